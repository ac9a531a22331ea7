"""Answers that owe nothing to convpar's kernels: scipy.signal, reached from any `Problem`.

SciPy convolves one plane, without stride, dilation, groups, channels, mirror or
nearest. Here `numpy.pad` draws the borders (so `convpar.boundary` is checked too),
a dilated filter meets the image phase by phase (zero-stuffing the filter would add
products with samples that no tap touches), strides are slices of the dense answer,
and channels are summed. SciPy only ever sees "valid" on images at least as large as the
filter, where it has no operand swap, no border and no crash on empty images.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import signal

from convpar.problem import Problem, is_integer

Array = npt.NDArray[Any]

_PAD_MODES = {"wrap": "wrap", "symm": "symmetric", "mirror": "reflect", "nearest": "edge"}


class Operands(NamedTuple):
    """What the products are formed of, in native types.

    Attributes
    ----------
    x : ndarray, (N, C, H + top + bottom, W + left + right)
        The padded image.
    w : ndarray, (OC, C/groups, KH, KW)
        The filter, turned so that it cross-correlates.
    bias : ndarray, (OC,)
        Zeros without a bias.
    """

    x: Array
    w: Array
    bias: Array


def operands(problem: Problem, x: Array, w: Array, bias: Array | None) -> Operands:
    """Image, filter and bias in the sum's type, the image padded and the filter unflipped."""
    p = problem
    with np.errstate(all="ignore"):
        xs = pad(p, x.astype(p.sum_dtype))
        ws = w.astype(p.sum_dtype)
        b = np.zeros(p.oc, p.sum_dtype) if bias is None else bias.astype(p.sum_dtype)
    return Operands(xs, ws[:, :, ::-1, ::-1] if p.flip else ws, b)


def pad(problem: Problem, x: Array) -> Array:
    """`x`, already in the sum's type, with its borders written out by `numpy.pad`."""
    top, bottom, left, right = problem.padding
    widths = ((0, 0), (0, 0), (top, bottom), (left, right))
    if not any(problem.padding):
        return x
    if problem.boundary == "fill":
        fill = np.asarray(problem.fillvalue).astype(x.dtype)
        # A broadcast copy keeps a NaN's payload and takes every type that NumPy takes.
        shape = (x.shape[0], x.shape[1], problem.h + top + bottom, problem.w + left + right)
        padded = np.full(shape, fill, x.dtype)
        padded[:, :, top : top + problem.h, left : left + problem.w] = x
        return padded
    if 0 in x.shape[:2]:
        return np.zeros((*x.shape[:2], problem.h + top + bottom, problem.w + left + right), x.dtype)
    return np.pad(x, widths, mode=_PAD_MODES[problem.boundary])  # type: ignore[call-overload, no-any-return]


def correlate(problem: Problem, x: Array, w: Array) -> Array:
    """Cross-correlation of a padded image with an unflipped filter, both of one type that SciPy takes.

    Returns
    -------
    ndarray
        (N, OC, OH, OW), of the operands' type, without a bias.
    """
    p = problem
    rows = x.shape[2] - p.extent[0] + 1
    columns = x.shape[3] - p.extent[1] + 1
    if rows <= 0 or columns <= 0 or 0 in p.out_shape or p.terms == 0:
        return np.zeros(p.out_shape, x.dtype)
    dense = np.zeros((p.n, p.oc, rows, columns), x.dtype)
    # convolve2d, unlike correlate2d, never conjugates; it turns the filter round instead.
    turned = w[:, :, ::-1, ::-1]
    cg, ocg = p.c // p.groups, p.oc // p.groups
    with np.errstate(all="ignore"):
        for a in range(min(p.dilation[0], rows)):
            for b in range(min(p.dilation[1], columns)):
                phase = x[:, :, a :: p.dilation[0], b :: p.dilation[1]]
                y = dense[:, :, a :: p.dilation[0], b :: p.dilation[1]]
                for n in range(p.n):
                    for o in range(p.oc):
                        for c in range(cg):
                            plane = phase[n, o // ocg * cg + c]
                            y[n, o] += signal.convolve2d(plane, turned[o, c], mode="valid")
    return dense[:, :, :: p.stride[0], :: p.stride[1]]


def windows(problem: Problem, x: Array) -> Array:
    """Every sample that every output meets: a view (N, groups, C/groups, OH, OW, KH, KW) of a padded image."""
    p = problem
    seen = np.lib.stride_tricks.sliding_window_view(x, p.extent, axis=(2, 3))
    seen = seen[:, :, :: p.stride[0], :: p.stride[1], :: p.dilation[0], :: p.dilation[1]]
    return seen.reshape((p.n, p.groups, p.c // p.groups, *seen.shape[2:]))


class Scaled(NamedTuple):
    """Numbers as whole numbers times a power of two: ``integers * 2**exponent``, exactly.

    `integers` holds Python ints, or int64 where that is known to be enough.
    """

    integers: Array
    exponent: int


def scaled(values: Array) -> Scaled:
    """Finite float64 `values` as whole numbers times one power of two, without rounding."""
    mantissa, exponent = np.frexp(values)
    whole = (mantissa * 2.0**53).astype(np.int64)
    exponent = exponent.astype(np.int64) - 53
    # Trailing zeros go into the exponent, so that small integers stay small.
    lowest = whole & -whole
    zeros = np.where(whole == 0, 0, np.frexp(lowest.astype(np.float64))[1] - 1)
    whole >>= zeros
    exponent += zeros
    least = int(exponent[whole != 0].min()) if np.any(whole != 0) else 0
    shift = np.where(whole == 0, 0, exponent - least)
    if not shift.size or int(shift.max()) + 53 < 63:
        return Scaled(whole << shift, least)
    return Scaled(whole.astype(object) << shift.astype(object), least)


def exact_sums(problem: Problem, parts: list[tuple[int, Array, Array]], bias: Array) -> Scaled:
    """Exact sums of products of finite float64 numbers, on every platform alike.

    Parameters
    ----------
    problem : Problem
    parts : list of (sign, image, filter)
        Padded images and unflipped filters whose cross-correlations are added with `sign`; a complex sum has two.
    bias : ndarray of float64, (OC,)

    Returns
    -------
    Scaled
        (N, OC, OH, OW) Python ints and their exponent.
    """
    p = problem
    total: Array = np.zeros(p.out_shape, object)
    exponent = 0
    for sign, x, w in parts:
        xs, ws = scaled(x), scaled(w)
        a, b = _largest(xs.integers), _largest(ws.integers)
        if max(a, b, a * b * p.terms) < 2**62:
            sums = correlate(p, xs.integers.astype(np.int64), ws.integers.astype(np.int64)).astype(object)
        else:
            sums = _object_sums(p, xs.integers.astype(object), ws.integers.astype(object))
        total, exponent = _add(Scaled(total, exponent), Scaled(sign * sums, xs.exponent + ws.exponent))
    added = scaled(bias)
    return _add(
        Scaled(total, exponent), Scaled(added.integers.astype(object)[None, :, None, None], added.exponent)
    )


def _largest(integers: Array) -> int:
    return max((abs(int(integers.min())), abs(int(integers.max()))), default=0) if integers.size else 0


def _object_sums(p: Problem, x: Array, w: Array) -> Array:
    """`correlate` for Python ints, which SciPy doesn't take."""
    total = np.zeros((p.n, p.groups, p.oc // p.groups, p.oh, p.ow), object)
    if total.size and p.terms:
        seen = windows(p, x)
        grouped = w.reshape(p.groups, -1, p.c // p.groups, p.kh, p.kw)
        for c, i, j in np.ndindex(p.c // p.groups, p.kh, p.kw):
            total += seen[:, :, None, c, :, :, i, j] * grouped[None, :, :, c, i, j, None, None]
    return total.reshape(p.out_shape)


def _add(a: Scaled, b: Scaled) -> Scaled:
    exponent = min(a.exponent, b.exponent)
    return Scaled((a.integers << (a.exponent - exponent)) + (b.integers << (b.exponent - exponent)), exponent)


def integer_sums(problem: Problem, x: Array, w: Array, bias: Array | None) -> Array:
    """Integer sums modulo 2**64, in uint64 or int64 as the sum's type is unsigned or signed.

    Where the sum's type provably holds the sums (every rule but "wrap") they are the sums themselves.
    """
    p = problem
    given = operands(p, x, w, bias)
    # Unsigned arithmetic wraps by definition; sign extension makes it right for signed values.
    wide = correlate(p, given.x.astype(np.uint64), given.w.astype(np.uint64))
    wide = wide + given.bias.astype(np.uint64)[None, :, None, None]
    return wide.view(np.int64) if p.sum_dtype.kind == "i" else wide


def convert(problem: Problem, sums: Array) -> Array:
    """Sums in the output type: wrapped, or clipped; floats half to even, clipped, NaN as 0.

    Raises
    ------
    OverflowError
        Under ``overflow="raise"``, with the first place in row-major order.
    """
    p = problem
    out = p.out_dtype
    with np.errstate(all="ignore"):
        if not is_integer(out):
            return sums.astype(out)
        if is_integer(sums.dtype) and p.overflow == "wrap":
            return sums.astype(out)
        clipped, outside = clip(sums, out)
    if p.overflow == "raise" and outside.any():
        first = tuple(int(i) for i in np.argwhere(outside)[0])
        raise OverflowError(f"the first place is {first}")
    return clipped


def clip(sums: Array, out: np.dtype[Any]) -> tuple[Array, Array]:
    """Sums clipped to the integer type `out`, floats rounded half to even, and where they lay outside it."""
    limits = np.iinfo(out)
    if is_integer(sums.dtype):
        outside = (sums < limits.min) | (sums > limits.max)
        y = sums.astype(out)
        y[sums > limits.max] = limits.max
        y[sums < limits.min] = limits.min
        return y, outside
    whole = np.rint(sums)
    # The power of two above the largest integer is a float, the largest integer need not be.
    above = whole >= 2.0 ** (limits.bits - (out.kind == "i"))
    below = whole < limits.min
    unknown = np.isnan(whole)
    y = np.where(above | below | unknown, 0, whole).astype(out)
    y[above] = limits.max
    y[below] = limits.min
    return y, above | below | unknown


def answer(problem: Problem, x: Array, w: Array, bias: Array | None = None) -> Array:
    """The result of `problem` through SciPy: integers exact, floats with sums in float64 or wider.

    Raises
    ------
    OverflowError
        As `convert`.
    """
    p = problem
    if is_integer(p.sum_dtype):
        return convert(p, integer_sums(p, x, w, bias))
    wide = {"f": np.dtype(np.float64), "c": np.dtype(np.complex128)}[p.sum_dtype.kind]
    wide = np.promote_types(p.sum_dtype, wide)
    given = operands(p, x, w, bias)
    with np.errstate(all="ignore"):
        sums = correlate(p, given.x.astype(wide), given.w.astype(wide))
        sums = sums + given.bias.astype(wide)[None, :, None, None]
    return convert(p, sums)
