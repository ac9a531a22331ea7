"""The GPU rungs, one row each, and the recipes that draw their launches.

The recipes of the matrix products are in gemm_recipes.py. To add a rung, write its `Rung` among `ROWS`; and, if no kernel there is can do it with other options, a recipe
and a .cu file in kernels/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from convpar.backend import Capabilities, ErrorContract, Option
from convpar.problem import is_integer

from . import gemm_recipes
from .launch import PLAIN_SHARED, Draft, filter_loops
from .plan import Rung

__all__ = ["ROWS"]


def _naive(draft: Draft) -> None:
    """One thread per output."""
    draft.launch(
        "naive",
        tile=draft.config["tile"],
        w=draft.filters(),
        bias=draft.bias(),
        template=filter_loops(draft),
    )


def _tiled(draft: Draft) -> None:
    """The input of a tile in shared memory: as many channels at a time as fit."""
    p, config = draft.problem, draft.config
    tile, loading = config["tile"], config["loading"]
    rows, columns = draft.input_tile(tile)
    block = (rows, columns) if loading == "full" else tile
    channel = rows * columns * draft.operand.itemsize
    channels = p.c // p.groups
    filters = p.terms * draft.operand.itemsize if config["filters"] == "shared" else 0
    # More than the plain size would be had only at the cost of blocks that run beside this one.
    fitting = max((PLAIN_SHARED - filters) // channel, 1)
    stage = max(min(fitting, channels), 1)
    draft.threshold("c", fitting * p.groups + 1, "several stages")
    draft.launch(
        "tiled",
        tile=tile,
        block=block,
        w=draft.filters(),
        bias=draft.bias(),
        shared=stage * channel,
        stage=stage,
        # 16-byte factors spill where the compiler aims at full occupancy.
        min_blocks=1 if draft.operand.itemsize == 16 else 0,
        paths=("several stages",) if stage < channels else (),
        template={
            **filter_loops(draft),
            "LAYOUT": "CHANNEL_LAST" if config["layout"] == "channel-last" else "CHANNEL_FIRST",
            "LOADS_DOWN": -(-rows // block[0]) if loading == "unrolled" else 1,
            "LOADS_ACROSS": -(-columns // block[1]) if loading == "unrolled" else 1,
        },
    )


def _half(draft: Draft) -> None:
    """One thread per output, factors and perhaps sums in half precision."""
    half, single = np.dtype(np.float16), np.dtype(np.float32)
    draft.operand = half
    draft.sum = half if draft.config["sum"] == "half" else single
    # float32 filters stay as they are: each tap converts both of its factors.
    draft.launch(
        "naive",
        tile=draft.config["tile"],
        w=draft.filters(draft.problem.w_dtype),
        bias=draft.bias(),
        template=filter_loops(draft),
    )


def _atomic(draft: Draft) -> None:
    """One thread per input; sums in the output where its type can hold them, else in the workspace."""
    p = draft.problem
    tile = draft.config["tile"]
    modulo = is_integer(draft.sum) and is_integer(p.out_dtype) and p.overflow == "wrap"
    in_place = draft.sum == p.out_dtype or (modulo and draft.sum.itemsize == p.out_dtype.itemsize)
    filters, bias = draft.filters(), draft.bias()
    sums = None
    if in_place:
        draft.launch("epilogue", tile=tile, bias=bias, template={"IN_PLACE": True})
    else:
        size = draft.images * p.oc * p.oh * p.ow * draft.sum.itemsize
        sums = draft.scratch(size)
        draft.fill(sums, size, 0)
    draft.launch(
        "atomic",
        tile=tile,
        plane=(p.h + p.padding[0] + p.padding[1], p.w + p.padding[2] + p.padding[3]),
        planes=p.c,
        largest_index=p.oh * p.ow,
        w=filters,
        scratch=sums,
        tile_paths=("second row tile of the input", "second column tile of the input"),
        template={"IN_PLACE": in_place},
    )
    if not in_place:
        draft.launch(
            "epilogue",
            tile=tile,
            bias=bias,
            scratch=sums,
            largest_index=p.oh * p.ow,
            template={"IN_PLACE": False},
        )


FILTERS = Option("where the filters are read from", "global", ("global", "constant", "shared"))
LOOPS = Option("filter loops: sizes at run time, the same with a pragma, or compiled in", "rolled",
               ("rolled", "pragma", "unrolled"))  # fmt: skip
RESTRICT = Option("whether pointers are declared __restrict__", False, (False, True))
LANES = Option("what neighbouring threads walk along", "columns", ("columns", "rows"))
TILE = Option("outputs (rows, columns) of a thread block", (16, 16), kind="pair")

LOADING = Option("threads that load a tile: as many as outputs, in strides; the same, unrolled; as many as inputs",
                 "strided", ("strided", "unrolled", "full"))  # fmt: skip
LAYOUT = Option("order of the tile in shared memory", "channel-first", ("channel-first", "channel-last"))

_NAIVE = {"filters": FILTERS, "loops": LOOPS, "restrict": RESTRICT, "lanes": LANES, "tile": TILE}
_TILED = _NAIVE | {"loading": LOADING, "layout": LAYOUT}

_HALF = _NAIVE | {"sum": Option("type of the sum", "half", ("half", "float"))}
_ATOMIC = {"filters": replace(FILTERS, allowed=("global", "constant")), "lanes": LANES, "tile": TILE}

_PRODUCT = {"filters": replace(FILTERS, allowed=("global", "constant")), "restrict": RESTRICT}
_BLOCKS = {"tile": gemm_recipes.TILE, "block": gemm_recipes.BLOCK, "depth": gemm_recipes.DEPTH}
_TAPS = {"loops": gemm_recipes.SIZES, "reuse": gemm_recipes.REUSE}
# Plain by default where it repeats a published kernel; the matrix units would only wait for divisions.
_UNITS = _TAPS | {
    "reuse": replace(gemm_recipes.REUSE, default="shared"),
    "block": gemm_recipes.SHAPE,
    "warps": gemm_recipes.WARPS,
    "depth": gemm_recipes.SLAB,
}

_ALL = Capabilities(
    device="gpu",
    error=ErrorContract(flushes_subnormals=True),
)


def _fixed(choices: Mapping[str, Option], **values: Any) -> Mapping[str, Option]:
    """`choices` with some options fixed."""
    fixed = {name: replace(choices[name], default=value, allowed=(value,)) for name, value in values.items()}
    return {**choices, **fixed}


# Efficiencies are from benchmarks/results/studies/nvidia-h200.json, experiments "ladder" and "images": multiply-accumulates
# a second over what the H200's lanes could do at their highest clock, each rung's best among the network's layers with 10 000
# images and one channel of 4096 x 4096, so that the fastest there is the cheapest here (a test compares them). gpu-atomic
# and gpu-half have none: nobody's first choice.
ROWS = (
    Rung(
        name="gpu-naive",
        summary="one thread per output; a grid over image tiles, output channels and images",
        builds_on=None,
        recipe=_naive,
        kernels=("naive",),
        choices=_NAIVE,
        capabilities=_ALL,
        efficiency=0.049,
    ),
    Rung(
        name="gpu-constant",
        summary="filters in constant memory, which hands one weight to a whole warp at a time",
        builds_on="gpu-naive",
        recipe=_naive,
        kernels=("naive",),
        choices=_fixed(_NAIVE, filters="constant"),
        capabilities=_ALL,
        efficiency=0.052,
    ),
    Rung(
        name="gpu-tiled",
        summary="the input tile with its halo in shared memory",
        builds_on="gpu-naive",
        recipe=_tiled,
        kernels=("tiled",),
        choices=_TILED,
        capabilities=_ALL,
        efficiency=0.048,
    ),
    Rung(
        name="gpu-tiled-constant",
        summary="input tile in shared memory and filters in constant memory",
        builds_on="gpu-tiled",
        recipe=_tiled,
        kernels=("tiled",),
        choices=_fixed(_TILED, filters="constant"),
        capabilities=_ALL,
        efficiency=0.065,
    ),
    Rung(
        name="gpu-unrolled",
        summary="filter loops unrolled at compile time, pointers declared __restrict__",
        builds_on="gpu-naive",
        recipe=_naive,
        kernels=("naive",),
        choices=_fixed(_NAIVE, loops="unrolled", restrict=True),
        capabilities=_ALL,
        efficiency=0.070,
        efficiency_beyond=0.060,
    ),
    Rung(
        name="gpu-im2col",
        summary="patches written out as a matrix, then a tiled matrix product; the batch in slices",
        builds_on="gpu-tiled",
        recipe=gemm_recipes.im2col,
        kernels=("im2col", "gemm"),
        choices=_PRODUCT | {"loops": LOOPS} | _BLOCKS,
        capabilities=_ALL,
        efficiency=0.065,
    ),
    Rung(
        name="gpu-fused",
        summary="the matrix product takes its patches from the image; they are never written",
        builds_on="gpu-im2col",
        recipe=gemm_recipes.fused,
        kernels=("fused",),
        choices=_PRODUCT | _TAPS | _BLOCKS,
        capabilities=_ALL,
        efficiency=0.069,
    ),
    Rung(
        name="gpu-tensorcore",
        summary="the same product on tensor cores: factors in half precision, sums in float",
        builds_on="gpu-fused",
        recipe=gemm_recipes.tensorcore,
        kernels=("tensorcore",),
        choices=_PRODUCT | _UNITS,
        capabilities=Capabilities(
            device="gpu",
            input_dtypes=("bool", "int8", "uint8", "float16", "float32"),
            sum_dtypes=("float32",),
            error=ErrorContract(flushes_subnormals=True, operand_dtype="float16"),
        ),
        efficiency=0.12,
    ),
    Rung(
        name="gpu-half",
        summary="half-precision products and sums",
        builds_on="gpu-naive",
        recipe=_half,
        kernels=("naive",),
        choices=_HALF,
        capabilities=Capabilities(
            device="gpu",
            input_dtypes=("float16", "float32"),
            sum_dtypes=("float32",),
            out_dtypes=("float16", "float32"),
            error=ErrorContract(sum_dtype="float16", flushes_subnormals=True),
        ),
    ),
    Rung(
        name="gpu-atomic",
        summary="one thread per input, which adds its products to the outputs atomically",
        builds_on="gpu-naive",
        recipe=_atomic,
        kernels=("atomic", "epilogue"),
        choices=_ATOMIC,
        capabilities=replace(_ALL, error=ErrorContract(flushes_subnormals=True, deterministic=False)),
    ),
)
