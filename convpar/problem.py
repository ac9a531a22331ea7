"""`Problem`: the one spec that every backend answers to.

A problem holds shapes, types and rules, never array values. Everything that can
be derived from them (output size, types of sum and result, work, traffic) is
derived here and nowhere else.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from . import boundary as _boundary

Padding = str | int | Sequence[int]
Pair = int | Sequence[int]
Accuracy = Literal["elementwise", "normwise"] | float | None

OVERFLOW_RULES = ("wrap", "saturate", "raise")
LARGEST = 2**48
"""Most elements of any array, and the largest stride, dilation and tile: index arithmetic in 64 bits
can't overflow on them, and no address space holds more."""
LARGEST_PADDING = 2**24
"""Most samples of padding on a side: the border's index map takes eight bytes for each of them."""
PADDING_NAMES = ("valid", "same", "full")


class Unsupported(NotImplementedError):
    """The backend, or convpar as a whole, can't do this problem; the message says why."""


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is a signed or unsigned integer (bool is not)."""
    return dtype.kind in "iu"


def is_narrow_float(dtype: np.dtype[Any]) -> bool:
    """Whether sums of `dtype` are kept in float32: float16 and bfloat16."""
    return dtype.name in ("float16", "bfloat16")


def is_float(dtype: np.dtype[Any]) -> bool:
    """Whether `dtype` is a real floating-point type, bfloat16 included."""
    return dtype.kind == "f" or dtype.name == "bfloat16"


def shown(value: Any) -> str:
    """`value` as messages write it: its repr, but a long integer, which Python may refuse to write, by its length."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of about {int(math.log10(abs(value))) + 1} digits"
    try:
        return repr(value)
    except ValueError:
        return f"a {type(value).__name__} with an integer of more than {sys.get_int_max_str_digits()} digits"


NOT_A_DTYPE = (TypeError, ValueError, SyntaxError)
"""What `numpy.dtype` raises: the last of a string with brackets, which it gives to Python's parser."""


def check_dtype(dtype: Any, name: str) -> np.dtype[Any]:
    """Native-order `dtype` of the array called `name`.

    Raises
    ------
    TypeError
        It isn't bool, an integer, a float (float16, bfloat16 and longdouble included) or complex.
    """
    try:
        if dtype is None:  # float64 to NumPy
            raise TypeError
        if isinstance(dtype, str) and dtype == "bfloat16":
            # The package that brings the type makes its name known to NumPy.
            with contextlib.suppress(ImportError):
                importlib.import_module("ml_dtypes")
        d: np.dtype[Any] = np.dtype(dtype).newbyteorder("=")
    except NOT_A_DTYPE as e:
        hint = "; that type comes with the package ml_dtypes" if dtype == "bfloat16" else ""
        raise TypeError(f"{name} must be a NumPy dtype, not {shown(dtype)}{hint}") from e
    if d.kind not in "biufc" and d.name != "bfloat16":
        raise TypeError(f"{name} must be bool, an integer, floating point or complex, not {d}")
    return d


def index_argument(value: Any, name: str, least: int, most: int = LARGEST) -> int:
    """`value` as an int from `least` to `most`; a TypeError or ValueError that names the argument."""
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be an integer, not {value!r}")
    try:
        i = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, not {shown(value)}") from None
    if i < least:
        raise ValueError(f"{name} must be at least {least}, not {shown(i)}")
    if i > most:
        raise ValueError(f"{name} must be at most {most}, not {shown(i)}")
    return i


def _is_index(value: Any) -> bool:
    """Whether `value` means one integer: arrays of more than one have __index__ too."""
    return hasattr(value, "__index__") and not getattr(value, "ndim", 0)


def _items(value: Any, name: str, allowed: str) -> tuple[Any, ...]:
    # Sets and mappings have no order that could tell vertical from horizontal.
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise TypeError(f"{name} must be {allowed}, not {shown(value)}")
    return tuple(value)


def pair_argument(value: Any, name: str) -> tuple[int, int]:
    """An int, or a pair (vertical, horizontal) of ints, each at least 1."""
    if _is_index(value):
        i = index_argument(value, name, 1)
        return i, i
    items = _items(value, name, "an integer or a pair (vertical, horizontal)")
    if len(items) != 2:
        raise ValueError(f"{name} must be an integer or a pair (vertical, horizontal), not {shown(value)}")
    return index_argument(items[0], f"each {name}", 1), index_argument(items[1], f"each {name}", 1)


def _same_padding(n: int, k: int, stride: int) -> tuple[int, int]:
    """SAME as in TensorFlow and JAX: ceil(n / stride) outputs, the odd sample after."""
    total = max((-(-n // stride) - 1) * stride + k - n, 0)
    return total // 2, total - total // 2


def padding_argument(
    value: Any, image: tuple[int, int], extent: tuple[int, int], stride: tuple[int, int]
) -> tuple[int, int, int, int]:
    """Padding as (top, bottom, left, right); `extent` is the size of the dilated filter."""
    sides = _sides(value, image, extent, stride)
    if max(sides) > LARGEST_PADDING:
        raise ValueError(f"padding may be {LARGEST_PADDING} on a side at most, and {value!r} gives {sides}")
    return sides


def _sides(
    value: Any, image: tuple[int, int], extent: tuple[int, int], stride: tuple[int, int]
) -> tuple[int, int, int, int]:
    if isinstance(value, str):
        if value == "valid":
            return 0, 0, 0, 0
        if value == "full":
            return extent[0] - 1, extent[0] - 1, extent[1] - 1, extent[1] - 1
        if value == "same":
            top, bottom = _same_padding(image[0], extent[0], stride[0])
            left, right = _same_padding(image[1], extent[1], stride[1])
            return top, bottom, left, right
        raise ValueError(
            f"padding must be 'valid', 'same', 'full', an integer, a pair (vertical, horizontal) "
            f"or four (top, bottom, left, right), not {value!r}"
        )
    if _is_index(value):
        p = index_argument(value, "padding", 0)
        return p, p, p, p
    allowed = (
        "'valid', 'same', 'full', an integer, a pair (vertical, horizontal) "
        "or four (top, bottom, left, right)"
    )
    items = _items(value, "padding", allowed)
    if len(items) not in (2, 4):
        raise ValueError(f"padding must be {allowed}, not {shown(value)}")
    sides = tuple(index_argument(i, "each side of padding", 0) for i in items)
    if len(sides) == 2:
        return sides[0], sides[0], sides[1], sides[1]
    return sides[0], sides[1], sides[2], sides[3]


def fill_argument(value: Any, dtype: np.dtype[Any]) -> Any:
    """`value` cast to `dtype`, the promotion of image and filter, as SciPy casts it.

    Fractions are cut for integers. A value outside an integer's range and a
    complex value for a real type raise ValueError; a value that isn't a number raises TypeError.
    """
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError("fillvalue must be a number, not a masked one")
    a = np.asarray(value)
    if a.size != 1:
        raise ValueError(f"fillvalue must be one number, not an array of shape {a.shape}")
    # NumPy has no type for a Python integer beyond 64 bits.
    wide = a.dtype.kind == "O" and isinstance(value, int)
    if a.dtype.kind not in "biufc" and a.dtype.name != "bfloat16" and not wide:
        raise TypeError(f"fillvalue must be a number, not {shown(value)}")
    v = value if wide else a.reshape(())[()]
    if a.dtype.kind == "c" and dtype.kind != "c":
        raise ValueError(f"fillvalue {value!r} is complex, but image and filter are {dtype}")
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        whole = int(v) if wide or math.isfinite(v) else None
        if whole is None or not limits.min <= whole <= limits.max:
            raise ValueError(
                f"fillvalue must fit {dtype}, the type of image and filter together: "
                f"{limits.min} to {limits.max}, not {shown(value)}"
            )
        return dtype.type(whole)
    try:
        with np.errstate(over="ignore"):
            return dtype.type(v)
    except OverflowError as e:
        raise ValueError(f"fillvalue must fit {dtype}, the type of image and filter together: {e}") from e


def promotion(x: np.dtype[Any], w: np.dtype[Any]) -> np.dtype[Any]:
    """NumPy's common type of image and filter: the type of the plain result."""
    try:
        return np.result_type(x, w)
    except TypeError as e:
        raise TypeError(f"x is {x} and w is {w}, which have no common type") from e


def _largest(dtype: np.dtype[Any]) -> tuple[int, int]:
    if dtype.kind == "b":
        return 0, 1
    limits = np.iinfo(dtype)
    return int(limits.min), int(limits.max)


def _holding(
    x: np.dtype[Any],
    w: np.dtype[Any],
    bias: np.dtype[Any] | None,
    terms: int,
    fillvalue: Any,
) -> np.dtype[Any]:
    """The narrowest of int32, int64 and uint64 that holds every sum of `terms` products."""
    xlo, xhi = _largest(x)
    xlo, xhi = min(xlo, int(fillvalue)), max(xhi, int(fillvalue))
    wlo, whi = _largest(w)
    corners = [a * b for a in (xlo, xhi) for b in (wlo, whi)]
    lo, hi = terms * min(0, *corners), terms * max(0, *corners)
    if bias is not None:
        blo, bhi = _largest(bias)
        lo, hi = lo + min(blo, 0), hi + max(bhi, 0)
    for name in ("int32", "int64", "uint64"):
        dtype = np.dtype(name)
        limits = np.iinfo(dtype)
        if limits.min <= lo and hi <= limits.max:
            return dtype
    raise Unsupported(
        f"overflow='saturate' and 'raise' need an integer type that holds every possible sum, "
        f"and sums of {terms} products {x} * {w}"
        + (f" with a bias of type {bias}" if bias is not None else "")
        + " may exceed 64 bits; use narrower inputs, overflow='wrap', or a floating-point filter"
    )


def sum_and_output_types(
    x: np.dtype[Any],
    w: np.dtype[Any],
    dtype: np.dtype[Any] | None,
    *,
    bias: np.dtype[Any] | None = None,
    overflow: str = "wrap",
    terms: int = 1,
    fillvalue: Any = 0,
) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Type in which the sum is kept and type of the result.

    Without `dtype` the result is NumPy's promotion of `x` and `w`; with it, the
    sum is that of all three and is then converted. Narrow floats sum in float32.
    An integer sum that must not wrap is kept in a type that provably holds it.

    Raises
    ------
    TypeError
        The sum is complex and the result real, or the result would be bool.
    Unsupported
        No integer type provably holds the sum.
    """
    out = promotion(x, w) if dtype is None else dtype
    common = out if dtype is None else promotion(promotion(x, w), dtype)
    if out.kind == "b":
        raise TypeError("the result would be bool, which has no sum; ask for another type with dtype=")
    if common.kind == "c" and out.kind != "c":
        raise TypeError(f"dtype is {out}, but the sum is {common}; a complex sum needs a complex dtype")
    if is_narrow_float(common):
        return np.dtype(np.float32), out
    if is_integer(common) and overflow != "wrap":
        return _holding(x, w, bias, terms, fillvalue), out
    return common, out


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One 2-D cross-correlation, whatever computes it.

    ``y[n, o, i, j] = bias[o] + sum over c, p, q of
    x[n, g*C/groups + c, i*stride - top + p*dilation, ...] * w[o, c, p, q]``
    with ``g`` the group of output channel ``o``; with `flip`, ``w`` is turned by
    180 degrees first. Samples outside the image follow `boundary`.

    Build one with `Problem.of`, which checks and normalises what a caller gives.

    Attributes
    ----------
    n, c, h, w : int
        Images, channels, rows and columns of the input.
    oc, kh, kw : int
        Output channels, rows and columns of the filter.
    stride, dilation : (int, int)
        (vertical, horizontal); a dilation of 1 is dense.
    groups : int
        Channels and output channels are split into this many independent groups.
    padding : (int, int, int, int)
        (top, bottom, left, right).
    boundary : str
        "fill", "wrap", "symm", "mirror" or "nearest".
    fillvalue : NumPy scalar
        What "fill" pads with, in the promotion of `x_dtype` and `w_dtype`.
    flip : bool
        Convolution rather than cross-correlation.
    x_dtype, w_dtype, bias_dtype, sum_dtype, out_dtype : numpy.dtype
        Native byte order; `bias_dtype` is None without a bias.
    overflow : str
        What an integer result does with a sum outside its range: "wrap", "saturate", "raise".
    accuracy : None, "elementwise", "normwise" or float
        The error contract asked for.
    """

    n: int
    c: int
    h: int
    w: int
    oc: int
    kh: int
    kw: int
    x_dtype: np.dtype[Any]
    w_dtype: np.dtype[Any]
    sum_dtype: np.dtype[Any]
    out_dtype: np.dtype[Any]
    bias_dtype: np.dtype[Any] | None = None
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    boundary: str = "fill"
    fillvalue: Any = field(default=0, compare=False)
    flip: bool = False
    overflow: str = "wrap"
    accuracy: Accuracy = None
    # NaN differs from itself and -0.0 equals 0.0; the written form tells them right.
    _fill_key: str = field(init=False, repr=False, default="")

    def __post_init__(self) -> None:
        object.__setattr__(self, "_fill_key", repr(self.fillvalue))

    @classmethod
    def of(
        cls,
        x_shape: Sequence[int],
        w_shape: Sequence[int],
        x_dtype: Any,
        w_dtype: Any = None,
        *,
        bias_dtype: Any = None,
        stride: Pair = 1,
        padding: Padding = "valid",
        dilation: Pair = 1,
        groups: int = 1,
        boundary: str = "fill",
        fillvalue: Any = 0,
        flip: bool = False,
        dtype: Any = None,
        overflow: str = "wrap",
        accuracy: Accuracy = None,
    ) -> Problem:
        """The problem of an (N, C, H, W) image and an (OC, C/groups, KH, KW) filter.

        Takes the keywords of `convpar.conv2d`; `w_dtype` defaults to `x_dtype`.

        Raises
        ------
        ValueError, TypeError
            An argument is wrong; the message names it, what was given and what is allowed.
        Unsupported
            The result can't be had in any type.
        """
        n, c, h, w = _shape4(x_shape, "x")
        oc, cg, kh, kw = _shape4(w_shape, "w")
        xt = check_dtype(x_dtype, "x")
        wt = check_dtype(x_dtype if w_dtype is None else w_dtype, "w")
        bt = None if bias_dtype is None else check_dtype(bias_dtype, "bias")
        if kh == 0 or kw == 0:
            raise ValueError(f"w must have at least one row and one column, not {kh} x {kw}")
        groups = index_argument(groups, "groups", 1)
        if c % groups or oc % groups:
            raise ValueError(
                f"groups must divide the channels of x ({c}) and the output channels of w ({oc}), "
                f"and {groups} doesn't"
            )
        if cg != c // groups:
            raise ValueError(
                f"w must have C/groups = {c}/{groups} = {c // groups} input channels on its "
                f"second axis, not {cg}"
            )
        strides = pair_argument(stride, "stride")
        dilations = pair_argument(dilation, "dilation")
        extent = (dilations[0] * (kh - 1) + 1, dilations[1] * (kw - 1) + 1)
        sides = padding_argument(padding, (h, w), extent, strides)
        if not isinstance(boundary, str) or boundary not in _boundary.MODES:
            raise ValueError(_boundary_message(boundary))
        empty_is_right = isinstance(padding, str) and padding in ("same", "full")
        for axis, size, before, after, k in (
            ("rows", h, sides[0], sides[1], extent[0]),
            ("columns", w, sides[2], sides[3], extent[1]),
        ):
            if boundary != "fill" and size == 0 and before + after > 0:
                raise ValueError(f"boundary {boundary!r} needs a sample to repeat, and x has no {axis}")
            # "same" and "full" of an empty axis are empty, as in SciPy.
            if size + before + after < k and not empty_is_right:
                raise ValueError(
                    f"w is larger than the padded x: its {axis} span {k} with dilation, "
                    f"x has {size} and padding adds {before + after}"
                )
        if not isinstance(flip, (bool, np.bool_)):
            raise TypeError(f"flip must be True or False, not {shown(flip)}")
        if not isinstance(overflow, str) or overflow not in OVERFLOW_RULES:
            raise ValueError(f"overflow must be one of {', '.join(OVERFLOW_RULES)}, not {shown(overflow)}")
        common = promotion(xt, wt)
        fill = fill_argument(fillvalue, common)
        if boundary != "fill":
            fill = common.type(0)
        sum_dtype, out_dtype = sum_and_output_types(
            xt,
            wt,
            None if dtype is None else check_dtype(dtype, "dtype"),
            bias=bt,
            overflow=overflow,
            terms=cg * kh * kw,
            fillvalue=fill if is_integer(common) or common.kind == "b" else 0,
        )
        if bt is not None and not np.can_cast(bt, sum_dtype, "same_kind"):
            raise TypeError(
                f"bias is {bt}, which can't be cast to {sum_dtype}, the type of the sum, "
                "without changing its kind"
            )
        problem = cls(
            n=n, c=c, h=h, w=w, oc=oc, kh=kh, kw=kw,
            x_dtype=xt, w_dtype=wt, bias_dtype=bt, sum_dtype=sum_dtype, out_dtype=out_dtype,
            stride=strides, padding=sides, dilation=dilations, groups=groups,
            boundary=boundary, fillvalue=fill, flip=bool(flip), overflow=overflow,
            accuracy=_accuracy_argument(accuracy),
        )  # fmt: skip
        padded = (n, c, h + sides[0] + sides[1], w + sides[2] + sides[3])
        for name, shape in (
            ("x and its padding", padded), ("w", problem.w_shape), ("the result", problem.out_shape),
        ):  # fmt: skip
            # Axes of no elements don't make the others' product harmless.
            if math.prod(size or 1 for size in shape) > LARGEST:
                raise ValueError(f"{name} would have the shape {shape}: more than {LARGEST} elements")
        return problem

    # -- geometry

    @property
    def extent(self) -> tuple[int, int]:
        """Rows and columns that the dilated filter spans."""
        return self.dilation[0] * (self.kh - 1) + 1, self.dilation[1] * (self.kw - 1) + 1

    @property
    def oh(self) -> int:
        """Rows of the output."""
        room = self.h + self.padding[0] + self.padding[1] - self.extent[0]
        return max(room // self.stride[0] + 1, 0)

    @property
    def ow(self) -> int:
        """Columns of the output."""
        room = self.w + self.padding[2] + self.padding[3] - self.extent[1]
        return max(room // self.stride[1] + 1, 0)

    @property
    def x_shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self.n, self.c, self.h, self.w

    @property
    def w_shape(self) -> tuple[int, int, int, int]:
        """(OC, C/groups, KH, KW)."""
        return self.oc, self.c // self.groups, self.kh, self.kw

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """(N, OC, OH, OW)."""
        return self.n, self.oc, self.oh, self.ow

    # -- work and traffic

    @property
    def terms(self) -> int:
        """Products in each sum, K = (C/groups) * KH * KW."""
        return self.c // self.groups * self.kh * self.kw

    @property
    def outputs(self) -> int:
        """Elements of the output."""
        return math.prod(self.out_shape)

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the direct method."""
        return self.outputs * self.terms

    @property
    def least_bytes(self) -> int:
        """Bytes moved if image, filter and bias are read once and the output written once."""
        total = math.prod(self.x_shape) * self.x_dtype.itemsize
        total += math.prod(self.w_shape) * self.w_dtype.itemsize
        total += self.outputs * self.out_dtype.itemsize
        return total + (self.oc * self.bias_dtype.itemsize if self.bias_dtype is not None else 0)

    @property
    def arithmetic_intensity(self) -> float:
        """Floating-point operations (two a multiply-accumulate) per byte of `least_bytes`."""
        return 2 * self.macs / self.least_bytes if self.least_bytes else 0.0

    @property
    def gemm(self) -> tuple[int, int, int]:
        """(rows, columns, depth) of each group's matrix product: OC/groups, N*OH*OW, K."""
        return self.oc // self.groups, self.n * self.oh * self.ow, self.terms

    def __str__(self) -> str:
        text = (
            f"{'convolution' if self.flip else 'cross-correlation'} of "
            f"x{self.x_shape} {self.x_dtype} with w{self.w_shape} {self.w_dtype} "
            f"-> {self.out_shape} {self.out_dtype}, sums in {self.sum_dtype}"
        )
        if self.bias_dtype is not None:
            text += f", bias {self.bias_dtype}"
        if self.stride != (1, 1):
            text += f", stride {self.stride[0]}x{self.stride[1]}"
        if self.dilation != (1, 1):
            text += f", dilation {self.dilation[0]}x{self.dilation[1]}"
        if self.groups != 1:
            text += f", {self.groups} groups"
        if any(self.padding):
            sides = ", ".join(map(str, self.padding))
            text += f", padding (top, bottom, left, right) = ({sides}), boundary {self.boundary}"
            if self.boundary == "fill":
                text += f" with {self.fillvalue}"
        if is_integer(self.out_dtype):
            text += f", overflow {self.overflow}"
        if self.accuracy is not None:
            text += f", accuracy {self.accuracy}"
        return text


def _shape4(shape: Sequence[int], name: str) -> tuple[int, int, int, int]:
    sizes = tuple(shape)
    if len(sizes) != 4:
        raise ValueError(f"{name} must have four axes here, not shape {sizes}")
    a, b, c, d = (index_argument(i, f"each axis of {name}", 0) for i in sizes)
    return a, b, c, d


def _boundary_message(given: Any) -> str:
    if isinstance(given, str) and given == "reflect":
        return (
            "boundary 'reflect' means two things: say 'symm' for d c b a | a b c d "
            "(scipy.ndimage's reflect) or 'mirror' for d c b | a b c d (numpy.pad's and torch's reflect)"
        )
    return f"boundary must be one of {', '.join(_boundary.MODES)}, not {shown(given)}"


def _accuracy_argument(value: Any) -> Accuracy:
    if value is None or (isinstance(value, str) and value in ("elementwise", "normwise")):
        return value  # type: ignore[return-value]
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool):
        # An integer may be too large for a float.
        with contextlib.suppress(OverflowError):
            number = float(value)
            if 0 < number < math.inf:
                return number
    raise ValueError(
        f"accuracy must be None, 'elementwise', 'normwise' or a positive number, not {shown(value)}"
    )
