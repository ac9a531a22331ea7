"""The emulator finds what it is there to find: each planted fault fails for its own reason."""

from __future__ import annotations

import dataclasses
import importlib.util
import shutil
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from convpar import Unavailable, conv2d, registry
from convpar.backends.gpu import compile, executors, pipeline, rungs
from convpar.backends.gpu.executors import cupy as cupy_executor
from convpar.backends.gpu.executors import emulator
from convpar.backends.gpu.executors.emulator import ORDERS, EmulationError, Emulator, Settings
from convpar.backends.gpu.launch import Launch
from convpar.conformance import memory
from convpar.problem import Unsupported

TILED = {"config": {"tile": (8, 8)}}
BARRIER = "            __syncthreads();\n"


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernels_as_they_are_pass(bench, small, order):
    bench.settings(order)
    np.testing.assert_array_equal(bench.run("gpu-tiled", *small, **TILED), bench.reference(*small))


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_after_loading(bench, small, order):
    bench.edited(order, tiled=(BARRIER, ""))
    with pytest.raises(EmulationError, match=r"tiled: block .* thread .* shared memory at offset"):
        bench.run("gpu-tiled", *small, **TILED)


@pytest.mark.parametrize("order", ORDERS)
def test_a_missing_barrier_before_the_next_stage(bench, small, order, monkeypatch):
    monkeypatch.setattr(rungs, "PLAIN_SHARED", 400)  # room for one channel of 10 x 10
    np.testing.assert_array_equal(bench.run("gpu-tiled", *small, **TILED), bench.reference(*small))
    text = compile.read_kernel("tiled.cu")
    tail = text[text.rindex(BARRIER) : text.rindex(BARRIER) + len(BARRIER) + 20]
    bench.edited(order, tiled=(tail, tail.removeprefix(BARRIER)))
    with pytest.raises(
        EmulationError, match=r"(writes|reads) shared memory .* (reads|writes) with no barrier between"
    ):
        bench.run("gpu-tiled", *small, **TILED)


def test_a_missing_barrier_shows_in_results_too(bench, small):
    """Without checks, some order of the threads gives a wrong result."""
    wrong = []
    for order in ORDERS:
        bench.edited(f"{order},unchecked", tiled=(BARRIER, ""))
        wrong.append(not np.array_equal(bench.run("gpu-tiled", *small, **TILED), bench.reference(*small)))
    assert any(wrong)


def test_a_race_on_the_halo(bench, small):
    bench.edited(tiled=("i += I::BLOCK_ROWS", "i += I::BLOCK_ROWS - 1"))
    with pytest.raises(EmulationError, match=r"writes shared memory .* writes with no barrier between them"):
        bench.run("gpu-tiled", *small, **TILED)


def test_a_halo_too_small(bench, small):
    bench.edited(tiled=("j <= last_column", "j < last_column"))
    with pytest.raises(EmulationError, match="no thread of the block has written"):
        bench.run("gpu-tiled", *small, **TILED)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("checked", r"writes 4 bytes of shared memory at offset 400, and the block has 400"),
        ("unchecked", "wrote outside its shared memory"),
    ],
)
def test_shared_memory_overrun(bench, small, settings, message):
    x, w = (a[:, :1] for a in small)
    bench.edited(settings, tiled=("i <= last_row", "i <= last_row + 1"))
    with pytest.raises(EmulationError, match=message):
        bench.run("gpu-tiled", x, w, **TILED)


def test_device_memory_overrun(bench, small):
    bench.edited(naive=("row >= Index(p.oh) || ", ""))
    with pytest.raises(EmulationError, match="naive: wrote outside the device memory"):
        bench.run("gpu-naive", *small)


def test_a_barrier_that_some_threads_skip(bench, small):
    bench.edited(tiled=(BARRIER, f"            if (computes) {BARRIER.strip()}\n"))
    with pytest.raises(EmulationError, match="waits at the barrier of line"):
        bench.run("gpu-tiled", *small, **TILED)


def test_a_kernel_that_does_not_compile(bench, small):
    bench.edited(naive=("Sum sum{};", "Sum sum{}"))
    with pytest.raises(EmulationError, match=r"naive\.cu:\d+"):
        bench.run("gpu-naive", *small)


def test_after_a_fault_the_emulator_runs_on(bench, small):
    bench.edited(tiled=(BARRIER, ""))
    with pytest.raises(EmulationError):
        bench.run("gpu-tiled", *small, **TILED)
    bench.use(Emulator())
    np.testing.assert_array_equal(bench.run("gpu-tiled", *small, **TILED), bench.reference(*small))


def _kernel(body: str) -> Callable[[str], str]:
    """A reader in whose files trial.cu has that body."""
    text = f"""
    #include "problem.cuh"
    template <class I>
    __device__ void trial(const Arrays<I>& arrays, const Problem&) {{
        const int me = thread_index();
        {body}
    }}
    """
    return lambda name: text if name == "trial.cu" else compile.read_kernel(name)


def _trial(body: str, settings: str = "", threads: int = 64, shared: int = 1024) -> np.ndarray[Any, Any]:
    """One int a thread, as `body` writes it to arrays.out; arrays.x counts from 0."""
    executor = Emulator(Settings.parse(settings), _kernel(body))
    members = dict.fromkeys(("X", "W", "Operand", "Sum", "Out", "Index"), "int")
    launch = Launch("trial", tuple(members.items()), (1, 1, 1), (threads, 1, 1), (), shared=shared)
    queue = executor.queue(0, None)
    x, out = np.arange(threads, dtype=np.int32), np.full(threads, -7, np.int32)
    queue.launch(executor.load(launch, 0), [x.ctypes.data, 0, 0, out.ctypes.data, 0, 0, 0, 0, 0])
    return out


@pytest.mark.parametrize("order", ORDERS)
def test_shuffles(order):
    np.testing.assert_array_equal(
        _trial("arrays.out[me] = shuffle(arrays.x[me], 5);", order), np.repeat([5, 37], 32)
    )
    np.testing.assert_array_equal(
        _trial("arrays.out[me] = shuffle_xor(arrays.x[me], 1);", order), np.arange(64) ^ 1
    )
    np.testing.assert_array_equal(
        _trial(
            "int v = arrays.x[me]; for (int d = 16; d; d /= 2) v += shuffle_down(v, d); arrays.out[me] = v;",
            order,
        )[::32],
        [np.arange(32).sum(), np.arange(32, 64).sum()],
    )


@pytest.mark.parametrize("order", ORDERS)
def test_a_warp_barrier_orders_its_warp_only(order):
    within = """
        Shared<int> s = dynamic_shared<int>(0);
        s[me] = me;
        __syncwarp();
        arrays.out[me] = s[me ^ 1];
    """
    np.testing.assert_array_equal(_trial(within, order), np.arange(64) ^ 1)
    with pytest.raises(EmulationError, match=r"no barrier between them|no thread of the block has written"):
        _trial(within.replace("me ^ 1", "me ^ 32"), order)


def test_atomics_on_shared_memory_do_not_race():
    counted = """
        Shared<int> s = dynamic_shared<int>(0);
        if (me == 0) s[0] = 0;
        __syncthreads();
        atomic_add(s + 0, 1);
        __syncthreads();
        arrays.out[me] = s[0];
    """
    np.testing.assert_array_equal(_trial(counted), np.full(64, 64))
    with pytest.raises(EmulationError, match=r"no barrier between them"):
        _trial(counted.replace("atomic_add(s + 0, 1);", "atomic_add(s + 0, 1); s[0] += 1;"))


COPIES = """
    Shared<int> s = dynamic_shared<int>(0);
    copy_async<4>(s + me, arrays.x + me, me != 3);
    copy_async_commit();
    copy_async<4>(s + (64 + me), arrays.x + me);
    copy_async_commit();
    copy_async_wait<{groups}>();
    {barrier}
    arrays.out[me] = s[{first} + (me + 1) % 64];
"""


@pytest.mark.parametrize("order", ORDERS)
def test_asynchronous_copies(order):
    expected = (np.arange(64) + 1) % 64
    landed = _trial(COPIES.format(groups=0, barrier="__syncthreads();", first=64), order)
    np.testing.assert_array_equal(landed, expected)
    landed = _trial(COPIES.format(groups=1, barrier="__syncthreads();", first=0), order)
    np.testing.assert_array_equal(landed, np.where(expected == 3, 0, expected))


def test_an_asynchronous_copy_read_too_early_is_poison():
    early = _trial(COPIES.format(groups=1, barrier="__syncthreads();", first=64))
    np.testing.assert_array_equal(early, np.full(64, -1))


def test_an_asynchronous_copy_needs_a_barrier_for_other_threads():
    with pytest.raises(EmulationError, match=r"no barrier between them|no thread of the block has written"):
        _trial(COPIES.format(groups=0, barrier="", first=64))


def test_an_asynchronous_copy_must_be_aligned():
    with pytest.raises(EmulationError, match="aligned"):
        _trial("copy_async<8>(dynamic_shared<int>(0) + me, arrays.x + me);")


def test_shared_memory_starts_poisoned_for_every_block():
    read = "arrays.out[me] = *dynamic_shared<int>(4 * me).raw();"
    np.testing.assert_array_equal(_trial(read), np.full(64, -1))


def test_a_pipeline_that_does_not_wait_for_the_filters(bench, monkeypatch):
    """Queues take turns in no fixed order: some order shows a missing wait between two of them."""
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (6, 1, 9, 9)).astype(np.float32)
    w = rng.integers(-4, 5, (1, 1, 3, 3)).astype(np.float32)
    expected = bench.reference(x, w)

    def rightly() -> list[bool]:
        right = []
        for seed in range(6):
            bench.settings(f"shuffle={seed}")
            y = bench.run("gpu-naive", x, w, config={"slice": 1, "streams": 3})
            right.append(np.array_equal(y, expected))
        return right

    assert all(rightly())
    monkeypatch.setattr(emulator._Queue, "wait", lambda self, event: None)
    assert not all(rightly())


def test_a_staging_piece_used_again_too_early(bench, monkeypatch):
    bench.settings("reverse")
    monkeypatch.setattr(pipeline, "PIECE_BYTES", 64)
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (1, 2, 20, 20)).astype(np.float32)
    w = rng.integers(-4, 5, (1, 2, 3, 3)).astype(np.float32)
    np.testing.assert_array_equal(bench.run("gpu-naive", x, w), bench.reference(x, w))
    monkeypatch.setattr(emulator._Event, "synchronize", lambda self: None)
    assert not np.array_equal(bench.run("gpu-naive", x, w), bench.reference(x, w))


class Turns:
    """Takes banks of 1024 bytes of constant memory, and notes which operation of which queue came when."""

    def __init__(self, bench: Any) -> None:
        self.memory = bench.emulator.allocate(2048)
        self.banks = executors.Banks(self.memory.ptr, 1024)
        self.seen: list[str] = []

    def take(self, queue: Any, name: str, size: int) -> int:
        """The bank of an operation called `name` whose filters have `size` bytes."""
        with self.banks.lock:
            bank = self.banks.fill(queue, self.memory.ptr + 1024, size)
            queue._give(lambda: self.seen.append(name))
            self.banks.leave(queue)
        return bank


def test_banks_of_constant_memory_make_queues_wait(bench):
    """Two queues whose filters don't fit together: the second waits for the first's kernel."""
    bench.settings("reverse")
    turns = Turns(bench)
    with bench.emulator.own_queues(0, 2) as (first, second):
        assert turns.take(first, "a", 400) == 0
        assert turns.take(second, "b", 400) == 512
        assert turns.take(second, "c", 900) == 0
        assert turns.take(first, "d", 100) == 0
    assert turns.seen.index("a") < turns.seen.index("c") < turns.seen.index("d")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What queues recorded and waited for."""
    found: list[str] = []
    for name in ("record", "wait"):
        whole = getattr(emulator._Queue, name)

        def noted(self: Any, *given: Any, name: str = name, whole: Any = whole) -> Any:
            found.append(name)
            return whole(self, *given)

        monkeypatch.setattr(emulator._Queue, name, noted)
    return found


def test_a_bank_under_capture_is_refused_and_nobody_loses_one(bench, monkeypatch):
    turns = Turns(bench)
    with bench.emulator.own_queues(0, 2) as (first, second):
        turns.take(first, "a", 100)
        with monkeypatch.context() as m:
            m.setattr(emulator._Queue, "capturing", lambda self: True)
            with pytest.raises(
                Unsupported, match=r"can't capture.*constant memory.*gpu-naive, gpu-tiled and gpu-un"
            ):
                turns.take(second, "b", 100)
        assert turns.take(first, "c", 100) == 0
        assert turns.take(second, "d", 100) == 256
    assert sorted(turns.seen) == ["a", "c", "d"]


def test_what_can_be_captured(bench, monkeypatch):
    """The rungs that the errors name need neither constant memory nor scratch memory; others are refused."""
    monkeypatch.setattr(emulator._Queue, "capturing", lambda self: True)
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (2, 2, 9, 9)).astype(np.float32)
    w = rng.integers(-4, 5, (3, 2, 3, 3)).astype(np.float32)
    bias = np.arange(3, dtype=np.float32)
    named = executors.CAPTURABLE.partition(" can be")[0].replace(" and ", ", ").split(", ")
    for name in named:
        y = bench.run(name, x, w, bias, in_place=True)
        np.testing.assert_array_equal(y, bench.reference(x, w, bias))
    for name, given, message in (
        ("gpu-constant", {}, "constant memory"),
        ("gpu-tiled-constant", {}, "constant memory"),
        ("gpu-im2col", {}, "scratch memory"),
        ("gpu-naive", {"flip": True}, "scratch memory"),
    ):
        with pytest.raises(Unsupported, match=f"can't capture.*{message}.*{named[0]}"):
            bench.run(name, x, w, in_place=True, **given)


def test_calls_of_one_queue_share_a_bank_without_events(bench, events):
    turns = Turns(bench)
    with bench.emulator.own_queues(0, 2) as (first, second):
        assert [turns.take(first, name, 300) for name in "abc"] == [0, 0, 0]
        assert events == []
        # One event where another queue comes; its bank is free.
        assert [turns.take(second, name, 300) for name in "def"] == [512, 512, 512]
        assert events == ["record"]
        assert turns.take(first, "g", 300) == 0
        assert events == ["record", "record", "wait"]


def test_a_launch_that_fails_leaves_its_bank(bench, small, events, monkeypatch):
    """Its filters may still be on their way there when the next caller comes."""
    x, w = small
    plan = bench.plan("gpu-constant", x, w, in_place=True)
    out = np.empty(plan.problem.out_shape, np.float32)
    monkeypatch.setattr(emulator._Queue, "order", None)

    def fails(self: Any, loaded: Any, numbers: Any) -> None:
        raise EmulationError("planted")

    with monkeypatch.context() as planted:
        planted.setattr(emulator._Queue, "launch", fails)
        with pytest.raises(EmulationError, match="planted"):
            plan.run(x, w, None, out)
    assert events == ["record"]
    plan.run(x, w, None, out)
    assert np.array_equal(out, bench.reference(x, w))


def test_a_queue_that_may_not_last_is_marked_at_once(bench, events, monkeypatch):
    """What uses a stream that somebody else may destroy leaves an event behind, and no bank is shared."""
    monkeypatch.setattr(emulator._Queue, "order", None)
    turns = Turns(bench)
    with bench.emulator.own_queues(0, 1) as (queue,):
        assert [turns.take(queue, name, 300) for name in "ab"] == [0, 512]
        assert events == ["record", "record"]
        assert turns.take(queue, "c", 300) == 0
        assert events == ["record", "record", "wait", "record"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", Settings()),
        ("reverse", Settings(order="reverse")),
        ("shuffle=7, unchecked", Settings(order="shuffle", seed=7, checked=False)),
    ],
)
def test_settings(text, expected):
    assert Settings.parse(text) == expected


@pytest.mark.parametrize("text", ["backward", "forward=3", "shuffle=x", "check"])
def test_wrong_settings_list_the_right_ones(text):
    with pytest.raises(ValueError, match="forward, reverse, shuffle"):
        Settings.parse(text)


def test_threads_switch_without_assembly_too(bench, small, monkeypatch):
    """Where convpar has no switch of its own for the processor, the C library's serves."""
    monkeypatch.setattr(emulator, "_FLAGS", (*emulator._FLAGS, "-DCONVPAR_UCONTEXT"))
    emulator._runtime.cache_clear()
    try:
        for order in ORDERS:
            bench.settings(order)
            np.testing.assert_array_equal(bench.run("gpu-tiled", *small, **TILED), bench.reference(*small))
        bench.edited(tiled=(BARRIER, ""))
        with pytest.raises(
            EmulationError, match=r"no barrier between them|no thread of the block has written"
        ):
            bench.run("gpu-tiled", *small, **TILED)
    finally:
        emulator._runtime.cache_clear()


@pytest.mark.parametrize(
    ("installed", "found", "words"),
    [
        (
            False,
            False,
            ("CuPy is not installed", "convpar[cuda13x]", "convpar[cuda12x]", "CONVPAR_GPU=emulate"),
        ),
        (True, False, ("finds no GPU", "CONVPAR_GPU=emulate")),
        (True, None, ("can't be used", "libcuda", "CONVPAR_GPU=emulate")),
        (True, True, ()),
    ],
)
def test_without_a_gpu_it_is_said_what_to_do(monkeypatch, installed, found, words):
    def is_available() -> bool:
        if found is None:
            raise OSError("libcuda.so.1: no such file")
        return bool(found)

    fake = types.SimpleNamespace(cuda=types.SimpleNamespace(is_available=is_available))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.setenv("CONVPAR_GPU", "")
    cupy_executor._missing.cache_clear()
    try:
        reason = registry.find("gpu-naive").unavailable()
    finally:
        cupy_executor._missing.cache_clear()
    assert all(word in (reason or "") for word in words)
    assert (reason is None) == (words == ())


def test_what_can_not_run_is_said(monkeypatch):
    rung = registry.find("gpu-naive")
    monkeypatch.setenv("CONVPAR_GPU", "banana")
    assert "must be 'cuda' or 'emulate', not 'banana'" in rung.unavailable()
    monkeypatch.setenv("CONVPAR_GPU", "emulate:backward")
    assert "forward, reverse, shuffle" in rung.unavailable()
    monkeypatch.setenv("CONVPAR_GPU", "emulate")
    monkeypatch.setattr(emulator, "compiler", lambda: None)
    emulator._missing_with.cache_clear()
    try:
        assert rung.unavailable() == "the emulator needs a C++ compiler; install one, or name it in CXX"
    finally:
        emulator._missing_with.cache_clear()


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("no-such-compiler", "'no-such-compiler' isn't found"),
        ('"', "'\"' can't be read as a command: No closing quotation"),
        ("''", "isn't found"),
        ("false", "'false' doesn't tell its version"),
        ("true", "'true' makes no file"),
        ("sh -c 'test $0 = --version'", "can't make a library"),
    ],
)
def test_a_compiler_of_no_use_is_named(monkeypatch, tmp_path, command, says):
    monkeypatch.setenv("CONVPAR_GPU", "emulate")
    monkeypatch.setenv("CONVPAR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("CXX", command)
    reason = registry.find("gpu-naive").unavailable()
    assert says in reason
    assert reason.endswith("name another one in CXX")
    with pytest.raises(Unavailable, match="name another one in CXX"):
        conv2d(np.ones((5, 5), np.float32), np.ones((3, 3), np.float32), backend="gpu-naive")


def test_a_cache_folder_of_no_use_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("CONVPAR_GPU", "emulate")
    monkeypatch.setenv("CONVPAR_CACHE_DIR", str(tmp_path / "file"))
    reason = registry.find("gpu-naive").unavailable()
    assert f"can't keep compiled kernels in {tmp_path / 'file' / 'emulator'}" in reason
    assert reason.endswith("name another folder in CONVPAR_CACHE_DIR")


def test_a_cache_folder_that_is_lost_later_is_named_too(bench, small, monkeypatch, tmp_path):
    monkeypatch.setenv("CONVPAR_CACHE_DIR", str(tmp_path / "cache"))
    assert registry.find("gpu-naive").unavailable() is None
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").touch()
    with pytest.raises(Unavailable, match="name another folder in CONVPAR_CACHE_DIR"):
        bench.run("gpu-naive", *small)


@pytest.mark.parametrize(
    ("value", "emulated"),
    [("emulate", True), (" emulate ", True), ("emulate:reverse", True), ("emulated", False), ("emulate:backward", False),
     ("", False), ("cuda", False)],
)  # fmt: skip
def test_everybody_reads_the_setting_alike(monkeypatch, value, emulated):
    monkeypatch.setenv("CONVPAR_GPU", value)
    assert executors.emulating() == emulated
    assert isinstance(memory.device_place("gpu"), memory.EmulatedPlace) == emulated


def test_limits_are_the_settings(bench):
    bench.use(
        Emulator(dataclasses.replace(Settings(), limits=dataclasses.replace(Settings().limits, threads=64)))
    )
    refusal = bench.plan("gpu-naive", np.zeros((1, 1, 9, 9)), np.zeros((1, 1, 3, 3)))
    assert refusal.reason == "needs 256 threads a block, this GPU has 64"
