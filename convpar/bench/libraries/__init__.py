"""How each library is driven: one file each, imported only in the process that runs it.

A library turns a case into jobs, one for each setting worth trying (a layout, a
method, a thread count), or says why it can't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from convpar.cases import Case
from convpar.problem import Problem
from convpar.timing import Call, CpuTimer, Timer

Array = npt.NDArray[Any]

CONVPAR = "convpar"

LIBRARIES: Mapping[str, str] = {
    CONVPAR: "convpar.bench.libraries.own:Convpar",
    "scipy": "convpar.bench.libraries.scipy_signal:ScipySignal",
    "ndimage": "convpar.bench.libraries.ndimage:Ndimage",
    "opencv": "convpar.bench.libraries.opencv:OpenCV",
    "torch": "convpar.bench.libraries.pytorch:TorchCpu",
    "torch-cuda": "convpar.bench.libraries.pytorch:TorchCuda",
    "cupy": "convpar.bench.libraries.cupy_scipy:CuPy",
}
"""Name -> where its class is. Constructed with the number of threads it may use."""

PEERS: Mapping[str, Literal["cpu", "gpu"]] = {
    "scipy": "cpu",
    "ndimage": "cpu",
    "opencv": "cpu",
    "torch": "cpu",
    "torch-cuda": "gpu",
    "cupy": "gpu",
}
"""The libraries that convpar is compared with, and the device of each."""

SMALL = 10_000_000
"""MACs below which a library is also tried with one thread: waking a second may cost more than it brings."""


ONE_THREAD = ", 1 thread"
"""What the name of such a setting ends with."""


class Cannot(Exception):
    """The library can't serve the case, or isn't there; the message says why."""


@dataclass(slots=True)
class Job:
    """A library, a case and a setting, ready to be called.

    Attributes
    ----------
    call : callable
        Runs it once, and nothing else: what is timed.
    answer : callable
        The answer of the last call as a NumPy array (N, OC, OH, OW).
    out : array, or None
        What `call` writes to, where it can be given; overwritten before an answer is judged.
    contract : {"elementwise", "normwise"}
        What its rounding errors follow.
    factor : float
        By which its errors may exceed the contract's bound.
    rounding : {"nearest", "truncate"}
        How it converts sums to integers.
    notes : tuple of str
        What differs from what was asked, for people to read.
    chose : str
        What it picked by itself, where it says.
    threads : int, or None
        Threads it uses in this setting, where that isn't what `Library.about` says.
    before : callable, or None
        Run before each sample, untimed.
    timer : Timer
    """

    call: Call
    answer: Callable[[], Array]
    out: Any = None
    contract: Literal["elementwise", "normwise"] = "elementwise"
    factor: float = 1.0
    rounding: Literal["nearest", "truncate"] = "nearest"
    notes: tuple[str, ...] = ()
    chose: str = ""
    threads: int | None = None
    before: Call | None = None
    timer: Timer = field(default_factory=CpuTimer)


class Library(Protocol):
    """What a class in `LIBRARIES` offers."""

    def __init__(self, num_threads: int) -> None: ...

    def about(self) -> dict[str, Any]:
        """At least ``version`` and ``threads``, the number it will really use; `Cannot` if it isn't there."""
        ...

    def settings(self, case: Case) -> list[str]:
        """Names of the settings worth trying; `Cannot` if there is none."""
        ...

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """Everything but the call itself; `Cannot` if the setting can't serve the case."""
        ...


def keep(
    call: Callable[[], Any], to_numpy: Callable[[Any], Array], problem: Problem
) -> tuple[Call, Callable[[], Array]]:
    """(call, answer) of a library that returns its answer instead of taking an output array."""
    kept: list[Any] = [None]

    def run() -> None:
        kept[0] = call()

    return run, lambda: to_numpy(kept[0]).reshape(problem.out_shape)


def pixels_of(x: Array) -> Array:
    """(N, C, H, W) as (N, H, W, C) in memory."""
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1))


def planes_of(y: Array) -> Array:
    """(H, W, C) or (N, H, W, C) as (1, C, H, W) or (N, C, H, W)."""
    return np.moveaxis(y if y.ndim == 4 else y[None], -1, 1)


def is_plane(problem: Problem) -> bool:
    """Whether there is one image, one channel and one filter: all that image libraries know."""
    return problem.n == problem.c == problem.oc == 1


def one_plane(problem: Problem) -> None:
    """Raise `Cannot` unless the problem is one that libraries for single images know."""
    p = problem
    if not is_plane(p):
        raise Cannot("one image with one channel and one filter only")
    if p.stride != (1, 1):
        raise Cannot("no stride")
    if p.dilation != (1, 1):
        raise Cannot("no dilation")


def padding_kind(problem: Problem) -> Literal["valid", "same", "full"] | None:
    """The name of the problem's padding, None if it has none."""
    above, left = problem.extent[0] - 1, problem.extent[1] - 1
    names: dict[tuple[int, ...], Literal["valid", "same", "full"]] = {
        (above, above, left, left): "full",
        (above // 2, above - above // 2, left // 2, left - left // 2): "same",
        (0, 0, 0, 0): "valid",
    }
    return names.get(problem.padding) if problem.stride == (1, 1) else None


def centred_alike(problem: Problem) -> bool:
    """Whether a convolution with the turned filter has its centre where our cross-correlation has."""
    return padding_kind(problem) != "same" or (problem.kh % 2 == 1 and problem.kw % 2 == 1)


def correlated(problem: Problem, w: Array) -> Array:
    """The filter to cross-correlate with: turned round where the problem is a convolution."""
    return np.ascontiguousarray(w[:, :, ::-1, ::-1]) if problem.flip else w


def rank_one(w: Array) -> tuple[Array, Array]:
    """Column and row whose product is the separable filter `w`, in its type."""
    taps = w[0, 0].astype(np.float64)
    i, j = np.unravel_index(np.argmax(np.abs(taps)), taps.shape)
    return taps[:, j].astype(w.dtype), (taps[i] / taps[i, j]).astype(w.dtype)
