"""Timing: one timer per device, what to make of the times, and the ceilings to hold them against.

The command line, the benchmarks and the choosers' ``tune=True`` all measure with
these. Seconds and bytes throughout; a "call" takes no arguments.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from .problem import Problem

Call = Callable[[], object]
Key = TypeVar("Key", bound=Hashable)

REPEATS = 15
"""Samples that a median is taken of."""

LEAST_SAMPLE = 1e-3
"""Seconds that one sample should last: shorter calls are repeated inside it."""

COPIED_BYTES = 1 << 31
"""Bytes that copies of arrays beyond the caches read, each way, to measure the bandwidth; but 3 copies at least, and no more than
`REPEATS`."""

LONG_CALL = 100e-3
"""Seconds of a call to which it makes little difference what ran before."""


class Timer(Protocol):
    """How long a call takes on one device."""

    device: Literal["cpu", "gpu"]

    def sample(self, call: Call, number: int = 1) -> float:
        """Seconds per call, the mean of `number` calls one after the other."""
        ...


class CpuTimer:
    """Wall time of calls that have finished when they return.

    Parameters
    ----------
    clock : callable
        Nanoseconds from an arbitrary start; replaced in tests.
    """

    device: Literal["cpu", "gpu"] = "cpu"

    def __init__(self, clock: Callable[[], int] = time.perf_counter_ns) -> None:
        self._clock = clock

    def sample(self, call: Call, number: int = 1) -> float:
        """Seconds per call, the mean of `number` calls one after the other."""
        calls = itertools.repeat(None, number)
        start = self._clock()
        for _ in calls:
            call()
        return (self._clock() - start) / number * 1e-9


class GpuTimer:
    """Time between two events on a CUDA stream, around each call.

    Parameters
    ----------
    stream : cupy.cuda.Stream, optional
        Where the calls put their work; CuPy's current stream at each sample without it.
    flush : bool
        Overwrite the L2 cache before each call, outside the timed interval. Without it,
        arrays that fit in the cache are timed warm.

    Raises
    ------
    ImportError
        CuPy isn't installed.
    """

    device: Literal["cpu", "gpu"] = "gpu"

    def __init__(self, stream: Any = None, *, flush: bool = True) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._stream = stream
        self._scratch = None
        if flush:
            # Twice the cache, so that no line of it survives whatever the replacement policy.
            size = 2 * int(cupy.cuda.Device().attributes["L2CacheSize"])
            self._scratch = cupy.empty(max(size, 1), cupy.uint8)

    def sample(self, call: Call, number: int = 1) -> float:
        """Seconds per call on the device; returns when the last call has finished."""
        stream = self._cuda.get_current_stream() if self._stream is None else self._stream
        pairs = []
        for _ in range(number):
            if self._scratch is not None:
                # Also keeps the device busy while the host gets ahead of it.
                self._scratch.data.memset_async(0, self._scratch.nbytes, stream)
            start, stop = self._cuda.Event(), self._cuda.Event()
            start.record(stream)
            call()
            stop.record(stream)
            pairs.append((start, stop))
        pairs[-1][1].synchronize()
        milliseconds: float = sum(self._cuda.get_elapsed_time(a, b) for a, b in pairs)
        return milliseconds * 1e-3 / number


# -- samples and what to make of them


@dataclass(frozen=True, slots=True)
class Times:
    """Samples of one call, in seconds.

    Attributes
    ----------
    samples : tuple of float
        In the order taken.
    number : int
        Calls averaged in each sample.
    """

    samples: tuple[float, ...]
    number: int = 1

    @property
    def median(self) -> float:
        """The middle sample."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> float:
        """The interquartile range; 0 for a single sample."""
        if len(self.samples) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return high - low

    @property
    def repeats(self) -> int:
        """How many samples there are."""
        return len(self.samples)


def calibrate(timer: Timer, call: Call, *, least: float = LEAST_SAMPLE) -> tuple[int, float]:
    """How many calls make a sample of at least `least` seconds, and how long one call takes.

    Runs the call a few times, so it is also a warm-up.
    """
    number = 1
    while True:
        seconds = timer.sample(call, number)
        if seconds * number >= least or number >= 1 << 20:
            return number, seconds
        # Towards the goal, but not on the word of one short sample.
        number = min(max(2 * number, round(1.2 * least / max(seconds, 1e-9))), 16 * number)


def sampler(timer: Timer, call: Call, *, least: float = LEAST_SAMPLE) -> tuple[Callable[[], float], float]:
    """What takes a sample of at least `least` seconds, and how long one call takes.

    Each begins with as many calls that don't count, unless they are long: what ran before may have taken the caches, or lowered the
    processor's clock, from which it recovers within a millisecond or so, as after a matrix unit was at work.
    """
    # Twice: a call that something else held up says nothing of how many are needed.
    number, seconds = min((calibrate(timer, call, least=least) for _ in range(2)), key=lambda found: found[1])

    def sample() -> float:
        if seconds < LONG_CALL:
            timer.sample(call, number)
        return timer.sample(call, number)

    return sample, seconds


def interleave(
    samplers: Mapping[Key, Callable[[], float]],
    rounds: int | Mapping[Key, int] = REPEATS,
    *,
    before: Call | None = None,
) -> dict[Key, tuple[float, ...]]:
    """Samples of several things in turn: A B C A B C ...

    A drift of the machine then meets all of them alike, where one after the
    other would charge it to whoever came last.

    Parameters
    ----------
    samplers : mapping
        What to call for one sample of each.
    rounds : int or mapping
        How many samples; those with fewer drop out of the later rounds.
    before : callable, optional
        Run before every sample.
    """
    wanted = {key: rounds if isinstance(rounds, int) else rounds[key] for key in samplers}
    taken: dict[Key, list[float]] = {key: [] for key in samplers}
    for turn in range(max(wanted.values(), default=0)):
        for key, take in samplers.items():
            if turn < wanted[key]:
                if before is not None:
                    before()
                taken[key].append(take())
    return {key: tuple(samples) for key, samples in taken.items()}


def measure(call: Call, *, timer: Timer | None = None, repeats: int = REPEATS) -> Times:
    """Time one call by itself: calibrated, warmed up, `repeats` samples on `timer` (the CPU's)."""
    timer = CpuTimer() if timer is None else timer
    number, _ = calibrate(timer, call)
    return Times(tuple(timer.sample(call, number) for _ in range(repeats)), number)


# -- ceilings


@dataclass(frozen=True, slots=True)
class Limit:
    """The shortest time that the ceilings allow a problem.

    Attributes
    ----------
    seconds : float
    by : {"bytes", "arithmetic"}
        Which ceiling it comes from.
    """

    seconds: float
    by: Literal["bytes", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a machine can do at most, as measured.

    Attributes
    ----------
    device : {"cpu", "gpu"}
    num_threads : int
        Threads that were used; 0 on a GPU.
    bandwidth : float
        Bytes per second of a copy too large for any cache, counting both directions.
    fma : mapping of str to float
        Multiply-accumulates per second in registers, by element type. Types that
        weren't measured are missing.
    """

    device: Literal["cpu", "gpu"]
    num_threads: int
    bandwidth: float
    fma: Mapping[str, float] = field(default_factory=dict)

    def limit(self, problem: Problem) -> Limit:
        """The larger of least bytes / bandwidth and MACs / peak.

        The direct method's MACs count, so a method with fewer may go below it, as may
        arrays that stay in a cache. A sum type without a measured peak is limited by bytes only.
        """
        by_bytes = problem.least_bytes / self.bandwidth
        real, factor = _real(problem.sum_dtype)
        peak = self.fma.get(real)
        by_arithmetic = factor * problem.macs / peak if peak else 0.0
        if by_arithmetic > by_bytes:
            return Limit(by_arithmetic, "arithmetic")
        return Limit(by_bytes, "bytes")


def _real(dtype: np.dtype[Any]) -> tuple[str, int]:
    """The real type of a sum and the real products in one of its MACs; signed and unsigned take equally long."""
    if dtype.kind == "c":
        return f"float{4 * dtype.itemsize}", 4
    return dtype.name.removeprefix("u"), 1


def fma_kinds(problems: Iterable[Problem]) -> list[str]:
    """The element types whose peaks the limits of `problems` need."""
    return sorted({_real(problem.sum_dtype)[0] for problem in problems})


def measure_ceilings(
    kinds: Sequence[str] = ("float32",),
    *,
    num_threads: int = 1,
    device: Literal["cpu", "gpu"] = "cpu",
    seconds: float = 0.5,
) -> Ceilings:
    """Measure the two ceilings of this machine, now.

    Parameters
    ----------
    kinds : sequence of str
        Element types to measure the arithmetic peak of; those that the device has no loop for are left out.
    num_threads : int
        CPU threads to measure with.
    device : {"cpu", "gpu"}
    seconds : float
        How long each measurement may run, roughly.

    Raises
    ------
    ImportError
        The compiled engine (CPU) or CuPy (GPU) is missing.
    TypeError, ValueError
        `num_threads` is no integer from 1 to 1024.
    """
    if device == "gpu":
        return Ceilings("gpu", 0, _gpu_copy_bandwidth(), _gpu_peaks(kinds, seconds))
    from .backends import cpu

    peaks = _peaks(lambda kind: cpu.peak_fma(kind, num_threads, seconds), kinds)
    size = streaming_bytes()
    repeats = min(max(COPIED_BYTES // size, 3), REPEATS)
    return Ceilings("cpu", num_threads, cpu.copy_bandwidth(size, num_threads, repeats), peaks)


def measure_copy(size: int, *, num_threads: int = 1, seconds: float = 0.3) -> float:
    """Bytes a second that `num_threads` CPU threads read and write, copying `size` bytes again and again.

    Through the caches or past them, whichever is faster; small arrays stay in them. The best of 3 to 200 copies each way,
    as many as `seconds` allow.

    Raises
    ------
    ImportError
        The compiled engine is missing.
    TypeError, ValueError
        `num_threads` is no integer from 1 to 1024.
    """
    from .backends import cpu

    first = cpu.copy_bandwidth(size, num_threads, 1)
    # A copy moves twice its size, and each repeat is two.
    repeats = min(max(round(seconds * first / (4 * max(size, 1))), 3), 200)
    return max(first, cpu.copy_bandwidth(size, num_threads, repeats))


def _peaks(peak: Callable[[str], float], kinds: Sequence[str]) -> dict[str, float]:
    found = {}
    for kind in kinds:
        try:
            found[kind] = peak(kind)
        except ValueError:
            continue
    return found


def streaming_bytes() -> int:
    """Size of an array that no cache of this machine holds: 4 times the largest, at least 128 MiB."""
    sizes = [
        _cache_bytes(path.read_text())
        for path in Path("/sys/devices/system/cpu").glob("cpu0/cache/index*/size")
    ]
    return max(4 * max(sizes, default=0), 128 << 20)


def _cache_bytes(text: str) -> int:
    units = {"K": 10, "M": 20, "G": 30}
    digits = text.strip()
    return int(digits[:-1]) << units[digits[-1]] if digits[-1] in units else int(digits)


def _gpu_copy_bandwidth() -> float:
    import cupy

    size = 16 * max(int(cupy.cuda.Device().attributes["L2CacheSize"]), 16 << 20)
    source, target = cupy.zeros(size, cupy.uint8), cupy.empty(size, cupy.uint8)
    times = measure(lambda: cupy.copyto(target, source), timer=GpuTimer(flush=False))
    return 2 * size / times.median


def _gpu_peaks(kinds: Sequence[str], seconds: float) -> dict[str, float]:
    from .backends.gpu import ceilings

    return _peaks(lambda kind: ceilings.peak_fma(kind, seconds), kinds)
