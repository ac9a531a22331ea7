"""Recipes of the rungs that see a convolution as matrix products. For their words see kernels/gemm.cuh."""

from __future__ import annotations

import numpy as np

from convpar.backend import Option

from .launch import CUDA_TYPES, Draft, NoLaunch, Place, Template, filter_loops

_REUSE = {"none": "NO_REUSE", "registers": "IN_REGISTERS", "shared": "IN_SHARED"}
_SHAPES = {"16x16x16": (16, 16), "8x32x16": (8, 32)}
_WARP = 32
_PATHS = "second tile of channels", "second tile of positions"

TILE = Option("outputs (channels, positions) of a thread block; 16 x 16 times block if None", kind="pair")
BLOCK = Option("outputs (channels, positions) of a thread, in registers", (1, 1),
               ((1, 1), (1, 2), (2, 1), (2, 2), (1, 4), (4, 1), (4, 4), (8, 4), (8, 8)))  # fmt: skip
DEPTH = Option("taps in shared memory at a time", 16, (4, 8, 16, 32))
SIZES = Option("filter size: at run time, or compiled in", "rolled", ("rolled", "unrolled"))
REUSE = Option("where a thread keeps the taps it loads: nowhere (it divides each time), in registers, in a shared table",
               "none", tuple(_REUSE))  # fmt: skip

SHAPE = Option("channels x positions x taps of a warp's product; by the output channels if None",
               allowed=(None, *_SHAPES))  # fmt: skip
WARPS = Option("warps of a thread block (along channels, along positions); by the output channels if None",
               allowed=(None, (1, 1), (1, 2), (1, 4), (1, 8), (2, 2), (2, 4), (4, 2), (4, 4)))  # fmt: skip
SLAB = Option("taps in shared memory at a time; by the filter's size if None", allowed=(None, 16, 32))


def im2col(draft: Draft) -> None:
    """Patches written out as (image, channel and tap, position), then multiplied by the filters."""
    p = draft.problem
    positions = p.oh * p.ow
    size = draft.images * p.c * p.kh * p.kw * positions * draft.operand.itemsize
    patches = draft.scratch(size) if size else None
    draft.launch(
        "im2col",
        tile=(1, 256),
        plane=(1, positions),
        planes=p.c,
        scratch=patches,
        min_blocks=1,
        tile_paths=("second row of positions", "second run of positions"),
        template=filter_loops(draft),
    )
    if positions:
        draft.threshold("ow", 256 // p.oh + 1, "second run of positions")
    # The product looks at no image, so one kernel serves all types of them.
    template: Template = {"X": CUDA_TYPES[draft.operand.name], "BORDERS": False}
    _by_threads(draft, "gemm", template, scratch=patches, largest_index=p.terms * positions)


def fused(draft: Draft) -> None:
    """The same product, its patches taken from the image as they are needed."""
    _by_threads(draft, "fused", _taps(draft), shared=_table_bytes(draft), largest_index=_reach(draft))


def tensorcore(draft: Draft) -> None:
    """The same on matrix units, factors in half precision."""
    p = draft.problem
    draft.operand = np.dtype(np.float16)
    channels = p.oc // p.groups
    rows, columns = _SHAPES[draft.choose("block", "16x16x16" if channels > 8 else "8x32x16")]
    down, across = draft.choose("warps", (1 if channels <= rows else 2 if channels <= 2 * rows else 4, 4))
    depth = draft.choose("depth", 16 if p.terms <= 16 else 32)
    tile = down * rows, across * columns
    # See PairSlab for the pitch.
    pitches = (n if n % 16 == 8 else n + 8 for n in tile)
    _product(
        draft,
        "tensorcore",
        tile,
        threads=(down * across, _WARP),
        shared=_table_bytes(draft) + depth // 2 * sum(pitches) * 4,
        template=_taps(draft) | {"WARP_ROWS": rows, "WARP_COLUMNS": columns},
        largest_index=_reach(draft),
    )


def _by_threads(
    draft: Draft,
    kernel: str,
    template: Template,
    shared: int = 0,
    scratch: Place | None = None,
    largest_index: int = 0,
) -> None:
    """A product whose threads each compute a block of outputs; `shared` comes on top of the slabs."""
    config = draft.config
    block, depth = config["block"], config["depth"]
    tile = draft.choose("tile", (16 * block[0], 16 * block[1]))
    if tile[0] % block[0] or tile[1] % block[1]:
        raise NoLaunch(f"tile {tile} is not made up of whole blocks {block}")
    threads = tile[0] // block[0], tile[1] // block[1]
    if threads[0] * threads[1] < tile[1]:
        raise NoLaunch(
            f"each of the tile's {tile[1]} positions needs a thread that loads it, "
            f"and block {block} leaves {threads[0] * threads[1]}"
        )
    # See Slabs.
    slabs = (tile[0] * (depth + 1) + depth * tile[1]) * draft.operand.itemsize
    _product(
        draft,
        kernel,
        tile,
        threads,
        shared + slabs,
        template,
        scratch,
        largest_index,
        # One output a thread needs many threads more than it needs registers.
        min_blocks=0 if block == (1, 1) and draft.operand.itemsize < 16 else 1,
    )


def _product(
    draft: Draft,
    kernel: str,
    tile: tuple[int, int],
    threads: tuple[int, int],
    shared: int,
    template: Template,
    scratch: Place | None = None,
    largest_index: int = 0,
    min_blocks: int = 1,
) -> None:
    """The launch over the matrices (channels of a group, positions) of outputs, one for each group and image."""
    p, depth = draft.problem, draft.config["depth"]
    positions = p.oh * p.ow
    if positions:
        draft.threshold("oc", p.groups * tile[0] + 1, _PATHS[0])
        draft.threshold("ow", tile[1] // p.oh + 1, _PATHS[1])
        draft.threshold("oh", tile[1] // p.ow + 1, _PATHS[1])
        draft.threshold("c", p.groups * (depth // (p.kh * p.kw) + 1), "several slabs")
    draft.launch(
        kernel,
        tile=tile,
        block=threads,
        plane=(p.oc // p.groups, positions),
        planes=p.groups,
        w=draft.filters(),
        bias=draft.bias(),
        scratch=scratch,
        shared=shared,
        largest_index=max(largest_index, positions + tile[1], p.terms + 2 * depth),
        min_blocks=min_blocks,
        tile_paths=_PATHS,
        paths=("several slabs",) if p.terms > depth else (),
        template={**template, "DEPTH": depth},
        full_tiles=True,
    )


def _taps(draft: Draft) -> Template:
    """The members by which a kernel finds the samples of its patches."""
    return {**filter_loops(draft), "REUSE": _REUSE[draft.config["reuse"]]}


def _reach(draft: Draft) -> int:
    """The largest offset from a group's first sample to another of its samples."""
    p = draft.problem
    _, c, h, w = (abs(s) // p.x_dtype.itemsize for s in draft.layouts.x.strides)
    return c * (p.c // p.groups) + h * p.h + w * p.w


def _table_bytes(draft: Draft) -> int:
    """Bytes of TAP_TABLE_BYTES."""
    return 24 * draft.config["depth"] if draft.config["reuse"] == "shared" else 0
