"""The CPU ladder. Rungs are lines of rungs.inc; this module makes them backends and plans their work.

Everything is decided here, from shapes and types. The compiled `engine` runs it: it is loaded
with the first plan, so listing the rungs costs nothing.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
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
    check_workspace,
    resolve_config,
)
from convpar.boundary import border_maps
from convpar.problem import Problem, is_integer

from . import interleaved, splitting
from .splitting import Tiling

FOLDER = Path(__file__).parent
ISA_VARIABLE = "CONVPAR_ISA"
UNIT_VARIABLE = "CONVPAR_AMX"
WORD_VARIABLE = "CONVPAR_IFMA"

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

GATHERED_LEVEL, GATHERED_ROWS = "v3", 7
"""Where rows of an image share a set of the first cache, a filter of so many rows meets more of them at once than a set holds,
on processors of this level where it was measured; rows that are gathered don't share one. Of floating point and more filter
rows cpu-simd meets one at a time: see RowByRow in blocks.h."""

_TILE_COLUMNS = 8192
_TILE_OUTPUTS = 32_768
_STAGE_BYTES = 512 * 1024
_BLOCK = 16

# Of the kernels over vectors.
_ROW_BYTES = 32_768
_LEAST_ROWS = 16
"""And a multiple of it where a tile is neither all of an image nor gathered: of other numbers of rows blocks that slide, of 8 or 16
rows, reach back over what is done already."""
_ITEMS = 16

# What work takes beside its multiply-accumulates, on one core.
_SECONDS_PER_ITEM = 150e-9
_SECONDS_PER_VECTOR_ITEM = 250e-9
"""Of a kernel over vectors that has no other: it gathers short rows."""
_KEPT_BYTES = 2**25
_SECONDS_PER_NEW_BYTE = 0.1e-9
"""Of a workspace beyond what is kept from run to run (memory.h): the system clears its pages every time."""
_SECONDS_PER_LOOK = 100e-9
"""For factors of a filter, in every run."""
_UNLESS_FACTORED = 0.99
"""Looking for factors takes little, and now and then saves most of a run."""
_FEW_TAPS, _FEW_TAPS_FAR = 9, 25
"""Of so few taps factors save nothing; the second where samples come from memory and blocks slide."""
_SECONDS_PER_BORDER_TAP = 4e-9
"""Of outputs whose window reaches over the edge, in kernels that go there sample by sample."""
_SECONDS_PER_CONVERSION = 0.2e-9
_SECONDS_PER_COPY = 0.06e-9
"""Of a sample that is gathered as it is, with all of a tile, because that meets the edge of the image."""
_SECONDS_PER_PARTED = 0.8e-9
"""Of a sample that is gathered, or an output that is converted, whose neighbours in memory belong to other channels."""
_SECONDS_PER_COPIED_ITEM = 65e-9
"""Of what an item takes, for gathering at all."""
_SECONDS_PER_VECTOR = 3e-9
"""To begin and store the sums of a vector."""
_SECONDS_PER_VECTOR_OF_ONE_BLOCK = 2.95e-9
"""The same where cpu-masked's blocks are as wide as a row and slide down all rows, if nothing was gathered."""
_SECONDS_PER_VECTOR_OF_NARROW_BLOCKS = 2.3e-9
"""The same in cpu-simd, of one channel and under fewer than seven filter rows, whose blocks are as narrow as the row."""
_SECONDS_PER_SCATTERED_VECTOR = 4e-9
"""The same in cpu-packed, which has to turn sums from output channels to rows, and from memory in cpu-im2col, whose panels go to as
many planes as there are output channels."""

_PASS_ROWS, _SLID_ROWS, _WORD_ROWS = 8, 15, 7
"""Filter rows of a pass over the samples, of one by blocks that slide (`slide` in simd.hpp), and of one that multiplies words."""
_SLID_LEVEL = "v4"
"""Where blocks slide."""
_SLID_CHANNEL_ROWS, _LEAST_SLID_ROWS, _LEAST_SLID = 7, 8, 4
"""Filter rows, at most, of those that slide through several channels, and rows and vectors of outputs, at least."""
_MASKED_ROWS, _MASKED_COLUMNS = 7, 16
"""Of a filter, at most, under which cpu-masked's blocks slide."""
_SECONDS_PER_SLID_VECTOR, _SECONDS_PER_SLID_PASS = 1e-9, 0.2e-9
"""What a vector and a pass take where blocks slide for several channels of outputs: caches hold what was loaded for the first, so
that fewer of them wait for memory than in a single image or plane."""
_SECONDS_PER_FAR_SLID_VECTOR = 2e-9
"""The same of such a vector in cpu-simd, if several channels of samples come from memory: cpu-masked fetches more of them."""
_NO_BLOCKS, _NO_BLOCKS_ROWS = 5, 7
"""Vectors of a row that are no blocks of four and three, as slide in cpu-simd, under so many filter rows and more; only where samples
were gathered that takes longer."""
_EMULATED_WORDS = 2.5
"""How many times as long products of words take without instructions for them."""

# Of those that transform filters and samples.
_TRANSFORMED_BYTES = 1280 * 1024
"""Of transformed samples of a work item, which stay in the second cache, and most of its sums."""
_SUMS_BYTES = 128
"""Of the output channels whose sums are kept at once: two vectors, the widest there are."""
_TRANSFORMED_ITEMS = 8
_LEAST_TILES = 16
_PAIRED_ITEMS = 64
_PAIRED_TILES = 16
_SPECTRA_BYTES = 1600 * 1024
"""Of a pair of tiles and a filter, which take twice as long as those in the first cache."""
_SECONDS_PER_OUTPUT = 0.17e-9
"""Of a byte of outputs, and of the samples under them, to come and go."""
_SECONDS_PER_FILTER = 300e-9
"""Of a vector of output channels and one channel, whose transform is stored far away and loaded again."""


@functools.cache
def _engine() -> ModuleType:
    with _threads.STATE:
        return importlib.import_module(".engine", __name__)


def _missing_engine() -> str | None:
    try:
        _engine()
    except ImportError as e:
        missing = f"the compiled module convpar.backends.cpu.engine can't be loaded ({e})"
        sources = FOLDER.parents[2]
        if (sources / "pyproject.toml").is_file():
            return f"{missing}: Python found convpar's sources, in which nothing is compiled, in {sources}; start it in another folder"
        return f"{missing}; install convpar again"
    return None


def _missing_level() -> str | None:
    missing = _missing_engine()
    if missing is None:
        try:
            isa()
        except ValueError as e:
            return str(e)
    return missing


def _missing_instructions(units: Callable[[], bool] | None) -> str | None:
    """Why a rung that needs the highest level can't run; `units` reads the setting for what it needs beyond that."""
    if isa() != splitting.LEVEL:
        return f"it needs the instruction set {splitting.LEVEL}, and {isa()} is in use"
    try:
        if units is not None:
            units()
    except ValueError as e:
        return str(e)
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


def _wanted(variable: str) -> bool:
    wanted = os.environ.get(variable, "").strip()
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {wanted!r}")
    return wanted != "0"


@functools.cache
def matrix_unit() -> bool:
    """Whether products of matrices are the processor's: it has AMX, this process may use it, and CONVPAR_AMX isn't 0.

    Raises
    ------
    ValueError
        CONVPAR_AMX is neither 0 nor 1.
    """
    return _wanted(UNIT_VARIABLE) and bool(_engine().matrix_unit())


@functools.cache
def word_unit() -> bool:
    """Whether products of 52 bits are the processor's: Intel's with AVX-512 IFMA, if CONVPAR_IFMA isn't 0.

    Raises
    ------
    ValueError
        CONVPAR_IFMA is neither 0 nor 1.
    """
    return _wanted(WORD_VARIABLE) and bool(_engine().word_unit())


def build_info() -> dict[str, Any]:
    """What the compiled engine was built with and uses: compiler, OpenMP, ISA levels, threads."""
    missing = _missing_engine()
    if missing is not None:
        return {"engine": missing}
    engine = _engine()
    return {
        "engine": engine.__file__,
        "compiler": engine.COMPILER,
        "OpenMP": engine.OPENMP or "not built in: one thread",
        "ISA levels": engine.isa_levels(),
        "ISA level in use": isa(),
        "matrix unit": "AMX" if matrix_unit() else "emulated",
        "products of 52 bits": "AVX-512 IFMA" if word_unit() else "emulated",
        "processors available": _threads.available(),
    }


def peak_fma(kind: str, num_threads: int, seconds: float = 0.3) -> float:
    """Multiply-accumulates a second in registers, measured at the ISA level in use.

    `kind` is "float32", "float64" or "int32"; `num_threads` is from 1 to 1024.
    """
    num_threads = _threads.threads_argument(num_threads)
    return float(_engine().peak_fma(kind, num_threads, seconds, isa()))


def copy_bandwidth(size: int, num_threads: int, repeats: int = 5) -> float:
    """Bytes read and written a second by 1 to 1024 threads that copy `size` bytes, the best of `repeats`."""
    return float(_engine().copy_bandwidth(size, _threads.threads_argument(num_threads), repeats))


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
        self._parted = _parted(layouts.x, p.c), _parted(layouts.out, p.oc)
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
        gathered = rung.streams and config["tile"] is None and _share_lines(rung, p, layouts.x, self._isa)
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
        # What the engine finds out may ask for other tiles.
        for _ in range(3):
            tiling = _tiling(p, config["tile"], rung)
            tile, block = _tile(p, config, rung, tiling, stage, convert)
            # Whole pixels.
            tile = tile[0], max(tile[1] // beside, 1) * beside
            self._task = task = self._make(rung, layouts, tile, block, tiling, convert, stage, stream, moved)
            if (task.staged, task.converted) == (stage, convert):
                break
            stage, convert = task.staged, task.converted
        self.config = {"tile": asked or (tile[0], tile[1] // beside), "block": block}
        # Channels that are packed together stay together.
        block = -(-block // task.packing) * task.packing
        if rung.streams:
            self.config["stores"] = "streamed" if task.streamed else "cached"
        self.factored: bool | None = task.factored
        serial = SERIAL_VECTOR_MACS if rung.dense else SERIAL_MACS
        one = task.workspace_bytes(1)
        each = task.workspace_bytes(2) - one
        self._most = _threads.within_workspace(one - each, each)
        self.launch: Mapping[str, Any] = {
            "instruction set": _engine().compiled_for(rung.row, self._isa),
            "tile": f"{min(tile[0], p.oh)} x {min(tile[1], p.ow) // beside} outputs"
            + (f" of {task.images} images" if task.images > 1 else ""),
            "output channels a tile": f"{beside}, beside each other"
            if columns
            else min(block, max(p.oc // p.groups, 1)),
            **({"transform": f"{tiling[0]} x {tiling[1]} samples"} if rung.lengths else {}),
            **(
                {
                    "matrix unit": ("emulated" if tiling.emulated else "AMX")
                    + f"; {tiling.products} of 9 products of three parts"
                }
                if rung.unit
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
            "input": "read in place"
            if "staged" not in task.paths
            else "read in place, or gathered tile by tile if a filter isn't finite"
            if rung.dense and "border" in task.paths
            else "read in place, gathered at the edges"
            if "inside" in task.paths
            else "gathered tile by tile",
            "output": "stored past the caches"
            if "streamed" in task.paths
            else "converted tile by tile"
            if task.converted
            else "written in place",
            "threads": self._told(p.macs < serial),
        }
        self._tiling = tiling
        self.thresholds = (
            Threshold("oh", tile[0] + 1, "second row tile"),
            Threshold("ow", tile[1] // beside + 1, "second column tile"),
            *(() if columns else (Threshold("oc", block * p.groups + 1, "second block"),)),
            *((Threshold("macs", serial, "parallel"),) if _engine().OPENMP else ()),
        )
        self.paths = self._declare()
        self.by_address = True
        # Looked up in every call, which takes three microseconds in all.
        self._parallel = bool(_engine().OPENMP)
        self._worthwhile = self._parallel and p.macs >= serial
        self.direct_seconds = direct = self._estimate(rung, tile)
        self.cost: float | None = self._unless_factored(direct) if task.factored else direct
        self._direct: CpuPlan | None = None

    def _told(self, serial: bool) -> str:
        return _threads.told(serial, self._most) if _engine().OPENMP else "1, without OpenMP"

    def leave_direct_sums_to(self, other: CpuPlan, name: str) -> None:
        """Run `other`, a plan of the rung of that name, where the filters' values allow no shorter way."""
        self._direct = other
        # Both run in one workspace, on as many threads.
        self._most = min(self._most, other._most)
        self.cost = self._unless_factored(other.direct_seconds)
        told = [other.launch[key] for key in ("matrix unit", "products", "tile") if key in other.launch]
        self.launch = {
            **self.launch,
            "threads": self._told(not self._worthwhile),
            "direct sums": f"by {name}: {', '.join(told)}",
        }
        # A path is one that either may take.
        self.paths = tuple(dict.fromkeys((*self.paths, *other.paths)))

    def _estimate(self, rung: Rung, tile: tuple[int, int]) -> float:
        """Seconds on one core, where the filters' values allow no shorter way."""
        p, task = self._run_as, self._task
        if not rung.dense:
            slower = 1.5 if task.staged or task.converted else 1.0
            at_border = p.outputs - p.n * p.oc * task.inside
            border = 0 if task.staged else at_border * (p.c // p.groups) * p.kh * p.kw
            return float(
                1e-6
                + _SECONDS_PER_ITEM * task.items
                + slower * rung.seconds_per_mac * p.macs
                + _SECONDS_PER_BORDER_TAP * border
            )
        # Lanes that hold nothing take as long as the others.
        channels = p.oc // p.groups
        if rung.unit:
            vector_sums = splitting.seconds(
                p,
                self._tiling,
                tile,
                rung.seconds_per_mac,
                rung.seconds_per_pass,
            )
        elif rung.transformed:
            vector_sums = _transformed_seconds(p, rung, self._tiling, task.lanes)
        else:
            width = max(channels if task.packing > 1 else p.ow, 1)
            vectors = p.outputs / width * -(-width // task.lanes)
            # Of planes wide enough only the edges are masked, and the rest is left to the rung before.
            middle = rung.masks and "inside" in task.paths and min(tile[1], p.ow) >= task.streams
            own = _rung_before(rung) if middle else rung
            slid = (
                own.row in ("simd", "separable")
                and p.kh <= (_SLID_ROWS if p.c == p.groups else _SLID_CHANNEL_ROWS)
                and self._slides()
                and not (task.staged and p.kh >= _NO_BLOCKS_ROWS and -(-p.ow // task.lanes) == _NO_BLOCKS)
            )
            # Of higher filters than slide in cpu-masked its blocks are wide and low, and a second pass takes little more.
            once = slid or (own.masks and p.kh <= _SLID_ROWS)
            rows = _WORD_ROWS if rung.word_bits else _SLID_ROWS if once else _PASS_ROWS
            # Words meet the samples of even and of odd columns in turn.
            columns = p.kw + 1 if rung.word_bits else p.kw
            passes = 1 + columns * -(-p.kh // rows)
            product = own.seconds_per_mac * (_EMULATED_WORDS if self._tiling.emulated else 1)
            begun, a_pass = _SECONDS_PER_VECTOR, rung.seconds_per_pass
            if rung.row == "packed" or (rung.row == "im2col" and task.far):
                begun = _SECONDS_PER_SCATTERED_VECTOR
            elif own.masks and p.ow <= _LEAST_SLID * task.lanes and not task.staged:
                begun = _SECONDS_PER_VECTOR_OF_ONE_BLOCK
            elif slid and not task.staged and self._narrow(task.lanes):
                begun = _SECONDS_PER_VECTOR_OF_NARROW_BLOCKS
            large = p.oh >= _LEAST_SLID_ROWS and p.ow >= _LEAST_SLID * task.lanes
            masked = own.masks and p.kh <= _MASKED_ROWS and p.kw <= _MASKED_COLUMNS
            if p.oc > p.groups and ((slid and large) or masked):
                begun, a_pass = _SECONDS_PER_SLID_VECTOR, _SECONDS_PER_SLID_PASS
                if slid and task.far and p.c > p.groups:
                    begun = _SECONDS_PER_FAR_SLID_VECTOR
            sums = p.c // p.groups * (a_pass * passes + product * p.kh * p.kw)
            vector_sums = vectors * (begun + sums)
        top, bottom, left, right = p.padding
        gathered = task.staged or ((rung.lengths or rung.unit) and "inside" not in task.paths)
        samples = p.n * p.c * (top + p.h + bottom) * (left + p.w + right) if gathered else 0
        converted = p.outputs if task.converted else 0
        item = _SECONDS_PER_VECTOR_ITEM if task.items == 1 else _SECONDS_PER_ITEM
        copied = 0
        if rung.lengths and p.x_dtype == p.sum_dtype:
            copied = samples
        else:
            converted += samples
        if rung.masks and "border" in task.paths:
            item -= _SECONDS_PER_COPIED_ITEM
        elif "staged" in task.paths and task.paths.isdisjoint({"inside", "border"}) and not samples:
            rows = (top + p.h + bottom) + (task.tiles[1] - 1) * (p.extent[0] - 1)
            copied = p.n * p.c * rows * (left + p.w + right)
        overhead = 1e-6 + item * task.items
        seconds = overhead + vector_sums + _SECONDS_PER_CONVERSION * converted + _SECONDS_PER_COPY * copied
        parted_x, parted_out = self._parted
        seconds += _SECONDS_PER_PARTED * (parted_x * samples + parted_out * p.outputs)
        workspace = task.workspace_bytes(1)
        if workspace > _KEPT_BYTES:
            seconds += _SECONDS_PER_NEW_BYTE * workspace
        return float(seconds)

    def _slides(self) -> bool:
        """Whether estimates count on blocks that slide, under filters that aren't too high."""
        p = self._run_as
        # Products of integers take longer than they are counted; by shorter passes choosers find cpu-ifma where it is faster.
        floats = not is_integer(p.sum_dtype)
        return self._isa == _SLID_LEVEL and p.stride[0] == p.dilation[1] == 1 and floats

    def _narrow(self, lanes: int) -> bool:
        """Whether blocks that slide down one channel are as wide as a row of three or four vectors, or nearly."""
        p = self._run_as
        wide = (_LEAST_SLID - 1) * lanes <= p.ow <= _LEAST_SLID * lanes
        high = p.oh >= _LEAST_SLID_ROWS * p.dilation[0]
        return wide and high and p.c == p.groups and p.kh < _NO_BLOCKS_ROWS

    def _unless_factored(self, seconds: float) -> float:
        """Of a plan that looks for factors, and then sums directly in so many seconds."""
        p = self._run_as
        # Where memory limits, direct sums by blocks that slide take no longer up to more taps.
        in_place = p.stride == p.dilation == (1, 1) and not self._task.converted
        few = _FEW_TAPS_FAR if self._slides() and in_place and self._task.far else _FEW_TAPS
        return (_UNLESS_FACTORED if p.kh * p.kw > few else 1) * seconds + _SECONDS_PER_LOOK * p.oc

    def _make(
        self,
        rung: Rung,
        layouts: Layouts,
        tile: tuple[int, int],
        block: int,
        tiling: Tiling,
        convert: bool,
        stage: bool,
        stream: bool,
        moved: int,
    ) -> Any:
        p = self._run_as

        def array(dtype: np.dtype[Any], layout: Layout) -> tuple[str, tuple[int, ...], bool]:
            return "uint8" if dtype.kind == "b" else dtype.name, layout.strides, layout.swapped

        return _engine().Task(
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
            tiling=tiling,
            convert=convert,
            stage=stage,
            stream=stream,
            off_core=stream or moved >= OFF_CORE_BYTES,
            far=stream or moved >= FAR_BYTES,
            set_lines=_engine().SET_LINES,
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
            "parallel": bool(_engine().OPENMP),
        }
        return (*sorted(task.paths), *(name for name, possible in named.items() if possible))

    def _threads(self, num_threads: int | None) -> int:
        if num_threads is not None:
            return num_threads if self._parallel else 1
        return min(_threads.get_num_threads(), self._most) if self._worthwhile else 1

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Packed and transformed filters, and each thread's gathered input, scratch and unconverted sums."""
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


def _share_lines(rung: Rung, p: Problem, x: Layout, level: str) -> bool:
    """Whether a kernel that would read planes where they are meets rows that push each other out of the first cache."""
    # Under a dilated filter the copy takes longer than it saves; of several channels it was not measured.
    alone = p.c == p.groups and p.dilation[0] == 1
    one_by_one = p.kh > GATHERED_ROWS and rung.row == "simd" and not is_integer(p.sum_dtype)
    return (
        level == GATHERED_LEVEL
        and alone
        and p.kh >= GATHERED_ROWS
        and not (one_by_one and p.stride[0] == 1)
        and x.strides[2] != 0
        and x.strides[2] % _engine().SET_BYTES == 0
    )


def _tile(
    p: Problem, config: Mapping[str, Any], rung: Rung, tiling: Tiling, stage: bool, convert: bool
) -> tuple[tuple[int, int], int]:
    """Outputs (rows, columns) and output channels of a work item."""
    if config["tile"]:
        rows, columns = config["tile"]
    elif rung.unit:
        rows, columns = splitting.tile(p, tiling)
    elif rung.lengths:
        rows, columns = _paired_tile(p, tiling)
    elif rung.transformed:
        rows, columns = _transformed_tile(p, rung.side)
    else:
        rows, columns = _dense_tile(p, stage, convert) if rung.dense else _window_tile(p, stage)
    if config["block"] is not None:
        return (rows, columns), config["block"]
    if not rung.dense:
        return (rows, columns), _BLOCK
    # What is gathered for a tile serves all output channels, unless there would be too few items.
    channels = max(p.oc // p.groups, 1)
    images = max(rows // max(p.oh, 1), 1) if rung.transformed else 1
    tiles = -(-p.n // images) * p.groups * -(-p.oh // rows) * -(-p.ow // columns)
    items = _TRANSFORMED_ITEMS if rung.transformed else _ITEMS
    block = -(-channels // -(-items // max(tiles, 1)))
    if rung.unit == "channels":
        block = splitting.block(block)
    if convert:
        block = min(block, max(_STAGE_BYTES // (rows * columns * p.sum_dtype.itemsize), 1))
    return (rows, columns), block


def _window_tile(p: Problem, stage: bool) -> tuple[int, int]:
    columns = max(min(p.ow, _TILE_COLUMNS), 1)
    rows = max(_TILE_OUTPUTS // columns, 1)
    return _gathered(p, min(rows, 32), min(columns, 256), _STAGE_BYTES) if stage else (rows, columns)


def _dense_tile(p: Problem, stage: bool, convert: bool) -> tuple[int, int]:
    # Whole rows: memory is read ahead along them.
    columns = max(min(p.ow, _ROW_BYTES // p.sum_dtype.itemsize), 1)
    # A single image is cut finely enough for many threads.
    rows = min(_TILE_OUTPUTS // columns, -(-p.oh * p.n * p.groups // _ITEMS))
    rows = max(rows, _LEAST_ROWS)
    if rows < p.oh:
        rows -= rows % _LEAST_ROWS
    if convert:
        rows = _LEAST_ROWS
    if not stage and not any(p.padding):
        return rows, columns
    # A wide plane of its own is gathered at its edges only, and a narrow one is small.
    alone = not stage and p.c == p.groups
    return _gathered(p, rows, columns, (4 if alone else 1) * _STAGE_BYTES)


def _transformed_tile(p: Problem, side: int) -> tuple[int, int]:
    """Whole tiles of `side` x `side` outputs, as many as fit; more rows than there are stand for further images."""
    size = (side + 2) ** 2 * max(p.c // p.groups * p.sum_dtype.itemsize, _SUMS_BYTES)
    down, beside = max(-(-p.oh // side), 1), max(-(-p.ow // side), 1)
    most = max(_TRANSFORMED_BYTES // size, 1)
    # A single image is cut finely enough for many threads, but filters are worth loading for several tiles only.
    room = min(most, max(-(-p.n * p.groups * down * beside // _TRANSFORMED_ITEMS), _LEAST_TILES))
    columns = _part(p.ow, side, min(room, beside))
    room = max(room // beside, 1)
    if room < down:
        return _part(p.oh, side, room), columns
    return max(p.oh, 1) * splitting.even(max(p.n, 1), room // down), columns


def _tiling(p: Problem, tile: tuple[int, int] | None, rung: Rung) -> Tiling:
    """What the rung's transforms take and make: those that suit work items of `tile`, or the whole problem."""
    if rung.unit:
        split = splitting.tiling(p, rung.unit == "channels")
        assert split is not None
        return split._replace(emulated=not matrix_unit())
    if rung.word_bits:
        return Tiling(0, 0, 0, 0, emulated=not word_unit())
    if not rung.lengths:
        return Tiling(rung.side + 2, rung.side + 2, rung.side, rung.side)
    item = tile or (p.oh, p.ow)
    axes: list[list[tuple[int, int]]] = [[], []]
    for axis, found in enumerate(axes):
        fewest = math.inf
        for length in rung.lengths:
            made = _made(p, axis, length, item[axis])
            # A longer transform is worth it for fewer tiles only.
            if made > 0 and (tiles := -(-max(min(p.out_shape[2 + axis], item[axis]), 1) // made)) < fewest:
                found.append((length, made))
                fewest = tiles
    tried = [Tiling(down[0], across[0], down[1], across[1]) for down, across in itertools.product(*axes)]
    return min(
        tried, key=lambda t: _spectral_seconds(p, t, item, rung.seconds_per_mac, rung.seconds_per_pass)
    )


def _made(p: Problem, axis: int, length: int, item: int) -> int:
    """Outputs along an axis that a transform of `length` samples gives, none that are another's."""
    outputs, samples = p.out_shape[2 + axis], p.x_shape[2 + axis]
    before, after = p.padding[2 * axis : 2 * axis + 2]
    zeros = p.boundary == "fill" and p.fillvalue == 0
    if item >= outputs and zeros and length >= max(samples + max(before, after), outputs, p.extent[axis]):
        # Zeros on one side stand for those on the other too: the transform goes round.
        return max(outputs, 1)
    return length - p.extent[axis] + 1


def _spectral_seconds(
    p: Problem, tiling: Tiling, item: tuple[int, int], product: float, halving: float
) -> float:
    """Of spectra in both directions, by lanes of one: of pairs of tiles, of filters, and of their products."""
    channels, outputs = p.c // p.groups, p.oc // p.groups
    points = tiling[0] * tiling[1]
    item = max(min(p.oh, item[0]), 1), max(min(p.ow, item[1]), 1)
    items = -(-p.oh // item[0]) * -(-p.ow // item[1])
    tiles = -(-item[0] // tiling[2]) * -(-item[1] // tiling[3])
    pairs = -(-p.n * tiles // 2) if items == 1 and channels == 1 else p.n * -(-tiles // 2)
    transforms = p.groups * (pairs * items * (channels + outputs) + channels * outputs)
    # A pair's spectra and the filters' come from the second cache, and less and less of them.
    kept = points * (2 + channels) * 2 * p.sum_dtype.itemsize
    products = product * p.groups * pairs * items * channels * outputs
    # Each axis is passed over three times, or twice where factors of 8 and 4 do.
    passes = sum(2 if length in (32, 64) else 3 for length in tiling[:2])
    return (
        (1 + kept / _SPECTRA_BYTES)
        * points
        * (halving * transforms * (math.log2(points) + passes) + products)
    )


def _paired_tile(p: Problem, tiling: Tiling) -> tuple[int, int]:
    """Whole tiles, an even number where that can be; more rows than there are stand for further images."""
    high, wide = tiling[2:4]
    down, beside = max(-(-p.oh // high), 1), max(-(-p.ow // wide), 1)
    channels = max(p.c // p.groups, 1)
    total = p.n * p.groups * down * beside
    size = channels * p.sum_dtype.itemsize * tiling[0] * tiling[1]
    room = max(min(total // _PAIRED_ITEMS, _PAIRED_TILES, _STAGE_BYTES // size) // 2 * 2, 2)
    if room < beside:
        return high, wide * 2 * splitting.even(-(-beside // 2), room // 2)
    rows = splitting.even(down, max(room // beside, 1 + beside % 2))
    if rows < down or channels > 1:
        return high * rows, wide * beside
    images = splitting.even(max(p.n, 1), max(room // (down * beside), 1 + down * beside % 2))
    return max(p.oh, 1) * images, wide * beside


def _part(outputs: int, side: int, most: int) -> int:
    """`outputs` along an axis in nearly equal parts of about `most` tiles; too short a last one can't be transformed."""
    part = side * splitting.even(max(-(-outputs // side), 1), most)
    return part + side if 0 < outputs % part < side - 1 and part < outputs else part


def _transformed_seconds(p: Problem, rung: Rung, tiling: Tiling, lanes: int) -> float:
    """Of the transforms of filters, samples and sums, and of the products between, on one core."""
    if rung.lengths:
        vectors = (
            _spectral_seconds(p, tiling, (p.oh, p.ow), rung.seconds_per_mac, rung.seconds_per_pass) / lanes
        )
        return vectors + _SECONDS_PER_OUTPUT * p.outputs * p.sum_dtype.itemsize
    channels, outputs = p.c // p.groups, -(-(p.oc // p.groups) // lanes)
    side = rung.side
    tiles = p.n * p.groups * -(-p.oh // side) * -(-p.ow // side)
    return (
        rung.seconds_per_mac * tiles * (side + 2) ** 2 * channels * outputs
        + rung.seconds_per_pass * tiles * (-(-channels // lanes) + outputs)
        + _SECONDS_PER_FILTER * p.groups * channels * outputs
    )


def _gathered(p: Problem, rows: int, columns: int, limit: int) -> tuple[int, int]:
    """At most `rows` x `columns` outputs whose input, gathered, takes no more than `limit` bytes, or twice what one output's takes."""
    size = p.c // p.groups * p.sum_dtype.itemsize
    limit = max(limit, 2 * p.extent[0] * p.extent[1] * size)
    while rows * columns > 1:
        high = (rows - 1) * p.stride[0] + p.extent[0]
        wide = (columns - 1) * p.stride[1] + p.extent[1]
        if high * wide * size <= limit:
            break
        if rows > _LEAST_ROWS // 2 or columns == 1:
            rows = -(-rows // 2)
        else:
            columns = -(-columns // 2)
    return rows, columns


OPTIONS: Mapping[str, Option] = {
    "tile": Option("outputs (rows, columns) of a work item", kind="pair"),
    "block": Option("output channels of a work item", kind="int"),
}
STORES = Option(
    "whether results go through the caches or past them; by their size and the level if None",
    allowed=("cached", "streamed"),
)


@dataclass(frozen=True)
class Rung:
    """A line of rungs.inc as a `convpar.backend.Backend`."""

    row: str
    summary: str
    builds_on: str | None
    capabilities: Capabilities
    dense: bool
    streams: bool
    seconds_per_mac: float
    seconds_per_pass: float
    side: int
    """Rows and columns of outputs that a transform makes at once, 0 without one or if it is any."""
    lengths: tuple[int, ...]
    """Rows and columns of samples that a transform may take, if it makes any number of outputs."""
    unit: str
    """What fills the tiles of a kernel that splits filters and samples for the matrix unit: channels, rows, or none."""
    word_bits: int
    """Bits of the words that a kernel multiplies in place of its sums' type, 0 in that type."""
    masks: bool
    """Whether it loads some lanes of a vector and leaves the others."""

    contract = CONTRACT_VERSION

    @property
    def options(self) -> Mapping[str, Option]:
        """What ``config=`` may set."""
        return {**OPTIONS, "stores": STORES} if self.streams else OPTIONS

    @property
    def transformed(self) -> bool:
        """Whether the kernel transforms filters and samples."""
        return bool(self.side or self.lengths or self.unit)

    @property
    def takes_columns(self) -> bool:
        """Whether channels that lie beside each other may be columns (`interleaved`): lanes are columns, and may be dilated."""
        return self.dense and self.streams and self.capabilities.dilated

    @property
    def emulated(self) -> bool:
        """Whether other instructions do the work of its own, which this processor lacks, gains nothing by or mayn't use."""
        return bool(self.unit and not matrix_unit()) or bool(self.word_bits and not word_unit())

    @property
    def name(self) -> str:
        """What callers say."""
        return f"cpu-{self.row}"

    def unavailable(self) -> str | None:
        """It needs the compiled engine, and an ISA level that the engine has; some rungs a certain one."""
        missing = _missing_level()
        if missing is not None:
            return missing
        if self.unit or self.word_bits or self.masks:
            return _missing_instructions(matrix_unit if self.unit else word_unit if self.word_bits else None)
        return None

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """A plan, or why the rung can't serve `problem`."""
        options = resolve_config(self.options, config, self.name)
        if device.kind != "cpu":
            return Refusal(f"the arrays live on {device}; it runs on the CPU and downloads nothing unasked")
        refusal = self.capabilities.refusal(problem)
        if refusal is not None:
            return refusal
        least = self.side - 1
        if self.side and problem.outputs and min(problem.oh, problem.ow) < least:
            return Refusal(
                f"it makes {least} rows and columns of outputs or more, not {problem.oh} x {problem.ow}"
            )
        if self.lengths and max(problem.extent) > self.lengths[-1]:
            return Refusal(
                f"it takes filters of at most {self.lengths[-1]} rows and columns, not {problem.kh} x {problem.kw}"
            )
        if self.unit and splitting.tiling(problem, self.unit == "channels") is None:
            terms = problem.c // problem.groups * problem.kh * problem.kw
            return Refusal(f"it can't keep the contract in sums of as few as {terms} products")
        columns = interleaved.as_columns(problem, layouts) if self.takes_columns else None
        plan = CpuPlan(self, problem, layouts, options, columns)
        if columns and plan.factored is False:
            # So wide a filter is for it only channel by channel.
            plan = CpuPlan(self, problem, layouts, options)
        if self.transformed:
            # Of one thread: what is refused mustn't depend on the machine.
            workspace = plan.workspace_bytes(1)
            if workspace > _threads.MOST_WORKSPACE:
                return Refusal(
                    f"it would need {workspace >> 20} MB of workspace on one thread; at most {_threads.MOST_WORKSPACE >> 20} MB"
                )
        if plan.factored is False:
            return Refusal(
                "it takes filters of one channel, of two rows and columns or more, that reach over at most 512 columns"
            )
        if plan.factored and not any(options.values()):
            self._pair(plan, layouts, device)
        if options.get("stores") == "streamed" and plan.config["stores"] != "streamed":
            return Refusal("config['stores'] is 'streamed', and the results are converted tile by tile")
        return plan

    def _pair(self, plan: CpuPlan, layouts: Layouts, device: Device) -> None:
        """Leave direct sums to another rung over planes, where that is faster than the rung before this one.

        Only without ``config=``, whose tiles would not be that rung's.
        """
        before = _rung_before(self).plan(plan.problem, layouts, device, None)
        least = before.direct_seconds if isinstance(before, CpuPlan) else plan.direct_seconds
        best: tuple[CpuPlan, str] | None = None
        for other in _rungs():
            over_planes = other.masks or other.unit == "rows" or other.word_bits
            if not over_planes or other.unavailable() is not None:
                continue
            made = other.plan(plan.problem, layouts, device, None)
            if isinstance(made, CpuPlan) and made.direct_seconds < least:
                least = made.direct_seconds
                best = made, other.name
        if best is not None:
            plan.leave_direct_sums_to(*best)

    def source(self) -> tuple[tuple[str, str], ...]:
        """(file name, text) of the rung's kernel and of the headers that it includes."""
        names = [f"kernels/{self.row}.hpp"]
        texts = {}
        for name in names:
            texts[name] = (FOLDER / name).read_text(encoding="utf-8")
            names += re.findall(r'^#include "(.*)"$', texts[name], re.MULTILINE)
        return tuple(texts.items())

    def assembly(self, problem: Problem | None = None, *, level: str | None = None) -> str:
        """What the compiler made of the rung at an ISA level (the one in use); see `disassembly.assembly`."""
        from . import disassembly

        missing = _missing_engine()
        if missing is not None:
            raise Unavailable(missing)
        return disassembly.assembly(str(_engine().__file__), self.row, level or isa(), problem)


_LINE = re.compile(
    r"^RUNG\((\w+), (\w+), ([\w ]+), ([\d ]+?)(?: at (\d+)x\d+| in ([\d ]+?)| on 16x16x32 from (?:(\d+) channels|(\d+)x\d+)| by (\d+) bits| (by masks))?(?: within (\d+))?, "
    r'(\w+), ([\d.]+), ([\d.]+), (\w+), "(.*)"\)$',
    re.MULTILINE,
)


def _sums(types: list[str]) -> tuple[str, ...]:
    """Sum types of a vector kernel: ``u8`` serves int8 and uint8, ``f32`` float32."""
    names: list[str] = []
    for t in types:
        bits = t[1:]
        names += [f"float{bits}"] if t[0] == "f" else [f"int{bits}", f"uint{bits}"]
    return tuple(names)


def _rung(line: re.Match[str]) -> Rung:
    row, _flags, sums, sizes, side, lengths, channels, rows, bits, masks, *others = line.groups()
    factor, output, mac, a_pass, before, summary = others
    filters = tuple((int(k), int(k)) for k in sizes.split() if k != "0")
    return Rung(
        row=row,
        summary=summary,
        builds_on=None if before == "none" else f"cpu-{before}",
        dense=sums != "any",
        streams=output == "streamed",
        capabilities=Capabilities(
            sum_dtypes=Capabilities().sum_dtypes if sums == "any" else _sums(sums.split()),
            filter_sizes=filters or None,
            least_filter=(int(rows or 1),) * 2,
            least_channels=int(channels or 1),
            strided=not (factor or rows or bits or masks),
            dilated=not (factor or rows or bits or masks),
            sum_is_output=output == "sum",
            error=ErrorContract("normwise", float(factor)) if factor else ErrorContract("elementwise"),
        ),
        seconds_per_mac=float(mac) * 1e-9,
        seconds_per_pass=float(a_pass) * 1e-9,
        side=int(side or 0),
        lengths=tuple(map(int, (lengths or "").split())),
        unit="channels" if channels else "rows" if rows else "",
        word_bits=int(bits or 0),
        masks=bool(masks),
    )


@functools.cache
def _rungs() -> tuple[Rung, ...]:
    return tuple(map(_rung, _LINE.finditer((FOLDER / "rungs.inc").read_text(encoding="utf-8"))))


def _rung_before(rung: Rung) -> Rung:
    """The one that `rung` builds on."""
    return next(other for other in _rungs() if other.name == rung.builds_on)


def backends() -> list[Backend]:
    """The rows of the family, slowest first."""
    return list(_rungs())
