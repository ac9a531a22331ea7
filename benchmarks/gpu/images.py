"""Every rung on images of one channel, over filter sizes: no report has these, and the choosers' estimates need them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from convpar.cases import Case, find

from . import show
from .session import BASELINE, Contender, Session

FILTERS = (3, 5, 7, 15)


def name(k: int) -> str:
    """The case with a filter of k x k."""
    return f"single-4096-k{k}-float32-valid"


def _case(session: Session, k: int) -> Case:
    if session.quick:
        return Case(name=f"quick-image-k{k}", x_shape=(1, 1, 33, 37), w_shape=(1, 1, k, k))
    return find(name(k))


def run(session: Session) -> Iterator[Table | str]:
    """Measure, and give the table and, last, the summary."""
    rungs = session.rungs()
    filters = FILTERS[:2] if session.quick else FILTERS
    found = {
        k: session.time("images", _case(session, k), [Contender.of(rung) for rung in (BASELINE, *rungs)])
        for k in filters
    }
    columns = [cell for k in filters for cell in (f"{k}x{k}", "of limit")]
    table = show.table("4096 x 4096, one channel, float32, valid: every rung as it comes", "rung", *columns)
    for rung in rungs:
        results = [found[k].get(Contender.of(rung)) for k in filters]
        table.add_row(rung, *(cell for r in results for cell in (show.time(r), show.share(r))))
    yield table
    lines = ["images: fastest rung by filter"]
    for k in filters:
        timed = {c.rung: r.seconds for c, r in found[k].items() if r.seconds is not None}
        best = min(timed, key=timed.__getitem__)
        lines.append(f"  {k}x{k}: {best} {show.seconds(timed[best])}")
    yield "\n".join(lines)
