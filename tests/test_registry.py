"""Names to backends: the built-in families, `register`, and entry points of other packages."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

import convpar
from convpar import choose, conv2d, registry
from convpar.backend import CONTRACT_VERSION, Capabilities, Option, Unavailable
from convpar.backends.cpu import compiled
from convpar.backends.reference import Reference

X = np.arange(30.0).reshape(5, 6)
W = np.ones((2, 2))


class Sevens(Reference):
    """The reference under another name, whose every result is 7."""

    name = "sevens"

    def plan(self, *arguments: Any) -> Any:
        made: Any = super().plan(*arguments)
        made.run = lambda x, w, bias, out, **settings: out.fill(7)
        return made


@pytest.fixture(autouse=True)
def unchanged(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with the built-in families and leaves nothing behind."""
    for name in ("_found", "_given"):
        monkeypatch.setattr(registry, name, {})
    monkeypatch.setattr(registry, "_loaded", set())
    monkeypatch.setattr(registry, "_plugins_loaded", True)
    yield
    registry._version += 1


# -- what is there


def test_every_built_in_backend_is_found_by_its_name() -> None:
    names = [b.name for b in convpar.list_backends()]
    assert names[0] == "numpy"
    assert {"cpu-naive", "cpu-private", "cpu-unrolled"} <= set(names)
    assert len(set(names)) == len(names)
    for name in names:
        assert registry.find(name) is not None
        assert registry.find(name).name == name


def test_only_the_family_asked_for_is_loaded() -> None:
    assert registry.find("cpu-naive") is not None
    assert registry._loaded == {"convpar.backends.cpu"}
    assert registry.find("numpy") is not None
    assert registry._loaded == {"convpar.backends.cpu", "convpar.backends.reference"}


def test_unknown_names_and_choosers_are_no_backends() -> None:
    assert registry.find("cpu-none") is None
    assert registry.find("") is None
    for name in registry.CHOOSERS:
        assert registry.find(name) is None


# -- register


def test_a_registered_backend_serves_by_name() -> None:
    convpar.register(Sevens())
    assert [b.name for b in convpar.list_backends()][-1] == "sevens"
    assert (conv2d(X, W, backend="sevens") == 7).all()
    # It estimates no time, so nothing else changes.
    assert (conv2d(X, W) != 7).all()
    convpar.unregister("sevens")
    assert "sevens" not in [b.name for b in convpar.list_backends()]
    with pytest.raises(ValueError, match="backend 'sevens' is unknown"):
        conv2d(X, W, backend="sevens")


def test_a_taken_name_needs_replace() -> None:
    class Numpy(Sevens):
        name = "numpy"

    order = [b.name for b in convpar.list_backends()]
    with pytest.raises(ValueError, match="'numpy' exists; say replace=True"):
        convpar.register(Numpy())
    convpar.register(Numpy(), replace=True)
    assert [b.name for b in convpar.list_backends()] == order
    assert (conv2d(X, W, backend="numpy") == 7).all()
    convpar.unregister("numpy")
    assert (conv2d(X, W, backend="numpy") != 7).all()
    convpar.register(Sevens())
    with pytest.raises(ValueError, match="'sevens' exists"):
        convpar.register(Sevens())
    convpar.register(Sevens(), replace=True)


def test_only_what_was_registered_can_be_unregistered() -> None:
    convpar.register(Sevens())
    for name in ("numpy", "cpu-naive", "none", "", None, []):
        message = f"no backend named {name!r} was registered in this process; there are: sevens"
        with pytest.raises(ValueError, match=re.escape(message)):
            convpar.unregister(name)


@pytest.mark.parametrize("name", sorted(registry.CHOOSERS))
def test_a_choosers_name_cannot_be_taken(name: str) -> None:
    backend = Sevens()
    backend.name = name
    with pytest.raises(ValueError, match=f"can't be called '{name}': that is a chooser"):
        convpar.register(backend, replace=True)


def _changed(**attributes: Any) -> Any:
    backend = Sevens()
    for name, value in attributes.items():
        setattr(backend, name, value)
    return backend


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (None, "backend None lacks contract, name, summary"),
        ("cpu-fast", "backend 'cpu-fast' lacks contract"),
        (Sevens, "must be an object, not the class Sevens"),
        (SimpleNamespace(contract=CONTRACT_VERSION, name="half"), "lacks summary, builds_on, capabilities"),
        (
            _changed(contract=CONTRACT_VERSION + 1),
            f"'sevens' was written for contract {CONTRACT_VERSION + 1}, this",
        ),
        (SimpleNamespace(contract=0, name="old"), "'old' was written for contract 0, this convpar has"),
        (_changed(name=""), "a backend's name must be a non-empty string, not ''"),
        (_changed(name=7), "a backend's name must be a non-empty string, not 7"),
        (
            _changed(capabilities={"device": "cpu"}),
            "the capabilities of backend 'sevens' must be a Capabilities",
        ),
        (_changed(name="two words"), "a backend's name must be one word, not 'two words'"),
        (_changed(name="line\n"), "a backend's name must be one word, not 'line\\n'"),
        (
            _changed(capabilities=Capabilities(device="tpu")),  # type: ignore[arg-type]
            "the device of backend 'sevens' must be 'cpu' or 'gpu', not 'tpu'",
        ),
        (_changed(options=None), "the options of backend 'sevens' must be a mapping, not None"),
    ],
)
def test_what_does_not_follow_the_contract_is_refused(backend: Any, message: str) -> None:
    for replace in (False, True):
        with pytest.raises((TypeError, ValueError), match=re.escape(message)):
            convpar.register(backend, replace=replace)
    assert not registry._given


def test_the_version_counts_every_change() -> None:
    before = registry.version()
    convpar.register(Sevens())
    after = registry.version()
    convpar.unregister("sevens")
    assert before < after < registry.version()


def test_many_threads_register_and_look_up() -> None:
    errors: list[BaseException] = []

    def work(k: int) -> None:
        try:
            for _ in range(30):
                convpar.register(_changed(name=f"sevens-{k}"))
                assert (conv2d(X, W, backend=f"sevens-{k}") == 7).all()
                assert any(b.name == f"sevens-{k}" for b in convpar.list_backends())
                convpar.unregister(f"sevens-{k}")
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors


# -- entry points


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put objects in the place of other packages' entry points."""
    import importlib.metadata

    module = types.ModuleType("convpar_plugins_of_a_test")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def install(**objects: Any) -> None:
        points = []
        for name, made in objects.items():
            setattr(module, name, made)
            value = f"{module.__name__}:{name}" if made is not None else "convpar_no_such_module:backend"
            points.append(importlib.metadata.EntryPoint(name, value, registry.ENTRY_POINT_GROUP))
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: points)
        monkeypatch.setattr(registry, "_plugins_loaded", False)

    return install


@pytest.mark.parametrize(
    "made",
    [Sevens(), Sevens, lambda: Sevens(), lambda: [Sevens()], (Sevens(),), lambda: (Sevens(),)],
    ids=["an object", "a class", "a function", "a function of a list", "a tuple", "a function of a tuple"],
)
def test_forms_of_entry_points(made: Any, plugins: Any, recwarn: pytest.WarningsRecorder) -> None:
    plugins(sevens=made)
    assert (conv2d(X, W, backend="sevens") == 7).all()
    assert [b.name for b in convpar.list_backends()][-1] == "sevens"
    assert not recwarn.list


def test_entry_points_wait_until_a_name_needs_them(plugins: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plugins(sevens=Sevens())
    conv2d(X, W, backend="cpu-private")
    assert not registry._plugins_loaded
    assert registry.find("sevens") is not None
    assert registry._plugins_loaded


def raising(*_: Any) -> Any:
    raise RuntimeError("half installed")


class Future:
    """Of a contract that isn't written yet."""

    contract = CONTRACT_VERSION + 1
    name = "future"


class Incomplete:
    """Has no plan."""

    contract = CONTRACT_VERSION
    name = "incomplete"
    summary = "nothing"
    builds_on = None
    capabilities = Capabilities()
    options: ClassVar[dict[str, Option]] = {}

    def unavailable(self) -> str | None:
        return None


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (None, "ModuleNotFoundError: No module named 'convpar_no_such_module'"),
        (raising, "RuntimeError: half installed"),
        (7, "TypeError: backend 7 lacks contract"),
        (
            Future(),
            f"'future' was written for contract {CONTRACT_VERSION + 1}, this convpar has {CONTRACT_VERSION}",
        ),
        (Incomplete, "lacks plan"),
        (lambda: _changed(name="cpu-naive"), "ValueError: the name 'cpu-naive' is taken"),
        (lambda: _changed(name="auto"), "ValueError: a backend can't be called 'auto'"),
    ],
)
def test_a_broken_plugin_warns_and_is_left_out(made: Any, reason: str, plugins: Any) -> None:
    plugins(bad=made, sevens=Sevens())
    built_in = type(registry.find("cpu-naive"))
    with pytest.warns(RuntimeWarning, match=re.escape(reason)) as seen:
        names = [b.name for b in convpar.list_backends()]
    assert len(seen) == 1
    assert "convpar leaves out the backend plugin 'bad'" in str(seen[0].message)
    # Its neighbours and everything else are as they were, and there is no second warning.
    assert names[-1] == "sevens"
    assert type(registry.find("cpu-naive")) is built_in
    assert [b.name for b in convpar.list_backends()] == names
    assert (conv2d(X, W, backend="sevens") == 7).all()


def test_of_two_plugins_with_one_name_the_first_stays(plugins: Any) -> None:
    plugins(a=Sevens(), b=Sevens())
    with pytest.warns(RuntimeWarning, match=r"plugin 'b'.*'sevens' is taken"):
        backend = registry.find("sevens")
    assert backend is sys.modules["convpar_plugins_of_a_test"].a


def test_a_plugins_good_rows_stay_beside_its_bad_one(plugins: Any) -> None:
    plugins(several=lambda: [Sevens(), Future(), _changed(name="never")])
    with pytest.warns(RuntimeWarning, match="written for contract"):
        names = {b.name for b in convpar.list_backends()}
    assert "sevens" in names
    assert "never" not in names


def test_a_registered_backend_may_take_a_plugins_place_and_give_it_back(plugins: Any) -> None:
    plugins(sevens=Sevens())
    first = registry.find("sevens")
    other = Sevens()
    with pytest.raises(ValueError, match="exists"):
        convpar.register(other)
    convpar.register(other, replace=True)
    assert registry.find("sevens") is other
    convpar.unregister("sevens")
    assert registry.find("sevens") is first


def test_a_plugin_may_register_more_while_it_loads(plugins: Any) -> None:
    def make() -> Any:
        convpar.register(_changed(name="second"))
        return _changed(name="first")

    plugins(both=make)
    assert {"first", "second"} <= {b.name for b in convpar.list_backends()}


@pytest.mark.parametrize("method", ["plan", "unavailable"])
def test_a_chooser_leaves_out_a_backend_that_raises(method: str) -> None:
    class Failing(Sevens):
        name = "failing"

    def fails(self: Any, *arguments: Any) -> Any:
        raise ZeroDivisionError("planted")

    setattr(Failing, method, fails)
    before = convpar.explain(X, W).backend
    convpar.register(Failing())
    expected = conv2d(X, W, backend="numpy")
    with pytest.warns(RuntimeWarning) as seen:
        np.testing.assert_allclose(conv2d(X, W), expected)
    assert [str(w.message) for w in seen] == [
        "convpar leaves out the backend 'failing': it fails, ZeroDivisionError: planted"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_allclose(conv2d(X[1:], W), expected[1:])
        found = convpar.explain(X, W)
    assert found.backend == before
    assert ("failing", "it fails, ZeroDivisionError: planted") in found.considered
    # Who asks for it by name gets the error itself.
    with pytest.raises(ZeroDivisionError, match="planted"):
        conv2d(X, W, backend="failing")
    # Under its name comes another one that fails: that is told again.
    convpar.register(Failing(), replace=True)
    with pytest.warns(RuntimeWarning, match="planted"):
        conv2d(X, W)


@pytest.mark.parametrize("made", [None, 7, SimpleNamespace(cost=1e-9)])
def test_a_chooser_leaves_out_a_backend_whose_plan_is_none(made: Any) -> None:
    class Empty(Sevens):
        name = "empty"

        def plan(self, *arguments: Any) -> Any:
            return made

    expected = conv2d(X, W, backend="numpy")
    convpar.register(Empty())
    with pytest.warns(RuntimeWarning, match="leaves out the backend 'empty': it fails, TypeError"):
        np.testing.assert_allclose(conv2d(X, W), expected)
    message = (
        r"plan\(\) of the backend 'empty' must give a convpar.backend.Plan or Refusal, not .*lacks problem"
    )
    for ask in (conv2d, convpar.plan, convpar.explain):
        with pytest.raises(TypeError, match=message):
            ask(X, W, backend="empty")


@pytest.mark.parametrize("cost", ["abc", [1], 1j, float("nan"), float("-inf")])
def test_a_chooser_leaves_out_a_backend_whose_cost_is_no_time(cost: Any) -> None:
    class Costly(Sevens):
        name = "costly"

        def plan(self, *arguments: Any) -> Any:
            made = super().plan(*arguments)
            made.cost = cost
            return made

    expected = conv2d(X, W, backend="numpy")
    convpar.register(Costly())
    with pytest.warns(RuntimeWarning, match=r"leaves out the backend 'costly': it fails, (Type|Value)Error"):
        np.testing.assert_allclose(conv2d(X, W), expected)


def test_backends_are_listed_alike_whichever_was_asked_for_first() -> None:
    code = "import convpar; {}; print([b.name for b in convpar.list_backends()])"
    orders = {
        subprocess.run(
            [sys.executable, "-c", code.format(first)], capture_output=True, text=True, check=True
        ).stdout
        for first in ("pass", "convpar.registry.find('cpu-naive')", "convpar.registry.find('gpu-naive')")
    }
    assert len(orders) == 1


def test_a_plan_whose_backend_gives_none_for_another_layout() -> None:
    class Once(Sevens):
        name = "once"
        given = False

        def plan(self, *arguments: Any) -> Any:
            if self.given:
                return None
            self.given = True
            return super().plan(*arguments)

    convpar.register(Once())
    p = convpar.plan(X, W, backend="once")
    assert (p(X, W) == 7).all()
    with pytest.raises(TypeError, match=r"plan\(\) of the backend 'once' must give"):
        p(X[::-1], W)


def test_warnings_point_at_the_caller(plugins: Any) -> None:
    class Failing(Sevens):
        name = "failing"

        def unavailable(self) -> str | None:
            raise ZeroDivisionError("planted")

    convpar.register(Failing())
    plugins(bad=3)
    calls = [lambda: conv2d(X, W), lambda: convpar.plan(X, W), lambda: convpar.signal.convolve2d(X, W)]
    for call in calls:
        registry._version += 1
        with pytest.warns(RuntimeWarning, match="leaves out") as seen:
            call()
        assert {w.filename for w in seen} == {__file__}


@pytest.mark.parametrize("sources", [True, False])
def test_an_engine_that_is_missing_says_what_to_do(
    sources: bool, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among convpar's sources nothing is compiled, however often it is installed."""

    def fails() -> None:
        raise ImportError("No module named 'convpar.backends.cpu.engine'")

    if sources:
        (tmp_path / "pyproject.toml").touch()
    monkeypatch.setattr(compiled, "engine", fails)
    monkeypatch.setattr(compiled, "FOLDER", tmp_path / "convpar" / "backends" / "cpu")
    with pytest.raises(Unavailable) as told:
        conv2d(X, W, backend="cpu-simd")
    assert "can't be loaded" in str(told.value)
    assert ("start it in another folder" in str(told.value)) == sources
    assert ("install convpar again" in str(told.value)) != sources
    assert (str(tmp_path) in str(told.value)) == sources
    right = conv2d(X, W, backend="numpy")
    choose._warn_once.cache_clear()
    registry._version += 1
    slow = "backend 'auto' runs 'numpy', which is slow: .* can't be loaded"
    with pytest.warns(RuntimeWarning, match=slow) as seen:
        results = [conv2d(X, W, dtype=dtype) for dtype in ("float64", "complex128")]
    assert all(np.array_equal(y, right) for y in results)
    assert [w.filename for w in seen] == [__file__]
