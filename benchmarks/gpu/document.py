"""The tables of docs/gpu-ladder.md, as Markdown, from the result files of the experiments. Nothing is typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from convpar import registry
from convpar.bench.results import RecordFile, duration

from . import blocks, images, ladder, streams, widths
from .calls import TARGET
from .published import op_seconds
from .reasons import REASONS, Counter, Reason
from .records import GpuRecord, written
from .session import BASELINE, PEER, Contender
from .steps import BASELINE as OWN_BASELINE
from .steps import BATCHES, Step, steps

LAYERS = (1, 2)
LARGEST = 10000


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> str:
    lines = [header, ["---" if k < left else "---:" for k in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


class Found:
    """The records of one GPU model, by what was run."""

    def __init__(self, records: Iterable[GpuRecord]) -> None:
        self._records = {r.key: r for r in records}

    def get(
        self,
        experiment: str,
        case: str,
        contender: Contender,
        *,
        clock: str = "op",
        kernel: str = "",
    ) -> GpuRecord | None:
        """The record of a contender, or None."""
        config = written(contender.config)
        return self._records.get((experiment, case, contender.rung, config, contender.arrays, clock, kernel))

    def has(self, experiment: str) -> bool:
        """Whether there is any record of `experiment`."""
        return any(r.experiment == experiment for r in self._records.values())

    def counter(self, counter: Counter) -> float | None:
        """What was counted, or None."""
        contender = Contender.of(counter.rung, counter.options)
        record = self.get("counters", counter.case, contender, kernel=counter.kernel)
        return None if record is None else record.numbers.get(counter.name)

    def conditions(self, *experiments: str) -> str:
        """Ceilings, versions and days of some experiments, in a line."""
        chosen = [r for r in self._records.values() if r.experiment in experiments]
        ceilings = next((r.ceilings for r in chosen if r.ceilings), None)
        parts = []
        if ceilings is not None:
            parts.append(f"copy {ceilings['bandwidth'] / 1e12:.2f} TB/s")
            parts += [f"{kind} {rate / 1e12:.1f} TMAC/s" for kind, rate in ceilings["fma"].items()]
        names = ("cupy", "nvrtc", "driver")
        parts += sorted({f"{k} {r.versions[k]}" for r in chosen for k in names if k in r.versions})
        parts += sorted({r.date[:10] for r in chosen if r.date})
        return "; ".join(parts)


# -- cells


def _time(r: GpuRecord | None) -> str:
    if r is None:
        return ""
    if r.median is None or r.error:
        return "wrong" if r.error else "refused"
    return duration(r.median)


def _seconds(r: GpuRecord | None) -> float | None:
    return None if r is None or r.error else r.median


def _share(r: GpuRecord | None) -> str:
    return "" if r is None or r.share is None else f"{r.share:.0%}"


def _ratio(base: float | None, other: float | None) -> str:
    return "" if base is None or other is None else f"{base / other:.2f}"


def _sum(values: Iterable[float | None]) -> float | None:
    total = 0.0
    for value in values:
        if value is None:
            return None
        total += value
    return total


def _count(value: float) -> str:
    """Three digits and a unit."""
    for unit, size in ((" G", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _rungs() -> list[str]:
    return [b.name for b in registry.backends() if b.name.startswith("gpu-")]


# -- tables


def _case(report: str, layer: int, n: int) -> str:
    return f"report-b-{layer}-n{n}" if report == "B" else f"network-{layer}-n{n}"


def _step(found: Found, step: Step, n: int, layer: int) -> GpuRecord | None:
    """What was measured for a step; None for one that isn't repeated."""
    if step.rung is None:
        return None
    contender = ladder.contender(step, layer, n)
    clock = "op" if step.arrays == "device" else "compute"
    return found.get("ladder", _case(step.report, layer, n), contender, clock=clock)


def _published(step: Step, n: int, layer: int) -> float | None:
    batch = None if step.report == "B" else n
    return op_seconds(step.report, step.section, n=batch, layer=layer, config=step.figure)


def _report(found: Found, report: str) -> str:
    base = next(s for s in steps(report) if s.section == OWN_BASELINE[report])
    header = ["N", "step", "as"]
    for layer in LAYERS:
        header += [f"layer {layer}", "of limit", "times its baseline", "published"]
    header += ["both: times its baseline", "published"]
    rows = []
    for n, step in product(BATCHES[report], steps(report)):
        if step.rung is None:
            continue
        row = [str(n), step.section, ladder.options(step)]
        ours = [(_step(found, base, n, k), _step(found, step, n, k)) for k in LAYERS]
        theirs = [(_published(base, n, k), _published(step, n, k)) for k in LAYERS]
        for (b, s), (pb, ps) in zip(ours, theirs, strict=True):
            row += [_time(s), _share(s), _ratio(_seconds(b), _seconds(s)), _ratio(pb, ps)]
        row.append(_ratio(_sum(_seconds(b) for b, _ in ours), _sum(_seconds(s) for _, s in ours)))
        row.append(_ratio(_sum(b for b, _ in theirs), _sum(s for _, s in theirs)))
        rows.append(row)
    if report == "B":
        rows.append(_torch(found, base))
    notes = [f"{s.section}: {s.note}" for s in steps(report) if s.note]
    text = f"{found.conditions('ladder')}\n\n{_markdown(header, rows, left=3)}"
    return text + "".join(f"\n\n{note[0].upper()}{note[1:]}." for note in notes)


def _torch(found: Found, base: Step) -> list[str]:
    n = BATCHES["B"][0]
    row, ours, theirs, layouts = [], [], [], []
    for layer in LAYERS:
        tried = [found.get("ladder", _case("B", layer, n), contender) for contender in ladder.PEERS]
        best = min(
            (r for r in tried if r is not None and r.median is not None), key=_seconds_or_0, default=None
        )
        b, published = _step(found, base, n, layer), op_seconds("B", "pytorch", n=None, layer=layer)
        pb = _published(base, n, layer)
        row += [_time(best), _share(best), _ratio(_seconds(b), _seconds(best)), _ratio(pb, published)]
        ours.append((_seconds(b), _seconds(best)))
        theirs.append((pb, published))
        layouts.append("" if best is None else str(best.config["layout"]))
    row.append(_ratio(_sum(b for b, _ in ours), _sum(s for _, s in ours)))
    row.append(_ratio(_sum(b for b, _ in theirs), _sum(s for _, s in theirs)))
    return [str(n), "pytorch", f"{PEER} {' | '.join(layouts)}", *row]


def _seconds_or_0(r: GpuRecord) -> float:
    return r.median or 0.0


def _rungs_table(found: Found) -> str:
    header = ["rung", "layer 1", "of limit", "layer 2", "of limit", f"both: times {BASELINE}"]
    for k in images.FILTERS:
        header += [f"{k}x{k}", "of limit"]
    rows = []
    base = _sum(
        _seconds(found.get("ladder", f"network-{k}-n{LARGEST}", Contender.of(BASELINE))) for k in LAYERS
    )
    for rung in _rungs():
        contender = Contender.of(rung)
        layers = [found.get("ladder", f"network-{k}-n{LARGEST}", contender) for k in LAYERS]
        row = [f"`{rung}`", *(cell for r in layers for cell in (_time(r), _share(r)))]
        row.append(_ratio(base, _sum(map(_seconds, layers))))
        for k in images.FILTERS:
            r = found.get("images", images.name(k), contender)
            row += [_time(r), _share(r)]
        rows.append(row)
    return f"{found.conditions('ladder', 'images')}\n\n{_markdown(header, rows)}"


def _blocks(found: Found) -> str:
    case = "single-4096-k7-int32-valid"
    header = ["lanes along", "block", "naive", "of limit"]
    header += [cell for loading in blocks.LOADINGS for cell in (f"tiled, {loading}", "naive / tiled")]
    rows = []
    for lanes, block in product(blocks.LANES, blocks.BLOCKS):
        naive = found.get("blocks", case, Contender.of("gpu-naive", {"tile": block, "lanes": lanes}))
        row = [lanes, f"{block[0]}x{block[1]}", _time(naive), _share(naive)]
        for loading in blocks.LOADINGS:
            options = {"tile": block, "lanes": lanes, "loading": loading}
            tiled = found.get("blocks", case, Contender.of("gpu-tiled", options))
            row += [_time(tiled), _ratio(_seconds(naive), _seconds(tiled))]
        rows.append(row)
    return f"{found.conditions('blocks')}\n\n{_markdown(header, rows, left=2)}"


def _widths(found: Found) -> str:
    header = [
        "rung",
        "lanes along",
        "width",
        "layer 1",
        "of limit",
        "layer 2",
        "of limit",
        "16's / it",
        "published",
    ]
    rows = []
    kinds: list[tuple[str, str]] = [(rung, "columns") for rung in widths.SWEPT]
    kinds += list(product(widths.MAPPED, widths.LANES))
    for rung, lanes in kinds:
        both = {}
        for width in widths.WIDTHS:
            options: dict[str, Any] = {"tile": (width, width)}
            if rung in widths.MAPPED:
                options["lanes"] = lanes
            both[width] = [
                found.get("widths", f"network-{k}-n{widths.BATCH}", Contender.of(rung, options))
                for k in LAYERS
            ]
        name = widths.SWEPT.get(rung)
        published = {
            w: op_seconds(
                "C", "tile-sweep", n=widths.BATCH, layer="both", config={"rung": name, "tile": str(w)}
            )
            if name
            else None
            for w in widths.WIDTHS
        }
        for width, layers in both.items():
            row = [f"`{rung}`", lanes, str(width), *(cell for r in layers for cell in (_time(r), _share(r)))]
            row.append(_ratio(_sum(map(_seconds, both[16])), _sum(map(_seconds, layers))))
            rows.append([*row, _ratio(published[16], published[width])])
    return f"{found.conditions('widths')}\n\n{_markdown(header, rows, left=3)}"


def _streams(found: Found) -> str:
    stages = [*streams.STAGES, "overlap", "allocated"]
    header = ["case", "arrays", "slices", "streams", "layer time", "serial / it", *stages]
    rows = []
    for layer, arrays in product(LAYERS, streams.HOSTS):
        case = f"network-{layer}-n{streams.BATCH}"
        serial = None
        for slices, count in ((1, 1), *((streams.SLICES, count) for count in streams.STREAMS)):
            options = {"streams": count, "slice": -(-streams.BATCH // slices), **streams.ROOM}
            r = found.get("streams", case, Contender.of("gpu-naive", options, arrays), clock="layer")
            serial = serial or _seconds(r)
            row = [f"`{case}`", arrays, str(slices), str(count), _time(r), _ratio(serial, _seconds(r))]
            numbers = {} if r is None else r.numbers
            # Nothing is shorter than nothing: an overlap is a difference, and may fall short of 0 by rounding.
            rows.append([*row, *(duration(max(numbers[s], 0.0)) if s in numbers else "" for s in stages)])
    return f"{found.conditions('streams')}\n\n{_markdown(header, rows, left=2)}"


def _calls(found: Found) -> str:
    case = "call-32x32-k3"
    header = [
        "rung",
        "conv2d, out given",
        "conv2d, new result",
        "plan, out given",
        "first call",
        "found compiled",
    ]
    rows = []
    for rung in _rungs():
        call = found.get("calls", case, Contender.of(rung), clock="call")
        first = found.get("calls", case, Contender.of(rung), clock="first call")
        if call is None:
            continue
        numbers = {**call.numbers, **({} if first is None else first.numbers)}
        cells = [
            duration(numbers[name]) if name in numbers else "" for name in ("conv2d", "plan, out", "cached")
        ]
        rows.append([f"`{rung}`", _time(call), *cells[:2], _time(first), cells[2]])
    goal = f"goal {duration(TARGET)} on device arrays"
    return f"{found.conditions('calls')}; {goal}\n\n{_markdown(header, rows)}"


_COUNTED = (
    "time, ns", "instructions", "threads an instruction", "load sectors", "bank conflicts", "memory, % of peak",
    "warps resident, %", "stalled on global queue", "stalled at barriers",
)  # fmt: skip


def _counters(found: Found) -> str:
    """The counters of every kernel that `REASONS` quotes."""
    kernels = dict.fromkeys(
        (
            c.case,
            c.rung,
            written(Contender.of(c.rung, c.options).config),
            c.kernel,
            Contender.of(c.rung, c.options),
        )
        for reason in REASONS
        for c in reason.counters.values()
    )
    rows = []
    for case, rung, options, kernel, contender in kernels:
        r = found.get("counters", case, contender, kernel=kernel)
        numbers = {} if r is None else r.numbers
        cells = [_count(numbers[name]) if name in numbers else "" for name in _COUNTED]
        rows.append([f"`{case}`", f"{rung} {options}".strip(), kernel, *cells])
    return (
        f"{found.conditions('counters')}\n\n{_markdown(['case', 'rung', 'kernel', *_COUNTED], rows, left=3)}"
    )


def _reasons(found: Found) -> str:
    # On a GPU whose counters nobody has read there is nothing to quote.
    return "\n".join(_reason(found, reason) for reason in REASONS if found.has("counters"))


def _reason(found: Found, reason: Reason) -> str:
    figures = {}
    for name, counter in reason.counters.items():
        value = found.counter(counter)
        if value is None:
            raise ValueError(f"the result file has no {counter.name!r} for {counter}")
        figures[name] = _count(value)
    ratios = ""
    if reason.section:
        step = next(s for s in steps(reason.report) if s.section == reason.section)
        base = next(s for s in steps(reason.report) if s.section == OWN_BASELINE[reason.report])
        ours = [_seconds(_step(found, s, reason.n, reason.layer)) for s in (base, step)]
        theirs = [_published(s, reason.n, reason.layer) for s in (base, step)]
        ratios = f" ({_ratio(*ours)} times its baseline, published {_ratio(*theirs)})"
    return f"- **Report {reason.report}, {reason.about}**{ratios}: {reason.sentence.format(**figures)}."


TABLES: Mapping[str, Callable[[Found], str]] = {
    "gpu-rungs": _rungs_table,
    **{f"gpu-report-{report.lower()}": partial(_report, report=report) for report in BATCHES},
    "gpu-blocks": _blocks,
    "gpu-widths": _widths,
    "gpu-streams": _streams,
    "gpu-calls": _calls,
    "gpu-reasons": _reasons,
    "gpu-counters": _counters,
}
"""Name of a mark -> what makes its table."""


def table(name: str, folder: Path) -> str:
    """The table `name` for every GPU model that has a result file in `folder`."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        file = RecordFile(GpuRecord, path)
        text = TABLES[name](Found(file.records))
        if not text:
            continue
        mark = f"**{file.hardware['gpu']}**"
        parts.append(f"{mark}\n\n{text}" if text.startswith(("-", "|")) else f"{mark}, {text}")
    return (
        "\n\n".join(parts)
        or "Not measured yet: `python -m benchmarks.gpu --json-dir benchmarks/results/studies`."
    )
