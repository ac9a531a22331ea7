"""Two commits side by side: ``python -m benchmarks.compare BASE [NEW] [--case PATTERN ...]``.

Both are built and then called in turn, sample by sample, so a machine that drifts or is busy slows both. BASE
runs twice, in two processes: what lies between those two is noise. A case counts as changed when NEW / BASE of
the same round is beyond the factor in the middle, the noise isn't, NEW lies beyond both BASEs in more rounds than
chance would have it, and all this is found twice in up to three runs.

Would it be seen here and now? ``python -m benchmarks.compare BASE --plant 1.2`` holds BASE against itself with every
call made a fifth longer: "slower" is the right verdict everywhere. With BASE as NEW too, "same" is.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from collections.abc import Iterable, Sequence
from itertools import chain
from math import comb
from pathlib import Path
from typing import NamedTuple

import click
from rich.table import Table

from benchmarks.build import ROOT, build, export
from convpar import get_num_threads
from convpar.bench import machine
from convpar.bench.measure import BUDGET, Bench, Effort, Outcome
from convpar.bench.results import duration
from convpar.cases import Case, select
from convpar.cli.common import THREADS, console

BASE, AGAIN, NEW = "base", "base again", "new"

DEFAULT_CASES = (
    "single-64-k3-float32-valid",
    "single-1024-k[37]-float32-valid",
    "single-1024-k3-uint8-valid",
    "network-?-n100",
    "resnet-64-64-56x56-k3-n16",
    "depthwise-96-56x56-k7-n16",
)
"""Quick, and one of each kind."""

CHANCE = 0.001
"""How likely chance alone may put so many rounds on one side."""


SLOWED = """

def _slowed(call, factor):
    import time

    def slowed(*arguments, **keywords):
        start = time.perf_counter()
        result = call(*arguments, **keywords)
        end = start + factor * (time.perf_counter() - start)
        while time.perf_counter() < end:
            pass
        return result

    return slowed


conv2d = _slowed(conv2d, {factor!r})
"""
"""What makes every call of a package's `conv2d` longer by a factor, at the end of its ``__init__.py``."""


class Verdict(NamedTuple):
    """What the samples of one case say.

    Attributes
    ----------
    change : {"slower", "faster", "same", "unclear"}
        "unclear": beyond the factor, but so is the noise, or chance might do it.
    ratio : float
        Median over the rounds of NEW / BASE.
    noise : float
        The same for the second BASE.
    """

    change: str
    ratio: float
    noise: float


def judge(factor: float, base: Sequence[float], again: Sequence[float], new: Sequence[float]) -> Verdict:
    """Whether `new` differs from `base`, by seconds taken in the same rounds.

    Parameters
    ----------
    factor : float
        Over 1; smaller changes don't count.
    base, again, new : sequences of float
        One sample a round each, of the same length.
    """
    rounds = list(zip(base, again, new, strict=True))
    ratio = statistics.median(n / b for b, _, n in rounds)
    noise = statistics.median(a / b for b, a, _ in rounds)
    if 1 / factor < ratio < factor:
        return Verdict("same", ratio, noise)
    slower = ratio > 1
    alone = sum(n > max(b, a) if slower else n < min(b, a) for b, a, n in rounds)
    if not 1 / factor < noise < factor or _chance(alone, len(rounds)) > CHANCE:
        return Verdict("unclear", ratio, noise)
    return Verdict("slower" if slower else "faster", ratio, noise)


def settle(verdicts: Iterable[Verdict]) -> Verdict:
    """The one of up to three verdicts to report, asked for one by one: what is "same" once, or found twice."""
    seen: list[Verdict] = []
    for verdict in verdicts:
        if verdict.change == "same" or verdict.change in [v.change for v in seen]:
            return verdict
        seen.append(verdict)
    return seen[-1]._replace(change="unclear")


def _chance(alone: int, rounds: int) -> float:
    """Probability that one of three equals is the last in at least `alone` of `rounds` rounds."""
    return sum(comb(rounds, k) * (1 / 3) ** k * (2 / 3) ** (rounds - k) for k in range(alone, rounds + 1))


def planted(package: Path, folder: Path, factor: float) -> Path:
    """Copy the package in `package` into `folder`, which is returned, every call `factor` times as long."""
    shutil.copytree(package, folder)
    with (folder / "convpar" / "__init__.py").open("a", encoding="utf-8") as file:
        file.write(SLOWED.format(factor=factor))
    return folder


def _samples(bench: Bench, case: Case) -> dict[str, tuple[list[Outcome], list[tuple[float, ...]]]]:
    """Backend -> the outcomes of the three, and their samples by rounds; none if one of them has none."""
    outcomes = bench.run(case)
    found = {}
    for backend in bench.backends:
        three = [
            next(o for o in outcomes if (o.backend, o.build) == (backend, build))
            for build in (BASE, AGAIN, NEW)
        ]
        times = [o.times.samples for o in three if o.times is not None]
        length = min(map(len, times), default=0)
        found[backend] = three, [t[:length] for t in times] if len(times) == 3 else []
    return found


@click.command()
@click.argument("base")
@click.argument("new", required=False)
@click.option(
    "--case",
    "-c",
    "patterns",
    multiple=True,
    metavar="PATTERN",
    help="As in convpar bench. [default: a quick choice]",
)
@click.option("--backend", "-b", "backends", multiple=True, default=("auto",), show_default=True)
@click.option("--threads", "-t", type=THREADS, help="[default: all]")
@click.option(
    "--factor", type=click.FloatRange(min=1, min_open=True), default=1.1, show_default=True,
    help="Smaller changes don't count.",
)  # fmt: skip
@click.option("--rounds", type=click.IntRange(min=10), default=25, show_default=True)
@click.option(
    "--plant", type=click.FloatRange(min=1, min_open=True), metavar="FACTOR",
    help="In place of NEW: BASE, with every call made longer by FACTOR.",
)  # fmt: skip
@click.pass_context
def main(
    ctx: click.Context,
    base: str,
    new: str | None,
    patterns: tuple[str, ...],
    backends: tuple[str, ...],
    threads: int | None,
    factor: float,
    rounds: int,
    plant: float | None,
) -> None:
    """Build and time commit BASE and commit NEW, or the working tree, in turn. Exit code 1: something is slower."""
    if plant is not None and new is not None:
        raise click.UsageError("--plant takes the place of NEW; give one of them")
    try:
        cases = select(patterns or DEFAULT_CASES)
    except ValueError as e:
        raise click.ClickException(str(e)) from e
    out = console()
    busy = machine.busy()
    if busy is not None and busy > machine.BUSY:
        click.echo(f"warning: others use {busy:.0%} of the processors right now", err=True)
    slower = False
    table = Table("case", "backend", "base", "new", "new / base", "base / base", "verdict", box=None)
    table.columns[0].no_wrap = True
    with tempfile.TemporaryDirectory(prefix="convpar-") as made, out.status("building") as status:
        folder = Path(made)
        old = build(export(base, folder / "base-source"), folder / "base")
        if plant is not None:
            young = planted(old, folder / "new", plant)
        else:
            young = build(ROOT if new is None else export(new, folder / "new-source"), folder / "new")
        with Bench(
            backends,
            num_threads=threads or get_num_threads(),
            effort=Effort(repeats=rounds, budget=2 * BUDGET),
            builds={BASE: old, AGAIN: old, NEW: young},
            progress=status.update,
        ) as bench:
            if bench.missing:
                raise click.ClickException("; ".join(f"{k}: {v}" for k, v in bench.missing.items()))
            for case in cases:
                found = _samples(bench, case)
                for backend in backends:
                    three, times = found[backend]
                    if not times:
                        why = "; ".join(f"{o.build}: {o.reason}" for o in three if o.reason)
                        table.add_row(case.name, backend, "", "", "", "", why)
                        continue
                    samples = (_samples(bench, case)[backend][1] for _ in range(2))
                    verdict = settle(judge(factor, *s) for s in chain([times], samples) if s)
                    wrong = "; ".join(f"{o.build} is wrong" for o in three if o.wrong)
                    slower |= verdict.change == "slower" or three[2].wrong
                    table.add_row(
                        case.name,
                        backend,
                        duration(statistics.median(times[0])),
                        duration(statistics.median(times[2])),
                        f"{verdict.ratio:.3f}",
                        f"{verdict.noise:.3f}",
                        wrong or verdict.change,
                        style={"slower": "red", "faster": "green"}.get(verdict.change),
                    )
    out.print(table)
    ctx.exit(int(slower))


if __name__ == "__main__":
    main()
