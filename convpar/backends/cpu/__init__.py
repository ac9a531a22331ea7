"""The CPU ladder: rungs.inc has a line for every rung, `rungs` makes them backends, `plan` plans their work.

Everything is decided in Python, from shapes and types: what a work item is in `items`, how long it takes in `estimate`. The
`compiled` engine runs it: it is loaded with the first plan, so listing the rungs costs nothing.
"""

from __future__ import annotations

from convpar.backend import Backend

from .compiled import (
    ISA_VARIABLE,
    PAIR_VARIABLE,
    UNIT_VARIABLE,
    WORD_VARIABLE,
    build_info,
    copy_bandwidth,
    isa,
    matrix_unit,
    pair_unit,
    peak_fma,
    word_unit,
)
from .rungs import rungs

__all__ = [
    "ISA_VARIABLE",
    "PAIR_VARIABLE",
    "UNIT_VARIABLE",
    "WORD_VARIABLE",
    "backends",
    "build_info",
    "copy_bandwidth",
    "isa",
    "matrix_unit",
    "pair_unit",
    "peak_fma",
    "word_unit",
]


def backends() -> list[Backend]:
    """The rows of the family, slowest first."""
    return list(rungs())
