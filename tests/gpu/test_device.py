"""What only a real GPU can show: streams, threads, memory, devices. Skipped without one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import convpar
from convpar.backends import gpu
from convpar.backends.gpu.executors import cupy as cupy_executor

cupy: Any = pytest.importorskip("cupy", reason="CuPy is not installed: pip install 'convpar[cuda13x]'")
if cupy_executor._missing() is not None:
    pytest.skip(f"needs a GPU: {cupy_executor._missing()}", allow_module_level=True)

RUNGS = [b.name for b in gpu.backends()]
CONSTANT = [name for name in RUNGS if "constant" in name]


def _problem(seed: int, n: int = 3) -> tuple[Any, Any, Any]:
    """Small whole numbers, so that every rung is exact: image, filter and right answer."""
    rng = np.random.default_rng(seed)
    x = rng.integers(-3, 4, (n, 2, 40, 37)).astype(np.float32)
    w = rng.integers(-3, 4, (3, 2, 5, 5)).astype(np.float32)
    return cupy.asarray(x), cupy.asarray(w), convpar.conv2d(x, w, backend="numpy")


@pytest.mark.parametrize("name", CONSTANT)
def test_streams_with_different_filters_dont_meet_in_constant_memory(name: str) -> None:
    cases = [_problem(seed) for seed in range(8)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in cases]
    cupy.cuda.Device().synchronize()
    for _ in range(20):
        got = []
        for stream, (x, w, _) in zip(streams, cases, strict=True):
            with stream:
                got.append(convpar.conv2d(x, w, backend=name))
        cupy.cuda.Device().synchronize()
        for y, (_, _, right) in zip(got, cases, strict=True):
            assert np.array_equal(cupy.asnumpy(y), right)


@pytest.mark.parametrize("name", RUNGS)
def test_host_threads_call_at_once(name: str) -> None:
    wrong: list[str] = []

    def caller(seed: int) -> None:
        x, w, right = _problem(seed)
        with cupy.cuda.Stream(non_blocking=True) as stream:
            cupy.cuda.Device().synchronize()
            for _ in range(20):
                y = convpar.conv2d(x, w, backend=name)
                stream.synchronize()
                if not np.array_equal(cupy.asnumpy(y), right):
                    wrong.append(f"seed {seed}")

    threads = [threading.Thread(target=caller, args=(seed,)) for seed in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


@pytest.mark.parametrize("name", RUNGS)
def test_negative_strides(name: str) -> None:
    x, w, _ = _problem(5)
    turned = x[:, ::-1, ::-1, ::-2]
    right = convpar.conv2d(cupy.asnumpy(turned), cupy.asnumpy(w), backend="numpy")
    assert np.array_equal(cupy.asnumpy(convpar.conv2d(turned, w, backend=name)), right)


def test_nothing_waits_for_the_device() -> None:
    x, w, _ = _problem(6)
    convpar.conv2d(x, w)
    cupy.cuda.Device().synchronize()
    busy = cupy.RawKernel(
        'extern "C" __global__ void busy() { long long t = clock64(); while (clock64() - t < 1000000000); }',
        "busy",
    )
    done = cupy.cuda.Event()
    busy((1,), (1,), ())
    convpar.conv2d(x, w)
    done.record()
    assert not done.done
    done.synchronize()


def test_an_allocation_too_large_is_a_clear_error_and_gives_memory_back() -> None:
    pool = cupy.get_default_memory_pool()
    x, w, right = _problem(7)
    before = pool.used_bytes()
    limit = pool.get_limit()
    pool.set_limit(size=before + 1000)
    try:
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
            convpar.conv2d(x, w, padding=4000)
    finally:
        pool.set_limit(size=limit)
    assert pool.used_bytes() == before
    assert np.array_equal(cupy.asnumpy(convpar.conv2d(x, w)), right)


@pytest.mark.parametrize("name", RUNGS)
def test_a_host_batch_larger_than_the_memory_pool(name: str) -> None:
    pool = cupy.get_default_memory_pool()
    pool.free_all_blocks()
    rng = np.random.default_rng(8)
    x = rng.integers(-3, 4, (4000, 1, 64, 64)).astype(np.float32)
    w = rng.integers(-3, 4, (2, 1, 3, 3)).astype(np.float32)
    limit = pool.get_limit()
    room = x.nbytes // 2
    pool.set_limit(size=pool.total_bytes() + room)
    try:
        y = convpar.conv2d(x, w, backend=name, config={"slice": 100, "streams": 2, "workspace_limit": room})
    finally:
        pool.set_limit(size=limit)
    assert x.nbytes + y.nbytes > 2 * room
    assert np.array_equal(y, convpar.conv2d(x, w, backend="cpu"))


@pytest.mark.skipif(cupy.cuda.runtime.getDeviceCount() < 2, reason="needs two GPUs")
def test_arrays_on_two_devices() -> None:
    x, w, right = _problem(9)
    with cupy.cuda.Device(1):
        other_x, other_w = cupy.asarray(cupy.asnumpy(x)), cupy.asarray(cupy.asnumpy(w))
    with pytest.raises(TypeError, match="w lives on gpu:1 and x on gpu:0"):
        convpar.conv2d(x, other_w)
    # The current device is not the arrays': theirs counts.
    for name in RUNGS:
        y = convpar.conv2d(other_x, other_w, backend=name)
        assert y.device.id == 1
        assert np.array_equal(cupy.asnumpy(y), right)


def test_numpy_and_cupy_arrays_dont_mix() -> None:
    x, w, _ = _problem(10)
    with pytest.raises(TypeError, match="one device"):
        convpar.conv2d(x, cupy.asnumpy(w))
    with pytest.raises(convpar.Unsupported, match="downloads nothing"):
        convpar.conv2d(x, w, backend="cpu-private")
