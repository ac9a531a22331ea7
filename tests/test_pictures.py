"""Pictures of bytes: cpu-simd makes floats of them in registers, and bytes of its sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import convpar
from convpar import conv2d, registry
from convpar.backend import Refusal
from convpar.backends.cpu import build_info, isa
from convpar.boundary import MODES
from convpar.conformance.case import Case
from convpar.conformance.memory import Memory

pytestmark = [
    pytest.mark.skipif(
        "ISA levels" not in build_info(), reason="the CPU engine isn't built here; install convpar"
    ),
    pytest.mark.skipif(
        "ISA levels" in build_info() and isa() != "v4",
        reason="samples are gathered as floats: vectors as wide as a line of the cache are of AVX-512",
    ),
]

RUNG = "cpu-simd"
ROWS, COLUMNS = 8, 64
"""Of the smallest rectangle."""

INTERLEAVED = {
    "x": Memory(order=(0, 2, 3, 1)),
    "w": Memory(steps=(0, 1, 1, 1)),
    "out": Memory(order=(0, 2, 3, 1)),
    "groups": 3,
}


def picture(
    size: tuple[int, int], taps: tuple[int, int], channels: int = 1, filters: int = 1, **given: Any
) -> Case:
    """Of one channel, or of several with filters of their own."""
    types = {"x_dtype": "uint8", "w_dtype": "float32", "dtype": "uint8", "overflow": "saturate"}
    plain: dict[str, Any] = {**types, "data": "uniform", "groups": channels}
    return Case(
        x_shape=(given.pop("images", 1), channels, *size),
        w_shape=(channels * filters, 1, *taps),
        **{**plain, **given},
    )


def plan_of(case: Case, rung: str = RUNG) -> Any:
    backend = registry.find(rung)
    assert backend is not None
    plan = case.plan(backend, case.arrays("cpu"))
    assert not isinstance(plan, Refusal)
    return plan


def check(case: Case) -> None:
    """It is right, and some of it was taken so."""
    plan = plan_of(case)
    assert "in registers" in plan.launch["output"]
    assert "inside" in plan.paths
    case.check(RUNG)


@pytest.mark.parametrize("high", range(1, 8))
@pytest.mark.parametrize("wide", [1, 2, 3, 5, 8])
def test_every_filter(high: int, wide: int) -> None:
    """Weights that stay in registers, and others; sums of all filter rows at once."""
    for data in ("uniform", "bright", "extremes"):
        check(picture((high + 11, wide + 90), (high, wide), data=data, bias_dtype="float32"))


@pytest.mark.parametrize(
    "columns", [*range(COLUMNS, COLUMNS + 17), 79, 80, 81, 95, 96, 97, 127, 128, 129, 143, 177, 255, 300]
)
def test_every_width(columns: int) -> None:
    """Blocks of four and of three vectors, and a last one that reaches back; the fewest are one and a half."""
    for taps in ((3, 3), (5, 4)):
        check(picture((ROWS + taps[0], columns + taps[1] - 1), taps))


@pytest.mark.parametrize("rows", range(ROWS, 2 * ROWS + 3))
def test_every_height(rows: int) -> None:
    """The last blocks of a rectangle reach back; of tiles of fewer rows samples are gathered."""
    check(picture((rows + 2, 100), (3, 3)))
    check(picture((rows + 6, 100), (7, 7)))


@pytest.mark.parametrize("size", [(ROWS - 1, 200), (200, COLUMNS - 1)], ids=str)
def test_smaller_pictures_are_gathered(size: tuple[int, int]) -> None:
    case = picture((size[0] + 2, size[1] + 2), (3, 3))
    plan = plan_of(case)
    assert "inside" not in plan.paths
    assert {"staged", "converted"} <= set(plan.paths)
    case.check(RUNG)


@pytest.mark.parametrize("boundary", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_border(boundary: str, channels: int) -> None:
    """What lies at an edge is gathered and converted, and nothing else."""
    for padding in ("same", (0, 2, 0, 0), (1, 0, 3, 0), (0, 0, 0, 5)):
        for taps in ((3, 3), (4, 7)):
            fill = {"fillvalue": 200} if boundary == "fill" else {}
            case = picture((40, 700), taps, channels, padding=padding, boundary=boundary, **fill)
            check(case)
            assert {"staged", "converted"} <= set(plan_of(case).paths)


def test_without_a_border_nothing_is_gathered() -> None:
    plan = plan_of(picture((50, 300), (3, 3)))
    assert not {"staged", "converted"} & set(plan.paths)
    assert plan.launch["output"] == "converted in registers"
    assert plan.workspace_bytes(1) < 300 * 50


@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (5, 5), (7, 7), (2, 6)], ids=str)
def test_colours_beside_each_other(taps: tuple[int, int]) -> None:
    """They are columns, under a filter whose own lie as far apart as there are colours."""
    for padding, boundary in ((0, "fill"), ("same", "mirror")):
        check(picture((30, 400), taps, 3, padding=padding, boundary=boundary, **INTERLEAVED))


def test_planes_filters_images_tiles_and_threads() -> None:
    """Of each the first and others; also where tiles end within a block."""
    for config in ((), (("tile", (9, 67)),), (("tile", (17, 512)), ("block", 1))):
        for threads in (1, 3):
            for padding in (0, "same"):
                check(
                    picture(
                        (60, 600), (3, 3), 2, 3, images=2, config=config, threads=threads,
                        padding=padding, bias_dtype="float32",
                    )
                )  # fmt: skip


@pytest.mark.parametrize("flip", [False, True])
def test_rows_and_planes_anywhere(flip: bool) -> None:
    """Of a larger picture, in reverse, at any address."""
    for steps in ((1, 1, 2, 1), (1, 1, -1, 1), (1, 2, 3, 1)):
        memory = Memory(steps=steps, offset=1)
        check(picture((30, 700), (3, 5), 2, x=memory, out=memory, flip=flip, padding="same"))


@pytest.mark.parametrize(
    "given",
    [{"stride": (2, 1)}, {"stride": (1, 2)}, {"dilation": (2, 1)}, {"overflow": "raise", "data": "sparse"}, {"dtype": None, "overflow": "wrap"}, {"x_dtype": "int8"}, {"dtype": "int8"}, {"x": Memory(steps=(1, 1, 1, 2))}, {"out": Memory(steps=(1, 1, 1, 2))}],
    ids=str,
)  # fmt: skip
def test_what_is_gathered_all_the_same(given: dict[str, Any]) -> None:
    case = picture((40, 300), (3, 3), **given)
    assert "in registers" not in plan_of(case).launch["output"]
    case.check(RUNG)


def test_sums_are_rounded_to_even_and_saturated_and_what_is_no_number_is_zero() -> None:
    """The same at an edge and in the middle."""
    x = np.zeros((40, 400), np.uint8)
    x[:, ::2] = np.arange(40)[:, None] * 6
    for weight in (0.5, 1.5, -0.5, 100, -100, 1e30, -1e30, np.nan, np.inf, -np.inf):
        w = np.float32([[weight]])
        with np.errstate(invalid="ignore"):
            sums = x.astype(np.float32) * w[0, 0]
        right = np.nan_to_num(np.clip(np.rint(sums), 0, 255)).astype(np.uint8)
        y = conv2d(x, w, dtype="uint8", overflow="saturate", backend=RUNG)
        np.testing.assert_array_equal(y, right)
        wide = np.float32([[0, 0, 0], [0, weight, 0], [0, 0, 0]])
        if np.isfinite(weight):
            y = conv2d(x, wide, padding="same", boundary="mirror", dtype="uint8", overflow="saturate", backend=RUNG)  # fmt: skip
            np.testing.assert_array_equal(y, right)


def test_a_filter_without_factors_is_left_to_it() -> None:
    """By cpu-separable, which gathers what it looks for a shorter way."""
    x = np.random.default_rng(0).integers(0, 256, (300, 300), dtype=np.uint8)
    w = np.random.default_rng(1).standard_normal((5, 5)).astype(np.float32)
    plan = convpar.plan(x, w, dtype="uint8", overflow="saturate", backend="cpu-separable")
    assert "by cpu-simd" in str(plan.plan.launch["direct sums"])
    y = conv2d(x, w, dtype="uint8", overflow="saturate", backend="cpu-separable")
    np.testing.assert_array_equal(y, conv2d(x, w, dtype="uint8", overflow="saturate", backend=RUNG))
