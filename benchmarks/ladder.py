"""The published CPU ladder: naive, private, unrolled, as users get them and compiled without optimisation.

``python -m benchmarks.ladder --json benchmarks/results`` builds the second convpar, times both on a
4096 x 4096 image with 3x3, 5x5 and 7x7 filters of int32 and float32 on 1 and 2 threads,
and merges the times into the result file of this hardware.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from benchmarks.build import ROOT, build
from benchmarks.tables import LADDER, ladder_table
from convpar.bench import machine
from convpar.bench.measure import BUDGET, Bench, Effort
from convpar.bench.results import SHIPPED, ResultFile, ResultsError, path_for
from convpar.cases import select
from convpar.cli.common import THREADS, Finite, console
from convpar.timing import REPEATS

OPTION = "unoptimised"
"""The value of the Meson option ``ladder``, and the name of the build in the records."""


@click.command()
@click.option(
    "--json", "target", type=click.Path(path_type=Path), metavar="FILE",
    help="Merge the results into FILE, or into the file of this hardware in a folder.",
)  # fmt: skip
@click.option(
    "--build", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
    help="An unoptimised convpar made earlier, as pip install --target made it. [default: a new one]",
)  # fmt: skip
@click.option(
    "--case", "patterns", multiple=True, default=("ladder",), show_default=True, help="As in convpar bench."
)
@click.option("--threads", multiple=True, type=THREADS, default=(1, 2), show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=REPEATS, show_default=True)
@click.option(
    "--budget", type=Finite(min=0, min_open=True), default=4 * BUDGET, show_default=True, metavar="SECONDS"
)
def main(
    target: Path | None,
    folder: Path | None,
    patterns: tuple[str, ...],
    threads: tuple[int, ...],
    repeats: int,
    budget: float,
) -> None:
    """Time the published CPU rungs in both builds and print their ratios."""
    out = console()
    hardware = machine.hardware()
    try:
        cases = select(patterns)
        path = path_for(target, machine.slug(hardware)) if target is not None else None
        file = ResultFile(path, hardware) if path is not None else None
    except (ValueError, ResultsError) as e:
        raise click.ClickException(str(e)) from e
    with out.status("building") as status, tempfile.TemporaryDirectory(prefix="convpar-") as made:
        if folder is None:
            folder = build(ROOT, Path(made), f"-Dladder={OPTION}")
        builds = {SHIPPED: None, OPTION: folder.resolve()}
        records = []
        for num_threads in threads:
            effort = Effort(repeats=repeats, budget=budget)
            with Bench(
                LADDER, num_threads=num_threads, effort=effort, builds=builds, progress=status.update
            ) as bench:
                if bench.missing:
                    raise click.ClickException("; ".join(f"{k}: {v}" for k, v in bench.missing.items()))
                reason = bench.measure_ceilings(cases)
                if reason:
                    raise click.ClickException(reason)
                for case in cases:
                    outcomes = bench.run(case)
                    for outcome in outcomes:
                        if outcome.record is None or outcome.wrong:
                            reason = outcome.reason if outcome.record is None else outcome.record.error
                            raise click.ClickException(
                                f"{case.name}, {outcome.backend} ({outcome.build}): {reason}"
                            )
                    new = [o.record for o in outcomes if o.record is not None]
                    records += new
                    if file is not None:
                        file.merge(new)
                        file.save()
    out.print(ladder_table(records), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
