"""Runs checks on backends, in this process or in others, and reports what they saw."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from typing import Any, Literal

from convpar import registry
from convpar.backend import Backend

from .case import Wrong
from .checks import CHECKS
from .trial import EXAMPLES, NotApplicable, Tally, Trial

Status = Literal["passed", "failed", "skipped", "not applicable"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one check found in one backend.

    Attributes
    ----------
    backend, check : str
    status : str
        "skipped": the backend is unavailable here. "not applicable": the check has nothing to look at.
    message : str
        Why it failed, was skipped or doesn't apply.
    tally : Tally
        Problems drawn and served, refusals by reason, paths.
    seconds : float
    """

    backend: str
    check: str
    status: Status
    message: str = ""
    tally: Tally = field(default_factory=Tally)
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Report:
    """The outcomes of a whole run.

    Attributes
    ----------
    outcomes : tuple of Outcome
        Backend by backend, in the order of the checks.
    examples, seed : int
        What reproduces it.
    """

    outcomes: tuple[Outcome, ...]
    examples: int
    seed: int

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The outcomes that failed."""
        return tuple(o for o in self.outcomes if o.status == "failed")

    def refusals(self, backend: str) -> Counter[str]:
        """How often `backend` gave each reason, over all checks; numbers are written as ``#``."""
        return sum((o.tally.refusals for o in self.outcomes if o.backend == backend), Counter[str]())

    def __str__(self) -> str:
        lines = [
            f"{o.backend} {o.check}: {o.status}" + (f": {o.message}" if o.message else "")
            for o in self.outcomes
        ]
        return "\n".join(
            [*lines, f"{len(self.failures)} failed, {self.examples} examples a check, seed {self.seed}"]
        )


def run_check(
    backend: Backend, check: str, *, examples: int = EXAMPLES, seed: int = 0, shrink: bool = True
) -> Outcome:
    """Run the check named `check` on `backend` here and now."""
    started = time.perf_counter()
    trial = Trial(backend, check, examples=examples, seed=seed, shrink=shrink)
    status: Status = "passed"
    message = ""
    reason = backend.unavailable()
    if reason is not None:
        status, message = "skipped", reason
    else:
        try:
            CHECKS[check](trial)
        except NotApplicable as e:
            status, message = "not applicable", str(e)
        except Wrong as e:
            status, message = "failed", str(e)
        except Exception:
            # Not a breach that the check was made for; whoever reads it needs the place.
            status, message = "failed", f"the check itself stopped:\n{traceback.format_exc()}"
    return Outcome(backend.name, check, status, message, trial.tally, time.perf_counter() - started)


def verify(
    backends: str | Backend | Iterable[str | Backend] | None = None,
    checks: Iterable[str] | None = None,
    *,
    require: Collection[str] = (),
    examples: int = EXAMPLES,
    seed: int = 0,
    jobs: int | None = None,
    progress: Callable[[Outcome], None] | None = None,
) -> Report:
    """Run checks on backends.

    Parameters
    ----------
    backends : str, Backend or several
        Backends, or names of them; None for all.
    checks : iterable of str
        Names in `CHECKS`; None for all.
    require : collection of str
        Names of backends that fail where they are unavailable.
    examples : int
        Problems that a property draws; the costlier checks draw a share of them.
    seed : int
        The same seed draws the same problems.
    jobs : int
        How many processes to run the checks in, so that one that dies is a failure and no more; they know
        the built-in backends and installed plugins. None runs them in this process, which knows
        every registered one.
    progress : callable
        Called with each outcome as it comes.

    Raises
    ------
    ValueError
        A name is unknown; the message lists those that are known.
    """
    found = _backends(backends)
    names = list(CHECKS) if checks is None else list(checks)
    for name in names:
        if name not in CHECKS:
            raise ValueError(f"no check is named {name!r}; there are {', '.join(CHECKS)}")
    tasks = [(backend, check) for backend in found for check in names]
    missing = {backend.name: backend.unavailable() for backend in found}
    skipped = (_skipped(b.name, check, missing, require) for b, check in tasks if missing[b.name] is not None)
    tasks_left = [(b, check) for b, check in tasks if missing[b.name] is None]
    run = _here(tasks_left, examples, seed) if jobs is None else _elsewhere(tasks_left, examples, seed, jobs)
    outcomes: dict[tuple[str, str], Outcome] = {}
    for outcome in itertools.chain(skipped, run):
        outcomes[outcome.backend, outcome.check] = outcome
        if progress is not None:
            progress(outcome)
    return Report(tuple(outcomes[b.name, check] for b, check in tasks), examples, seed)


def _backends(given: str | Backend | Iterable[str | Backend] | None) -> list[Backend]:
    if given is None:
        return registry.backends()
    if isinstance(given, (str, Backend)):
        given = [given]
    found = []
    for one in given:
        backend = registry.find(one) if isinstance(one, str) else one
        if backend is None:
            names = ", ".join(b.name for b in registry.backends())
            raise ValueError(f"no backend is named {one!r}; there are {names}")
        found.append(backend)
    return found


def _skipped(name: str, check: str, missing: Mapping[str, str | None], require: Collection[str]) -> Outcome:
    if name in require:
        return Outcome(name, check, "failed", f"required, but unavailable: {missing[name]}")
    return Outcome(name, check, "skipped", str(missing[name]))


def _here(tasks: Iterable[tuple[Backend, str]], examples: int, seed: int) -> Iterator[Outcome]:
    for backend, check in tasks:
        yield run_check(backend, check, examples=examples, seed=seed)


# -- in other processes


def _worker(pipe: Any, examples: int, seed: int) -> None:
    """Run each (backend name, check) that comes, until None does or nobody is left to ask."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Threads that spin while they wait would take the cores from the other workers. OpenMP is loaded with the first backend that runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    with contextlib.suppress(EOFError, ConnectionError):
        while (task := pipe.recv()) is not None:
            name, check = task
            backend = registry.find(name)
            if backend is None:
                pipe.send(
                    Outcome(name, check, "failed", "it is registered only in the process that called verify")
                )
            else:
                pipe.send(run_check(backend, check, examples=examples, seed=seed))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """What starts inside is born deaf to Ctrl-C, which reaches every process of a terminal: who started it ends it."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # Started with the first process otherwise, and then it lets the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _elsewhere(tasks: list[tuple[Backend, str]], examples: int, seed: int, jobs: int) -> Iterator[Outcome]:
    # A forked child would inherit threads and device contexts; a fresh one costs a second.
    context = multiprocessing.get_context("spawn")
    waiting = deque((b.name, check) for b, check in tasks)
    busy: dict[Any, tuple[Any, tuple[str, str]]] = {}

    def start() -> tuple[Any, Any]:
        mine, theirs = context.Pipe()
        process = context.Process(target=_worker, args=(theirs, examples, seed), daemon=True)
        with _uninterrupted():
            process.start()
        theirs.close()
        return mine, process

    def give(pipe: Any, process: Any) -> None:
        if waiting:
            task = waiting.popleft()
            pipe.send(task)
            busy[pipe] = process, task
        else:
            pipe.send(None)
            pipe.close()
            process.join()

    try:
        for _ in range(min(jobs, len(tasks))):
            give(*start())
        while busy:
            for ready in wait(list(busy)):
                pipe: Any = ready
                process, task = busy.pop(pipe)
                try:
                    outcome: Outcome = pipe.recv()
                except (EOFError, ConnectionError):
                    process.join()
                    how = (
                        f"signal {-process.exitcode}"
                        if process.exitcode < 0
                        else f"exit code {process.exitcode}"
                    )
                    yield Outcome(*task, "failed", f"the process died ({how}) during the check")
                    if waiting:
                        give(*start())
                    continue
                yield outcome
                give(pipe, process)
    finally:
        for process, _ in busy.values():
            process.terminate()
            process.join()
