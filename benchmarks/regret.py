"""What a chooser loses: the time of the rung that it picks against the fastest that the accuracy contract allows.

``python -m benchmarks.regret --json benchmarks/results/regret`` times every candidate of every case in turn, each
sample after as many calls that don't count, and merges the times into the file of this hardware; docs/cpu-speed.md shows them.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import click
import numpy as np

import convpar
from benchmarks.tables import commits, markdown, model
from convpar.backend import Device, Layout, Layouts
from convpar.bench import machine
from convpar.bench.results import RecordFile, ResultsError, duration, path_for
from convpar.cases import Case, select
from convpar.choose import choose
from convpar.cli.common import THREADS, console
from convpar.timing import CpuTimer, interleave, sampler

CHOOSER = "cpu-omp"
HOPELESS = 4.0
"""A candidate that takes this many times as long as the fastest in its first calls isn't timed any further."""

UNLIKELY = 8.0
"""Nor is one whose estimate is so many times the least: cpu-naive would take hours."""

CLOSE, ROUNDS = 0.05, 5
"""A loss above `CLOSE` is looked at again, in so many rounds of samples at most, for chance may be all there is to it. One that chance
hid isn't looked for; and one below it is what the first round found, chance and all."""

WORST = 12
"""Rows of the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The candidates' times on one case.

    Attributes
    ----------
    case, threads
        The key.
    chose : str
        The rung that the chooser picks.
    times : mapping
        Middle time of each candidate in seconds, of samples taken in turn; the shortest in records of before `ratios` were kept.
    ratios : mapping
        The chosen rung's time over each candidate's: the middle one of those that samples of the same turn have. Processors whose other half
        somebody else uses are now fast and now slow, and two rungs that run the same code may find their shortest times in either.
    notes : tuple of str
        Candidates that were given up as hopeless, with the time of their first calls.
    rounds : int
        Of samples; 0 in records of before this was kept.
    date, commit : str
    """

    case: str
    threads: int
    chose: str
    times: Mapping[str, float] = field(default_factory=dict)
    ratios: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    rounds: int = 0
    date: str = ""
    commit: str | None = None

    @property
    def key(self) -> tuple[str, int]:
        """What a newer record replaces an older one by."""
        return self.case, self.threads

    @property
    def fastest(self) -> str:
        """The candidate that the chosen rung takes longest beside, or itself."""
        beside = self._beside()
        return max(beside, key=beside.__getitem__)

    @property
    def regret(self) -> float:
        """The time of the chosen rung over the fastest's, less one."""
        return max(self._beside().values()) - 1

    def _beside(self) -> Mapping[str, float]:
        return self.ratios or {name: self.times[self.chose] / seconds for name, seconds in self.times.items()}


def measure(case: Case, repeats: int) -> Loss:
    """Time the candidates of `case` in turn, on one set of arrays."""
    p = case.problem()
    x, w, out = case.operands(np.random.default_rng(0))
    layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.of(out))
    choice = choose(CHOOSER, p, layouts, Device("cpu", 0), None)
    chosen = choice.required()[0].name
    timer = CpuTimer()
    likely = UNLIKELY * min(plan.cost for _, plan in choice.candidates)
    calls = {
        b.name: functools.partial(plan.run, x, w, None, out)
        for b, plan in choice.candidates
        if plan.cost <= likely
    }
    began = {name: sampler(timer, call) for name, call in calls.items()}
    bearable = HOPELESS * min(seconds for _, seconds in began.values())
    hopeless = {name: s for name, (_, s) in began.items() if s > bearable and name != chosen}
    samplers = {name: sample for name, (sample, _) in began.items() if name not in hopeless}
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for rounds in range(1, ROUNDS + 1):  # noqa: B007
        for name, taken in interleave(samplers, repeats).items():
            samples[name] += taken
        ratios = {
            name: statistics.median(a / b for a, b in zip(samples[chosen], taken, strict=True))
            for name, taken in samples.items()
        }
        if max(ratios.values()) <= 1 + CLOSE:
            break
    return Loss(
        case=case.name,
        threads=convpar.get_num_threads(),
        chose=chosen,
        times={name: statistics.median(taken) for name, taken in samples.items()},
        ratios=ratios,
        notes=tuple(f"{name} {duration(seconds)}" for name, seconds in hopeless.items()),
        rounds=rounds,
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=machine.git_commit(),
    )


def table(folder: Path) -> str:
    """Mean and worst loss on every hardware model in `folder`, and the worst cases."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        file = RecordFile(Loss, path)
        by_threads: dict[int, list[Loss]] = {}
        for loss in file.records:
            by_threads.setdefault(loss.threads, []).append(loss)
        parts += [
            f"**{model(file.hardware)}**, {_summary(losses)}" for _, losses in sorted(by_threads.items())
        ]
    return "\n\n".join(parts)


def _summary(losses: Sequence[Loss]) -> str:
    worst = sorted(losses, key=lambda loss: -loss.regret)
    builds = commits(loss.commit for loss in losses)
    within = sum(loss.regret <= CLOSE for loss in losses)
    shortest = sum(not loss.ratios for loss in losses)
    by = f", {shortest} by shortest times" if shortest else ""
    rows = [
        [
            f"`{loss.case}`",
            loss.chose,
            duration(loss.times[loss.chose]),
            loss.fastest,
            duration(loss.times[loss.fastest]),
            f"{loss.regret:.1%}",
        ]
        for loss in worst[:WORST]
    ]
    return (
        f"{losses[0].threads} threads, convpar {builds}: {len(losses)} cases{by}, mean loss "
        f"{statistics.mean(loss.regret for loss in losses):.1%}, median "
        f"{statistics.median(loss.regret for loss in losses):.1%}, at most 5 % in {within}; the worst:\n\n"
        + markdown(["case", "chosen", "time", "fastest", "time", "loss"], rows, right=2)
    )


@click.command()
@click.option(
    "--case", "patterns", multiple=True, default=("*",), show_default=True, help="As in convpar bench."
)
@click.option(
    "--json", "target", type=click.Path(path_type=Path), metavar="FILE",
    help="Merge the times into FILE, or into the file of this hardware in a folder.",
)  # fmt: skip
@click.option("--threads", type=THREADS, help="[default: all that there are]")
@click.option("--repeats", type=click.IntRange(min=1), default=5, show_default=True)
@click.option(
    "--bytes", "most", type=click.IntRange(min=1), default=2**30, show_default=True, metavar="N",
    help="Leave out cases whose arrays take more.",
)  # fmt: skip
def main(
    patterns: tuple[str, ...], target: Path | None, threads: int | None, repeats: int, most: int
) -> None:
    """Time every candidate of the CPU's chooser."""
    out = console()
    hardware = machine.hardware()
    try:
        cases = select(patterns)
        path = path_for(target, machine.slug(hardware)) if target is not None else None
        file = RecordFile(Loss, path, hardware) if path is not None else None
    except (ValueError, ResultsError) as e:
        raise click.ClickException(str(e)) from e
    convpar.set_num_threads(threads)
    losses = []
    for case in cases:
        p = case.problem()
        if p.least_bytes > most:
            out.print(f"{case.name}: left out, its arrays take {p.least_bytes / 1e9:.1f} GB")
            continue
        losses.append(measure(case, repeats))
        out.print(f"{case.name}: {losses[-1].chose}, loss {losses[-1].regret:.1%}", highlight=False)
        if file is not None:
            file.merge(losses[-1:])
            file.save()
    if losses:
        out.print(_summary(losses), soft_wrap=True, markup=False, highlight=False)


if __name__ == "__main__":
    main()
