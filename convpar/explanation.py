"""What `convpar.explain` answers: what a call would do and why, as an object and as text.

The reasons why a rung is passed over come from choose.py and the rungs' refusals, the facts about the one chosen from
its plan's ``launch``.
"""

from __future__ import annotations

from typing import Any

from .backend import Plan
from .choose import Choice, duration
from .problem import Problem

__all__ = ["Explanation"]


class Explanation:
    """What a call would do and why; its text is ``str(explanation)``.

    Attributes
    ----------
    problem : Problem
    backend : str or None
        The rung that would run, None if nothing can.
    plan : Plan or None
    considered : list of (str, str or None)
        Each candidate with the reason it was passed over, None for the one chosen.
    """

    def __init__(self, problem: Problem, choice: Choice, num_threads: int | None) -> None:
        self.problem = problem
        self.backend = None if choice.backend is None else choice.backend.name
        self.plan = choice.plan
        self.considered = choice.considered
        self._choice = choice
        self._num_threads = num_threads

    def __reduce__(self) -> Any:
        raise TypeError(
            "an explanation holds a plan and can't be pickled or copied; keep its text, str(explanation)"
        )

    def __str__(self) -> str:
        p = self.problem
        lines = [f"A {p}."]
        lines.append(
            f"Work: {_count(p.macs)} multiply-accumulates ({p.terms} for each of {_count(p.outputs)} outputs), "
            f"at least {_bytes(p.least_bytes)} moved: {p.arithmetic_intensity:.3g} operations a byte."
        )
        backend, made = self._choice.backend, self._choice.plan
        if backend is None or made is None:
            lines.append(f"Nothing would run: no backend for {self._choice.asked!r} can do this.")
        else:
            lines.append(f"Runs: {backend.name} ({backend.summary}), asked for as {self._choice.asked!r}.")
            lines += [f"  {name}: {value}" for name, value in made.launch.items()]
            if made.config:
                options = ", ".join(f"{k}={v}" for k, v in made.config.items())
                lines.append(f"  options: {options}")
            lines.append(f"  workspace: {_bytes(made.workspace_bytes(self._num_threads))}")
            lines.append(f"  accuracy: {_promise(made, p)}")
            if made.cost is not None:
                lines.append(f"  estimate: {duration(made.cost)} on one thread")
        passed = [(name, why) for name, why in self.considered if why is not None]
        if passed:
            lines.append("Passed over:")
            lines += [f"  {name}: {why}" for name, why in passed]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return str(self)


def _promise(made: Plan, p: Problem) -> str:
    if p.sum_dtype.kind in "iu":
        return "exact, in integers of " + p.sum_dtype.name
    bound = (
        "every element within its own bound"
        if made.accuracy.kind == "elementwise"
        else "within a bound for the plane"
    )
    factors = f", factors rounded to {made.accuracy.operand_dtype}" if made.accuracy.operand_dtype else ""
    return f"{made.accuracy.kind} ({bound}), sums in {made.accuracy.sum_dtype or p.sum_dtype.name}{factors}"


def _count(n: int) -> str:
    for unit, size in ((" G", 10**9), (" M", 10**6), (" k", 10**3)):
        if n >= size:
            return f"{n / size:.3g}{unit}"
    return str(n)


def _bytes(n: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return f"{n} bytes"
