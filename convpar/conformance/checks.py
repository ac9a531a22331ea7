"""What every backend must pass: named checks, each a function that raises `Wrong` at the first breach.

Properties draw problems from what the backend declares and compare every result
with SciPy; contract checks look at what a run touches, how it repeats, and how
it gets along with threads, forks and workspaces. `CHECKS` lists them all.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, assume
from hypothesis import strategies as st
from hypothesis.errors import FlakyFailure, Unsatisfiable

from convpar import boundary
from convpar.backend import (
    CONTRACT_VERSION,
    Backend,
    Capabilities,
    Device,
    ErrorContract,
    Option,
    Plan,
    Refusal,
    Threshold,
)
from convpar.problem import Problem, Unsupported, is_integer

from . import strategies
from .arrays import GUARD, NAN_BYTE, OTHER_BYTE, Place, aligned_bytes, place_of
from .case import DATA, Arrays, Case, Wrong
from .strategies import EVERYTHING, FINITE, ROUNDING, SPECIAL, Draw, Style, Types, cases, pick

THREADS = (1, 2, 3, 5)
"""Thread counts that must agree; more than this machine may have cores."""

_ACCURACIES = ("elementwise", "normwise", 1e-3, 1e-7)

LARGEST = 50_000_000
"""Multiply-accumulates of the largest problem made to reach a declared path."""

FORK_SECONDS = 30.0
"""How long a forked child may take for a problem of some microseconds."""


class NotApplicable(Exception):
    """The check has nothing to look at in this backend; the message says why."""


@dataclass
class Tally:
    """What a check saw on its way.

    Attributes
    ----------
    examples, served : int
        Problems drawn, and those not refused.
    refusals : Counter
        How often each reason was given, with its numbers written as ``#``.
    declared, run : set of str
        Paths that plans declared, and those that ran.
    notes : list of str
        What else is worth telling.
    """

    examples: int = 0
    served: int = 0
    refusals: Counter[str] = field(default_factory=Counter)
    declared: set[str] = field(default_factory=set)
    run: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def saw(self, plan: Plan) -> None:
        """Add the paths of a plan that has run."""
        self.declared.update(plan.paths)
        self.run.update(plan.paths_run())


@dataclass
class Session:
    """One check of one backend.

    Attributes
    ----------
    backend : Backend
    check : str
        The check's name, for messages.
    examples : int
        Problems that a property draws.
    seed : int
        Of Hypothesis; the same seed draws the same problems.
    shrink : bool
        Whether a failing problem is made as small as it goes.
    """

    backend: Backend
    check: str
    examples: int = 300
    seed: int = 0
    shrink: bool = True
    tally: Tally = field(default_factory=Tally)
    place: Place = field(init=False)

    def __post_init__(self) -> None:
        self.place = place_of(self.backend.capabilities.device)

    # -- drawing

    def strategy(
        self, style: Style, *, config: bool = False, capabilities: Capabilities | None = None
    ) -> st.SearchStrategy[Case]:
        """Cases inside the backend's capabilities, or others; with `config`, some of its options set."""
        options: Mapping[str, Option] = self.backend.options if config else {}
        return cases(capabilities or self.backend.capabilities, options, self.place, style)

    def need(self, keep: Callable[[Types], bool], what: str) -> None:
        """Raises `NotApplicable` if the backend takes no types that `keep` keeps."""
        if not strategies.any_types(self.backend.capabilities, keep):
            raise NotApplicable(f"it takes no {what}")

    def each(self, strategy: st.SearchStrategy[Any], body: Callable[[Any], None], share: float = 1.0) -> None:
        """Run `body` on `share` of the session's examples.

        Raises
        ------
        Wrong
            From `body`, for the smallest failing example found, with how to see it again.
        """
        phases = (Phase.generate, Phase.shrink) if self.shrink else (Phase.generate,)

        @hypothesis.seed(self.seed)
        @hypothesis.settings(
            max_examples=max(round(self.examples * share), 1),
            database=None,
            deadline=None,
            phases=phases,
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            print_blob=False,
            suppress_health_check=list(HealthCheck),
        )
        @hypothesis.given(strategy)
        def run(drawn: Any) -> None:
            self.tally.examples += 1
            try:
                body(drawn)
            except Wrong as e:
                raise Wrong(f"{e}\n{self.again(drawn)}") from e.__cause__

        try:
            run()
        except FlakyFailure as e:
            raise Wrong(f"fails only sometimes: {e.exceptions[0]}") from e
        except Unsatisfiable:
            raise NotApplicable("no problem inside its capabilities could be drawn") from None

    def again(self, drawn: Any) -> str:
        """Two lines that reproduce a failure: the whole check, and this example alone."""
        name = self.backend.name
        lines = [f"again: convpar verify {name} --check {self.check} --seed {self.seed} --examples {self.examples}"]
        found = drawn if isinstance(drawn, tuple) else (drawn,)
        for case in found:
            if isinstance(case, Case):
                lines.append(f"or:    from convpar.conformance import Case, Memory; {case!r}.check({name!r})")
        return "\n".join(lines)

    # -- running

    def plan(self, case: Case, arrays: Arrays) -> Plan | None:
        """The plan, or None where the backend refuses, which is counted."""
        plan = case.plan(self.backend, arrays)
        if isinstance(plan, Refusal):
            self.tally.refusals[re.sub(r"\d+", "#", plan.reason)] += 1
            return None
        self.tally.served += 1
        return plan

    def run(self, case: Case) -> Plan | None:
        """Plan and run a case with every check that one run allows; None if refused."""
        arrays = case.arrays(self.place, pattern=OTHER_BYTE if case.seed % 2 else NAN_BYTE)
        plan = self.plan(case, arrays)
        if plan is not None:
            arrays.run(plan)
            self.tally.saw(plan)
        return plan

    def prepared(self, case: Case, **how: Any) -> tuple[Plan, Arrays]:
        """The plan and arrays of a case; a refused one is left out of the count."""
        arrays = case.arrays(self.place, **how)
        plan = self.plan(case, arrays)
        assume(plan is not None)
        assert plan is not None
        return plan, arrays

    def insist_on_service(self) -> None:
        """Raises `Wrong` if nearly everything inside the declared capabilities was refused."""
        t = self.tally
        if t.examples >= 20 and t.served < t.examples / 10:
            reason, count = t.refusals.most_common(1)[0]
            raise Wrong(
                f"refused {t.examples - t.served} of {t.examples} problems inside its own capabilities; "
                f"most often ({count}): {reason}"
            )


@dataclass(frozen=True)
class Check:
    """A named check. Calling it with a `Session` raises `Wrong` or `NotApplicable`, or returns."""

    name: str
    summary: str
    function: Callable[[Session], None]

    def __call__(self, session: Session) -> None:
        self.function(session)


CHECKS: dict[str, Check] = {}
"""Every check by name, in the order in which they run."""


def _check(name: str) -> Callable[[Callable[[Session], None]], Callable[[Session], None]]:
    def add(function: Callable[[Session], None]) -> Callable[[Session], None]:
        summary = (function.__doc__ or "").partition("\n")[0].rstrip(".")
        CHECKS[name] = Check(name, summary, function)
        return function

    return add


def _is_rounded(t: Types) -> bool:
    return any(np.dtype(name).kind not in "biu" for name in (t.x, t.w))


def _sums_elsewhere(t: Types) -> bool:
    return t.x != t.w or t.dtype is not None


def _converts(t: Types) -> bool:
    return t.dtype is not None or t.overflow != "wrap"


def _raises(t: Types) -> bool:
    return t.overflow == "raise"


def _returns(t: Types) -> bool:
    return t.overflow != "raise"


# -- properties: the answer is right


@_check("agrees-with-scipy")
def agrees_with_scipy(s: Session) -> None:
    """Every kind of problem it takes has SciPy's answer."""
    style = Style(data=("sparse", "uniform", "halves", "extremes"), threads=(None, 1))

    s.each(s.strategy(style), s.run)
    s.insist_on_service()


@_check("error-bound")
def error_bound(s: Session) -> None:
    """Sums in floating point keep the published bound at every element."""
    s.need(_is_rounded, "floating-point types")
    promised = tuple(a for a in (None, *_ACCURACIES) if s.backend.capabilities.error.meets(a))
    style = Style(data=ROUNDING, keep=_is_rounded, threads=(None, 1), accuracies=promised)
    s.each(s.strategy(style), s.run)


@_check("special-values")
def special_values(s: Session) -> None:
    """Infinities, NaN, overflow and subnormals end where IEEE arithmetic puts them and nowhere else."""
    s.need(_is_rounded, "floating-point types")
    style = Style(data=SPECIAL, keep=_is_rounded, special_fill=True, threads=(None, 1))
    s.each(s.strategy(style), s.run)


@_check("sum-types")
def sum_types(s: Session) -> None:
    """Mixed types and dtype= are summed in the type of the spec."""
    s.need(_sums_elsewhere, "mixed types and no dtype=")
    style = Style(data=("uniform", "extremes", "sparse"), keep=_sums_elsewhere, threads=(None, 1))
    s.each(s.strategy(style), s.run)


@_check("conversions")
def conversions(s: Session) -> None:
    """Sums are converted as dtype= and overflow= say: wrapped, clipped, half to even."""
    s.need(_converts, "dtype= or overflow=")
    style = Style(data=("halves", "extremes", "uniform", "halves"), keep=_converts, threads=(None, 1))
    s.each(s.strategy(style), s.run)


@_check("memory-layouts")
def memory_layouts(s: Session) -> None:
    """Arrays may be strided, reversed, transposed, broadcast, byte-swapped, misaligned and read-only."""
    s.each(s.strategy(Style(data=("sparse", "uniform", "extremes"), layouts=True)), s.run)
    s.insist_on_service()


@_check("around-thresholds")
def around_thresholds(s: Session) -> None:
    """Sizes just below, at and above each published threshold are right, and every declared path runs."""
    ways: dict[str, list[tuple[int, Case, Threshold]]] = {}

    @st.composite
    def sized(draw: Draw) -> tuple[Case, int, int, int]:
        style = Style(data=("sparse", "uniform"), layouts=not draw(st.integers(0, 2)), threads=(1, 2, 3, None))
        case = strategies.draw_case(draw, s.backend.capabilities, s.backend.options, s.place, style)
        return case, draw(st.integers(0, 11)), pick(draw, (1, 2, 3)), pick(draw, (0, -1, 1))

    def body(drawn: tuple[Case, int, int, int]) -> None:
        case, index, m, delta = drawn
        plan = s.plan(case, case.arrays(s.place))
        if plan is None:
            return
        s.tally.declared.update(plan.paths, (t.path for t in plan.thresholds))
        for t in plan.thresholds:
            least = resized(case, t.axis, t.value, LARGEST)
            if least is not None:
                known = ways.setdefault(t.path, [])
                known.append((least.problem.macs, case, t))
                known.sort(key=lambda way: way[0])
                del known[4:]
        if plan.thresholds:
            t = plan.thresholds[index % len(plan.thresholds)]
            case = resized(case, t.axis, m * t.value + delta, strategies.MOST_MACS) or case
        try:
            s.run(case)
        except Wrong as e:
            # What failed is the resized case, not the one that was drawn.
            raise Wrong(f"{e}\nat:    {case!r}") from e

    s.each(sized(), body)
    for path in sorted(s.tally.declared - s.tally.run):
        _reach(s, path, ways.get(path, []))


def _reach(s: Session, path: str, ways: list[tuple[int, Case, Threshold]]) -> None:
    """Run what the thresholds say leads to `path`; `Wrong` if nothing does."""
    for _, case, t in ways:
        for size in (t.value, t.value + 1, 2 * t.value, 2 * t.value + 1):
            for threads in (1, 2):
                grown = resized(replace(case, data="sparse", threads=threads), t.axis, size, LARGEST)
                if grown is None:
                    continue
                s.tally.examples += 1
                try:
                    s.run(grown)
                except Wrong as e:
                    raise Wrong(f"{e}\n{s.again(grown)}") from e
                if path in s.tally.run:
                    return
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
    n, c, oc = max(p.n, 1), max(p.c // p.groups, 1), max(p.oc // p.groups, 1)
    oh, ow = max(p.oh, 1), max(p.ow, 1)
    k = p.kh * p.kw
    for n, c, oc, oh, ow in ((n, c, oc, oh, ow), (1, c, oc, oh, ow), (1, 1, 1, oh, ow), (1, 1, 1, 1, ow), (1,) * 5):
        sizes = {"n": n, "c": c, "oc": oc, "oh": oh, "ow": ow}
        if axis == "macs":
            each = n * c * oc * k
            sizes["oh"] = max(math.isqrt(size // each), 1)
            sizes["ow"] = max(-(-size // (each * sizes["oh"])), 1)
        else:
            sizes[axis] = size
        if math.prod(sizes.values()) * k > most_macs:
            continue
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


@_check("options")
def options(s: Session) -> None:
    """Every value of every option is kept in the plan's config and gives the right answer."""
    if not s.backend.options:
        raise NotApplicable("it has no options")
    pairs = [(name, value) for name, option in s.backend.options.items() for value in _values(option)]
    served: set[int] = set()
    reasons: dict[int, str] = {}

    @st.composite
    def chosen(draw: Draw) -> tuple[Case, int]:
        index = draw(st.integers(0, len(pairs) - 1))
        style = Style(data=("sparse", "uniform"), layouts=not draw(st.integers(0, 3)))
        case = strategies.draw_case(draw, s.backend.capabilities, s.backend.options, s.place, style)
        config = dict(case.config) if draw(st.booleans()) else {}
        config[pairs[index][0]] = pairs[index][1]
        return replace(case, config=tuple(config.items())), index

    def body(drawn: tuple[Case, int]) -> None:
        case, index = drawn
        arrays = case.arrays(s.place)
        plan = case.plan(s.backend, arrays)
        if isinstance(plan, Refusal):
            reasons[index] = plan.reason
            s.tally.refusals[re.sub(r"\d+", "#", plan.reason)] += 1
            return
        s.tally.served += 1
        served.add(index)
        for name, value in case.config:
            if plan.config.get(name) != value:
                raise Wrong(f"config[{name!r}] was {value!r} and the plan has {plan.config.get(name)!r}")
        missing = set(s.backend.options) - set(plan.config)
        if missing:
            raise Wrong(f"the plan's config lacks {', '.join(sorted(missing))}")
        arrays.run(plan)
        s.tally.saw(plan)

    s.each(chosen(), body)
    for index, (name, value) in enumerate(pairs):
        if index not in served:
            why = reasons.get(index, "never drawn")
            s.tally.notes.append(f"config {name}={value!r} was never served: {why}")


def _values(option: Option) -> tuple[Any, ...]:
    if option.allowed is not None:
        return option.allowed
    return {"pair": ((1, 1), (3, 5), (8, 16)), "int": (1, 2, 5), "bytes": (1, 4096, 1 << 20)}[option.kind]


@_check("outside-capabilities")
def outside_capabilities(s: Session) -> None:
    """Any problem at all is right or refused with a reason."""
    style = Style(data=tuple(DATA), layouts=True, special_fill=True, accuracies=(None, None, None, *_ACCURACIES))
    own = s.backend.capabilities
    # One step outside in each direction, so that no one restriction hides what is behind the others.
    wider = [
        EVERYTHING,
        replace(EVERYTHING, filter_sizes=own.filter_sizes),
        replace(own, filter_sizes=None),
        replace(own, strided=True, dilated=True, grouped=True, boundaries=boundary.MODES),
        replace(own, sum_is_output=False),
    ]

    @st.composite
    def any_problem(draw: Draw) -> Case:
        # What accuracy is promised is for the backend to say, and for the check to hold it to.
        capabilities = replace(pick(draw, wider), error=ErrorContract())
        return strategies.draw_case(draw, capabilities, s.backend.options, s.place, style)

    s.each(any_problem(), s.run)


# -- contract: what a run touches


@_check("writes-every-element")
def writes_every_element(s: Session) -> None:
    """No element of the output keeps what it held before, whatever that was."""

    def body(case: Case) -> None:
        left = []
        for pattern in (NAN_BYTE, OTHER_BYTE):
            plan, arrays = s.prepared(case, pattern=pattern)
            arrays.call(plan, case.threads)
            left.append(arrays.out.unwritten())
        never = left[0] & left[1]
        if never.any():
            place = tuple(int(i) for i in np.argwhere(never)[0])
            raise Wrong(f"{int(never.sum())} of {never.size} elements were never written, first {place}")

    s.each(s.strategy(Style(data=FINITE, layouts=True, keep=_returns), config=True), body)


@_check("writes-nothing-else")
def writes_nothing_else(s: Session) -> None:
    """Not one byte beside the output's elements is written: not before, after or between them."""

    def body(case: Case) -> None:
        for pattern in (NAN_BYTE, OTHER_BYTE):
            plan, arrays = s.prepared(case, pattern=pattern)
            arrays.call(plan, case.threads)
            if arrays.out.changed_outside():
                raise Wrong("the run wrote to memory outside the output's elements")

    s.each(s.strategy(Style(layouts=True), config=True), body)


@_check("inputs-untouched")
def inputs_untouched(s: Session) -> None:
    """Image, filter and bias, and the memory around them, stay as they were."""

    def body(case: Case) -> None:
        # Arrays that can't be written raise instead of changing; other checks draw those.
        open_ = replace(
            case, x=replace(case.x, read_only=False), w=replace(case.w, read_only=False),
            bias=replace(case.bias, read_only=False),
        )  # fmt: skip
        plan, arrays = s.prepared(open_)
        arrays.call(plan, case.threads)
        for name, buffer in (("x", arrays.x), ("w", arrays.w), ("bias", arrays.bias)):
            if buffer is not None and buffer.changed():
                raise Wrong(f"the run changed its input {name}")

    s.each(s.strategy(Style(layouts=True), config=True), body)


@_check("overflow-raise")
def overflow_raise(s: Session) -> None:
    """overflow="raise" raises OverflowError with the first place that doesn't fit, and only then."""
    s.need(_raises, "overflow='raise'")
    style = Style(data=("extremes", "uniform", "sparse", "halves"), keep=_raises)
    s.each(s.strategy(style, config=True), s.run)


# -- contract: runs repeat


@_check("plans-hold-no-values")
def plans_hold_no_values(s: Session) -> None:
    """One plan serves other data in the same arrays, and the first data again."""

    def body(case: Case) -> None:
        plan, arrays = s.prepared(case)
        arrays.run(plan)
        other = case.arrays(s.place, data_seed=case.seed + 1000)
        other.run(plan)
        for mine, new in ((arrays.x, other.x), (arrays.w, other.w), (arrays.bias, other.bias)):
            if mine is not None and new is not None:
                mine.refill(new.given())
        try:
            arrays.run(plan)
        except Wrong as e:
            raise Wrong(f"after the inputs were overwritten in place: {e}") from e
        case.arrays(s.place).run(plan)

    s.each(s.strategy(Style(data=("uniform", "sparse")), config=True), body)


@_check("same-bits")
def same_bits(s: Session) -> None:
    """Repeated calls and any number of threads give the same bits, unless the contract says otherwise."""

    def body(case: Case) -> None:
        plan, first = s.prepared(case)
        assume(plan.accuracy.deterministic)
        first.call(plan, 1)
        for threads in (*THREADS, None):
            arrays = case.arrays(s.place, pattern=OTHER_BYTE)
            arrays.call(plan, threads)
            if arrays.out.bits() != first.out.bits():
                what = "a repeated call" if threads == 1 else f"num_threads={threads}"
                raise Wrong(f"{what} gave other bits than num_threads=1")

    if not s.backend.capabilities.error.deterministic:
        raise NotApplicable("it says that its bits may differ from call to call")
    style = Style(data=("uniform", "wide", "extremes"), keep=_returns)
    s.each(s.strategy(style, config=True), body)


@_check("thread-counts")
def thread_counts(s: Session) -> None:
    """Any number of threads, more than there are cores or outputs too, gives the right answer."""

    def body(case: Case) -> None:
        plan, _ = s.prepared(case)
        for threads in THREADS:
            arrays = case.arrays(s.place)
            try:
                arrays.run(plan, threads=threads)
            except Wrong as e:
                raise Wrong(f"with num_threads={threads}: {e}") from e
        s.tally.saw(plan)

    s.each(s.strategy(Style(data=("sparse", "uniform")), config=True), body)


@_check("workspace")
def workspace(s: Session) -> None:
    """A workspace of exactly the stated size is enough, is not overrun, and its old contents don't matter."""
    # Where it begins is the caller's affair; device allocators align.
    offsets = (0, 1, 8, 63) if s.place.takes_any_layout else (0, 256)

    @st.composite
    def placed(draw: Draw) -> tuple[Case, int, int]:
        style = Style(data=("sparse", "uniform"), keep=_returns)
        case = strategies.draw_case(draw, s.backend.capabilities, s.backend.options, s.place, style)
        return case, pick(draw, THREADS), pick(draw, offsets)

    def body(drawn: tuple[Case, int, int]) -> None:
        case, threads, offset = drawn
        plan, arrays = s.prepared(case)
        size = plan.workspace_bytes(threads)
        if not isinstance(size, int) or size < 0:
            raise Wrong(f"workspace_bytes({threads}) is {size!r}, not a number of bytes")
        right = arrays.expected(plan)
        bits = []
        for pattern in (NAN_BYTE, OTHER_BYTE):
            arrays = case.arrays(s.place)
            start = GUARD + offset
            raw = s.place.upload(aligned_bytes(start + size + GUARD, pattern))
            part = s.place.view(raw, start, (size,), np.uint8, (1,))
            arrays.inspect(right, arrays.call(plan, threads, part))
            host = s.place.download(raw)
            if np.any(host[:start] != pattern) or np.any(host[start + size :] != pattern):
                raise Wrong(f"with num_threads={threads} the run wrote outside its workspace of {size} bytes")
            bits.append(arrays.out.bits())
        if plan.accuracy.deterministic and bits[0] != bits[1]:
            raise Wrong("the result depends on what the workspace held before")

    s.each(placed(), body)


@_check("concurrent-callers")
def concurrent_callers(s: Session) -> None:
    """Four threads at once, on plans that they share, get what they would get alone."""

    def body(drawn: list[Case]) -> None:
        plans = [s.prepared(case)[0] for case in drawn]
        # Everybody has the same problems, data of his own, and begins elsewhere.
        work = [
            [case.arrays(s.place, data_seed=case.seed + 7 * caller) for case in drawn] for caller in range(4)
        ]
        start = threading.Barrier(4)
        failures: list[Wrong] = []
        errors: dict[tuple[int, int], OverflowError | None] = {}

        def call(caller: int) -> None:
            start.wait()
            for turn in range(2 * len(drawn)):
                i = (turn + caller) % len(drawn)
                try:
                    errors[caller, i] = work[caller][i].call(plans[i], drawn[i].threads)
                except Wrong as e:
                    failures.append(e)

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for t in callers:
            t.start()
        for t in callers:
            t.join()
        if failures:
            raise Wrong(f"with four callers at once: {failures[0]}") from failures[0]
        for caller, mine in enumerate(work):
            for i, arrays in enumerate(mine):
                try:
                    arrays.inspect(arrays.expected(plans[i]), errors[caller, i])
                except Wrong as e:
                    raise Wrong(f"with four callers at once: {e}") from e

    one = s.strategy(Style(data=("sparse", "uniform"), threads=(1, 2)), config=True)
    s.each(st.lists(one, min_size=3, max_size=3), body, 1 / 6)


@_check("after-fork")
def after_fork(s: Session) -> None:
    """A child forked after a parallel run computes too, and doesn't hang."""
    if s.backend.capabilities.device != "cpu":
        raise NotApplicable("a GPU's context doesn't survive a fork, whatever a backend does")
    if not hasattr(os, "fork"):
        raise NotApplicable("this system has no fork")

    def body(case: Case) -> None:
        plan, arrays = s.prepared(case)
        arrays.run(plan, threads=2)
        wrong = _in_child(lambda: case.arrays(s.place).run(plan, threads=2))
        if wrong is not None:
            raise Wrong(f"in a child forked after a parallel run: {wrong}")
        case.arrays(s.place).run(plan, threads=2)

    s.each(s.strategy(Style(data=("sparse", "uniform")), config=True), body, 1 / 30)


def _in_child(work: Callable[[], None]) -> str | None:
    """What went wrong with `work` in a forked child, or None; a child that takes too long is killed."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forking with threads around; whether that works is what is being checked.
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
    if child == 0:
        # Nothing of the parent's may run here on the way out: no handlers, no buffers.
        code = 1
        try:
            work()
            code = 0
        except Wrong as e:
            os.write(writer, str(e).encode()[:4000])
        finally:
            os._exit(code)
    os.close(writer)
    status = _wait(child, FORK_SECONDS)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    if status is None:
        return f"it hung, and was killed after {FORK_SECONDS:g} s"
    if os.WIFSIGNALED(status):
        return f"it died of signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status):
        return said or "it failed"
    return None


def _wait(child: int, seconds: float) -> int | None:
    """The child's exit status, or None if it had to be killed."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


# -- contract: what a backend says of itself


@_check("declaration")
def declaration(s: Session) -> None:
    """Names, options, plans and refusals have the form that the contract asks for."""
    b = s.backend
    _declares(b)
    _rejects_bad_config(s)
    s.each(s.strategy(Style(data=("sparse",)), config=True), lambda case: _plan_is_sound(s, case), 1 / 3)


def _declares(b: Backend) -> None:
    c = b.capabilities
    facts = {
        f"contract must be {CONTRACT_VERSION}": b.contract == CONTRACT_VERSION,
        "name must be a word": isinstance(b.name, str) and bool(re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", b.name)),
        "summary must be a line of text": isinstance(b.summary, str) and bool(b.summary.strip()) and "\n" not in b.summary,
        "builds_on must be None or a name": b.builds_on is None or isinstance(b.builds_on, str),
        "capabilities must name input, sum and output types": all((c.input_dtypes, c.sum_dtypes, c.out_dtypes)),
        "capabilities must name known types": set((*c.input_dtypes, *c.sum_dtypes, *c.out_dtypes))
        <= set((*EVERYTHING.input_dtypes, *EVERYTHING.sum_dtypes, *EVERYTHING.out_dtypes)),
        "capabilities must name known boundaries": set(c.boundaries) <= set(boundary.MODES),
        "unavailable() must give None or a sentence": b.unavailable() is None,
    }  # fmt: skip
    for name, option in b.options.items():
        facts[f"option {name!r} must have a summary"] = bool(option.summary.strip())
        facts[f"option {name!r} must allow its default"] = (
            option.default is None or option.check(name, option.default) == option.default
        )
    for fact, holds in facts.items():
        if not holds:
            raise Wrong(fact)


def _rejects_bad_config(s: Session) -> None:
    b = s.backend
    types = next(iter(next(iter(strategies.type_table(b.capabilities).values())).values()))[0]
    kh, kw = b.capabilities.filter_sizes[0] if b.capabilities.filter_sizes else (3, 3)
    case = Case(
        x_shape=(1, 1, kh + 4, kw + 4), w_shape=(1, 1, kh, kw),
        x_dtype=types.x, w_dtype=types.w, dtype=types.dtype, overflow=types.overflow,
    )  # fmt: skip
    layouts = case.arrays(s.place).layouts()
    device = Device(b.capabilities.device, 0)

    def planned(config: Any, device: Device = device) -> Any:
        return b.plan(case.problem, layouts, device, config)

    bad: list[tuple[Any, type[Exception], str]] = [
        ({"no such option": 1}, ValueError, "an unknown key"),
        (3, TypeError, "a config that is no mapping"),
    ]
    bad += [({name: object()}, ValueError, f"a wrong value for {name!r}") for name in b.options]
    for config, error, what in bad:
        try:
            planned(config)
        except error as e:
            if isinstance(config, dict) and next(iter(config)) not in str(e):
                raise Wrong(f"{what} in config raised {error.__name__}, which doesn't name it: {e}") from e
            continue
        except Exception as e:
            raise Wrong(f"{what} in config raised {type(e).__name__}, not {error.__name__}: {e}") from e
        raise Wrong(f"{what} in config was accepted; it must be a {error.__name__}")
    if device.kind == "cpu" and not isinstance(planned(None, Device("gpu", 0)), Refusal):
        raise Wrong("arrays on a GPU must be refused; nothing is downloaded unasked")


def _plan_is_sound(s: Session, case: Case) -> None:
    plan, _ = s.prepared(case)
    facts = {
        "problem must be the one asked for": plan.problem == case.problem,
        "config must be a mapping with every option": isinstance(plan.config, Mapping)
        and set(plan.config) == set(s.backend.options),
        "launch must be a mapping": isinstance(plan.launch, Mapping),
        "paths must be names": isinstance(plan.paths, tuple) and all(isinstance(i, str) for i in plan.paths),
        "paths_run() must be empty before the first run": plan.paths_run() == frozenset(),
        "cost must be None or seconds": plan.cost is None or (math.isfinite(plan.cost) and plan.cost >= 0),
        "str() must work": isinstance(str(plan), str),
        "workspace_bytes() must work without a thread count": plan.workspace_bytes() >= 0,
    }
    for t in plan.thresholds:
        facts[f"{t} must have a known axis and a positive value"] = t.axis in (
            "oh", "ow", "oc", "n", "c", "macs",
        ) and t.value >= 1  # fmt: skip
        facts[f"{t} must name its path"] = isinstance(t.path, str) and bool(t.path)
    for fact, holds in facts.items():
        if not holds:
            raise Wrong(f"the plan's {fact}")
    arrays = case.arrays(s.place)
    arrays.run(plan)
    if not plan.paths_run() <= set(plan.paths):
        raise Wrong(f"paths_run() gives {sorted(plan.paths_run())}, the plan declares {sorted(plan.paths)}")
    if case.problem.outputs and plan.paths and not plan.paths_run():
        raise Wrong("no path was run, and yet there are outputs")
    if is_integer(case.problem.sum_dtype) and not plan.accuracy.deterministic:
        s.tally.notes.append("integer results are said to be non-deterministic")
