"""The GPU family. rungs.py has its rungs, one row each."""

from __future__ import annotations

from convpar.backend import Backend

from .executors import here
from .rungs import ROWS

__all__ = ["ROWS", "backends", "here"]


def backends() -> list[Backend]:
    """The rows of the family, in the order of the ladder."""
    return list(ROWS)
