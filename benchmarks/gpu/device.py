"""What the experiments run on: a GPU through CuPy, or the emulator, which shows that they run and nothing more."""

from __future__ import annotations

import os
from typing import Any, Protocol

import click
import numpy as np

from convpar.backends.gpu import executors
from convpar.bench import machine
from convpar.timing import Call, CpuTimer, GpuTimer, Timer, measure


class NothingToMeasure(click.ClickException):
    """There is no GPU, or what was asked for would make no results."""

    exit_code = 2

    def __init__(self, reason: str) -> None:
        super().__init__(f"nothing to measure: {reason}")


class Place(Protocol):
    """Where device arrays are.

    Attributes
    ----------
    xp : module
        NumPy or CuPy, for arrays there.
    emulated : bool
        Times mean nothing.
    exhausted : tuple of exception types
        What allocating raises when the device's memory is full.
    """

    xp: Any
    emulated: bool
    exhausted: tuple[type[BaseException], ...]

    def describe(self) -> str:
        """The device and what drives it, in a line."""
        ...

    def versions(self) -> dict[str, str]:
        """Name -> version of the libraries between convpar and the device."""
        ...

    def timer(self) -> Timer:
        """A timer of work on the device, that finds the caches cold."""
        ...

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """A device array in host memory."""
        ...

    def synchronize(self) -> None:
        """Wait for all work on the device."""
        ...

    def release(self) -> None:
        """Give memory that no array has any more back to the device."""
        ...

    def host_bandwidth(self, size: int) -> tuple[float, float]:
        """Bytes per second of one copy of `size` bytes from and to pinned host memory: (in, out)."""
        ...


class CudaPlace:
    """The current GPU."""

    emulated: bool = False

    def __init__(self) -> None:
        import cupy

        self.xp: Any = cupy
        self.exhausted: tuple[type[BaseException], ...] = (cupy.cuda.memory.OutOfMemoryError,)

    def describe(self) -> str:
        """Model, driver and toolkit."""
        versions = self.versions()
        return f"{machine.graphics()}: " + ", ".join(f"{k} {v}" for k, v in versions.items())

    def versions(self) -> dict[str, str]:
        """CuPy's, the runtime's and the driver's."""
        runtime = self.xp.cuda.runtime

        def dotted(number: int) -> str:
            return f"{number // 1000}.{number % 1000 // 10}"

        major, minor = self.xp.cuda.nvrtc.getVersion()
        return {
            "cupy": self.xp.__version__,
            "nvrtc": f"{major}.{minor}",
            "runtime": dotted(runtime.runtimeGetVersion()),
            "driver": dotted(runtime.driverGetVersion()),
        }

    def timer(self) -> Timer:
        """Events, the L2 cache overwritten before each call."""
        return GpuTimer()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy."""
        return np.asarray(self.xp.asnumpy(array))

    def synchronize(self) -> None:
        """Of the current device."""
        self.xp.cuda.Device().synchronize()

    def release(self) -> None:
        """Empties CuPy's pool."""
        self.xp.get_default_memory_pool().free_all_blocks()

    def host_bandwidth(self, size: int) -> tuple[float, float]:
        """Median of several copies each way."""
        import convpar

        device, host = self.xp.zeros(size, self.xp.uint8), convpar.empty_pinned(size, np.uint8)
        host[...] = 1
        timer = GpuTimer(flush=False)
        calls: tuple[Call, Call] = (lambda: device.set(host), lambda: device.get(out=host, blocking=False))
        into, out = (size / measure(call, timer=timer).median for call in calls)
        return into, out


class EmulatedPlace:
    """Host memory that plays the device's; see `convpar.backends.gpu.executors.emulator`."""

    xp: Any = np
    emulated: bool = True
    exhausted: tuple[type[BaseException], ...] = ()

    def describe(self) -> str:
        """What it is not."""
        return "the emulator: its times say nothing"

    def versions(self) -> dict[str, str]:
        """None."""
        return {}

    def timer(self) -> Timer:
        """The host's clock."""
        return CpuTimer()

    def to_host(self, array: Any) -> np.ndarray[Any, Any]:
        """The array."""
        return np.asarray(array)

    def synchronize(self) -> None:
        """Nothing is under way."""

    def release(self) -> None:
        """Nothing is kept."""

    def host_bandwidth(self, size: int) -> tuple[float, float]:
        """Of a copy in host memory."""
        source, target = np.zeros(size, np.uint8), np.empty(size, np.uint8)
        rate = size / measure(lambda: np.copyto(target, source), repeats=3).median
        return rate, rate


def find() -> Place:
    """The place that ``CONVPAR_GPU`` asks for.

    Raises
    ------
    NothingToMeasure
        This machine hasn't got it.
    """
    executor = executors.select()
    reason = executor if isinstance(executor, str) else executor.unavailable()
    if reason is not None:
        raise NothingToMeasure(reason)
    emulated = os.environ.get(executors.VARIABLE, "").startswith("emulate")
    return EmulatedPlace() if emulated else CudaPlace()
