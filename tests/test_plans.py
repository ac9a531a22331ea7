"""Plans that are kept, plans that are remembered, explanations and tuning."""

from __future__ import annotations

import copy
import json
import pickle
import threading
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import ArraySpec, api, conv2d, explain, plan, registry, tuning
from convpar.backend import Refusal
from convpar.backends import gpu
from convpar.backends.gpu.executors import emulator
from convpar.backends.reference import Reference

rng = np.random.default_rng(5)
X = rng.integers(-9, 10, (6, 8)).astype(np.float32)
W = rng.integers(-9, 10, (3, 3)).astype(np.float32)
RIGHT = conv2d(X, W, backend="numpy")


class Counting:
    """A stand-in for a backend that counts the plans it is asked for."""

    def __init__(self, inner: Any, name: str = "counting", cost: float | None = None) -> None:
        self.inner, self.name, self.cost = inner, name, cost
        self.contract, self.summary, self.builds_on = inner.contract, "counts", None
        self.capabilities, self.options = inner.capabilities, inner.options
        self.plans = 0
        self.missing: str | None = None

    def unavailable(self) -> str | None:
        return self.missing

    def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
        self.plans += 1
        made = self.inner.plan(problem, layouts, device, config)
        if self.cost is not None and not isinstance(made, Refusal):
            made.cost = self.cost
        return made


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Any:
    backend = Counting(registry.find("cpu-private"))
    convpar.register(backend)
    monkeypatch.setattr(api, "_calls", {})
    yield backend
    convpar.unregister(backend.name)


# -- where arrays from the host go


def test_a_remembered_call_follows_the_choice_of_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if emulator.compiler() is None:
        pytest.skip("the emulator needs a C++ compiler")
    monkeypatch.setenv("CONVPAR_GPU", "emulate")
    monkeypatch.setattr(api, "_calls", {})
    backend = Counting(registry.find("gpu-naive"))
    convpar.register(backend)
    try:
        for _ in range(3):
            np.testing.assert_array_equal(conv2d(X, W, backend="counting"), RIGHT)
        assert backend.plans == 1
        monkeypatch.setenv("CONVPAR_GPU", "emulate:reverse")
        np.testing.assert_array_equal(conv2d(X, W, backend="counting"), RIGHT)
        assert backend.plans == 2
        # Another device becomes the current one.
        monkeypatch.setattr(emulator.Emulator, "current_device", lambda self: 1)
        np.testing.assert_array_equal(conv2d(X, W, backend="counting"), RIGHT)
        assert backend.plans == 3
        monkeypatch.undo()
        monkeypatch.setattr(api, "_calls", {})
        monkeypatch.setenv("CONVPAR_GPU", "emulate")
        for chooser in ("gpu", "gpu-naive"):
            np.testing.assert_array_equal(conv2d(X, W, backend=chooser), RIGHT)
        monkeypatch.setenv("CONVPAR_GPU", "nonsense")
        for chooser in ("gpu", "gpu-naive"):
            with pytest.raises(
                (convpar.Unavailable, convpar.Unsupported), match="must be 'cuda' or 'emulate'"
            ):
                conv2d(X, W, backend=chooser)
    finally:
        convpar.unregister("counting")


def test_arrays_on_the_cpu_ask_for_no_gpu(counting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "here", None)
    for backend in ("counting", "cpu", "auto", "numpy"):
        np.testing.assert_array_equal(conv2d(X, W, backend=backend), RIGHT)


def test_threads_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    p = plan(X, W, num_threads=1)
    looked: list[Any] = []
    whole = api.threads_argument
    monkeypatch.setattr(api, "threads_argument", lambda n: looked.append(n) or whole(n))
    p(X, W)
    assert looked == []
    p(X, W, num_threads=2)
    conv2d(X, W, num_threads=3)
    assert looked == [2, 3]


# -- plans to keep


def test_a_plan_runs_on_other_arrays() -> None:
    p = plan(X, W, padding="same", boundary="mirror", flip=True)
    for _ in range(3):
        x, w = rng.random((6, 8), np.float32), rng.random((3, 3), np.float32)
        right = conv2d(x, w, padding="same", boundary="mirror", flip=True)
        np.testing.assert_array_equal(p(x, w), right)
        out = np.empty_like(right)
        assert p(x, w, out=out) is out
        np.testing.assert_array_equal(out, right)


def test_specs_plan_as_arrays_do() -> None:
    from_arrays = plan(X, W, np.float32([1]), stride=2)
    from_specs = plan(ArraySpec((6, 8)), ArraySpec((3, 3)), ArraySpec((1,)), stride=2)
    assert from_specs.problem == from_arrays.problem
    assert from_specs.backend is from_arrays.backend
    bias = np.float32([3])
    np.testing.assert_array_equal(from_specs(X, W, bias), conv2d(X, W, bias, stride=2))
    assert plan(ArraySpec([6, 8], ">i2", "cpu"), ArraySpec((3, 3), "int8")).problem.out_dtype == np.int16


def test_a_plan_tells_what_it_is() -> None:
    p = plan(X, W, backend="cpu-private", num_threads=2)
    assert p.backend.name == "cpu-private"
    assert p.problem.out_shape == (1, 1, 4, 6)
    assert p.plan.problem is p.problem
    assert "cpu-private" in repr(p)
    assert "(1, 1, 6, 8) float32" in repr(p)
    assert p.workspace_bytes() == p.plan.workspace_bytes(2)
    assert p.workspace_bytes(5) > p.workspace_bytes(1) > 0


def test_a_plan_is_what_runs(counting: Any) -> None:
    p = plan(X, W, backend=counting.name)
    assert not p.plan.paths_run()
    p(X, W)
    assert p.plan.paths_run()
    for _ in range(5):
        p(X, W)
        p(X, W, out=np.empty((4, 6), np.float32))
    # One plan for the layout given, one for an out of the caller's.
    assert counting.plans == 2


def test_other_layouts_are_planned_once(counting: Any) -> None:
    p = plan(X, W, backend=counting.name)
    wide = np.repeat(X, 2, axis=1)
    for _ in range(3):
        np.testing.assert_array_equal(p(wide[:, ::2], W), RIGHT)
        np.testing.assert_array_equal(p(X.astype(">f4"), W), RIGHT)
        np.testing.assert_array_equal(p(X.T.copy().T, W[::-1].copy()[::-1]), RIGHT)
    assert counting.plans == 4


def test_rules_without_a_key_are_planned_once_too(counting: Any) -> None:
    right = conv2d(X, W, padding=1, fillvalue=2.0, backend="numpy")
    p = plan(X, W, padding=1, fillvalue=np.array(2.0), backend=counting.name)
    for _ in range(3):
        np.testing.assert_array_equal(p(X, W), right)
    assert counting.plans == 1


def test_a_plan_keeps_the_rules_it_was_made_with() -> None:
    padding, fill, config = [1, 1], np.array(2.0), {"tile": [2, 2]}
    p = plan(X, W, padding=padding, fillvalue=fill, config=config, backend="cpu-private")
    right = p(X, W)
    padding[0], fill[...], config["tile"] = 7, 3, "all"
    np.testing.assert_array_equal(p(X.astype(">f4"), W), right)


def test_a_plan_outlives_the_name_of_its_backend() -> None:
    backend = Counting(registry.find("cpu-private"), "passing")
    convpar.register(backend)
    p = plan(X, W, backend="passing")
    convpar.unregister("passing")
    np.testing.assert_array_equal(p(X, W), conv2d(X, W))
    np.testing.assert_array_equal(p(X[:, ::-1], W), conv2d(X[:, ::-1], W))
    with pytest.raises(ValueError, match="backend 'passing' is unknown"):
        conv2d(X, W, backend="passing")


def test_numbers_as_bias_of_a_plan_take_its_type() -> None:
    p = plan(X, W, 1.5)
    for bias in (2, 2.0, True, np.float64(2)):
        np.testing.assert_array_equal(p(X, W, bias), conv2d(X, W) + np.float32(bias))
    whole = plan(X.astype(np.int32), W.astype(np.int32), 100)
    np.testing.assert_array_equal(
        whole(X.astype(np.int32), W.astype(np.int32), 200), conv2d(X, W).astype(np.int32) + 200
    )


def test_lists_and_tensors_run_in_a_plan() -> None:
    p = plan(X, W)
    y = p(X, W.astype(np.float32))
    np.testing.assert_array_equal(y, conv2d(X, W))
    torch = pytest.importorskip("torch", reason="checks tensors of PyTorch")
    y = p(torch.tensor(X), torch.tensor(W))
    assert isinstance(y, torch.Tensor)
    out = torch.zeros((4, 6))
    assert p(X, W, out=out) is out
    np.testing.assert_array_equal(out.numpy(), y.numpy())
    listed = plan(X.tolist(), W.tolist())
    np.testing.assert_array_equal(listed(X.tolist(), W.tolist()), conv2d(X, W))


def test_a_plan_checks_out_in_every_run() -> None:
    p = plan(X, W)
    with pytest.raises(ValueError, match=r"out must have the shape \(4, 6\)"):
        p(X, W, out=np.empty((4, 5), np.float32))
    with pytest.raises(TypeError, match="out must have the dtype float32"):
        p(X, W, out=np.empty((4, 6)))
    with pytest.raises(ValueError, match="out shares memory with x"):
        p(X, W, out=X[:4, :6])
    frozen = np.empty((4, 6), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        p(X, W, out=frozen)


def test_the_layout_of_out_may_be_planned(counting: Any) -> None:
    out = np.empty((6, 4), np.float32).T
    p = plan(X, W, out=out, backend=counting.name)
    p(X, W, out=out)
    assert counting.plans == 1
    np.testing.assert_array_equal(out, conv2d(X, W))


# -- calls that are remembered


def test_a_call_is_planned_once(counting: Any) -> None:
    for _ in range(4):
        conv2d(X, W, backend=counting.name)
        conv2d(X + 1, W, backend=counting.name)
    assert counting.plans == 1
    conv2d(X, W, backend=counting.name, padding=1)
    conv2d(X, W, backend=counting.name, padding=[1, 1])
    conv2d(X, W, backend=counting.name, padding=[1, 1])
    conv2d(X, W, backend=counting.name, config={"tile": [2, 2]})
    conv2d(X, W, backend=counting.name, config={"tile": [2, 2]})
    assert counting.plans == 4


def test_keys_tell_equal_values_of_other_types_apart() -> None:
    assert conv2d(X, W, stride=1).shape == (4, 6)
    for wrong in (True, 1.0, np.float32(1)):
        with pytest.raises(TypeError, match="stride"):
            conv2d(X, W, stride=wrong)
    assert conv2d(X, W, stride=1).shape == (4, 6)
    with pytest.raises(TypeError, match="flip"):
        conv2d(X, W, flip=0)
    assert conv2d(X, W, accuracy=1).dtype == np.float32
    with pytest.raises(ValueError, match="accuracy"):
        conv2d(X, W, accuracy=True)


@pytest.mark.parametrize("values", [(0.0, -0.0), (np.nan, 0.0), (np.float32(1), np.float32(2)), (1, 1 + 0j)])
def test_keys_tell_fill_values_apart(values: Any) -> None:
    x = np.ones((1, 1), np.complex128 if isinstance(values[1], complex) else np.float64)
    for _ in range(2):
        for value in values:
            problem = plan(x, x, padding=1, fillvalue=value).problem
            assert repr(complex(problem.fillvalue)) == repr(complex(value))
            y = conv2d(x, x, padding=1, fillvalue=value)
            np.testing.assert_array_equal(y[0, 0], value * x[0, 0])


def test_values_that_can_be_no_key_work() -> None:
    right = conv2d(X, W, padding=1, fillvalue=2.0)
    for value in (np.array(2.0), np.array([2.0]), [2.0]):
        np.testing.assert_array_equal(conv2d(X, W, padding=1, fillvalue=value), right)
    changing = np.array(1.0)
    first = conv2d(X, W, padding=1, fillvalue=changing)
    changing[...] = 2
    np.testing.assert_array_equal(conv2d(X, W, padding=1, fillvalue=changing), right)
    assert not np.array_equal(first, right)


def test_config_is_read_when_the_call_is_made(counting: Any) -> None:
    config = {"tile": [2, 2]}
    conv2d(X, W, backend=counting.name, config=config)
    config["tile"][0] = 3
    config["block"] = 1
    conv2d(X, W, backend=counting.name, config=config)
    assert counting.plans == 2
    config["tile"] = "all"
    with pytest.raises(ValueError, match="tile"):
        conv2d(X, W, backend=counting.name, config=config)


def test_memory_is_bounded_over_many_kinds_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_calls", {})
    for n in range(2000):
        y = conv2d(np.ones((1, n + 1)), np.ones((1, 1)))
        assert y.shape == (1, n + 1)
    assert len(api._calls) == api.CACHED_CALLS
    assert conv2d(np.ones((1, 1)), np.ones((1, 1)))[0, 0] == 1


def test_wide_borders_are_not_hoarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_calls", {})
    side = api.WIDEST_REMEMBERED
    one = np.ones((1, 1), np.uint8)
    conv2d(one, one, padding=(0, 0, 0, side))
    assert len(api._calls) == 1
    assert conv2d(one, one, padding=(0, 0, 0, side + 1)).shape == (1, side + 2)
    assert len(api._calls) == 1


def test_nothing_is_remembered_about_an_address() -> None:
    for _ in range(50):
        x = rng.random((6, 8), np.float32)
        np.testing.assert_array_equal(
            conv2d(x, W, backend="cpu-private"), conv2d(x.copy(), W, backend="cpu-private")
        )
        del x


def test_a_registered_backend_is_chosen_from_then_on() -> None:
    fast = Counting(registry.find("cpu-private"), "cheapest", cost=0.0)
    before = explain(X, W).backend
    conv2d(X, W)
    convpar.register(fast)
    try:
        conv2d(X, W)
        assert fast.plans == 1
        assert explain(X, W).backend == "cheapest"
    finally:
        convpar.unregister("cheapest")
    conv2d(X, W)
    assert explain(X, W).backend == before


def test_a_replaced_backend_serves_from_then_on() -> None:
    conv2d(X, W, backend="cpu-private")
    other = Counting(registry.find("cpu-private"), "cpu-private")
    convpar.register(other, replace=True)
    try:
        conv2d(X, W, backend="cpu-private")
        assert other.plans == 1
    finally:
        convpar.unregister("cpu-private")
    conv2d(X, W, backend="cpu-private")
    assert other.plans == 1


def test_many_threads_make_and_forget_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_calls", {})
    monkeypatch.setattr(api, "CACHED_CALLS", 5)
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        order = np.random.default_rng(seed).permutation(60)
        try:
            for n in [*order, *order]:
                assert conv2d(np.ones((2, n + 1)), np.ones((1, 1))).sum() == 2 * (n + 1)
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not errors
    assert len(api._calls) <= 5


# -- explanations


def test_an_explanation_says_what_runs_and_why() -> None:
    e = explain(X, W, np.float32(1), padding="same", boundary="mirror", stride=2)
    text = str(e)
    assert repr(e) == text
    assert e.backend == plan(X, W, np.float32(1), padding="same", boundary="mirror", stride=2).backend.name
    for words in (
        "x(1, 1, 6, 8) float32",
        "stride 2x2",
        "boundary mirror",
        f"Runs: {e.backend}",
        "workspace",
    ):
        assert words in text
    names = [name for name, _ in e.considered]
    assert [name for name, why in e.considered if why is None] == [e.backend]
    assert "cpu-naive" in names
    for name, why in e.considered:
        if why is not None:
            assert f"{name}: {why}" in text


def test_an_explanation_runs_nothing(counting: Any) -> None:
    e = explain(ArraySpec((2**12, 2**12)), ArraySpec((31, 31)), backend=counting.name)
    assert e.plan is not None
    assert not e.plan.paths_run()


def test_a_refusal_is_told(counting: Any) -> None:
    e = explain(X, W[:2, :2], backend="cpu-unrolled")
    assert (e.backend, e.plan) == (None, None)
    assert "Nothing would run" in str(e)
    assert "the filter is 2x2" in str(e)


def test_an_absent_machine_is_told(counting: Any) -> None:
    counting.missing = "this needs a second moon"
    e = explain(X, W, backend=counting.name)
    assert e.backend is None
    assert e.considered == [(counting.name, "this needs a second moon")]
    assert "this needs a second moon" in str(e)
    for call in (conv2d, plan):
        with pytest.raises(convpar.Unavailable, match="'counting' can't run here: this needs a second moon"):
            call(X, W, backend=counting.name)
    # A chooser passes over it.
    assert ("counting", "this needs a second moon") in explain(X, W).considered


def test_arrays_elsewhere_can_be_explained() -> None:
    e = explain(ArraySpec((6, 8), device="gpu:1"), ArraySpec((3, 3), device="gpu:1"), backend="cpu")
    assert e.backend is None
    assert "the arrays live on gpu:1" in str(e)


# -- tuning


@pytest.fixture
def races(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Any:
    """Names that were told to win, one for each race; memory lies in an empty folder."""
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(api, "_calls", {})
    tuning._remembered.cache_clear()
    run: list[str] = []

    def race(choice: Any, x: Any, w: Any, bias: Any) -> str:
        run.append(choice.candidates[-1][0].name)
        return run[-1]

    monkeypatch.setattr(tuning, "_race", race)
    yield run
    tuning._remembered.cache_clear()


def test_tuning_remembers_and_serves_only_who_asks(races: Any, tmp_path: Any) -> None:
    chosen = explain(X, W).backend
    right = conv2d(X, W)
    for _ in range(3):
        np.testing.assert_array_equal(conv2d(X, W, tune=True), right)
    assert len(races) == 1
    assert races[0] != chosen
    assert plan(X, W, tune=True).backend.name == races[0]
    assert plan(X, W).backend.name == chosen == explain(X, W).backend
    assert len(races) == 1
    # Another process reads it from the file.
    assert races[0] in json.loads((tmp_path / "cache" / "tuned.json").read_text()).values()
    tuning._remembered.cache_clear()
    api._calls.clear()
    conv2d(X, W, tune=True)
    assert len(races) == 1
    conv2d(X, W, tune=True, padding=1)
    assert len(races) == 2


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', "\x00\xff"])
def test_a_damaged_memory_is_made_anew(races: Any, tmp_path: Any, text: str) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "tuned.json").write_text(text, encoding="latin-1")
    np.testing.assert_array_equal(conv2d(X, W, tune=True), conv2d(X, W))
    assert len(races) == 1
    assert races[0] in json.loads((tmp_path / "cache" / "tuned.json").read_text()).values()


def test_memory_that_cannot_be_written_costs_only_itself(
    races: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path / "file" / "folder"))
    for _ in range(2):
        np.testing.assert_array_equal(conv2d(X, W, tune=True), conv2d(X, W))
        api._calls.clear()
    assert len(races) == 1


def test_memory_of_a_folder_that_cannot_be_written_grows(
    races: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PermissionError("planted")

    monkeypatch.setattr(tuning.os, "replace", refuse)
    for _ in range(2):
        for padding in (0, 1):
            conv2d(X, W, tune=True, padding=padding)
            api._calls.clear()
    assert len(races) == 2
    assert not list((tmp_path / "cache").iterdir())


def test_a_candidate_of_somebody_else_may_fail(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    class Failing(Reference):
        name = "failing"

        def plan(self, *arguments: Any) -> Any:
            made = super().plan(*arguments)
            made.cost = 1.0

            def run(*arguments: Any, **named: Any) -> None:
                raise ZeroDivisionError("planted")

            made.run = run
            return made

    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path))
    tuning._remembered.cache_clear()
    convpar.register(Failing())
    try:
        with pytest.warns(
            RuntimeWarning, match="leaves out the backend 'failing': it fails, ZeroDivisionError"
        ):
            y = conv2d(X, W, tune=True)
        np.testing.assert_array_equal(y, conv2d(X, W, backend="numpy"))
    finally:
        convpar.unregister("failing")
        tuning._remembered.cache_clear()


def test_a_planned_bias_has_the_planned_type_in_the_race(races: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def race(choice: Any, x: Any, w: Any, bias: Any) -> str:
        seen.append(bias.dtype)
        return str(choice.candidates[0][0].name)

    monkeypatch.setattr(tuning, "_race", race)
    p = plan(X, W, 3, tune=True)
    assert seen == [p.problem.bias_dtype]


def test_a_plan_says_why_it_cannot_be_pickled() -> None:
    for make in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match="holds kernels of this process"):
            make(plan(X, W))
        with pytest.raises(TypeError, match=r"keep its text, str\(explanation\)"):
            make(explain(X, W))


def test_a_chooser_without_its_device_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = "this needs a second moon"
    for backend in registry.backends():
        if backend.capabilities.device == "gpu":
            monkeypatch.setattr(type(backend), "unavailable", lambda self: lacking)
    with pytest.raises(convpar.Unavailable) as caught:
        conv2d(X, W, backend="gpu")
    assert str(caught.value) == f"backend 'gpu' can't run here: {lacking}"


def test_a_named_rung_has_nothing_to_tune(races: Any) -> None:
    conv2d(X, W, tune=True, backend="cpu-private")
    assert not races


def test_candidates_are_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv(tuning.CACHE_VARIABLE, str(tmp_path))
    tuning._remembered.cache_clear()
    x = X.copy()
    y = conv2d(x, W, np.float32(1), tune=True, overflow="raise", dtype="int32")
    np.testing.assert_array_equal(y, conv2d(x, W, 1.0, dtype="int32"))
    np.testing.assert_array_equal(x, X)
    with pytest.raises(OverflowError):
        conv2d(x, W, tune=True, overflow="raise", dtype="uint8")
    tuning._remembered.cache_clear()


@pytest.mark.parametrize("backend", [b.name for b in registry.backends() if b.name.startswith("cpu-")])
def test_a_workspace_that_wont_do_is_refused(backend: str) -> None:
    if registry.find(backend).unavailable():
        pytest.skip(f"{backend}: {registry.find(backend).unavailable()}")
    takes = registry.find(backend).capabilities
    kh, kw = (max(3, least) for least in takes.least_filter)
    dtype, result = takes.plain_types
    channels, outputs, groups = takes.least_layer
    x = np.ones((1, channels, kh + 6, kw + 6), dtype)
    w = np.ones((outputs, channels // groups, kh, kw), dtype)
    out = np.full((1, outputs, 7, 7), 5, result)
    rules = {"groups": groups, "dtype": result}
    plan = convpar.plan(x, w, backend=backend, **rules).plan
    enough = plan.workspace_bytes(1)
    for bad, message in (
        (np.empty(enough - 1, np.uint8), f"at least {enough} bytes"),
        (np.empty(2 * enough, np.uint8)[::2], "one after the other"),
        (np.empty(enough, np.float32), "not an array of float32"),
        (bytearray(enough), "must be a NumPy array of uint8"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            plan.run(x, w, None, out, workspace=bad, num_threads=1)
    assert (out == 5).all()
    plan.run(x, w, None, out, workspace=np.empty(enough, np.uint8), num_threads=1)
    np.testing.assert_array_equal(out, convpar.conv2d(x, w, backend=backend, **rules))
