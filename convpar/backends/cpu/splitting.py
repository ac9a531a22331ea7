"""Plans of the rungs that split floats into bfloat16 for the processor's matrix unit, and of those that put small integers of several
channels into words; split.h and words.h have the arithmetic.

A tile of sums is 16 x 16. What an output meets at a time fills the 32 places of a tile's row: samples of 32 channels
(cpu-amx), or of neighbouring columns and rows of one (cpu-toeplitz); or its 64 places of bytes (cpu-amx8).
"""

from __future__ import annotations

import bisect
import math
from typing import NamedTuple

import numpy as np

from convpar.backend import Refusal
from convpar.problem import Problem

SIDE = 16
DEPTH = 32
LEVEL = "v4"
"""The instruction set whose vectors are as long as a tile's row."""

WINDOWS = ((2, 2), (2, 4), (2, 8), (4, 4))
"""Rows of a window of samples, and of the outputs that a tile's row makes of it (toeplitz.hpp)."""
_LEFT_OUT = {3: 514, 4: 258, 5: 130, 6: 2}
_LEFT_OUT_OF_SAMPLES = {1: {2: 128, 3: 0}, 2: {3: 385, 4: 129, 5: 1}, 3: _LEFT_OUT | {6: 4}}
"""Number of products of parts that are summed -> what the others may come to, in roundings (split.h). Of bands by how many parts hold
any sample; where three are needed they are truncated.
"""
_WHOLE_PARTS = {"bool": 1, "int8": 1, "uint8": 1, "bfloat16": 1, "int16": 2, "uint16": 2, "float16": 2}
"""Parts that hold any sample of a type; others take three."""
_LARGER = 1.016
"""By how much the magnitudes of parts may exceed their floats', in products."""
BYTES, PAIRS = 1, -1
"""In place of a number of products: integers of 8 bits, four in a word, or of 16, two of them. They have no parts, and tiles of bytes one product."""
_FIRST_BYTES = {BYTES: 1, PAIRS: 2, 3: 4, 4: 4, 5: 4, 6: 6}
_SECOND_BYTES = {BYTES: 1, PAIRS: 2, 3: 4, 4: 4, 5: 6, 6: 6}
"""Bytes of all parts of the first factor, filters, and of the second, samples, where channels fill tiles."""
INTEGERS = {8: ("bool", "int8", "uint8"), 16: ("bool", "int8", "uint8", "int16")}
"""Types of samples and filters that integers of so many bits stand for."""
_CHANNELS_BYTES = 512 * 1024
"""Of split samples of a work item, which stay in the second cache with filters, of so many channels as take turns."""
_PASS_CHANNELS, _PASS_BYTES, _FILTERS_BYTES = 128, 768 * 1024, 1536 * 1024
"""Channels of a pass that tiles have room for: between passes sums wait among the results. And bytes of a pass's split samples, and of
its split filters of a pair of tiles of output channels, at most.
"""
_COLUMNS = 512
_LEAST_WINDOWS_ROWS, _WINDOWS_ROWS, _GATHERED_WINDOWS_ROWS = 32, 256, 128
"""Rows of a work item of bands, at least, for those under a filter are split for two items, and at most, for many threads aren't all as fast; and
where samples are gathered or outputs converted, for these wait in the second cache (bytes don't, and lose nothing).
"""
_WINDOWS_COLUMNS, _WINDOWS_BYTES = 512, 1024 * 1024
"""Its columns, and bytes of the groups of rows that it keeps, at most."""
_ITEMS = 16
_EMULATED = 60
"""How many times as long the same takes without a unit."""
_MULTIPLIED_THEN_ADDED, _OF_SHORTER_VECTORS = 1.6, 1.3
"""And pairs of 16 bits in two operations; of vectors of 32 bytes and less."""
_PAIRS_CHANNELS = 8
"""Output channels of a block of pairs (pairs.hpp), at most."""
_LOADS, _LOADS_OF_BYTES = 2.8, 1.4
"""How many products of tiles take as long as the loads for all of a pair's, which wait for them in part."""
_SUMS, _SUMS_OF_BYTES = 14, 10
"""How many take as long as a tile of sums to begin, and to give its outputs."""
_SUMS_OF_WINDOWS, _SPLITS_OF_WINDOWS, _SPLITS_OF_BYTES = 11, 12, 6
_LOADS_OF_WINDOWS = {2: 0.4, 4: 0.5, 8: 0.85}
"""The same of bands, with what else vectors do meanwhile: to split a channel's samples under the tile, floats or bytes, once for all output channels;
and, for each part of samples, by output rows of a tile's row: the more of them, the more windows lie across two lines of a cache.
"""
_LONE_TILE, _LONE_TILE_OF_BYTES = 1.7, 1.3
"""How many tiles of output channels take as long as one that isn't half of a pair."""
_SECONDS_PER_FAR_BYTE = 0.025e-9
"""Of bands, of outputs, if they and samples come from memory."""
_FAR_FILTERS = 1.6
"""How many times as long products take where filters, more than samples, are why channels take turns."""
_STRIDED = 1.3
"""How many times as long products take of channels under outputs whose columns are a stride apart, with what it takes to part samples.
Measured with strides of two."""
_SECONDS_TO_BEGIN = 8e-6
_SECONDS_PER_TAP, _SECONDS_PER_PAIRED_TAP = 1.2e-9, 0.5e-9
_SECONDS_PER_BYTE_TAP, _SECONDS_PER_FLIPPED_BYTE_TAP = 0.2e-9, 1.1e-9
"""To split a filter and lay it out; and where integers of its channels become words, of 16 bits or of 8: from where they lie, or packed first."""
_SECONDS_TO_BEGIN_BANDS, _SECONDS_TO_BEGIN_BANDS_OF_BYTES = 6e-6, 7e-6
_SECONDS_PER_PLACE = 0.6e-9
"""The same of bands, for each place of their tiles. Those of one filter count twice: one thread lays them out while others wait."""


class Tiling(NamedTuple):
    """What a transform, or a row of a tile, takes and makes.

    Attributes
    ----------
    rows, columns : int
        Of samples that it takes; 0 where channels fill the row.
    out_rows, out_columns : int
        Of outputs that it makes.
    products : int
        Products of parts that are summed; `BYTES` or `PAIRS` of integers, which have none, and 0 elsewhere.
    emulated : bool
        Whether without a unit.
    signed_x, signed_w : bool
        Whether samples and filters of 8 bits have signs.
    parts : int
        Of a sample, where its neighbours fill the row.
    """

    rows: int
    columns: int
    out_rows: int
    out_columns: int
    products: int = 0
    emulated: bool = False
    signed_x: bool = False
    signed_w: bool = False
    parts: int = 0


def even(total: int, most: int) -> int:
    """The size of parts of `total`, none larger than `most` and nearly all alike."""
    return -(-total // -(-total // most))


def _products(p: Problem, left_out: dict[int, int], in_row: int, steps: int) -> int | None:
    """The fewest products of parts whose sums keep the elementwise contract.

    What `left_out` says of the others, the roundings on a product's way, of parts that may exceed their float, and one for the
    bias mustn't come to more than direct sums are allowed. The roundings are one for each of the `in_row` products that a
    tile's row sums apart, and one for each of the products of tiles, of which there are `steps` for each product of
    parts.
    """
    terms = p.c // p.groups * p.kh * p.kw
    if not terms:
        return min(left_out)
    for products, others in left_out.items():
        if others + _LARGER * (in_row + products * steps) + 1 <= terms + 2:
            return products
    return None


def _filled(p: Problem, tiling: Tiling) -> int:
    """Channels of a group, and those that are zeros in tiles which they fill."""
    channels, depth = p.c // p.groups, _depth(tiling)
    return channels if tiling.rows else -(-channels // depth) * depth


def _depth(tiling: Tiling) -> int:
    """Channels of a chunk."""
    return 2 * DEPTH if tiling.products == BYTES else DEPTH


def _steps(p: Problem, tiling: Tiling) -> int:
    """Tiles of a filter that an output meets."""
    channels = p.c // p.groups
    if not tiling.rows:
        return -(-channels // _depth(tiling)) * p.kh * p.kw
    down = -(-(p.kh + tiling.out_rows - 1) // tiling.rows)
    return channels * down * -(-(p.kw + tiling.out_columns - 1) // tiling.columns)


def _sums(p: Problem, tiling: Tiling, rows: int, columns: int) -> float:
    """Tiles of sums that take as long as those of `rows` x `columns` outputs."""
    channels = p.oc // p.groups
    if not tiling.rows:
        _, apart = _met(columns, p.kw, p.stride[1], p.dilation[1])
        pairs, left = divmod(-(-channels // SIDE), 2)
        lone = _LONE_TILE_OF_BYTES if tiling.products == BYTES else _LONE_TILE
        return (2 * pairs + lone * left) * -(-((rows - 1) * apart + columns) // SIDE)
    return channels * -(-rows // tiling.out_rows) * 2 * -(-columns // (2 * SIDE * tiling.out_columns))


def _passes(p: Problem, tiling: Tiling, item: tuple[int, int]) -> tuple[int, int]:
    """In which channels take turns under the outputs of a work item for the sake of samples, and for that of filters.

    grids.h makes as many as the more, but for what it rounds up.
    """
    rows, columns = _of_an_image(p, item)
    images = min(max(item[0] // max(p.oh, 1), 1), max(p.n, 1))
    sample = images * _SECOND_BYTES[tiling.products]
    split = sample * _filled(p, tiling) * _split_samples(p, rows, columns)
    return max(-(-split // _PASS_BYTES), 1), -(-_of_filters(p, tiling, _filled(p, tiling)) // _FILTERS_BYTES)


def _of_an_image(p: Problem, item: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of one image's outputs of a work item."""
    return max(min(item[0], p.oh), 1), max(min(item[1], p.ow), 1)


def _products_of(p: Problem, tiling: Tiling, item: tuple[int, int], as_bytes: bool = False) -> float:
    """Products of tiles that take as long as all sums of one image's outputs of a work item."""
    once, loads = float(_SUMS), _LOADS
    if tiling.rows:
        splits = _SPLITS_OF_BYTES if as_bytes else _SPLITS_OF_WINDOWS
        once = _SUMS_OF_WINDOWS + splits * (p.c // p.groups) / max(p.oc // p.groups, 1)
        loads = _LOADS_OF_WINDOWS[tiling.out_rows] * tiling.parts
    elif tiling.products == BYTES:
        once, loads = _SUMS_OF_BYTES, _LOADS_OF_BYTES
    if not tiling.rows:
        once *= max(_passes(p, tiling, item))
    return _sums(p, tiling, *_of_an_image(p, item)) * ((tiling.products + loads) * _steps(p, tiling) + once)


def _pair_products(p: Problem, item: tuple[int, int], lanes: int) -> float:
    """Products of vectors, of pairs, for all sums of one image's outputs of a work item."""
    rows, columns = _of_an_image(p, item)
    _, apart = _met(columns, p.kw, p.stride[1], p.dilation[1])
    vectors = -(-((rows - 1) * apart + columns) // lanes)
    words = -(-(p.c // p.groups) // 2)
    channels = -(-(p.oc // p.groups) // _PAIRS_CHANNELS) * _PAIRS_CHANNELS
    return vectors * channels * words * p.kh * p.kw


def _in_row(columns: int, high: int) -> int:
    """Taps that the first, or the second, of a tile row's pairs meet at most, of a filter of so many columns.

    Pairs are neighbours in a column, of windows of `high` rows.
    """
    return high // 2 * min(columns, DEPTH // high)


def tiling(p: Problem, channels: bool) -> Tiling | None:
    """How a tile's row is filled, by channels or by rows and columns of one; None if no way keeps the contract."""
    if channels:
        made = Tiling(0, 0, 0, 0)
        in_row = -(-min(p.c // p.groups, DEPTH) // 2)
        # Each chunk may be a pass of its own.
        products = _products(p, _LEFT_OUT, in_row + -(-(p.c // p.groups) // DEPTH) - 1, _steps(p, made))
        return None if products is None else made._replace(products=products)
    best, fewest, whole = None, math.inf, whole_parts(p)
    for high, out_rows in WINDOWS:
        made = Tiling(high, DEPTH // high, out_rows, SIDE // out_rows)
        products = _products(p, _LEFT_OUT_OF_SAMPLES[whole], _in_row(p.kw, high), _steps(p, made))
        if products is not None:
            made = made._replace(products=products, parts=_parts(whole, products))
            tiles = _products_of(p, made, (p.oh, p.ow))
            if tiles < fewest:
                best, fewest = made, tiles
    return best


def integers(p: Problem, bits: int) -> Tiling:
    """How words are filled with integers of so many bits."""
    signs = (dtype.kind == "i" for dtype in (p.x_dtype, p.w_dtype))
    return Tiling(0, 0, 0, 0, BYTES if bits == 8 else PAIRS, False, *signs)


def _parts(whole: int, products: int) -> int:
    """Of a sample, of `whole`, that so many products ask for (split.h)."""
    return whole if whole == 1 or products == max(_LEFT_OUT_OF_SAMPLES[whole]) else 2


def whole_parts(p: Problem) -> int:
    """How many parts hold any sample of bands, and what lies around the image: bfloat16 has 8 bits, and floats 24."""
    parts = _WHOLE_PARTS.get(p.x_dtype.name, 3)
    if any(p.padding) and p.boundary == "fill":
        with np.errstate(all="ignore"):
            around = np.asarray(p.fillvalue).astype(p.sum_dtype)
            if around != around.astype(p.x_dtype):
                return 3
    return parts


def told(p: Problem, tiling: Tiling) -> str:
    """Which products of parts are summed, in words."""
    whole = whole_parts(p) if tiling.rows else 3
    of = {
        1: "samples of one part with taps of three",
        2: "samples of two parts with taps of three",
        3: "three parts",
    }
    return f"{tiling.products} of {3 * whole} products of {of[whole]}"


def fill_refusal(p: Problem) -> Refusal | None:
    """Why what lies around an image doesn't fit bytes as its samples do, or None if it does. Of 16 bits it always fits."""
    of = np.iinfo(np.uint8 if p.x_dtype.kind == "b" else p.x_dtype)
    value = int(np.asarray(p.fillvalue).astype(p.sum_dtype))
    if not any(p.padding) or p.boundary != "fill" or of.min <= value <= of.max:
        return None
    return Refusal(f"the fill value is {value}; it takes {of.min} to {of.max} around samples of {p.x_dtype}")


def _met(outputs: int, taps: int, stride: int, dilation: int) -> tuple[int, int]:
    """Along one axis, grids of samples as grids.h lays them out, and places of each.

    Taps that are a multiple of the stride apart share one, unless each by itself asks for fewer samples.
    """
    cycle = min(stride // math.gcd(stride, dilation), taps)
    places = outputs + (taps - 1) // cycle * (cycle * dilation // stride)
    return (taps, outputs) if taps * outputs <= cycle * places else (cycle, places)


def _split_samples(p: Problem, rows: int, columns: int) -> int:
    """Of a channel, under so many outputs."""
    down = _met(rows, p.kh, p.stride[0], p.dilation[0])
    return math.prod(down) * math.prod(_met(columns, p.kw, p.stride[1], p.dilation[1]))


def _of_filters(p: Problem, tiling: Tiling, channels: int) -> int:
    """Bytes of the split filters of so many channels and a pair of tiles of output channels."""
    return 2 * SIDE * _FIRST_BYTES[tiling.products] * p.kh * p.kw * channels


def tile(p: Problem, tiling: Tiling, in_place: bool) -> tuple[int, int]:
    """Outputs of a work item; more rows than there are stand for further images. `in_place`: neither samples nor outputs are copied."""
    if tiling.rows:
        return _banded_tile(p, tiling, in_place)
    sample = _SECOND_BYTES[tiling.products]
    # Channels that fill tiles take turns, unless filters of one sample make few products of each pass.
    channels = _filled(p, tiling)
    at_once = channels
    if p.kh * p.kw > 1:
        depth = _depth(tiling)
        met = _FILTERS_BYTES // _of_filters(p, tiling, depth) * depth
        at_once = min(channels, _PASS_CHANNELS * max(4 // sample, 1), max(met, depth))
    columns = max(p.ow, 1)

    def split(rows: int) -> int:
        return sample * at_once * _split_samples(p, rows, columns)

    columns = even(columns, _COLUMNS)
    while split(1) > _CHANNELS_BYTES and columns > 4 * SIDE:
        columns = -(-columns // (2 * SIDE)) * SIDE
    beside = -(-p.ow // columns)
    # A single image isn't cut further for many threads: blocks of output channels do that, for filters are large.
    most = max(-(-p.n * p.groups * p.oh * beside // _ITEMS), p.oh, 1)
    rows = max(bisect.bisect_right(range(1, most + 1), _CHANNELS_BYTES, key=split), 1)
    if rows < p.oh:
        return even(p.oh, rows), columns
    whole = max(p.oh, 1)
    # Of several images all channels, or passes would be short, and sums of each wait for the next.
    fit = _CHANNELS_BYTES // max(sample * channels * _split_samples(p, whole, columns), 1)
    return whole * even(max(p.n, 1), max(min(fit, most // whole), 1)), columns


def _banded_tile(p: Problem, tiling: Tiling, in_place: bool) -> tuple[int, int]:
    """Outputs of a work item of bands, in whole steps (toeplitz.hpp)."""
    high, wide = 2 * tiling.out_rows, 2 * SIDE * tiling.out_columns
    kept = -(-(p.kh + tiling.out_rows - 1) // tiling.rows) * tiling.rows + 3 * tiling.out_rows
    sample = 2 * tiling.parts * (p.c // p.groups) * kept
    fit = min(_WINDOWS_COLUMNS, max(_WINDOWS_BYTES // max(sample, 1) - p.kw, 1))
    columns = max(p.ow, 1)
    if columns > fit:
        columns = -(-even(columns, fit) // wide) * wide if fit >= wide else max(fit, 4 * SIDE)
    beside = -(-p.ow // columns)
    most_rows = _WINDOWS_ROWS if in_place else _GATHERED_WINDOWS_ROWS
    most = min(max(-(-p.n * p.groups * p.oh * beside // _ITEMS), _LEAST_WINDOWS_ROWS), most_rows)
    most = -(-most // high) * high
    if most < p.oh:
        return -(-even(p.oh, most) // high) * high, columns
    return max(p.oh, 1) * even(max(p.n, 1), max(most // max(p.oh, 1), 1)), columns


def block(channels: int) -> int:
    """At least so many output channels of a work item: whole pairs of tiles, which halve the loads."""
    return -(-channels // (2 * SIDE)) * 2 * SIDE


def seconds(
    p: Problem,
    tiling: Tiling,
    item: tuple[int, int],
    blocks: int,
    product: float,
    pair: float,
    far: bool,
    as_bytes: bool,
    lanes: int,
) -> float:
    """Of splitting the samples, multiplying their tiles and giving the sums, on one core.

    `item` is the outputs of a work item, and samples are split again for each of so many `blocks` of output channels. `product` and
    `pair` are what a product of tiles, or of vectors of so many `lanes`, and splitting two samples take. `far`: samples and
    outputs come from memory; `as_bytes`: they are read and stored as bytes.
    """
    rows, columns = _of_an_image(p, item)
    items = p.n * p.groups * -(-p.oh // rows) * -(-p.ow // columns)
    if tiling.products == PAIRS:
        twice = _MULTIPLIED_THEN_ADDED if lanes == SIDE else _OF_SHORTER_VECTORS
        sums = product * _pair_products(p, item, lanes) * (twice if tiling.emulated else 1)
    else:
        sums = product * _products_of(p, tiling, item, as_bytes) * (_EMULATED if tiling.emulated else 1)
    if tiling.rows:
        # Those under later outputs are split meanwhile.
        rows = min(rows, 2 * tiling.out_rows)
        sums += _SECONDS_PER_FAR_BYTE * p.out_dtype.itemsize * p.outputs / items if far else 0
        places = max(p.oc, 2) * _steps(p, tiling) * SIDE * DEPTH
        filters = _SECONDS_TO_BEGIN_BANDS_OF_BYTES if as_bytes else _SECONDS_TO_BEGIN_BANDS
        filters += _SECONDS_PER_PLACE * places
    else:
        taps = (p.c // p.groups) * p.kh * p.kw
        by_samples, by_filters = _passes(p, tiling, item)
        sums *= _FAR_FILTERS if by_filters > by_samples else 1
        sums *= _STRIDED if p.stride[1] != 1 else 1
        flipped = p.flip and p.kh * p.kw > 1
        of_bytes = _SECONDS_PER_FLIPPED_BYTE_TAP if flipped else _SECONDS_PER_BYTE_TAP
        a_tap = {BYTES: of_bytes, PAIRS: _SECONDS_PER_PAIRED_TAP}.get(tiling.products, _SECONDS_PER_TAP)
        filters = _SECONDS_TO_BEGIN + a_tap * p.oc * taps
    samples = blocks * _filled(p, tiling) * _split_samples(p, rows, columns)
    return filters + items * (sums + pair / 2 * samples)
