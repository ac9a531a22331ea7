"""Arrays from wherever they come: NumPy, CuPy, DLPack, the array interfaces, plain sequences."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from .backend import Device
from .problem import check_dtype

CPU = Device("cpu", 0)

NATIVE: set[type] = {np.ndarray}
"""Types that are used as they are and known at a glance: NumPy's array and, once one has been seen, CuPy's."""

_DLPACK_CPU = (1, 3)  # host memory, and host memory pinned for CUDA
_DLPACK_CUDA = (2, 13)


def is_gpu_array(a: Any) -> bool:
    """Whether `a` is a CuPy array; doesn't import CuPy."""
    cupy = sys.modules.get("cupy")
    if cupy is None or not isinstance(a, cupy.ndarray):
        return False
    NATIVE.add(cupy.ndarray)
    return True


def is_native(a: Any) -> bool:
    """Whether `a` is a NumPy or CuPy array, used as it is."""
    return type(a) is np.ndarray or is_gpu_array(a)


def device_of(a: Any) -> Device:
    """Where a NumPy or CuPy array lives."""
    return CPU if isinstance(a, np.ndarray) else GPUS[a.data.device_id]


class _Gpus(dict[int, Device]):
    def __missing__(self, ordinal: int) -> Device:
        made = self[ordinal] = Device("gpu", ordinal)
        return made


GPUS = _Gpus()
"""CuPy's number of a GPU -> the device, the same object every time."""


def on(device: Device) -> contextlib.AbstractContextManager[Any]:
    """Inside it, what CuPy makes is made on `device`, whatever the current one is."""
    if device.kind == "cpu":
        return contextlib.nullcontext()
    import cupy

    return cupy.cuda.Device(device.ordinal)  # type: ignore[no-any-return]


def empty(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A new array on `device`."""
    if device.kind == "cpu":
        return np.empty(shape, dtype)
    cupy = module_of(device)
    if cupy.cuda.runtime.getDevice() == device.ordinal:
        return cupy.empty(shape, dtype)
    with on(device):
        return cupy.empty(shape, dtype)


def module_of(device: Device) -> Any:
    """NumPy or CuPy, by device."""
    if device.kind == "cpu":
        return np
    import cupy

    return cupy


def current_stream(*arrays: Any) -> contextlib.AbstractContextManager[Any]:
    """Inside it, CuPy's current stream is the one where work on the arrays of a call belongs.

    That is torch's current stream where the first of `arrays`, x, or the last, out, is a tensor on a GPU: tensors
    are made, used and given back in its order. Where tensors meet CuPy arrays, the streams of both libraries wait
    for each other at both ends, since memory goes back to either in the order of its own stream.

    Parameters
    ----------
    *arrays : array or None
        x, w, bias, out
    """
    tensors = [a for a in arrays if _is_torch(a) and a.device.type == "cuda"]
    if not tensors:
        return contextlib.nullcontext()
    on_torchs = any(a is tensors[0] or a is tensors[-1] for a in (arrays[0], arrays[-1]))
    return _beside_torch(tensors[0].device.index, on_torchs, any(map(is_gpu_array, arrays)))


@contextlib.contextmanager
def _beside_torch(ordinal: int, on_torchs: bool, mixed: bool) -> Iterator[None]:
    """Inside it, torch's current stream of the device is CuPy's, or CuPy's own."""
    try:
        import cupy
    except ImportError:
        # `as_native` says so, and in which argument.
        yield
        return
    ours = cupy.cuda.get_current_stream(ordinal)
    pointer = sys.modules["torch"].cuda.current_stream(ordinal).cuda_stream
    if pointer == ours.ptr:
        yield
        return
    torchs = _stream(pointer, ordinal)
    inside, other = (torchs, ours) if on_torchs else (ours, torchs)
    with cupy.cuda.Device(ordinal), inside:
        if mixed:
            inside.wait_event(other.record(cupy.cuda.Event(disable_timing=True)))
        try:
            yield
        finally:
            # Also after an error: some of the work may be under way.
            if mixed:
                other.wait_event(inside.record(cupy.cuda.Event(disable_timing=True)))


@lru_cache(maxsize=256)
def _stream(pointer: int, ordinal: int) -> Any:
    """Somebody else's stream for CuPy, which doesn't destroy it."""
    import cupy

    if not pointer:
        return cupy.cuda.Stream.null

    class Lent(cupy.cuda.ExternalStream):  # type: ignore[misc]
        # ExternalStream's own constructor warns, from CuPy 14 on, of a successor that destroys what it was lent.
        def __init__(self) -> None:
            super(cupy.cuda.ExternalStream, self).__init__(pointer, ordinal)

    return Lent()


class _NoCupy(ImportError):
    """An array lives on a GPU, and CuPy can't be imported."""


def as_native(a: Any, name: str) -> Any:
    """`a` as a NumPy or CuPy array over the same memory where possible.

    Raises
    ------
    TypeError
        It is a masked array, or nothing that can be seen as an array of numbers; what was raised on
        the way is the error's cause.
    """
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array, whose mask convpar can't honour; fill it first")
    if isinstance(a, np.ndarray):
        return a.view(np.ndarray)
    if is_gpu_array(a):
        return a
    try:
        made = _seen_as_array(a)
    except _NoCupy as e:
        raise TypeError(f"{name} lives on a GPU, and CuPy, which convpar needs there, is missing: {e}") from e
    except MemoryError:
        raise
    except Exception as e:
        # Whatever the caller's own class raises.
        usual = isinstance(e, (TypeError, ValueError, RuntimeError, BufferError))
        raise TypeError(f"{name} can't be seen as an array: {e if usual else repr(e)}") from e
    if made.dtype.kind in "OSUMm":
        raise TypeError(f"{name} must be an array of numbers, not {_name(a)} of dtype {made.dtype}")
    return made


def _seen_as_array(a: Any) -> Any:
    if _is_torch(a) and str(a.dtype) == "torch.bfloat16" and a.device.type == "cpu" and not a.requires_grad:
        # NumPy knows the type only by its bits.
        bits = a.view(sys.modules["torch"].uint16)
        return np.asarray(bits).view(check_dtype("bfloat16", "dtype"))
    device_kind = int(a.__dlpack_device__()[0]) if hasattr(a, "__dlpack_device__") else None
    if device_kind in _DLPACK_CUDA or (device_kind is None and hasattr(a, "__cuda_array_interface__")):
        try:
            import cupy
        except ImportError as e:
            raise _NoCupy(e) from e
        return cupy.from_dlpack(a) if device_kind is not None else cupy.asarray(a)
    if device_kind in _DLPACK_CPU and not hasattr(a, "__array__") and not hasattr(a, "__array_interface__"):
        return np.from_dlpack(a)
    return np.asarray(a)


def as_output(a: Any) -> Any:
    """`a` as a NumPy or CuPy array to write its elements through.

    Raises
    ------
    TypeError
        It gives out only copies of its elements, as a list does.
    """
    made = as_native(a, "out")
    # What makes a copy for every look makes another one now.
    if isinstance(made, np.ndarray) and made.size and not np.may_share_memory(made, as_native(a, "out")):
        raise TypeError(f"out must be an array that can be written in place, not {_name(a)}")
    return made


def exporter(like: Any) -> Callable[[Any], Any]:
    """A function that gives a result the kind of array that `like` is.

    The function raises TypeError where that kind of array has no such element type.
    """
    if isinstance(like, np.ndarray) or is_gpu_array(like):
        return _same
    if _is_torch(like):
        convert = _to_torch
    elif hasattr(like, "__array_namespace__") and hasattr(like, "__dlpack__"):
        convert = getattr(like.__array_namespace__(), "from_dlpack", _same)
    else:
        return _same

    def export(y: Any) -> Any:
        # Not every library knows negative strides; torch ends the process on them.
        if any(stride < 0 for stride in y.strides):
            y = y.copy()
        try:
            return convert(y)
        except (BufferError, TypeError, RuntimeError) as e:
            raise TypeError(f"the result has dtype {y.dtype}, which {_name(like)} can't hold: {e}") from e

    return export


def _same(y: Any) -> Any:
    return y


def _is_torch(a: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(a, torch.Tensor)


def _to_torch(y: Any) -> Any:
    torch = sys.modules["torch"]
    if y.dtype.name == "bfloat16":
        return torch.from_dlpack(y.view(np.uint16)).view(torch.bfloat16)
    return torch.from_dlpack(y)


def _name(a: Any) -> str:
    return type(a).__name__


def overlap_inside(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether two elements of an array may share memory (broadcast or overlapping windows)."""
    if 0 in shape:
        return False
    reach = itemsize
    for stride, n in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride < reach:
            return True
        reach += stride * (n - 1)
    return False


def share_memory(a: Any, b: Any) -> bool:
    """Whether two NumPy arrays share an element; True if that takes too long to tell."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
