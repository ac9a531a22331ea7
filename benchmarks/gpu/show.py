"""How numbers look in the tables."""

from __future__ import annotations

from rich.table import Table

from convpar.bench.results import duration

from .session import Result


def table(title: str, *columns: str, left: int = 1, caption: str | None = None) -> Table:
    """An empty table without lines; columns from `left` on are aligned right."""
    made = Table(
        title=title, caption=caption, box=None, pad_edge=False, title_justify="left", caption_justify="left"
    )
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number < left else "right", no_wrap=number >= left)
    return made


def time(result: Result | None) -> str:
    """The median with its spread, or why there is none."""
    if result is None or result.times is None or result.error:
        return missing(result)
    return f"{duration(result.times.median)} ± {duration(result.times.spread)}"


def missing(result: Result | None) -> str:
    """Why there is no time, in a word."""
    if result is None:
        return "left out"
    return "WRONG" if result.error else "refused"


def reason(result: Result | None) -> str:
    """Why there is no time."""
    if result is None:
        return missing(result)
    return f"{missing(result)}: {result.error or result.reason}"


def seconds(value: float | None) -> str:
    """A time without its spread."""
    return "" if value is None else duration(value)


def share(result: Result | None) -> str:
    """The share of the ceiling, as a percentage."""
    return "" if result is None or result.share is None else f"{result.share:.0%}"


def ratio(base: float | None, other: float | None) -> str:
    """How many times as fast as `base`: 2.00x for half its time."""
    return "" if base is None or other is None else f"{base / other:.2f}x"
