"""Every rung on the layers of the two-layer network, and the reports' tables beside their published figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from convpar.cases import Case

from . import show, streams
from .published import op_seconds
from .records import written
from .session import BASELINE, PEER, Contender, Result, Results, Session, total
from .steps import BASELINE as OWN_BASELINE
from .steps import BATCHES, Step, steps

LAYERS = (1, 2)

# Layouts of torch's tensors that are tried; the faster one counts.
PEERS = tuple(Contender.of(PEER, {"layout": layout}) for layout in ("NCHW", "channels-last"))

Found = dict[str, Results]
"""Case -> results."""


def contender(step: Step, layer: int, n: int) -> Contender:
    """What to run for a step; its rung must be known."""
    assert step.rung is not None
    config = dict(step.options(layer))
    if step.arrays == "pinned":
        config["slice"] = max(n // config["streams"], 1)
    return Contender.of(step.rung, config, step.arrays)


def run(session: Session) -> Iterator[Table | str]:
    """Measure, and give the tables and, last, the summary."""
    found = {case.name: _measure(session, case, wanted) for case, wanted in _wanted(session).items()}
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


def _wanted(session: Session) -> dict[Case, dict[Contender, None]]:
    """What the tables show, by case: reports that ran the same layer share its measurements."""
    wanted: dict[Case, dict[Contender, None]] = {}
    for report in BATCHES:
        for n in _batches(session, report):
            for layer in LAYERS:
                here = wanted.setdefault(session.network(layer, n, report=report), {})
                here[Contender.of(BASELINE)] = None
                here |= {contender(step, layer, n): None for step in steps(report) if step.rung is not None}
                if report in "AC":
                    here |= {Contender.of(rung): None for rung in session.rungs()}
                if report == "B":
                    here |= dict.fromkeys(PEERS)
    return wanted


def _measure(session: Session, case: Case, wanted: Iterable[Contender]) -> Results:
    on_host = [c for c in wanted if c.arrays != "device"]
    results = session.time("ladder", case, [c for c in wanted if c.arrays == "device"])
    if on_host:
        results |= streams.compute_times(session, "ladder", case, on_host)
    return results


# -- tables


def _both(
    session: Session, report: str, n: int, found: Found, pick: dict[int, Contender]
) -> dict[int, Result | None]:
    """Layer -> result of its contender."""
    return {layer: found[session.network(layer, n, report=report).name].get(c) for layer, c in pick.items()}


def _rungs_table(session: Session, n: int, found: Found) -> Table:
    """Every rung with its default options."""
    table = show.table(
        f"every rung as it comes, {session.batch(n)}",
        "rung", "layer 1", "of limit", "layer 2", "of limit", f"both: times {BASELINE}",
    )  # fmt: skip
    base = total(_both(session, "A", n, found, dict.fromkeys(LAYERS, Contender.of(BASELINE))))
    for rung in session.rungs():
        results = _both(session, "A", n, found, dict.fromkeys(LAYERS, Contender.of(rung)))
        cells = [cell for r in results.values() for cell in (show.time(r), show.share(r))]
        table.add_row(rung, *cells, show.ratio(base, total(results)))
    return table


def _published(step: Step, n: int) -> dict[int, float | None]:
    """Layer -> published op time. Report B states no batch."""
    batch = None if step.report == "B" else n
    return {
        layer: op_seconds(step.report, step.section, n=batch, layer=layer, config=step.figure)
        for layer in LAYERS
    }


def _sum(times: dict[int, float | None]) -> float | None:
    known = [t for t in times.values() if t is not None]
    return sum(known) if len(known) == len(times) else None


def _measured(session: Session, step: Step, n: int, found: Found) -> dict[int, Result | None]:
    pick = {layer: contender(step, layer, n) for layer in LAYERS}
    return _both(session, step.report, n, found, pick)


def _bases(session: Session, report: str, n: int, found: Found) -> tuple[float | None, float | None]:
    """Both layers of the report's own baseline: ours, and as published."""
    step = next(s for s in steps(report) if s.section == OWN_BASELINE[report])
    return total(_measured(session, step, n, found)), _sum(_published(step, n))


def options(step: Step) -> str:
    """A step's rung and options in a line; those of two layers apart by a stroke."""
    texts = dict.fromkeys(
        written({k: v for k, v in step.options(layer).items() if k != "workspace_limit"}) for layer in LAYERS
    )
    return f"{step.rung} {' | '.join(t for t in texts if t)}".strip()


def _report_table(session: Session, report: str, n: int, found: Found) -> Table:
    """A report's own table, measured and published side by side; ratios are to its own baseline."""
    table = show.table(
        f"report {report}, {session.batch(n)}",
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


def _best_peers(session: Session, n: int, found: Found) -> dict[int, Result | None]:
    """Layer -> the faster of torch's layouts."""
    best = {}
    for layer in LAYERS:
        results = found[session.network(layer, n, report="B").name]
        timed = [r for c in PEERS if (r := results.get(c)) is not None and r.seconds is not None]
        best[layer] = min(timed, key=lambda r: r.seconds or 0.0, default=None)
    return best


def _notes(report: str) -> list[str]:
    return [f"{step.section}: {step.note}" for step in steps(report) if step.note]


def _summary(session: Session, report: str, n: int, found: Found) -> list[str]:
    """A line a step: both layers, and the ratio to the report's baseline beside the published one."""
    base, published_base = _bases(session, report, n, found)
    lines = [f"report {report}, {session.batch(n)}: both layers, times its baseline (published)"]
    for step in steps(report):
        if step.rung is None:
            continue
        results = _measured(session, step, n, found)
        seconds = total(results)
        reasons = dict.fromkeys(show.reason(r) for r in results.values() if r is None or r.seconds is None)
        ours = "; ".join(reasons) or f"{show.seconds(seconds):>9} {show.ratio(base, seconds):>7}"
        lines.append(
            f"  {step.section:20}{ours} ({show.ratio(published_base, _sum(_published(step, n))) or 'none'})"
        )
    return lines
