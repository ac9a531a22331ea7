"""What every backend must pass, as functions: used by the tests and by ``convpar verify``.

`verify` runs checks on backends and returns a `Report`; `Case` is one problem with its data, what a
failing check prints and what runs it again. Needs SciPy and Hypothesis: ``pip install "convpar[test]"``.

>>> from convpar.conformance import verify
>>> print(verify("numpy", examples=20))  # doctest: +SKIP
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .case import Case, Wrong
    from .checks import CHECKS
    from .memory import Memory
    from .report import Outcome, Report, run_check, verify
    from .trial import Check, NotApplicable, Tally, Trial

__all__ = [
    "CHECKS",
    "Case",
    "Check",
    "Memory",
    "NotApplicable",
    "Outcome",
    "Report",
    "Tally",
    "Trial",
    "Wrong",
    "run_check",
    "verify",
]

_HOMES = {
    "Case": "case",
    "Wrong": "case",
    "CHECKS": "checks",
    "Memory": "memory",
    "Outcome": "report",
    "Report": "report",
    "run_check": "report",
    "verify": "report",
    "Check": "trial",
    "NotApplicable": "trial",
    "Tally": "trial",
    "Trial": "trial",
}


def __getattr__(name: str) -> Any:
    # The demo compares with `oracle` and `error_bounds`, and comes without Hypothesis.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
