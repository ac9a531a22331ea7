"""Problem and options -> launches: plain records that can be printed, compared and tested without a GPU.

A rung describes its work to a `Draft`: which kernels, which blocks, how much shared memory. The draft adds what
all kernels have in common (types, strides, grid, prepared filters, borders), and `draw` checks the limits of
the device. The result, a `Program`, is what an executor runs. Nothing here knows CuPy.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from convpar.backend import Layout, Layouts, Refusal, Threshold
from convpar.boundary import border_maps
from convpar.problem import Problem, is_integer

KERNELS = Path(__file__).parent / "kernels"

COMPILED_ROWS = (1, 2, 3, 5, 7)
COMPILED_COLUMNS = (1, 2, 3, 5, 7, 9, 11)
"""Filter sizes that may be compiled in; any other is known at run time only. This bounds the compilations."""

ALIGNMENT = 256
"""Bytes to which every part of a workspace is aligned."""

PLAIN_SHARED = 48 * 1024
"""Bytes of shared memory that every device gives a block."""

# Offsets below it, and sums of two of them, are exact in 32 bits.
_INDEX_LIMIT = 2**30

CUDA_TYPES = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "Half",
    "bfloat16": "BFloat16",
    "float32": "float",
    "float64": "double",
    "complex64": "Complex<float>",
    "complex128": "Complex<double>",
}

Template = dict[str, str | int | bool]


class NoLaunch(Exception):
    """A recipe raises it to say why it has no launch for a problem; the caller gets a `Refusal`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one device allows, and roughly how fast it is.

    Attributes
    ----------
    name : str
        The device, for people.
    threads : int
        Threads a block.
    shared : int
        Bytes of shared memory that a block can have.
    constant : int
        Bytes of constant memory of a module.
    grid : (int, int, int)
        Blocks along x, y and z.
    fma_rate : float
        float32 multiply-accumulates a second at best, for estimates.
    bandwidth : float
        Bytes of device memory read or written a second at best, for estimates.
    """

    name: str
    threads: int = 1024
    shared: int = PLAIN_SHARED
    constant: int = 64 * 1024
    grid: tuple[int, int, int] = (2**31 - 1, 65535, 65535)
    fma_rate: float = 1e12
    bandwidth: float = 1e11


class Place(NamedTuple):
    """Where an array of a launch begins, `offset` bytes into `base`.

    `base` is one of the call's arrays, "kept" (workspace filled once a call) or "scratch"
    (workspace of one slice of images).
    """

    base: Literal["x", "w", "bias", "out", "kept", "scratch"]
    offset: int = 0


class Stored(NamedTuple):
    """An operand in device memory: where it is and its type there."""

    place: Place
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class Fill:
    """A step that sets `size` bytes at `place` to the byte `value`."""

    place: Place
    size: int
    value: int


@dataclass(frozen=True, slots=True)
class Launch:
    """A step that runs one kernel.

    Attributes
    ----------
    kernel : str
        The kernel's file and template: "naive" is the template ``naive`` in naive.cu.
    template : tuple of (str, str, int or bool)
        The members of its instance. Strings are types, or names of constants where all in capitals.
    restrict : bool
        Whether its pointers are declared ``__restrict__``.
    grid, block : (int, int, int)
    shared : int
        Bytes of dynamic shared memory.
    x, w, bias, out, scratch : Place or None
        The arrays it reads and writes.
    constant : int
        Bytes of `w` that are copied to constant memory before it starts.
    scalars : tuple of (str, int)
        The fields of the CUDA `Problem`; those left out are 0.
    min_blocks : int
        Blocks that a multiprocessor shall hold at least, which limits registers; 0 leaves it to the compiler.
    paths : tuple of str
        The code paths that it takes.
    waste : float
        Lanes kept busy over those that compute a result, for estimates.
    """

    kernel: str
    template: tuple[tuple[str, str | int | bool], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    scalars: tuple[tuple[str, int], ...]
    x: Place | None = None
    w: Place | None = None
    bias: Place | None = None
    out: Place | None = None
    scratch: Place | None = None
    shared: int = 0
    constant: int = 0
    restrict: bool = False
    min_blocks: int = 0
    paths: tuple[str, ...] = ()
    waste: float = 1.0

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    def parameters(self) -> np.ndarray[Any, Any]:
        """The CUDA `Problem`, as one record to be passed by value."""
        record = np.zeros(1, parameter_dtype())
        for name, value in self.scalars:
            record[name] = value
        return record

    def refusal(self, limits: Limits) -> Refusal | None:
        """Why a device with `limits` can't run it, None if it can."""
        if self.threads > limits.threads:
            return Refusal(f"needs {self.threads} threads a block, this GPU has {limits.threads}")
        if self.shared > limits.shared:
            return Refusal(
                f"needs {_kilobytes(self.shared)} of shared memory, this GPU has {limits.shared // 1024}"
            )
        if self.constant > limits.constant:
            return Refusal(
                f"needs {_kilobytes(self.constant)} of constant memory for the filters, "
                f"this GPU has {limits.constant // 1024}"
            )
        return None

    def __str__(self) -> str:
        template = ", ".join(f"{name}={value}" for name, value in self.template)
        text = f"{self.kernel}<{template}>, grid {self.grid}, block {self.block}"
        if self.shared:
            text += f", {self.shared} bytes of shared memory"
        if self.constant:
            text += f", {self.constant} bytes of constant memory"
        return text


Step = Launch | Fill


@dataclass(frozen=True, slots=True)
class Program:
    """All steps of a call: `once`, then `each` for every slice of at most `images` images.

    Attributes
    ----------
    once, each : tuple of Launch or Fill
    images : int
    kept_bytes, scratch_bytes : int
        Sizes of the two parts of the workspace.
    borders : ndarray of int64
        What kernels look positions outside the image up in: the tables for rows above and below,
        columns before and after; empty without padding.
    overflow : Place or None
        The word that receives the index of the first result that doesn't fit.
    thresholds : tuple of Threshold
    """

    once: tuple[Step, ...]
    each: tuple[Step, ...]
    images: int
    kept_bytes: int
    scratch_bytes: int
    borders: np.ndarray[Any, Any]
    overflow: Place | None
    thresholds: tuple[Threshold, ...]

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernels among the steps."""
        return tuple(s for s in self.once + self.each if isinstance(s, Launch))


def _kilobytes(size: int) -> str:
    return f"{-(-size // 1024)} kB"


@functools.cache
def parameter_dtype() -> np.dtype[Any]:
    """The CUDA `Problem` as NumPy sees it, read from its declaration in problem.cuh."""
    text = (KERNELS / "problem.cuh").read_text(encoding="utf-8")
    body = re.search(r"^struct Problem \{$(.*?)^\};$", text, re.DOTALL | re.MULTILINE)
    if body is None:
        raise RuntimeError("problem.cuh declares no struct Problem")
    return np.dtype([(name, np.int64) for name in re.findall(r"^ *long long (\w+);", body[1], re.MULTILINE)])


def arithmetic_dtype(problem: Problem) -> np.dtype[Any]:
    """The type in which kernels keep the sum.

    Integer sums that wrap are kept in int32 or int64, whatever their width and sign: modulo
    2**bits the result is the same, and fewer kernels are compiled.
    """
    s = problem.sum_dtype
    if not is_integer(s):
        return s
    if s.itemsize <= 4:
        return np.dtype(np.int32)
    return np.dtype(np.int64) if problem.overflow == "wrap" else s


def is_dense(shape: tuple[int, ...], layout: Layout, itemsize: int) -> bool:
    """Whether an array is C-contiguous; axes of one element and empty arrays don't count."""
    dense = Layout.contiguous(shape, itemsize).strides
    return 0 in shape or all(n == 1 or s == d for n, s, d in zip(shape, layout.strides, dense, strict=True))


def aligned(size: int) -> int:
    """`size` rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


class Draft:
    """A program in the making. A rung's recipe calls its methods in the order of the steps.

    Parameters and attributes
    -------------------------
    problem : Problem
    layouts : Layouts
        Of the arrays on the device: native byte order, aligned elements.
    config : dict
        The value of every option of the rung; see `choose`.
    limits : Limits
    images : int
        Images a slice.
    operand, sum : numpy.dtype
        Types of a product's factors and of the sum inside the kernel. A recipe may set others.
    """

    def __init__(
        self, problem: Problem, layouts: Layouts, config: dict[str, Any], limits: Limits, images: int
    ) -> None:
        self.problem = problem
        self.layouts = layouts
        self.config = config
        self.limits = limits
        self.images = images
        self.operand = self.sum = arithmetic_dtype(problem)
        self._once: list[Step] = []
        self._each: list[Step] = []
        self._kept = 0
        self._scratch = 0
        self._thresholds: list[Threshold] = []
        self._overflow: Place | None = None
        if problem.overflow == "raise" and is_integer(problem.out_dtype):
            self._overflow = self.keep(8)
            self._once.append(Fill(self._overflow, 8, 0xFF))

    def choose(self, option: str, value: Any) -> Any:
        """The value of an option that None leaves to the plan: the caller's, else `value`, which the plan then shows."""
        if self.config[option] is None:
            self.config[option] = value
        return self.config[option]

    # -- workspace

    def keep(self, size: int) -> Place:
        """`size` bytes of workspace that live as long as the call."""
        place = Place("kept", self._kept)
        self._kept += aligned(size)
        return place

    def scratch(self, size: int) -> Place:
        """`size` bytes of workspace for one slice of images."""
        place = Place("scratch", self._scratch)
        self._scratch += aligned(size)
        return place

    # -- operands

    def filters(self, dtype: np.dtype[Any] | None = None) -> Stored:
        """Dense (OC, C/groups, KH, KW) filters of type `dtype`, the operand's by default.

        The caller's own array where it is just that; otherwise a step that prepares them is added.
        """
        p = self.problem
        wanted = self.operand if dtype is None else dtype
        strides = list(self.layouts.w.strides)
        offset = 0
        if p.flip:
            # Turned by 180 degrees: walked backwards from the last tap.
            offset = (p.kh - 1) * strides[2] + (p.kw - 1) * strides[3]
            strides[2:] = -strides[2], -strides[3]
        return self._prepared("w", offset, p.w_shape, tuple(strides), p.w_dtype, wanted)

    def bias(self) -> Place | None:
        """The dense (OC,) bias in the type of the sum; None without one."""
        p = self.problem
        if p.bias_dtype is None or self.layouts.bias is None:
            return None
        strides = (0, 0, 0, *self.layouts.bias.strides)
        return self._prepared("bias", 0, (1, 1, 1, p.oc), strides, p.bias_dtype, self.sum).place

    def _prepared(
        self,
        base: Literal["w", "bias"],
        offset: int,
        shape: tuple[int, int, int, int],
        strides: tuple[int, ...],
        dtype: np.dtype[Any],
        wanted: np.dtype[Any],
    ) -> Stored:
        same_type = dtype.itemsize == wanted.itemsize and (
            dtype == wanted or (is_integer(dtype) and is_integer(wanted))
        )
        if 0 in shape or (same_type and is_dense(shape, Layout(strides), dtype.itemsize)):
            return Stored(Place(base, offset), wanted)
        place = self.keep(math.prod(shape) * wanted.itemsize)
        steps = [s // dtype.itemsize for s in strides]
        names = ("n", "c", "h", "w", "x_n", "x_c", "x_h", "x_w")
        threads = 256
        self._once.append(
            Launch(
                kernel="prepare",
                template=tuple(_types(dtype, wanted, wanted, wanted, wanted, "long long").items()),
                grid=(min(max(-(-math.prod(shape) // threads), 1), 1024), 1, 1),
                block=(threads, 1, 1),
                scalars=tuple(zip(names, (*shape, *steps), strict=True)),
                x=Place(base, offset),
                out=place,
                paths=("prepared filters" if base == "w" else "prepared bias",),
            )
        )
        return Stored(place, wanted)

    # -- steps

    def fill(self, place: Place, size: int, value: int) -> None:
        """In every slice, set `size` bytes at `place` to the byte `value`."""
        self._each.append(Fill(place, size, value))

    def launch(
        self,
        kernel: str,
        *,
        tile: tuple[int, int],
        block: tuple[int, int] | None = None,
        w: Stored | None = None,
        bias: Place | None = None,
        scratch: Place | None = None,
        shared: int = 0,
        stage: int = 0,
        plane: tuple[int, int] | None = None,
        planes: int | None = None,
        largest_index: int = 0,
        min_blocks: int = 0,
        paths: tuple[str, ...] = (),
        tile_paths: tuple[str, str] = ("second row tile", "second column tile"),
        template: Template | None = None,
        scalars: Mapping[str, int] | None = None,
        full_tiles: bool = False,
    ) -> None:
        """In every slice, run a kernel whose blocks walk over the tiles of all planes of all images.

        Parameters
        ----------
        kernel : str
            The .cu file and the template in it.
        tile, block : (int, int)
            (rows, columns) of the plane that a block serves, and of its threads: one for each place by default.
        w, bias, scratch : Stored, Place
            What `filters`, `bias` and `scratch` gave.
        shared : int
            Bytes of shared memory, without those for filters.
        stage : int
            Channels held in shared memory at a time.
        plane, planes : (int, int), int
            (rows, columns) of a plane and planes of an image: by default those of the output.
        largest_index : int
            The largest number that an Index must hold in this kernel, besides the usual ones.
        min_blocks : int
            Blocks that a multiprocessor shall hold at least. The compiler's own choice, 0, may spill a few
            registers to fit more blocks; 1 never limits them.
        paths : tuple of str
            Names of the code paths that this launch takes, besides the usual ones.
        tile_paths : (str, str)
            Names of the paths that begin with the second tile downwards and across.
        template : dict
            Members of the instance that the kernel alone has, or that differ from the usual.
        scalars : mapping
            The same for the fields of the CUDA `Problem`.
        full_tiles : bool
            Whether rows of a tile that lie outside the plane take as long as others; columns do in any case.
        """
        p, config = self.problem, self.config
        of_output = plane is None
        plane = (p.oh, p.ow) if plane is None else plane
        planes = p.oc if planes is None else planes
        block = tile if block is None else block
        down, across = -(-plane[0] // tile[0]), -(-plane[1] // tile[1])
        work = (down * across, planes, self.images)
        if 0 in work:
            return
        grid = (
            min(work[0], self.limits.grid[0]),
            min(work[1], self.limits.grid[1]),
            min(work[2], self.limits.grid[2]),
        )
        filters = config.get("filters", "global") if w is not None else "global"
        filter_offset = 0
        if w is not None and filters == "shared":
            filter_offset = aligned(shared)
            shared = filter_offset + p.terms * self.operand.itemsize
        row_lanes = config.get("lanes") == "rows"
        index = self._index(max(largest_index, down * across, planes, *self._positions(tile)))
        members: Template = {
            **self._members(self.operand if w is None else w.dtype, index),
            "KH": 0,
            "KW": 0,
            "BORDERS": any(p.padding),
            "TILE_ROWS": tile[0],
            "TILE_COLUMNS": tile[1],
            "BLOCK_ROWS": block[0],
            "BLOCK_COLUMNS": block[1],
            "ROW_LANES": row_lanes,
            "FILTERS": filters.upper(),
            **(template or {}),
        }
        fields = {
            **self._scalars(),
            "planes": planes,
            "tiles_down": down,
            "tiles_across": across,
            "stage": stage,
            "filter_offset": filter_offset,
            **(scalars or {}),
        }
        taken = {
            tile_paths[0]: down > 1,
            tile_paths[1]: across > 1,
            "several tiles a block": grid != work,
        }
        if of_output:
            self.threshold("oh", tile[0] + 1, tile_paths[0])
            self.threshold("ow", tile[1] + 1, tile_paths[1])
        self._each.append(
            Launch(
                kernel=kernel,
                template=tuple(members.items()),
                grid=grid,
                block=(block[0], block[1], 1) if row_lanes else (block[1], block[0], 1),
                scalars=tuple(fields.items()),
                x=Place("x"),
                w=None if w is None else w.place,
                bias=bias,
                out=Place("out"),
                scratch=scratch,
                shared=shared,
                constant=p.oc * p.terms * w.dtype.itemsize if w is not None and filters == "constant" else 0,
                restrict=bool(config.get("restrict", False)),
                min_blocks=min_blocks,
                paths=(kernel, *paths, *(name for name, yes in taken.items() if yes)),
                waste=across * tile[1] / plane[1] * (down * tile[0] / plane[0] if full_tiles else 1),
            )
        )

    def input_tile(self, tile: tuple[int, int]) -> tuple[int, int]:
        """(rows, columns) of the input that a tile of outputs needs, halo included."""
        p = self.problem
        return (tile[0] - 1) * p.stride[0] + p.extent[0], (tile[1] - 1) * p.stride[1] + p.extent[1]

    def threshold(self, axis: Literal["oh", "ow", "oc", "n", "c", "macs"], value: int, path: str) -> None:
        """Publish the size at which `path` begins."""
        self._thresholds.append(Threshold(axis, value, path))

    def program(self) -> Program:
        """What has been drawn so far."""
        p = self.problem
        tables = (
            *border_maps(p.h, p.padding[0], p.padding[1], p.boundary),
            *border_maps(p.w, p.padding[2], p.padding[3], p.boundary),
        )
        return Program(
            once=tuple(self._once),
            each=tuple(self._each),
            images=self.images,
            kept_bytes=self._kept,
            scratch_bytes=self._scratch,
            borders=np.concatenate(tables),
            overflow=self._overflow,
            thresholds=tuple(dict.fromkeys(self._thresholds)),
        )

    # -- what all kernels have in common

    def _steps(self, layout: Layout, dtype: np.dtype[Any]) -> list[int]:
        return [s // dtype.itemsize for s in layout.strides]

    def _positions(self, tile: tuple[int, int]) -> tuple[int, ...]:
        """The largest numbers that a kernel over this problem meets inside a plane."""
        p = self.problem
        x, out = self._steps(self.layouts.x, p.x_dtype), self._steps(self.layouts.out, p.out_dtype)
        return (
            (p.oh + tile[0]) * p.stride[0] + p.extent[0],
            (p.ow + tile[1]) * p.stride[1] + p.extent[1],
            p.h + p.padding[0] + p.padding[1] + tile[0],
            p.w + p.padding[2] + p.padding[3] + tile[1],
            abs(x[2]) * p.h + abs(x[3]) * p.w,
            abs(out[2]) * (p.oh + tile[0]) + abs(out[3]) * (p.ow + tile[1]),
            self.images,
            p.c,
            p.oc,
            p.terms,
        )

    def _index(self, largest: int) -> str:
        return "int" if largest < _INDEX_LIMIT else "long long"

    def _members(self, w: np.dtype[Any], index: str) -> Template:
        """Types and overflow rule; where several would give the same bits, always the same one of them."""
        p = self.problem
        x, out, rule = p.x_dtype, p.out_dtype, p.overflow
        modulo = is_integer(p.sum_dtype) and rule == "wrap"
        if modulo and is_integer(x) and x.itemsize >= self.operand.itemsize:
            x = _signed(x)
        if modulo:
            out = _signed(out)
        if not is_integer(out) or (rule == "saturate" and not is_integer(p.sum_dtype)):
            rule = "wrap"
        return {**_types(x, w, self.operand, self.sum, out, index), "OVERFLOW": rule.upper()}

    def _scalars(self) -> dict[str, int]:
        p = self.problem
        fill = np.zeros(2, np.int64)
        with np.errstate(over="ignore"):
            operand = np.asarray(p.fillvalue).astype(self.operand)
        fill.view(np.uint8)[: operand.nbytes] = np.frombuffer(operand.tobytes(), np.uint8)
        x, out = self._steps(self.layouts.x, p.x_dtype), self._steps(self.layouts.out, p.out_dtype)
        return {
            "n": self.images,
            "c": p.c,
            "h": p.h,
            "w": p.w,
            "oc": p.oc,
            "oh": p.oh,
            "ow": p.ow,
            "kh": p.kh,
            "kw": p.kw,
            "group_c": p.c // p.groups,
            "group_oc": p.oc // p.groups,
            "stride_y": p.stride[0],
            "stride_x": p.stride[1],
            "dilation_y": p.dilation[0],
            "dilation_x": p.dilation[1],
            "top": p.padding[0],
            "bottom": p.padding[1],
            "left": p.padding[2],
            "right": p.padding[3],
            **dict(zip(("x_n", "x_c", "x_h", "x_w"), x, strict=True)),
            **dict(zip(("out_n", "out_c", "out_h", "out_w"), out, strict=True)),
            "fill_low": int(fill[0]),
            "fill_high": int(fill[1]),
        }


def _signed(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.dtype(f"int{8 * dtype.itemsize}")


def _types(
    x: np.dtype[Any],
    w: np.dtype[Any],
    operand: np.dtype[Any],
    sum_: np.dtype[Any],
    out: np.dtype[Any],
    index: str,
) -> Template:
    names = zip(("X", "W", "Operand", "Sum", "Out"), (x, w, operand, sum_, out), strict=True)
    return {**{name: CUDA_TYPES[dtype.name] for name, dtype in names}, "Index": index}


def filter_loops(draft: Draft) -> Template:
    """The members KH, KW, UNROLL_ROWS and UNROLL_COLUMNS for the option ``loops``.

    "rolled": sizes known at run time, one turn after another. "pragma": the same, four turns at a time.
    "unrolled": sizes compiled in where they are among `COMPILED_ROWS` and `COMPILED_COLUMNS`.
    """
    p, loops = draft.problem, draft.config["loops"]
    if loops != "unrolled":
        turns = 1 if loops == "rolled" else 4
        return {"KH": 0, "KW": 0, "UNROLL_ROWS": turns, "UNROLL_COLUMNS": turns}
    kh = p.kh if p.kh in COMPILED_ROWS else 0
    kw = p.kw if p.kw in COMPILED_COLUMNS else 0
    return {"KH": kh, "KW": kw, "UNROLL_ROWS": kh or 1, "UNROLL_COLUMNS": kw or 4}


Recipe = Callable[[Draft], None]


def draw(
    recipe: Recipe,
    problem: Problem,
    layouts: Layouts,
    config: dict[str, Any],
    limits: Limits,
    images: int,
) -> Program | Refusal:
    """The program that `recipe` gives for slices of `images` images, or why `limits` rule it out."""
    draft = Draft(problem, layouts, config, limits, images)
    try:
        recipe(draft)
    except NoLaunch as e:
        return Refusal(str(e))
    program = draft.program()
    for launch in program.launches:
        refusal = launch.refusal(limits)
        if refusal is not None:
            return refusal
    return program


def dense_layouts(problem: Problem, layouts: Layouts) -> Layouts:
    """Layouts of device copies of arrays that live on the host.

    Images stay outermost, for slices; the other axes keep the order that they have in the host's
    memory, so that copying is copying and not transposing.
    """
    p = problem

    def dense(shape: tuple[int, ...], layout: Layout, itemsize: int, outer: int) -> Layout:
        inner = sorted(range(outer, len(shape)), key=lambda a: -abs(layout.strides[a]))
        order = [*range(outer), *inner]
        strides = [0] * len(shape)
        step = itemsize
        for axis in reversed(order):
            strides[axis] = step
            step *= shape[axis]
        return Layout(tuple(strides))

    return Layouts(
        dense(p.x_shape, layouts.x, p.x_dtype.itemsize, 1),
        Layout.contiguous(p.w_shape, p.w_dtype.itemsize),
        None if layouts.bias is None or p.bias_dtype is None else Layout((p.bias_dtype.itemsize,)),
        dense(p.out_shape, layouts.out, p.out_dtype.itemsize, 1),
    )
