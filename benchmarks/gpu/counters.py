"""Hardware counters of the reports' kernels, through Nsight Compute: ``python -m benchmarks.gpu.counters``.

Nsight Compute (``ncu``) runs this module once more as the program to watch; that one launches each kernel once, on a small
batch. What comes back are the figures by which the reports explain their times, per kernel.
"""

from __future__ import annotations

import csv
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from convpar.backends.gpu.plan import GpuPlan
from convpar.cases import Case

from . import device, ladder, show
from .device import Place
from .records import file_in
from .session import BASELINE, Contender, Result, Session, planned
from .steps import STEPS, Step

BATCH = 100

METRICS: Mapping[str, str] = {
    "time, ns": "gpu__time_duration.sum",
    "SM, % of peak": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "memory, % of peak": "gpu__compute_memory_throughput.avg.pct_of_peak_sustained_elapsed",
    "device memory, % of peak": "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    "warps resident, %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "instructions": "smsp__inst_executed.sum",
    "threads an instruction": "smsp__thread_inst_executed_per_inst_executed.ratio",
    "integer instructions": "sm__inst_executed_pipe_alu.sum",
    "FMA instructions": "sm__inst_executed_pipe_fma.sum",
    "load requests": "l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",
    "load sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_ld.sum",
    "store sectors": "l1tex__t_sectors_pipe_lsu_mem_global_op_st.sum",
    "bank conflicts": "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",
    "bytes read": "dram__bytes_read.sum",
    "bytes written": "dram__bytes_write.sum",
    "stalled on global queue": "smsp__average_warps_issue_stalled_lg_throttle_per_issue_active.ratio",
    "stalled on global loads": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "stalled on shared queue": "smsp__average_warps_issue_stalled_mio_throttle_per_issue_active.ratio",
    "stalled on shared loads": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "stalled at barriers": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
}
"""What is read -> its name for ncu. Stalls are warps waiting for each instruction issued."""

WIDTHS = {"gpu-constant": (8, 16, 17, 32), "gpu-tiled-constant": (8, 10, 16), "gpu-fused": (8, 16, 32)}
"""Tile widths of report C's sweep whose counters explain where it finds others fastest."""

BLOCKS = ((16, 16), (4, 8))
"""Outputs of a thread block: as they come, and where report E's tile wins by most."""

SHOWN = (
    "time, ns", "SM, % of peak", "memory, % of peak", "warps resident, %", "instructions", "threads an instruction",
    "load sectors", "bytes read", "stalled on global queue", "stalled at barriers",
)  # fmt: skip
"""The columns of the table; the result file has all."""


class Watched(NamedTuple):
    """One kernel launch: of which contender on which case, and the kernel's name."""

    case: Case
    contender: Contender
    kernel: str


def contenders(session: Session) -> dict[Case, dict[Contender, None]]:
    """What is watched: the reports' steps on both layers with some more widths, and report E's kernels and blocks."""
    wanted: dict[Case, dict[Contender, None]] = {}
    known = set(session.rungs())
    for layer in ladder.LAYERS:
        case = session.network(layer, BATCH)
        here = wanted.setdefault(case, {Contender.of(BASELINE): None})
        here |= {_step(step, layer): None for step in STEPS if step.rung in known and step.arrays == "device"}
        here |= {
            Contender.of(rung, {"tile": (width, width)}): None
            for rung, others in WIDTHS.items()
            if rung in known
            for width in others
        }
        # What a stream gets where a batch of 100 is cut into ten.
        here[Contender.of(BASELINE, {"slice": case.x_shape[0] // 10 or 1})] = None
    image = wanted.setdefault(session.image(), {})
    for block, lanes in itertools.product(BLOCKS, ("columns", "rows")):
        image[Contender.of(BASELINE, {"tile": block, "lanes": lanes})] = None
        if "gpu-tiled" in known:
            for loading in ("strided", "full"):
                options = {"tile": block, "lanes": lanes, "loading": loading}
                image[Contender.of("gpu-tiled", options)] = None
    return wanted


def _step(step: Step, layer: int) -> Contender:
    return ladder.contender(step, layer, BATCH)


def launched(session: Session, *, run: bool) -> Iterator[Watched]:
    """Every launch in its order; with `run` it is also made."""
    for case, wanted in contenders(session).items():
        x, w = case.arrays(np.random.default_rng(0))
        xp, problem = session.place.xp, case.problem()
        xs, ws, out = xp.asarray(x), xp.asarray(w), xp.empty(problem.out_shape, problem.out_dtype)
        for contender in wanted:
            plan = planned(contender, case, xs, ws, out, session.place)
            if isinstance(plan, str):
                continue
            assert isinstance(plan, GpuPlan)
            if run:
                plan.run(xs, ws, None, out)
                session.place.synchronize()
            for launch in _launches(plan):
                yield Watched(case, contender, launch)


def _launches(plan: GpuPlan) -> list[str]:
    """Names of the kernels of one run on device arrays."""
    main = plan.programs[0]
    names = [step.kernel for step in main.launches if step in main.once]
    for first, last in plan.slices:
        program = next(p for p in plan.programs if p.images == last - first)
        names += [step.kernel for step in program.launches if step in program.each]
    return names


# -- ncu


def parse(text: str) -> list[dict[str, str]]:
    """The rows of ``ncu --csv --page raw``: a header, a row of units, then one for each launch."""
    lines = text.splitlines()
    start = next((k for k, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        raise ValueError(f"ncu gave no table:\n{text[:2000]}")
    return [row for row in csv.DictReader(lines[start:]) if row["ID"].strip()]


def numbers(row: Mapping[str, str]) -> dict[str, float]:
    """What a row says, under our names; counters that this GPU lacks are left out."""
    found = {}
    for name, metric in METRICS.items():
        text = (row.get(metric) or "").replace(",", "")
        try:
            found[name] = float(text)
        except ValueError:
            continue
    return found


def known(listing: str) -> list[str]:
    """Those of `METRICS` that ``ncu --query-metrics`` lists: one it doesn't know would end it."""
    names = {line.split()[0] for line in listing.splitlines() if line.split()}
    return [metric for metric in METRICS.values() if metric.partition(".")[0] in names]


def command(ncu: str, log: Path, metrics: Sequence[str], quick: bool) -> list[str]:
    """How this module is watched."""
    return [
        ncu, "--clock-control", "none", "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
        "--kernel-name", "regex:^convpar_", "--metrics", ",".join(metrics),
        sys.executable, "-m", "benchmarks.gpu.counters", "--watched", *(["--quick"] if quick else []),
    ]  # fmt: skip


def watch(session: Session, ncu: str) -> list[Result]:
    """Run under ncu, and give one result for each launch."""
    listing = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False).stdout
    metrics = known(listing)
    if not metrics:
        raise click.ClickException(f"ncu lists none of the counters:\n{listing[-2000:]}")
    with tempfile.TemporaryDirectory(prefix="convpar-") as folder:
        log = Path(folder) / "counters.csv"
        done = subprocess.run(
            command(ncu, log, metrics, session.quick),
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or not log.exists():
            raise click.ClickException(f"ncu failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        rows = parse(log.read_text(encoding="utf-8"))
    return matched(list(launched(session, run=False)), rows)


def matched(launches: Sequence[Watched], rows: Sequence[Mapping[str, str]]) -> list[Result]:
    """Each launch with its row, which come in the same order."""
    kernels = [row["Kernel Name"] for row in rows]
    expected = [f"convpar_{launch.kernel}" for launch in launches]
    if [kernel.partition("(")[0] for kernel in kernels] != expected:
        raise click.ClickException(f"ncu saw {len(rows)} launches, and {len(launches)} were made")
    results = []
    for launch, row in zip(launches, rows, strict=True):
        result = Result(launch.contender, launch.case)
        result.numbers = numbers(row)
        result.kernel = launch.kernel
        results.append(result)
    return results


def _table(case: str, results: Sequence[Result]) -> Table:
    table = show.table(case, "rung and options", "kernel", *SHOWN, left=2)
    for r in results:
        table.add_row(
            str(r.contender), r.kernel, *(f"{r.numbers[n]:.4g}" if n in r.numbers else "" for n in SHOWN)
        )
    return table


@click.command()
@click.option("--json-dir", "folder", type=click.Path(file_okay=False, path_type=Path), metavar="DIR")
@click.option("--commit", metavar="NAME", help="What is measured, where git can't tell.")
@click.option("--quick", is_flag=True, help="Tiny shapes.")
@click.option("--watched", is_flag=True, hidden=True)
def main(folder: Path | None, commit: str | None, quick: bool, watched: bool) -> None:
    """Read hardware counters of the reports' kernels, on a batch of 100."""
    place: Place = device.find()
    if watched:
        for _ in launched(Session(place, quick=quick), run=True):
            pass
        return
    ncu = shutil.which("ncu")
    if ncu is None or place.emulated:
        raise device.NothingToMeasure("counters need a GPU and Nsight Compute's ncu on the PATH")
    file = file_in(folder) if folder is not None else None
    session = Session(place, quick=quick, file=file, commit=commit or None)
    results = watch(session, ncu)
    session.keep("counters", results)
    out = Console(width=220, highlight=False)
    for case in dict.fromkeys(r.case.name for r in results):
        out.print(_table(case, [r for r in results if r.case.name == case]))
        out.print()


if __name__ == "__main__":
    main(prog_name="python -m benchmarks.gpu.counters")
