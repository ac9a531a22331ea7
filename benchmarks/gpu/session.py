"""One run of the experiments: the place, the effort, the ceilings, and the times of contenders on a case."""

from __future__ import annotations

import fnmatch
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

import numpy as np

import convpar
from convpar import registry
from convpar.backend import Device, ErrorContract, Plan, Refusal
from convpar.bench import machine
from convpar.bench.results import RecordFile
from convpar.cases import Case, find
from convpar.timing import REPEATS, Ceilings, Timer, Times, calibrate, fma_kinds, interleave, measure_ceilings

from .check import Judge, device_of, layouts_of
from .device import Place
from .records import GpuRecord, written
from .steps import Arrays, Config

POISON = {"f": np.nan, "i": -(2**30)}
"""What an answer holds before it is made, by the kind of its type: no right answer of the experiments has it."""

QUICK_REPEATS = 3

ON_DEVICE = ("op", "compute")
"""Clocks that the device's ceilings bound."""

BASELINE = "gpu-naive"
PEER = "torch"
"""PyTorch's conv2d through cuDNN, in the layout that the option says."""


@dataclass(frozen=True, slots=True)
class Contender:
    """A rung with options, and where its arrays are.

    Attributes
    ----------
    rung : str
    options : tuple of (str, value)
        In alphabetical order.
    arrays : {"device", "pinned", "pageable"}
    """

    rung: str
    options: tuple[tuple[str, Any], ...] = ()
    arrays: Arrays = "device"

    @classmethod
    def of(cls, rung: str, config: Config | None = None, arrays: Arrays = "device") -> Contender:
        """A contender with the options of a mapping; those that the rung has anyway are left out."""
        backend = registry.find(rung)
        defaults = {} if backend is None else {k: o.default for k, o in backend.options.items()}
        given = {k: v for k, v in (config or {}).items() if k not in defaults or defaults[k] != v}
        return cls(rung, tuple(sorted(given.items())), arrays)

    @property
    def config(self) -> dict[str, Any]:
        """The options as ``config=`` takes them."""
        return dict(self.options)

    def __str__(self) -> str:
        return f"{self.rung} {written(self.config)}".strip()


@dataclass(slots=True)
class Result:
    """What became of a contender.

    Attributes
    ----------
    contender : Contender
    case : Case
    times : Times or None
        None where it was refused.
    reason : str
        Why it was refused.
    error : str
        What was wrong with its answer.
    worst : float
        The largest error over the contract's bound.
    contract : ErrorContract or None
    share : float or None
        Of what the ceilings allow.
    numbers : dict
        What else was measured.
    kernel : str
        Which of several kernels it is about; empty for all together.
    """

    contender: Contender
    case: Case
    times: Times | None = None
    reason: str = ""
    error: str = ""
    worst: float = 0.0
    contract: ErrorContract | None = None
    share: float | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    kernel: str = ""

    @property
    def seconds(self) -> float | None:
        """The median, if its answer was right."""
        return self.times.median if self.times is not None and not self.error else None


Results = dict[Contender, Result]


@dataclass(slots=True)
class Ready:
    """A call to time, and its answer.

    Attributes
    ----------
    call : callable
    timer : Timer
    contract : ErrorContract
        What its answer obeys.
    answer : callable
        Gives what the last call computed, on the device or the host.
    number : int
        Calls in a sample.
    """

    call: Callable[[], object]
    timer: Timer
    contract: ErrorContract
    answer: Callable[[], Any]
    number: int = 1

    def sample(self) -> float:
        """Seconds a call."""
        return self.timer.sample(self.call, self.number)


def planned(contender: Contender, case: Case, x: Any, w: Any, out: Any, place: Place) -> Plan | str:
    """The plan of a contender for these arrays, or why there is none."""
    rung = registry.find(contender.rung)
    if rung is None:
        return "convpar has no such rung"
    problem = case.problem()
    device = device_of(place) if contender.arrays == "device" else Device("cpu")
    try:
        plan = rung.plan(problem, layouts_of(problem, x, w, out), device, contender.config)
    except ValueError as e:
        return str(e)
    return plan.reason if isinstance(plan, Refusal) else plan


class Session:
    """What all experiments of a run share.

    Parameters
    ----------
    place : Place
    quick : bool
        Tiny shapes and few samples, to see that everything runs.
    repeats : int
        Samples of each time.
    only : iterable of str
        Patterns of rungs; others are left out, but for the baseline. Empty for all.
    file : RecordFile, optional
        Where results go, after every case.
    commit : str, optional
        What is measured, where git can't tell.
    """

    def __init__(
        self,
        place: Place,
        *,
        quick: bool = False,
        repeats: int = REPEATS,
        only: Iterable[str] = (),
        file: RecordFile[GpuRecord] | None = None,
        commit: str | None = None,
    ) -> None:
        self.place = place
        self.quick = quick
        self.repeats = QUICK_REPEATS if quick else repeats
        self.only = tuple(only)
        self.file = file
        self.commit = machine.git_commit() or commit
        self.errors: list[str] = []
        self.peer_versions: dict[str, str] = {}
        self._timer = place.timer()

    # -- what is measured

    def wants(self, rung: str) -> bool:
        """Whether a rung is to be measured."""
        return not self.only or any(fnmatch.fnmatchcase(rung, pattern) for pattern in (*self.only, BASELINE))

    def rungs(self) -> list[str]:
        """The names of the GPU rungs to measure, in the order of their ladder."""
        return [b.name for b in registry.backends() if b.capabilities.device == "gpu" and self.wants(b.name)]

    def network(self, layer: int, n: int, *, report: str = "") -> Case:
        """A layer of the two-layer network, or of the one that stands for report B's."""
        if self.quick:
            c, oc, size = (1, 4, 22) if layer == 1 else (4, 16, 18)
            return Case(name=f"quick-network-{layer}", x_shape=(3, c, size, size), w_shape=(oc, c, 7, 7))
        return find(f"report-b-{layer}-n{n}" if report == "B" else f"network-{layer}-n{n}")

    def image(self) -> Case:
        """Report E's largest image with its largest filter."""
        if not self.quick:
            return find("single-4096-k7-int32-valid")
        return Case(
            name="quick-image", x_shape=(1, 1, 41, 45), w_shape=(1, 1, 7, 7), x_dtype="int32", w_dtype="int32"
        )

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """Copy bandwidth and arithmetic peaks, measured at first use; None on the emulator."""
        if self.place.emulated:
            return None
        problems = [self.network(1, 100).problem(), self.image().problem()]
        return measure_ceilings(fma_kinds(problems), device="gpu")

    def batch(self, n: int) -> str:
        """What a table of batch `n` is about."""
        return "tiny shapes" if self.quick else f"N = {n}"

    def share(self, case: Case, seconds: float) -> float | None:
        """The shortest possible time over `seconds`."""
        return None if self.ceilings is None else self.ceilings.limit(case.problem()).seconds / seconds

    # -- measuring

    def time(self, experiment: str, case: Case, contenders: Iterable[Contender]) -> Results:
        """Check and time contenders on a case, in turn, and record the results.

        Arrays are on the device. Each time is that of all that the device does for the call. Before the
        last sample of each contender the answer is poisoned, and after it every element is checked.
        """
        started = time.perf_counter()
        wanted = [c for c in dict.fromkeys(contenders) if c.rung == PEER or self.wants(c.rung)]
        results = {contender: Result(contender, case) for contender in wanted}
        x, w = case.arrays(np.random.default_rng(0))
        judge = Judge(case, x, w, self.place)
        xp, problem = self.place.xp, case.problem()
        xs, ws, out = judge.x, xp.asarray(w), xp.empty(problem.out_shape, problem.out_dtype)
        ready: dict[Contender, Ready] = {}
        for contender, result in results.items():
            try:
                found = (
                    self._peer(contender, case, x, w)
                    if contender.rung == PEER
                    else self._ready(contender, case, xs, ws, out)
                )
                if isinstance(found, str):
                    result.reason = found
                    continue
                found.call()
                found.number, _ = calibrate(found.timer, found.call)
                ready[contender] = found
            except self.place.exhausted as e:
                result.reason = f"out of device memory: {e}"
        samplers = {contender: one.sample for contender, one in ready.items()}
        taken = interleave(samplers, self.repeats - 1)
        for contender, one in ready.items():
            result = results[contender]
            out[...] = POISON[problem.out_dtype.kind]
            result.times = Times((*taken[contender], one.sample()), one.number)
            verdict = judge.judge(one.answer(), one.contract)
            result.error, result.worst, result.contract = verdict.reason, verdict.worst, one.contract
        del xs, ws, out, samplers, ready, judge
        self.place.release()
        self.keep(experiment, results.values())
        self.say(f"{experiment} {case.name}: {len(wanted)} in {time.perf_counter() - started:.1f} s")
        return results

    def _ready(self, contender: Contender, case: Case, x: Any, w: Any, out: Any) -> Ready | str:
        plan = planned(contender, case, x, w, out, self.place)
        if isinstance(plan, str):
            return plan
        return Ready(lambda: plan.run(x, w, None, out), self._timer, plan.accuracy, lambda: out)

    def _peer(self, contender: Contender, case: Case, x: Any, w: Any) -> Ready | str:
        if self.place.emulated:
            return "it needs a GPU"
        from convpar.bench.libraries import Cannot
        from convpar.bench.libraries.pytorch import TorchCuda

        try:
            torch = TorchCuda(1)
            about = torch.about()
            job = torch.prepare(case, contender.config["layout"], x, w)
        except Cannot as e:
            return str(e)
        self.peer_versions["torch"] = f"{about['version']}, {about['mode'].partition(',')[0]}"

        def call() -> None:
            if job.before is not None:
                job.before()
            job.call()

        assert job.timer is not None
        return Ready(call, job.timer, ErrorContract(job.contract, job.factor), job.answer)

    def say(self, words: str) -> None:
        """Tell whoever waits what has been done."""
        print(words, file=sys.stderr, flush=True)

    # -- recording

    def keep(self, experiment: str, results: Iterable[Result], *, clock: str = "op") -> None:
        """Hold results against the ceilings and their baseline, and record them."""
        found = list(results)
        for result in found:
            if result.times is not None and clock in ON_DEVICE:
                result.share = self.share(result.case, result.times.median)
            if result.error:
                self.errors.append(f"{experiment} {result.case.name} {result.contender}: {result.error}")
        if self.file is None:
            return
        baseline = next((r.seconds for r in found if r.contender == Contender.of(BASELINE)), None)
        self.file.merge(self._record(experiment, result, baseline, clock) for result in found)
        self.file.save()

    def _record(self, experiment: str, result: Result, baseline: float | None, clock: str) -> GpuRecord:
        times, ceilings = result.times, self.ceilings
        limit = None
        if ceilings is not None and clock in ON_DEVICE:
            limit = ceilings.limit(result.case.problem())
        checked = times is not None and result.contract is not None
        return GpuRecord(
            experiment=experiment,
            case=result.case.name,
            backend=result.contender.rung,
            config=result.contender.config,
            arrays=result.contender.arrays,
            kernel=result.kernel,
            median=None if times is None else times.median,
            spread=None if times is None else times.spread,
            clock=clock,
            refused=result.reason,
            repeats=0 if times is None else times.repeats,
            number=1 if times is None else times.number,
            limit=None if limit is None else limit.seconds,
            limit_by=None if limit is None else limit.by,
            share=result.share,
            ratios={BASELINE: baseline / times.median} if baseline is not None and times is not None else {},
            numbers=result.numbers,
            checked="every element" if checked else "",
            error=result.error,
            worst=result.worst,
            contract=describe(result.contract),
            versions={
                "convpar": convpar.__version__,
                "numpy": np.__version__,
                **self.place.versions(),
                **(self.peer_versions if result.contender.rung == PEER else {}),
            },
            ceilings={} if ceilings is None else {"bandwidth": ceilings.bandwidth, "fma": dict(ceilings.fma)},
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            commit=self.commit,
        )


def describe(contract: ErrorContract | None) -> str:
    """An error contract in a few words."""
    if contract is None:
        return ""
    kind: str = contract.kind if contract.factor == 1 else f"{contract.kind} x {contract.factor:g}"
    narrow = {"factors": contract.operand_dtype, "sums": contract.sum_dtype}
    return ", ".join([kind, *(f"{what} in {dtype}" for what, dtype in narrow.items() if dtype is not None)])


def total(results: Mapping[int, Result | None]) -> float | None:
    """Seconds of both layers together; None if one is missing."""
    seconds = [None if r is None else r.seconds for r in results.values()]
    known = [s for s in seconds if s is not None]
    return sum(known) if len(known) == len(seconds) else None
