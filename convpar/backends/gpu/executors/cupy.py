"""Runs launches on a GPU through CuPy, on the arrays' device and the current stream; it waits only where it is told to.

Kernels are compiled by NVRTC at first use and kept in CuPy's disk cache for the next process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from operator import attrgetter
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


@cache
def _cuda() -> Any:
    import cupy

    return cupy.cuda


@cache
def _launch_kernel() -> Any:
    # CuPy's own Function finds out the type of each argument anew in every launch, which takes longer than launching.
    from cupy_backends.cuda.api import driver

    return driver.launchKernel


class _Kernel:
    """A kernel in its module. It is made, and its methods are called, with its device as the current one."""

    def __init__(self, launch: Launch) -> None:
        import cupy

        module = cupy.RawModule(code=unit(launch), options=(STANDARD,), backend="nvrtc")
        self._raw: Any = module.get_function(entry_name(launch))
        self.function: int | None = self._raw.kernel.ptr
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
        with self._lock:
            if size > self._shared:
                self._raw.max_dynamic_shared_size_bytes = size
                self._shared = size


_NUMBERS = struct.Struct("9q")
"""The arguments before the `Problem`."""


class _Arguments:
    """The arguments of a launch in memory, and the addresses of each, as the driver wants them."""

    __slots__ = ("_addresses", "addresses", "values")

    def __init__(self, parameters: np.ndarray[Any, Any]) -> None:
        self.values = ctypes.create_string_buffer(_NUMBERS.size + parameters.nbytes)
        first = ctypes.addressof(self.values)
        ctypes.memmove(first + _NUMBERS.size, parameters.ctypes.data, parameters.nbytes)
        places = range(first, first + _NUMBERS.size + 1, 8)
        self._addresses = (ctypes.c_void_p * len(places))(*places)
        self.addresses = ctypes.addressof(self._addresses)


class _Loaded:
    """A launch with its kernel; made with its device as the current one.

    Attributes
    ----------
    kernel : _Kernel
    banks : Banks
    shape : tuple of int
        Grid, block and bytes of shared memory.
    idle : list of _Arguments
        Those that no host thread is filling in or launching with.
    """

    __slots__ = ("_parameters", "banks", "idle", "kernel", "shape")

    def __init__(self, kernel: _Kernel, launch: Launch) -> None:
        kernel.allow_shared(launch.shared)
        self.kernel = kernel
        self.banks = kernel.banks
        self.shape = (*launch.grid, *launch.block, launch.shared)
        self._parameters = launch.parameters()
        self.idle: list[_Arguments] = []

    def arguments(self) -> _Arguments:
        """New ones, for a host thread that finds none idle."""
        return _Arguments(self._parameters)


class _Event:
    def __init__(self, stream: Any, timed: bool) -> None:
        self.event = _cuda().Event(disable_timing=not timed)
        self.event.record(stream)

    def synchronize(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return float(_cuda().get_elapsed_time(earlier.event, self.event)) * 1e-3


_PER_THREAD = 2
"""CUDA's handle for the default stream of whichever thread uses it."""


class _Queue:
    __slots__ = ("_launch", "_pointer", "_runtime", "order", "stream")

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self._pointer: int = stream.ptr
        self._runtime = _cuda().runtime
        self._launch = _launch_kernel()
        # Holding a stream of CuPy's own keeps it; somebody else may destroy an external one, and make another at
        # the same address.
        own = type(stream) is _cuda().Stream and self._pointer != _PER_THREAD
        self.order: int | None = self._pointer if own else None

    def launch(self, loaded: Any, numbers: Sequence[int]) -> None:
        try:
            arguments = loaded.idle.pop()
        except IndexError:
            arguments = loaded.arguments()
        _NUMBERS.pack_into(arguments.values, 0, *numbers)
        # The driver has copied the arguments when it returns.
        self._launch(loaded.kernel.function, *loaded.shape, self._pointer, arguments.addresses, 0)
        loaded.idle.append(arguments)

    def fill(self, address: int, size: int, value: int) -> None:
        self._runtime.memsetAsync(address, value, size, self._pointer)

    def _copy(self, to: int, source: int, size: int, kind: int) -> None:
        if size:
            self._runtime.memcpyAsync(to, source, size, kind, self._pointer)

    def copy(self, to: int, source: int, size: int) -> None:
        self._copy(to, source, size, self._runtime.memcpyDeviceToDevice)

    def copy_in(self, to: int, source: np.ndarray[Any, Any]) -> None:
        self._copy(to, source.ctypes.data, source.nbytes, self._runtime.memcpyHostToDevice)

    def copy_out(self, to: np.ndarray[Any, Any], source: int) -> None:
        self._copy(to.ctypes.data, source, to.nbytes, self._runtime.memcpyDeviceToHost)

    def allocate(self, size: int) -> Any:
        cuda = _cuda()
        if cuda.get_current_stream() is self.stream:
            return cuda.alloc(size)
        # CuPy's pool gives memory back to the stream that was current when it was taken.
        with self.stream:
            return cuda.alloc(size)

    def capturing(self) -> bool:
        # The default stream, 0 or 1, can't.
        return self._pointer > 1 and bool(self._runtime.streamIsCapturing(self._pointer))

    def record(self, *, timed: bool = False) -> _Event:
        return _Event(self.stream, timed)

    def wait(self, event: Any) -> None:
        self.stream.wait_event(event.event)

    def synchronize(self) -> None:
        self.stream.synchronize()


class _Thread(threading.local):
    """What a host thread has used: for each device the last queue."""

    def __init__(self) -> None:
        self.queues: dict[int, _Queue] = {}


class CupyExecutor:
    """An executor on CUDA devices; see `convpar.backends.gpu.executors.Executor`."""

    def __init__(self) -> None:
        self._kernels: Memo[_Kernel] = Memo()
        atexit.register(self._release)
        self._limits: dict[int, Limits] = {}
        self._idle: dict[int, list[_Queue]] = {}
        self._thread = _Thread()
        self._lock = threading.Lock()

    @cached_property
    def _cuda(self) -> Any:
        return _cuda()

    def _release(self) -> None:
        # A module that is unloaded while the interpreter is taken apart finds no CuPy any more.
        for kernel in self._kernels.made():
            kernel.release()

    def unavailable(self) -> str | None:
        """It needs CuPy and a GPU."""
        return _missing()

    def current_device(self) -> int:
        """CuPy's."""
        return self._cuda.runtime.getDevice()  # type: ignore[no-any-return]

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """CuPy's way to make it the current one."""
        return self._cuda.Device(device)  # type: ignore[no-any-return]

    def limits(self, device: int) -> Limits:
        """As the driver tells them."""
        found = self._limits.get(device)
        if found is None:
            found = self._limits[device] = _limits(device)
        return found

    def load(self, launch: Launch, device: int) -> _Loaded:
        """Compiled by NVRTC, or loaded from CuPy's disk cache."""
        with self.on(device):
            kernel = self._kernels.get((device, identity(launch)), lambda: _Kernel(launch))
            return _Loaded(kernel, launch)

    def queue(self, device: int, stream: Any) -> _Queue:
        """`stream`, or the calling thread's current stream."""
        if stream is None:
            stream = self._cuda.get_current_stream()
        last = self._thread.queues.get(device)
        if last is not None and last.stream is stream:
            return last
        if last is None:
            # The driver, unlike the runtime, doesn't by itself give a thread the device's context.
            self._cuda.runtime.memGetInfo()
        queue = self._thread.queues[device] = _Queue(stream)
        return queue

    @contextlib.contextmanager
    def own_queues(self, device: int, count: int) -> Iterator[Sequence[_Queue]]:
        """Streams that don't wait for the default stream, kept for the next caller."""
        with self._lock:
            idle = self._idle.setdefault(device, [])
            queues = [idle.pop() for _ in range(min(count, len(idle)))]
        with self.on(device):
            self.queue(device, None)
            while len(queues) < count:
                queues.append(_Queue(self._cuda.Stream(non_blocking=True)))
            try:
                yield queues
            finally:
                # Also after an error: what the queues still use is freed next.
                for queue in queues:
                    queue.synchronize()
                with self._lock:
                    self._idle[device] += queues

    address = staticmethod(attrgetter("data.ptr"))
    """The array's device pointer."""

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
