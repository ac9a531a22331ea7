"""The choosers: which rung serves a problem on a device.

A chooser asks every backend of its device for a plan and takes the cheapest one by the
plan's own estimate (`Plan.cost`), among those under the accuracy contract. No rung's speed is known here:
rungs.inc has it for the CPU, the rows of the GPU family for the GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from . import registry
from .backend import Backend, Config, Device, Layouts, Plan, Refusal, Unavailable, Unsupported
from .problem import Problem
from .registry import CHOOSERS

__all__ = ["CHOOSERS", "FALLBACK", "Choice", "choose", "names"]

FALLBACK = "numpy"
"""What serves on the CPU when no rung does: extended precision, for example."""


@dataclass
class Choice:
    """What was chosen and what was passed over.

    Attributes
    ----------
    asked : str
        The name the caller gave.
    backend, plan : Backend, Plan or None
        None if nothing serves.
    missing : str or None
        Why this machine can't run the rung that was named.
    considered : list of (str, str or None)
        Each candidate with the reason it was passed over, or None for the one chosen.
    candidates : list of (Backend, Plan)
        All that could serve, cheapest first.
    """

    asked: str
    backend: Backend | None = None
    plan: Plan | None = None
    missing: str | None = None
    considered: list[tuple[str, str | None]] = field(default_factory=list)
    candidates: list[tuple[Backend, Plan]] = field(default_factory=list)

    def required(self) -> tuple[Backend, Plan]:
        """The backend and its plan, or the error that says why there is none."""
        if self.backend is not None and self.plan is not None:
            return self.backend, self.plan
        if self.missing is not None:
            raise Unavailable(f"backend {self.asked!r} can't run here: {self.missing}")
        if self.asked not in CHOOSERS:
            raise Unsupported(f"{self.asked} can't do this: {self.considered[0][1]}")
        reasons = "; ".join(f"{name}: {why}" for name, why in self.considered) or "there is none"
        raise Unsupported(f"no backend for {self.asked!r} can do this: {reasons}")


def names() -> list[str]:
    """Every name that ``backend=`` takes: choosers and backends."""
    return [*CHOOSERS, *(b.name for b in registry.backends())]


def choose(name: Any, problem: Problem, layouts: Layouts, device: Device, config: Config | None) -> Choice:
    """The backend and plan that `name`, a rung or a chooser, gives `problem`.

    Raises
    ------
    TypeError, ValueError
        The name is no string or unknown, or options were given to a chooser.
    """
    if not isinstance(name, str):
        raise TypeError(f"backend must be a name, not {name!r}; known: {', '.join(names())}")
    if name in CHOOSERS:
        if config is not None:
            raise ValueError(f"config sets the options of one rung, and backend is the chooser {name!r}")
        return _cheapest(name, problem, layouts, device)
    backend = registry.find(name)
    if backend is None:
        raise ValueError(f"backend {name!r} is unknown; known: {', '.join(names())}")
    choice = Choice(name, missing=backend.unavailable())
    if choice.missing is not None:
        choice.considered.append((name, choice.missing))
        return choice
    plan = backend.plan(problem, layouts, device, config)
    if isinstance(plan, Refusal):
        choice.considered.append((name, plan.reason))
    else:
        choice.backend, choice.plan = backend, plan
        choice.considered.append((name, None))
    return choice


def _cheapest(name: str, problem: Problem, layouts: Layouts, device: Device) -> Choice:
    kind = CHOOSERS[name] or device.kind
    choice = Choice(name)
    if kind == "cpu" and device.kind != "cpu":
        choice.considered.append((name, f"the arrays live on {device}, and nothing is downloaded unasked"))
        return choice
    # Unless asked otherwise, a chooser keeps every element's own error bound.
    accuracy = "elementwise" if problem.accuracy is None else problem.accuracy
    served: list[tuple[float, Backend, Plan]] = []
    fallback = None
    for backend in registry.backends():
        if backend.capabilities.device != kind:
            continue
        if backend.name == FALLBACK:
            fallback = backend
            continue
        missing = backend.unavailable()
        if missing is not None:
            choice.considered.append((backend.name, missing))
            continue
        plan = backend.plan(problem, layouts, device, None)
        if isinstance(plan, Refusal):
            choice.considered.append((backend.name, plan.reason))
        elif plan.cost is None:
            choice.considered.append((backend.name, "it estimates no time; ask for it by name"))
        elif not plan.accuracy.meets(accuracy):
            choice.considered.append(
                (backend.name, f"its error is {plan.accuracy}, not {accuracy}; ask for accuracy=")
            )
        else:
            served.append((plan.cost, backend, plan))
    served.sort(key=lambda s: s[0])
    choice.candidates = [(backend, plan) for _, backend, plan in served]
    if served:
        best, choice.backend, choice.plan = served[0]
        choice.considered.append((choice.backend.name, None))
        for cost, backend, _ in served[1:]:
            choice.considered.append(
                (backend.name, f"estimated {_time(cost)}, {choice.backend.name} {_time(best)}")
            )
    elif fallback is not None:
        plan = fallback.plan(problem, layouts, device, None)
        if isinstance(plan, Refusal):
            choice.considered.append((fallback.name, plan.reason))
        else:
            choice.backend, choice.plan = fallback, plan
            choice.candidates = [(fallback, plan)]
            choice.considered.append((fallback.name, None))
    return choice


def _time(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
