"""Where a measured ratio contradicts a report, and the counters that say why: the sentences of docs/gpu-ladder.md.

The words are written by hand, for the GPU that was measured; every measured figure in them comes from the result file,
and only sizes of the problem, of a tile and of a warp are words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Options = Mapping[str, Any]


class Counter(NamedTuple):
    """A hardware counter: of which rung and kernel on which case, and its name in `counters.METRICS`."""

    case: str
    rung: str
    options: Options
    kernel: str
    name: str


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a step's ratio to its baseline differs from the published one.

    Attributes
    ----------
    report, section, n, layer
        The step, as in `steps.STEPS`; `section` is empty where the ratio is in another table.
    about : str
        What the sentence is about.
    sentence : str
        With a place in braces for each counter.
    counters : mapping
    """

    report: str
    section: str
    n: int
    layer: int
    about: str
    sentence: str
    counters: Mapping[str, Counter]


ONE, TWO, IMAGE = "network-1-n100", "network-2-n100", "single-4096-k7-int32-valid"
_FLAT = {"tile": (32, 32)}
_D_PATCHES = {"tile": (16, 16), "depth": 16}
_FULL = {"loading": "full", "lanes": "rows", "tile": (4, 8)}


def _naive(case: str, name: str, **options: Any) -> Counter:
    return Counter(case, "gpu-naive", options, "naive", name)


def _product(case: str, kernel: str, name: str) -> Counter:
    return Counter(case, "gpu-im2col", _D_PATCHES, kernel, name)


def _first(name: str) -> Counter:
    return Counter(TWO, "gpu-tiled-constant", {"loops": "unrolled"}, "tiled", name)


def _last(name: str) -> Counter:
    return Counter(TWO, "gpu-tiled-constant", {"loops": "unrolled", "layout": "channel-last"}, "tiled", name)


_BY_PRODUCT = {
    "rolled": _naive(TWO, "instructions"),
    "active": _naive(TWO, "threads an instruction"),
    "patches": _product(TWO, "im2col", "instructions"),
    "product": _product(TWO, "gemm", "instructions"),
    "whole": _product(TWO, "gemm", "threads an instruction"),
}
_BY_PRODUCT_WORDS = (
    "the baseline executes {rolled} instructions with {active} of 32 threads (16-wide tiles over 34 columns), the patches "
    "and their product {patches} and {product} with {whole} in the product"
)

REASONS = (
    Reason("A", "im2col", 10000, 2, "im2col in layer 2", _BY_PRODUCT_WORDS, _BY_PRODUCT),
    Reason("D", "im2col", 5000, 2, "im2col in layer 2", _BY_PRODUCT_WORDS, _BY_PRODUCT),
    Reason(
        "A", "unrolled", 10000, 1, "unrolled filter loops in layer 1",
        "the baseline's loops are kept rolled, over sizes known at run time: {rolled} instructions against {unrolled} unrolled",
        {"rolled": _naive(ONE, "instructions"),
         "unrolled": Counter(ONE, "gpu-unrolled", {}, "naive", "instructions")},
    ),
    Reason(
        "A", "streams", 100, 2, "ten streams for a batch of 100 in layer 2",
        "ten images are too few for this GPU: counted alone, their kernel keeps {part} % of the warps resident that a "
        "multiprocessor can have, the whole batch's {whole} %",
        {"part": _naive(TWO, "warps resident, %", slice=10), "whole": _naive(TWO, "warps resident, %")},
    ),
    Reason(
        "B", "channel-last", 10000, 2, "a channel-last tile in layer 2",
        "the loop over channels is then the innermost, and its length is known at run time only: {last} instructions with "
        "{fewer} % of the warps resident against {first} with {more} % channel-first; and neighbouring threads read a "
        "channel count apart, {hit} bank conflicts against {missed} (counted on the two-layer network)",
        {"last": _last("instructions"), "fewer": _last("warps resident, %"), "hit": _last("bank conflicts"),
         "first": _first("instructions"), "more": _first("warps resident, %"), "missed": _first("bank conflicts")},
    ),
    Reason(
        "C", "half", 10000, 1, "half precision in layer 1",
        "images and filters stay float in memory and are converted at each tap: {half} instructions against {single}, "
        "and {loaded} sectors loaded against {sectors}",
        {"half": Counter(ONE, "gpu-half", _FLAT, "naive", "instructions"),
         "single": _naive(ONE, "instructions", **_FLAT),
         "loaded": Counter(ONE, "gpu-half", _FLAT, "naive", "load sectors"),
         "sectors": _naive(ONE, "load sectors", **_FLAT)},
    ),
    Reason(
        "C", "tiled-constant", 100, 2, "tile and constant memory at N = 100 in layer 2",
        "the baseline's 32-wide tiles over 34 columns execute {flat} instructions with {active} of 32 threads, the "
        "16-wide tiles with constant memory {tiled} with {more}",
        {"flat": _naive(TWO, "instructions", **_FLAT), "active": _naive(TWO, "threads an instruction", **_FLAT),
         "tiled": Counter(TWO, "gpu-tiled-constant", {}, "tiled", "instructions"),
         "more": Counter(TWO, "gpu-tiled-constant", {}, "tiled", "threads an instruction")},
    ),
    Reason(
        "C", "im2col", 10000, 2, "im2col in layer 2",
        "its baseline's 32-wide tiles over 34 columns execute {flat} instructions with {active} of 32 threads, the "
        "product {product}",
        {"flat": _naive(TWO, "instructions", **_FLAT), "active": _naive(TWO, "threads an instruction", **_FLAT),
         "product": _product(TWO, "gemm", "instructions")},
    ),
    Reason(
        "C", "fused", 10000, 2, "the fused product in layer 2",
        "it executes {fused} instructions with {whole} of 32 threads, the baseline {flat} with {active}",
        {"fused": Counter(TWO, "gpu-fused", {"tile": (16, 16), "filters": "constant"}, "fused", "instructions"),
         "whole": Counter(TWO, "gpu-fused", {"tile": (16, 16), "filters": "constant"}, "fused",
                          "threads an instruction"),
         "flat": _naive(TWO, "instructions", **_FLAT), "active": _naive(TWO, "threads an instruction", **_FLAT)},
    ),
    Reason(
        "C", "", 10000, 2, "width 32 for the fused product, the report's fastest",
        "half of a 32-wide tile has no output channel in layer 2: {wide} instructions against {fitting} at 16",
        {"wide": Counter(TWO, "gpu-fused", _FLAT, "fused", "instructions"),
         "fitting": Counter(TWO, "gpu-fused", {"tile": (16, 16)}, "fused", "instructions")},
    ),
    Reason(
        "C", "", 10000, 2, "width 17 for constant memory, where the report's sweep has 8",
        "17 divides the 34 columns, so {at17} of 32 threads take part in an instruction against {at8} at 8 and "
        "{at16} at 16; at 8 also {queue8} warps are held up at the queue for shared memory and the like for each "
        "instruction issued, {queue17} at 17",
        {f"{word}{width}": Counter(TWO, "gpu-constant", {"tile": (width, width)}, "naive", name)
         for word, name in (("at", "threads an instruction"), ("queue", "stalled on shared queue"))
         for width in (8, 16, 17)},
    ),
    Reason(
        "E", "", 1, 0, "the tile against one thread per output with coalesced lanes, at least 2x in the report",
        "{queue} of the baseline's warps are held up at the queue of global loads for each instruction issued ({rows} with "
        "lanes along rows, where the tile does win), and its {direct} instructions are {tiled} with the tile: there is "
        "little for the tile to take away",
        {"queue": _naive(IMAGE, "stalled on global queue"),
         "rows": _naive(IMAGE, "stalled on global queue", lanes="rows"), "direct": _naive(IMAGE, "instructions"),
         "tiled": Counter(IMAGE, "gpu-tiled", {}, "tiled", "instructions")},
    ),
    Reason(
        "E", "", 1, 0, "the tile loaded by as many threads as inputs, at 32 outputs a block, 2.8x in the report",
        "it executes {full} instructions with {active} of 32 threads, one thread per output {direct} with {whole}",
        {"full": Counter(IMAGE, "gpu-tiled", _FULL, "tiled", "instructions"),
         "active": Counter(IMAGE, "gpu-tiled", _FULL, "tiled", "threads an instruction"),
         "direct": _naive(IMAGE, "instructions", lanes="rows", tile=(4, 8)),
         "whole": _naive(IMAGE, "threads an instruction", lanes="rows", tile=(4, 8))},
    ),
)  # fmt: skip
