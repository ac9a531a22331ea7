"""Which results are right: exact equality for integers, the published error contract for floats.

`expected` turns a problem, its data and a contract into the closed interval that
each element may lie in; `mismatch` says where a result leaves it. With K products a sum,
``u`` the sum's unit roundoff and ``S = conv(|x|, |w|) + |bias|``, a sum may be off by
``(K + 2) * u * S + K * (smallest subnormal)``; under "normwise" S is the plane's largest, times the
backend's factor. What a conversion to the output type makes of the two ends bounds the converted result.

Where S overflows the sum's type nothing is promised. Where infinities or NaN take part, the
result is what IEEE arithmetic makes of the products in any order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from convpar.backend import ErrorContract
from convpar.problem import Problem, is_integer

from . import oracle

Array = npt.NDArray[Any]

# A part of a sum: its sign, a padded image and a filter, all real.
_Part = tuple[int, Array, Array]

# Bits of the significand and the smallest normal exponent of types that NumPy may not know.
_NARROW = {"tf32": (11, -126), "bfloat16": (8, -126), "float16": (11, -14)}


@dataclass(frozen=True, slots=True)
class Expected:
    """What each element of a result may be, real and imaginary parts apart.

    Attributes
    ----------
    low, high : tuple of ndarray, (N, OC, OH, OW)
        Ends of the closed interval, one array per real component: of the output's real type, or of a
        wider one for types that NumPy computes no bounds in.
    nan : tuple of ndarray of bool
        The component must be NaN.
    free : tuple of ndarray of bool
        Nothing is promised.
    must_raise, may_raise : ndarray of bool
        Under ``overflow="raise"``: places that certainly, and that possibly, lie outside the output type.
    """

    low: tuple[Array, ...]
    high: tuple[Array, ...]
    nan: tuple[Array, ...]
    free: tuple[Array, ...]
    must_raise: Array
    may_raise: Array


def expected(
    problem: Problem,
    contract: ErrorContract,
    x: Array,
    w: Array,
    bias: Array | None,
    *,
    exact: bool = False,
) -> Expected:
    """The right results of `problem` under `contract`.

    Parameters
    ----------
    problem : Problem
    contract : ErrorContract
        What the plan publishes. If the problem asks for more, it must deliver that too.
    x, w, bias : ndarray
        In canonical shapes and native byte order.
    exact : bool
        The data are such that no order of summation rounds (small integers, say). An elementwise
        contract in the full sum type then leaves no room at all.
    """
    p = problem
    if is_integer(p.sum_dtype):
        return _expected_integers(p, oracle.integer_sums(p, x, w, bias))
    given = oracle.operands(p, x, w, bias)
    # Operands of sums kept in a narrow type may be subnormal there, and lose all their bits too.
    loses_small = contract.flushes_subnormals or contract.sum_dtype is not None
    smaller = _components(_without_subnormals(p, contract, given)) if loses_small else None
    bounded = [
        _component(p, contract, parts, b, None if smaller is None else smaller[i], exact)
        for i, (parts, b) in enumerate(_components(given))
    ]
    return _converted(p, contract, bounded)


def _expected_integers(p: Problem, sums: Array) -> Expected:
    nowhere = np.zeros(p.out_shape, bool)
    if p.overflow == "wrap":
        y = oracle.convert(p, sums)
        return Expected((y,), (y,), (nowhere,), (nowhere,), nowhere, nowhere)
    y, outside = oracle.clip(sums, p.out_dtype)
    if p.overflow != "raise":
        outside = nowhere
    return Expected((y,), (y,), (nowhere,), (nowhere,), outside, outside)


def _components(given: oracle.Operands) -> list[tuple[list[_Part], Array]]:
    """The real sums that make up the result; a complex product is four plain real ones."""
    x, w, b = given
    if x.dtype.kind != "c":
        return [([(1, x, w)], b)]
    return [
        ([(1, x.real, w.real), (-1, x.imag, w.imag)], b.real),
        ([(1, x.real, w.imag), (1, x.imag, w.real)], b.imag),
    ]


@dataclass(slots=True)
class _Bounded:
    """One real component before conversion: reference, allowed error, special places."""

    low: Array
    high: Array
    special: Array  # the non-finite result where there is one, else 0
    either: Array  # whether there is one depends on flushing
    free: Array


def _precision(p: Problem, contract: ErrorContract) -> tuple[float, float, float, float]:
    """Unit roundoff, smallest subnormal, smallest normal and largest number of the sums."""
    if contract.sum_dtype in _NARROW:
        bits, least = _NARROW[contract.sum_dtype]
        return 2.0**-bits, 2.0 ** (least - bits + 1), 2.0**least, _largest(contract.sum_dtype)
    info = np.finfo(p.sum_dtype)
    # A longdouble may be wider than anything that the comparison is made in.
    return float(info.eps) / 2, float(info.smallest_subnormal), float(info.tiny), float(info.max)


def _component(
    p: Problem,
    contract: ErrorContract,
    parts: list[_Part],
    bias: Array,
    flushed: tuple[list[_Part], Array] | None,
    exact: bool,
) -> _Bounded:
    unit, subnormal, normal, largest = _precision(p, contract)
    if contract.operand_dtype is not None:
        unit *= 2
    terms = p.terms * len(parts)
    special = _special(p, parts, bias)
    finite = [(s, _finite(x), _finite(w)) for s, x, w in parts]
    finite_bias = _finite(bias)
    # NumPy's longdouble where sums are longdouble, else float64, which is exact for float32 products.
    wide = np.promote_types(p.sum_dtype if p.sum_dtype.kind == "f" else bias.dtype, np.float64)
    size = _magnitude(p, finite, finite_bias, wide)
    with np.errstate(all="ignore"):
        free = ~(size * (1 + (terms + 2) * unit) < largest) | _too_large(p, finite, largest)
        relative = underflow = np.zeros(())
        summed = size
        if contract.operand_dtype is not None:
            summed = _of_raised(p, contract.operand_dtype, finite, finite_bias, wide)
            free = free | _too_large(p, finite, _largest(contract.operand_dtype))
            relative, underflow = _of_rounded(p, contract.operand_dtype, finite, finite_bias, wide)
        either = np.zeros(p.out_shape, bool)
        slack = terms * (normal if contract.flushes_subnormals else subnormal) + underflow
        error = _allowed(p, contract, size, summed, relative, free, terms, unit) + slack
        if flushed is not None:
            parts_flushed, bias_flushed = flushed
            kept = [(s, _finite(x), _finite(w)) for s, x, w in parts_flushed]
            error = error + (size - _magnitude(p, kept, _finite(bias_flushed), wide))
            either = _differ(special, _special(p, parts_flushed, bias_flushed))
        if contract.kind == "normwise":
            # The plane's largest may overflow although this element's own doesn't.
            free = free | ~(error < largest)
    sure = np.zeros(p.out_shape, bool)
    if exact and contract.kind == "elementwise":
        sure = _unrounded(p, finite, finite_bias, size, unit) & (relative + underflow == 0)
    if p.sum_dtype.itemsize // (2 if p.sum_dtype.kind == "c" else 1) == 8:
        low, high = _exact_interval(p, finite, finite_bias, np.where(sure, 0, error), free)
    else:
        low, high = _wide_interval(p, finite, finite_bias, np.where(sure, 0, error), wide)
    return _Bounded(low, high, special, either, free)


def _finite(a: Array) -> Array:
    return np.where(np.isfinite(a), a, a.dtype.type(0))


def _magnitude(p: Problem, parts: list[_Part], bias: Array, wide: np.dtype[Any]) -> Array:
    """``conv(|x|, |w|) + |bias|`` of finite operands."""
    size: Array = np.zeros(p.out_shape, wide) + np.abs(bias.astype(wide))[None, :, None, None]
    with np.errstate(all="ignore"):
        for _, x, w in parts:
            size += oracle.correlate(p, np.abs(x.astype(wide)), np.abs(w.astype(wide)))
    return size


def _too_large(p: Problem, parts: list[_Part], largest: float) -> Array:
    """Where an operand itself overflows the type of the sums, which narrow ones may."""
    places = np.zeros(p.out_shape, bool)
    for _, x, w in parts:
        if x.size and w.size and max(np.abs(x).max(), np.abs(w).max()) > largest:
            beyond_x, beyond_w = (np.abs(a) > largest for a in (x, w))
            met = oracle.correlate(p, beyond_x.astype(np.float64), np.ones(w.shape))
            places |= (met + oracle.correlate(p, np.ones(x.shape), beyond_w.astype(np.float64))) > 0
    return places


def _special(p: Problem, parts: list[_Part], bias: Array) -> Array:
    """What infinities and NaN among the products leave of each sum: inf, -inf, NaN, or 0 without any.

    Finite operands count by their sign alone, so nothing overflows.
    """
    total = np.zeros(p.out_shape)
    if all(np.isfinite(a).all() for _, x, w in parts for a in (x, w)) and np.isfinite(bias).all():
        return total
    with np.errstate(all="ignore"):
        for sign, x, w in parts:
            total += sign * oracle.correlate(p, _by_sign(x), _by_sign(w))
        total += _by_sign(bias)[None, :, None, None]
    return np.where(np.isfinite(total), 0.0, total)


def _by_sign(a: Array) -> Array:
    return np.where(np.isfinite(a), np.sign(a), a).astype(np.float64)


def _differ(a: Array, b: Array) -> Array:
    return np.asarray(~((a == b) | (np.isnan(a) & np.isnan(b))))


def _without_subnormals(p: Problem, contract: ErrorContract, given: oracle.Operands) -> oracle.Operands:
    """Operands that are subnormal, where they are read or in the type they are multiplied in, as zero."""
    normal = _precision(p, contract)[2]

    def flushed(a: Array, read_as: np.dtype[Any] | None) -> Array:
        if a.dtype.kind == "c":
            y = a.copy()
            y.real, y.imag = flushed(a.real, read_as), flushed(a.imag, read_as)
            return y
        least = normal
        if read_as is not None and read_as.kind not in "biu":
            least = max(least, 2.0**-126 if read_as.name == "bfloat16" else float(np.finfo(read_as).tiny))
        return np.where(np.abs(a) < least, a.dtype.type(0), a)

    return oracle.Operands(
        flushed(given.x, p.x_dtype), flushed(given.w, p.w_dtype), flushed(given.bias, p.bias_dtype)
    )


def _largest(name: str) -> float:
    bits, least = _NARROW[name]
    return (2.0 - 2.0 ** (1 - bits)) * 2.0 ** (1 - least)


def _of_rounded(
    p: Problem, name: str, parts: list[_Part], bias: Array, wide: np.dtype[Any]
) -> tuple[Array, Array]:
    """How far sums may move when their factors become numbers of the type `name`: within its normal range, and below."""
    bits, least = _NARROW[name]

    def moved(a: Array, share: float) -> Array:
        a = np.abs(a.astype(wide))
        quantum = np.ldexp(np.ones(()), np.maximum(np.frexp(a)[1], least + 1) - bits)
        return np.asarray(a + np.minimum(np.abs(np.round(a / quantum) * quantum - a), share * a))

    unmoved, normal, all_of_it = (
        _magnitude(p, [(s, moved(x, share), moved(w, share)) for s, x, w in parts], bias, wide)
        for share in (0.0, 2.0**-bits, 1.0)
    )
    return normal - unmoved, all_of_it - normal


def _of_raised(p: Problem, name: str, parts: list[_Part], bias: Array, wide: np.dtype[Any]) -> Array:
    """The magnitude where factors that are subnormal in the type `name` count as its smallest normal number.

    Matrix units align products by the exponents of their factors, and a subnormal one has the exponent of the
    smallest normal number: the sum is cut where that number's product would be.
    """
    bits, least = _NARROW[name]
    normal = 2.0**least

    def raised(a: Array) -> Array:
        a = np.abs(a.astype(wide))
        # Up to half the smallest subnormal a factor becomes zero, which has no exponent.
        return np.where((a > 2.0 ** (least - bits)) & (a < normal), wide.type(normal), a)

    return _magnitude(p, [(s, raised(x), raised(w)) for s, x, w in parts], bias, wide)


def _allowed(
    p: Problem,
    contract: ErrorContract,
    size: Array,
    summed: Array,
    relative: Array,
    free: Array,
    terms: int,
    unit: float,
) -> Array:
    """The contract's bound without the allowances for subnormals.

    `summed` is the magnitude that sums are cut or rounded by, `relative` what rounded factors add.
    """

    def planes(a: Array) -> Array:
        return np.asarray(np.where(free, 0, a).max(axis=(2, 3), keepdims=True, initial=0))

    if contract.kind == "normwise":
        error = np.broadcast_to(contract.factor * (terms + 2) * unit * planes(summed), p.out_shape)
    else:
        error = (terms + 2) * unit * summed
    error = error + relative
    if p.sum_dtype.char in "gG":
        # The reference is a longdouble itself, with as large an error again.
        error = 2 * error
    if isinstance(p.accuracy, float):
        error = np.minimum(error, p.accuracy * planes(size))
    return error


def _unrounded(p: Problem, parts: list[_Part], bias: Array, size: Array, unit: float) -> Array:
    """Where every partial sum, in any order, is a whole multiple of one number and has few enough bits."""
    exponents = [oracle.scaled(x.astype(np.float64)).exponent for _, x, _ in parts if x.size]
    filters = [oracle.scaled(w.astype(np.float64)).exponent for _, _, w in parts if w.size]
    quantum = min(exponents, default=0) + min(filters, default=0)
    if np.any(bias != 0):
        quantum = min(quantum, oracle.scaled(bias.astype(np.float64)).exponent)
    with np.errstate(over="ignore"):
        return np.asarray(np.ldexp(size, -quantum) <= 1 / unit)


def _exact_interval(
    p: Problem, parts: list[_Part], bias: Array, error: Array, free: Array
) -> tuple[Array, Array]:
    """The float64 numbers within `error` of the exact sums: the least and the greatest."""
    sums, exponent = oracle.exact_sums(p, parts, bias)
    if not error.any() and all(abs(s) < 2**53 for s in sums.flat):
        y = np.ldexp(sums.astype(np.float64), exponent)
        return y, y
    low, high = np.zeros(p.out_shape), np.zeros(p.out_shape)
    for i in np.ndindex(p.out_shape):
        if not free[i]:
            total, allowed = int(sums[i]), float(error[i])
            low[i] = _upward(total, exponent, -allowed)
            high[i] = -_upward(-total, exponent, -allowed)
    return low, high


def _upward(whole: int, exponent: int, offset: float) -> float:
    """The least float64 not below ``whole * 2**exponent + offset``."""
    top, bottom = offset.as_integer_ratio()
    if exponent < 0:
        numerator = whole * bottom + (top << -exponent)
        denominator = bottom << -exponent
    else:
        numerator = (whole << exponent) * bottom + top
        denominator = bottom
    try:
        nearest = numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf
    a, b = nearest.as_integer_ratio()
    return math.nextafter(nearest, math.inf) if a * denominator < numerator * b else nearest


def _wide_interval(
    p: Problem, parts: list[_Part], bias: Array, error: Array, wide: np.dtype[Any]
) -> tuple[Array, Array]:
    """As `_exact_interval` for sums in float32, whose reference in float64 has 29 bits to spare, or longdouble."""
    sums = np.zeros(p.out_shape, wide) + bias.astype(wide)[None, :, None, None]
    with np.errstate(all="ignore"):
        for sign, x, w in parts:
            sums += sign * oracle.correlate(p, x.astype(wide), w.astype(wide))
        return sums - error, sums + error


def _converted(p: Problem, contract: ErrorContract, bounded: list[_Bounded]) -> Expected:
    """The ends of the intervals in the output type."""
    out = p.out_dtype
    nowhere = np.zeros(p.out_shape, bool)
    if is_integer(out):
        (b,) = bounded
        return _converted_to_integers(p, b)
    real = np.empty(0, out).real.dtype
    low, high, nan = [], [], []
    with np.errstate(all="ignore"):
        for b in bounded:
            narrower = real.itemsize < b.low.dtype.itemsize and real.name != _real(p.sum_dtype).name
            is_special = b.special != 0
            ends = [np.where(is_special, b.special, end) for end in (b.low, b.high)]
            if narrower:
                # Rounding is monotonic, so any rounded number of the interval lies between the rounded ends.
                ends = [_narrowed(end, real, side) for end, side in zip(ends, (-np.inf, np.inf), strict=True)]
                if contract.flushes_subnormals and real.name == "float32":
                    # The conversion itself may flush: where the interval ends in a subnormal, zero belongs to it.
                    tiny = np.finfo(real).tiny
                    ends = [
                        np.where((ends[0] > 0) & (ends[0] < tiny), real.type(0), ends[0]),
                        np.where((ends[1] < 0) & (ends[1] > -tiny), real.type(0), ends[1]),
                    ]
            low.append(ends[0])
            high.append(ends[1])
            nan.append(np.isnan(b.special))
    free = tuple(b.free | b.either for b in bounded)
    return Expected(tuple(low), tuple(high), tuple(nan), free, nowhere, nowhere)


def _narrowed(end: Array, real: np.dtype[Any], side: float) -> Array:
    if real.name == "bfloat16" and end.dtype.itemsize > 4:
        # It is rounded by way of float32: step outward first, or rounding twice may step inward.
        single = end.astype(np.float32)
        inward = single > end if side < 0 else single < end
        end = np.where(inward, np.nextafter(single, np.float32(side)), single)
    return end.astype(real)


def _real(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.empty(0, dtype).real.dtype


def _converted_to_integers(p: Problem, b: _Bounded) -> Expected:
    nowhere = np.zeros(p.out_shape, bool)
    free = b.free | b.either
    special = b.special != 0
    low, below = oracle.clip(np.where(special, b.special, b.low), p.out_dtype)
    high, above = oracle.clip(np.where(special, b.special, b.high), p.out_dtype)
    must, may = nowhere, nowhere
    if p.overflow == "raise":
        # An interval wholly on one side is outside for certain; one that straddles an end may be.
        must = below & above & (low == high) & ~free
        may = below | above | free
    return Expected((low,), (high,), (nowhere,), (free,), must, may)


def mismatch(problem: Problem, right: Expected, got: Array) -> str | None:
    """Where and by how much `got` is wrong, or None if every element is right.

    Parameters
    ----------
    got : ndarray, (N, OC, OH, OW)
        In the output type, any byte order.
    """
    if got.dtype.newbyteorder("=") != problem.out_dtype or got.shape != problem.out_shape:
        return f"the result is {got.dtype} {got.shape}, not {problem.out_dtype} {problem.out_shape}"
    got = got.astype(problem.out_dtype)
    parts = (got.real, got.imag) if got.dtype.kind == "c" else (got,)
    wrong = np.zeros(problem.out_shape, bool)
    for y, low, high, nan, free in zip(parts, right.low, right.high, right.nan, right.free, strict=True):
        with np.errstate(invalid="ignore"):
            fits = np.where(nan, np.isnan(y) if y.dtype.kind not in "iu" else False, (low <= y) & (y <= high))
        wrong |= ~(fits | free)
    if not wrong.any():
        return None
    place = tuple(int(i) for i in np.argwhere(wrong)[0])
    allowed = []
    for low, high, nan in zip(right.low, right.high, right.nan, strict=True):
        if nan[place]:
            allowed.append("NaN")
        elif low[place] == high[place]:
            allowed.append(f"{low[place]}")
        else:
            allowed.append(f"{low[place]} to {high[place]}")
    return (
        f"{int(wrong.sum())} of {wrong.size} elements are wrong; the first, {place} (n, oc, row, column), "
        f"is {got[place]}, allowed is {' and '.join(allowed)}"
    )
