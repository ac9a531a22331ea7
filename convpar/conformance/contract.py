"""Checks of what a run touches, how it repeats, how it gets along with threads and forks, and what a plan says."""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from convpar import boundary
from convpar.backend import CONTRACT_VERSION, Backend, Device, Refusal

from . import strategies
from .case import Case, Wrong
from .memory import GUARD, NAN_BYTE, OTHER_BYTE, aligned_bytes, device_place
from .strategies import EVERYTHING, FINITE, Choices, Style, drawn
from .trial import NotApplicable, Trial, check, returns

THREADS = (1, 2, 3, 5)
"""Thread counts that must agree; more than this machine may have cores."""

FORK_SECONDS = 30.0
"""How long a forked child may take for a problem of some microseconds."""


# -- what a run touches


@check("writes-every-element")
def writes_every_element(trial: Trial) -> None:
    """No element of the output keeps what it held before, whatever that was."""

    def body(case: Case) -> None:
        left = []
        for pattern in (NAN_BYTE, OTHER_BYTE):
            plan, arrays = trial.prepared(case, pattern=pattern)
            arrays.call(plan, case.threads)
            left.append(arrays.out.unwritten())
        never = left[0] & left[1]
        if never.any():
            place = tuple(int(i) for i in np.argwhere(never)[0])
            raise Wrong(f"{int(never.sum())} of {never.size} elements were never written, first {place}")

    trial.each(trial.strategy(Style(data=FINITE, layouts=True, keep=returns), config=True), body)


@check("writes-nothing-else")
def writes_nothing_else(trial: Trial) -> None:
    """Not one byte beside the output's elements is written: not before, after or between them."""

    def body(case: Case) -> None:
        for pattern in (NAN_BYTE, OTHER_BYTE):
            plan, arrays = trial.prepared(case, pattern=pattern)
            arrays.call(plan, case.threads)
            if arrays.out.changed_outside():
                raise Wrong("the run wrote to memory outside the output's elements")

    trial.each(trial.strategy(Style(layouts=True), config=True), body)


@check("inputs-untouched")
def inputs_untouched(trial: Trial) -> None:
    """Image, filter and bias, and the memory around them, stay as they were."""

    def body(case: Case) -> None:
        # Arrays that can't be written raise instead of changing; other checks draw those.
        open_ = replace(
            case, x=replace(case.x, read_only=False), w=replace(case.w, read_only=False),
            bias=replace(case.bias, read_only=False),
        )  # fmt: skip
        plan, arrays = trial.prepared(open_)
        arrays.call(plan, case.threads)
        for name, buffer in (("x", arrays.x), ("w", arrays.w), ("bias", arrays.bias)):
            if buffer is not None and buffer.changed():
                raise Wrong(f"the run changed its input {name}")

    trial.each(trial.strategy(Style(layouts=True), config=True), body)


# -- runs repeat


@check("plans-hold-no-values")
def plans_hold_no_values(trial: Trial) -> None:
    """One plan serves other data in the same arrays, and the first data again."""

    def body(case: Case) -> None:
        plan, arrays = trial.prepared(case)
        right = arrays.expected(plan)
        arrays.run(plan, right=right)
        other = trial.arrays(case, data_seed=case.seed + 1000)
        others = other.expected(plan)
        other.run(plan, right=others)
        for mine, new in ((arrays.x, other.x), (arrays.w, other.w), (arrays.bias, other.bias)):
            if mine is not None and new is not None:
                mine.refill(new.given())
        try:
            arrays.run(plan, right=others)
        except Wrong as e:
            raise Wrong(f"after the inputs were overwritten in place: {e}") from e
        trial.arrays(case).run(plan, right=right)

    trial.each(trial.strategy(Style(data=("uniform", "sparse")), config=True), body)


@check("same-bits")
def same_bits(trial: Trial) -> None:
    """Repeated calls and any number of threads give the same bits, unless the contract says otherwise."""

    def body(case: Case) -> None:
        plan, first = trial.prepared(case)
        assume(plan.accuracy.deterministic)
        first.call(plan, 1)
        for threads in (*THREADS, None):
            arrays = trial.arrays(case, pattern=OTHER_BYTE)
            arrays.call(plan, threads)
            if arrays.out.bits() != first.out.bits():
                what = "a repeated call" if threads == 1 else f"num_threads={threads}"
                raise Wrong(f"{what} gave other bits than num_threads=1")

    if not trial.backend.capabilities.error.deterministic:
        raise NotApplicable("it says that its bits may differ from call to call")
    style = Style(data=("uniform", "wide", "extremes"), keep=returns)
    trial.each(trial.strategy(style, config=True), body)


@check("thread-counts")
def thread_counts(trial: Trial) -> None:
    """Any number of threads, more than there are cores or outputs too, gives the right answer."""

    def body(case: Case) -> None:
        plan, arrays = trial.prepared(case)
        right = arrays.expected(plan)
        for threads in THREADS:
            try:
                trial.arrays(case).run(plan, threads=threads, right=right)
            except Wrong as e:
                raise Wrong(f"with num_threads={threads}: {e}") from e
        trial.tally.saw(plan)

    trial.each(trial.strategy(Style(data=("sparse", "uniform")), config=True), body)


@check("workspace")
def workspace(trial: Trial) -> None:
    """A workspace of exactly the stated size is enough, is not overrun, and its old contents don't matter."""
    # Where it begins is the caller's affair; device allocators align.
    place = device_place(trial.backend.capabilities.device)
    offsets = (0, 1, 8, 63) if place.takes_any_layout else (0, 256)

    def placed(draw: Choices) -> tuple[Case, int, int]:
        style = Style(data=("sparse", "uniform"), keep=returns, host=False)
        case = strategies.draw_case(draw, trial.backend.capabilities, trial.backend.options, style)
        return case, draw.pick(THREADS), draw.pick(offsets)

    def body(given: tuple[Case, int, int]) -> None:
        case, threads, offset = given
        plan, arrays = trial.prepared(case)
        size = plan.workspace_bytes(threads)
        if not isinstance(size, int) or size < 0:
            raise Wrong(f"workspace_bytes({threads}) is {size!r}, not a number of bytes")
        right = arrays.expected(plan)
        bits = []
        for pattern in (NAN_BYTE, OTHER_BYTE):
            arrays = trial.arrays(case)
            start = GUARD + offset
            raw = place.upload(aligned_bytes(start + size + GUARD, pattern))
            part = place.view(raw, start, (size,), np.uint8, (1,))
            arrays.inspect(right, arrays.call(plan, threads, part))
            host = place.download(raw)
            if np.any(host[:start] != pattern) or np.any(host[start + size :] != pattern):
                raise Wrong(f"with num_threads={threads} the run wrote outside its workspace of {size} bytes")
            bits.append(arrays.out.bits())
        if plan.accuracy.deterministic and bits[0] != bits[1]:
            raise Wrong("the result depends on what the workspace held before")

    trial.each(drawn(placed), body)


@check("concurrent-callers")
def concurrent_callers(trial: Trial) -> None:
    """Four threads at once, on plans that they share, get what they would get alone."""

    def body(several: list[Case]) -> None:
        plans = [trial.prepared(case)[0] for case in several]
        # Everybody has the same problems, data of his own, and begins elsewhere.
        work = [
            [trial.arrays(case, data_seed=case.seed + 7 * caller) for case in several] for caller in range(4)
        ]
        start = threading.Barrier(4)
        failures: list[Wrong] = []
        errors: dict[tuple[int, int], OverflowError | None] = {}

        def call(caller: int) -> None:
            start.wait()
            for turn in range(2 * len(several)):
                i = (turn + caller) % len(several)
                try:
                    errors[caller, i] = work[caller][i].call(plans[i], several[i].threads)
                except Wrong as e:
                    failures.append(e)

        callers = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for t in callers:
            t.start()
        for t in callers:
            t.join()
        if failures:
            raise Wrong(f"with four callers at once: {failures[0]}") from failures[0]
        for caller, mine in enumerate(work):
            for i, arrays in enumerate(mine):
                try:
                    arrays.inspect(arrays.expected(plans[i]), errors[caller, i])
                except Wrong as e:
                    raise Wrong(f"with four callers at once: {e}") from e

    one = trial.strategy(Style(data=("sparse", "uniform"), threads=(1, 2)), config=True)
    trial.each(st.lists(one, min_size=3, max_size=3), body, 1 / 6)


@check("after-fork")
def after_fork(trial: Trial) -> None:
    """A child forked after a parallel run computes too, and doesn't hang."""
    if trial.backend.capabilities.device != "cpu":
        raise NotApplicable("a GPU's context doesn't survive a fork, whatever a backend does")
    if not hasattr(os, "fork"):
        raise NotApplicable("this system has no fork")

    def body(case: Case) -> None:
        plan, arrays = trial.prepared(case)
        arrays.run(plan, threads=2)
        wrong = _in_child(lambda: trial.arrays(case).run(plan, threads=2))
        if wrong is not None:
            raise Wrong(f"in a child forked after a parallel run: {wrong}")
        trial.arrays(case).run(plan, threads=2)

    trial.each(trial.strategy(Style(data=("sparse", "uniform")), config=True), body, 1 / 30)


def _in_child(work: Callable[[], None]) -> str | None:
    """What went wrong with `work` in a forked child, or None; a child that takes too long is killed."""
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        # Python warns of forking with threads around; whether that works is what is being checked.
        warnings.simplefilter("ignore", DeprecationWarning)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
    if child == 0:
        # Nothing of the parent's may run here on the way out: no handlers, no buffers.
        code = 1
        try:
            work()
            code = 0
        except Wrong as e:
            os.write(writer, str(e).encode()[:4000])
        finally:
            os._exit(code)
    os.close(writer)
    status = _wait(child, FORK_SECONDS)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode(errors="replace")
    if status is None:
        return f"it hung, and was killed after {FORK_SECONDS:g} s"
    if os.WIFSIGNALED(status):
        return f"it died of signal {os.WTERMSIG(status)}"
    if os.WEXITSTATUS(status):
        return said or "it failed"
    return None


def _wait(child: int, seconds: float) -> int | None:
    """The child's exit status, or None if it had to be killed."""
    deadline = time.monotonic() + seconds
    pause = 0.0005
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


# -- what a backend says of itself


@check("declaration")
def declaration(trial: Trial) -> None:
    """Names, options, plans and refusals have the form that the contract asks for."""
    b = trial.backend
    _declares(b)
    _rejects_bad_config(trial)
    trial.each(
        trial.strategy(Style(data=("sparse",), keep=returns), config=True),
        lambda case: _plan_is_sound(trial, case),
        1 / 3,
    )


def _declares(b: Backend) -> None:
    c = b.capabilities
    facts = {
        f"contract must be {CONTRACT_VERSION}": b.contract == CONTRACT_VERSION,
        "name must be a word": isinstance(b.name, str) and bool(re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", b.name)),
        "summary must be a line of text": isinstance(b.summary, str) and bool(b.summary.strip()) and "\n" not in b.summary,
        "builds_on must be None or a name": b.builds_on is None or isinstance(b.builds_on, str),
        "capabilities must name input, sum and output types": all((c.input_dtypes, c.sum_dtypes, c.out_dtypes)),
        "capabilities must name known types": {*c.input_dtypes, *c.sum_dtypes, *c.out_dtypes}
        <= {*EVERYTHING.input_dtypes, *EVERYTHING.sum_dtypes, *EVERYTHING.out_dtypes},
        "capabilities must name known boundaries": set(c.boundaries) <= set(boundary.MODES),
        "unavailable() must give None or a sentence": b.unavailable() is None,
    }  # fmt: skip
    for name, option in b.options.items():
        facts[f"option {name!r} must have a summary"] = bool(option.summary.strip())
        facts[f"option {name!r} must allow its default"] = (
            option.default is None or option.check(name, option.default) == option.default
        )
    for fact, holds in facts.items():
        if not holds:
            raise Wrong(fact)


def _rejects_bad_config(trial: Trial) -> None:
    b = trial.backend
    types = next(iter(next(iter(strategies.type_table(b.capabilities).values())).values()))[0]
    c = b.capabilities
    kh, kw = c.filter_sizes[0] if c.filter_sizes else (max(3, least) for least in c.least_filter)
    channels, outputs, groups = c.least_layer
    case = Case(
        x_shape=(1, channels, kh + 4, kw + 4), w_shape=(outputs, channels // groups, kh, kw), groups=groups,
        x_dtype=types.x, w_dtype=types.w, dtype=types.dtype, overflow=types.overflow,
    )  # fmt: skip
    layouts = trial.arrays(case).layouts()
    device = Device(b.capabilities.device, 0)

    def planned(config: Any, device: Device = device) -> Any:
        return b.plan(case.problem, layouts, device, config)

    bad: list[tuple[Any, type[Exception], str]] = [
        ({"no such option": 1}, ValueError, "an unknown key"),
        (3, TypeError, "a config that is no mapping"),
    ]
    bad += [({name: object()}, ValueError, f"a wrong value for {name!r}") for name in b.options]
    for config, error, what in bad:
        try:
            planned(config)
        except error as e:
            if isinstance(config, dict) and next(iter(config)) not in str(e):
                raise Wrong(f"{what} in config raised {error.__name__}, which doesn't name it: {e}") from e
            continue
        except Exception as e:
            raise Wrong(f"{what} in config raised {type(e).__name__}, not {error.__name__}: {e}") from e
        raise Wrong(f"{what} in config was accepted; it must be a {error.__name__}")
    if device.kind == "cpu" and not isinstance(planned(None, Device("gpu", 0)), Refusal):
        raise Wrong("arrays on a GPU must be refused; nothing is downloaded unasked")


def _plan_is_sound(trial: Trial, case: Case) -> None:
    plan, arrays = trial.prepared(case)
    facts = {
        "problem must be the one asked for": plan.problem == case.problem,
        "config must be a mapping with every option": isinstance(plan.config, Mapping)
        and set(plan.config) == set(trial.backend.options),
        "launch must be a mapping": isinstance(plan.launch, Mapping),
        "paths must be names": isinstance(plan.paths, tuple) and all(isinstance(i, str) for i in plan.paths),
        "paths_run() must be empty before the first run": plan.paths_run() == frozenset(),
        "cost must be None or seconds": plan.cost is None or (math.isfinite(plan.cost) and plan.cost >= 0),
        "str() must work": isinstance(str(plan), str),
        "workspace_bytes() must work without a thread count": plan.workspace_bytes() >= 0,
    }
    again = trial.backend.plan(case.problem, arrays.layouts(), arrays.device, plan.config)
    facts["config, given back, must give the same plan"] = not isinstance(again, Refusal) and dict(
        again.config
    ) == dict(plan.config)
    for t in plan.thresholds:
        facts[f"{t} must have a known axis and a positive value"] = t.axis in (
            "oh", "ow", "oc", "n", "c", "macs",
        ) and t.value >= 1  # fmt: skip
        facts[f"{t} must name its path"] = isinstance(t.path, str) and bool(t.path)
    for fact, holds in facts.items():
        if not holds:
            raise Wrong(f"the plan's {fact}")
    arrays.run(plan)
    if not plan.paths_run() <= set(plan.paths):
        raise Wrong(f"paths_run() gives {sorted(plan.paths_run())}, the plan declares {sorted(plan.paths)}")
    if case.problem.outputs and plan.paths and not plan.paths_run():
        raise Wrong("no path was run, and yet there are outputs")
