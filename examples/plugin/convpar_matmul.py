"""The backend ``np-matmul``: a strip of output rows is one matrix product.

It builds on the reference ``numpy``. Its one idea: the patches under a few rows of outputs become the
columns of a matrix, so that a product with the filters, as rows of another, gives those outputs (im2col).
What limits it: every sample is copied once for each tap that meets it.

A backend has three parts. `Matmul.capabilities` declares what it takes; tests, documents and choosers
read nothing else. `Matmul.plan` decides everything for a problem from shapes and types, or refuses with
a reason. `Strips.run` computes; it may look at values, and only there are any.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from convpar.backend import (
    CONTRACT_VERSION,
    INTEGERS,
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
from convpar.problem import Problem

TYPES = (*INTEGERS, "float32", "float64")


class Strips:
    """The plan for one problem. Threads may run it at once, so `run` keeps its work to itself."""

    cost = None  # no estimate, so a chooser never picks it: callers ask for it by name

    def __init__(self, problem: Problem, config: Config, accuracy: ErrorContract) -> None:
        p = self.problem = problem
        self.config = config
        self.accuracy = accuracy
        self.height: int = config["rows"]
        self.launch: Mapping[str, Any] = {"strip": f"{self.height} rows", "strips": -(-p.oh // self.height)}
        # Tests draw sizes around each threshold and ask afterwards which paths ran.
        self.thresholds = (Threshold("oh", self.height + 1, "second strip"),)
        self.paths = ("strip", "second strip") if p.oh > self.height else ("strip",)
        self._ran: set[str] = set()
        # Which input row stands under tap p of output row i, and so for columns; FILL where none does.
        top, bottom, left, right = p.padding
        self.rows = _under(index_map(p.h, top, bottom, p.boundary), p.oh, p.kh, p.stride[0], p.dilation[0])
        self.columns = _under(index_map(p.w, left, right, p.boundary), p.ow, p.kw, p.stride[1], p.dilation[1])

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """About what NumPy allocates: the patches of a strip, twice, and its outputs."""
        p = self.problem
        outputs: int = min(self.height, p.oh) * p.ow
        return (2 * p.c * p.kh * p.kw + p.oc) * outputs * p.sum_dtype.itemsize

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
        """Fill `out`. Memory, threads and streams are NumPy's affair here."""
        p = self.problem
        depth = p.terms
        filters = w[:, :, ::-1, ::-1] if p.flip else w
        with np.errstate(all="ignore"):  # infinities and NaN are results like others
            filters = filters.astype(p.sum_dtype).reshape(p.groups, p.oc // p.groups, depth)
            start = np.zeros(p.oc, p.sum_dtype) if bias is None else bias.astype(p.sum_dtype)
            for image, result in zip(x, out, strict=True):
                for i in range(0, p.oh, self.height):
                    rows = self.rows[i : i + self.height]
                    patches = self._patches(image, rows).reshape(p.groups, depth, len(rows) * p.ow)
                    sums = (filters @ patches).reshape(p.oc, len(rows), p.ow)
                    result[:, i : i + len(rows)] = sums + start[:, None, None]
                    self._ran.add("second strip" if i else "strip")

    def _patches(self, image: Any, rows: Any) -> Any:
        """(C, KH, KW, rows, OW): the sample that each tap of each output meets, in the type of the sum."""
        p = self.problem
        r, c = rows.T[:, None, :, None], self.columns.T[None, :, None, :]
        patches = image[:, r, c].astype(p.sum_dtype)
        patches[:, (r == FILL) | (c == FILL)] = p.fillvalue
        return patches

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run."""
        return frozenset(self._ran)


def _under(positions: Any, outputs: int, taps: int, stride: int, dilation: int) -> Any:
    """(outputs, taps): the sample under each tap of each output along one axis."""
    return positions[np.arange(outputs)[:, None] * stride + np.arange(taps) * dilation]


class Matmul:
    """The backend itself: a name, a declaration and a way to a plan."""

    contract = CONTRACT_VERSION
    name = "np-matmul"
    summary = "a strip of output rows is one matrix product, in NumPy"
    builds_on = "numpy"
    capabilities = Capabilities(
        input_dtypes=("bool", *TYPES),
        sum_dtypes=TYPES,
        out_dtypes=TYPES,
        # It writes its sums as they are: rounding, clipping and checking for overflow are left to others.
        sum_is_output=True,
        error=ErrorContract("elementwise"),
    )
    options: Mapping[str, Option] = {"rows": Option("output rows of a strip", default=8, kind="int")}

    def unavailable(self) -> str | None:
        """It runs wherever NumPy does."""
        return None

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """A plan, or why there is none. NumPy takes every layout, so `layouts` decides nothing."""
        values = resolve_config(self.options, config, self.name)
        if device.kind != "cpu":
            return Refusal(f"the arrays live on {device}; it runs on the CPU")
        refusal = self.capabilities.refusal(problem)
        if refusal is not None:
            return refusal
        if 0 in problem.x_shape or 0 in problem.out_shape:
            return Refusal("there is nothing to multiply: the image or the result is empty")
        return Strips(problem, values, self.capabilities.error)
