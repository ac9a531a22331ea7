"""Arrays from wherever they come: NumPy, CuPy, DLPack, the array interfaces, plain sequences."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .backend import Device
from .problem import check_dtype

CPU = Device("cpu", 0)

_DLPACK_CPU = (1, 3)  # host memory, and host memory pinned for CUDA
_DLPACK_CUDA = (2, 13)


def is_gpu_array(a: Any) -> bool:
    """Whether `a` is a CuPy array; doesn't import CuPy."""
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(a, cupy.ndarray)


def is_native(a: Any) -> bool:
    """Whether `a` is a NumPy or CuPy array, used as it is."""
    return type(a) is np.ndarray or is_gpu_array(a)


def device_of(a: Any) -> Device:
    """Where a NumPy or CuPy array lives."""
    return CPU if isinstance(a, np.ndarray) else Device("gpu", int(a.device.id))


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
    with on(device):
        return module_of(device).empty(shape, dtype)


def module_of(device: Device) -> Any:
    """NumPy or CuPy, by device."""
    if device.kind == "cpu":
        return np
    import cupy

    return cupy


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
    device_kind = None
    try:
        if (
            _is_torch(a)
            and str(a.dtype) == "torch.bfloat16"
            and a.device.type == "cpu"
            and not a.requires_grad
        ):
            # NumPy knows the type only by its bits.
            bits = a.view(sys.modules["torch"].uint16)
            return np.asarray(bits).view(check_dtype("bfloat16", "dtype"))
        if hasattr(a, "__dlpack_device__"):
            device_kind = int(a.__dlpack_device__()[0])
        if device_kind in _DLPACK_CUDA or (device_kind is None and hasattr(a, "__cuda_array_interface__")):
            import cupy

            return cupy.from_dlpack(a) if device_kind is not None else cupy.asarray(a)
        if (
            device_kind in _DLPACK_CPU
            and not hasattr(a, "__array__")
            and not hasattr(a, "__array_interface__")
        ):
            return np.from_dlpack(a)
        made = np.asarray(a)
    except ImportError as e:
        raise TypeError(f"{name} lives on a GPU, and CuPy, which convpar needs there, is missing: {e}") from e
    except (TypeError, ValueError, RuntimeError, BufferError) as e:
        raise TypeError(f"{name} can't be seen as an array: {e}") from e
    if made.dtype.kind in "OSUMm":
        raise TypeError(f"{name} must be an array of numbers, not {_name(a)} of dtype {made.dtype}")
    return made


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


def overlap_inside(a: Any) -> bool:
    """Whether two elements of `a` may share memory (broadcast or overlapping windows)."""
    axes = sorted((abs(s), n) for s, n in zip(a.strides, a.shape, strict=True) if n > 1)
    reach = a.dtype.itemsize
    for stride, n in axes:
        if stride < reach:
            return bool(a.size > 0)
        reach += stride * (n - 1)
    return False


def share_memory(a: Any, b: Any) -> bool:
    """Whether two arrays on one device share an element; True if that takes too long to tell."""
    if isinstance(a, np.ndarray) != isinstance(b, np.ndarray):
        return False
    if not isinstance(a, np.ndarray):
        import cupy

        return bool(cupy.may_share_memory(a, b))
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=100_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
