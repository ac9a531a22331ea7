"""Checks that the answer is right: problems drawn from what a backend declares, results compared with SciPy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from convpar import boundary
from convpar.backend import Option, Refusal, Threshold
from convpar.problem import Problem, Unsupported

from . import strategies
from .case import DATA, Case, Wrong
from .session import NotApplicable, Session, check, converts, is_rounded, raises, sums_elsewhere
from .strategies import EVERYTHING, ROUNDING, SPECIAL, Draw, Style, pick

LARGEST = 4_000_000
"""Multiply-accumulates of the largest problem made to reach a declared path."""

_ACCURACIES = ("elementwise", "normwise", 1e-3, 1e-7)


@check("agrees-with-scipy")
def agrees_with_scipy(s: Session) -> None:
    """Every kind of problem it takes has SciPy's answer."""
    style = Style(data=("sparse", "uniform", "halves", "extremes"), threads=(None, 1))

    s.each(s.strategy(style), s.run)
    s.insist_on_service()


@check("error-bound")
def error_bound(s: Session) -> None:
    """Sums in floating point keep the published bound at every element."""
    s.need(is_rounded, "floating-point types")
    promised = tuple(a for a in (None, *_ACCURACIES) if s.backend.capabilities.error.meets(a))
    style = Style(data=ROUNDING, keep=is_rounded, threads=(None, 1), accuracies=promised)
    s.each(s.strategy(style), s.run)


@check("special-values")
def special_values(s: Session) -> None:
    """Infinities, NaN, overflow and subnormals end where IEEE arithmetic puts them and nowhere else."""
    s.need(is_rounded, "floating-point types")
    style = Style(data=SPECIAL, keep=is_rounded, special_fill=True, threads=(None, 1))
    s.each(s.strategy(style), s.run)


@check("sum-types")
def sum_types(s: Session) -> None:
    """Mixed types and dtype= are summed in the type of the spec."""
    s.need(sums_elsewhere, "mixed types and no dtype=")
    style = Style(data=("uniform", "extremes", "sparse"), keep=sums_elsewhere, threads=(None, 1))
    s.each(s.strategy(style), s.run)


@check("conversions")
def conversions(s: Session) -> None:
    """Sums are converted as dtype= and overflow= say: wrapped, clipped, half to even."""
    s.need(converts, "dtype= or overflow=")
    style = Style(data=("halves", "extremes", "uniform", "halves"), keep=converts, threads=(None, 1))
    s.each(s.strategy(style), s.run)


@check("overflow-raise")
def overflow_raise(s: Session) -> None:
    """overflow="raise" raises OverflowError with the first place that doesn't fit, and only then."""
    s.need(raises, "overflow='raise'")
    style = Style(data=("extremes", "uniform", "sparse", "halves"), keep=raises)
    s.each(s.strategy(style, config=True), s.run)


@check("memory-layouts")
def memory_layouts(s: Session) -> None:
    """Arrays may be strided, reversed, transposed, broadcast, byte-swapped, misaligned and read-only."""
    s.each(s.strategy(Style(data=("sparse", "uniform", "extremes"), layouts=True)), s.run)
    s.insist_on_service()


@check("around-thresholds")
def around_thresholds(s: Session) -> None:
    """Sizes just below, at and above each published threshold are right, and every declared path runs."""
    ways: dict[str, list[tuple[int, Case, Threshold]]] = {}

    @st.composite
    def sized(draw: Draw) -> tuple[Case, bool, int, int, int]:
        style = Style(
            data=("sparse", "uniform"), layouts=not draw(st.integers(0, 2)), threads=(1, 2, 3, None)
        )
        case = strategies.draw_case(draw, s.backend.capabilities, s.backend.options, style)
        return (
            case,
            draw(st.booleans()),
            draw(st.integers(0, 11)),
            pick(draw, (1, 2, 3)),
            pick(draw, (0, -1, 1)),
        )

    def body(drawn: tuple[Case, bool, int, int, int]) -> None:
        case, pinned, index, m, delta = drawn
        plan = s.plan(case, s.arrays(case))
        if plan is None:
            return
        s.tally.declared.update(plan.paths)
        # What a plan chose by itself for this size it may choose otherwise for another.
        fixed = replace(case, config=tuple(plan.config.items()))
        # A plan without any work says little about others.
        for t in plan.thresholds if case.problem.macs else ():
            s.tally.declared.add(t.path)
            least = resized(fixed, t.axis, t.value, LARGEST)
            if least is not None:
                known = ways.setdefault(t.path, [])
                known.append((least.problem.macs, fixed, t))
                known.sort(key=lambda way: way[0])
                del known[4:]
        if plan.thresholds:
            t = plan.thresholds[index % len(plan.thresholds)]
            size = m * t.value + delta
            case = resized(fixed if pinned else case, t.axis, size, strategies.MOST_MACS) or case
        try:
            s.run(case)
        except Wrong as e:
            # What failed is the resized case, not the one that was drawn.
            raise Wrong(f"{e}\nat:    {case!r}") from e

    s.each(sized(), body)
    for path in sorted(s.tally.declared - s.tally.run):
        _reach(s, path, ways.get(path, []))


def _reach(s: Session, path: str, ways: list[tuple[int, Case, Threshold]]) -> None:
    """Run what the thresholds say leads to `path`, and larger; `Wrong` if nothing does."""
    for _, case, t in ways:
        size = t.value
        # A plan for more may set its threshold higher, so follow it as far as that is cheap.
        while (grown := resized(replace(case, data="sparse"), t.axis, size, LARGEST)) is not None:
            for threads in (1, 2):
                s.tally.examples += 1
                run = replace(grown, threads=threads)
                try:
                    s.run(run)
                except Wrong as e:
                    raise Wrong(f"{e}\n{s.again(run)}") from e
                if path in s.tally.run:
                    return
            size *= 2
    at = ", ".join(sorted({f"{t.axis} = {t.value}" for _, _, t in ways}))
    raise Wrong(
        f"the path {path!r} is declared and was never run "
        + (f"(its threshold: {at})" if at else "(and no threshold leads to it within reach)")
        + f"\n{s.again(())}"
    )


def resized(case: Case, axis: str, size: int, most_macs: int) -> Case | None:
    """`case` with `size` along a threshold's axis, other sizes cut where it would cost too much.

    Returns None if there is no such problem with at most `most_macs` multiply-accumulates.
    """
    if size < 1:
        return None
    p = case.problem
    full = {
        "n": max(p.n, 1),
        "c": max(p.c // p.groups, 1),
        "oc": max(p.oc // p.groups, 1),
        "oh": max(p.oh, 1),
        "ow": max(p.ow, 1),
    }
    for cut in ((), ("n",), ("n", "c", "oc"), ("n", "c", "oc", "oh"), tuple(full)):
        sizes = {name: 1 if name in cut else value for name, value in full.items()}
        if axis == "macs":
            each = sizes["n"] * sizes["c"] * sizes["oc"] * p.kh * p.kw
            sizes["oh"] = max(math.isqrt(size // each), 1)
            sizes["ow"] = -(-size // (each * sizes["oh"]))
        else:
            sizes[axis] = size
        if math.prod(sizes.values()) * p.kh * p.kw <= most_macs:
            return _of_sizes(case, p, sizes)
    return None


def _of_sizes(case: Case, p: Problem, sizes: Mapping[str, int]) -> Case | None:
    rows, top, bottom = _input_size(sizes["oh"], p.stride[0], p.extent[0], p.padding[:2])
    columns, left, right = _input_size(sizes["ow"], p.stride[1], p.extent[1], p.padding[2:])
    grown = replace(
        case,
        x_shape=(sizes["n"], sizes["c"], rows, columns),
        w_shape=(sizes["oc"], sizes["c"], p.kh, p.kw),
        padding=(top, bottom, left, right),
        groups=1,
    )
    try:
        _ = grown.problem
    except (Unsupported, TypeError):
        # More channels may leave no integer type that holds the sum.
        return None
    return grown


def _input_size(out: int, stride: int, extent: int, sides: tuple[int, ...]) -> tuple[int, int, int]:
    """Samples and padding of an axis with `out` outputs, keeping its padding where some image remains."""
    before, after = sides
    size = (out - 1) * stride + extent - before - after
    if size < 1:
        return (out - 1) * stride + extent, 0, 0
    return size, before, after


@check("options")
def options(s: Session) -> None:
    """Every value of every option is kept in the plan's config and gives the right answer."""
    if not s.backend.options:
        raise NotApplicable("it has no options")
    pairs = [(name, value) for name, option in s.backend.options.items() for value in _values(option)]
    for name, value in pairs:
        served, reason = _run_option(s, name, value, max(1 / len(pairs), 3 / s.examples))
        if not served:
            s.tally.notes.append(f"config {name}={value!r} was never served: {reason}")


def _run_option(s: Session, name: str, value: Any, share: float) -> tuple[int, str]:
    """Run `share` of the examples with one option set; how many were served, and why another wasn't."""
    served, reason = 0, ""

    @st.composite
    def chosen(draw: Draw) -> Case:
        style = Style(data=("sparse", "uniform"), layouts=not draw(st.integers(0, 3)))
        case = strategies.draw_case(draw, s.backend.capabilities, s.backend.options, style)
        others = dict(case.config) if draw(st.booleans()) else {}
        return replace(case, config=tuple({**others, name: value}.items()))

    def body(case: Case) -> None:
        nonlocal served, reason
        arrays = s.arrays(case)
        plan = case.plan(s.backend, arrays)
        if isinstance(plan, Refusal):
            reason = plan.reason
            s.tally.refuse(plan)
            return
        served += 1
        s.tally.served += 1
        for key, asked in case.config:
            # None leaves the choice to the plan.
            if asked is not None and plan.config.get(key) != asked:
                raise Wrong(f"config[{key!r}] was {asked!r} and the plan has {plan.config.get(key)!r}")
        missing = set(s.backend.options) - set(plan.config)
        if missing:
            raise Wrong(f"the plan's config lacks {', '.join(sorted(missing))}")
        arrays.run(plan)
        s.tally.saw(plan)

    s.each(chosen(), body, share)
    return served, reason


def _values(option: Option) -> tuple[Any, ...]:
    if option.allowed is not None:
        return option.allowed
    return {"pair": ((1, 1), (3, 5), (8, 16)), "int": (1, 2, 5), "bytes": (1, 4096, 1 << 20)}[option.kind]


@check("outside-capabilities")
def outside_capabilities(s: Session) -> None:
    """Any problem at all is right or refused with a reason."""
    style = Style(
        data=tuple(DATA), layouts=True, special_fill=True, accuracies=(None, None, None, *_ACCURACIES)
    )
    own = s.backend.capabilities
    # One step outside in each direction, so that no one restriction hides what is behind the others.
    everything = replace(EVERYTHING, device=own.device)
    wider = [
        everything,
        replace(everything, filter_sizes=own.filter_sizes),
        replace(own, filter_sizes=None),
        replace(own, strided=True, dilated=True, grouped=True, boundaries=boundary.MODES),
        replace(own, sum_is_output=False),
    ]

    @st.composite
    def any_problem(draw: Draw) -> Case:
        return strategies.draw_case(draw, pick(draw, wider), s.backend.options, style)

    s.each(any_problem(), s.run)
