"""Problem and options -> launches: plain records that can be printed, compared and tested without a GPU.

A rung describes its work to a `Draft`: which kernels, which block, how much shared memory. The draft adds what
all kernels have in common (types, strides, grid, prepared filters, borders) and checks the limits of the device.
The result, a `Program`, is run by an executor. Nothing here knows CuPy.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from convpar.backend import Layout, Layouts, Refusal, Threshold
from convpar.boundary import border_maps
from convpar.problem import Problem, is_float, is_integer

KERNELS = Path(__file__).parent / "kernels"

COMPILED_ROWS = (1, 2, 3, 5, 7)
COMPILED_COLUMNS = (1, 2, 3, 5, 7, 9, 11)
"""Filter sizes that are compiled in; others are known at run time only. Both sets bound the number of compilations."""

ALIGNMENT = 256
"""Bytes to which every part of a workspace is aligned, as device memory is."""

_INDEX_LIMIT = 2**30
_GRID_Y = _GRID_Z = 65535

CUDA_NAMES = {
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What one device allows, and roughly how fast it is.

    Attributes
    ----------
    name : str
        The device, for messages and for people.
    threads : int
        Threads a block.
    shared, shared_optin : int
        Bytes of shared memory a block, and with a kernel's explicit consent.
    constant : int
        Bytes of constant memory a module.
    grid : (int, int, int)
        Blocks along x, y and z.
    multiprocessors : int
    fma_rate : float
        float32 multiply-accumulates a second at best, for estimates.
    bandwidth : float
        Bytes a second to and from device memory at best, for estimates.
    """

    name: str
    threads: int = 1024
    shared: int = 48 * 1024
    shared_optin: int = 48 * 1024
    constant: int = 64 * 1024
    grid: tuple[int, int, int] = (2**31 - 1, _GRID_Y, _GRID_Z)
    multiprocessors: int = 1
    fma_rate: float = 1e12
    bandwidth: float = 1e11


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array of a launch is: in one of the call's arrays or in the workspace.

    `base` is "x", "w", "bias", "out", "kept" (workspace filled once a call) or "scratch" (workspace
    of one slice of images); `offset` counts bytes.
    """

    base: Literal["x", "w", "bias", "out", "kept", "scratch"]
    offset: int = 0


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
        The kernel's file and template: "naive" is ``naive`` in naive.cu.
    template : tuple of (str, str, int or bool)
        The members of its instance; strings are types.
    grid, block : (int, int, int)
    shared : int
        Bytes of dynamic shared memory.
    x, w, bias, out, scratch : Place or None
        The arrays it reads and writes.
    scalars : tuple of (str, int)
        The fields of the CUDA `Problem`.
    constant : int
        Bytes of `w` that are copied to constant memory before it starts.
    paths : tuple of str
        The code paths that it takes.
    """

    kernel: str
    template: tuple[tuple[str, str | int | bool], ...]
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    x: Place | None
    w: Place | None
    bias: Place | None
    out: Place | None
    scratch: Place | None
    scalars: tuple[tuple[str, int], ...]
    constant: int = 0
    paths: tuple[str, ...] = ()

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return math.prod(self.block)

    def parameters(self) -> np.ndarray[Any, Any]:
        """The CUDA `Problem`, as one record to pass by value."""
        record = np.zeros(1, parameter_dtype())
        for name, value in self.scalars:
            record[name] = value
        record.flags.writeable = False
        return record

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
    """All steps of a call: `once`, then `each` for every slice of images.

    `kept_bytes` and `slice_bytes` are the sizes of the two parts of the workspace. `borders` are the tables
    that kernels look positions outside the image up in, empty without padding. `overflow` is the place of the
    word that holds the index of the first result that didn't fit, None if no one asked.
    """

    once: tuple[Step, ...]
    each: tuple[Step, ...]
    kept_bytes: int
    slice_bytes: int
    borders: np.ndarray[Any, Any]
    overflow: Place | None
    thresholds: tuple[Threshold, ...]

    @property
    def steps(self) -> tuple[Step, ...]:
        """`once` and `each`."""
        return self.once + self.each

    @property
    def launches(self) -> tuple[Launch, ...]:
        """The kernels among the steps."""
        return tuple(s for s in self.steps if isinstance(s, Launch))


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

    Integers narrower than 32 bits, and unsigned ones that wrap, are computed in a signed type of 32 or 64
    bits: modulo 2**bits the result is the same, and fewer kernels are compiled.
    """
    s = problem.sum_dtype
    if not is_integer(s):
        return s
    if s.itemsize <= 4:
        return np.dtype(np.int32)
    return s if problem.overflow != "wrap" else np.dtype(np.int64)


def is_dense(shape: tuple[int, ...], layout: Layout, itemsize: int) -> bool:
    """Whether the array is C-contiguous; axes of one element don't count."""
    if math.prod(shape) == 0:
        return True
    dense = Layout.contiguous(shape, itemsize).strides
    return all(n == 1 or s == d for n, s, d in zip(shape, layout.strides, dense, strict=True))


def compiled_size(size: int, known: tuple[int, ...]) -> int:
    """`size` where it is compiled in, else 0."""
    return size if size in known else 0


def aligned(size: int) -> int:
    """`size` rounded up to `ALIGNMENT`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass
class Draft:
    """A program in the making, for `images` images at a time. Rungs call its methods; see `Rung.draft`.

    Attributes
    ----------
    problem : Problem
    layouts : Layouts
        Of the arrays on the device: native byte order, aligned.
    config : mapping
        The value of every option.
    limits : Limits
    images : int
        Images a slice.
    operand : numpy.dtype
        The type of a product's factors, the sum's unless the rung says otherwise.
    sum : numpy.dtype
        The type of the sum inside the kernel.
    """

    problem: Problem
    layouts: Layouts
    config: Mapping[str, Any]
    limits: Limits
    images: int
    operand: np.dtype[Any] = field(init=False)
    sum: np.dtype[Any] = field(init=False)
    _once: list[Step] = field(init=False, default_factory=list)
    _each: list[Step] = field(init=False, default_factory=list)
    _kept: int = field(init=False, default=0)
    _scratch: int = field(init=False, default=0)
    _thresholds: list[Threshold] = field(init=False, default_factory=list)
    _overflow: Place | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.operand = self.sum = arithmetic_dtype(self.problem)

    # -- workspace

    def keep(self, size: int) -> Place:
        """`size` bytes of workspace that hold for the whole call."""
        place = Place("kept", self._kept)
        self._kept += aligned(size)
        return place

    def scratch(self, size: int) -> Place:
        """`size` bytes of workspace for one slice of images."""
        place = Place("scratch", self._scratch)
        self._scratch += aligned(size)
        return place

    # -- operands

    def filters(self, dtype: np.dtype[Any] | None = None) -> Place:
        """Where the dense (OC, C/groups, KH, KW) filters of type `dtype` are; the operand's by default.

        They are the caller's own array where that fits, else a step that prepares them is added.
        """
        p = self.problem
        return self._prepared("w", p.w_shape, p.w_dtype, self.layouts.w, dtype or self.operand, p.flip)

    def bias(self) -> Place | None:
        """Where the dense (OC,) bias in the type of the sum is; None without one."""
        p = self.problem
        if p.bias_dtype is None or self.layouts.bias is None:
            return None
        shape = (1, 1, 1, p.oc)
        layout = Layout((0, 0, 0, *self.layouts.bias.strides))
        return self._prepared("bias", shape, p.bias_dtype, layout, self.sum, False)

    def _prepared(
        self,
        base: Literal["w", "bias"],
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        layout: Layout,
        wanted: np.dtype[Any],
        flip: bool,
    ) -> Place:
        flip = flip and shape[2:] != (1, 1)
        if CUDA_NAMES[dtype.name] == CUDA_NAMES[wanted.name] and is_dense(shape, layout, dtype.itemsize) and not flip:
            return Place(base)
        strides = [s // dtype.itemsize for s in layout.strides]
        first = 0
        if flip:
            # Turned by 180 degrees: walked backwards from the last tap.
            first = sum((n - 1) * s for n, s in zip(shape[2:], strides[2:], strict=True) if n)
            strides[2:] = [-s for s in strides[2:]]
        place = self.keep(math.prod(shape) * wanted.itemsize)
        if math.prod(shape):
            threads = 256
            self._once.append(
                Launch(
                    kernel="prepare",
                    template=self._types(dtype, wanted, wanted, wanted, wanted),
                    grid=(min(-(-math.prod(shape) // threads), 1024), 1, 1),
                    block=(threads, 1, 1),
                    shared=0,
                    x=Place(base, first * dtype.itemsize),
                    w=None,
                    bias=None,
                    out=place,
                    scratch=None,
                    scalars=tuple(zip(("n", "c", "h", "w", "x_n", "x_c", "x_h", "x_w"), (*shape, *strides), strict=True)),
                    paths=(f"{'filters' if base == 'w' else 'bias'} prepared",),
                )
            )
        return place

    # -- steps

    def fill(self, place: Place, size: int, value: int) -> None:
        """Before each slice's launches that follow, set bytes."""
        self._each.append(Fill(place, size, value))

    def launch(
        self,
        kernel: str,
        *,
        tile: tuple[int, int],
        block: tuple[int, int],
        shared: int = 0,
        w: Place | None = None,
        bias: Place | None = None,
        scratch: Place | None = None,
        planes: int | None = None,
        plane: tuple[int, int] | None = None,
        stage: int = 0,
        paths: tuple[str, ...] = (),
        **template: str | int | bool,
    ) -> None:
        """Add a kernel whose blocks walk over tiles of planes.

        Parameters
        ----------
        kernel : str
            The .cu file and the template in it.
        tile, block : (int, int)
            (rows, columns) of the plane that a block serves, and of its threads.
        shared : int
            Bytes of shared memory, without those for filters.
        w, bias, scratch : Place
            What `filters`, `bias` and `scratch` gave.
        planes, plane : int, (int, int)
            How many planes an image has and their (rows, columns): by default those of the output.
        stage : int
            Channels in shared memory at a time.
        paths : tuple of str
            Names of the code paths that this launch takes.
        **template
            Further members of the instance, and those whose default doesn't fit.
        """
        p, config = self.problem, self.config
        planes = p.oc if planes is None else planes
        plane = (p.oh, p.ow) if plane is None else plane
        down, across = -(-plane[0] // tile[0]), -(-plane[1] // tile[1])
        work = (down * across, planes, self.images)
        if 0 in work:
            return
        grid = tuple(min(a, b) for a, b in zip(work, self.limits.grid, strict=True))
        row_lanes = config.get("lanes") == "rows"
        where = config.get("filters", "global")
        size = p.terms * (self.operand if where == "shared" else self._stored(template)).itemsize
        if where == "shared":
            shared = aligned_to(shared, 16) + size
        once = self._overflow_word() if p.overflow == "raise" and is_integer(p.out_dtype) else None
        members = dict(self._types(p.x_dtype, self._stored(template), self.operand, self.sum, p.out_dtype))
        members |= {
            "Index": self._index(tile, planes, plane),
            "KH": 0,
            "KW": 0,
            "BORDERS": any(p.padding),
            "OVERFLOW": p.overflow.upper() if is_integer(p.out_dtype) else "WRAP",
            "TILE_ROWS": tile[0],
            "TILE_COLUMNS": tile[1],
            "ROW_LANES": row_lanes,
            "FILTERS": where.upper(),
            "UNROLL": 1,
            "RESTRICT": config.get("restrict", False),
        }
        members |= template
        paths = (
            *paths,
            *(("second row tile",) if down > 1 else ()),
            *(("second column tile",) if across > 1 else ()),
            *(("several tiles a block",) if grid != work else ()),
        )
        if plane == (p.oh, p.ow):
            self._thresholds += [
                Threshold("oh", tile[0] + 1, "second row tile"),
                Threshold("ow", tile[1] + 1, "second column tile"),
            ]
        self._each.append(
            Launch(
                kernel=kernel,
                template=tuple(members.items()),
                grid=grid,  # type: ignore[arg-type]
                block=(block[0], block[1], 1) if row_lanes else (block[1], block[0], 1),
                shared=shared,
                x=Place("x"),
                w=w,
                bias=bias,
                out=Place("out"),
                scratch=scratch,
                scalars=tuple(self._scalars(planes, (down, across), stage).items()),
                constant=size * p.oc if where == "constant" else 0,
                paths=paths,
            )
        )
        del once

    def threshold(self, axis: Any, value: int, path: str) -> None:
        """Publish the size at which `path` begins."""
        self._thresholds.append(Threshold(axis, value, path))
