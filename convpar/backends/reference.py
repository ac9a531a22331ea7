"""The backend ``numpy``: the whole spec as readable NumPy, one line an idea; no speed claims."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from convpar.backend import (
    CONTRACT_VERSION,
    Backend,
    Capabilities,
    Config,
    Device,
    ErrorContract,
    Layouts,
    Option,
    Plan,
    Refusal,
    Threshold,
    resolve_config,
)
from convpar.boundary import FILL, index_map
from convpar.problem import Problem, is_integer

Array = npt.NDArray[Any]

# Where longdouble is double, as with MSVC, these are names already taken.
_EXTENDED = tuple(
    name
    for name in (np.dtype(np.longdouble).name, np.dtype(np.clongdouble).name)
    if name not in Capabilities().input_dtypes
)


def correlate(problem: Problem, x: Array, w: Array, bias: Array | None) -> Array:
    """The sums of `problem`, in its sum type, before conversion to the output type.

    `x` is (N, C, H, W), `w` (OC, C/groups, KH, KW), `bias` (OC,); the result is (N, OC, OH, OW).
    """
    p = problem
    top, bottom, left, right = p.padding
    rows = index_map(p.h, top, bottom, p.boundary)
    columns = index_map(p.w, left, right, p.boundary)
    w = w.astype(p.sum_dtype)
    if p.flip:
        w = w[:, :, ::-1, ::-1]
    w = w.reshape(p.groups, p.oc // p.groups, p.c // p.groups, p.kh, p.kw)
    y = np.zeros((p.n, p.groups, p.oc // p.groups, p.oh, p.ow), p.sum_dtype)
    with np.errstate(all="ignore"):
        if bias is not None:
            y += bias.astype(p.sum_dtype).reshape(1, p.groups, -1, 1, 1)
        for i in range(p.kh):
            for j in range(p.kw):
                # The samples that tap (i, j) meets, one for each output.
                r = rows[i * p.dilation[0] :][: (p.oh - 1) * p.stride[0] + 1 : p.stride[0]]
                c = columns[j * p.dilation[1] :][: (p.ow - 1) * p.stride[1] + 1 : p.stride[1]]
                seen = _gather(x, r[: p.oh], c[: p.ow], p)
                seen = seen.reshape(p.n, p.groups, p.c // p.groups, p.oh, p.ow)
                for k in range(p.c // p.groups):
                    y += seen[:, :, None, k] * w[None, :, :, k, i, j, None, None]
    return y.reshape(p.out_shape)


def _gather(x: Array, rows: Array, columns: Array, p: Problem) -> Array:
    """`x` at `rows` and `columns` in the sum type, the fill value where the map says so."""
    outside = (rows == FILL)[:, None] | (columns == FILL)
    if outside.all():
        return np.full((p.n, p.c, p.oh, p.ow), p.fillvalue, p.sum_dtype)
    seen = x[:, :, rows[:, None], columns].astype(p.sum_dtype)
    seen[:, :, outside] = p.fillvalue
    return seen


def convert(sums: Array, problem: Problem) -> Array:
    """Sums in the output type, under the problem's overflow rule.

    Raises
    ------
    OverflowError
        ``overflow="raise"`` and a sum is outside the output type or NaN; names the first place.
    """
    out = problem.out_dtype
    if not is_integer(out):
        with np.errstate(all="ignore"):
            return sums.astype(out)
    limits = np.iinfo(out)
    if is_integer(sums.dtype):
        if problem.overflow == "wrap":
            return sums.astype(out)
        fits = (sums >= limits.min) & (sums <= limits.max)
        clipped = np.clip(sums, max(limits.min, np.iinfo(sums.dtype).min), limits.max)
    else:
        whole = np.rint(sums)
        # The largest integer may not be a float: compare with the power of two above it.
        fits = (whole >= limits.min) & (whole < 2.0 ** (limits.bits - (limits.min < 0)))
        clipped = np.where(fits, whole, 0)
    if problem.overflow == "raise" and not fits.all():
        place = tuple(int(i) for i in np.argwhere(~fits)[0])
        raise OverflowError(
            f"the result doesn't fit {out}: the first place is {place} (n, oc, row, column), "
            f"where the sum is {sums[place]}"
        )
    y = clipped.astype(out)
    if not is_integer(sums.dtype):
        # wrap and saturate agree here: beyond the ends clips, NaN gives 0.
        y[whole >= 2.0 ** (limits.bits - (limits.min < 0))] = limits.max
        y[whole < limits.min] = limits.min
    return y


class ReferencePlan:
    """A `convpar.backend.Plan` that has nothing to decide."""

    launch: Mapping[str, Any] = {"method": "one NumPy product per filter tap and channel"}
    thresholds: tuple[Threshold, ...] = ()
    paths = ("taps",)
    cost = None

    def __init__(self, problem: Problem, accuracy: ErrorContract) -> None:
        self.problem = problem
        self.config: Config = {}
        self.accuracy = accuracy
        self._ran = False

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """NumPy allocates what it needs: gathered samples, their product, and the sums."""
        p = self.problem
        gathered = p.n * p.c * p.oh * p.ow
        return (gathered + 3 * p.outputs) * p.sum_dtype.itemsize

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
        """Fill `out`; workspace, threads and stream play no part."""
        out[...] = convert(correlate(self.problem, x, w, bias), self.problem)
        self._ran = True

    def paths_run(self) -> frozenset[str]:
        """The one path, once it ran."""
        return frozenset(self.paths) if self._ran else frozenset()


class Reference:
    """The backend ``numpy``."""

    contract = CONTRACT_VERSION
    name = "numpy"
    summary = "the readable reference: the whole spec, one NumPy product per tap"
    builds_on = None
    options: Mapping[str, Option] = {}
    capabilities = Capabilities(
        input_dtypes=(*Capabilities().input_dtypes, *_EXTENDED),
        sum_dtypes=(*Capabilities().sum_dtypes, *_EXTENDED),
        out_dtypes=(*Capabilities().out_dtypes, *_EXTENDED),
    )

    def unavailable(self) -> str | None:
        """It runs wherever NumPy does."""
        return None

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """Always a plan, unless the arrays live elsewhere or a type is unknown."""
        resolve_config(self.options, config, self.name)
        if device.kind != "cpu":
            return Refusal(f"the arrays live on {device}; it runs on the CPU and downloads nothing unasked")
        return self.capabilities.refusal(problem) or ReferencePlan(problem, self.capabilities.error)

    def source(self) -> tuple[tuple[str, str], ...]:
        """(file name, text) of what computes."""
        return (("reference.py", inspect.getsource(sys.modules[__name__])),)


def backends() -> list[Backend]:
    """The rows of the family."""
    return [Reference()]
