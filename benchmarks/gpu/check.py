"""Is every element of a timed answer right? Held against float64 sums that are made on the device.

Those sums come from gpu-naive in float64. That they are right is seen on some images, which the ``numpy`` backend
computes in float64 on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

import convpar
from convpar import registry
from convpar.backend import Device, ErrorContract, Layout, Layouts, Plan, Refusal
from convpar.cases import Case
from convpar.problem import Problem, is_integer

from .device import Place

Array = np.ndarray[Any, Any]

HOST_MACS = 10**9
"""How much the host computes for itself: whole images, as many as fit, at least one."""

SLICE_BYTES = 2**28
"""float64 sums that are on the device at a time."""

_UNITS = {"float16": (2.0**-11, 2.0**-14), "bfloat16": (2.0**-8, 2.0**-126), "tf32": (2.0**-11, 2.0**-126)}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes
    ----------
    reason : str
        What is wrong, and where first; empty if nothing is.
    worst : float
        The largest error over the bound of the contract, among those that keep it; 0 where the answer must be equal.
    """

    reason: str
    worst: float


class Judge:
    """The right answer to a case.

    Parameters
    ----------
    case : Case
        Its border is "valid": what the studies need.
    x, w : ndarray
        The arrays on the host.
    place : Place

    Attributes
    ----------
    x : array
        The image on the device.

    Raises
    ------
    RuntimeError
        The sums made on the device differ from those of the host.
    """

    def __init__(self, case: Case, x: Array, w: Array, place: Place) -> None:
        self.problem = case.problem()
        self._place = place
        xp = place.xp
        self.x = xp.asarray(x)
        self._w = xp.asarray(w.astype(np.float64))
        p = self.problem
        self._images = max(min(SLICE_BYTES // max(8 * p.oc * p.oh * p.ow, 1), p.n), 1)
        self._options = dict(case.options)
        self._plans: dict[int, Plan] = {}
        self._compare_with_host(x, w.astype(np.float64))

    # -- the reference

    def _compare_with_host(self, x: Array, w: Array) -> None:
        p = self.problem
        count = max(min(HOST_MACS // max(p.macs // p.n, 1), p.n, 6), 1)
        # The first, the last and some between.
        chosen = np.unique(np.linspace(0, p.n - 1, count).astype(int)) if count > 1 else np.array([p.n - 1])
        for n in chosen:
            one = x[n : n + 1].astype(np.float64)
            right = convpar.conv2d(one, w, backend="numpy", **self._options)
            size = convpar.conv2d(np.abs(one), np.abs(w), backend="numpy", **self._options)
            got = self._place.to_host(self._correlated(self._place.xp.asarray(one), self._w))
            # Both are float64 sums in some order.
            allowed = 2 * (p.terms + 2) * 2.0**-53 * size
            if not (np.abs(got - right) <= allowed).all():
                raise RuntimeError(
                    f"gpu-naive in float64 is wrong in image {n} of {p}: there is nothing to check against"
                )

    def _correlated(self, x: Any, w: Any) -> Any:
        """float64 sums of `x` and `w` on the device."""
        plan = self._plans.get(len(x)) or self._plan(x, w)
        self._plans[len(x)] = plan
        out = self._place.xp.empty(plan.problem.out_shape, np.float64)
        plan.run(x, w, None, out)
        return out

    def _plan(self, x: Any, w: Any) -> Plan:
        problem = Problem.of(x.shape, w.shape, x.dtype, w.dtype, **self._options)
        naive = registry.find("gpu-naive")
        assert naive is not None
        plan = naive.plan(problem, layouts_of(problem, x, w), device_of(self._place), None)
        if isinstance(plan, Refusal):
            raise RuntimeError(f"gpu-naive refuses {problem}: {plan.reason}")
        return plan

    def _slices(self, out: Any) -> Iterator[tuple[int, Any, Any, Any]]:
        """(first image, answer, sums, sums of magnitudes), some images at a time, all on the device."""
        xp = self._place.xp
        for first in range(0, self.problem.n, self._images):
            last = min(first + self._images, self.problem.n)
            x = self.x[first:last].astype(xp.float64)
            sums = self._correlated(x, self._w)
            sizes = self._correlated(xp.abs(x), xp.abs(self._w))
            yield first, xp.asarray(out[first:last]).astype(xp.float64), sums, sizes

    # -- judging

    def judge(self, out: Any, contract: ErrorContract) -> Verdict:
        """Hold every element of `out`, on the device or the host, against the reference.

        Integers must be equal, floats obey `contract`; an element that was never written is wrong.
        """
        p, xp = self.problem, self._place.xp
        worst = 0.0
        for first, got, sums, sizes in self._slices(out):
            error = xp.abs(got - sums)
            if is_integer(p.sum_dtype):
                wrong = error != 0
            else:
                allowed = self._allowed(sizes, contract)
                # NaN, as poison is, fails every comparison.
                wrong = ~(error <= allowed)
            if bool(wrong.any()):
                at = tuple(int(i) for i in np.unravel_index(int(xp.argmax(wrong)), wrong.shape))
                place = (first + at[0], *at[1:])
                reason = f"element {place} is {float(got[at])!r}, and should be {float(sums[at])!r}"
                return Verdict(f"{int(wrong.sum())} elements are wrong: {reason}", worst)
            if not is_integer(p.sum_dtype):
                worst = max(worst, float((error / allowed).max()))
        return Verdict("", worst)

    def _allowed(self, sizes: Any, contract: ErrorContract) -> Any:
        """(K + 2) u conv(|x|, |w|) + K times the smallest number, with the sum's own u, and what else is published."""
        p = self.problem
        info = np.finfo(p.sum_dtype)
        unit, smallest = float(info.eps) / 2, float(info.tiny)
        if contract.sum_dtype is not None:
            unit, smallest = _UNITS[contract.sum_dtype]
        if contract.kind == "normwise":
            sizes = contract.factor * sizes.max(axis=(2, 3), keepdims=True)
        rounding = 0.0
        if contract.operand_dtype is not None:
            # Both factors of each product move by a share of at most this; see `ErrorContract` for the 2.
            share, tiny = _UNITS[contract.operand_dtype]
            unit, rounding, smallest = 2 * unit, (1 + share) ** 2 - 1, max(smallest, tiny)
        allowed = ((p.terms + 2) * unit + rounding) * sizes + p.terms * smallest
        if p.out_dtype.itemsize < p.sum_dtype.itemsize:
            # A narrower result adds its own rounding.
            allowed = allowed + sizes * float(np.finfo(p.out_dtype).eps) / 2
        return allowed


def layouts_of(problem: Problem, x: Any, w: Any, out: Any = None) -> Layouts:
    """The layouts of a call's arrays; without `out`, those of a new one."""
    fresh = Layout.contiguous(problem.out_shape, problem.out_dtype.itemsize)
    return Layouts(Layout.of(x), Layout.of(w), None, fresh if out is None else Layout.of(out))


def device_of(place: Place) -> Device:
    """The device of arrays in `place`, as plans name it."""
    return Device("gpu", 0 if place.emulated else int(place.xp.cuda.runtime.getDevice()))
