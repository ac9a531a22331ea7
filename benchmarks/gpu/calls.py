"""What a call costs besides the kernel: the host's share of each, and compiling at the first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

import convpar
from convpar.cases import Case
from convpar.timing import CpuTimer, Times, interleave

from . import show
from .session import Contender, Result, Session

TARGET = 10e-6
"""Seconds that a call on device arrays may take the host."""

CALLS = 100
"""Calls in a sample: fewer than a stream takes before it makes the host wait."""

ROUNDS = 10
"""Samples, times those of other experiments."""

ROOT = Path(__file__).resolve().parents[2]


def case() -> Case:
    """So small that the device is done before the host has made the next call."""
    return Case(name="call-32x32-k3", x_shape=(1, 1, 32, 32), w_shape=(1, 1, 3, 3))


def run(session: Session) -> Iterator[Table | str]:
    """Measure, and give the tables and, last, the summary."""
    calls = _host_times(session)
    first = _first_calls(session)
    table = show.table(
        f"{case().name}: what a call takes on the host, arrays on the device",
        "rung", "conv2d, out given", "conv2d, new result", "plan, out given",
        caption=f"the goal is {show.seconds(TARGET)} at most",
    )  # fmt: skip
    for rung, times in calls.items():
        table.add_row(rung, *(show.seconds(t) for t in times.values()))
    yield table
    table = show.table(
        "the first call with a filter size, in a new process",
        "rung", "nothing cached", "compiled", "found compiled", "compiled again", "second call",
        caption="CuPy, the device and the compiler have started before; compiled: kernels added to the cache",
    )  # fmt: skip
    for rung, (fresh, cached) in first.items():
        table.add_row(
            rung, show.seconds(fresh["first"]), str(fresh["compiled"]),
            show.seconds(cached["first"]), str(cached["compiled"]), show.seconds(cached["second"]),
        )  # fmt: skip
    yield table
    yield "\n".join(_summary(calls, first))


def _summary(calls: dict[str, dict[str, float]], first: dict[str, tuple[Any, Any]]) -> list[str]:
    lines = ["calls: conv2d with out on the host (goal 10 us); first call without and with the cache"]
    for rung, times in calls.items():
        fresh, cached = first.get(rung, ({}, {}))
        parts = [
            show.seconds(times["conv2d, out"]),
            show.seconds(fresh.get("first")),
            show.seconds(cached.get("first")),
        ]
        lines.append(f"  {rung}: {' '.join(parts)}; compiled again {cached.get('compiled', 'unknown')}")
    return lines


def _host_times(session: Session) -> dict[str, dict[str, float]]:
    """Rung -> way of calling -> seconds until an asynchronous call returns."""
    xp = session.place.xp
    x, w = (xp.asarray(a) for a in case().arrays(np.random.default_rng(0)))
    out = xp.empty(case().problem().out_shape, np.float32)
    ways: dict[tuple[str, str], Callable[[], object]] = {}
    for rung in session.rungs():
        plan = convpar.plan(x, w, backend=rung)
        ways[rung, "conv2d, out"] = partial(convpar.conv2d, x, w, out=out, backend=rung)
        ways[rung, "conv2d"] = partial(convpar.conv2d, x, w, backend=rung)
        ways[rung, "plan, out"] = partial(plan, x, w, out=out)
    for call in ways.values():
        call()
    # In turn, over many rounds: the host is slower at some times than at others.
    taken = interleave(
        {way: partial(_sample, session, call) for way, call in ways.items()}, ROUNDS * session.repeats
    )
    session.place.synchronize()
    found: dict[str, dict[str, float]] = {}
    for (rung, name), samples in taken.items():
        found.setdefault(rung, {})[name] = Times(tuple(samples), _number(session)).median
    for rung, times in found.items():
        result = Result(
            Contender.of(rung), case(), Times(tuple(taken[rung, "conv2d, out"]), _number(session))
        )
        result.numbers = {name: seconds for name, seconds in times.items() if name != "conv2d, out"}
        session.keep("calls", [result], clock="call")
    return found


def _number(session: Session) -> int:
    return 3 if session.quick else CALLS


def _sample(session: Session, call: Callable[[], object]) -> float:
    session.place.synchronize()
    return CpuTimer().sample(call, _number(session))


def _first_calls(session: Session) -> dict[str, tuple[Any, Any]]:
    """Rung -> what a process with empty caches saw, and what the next one saw."""
    rungs = session.rungs()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="convpar-") as folder:
        env = {
            **os.environ,
            "CUPY_CACHE_DIR": str(Path(folder) / "cupy"),
            "CUDA_CACHE_PATH": str(Path(folder) / "cuda"),
            "CONVPAR_CACHE_DIR": str(Path(folder) / "convpar"),
        }
        fresh, cached = (_process(rungs, folder, env) for _ in range(2))
    for rung in rungs:
        result = Result(Contender.of(rung), case(), Times((fresh[rung]["first"],)))
        result.numbers = {
            "compiled": fresh[rung]["compiled"],
            "cached": cached[rung]["first"],
            "compiled again": cached[rung]["compiled"],
        }
        session.keep("calls", [result], clock="first call")
    session.say(f"calls, two processes: {time.perf_counter() - started:.1f} s")
    return {rung: (fresh[rung], cached[rung]) for rung in rungs}


def _process(rungs: list[str], folder: str, env: dict[str, str]) -> dict[str, Any]:
    """What `benchmarks.gpu.first_call` prints."""
    command = [sys.executable, "-m", "benchmarks.gpu.first_call", folder, *rungs]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
