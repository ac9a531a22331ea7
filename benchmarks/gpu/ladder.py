"""Every rung on the layers of the two-layer network, and the reports' tables beside their published figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from . import show, streams
from .published import op_seconds
from .records import written
from .session import BASELINE, PEER, Contender, Result, Session, total
from .steps import BASELINE as OWN_BASELINE
from .steps import BATCHES, Step, steps

LAYERS = (1, 2)

# Layouts of torch's tensors that are tried; the faster one counts.
PEERS = tuple(Contender.of(PEER, {"layout": layout}) for layout in ("NCHW", "channels-last"))

Measured = dict[tuple[str, int], dict[Contender, Result]]
"""(case, layer) -> results."""


def contender(step: Step, layer: int, n: int) -> Contender:
    """What to run for a step; its rung must be known."""
    assert step.rung is not None
    config = dict(step.options(layer))
    if step.arrays == "pinned":
        config["slice"] = max(n // config["streams"], 1)
    return Contender.of(step.rung, config, step.arrays)


def run(session: Session) -> Iterator[Table | str]:
    """Measure, and give the tables and, last, the summary."""
    found: Measured = {}
    for report in BATCHES:
        for n in _batches(session, report):
            for layer in LAYERS:
                _measure(session, report, n, layer, found)
    for n in dict.fromkeys(n for report in "AC" for n in _batches(session, report)):
        yield _rungs_table(session, n, found)
    lines = []
    for report in BATCHES:
        for n in _batches(session, report):
            yield _report_table(session, report, n, found)
        lines += _summary(session, report, _batches(session, report)[-1], found)
    yield "\n".join(lines)


def _batches(session: Session, report: str) -> tuple[int, ...]:
    return BATCHES[report][:1] if session.quick else BATCHES[report]


def _measure(session: Session, report: str, n: int, layer: int, found: Measured) -> None:
    """Time what `report` needs on a layer; what another report had measured already is left out."""
    case = session.network(layer, n, report=report)
    known = found.setdefault((case.name, layer), {})
    wanted = [Contender.of(rung) for rung in session.rungs()] if report != "D" else [Contender.of(BASELINE)]
    wanted += [contender(step, layer, n) for step in steps(report) if step.rung is not None]
    if report == "B":
        wanted += PEERS
    new = [c for c in wanted if c not in known]
    # The baseline takes part each time, so that every ratio is of one run.
    on_device = [c for c in new if c.arrays == "device"]
    if on_device:
        known |= session.time("ladder", case, dict.fromkeys([Contender.of(BASELINE), *on_device]))
    for c in new:
        if c.arrays != "device" and session.wants(c.rung):
            known |= streams.compute_times(session, "ladder", case, [c])


# -- tables


def _both(found: Measured, cases: Iterable[tuple[str, int]], pick: dict[int, Contender]) -> dict[int, Result | None]:
    """Layer -> result of its contender."""
    return {layer: found[case, layer].get(pick[layer]) for case, layer in cases}


def _cases(session: Session, report: str, n: int) -> list[tuple[str, int]]:
    return [(session.network(layer, n, report=report).name, layer) for layer in LAYERS]


def _rungs_table(session: Session, n: int, found: Measured) -> Table:
    """Every rung with its default options."""
    cases = _cases(session, "A", n)
    table = show.table(
        f"every rung as it comes, N = {n}",
        "rung", "layer 1", "of limit", "layer 2", "of limit", f"both: times {BASELINE}",
    )  # fmt: skip
    base = total(_both(found, cases, dict.fromkeys(LAYERS, Contender.of(BASELINE))))
    for rung in session.rungs():
        results = _both(found, cases, dict.fromkeys(LAYERS, Contender.of(rung)))
        cells = [cell for r in results.values() for cell in (show.time(r), show.share(r))]
        table.add_row(rung, *cells, show.ratio(base, total(results)))
    return table


def _published(step: Step, n: int) -> dict[int, float | None]:
    """Layer -> published op time. Report B states no batch."""
    batch = None if step.report == "B" else n
    return {
        layer: op_seconds(step.report, step.section, n=batch, layer=layer, config=step.figure) for layer in LAYERS
    }


def _sum(times: dict[int, float | None]) -> float | None:
    known = [t for t in times.values() if t is not None]
    return sum(known) if len(known) == len(times) else None


def _measured(session: Session, step: Step, n: int, found: Measured) -> dict[int, Result | None]:
    pick = {layer: contender(step, layer, n) for layer in LAYERS}
    return _both(found, _cases(session, step.report, n), pick)


def _bases(session: Session, report: str, n: int, found: Measured) -> tuple[float | None, float | None]:
    """Both layers of the report's own baseline: ours, and as published."""
    step = next(s for s in steps(report) if s.section == OWN_BASELINE[report])
    return total(_measured(session, step, n, found)), _sum(_published(step, n))


def options(step: Step) -> str:
    """A step's rung and options in a line; those of two layers apart by a stroke."""
    texts = dict.fromkeys(written({k: v for k, v in step.options(layer).items() if k != "workspace_limit"}) for layer in LAYERS)
    return f"{step.rung} {' | '.join(t for t in texts if t)}".strip()


def _report_table(session: Session, report: str, n: int, found: Measured) -> Table:
    """A report's own table, measured and published side by side; ratios are to its own baseline."""
    table = show.table(
        f"report {report}, {'tiny shapes' if session.quick else f'N = {n}'}",
        "step", "as", "layer 1", "of limit", "layer 2", "of limit", "times its baseline",
        "published: 1", "2", "times its baseline",
        left=2, caption="\n".join(_notes(report)),
    )  # fmt: skip
    base, published_base = _bases(session, report, n, found)
    for step in steps(report):
        published = _published(step, n)
        figures = [show.seconds(t) for t in published.values()]
        figures.append(show.ratio(published_base, _sum(published)))
        if step.rung is None:
            table.add_row(step.section, "not repeated", "", "", "", "", "", *figures)
            continue
        results = _measured(session, step, n, found)
        cells = [cell for r in results.values() for cell in (show.time(r), show.share(r))]
        table.add_row(step.section, options(step), *cells, show.ratio(base, total(results)), *figures)
    if report == "B":
        best = _best_peers(session, n, found)
        cells = [cell for r in best.values() for cell in (show.time(r), show.share(r))]
        layouts = " | ".join(r.contender.config["layout"] for r in best.values() if r is not None)
        published = {layer: op_seconds("B", "pytorch", n=None, layer=layer) for layer in LAYERS}
        table.add_row(
            "pytorch", layouts, *cells, show.ratio(base, total(best)),
            *(show.seconds(t) for t in published.values()), show.ratio(published_base, _sum(published)),
        )  # fmt: skip
    return table


def _best_peers(session: Session, n: int, found: Measured) -> dict[int, Result | None]:
    """Layer -> the faster of torch's layouts."""
    best = {}
    for case, layer in _cases(session, "B", n):
        timed = [r for c in PEERS if (r := found[case, layer].get(c)) is not None and r.seconds is not None]
        best[layer] = min(timed, key=lambda r: r.seconds or 0.0, default=None)
    return best


def _notes(report: str) -> list[str]:
    return [f"{step.section}: {step.note}" for step in steps(report) if step.note]


def _summary(session: Session, report: str, n: int, found: Measured) -> list[str]:
    """A line a step: both layers, and the ratio to the report's baseline beside the published one."""
    base, published_base = _bases(session, report, n, found)
    lines = [f"report {report}, N = {n}: both layers, times its baseline (published)"]
    for step in steps(report):
        if step.rung is None:
            continue
        results = _measured(session, step, n, found)
        seconds = total(results)
        reasons = dict.fromkeys(r.error or r.reason for r in results.values() if r is not None and (r.error or r.reason))
        ours = f"{show.seconds(seconds):>9} {show.ratio(base, seconds):>7}" if seconds is not None else "; ".join(reasons)
        lines.append(f"  {step.section:20}{ours} ({show.ratio(published_base, _sum(_published(step, n))) or 'none'})")
    return lines
