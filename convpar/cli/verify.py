"""`convpar verify`: the checks that every backend must pass, run on this machine."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from .common import CONTEXT_SETTINGS, UserError, check_settings, console, matching

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from convpar.conformance import Outcome, Report

EXAMPLES = 300

_CELLS = {
    "passed": "[green]passed[/]",
    "failed": "[bold red]FAILED[/]",
    "skipped": "[yellow]skipped[/]",
    "not applicable": "[dim]-[/]",
}


@click.command("verify", context_settings=CONTEXT_SETTINGS)
@click.argument("pattern", required=False)
@click.option("--check", "wanted", multiple=True, metavar="PATTERN", help="Run only these checks.")
@click.option("--list", "list_only", is_flag=True, help="List the checks and what each is about.")
@click.option("--require", metavar="PATTERN", help="Backends that fail where they are unavailable.")
@click.option(
    "--jobs",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Run checks in N processes.",
)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    default=EXAMPLES,
    show_default=True,
    metavar="N",
    help="Problems that a check draws.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Where drawing begins: the same seed, the same problems.",
)
@click.option(
    "--emulate", is_flag=True, help="Run the gpu rungs' kernels on the CPU; slow. As CONVPAR_GPU=emulate."
)
def command(
    pattern: str | None,
    wanted: tuple[str, ...],
    list_only: bool,
    require: str | None,
    jobs: int,
    examples: int,
    seed: int,
    emulate: bool,
) -> int:
    """Check backends against SciPy.

    PATTERN selects backends: a name, the beginning of some names, or a pattern such as '*-tiled*'. The exit
    code is 1 if anything failed. An unavailable backend is skipped, with its reason.
    """
    if emulate:
        # Worker processes inherit it.
        os.environ["CONVPAR_GPU"] = "emulate"
    suite = _suite()
    checks = [
        name for name in suite.CHECKS if not wanted or any(fnmatch.fnmatchcase(name, w) for w in wanted)
    ]
    if not checks:
        raise UserError(f"no check matches {', '.join(wanted)}; there are {', '.join(suite.CHECKS)}")
    out = console()
    if list_only:
        out.print(_list(suite, checks))
        return 0
    check_settings()
    found = matching(pattern)
    required = [b.name for b in matching(require)] if require is not None else []
    left_out = [name for name in required if name not in [b.name for b in found]]
    if left_out:
        raise UserError(f"--require names {', '.join(left_out)}, which {pattern!r} leaves out")
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    errors = console(stderr=True)
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bar:
        task = bar.add_task("", total=len(found) * len(checks))

        def advance(outcome: Outcome) -> None:
            bar.update(task, advance=1, description=f"{outcome.backend} {outcome.check}: {outcome.status}")

        report: Report = suite.verify(
            found, checks, require=required, examples=examples, seed=seed, jobs=jobs, progress=advance
        )
    show(report, out)
    return 1 if report.failures else 0


def _suite() -> Any:
    """`convpar.conformance`, or a `UserError` that says what brings the packages that it needs."""
    try:
        from convpar import conformance

        _ = conformance.CHECKS, conformance.verify  # they come with the first use
    except ModuleNotFoundError as e:
        if e.name is None or e.name.startswith("convpar"):
            raise
        raise UserError(
            f'checking needs {e.name.partition(".")[0]}, which isn\'t installed: pip install "convpar[test]"'
        ) from e
    return conformance


def _list(suite: Any, checks: list[str]) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("what it is about")
    for name in checks:
        table.add_row(name, suite.CHECKS[name].summary)
    return table


def show(report: Report, out: Console) -> None:
    """Print a report: the table, what was refused and skipped, and every failure with how to see it again."""
    for table in _tables(report, out.width):
        out.print(table)
        out.print()
    skipped: dict[str, list[str]] = {}
    for o in report.outcomes:
        if o.status == "skipped" and o.backend not in skipped.setdefault(o.message, []):
            skipped[o.message].append(o.backend)
    for reason, names in skipped.items():
        out.print(f"skipped {', '.join(names)}: {reason}", markup=False, soft_wrap=True)
    for name in dict.fromkeys(o.backend for o in report.outcomes):
        _show_backend(report, name, out)
    for outcome in report.failures:
        out.print(f"[bold red]FAILED[/] {outcome.backend} {outcome.check}")
        out.print(f"{outcome.message}\n", markup=False, soft_wrap=True)
    count = {status: sum(o.status == status for o in report.outcomes) for status in _CELLS}
    problems = sum(o.tally.examples for o in report.outcomes)
    out.print(
        f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped; {problems} problems; "
        f"--examples {report.examples} --seed {report.seed}",
        soft_wrap=True,
    )


def _show_backend(report: Report, name: str, out: Console) -> None:
    mine = [o for o in report.outcomes if o.backend == name]
    refusals = report.refusals(name)
    if refusals:
        drawn = sum(o.tally.examples for o in mine)
        out.print(f"{name} refused {refusals.total()} of {drawn} problems:", markup=False)
        listed = refusals.most_common(5)
        for reason, count in listed:
            out.print(f"  {count:6} {reason}", markup=False, soft_wrap=True)
        if len(refusals) > len(listed):
            rest = refusals.total() - sum(count for _, count in listed)
            out.print(f"  {rest:6} for {len(refusals) - len(listed)} other reasons")
    paths = sorted(set().union(*(o.tally.run for o in mine)))
    if paths:
        out.print(f"{name} ran the paths {', '.join(paths)}", markup=False, soft_wrap=True)
    for note in dict.fromkeys(note for o in mine for note in o.tally.notes):
        out.print(f"{name}: {note}", markup=False, soft_wrap=True)


def _tables(report: Report, width: int) -> Iterator[Table]:
    """Checks down, backends across, as many backends a table as fit."""
    from rich.table import Table

    names = list(dict.fromkeys(o.backend for o in report.outcomes))
    checks = list(dict.fromkeys(o.check for o in report.outcomes))
    status = {(o.backend, o.check): _CELLS[o.status] for o in report.outcomes}
    first = max(map(len, [*checks, "check"])) + 2
    while names:
        fitting, used = 1, first + max(len(names[0]), 7) + 2
        while fitting < len(names) and used + max(len(names[fitting]), 7) + 2 <= width:
            used += max(len(names[fitting]), 7) + 2
            fitting += 1
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("check", no_wrap=True)
        for name in names[:fitting]:
            table.add_column(name, no_wrap=True)
        for check in checks:
            table.add_row(check, *(status[name, check] for name in names[:fitting]))
        yield table
        names = names[fitting:]
