"""`convpar bench`: convpar's backends and other libraries on named cases, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from convpar import __version__, get_num_threads
from convpar.backends.gpu import executors
from convpar.bench import machine
from convpar.bench.libraries import PEERS
from convpar.bench.measure import BUDGET, CALL_LIMIT, Bench, Effort, Outcome, variant
from convpar.bench.results import Record, ResultFile, ResultsError, duration, path_for
from convpar.cases import Case, all_cases, select, tags
from convpar.choose import CHOOSERS
from convpar.timing import REPEATS, Ceilings

from .common import CONTEXT_SETTINGS, THREADS, Finite, UserError, check_settings, console

if TYPE_CHECKING:
    from rich.console import Console

Device = Literal["cpu", "gpu"]


@click.command(context_settings=CONTEXT_SETTINGS)
@click.option(
    "--case", "-c", "patterns", multiple=True, metavar="PATTERN",
    help="Names or tags of cases, with * and ?; repeat for more. See --list. [default: one of each kind]",
)  # fmt: skip
@click.option(
    "--backend", "-b", "backends", multiple=True, metavar="PATTERN", default=("auto",), show_default=True,
    help="Backends or choosers, with * and ?, all of one device; repeat for more.",
)  # fmt: skip
@click.option(
    "--peer", "-p", "peers", multiple=True, type=click.Choice([*PEERS, "none"]),
    help="Libraries to compare with; repeat for more. [default: all that run on the backends' device]",
)  # fmt: skip
@click.option(
    "--threads", "-t", "threads", multiple=True, type=THREADS, metavar="N",
    help="Threads for everybody, pinned to as many processors; repeat for more runs. [default: all]",
)  # fmt: skip
@click.option(
    "--isa", "levels", multiple=True, metavar="LEVEL",
    help="Hold the CPU backends to an instruction set, \"all\" to each that this machine has; repeat to time several in "
    "turn. [default: the best]",
)  # fmt: skip
@click.option(
    "--repeats", type=click.IntRange(min=1), default=REPEATS, show_default=True, help="Samples of each."
)
@click.option(
    "--budget", type=Finite(min=0, min_open=True), default=BUDGET, show_default=True,
    metavar="SECONDS", help="Time for one contestant on one case; the slow get fewer samples.",
)  # fmt: skip
@click.option(
    "--call-limit", type=Finite(min=0, min_open=True), default=CALL_LIMIT, show_default=True,
    metavar="SECONDS", help="Give up on a single call that takes longer.",
)  # fmt: skip
@click.option(
    "--accuracy", is_flag=True, help="Also measure errors, on a plain image and one with a bright patch."
)
@click.option(
    "--check-all", is_flag=True, help="Compare every element of large answers with the reference; slow."
)
@click.option(
    "--json", "target", type=click.Path(path_type=Path), metavar="FILE",
    help="Merge the results into FILE, or into the file of this hardware in a folder.",
)  # fmt: skip
@click.option("--list", "listing", is_flag=True, help="List the cases that --case chooses, and stop.")
def command(
    patterns: tuple[str, ...],
    backends: tuple[str, ...],
    peers: tuple[str, ...],
    threads: tuple[int, ...],
    levels: tuple[str, ...],
    repeats: int,
    budget: float,
    call_limit: float,
    accuracy: bool,
    check_all: bool,
    target: Path | None,
    listing: bool,
) -> int:
    """Time backends on named cases, with other libraries beside them.

    The machine's ceilings are measured first. Each library runs in a process of its
    own, pinned to the same processors, and is called in turn with the others. Every answer
    is checked. Exit code 1: one of convpar's was wrong; 2: nothing could be timed.
    """
    try:
        cases = select(patterns)
    except ValueError as e:
        raise UserError(str(e)) from e
    out = console()
    if listing:
        _list(out, cases if patterns else list(all_cases().values()))
        return 0
    check_settings()
    names = _backends(backends)
    device = _device(names)
    if device == "gpu" and machine.graphics() is None:
        raise UserError(f"{', '.join(names)}: there is no GPU to be timed on")
    if device == "gpu" and executors.emulating():
        raise UserError(
            f"{executors.VARIABLE} is 'emulate', and the emulator's times say nothing about a GPU"
        )
    chosen = _peers(peers, device)
    held_to = _levels(levels, device)
    file = _file(target, device)
    effort = Effort(
        repeats=repeats, budget=budget, call_limit=call_limit, accuracy=accuracy, everything=check_all
    )
    _warn_if_busy(console(stderr=True))
    outcomes: list[Outcome] = []
    for num_threads in threads or (get_num_threads(),):
        outcomes += _run(out, cases, names, chosen, device, num_threads, held_to, effort, file)
    if all(o.record is None for o in outcomes):
        raise UserError(f"nothing was timed; {outcomes[0].backend}: {outcomes[0].reason}")
    return int(any(o.wrong for o in outcomes if o.backend in names))


def _run(
    out: Console,
    cases: Sequence[Case],
    backends: Sequence[str],
    peers: Sequence[str],
    device: Device,
    num_threads: int,
    levels: Sequence[str] | None,
    effort: Effort,
    file: ResultFile | None,
) -> list[Outcome]:
    """One thread count: what became of every contestant on every case."""
    found: list[Outcome] = []
    with (
        out.status("starting") as status,
        Bench(
            backends, peers, num_threads=num_threads, effort=effort, levels=levels, progress=status.update
        ) as bench,
    ):
        lacking = next((bench.missing[name] for name in bench.ours if name in bench.missing), None)
        if lacking is not None:
            raise UserError(f"convpar can't be run in a process of its own: {lacking}")
        reason = bench.measure_ceilings(cases, device=device)
        _print_header(out, bench, device, reason)
        first = dict(bench.ceilings_at)
        for case in cases:
            outcomes = bench.run(case)
            if file is not None:
                file.merge(o.record for o in outcomes if o.record is not None)
                file.save()
            _print_case(out, case, outcomes, peers, accuracy=effort.accuracy)
            found += outcomes
        # Measured again where a result was above them.
        raised = {level: c for level, c in bench.ceilings_at.items() if c != first[level]}
        _print_ceilings(out, "ceilings, as raised since", raised)
    return found


# -- what was asked for


def _backends(patterns: Sequence[str]) -> list[str]:
    from convpar import registry

    known = [b.name for b in registry.backends()]
    chosen: dict[str, None] = {}
    for pattern in patterns:
        found = [pattern] if pattern in CHOOSERS else [n for n in known if fnmatchcase(n, pattern)]
        if not found:
            raise UserError(f"no backend matches {pattern!r}; there are {', '.join([*CHOOSERS, *known])}")
        chosen |= dict.fromkeys(found)
    return list(chosen)


def _device(backends: Sequence[str]) -> Device:
    from convpar import registry

    def device(name: str) -> Device:
        if name in CHOOSERS:
            return "gpu" if CHOOSERS[name] == "gpu" else "cpu"
        backend = registry.find(name)
        assert backend is not None
        return backend.capabilities.device

    devices = {device(name) for name in backends}
    if len(devices) > 1:
        raise UserError(f"{', '.join(backends)} run on different devices; time one device at a time")
    return devices.pop()


def _peers(peers: Sequence[str], device: Device) -> list[str]:
    if "none" in peers:
        return []
    other = [peer for peer in peers if PEERS[peer] != device]
    if other:
        fit = ", ".join(peer for peer, where in PEERS.items() if where == device)
        raise UserError(f"{', '.join(other)} can't be compared on the {device}; peers there are {fit}")
    return list(dict.fromkeys(peers)) or [peer for peer, where in PEERS.items() if where == device]


def _levels(levels: Sequence[str], device: Device) -> list[str] | None:
    """ISA levels for `Bench`."""
    if device == "gpu":
        if levels:
            raise UserError("--isa holds the CPU's backends to an instruction set, and these run on the gpu")
        return [""]
    if not levels:
        return None
    from convpar.backends import cpu

    known: Sequence[str] = cpu.build_info().get("ISA levels", ())
    unknown = [level for level in levels if level not in (*known, "all")]
    if unknown:
        raise UserError(f"--isa must be all or one of {', '.join(known)} on this machine, not {unknown[0]!r}")
    return list(known) if "all" in levels else list(dict.fromkeys(levels))


def _file(target: Path | None, device: Device) -> ResultFile | None:
    if target is None:
        return None
    hardware = machine.hardware(device)
    try:
        file = ResultFile(path_for(target, machine.slug(hardware)), hardware)
        # Before hours of measuring: can it be written at all?
        file.save()
    except (ResultsError, OSError) as e:
        raise UserError(str(e)) from e
    return file


# -- what is printed


def _list(out: Console, cases: Sequence[Case]) -> None:
    from rich.table import Table

    table = Table("case", "problem", "MACs", "tags", box=None)
    for case in cases:
        problem = case.problem()
        shapes = f"{'x'.join(map(str, case.x_shape))} * {'x'.join(map(str, case.w_shape))}"
        table.add_row(case.name, shapes, f"{problem.macs:.3g}", " ".join(case.tags))
    out.print(table)
    out.print(f"{len(cases)} cases; tags: {', '.join(tags())}")


def _warn_if_busy(err: Console) -> None:
    load, busy = machine.load(), machine.busy()
    found = []
    if load is not None and load >= 1:
        found.append(f"the load average is {load:.1f}")
    if busy is not None and busy > machine.BUSY:
        found.append(f"others use {busy:.0%} of the processors right now")
    if found:
        err.print(
            f"warning: {' and '.join(found)}: compare times only within this run, if at all", style="yellow"
        )


def _print_header(out: Console, bench: Bench, device: Device, reason: str) -> None:
    hardware = machine.hardware(device)
    names = ", ".join(str(v) for k, v in hardware.items() if k in ("processor", "family", "gpu"))
    pinned = f"pinned to {','.join(map(str, bench.cores))}" if bench.cores else "not pinned"
    out.print(
        f"[bold]{names}[/bold]: {_threads(bench.num_threads)}, {pinned}; convpar {__version__}",
        soft_wrap=True,
    )
    if not bench.ceilings_at:
        out.print(f"no ceilings, so no shares of them: {reason}", soft_wrap=True)
    _print_ceilings(out, "ceilings", bench.ceilings_at)
    for name, about in bench.about().items():
        if name not in bench.ours:
            threads = f"{_threads(about['threads'])}, " if about["threads"] else ""
            out.print(
                f"{name} {about['version']}: {threads}{about.get('mode', '')}",
                soft_wrap=True,
                highlight=False,
            )
    for name, why in bench.missing.items():
        out.print(f"{name}: {why}", soft_wrap=True)


def _print_ceilings(out: Console, name: str, ceilings_at: Mapping[str, Ceilings]) -> None:
    for level, ceilings in ceilings_at.items():
        peaks = ", ".join(f"{kind} {peak / 1e9:.4g} GMAC/s" for kind, peak in ceilings.fma.items())
        out.print(
            f"{variant(name, level=level)}: copy {ceilings.bandwidth / 1e9:.4g} GB/s counting both directions"
            f"{', ' if peaks else '; no arithmetic peak, so limits count bytes only'}{peaks}",
            soft_wrap=True,
        )


def _threads(number: int) -> str:
    return "1 thread" if number == 1 else f"{number} threads"


def _print_case(
    out: Console, case: Case, outcomes: Sequence[Outcome], peers: Sequence[str], *, accuracy: bool
) -> None:
    """Numbers in a table, and under it what they are numbers of."""
    from rich.table import Table

    records = [o.record for o in outcomes if o.record is not None]
    compared = [p for p in peers if any(r.backend == p for r in records)]
    table = Table(box=None, pad_edge=False)
    table.add_column("backend", no_wrap=True)
    for heading in ("median", "spread", "n", "of limit", *(f"{p} / it" for p in compared)):
        table.add_column(heading, justify="right", no_wrap=True)
    if accuracy:
        table.add_column("error (bright)", justify="right")
        table.add_column("of plane (bright)", justify="right")
    for outcome in outcomes:
        record = outcome.record
        if record is None:
            continue
        row = [
            _name(outcome),
            duration(record.median),
            duration(record.spread),
            str(record.repeats),
            "" if record.share is None else f"{record.share:.0%}",
        ]
        row += [f"{record.ratios[p]:.2f}x" if p in record.ratios else "" for p in compared]
        if accuracy:
            row += [_errors(record, "elementwise"), _errors(record, "normwise")]
        table.add_row(*row, style="red" if record.error else None)
    out.print(f"[bold]{case.name}[/bold]: {case.problem()}")
    if records:
        first = records[0]
        if first.limit is not None:
            out.print(f"limit {duration(first.limit)}, by {first.limit_by}; checked: {first.checked}")
        out.print(table)
    beside = next((r.peers for r in records if r.peers), {})
    for outcome in outcomes:
        contracts = {
            name: setting["contract"]
            for name, setting in beside.get(outcome.backend, {}).get("settings", {}).items()
        }
        out.print(f"  {_name(outcome)}: {_describe(outcome, contracts)}", soft_wrap=True)
    if accuracy and any(r.errors for r in records):
        out.print("  error: the largest, over the elementwise bound; of plane: over the normwise one")
    out.print()


def _name(outcome: Outcome) -> str:
    return variant(outcome.backend, outcome.build, outcome.level)


def _errors(record: Record, contract: str) -> str:
    if not record.errors:
        return ""
    return f"{record.errors['plain'][contract]:.2g} ({record.errors['bright'][contract]:.2g})"


def _describe(outcome: Outcome, contracts: Mapping[str, str]) -> str:
    """What a row's numbers are of; `contracts` of a peer's settings tell why another, faster one wasn't taken."""
    record = outcome.record
    if record is None:
        return f"not timed: {outcome.reason}"
    parts = [record.types, record.contract, *record.notes]
    if record.chose:
        parts.insert(0, record.chose)
    if record.setting:
        others = ", ".join(
            f"{s} {duration(t) if isinstance(t, float) else t}"
            + (f" {contracts[s]}" if contracts.get(s, record.contract) != record.contract else "")
            for s, t in record.settings.items()
            if s != record.setting
        )
        parts.insert(0, record.setting + (f" (not {others})" if others else ""))
    if record.error:
        parts.insert(0, f"WRONG: {record.error}")
    return "; ".join(parts)
