"""Hypothesis strategies that draw a `Case` from what a backend declares.

Hypothesis draws one string of bytes an example and makes it smaller when the example fails; `Choices` reads
it, a byte a choice. Draws that follow one another would be made alike now and then, which is no way to cover
many types, shapes and layouts with few examples. Sizes are repaired rather than rejected.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from convpar.backend import Capabilities, Option
from convpar.problem import OVERFLOW_RULES, Problem, Unsupported, is_integer

from .case import DATA, EXACT, Case
from .memory import Memory, device_place

T = TypeVar("T")

MOST_MACS = 150_000
"""Multiply-accumulates of the largest case drawn."""

_SEVERAL_CHANNELS = 4
"""How many times as many where a backend takes no fewer channels than several."""

FINITE = ("sparse", "halves", "uniform", "wide", "bright", "cancelling", "separable", "extremes", "subnormal")
SPECIAL = ("inf", "nan", "inf and nan", "extremes")
ROUNDING = ("bright", "cancelling", "separable", "uniform", "wide")


class Choices:
    """Reads choices from bytes, part by part, so that a byte means the same whatever other parts hold.

    All zeros is the simplest choice everywhere.
    """

    PARTS: ClassVar[Mapping[str, int]] = {
        "types": 8,
        "shapes": 32,
        "values": 16,
        "config": 32,
        "check": 16,
        "x": 16,
        "w": 16,
        "bias": 16,
        "out": 16,
    }
    """Bytes of each part, of which Hypothesis draws one at a time; what is read beyond them is zero."""

    def __init__(self, data: bytes, part: str = "check") -> None:
        self._data = data
        before = itertools.takewhile(lambda name: name != part, self.PARTS)
        first = sum(self.PARTS[name] for name in before)
        self._mine = iter(data[first : first + self.PARTS[part]])

    def part(self, name: str) -> Choices:
        """The choices of another part, from its beginning."""
        return Choices(self._data, name)

    def upto(self, most: int) -> int:
        """An integer from 0 to `most`, which is at most 255."""
        return next(self._mine, 0) % (most + 1)

    def pick(self, choices: Sequence[T]) -> T:
        """One of `choices`; the first is the simplest."""
        return choices[self.upto(len(choices) - 1)]

    def rarely(self, one_in: int) -> bool:
        """True once in about `one_in` times."""
        return self.upto(one_in - 1) == one_in - 1


def drawn(build: Callable[[Choices], T]) -> st.SearchStrategy[T]:
    """What `build` makes of drawn choices."""
    size = sum(Choices.PARTS.values())
    return st.binary(min_size=size, max_size=size).map(lambda data: build(Choices(data)))


def known_dtypes(names: Sequence[str]) -> tuple[np.dtype[Any], ...]:
    """The types of `names` that this installation has (bfloat16 needs ml_dtypes)."""
    found = []
    for name in names:
        if name == "bfloat16":
            try:
                import ml_dtypes  # noqa: F401  (registers the name)
            except ModuleNotFoundError:
                continue
        try:
            found.append(np.dtype(name))
        except TypeError:
            continue
    return tuple(found)


_EXTENDED = (np.dtype(np.longdouble).name, np.dtype(np.clongdouble).name)

EVERYTHING = Capabilities(
    input_dtypes=(*Capabilities().input_dtypes, *_EXTENDED),
    sum_dtypes=(*Capabilities().sum_dtypes, *_EXTENDED),
    out_dtypes=(*Capabilities().out_dtypes, *_EXTENDED),
)
"""All that convpar can be asked for."""


_COMMON = ("float32", "float32", "uint8", "float64", "complex64", "float16")


@dataclass(frozen=True)
class Types:
    """One choice of types: names as `Case` takes them."""

    x: str
    w: str
    dtype: str | None
    overflow: str


def type_table(capabilities: Capabilities) -> dict[str, dict[str, tuple[Types, ...]]]:
    """Every choice of types inside `capabilities`, by type of image and type of filter."""
    c = capabilities
    return _type_table(c.input_dtypes, c.sum_dtypes, c.out_dtypes, c.sum_is_output)


@functools.cache
def _type_table(
    inputs: tuple[str, ...], sums: tuple[str, ...], outputs: tuple[str, ...], sum_is_output: bool
) -> dict[str, dict[str, tuple[Types, ...]]]:
    c = Capabilities(input_dtypes=inputs, sum_dtypes=sums, out_dtypes=outputs, sum_is_output=sum_is_output)
    table: dict[str, dict[str, tuple[Types, ...]]] = {}
    given, asked = known_dtypes(inputs), (None, *known_dtypes(outputs))
    for x, w in itertools.product(given, given):
        found = []
        for dtype, overflow in itertools.product(asked, OVERFLOW_RULES):
            try:
                p = Problem.of((1, 1, 1, 1), (1, 1, 1, 1), x, w, dtype=dtype, overflow=overflow)
            except (TypeError, Unsupported):
                continue
            if (overflow == "wrap" or is_integer(p.out_dtype)) and c.refusal(p) is None:
                found.append(Types(x.name, w.name, None if dtype is None else dtype.name, overflow))
        if found:
            table.setdefault(x.name, {})[w.name] = tuple(found)
    return table


@dataclass(frozen=True)
class Style:
    """What a check wants its cases to be like.

    Attributes
    ----------
    data : tuple of str
        Kinds of data, keys of `DATA`.
    layouts : bool
        Odd memory for every array.
    special_fill : bool
        NaN, infinities and -0.0 as fill values.
    keep : function of Types to bool, or None
        Narrows the types.
    accuracies : tuple
        What ``accuracy=`` may be.
    threads : tuple
        What ``num_threads=`` may be.
    host : bool
        Whether NumPy arrays may be given to a backend that computes on a GPU.
    """

    data: tuple[str, ...] = FINITE
    layouts: bool = False
    special_fill: bool = False
    keep: Callable[[Types], bool] | None = None
    accuracies: tuple[Any, ...] = (None,)
    threads: tuple[int | None, ...] = (None, 1, 2)
    host: bool = True


@functools.lru_cache(maxsize=256)
def _narrowed(
    capabilities: Capabilities, keep: Callable[[Types], bool] | None
) -> dict[str, dict[str, tuple[Types, ...]]]:
    table = type_table(capabilities)
    if keep is None:
        return table
    kept: dict[str, dict[str, tuple[Types, ...]]] = {}
    for x, row in table.items():
        for w, choices in row.items():
            left = tuple(t for t in choices if keep(t))
            if left:
                kept.setdefault(x, {})[w] = left
    return kept


def any_types(capabilities: Capabilities, keep: Callable[[Types], bool] | None = None) -> bool:
    """Whether any choice of types is left."""
    return bool(_narrowed(capabilities, keep))


def draw_types(draw: Choices, capabilities: Capabilities, keep: Callable[[Types], bool] | None) -> Types:
    """Types inside `capabilities`, equal types of image and filter and no ``dtype=`` more often than not."""
    table = _narrowed(capabilities, keep)
    # What most callers use comes up most often, and is what a failing case shrinks to.
    x = draw.pick((*(name for name in _COMMON if name in table), *table))
    row = table[x]
    w = x if x in row and not draw.rarely(3) else draw.pick(tuple(row))
    plain = tuple(t for t in row[w] if t.dtype is None)
    return draw.pick(plain if plain and not draw.rarely(3) else row[w])


def draw_memory(
    draw: Choices, shape: tuple[int, ...], itemsize: int, *, output: bool, device: bool
) -> Memory:
    """A way to lie in memory; outputs neither repeat elements nor are read-only, `device` arrays are aligned."""
    axes = len(shape)
    order: tuple[int, ...] = ()
    if axes == 4 and draw.rarely(2):
        order = draw.pick(((0, 2, 3, 1), (0, 1, 3, 2), (2, 3, 1, 0), (3, 2, 1, 0), (1, 0, 2, 3)))
    steps: tuple[int, ...] = ()
    if draw.rarely(2):
        allowed = (1, 1, -1, 2, -2, 3) if output else (1, 1, -1, 2, -2, 3, 0)
        steps = tuple(draw.pick(allowed) for _ in range(axes))
    if device:
        return Memory(order, steps, gap=draw.pick((0, itemsize)))
    several = itemsize > 1
    return Memory(
        order,
        steps,
        swapped=several and draw.rarely(3),
        offset=draw.pick((1, itemsize - 1, itemsize // 2)) if several and draw.rarely(3) else 0,
        gap=draw.pick((1, itemsize, 3)) if draw.rarely(3) else 0,
        read_only=not output and draw.rarely(3),
    )


def draw_config(draw: Choices, options: Mapping[str, Option]) -> tuple[tuple[str, Any], ...]:
    """Some of `options` with values that they allow, small ones where any number is."""
    chosen = []
    for name, option in options.items():
        if draw.rarely(2):
            chosen.append((name, draw_value(draw, option)))
    return tuple(chosen)


def draw_value(draw: Choices, option: Option) -> Any:
    """A value that `option` allows."""
    if option.allowed is not None:
        return draw.pick(option.allowed)
    if option.kind == "pair":
        return draw.pick((1, 2, 3, 4, 7, 8)), draw.pick((1, 2, 3, 4, 5, 8, 16, 17))
    if option.kind == "bytes":
        return draw.pick((1 << 20, 1 << 12, 256, 1))
    return draw.pick((1, 2, 3, 4, 8))


def _fill_values(dtype: np.dtype[Any], special: bool) -> tuple[Any, ...]:
    if dtype.kind == "b":
        return 0, 1
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        return 0, 1, int(limits.max), int(limits.min), 1.75
    if special:
        return 0, math.nan, math.inf, -math.inf, -0.0, 1.5
    return 0, 1.5, -2, -0.0


def _size(draw: Choices) -> int:
    return draw.upto(40 if draw.rarely(4) else 9)


def _axis(
    draw: Choices, k: int, extent: int, named: bool, wide: bool, empty: bool, border: bool
) -> tuple[int, int, int]:
    """Size, padding before and padding after of one axis, such that the filter fits."""
    size = draw.upto(3) if wide else _size(draw)
    if size == 0 and (border or not empty):
        size = 1
    if named:
        return size, 0, 0
    most = 3 * size + 2 if wide else 3
    before, after = draw.upto(most), draw.upto(most)
    return max(size, extent - before - after), before, after


def draw_case(
    draw: Choices,
    capabilities: Capabilities,
    options: Mapping[str, Option],
    style: Style,
) -> Case:
    """A case whose problem, but for the accuracy it asks for, lies inside `capabilities`."""
    c = capabilities
    types = draw_types(draw.part("types"), c, style.keep)
    values = draw.part("values")
    data, seed = values.pick(style.data), values.upto(255)
    flip, host = values.rarely(2), values.rarely(4)
    threads, accuracy = values.pick(style.threads), values.pick(style.accuracies)
    configs = draw.part("config")
    config = draw_config(configs, options) if options and configs.rarely(2) else ()
    draw = draw.part("shapes")
    if c.filter_sizes is not None:
        kh, kw = draw.pick(c.filter_sizes)
    else:
        most = 8 if draw.rarely(8) else 4
        kh, kw = (least + draw.upto(most) for least in c.least_filter)
    dilation, stride, groups = (1, 1), (1, 1), 1
    if c.dilated and draw.rarely(3):
        dilation = (1 + draw.upto(2), 1 + draw.upto(2))
    if c.strided and draw.rarely(3):
        stride = draw.pick(c.strides) if c.strides else (1 + draw.upto(2), 1 + draw.upto(2))
    if c.grouped and draw.rarely(4):
        groups = 2 + draw.upto(1)
    n = draw.pick((1, 1, 2, 3, 0) if draw.rarely(3) else (1, 2))
    few = (1, 2, 3, 1, 2, 3, 0)
    # As many as fill a vector or two, and beyond.
    if c.depthwise:
        groups, cg, ocg = draw.pick((2, 3, 7, 8, 9, 16, 17, 33)), 1, 1
    elif c.least_channels > 1:
        cg = c.least_channels + draw.pick((0, 1, 2, 15, 16, 17, 49))
        ocg = draw.pick((*few, 16, 17, 33))
    else:
        cg = draw.pick(few)
        ocg = draw.pick(few if groups == 1 else (1, 2))
    padding: Any = draw.pick(("valid", "same", "full", "sides", "sides", "wide"))
    boundary = draw.pick(c.boundaries) if padding != "valid" else "fill"
    named, wide = padding in ("same", "full"), padding == "wide"
    sizes, sides = [], []
    for k, d in ((kh, dilation[0]), (kw, dilation[1])):
        extent = d * (k - 1) + 1
        if padding == "valid":
            sizes.append(extent + _size(draw))
            continue
        size, before, after = _axis(draw, k, extent, named, wide, draw.rarely(8), boundary != "fill")
        sizes.append(size)
        sides += [before, after]
    if padding not in ("valid", "same", "full"):
        padding = tuple(sides)
    case = Case(
        x_shape=(n, groups * cg, sizes[0], sizes[1]),
        w_shape=(groups * ocg, cg, kh, kw),
        x_dtype=types.x,
        w_dtype=None if types.w == types.x else types.w,
        dtype=types.dtype,
        overflow=types.overflow,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        boundary=boundary,
        flip=flip,
        data=data,
        seed=seed,
        config=config,
        threads=threads,
        host=style.host and c.device == "gpu" and host,
    )
    case = _with_values(values, case, style)
    problem = _problem(case)
    if problem is None or c.refusal(problem) is not None:
        # No integer type holds the sum of so many products: let it wrap.
        case = replace(case, overflow="wrap")
        problem = _problem(case)
        assume(problem is not None and c.refusal(problem) is None)
        assert problem is not None
    most_macs = MOST_MACS * (_SEVERAL_CHANNELS if c.least_channels > 1 else 1)
    if problem.macs > most_macs:
        assume(problem.macs <= most_macs * max(n, 1) * ocg)
        case = replace(case, x_shape=(1, *case.x_shape[1:]), w_shape=(groups, *case.w_shape[1:]))
    if style.layouts:
        case = with_memory(draw, case, c.device)
    # Whether an accuracy is met is for the backend to say, and for the check to hold it to.
    return replace(case, accuracy=accuracy)


def with_memory(draw: Choices, case: Case, kind: str) -> Case:
    """`case` with its arrays, for a backend of device `kind`, laid out in odd ways."""
    p = case.problem
    device = not case.host and not device_place(kind).takes_any_layout

    def memory(name: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Memory:
        found = draw_memory(draw.part(name), shape, dtype.itemsize, output=name == "out", device=device)
        # bfloat16 has no other byte order.
        return replace(found, swapped=False) if dtype.name == "bfloat16" else found

    return replace(
        case,
        x=memory("x", p.x_shape, p.x_dtype),
        w=memory("w", p.w_shape, p.w_dtype),
        bias=Memory() if p.bias_dtype is None else memory("bias", (p.oc,), p.bias_dtype),
        out=memory("out", p.out_shape, p.out_dtype),
    )


def _with_values(draw: Choices, case: Case, style: Style) -> Case:
    """`case` with a bias and a fill value, each now and then."""
    x, w = (np.dtype(t) for t in (case.x_dtype, case.w_dtype or case.x_dtype))
    if draw.rarely(3):
        bias = draw.pick(_bias_dtypes(x.name, w.name, case.dtype))
        case = replace(case, bias_dtype=bias)
    if case.boundary == "fill" and case.padding != "valid" and draw.rarely(2):
        common = np.result_type(x, w)
        special = style.special_fill and case.data not in EXACT
        case = replace(case, fillvalue=draw.pick(_fill_values(common, special)))
    return case


@functools.lru_cache(maxsize=4096)
def _bias_dtypes(x: str, w: str, dtype: str | None) -> tuple[str, ...]:
    """Types of a bias that convert to the sum's without changing kind, the sum's own first."""
    total = Problem.of((1, 1, 1, 1), (1, 1, 1, 1), x, w, dtype=dtype).sum_dtype
    others = known_dtypes(
        ("int8", "uint8", "int32", "int64", "float16", "float32", "float64", "complex64", *_EXTENDED)
    )
    return tuple(dict.fromkeys((total.name, *(d.name for d in others if np.can_cast(d, total, "same_kind")))))


def _problem(case: Case) -> Problem | None:
    try:
        return case.problem
    except Unsupported:
        return None
    except TypeError:
        # A sum that must not wrap may be kept in a type that the bias doesn't convert to.
        if case.overflow != "wrap":
            return None
        raise


def cases(
    capabilities: Capabilities,
    options: Mapping[str, Option],
    style: Style,
) -> st.SearchStrategy[Case]:
    """Cases inside `capabilities`; see `draw_case`."""

    return drawn(lambda draw: draw_case(draw, capabilities, options, style))


assert set(FINITE) | set(SPECIAL) <= set(DATA)
