"""The tables of the documentation, as Markdown, from result files and from the registry. Nothing is typed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.gpu.published import figures
from benchmarks.gpu.steps import STEPS
from benchmarks.targets import TARGETS
from convpar.bench.libraries import ONE_THREAD, PEERS
from convpar.bench.machine import BUSY
from convpar.bench.results import SHIPPED, Record, ResultFile, duration
from convpar.cases import all_cases, select
from convpar.cli.backends import takes
from convpar.registry import FAMILIES, backends
from convpar.timing import REPEATS

CHOSEN = ("auto", "gpu")
"""What a caller gets who names no rung, on either device."""

LADDER = ("cpu-naive", "cpu-private", "cpu-unrolled")
"""The published CPU rungs, each over the one before."""


LIMIT = (
    "The limit is the shortest time that the measured copy and arithmetic rates allow; above 100% a case moved its "
    "bytes faster than the measured copy, found them in a cache, took fewer multiplications than are counted, or let other units do them."
)
"""What shares of a limit are shares of."""

FEWEST = 3
"""Numbers of threads from which on a case says how it scales."""


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


def _shipped(records: Iterable[Record]) -> Iterable[Record]:
    """Those of the build that users get, at the ISA level that it takes by itself."""
    return (r for r in records if r.build == SHIPPED and not r.level)


def _conditions(records: Sequence[Record]) -> str:
    """What a table's numbers were measured with: ceilings, versions, commits, dates, and who else was busy."""
    return "; ".join([*_ceilings(records), *_circumstances(records)])


def _ceilings(records: Sequence[Record]) -> list[str]:
    """The copy and the arithmetic rates that `records` are held against."""
    ceilings = [r.ceilings for r in records if r.ceilings]
    if not ceilings:
        return []
    parts = [f"copy {_range([c['bandwidth'] / 1e9 for c in ceilings])} GB/s"]
    for kind in sorted({k for c in ceilings for k in c["fma"]}):
        rates = [c["fma"][kind] / 1e9 for c in ceilings if kind in c["fma"]]
        parts.append(f"{kind} {_range(rates)} GMAC/s")
    return parts


def _circumstances(records: Sequence[Record]) -> list[str]:
    """Versions, commits, dates, and who else was busy."""
    parts = []
    # A record has the version of NumPy too, and its commit is convpar's.
    ours = {(r.versions["convpar"], r.commit) for r in records if "convpar" in r.versions}
    parts += [f"convpar {version}{_commit(commit)}" for version, commit in sorted(ours, key=str)]
    days = sorted({r.date[:10] for r in records if r.date})
    if days:
        parts.append(days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}")
    busy = max((r.busy for r in records if r.busy is not None), default=0.0)
    if busy > BUSY:
        parts.append(f"not an idle machine: others used up to {busy:.0%} of the processors")
    return parts


def _commit(commit: str | None) -> str:
    if commit is None:
        return ""
    known, _, changed = commit.partition("-")
    return f" ({known[:10]}{', changed since' if changed else ''})"


def commits(found: Iterable[str | None]) -> str:
    """The builds that records were made with, for a line above a table."""
    names = {_commit(commit).strip(" ()") or "unknown" for commit in found}
    return ", ".join(sorted(n for n in names if f"{n}, changed since" not in names))


def _range(values: Sequence[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.0f}" if round(low) == round(high) else f"{low:.0f}-{high:.0f}"


Setting = Mapping[str, Any]
"""One setting of a peer, as in `Record.peers`."""

Column = tuple[str, str]
"""A peer and its method: a setting without the number of threads."""


def _methods(record: Record) -> dict[Column, tuple[str, Setting]]:
    """What ran beside `record`: the faster of each method's settings, with its name."""
    found: dict[Column, tuple[str, Setting]] = {}
    for peer in PEERS:
        for name, setting in record.peers.get(peer, {}).get("settings", {}).items():
            column = peer, name.removesuffix(ONE_THREAD)
            if column not in found or setting["median"] < found[column][1]["median"]:
                found[column] = name, setting
    return found


def _columns(rows: Sequence[Record]) -> tuple[list[Column], list[Column]]:
    """The columns to show and those to leave out: of each peer, what it does first and whatever is its fastest on a case."""
    seen: dict[Column, bool] = {}
    for record in rows:
        methods = _methods(record)
        for peer in PEERS:
            mine = {
                column: setting["median"] for column, (_, setting) in methods.items() if column[0] == peer
            }
            for k, column in enumerate(mine):
                seen[column] = seen.get(column, False) or k == 0 or column == min(mine, key=mine.__getitem__)
    order = sorted(seen, key=lambda c: list(PEERS).index(c[0]))
    return [c for c in order if seen[c]], [c for c in order if not seen[c]]


def _cell(record: Record, name: str, setting: Setting) -> str:
    """Time, ratio, and what isn't alike on both sides of it."""
    text = f"{duration(setting['median'])} ({setting['median'] / record.median:.2f}x)"
    kinds = [_kind(setting["contract"]), _kind(record.contract)]
    marks = [kinds[0]] if kinds[0] != kinds[1] else []
    marks += ["1 thread"] if name.endswith(ONE_THREAD) else []
    return " ".join([text, ", ".join(marks)]).strip()


def _kind(contract: str) -> str:
    """ "elementwise", "normwise" or "exact", whatever the factor."""
    return contract.partition(" ")[0]


def _legend(rows: Sequence[Record], shown: Sequence[Column], hidden: Sequence[Column]) -> str:
    """What each column is: version, threads, types, contract, and what it does differently."""
    plain = min((s["repeats"] for r in rows for _, s in _methods(r).values()), default=REPEATS)
    fewest = min([plain, *(r.repeats for r in rows)])
    samples = (
        f"{REPEATS} samples" if fewest >= REPEATS else f"{REPEATS} samples, of the slowest at least {fewest}"
    )
    lines = [
        f"Times are medians of {samples}; ± is the interquartile range. In brackets, the time over convpar's in the "
        f"same row; a cell says so where its accuracy contract is another than convpar's. {LIMIT}",
        "",
    ]
    what = {f"{r.types}: {r.contract}{''.join(f', {n}' for n in r.notes)}": None for r in rows}
    threads = _threads_of({r.effective_threads for r in rows})
    lines.append(f"- convpar: {threads}output array given; {'; '.join(what)}")
    for column in shown:
        peer, method = column
        mine = [(r, _methods(r)[column][1]) for r in rows if column in _methods(r)]
        settings = [setting for _, setting in mine]
        versions = sorted({r.peers[peer]["version"] for r, _ in mine})
        modes = sorted({r.peers[peer]["mode"] for r, _ in mine} - {""})
        what = {
            f"{s['types']}: {s['contract']}{''.join(f', {n}' for n in s['notes'])}": None for s in settings
        }
        parts = [*modes, *what]
        threads = _threads_of({s["threads"] for s in settings})
        lines.append(f"- {peer} {', '.join(versions)}, `{method}`: {threads}{'; '.join(parts)}")
    if hidden:
        names = ", ".join(f"{peer} `{method}`" for peer, method in hidden)
        lines.append(f"- also tried, and nowhere the fastest of its library: {names}")
    return "\n".join(lines)


def _threads_of(counts: Iterable[int | None]) -> str:
    known = sorted({n for n in counts if n})
    return f"{' or '.join(map(str, known))} thread{'s' if known != [1] else ''}; " if known else ""


def count(threads: int) -> str:
    """A number of threads in words."""
    return "1 thread" if threads == 1 else f"{threads} threads"


def comparison_table(cases: Sequence[str], records: Sequence[Record], *, targets: bool = False) -> str:
    """What the chooser gives beside the peers timed in the same run, per thread count; nothing that ran alone.

    A column is one method of a peer; every ratio is that cell's time over convpar's in its row. With `targets`,
    CPU cases only, and what they are meant to reach in two more columns.
    """
    order = {name: k for k, name in enumerate(all_cases())}
    wanted = set(cases)
    texts = []
    for threads, found in _threads(r for r in _shipped(records) if r.case in wanted).items():
        if targets and not threads:
            continue
        ours = {r.case: r for r in found if r.backend in CHOSEN and _methods(r)}
        rows = sorted(ours.values(), key=lambda r: order[r.case])
        if not rows:
            continue
        shown, hidden = _columns(rows)
        lines = []
        for r in rows:
            methods = _methods(r)
            line = [f"`{r.case}`", f"{duration(r.median)} ± {duration(r.spread)}", r.chose]
            line += ["" if r.share is None else f"{r.share:.0%}"]
            line += [_cell(r, *methods[column]) if column in methods else "" for column in shown]
            lines.append(line + (_reached(r) if targets else []))
        header = ["case", "convpar", "rung", "of limit", *(f"{peer} `{method}`" for peer, method in shown)]
        header += ["target", "met"] if targets else []
        unit = f"{count(threads)}; " if threads else ""
        table = markdown(header, lines)
        texts.append(f"{unit}{_conditions(rows)}\n\n{table}\n\n{_legend(rows, shown, hidden)}")
    return "\n\n".join(texts)


def _reached(record: Record) -> list[str]:
    """The targets of a case, and for each whether it is met and by what; blank where no peer of them was timed.

    One that the limit itself misses says so: the peer is too near to it on this machine.
    """
    goals, found, known = [], [], False
    for target in TARGETS.get(record.case, ()):
        if target.seconds:
            goals.append(f"at most {duration(target.seconds)}")
            found.append("yes" if record.median <= target.seconds else "no")
            known = True
            continue
        goals.append(f"{target.ratio:g}x {target.peer}")
        times = [
            setting["median"] for (peer, _), (_, setting) in _methods(record).items() if peer == target.peer
        ]
        if times:
            ratio = min(times) / record.median
            met = ratio >= target.ratio
            found.append(f"{'yes' if met else 'no'}, {ratio:.2f}x")
            share = record.share or 1
            if not met and share < 1 and ratio / share < target.ratio:
                found[-1] += f" ({ratio / share:.2f}x at the limit)"
            known = True
        else:
            found.append("not timed")
    return [", ".join(goals), "; ".join(found) if known else ""]


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
        for r in _shipped(records)
        if r.case in wanted and r.errors
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
    found = {
        (r.case, r.backend, r.threads, r.build): r for r in records if r.backend in LADDER and not r.level
    }
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


def scaling_table(records: Sequence[Record]) -> str:
    """Times of the CPU's chooser by number of threads, for cases timed with at least `FEWEST` of them.

    A cell has the time, the time of one thread over it if both are of the same commit, and its share of the limit measured
    with as many threads.
    """
    cases: dict[str, dict[int, Record]] = {}
    for r in _shipped(records):
        if r.backend == "auto" and r.threads:
            cases.setdefault(r.case, {})[r.threads] = r
    rows = [(case, cases[case]) for case in all_cases() if len(cases.get(case, ())) >= FEWEST]
    if not rows:
        return ""
    shown = _threads(r for _, found in rows for r in found.values())
    lines = [
        [f"`{case}`", ", ".join(dict.fromkeys(found[n].chose for n in sorted(found)))]
        + [_scaled(found[n], found.get(1)) if n in found else "" for n in shown]
        for case, found in rows
    ]
    table = markdown(["case", "rung", *map(count, shown)], lines, right=2)
    limits = {n: ", ".join(_ceilings(mine)) for n, mine in shown.items()}
    legend = [
        "A cell is the median time ± the interquartile range; in brackets, the time of one thread over it if that is of the "
        f"same commit, and the share of the limit measured with as many threads. {LIMIT}",
        "",
        *(f"- {count(n)}: {measured}" for n, measured in limits.items() if measured),
    ]
    conditions = "; ".join(_circumstances([r for mine in shown.values() for r in mine]))
    return "\n\n".join([conditions, table, "\n".join(legend).rstrip()])


def _scaled(record: Record, alone: Record | None) -> str:
    # Of another commit, and so another hour, one thread's time tells nothing about what more of them gain.
    same = alone is not None and alone.commit == record.commit
    parts = [f"{alone.median / record.median:.2f}x"] if alone is not None and same else []
    parts += [] if record.share is None else [f"{record.share:.0%} of limit"]
    time = f"{duration(record.median)} ± {duration(record.spread)}"
    return f"{time} ({', '.join(parts)})" if parts else time


def _fastest(record: Record) -> str:
    """The cell of the fastest method beside `record` that keeps the contract of its case; without one, of the fastest.

    An empty text if nothing ran beside it.
    """
    asked = all_cases()[record.case].problem().accuracy or "elementwise"
    methods = _methods(record)
    keep = {
        c for c, (_, s) in methods.items() if asked != "elementwise" or _kind(s["contract"]) != "normwise"
    }
    best = min(keep or methods, key=lambda c: methods[c][1]["median"], default=None)
    if best is None:
        return ""
    return f"{best[0]} `{best[1]}` {_cell(record, *methods[best])}"


def _sentences(rows: Sequence[Record]) -> str:
    """The legend of a table that names the methods in its cells."""
    return _legend(rows, list(dict.fromkeys(column for r in rows for column in _methods(r))), [])


def growth_size_table(records: Sequence[Record]) -> str:
    """Time an output by the size of the image, and what moving it as fast as a copy of that size takes."""
    cases = [all_cases()[name] for name in _names("table-growth-size")]
    texts = []
    for threads, found in _threads(r for r in _shipped(records) if r.backend == "auto" and r.copy).items():
        ours = {r.case: r for r in found}
        rows = [ours[case.name] for case in cases if case.name in ours]
        if not rows:
            continue
        lines = [
            [
                f"{case.x_shape[2]} x {case.x_shape[3]}",
                *(
                    _by_copy(ours[case.name])
                    if case.name in ours
                    else [f"not timed: arrays of {case.problem().least_bytes / 1e6:.0f} MB", *[""] * 6]
                ),
            ]
            for case in cases
        ]
        header = [
            "image",
            "convpar",
            "rung",
            "ns an output",
            "copied, ns",
            "above it",
            "copy, GB/s",
            "fastest peer",
        ]
        what = (
            "A copy is one of as many bytes, measured in the same run, through the caches or past them; where image "
            "and result fit in a cache it is the cache's. Above it: by how much the time exceeds that of reading each "
            "sample and writing each output once at this rate."
        )
        circumstances = "; ".join([count(threads), *_circumstances(rows)])
        texts.append(f"{circumstances}\n\n{markdown(header, lines)}\n\n{what}\n\n{_sentences(rows)}")
    return "\n\n".join(texts)


def _by_copy(record: Record) -> list[str]:
    problem = all_cases()[record.case].problem()
    assert record.copy is not None
    least = problem.least_bytes / record.copy
    return [
        f"{duration(record.median)} ± {duration(record.spread)}",
        record.chose,
        f"{record.median / problem.outputs * 1e9:.3f}",
        f"{least / problem.outputs * 1e9:.3f}",
        f"{record.median / least - 1:+.0%}",
        f"{record.copy / 1e9:.0f}",
        _fastest(record),
    ]


def growth_filter_table(records: Sequence[Record]) -> str:
    """Time by the size of the filter under either contract, beside the fastest peer that keeps it."""
    names = _names("table-growth-filter")
    texts = []
    found = (r for r in _shipped(records) if r.case in names and r.backend == "auto" and _methods(r))
    for threads, mine in _threads(found).items():
        ours = {r.case: r for r in mine}
        lines = []
        for case in (all_cases()[name] for name in names if "normwise" not in all_cases()[name].tags):
            both = [ours.get(case.name), ours.get(f"{case.name}-normwise")]
            if any(both):
                cells = [_grown(r) if r is not None else [""] * 4 for r in both]
                lines.append([f"{case.w_shape[2]}x{case.w_shape[3]}", *cells[0], *cells[1]])
        header = ["filter"]
        for contract in ("elementwise", "normwise"):
            header += [contract, "rung", "of limit", "fastest peer"]
        rows = list(ours.values())
        texts.append(
            f"{count(threads)}; {_conditions(rows)}\n\n{markdown(header, lines)}\n\n{_sentences(rows)}"
        )
    return "\n\n".join(texts)


def _grown(record: Record) -> list[str]:
    share = "" if record.share is None else f"{record.share:.0%}"
    return [f"{duration(record.median)} ± {duration(record.spread)}", record.chose, share, _fastest(record)]


def levels_table(records: Sequence[Record]) -> str:
    """Times at each ISA level, its share of what that level can do, and the fastest peer, which has its own best."""
    held = [r for r in records if r.level and r.backend == "auto" and r.build == SHIPPED]
    order = {name: k for k, name in enumerate(all_cases())}
    texts = []
    for threads, rows in _threads(held).items():
        # v4, v3, baseline.
        rows = sorted(sorted(rows, key=lambda r: r.level, reverse=True), key=lambda r: order[r.case])
        lines = [[f"`{r.case}`", r.level, *_grown(r)] for r in rows]
        header = ["case", "level", "convpar", "rung", "of limit", "fastest peer"]
        levels = dict.fromkeys(sorted((r.level for r in rows), reverse=True))
        peaks = {level: ", ".join(_ceilings([r for r in rows if r.level == level])) for level in levels}
        texts.append(
            f"{'; '.join([count(threads), *_circumstances(rows)])}\n\n{markdown(header, lines, right=2)}\n\n"
            + _sentences(rows)
            + "".join(f"\n- {level}: {measured}" for level, measured in peaks.items() if measured)
        )
    return "\n\n".join(texts)


def _names(*patterns: str) -> list[str]:
    return [case.name for case in select(patterns)]


def _speed_table(tag: str, records: Sequence[Record]) -> str:
    return comparison_table(_names(tag), records, targets=True)


TABLES: Mapping[str, Callable[[Sequence[Record]], str]] = {
    "peers": lambda records: comparison_table(_names(), records),
    **{
        name: partial(_speed_table, f"table-{name}")
        for name in ("single", "types", "small", "separable", "layers")
    },
    "layers-last": lambda records: comparison_table(_names("table-layers-last"), records),
    "networks": lambda records: comparison_table(_names("table-networks"), records),
    "integers": lambda records: comparison_table(_names("table-integers"), records),
    "one-image": lambda records: comparison_table(_names("table-one-image"), records),
    "pictures": lambda records: comparison_table(_names("table-pictures"), records),
    "targets": lambda records: comparison_table(_names("targets-cpu", "targets-gpu"), records),
    "accuracy": lambda records: accuracy_table(_names("*"), records),
    "scaling": scaling_table,
    "ladder": ladder_table,
    "growth-size": growth_size_table,
    "growth-filter": growth_filter_table,
    "growth-channels": lambda records: comparison_table(_names("table-growth-channels"), records),
    "levels": levels_table,
}
"""Name -> how the table is made from records."""


def model(hardware: Mapping[str, Any]) -> str:
    """What a table's heading calls the hardware: virtual machines often hide a processor's name, but not its family."""
    if "gpu" in hardware:
        return str(hardware["gpu"])
    family = hardware.get("family", hardware["architecture"])
    return f"{hardware['processor']} ({family}), {hardware['cores']} cores"


def results_table(name: str, files: Sequence[ResultFile]) -> str:
    """The table `name` for every hardware model that has results for it; empty if none has.

    Raises
    ------
    ValueError
        There is no table of that name.
    """
    if name not in TABLES:
        raise ValueError(f"no table is called {name!r}; there are {', '.join(TABLES)}")
    make = TABLES[name]
    parts = []
    for file in files:
        text = make(file.records)
        if text:
            parts.append(f"**{model(file.hardware)}**, {text}")
    return "\n\n".join(parts)
