"""The figures that the student reports print, one row each in benchmarks/published.csv."""

from __future__ import annotations

import csv
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).resolve().parents[1] / "published.csv"

# Rows with one of these say something about a time rather than what was run.
_DERIVED = {"metric", "vs", "kernel", "api", "stat", "run", "milestone", "profiler"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One published number.

    Attributes
    ----------
    report : str
        "A" to "E".
    section : str
        What was run, in the file's words.
    config : mapping of str to str
        How it was run.
    n : int or None
        Images; None where the report doesn't say.
    layer : str
        "1", "2", "both" or empty.
    quantity, unit, note : str
    value : float
    """

    report: str
    section: str
    config: Mapping[str, str]
    n: int | None
    layer: str
    quantity: str
    value: float
    unit: str
    note: str


@functools.cache
def figures() -> tuple[Figure, ...]:
    """Every row of the file, in its order."""
    with FILE.open(newline="", encoding="utf-8") as file:
        return tuple(
            Figure(
                row["report"],
                row["section"],
                dict(pair.split("=", 1) for pair in row["config"].split(";") if pair),
                int(row["n"]) if row["n"] else None,
                row["layer"],
                row["quantity"],
                float(row["value"]),
                row["unit"],
                row["note"],
            )
            for row in csv.DictReader(file)
        )


def find(
    report: str,
    section: str,
    quantity: str,
    *,
    n: int | None = None,
    layer: int | str = "",
    config: Mapping[str, str] | None = None,
) -> Figure | None:
    """The one figure of that description, or None.

    Parameters
    ----------
    report, section, quantity, n, layer
        As in `Figure`.
    config : mapping, optional
        What the figure's own configuration must hold, among other things.

    Raises
    ------
    LookupError
        Several figures fit.
    """
    wanted = dict(config or {})
    found = [
        f
        for f in figures()
        if (f.report, f.section, f.quantity, f.n, f.layer) == (report, section, quantity, n, str(layer))
        and wanted.items() <= f.config.items()
        and not _DERIVED & (f.config.keys() - wanted.keys())
    ]
    if len(found) > 1:
        configs = " and ".join(";".join(f"{k}={v}" for k, v in f.config.items()) or "none" for f in found)
        raise LookupError(f"report {report}, {section}, {quantity}, {n}, layer {layer!r}: {configs}")
    return found[0] if found else None


def op_seconds(
    report: str, section: str, *, n: int | None, layer: int | str, config: Mapping[str, str] | None = None
) -> float | None:
    """A published op time in seconds, or None; see `find`."""
    figure = find(report, section, "op_time", n=n, layer=layer, config=config)
    return None if figure is None else figure.value * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[figure.unit]
