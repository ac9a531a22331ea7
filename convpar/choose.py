"""The choosers: which rung serves a problem on a device.

A chooser asks every backend of its device for a plan and takes the cheapest one by the
plan's own estimate (`Plan.cost`), among those under the accuracy contract. No rung's speed is known here:
rungs.inc has it for the CPU, the rows of the GPU family for the GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

from . import registry
from .backend import Backend, Config, Device, Layouts, Plan, Refusal, Unavailable, Unsupported
from .info import check_settings
from .problem import Problem, shown
from .registry import CHOOSERS

__all__ = ["CHOOSERS", "FALLBACK", "Choice", "choose", "duration", "names"]

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
        Why this machine can't run the rung that was named, or any that the chooser has.
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
        raise TypeError(f"backend must be a name, not {shown(name)}; known: {', '.join(names())}")
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
    plan = planned(backend, problem, layouts, device, config)
    if isinstance(plan, Refusal):
        choice.considered.append((name, plan.reason))
    else:
        choice.backend, choice.plan = backend, plan
        choice.considered.append((name, None))
    return choice


_OF_A_PLAN = (
    "problem", "config", "launch", "thresholds", "paths", "accuracy", "cost",
    "workspace_bytes", "run", "paths_run",
)  # fmt: skip


def planned(
    backend: Backend, problem: Problem, layouts: Layouts, device: Device, config: Config | None
) -> Plan | Refusal:
    """What `backend` plans.

    Raises
    ------
    TypeError
        It is somebody else's backend, and gives neither a plan nor a refusal.
    """
    plan = backend.plan(problem, layouts, device, config)
    if not isinstance(plan, Refusal) and not registry.is_built_in(backend):
        lacking = [name for name in _OF_A_PLAN if not hasattr(plan, name)]
        if lacking:
            raise TypeError(
                f"plan() of the backend {backend.name!r} must give a convpar.backend.Plan or Refusal, "
                f"not {plan!r}, which lacks {', '.join(lacking)}"
            )
    return plan


def _cheapest(name: str, problem: Problem, layouts: Layouts, device: Device) -> Choice:
    kind = CHOOSERS[name] or device.kind
    choice = Choice(name)
    if kind == "cpu" and device.kind != "cpu":
        choice.considered.append((name, f"the arrays live on {device}, and nothing is downloaded unasked"))
        return choice
    # Unless asked otherwise, a chooser keeps every element's own error bound.
    accuracy = "elementwise" if problem.accuracy is None else problem.accuracy
    served: list[tuple[float, Backend, Plan]] = []
    absent: dict[str, list[str]] = {}  # what this machine lacks, and the names that need it
    fallback = None
    for backend in registry.backends():
        if backend.capabilities.device != kind:
            continue
        if backend.name == FALLBACK:
            fallback = backend
            continue
        cost, keeps = None, True
        try:
            missing = backend.unavailable()
            if missing is not None:
                absent.setdefault(missing, []).append(backend.name)
            plan = (
                Refusal(missing) if missing is not None else planned(backend, problem, layouts, device, None)
            )
            if not isinstance(plan, Refusal):
                cost, keeps = _seconds(plan), plan.accuracy.meets(accuracy)
        except Exception as e:
            plan = Refusal(left_out(backend, e))
        if isinstance(plan, Refusal):
            choice.considered.append((backend.name, plan.reason))
        elif cost is None:
            choice.considered.append((backend.name, "it estimates no time; ask for it by name"))
        elif not keeps:
            choice.considered.append(
                (backend.name, f"its error is {plan.accuracy}, not {accuracy}; ask for accuracy=")
            )
        else:
            served.append((cost, backend, plan))
    served.sort(key=lambda s: s[0])
    choice.candidates = [(backend, plan) for _, backend, plan in served]
    if served:
        best, choice.backend, choice.plan = served[0]
        choice.considered.append((choice.backend.name, None))
        for cost, backend, _ in served[1:]:
            choice.considered.append(
                (backend.name, f"estimated {duration(cost)}, {choice.backend.name} {duration(best)}")
            )
    elif fallback is not None:
        # It stands in for what isn't there, not for what a wrong setting keeps away.
        check_settings()
        nothing_there = absent and sum(map(len, absent.values())) == len(choice.considered)
        plan = fallback.plan(problem, layouts, device, None)
        if isinstance(plan, Refusal):
            choice.considered.append((fallback.name, plan.reason))
        else:
            choice.backend, choice.plan = fallback, plan
            choice.candidates = [(fallback, plan)]
            if nothing_there:
                _warn_of_fallback(name, absent)
            choice.considered.append((fallback.name, None))
    elif absent and sum(map(len, absent.values())) == len(choice.considered):
        choice.missing = _told(absent)
    return choice


def _told(absent: dict[str, list[str]]) -> str:
    """What this machine lacks, each with the names that need it where they don't all need the same."""
    return "; ".join(
        reason if len(absent) == 1 else f"{', '.join(names)}: {reason}" for reason, names in absent.items()
    )


@functools.cache
def _warn_once(message: str) -> None:
    registry.warn(message)


def _warn_of_fallback(name: str, absent: dict[str, list[str]]) -> None:
    """Say, once for each reason, that no rung of the device is there: its stand-in takes a hundred times as long."""
    _warn_once(f"backend {name!r} runs {FALLBACK!r}, which is slow: {_told(absent)}")


def _seconds(plan: Plan) -> float | None:
    """The plan's estimate, which somebody else's backend may give as anything."""
    if plan.cost is None:
        return None
    seconds = float(plan.cost)
    if not math.isfinite(seconds):
        raise ValueError(f"cost must be a finite number of seconds, not {plan.cost!r}")
    return seconds


_warned_of: dict[str, int] = {}  # the version of the registry in which each name was warned of


def left_out(backend: Backend, error: Exception) -> str:
    """Why a backend that failed is left out, with a warning; the error itself if it is one of convpar's own.

    Somebody else's backend must not take the others down with it. It is warned of once as long as no name changes its
    meaning.
    """
    if registry.is_built_in(backend):
        raise error
    reason = f"it fails, {type(error).__name__}: {error}"
    if _warned_of.get(backend.name) != registry.version():
        _warned_of[backend.name] = registry.version()
        registry.warn(f"convpar leaves out the backend {backend.name!r}: {reason}")
    return reason


def duration(seconds: float) -> str:
    """`seconds` with three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
