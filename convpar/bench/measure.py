"""Times of one case: every contestant ready and checked first, then all of them in turn."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from convpar.backends.cpu import ISA_VARIABLE
from convpar.cases import Case
from convpar.problem import Problem, is_integer
from convpar.timing import REPEATS, Ceilings, Limit, Times, fma_kinds, interleave

from . import machine
from .check import Reference, Verdict
from .libraries import CONVPAR, LIBRARIES, Cannot
from .process import Died, LibraryProcess, first_cores
from .results import SHIPPED, Record

LEAST_REPEATS = 3
"""Samples taken of even the slowest."""

LOOK = 0.2
"""Seconds for which others' use of the processors is looked at before each case."""

SETTLE = 0.02
"""Seconds between turns: threads of the last one may still spin, waiting for work."""

BUDGET = 30.0
"""Seconds of timing for one contestant on one case, unless told otherwise."""

CALL_LIMIT = 120.0
"""Seconds after which a single call is given up, unless told otherwise."""

LOOSEST = 16.0
"""The largest factor on the normwise bound that counts as keeping it: that of fast algorithms in the sum's type."""

_MEMORY_SHARE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is spent on a case.

    Attributes
    ----------
    repeats : int
        Samples of each contestant.
    budget : float
        Seconds of timing for one contestant, after which it gets fewer samples.
    call_limit : float
        Seconds after which a single call is given up.
    accuracy : bool
        Also measure errors on an image with a bright patch.
    everything : bool
        Compare every element with the reference, however long it takes.
    seed : int
        Of the arrays.
    """

    repeats: int = REPEATS
    budget: float = BUDGET
    call_limit: float = CALL_LIMIT
    accuracy: bool = False
    everything: bool = False
    seed: int = 0


@dataclass(slots=True)
class Outcome:
    """What became of one contestant on a case: a record with its samples, or the reason why there is none."""

    backend: str
    build: str = SHIPPED
    level: str = ""
    record: Record | None = None
    times: Times | None = None
    reason: str = ""

    @property
    def wrong(self) -> bool:
        """Whether it gave an answer, and a wrong one."""
        return self.record is not None and bool(self.record.error)


@dataclass(slots=True)
class _Entry:
    """One library in one setting."""

    process: str
    setting: str
    reason: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    verdict: Verdict | None = None
    checksum: int = 0
    number: int = 1
    seconds: float = math.nan
    times: Times | None = None
    errors: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return self.verdict is not None and self.verdict.right


class _Wanted(NamedTuple):
    """What a process is to run: a library; of convpar a build, the folder that has it, and the ISA level it is held to."""

    name: str
    build: str = SHIPPED
    package: Path | None = None
    level: str = ""


class Bench:
    """The processes of one run, and the ceilings: the largest measured at its start and after each of its cases.

    Parameters
    ----------
    backends : sequence of str
        Backends of convpar, by name, or choosers.
    peers : sequence of str
        Names from `convpar.bench.libraries.PEERS`.
    num_threads : int
        Threads for everybody, on as many processors.
    effort : Effort
    builds : mapping of str to path or None
        Builds of convpar to time: name -> the folder that has the package. None is the one that runs.
    levels : sequence of str, optional
        ISA levels to hold each build to, each in a process of its own; "" is what it takes by itself. Without it what
        CONVPAR_ISA says.
    libraries : mapping, optional
        Name -> ``module:Class`` in place of `LIBRARIES`.
    progress : callable
        Told in a few words what is being done.

    Use it as a context manager: the processes end with it.
    """

    def __init__(
        self,
        backends: Sequence[str],
        peers: Sequence[str] = (),
        *,
        num_threads: int,
        effort: Effort | None = None,
        builds: Mapping[str, Path | None] = MappingProxyType({SHIPPED: None}),
        levels: Sequence[str] | None = None,
        libraries: Mapping[str, str] = LIBRARIES,
        progress: Callable[[str], None] = lambda words: None,
    ) -> None:
        self.backends = list(backends)
        self.peers = list(peers)
        self.num_threads = num_threads
        self.effort = Effort() if effort is None else effort
        self.cores = first_cores(num_threads)
        # ISA level -> what convpar's first process of that level measured.
        self.ceilings_at: dict[str, Ceilings] = {}
        # What to ask for when they are measured again: element types, device, seconds.
        self._asked: tuple[list[str], str, float] | None = None
        self.missing: dict[str, str] = {}
        self._libraries = libraries
        self._progress = progress
        # Once: nobody is asked to leave the sources alone while hours of cases run.
        self._commit = machine.git_commit()
        # By the name of the process. convpar's builds are processes like any other.
        self._wanted: dict[str, _Wanted] = {}
        if levels is None:
            levels = [os.environ.get(ISA_VARIABLE, "").strip()]
        for build, folder in builds.items():
            for level in levels:
                self._wanted[variant(CONVPAR, build, level)] = _Wanted(CONVPAR, build, folder, level)
        for peer in self.peers:
            self._wanted[peer] = _Wanted(peer)
        self._processes: dict[str, LibraryProcess] = {}

    def __enter__(self) -> Bench:
        for name in self._wanted:
            self._progress(f"starting {name}")
            self._start(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.close()

    def _start(self, name: str) -> LibraryProcess | None:
        wanted = self._wanted[name]
        try:
            self._processes[name] = LibraryProcess(
                name,
                self._libraries[wanted.name],
                num_threads=self.num_threads,
                cores=self.cores,
                package=wanted.package,
                variables={ISA_VARIABLE: wanted.level} if wanted.level else {},
            )
        except (Cannot, Died) as e:
            self.missing[name] = str(e)
            return None
        return self._processes[name]

    def _process(self, name: str) -> LibraryProcess | None:
        """The running process, started again if the last case was its end; None if it can't be had."""
        if name in self.missing:
            return None
        process = self._processes[name]
        return process if process.alive else self._start(name)

    @property
    def ours(self) -> list[str]:
        """The names of convpar's processes."""
        return [name for name, wanted in self._wanted.items() if wanted.name == CONVPAR]

    @property
    def ceilings(self) -> Ceilings | None:
        """Those of the first level, None without any."""
        return next(iter(self.ceilings_at.values()), None)

    def about(self) -> dict[str, dict[str, Any]]:
        """Process -> version, effective threads and mode, of those that run."""
        return {name: process.about for name, process in self._processes.items()}

    def measure_ceilings(self, cases: Iterable[Case], *, device: str = "cpu", seconds: float = 0.5) -> str:
        """Measure the ceilings that the limits of `cases` need, at each level; the reason if that can't be done.

        After each case they are measured again, and the larger ones kept: machines are faster at times, and a
        share of what a slow moment allowed would say nothing.
        """
        kinds = fma_kinds(case.problem() for case in cases)
        try:
            self.ceilings_at = self._measured_ceilings(kinds, device, seconds)
        except (Cannot, Died) as e:
            return str(e)
        self._asked = kinds, device, seconds
        return ""

    def _measured_ceilings(self, kinds: list[str], device: str, seconds: float) -> dict[str, Ceilings]:
        first: dict[str, str] = {}
        for name in self.ours:
            first.setdefault(self._wanted[name].level, name)
        self._progress("measuring the ceilings")
        found = {level: self._ceilings_in(name, kinds, device, seconds) for level, name in first.items()}
        # Copies are the machine's: no level has its own.
        bandwidth = max(ceilings.bandwidth for ceilings in found.values())
        return {level: replace(ceilings, bandwidth=bandwidth) for level, ceilings in found.items()}

    def _ceilings_in(self, name: str, kinds: list[str], device: str, seconds: float) -> Ceilings:
        process = self._process(name)
        if process is None:
            raise Cannot(self.missing[name])
        found = process.ask(
            "ceilings",
            timeout=_setup_limit(self.effort),
            kinds=kinds,
            num_threads=self.num_threads,
            device=device,
            seconds=seconds,
        )
        threads = self.num_threads if device == "cpu" else 0
        return Ceilings(device, threads, found["bandwidth"], found["fma"])  # type: ignore[arg-type]

    def _raise_ceilings(self) -> None:
        """Measure the ceilings again and keep the larger of each; those that there are if it can't be done."""
        if self._asked is None:
            return
        with contextlib.suppress(Cannot, Died):
            for level, again in self._measured_ceilings(*self._asked).items():
                known = self.ceilings_at[level]
                self.ceilings_at[level] = replace(
                    known,
                    bandwidth=max(known.bandwidth, again.bandwidth),
                    fma={kind: max(peak, again.fma.get(kind, peak)) for kind, peak in known.fma.items()},
                )

    def _copy(self, problem: Problem) -> float | None:
        """Bytes a second of a copy as large as the problem; None on a GPU, without ceilings, or if it can't be had."""
        if self._asked is None or self._asked[1] != "cpu":
            return None
        with contextlib.suppress(Cannot, Died):
            process = self._process(self.ours[0])
            if process is not None:
                reply = process.ask(
                    "copy",
                    timeout=_setup_limit(self.effort),
                    size=problem.least_bytes // 2,
                    num_threads=self.num_threads,
                )
                return float(reply["bandwidth"]) or None
        return None

    def run(self, case: Case) -> list[Outcome]:
        """Time every contestant on `case`, convpar's backends first."""
        problem = case.problem()
        shortage = _shortage(problem, len(self._wanted))
        if shortage:
            return [Outcome(*names, reason=shortage) for names in self._names()]
        load, busy = machine.load(), machine.busy(LOOK)
        with tempfile.TemporaryDirectory(prefix="convpar-", dir=_memory_folder(problem)) as folder:
            entries, reference = self._ready(case, Path(folder))
            copies = [self._copy(problem)]
            self._time(case, [entry for entry in entries if not entry.reason], reference, Path(folder))
            copies.append(self._copy(problem))
            if self.effort.accuracy and not is_integer(problem.sum_dtype):
                self._measure_errors(case, Path(folder), entries)
        for process in self._processes.values():
            if process.alive:
                # One that ends here is started again for the next case.
                with contextlib.suppress(Cannot, Died):
                    process.ask("drop", timeout=_setup_limit(self.effort))
        if any(entry.times is not None for entry in entries):
            self._raise_ceilings()
        copy = max((rate for rate in copies if rate is not None), default=None)
        return self._outcomes(case, entries, {"load": load, "busy": busy, "copy": copy})

    def _names(self) -> list[tuple[str, str, str]]:
        """Backend, build and level of each contestant."""
        ours = [self._wanted[name] for name in self.ours]
        mine = [(b, wanted.build, wanted.level) for wanted in ours for b in self.backends]
        return mine + [(peer, SHIPPED, "") for peer in self.peers]

    # -- ready

    def _ready(self, case: Case, folder: Path) -> tuple[list[_Entry], Reference]:
        """Every contestant with its answer checked and its time estimated."""
        self._progress(f"{case.name}: reference")
        x, w = self._arrays(case, folder, bright=False)
        reference = Reference(case.problem(), x, w, seed=self.effort.seed, everything=self.effort.everything)
        entries = []
        for name, wanted in self._wanted.items():
            try:
                process = self._loaded(name, case, folder)
                settings = self.backends if wanted.name == CONVPAR else self._settings(process)
            except (Cannot, Died) as e:
                entries.append(_Entry(name, "", str(e)))
                continue
            mine = [_Entry(name, setting) for setting in settings]
            entries += mine
            for k, entry in enumerate(mine):
                if entry.reason:
                    continue
                self._progress(f"{case.name}: {name} {entry.setting}")
                try:
                    self._check(self._processes[name], entry, reference, folder)
                except Cannot as e:
                    entry.reason = str(e)
                except Died as e:
                    entry.reason = str(e)
                    self._revive(name, case, folder, mine[:k], mine[k + 1 :])
        return entries, reference

    def _revive(
        self, name: str, case: Case, folder: Path, ready: Iterable[_Entry], others: Iterable[_Entry]
    ) -> None:
        """Start a process again for the settings that weren't its end, those in `ready` as far as they were."""
        try:
            process = self._loaded(name, case, folder)
            for entry in ready:
                if not entry.reason:
                    process.ask("prepare", timeout=self.effort.call_limit, setting=entry.setting)
        except (Cannot, Died) as e:
            for entry in (*ready, *others):
                entry.reason = entry.reason or str(e)

    def _loaded(self, name: str, case: Case, folder: Path) -> LibraryProcess:
        """The process with the case at hand; `Cannot` or `Died` with the reason if it can't be had."""
        process = self._process(name)
        if process is None:
            raise Cannot(self.missing[name])
        self._load(process, case, folder)
        return process

    def _arrays(self, case: Case, folder: Path, *, bright: bool) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        x, w = case.arrays(np.random.default_rng(self.effort.seed), bright=bright)
        np.save(folder / "x.npy", x)
        np.save(folder / "w.npy", w)
        return x, w

    def _load(self, process: LibraryProcess, case: Case, folder: Path) -> None:
        given = {
            "name": case.name,
            "x_shape": case.x_shape,
            "w_shape": case.w_shape,
            "x_dtype": case.x_dtype,
            "w_dtype": case.w_dtype,
            "options": dict(case.options),
            "separable": case.separable,
            "pixels": case.pixels,
            "channels_last": case.channels_last,
        }
        process.ask("load", timeout=_setup_limit(self.effort), case=given, folder=str(folder))

    def _settings(self, process: LibraryProcess) -> list[str]:
        settings: list[str] = process.ask("settings", timeout=_setup_limit(self.effort))["settings"]
        return settings

    def _check(self, process: LibraryProcess, entry: _Entry, reference: Reference, folder: Path) -> None:
        limit = self.effort.call_limit
        entry.info = process.ask("prepare", timeout=limit, setting=entry.setting)
        entry.verdict = self._judge(process, entry, reference, folder)
        # The first call may have allocated and compiled; a call within the limit is repeated a few times.
        found = process.ask("calibrate", timeout=4 * limit, setting=entry.setting)
        entry.number, entry.seconds = found["number"], found["seconds"]

    def _judge(
        self,
        process: LibraryProcess,
        entry: _Entry,
        reference: Reference,
        folder: Path,
        request: str = "answer",
    ) -> Verdict:
        """The verdict on a new answer, or on the "last" one."""
        path = folder / "answer.npy"
        reply = process.ask(request, timeout=self.effort.call_limit, setting=entry.setting, path=str(path))
        entry.checksum = reply["checksum"]
        entry.info["dtype"] = reply["dtype"]
        verdict = reference.judge(
            np.load(path),
            contract=entry.info["contract"],
            factor=entry.info["factor"],
            rounding=entry.info["rounding"],
            flushes=entry.info["device"] == "gpu",
        )
        path.unlink()
        return verdict

    # -- time

    def _time(self, case: Case, entries: list[_Entry], reference: Reference, folder: Path) -> None:
        """Samples in turn, one contestant after the other, round after round."""
        rounds = {}
        for k, entry in enumerate(entries):
            sample = max(entry.seconds * entry.number, 1e-3)
            affordable = max(int(self.effort.budget / sample), LEAST_REPEATS)
            rounds[k] = min(self.effort.repeats, affordable)
        self._progress(f"{case.name}: timing")
        samplers = {k: self._sampler(entry) for k, entry in enumerate(entries)}
        taken = interleave(samplers, rounds, before=lambda: time.sleep(SETTLE))
        for k, entry in enumerate(entries):
            if not entry.reason:
                entry.times = Times(taken[k], entry.number)
                self._check_last(entry, reference, folder)

    def _sampler(self, entry: _Entry) -> Callable[[], float]:
        process, limit = self._processes[entry.process], self.effort.call_limit

        def sample() -> float:
            if entry.reason:
                return math.nan
            try:
                reply = process.ask(
                    "time",
                    timeout=limit + 4 * entry.number * entry.seconds,
                    setting=entry.setting,
                    number=entry.number,
                    about=entry.seconds,
                )
            except (Cannot, Died) as e:
                entry.reason = str(e)
                return math.nan
            return float(reply["seconds"])

        return sample

    def _check_last(self, entry: _Entry, reference: Reference, folder: Path) -> None:
        """Judge the last timed answer too, if its bits aren't those of the one that was checked."""
        process, limit = self._processes[entry.process], self.effort.call_limit
        try:
            changed = process.ask("changed", timeout=limit, setting=entry.setting, checksum=entry.checksum)
            if changed["answer"] and entry.right:
                entry.verdict = self._judge(process, entry, reference, folder, "last")
        except (Cannot, Died) as e:
            entry.reason = str(e)
            return
        if changed["inputs"] and entry.verdict is not None:
            entry.verdict = replace(entry.verdict, right=False, reason="it modified its inputs")

    def _measure_errors(self, case: Case, folder: Path, entries: list[_Entry]) -> None:
        """Largest errors on the plain image, known already, and on one with a bright patch."""
        self._progress(f"{case.name}: accuracy")
        x, w = self._arrays(case, folder, bright=True)
        reference = Reference(case.problem(), x, w, seed=self.effort.seed, everything=self.effort.everything)
        for name in self._wanted:
            ready = [entry for entry in entries if entry.process == name and not entry.reason]
            if not ready:
                continue
            try:
                process = self._loaded(name, case, folder)
                for entry in ready:
                    plain = entry.verdict
                    process.ask("prepare", timeout=self.effort.call_limit, setting=entry.setting)
                    bright = self._judge(process, entry, reference, folder)
                    entry.errors = {
                        kind: {"elementwise": verdict.elementwise, "normwise": verdict.normwise}
                        for kind, verdict in (("plain", plain), ("bright", bright))
                        if verdict is not None
                        and verdict.elementwise is not None
                        and verdict.normwise is not None
                    }
                    if entry.right and not bright.right:
                        entry.verdict = bright
            except (Cannot, Died) as e:
                for entry in ready:
                    entry.reason = entry.reason or str(e)

    # -- records

    def _outcomes(
        self, case: Case, entries: list[_Entry], circumstances: Mapping[str, float | None]
    ) -> list[Outcome]:
        problem = case.problem()
        tried = {peer: [e for e in entries if e.process == peer] for peer in self.peers}
        best = {peer: _best(mine, problem) for peer, mine in tried.items()}
        medians = {peer: e.times.median for peer, e in best.items() if e is not None and e.times and e.right}
        beside = {peer: self._beside(problem, peer, tried[peer]) for peer in medians}
        outcomes = []
        for name, (library, build, _, level) in self._wanted.items():
            mine = [entry for entry in entries if entry.process == name]
            if library != CONVPAR:
                chosen = best[name]
                if chosen is None:
                    outcomes.append(Outcome(name, reason=_first_reason(mine)))
                else:
                    record = self._record(case, name, chosen, mine)
                    record = replace(record, **circumstances)  # type: ignore[arg-type]
                    outcomes.append(Outcome(name, record=record, times=chosen.times))
                continue
            for backend in self.backends:
                entry = next((e for e in mine if e.setting == backend), mine[0])
                if entry.times is None or entry.reason:
                    outcomes.append(Outcome(backend, build, level, reason=entry.reason))
                else:
                    record = self._record(case, backend, entry, [])
                    ratios = {peer: median / record.median for peer, median in medians.items()}
                    record = replace(record, ratios=ratios, peers=beside, **circumstances)  # type: ignore[arg-type]
                    outcomes.append(Outcome(backend, build, level, record, entry.times))
        return outcomes

    def _record(self, case: Case, backend: str, entry: _Entry, tried: list[_Entry]) -> Record:
        """All but what is known of the run as a whole."""
        assert entry.times is not None
        assert entry.verdict is not None
        problem, times, verdict = case.problem(), entry.times, entry.verdict
        wanted = self._wanted[entry.process]
        # A peer has no level: it is held against what the machine can do at the first.
        ceilings = self.ceilings_at.get(wanted.level, self.ceilings)
        limit: Limit | None = ceilings.limit(problem) if ceilings is not None else None
        about = self._processes[entry.process].about
        return Record(
            case=case.name,
            backend=backend,
            threads=self.num_threads if entry.info["device"] == "cpu" else 0,
            build=wanted.build,
            level=wanted.level,
            median=times.median,
            spread=times.spread,
            repeats=times.repeats,
            number=times.number,
            setting=entry.setting if tried else "",
            chose=entry.info["chose"] if entry.info["chose"] != backend else "",
            settings={e.setting: e.times.median if e.times is not None else e.reason for e in tried},
            limit=limit.seconds if limit is not None else None,
            limit_by=limit.by if limit is not None else None,
            share=limit.seconds / times.median if limit is not None else None,
            types=_types(problem, entry.info["dtype"], ours=not tried),
            contract=_contract(problem, entry.info),
            notes=tuple(entry.info["notes"]),
            checked="every element"
            if verdict.checked == verdict.total
            else f"{verdict.checked} of {verdict.total} elements",
            error=verdict.reason,
            errors=entry.errors,
            versions={wanted.name: about["version"], "numpy": np.__version__},
            effective_threads=_effective_threads(about, entry),
            mode=about.get("mode", ""),
            ceilings={} if ceilings is None else {"bandwidth": ceilings.bandwidth, "fma": dict(ceilings.fma)},
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=self._commit,
        )

    def _beside(self, problem: Problem, peer: str, entries: Sequence[_Entry]) -> dict[str, Any]:
        """What goes into `Record.peers` of one peer."""
        about = self._processes[peer].about
        settings = {
            e.setting: {
                "median": e.times.median,
                "spread": e.times.spread,
                "repeats": e.times.repeats,
                "threads": _effective_threads(about, e),
                "types": _types(problem, e.info["dtype"], ours=False),
                "contract": _contract(problem, e.info),
                "notes": list(e.info["notes"]),
            }
            for e in entries
            if e.times is not None and not e.reason and e.right
        }
        return {"version": about["version"], "mode": about.get("mode", ""), "settings": settings}


def variant(name: str, build: str = SHIPPED, level: str = "") -> str:
    """`name` with the build of convpar and the ISA level, if they aren't what users get."""
    kinds = [*([build] if build != SHIPPED else []), *([level] if level else [])]
    return f"{name} ({', '.join(kinds)})" if kinds else name


def _setup_limit(effort: Effort) -> float:
    """Seconds for what is no call of a library: a short limit is meant for those only."""
    return max(effort.call_limit, CALL_LIMIT)


def _best(entries: Sequence[_Entry], problem: Problem) -> _Entry | None:
    """The fastest of those with a right answer that keep the problem's contract, or the strictest that there is.

    If no answer is right the fastest at all; None if nothing was timed.
    """

    def seconds(entry: _Entry) -> float:
        return entry.times.median if entry.times else math.inf

    timed = [e for e in entries if e.times is not None and not e.reason]
    right = [e for e in timed if e.right]
    if not right:
        return min(timed, key=seconds, default=None)
    allowed = ("elementwise", 1.0) if problem.accuracy in (None, "elementwise") else ("normwise", LOOSEST)
    # "elementwise" comes before "normwise" in the alphabet too.
    wanted = max(allowed, min((e.info["contract"], e.info["factor"]) for e in right))
    return min((e for e in right if (e.info["contract"], e.info["factor"]) <= wanted), key=seconds)


def _effective_threads(about: Mapping[str, Any], entry: _Entry) -> int:
    threads: int | None = entry.info["threads"]
    return int(about["threads"]) if threads is None else threads


def _first_reason(entries: Sequence[_Entry]) -> str:
    return next((e.reason for e in entries if e.reason), "it offers no setting")


def _types(problem: Problem, answer: str, *, ours: bool) -> str:
    text = f"{problem.x_dtype} * {problem.w_dtype} -> {answer}"
    if ours and problem.sum_dtype != problem.out_dtype:
        text += f", sums in {problem.sum_dtype}"
    if ours and is_integer(problem.out_dtype):
        text += f", {problem.overflow}"
    return text


def _contract(problem: Problem, info: Mapping[str, Any]) -> str:
    if is_integer(problem.sum_dtype):
        return "exact"
    factor = info["factor"]
    return str(info["contract"]) if factor == 1 else f"{info['contract']} x {factor:g}"


def _needed(problem: Problem) -> int:
    """Bytes of one process's arrays: image, filter, answer and a copy of it."""
    return problem.least_bytes + problem.outputs * problem.out_dtype.itemsize


def _shortage(problem: Problem, processes: int) -> str:
    """Why the case doesn't fit in memory; empty if it does."""
    room = machine.memory_available()
    # Each process has its arrays; the files between them and the reference are about two more. One of them copies.
    needed = _needed(problem) * (processes + 2) + problem.least_bytes
    if room is None or needed < _MEMORY_SHARE * room:
        return ""
    return f"needs {needed / 1e9:.0f} GB for {processes} processes, {room / 1e9:.0f} GB are free; name fewer peers"


def _memory_folder(problem: Problem) -> str | None:
    """Where the arrays change hands: in memory if there is such a folder with room, else the usual place."""
    folder = Path("/dev/shm")
    try:
        return str(folder) if shutil.disk_usage(folder).free > 2 * _needed(problem) else None
    except OSError:
        return None
