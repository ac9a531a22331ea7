"""What only a real GPU can show: streams, threads, memory, devices. Skipped without one."""

from __future__ import annotations

import gc
import threading
from functools import partial
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import arrays
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


@pytest.mark.filterwarnings("ignore:ExternalStream is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", CONSTANT)
def test_streams_of_others_and_of_our_own_take_turns(name: str) -> None:
    cases = [_problem(seed) for seed in range(4)]
    lent = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    streams = [cupy.cuda.Stream.null, cupy.cuda.Stream(non_blocking=True)]
    streams += [cupy.cuda.ExternalStream(stream.ptr) for stream in lent]
    cupy.cuda.Device().synchronize()
    got = []
    for turn in range(80):
        x, w, _ = cases[turn % 4]
        with streams[turn // 3 % 4]:
            got.append(convpar.conv2d(x, w, backend=name))
    cupy.cuda.Device().synchronize()
    for turn, y in enumerate(got):
        assert np.array_equal(cupy.asnumpy(y), cases[turn % 4][2])


@pytest.mark.parametrize("name", CONSTANT)
def test_calls_on_one_stream_need_no_events(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, _ = _problem(11)
    out = convpar.conv2d(x, w, backend=name)
    made: list[int] = []
    whole = cupy_executor._Event.__init__
    monkeypatch.setattr(cupy_executor._Event, "__init__", lambda *given: made.append(1) or whole(*given))
    with cupy.cuda.Stream(non_blocking=True):
        for _ in range(10):
            convpar.conv2d(x, w, out=out, backend=name)
    cupy.cuda.Device().synchronize()
    assert len(made) <= 1


def _in_a_new_thread(call: Any) -> None:
    failed: list[BaseException] = []

    def caller() -> None:
        try:
            call()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join(120)
    assert not thread.is_alive()
    assert not failed, failed


@pytest.mark.parametrize("name", RUNGS)
def test_a_thread_may_begin_with_a_planned_call(name: str) -> None:
    """Nothing before it has given the thread a context."""
    x, w, right = _problem(12)
    planned = convpar.plan(x, w, backend=name)
    out = planned(x, w)
    out[...] = -1
    cupy.cuda.Device().synchronize()
    _in_a_new_thread(lambda: planned(x, w, out=out))
    cupy.cuda.Device().synchronize()
    assert np.array_equal(cupy.asnumpy(out), right)


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


def _keep_busy() -> None:
    """CuPy's current stream, for half a second or so."""
    busy = cupy.RawKernel(
        'extern "C" __global__ void busy() { long long t = clock64(); while (clock64() - t < 1000000000); }',
        "busy",
    )
    busy((1,), (1,), ())


@pytest.fixture
def torch() -> Any:
    found = pytest.importorskip("torch", reason="checks tensors of PyTorch")
    if not found.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return found


def _busy(torch: Any, stream: Any) -> None:
    """Keep one of torch's streams busy."""
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)


@pytest.mark.filterwarnings("error::DeprecationWarning")
@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("name", ["gpu-unrolled", *CONSTANT])
def test_tensors_are_used_in_the_order_of_torchs_stream(torch: Any, name: str, planned: bool) -> None:
    x, w, right = _problem(13)
    tx, tw = torch.from_dlpack(x).clone(), torch.from_dlpack(w).clone()
    call = convpar.plan(tx, tw, backend=name) if planned else partial(convpar.conv2d, backend=name)
    late, out = torch.zeros_like(tx), torch.full(right.shape, -1.0, device="cuda")
    call(late, tw, out=out)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    for given in (None, out):
        late.zero_()
        out.fill_(-1)
        torch.cuda.synchronize()
        _busy(torch, side)
        with torch.cuda.stream(side):
            late.copy_(tx)
            y = call(late, tw, out=given)
            assert not side.query()
            # Without a wait: in the order of the stream.
            twice = y * 2
            late.fill_(5)
        assert isinstance(y, torch.Tensor)
        side.synchronize()
        assert np.array_equal(twice.cpu().numpy(), 2 * right)
        assert np.array_equal(y.cpu().numpy(), right)
    assert cupy.cuda.get_current_stream() == cupy.cuda.Stream.null


def test_torchs_streams_outlive_the_calls(torch: Any) -> None:
    x, w, right = _problem(14)
    tx, tw = torch.from_dlpack(x), torch.from_dlpack(w)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        convpar.conv2d(tx, tw)
    arrays._stream.cache_clear()
    gc.collect()
    with torch.cuda.stream(side):
        y = convpar.conv2d(tx, tw)
    side.synchronize()
    assert np.array_equal(y.cpu().numpy(), right)


def test_tensors_beside_cupys_arrays_wait_both_ways(torch: Any) -> None:
    x, w, right = _problem(15)
    tx = torch.from_dlpack(x).clone()
    convpar.conv2d(x, w)
    late = torch.zeros_like(tx)
    side, ours = torch.cuda.Stream(), cupy.cuda.Stream(non_blocking=True)
    late_w = cupy.zeros_like(w)
    cupy.cuda.Device().synchronize()
    _busy(torch, side)
    with ours:
        _keep_busy()
        late_w[...] = w
        with torch.cuda.stream(side):
            late.copy_(tx)
            y = convpar.conv2d(late, late_w)
            late.fill_(7)
        late_w[...] = 7
    cupy.cuda.Device().synchronize()
    assert np.array_equal(y.cpu().numpy(), right)


def _captured(call: Any) -> Any:
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            call()
        finally:
            graph = stream.end_capture()
    return graph, stream


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-tiled", "gpu-unrolled"])
def test_a_captured_call_replays(name: str) -> None:
    x, w, right = _problem(16)
    other_x, other_w, other = _problem(17)
    planned = convpar.plan(x, w, backend=name)
    out = planned(x, w)
    cupy.cuda.Device().synchronize()
    graph, stream = _captured(lambda: planned(x, w, out=out))
    for given_x, given_w, expected in ((x, w, right), (other_x, other_w, other)):
        x[...], w[...] = given_x.copy(), given_w.copy()
        out[...] = -1
        convpar.conv2d(other_x, other_w, backend="gpu-tiled-constant")
        cupy.cuda.Device().synchronize()
        graph.launch(stream)
        stream.synchronize()
        assert np.array_equal(cupy.asnumpy(out), expected)


@pytest.mark.parametrize(
    ("name", "rules"), [*((name, {}) for name in CONSTANT), ("gpu-im2col", {}), ("gpu-naive", {"flip": True})]
)
def test_a_call_that_a_graph_would_spoil_is_refused_under_capture(name: str, rules: Any) -> None:
    x, w, right = _problem(18)
    out = convpar.conv2d(x, w, backend=name, **rules)
    expected = cupy.asnumpy(out)
    with pytest.raises(
        convpar.Unsupported, match=r"can't capture.*gpu-naive, gpu-tiled and gpu-unrolled can"
    ):
        _captured(lambda: convpar.conv2d(x, w, out=out, backend=name, **rules))
    out[...] = -1
    convpar.conv2d(x, w, out=out, backend=name, **rules)
    assert np.array_equal(cupy.asnumpy(out), expected)
    if not rules:
        assert np.array_equal(expected, right)


def test_torch_captures_a_call(torch: Any) -> None:
    x, w, right = _problem(19)
    tx, tw = torch.from_dlpack(x).clone(), torch.from_dlpack(w).clone()
    planned = convpar.plan(tx, tw, backend="gpu-unrolled")
    out = planned(tx, tw)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        planned(tx, tw, out=out)
    out.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert np.array_equal(out.cpu().numpy(), right)


def test_nothing_waits_for_the_device() -> None:
    x, w, _ = _problem(6)
    convpar.conv2d(x, w)
    cupy.cuda.Device().synchronize()
    done = cupy.cuda.Event()
    _keep_busy()
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


@pytest.mark.filterwarnings("ignore:The device where the array resides")
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
        y[...] = -1
        cupy.cuda.Device(1).synchronize()
        _in_a_new_thread(partial(convpar.conv2d, other_x, other_w, out=y, backend=name))
        cupy.cuda.Device(1).synchronize()
        assert np.array_equal(cupy.asnumpy(y), right)
    assert cupy.cuda.Device().id == 0


def test_numpy_and_cupy_arrays_dont_mix() -> None:
    x, w, _ = _problem(10)
    with pytest.raises(TypeError, match="one device"):
        convpar.conv2d(x, cupy.asnumpy(w))
    with pytest.raises(convpar.Unsupported, match="downloads nothing"):
        convpar.conv2d(x, w, backend="numpy")
