"""The tables of the documentation, as Markdown, from result files and from the registry. Nothing is typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from benchmarks.gpu.published import figures
from benchmarks.gpu.steps import STEPS
from convpar.bench.libraries import PEERS
from convpar.bench.results import SHIPPED, Record, ResultFile, duration
from convpar.cases import all_cases, select
from convpar.cli.backends import takes
from convpar.registry import FAMILIES, backends

CHOSEN = ("auto", "gpu")
"""What a caller gets who names no rung, on either device."""

LADDER = ("cpu-naive", "cpu-private", "cpu-unrolled")
"""The published CPU rungs, each over the one before."""


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: int | None = None) -> str:
    """A table; columns from `right` on are aligned right, by default all but the first."""
    first = 1 if right is None else right
    lines = [header, ["---" if k < first else "---:" for k in range(len(header))], *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def backends_table() -> str:
    """Every backend that convpar brings: where it runs, its idea, what it takes, what it builds on, who published it."""
    rows = [
        [
            f"`{b.name}`",
            b.capabilities.device,
            b.summary,
            takes(b.capabilities),
            f"`{b.builds_on}`" if b.builds_on else "",
            ", ".join(_reports(b.name)),
        ]
        for b in backends()
        # Somebody's plugin is not convpar's.
        if b.name.startswith(tuple(FAMILIES))
    ]
    return markdown(["name", "device", "idea", "takes", "builds on", "published in report"], rows, right=6)


def _reports(name: str) -> list[str]:
    """The reports that have figures for a rung, by the table of steps or by calling it as we do."""
    found = {step.report for step in STEPS if step.rung == name}
    return sorted(found | {f.report for f in figures() if name == _rung(f.report, f.section)})


def _rung(report: str, section: str) -> str:
    """What a rung called `section` would be called here: report E's are of the CPU unless it says gpu."""
    if section.startswith("gpu-"):
        return section
    return f"cpu-{section}" if report == "E" else f"gpu-{section}"


def _threads(records: Iterable[Record]) -> dict[int, list[Record]]:
    found: dict[int, list[Record]] = {}
    for record in records:
        found.setdefault(record.threads, []).append(record)
    return dict(sorted(found.items()))


def _conditions(records: Sequence[Record]) -> str:
    """What a table's numbers were measured with: ceilings, versions, dates."""
    ceilings = [r.ceilings for r in records if r.ceilings]
    parts = []
    if ceilings:
        bandwidths = [c["bandwidth"] / 1e9 for c in ceilings]
        parts.append(f"copy {_range(bandwidths)} GB/s")
        for kind in sorted({k for c in ceilings for k in c["fma"]}):
            parts.append(
                f"{kind} {_range([c['fma'][kind] / 1e9 for c in ceilings if kind in c['fma']])} GMAC/s"
            )
    versions = {(name, version) for r in records for name, version in r.versions.items() if name != "numpy"}
    parts += [f"{name} {version}" for name, version in sorted(versions)]
    days = sorted({r.date[:10] for r in records if r.date})
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    return "; ".join(parts)


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f}-{high:.0f}"


def comparison_table(cases: Sequence[str], records: Sequence[Record]) -> str:
    """What the chooser gives beside every peer that has a time on one of `cases`, with ratios, per thread count."""
    order = {name: k for k, name in enumerate(all_cases())}
    wanted = set(cases)
    texts = []
    for threads, found in _threads(r for r in records if r.case in wanted and r.build == SHIPPED).items():
        ours = {r.case: r for r in found if r.backend in CHOSEN}
        by_peer = {peer: {r.case: r for r in found if r.backend == peer and not r.error} for peer in PEERS}
        peers = [peer for peer in PEERS if any(case in by_peer[peer] for case in ours)]
        rows = []
        for case in sorted(ours, key=order.__getitem__):
            r = ours[case]
            row = [f"`{case}`", f"{duration(r.median)} ± {duration(r.spread)}", r.chose]
            row += ["" if r.share is None else f"{r.share:.0%}"]
            for peer in peers:
                other = by_peer[peer].get(case)
                ratio = f" ({r.ratios[peer]:.2f}x)" if peer in r.ratios else ""
                row.append(duration(other.median) + ratio if other is not None else "")
            rows.append(row)
        if rows:
            header = ["case", "convpar", "rung", "of limit", *(f"{p} (over convpar)" for p in peers)]
            shown = [r for r in found if r.backend in CHOSEN or r.backend in peers]
            unit = {0: "", 1: "1 thread; "}.get(threads, f"{threads} threads; ")
            texts.append(f"{unit}{_conditions(shown)}\n\n{markdown(header, rows)}")
    return "\n\n".join(texts)


def accuracy_table(cases: Sequence[str], records: Sequence[Record]) -> str:
    """Largest errors over either contract's bound, on a plain image and on one with a bright patch."""
    wanted = set(cases)
    rows = [
        [
            f"`{r.case}`",
            f"`{r.backend}`" + (f" {r.setting}" if r.setting else ""),
            r.contract,
            *(
                f"{r.errors[data][kind]:.2g}"
                for kind in ("elementwise", "normwise")
                for data in ("plain", "bright")
            ),
        ]
        for r in records
        if r.case in wanted and r.errors and r.build == SHIPPED
    ]
    if not rows:
        return ""
    header = [
        "case",
        "backend",
        "contract",
        "element, plain",
        "element, bright",
        "plane, plain",
        "plane, bright",
    ]
    return f"largest error over the bound\n\n{markdown(header, rows, right=3)}"


def ladder_table(records: Sequence[Record]) -> str:
    """Times of the published CPU rungs and each one's gain over the one before, in both builds."""
    found = {r.key: r for r in records if r.backend in LADDER}
    groups = sorted({(r.build != SHIPPED, r.build, r.case, r.threads) for r in found.values()})
    order = {name: k for k, name in enumerate(all_cases())}
    groups.sort(key=lambda g: (g[0], g[1], order[g[2]], g[3]))
    rows = []
    for _, build, case, threads in groups:
        rungs = [found.get((case, rung, threads, build)) for rung in LADDER]
        if any(r is None for r in rungs):
            continue
        times = [r.median for r in rungs if r is not None]
        problem = all_cases()[case].problem()
        rows.append(
            [
                build,
                problem.x_dtype.name,
                f"{problem.kh}x{problem.kw}",
                str(threads),
                *(duration(t) for t in times),
                *(f"{before / after:.2f}" for before, after in pairwise(times)),
            ]
        )
    if not rows:
        return ""
    names = [rung.removeprefix("cpu-") for rung in LADDER]
    header = ["build", "type", "filter", "threads", *names]
    header += [f"{a} / {b}" for a, b in pairwise(names)]
    shown = [r for r in found.values() if (r.build != SHIPPED, r.build, r.case, r.threads) in set(groups)]
    return f"{_conditions(shown)}\n\n{markdown(header, rows, right=4)}"


def _names(*patterns: str) -> list[str]:
    return [case.name for case in select(patterns)]


TABLES: Mapping[str, tuple[Callable[[Sequence[Record]], str], str]] = {
    "peers": (
        lambda records: comparison_table(_names(), records),
        "convpar bench --json benchmarks/results",
    ),
    "single": (
        lambda records: comparison_table(
            _names("single-4096-*-float32-valid*", "single-16384-*-float32-valid*"), records
        ),
        "convpar bench --case 'single-4096-*-float32-valid*' --json benchmarks/results",
    ),
    "types": (
        lambda records: comparison_table(
            [
                n
                for t in ("float64", "int32", "int16", "uint8", "uint8-int32")
                for n in _names(f"single-4096-*-{t}-valid", f"single-16384-*-{t}-valid")
            ],
            records,
        ),
        "convpar bench --case 'single-4096-k[357]-*-valid' --json benchmarks/results",
    ),
    "small": (
        lambda records: comparison_table(_names("small"), records),
        "convpar bench --case small --json benchmarks/results",
    ),
    "separable": (
        lambda records: comparison_table(_names("separable"), records),
        "convpar bench --case 'separable-4096-*-float32' --json benchmarks/results",
    ),
    "layers": (
        lambda records: comparison_table(_names("layers"), records),
        "convpar bench --case layers --json benchmarks/results",
    ),
    "targets": (
        lambda records: comparison_table(_names("targets-cpu", "targets-gpu"), records),
        "convpar bench --case targets-cpu --json benchmarks/results",
    ),
    "accuracy": (
        lambda records: accuracy_table(_names("*"), records),
        "convpar bench --accuracy --json benchmarks/results",
    ),
    "ladder": (ladder_table, "python -m benchmarks.ladder --json benchmarks/results"),
}
"""Name -> (how the table is made from records, the command that makes the records)."""


def results_table(name: str, files: Sequence[ResultFile]) -> str:
    """The table `name` for every hardware model that has results for it; how to get some if none has.

    Raises
    ------
    ValueError
        There is no table of that name.
    """
    if name not in TABLES:
        raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
    make, command = TABLES[name]
    parts = []
    for file in files:
        text = make(file.records)
        if text:
            hardware = file.hardware
            model = (
                hardware.get("gpu")
                or f"{hardware['processor']} ({hardware.get('family', hardware['architecture'])}), {hardware['cores']} cores"
            )
            parts.append(f"**{model}**, {text}")
    return "\n\n".join(parts) or f"Not measured yet: `{command}`."
