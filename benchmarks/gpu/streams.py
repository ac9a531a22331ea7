"""Batches in host memory: slices on several streams, pinned and not, and how far copies overlap with kernels.

A call's time is that of the host, until the result is there. Beside it are the times during which the device copied in,
computed and copied out, from events around each stage of each slice (`convpar.backends.gpu.pipeline.Span`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from rich.table import Table

import convpar
from convpar.backends.gpu.pipeline import STAGES, Span
from convpar.backends.gpu.plan import GpuPlan
from convpar.cases import Case
from convpar.timing import CpuTimer, Times

from . import show
from .check import Judge
from .published import find, op_seconds
from .session import POISON, Contender, Result, Results, Session, planned
from .steps import MIB, Arrays, Config, steps

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STREAMS = (1, 2, 4, 10)
SHOWN = (1, 10)
"""Numbers of streams whose timelines are drawn."""

SLICES = 10
BATCH = 10000
LAYERS = (1, 2)
HOSTS: tuple[Arrays, ...] = ("pinned", "pageable")

ROOM = {"workspace_limit": 16384 * MIB}
"""Ten slices of a thousand images are under way at a time."""

COPY_BYTES = 256 * MIB


def run(session: Session, folder: Path | None) -> Iterator[Table | str]:
    """Measure, draw timelines into `folder`, and give the tables and, last, the summary."""
    into, out = session.place.host_bandwidth(COPY_BYTES if not session.quick else MIB)
    rates = f"pinned copies: {into / 1e9:.1f} GB/s in, {out / 1e9:.1f} GB/s out"
    lines = [f"streams; {rates}"]
    for layer in LAYERS:
        case = session.network(layer, BATCH)
        ways = _ways(case)
        results, spans = _measure(session, "streams", case, [way.contender for way in ways])
        limit = _copy_limit(case, into, out)
        yield _table(case, layer, ways, results, limit, rates)
        lines += _summary(case, ways, results, limit)
        if folder is not None:
            shown = [w for w in ways if w.slices > 1 and w.streams in SHOWN and w.contender in spans]
            figure = timeline_figure(
                [f"{way.arrays}, {way.streams} streams" for way in shown],
                [spans[way.contender] for way in shown],
                f"{case.name}, gpu-naive",
            )
            figure.savefig(folder / f"streams-layer-{layer}.png", dpi=120)
    table, line = _report_d(session)
    yield table
    yield "\n".join([*lines, line])


class Way(NamedTuple):
    """A way to take a batch from host memory through gpu-naive."""

    arrays: Arrays
    slices: int
    streams: int
    contender: Contender


def _ways(case: Case) -> list[Way]:
    """The whole batch at once, and slices on more and more streams, for either kind of host memory."""
    found = []
    for arrays in HOSTS:
        for slices, streams in ((1, 1), *((SLICES, streams) for streams in STREAMS)):
            config = {"streams": streams, "slice": -(-case.x_shape[0] // slices), **ROOM}
            found.append(Way(arrays, slices, streams, Contender.of("gpu-naive", config, arrays)))
    return found


# -- measuring


def compute_times(session: Session, experiment: str, case: Case, contenders: Sequence[Contender]) -> Results:
    """Results whose times are those during which the device computes for any slice."""
    results, _ = _measure(session, experiment, case, contenders, clock="compute")
    return results


def _measure(
    session: Session, experiment: str, case: Case, contenders: Iterable[Contender], *, clock: str = "layer"
) -> tuple[Results, dict[Contender, tuple[Span, ...]]]:
    """Check and time contenders on host arrays; also a timeline of each."""
    started = time.perf_counter()
    x, w = case.arrays(np.random.default_rng(0))
    judge = Judge(case, x, w, session.place)
    results: Results = {}
    spans: dict[Contender, tuple[Span, ...]] = {}
    wanted = [c for c in contenders if session.wants(c.rung)]
    for arrays in dict.fromkeys(c.arrays for c in wanted):
        host = _host_arrays(case, x, arrays)
        for contender in (c for c in wanted if c.arrays == arrays):
            result = results[contender] = Result(contender, case)
            plan = planned(contender, case, host.x, w, host.out, session.place)
            if isinstance(plan, str):
                result.reason = plan
                continue
            assert isinstance(plan, GpuPlan)
            try:
                result.times = _times(plan, host, w, session.repeats, clock)
                host.out[...] = POISON[host.out.dtype.kind]
                spans[contender] = plan.timeline(host.x, w, None, host.out)
            except session.place.exhausted as e:
                result.times, result.reason = None, f"out of device memory: {e}"
                continue
            verdict = judge.judge(host.out, plan.accuracy)
            result.error, result.worst, result.contract = verdict.reason, verdict.worst, plan.accuracy
            result.numbers = {**_numbers(spans[contender]), "allocated": host.allocated}
        del host
        session.place.release()
    session.keep(experiment, results.values(), clock=clock)
    session.say(
        f"{experiment} {case.name}, host arrays: {len(results)} in {time.perf_counter() - started:.1f} s"
    )
    return results, spans


def _times(plan: GpuPlan, host: _Host, w: Any, repeats: int, clock: str) -> Times:
    def run() -> None:
        plan.run(host.x, w, None, host.out)

    run()
    if clock == "compute":
        return Times(tuple(busy(plan.timeline(host.x, w, None, host.out), "compute") for _ in range(repeats)))
    timer = CpuTimer()
    return Times(tuple(timer.sample(run) for _ in range(repeats)))


class _Host(NamedTuple):
    """Image and output in host memory, and the seconds that allocating the two took."""

    x: Any
    out: Any
    allocated: float


def _host_arrays(case: Case, x: Any, arrays: Arrays) -> _Host:
    p = case.problem()
    started = time.perf_counter()
    empty = convpar.empty_pinned if arrays == "pinned" else np.empty
    xs, out = empty(x.shape, x.dtype), empty(p.out_shape, p.out_dtype)
    allocated = time.perf_counter() - started
    xs[...] = x
    out[...] = 0
    return _Host(xs, out, allocated)


# -- what a timeline says


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, -np.inf
    for start, stop in sorted(spans):
        if stop > end:
            total += stop - max(start, end)
            end = stop
    return float(total)


def busy(spans: Iterable[Span], stage: str) -> float:
    """Seconds during which the device is at `stage` of any slice.

    A stage begins when its stream has come to it, and may then wait for one of the same kind on another stream;
    what is counted is the union, in which such waiting disappears.
    """
    return covered((s.start, s.stop) for s in spans if s.stage == stage)


def _numbers(spans: Sequence[Span]) -> dict[str, float]:
    stages = {stage: busy(spans, stage) for stage in STAGES}
    together = covered((s.start, s.stop) for s in spans)
    return {**stages, "device": together, "overlap": sum(stages.values()) - together}


def _copy_limit(case: Case, into: float, out: float) -> float:
    """Seconds in which the slower direction can be copied, both at once."""
    p = case.problem()
    x_bytes = p.n * p.c * p.h * p.w * p.x_dtype.itemsize
    return max(x_bytes / into, p.outputs * p.out_dtype.itemsize / out)


# -- tables


def _table(case: Case, layer: int, ways: Sequence[Way], results: Results, limit: float, rates: str) -> Table:
    base = op_seconds("A", "baseline", n=BATCH, layer=layer)
    sliced = op_seconds("A", "streams", n=BATCH, layer=layer)
    allocation = find("A", "streams", "api_time", n=BATCH, config={"api": "cudaHostAlloc", "stat": "total"})
    assert allocation is not None
    table = show.table(
        f"{case.name}, gpu-naive",
        "arrays", "slices", "streams", "layer time", "serial / it",
        "copy in", "compute", "copy out", "overlap", "allocating",
        left=1,
        caption=f"{rates}; copies alone take {show.seconds(limit)} at least; serial: one slice\n"
        f"published (A, 10 streams, pinned): op time {show.seconds(sliced)}, {show.seconds(base)} without; "
        f"allocating pinned memory {show.seconds(allocation.value * 1e-9)}",
    )  # fmt: skip
    for way in ways:
        r = results.get(way.contender)
        serial = next(results.get(w.contender) for w in ways if w.arrays == way.arrays)
        numbers = r.numbers if r is not None else {}
        table.add_row(
            way.arrays,
            str(way.slices),
            str(way.streams),
            show.time(r),
            show.ratio(serial.seconds if serial else None, r.seconds if r else None),
            *(show.seconds(numbers.get(name)) for name in (*STAGES, "overlap", "allocated")),
        )
    return table


def _summary(case: Case, ways: Sequence[Way], results: Results, limit: float) -> list[str]:
    lines = []
    for arrays in HOSTS:
        times = []
        for way in (w for w in ways if w.arrays == arrays):
            r = results.get(way.contender)
            times.append(
                f"{way.slices}/{way.streams}: {show.seconds(r.seconds if r else None) or show.missing(r)}"
            )
        lines.append(
            f"  {case.name} {arrays}, by slices/streams: {', '.join(times)}; copies alone {show.seconds(limit)}"
        )
    return lines


def _report_d(session: Session) -> tuple[Table, str]:
    """Two streams of half the batch without pinned memory, against one slice: report D's last step."""
    step = steps("D")[-1]
    n = 5000
    table = show.table(
        "report D, its last step on ordinary host memory",
        "layer", "one slice", "2 streams", "gain", "published: one slice", "2 streams", "gain",
    )  # fmt: skip
    gains = []
    assert step.rung is not None
    for layer in LAYERS:
        case = session.network(layer, n)
        images = case.x_shape[0]
        config: Config = {**step.options(layer), **ROOM}
        one = Contender.of(step.rung, {**config, "streams": 1, "slice": images}, "pageable")
        two = Contender.of(step.rung, {**config, "streams": 2, "slice": -(-images // 2)}, "pageable")
        results, _ = _measure(session, "streams", case, [one, two])
        a, b = (r.seconds if (r := results.get(c)) is not None else None for c in (one, two))
        published = [
            find("D", section, "layer_time", n=n, layer=layer, config=config)
            for section, config in ((step.section, {"run": "second"}), ("streams", {"streams": "2"}))
        ]
        c, d = (None if f is None else f.value * 1e-3 for f in published)
        cells = [show.time(results.get(one)), show.time(results.get(two)), show.ratio(a, b)]
        table.add_row(str(layer), *cells, show.seconds(c), show.seconds(d), show.ratio(c, d))
        reason = next((r.reason or r.error for r in results.values() if r.reason or r.error), "")
        gains.append(f"layer {layer} {show.ratio(a, b) or reason or 'left out'} ({show.ratio(c, d)})")
    return table, f"  report D, 2 streams, pageable: {', '.join(gains)}"


# -- the picture

_COLOURS = {"copy in": "#4c78a8", "compute": "#54a24b", "copy out": "#e45756"}


def timeline_figure(titles: Sequence[str], timelines: Sequence[Sequence[Span]], title: str) -> Figure:
    """One panel a timeline: streams down, milliseconds along, a bar for each stage of each slice.

    A stage is drawn from where the one of its kind before it ended, since they take turns on the device.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 1 + 1.8 * len(titles)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(titles), 1, squeeze=False)[:, 0]
    for ax, name, spans in zip(axes, titles, timelines, strict=True):
        for stage in STAGES:
            end = 0.0
            for span in sorted((s for s in spans if s.stage == stage), key=lambda s: s.stop):
                start = max(span.start, end)
                end = max(end, span.stop)
                ax.broken_barh(
                    [(start * 1e3, (span.stop - start) * 1e3)], (span.queue + 0.1, 0.8), color=_COLOURS[stage]
                )
        ax.set_title(name, fontsize=9, loc="left")
        ax.set_ylabel("stream")
        ax.set_yticks([q + 0.5 for q in sorted({s.queue for s in spans})], sorted({s.queue for s in spans}))
        ax.set_ylim(max((s.queue for s in spans), default=0) + 1, 0)
    axes[-1].set_xlabel("ms")
    figure.suptitle(title, fontsize=10)
    figure.legend(
        handles=[Patch(color=c, label=stage) for stage, c in _COLOURS.items()],
        loc="outside lower center",
        ncols=3,
        fontsize=8,
    )
    return figure
