"""How long a plan would take on one core, for the choosers.

Nanoseconds of a multiply-accumulate and of a pass are each rung's own (rungs.inc); what surrounds them is here. All were fitted to
times of the case list on several processors (benchmarks.regret).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from convpar.problem import Problem, is_integer

from . import splitting
from .splitting import Tiling

if TYPE_CHECKING:
    from .rungs import Rung

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
_SECONDS_PER_PARTED = 0.25e-9
"""Of a sample that is gathered, or an output that is converted, whose neighbours in memory belong to other channels."""
_SECONDS_PER_COPIED_ITEM = 65e-9
"""Of what an item takes, for gathering at all."""
_SECONDS_PER_PLANE = 10e-9
"""Of those that cpu-masked takes together, each is begun and ended."""
_SECONDS_PER_VECTOR = 3e-9
"""To begin and store the sums of a vector."""
_SECONDS_PER_VECTOR_OF_ONE_BLOCK = 2.95e-9
"""The same where cpu-masked's blocks are as wide as a row and slide down all rows, if nothing was gathered; see also `_Level`."""
_SECONDS_PER_VECTOR_OF_NARROW_BLOCKS = 2.3e-9
"""The same in cpu-simd, of one channel and under fewer than seven filter rows, whose blocks are as narrow as the row."""
_SECONDS_PER_VECTOR_OF_WORDS = 4.8e-9
"""The same of sums of words, which are joined from two."""
_SECONDS_PER_SCATTERED_VECTOR = 4e-9
"""The same in cpu-packed, which has to turn sums from output channels to rows, and from memory in cpu-im2col, whose panels go to as
many planes as there are output channels."""

_SECONDS_PER_PACKED_WEIGHT = 0.25e-9
"""To turn filters so that output channels are neighbours."""

_SECONDS_PER_FAR_BYTE = 0.03e-9
"""Of sums that go to memory, in cpu-packed and cpu-implicit: to several planes in turn."""

# Of cpu-implicit.
_SECONDS_PER_SHARED_VECTOR = 1.5e-9
"""To begin and store the sums of a vector."""
_SECONDS_PER_GATHERED_ROW = 12e-9
"""Beside its samples."""
_LEAST_SHARED, _TIMES_LEFT = 3, 1.15
"""Output channels of a block that isn't full, at least, for fewer take as long; and how many times as long as in a full one each takes."""
_WORTH_APART, _TIMES_TURNED, _TURNED_BYTES = 4, 2, 2**19
"""Products of a vector that take as long as to store a lane by itself, where vectors lie along columns; how many times as long those take; and
bytes of samples that are turned for them, at most."""
_DEEP = 64
"""Channels whose samples don't stay in the first cache."""
_LAID_OUT_CHANNELS, _LAID_OUT_WEIGHTS = 64, 8192
"""From which on samples are laid out under filters of one sample though outputs be neighbours."""
_SECONDS_PER_EVERY_OTHER_SAMPLE, _SECONDS_PER_APART_SAMPLE = 0.375e-9, 1.2e-9
"""To lay out every other sample, and samples that are farther apart, where fewer weights meet them."""
_FAR_FILTER_BYTES, _FAR_FILTERS = 2**20, 0.25
"""Of filters that don't stay in the second one, and come again for a few vectors each time; and what that adds to products."""

_PASS_ROWS, _SLID_ROWS, _WORD_ROWS = 8, 15, 7
"""Filter rows of a pass over the samples, of one by blocks that slide (`slide` in simd.hpp), and of one that multiplies words."""
_SLID_CHANNEL_ROWS, _LEAST_SLID_ROWS, _LEAST_SLID = 7, 8, 4
"""Filter rows, at most, of those that slide through several channels, and rows and vectors of outputs, at least."""
_MASKED_ROWS, _MASKED_COLUMNS, _PAIR_TAPS = 7, 16, 81
"""Of a filter, at most, under which cpu-masked's blocks slide, and under which it takes two planes at once."""

_TIMES_BESIDE_MASKED_LOADS = 1.4
"""How many times as long products take where they don't, on Intel's processors, whose masked loads take turns with products, and where they
wait (`_Level`): there blocks are smaller."""
_EDGES_BESIDE_MIDDLE, _EDGES_BESIDE_MIDDLE_ON_INTEL = 0.55, 0.75
"""The share by which products take longer at its edges, a vector on each side, where such filters' middle is left to the rung
before; and on Intel's processors."""
_SECONDS_PER_STRIDED_PASS, _SECONDS_PER_NARROW_STRIDED_PASS = 1.15e-9, 2.2e-9
"""What a pass of its blocks with a stride takes: two loads, of which it picks every other lane. And where a row of outputs is narrower
than a vector."""
_STRIDED_SQUARES = 3, 5, 7
"""Filters of one channel under which its blocks slide with a stride, too."""
_SECONDS_PER_STRIDED_SLID_PASS, _SECONDS_PER_NARROW_STRIDED_SLID_PASS = 0.1e-9, 0.9e-9
"""The same of these."""
_SECONDS_PER_FAR_STRIDED_SLID_VECTOR = 7e-9
"""To begin and store the sums of a vector there, if several channels of outputs come from each one of samples, and go to memory: they are
most of what is moved, and the products are few beside them. As measured under 5 x 5 on Intel's, whose cores wait longest."""
_SECONDS_PER_SLID_VECTOR, _SECONDS_PER_SLID_PASS = 1e-9, 0.2e-9
"""What a vector and a pass take where blocks slide for several channels of outputs: caches hold what was loaded for the first, so
that fewer of them wait for memory than in a single image or plane."""
_SECONDS_PER_FAR_SLID_VECTOR, _SECONDS_PER_FAR_SLID_VECTOR_ON_INTEL = 2e-9, 3e-9
"""The same of such a vector in cpu-simd, if several channels of samples come from memory: cpu-masked fetches more of them. And of either
on Intel's processors, whose cores wait longer for memory."""
_NO_BLOCKS, _NO_BLOCKS_ROWS, _NO_BLOCKS_TIME = 5, 7, 1.1
"""Vectors of a row that are no blocks of four and three, as slide in cpu-simd under so many filter rows; and how many times as long their
products take, but on Intel's processors."""
_SECONDS_PER_TURNED_VECTOR, _SECONDS_PER_TURNED_VECTOR_ON_INTEL = 2.2e-9, 3e-9
"""Of samples or of outputs, where lanes are channels that are no neighbours in memory, or too few; and on Intel's
processors, which move lanes in one port."""
_SECONDS_PER_PIXEL = 2.5e-9
"""To begin and store the sums of a vector there; see also `_Level`."""
_PIXELS, _CROWDED_BYTES, _TIMES_CROWDED = 8, 2**15, 1.7
"""Outputs of a block beside each other; bytes of turned samples under them, with all rows and columns of the filter, that don't stay in the
first cache from one row of outputs to the next; and how many times as long products take then on Intel's processors, and where they
wait (`_Level`)."""
_TIMES_COLUMNS = 1.7
"""How many times as long it takes, measured by what is estimated of rungs that take the channels of one filter as columns."""
_TIMES_CROWDED_ROWS = 1.15
"""How many times as long products take where rows of the image push each other out of the first cache, under filters too high for blocks that
slide."""
_EMULATED_WORDS = 2.5
"""How many times as long products of words take without instructions for them."""


# Of rungs that transform filters and samples.
_SPECTRA_BYTES = 1600 * 1024
"""Of a pair of tiles and a filter, which take twice as long as those in the first cache."""
_SECONDS_TO_BEGIN_ON_INTEL = 12e-6
"""Of a run by spectra, as fitted to images of 64 x 64 and 128 x 128, other rungs' times being less there than what they are estimated at
elsewhere."""
_SECONDS_PER_OUTPUT = 0.17e-9
"""Of a byte of outputs, and of the samples under them, to come and go."""
_SECONDS_PER_FILTER = 300e-9
"""Of a vector of output channels and one channel, whose transform is stored far away and loaded again."""


@dataclass(frozen=True)
class _Level:
    """What differs between ISA levels, on any processor; as it is of AVX-512 unless told otherwise.

    Attributes
    ----------
    slid : {"all", "3 x 3", "none"}
        Where estimates count on blocks that slide in cpu-simd: under all filters that aren't too high, of one channel under those, or nowhere.
    waits : bool
        Whether products wait for masked loads, and for samples that don't stay in the first cache, on all processors; on Intel's they do
        at every level.
    few_taps_narrow : int
        `_FEW_TAPS` of pictures whose samples become floats in registers.
    to_begin : float
        Seconds to begin a run by spectra, as `_SECONDS_TO_BEGIN_ON_INTEL` on others.
    fast_rows : int
        Of a filter of one channel, at most, under which cpu-masked doesn't leave wide planes to the rung before but for their edges.
    over_edge : float
        Seconds to begin and store the sums of a vector there, if two or more of them are as wide as a row, over an edge, where others gather.
    weights : float
        How many times as long products take in its blocks that slide, over several channels or of single vectors: with 16 registers they load
        weights for every row.
    strided : float
        How many times as long sums take with a stride: with AVX2 even and odd lanes are told apart in two instructions each.
    strided_rows : int
        Of a filter, of a pass of blocks that have a stride and don't slide.
    pixels : float
        How many times as long products take where lanes are channels: 16 registers hold fewer pixels for each weight that is loaded.
    slab : float
        Seconds to begin and store the sums of a vector there, under 3 x 3, unless channels are columns of one filter.
    deep : float
        What is added to products in cpu-implicit over so many channels that samples don't stay in the first cache.
    integers : float
        How many times as long sums of 32-bit integers take on Intel's, which multiply those in two operations; of cpu-ifma, too, whose
        estimates were fitted to the others'.
    """

    slid: str
    waits: bool = False
    few_taps_narrow: int = _FEW_TAPS
    to_begin: float = 0
    fast_rows: int = _MASKED_ROWS
    over_edge: float = 1.6e-9
    weights: float = 1
    strided: float = 1
    strided_rows: int = 4
    pixels: float = 1
    slab: float = 1.2e-9
    deep: float = 0.3
    integers: float = 2


_LEVELS = {
    "v4": _Level("all"),
    "v3": _Level(
        "3 x 3",
        waits=True,
        few_taps_narrow=8,
        to_begin=2e-6,
        fast_rows=5,
        over_edge=3.1e-9,
        weights=1.2,
        strided=1.6,
        strided_rows=1,
        pixels=1.4,
        slab=0.7e-9,
        deep=0.05,
        integers=1.5,
    ),
    # What 16 registers change was measured with AVX2 alone.
    "baseline": _Level("none"),
}


@dataclass(frozen=True)
class Work:
    """What an estimate is made of.

    Attributes
    ----------
    problem : Problem
        As the engine does it.
    rung : Rung
    task : engine.Task
    isa : str
    tiling : Tiling
    tile : (int, int)
        Outputs of a work item.
    parted : (bool, bool)
        Whether neighbours in memory belong to other channels, in input and output.
    turned : bool
        Whether a kernel whose lanes are channels doesn't find them so.
    columns : bool
        Whether other rungs may take the channels as columns (`interleaved`).
    crowded : bool
        Whether rows of one plane, met where they are, push each other out of the first cache.
    intel : bool
        Whether the processor is Intel's. Estimates were fitted to those with AVX-512 and to AMD's; any other counts as AMD's.
    """

    problem: Problem
    rung: Rung
    task: Any
    isa: str
    tiling: Tiling
    tile: tuple[int, int]
    parted: tuple[bool, bool]
    turned: bool
    columns: bool
    crowded: bool
    intel: bool

    @property
    def level(self) -> _Level:
        """What is particular to `isa`."""
        return _LEVELS[self.isa]


def direct_seconds(work: Work) -> float:
    """Seconds where the filters' values allow no shorter way."""
    p, rung, task = work.problem, work.rung, work.task
    if not rung.dense:
        return _sample_by_sample(work)
    if rung.capabilities.depthwise:
        sums = _channels(work)
    elif rung.split:
        product, pair = rung.seconds_per_mac, rung.seconds_per_pass
        blocks, far = task.tiles[0], bool(task.far)
        as_bytes = task.in_registers
        sums = splitting.seconds(p, work.tiling, work.tile, blocks, product, pair, far, as_bytes, task.lanes)
    elif rung.transformed:
        sums = _transformed(p, rung, work.tiling, task.lanes)
        if rung.lengths:
            sums += _SECONDS_TO_BEGIN_ON_INTEL if work.intel else work.level.to_begin
    else:
        sums = _shared(work) if rung.row == "implicit" else _vectors(work)
        if work.intel and is_integer(p.sum_dtype) and p.sum_dtype.itemsize == 4:
            sums *= work.level.integers
    top, bottom, left, right = p.padding
    gathered = (
        task.staged
        or ((rung.lengths or rung.split) and task.paths.isdisjoint({"inside", "border"}))
        # With a stride by the rung before, as that gathers.
        or (rung.masks and p.stride != (1, 1) and not _in_place(work))
    )
    samples = p.n * p.c * (top + p.h + bottom) * (left + p.w + right) if gathered else 0
    converted = p.outputs if task.converted and not task.in_registers else 0
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
    if rung.masks:
        overhead += _SECONDS_PER_PLANE * task.items * (task.together - 1)
    seconds = overhead + sums + _SECONDS_PER_CONVERSION * converted + _SECONDS_PER_COPY * copied
    parted_x, parted_out = work.parted
    seconds += _SECONDS_PER_PARTED * (
        parted_x * samples + (p.outputs if parted_out and task.converted else 0)
    )
    workspace = task.workspace_bytes(1)
    if workspace > _KEPT_BYTES:
        seconds += _SECONDS_PER_NEW_BYTE * workspace
    return float(seconds)


def unless_factored(work: Work, seconds: float) -> float:
    """Of a plan that looks for factors, and then sums directly in so many seconds."""
    p = work.problem
    # Where memory limits, direct sums by blocks that slide take no longer up to more taps.
    in_place = p.stride == p.dilation == (1, 1) and not work.task.converts
    few = _FEW_TAPS_FAR if _slides(work) and in_place and work.task.far else _FEW_TAPS
    if work.task.in_registers:
        few = min(few, work.level.few_taps_narrow)
    return (_UNLESS_FACTORED if p.kh * p.kw > few else 1) * seconds + _SECONDS_PER_LOOK * p.oc


def _sample_by_sample(work: Work) -> float:
    p, rung, task = work.problem, work.rung, work.task
    slower = 1.5 if task.staged or task.converted else 1.0
    at_border = p.outputs - p.n * p.oc * task.inside
    border = 0 if task.staged else at_border * (p.c // p.groups) * p.kh * p.kw
    return float(
        1e-6
        + _SECONDS_PER_ITEM * task.items
        + slower * rung.seconds_per_mac * p.macs
        + _SECONDS_PER_BORDER_TAP * border
    )


@dataclass(frozen=True)
class _Blocks:
    """How a kernel over vectors takes most outputs.

    Attributes
    ----------
    own : Rung
        Whose blocks they are: cpu-masked leaves what it doesn't mask to the rung before.
    slide, masks_slide : bool
        Whether they slide down the image as cpu-simd's do, or as cpu-masked's with 32 registers.
    no_blocks : bool
        Whether rows are so many vectors that they are no blocks that slide.
    strided, strided_slide : bool
        Whether cpu-masked's take outputs a stride apart; and whether they slide then.
    still, slow : bool
        Whether the filter is higher or wider than cpu-masked's blocks slide under, or than they are faster under than those of the rung before.
    """

    own: Rung
    slide: bool
    masks_slide: bool
    no_blocks: bool
    strided: bool
    strided_slide: bool
    still: bool
    slow: bool


def _blocks(work: Work) -> _Blocks:
    p, rung, task = work.problem, work.rung, work.task
    one_channel = p.c == p.groups
    still = p.kh > _MASKED_ROWS or p.kw > _MASKED_COLUMNS
    slow = still or (rung.masks and p.kh > work.level.fast_rows)
    # Of planes wide enough only the edges are masked, and the rest is left to the rung before; of high filters what is gathered, too.
    middle = "inside" in task.paths and min(work.tile[1], p.ow) > task.narrow
    left = middle or (slow and one_channel and task.paths.isdisjoint({"inside", "border"}))
    if p.stride != (1, 1):
        left = not _in_place(work)
    own = rung.before if rung.masks and left else rung
    no_blocks = p.kh == _NO_BLOCKS_ROWS and -(-p.ow // task.lanes) == _NO_BLOCKS
    slide = (
        own.row in ("simd", "separable")
        and p.kh <= (_SLID_ROWS if one_channel else _SLID_CHANNEL_ROWS)
        and _slides(work)
    )
    strided = rung.masks and p.stride != (1, 1) and _in_place(work)
    square = one_channel and p.kh == p.kw and p.kh in _STRIDED_SQUARES
    strided_slide = strided and square and p.kh <= task.lanes + 1
    masks_slide = own.masks and work.level.slid == "all" and not (still or task.staged or strided)
    return _Blocks(own, slide, masks_slide, no_blocks, strided, strided_slide, still, slow)


def _in_place(work: Work) -> bool:
    """Whether some outputs' samples are read where they are."""
    return not (work.task.staged or work.task.paths.isdisjoint({"inside", "border"}))


def _vectors(work: Work) -> float:
    """Of all vectors of sums. Lanes that hold nothing take as long as the others."""
    p, task = work.problem, work.task
    blocks = _blocks(work)
    width = max(p.oc // p.groups if task.packing > 1 else p.ow, 1)
    # cpu-masked takes narrow planes two at once, but with a stride loads each one's samples unless its blocks slide.
    narrow = blocks.own.masks and 2 * width <= task.lanes and (p.stride == (1, 1) or blocks.strided_slide)
    pairs = narrow and p.c == p.oc == p.groups and task.together > 1 and p.kh * p.kw <= _PAIR_TAPS
    vectors = p.outputs / width * -(-width // task.lanes) / (2 if pairs else 1)
    begun, a_pass = _beside_products(work, blocks)
    products: float = p.kh * p.kw
    if work.rung.row == "packed" and max(p.dilation) > 1 and "border" in task.paths:
        products *= _met(p)
    sums = p.c // p.groups * (a_pass * _passes(work, blocks) + _product(work, blocks) * products)
    weights = p.oc * (p.c // p.groups) * p.kh * p.kw if task.packing > 1 else 0
    if blocks.strided:
        vectors *= work.level.strided
    return float(vectors * (begun + sums) + _SECONDS_PER_PACKED_WEIGHT * weights)


def _shared(work: Work) -> float:
    """Of all vectors of outputs whose samples, once loaded, meet several output channels."""
    p, rung, task = work.problem, work.rung, work.task
    blocks, left = divmod(p.oc // p.groups, task.packing)
    channels = blocks * task.packing + (_TIMES_LEFT * max(left, _LEAST_SHARED) if left else 0)
    deep = work.level.deep * min(p.c // p.groups / _DEEP, 1)
    if p.kh * p.kw == 1:
        # A line of the cache for each channel, or laid out.
        deep /= 2
    weights = p.oc * (p.c // p.groups) * p.kh * p.kw
    if weights // p.groups * p.sum_dtype.itemsize > _FAR_FILTER_BYTES:
        deep += _FAR_FILTERS
    products = (1 + deep) * rung.seconds_per_mac * p.kh * p.kw + rung.seconds_per_pass
    vectors = p.n * p.groups * _lines(work)
    begun = _SECONDS_PER_SHARED_VECTOR + _far_seconds(work)
    sums = vectors * channels * (begun + p.c // p.groups * products)
    rows = 0 if _in_place(work) else p.n * p.c * (p.padding[0] + p.h + p.padding[1])
    apart = 0.0
    if _apart(work) and not _many_weights(p):
        a_sample = _SECONDS_PER_EVERY_OTHER_SAMPLE if p.stride[1] == 2 else _SECONDS_PER_APART_SAMPLE
        apart = vectors * task.lanes * (p.c // p.groups) * a_sample
    return float(sums + apart + _SECONDS_PER_PACKED_WEIGHT * weights + _SECONDS_PER_GATHERED_ROW * rows)


def _far_seconds(work: Work) -> float:
    """Of a vector of sums that goes to memory."""
    vector: int = work.task.lanes * work.problem.sum_dtype.itemsize
    return _SECONDS_PER_FAR_BYTE * vector if work.task.far else 0


def _lines(work: Work) -> float:
    """Vectors of a plane's outputs there: along rows, and along the columns beyond the last whole vector where that saves enough."""
    p, task = work.problem, work.task
    lanes: int = task.lanes
    # Rows that follow each other, or whose samples are laid out, are one.
    follow = _in_place(work) and p.stride == (1, 1) and not any(p.padding)
    one = follow or _many_weights(p) or _apart(work)
    if p.kh == p.kw == 1 and one and not task.converts and work.tile[1] >= p.ow:
        return -(-p.oh * p.ow // lanes)
    whole, left = divmod(p.ow, lanes)
    height = max(min(work.tile[0], p.oh), 1)
    turned = left * -(-height // lanes)
    if whole and _turns(work, height, turned):
        return p.oh * (whole + min(_TIMES_TURNED * turned / height, 1))
    return p.oh * (whole + bool(left))


def _apart(work: Work) -> bool:
    """Whether samples are laid out because they are a stride apart: in place only those under filters of one sample are."""
    return _in_place(work) and work.problem.stride[1] > 1


def _many_weights(p: Problem) -> bool:
    """Whether samples of neighbouring outputs are laid out under a filter of one sample, as implicit.hpp decides it of an item's output
    channels, and this of all.
    """
    channels = p.c // p.groups
    return channels >= _LAID_OUT_CHANNELS and channels * (p.oc // p.groups) >= _LAID_OUT_WEIGHTS


def _turns(work: Work, height: int, turned: int) -> bool:
    """Whether columns of a tile are turned, as implicit.hpp decides it: `turned` vectors in place of `height`."""
    p, lanes = work.problem, work.task.lanes
    channels = p.c // p.groups
    saved = (height - turned) * channels * p.kh * p.kw
    pitch = (-(-(height + p.extent[0] - 1) // lanes) + 1) * lanes
    room = channels * (lanes + p.kw - 2) * pitch * p.sum_dtype.itemsize <= _TURNED_BYTES
    dense = p.stride == (1, 1) and p.dilation[1] == 1 and work.tile[1] >= p.ow
    enough = p.oc // p.groups >= work.task.packing and saved >= _WORTH_APART * turned * lanes
    return bool(dense and room and enough)


def _passes(work: Work, blocks: _Blocks) -> int:
    """Of a vector over the samples of a channel, and one more for the channel."""
    p, rung = work.problem, work.rung
    # Of higher filters than slide in cpu-masked its blocks are wide and low, and a second pass takes little more.
    once = blocks.slide or (blocks.own.masks and p.kh <= _SLID_ROWS)
    if rung.word_bits:
        rows = _WORD_ROWS
    elif blocks.strided and not blocks.strided_slide:
        rows = work.level.strided_rows
    else:
        rows = _SLID_ROWS if once else _PASS_ROWS
    # Words meet the samples of even and of odd columns in turn.
    columns = p.kw + 1 if rung.word_bits else p.kw
    return 1 + columns * -(-p.kh // rows)


def _product(work: Work, blocks: _Blocks) -> float:
    """Of a vector with a weight."""
    seconds = blocks.own.seconds_per_mac
    if work.tiling.emulated:
        seconds *= _EMULATED_WORDS
    if blocks.slide and blocks.no_blocks and not work.intel:
        seconds *= _NO_BLOCKS_TIME
    if work.crowded:
        seconds *= _TIMES_CROWDED_ROWS
    p = work.problem
    if blocks.strided:
        return seconds
    if blocks.own.masks and p.c > p.groups:
        seconds *= work.level.weights
    elif blocks.slow and p.c == p.groups:
        if blocks.own.masks and not blocks.still:
            seconds *= work.level.weights
        elif blocks.own.masks and (work.intel or work.level.waits):
            seconds *= _TIMES_BESIDE_MASKED_LOADS
        elif work.rung.masks and not blocks.own.masks and "border" in work.task.paths:
            edges = sum(side > 0 for side in p.padding[2:])
            longer = _EDGES_BESIDE_MIDDLE_ON_INTEL if work.intel else _EDGES_BESIDE_MIDDLE
            seconds *= 1 + longer * min(edges * work.task.lanes / p.ow, 1)
    return seconds


def _beside_products(work: Work, blocks: _Blocks) -> tuple[float, float]:
    """To begin and store a vector, and of each of its passes."""
    p, rung, task = work.problem, work.rung, work.task
    large = p.oh >= _LEAST_SLID_ROWS and p.ow >= _LEAST_SLID * task.lanes
    if p.oc > p.groups and ((blocks.slide and large) or blocks.masks_slide):
        begun = _SECONDS_PER_SLID_VECTOR
        if task.far and work.intel:
            begun = _SECONDS_PER_FAR_SLID_VECTOR_ON_INTEL
        elif task.far and blocks.slide and p.c > p.groups:
            begun = _SECONDS_PER_FAR_SLID_VECTOR
        return begun, _SECONDS_PER_SLID_PASS
    begun, a_pass = _SECONDS_PER_VECTOR, rung.seconds_per_pass
    if blocks.strided_slide:
        narrow = p.ow <= task.lanes
        if task.far and p.oc > p.groups and not narrow:
            begun = _SECONDS_PER_FAR_STRIDED_SLID_VECTOR
        return begun, _SECONDS_PER_NARROW_STRIDED_SLID_PASS if narrow else _SECONDS_PER_STRIDED_SLID_PASS
    if blocks.strided:
        a_pass = _SECONDS_PER_NARROW_STRIDED_PASS if p.ow < task.lanes else _SECONDS_PER_STRIDED_PASS
    if rung.word_bits:
        begun = _SECONDS_PER_VECTOR_OF_WORDS
    elif rung.row == "packed":
        begun = _SECONDS_PER_SCATTERED_VECTOR + _far_seconds(work)
    elif rung.row == "im2col" and task.far:
        begun = _SECONDS_PER_SCATTERED_VECTOR
    elif blocks.own.masks and p.ow <= _LEAST_SLID * task.lanes and not task.staged:
        several = p.ow > task.lanes and "border" in task.paths
        begun = work.level.over_edge if several else _SECONDS_PER_VECTOR_OF_ONE_BLOCK
    elif blocks.slide and not task.staged and _narrow(work):
        begun = _SECONDS_PER_VECTOR_OF_NARROW_BLOCKS
    return begun, a_pass


def _channels(work: Work) -> float:
    """Of all vectors of channels, each with its own filter: of the samples that exist, and of turning them."""
    p, rung, task = work.problem, work.rung, work.task
    vectors = -(-p.groups // task.lanes)
    met = _met(p) if "border" in task.paths else 1
    turned = work.turned or p.groups < task.lanes
    product = rung.seconds_per_mac * work.level.pixels
    under = min(p.kh, p.h) * min((_PIXELS - 1) * p.stride[1] + p.extent[1], p.w)
    waits = work.intel or work.level.waits
    if waits and turned and under * task.lanes * p.sum_dtype.itemsize > _CROWDED_BYTES:
        product *= _TIMES_CROWDED
    pixels = p.n * p.oh * p.ow
    slabs = (p.kh, p.kw) == (3, 3) and not work.columns
    begun = work.level.slab if slabs else _SECONDS_PER_PIXEL
    seconds = pixels * (begun + product * p.kh * p.kw * met)
    if turned:
        rows = min(p.h, (p.oh - 1) * p.stride[0] + p.extent[0])
        # What tiles have in common is turned for each.
        again = (task.tiles[1] - 1) * max(p.extent[0] - p.stride[0], 0) / max(rows, 1)
        turn = _SECONDS_PER_TURNED_VECTOR_ON_INTEL if work.intel else _SECONDS_PER_TURNED_VECTOR
        seconds += turn * (p.n * rows * p.w * (1 + again) + pixels)
    return float(vectors * seconds * (_TIMES_COLUMNS if work.columns else 1))


def _met(p: Problem) -> float:
    """The share of products that are left where those with zeros around the image aren't made."""
    share = 1.0
    for samples, outputs, taps, stride, dilation, before in zip(
        (p.h, p.w), (p.oh, p.ow), (p.kh, p.kw), p.stride, p.dilation, p.padding[::2], strict=True
    ):
        windows = np.arange(outputs) * stride - before
        # The first tap inside, and the first one behind.
        first, end = -(windows // dilation), -((windows - samples) // dilation)
        existing = np.minimum(end, taps) - np.maximum(first, 0)
        share *= float(np.maximum(existing, 0).mean()) / taps
    return share


def _slides(work: Work) -> bool:
    """Whether estimates count on blocks that slide, under filters that aren't too high."""
    p = work.problem
    # Products of integers take longer than they are counted; by shorter passes choosers find cpu-ifma where it is faster.
    floats = not is_integer(p.sum_dtype)
    squares = p.kh == p.kw == 3 and p.c == p.groups
    counted = work.level.slid == "all" or (work.level.slid == "3 x 3" and squares)
    return counted and p.stride[0] == p.dilation[1] == 1 and floats


def _narrow(work: Work) -> bool:
    """Whether blocks that slide down one channel are as wide as a row of three or four vectors, or nearly."""
    p = work.problem
    lanes = work.task.lanes
    wide = (_LEAST_SLID - 1) * lanes <= p.ow <= _LEAST_SLID * lanes
    high = p.oh >= _LEAST_SLID_ROWS * p.dilation[0]
    return wide and high and p.c == p.groups and p.kh < _NO_BLOCKS_ROWS


def _transformed(p: Problem, rung: Rung, tiling: Tiling, lanes: int) -> float:
    """Of the transforms of filters, samples and sums, and of the products between, on one core."""
    if rung.lengths:
        vectors = (
            spectral_seconds(p, tiling, (p.oh, p.ow), rung.seconds_per_mac, rung.seconds_per_pass) / lanes
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


def spectral_seconds(
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
