"""One check of one backend: how problems are drawn, run, counted and reported."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
from hypothesis import HealthCheck, Phase, Verbosity, assume
from hypothesis import strategies as st
from hypothesis.errors import Flaky, Unsatisfiable

from convpar.backend import Backend, Capabilities, Option, Plan, Refusal

from . import strategies
from .case import Arrays, Case, Wrong
from .memory import NAN_BYTE, OTHER_BYTE
from .strategies import Style, Types, cases

EXAMPLES = 300
"""Problems that a property draws unless told otherwise."""


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

    def refuse(self, refusal: Refusal) -> None:
        """Count a refusal."""
        # Numbers of the problem go, those of type names and of what is taken instead stay.
        given, semicolon, allowed = refusal.reason.partition(";")
        given = re.sub(r"\b\d+x\d+\b|(?<![\w.])\d[\d.]*(e[-+]?\d+)?(?!\w)", "#", given)
        self.refusals[given + semicolon + allowed] += 1

    def saw(self, plan: Plan) -> None:
        """Add the paths of a plan that has run."""
        self.declared.update(plan.paths)
        self.run.update(plan.paths_run())


@dataclass
class Trial:
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
    examples: int = EXAMPLES
    seed: int = 0
    shrink: bool = True
    tally: Tally = field(default_factory=Tally)

    # -- drawing

    def strategy(
        self, style: Style, *, config: bool = False, capabilities: Capabilities | None = None
    ) -> st.SearchStrategy[Case]:
        """Cases inside the backend's capabilities, or others; with `config`, some of its options set."""
        options: Mapping[str, Option] = self.backend.options if config else {}
        return cases(capabilities or self.backend.capabilities, options, style)

    def need(self, keep: Callable[[Types], bool], what: str) -> None:
        """Raises `NotApplicable` if the backend takes no types that `keep` keeps."""
        if not strategies.any_types(self.backend.capabilities, keep):
            raise NotApplicable(f"it takes no {what}")

    def each(
        self, strategy: st.SearchStrategy[Any], body: Callable[[Any], object], share: float = 1.0
    ) -> None:
        """Run `body` on `share` of the trial's examples.

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
        except Flaky as e:
            first = next(iter(getattr(e, "exceptions", ())), e)
            raise Wrong(f"fails only sometimes, with the same problem: {first}") from e
        except Unsatisfiable:
            raise NotApplicable("no problem inside its capabilities could be drawn") from None

    def again(self, drawn: Any) -> str:
        """Lines that reproduce a failure: the command, and each case drawn (see `Case.check`)."""
        lines = [
            f"again: convpar verify {self.backend.name} --check {self.check} "
            f"--seed {self.seed} --examples {self.examples}"
        ]
        found = drawn if isinstance(drawn, (tuple, list)) else (drawn,)
        lines += [f"case:  {case!r}" for case in found if isinstance(case, Case)]
        return "\n".join(lines)

    # -- running

    def arrays(self, case: Case, **how: Any) -> Arrays:
        """New arrays for a run of `case`; see `Case.arrays`."""
        return case.arrays(self.backend.capabilities.device, **how)

    def plan(self, case: Case, arrays: Arrays) -> Plan | None:
        """The plan, or None where the backend refuses, which is counted."""
        plan = case.plan(self.backend, arrays)
        if isinstance(plan, Refusal):
            self.tally.refuse(plan)
            return None
        self.tally.served += 1
        return plan

    def run(self, case: Case) -> Plan | None:
        """Plan and run a case with every check that one run allows; None if refused."""
        arrays = self.arrays(case, pattern=OTHER_BYTE if case.seed % 2 else NAN_BYTE)
        plan = self.plan(case, arrays)
        if plan is not None:
            arrays.run(plan)
            self.tally.saw(plan)
        return plan

    def prepared(self, case: Case, **how: Any) -> tuple[Plan, Arrays]:
        """The plan and arrays of a case; a refused one is left out of the count."""
        arrays = self.arrays(case, **how)
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
    """A named check. Calling it with a `Trial` raises `Wrong` or `NotApplicable`, or returns."""

    name: str
    summary: str
    function: Callable[[Trial], None]

    def __call__(self, trial: Trial) -> None:
        self.function(trial)


def check(name: str) -> Callable[[Callable[[Trial], None]], Check]:
    """Make a function a `Check`; the first line of its docstring is the summary."""

    def made(function: Callable[[Trial], None]) -> Check:
        return Check(name, (function.__doc__ or "").partition("\n")[0].rstrip("."), function)

    return made


# -- which types a check is about


def is_rounded(t: Types) -> bool:
    return any(np.dtype(name).kind not in "biu" for name in (t.x, t.w))


def sums_elsewhere(t: Types) -> bool:
    return t.x != t.w or t.dtype is not None


def converts(t: Types) -> bool:
    return t.dtype is not None or t.overflow != "wrap"


def raises(t: Types) -> bool:
    return t.overflow == "raise"


def returns(t: Types) -> bool:
    return t.overflow != "raise"
