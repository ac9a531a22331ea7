"""Report C's sweep over tile widths, layer by layer, and both lane mappings of the rungs without constant memory."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from . import show
from .published import op_seconds
from .session import BASELINE, Contender, Result, Session, total

WIDTHS = (4, 8, 10, 16, 17, 32)
BATCH = 10000
LAYERS = (1, 2)

SWEPT = {"gpu-constant": "constant", "gpu-tiled-constant": "tiled-constant", "gpu-fused": "fused"}
"""Rung -> what the report's sweep calls it."""

MAPPED = ("gpu-naive", "gpu-tiled")
LANES = ("columns", "rows")


def _wide(rung: str, width: int, lanes: str | None = None) -> Contender:
    return Contender.of(rung, {"tile": (width, width), **({"lanes": lanes} if lanes else {})})


def contenders() -> list[Contender]:
    """All that the tables show."""
    swept = [_wide(rung, width) for rung in SWEPT for width in WIDTHS]
    return swept + [_wide(rung, width, lanes) for rung in MAPPED for lanes in LANES for width in WIDTHS]


def run(session: Session) -> Iterator[Table | str]:
    """Measure, and give the tables and, last, the summary."""
    found: dict[Contender, dict[int, Result | None]] = {}
    for layer in LAYERS:
        case = session.network(layer, BATCH)
        for contender, result in session.time(
            "widths", case, [Contender.of(BASELINE), *contenders()]
        ).items():
            found.setdefault(contender, {})[layer] = result
    lines = [f"widths, {session.batch(BATCH)}: fastest per layer"]
    for rung, name in SWEPT.items():
        if session.wants(rung):
            rows = {width: found[_wide(rung, width)] for width in WIDTHS}
            yield _table(f"{rung}, {session.batch(BATCH)}", rows, name)
            lines.append(_best(rung, rows))
    for rung in MAPPED:
        for lanes in LANES:
            if session.wants(rung):
                rows = {width: found[_wide(rung, width, lanes)] for width in WIDTHS}
                yield _table(f"{rung}, lanes along {lanes}, {session.batch(BATCH)}", rows, None)
                lines.append(_best(f"{rung} lanes={lanes}", rows))
    yield "\n".join(lines)


def _published(name: str | None, width: int) -> float | None:
    """Both layers together, in the report's sweep."""
    if name is None:
        return None
    return op_seconds("C", "tile-sweep", n=BATCH, layer="both", config={"rung": name, "tile": str(width)})


def _table(title: str, rows: dict[int, dict[int, Result | None]], name: str | None) -> Table:
    reasons = {
        f"width {width}: {r.error or r.reason}": None
        for width, results in rows.items()
        for r in results.values()
        if r is not None and (r.error or r.reason)
    }
    columns = ["width", "layer 1", "of limit", "layer 2", "of limit", "both", "16's / it"]
    if name is not None:
        columns += ["published: both", "16's / it"]
    table = show.table(title, *columns, caption="\n".join(reasons) or None)
    base, published_base = total(rows[16]), _published(name, 16)
    for width, results in rows.items():
        cells = [cell for r in results.values() for cell in (show.time(r), show.share(r))]
        both = total(results)
        row = [str(width), *cells, show.seconds(both), show.ratio(base, both)]
        if name is not None:
            figure = _published(name, width)
            row += [show.seconds(figure), show.ratio(published_base, figure)]
        table.add_row(*row)
    return table


def _best(title: str, rows: dict[int, dict[int, Result | None]]) -> str:
    parts = []
    for layer in LAYERS:
        timed = {
            w: s
            for w, results in rows.items()
            if (r := results[layer]) is not None and (s := r.seconds) is not None
        }
        if timed:
            width = min(timed, key=timed.__getitem__)
            parts.append(f"{layer}: {width} ({show.seconds(timed[width])})")
    refused = [
        str(w) for w, results in rows.items() if all(r is not None and r.reason for r in results.values())
    ]
    return f"  {title}: {', '.join(parts) or 'none'}{'; refused: ' + ', '.join(refused) if refused else ''}"
