"""What the reports ran, as rungs and options of convpar: the one table to read and to correct.

A step whose options differ between the layers has a pair of them. Where a report's own kernel differs from
what convpar has, `Step.note` says how.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Config = Mapping[str, Any]
Arrays = Literal["device", "pinned", "pageable"]

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a report's table.

    Attributes
    ----------
    report, section : str
        Where its figures are in published.csv.
    rung : str or None
        None: convpar has nothing of the kind, and the note says what it was.
    config : mapping, or one for each layer
        Options of the rung.
    figure : mapping
        What else the figures' configuration must hold.
    arrays : str
        Where the arrays are: on the device, or on the host in pinned or ordinary memory.
    note : str
    """

    report: str
    section: str
    rung: str | None
    config: Config | tuple[Config, Config] = field(default_factory=dict)
    figure: Mapping[str, str] = field(default_factory=dict)
    arrays: Arrays = "device"
    note: str = ""

    def options(self, layer: int) -> Config:
        """The rung's options in layer 1 or 2."""
        return self.config[layer - 1] if isinstance(self.config, tuple) else self.config


def _tile(width: int) -> tuple[int, int]:
    return (width, width)


_MULTIPLY_16 = {"tile": _tile(16), "depth": 16}
# Report A writes the patches of 5 000 images at a time: 6.3 GB in the first layer.
_A_PATCHES = {**_MULTIPLY_16, "slice": 5000, "workspace_limit": 8192 * MIB}
_C_ALL = {"loading": "unrolled", "loops": "unrolled", "restrict": True}
# Report D's blocks are one warp, and one product deep.
_ONE_WARP = {"warps": (1, 1), "depth": 16}
_D_SQUARE = {**_ONE_WARP, "block": "16x16x16", "reuse": "none"}
_TILED_16 = {"tile": _tile(16), "loops": "unrolled"}

STEPS = (
    # -- A: eight optimisations, one at a time
    Step("A", "baseline", "gpu-naive", {"tile": _tile(16)}),
    Step("A", "streams", "gpu-naive", {"tile": _tile(16), "streams": 10, "workspace_limit": 8192 * MIB},
         arrays="pinned", note="ten slices on ten streams; the time during which any of them computes"),
    Step("A", "tiled", "gpu-tiled", {"tile": _tile(16), "loading": "full"}),
    Step("A", "im2col", "gpu-im2col", _A_PATCHES),
    Step("A", "fused", "gpu-fused", _MULTIPLY_16, note="its kernel still wrote the patches to memory; this one doesn't"),
    Step("A", "constant", "gpu-constant", {"tile": _tile(16)}),
    Step("A", "unrolled", "gpu-unrolled", {"tile": _tile(16)}),
    Step("A", "atomics", "gpu-atomic", {"tile": _tile(16)}),
    Step("A", "half", "gpu-half", {"tile": _tile(16), "sum": "half"}),
    # -- B: a stack; no shapes are stated, report-b-* are those of a public harness of the same course
    Step("B", "baseline", None, note="one thread an image: no rung leaves a GPU that idle"),
    Step("B", "naive", "gpu-naive", {"tile": _tile(16)}),
    Step("B", "constant", "gpu-constant", {"tile": _tile(16)}),
    Step("B", "unrolled", "gpu-naive", _TILED_16),
    Step("B", "tiled", "gpu-tiled", _TILED_16),
    Step("B", "tiled-constant", "gpu-tiled-constant", _TILED_16),
    Step("B", "channel-last", "gpu-tiled-constant", {**_TILED_16, "layout": "channel-last"}),
    # -- C: tuning
    Step("C", "baseline", "gpu-naive", {"tile": _tile(32)}, figure={"tile": "32"}),
    Step("C", "half", "gpu-half", {"tile": _tile(32), "sum": "half"}, note="no tile width stated"),
    Step("C", "tiled-constant", "gpu-tiled-constant", {"tile": _tile(16)}, note="no tile width stated"),
    Step("C", "im2col", "gpu-im2col", _MULTIPLY_16),
    Step("C", "fused", "gpu-fused", {**_MULTIPLY_16, "filters": "constant"}),
    Step("C", "kernel-per-layer", "gpu-tiled-constant", ({"tile": _tile(32)}, {"tile": _tile(17)})),
    Step("C", "final", "gpu-tiled-constant", ({**_C_ALL, "tile": _tile(32)}, {**_C_ALL, "tile": _tile(17)})),
    # -- D: tensor cores
    Step("D", "baseline", "gpu-naive", {"tile": _tile(16)}),
    Step("D", "im2col", "gpu-im2col", _MULTIPLY_16),
    Step("D", "fused", "gpu-fused", _MULTIPLY_16),
    Step("D", "tensorcore", "gpu-tensorcore", _D_SQUARE),
    Step("D", "index-reuse", "gpu-tensorcore", {**_D_SQUARE, "reuse": "registers"}),
    Step("D", "tensorcore-8x32x16", "gpu-tensorcore",
         ({**_ONE_WARP, "block": "8x32x16", "reuse": "shared"}, {**_D_SQUARE, "reuse": "registers"})),
)  # fmt: skip

BATCHES: Mapping[str, tuple[int, ...]] = {
    "A": (100, 1000, 10000),
    "B": (10000,),
    "C": (100, 1000, 10000),
    "D": (100, 1000, 5000),
}
"""Images of each report's runs; report B's are those of the harness."""

BASELINE = {"A": "baseline", "B": "naive", "C": "baseline", "D": "baseline"}
"""The section that a report's other times are held against: one thread per output in each of them."""


def steps(report: str) -> list[Step]:
    """The steps of `report`, in its order."""
    return [step for step in STEPS if step.report == report]
