"""What every backend must pass, as functions: used by the tests and by ``convpar verify``.

`verify` runs checks on backends and returns a `Report`; `Case` is one problem with its data, what a
failing check prints and what runs it again. Needs SciPy and Hypothesis: ``pip install "convpar[test]"``.

>>> from convpar.conformance import verify
>>> print(verify("numpy", examples=20))  # doctest: +SKIP
"""

from __future__ import annotations

from .arrays import Memory
from .case import Case, Wrong
from .checks import CHECKS
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
