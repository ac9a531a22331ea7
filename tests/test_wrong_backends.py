"""The checks, checked: backends that are wrong on purpose, each caught by the check made for its flaw.

Each one wraps the reference, which passes the same check.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the oracle is SciPy: pip install 'convpar[test]'")
pytest.importorskip("hypothesis", reason="problems are drawn by Hypothesis: pip install 'convpar[test]'")

from convpar import registry
from convpar.backend import Capabilities, ErrorContract, Option, Refusal, Threshold, resolve_config
from convpar.backends import reference
from convpar.conformance import Outcome, contract, oracle, run_check
from convpar.problem import is_integer

RIGHT = registry.find("numpy")


class WrongPlan:
    """The reference's plan with whatever its backend changes."""

    def __init__(self, backend: WrongBackend, inner: Any, config: Mapping[str, Any]) -> None:
        self.backend, self.inner = backend, inner
        self.problem, self.config, self.launch = inner.problem, config, inner.launch
        self.accuracy, self.cost = backend.capabilities.error, None
        self.thresholds = backend.thresholds(config)
        self.paths = (*inner.paths, *(t.path for t in self.thresholds))
        self.memory: dict[str, Any] = {}

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        return 64

    def run(
        self,
        x: Any,
        w: Any,
        bias: Any,
        out: Any,
        *,
        workspace: Any = None,
        num_threads: int | None = None,
        stream: Any = None,
    ) -> None:
        self.backend.run(self, x, w, bias, out, workspace, num_threads)

    def paths_run(self) -> frozenset[str]:
        return self.inner.paths_run()


class WrongBackend:
    """A wrapper of the reference that changes nothing; what derives from it has one flaw."""

    contract = RIGHT.contract
    name = "wrong"
    summary = "the reference with one flaw"
    builds_on = "numpy"
    capabilities = RIGHT.capabilities
    options: ClassVar[Mapping[str, Option]] = {}

    def unavailable(self) -> str | None:
        return None

    def thresholds(self, config: Mapping[str, Any]) -> tuple[Threshold, ...]:
        return ()

    def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
        chosen = resolve_config(self.options, config, self.name)
        refusal = self.capabilities.refusal(problem)
        inner = refusal or RIGHT.plan(problem, layouts, device, None)
        return inner if isinstance(inner, Refusal) else WrongPlan(self, inner, chosen)

    def run(
        self, plan: Any, x: Any, w: Any, bias: Any, out: Any, workspace: Any, threads: int | None
    ) -> None:
        plan.inner.run(x, w, bias, out)

    def with_problem(self, plan: Any, problem: Any, x: Any, w: Any, bias: Any, out: Any) -> None:
        """Answer another problem than the one asked."""
        reference.ReferencePlan(problem, self.capabilities.error).run(x, w, bias, out)
        plan.inner._ran = True


# -- wrong answers


class BorderOffByOne(WrongBackend):
    """mirror repeats the edge sample."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        boundary = {"mirror": "symm"}.get(plan.problem.boundary, plan.problem.boundary)
        self.with_problem(plan, replace(plan.problem, boundary=boundary), x, w, bias, out)


class FlipIgnored(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        self.with_problem(plan, replace(plan.problem, flip=False), x, w, bias, out)


class BiasIgnored(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, None, out)


class WritesAnotherType(WrongBackend):
    """Floats are stored as the integers of their size, and the other way round."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        y = np.empty(out.shape, plan.problem.out_dtype)
        plan.inner.run(x, w, bias, y)
        size = y.dtype.itemsize
        other = f"f{size}" if is_integer(y.dtype) and size > 1 else f"i{size}"
        if size <= 8:
            with np.errstate(all="ignore"):
                y = y.astype(other).view(y.dtype)
        out[...] = y


class SumsInTheFiltersType(WrongBackend):
    """An image of uint8 and a filter of int8 are summed in int8."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        p = plan.problem
        narrow = p.w_dtype if is_integer(p.w_dtype) and is_integer(p.sum_dtype) else p.sum_dtype
        self.with_problem(plan, replace(p, sum_dtype=narrow), x, w, bias, out)


class SumsInHalf(WrongBackend):
    """float16 is summed in float16."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        p = plan.problem
        half = np.dtype(np.float16)
        narrow = half if p.x_dtype == p.w_dtype == p.out_dtype == half else p.sum_dtype
        self.with_problem(plan, replace(p, sum_dtype=narrow), x, w, bias, out)


class NoisyFft(WrongBackend):
    """Errors as of an FFT, as large everywhere as the plane's brightest spot warrants, claimed elementwise."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if plan.problem.sum_dtype == plan.problem.out_dtype == np.float32 and out.size:
            peak = np.abs(out).max(axis=(2, 3), keepdims=True, initial=0, where=np.isfinite(out))
            noise = peak * np.float32(2.0**-23)
            noise[noise < 1e-30] = 0
            out[..., ::2] += noise


class HonestFft(NoisyFft):
    """The same errors under the contract that they keep."""

    capabilities = replace(
        RIGHT.capabilities, error=ErrorContract("normwise", factor=4.0), input_dtypes=("float32",)
    )


class ZeroStuffing(WrongBackend):
    """A dilated filter is filled up with zeros, which meet infinities."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        p = plan.problem
        stuffed = np.zeros((*w.shape[:2], *p.extent), w.dtype)
        stuffed[:, :, :: p.dilation[0], :: p.dilation[1]] = w
        dense = replace(p, kh=p.extent[0], kw=p.extent[1], dilation=(1, 1))
        self.with_problem(plan, dense, x, stuffed, bias, out)


class SkipsZeros(WrongBackend):
    """Weights of zero are skipped, and 0 * inf with them."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        p = plan.problem
        given = oracle.operands(p, np.array(x), np.array(w), bias)
        seen = oracle.windows(p, given.x)[:, :, None] if p.outputs else np.zeros(0)
        if not (p.outputs and p.terms):
            plan.inner.run(x, w, bias, out)
            return
        taps = given.w.reshape(p.groups, -1, p.c // p.groups, 1, 1, p.kh, p.kw)
        with np.errstate(all="ignore"):
            sums = np.where(taps == 0, p.sum_dtype.type(0), seen * taps).sum(
                axis=(3, 6, 7), dtype=p.sum_dtype
            )
            sums = sums.reshape(p.out_shape) + given.bias[None, :, None, None]
        out[...] = reference.convert(sums, p)
        plan.inner._ran = True


class FlushesSubnormals(WrongBackend):
    """Subnormal samples count as zero, and it doesn't say so."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        if x.dtype.kind == "f" and x.dtype.itemsize == 4:
            x = np.where(np.abs(x) < np.finfo(np.float32).tiny, np.float32(0), x)
        plan.inner.run(x, w, bias, out)


class HonestFlush(FlushesSubnormals):
    capabilities = replace(RIGHT.capabilities, error=ErrorContract(flushes_subnormals=True))


class SaturateWraps(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        p = plan.problem
        wraps = p.overflow == "saturate" and is_integer(p.sum_dtype)
        self.with_problem(plan, replace(p, overflow="wrap") if wraps else p, x, w, bias, out)


class RoundsHalfUp(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        p = plan.problem
        if not is_integer(p.out_dtype) or is_integer(p.sum_dtype):
            plan.inner.run(x, w, bias, out)
            return
        sums = reference.correlate(p, x, w, bias)
        with np.errstate(all="ignore"):
            out[...] = reference.convert(np.floor(sums + 0.5), p)
        plan.inner._ran = True


class NamesTheLastPlace(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        try:
            plan.inner.run(x, w, bias, out)
        except OverflowError:
            last = tuple(n - 1 for n in out.shape)
            raise OverflowError(f"the sum at {last} doesn't fit") from None


class RaisesNothing(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        self.with_problem(plan, replace(plan.problem, overflow="saturate"), x, w, bias, out)


class ByteOrderIgnored(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x.view(x.dtype.newbyteorder("=")), w, bias, out)


class StridesIgnored(WrongBackend):
    """The image is read as if it were contiguous from its first element on, where that stays inside it."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        if x.size and min(x.strides) > 0:
            x = np.lib.stride_tricks.as_strided(x, strides=np.empty(x.shape, x.dtype).strides)
        plan.inner.run(x, w, bias, out)


class Tiled(WrongBackend):
    """Right, with a tile that can be set and a path for the tiles after the first."""

    options: ClassVar[Mapping[str, Option]] = {"tile": Option("columns of a tile", default=200, kind="int")}

    def thresholds(self, config):
        return (Threshold("ow", config["tile"] + 1, "second tile"),)

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if out.shape[3] > plan.config["tile"]:
            plan.memory["second tile"] = True

    def plan(self, problem, layouts, device, config):
        made = super().plan(problem, layouts, device, config)
        if not isinstance(made, Refusal):
            made.paths_run = lambda: frozenset(made.memory) | made.inner.paths_run()
        return made


class WrongInTheThirdTile(Tiled):
    def run(self, plan, x, w, bias, out, workspace, threads):
        super().run(plan, x, w, bias, out, workspace, threads)
        out[..., 2 * plan.config["tile"] :] = 0


class PathNeverTaken(WrongBackend):
    """Declares a path that nothing reaches."""

    def thresholds(self, config):
        return (Threshold("ow", 40, "streaming"),)


class IgnoresConfig(Tiled):
    """Takes a tile and plans with its own."""

    def plan(self, problem, layouts, device, config):
        resolve_config(self.options, config, self.name)
        return super().plan(problem, layouts, device, None)


# -- outside what it can do


class CrashesOutside(WrongBackend):
    capabilities = Capabilities()

    def plan(self, problem, layouts, device, config):
        _ = {"float32": 4, "float64": 8}[problem.x_dtype.name] if problem.x_dtype.itemsize > 8 else None
        return super().plan(problem, layouts, device, config)


class WrongOutside(WrongBackend):
    """Says that it takes one channel, and answers for several as if there were one."""

    capabilities = replace(RIGHT.capabilities, strided=False)

    def plan(self, problem, layouts, device, config):
        inner = RIGHT.plan(problem, layouts, device, None)
        return inner if isinstance(inner, Refusal) else WrongPlan(self, inner, {})

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if plan.problem.stride != (1, 1):
            out[...] = 0


class RefusesWithoutReason(WrongBackend):
    capabilities = Capabilities()

    def plan(self, problem, layouts, device, config):
        refused = self.capabilities.refusal(problem)
        return Refusal(" ") if refused else super().plan(problem, layouts, device, config)


class RefusesEverything(WrongBackend):
    def plan(self, problem, layouts, device, config):
        return Refusal("not in the mood")


# -- what a run touches


class LeavesOneOut(WrongBackend):
    """The last element is never written."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        if not out.size:
            return
        last = out[-1, -1, -1, -1].tobytes()
        plan.inner.run(x, w, bias, out)
        out[-1, -1, -1, -1] = np.frombuffer(last, out.dtype)[0]


class WritesBeside(WrongBackend):
    """One byte before the output."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if out.size:
            ctypes.memset(np.lib.array_utils.byte_bounds(out)[0] - 1, 0, 1)


class ChangesItsInput(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if x.size and x.flags.writeable:
            first = (0,) * x.ndim
            x[first] = 0 if x[first] != 0 else 1


class ChangesItsFilter(WrongBackend):
    """Turns the filter round in place."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if w.flags.writeable:
            w[...] = w[:, :, ::-1, ::-1].copy()


# -- runs repeat


class RemembersTheFilter(WrongBackend):
    """The prepared filter is kept by the address of the filter given."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        kept = plan.memory.setdefault(w.ctypes.data, w.copy())
        plan.inner.run(x, kept, bias, out)


class OtherBitsEachTime(WrongBackend):
    """One element moves by one unit in the last place, one time and not the next."""

    _turn = itertools.count()

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if out.dtype == np.float32 and out.size and next(self._turn) % 2:
            out[0, 0, 0, 0] = np.nextafter(out[0, 0, 0, 0], np.float32(0))


class WrongWithTwoThreads(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if threads == 2:
            out[:, :, out.shape[2] // 2 :] = 0


class OverrunsItsWorkspace(WrongBackend):
    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if workspace is not None:
            ctypes.memset(workspace.ctypes.data + workspace.nbytes, 0, 1)


class TrustsItsWorkspace(WrongBackend):
    """Takes for granted that the workspace begins with the byte that it found there first."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if workspace is not None and workspace[0] != 0xFF and out.size:
            out[0] = 0


class SharesItsScratch(WrongBackend):
    """Concurrent runs of one plan overwrite each other's data."""

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.memory["x"] = x
        time.sleep(0.0005)
        plan.inner.run(plan.memory["x"], w, bias, out)


class HangsAfterFork(WrongBackend):
    _process = os.getpid()

    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        while os.getpid() != self._process:
            time.sleep(0.01)


class DiesAfterFork(HangsAfterFork):
    def run(self, plan, x, w, bias, out, workspace, threads):
        plan.inner.run(x, w, bias, out)
        if os.getpid() != self._process:
            os.kill(os.getpid(), signal.SIGKILL)


# -- what it says of itself


class TakesAnyConfig(WrongBackend):
    def plan(self, problem, layouts, device, config):
        return super().plan(problem, layouts, device, None)


class DownloadsSilently(WrongBackend):
    def plan(self, problem, layouts, device, config):
        return super().plan(problem, layouts, type(device)("cpu", 0), config)


WRONG_SUMS = "elements are wrong|the OverflowError names"
"""Of sums that are wrong some may be found first that don't fit, or fit where the right ones don't."""

CAUGHT = [
    (BorderOffByOne, "agrees-with-scipy", WRONG_SUMS),
    (FlipIgnored, "agrees-with-scipy", WRONG_SUMS),
    (BiasIgnored, "agrees-with-scipy", WRONG_SUMS),
    (WritesAnotherType, "agrees-with-scipy", "elements are wrong"),
    (RefusesEverything, "agrees-with-scipy", "refused .* inside its own capabilities.*not in the mood"),
    (SumsInTheFiltersType, "sum-types", "elements are wrong"),
    (SumsInHalf, "error-bound", "elements are wrong"),
    (NoisyFft, "error-bound", "elements are wrong"),
    (ZeroStuffing, "special-values", WRONG_SUMS),
    (SkipsZeros, "special-values", "allowed is NaN"),
    (FlushesSubnormals, "subnormals", "elements are wrong"),
    (SaturateWraps, "conversions", "elements are wrong"),
    (RoundsHalfUp, "conversions", "elements are wrong"),
    (NamesTheLastPlace, "overflow-raise", "names .* comes first|names .* where the sum fits"),
    (RaisesNothing, "overflow-raise", "nothing was raised"),
    (ByteOrderIgnored, "memory-layouts", "elements are wrong"),
    (StridesIgnored, "memory-layouts", "elements are wrong"),
    (WrongInTheThirdTile, "around-thresholds", "elements are wrong"),
    (PathNeverTaken, "around-thresholds", "'streaming' is declared and was never run"),
    (IgnoresConfig, "options", "config.*'tile'.* was"),
    (CrashesOutside, "outside-capabilities", "plan raised KeyError"),
    (WrongOutside, "outside-capabilities", "elements are wrong"),
    (RefusesWithoutReason, "outside-capabilities", "refused without a reason"),
    (LeavesOneOut, "writes-every-element", "never written"),
    (WritesBeside, "writes-nothing-else", "outside the output's elements"),
    (ChangesItsInput, "inputs-untouched", "changed its input x"),
    (ChangesItsFilter, "inputs-untouched", "changed its input w"),
    (RemembersTheFilter, "plans-hold-no-values", "after the inputs were overwritten in place"),
    (OtherBitsEachTime, "same-bits", "gave other bits"),
    (WrongWithTwoThreads, "same-bits", "num_threads=2 gave other bits"),
    (WrongWithTwoThreads, "thread-counts", "with num_threads=2"),
    (OverrunsItsWorkspace, "workspace", "outside its workspace of 64 bytes"),
    (TrustsItsWorkspace, "workspace", "depends on what the workspace held before|elements are wrong"),
    (SharesItsScratch, "concurrent-callers", "with four callers at once"),
    (HangsAfterFork, "after-fork", "it hung, and was killed"),
    (DiesAfterFork, "after-fork", "it died of signal 9"),
    (TakesAnyConfig, "declaration", "an unknown key in config was accepted"),
    (DownloadsSilently, "declaration", "arrays on a GPU must be refused"),
]

NOT_CAUGHT = [
    # A right wrapper, and honest claims, pass where the flaw would show.
    (Tiled, "around-thresholds"),
    (Tiled, "options"),
    (HonestFft, "error-bound"),
    (HonestFlush, "subnormals"),
    # A flaw shows in its own check, not by chance in the first.
    (ZeroStuffing, "agrees-with-scipy"),
    (SkipsZeros, "agrees-with-scipy"),
    (WrongInTheThirdTile, "agrees-with-scipy"),
    (WrongWithTwoThreads, "agrees-with-scipy"),
    (ByteOrderIgnored, "agrees-with-scipy"),
    (StridesIgnored, "agrees-with-scipy"),
]


def _outcome(backend: Any, check: str) -> Outcome:
    # What fails is looked at, not how small it can be made.
    return run_check(backend, check, shrink=False)


@functools.cache
def _right(check: str) -> Outcome:
    return _outcome(Tiled() if check == "options" else RIGHT, check)


@pytest.mark.parametrize(("flaw", "check", "reason"), CAUGHT, ids=[f"{f.__name__}-{c}" for f, c, _ in CAUGHT])
def test_caught(flaw: type[WrongBackend], check: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "FORK_SECONDS", 1.0)
    found = _outcome(flaw(), check)
    assert found.status == "failed"
    assert re.search(reason, found.message), found.message
    right = _right(check)
    assert right.status == "passed", right.message


@pytest.mark.parametrize(("flaw", "check"), NOT_CAUGHT, ids=[f"{f.__name__}-{c}" for f, c in NOT_CAUGHT])
def test_not_caught_by_chance(flaw: type[WrongBackend], check: str) -> None:
    found = _outcome(flaw(), check)
    assert found.status == "passed", found.message
