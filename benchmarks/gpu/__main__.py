"""The command ``python -m benchmarks.gpu``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from convpar.bench.results import ResultsError
from convpar.timing import REPEATS

from . import blocks, calls, device, images, ladder, streams, widths
from .records import file_in
from .session import Session

EXPERIMENTS = ("ladder", "images", "blocks", "widths", "streams", "calls")
WIDTH = 180


@click.command()
@click.argument("experiment", type=click.Choice([*EXPERIMENTS, "all"]), default="all")
@click.option(
    "--json-dir", "folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR",
    help="Merge results into the file of this GPU model in DIR, and put pictures there.",
)  # fmt: skip
@click.option(
    "--rung",
    "-r",
    "only",
    multiple=True,
    metavar="PATTERN",
    help="Only these rungs and gpu-naive; repeat for more.",
)
@click.option(
    "--repeats", type=click.IntRange(min=1), default=REPEATS, show_default=True, help="Samples of each time."
)
@click.option("--commit", metavar="NAME", help="What is measured, where git can't tell: for the results.")
@click.option("--quick", is_flag=True, help="Tiny shapes and few samples, to see that everything runs.")
@click.pass_context
def main(
    ctx: click.Context,
    experiment: str,
    folder: Path | None,
    only: tuple[str, ...],
    repeats: int,
    commit: str | None,
    quick: bool,
) -> None:
    """Repeat the published GPU experiments and print them beside the published figures.

    ladder: the rungs and the reports' tables; images: one channel, several filters; blocks: the shared-memory tile
    over block sizes; widths: tile widths; streams: slices of host arrays; calls: the cost of a call. Exit code 1: an
    answer was wrong; 2: no GPU.
    """
    place = device.find()
    if place.emulated and not quick:
        raise device.NothingToMeasure("the emulator's times say nothing; --quick shows that all runs")
    if folder is not None and (place.emulated or quick):
        raise device.NothingToMeasure(
            "--json-dir takes results, and neither the emulator nor --quick makes any"
        )
    try:
        file = file_in(folder) if folder is not None else None
        if file is not None:
            # Before minutes of measuring: can it be written at all?
            file.save()
    except (ResultsError, OSError) as e:
        raise click.ClickException(str(e)) from e
    session = Session(place, quick=quick, repeats=repeats, only=only, file=file, commit=commit or None)
    out = Console(width=WIDTH, highlight=False)
    out.print(place.describe(), soft_wrap=True)
    if session.ceilings is not None:
        peaks = ", ".join(f"{kind} {peak / 1e12:.1f} TMAC/s" for kind, peak in session.ceilings.fma.items())
        out.print(
            f"ceilings: copy {session.ceilings.bandwidth / 1e12:.2f} TB/s counting both directions, {peaks}"
        )
    summaries = []
    for name in EXPERIMENTS if experiment == "all" else (experiment,):
        *tables, summary = _parts(name, session, folder)
        for table in tables:
            out.print(table)
            out.print()
        summaries.append(summary)
    out.print("summary")
    for summary in summaries:
        out.print(summary, soft_wrap=True, markup=False)
    for error in session.errors:
        out.print(f"WRONG: {error}", soft_wrap=True, markup=False)
    ctx.exit(1 if session.errors else 0)


def _parts(name: str, session: Session, folder: Path | None) -> Iterator[Table | str]:
    if name == "streams":
        return streams.run(session, folder)
    runs: dict[str, Callable[[Session], Iterator[Table | str]]] = {
        "ladder": ladder.run, "images": images.run, "blocks": blocks.run, "widths": widths.run, "calls": calls.run,
    }  # fmt: skip
    return runs[name](session)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.gpu")
