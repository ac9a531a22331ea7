"""What each CPU rung gains over the rung that it builds on, on the cases where its idea shows.

``python -m benchmarks.steps --json benchmarks/results/steps`` times both in turn and merges the times into the file
of this hardware; docs/cpu-speed.md shows them. It takes about three minutes on two cores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import click

from benchmarks.tables import commits, count, markdown, model
from convpar import get_num_threads
from convpar.bench import machine
from convpar.bench.measure import BUDGET, Bench, Effort
from convpar.bench.results import RecordFile, ResultsError, duration, path_for
from convpar.cases import Case, all_cases, find
from convpar.cli.common import THREADS, Finite, console
from convpar.registry import FAMILIES, backends
from convpar.timing import REPEATS

CASES: Mapping[str, tuple[str, ...]] = {
    "cpu-private": ("single-4096-k7-float32-valid",),
    "cpu-unrolled": ("single-4096-k7-float32-valid",),
    "cpu-simd": ("single-4096-k7-float32-valid", "network-1-n1000"),
    "cpu-ifma": ("single-4096-k3-int32-valid", "single-4096-k7-int32-valid"),
    "cpu-masked": (
        "depthwise-96-56x56-k3-n16",
        "depthwise-96-56x56-k7-n16",
        "mobilenet-128-56x56-k3-s2-n16",
        "mobilenet-1024-7x7-k3-n16",
    ),
    "cpu-depthwise": (
        "depthwise-96-56x56-k3-n16-last",
        "depthwise-96-56x56-k7-n16-last",
        "mobilenet-1024-7x7-k3-n16",
        "convnext-768-7x7-k7-n16",
    ),
    "cpu-packed": ("network-2-n1000", "resnet-64-64-56x56-k3-n16"),
    "cpu-pairs": ("resnet-64-64-56x56-k3-n16-int16", "resnet-256-256-14x14-k3-n16-int16"),
    "cpu-amx8": ("resnet-64-64-56x56-k3-n16-uint8", "resnet-256-256-14x14-k3-n16-uint8"),
    "cpu-implicit": (
        "resnet-3-64-224x224-k7-s2-n16",
        "vgg-3-64-224x224-k3-n16",
        "resnet-64-256-56x56-k1-n16",
    ),
    "cpu-amx": ("resnet-64-64-56x56-k3-n16", "resnet-256-256-14x14-k3-n16"),
    "cpu-toeplitz": (
        "single-4096-k15-float32-valid",
        "single-4096-k31-float32-valid",
        "single-4096-k11-uint8-valid",
        "depthwise-128-56x56-k31-n4",
    ),
    "cpu-separable": ("separable-4096-k15-float32",),
    "cpu-winograd": ("resnet-64-64-56x56-k3-n16-normwise",),
    "cpu-fft2d": ("single-4096-k31-float32-valid-normwise", "depthwise-128-56x56-k31-n4-normwise"),
    "cpu-fft": ("single-4096-k31-float32-valid-normwise", "single-4096-k63-float32-same-normwise"),
}
"""Rung -> the cases where its idea shows. The rung below it is the registry's to say."""

OTHERS = ("network-2-n1000", "resnet-64-64-56x56-k3-n16")
"""The cases of a rung without a line above."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A rung and the one that it builds on, timed in turn on one case.

    Attributes
    ----------
    rung, case, threads
        The key.
    builds_on : str
    before, after : float
        Median seconds of `builds_on` and of `rung`.
    before_spread, after_spread : float
        Interquartile ranges.
    repeats : int
        Samples of the one that has fewer.
    before_contract, after_contract : str
        The error contract of each.
    busy : float
        Share of the processors' time that others were using just before.
    date, commit : str
    """

    rung: str
    case: str
    threads: int
    builds_on: str
    before: float
    after: float
    before_spread: float = 0.0
    after_spread: float = 0.0
    repeats: int = REPEATS
    before_contract: str = ""
    after_contract: str = ""
    busy: float | None = None
    date: str = ""
    commit: str | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        """What a newer record replaces an older one by."""
        return self.rung, self.case, self.threads

    @property
    def gain(self) -> float:
        """How many times as fast as the rung below."""
        return self.before / self.after


def ladder() -> dict[str, str]:
    """convpar's CPU rungs that build on another -> that other, in the order of the registry."""
    return {
        b.name: b.builds_on
        for b in backends()
        if b.capabilities.device == "cpu" and b.builds_on and b.name.startswith(tuple(FAMILIES))
    }


def measure(rung: str, below: str, case: Case, num_threads: int, effort: Effort) -> Step:
    """Time `rung` and `below` in turn on `case`.

    Raises
    ------
    ValueError
        One of them can't serve the case, or gives a wrong answer.
    """
    with Bench([below, rung], num_threads=num_threads, effort=effort) as bench:
        found = {outcome.backend: outcome for outcome in bench.run(case)}
    for name, outcome in found.items():
        if outcome.record is None or outcome.wrong:
            reason = outcome.reason if outcome.record is None else outcome.record.error
            raise ValueError(f"{case.name}, {name}: {reason}")
    before, after = (found[name].record for name in (below, rung))
    assert before is not None
    assert after is not None
    return Step(
        rung=rung,
        case=case.name,
        threads=num_threads,
        builds_on=below,
        before=before.median,
        after=after.median,
        before_spread=before.spread,
        after_spread=after.spread,
        repeats=min(before.repeats, after.repeats),
        before_contract=before.contract,
        after_contract=after.contract,
        busy=after.busy,
        date=after.date[:10],
        commit=after.commit,
    )


def table(folder: Path) -> str:
    """The steps on every hardware model in `folder`; empty without any."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        file = RecordFile(Step, path)
        by_threads: dict[int, list[Step]] = {}
        for step in file.records:
            by_threads.setdefault(step.threads, []).append(step)
        parts += [f"**{model(file.hardware)}**, {_summary(steps)}" for _, steps in sorted(by_threads.items())]
    return "\n\n".join(parts)


def _summary(steps: Sequence[Step]) -> str:
    rungs, cases = list(ladder()), list(all_cases())

    def order(step: Step) -> tuple[int, ...]:
        # What went away since comes last.
        return tuple(
            known.index(name) if name in known else len(known)
            for known, name in ((rungs, step.rung), (cases, step.case))
        )

    rows = [
        [
            f"`{s.rung}`",
            f"`{s.builds_on}`",
            f"`{s.case}`",
            f"{duration(s.before)} ± {duration(s.before_spread)}",
            f"{duration(s.after)} ± {duration(s.after_spread)}",
            f"{s.gain:.2f}x",
            s.after_contract
            if s.after_contract == s.before_contract
            else f"{s.after_contract}, over {s.before_contract}",
        ]
        for s in sorted(steps, key=order)
    ]
    header = ["rung", "over", "case", "time of that", "time", "gain", "contract"]
    builds = commits(s.commit for s in steps)
    days = sorted({s.date for s in steps})
    busy = max((s.busy for s in steps if s.busy is not None), default=0.0)
    words = [count(steps[0].threads), f"convpar {builds}", " to ".join(dict.fromkeys((days[0], days[-1])))]
    if busy > machine.BUSY:
        words.append(f"not an idle machine: others used up to {busy:.0%} of the processors")
    fewest = min(s.repeats for s in steps)
    samples = f"medians of at least {fewest} samples, ± the interquartile range"
    return f"{'; '.join(words)}; {samples}\n\n{markdown(header, rows, right=3)}"


@click.command()
@click.option(
    "--rung", "patterns", multiple=True, default=("*",), show_default=True, help="Rungs, with * and ?."
)
@click.option("--case", "names", multiple=True, help="Cases in place of each rung's own.")
@click.option(
    "--json", "target", type=click.Path(path_type=Path), metavar="FILE",
    help="Merge the times into FILE, or into the file of this hardware in a folder.",
)  # fmt: skip
@click.option("--threads", type=THREADS, help="[default: all that there are]")
@click.option("--repeats", type=click.IntRange(min=1), default=REPEATS, show_default=True)
@click.option(
    "--budget", type=Finite(min=0, min_open=True), default=BUDGET, show_default=True, metavar="SECONDS",
    help="Time for one rung on one case; the slow get fewer samples.",
)  # fmt: skip
def main(
    patterns: tuple[str, ...],
    names: tuple[str, ...],
    target: Path | None,
    threads: int | None,
    repeats: int,
    budget: float,
) -> None:
    """Time each CPU rung beside the one that it builds on."""
    out = console()
    hardware = machine.hardware()
    chosen = {rung: below for rung, below in ladder().items() if any(fnmatchcase(rung, p) for p in patterns)}
    if not chosen:
        raise click.ClickException(f"no rung matches; there are {', '.join(ladder())}")
    try:
        wanted = {rung: [find(name) for name in names or CASES.get(rung, OTHERS)] for rung in chosen}
        path = path_for(target, machine.slug(hardware)) if target is not None else None
        file = RecordFile(Step, path, hardware) if path is not None else None
    except (ValueError, ResultsError) as e:
        raise click.ClickException(str(e)) from e
    effort = Effort(repeats=repeats, budget=budget)
    steps, missing = [], []
    emulated = {b.name for b in backends() if getattr(b, "emulated", False)}
    for rung, below in chosen.items():
        if rung in emulated and "*" in patterns:
            out.print(f"{rung}: emulated on this processor; --rung {rung} times it all the same")
            continue
        for case in wanted[rung]:
            try:
                step = measure(rung, below, case, threads or get_num_threads(), effort)
            except ValueError as e:
                out.print(f"{rung}: {e}", highlight=False, soft_wrap=True)
                missing.append(rung)
                continue
            steps.append(step)
            out.print(f"{rung} over {below}, {case.name}: {step.gain:.2f}x", highlight=False)
            if file is not None:
                file.merge([step])
                file.save()
    if steps:
        out.print(_summary(steps), soft_wrap=True, markup=False, highlight=False)
    if missing:
        raise click.ClickException(f"not timed: {', '.join(dict.fromkeys(missing))}")


if __name__ == "__main__":
    main()
