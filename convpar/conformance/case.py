"""A `Case`: one problem with its data, the memory of its arrays and how to run it, written as one line.

The line that a failure prints is the case's `repr`; evaluating it and calling
`Case.check` runs the very same bytes again.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from convpar.backend import Backend, Device, Layout, Layouts, Plan, Refusal
from convpar.problem import Problem, is_integer

from . import error_bounds
from .memory import NAN_BYTE, Buffer, Memory, Place, device_place

Array = npt.NDArray[Any]
_Rng = np.random.Generator


class Wrong(AssertionError):
    """A backend broke the contract; the message says how, and how to see it again."""


# -- data


def _real_values(draw: Callable[[tuple[int, ...]], Array], shape: tuple[int, ...], dtype: Any) -> Array:
    """`draw(shape)` as `dtype`; a complex array draws its parts apart."""
    with np.errstate(all="ignore"):
        if dtype.kind != "c":
            return draw(shape).astype(dtype)
        y = np.empty(shape, dtype)
        y.real, y.imag = draw(shape), draw(shape)
        return y


def _whole(rng: _Rng, shape: tuple[int, ...], dtype: Any) -> Array:
    low = 0 if dtype.kind in "bu" else -3
    high = 2 if dtype.kind == "b" else 4
    return np.asarray(rng.integers(low, high, shape) * (rng.random(shape) < 0.6))


def _limits(dtype: Any) -> tuple[float, float]:
    """The largest and the smallest normal number of a real or complex type."""
    if dtype.name == "bfloat16":
        return 3.3895313892515355e38, 2.0**-126
    info = np.finfo(dtype)
    # Numbers are drawn in float64, which holds no larger longdouble.
    return min(float(info.max), 1e308), max(float(info.tiny), 1e-308)


def sparse(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """Integers from -3 to 3, many of them zero: sums are exact in any order."""
    return _real_values(lambda s: _whole(rng, s, dtype), shape, dtype)


def halves(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """Whole image, filter in halves: exact sums, many of which lie midway between two integers."""
    scale = 0.5 if role == "w" and dtype.kind not in "biu" else 1
    return _real_values(lambda s: _whole(rng, s, dtype) * scale, shape, dtype)


def uniform(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """Uniform in [-1, 1), or over all values of an integer type."""
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        return rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    return _real_values(lambda s: rng.uniform(-1, 1, s), shape, dtype)


def extremes(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """The ends of the type's range among small numbers: integers wrap, floats overflow."""
    if dtype.kind == "b":
        return np.ones(shape, bool)
    if is_integer(dtype):
        limits = np.iinfo(dtype)
        few = np.array([limits.min, limits.max, limits.max - 1, 0, 1], dtype)
        return np.asarray(rng.choice(few, shape))
    largest, least = _limits(dtype)
    few = np.array([largest, -largest, largest / 64, 1.0, -1.0, 0.0, least])
    return _real_values(lambda s: rng.choice(few, s), shape, dtype)


def wide(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """Magnitudes over many powers of two."""
    if dtype.kind in "biu":
        return uniform(rng, shape, dtype, role)
    span = 4 if dtype.name == "float16" else 30
    return _real_values(lambda s: rng.uniform(-1, 1, s) * 2.0 ** rng.integers(-span, span, s), shape, dtype)


def bright(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """A dark picture with a bright patch: errors of one part in a million of the patch drown the rest."""
    if role != "x" or dtype.kind in "biu":
        return uniform(rng, shape, dtype, role)
    light = 100.0 if dtype.name == "float16" else 1e6

    def picture(s: tuple[int, ...]) -> Array:
        y = rng.uniform(-1, 1, s) / light
        rows, columns = (
            slice(i, i + max(n // 3, 1)) for n in s[2:] for i in [int(rng.integers(0, max(n, 1)))]
        )
        y[:, :, rows, columns] *= light * light
        return y

    return _real_values(picture, shape, dtype)


def cancelling(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """A large flat image and a filter whose sum is nearly zero: what remains is small beside the products."""
    if dtype.kind in "biu":
        return uniform(rng, shape, dtype, role)
    if role == "x":
        return _real_values(lambda s: 64.0 + rng.uniform(-1, 1, s), shape, dtype)

    def filters(s: tuple[int, ...]) -> Array:
        y = rng.uniform(-1, 1, s)
        return np.asarray(y - y.mean() if y.size else y)

    return _real_values(filters, shape, dtype)


def separable(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """Filters that are a column times a row, every other one but for a few units in the last place of one tap."""
    if role != "w" or dtype.kind == "b":
        return bright(rng, shape, dtype, role)

    def filters(s: tuple[int, ...]) -> Array:
        column, row = (*s[:3], 1), (*s[:2], 1, s[3])
        # Products of other numbers don't survive the rounding to a narrow type.
        if dtype.kind in "iu" or dtype.itemsize == 2:
            return np.asarray(_whole(rng, column, dtype) * _whole(rng, row, dtype))
        y = rng.uniform(-1, 1, column) * rng.uniform(-1, 1, row)
        if y.size and rng.random() < 0.5:
            units = 2.0 ** (int(rng.integers(2, 6)) - (23 if dtype.name == "float32" else 52))
            y[..., -1, -1] *= 1 + units
        return np.asarray(y)

    return _real_values(filters, shape, dtype)


def subnormal(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
    """Around the smallest normal number; the filter around 1."""
    if dtype.kind in "biu" or role == "w":
        return sparse(rng, shape, dtype, role)
    least = _limits(dtype)[1]
    return _real_values(lambda s: rng.uniform(-2, 2, s) * least, shape, dtype)


def _with(special: tuple[float, ...]) -> Callable[[_Rng, tuple[int, ...], Any, str], Array]:
    def values(rng: _Rng, shape: tuple[int, ...], dtype: Any, role: str) -> Array:
        y = sparse(rng, shape, dtype, role)
        if dtype.kind not in "biu" and y.size and (role == "x" or rng.random() < 0.3):
            where = rng.random(shape) < min(0.1, 2 / y.size)
            part = y if dtype.kind != "c" or rng.random() < 0.5 else y.imag
            part[where] = rng.choice(np.array(special), int(where.sum())).astype(part.dtype)
        return y

    return values


DATA: dict[str, Callable[[_Rng, tuple[int, ...], Any, str], Array]] = {
    "sparse": sparse,
    "halves": halves,
    "uniform": uniform,
    "wide": wide,
    "bright": bright,
    "cancelling": cancelling,
    "separable": separable,
    "extremes": extremes,
    "subnormal": subnormal,
    "inf": _with((np.inf, -np.inf)),
    "nan": _with((np.nan,)),
    "inf and nan": _with((np.inf, -np.inf, np.nan, -0.0)),
}
"""Kinds of data, each a function (generator, shape, dtype, "x" or "w" or "bias") -> ndarray."""

EXACT = ("sparse", "halves")
"""Kinds of data whose sums no order of summation rounds."""


# -- cases


_PLAIN = Memory()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem and everything else that one run of it depends on.

    Attributes
    ----------
    x_shape, w_shape : (int, int, int, int)
    x_dtype, w_dtype, bias_dtype, dtype : str or None
        None for `w_dtype` repeats `x_dtype`.
    stride, padding, dilation, groups, boundary, fillvalue, flip, overflow, accuracy
        As `Problem.of` takes them.
    data : str
        A key of `DATA`.
    seed : int
        Of the data.
    x, w, bias, out : Memory
        Where the arrays lie.
    config : tuple of (str, value)
        What ``config=`` asks for.
    threads : int or None
        ``num_threads``.
    host : bool
        The arrays are NumPy's although the backend computes on a GPU.
    """

    x_shape: tuple[int, int, int, int]
    w_shape: tuple[int, int, int, int]
    x_dtype: str = "float32"
    w_dtype: str | None = None
    bias_dtype: str | None = None
    dtype: str | None = None
    stride: tuple[int, int] = (1, 1)
    padding: str | tuple[int, ...] = "valid"
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    boundary: str = "fill"
    fillvalue: Any = 0
    flip: bool = False
    overflow: str = "wrap"
    accuracy: Any = None
    data: str = "sparse"
    seed: int = 0
    x: Memory = _PLAIN
    w: Memory = _PLAIN
    bias: Memory = _PLAIN
    out: Memory = _PLAIN
    config: tuple[tuple[str, Any], ...] = ()
    threads: int | None = None
    host: bool = False

    def __repr__(self) -> str:
        given = []
        for f in fields(self):
            value = getattr(self, f.name)
            # -0.0 equals 0 and NaN nothing; their written forms tell them apart.
            if repr(value) != repr(f.default):
                text = repr(value)
                given.append(f"{f.name}={f'float({text!r})' if text in ('nan', 'inf', '-inf') else text}")
        return f"Case({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        # Hypothesis prints failing examples through this hook.
        printer.text(repr(self))

    @functools.cached_property
    def problem(self) -> Problem:
        """The problem; raises what `Problem.of` raises."""
        return Problem.of(
            self.x_shape,
            self.w_shape,
            self.x_dtype,
            self.w_dtype,
            bias_dtype=self.bias_dtype,
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            boundary=self.boundary,
            fillvalue=self.fillvalue,
            flip=self.flip,
            dtype=self.dtype,
            overflow=self.overflow,
            accuracy=self.accuracy,
        )

    def arrays(self, kind: str, *, pattern: int = NAN_BYTE, data_seed: int | None = None) -> Arrays:
        """New arrays for a backend of device `kind`; `pattern` poisons the output, `data_seed` replaces `seed`."""
        return Arrays(self, kind, pattern, self.seed if data_seed is None else data_seed)

    def plan(self, backend: Backend, arrays: Arrays) -> Plan | Refusal:
        """The plan of `backend` for this case, or its refusal.

        Raises
        ------
        Wrong
            The backend raised, or returned anything else, or a refusal without a reason.
        """
        try:
            plan = backend.plan(self.problem, arrays.layouts(), arrays.device, dict(self.config) or None)
        except Exception as e:
            raise Wrong(f"plan raised {type(e).__name__}: {e}") from e
        if isinstance(plan, Refusal):
            if not isinstance(plan.reason, str) or not plan.reason.strip():
                raise Wrong("plan refused without a reason")
            return plan
        if not isinstance(plan, Plan):
            raise Wrong(f"plan returned {type(plan).__name__}, neither a Plan nor a Refusal")
        if not plan.accuracy.meets(self.problem.accuracy):
            raise Wrong(
                f"accuracy {self.problem.accuracy!r} is asked for and the plan promises {plan.accuracy}"
            )
        return plan

    def check(self, backend: Backend | str) -> None:
        """Run this case on a backend, given by itself or by name, and compare with SciPy.

        Raises
        ------
        Wrong
            The result breaks the contract.
        """
        if isinstance(backend, str):
            from convpar import registry

            found = registry.find(backend)
            if found is None:
                raise ValueError(f"no backend named {backend!r}")
            backend = found
        arrays = self.arrays(backend.capabilities.device)
        plan = self.plan(backend, arrays)
        if isinstance(plan, Refusal):
            raise Wrong(f"refused: {plan.reason}")
        arrays.run(plan)


class Arrays:
    """The arrays of one run of a case, and what became of them."""

    def __init__(self, case: Case, kind: str, pattern: int, seed: int) -> None:
        p = self.problem = case.problem
        self.case = case
        at_home = kind == "cpu" or case.host
        self.device = Device("cpu" if at_home else "gpu", 0)
        place = self.place = Place() if at_home else device_place(kind)
        values = DATA[case.data]
        # Generators apart, so that the image doesn't change with the shape of the filter.
        xr, wr, br = (np.random.default_rng((seed, zlib.crc32(name.encode()))) for name in ("x", "w", "bias"))
        self.x = Buffer(p.x_shape, p.x_dtype, case.x, place, values(xr, p.x_shape, p.x_dtype, "x"))
        self.w = Buffer(p.w_shape, p.w_dtype, case.w, place, values(wr, p.w_shape, p.w_dtype, "w"))
        self.bias = None
        if p.bias_dtype is not None:
            self.bias = Buffer(
                (p.oc,), p.bias_dtype, case.bias, place, values(br, (p.oc,), p.bias_dtype, "bias")
            )
        self.out = Buffer(p.out_shape, p.out_dtype, case.out, place, pattern=pattern)

    def layouts(self) -> Layouts:
        """The layouts that a plan is made for."""
        return Layouts(
            Layout.of(self.x.array),
            Layout.of(self.w.array),
            None if self.bias is None else Layout.of(self.bias.array),
            Layout.of(self.out.array),
        )

    def operands(self) -> tuple[Array, Array, Array | None]:
        """Image, filter and bias in host memory, native and contiguous."""
        return self.x.given(), self.w.given(), None if self.bias is None else self.bias.given()

    def expected(self, plan: Plan) -> error_bounds.Expected:
        """What the run's result may be."""
        exact = self.case.data in EXACT
        return error_bounds.expected(self.problem, plan.accuracy, *self.operands(), exact=exact)

    def call(self, plan: Plan, threads: int | None = None, workspace: Any = None) -> OverflowError | None:
        """One run, unchecked; the OverflowError of ``overflow="raise"`` is returned.

        Raises
        ------
        Wrong
            It raised anything else.
        """
        bias = None if self.bias is None else self.bias.array
        try:
            plan.run(
                self.x.array, self.w.array, bias, self.out.array, workspace=workspace, num_threads=threads
            )
            self.place.wait()
        except OverflowError as e:
            if self.problem.overflow == "raise" and is_integer(self.problem.out_dtype):
                return e
            raise Wrong(f"run raised OverflowError: {e}") from e
        except Exception as e:
            raise Wrong(f"run raised {type(e).__name__}: {e}") from e
        return None

    def run(
        self, plan: Plan, *, threads: int | None = None, right: error_bounds.Expected | None = None
    ) -> None:
        """One run, and every check that needs no second one; `right` is `expected(plan)`, if that is known.

        Raises
        ------
        Wrong
            An element is wrong or unwritten, something else was written, an input changed.
        """
        error = self.call(plan, self.case.threads if threads is None else threads)
        self.inspect(self.expected(plan) if right is None else right, error)

    def inspect(self, right: error_bounds.Expected, error: OverflowError | None) -> None:
        """Compare what a run left with what is right; raises as `run`."""
        self.check_memory()
        if error is not None or right.must_raise.any():
            _check_overflow(right, error)
            return
        wrong = error_bounds.mismatch(self.problem, right, self.out.values())
        if wrong is None:
            return
        unwritten = self.out.unwritten()
        if unwritten.any():
            place = tuple(int(i) for i in np.argwhere(unwritten)[0])
            raise Wrong(f"the output still holds what it held before the run, first at {place}: {wrong}")
        raise Wrong(wrong)

    def check_memory(self) -> None:
        """Raises `Wrong` if a run changed an input or wrote beside the output."""
        for name, buffer in (("x", self.x), ("w", self.w), ("bias", self.bias)):
            if buffer is not None and buffer.changed():
                raise Wrong(f"the run changed its input {name}")
        if self.out.changed_outside():
            raise Wrong("the run wrote to memory outside the output's elements")


_PLACE = re.compile(r"\((\d+), (\d+), (\d+), (\d+)\)")


def _check_overflow(right: error_bounds.Expected, error: OverflowError | None) -> None:
    certain = np.argwhere(right.must_raise)
    first = tuple(int(i) for i in certain[0]) if len(certain) else None
    if error is None:
        raise Wrong(
            f"overflow='raise' and the sum at {first} is outside the output type, but nothing was raised"
        )
    found = _PLACE.search(str(error))
    if found is None:
        raise Wrong(f"the OverflowError names no place (n, oc, row, column): {error}")
    place = tuple(int(i) for i in found.groups())
    inside = all(i < n for i, n in zip(place, right.may_raise.shape, strict=True))
    if not inside or not right.may_raise[place]:
        raise Wrong(f"the OverflowError names {place}, where the sum fits; the first place is {first}")
    if first is not None and place > first:
        raise Wrong(f"the OverflowError names {place}, but {first} comes first")
