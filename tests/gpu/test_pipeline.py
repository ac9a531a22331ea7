"""Host arrays: any memory, in slices, over several queues, with bounded memory on both sides."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from convpar.backends.gpu import pipeline
from convpar.backends.gpu.executors.emulator import ORDERS, EmulationError
from convpar.backends.gpu.pipeline import empty_pinned, pieces

Array = np.ndarray[Any, Any]


def numbers(shape: tuple[int, ...], dtype: str = "int16") -> Array:
    """Small whole numbers."""
    return np.random.default_rng(20).integers(-5, 6, shape).astype(dtype)


def misaligned(a: Array) -> Array:
    """A copy whose elements begin at odd addresses."""
    block = np.empty(a.nbytes + 1, np.uint8)[1:].view(a.dtype).reshape(a.shape)
    block[...] = a
    assert not block.flags.aligned
    return block


def read_only(a: Array) -> Array:
    """A copy that can't be written."""
    a = a.copy()
    a.flags.writeable = False
    return a


MEMORIES = {
    "C order": lambda a: a,
    "channels last": lambda a: np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
    "Fortran order": np.asfortranarray,
    "backwards": lambda a: a[::-1, ::-1, ::-1, ::-1].copy()[::-1, ::-1, ::-1, ::-1],
    "with gaps": lambda a: np.repeat(np.repeat(a, 2, 3), 3, 1)[:, ::3, :, ::2],
    "swapped": lambda a: a.astype(a.dtype.newbyteorder()),
    "misaligned": misaligned,
    "read only": read_only,
}


@pytest.mark.parametrize("piece", [pipeline.PIECE_BYTES, 100])
@pytest.mark.parametrize("memory", MEMORIES)
def test_inputs_of_any_memory(bench, monkeypatch, memory, piece):
    monkeypatch.setattr(pipeline, "PIECE_BYTES", piece)
    x, w = MEMORIES[memory](numbers((5, 2, 9, 20))), MEMORIES[memory](numbers((3, 2, 3, 3)))
    bias = numbers((3,)).astype(x.dtype)
    before = x.copy(), w.copy()
    y = bench.run("gpu-naive", x, w, bias, config={"slice": 2}, padding=1)
    np.testing.assert_array_equal(y, bench.reference(x, w, bias, padding=1))
    np.testing.assert_array_equal(x, before[0])
    np.testing.assert_array_equal(w, before[1])


@pytest.mark.parametrize("memory", [m for m in MEMORIES if m != "read only"])
def test_results_into_any_memory(bench, monkeypatch, memory):
    monkeypatch.setattr(pipeline, "PIECE_BYTES", 100)
    x, w = numbers((5, 2, 9, 20)), numbers((3, 2, 3, 3))
    expected = bench.reference(x, w)
    out = MEMORIES[memory](np.full(expected.shape, -1, expected.dtype))
    y = bench.run("gpu-naive", x, w, None, out, config={"slice": 2})
    assert y is out
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("streams", [1, 2, 3, 10])
def test_slices_and_streams(bench, order, streams):
    bench.settings(f"{order}")
    x, w = numbers((11, 2, 7, 9)), numbers((3, 2, 3, 3))
    for images, name in itertools.product((1, 4, 11, 50), ("gpu-constant", "gpu-atomic")):
        config = {"slice": images, "streams": streams}
        np.testing.assert_array_equal(bench.run(name, x, w, config=config), bench.reference(x, w))


def test_pinned_arrays_go_straight(bench, monkeypatch):
    x, out = empty_pinned((6, 2, 9, 20), "int16"), empty_pinned((6, 3, 7, 18), "int16")
    x[...] = numbers(x.shape)
    w = numbers((3, 2, 3, 3))
    staged = []
    take = pipeline._Staging._take
    monkeypatch.setattr(
        pipeline._Staging, "_take", lambda self, size: staged.append(size) or take(self, size)
    )
    for config in ({"slice": 2, "streams": 3}, {"slice": 5, "streams": 1}):
        staged.clear()
        out[...] = -1
        bench.run("gpu-naive", x, w, None, out, config=config)
        np.testing.assert_array_equal(out, bench.reference(x, w))
        assert staged == [w.nbytes]


@pytest.mark.parametrize("shape", [(), 3, (2, 0), (3, 4, 5)])
@pytest.mark.parametrize("dtype", ["float32", "uint8", "complex128"])
def test_empty_pinned(bench, shape, dtype):
    a = empty_pinned(shape, dtype)
    assert a.shape == np.empty(shape).shape
    assert a.dtype == dtype
    assert a.flags.c_contiguous
    assert a.flags.writeable
    a[...] = 1
    assert bench.emulator.is_pinned(a) or a.size == 0


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        (3, "O", "dtype must be bool, an integer, floating point or complex, not object"),
        (3, "S3", "dtype must be bool"),
        (3, None, "dtype must be a NumPy dtype, not None"),
        (-1, "float32", "shape must be at least 0, not -1"),
        (1.5, "float32", "shape must be an integer, not 1.5"),
        ("a", "float32", "shape must be an integer, not 'a'"),
        ((2, 2.0), "float32", "shape must be an integer, not 2.0"),
    ],
)
def test_empty_pinned_of_nonsense(bench, shape, dtype, message):
    with pytest.raises((TypeError, ValueError), match=message):
        empty_pinned(shape, dtype)


def test_memory_is_bounded(bench, monkeypatch):
    """However large the batch: so many slices on the device, so many pieces on the host, and no copy of x or out."""
    monkeypatch.setattr(pipeline, "PIECE_BYTES", 1000)
    x, w = numbers((40, 2, 20, 20)), numbers((3, 2, 3, 3))
    device, host = [], []
    allocate, pinned = bench.emulator.allocate, bench.emulator.pinned
    monkeypatch.setattr(bench.emulator, "allocate", lambda size: device.append(size) or allocate(size))
    monkeypatch.setattr(bench.emulator, "pinned", lambda size: host.append(size) or pinned(size))
    limit = 30_000
    config = {"workspace_limit": limit, "streams": 2}
    plan = bench.plan("gpu-atomic", x, w, config=config, dtype="int8")
    out = np.empty(plan.problem.out_shape, np.int8)
    plan.run(x, w, None, out)
    np.testing.assert_array_equal(out, bench.reference(x, w, dtype="int8"))
    assert len(plan.slices) > 5
    assert plan.workspace_bytes() <= limit
    assert sum(device) <= plan.workspace_bytes() + w.nbytes + 3
    assert sum(host) <= 2 * pipeline.PIECES * 1000
    assert max(host) <= 1000


def test_an_image_larger_than_the_limit_still_runs(bench):
    x, w = numbers((3, 1, 40, 40)), numbers((1, 1, 3, 3))
    plan = bench.plan("gpu-naive", x, w, config={"workspace_limit": 1000})
    assert [last - first for first, last in plan.slices] == [1, 1, 1]
    np.testing.assert_array_equal(
        bench.run("gpu-naive", x, w, config={"workspace_limit": 1000}), bench.reference(x, w)
    )


def test_callers_at_the_same_time(bench):
    cases = [(numbers((4, 2, 9, 9 + i)), numbers((2, 2, 3, 3)) + i) for i in range(6)]
    right = [False] * len(cases)

    def call(i: int) -> None:
        x, w = cases[i]
        for _ in range(5):
            y = bench.run("gpu-tiled-constant", x, w, config={"slice": 1, "streams": 2})
            right[i] = np.array_equal(y, bench.reference(x, w))

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(right)


def test_a_fault_in_one_call_leaves_the_next_one_right(bench, monkeypatch):
    x, w = numbers((4, 2, 9, 9)), numbers((2, 2, 3, 3))
    run = bench.emulator.run
    calls = []

    def fails_later(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise EmulationError("planted")
        run(*arguments)

    config = {"slice": 1, "streams": 2}
    monkeypatch.setattr(bench.emulator, "run", fails_later)
    with pytest.raises(EmulationError, match="planted"):
        bench.run("gpu-naive", x, w, config=config)
    np.testing.assert_array_equal(bench.run("gpu-naive", x, w, config=config), bench.reference(x, w))


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4, 5), (1, 1, 1, 9), (4, 1, 1, 1), (2, 0, 3)])
@pytest.mark.parametrize("limit", [1, 8, 9, 40, 100, 10**6])
def test_pieces_cover_an_array_once_and_in_order(shape, limit):
    a = np.arange(np.prod(shape)).reshape(shape)
    seen = []
    for index, first, size in pieces(shape, 8, limit):
        part = a[index]
        assert part.size * 8 == size <= max(limit, 8)
        assert first == 8 * len(seen)
        seen += part.ravel().tolist()
    assert seen == a.ravel().tolist()
