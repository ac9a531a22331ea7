"""What a work item is: how many outputs and output channels, and what a transform takes and makes.

The engine does one item after the other (items.cpp).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from convpar.backend import Layouts
from convpar.problem import Problem

from . import splitting
from .compiled import isa, matrix_unit, pair_unit, word_unit
from .estimate import spectral_seconds
from .splitting import Tiling

if TYPE_CHECKING:
    from .rungs import Rung

_TILE_COLUMNS = 8192
_TILE_OUTPUTS = 32_768
_STAGE_BYTES, _MOST_STAGE_BYTES = 512 * 1024, 2048 * 1024
_SLID_STAGE_BYTES = 640 * 1024
"""Of those under blocks that slide, which are so wide and have so many rows that little is gathered twice."""
_GATHERED_COLUMNS = 512
"""Of outputs whose samples are gathered: so many are read one after the other."""
_BLOCK = 16

# Of the kernels over vectors.
_ROW_BYTES, _LONG_ROW_BYTES, _LONG_ROW_FILTERS = 32_768, 65_536, 7
"""Of a tile's row, at most; and where samples are met and sums stored where they lie, under filters of so many rows at most, so that the rows
under a strip stay in the second cache: memory is read ahead along them."""
_STAGED_ROW_BYTES, _CONVERTED_ROW_BYTES = 16_384, 8192
"""The same of blocks that slide over what was gathered; and where they are tall and outputs are converted, which wait beside it in the second cache."""
_COLUMNS_STEP = 64
"""Columns of such a tile are a multiple of it, so that results beside it begin with a line."""
_LEAST_ROWS = 16
"""And a multiple of it where a tile is neither all of an image nor gathered: of other numbers of rows blocks that slide, of 8 rows,
reach back over what is done already."""
_TALL_ROWS, _STRIP_ROWS, _TALL_FILTERS = 24, 8, range(6, 10)
"""Under filters of so many rows, where blocks that slide are tall: rows of these, at least, and a multiple of the rows of those that take what
is left below them (`tall_slid_rows` and `slid_rows` in simd.hpp)."""
_ITEMS = 16
_CHANNELS_TOGETHER, _LINE_BYTES = 128, 64
"""Channels of a work item whose groups are parted or joined together, at most, and bytes that they fill of each pixel, at least."""
_ITEMS_TOGETHER = 32
"""Work items that are left so."""
_OUTPUTS_TOGETHER = 4096
"""Of small planes that a kernel takes in one call, at most: then what it does once a call is a small part."""

# Of those whose samples meet several output channels at once.
_SUMS_BYTES = 128
"""Of the output channels whose sums are kept at once: two vectors, the widest there are."""
_CUT_ITEMS, _ITEM_MACS = 12, 300_000
"""Work items, at least, if there are so many products for each; under filters of one sample these only say that images are few."""
_LEAST_HALVED = 896
"""Outputs of a tile that is halved so that its samples stay in the second cache, at least: four strips, each of which brings all filters
there again, which takes more than fewer samples would save."""
_LEAST_PIXELS = 56
"""Of a part of an image: filters come from the second cache once for all of them."""
_TIMES_AGAIN, _LEAST_AGAIN = 4, 64
"""Gathering samples takes so many times as long as reading them; it is done for so many output channels at least, as is laying them out."""
_PRODUCTS_PER_LAID_OUT, _PRODUCTS_PER_WEIGHT, _PRODUCTS_PER_ITEM = 0.75, 0.25, 12_000
"""Products of the widest vector that take as long as to lay out a sample, to bring a weight from the second cache, and to begin and end an
item. One of several fits that did equally well: 16 layers of 1 x 1, 1 to 16 threads, an Intel processor."""
_MOST_PARTS = 32
"""Of an image's rows, and of its output channels, at most."""
_ITEMS_LOST = 3
"""Items in whose time threads wait at the end. A team of T waits for half of one, which makes ``1 + T / (2 items)`` of its time; from four
items on the geometric mean of that over teams of 1, 2, 4, 8 and 16 is near ``1 + 3 / items``."""
_FILTERS_BYTES = 640 * 1024
"""Of filters that stay in the second cache from one image to the next, beside samples of half as much. Measured where that has 2 MiB; others
have 1 MiB."""

# Of the one whose lanes are channels.
_TURNED_BYTES = 64 * 1024
"""Of a tile's samples and outputs, turned, which stay in the first cache or nearly, unless an output takes half of it or more."""
_VECTOR_BYTES = 64
"""Of one pixel of them: the widest vector there is."""
_LEAST_SLAB_ROWS, _SLAB_ROWS = 4, 7
"""Of outputs under 3 x 3 whose sums the kernel keeps at once where registers are many: at least, and at most."""
_PIXELS, _PIXELS_BYTES = 2048, 1024 * 1024
"""Outputs of each channel of a tile that isn't turned, at most, and bytes of samples under those of all its channels: where an edge is met
they may have to be gathered."""

# Of those that transform filters and samples.
_TRANSFORMED_BYTES = 1280 * 1024
"""Of transformed samples of a work item, which stay in the second cache, and most of its sums."""
_TRANSFORMED_ITEMS = 8
_LEAST_TILES = 16
_PAIRED_ITEMS = 64
_PAIRED_TILES = 16


class Access(NamedTuple):
    """How samples reach a kernel, and sums the output."""

    stage: bool
    """Samples are gathered tile by tile."""
    convert: bool
    """Sums wait beside them until they are outputs."""
    edges: bool
    """The kernel takes zeros around the image where they are, unless filters aren't finite."""
    in_registers: bool
    """Both are converted in registers, away from the edges of the image."""

    @property
    def as_they_lie(self) -> bool:
        """Of samples and outputs away from the edges of the image."""
        return not (self.stage or self.convert)


def tile(
    p: Problem,
    config: Mapping[str, Any],
    rung: Rung,
    tiling: Tiling,
    access: Access,
    together: int,
    turned: bool,
) -> tuple[tuple[int, int], int]:
    """Outputs (rows, columns) and output channels, of each of the groups that it takes `together`, of a work item."""
    stage, convert, edges, _ = access
    if config["tile"]:
        rows, columns = config["tile"]
    elif rung.split:
        in_place = access.as_they_lie and (edges or not any(p.padding))
        rows, columns = splitting.tile(p, tiling, in_place)
    elif rung.lengths:
        rows, columns = _paired_tile(p, tiling)
    elif rung.transformed:
        rows, columns = _transformed_tile(p, rung.side)
    elif rung.capabilities.depthwise:
        rows, columns = _turned_tile(p) if turned else _pixels_tile(p)
    else:
        rows, columns = _dense_tile(p, rung, access, together) if rung.dense else _window_tile(p, stage)
    cut = rung.blocks and not stage
    if cut:
        gathered = any(p.padding) and not edges
        rows, block = _cut(p, rows, columns, gathered, movable=not (config["tile"] or convert))
    if config["block"] is not None:
        return (rows, columns), config["block"]
    if not rung.dense:
        return (rows, columns), _BLOCK
    if not cut:
        # What is gathered for a tile serves all output channels, unless there would be too few items.
        channels = max(p.oc // p.groups, 1)
        images = max(rows // max(p.oh, 1), 1) if rung.transformed else 1
        tiles = -(-p.n // images) * p.groups * -(-p.oh // rows) * -(-p.ow // columns)
        items = _TRANSFORMED_ITEMS if rung.transformed else _ITEMS
        block = -(-channels // -(-items // max(tiles, 1)))
        if rung.by_channels:
            block = splitting.block(block)
    if convert:
        block = min(block, max(_STAGE_BYTES // (rows * columns * p.sum_dtype.itemsize), 1))
    return (rows, columns), block


def together(p: Problem, layouts: Layouts, rung: Rung, access: Access, turned: bool) -> int:
    """Groups of a work item: several small planes, in place, of a kernel that takes them; those that are lanes; or where channels are
    neighbours in memory, and parted or joined.

    All, for then pixels are read one after the other, but no more than leave threads enough items. The engine takes fewer where a
    tile of them would need too much room.
    """
    if rung.capabilities.depthwise:
        return _lanes_together(p, turned)
    if rung.masks and access.as_they_lie:
        most = _OUTPUTS_TOGETHER // max(p.oc // p.groups * p.oh * p.ow, 1)
        return max(min(most, p.groups // -(-_ITEMS_TOGETHER // max(p.n, 1))), 1)
    parted = any(
        layout.strides[1] == dtype.itemsize and not layout.swapped
        for layout, dtype in ((layouts.x, p.x_dtype), (layouts.out, p.out_dtype))
    )
    if not (access.stage and access.convert and parted):
        return 1
    channels = max(p.c // p.groups, 1)
    least = max(_LINE_BYTES // (channels * p.x_dtype.itemsize), 1)
    most = max(min(_CHANNELS_TOGETHER // channels, p.groups), 1)
    tiles = max(p.n * -(-p.oh // _LEAST_ROWS), 1)
    wanted = p.groups // -(-_ITEMS_TOGETHER // tiles)
    return min(max(wanted // least * least, least), most)


def _window_tile(p: Problem, stage: bool) -> tuple[int, int]:
    columns = max(min(p.ow, _TILE_COLUMNS), 1)
    rows = max(_TILE_OUTPUTS // columns, 1)
    return _gathered(p, min(rows, 32), min(columns, 256), _STAGE_BYTES) if stage else (rows, columns)


def piece(p: Problem, rung: Rung, tile: tuple[int, int]) -> tuple[int, int]:
    """Outputs of a tile whose samples are gathered at once, where only filters that aren't finite need that."""
    if rung.row != "packed":
        return tile
    rows, columns = tile
    size = p.c // p.groups * p.sum_dtype.itemsize
    while rows * columns > 1:
        # Of single rows and columns only those under a tap are kept.
        high = p.kh if rows == 1 else (rows - 1) * p.stride[0] + p.extent[0]
        wide = min((columns - 1) * p.stride[1] + p.extent[1], columns * p.kw)
        if high * wide * size <= _STAGE_BYTES:
            break
        if rows > 1:
            rows = -(-rows // 2)
        else:
            columns = -(-columns // 2)
    return rows, columns


def _dense_tile(p: Problem, rung: Rung, access: Access, together: int) -> tuple[int, int]:
    stage, convert, edges, in_registers = access
    slides = rung.streams and p.c == p.groups and p.sum_dtype.kind == "f"
    # A single image is cut finely enough for many threads.
    most = -(-p.oh * p.n * p.groups // _ITEMS)
    tall = slides and p.kh in _TALL_FILTERS and most >= _TALL_ROWS
    least = _TALL_ROWS if tall else _LEAST_ROWS
    if stage and slides:
        columns = _slid_columns(p, convert, least, together)
    else:
        long = rung.streams and access.as_they_lie and p.kh <= _LONG_ROW_FILTERS
        columns = max(min(p.ow, (_LONG_ROW_BYTES if long else _ROW_BYTES) // p.sum_dtype.itemsize), 1)
    rows = least if convert and not in_registers else max(min(_TILE_OUTPUTS // columns, most), least)
    if rows < p.oh:
        rows -= rows % (_STRIP_ROWS if tall else _LEAST_ROWS)
    if not stage and not any(p.padding):
        return rows, columns
    # Filters that don't stay in the caches pass through them for every tile.
    filters = p.oc * p.c // p.groups * p.kh * p.kw * p.sum_dtype.itemsize
    seldom = min(max(filters, _STAGE_BYTES), _MOST_STAGE_BYTES)
    if edges and rung.row == "packed":
        # Gathered in pieces, if ever.
        return _kept(p, rows, columns, seldom)
    limit = _SLID_STAGE_BYTES if slides else _STAGE_BYTES
    if not stage and p.c == p.groups:
        # A wide plane of its own is gathered at its edges only, and a narrow one is small.
        limit = _MOST_STAGE_BYTES
    elif edges:
        limit = seldom
    return _gathered(p, rows, columns, limit // together)


def _slid_columns(p: Problem, convert: bool, rows: int, together: int) -> int:
    """Of outputs of a tile of `rows` or more whose samples are gathered for blocks that slide, at most."""
    itemsize = p.sum_dtype.itemsize
    row = _CONVERTED_ROW_BYTES if convert and rows == _TALL_ROWS else _STAGED_ROW_BYTES
    fit = _SLID_STAGE_BYTES // (together * itemsize * (rows + p.extent[0] - 1)) - p.extent[1] + 1
    even = splitting.even(max(p.ow, 1), max(min(row // itemsize, fit), _COLUMNS_STEP))
    # Channels beside each other stay together, and no tile is a sliver.
    whole, lines = (
        -(-even // step) * step for step in (p.dilation[1], math.lcm(_COLUMNS_STEP, p.dilation[1]))
    )
    return min(lines if (p.ow - 1) % lines + 1 > lines // 2 else whole, max(p.ow, 1))


def turned(p: Problem, layouts: Layouts, access: Access) -> bool:
    """Whether a kernel whose lanes are channels has to turn samples or outputs: they don't lie as it takes them."""
    as_lanes = access.as_they_lie
    for layout, dtype in ((layouts.x, p.x_dtype), (layouts.out, p.out_dtype)):
        as_lanes = as_lanes and layout.strides[1] == dtype.itemsize != layout.strides[3]
    return not as_lanes


def _lanes_together(p: Problem, turned: bool) -> int:
    """Groups of a work item of the rung whose lanes they are: whole vectors at every level."""
    vector = _VECTOR_BYTES // p.sum_dtype.itemsize
    rows, columns = _turned_tile(p) if turned else _pixels_tile(p)
    tiles = max(p.n, 1) * -(-max(p.oh, 1) // rows) * -(-max(p.ow, 1) // columns)
    if turned:
        most = _OUTPUTS_TOGETHER // (rows * columns)
    else:
        # All, for they are read pixel by pixel; but there is room to gather them.
        high, wide = ((n - 1) * s + e for n, s, e in zip((rows, columns), p.stride, p.extent, strict=True))
        most = _PIXELS_BYTES // (high * wide * p.sum_dtype.itemsize)
    wanted = min(most, -(-p.groups // -(-_ITEMS_TOGETHER // tiles)))
    return max(wanted // vector, 1) * vector


def _pixels_tile(p: Problem) -> tuple[int, int]:
    """Outputs of a work item of all channels: few enough for many threads, and whole rows."""
    rows = -(-p.oh * p.n // _ITEMS)
    if (p.kh, p.kw) == (3, 3):
        rows = min(-(-rows // _SLAB_ROWS), 2) * _SLAB_ROWS if rows > _LEAST_SLAB_ROWS else _LEAST_SLAB_ROWS
    else:
        rows = min(rows + rows % 2, _LEAST_ROWS)
    rows = max(min(rows, p.oh), 1)
    return rows, max(min(p.ow, _PIXELS // rows), 1)


def _under(p: Problem, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of samples under so many outputs that exist."""
    high = min((rows - 1) * p.stride[0] + p.extent[0], p.h)
    wide = min((columns - 1) * p.stride[1] + p.extent[1], p.w)
    return high, wide


def _cut(p: Problem, rows: int, columns: int, gathered: bool, movable: bool) -> tuple[int, int]:
    """Rows, `rows` at most, and output channels, whole pairs of vectors, of an item whose samples meet several output channels at once.

    Few images are too few items: they are cut along rows and output channels, so that all items together read the least of samples
    and filters, or under filters of one sample by `_cut_under_points`. Samples count more where every block of output channels gathers
    them again. Rows are as given unless they are `movable`.
    """
    channels, itemsize = max(p.oc // p.groups, 1), p.sum_dtype.itemsize
    pair = _SUMS_BYTES // itemsize
    pairs = -(-channels // pair)
    size = p.c // p.groups * itemsize
    filters = channels * p.kh * p.kw * size
    tiles = max(p.n * p.groups * -(-p.ow // columns), 1)
    wanted = max(min(-(-_CUT_ITEMS // tiles), p.macs // (tiles * _ITEM_MACS)), 1)
    if wanted > 1 and p.kh * p.kw == 1 and not gathered:
        return _cut_under_points(p, rows, columns, tiles, movable)
    # Under filters of one sample images are many here, and laid out once for all output channels.
    again = gathered or p.kh * p.kw == 1
    cuts = []
    for parts in (1, 2, 4, 8, 16):
        high = max(min(-(-p.oh // parts), rows), 1) if movable else rows
        if parts > 1 and (not movable or parts >= 2 * wanted or high * columns < _LEAST_PIXELS):
            break
        parts = max(-(-p.oh // high), 1)
        met_high, met_wide = _under(p, high, columns)
        samples = met_high * met_wide * size
        fewest, most = 1, pairs
        if again:
            most = max(channels // _LEAST_AGAIN, 1)
        elif samples <= _FILTERS_BYTES // 2:
            # Filters of a block stay in the second cache from one image to the next.
            fewest = -(-pairs // max(_FILTERS_BYTES * channels // max(filters * pair, 1), 1))
        blocks = min(max(-(-wanted // parts), fewest), most)
        each = -(-pairs // blocks)
        if parts * -(-pairs // each) < wanted and not again:
            each = pairs // blocks
        if not again:
            # Rather a few more that are alike, for threads wait for the last one.
            each = next((n for n in range(each, 2 * each // 3, -1) if pairs % n == 0), each)
        blocks = -(-pairs // each)
        read = parts * (blocks * samples * (_TIMES_AGAIN if again else 1) + filters)
        cuts.append((-min(parts * blocks, wanted), read, high, each * pair))
    return min(cuts)[2:]


def _cut_under_points(p: Problem, rows: int, columns: int, tiles: int, movable: bool) -> tuple[int, int]:
    """The same of few images under filters of one sample: items that are alike, of the least time on teams of any size.

    As if every item laid out its samples, brought its filters once and filled up its last vector, as most of cpu-implicit's do.
    """
    channels, of_each = max(p.oc // p.groups, 1), p.c // p.groups
    pair, lanes = _SUMS_BYTES // p.sum_dtype.itemsize, _VECTOR_BYTES // p.sum_dtype.itemsize
    pairs = -(-channels // pair)
    heights = {max(min(high, rows), 1) for high in _even_sizes(p.oh)} if movable else {rows}
    cuts = []
    for high, each in itertools.product(heights, _even_sizes(pairs)):
        outputs = min(high, p.oh) * min(columns, p.ow)
        items = tiles * -(-p.oh // high) * -(-pairs // each)
        products = (-(-outputs // lanes) + _PRODUCTS_PER_WEIGHT) * min(each * pair, channels)
        # With a stride what lies between comes, too.
        item = (products + outputs * p.stride[1] * _PRODUCTS_PER_LAID_OUT) * of_each + _PRODUCTS_PER_ITEM
        cuts.append(((items + _ITEMS_LOST) * item, high, each * pair))
    return min(cuts)[1:]


def _even_sizes(whole: int) -> set[int]:
    """Of parts that are alike, or nearly."""
    return {-(-whole // parts) for parts in range(1, _MOST_PARTS + 1)}


def _turned_tile(p: Problem) -> tuple[int, int]:
    """Outputs whose vectors, and those of the samples under them, fit, or take no more than twice what one's do."""
    rows, columns = max(p.oh, 1), max(p.ow, 1)

    def taken(rows: int, columns: int) -> int:
        high, wide = _under(p, rows, columns)
        return (rows * columns + high * wide) * _VECTOR_BYTES

    limit = max(_TURNED_BYTES, 2 * taken(1, 1))
    while rows * columns > 1 and taken(rows, columns) > limit:
        if rows > _LEAST_ROWS // 4 or columns == 1:
            rows = -(-rows // 2)
        else:
            columns = -(-columns // 2)
    return rows, columns


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


def _kept(p: Problem, rows: int, columns: int, limit: int) -> tuple[int, int]:
    """At most `rows` x `columns` outputs whose samples take no more than `limit` bytes, or that are few."""
    size = p.c // p.groups * p.sum_dtype.itemsize
    while rows * columns >= _LEAST_HALVED and math.prod(_under(p, rows, columns)) * size > limit:
        if rows > _LEAST_ROWS // 4 or columns == 1:
            rows = -(-rows // 2)
        else:
            columns = -(-columns // 2)
    return rows, columns


def _gathered(p: Problem, rows: int, columns: int, limit: int) -> tuple[int, int]:
    """At most `rows` x `columns` outputs whose input, gathered, takes no more than `limit` bytes, or twice what one output's takes."""
    size = p.c // p.groups * p.sum_dtype.itemsize
    limit = max(limit, 2 * p.extent[0] * p.extent[1] * size)
    while rows * columns > 1:
        high = (rows - 1) * p.stride[0] + p.extent[0]
        wide = (columns - 1) * p.stride[1] + p.extent[1]
        if high * wide * size <= limit:
            break
        # Of higher filters most rows are gathered again for every tile, however low that is.
        low = rows < p.extent[0] and columns > _GATHERED_COLUMNS
        if columns == 1 or (rows > _LEAST_ROWS // 2 and not low):
            rows = -(-rows // 2)
        else:
            columns = -(-columns // 2)
    return rows, columns


def tiling(p: Problem, tile: tuple[int, int] | None, rung: Rung) -> Tiling:
    """What the rung's transforms take and make: those that suit work items of `tile`, or the whole problem."""
    if rung.operand_bits:
        emulated = not (matrix_unit() if rung.unit else isa() == splitting.LEVEL and pair_unit())
        return splitting.integers(p, rung.operand_bits)._replace(emulated=emulated)
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
    return min(tried, key=lambda t: spectral_seconds(p, t, item, rung.seconds_per_mac, rung.seconds_per_pass))


def _made(p: Problem, axis: int, length: int, item: int) -> int:
    """Outputs along an axis that a transform of `length` samples gives, none that are another's."""
    outputs, samples = p.out_shape[2 + axis], p.x_shape[2 + axis]
    before, after = p.padding[2 * axis : 2 * axis + 2]
    zeros = p.boundary == "fill" and p.fillvalue == 0
    if item >= outputs and zeros and length >= max(samples + max(before, after), outputs, p.extent[axis]):
        # Zeros on one side stand for those on the other too: the transform goes round.
        return max(outputs, 1)
    return length - p.extent[axis] + 1


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
