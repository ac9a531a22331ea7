"""The checks by name: properties first, then the contract, each in the order of its file."""

from __future__ import annotations

from . import contract, properties
from .trial import Check

CHECKS: dict[str, Check] = {
    found.name: found
    for module in (properties, contract)
    for found in vars(module).values()
    if isinstance(found, Check)
}
