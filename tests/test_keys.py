"""What plans are looked up by, and the arrays that need no test for overlap."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import api, conv2d, keys
from convpar.threads import STATE

X = np.arange(48, dtype=np.float32).reshape(6, 8)
W = np.ones((3, 3), np.float32)


def _misaligned(a: Any) -> Any:
    memory = np.zeros(a.nbytes + 1, np.uint8)
    moved = memory[1:].view(a.dtype).reshape(a.shape)
    moved[...] = a
    return moved


ALIKE = {
    "itself": X,
    "another": X + 1,
    "read-only": np.frombuffer(X.tobytes(), X.dtype).reshape(X.shape),
}
OTHERS = {
    "type": X.astype(np.int32),
    "width": X.astype(np.float64),
    "half": X.astype(np.float16),
    "swapped": X.astype(">f4"),
    "misaligned": _misaligned(X),
    "shape": X[:5],
    "transposed": np.asfortranarray(X),
    "reversed": X[::-1],
    "rank": X[None],
    "axes turned": X.reshape(8, 6),
}


@pytest.mark.parametrize("kind", ALIKE)
def test_arrays_alike_have_one_signature(kind: str) -> None:
    assert keys.signature(ALIKE[kind], W, None, None) == keys.signature(X, W, None, None)


def test_arrays_that_differ_have_signatures_of_their_own() -> None:
    every = {"none": X, **OTHERS}
    for (one, a), (other, b) in itertools.combinations(every.items(), 2):
        assert keys.signature(a, W, None, None) != keys.signature(b, W, None, None), (one, other)
        assert keys.signature(X, a, None, None) != keys.signature(X, b, None, None), (one, other)


def test_places_count() -> None:
    bias, out = np.ones(1, np.float32), np.ones(1, np.float32)
    found = {
        keys.signature(*arrays)
        for arrays in (
            (X, W, None, None),
            (X, W, bias, None),
            (X, W, None, out),
            (X, W, bias, out),
            (W, X, None, None),
        )
    }
    assert len(found) == 5


@pytest.mark.parametrize(
    "odd",
    [
        X.tolist(),
        np.ma.array(X),
        X.view(np.recarray),
        np.array(["a"]),
        np.array([None]),
        np.zeros(3, "m8[s]"),
        np.zeros(3, [("a", "f4")]),
    ],
    ids=lambda a: getattr(a, "dtype", type(a).__name__),
)
def test_what_is_no_plain_array_of_numbers_has_none(odd: Any) -> None:
    assert keys.signature(odd, W, None, None) is None
    assert keys.signature(X, W, odd, None) is None
    if type(odd) is not np.ndarray:
        assert not keys.apart(X, W, odd)


def test_arrays_apart() -> None:
    memory = np.zeros(100, np.float32)
    x, w, out = memory[:40].reshape(5, 8), W.copy(), memory[40:60].reshape(4, 5)
    locked = out[:]
    locked.flags.writeable = False
    for one in ((x, w, out), (x[::-1, ::-1], w, out), (x, w, out[::-1]), (x[:0], w, out), (out, w, x)):
        assert keys.apart(*one), one
    for one in (
        (x, w, x),
        (x, w, w),
        (x, memory[59:].reshape(-1, 1), out),
        (x, w, memory[39:59]),
        (x, w, memory[58:38:-1]),
        (x[::-1], w, memory[:1]),
        (memory[::2], w, memory[1::2]),
        (x, w, locked),
    ):
        assert not keys.apart(*one), one


@pytest.mark.parametrize("built", [True, False])
def test_calls_without_the_compiled_keys(monkeypatch: pytest.MonkeyPatch, built: bool) -> None:
    monkeypatch.setattr(api, "_keys", keys if built else api._NoKeys)
    monkeypatch.setattr(api, "_calls", {})
    right = conv2d(X, W, backend="numpy")
    for _ in range(2):
        np.testing.assert_array_equal(conv2d(X, W), right)
        np.testing.assert_array_equal(conv2d(X, W, out=np.empty((4, 6), np.float32)), right)
    assert len(api._calls) == 3
    with pytest.raises(ValueError, match="shares memory with x"):
        conv2d(X, W, out=X[:4, :6])
    p = convpar.plan(X, W)
    for x in (X, X[::-1], np.asfortranarray(X)):
        for _ in range(2):
            np.testing.assert_array_equal(p(x, W), conv2d(x, W, backend="numpy"))
    assert len(p._calls) == 3


def _unlike(text: str) -> str:
    """An equal string, at another place."""
    return "".join(list(text))


def test_identities_tell_objects_apart() -> None:
    same, far = _unlike("same"), int("1000")
    every: list[tuple[Any, ...]] = [
        ("same", 1), (same, 1), ("same", True), ("same", 1.0), ("same",), (1, "same"), (), ((1, "same"),), ((1,), "same"),
        (1, ("same",)), ((),), (0.0,), (-0.0,), (far,), ((far,),), (int("1000"),),
    ]  # fmt: skip
    assert len({keys.identities(objects) for objects in every}) == len(every)
    assert keys.identities(("same", 1)) == keys.identities(("same", 1))


def test_numbers_and_pairs_made_anew_are_the_same() -> None:
    for _ in range(2):
        side = int("2")
        assert keys.identities(((side, side), float("0.5"))) == keys.identities(((2, 2), 0.5))
        assert keys.identities((float("nan"),)) == keys.identities((float("nan"),))


def test_too_many_objects_have_no_identities() -> None:
    assert keys.identities((None,) * 60) is not None
    for objects in ((None,) * 65, ((None,) * 63,), ((),) * 33, (0.5,) * 33, (None, (None,) * 62)):
        assert keys.identities(objects) is None


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_calls", "_known_rules", "_numbers"):
        monkeypatch.setattr(api, name, {})


@pytest.mark.usefixtures("fresh")
def test_equal_keywords_share_a_call_wherever_they_lie() -> None:
    for _ in range(3):
        conv2d(X, W, padding=_unlike("same"), stride=(1, int("1")))
    assert len(api._calls) == 1
    conv2d(X, W, padding="same", stride=(1, 1), flip=False)
    assert len(api._calls) == 1
    for _ in range(3):
        with pytest.raises(TypeError, match="groups must be an integer"):
            conv2d(X, W, padding="same", stride=(1, 1), groups=True)
        for zero in (-0.0, 0.0):
            assert conv2d(X, W, padding="same", stride=(1, 1), fillvalue=zero).shape == (6, 8)
    assert len(api._calls) == 3


@pytest.mark.usefixtures("fresh")
def test_keywords_that_can_change_are_looked_at_in_every_call() -> None:
    padding, config = [0, 0], {"tile": (2, 2)}
    for _ in range(4):
        assert conv2d(X, W, padding=padding).shape == (4, 6)
        assert conv2d(X, W, stride=(1, 1), padding=(0, 0), backend="cpu-naive", config=config).shape == (4, 6)
    padding[0] = 1
    config["tile"] = (0, 2)
    assert conv2d(X, W, padding=padding).shape == (6, 6)
    with pytest.raises(ValueError, match="tile"):
        conv2d(X, W, stride=(1, 1), padding=(0, 0), backend="cpu-naive", config=config)
    assert not api._known_rules


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("room", [2, 1024])
def test_places_used_again_mean_what_lies_there_now(monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    monkeypatch.setattr(api, "CACHED_CALLS", room)
    shapes = {"same": (6, 8), "valid": (4, 6), "full": (8, 10)}
    for n in range(12):
        # What one call leaves free, the next one takes.
        for padding, shape in shapes.items():
            assert conv2d(X, W, padding=_unlike(padding)).shape == shape
        for fill in range(3):
            found = conv2d(X, W, padding="full", fillvalue=int(f"100{fill}"))
            assert found[0, 0] == 8 * (1000 + fill) + X[0, 0]
        for dtype in ("f4", "f8"):
            assert conv2d(X, W, dtype=np.dtype(dtype)).dtype == dtype
        assert len(api._known_rules) <= room
        assert len(api._numbers) <= room
        assert n == 0 or room < 8 or api._known_rules


@pytest.mark.usefixtures("fresh")
def test_of_equal_keywords_few_are_kept() -> None:
    # All at once, or the next would lie where the last one did.
    every = [_unlike("same") for _ in range(20)]
    for padding in every:
        conv2d(X, W, padding=padding)
    assert 1 < len(api._known_rules) <= api.MOST_SPELLINGS
    assert len(api._calls) == 1


@pytest.mark.usefixtures("fresh")
def test_of_calls_that_failed_nothing_is_kept() -> None:
    class Wrong:
        pass

    alive = weakref.ref(Wrong)
    for _ in range(3):
        with pytest.raises(TypeError, match="dtype"):
            conv2d(X, W, dtype=Wrong)
        with pytest.raises(ValueError, match="padding"):
            conv2d(X, W, padding=_unlike("sane"))
    assert not api._known_rules
    assert not api._numbers
    del Wrong
    gc.collect()
    assert alive() is None


@pytest.mark.usefixtures("fresh")
def test_what_was_called_before_waits_for_no_lock() -> None:
    calls: list[dict[str, Any]] = [
        {"stride": [1, 1]},
        {"padding": _unlike("same")},
        {"backend": "cpu-naive", "config": {}},
        {"fillvalue": np.float32(2)},
    ]
    for _ in range(2 + api.MOST_SPELLINGS):
        for rules in calls:
            conv2d(X, W, **{**rules, **({"padding": _unlike("same")} if "padding" in rules else {})})
    done = threading.Event()

    def again() -> None:
        for rules in calls:
            conv2d(X, W, **rules)
        done.set()

    with STATE:
        thread = threading.Thread(target=again, daemon=True)
        thread.start()
        assert done.wait(30)
    thread.join()
