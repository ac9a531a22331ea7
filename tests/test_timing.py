"""Timers, what is made of samples, ceilings and limits; clocks and devices are stand-ins, nothing asserts a time."""

from __future__ import annotations

import math
import subprocess
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from convpar import timing
from convpar.backends import cpu
from convpar.problem import Problem
from convpar.timing import Ceilings, CpuTimer, GpuTimer, Times


class Clock:
    """Nanoseconds that only pass when told to."""

    def __init__(self) -> None:
        self.now = 10**12

    def __call__(self) -> int:
        return self.now

    def work(self, nanoseconds: int) -> Callable[[], None]:
        def call() -> None:
            self.now += nanoseconds

        return call


def test_importing_timing_loads_no_device() -> None:
    code = "import sys, convpar.timing; print('cupy' in sys.modules, 'convpar.backends.cpu' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.split() == ["False", "False"]


@pytest.mark.parametrize("number", [1, 7])
def test_cpu_timer_gives_the_mean_of_its_calls(number: int) -> None:
    clock = Clock()
    assert CpuTimer(clock).sample(clock.work(3_000), number) == pytest.approx(3e-6)
    assert clock.now == 10**12 + 3_000 * number


def test_calibrate_makes_samples_long_enough() -> None:
    clock = Clock()
    number, seconds = timing.calibrate(CpuTimer(clock), clock.work(2_000), least=1e-3)
    assert seconds == pytest.approx(2e-6)
    assert 1e-3 <= number * seconds < 32e-3
    assert timing.calibrate(CpuTimer(clock), clock.work(5_000_000), least=1e-3) == (1, pytest.approx(5e-3))


def test_calibrate_ends_with_a_clock_that_stands_still() -> None:
    number, seconds = timing.calibrate(CpuTimer(lambda: 0), lambda: None)
    assert number >= 1 << 20
    assert seconds == 0


@pytest.mark.parametrize(
    ("usual", "after_others", "calls", "found"),
    [(10e-6, 50e-6, 240, 10e-6), (2e-3, 3e-3, 2, 2e-3), (0.2, 0.21, 1, 0.21)],
    ids=["many short calls", "two calls", "a long call"],
)
def test_what_ran_before_makes_no_difference_to_samples(
    usual: float, after_others: float, calls: int, found: float
) -> None:
    """Unless calls are long: then there is one, and the difference is small."""
    clock, slow, count = Clock(), [0], [0]

    def call() -> None:
        count[0] += 1
        clock.now += round(1e9 * (after_others if slow[0] > 0 else usual))
        slow[0] -= 1

    slow[0] = 1
    sample, seconds = timing.sampler(CpuTimer(clock), call)
    assert seconds == pytest.approx(usual)
    for _ in range(2):
        slow[0], count[0] = max(calls // 2, 1), 0
        assert sample() == pytest.approx(found)
        assert count[0] == calls


def test_measure_takes_samples_of_many_short_calls() -> None:
    clock = Clock()
    times = timing.measure(clock.work(10_000), timer=CpuTimer(clock), repeats=5)
    assert times.repeats == 5
    assert times.number * 10e-6 >= 1e-3
    assert times.median == pytest.approx(10e-6)
    assert times.spread == pytest.approx(0, abs=1e-12)


def test_median_and_interquartile_range() -> None:
    times = Times((5.0, 1.0, 2.0, 100.0, 3.0))
    assert times.median == 3
    low, high = np.percentile([1, 2, 3, 5, 100], [25, 75])
    assert times.spread == high - low == 3
    assert Times((2.0,)).spread == 0


def test_interleave_takes_turns_and_lets_the_slow_drop_out() -> None:
    order: list[str] = []

    def sampler(name: str) -> Callable[[], float]:
        def sample() -> float:
            order.append(name)
            return float(len(order))

        return sample

    samplers = {name: sampler(name) for name in "abc"}
    taken = timing.interleave(samplers, {"a": 3, "b": 1, "c": 2}, before=lambda: order.append("."))
    assert "".join(order) == ".a.b.c.a.c.a"
    assert {name: len(samples) for name, samples in taken.items()} == {"a": 3, "b": 1, "c": 2}
    order.clear()
    timing.interleave(samplers, 2)
    assert "".join(order) == "abcabc"
    assert timing.interleave({}, 2) == {}


# -- the GPU's timer, on a stand-in for CuPy that writes down what it is asked


class FakeCuda:
    """Streams and events whose time passes by calls; every use is written to `log`."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = 0.0
        cuda = self

        class Event:
            at = 0.0

            def record(self, stream: str) -> None:
                self.at = cuda.now
                cuda.log.append(f"record {stream}")

            def synchronize(self) -> None:
                cuda.log.append("synchronize")

        class Data:
            def memset_async(self, value: int, size: int, stream: str) -> None:
                cuda.now += 1000
                cuda.log.append(f"flush {size} {stream}")

        class Empty:
            def __init__(self, size: int, dtype: object) -> None:
                self.nbytes = size
                self.data = Data()

        self.module = types.ModuleType("cupy")
        self.module.uint8 = np.uint8  # type: ignore[attr-defined]
        self.module.empty = Empty  # type: ignore[attr-defined]
        self.module.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
            Event=Event,
            Device=lambda: types.SimpleNamespace(attributes={"L2CacheSize": 50}),
            get_current_stream=lambda: "current",
            get_elapsed_time=lambda a, b: b.at - a.at,
        )

    def call(self) -> None:
        self.now += 2.0
        self.log.append("call")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setitem(sys.modules, "cupy", fake.module)
    return fake


def test_gpu_timer_flushes_outside_the_timed_interval(cuda: FakeCuda) -> None:
    assert GpuTimer().sample(cuda.call, 2) == pytest.approx(2e-3)
    once = ["flush 100 current", "record current", "call", "record current"]
    assert cuda.log == [*once, *once, "synchronize"]


def test_gpu_timer_on_a_stream_without_flush(cuda: FakeCuda) -> None:
    assert GpuTimer("mine", flush=False).sample(cuda.call) == pytest.approx(2e-3)
    assert cuda.log == ["record mine", "call", "record mine", "synchronize"]


def test_gpu_timer_needs_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError):
        GpuTimer()


# -- ceilings


def problem(k: int = 3, dtype: str = "float32", **options: Any) -> Problem:
    return Problem.of((1, 1, 64, 64), (1, 1, k, k), dtype, **options)


def test_the_larger_limit_counts() -> None:
    p = problem()
    slow_memory = Ceilings("cpu", 1, bandwidth=1e6, fma={"float32": 1e12})
    assert slow_memory.limit(p) == timing.Limit(p.least_bytes / 1e6, "bytes")
    slow_arithmetic = Ceilings("cpu", 1, bandwidth=1e12, fma={"float32": 1e6})
    assert slow_arithmetic.limit(p) == timing.Limit(p.macs / 1e6, "arithmetic")


@pytest.mark.parametrize(
    ("dtype", "kind", "factor"),
    [
        ("complex64", "float32", 4),
        ("complex128", "float64", 4),
        ("uint32", "int32", 1),
        ("float16", "float32", 1),
    ],
)
def test_a_limit_uses_the_peak_of_the_sums_real_type(dtype: str, kind: str, factor: int) -> None:
    p = problem(dtype=dtype)
    assert timing.fma_kinds([p, p]) == [kind]
    limit = Ceilings("cpu", 1, bandwidth=1e30, fma={kind: 1e3}).limit(p)
    assert limit.seconds == pytest.approx(factor * p.macs / 1e3)


def test_without_a_peak_bytes_are_the_limit() -> None:
    p = problem(31)
    assert Ceilings("cpu", 1, 1e9, {"float64": 1.0}).limit(p) == timing.Limit(p.least_bytes / 1e9, "bytes")


def test_ceilings_are_asked_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []

    def peak(kind: str, num_threads: int, seconds: float) -> float:
        asked.append((kind, num_threads, seconds))
        if kind == "float16":
            raise ValueError("no loop for that")
        return 5.0

    monkeypatch.setattr(cpu, "peak_fma", peak)
    copies = []

    def copy(size: int, threads: int, repeats: int) -> float:
        copies.append(repeats)
        return float(size * threads)

    monkeypatch.setattr(cpu, "copy_bandwidth", copy)
    for size in (128 << 20, 480 << 20, 1920 << 20):
        monkeypatch.setattr(timing, "streaming_bytes", lambda size=size: size)
        asked.clear()
        found = timing.measure_ceilings(["float16", "float32"], num_threads=3, seconds=0.25)
        assert asked == [("float16", 3, 0.25), ("float32", 3, 0.25)]
        assert found == Ceilings("cpu", 3, 3.0 * size, {"float32": 5.0})
    assert copies == [15, 4, 3]


@pytest.mark.parametrize(
    ("size", "rate", "repeats"), [(1000, 1e9, 200), (10**6, 1e9, 75), (10**9, 1e9, 3), (10, 0.0, 3)]
)
def test_copies_of_a_size_are_repeated_as_time_allows(
    monkeypatch: pytest.MonkeyPatch, size: int, rate: float, repeats: int
) -> None:
    asked = []

    def copy_bandwidth(size: int, num_threads: int, repeats: int) -> float:
        asked.append((size, num_threads, repeats))
        return rate * len(asked)

    monkeypatch.setattr(cpu, "copy_bandwidth", copy_bandwidth)
    assert timing.measure_copy(size, num_threads=3, seconds=0.3) == 2 * rate
    assert asked == [(size, 3, 1), (size, 3, repeats)]


@pytest.mark.skipif(cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built")
def test_the_engine_measures_ceilings() -> None:
    found = timing.measure_ceilings(["float32", "float64", "int32", "float16"], num_threads=1, seconds=0.02)
    assert set(found.fma) == {"float32", "float64", "int32"}
    assert all(math.isfinite(v) and v > 0 for v in (found.bandwidth, *found.fma.values()))


def test_streaming_arrays_are_larger_than_every_cache() -> None:
    assert timing.streaming_bytes() >= 128 << 20


@pytest.mark.parametrize(
    ("text", "size"), [("48K\n", 49152), ("32M", 32 << 20), ("1G", 1 << 30), ("512", 512)]
)
def test_cache_sizes_are_read(text: str, size: int) -> None:
    assert timing._cache_bytes(text) == size
