"""The scratch memory of every case: what the chosen plan asks for, and what each CPU rung would, by number of threads.

``python -m benchmarks.workspace --json benchmarks/results/workspace`` makes plans only, in seconds;
docs/cpu-speed.md shows the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click

import convpar
from benchmarks.tables import commits, count, markdown, model
from convpar.bench import machine
from convpar.bench.results import RecordFile, ResultsError, path_for
from convpar.cases import Case, select
from convpar.cli.common import console
from convpar.registry import backends

THREADS = (1, 2, 16)
CHOOSER = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Largest:
    """The largest workspace of a backend over the cases that it serves.

    Attributes
    ----------
    backend, threads
        The key; the chooser is a backend too.
    cases : int
        How many it serves.
    size : int
        Bytes of the largest.
    case, rung : str
        Where that is, and the rung that asks for it.
    date, commit : str
    """

    backend: str
    threads: int
    cases: int
    size: int
    case: str
    rung: str
    date: str = ""
    commit: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What a newer record replaces an older one by."""
        return self.backend, self.threads


def names(*, usable: bool = False) -> list[str]:
    """The chooser, then convpar's CPU rungs in their order; if `usable`, those alone that this machine can run."""
    rungs = [b for b in backends() if b.name.startswith("cpu-")]
    return [CHOOSER, *(b.name for b in rungs if not usable or b.unavailable() is None)]


def largest(backend: str, cases: Sequence[Case], threads: Sequence[int] = THREADS) -> list[Largest]:
    """The largest workspace of `backend` for each number of threads, over those of `cases` that it serves."""
    plans = []
    for case in cases:
        x = convpar.ArraySpec(case.x_shape, case.x_dtype)
        w = convpar.ArraySpec(case.w_shape, case.w_dtype)
        try:
            plans.append((case.name, convpar.plan(x, w, backend=backend, **case.options)))
        except convpar.Unsupported:
            continue
    found = []
    for n in threads if plans else ():
        convpar.set_num_threads(n)
        name, plan = max(plans, key=lambda p: p[1].workspace_bytes())
        found.append(
            Largest(
                backend=backend,
                threads=n,
                cases=len(plans),
                size=plan.workspace_bytes(),
                case=name,
                rung=plan.backend.name,
                date=f"{datetime.now(UTC):%Y-%m-%d}",
                commit=machine.git_commit(),
            )
        )
    convpar.set_num_threads(None)
    return found


def table(folder: Path) -> str:
    """The largest workspaces on every hardware model in `folder`; empty without any."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        file = RecordFile(Largest, path)
        parts.append(f"**{model(file.hardware)}**, {_summary(file.records)}")
    return "\n\n".join(parts)


def _summary(records: Sequence[Largest]) -> str:
    found = {r.key: r for r in records}
    numbers = sorted({r.threads for r in records})
    order = {name: k for k, name in enumerate(names())}
    rows = []
    for backend in sorted({r.backend for r in records}, key=lambda b: (order.get(b, len(order)), b)):
        mine = [found.get((backend, n)) for n in numbers]
        rows.append([f"`{backend}`", str(max(r.cases for r in mine if r))])
        rows[-1] += ["" if r is None else f"{r.size / 2**20:.1f} MiB, `{r.case}`" for r in mine]
    builds = commits(r.commit for r in records)
    header = ["backend", "cases", *map(count, numbers)]
    return f"convpar {builds}\n\n{markdown(header, rows)}"


@click.command()
@click.option(
    "--case", "patterns", multiple=True, default=("*",), show_default=True, help="As in convpar bench."
)
@click.option(
    "--json", "target", type=click.Path(path_type=Path), metavar="FILE",
    help="Merge the sizes into FILE, or into the file of this hardware in a folder.",
)  # fmt: skip
def main(patterns: tuple[str, ...], target: Path | None) -> None:
    """Plan every case with every CPU rung and print the largest workspaces."""
    hardware = machine.hardware()
    try:
        cases = select(patterns)
        path = path_for(target, machine.slug(hardware)) if target is not None else None
        file = RecordFile(Largest, path, hardware) if path is not None else None
    except (ValueError, ResultsError) as e:
        raise click.ClickException(str(e)) from e
    records = [r for backend in names(usable=True) for r in largest(backend, cases)]
    if file is not None:
        file.merge(records)
        file.save()
    console().print(_summary(records), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
