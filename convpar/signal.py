"""`convolve2d` and `correlate2d` under SciPy's names, defaults and answers.

Facts about SciPy that are reproduced here were read off SciPy 1.17: which operand is the image,
where "same" is cut, what is an error, and that a swapped complex ``correlate2d(mode="valid")``
returns the conjugate of what its definition says.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any

import numpy as np

from .api import conv2d
from .arrays import as_native, device_of, exporter, is_native, module_of, on
from .problem import check_dtype, fill_argument, promotion, shown

__all__ = ["convolve2d", "correlate2d"]

_MODES = ("full", "valid", "same")
_BOUNDARIES = {
    "fill": "fill", "pad": "fill",
    "wrap": "wrap", "circular": "wrap",
    "symm": "symm", "symmetric": "symm",
}  # fmt: skip


def convolve2d(in1: Any, in2: Any, mode: str = "full", boundary: str = "fill", fillvalue: Any = 0) -> Any:
    """Convolve two 2-D arrays, as `scipy.signal.convolve2d`.

    Parameters
    ----------
    in1, in2 : array_like
        Two-dimensional. NumPy in, NumPy out; CuPy in, CuPy out.
    mode : {"full", "valid", "same"}
        All sums that meet both arrays; only those without padding; as many as `in1` has, centred.
        In "valid" one array must be at least as large as the other in every dimension.
    boundary : {"fill", "wrap", "symm"}
        Also "pad", "circular" and "symmetric".
    fillvalue : scalar
        What "fill" pads with.

    Returns
    -------
    array
        In NumPy's promotion of the two types, in which the sums are kept.

    Raises
    ------
    ValueError
        As SciPy: ranks, modes, boundaries, types it doesn't take (bool, float16, object), shapes
        neither of which contains the other, a `fillvalue` outside the result's type. Also an empty
        image with "wrap" or "symm", where SciPy 1.17 ends the interpreter.
    TypeError
        A mode or boundary that can't be a name, and what SciPy takes and convpar doesn't: a masked
        array, whose mask SciPy ignores.
    """
    return _signal(in1, in2, mode, boundary, fillvalue, flip=True)


def correlate2d(in1: Any, in2: Any, mode: str = "full", boundary: str = "fill", fillvalue: Any = 0) -> Any:
    """Cross-correlate two 2-D arrays, as `scipy.signal.correlate2d`; a complex `in2` is conjugated.

    Parameters, result and errors are those of `convolve2d`. "same" pads one row more at the
    bottom than at the top for an `in2` with an even number of rows, and so for columns.
    """
    return _signal(in1, in2, mode, boundary, fillvalue, flip=False)


def _signal(in1: Any, in2: Any, mode: Any, boundary: Any, fillvalue: Any, flip: bool) -> Any:
    name = "convolve2d" if flip else "correlate2d"
    export = exporter(in1)
    a, b = _array(in1, "in1"), _array(in2, "in2")
    if not a.ndim == b.ndim == 2:
        raise ValueError(f"{name} inputs must both be 2-D arrays, not of {a.ndim} and {b.ndim} dimensions")
    for given, known, what in ((mode, _MODES, "mode"), (boundary, _BOUNDARIES, "boundary")):
        if not isinstance(given, str) or given not in known:
            # SciPy looks both up in dictionaries, which refuse what has no hash in their own way.
            error = ValueError if isinstance(given, Hashable) else TypeError
            raise error(f"{what} must be one of {', '.join(known)}, not {shown(given)}")
    swapped = False
    if mode == "valid" and not _holds(a.shape, b.shape):
        if not _holds(b.shape, a.shape):
            raise ValueError(
                "for mode 'valid' one input must be at least as large as the other in every dimension, "
                f"not {a.shape} and {b.shape}"
            )
        a, b, swapped = b, a, True
    if not flip and b.dtype.kind in "cO":
        b = b.conj()
    elif not flip and b.dtype.kind in "SUMm":
        raise TypeError(f"{name} can't conjugate {'in1' if swapped else 'in2'} of dtype {b.dtype}")
    y = _sums(a, b, mode, _BOUNDARIES[boundary], fillvalue, flip, name)
    # Correlation doesn't commute: with the operands swapped the result stands the other way round.
    return export(y[::-1, ::-1] if swapped and not flip else y)


def _holds(shape: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return shape[0] >= other[0] and shape[1] >= other[1]


def _array(a: Any, name: str) -> Any:
    """`a` as an array of anything; what isn't one raises the error that NumPy raises for SciPy."""
    if is_native(a):
        return a
    try:
        return as_native(a, name)
    except TypeError as e:
        if isinstance(a, np.ma.MaskedArray):
            raise
        if e.__cause__ is None:
            return np.asarray(a)  # of no numbers, which is found later, at the place where SciPy finds it
        for kind in (RuntimeError, ValueError):
            if isinstance(e.__cause__, kind):
                raise kind(str(e)) from e
        raise


@lru_cache(256)
def _sum_dtype(x: np.dtype[Any], w: np.dtype[Any], name: str) -> np.dtype[Any]:
    try:
        dtype = promotion(check_dtype(x, "in1"), check_dtype(w, "in2"))
    except TypeError as e:
        raise ValueError(f"{name} is not available for {x} and {w}") from e
    if dtype.kind not in "iufc" or dtype.name == "float16":
        raise ValueError(f"{name} is not available for sums of {dtype}; conv2d may be")
    return dtype


# The same tuple each time: `conv2d` knows a call by its keywords' identities sooner than by their values.
@lru_cache(256)
def _padding(mode: str, flip: bool, kh: int, kw: int) -> tuple[int, int, int, int]:
    if mode == "full":
        return (kh - 1, kh - 1, kw - 1, kw - 1)
    if mode == "valid":
        return (0, 0, 0, 0)
    # The cut from "full" begins at (K-1)//2; seen from the padding, the flip turns it round.
    top, left = (kh // 2, kw // 2) if flip else ((kh - 1) // 2, (kw - 1) // 2)
    return (top, kh - 1 - top, left, kw - 1 - left)


def _sums(x: Any, w: Any, mode: str, boundary: str, fillvalue: Any, flip: bool, name: str) -> Any:
    dtype = _sum_dtype(x.dtype, w.dtype, name)
    (h, width), (kh, kw) = x.shape, w.shape
    if mode == "full":
        shape = (h + kh - 1, width + kw - 1)
    elif mode == "same":
        shape = (h, width)
    else:
        shape = (h - kh + 1, width - kw + 1)
    if min(shape) < 0:
        raise ValueError(f"the result would have the shape {shape}: both inputs are empty")
    if boundary != "fill" and mode != "valid" and 0 in x.shape and 0 not in shape:
        raise ValueError(f"boundary {boundary!r} needs a sample to repeat, and in1 has the shape {x.shape}")
    if boundary != "fill":
        fillvalue = 0  # which nothing looks at
    elif type(fillvalue) is not int or fillvalue != 0:
        fillvalue = _fill(fillvalue, dtype)
    if 0 in x.shape or 0 in w.shape or 0 in shape:
        with on(device_of(x)):
            return module_of(device_of(x)).zeros(shape, dtype)
    padding = _padding(mode, flip, kh, kw)
    return conv2d(x, w, padding=padding, boundary=boundary, flip=flip, fillvalue=fillvalue)


def _fill(value: Any, dtype: Any) -> Any:
    try:
        return fill_argument(value, dtype)
    except TypeError as e:
        # As SciPy answers a text that spells no number, and None for integers; None for floats it reads as NaN.
        if value is None or isinstance(value, str):
            raise ValueError(str(e)) from e
        raise
