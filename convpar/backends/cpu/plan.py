"""A plan of the compiled engine: how a problem falls into work items, and what is gathered, converted and streamed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from convpar import threads as _threads
from convpar.backend import Layout, Layouts, Threshold, check_workspace
from convpar.boundary import border_maps
from convpar.problem import Problem, is_integer

from . import interleaved, items, splitting
from .compiled import engine, isa
from .estimate import Work, direct_seconds, unless_factored
from .splitting import Tiling

if TYPE_CHECKING:
    from .rungs import Rung

SERIAL_MACS = 200_000
"""Below this many multiply-accumulates, waking threads costs more than it saves."""

SERIAL_VECTOR_MACS = 500_000
"""The same for kernels over vectors."""

STREAM_BYTES = 16 * 2**20
"""From this size of the output on, results go past the caches, where they wouldn't stay."""

STREAM_ROW_BYTES = 2048
"""But not in short rows, whose ends share cache lines with what is stored in the usual way."""

STREAM_TAPS = MappingProxyType({("v3", "f"): 9, ("v4", "f"): sys.maxsize, ("v4", "i"): sys.maxsize})
"""And only of filters with so many taps at most, by ISA level, of floating point or integers. Vectors shorter than a cache
line wait for the rest of it: two more steps, which take longer than the way through the caches where arithmetic limits.
Other levels were not measured."""

FAR_BYTES = 22 * 2**20
"""Input and output of so many bytes together come from memory, as measured where processors share a cache of 32 MiB with others;
so do those whose results go past the caches."""

OFF_CORE_BYTES = 4 * 2**20
"""Input and output of so many bytes together don't fit the first and second caches of a core, as far as it matters to kernels
that fetch what the processor doesn't."""


class Gathered(NamedTuple):
    """Which filters of one channel gain by gathering rows of the image that share a set of the first cache.

    Attributes
    ----------
    rows : int
        Of the filter, at least: it meets more of them at once than a set holds.
    one_by_one : bool
        Whether those are meant that cpu-simd meets one row at a time (RowByRow in blocks.h), and no others; or all but those.
    """

    rows: int
    one_by_one: bool


GATHERED = MappingProxyType({"v3": Gathered(7, False), "v4": Gathered(16, True)})
"""By ISA level, where it was measured."""


class CpuPlan:
    """A `convpar.backend.Plan` on the compiled engine."""

    def __init__(
        self,
        rung: Rung,
        problem: Problem,
        layouts: Layouts,
        config: dict[str, Any],
        columns: tuple[Problem, Layouts] | None = None,
    ) -> None:
        """`columns`: what `interleaved` makes of `problem` and `layouts`; config and thresholds are in pixels even so."""
        self.problem = problem
        p, layouts = columns or (problem, layouts)
        # As the engine does it, and how many channels are columns there.
        self._run_as = p
        beside = 1 if columns is None else problem.c
        parted = _parted(layouts.x, p.c), _parted(layouts.out, p.oc)
        across = border_maps(problem.w, *problem.padding[2:], p.boundary)
        self._maps = (
            *border_maps(p.h, *p.padding[:2], p.boundary),
            *(across if columns is None else interleaved.spread(across, beside)),
        )
        asked = config["tile"]
        if asked and columns:
            config = {**config, "tile": (asked[0], min(asked[1], max(problem.ow, 1)) * beside)}
        self.accuracy = rung.capabilities.error
        self._isa = isa()
        gathered = rung.streams and config["tile"] is None and _gathers(rung.row, p, layouts.x, self._isa)
        stage = layouts.x.swapped or not layouts.x.aligned or gathered
        # A sum that can't leave its type needs no rule.
        same = p.sum_dtype == p.out_dtype or (
            p.overflow == "wrap"
            and is_integer(p.sum_dtype)
            and is_integer(p.out_dtype)
            and p.sum_dtype.itemsize == p.out_dtype.itemsize
        )
        convert = not same or layouts.out.swapped or not layouts.out.aligned
        row = p.ow * p.out_dtype.itemsize
        large = row >= STREAM_ROW_BYTES and p.n * p.oc * p.oh * row >= STREAM_BYTES
        stores = config.get("stores")
        taps = STREAM_TAPS.get((self._isa, "i" if is_integer(p.sum_dtype) else "f"), 0)
        stream = large and p.kh * p.kw <= taps if stores is None else stores == "streamed"
        moved = p.n * p.c * p.h * p.w * p.x_dtype.itemsize + p.outputs * p.out_dtype.itemsize
        access = items.Access(stage, convert, edges=False, in_registers=False)
        # What the engine finds out may ask for other tiles.
        for _ in range(4):
            turned = items.turned(p, layouts, access)
            together = items.together(p, layouts, rung, access, turned)
            tiling = items.tiling(p, config["tile"], rung)
            tile, block = items.tile(p, config, rung, tiling, access, together, turned)
            # Whole pixels.
            tile = tile[0], max(tile[1] // beside, 1) * beside
            piece = items.piece(p, rung, tile)
            self._task = task = self._make(
                rung, layouts, tile, block, piece, together, tiling, access, stream, moved
            )
            over_edges = rung.dense and "border" in task.paths
            found = items.Access(task.staged, task.converts, over_edges, task.in_registers)
            if found == access:
                break
            access = found
        self._over_edges = over_edges
        self.config = {"tile": asked or (tile[0], tile[1] // beside), "block": block}
        # Channels that are packed together stay together.
        block = -(-block // task.packing) * task.packing
        if rung.streams:
            self.config["stores"] = "streamed" if task.streamed else "cached"
        self.factored: bool | None = task.factored
        self.converts: bool = task.converts
        serial = SERIAL_VECTOR_MACS if rung.dense else SERIAL_MACS
        one = task.workspace_bytes(1)
        each = task.workspace_bytes(2) - one
        self._most = _threads.within_workspace(one - each, each)
        self.launch: Mapping[str, Any] = {
            "instruction set": engine().compiled_for(rung.row, self._isa),
            "tile": f"{min(tile[0], p.oh)} x {min(tile[1], p.ow) // beside} outputs"
            + (f" of {task.images} images" if task.images > 1 else ""),
            "output channels a tile": f"{beside}, beside each other"
            if columns
            else min(block, max(p.oc // p.groups, 1)) * task.together,
            **({"transform": f"{tiling[0]} x {tiling[1]} samples"} if rung.lengths else {}),
            **(
                {
                    "matrix unit": ("emulated" if tiling.emulated else "AMX")
                    + ("" if rung.operand_bits else f"; {splitting.told(p, tiling)}")
                }
                if rung.unit
                else {}
            ),
            **(
                {
                    "products": f"of {rung.operand_bits} bits, in pairs"
                    + (", multiplied, then added" if tiling.emulated else ", AVX-512 VNNI")
                }
                if rung.operand_bits and not rung.unit
                else {}
            ),
            **(
                {
                    "products": f"of {rung.word_bits} bits, "
                    + ("emulated" if tiling.emulated else "AVX-512 IFMA")
                }
                if rung.word_bits
                else {}
            ),
            "work items": self._task.items,
            "input": self._input_told(),
            "output": self._output_told(),
            "threads": self._told(p.macs < serial),
        }
        self._tiling = tiling
        whole_groups = columns is not None or rung.capabilities.depthwise
        self.thresholds = (
            Threshold("oh", tile[0] + 1, "second row tile"),
            Threshold("ow", tile[1] // beside + 1, "second column tile"),
            *(() if whole_groups else (Threshold("oc", block * p.groups + 1, "second block"),)),
            *((Threshold("macs", serial, "parallel"),) if engine().OPENMP else ()),
        )
        self.paths = self._declare()
        self.by_address = True
        # Looked up in every call, which takes three microseconds in all.
        self._parallel = bool(engine().OPENMP)
        self._worthwhile = self._parallel and p.macs >= serial
        one_filter = rung.capabilities.depthwise and interleaved.as_columns(p, layouts) is not None
        # It leaves filters to cpu-simd's kernel, but reads in place what that rung gathers.
        crowded = rung.streams and not task.staged and _gathers("simd", p, layouts.x, self._isa)
        self._work = Work(
            p, rung, task, self._isa, tiling, tile, parted, turned, one_filter, crowded, engine().INTEL
        )
        self.direct_seconds = direct = direct_seconds(self._work)
        self.cost: float | None = unless_factored(self._work, direct) if task.factored else direct
        self._direct: CpuPlan | None = None

    def _input_told(self) -> str:
        paths = self._task.paths
        told = "read in place" + (", converted in registers" if self._task.in_registers else "")
        if "staged" not in paths:
            return told
        if paths.isdisjoint({"inside", "border"}):
            return "gathered tile by tile"
        return told + (
            ", or gathered tile by tile if a filter isn't finite"
            if self._over_edges
            else ", gathered at the edges"
        )

    def _output_told(self) -> str:
        task = self._task
        if "streamed" in task.paths:
            return "stored past the caches"
        if not (task.converts and task.in_registers):
            return "converted tile by tile" if task.converted else "written in place"
        if not task.converted:
            return "converted in registers"
        return "converted in registers, " + (
            "or tile by tile if a filter isn't finite" if self._over_edges else "at the edges tile by tile"
        )

    def _told(self, serial: bool) -> str:
        return _threads.told(serial, self._most) if engine().OPENMP else "1, without OpenMP"

    def leave_direct_sums_to(self, other: CpuPlan, name: str) -> None:
        """Run `other`, a plan of the rung of that name, where the filters' values allow no shorter way."""
        self._direct = other
        # Both run in one workspace, on as many threads.
        self._most = min(self._most, other._most)
        self.cost = unless_factored(self._work, other.direct_seconds)
        told = [other.launch[key] for key in ("matrix unit", "products", "tile") if key in other.launch]
        self.launch = {
            **self.launch,
            "threads": self._told(not self._worthwhile),
            "direct sums": f"by {name}: {', '.join(told)}",
        }
        # A path is one that either may take.
        self.paths = tuple(dict.fromkeys((*self.paths, *other.paths)))

    def _make(
        self,
        rung: Rung,
        layouts: Layouts,
        tile: tuple[int, int],
        block: int,
        piece: tuple[int, int],
        together: int,
        tiling: Tiling,
        access: items.Access,
        stream: bool,
        moved: int,
    ) -> Any:
        p = self._run_as

        def array(dtype: np.dtype[Any], layout: Layout) -> tuple[str, tuple[int, ...], bool]:
            return "uint8" if dtype.kind == "b" else dtype.name, layout.strides, layout.swapped

        return engine().Task(
            rung=rung.row,
            builds_on=rung.builds_on and rung.builds_on.removeprefix("cpu-"),
            isa=self._isa,
            problem=p,
            x=array(p.x_dtype, layouts.x),
            w=array(p.w_dtype, layouts.w),
            bias=None if p.bias_dtype is None or layouts.bias is None else array(p.bias_dtype, layouts.bias),
            y=array(p.out_dtype, layouts.out),
            before_after=self._maps,
            fill=np.asarray(p.fillvalue).astype(p.sum_dtype).tobytes(),
            tile=tile,
            block=block,
            piece=piece,
            together=together,
            tiling=tiling,
            convert=access.convert,
            stage=access.stage,
            stream=stream,
            off_core=stream or moved >= OFF_CORE_BYTES,
            far=stream or moved >= FAR_BYTES,
            set_lines=engine().SET_LINES,
        )

    def _declare(self) -> tuple[str, ...]:
        task = self._task
        if not task.items:
            return ()
        blocks, row_tiles, column_tiles = task.tiles
        named = {
            "factored": bool(task.factored),
            "converted": task.converted,
            "second row tile": row_tiles > 1,
            "second column tile": column_tiles > 1,
            "second block": blocks > 1,
            "serial": True,
            "parallel": bool(engine().OPENMP),
        }
        return (*sorted(task.paths), *(name for name, possible in named.items() if possible))

    def _threads(self, num_threads: int | None) -> int:
        if num_threads is not None:
            return num_threads if self._parallel else 1
        return min(_threads.get_num_threads(), self._most) if self._worthwhile else 1

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Packed and transformed filters, and each thread's gathered input, scratch and unconverted sums.

        Large filters may be packed block by block: then each thread has room for one.
        """
        own = int(self._task.workspace_bytes(self._threads(num_threads)))
        return own if self._direct is None else max(own, self._direct.workspace_bytes(num_threads))

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
        if workspace is not None:
            check_workspace(workspace, self.workspace_bytes(num_threads))
        direct = None if self._direct is None else self._direct._task
        bad = self._task.run(x, w, bias, out, workspace, self._threads(num_threads), direct)
        if bad >= 0:
            place = tuple(int(i) for i in np.unravel_index(bad, self.problem.out_shape))
            raise OverflowError(
                f"the result doesn't fit {self.problem.out_dtype}: "
                f"the first place is {place} (n, oc, row, column)"
            )

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run."""
        run = frozenset(self._task.paths_run())
        if self._direct is not None:
            run |= self._direct.paths_run()
        return run & frozenset(self.paths)


def _parted(layout: Layout, channels: int) -> bool:
    """Whether neighbours in memory belong to other channels."""
    return channels > 1 and abs(layout.strides[1]) < abs(layout.strides[3])


def _gathers(row: str, p: Problem, x: Layout, level: str) -> bool:
    """Whether the rung of that row in rungs.inc gains by gathering rows of the image; see `Gathered`."""
    if level not in GATHERED or x.strides[2] == 0 or x.strides[2] % engine().SET_BYTES:
        return False
    rows, one_by_one = GATHERED[level]
    # Under a dilated filter the copy takes longer than it saves; of several channels it was not measured.
    if p.c != p.groups or p.dilation[0] != 1 or p.kh < rows:
        return False
    own = row == "simd" and not is_integer(p.sum_dtype) and p.stride[0] == 1
    return own if one_by_one else not (own and p.kh > rows)
