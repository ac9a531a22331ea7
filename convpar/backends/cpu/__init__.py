"""The CPU ladder. Rungs are lines of rungs.inc; this module makes them backends and plans their work.

Everything is decided here, from shapes and types. The compiled `engine` runs it: it is loaded
with the first plan, so listing the rungs costs nothing.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from convpar import threads as _threads
from convpar.backend import (
    CONTRACT_VERSION,
    Backend,
    Capabilities,
    Config,
    Device,
    ErrorContract,
    Layout,
    Layouts,
    Option,
    Plan,
    Refusal,
    Threshold,
    Unavailable,
    resolve_config,
)
from convpar.boundary import border_maps
from convpar.problem import Problem, is_integer

FOLDER = Path(__file__).parent
ISA_VARIABLE = "CONVPAR_ISA"

SERIAL_MACS = 200_000
"""Below this many multiply-accumulates, waking threads costs more than it saves."""

_TILE_COLUMNS = 8192
_TILE_OUTPUTS = 32_768
_STAGE_BYTES = 256 * 1024
_BLOCK = 16


@functools.cache
def _engine() -> ModuleType:
    with _threads.STATE:
        return importlib.import_module(".engine", __name__)


def _missing_engine() -> str | None:
    try:
        _engine()
    except ImportError as e:
        return f"the compiled module convpar.backends.cpu.engine can't be loaded ({e}); install convpar again"
    return None


@functools.cache
def isa() -> str:
    """The ISA level in use: the best that the processor runs, or the one that CONVPAR_ISA names.

    Raises
    ------
    ValueError
        CONVPAR_ISA names a level that this build or processor doesn't have.
    """
    levels: tuple[str, ...] = _engine().isa_levels()
    forced = os.environ.get(ISA_VARIABLE, "").strip()
    if not forced:
        return levels[0]
    if forced not in levels:
        raise ValueError(f"{ISA_VARIABLE} must be one of {', '.join(levels)} on this machine, not {forced!r}")
    return forced


def build_info() -> dict[str, Any]:
    """What the compiled engine was built with and uses: OpenMP, ISA levels, threads."""
    missing = _missing_engine()
    if missing is not None:
        return {"engine": missing}
    engine = _engine()
    return {
        "engine": engine.__file__,
        "OpenMP": engine.OPENMP or "not built in: one thread",
        "ISA levels": engine.isa_levels(),
        "ISA level in use": isa(),
        "processors available": _threads.available(),
    }


def peak_fma(kind: str, num_threads: int, seconds: float = 0.3) -> float:
    """Multiply-accumulates a second in registers, measured at the ISA level in use.

    `kind` is "float32", "float64" or "int32".
    """
    return float(_engine().peak_fma(kind, num_threads, seconds, isa()))


def copy_bandwidth(size: int, num_threads: int, repeats: int = 5) -> float:
    """Bytes read and written a second by threads that copy `size` bytes, the best of `repeats`."""
    return float(_engine().copy_bandwidth(size, num_threads, repeats))


class CpuPlan:
    """A `convpar.backend.Plan` on the compiled engine."""

    def __init__(self, rung: Rung, problem: Problem, layouts: Layouts, config: dict[str, Any]) -> None:
        p = problem
        self.problem = p
        self.accuracy = rung.capabilities.error
        self._isa = isa()
        swapped_or_odd = layouts.x.swapped or not layouts.x.aligned
        stage = swapped_or_odd
        tile, block = _tile(p, config, stage)
        # A sum that can't leave its type needs no rule.
        same = p.sum_dtype == p.out_dtype or (
            p.overflow == "wrap"
            and is_integer(p.sum_dtype)
            and is_integer(p.out_dtype)
            and p.sum_dtype.itemsize == p.out_dtype.itemsize
        )
        convert = not same or layouts.out.swapped or not layouts.out.aligned
        self._task = self._make(rung, layouts, tile, block, convert, stage)
        if self._task.staged and not stage:
            # No kernel loads this pair of types, so the engine gathers it: that needs smaller tiles.
            tile, block = _tile(p, config, True)
            self._task = self._make(rung, layouts, tile, block, convert, True)
        self.config = {"tile": tile, "block": block}
        self.launch: Mapping[str, Any] = {
            "instruction set": _engine().compiled_for(rung.row, self._isa),
            "tile": f"{min(tile[0], p.oh)} x {min(tile[1], p.ow)} outputs",
            "output channels a tile": min(block, max(p.oc // p.groups, 1)),
            "work items": self._task.items,
            "input": "gathered tile by tile" if self._task.staged else "read in place",
            "output": "converted tile by tile" if convert else "written in place",
            "threads": "1" if p.macs < SERIAL_MACS else "all that the call may use",
        }
        self.thresholds = (
            Threshold("oh", tile[0] + 1, "second row tile"),
            Threshold("ow", tile[1] + 1, "second column tile"),
            Threshold("oc", block * p.groups + 1, "second block"),
            *((Threshold("macs", SERIAL_MACS, "parallel"),) if _engine().OPENMP else ()),
        )
        self.paths = self._declare(convert)
        self.cost: float | None = 1e-6 + rung.seconds_per_mac * p.macs
        if self._task.staged or convert:
            self.cost *= 1.5

    def _make(
        self, rung: Rung, layouts: Layouts, tile: tuple[int, int], block: int, convert: bool, stage: bool
    ) -> Any:
        p = self.problem
        top, bottom, left, right = p.padding

        def array(dtype: np.dtype[Any], layout: Layout) -> tuple[str, tuple[int, ...], bool]:
            return "uint8" if dtype.kind == "b" else dtype.name, layout.strides, layout.swapped

        return _engine().Task(
            rung=rung.row,
            isa=self._isa,
            problem=p,
            x=array(p.x_dtype, layouts.x),
            w=array(p.w_dtype, layouts.w),
            bias=None if p.bias_dtype is None or layouts.bias is None else array(p.bias_dtype, layouts.bias),
            y=array(p.out_dtype, layouts.out),
            before_after=(
                *border_maps(p.h, top, bottom, p.boundary),
                *border_maps(p.w, left, right, p.boundary),
            ),
            fill=np.asarray(p.fillvalue).astype(p.sum_dtype).tobytes(),
            tile=tile,
            block=block,
            convert=convert,
            stage=stage,
        )

    def _declare(self, convert: bool) -> tuple[str, ...]:
        p, task = self.problem, self._task
        if not task.items:
            return ()
        rows, columns = task.inner
        blocks, row_tiles, column_tiles = task.tiles
        named = {
            "inside": not task.staged and rows > 0 and columns > 0,
            "border": not task.staged and (rows < p.oh or columns < p.ow),
            "staged": task.staged,
            "converted": convert,
            "second row tile": row_tiles > 1,
            "second column tile": column_tiles > 1,
            "second block": blocks > 1,
            "serial": True,
            "parallel": bool(_engine().OPENMP),
        }
        return tuple(name for name, possible in named.items() if possible)

    def _threads(self, num_threads: int | None) -> int:
        if not _engine().OPENMP:
            return 1
        if num_threads is not None:
            return num_threads
        return 1 if self.problem.macs < SERIAL_MACS else _threads.get_num_threads()

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Packed filters, and each thread's gathered input and unconverted sums."""
        return int(self._task.workspace_bytes(self._threads(num_threads)))

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
        """Fill `out`; `stream` plays no part."""
        bad = self._task.run(x, w, bias, out, workspace, self._threads(num_threads))
        if bad >= 0:
            place = tuple(int(i) for i in np.unravel_index(bad, self.problem.out_shape))
            raise OverflowError(
                f"the result doesn't fit {self.problem.out_dtype}: "
                f"the first place is {place} (n, oc, row, column)"
            )

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run."""
        return frozenset(self._task.paths_run()) & frozenset(self.paths)


def _tile(p: Problem, config: Mapping[str, Any], stage: bool) -> tuple[tuple[int, int], int]:
    """Outputs (rows, columns) and output channels of a work item."""
    block = config["block"] or _BLOCK
    if config["tile"] is not None:
        return config["tile"], block
    columns = max(min(p.ow, _TILE_COLUMNS), 1)
    rows = max(_TILE_OUTPUTS // columns, 1)
    if not stage:
        return (rows, columns), block
    # The gathered input of a tile should stay in a core's cache.
    columns, rows = min(columns, 256), min(rows, 32)
    size = p.c // p.groups * p.sum_dtype.itemsize
    while rows * columns > 1:
        high = (rows - 1) * p.stride[0] + p.extent[0]
        wide = (columns - 1) * p.stride[1] + p.extent[1]
        if high * wide * size <= _STAGE_BYTES:
            break
        rows, columns = (rows, -(-columns // 2)) if columns >= rows else (-(-rows // 2), columns)
    return (rows, columns), block


OPTIONS: Mapping[str, Option] = {
    "tile": Option("outputs (rows, columns) of a work item", kind="pair"),
    "block": Option("output channels of a work item", kind="int"),
}


@dataclass(frozen=True)
class Rung:
    """A line of rungs.inc as a `convpar.backend.Backend`."""

    row: str
    summary: str
    builds_on: str | None
    capabilities: Capabilities
    seconds_per_mac: float

    contract = CONTRACT_VERSION
    options = OPTIONS

    @property
    def name(self) -> str:
        """What callers say."""
        return f"cpu-{self.row}"

    def unavailable(self) -> str | None:
        """It needs the compiled engine."""
        return _missing_engine()

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """A plan, or why the rung can't serve `problem`."""
        options = resolve_config(OPTIONS, config, self.name)
        if device.kind != "cpu":
            return Refusal(f"the arrays live on {device}; it runs on the CPU and downloads nothing unasked")
        refusal = self.capabilities.refusal(problem)
        return refusal or CpuPlan(self, problem, layouts, options)

    def source(self) -> tuple[tuple[str, str], ...]:
        """(file name, text) of the rung's kernel."""
        name = f"kernels/{self.row}.hpp"
        return ((name, (FOLDER / name).read_text(encoding="utf-8")),)

    def assembly(self, problem: Problem | None = None, *, level: str | None = None) -> str:
        """What the compiler made of the rung at an ISA level (the one in use); see `disassembly.assembly`."""
        from . import disassembly

        missing = _missing_engine()
        if missing is not None:
            raise Unavailable(missing)
        return disassembly.assembly(str(_engine().__file__), self.row, level or isa(), problem)


_LINE = re.compile(r'^RUNG\((\w+), (\w+), ([\d ]+), (\w+), ([\d.]+), (\w+), "(.*)"\)$', re.MULTILINE)


def _rung(line: re.Match[str]) -> Rung:
    row, _flags, sizes, output, nanoseconds, before, summary = line.groups()
    filters = tuple((int(k), int(k)) for k in sizes.split() if k != "0")
    return Rung(
        row=row,
        summary=summary,
        builds_on=None if before == "none" else f"cpu-{before}",
        capabilities=Capabilities(
            filter_sizes=filters or None,
            sum_is_output=output == "sum",
            error=ErrorContract("elementwise"),
        ),
        seconds_per_mac=float(nanoseconds) * 1e-9,
    )


@functools.cache
def _rungs() -> tuple[Rung, ...]:
    return tuple(map(_rung, _LINE.finditer((FOLDER / "rungs.inc").read_text(encoding="utf-8"))))


def backends() -> list[Backend]:
    """The rows of the family, slowest first."""
    return list(_rungs())
