"""The GPU family."""

from __future__ import annotations

from convpar.backend import Backend


def backends() -> list[Backend]:
    """The rows of the family."""
    return []
