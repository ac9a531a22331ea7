"""Checks that the answer is right: problems drawn from what a backend declares, results compared with SciPy."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from convpar import boundary
from convpar.backend import Option, Refusal, Threshold
from convpar.problem import Problem, Unsupported

from . import strategies
from .case import DATA, Case, Wrong
from .strategies import EVERYTHING, ROUNDING, SPECIAL, Choices, Style, drawn
from .trial import NotApplicable, Trial, check, converts, is_rounded, raises, sums_elsewhere

LARGEST = 4_000_000
"""Multiply-accumulates of the largest problem made to reach a declared path."""

_ACCURACIES = ("elementwise", "normwise", 1e-3, 1e-7)


@check("agrees-with-scipy")
def agrees_with_scipy(trial: Trial) -> None:
    """Every kind of problem it takes has SciPy's answer."""
    style = Style(data=("sparse", "uniform", "halves", "extremes"), threads=(None, 1))

    trial.each(trial.strategy(style), trial.run)
    trial.insist_on_service()


@check("error-bound")
def error_bound(trial: Trial) -> None:
    """Sums in floating point keep the published bound at every element."""
    trial.need(is_rounded, "floating-point types")
    promised = tuple(a for a in (None, *_ACCURACIES) if trial.backend.capabilities.error.meets(a))
    style = Style(data=ROUNDING, keep=is_rounded, threads=(None, 1), accuracies=promised)
    trial.each(trial.strategy(style), trial.run)


@check("subnormals")
def subnormals(trial: Trial) -> None:
    """Numbers below the smallest normal one count, unless the contract says that they may be flushed."""
    trial.need(is_rounded, "floating-point types")
    trial.each(trial.strategy(Style(data=("subnormal",), keep=is_rounded, threads=(None, 1))), trial.run)


@check("special-values")
def special_values(trial: Trial) -> None:
    """Infinities, NaN and overflow end where IEEE arithmetic puts them and nowhere else."""
    trial.need(is_rounded, "floating-point types")
    style = Style(data=SPECIAL, keep=is_rounded, special_fill=True, threads=(None, 1))
    trial.each(trial.strategy(style), trial.run)


@check("sum-types")
def sum_types(trial: Trial) -> None:
    """Mixed types and dtype= are summed in the type of the spec."""
    trial.need(sums_elsewhere, "mixed types and no dtype=")
    style = Style(data=("uniform", "extremes", "sparse"), keep=sums_elsewhere, threads=(None, 1))
    trial.each(trial.strategy(style), trial.run)


@check("conversions")
def conversions(trial: Trial) -> None:
    """Sums are converted as dtype= and overflow= say: wrapped, clipped, half to even."""
    trial.need(converts, "dtype= or overflow=")
    style = Style(data=("halves", "extremes", "uniform", "halves"), keep=converts, threads=(None, 1))
    trial.each(trial.strategy(style), trial.run)


@check("overflow-raise")
def overflow_raise(trial: Trial) -> None:
    """overflow="raise" raises OverflowError with the first place that doesn't fit, and only then."""
    trial.need(raises, "overflow='raise'")
    style = Style(data=("extremes", "uniform", "sparse", "halves"), keep=raises)
    trial.each(trial.strategy(style, config=True), trial.run)


@check("memory-layouts")
def memory_layouts(trial: Trial) -> None:
    """Arrays may be strided, reversed, transposed, broadcast, byte-swapped, misaligned and read-only."""
    trial.each(trial.strategy(Style(data=("sparse", "uniform", "extremes"), layouts=True)), trial.run)
    trial.insist_on_service()


@check("around-thresholds")
def around_thresholds(trial: Trial) -> None:
    """Sizes just below, at and above each published threshold are right, and every declared path runs."""
    ways: dict[str, list[tuple[int, Case, Threshold]]] = {}
    declared: dict[str, list[Case]] = {}

    def sized(draw: Choices) -> tuple[Case, bool, int, int, int]:
        style = Style(
            data=("sparse", "uniform", "separable"), layouts=draw.rarely(3), threads=(1, 2, 3, None)
        )
        case = strategies.draw_case(draw, trial.backend.capabilities, trial.backend.options, style)
        return case, draw.rarely(2), draw.upto(11), draw.pick((1, 2, 3)), draw.pick((0, -1, 1))

    def body(given: tuple[Case, bool, int, int, int]) -> None:
        case, pinned, index, m, delta = given
        plan = trial.plan(case, trial.arrays(case))
        if plan is None:
            return
        trial.tally.declared.update(plan.paths)
        for path in plan.paths:
            if len(cases := declared.setdefault(path, [])) < 8:
                cases.append(case)
        # What a plan chose by itself for this size it may choose otherwise for another.
        fixed = replace(case, config=tuple(plan.config.items()))
        # A plan without any work says little about others.
        for t in plan.thresholds if case.problem.macs else ():
            trial.tally.declared.add(t.path)
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
            trial.run(case)
        except Wrong as e:
            # What failed is the resized case, not the one that was drawn.
            raise Wrong(f"{e}\nat:    {case!r}") from e

    trial.each(drawn(sized), body)
    # What depends on the values of the filter has no threshold.
    for path, cases in sorted(declared.items()):
        for case, kind in itertools.product(cases, ("separable", "sparse")):
            if path not in trial.tally.run:
                trial.tally.examples += 1
                trial.run(replace(case, data=kind))
    for path in sorted(trial.tally.declared - trial.tally.run):
        _reach(trial, path, ways.get(path, []))


def _reach(trial: Trial, path: str, ways: list[tuple[int, Case, Threshold]]) -> None:
    """Run what the thresholds say leads to `path`, and larger; `Wrong` if nothing does."""
    for _, case, t in ways:
        size = t.value
        # A plan for more may set its threshold higher: follow it as far as that is cheap, unless it stays behind.
        passed = False
        while (
            not passed and (grown := resized(replace(case, data="sparse"), t.axis, size, LARGEST)) is not None
        ):
            for threads in (1, 2):
                trial.tally.examples += 1
                run = replace(grown, threads=threads)
                try:
                    plan = trial.run(run)
                except Wrong as e:
                    raise Wrong(f"{e}\n{trial.again(run)}") from e
                if path in trial.tally.run:
                    return
                moved = () if plan is None else plan.thresholds
                passed = any((m.axis, m.path) == (t.axis, path) and 4 * m.value <= size for m in moved)
            size *= 2
    at = ", ".join(sorted({f"{t.axis} = {t.value}" for _, _, t in ways}))
    raise Wrong(
        f"the path {path!r} is declared and was never run "
        + (f"(its threshold: {at})" if at else "(and no threshold leads to it within reach)")
        + f"\n{trial.again(())}"
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
def options(trial: Trial) -> None:
    """Every value of every option is kept in the plan's config and gives the right answer."""
    if not trial.backend.options:
        raise NotApplicable("it has no options")
    pairs = [(name, value) for name, option in trial.backend.options.items() for value in _values(option)]
    for name, value in pairs:
        served, reason = _run_option(trial, name, value, max(1 / len(pairs), 3 / trial.examples))
        if not served:
            trial.tally.notes.append(f"config {name}={value!r} was never served: {reason}")


def _run_option(trial: Trial, name: str, value: Any, share: float) -> tuple[int, str]:
    """Run `share` of the examples with one option set; how many were served, and why another wasn't."""
    served, reason = 0, ""

    def chosen(draw: Choices) -> Case:
        style = Style(data=("sparse", "uniform"), layouts=draw.rarely(4))
        case = strategies.draw_case(draw, trial.backend.capabilities, trial.backend.options, style)
        others = dict(case.config) if draw.rarely(2) else {}
        return replace(case, config=tuple({**others, name: value}.items()))

    def body(case: Case) -> None:
        nonlocal served, reason
        arrays = trial.arrays(case)
        plan = case.plan(trial.backend, arrays)
        if isinstance(plan, Refusal):
            reason = plan.reason
            trial.tally.refuse(plan)
            return
        served += 1
        trial.tally.served += 1
        for key, asked in case.config:
            # None leaves the choice to the plan.
            if asked is not None and plan.config.get(key) != asked:
                raise Wrong(f"config[{key!r}] was {asked!r} and the plan has {plan.config.get(key)!r}")
        missing = set(trial.backend.options) - set(plan.config)
        if missing:
            raise Wrong(f"the plan's config lacks {', '.join(sorted(missing))}")
        arrays.run(plan)
        trial.tally.saw(plan)

    trial.each(drawn(chosen), body, share)
    return served, reason


def _values(option: Option) -> tuple[Any, ...]:
    if option.allowed is not None:
        return option.allowed
    return {"pair": ((1, 1), (3, 5), (8, 16)), "int": (1, 2, 5), "bytes": (1, 4096, 1 << 20)}[option.kind]


@check("outside-capabilities")
def outside_capabilities(trial: Trial) -> None:
    """Any problem at all is right or refused with a reason."""
    style = Style(
        data=tuple(DATA), layouts=True, special_fill=True, accuracies=(None, None, None, *_ACCURACIES)
    )
    own = trial.backend.capabilities
    # One step outside in each direction, so that no one restriction hides what is behind the others.
    everything = replace(EVERYTHING, device=own.device)
    wider = [
        everything,
        replace(everything, filter_sizes=own.filter_sizes),
        replace(own, filter_sizes=None, least_filter=(1, 1), least_channels=1),
        replace(
            own,
            strided=True,
            strides=None,
            dilated=True,
            grouped=True,
            depthwise=False,
            boundaries=boundary.MODES,
        ),
        replace(own, sum_is_output=False),
    ]

    def any_problem(draw: Choices) -> Case:
        return strategies.draw_case(draw, draw.pick(wider), trial.backend.options, style)

    trial.each(drawn(any_problem), trial.run)
