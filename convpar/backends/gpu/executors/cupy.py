"""Runs launches on a GPU through CuPy, on the arrays' device and the current stream; it waits only where it is told to.

Kernels are compiled by NVRTC at first use and kept in CuPy's disk cache for the next process.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import numpy as np

from ..compile import CONSTANT_BYTES, STANDARD, Memo, entry_name, identity, unit
from ..launch import PLAIN_SHARED, Launch, Limits
from . import Banks


@cache
def _missing() -> str | None:
    if importlib.util.find_spec("cupy") is None:
        return (
            "CuPy is not installed; install convpar[cuda13x] or convpar[cuda12x], by the CUDA version that the "
            "driver supports, or set CONVPAR_GPU=emulate to run the kernels on the CPU"
        )
    try:
        import cupy

        found = cupy.cuda.is_available()
    except Exception as e:
        # A broken installation raises whatever its missing library makes it raise.
        return f"CuPy can't be used ({type(e).__name__}: {e}); set CONVPAR_GPU=emulate to run the kernels on the CPU"
    if not found:
        return "CuPy finds no GPU; set CONVPAR_GPU=emulate to run the kernels on the CPU"
    return None


class _Kernel:
    """A kernel in its module. It is made, and its methods are called, with its device as the current one."""

    def __init__(self, launch: Launch) -> None:
        import cupy

        module = cupy.RawModule(code=unit(launch), options=(STANDARD,), backend="nvrtc")
        self._raw: Any = module.get_function(entry_name(launch))
        self.function: Any = self._raw.kernel
        self._shared = PLAIN_SHARED
        self._lock = threading.Lock()
        # Without filters there, nobody asks for constant memory, and the compiler may have dropped it.
        address = module.get_global("constant_bytes").ptr if launch.constant else 0
        self.banks = Banks(address, CONSTANT_BYTES if launch.constant else 0)

    def release(self) -> None:
        """Let go of the module; the kernel can't be launched again."""
        self.function = self._raw = None

    def allow_shared(self, size: int) -> None:
        """See that a launch may ask for `size` bytes of shared memory."""
        if size > self._shared:
            with self._lock:
                if size > self._shared:
                    self._raw.max_dynamic_shared_size_bytes = size
                    self._shared = size


class _Event:
    def __init__(self, stream: Any, timed: bool) -> None:
        import cupy

        self.event = cupy.cuda.Event(disable_timing=not timed)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        import cupy

        return float(cupy.cuda.get_elapsed_time(earlier.event, self.event)) * 1e-3


class _Queue:
    def __init__(self, device: int, stream: Any) -> None:
        import cupy

        self._cuda = cupy.cuda
        self._device = device
        self._stream = stream

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        if self._cuda.runtime.getDevice() == self._device:
            return contextlib.nullcontext()
        return self._cuda.Device(self._device)  # type: ignore[no-any-return]

    def launch(self, kernel: Any, launch: Launch, arguments: Sequence[Any]) -> None:
        with self._current():
            kernel.allow_shared(launch.shared)
            kernel.function(launch.grid, launch.block, arguments, launch.shared, self._stream)

    def fill(self, address: int, size: int, value: int) -> None:
        with self._current():
            self._cuda.runtime.memsetAsync(address, value, size, self._stream.ptr)

    def _copy(self, to: int, source: int, size: int, kind: int) -> None:
        if size:
            with self._current():
                self._cuda.runtime.memcpyAsync(to, source, size, kind, self._stream.ptr)

    def copy(self, to: int, source: int, size: int) -> None:
        self._copy(to, source, size, self._cuda.runtime.memcpyDeviceToDevice)

    def copy_in(self, to: int, source: np.ndarray[Any, Any]) -> None:
        self._copy(to, source.ctypes.data, source.nbytes, self._cuda.runtime.memcpyHostToDevice)

    def copy_out(self, to: np.ndarray[Any, Any], source: int) -> None:
        self._copy(to.ctypes.data, source, to.nbytes, self._cuda.runtime.memcpyDeviceToHost)

    def allocate(self, size: int) -> Any:
        # CuPy's pool gives memory back to the stream that was current when it was taken.
        with self._current(), self._stream:
            return self._cuda.alloc(size)

    def record(self, *, timed: bool = False) -> _Event:
        with self._current():
            return _Event(self._stream, timed)

    def wait(self, event: Any) -> None:
        with self._current():
            self._stream.wait_event(event.event)

    def synchronize(self) -> None:
        with self._current():
            self._stream.synchronize()


class CupyExecutor:
    """An executor on CUDA devices; see `convpar.backends.gpu.executors.Executor`."""

    def __init__(self) -> None:
        self._kernels: Memo[_Kernel] = Memo()
        atexit.register(self._release)
        self._limits: dict[int, Limits] = {}
        self._idle: dict[int, list[_Queue]] = {}
        self._lock = threading.Lock()

    def _release(self) -> None:
        # A module that is unloaded while the interpreter is taken apart finds no CuPy any more.
        for kernel in self._kernels.made():
            kernel.release()

    def unavailable(self) -> str | None:
        """It needs CuPy and a GPU."""
        return _missing()

    def current_device(self) -> int:
        """CuPy's."""
        import cupy

        return int(cupy.cuda.runtime.getDevice())

    def limits(self, device: int) -> Limits:
        """As the driver tells them."""
        found = self._limits.get(device)
        if found is None:
            found = self._limits[device] = _limits(device)
        return found

    def load(self, launch: Launch, device: int) -> _Kernel:
        """Compiled by NVRTC, or loaded from CuPy's disk cache."""
        import cupy

        def make() -> _Kernel:
            with cupy.cuda.Device(device):
                return _Kernel(launch)

        return self._kernels.get((device, identity(launch)), make)

    def queue(self, device: int, stream: Any) -> _Queue:
        """`stream`, or the calling thread's current stream on `device`."""
        import cupy

        if stream is None:
            if cupy.cuda.runtime.getDevice() == device:
                stream = cupy.cuda.get_current_stream()
            else:
                with cupy.cuda.Device(device):
                    stream = cupy.cuda.get_current_stream()
        return _Queue(device, stream)

    @contextlib.contextmanager
    def own_queues(self, device: int, count: int) -> Iterator[Sequence[_Queue]]:
        """Streams that don't wait for the default stream, kept for the next caller."""
        import cupy

        with self._lock:
            idle = self._idle.setdefault(device, [])
            queues = [idle.pop() for _ in range(min(count, len(idle)))]
        with cupy.cuda.Device(device):
            while len(queues) < count:
                queues.append(_Queue(device, cupy.cuda.Stream(non_blocking=True)))
        try:
            yield queues
        finally:
            # Also after an error: what the queues still use is freed next.
            for queue in queues:
                queue.synchronize()
            with self._lock:
                self._idle[device] += queues

    def address(self, array: Any) -> int:
        """The array's device pointer."""
        return int(array.data.ptr)

    def upload(self, array: np.ndarray[Any, Any], device: int) -> Any:
        """A copy, made on a stream of its own, so that nobody's work is waited for."""
        with self.own_queues(device, 1) as (queue,):
            memory = queue.allocate(array.nbytes)
            queue.copy_in(memory.ptr, array)
        return memory

    def pinned(self, size: int) -> np.ndarray[Any, Any]:
        """Page-locked memory from CuPy's pool."""
        import cupy

        return np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size)

    def is_pinned(self, array: np.ndarray[Any, Any]) -> bool:
        """As the driver knows it."""
        import cupy

        runtime = cupy.cuda.runtime
        if not array.size:
            return False
        return bool(runtime.pointerGetAttributes(array.ctypes.data).type == runtime.memoryTypeHost)


def _limits(device: int) -> Limits:
    import cupy

    runtime = cupy.cuda.runtime

    def attribute(name: str) -> int:
        return int(runtime.deviceGetAttribute(getattr(runtime, f"cudaDevAttr{name}"), device))

    capability = cupy.cuda.Device(device).compute_capability
    # float32 lanes of a multiprocessor: one set a quadrant on sm_75 and sm_80, two on the others.
    lanes = 64 if capability in ("75", "80") else 128
    kilohertz = attribute("ClockRate") or 1_500_000
    memory_kilohertz = attribute("MemoryClockRate") or 5_000_000
    name = runtime.getDeviceProperties(device)["name"]
    return Limits(
        name=f"{name.decode() if isinstance(name, bytes) else name} (sm_{capability})",
        threads=attribute("MaxThreadsPerBlock"),
        shared=max(attribute("MaxSharedMemoryPerBlockOptin"), attribute("MaxSharedMemoryPerBlock")),
        constant=attribute("TotalConstantMemory"),
        grid=(attribute("MaxGridDimX"), attribute("MaxGridDimY"), attribute("MaxGridDimZ")),
        fma_rate=attribute("MultiProcessorCount") * lanes * kilohertz * 1e3,
        bandwidth=2 * memory_kilohertz * 1e3 * attribute("GlobalMemoryBusWidth") / 8,
    )
