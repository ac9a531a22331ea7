"""Pictures of bytes: cpu-simd and cpu-separable make floats of them in registers, and bytes of their sums. With AVX2 they do so for
filters of three rows at most; samples under higher ones are gathered."""

from __future__ import annotations

import itertools
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
        "ISA levels" in build_info() and isa() not in ("v3", "v4"),
        reason="samples are gathered as floats: bytes become floats in registers from AVX2 on",
    ),
]

RUNG, SEPARABLE = "cpu-simd", "cpu-separable"
WIDE = "ISA levels" in build_info() and isa() == "v4"
ROWS, COLUMNS = 8, 64 if WIDE else 16
"""Of the smallest rectangle."""
MOST_ROWS = 7 if WIDE else 3
"""Of a filter."""

INTERLEAVED: dict[str, Any] = {
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


def check(case: Case, rung: str = RUNG) -> None:
    """It is right, and some of it was taken so unless the filter has too many rows."""
    plan = plan_of(case, rung)
    taken = case.w_shape[2] <= MOST_ROWS
    assert ("in registers" in plan.launch["output"]) == taken
    assert "inside" in plan.paths or not taken
    case.check(rung)


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
    """Blocks of four and of three vectors, or of two and of one, and a last one that reaches back."""
    for taps in ((3, 3), (2, 3), (5, 4)):
        check(picture((ROWS + taps[0], columns + taps[1] - 1), taps))


@pytest.mark.parametrize("rows", range(ROWS, 2 * ROWS + 3))
def test_every_height(rows: int) -> None:
    """The last blocks of a rectangle reach back; of tiles of fewer rows samples are gathered."""
    check(picture((rows + 2, 100), (3, 3)))
    check(picture((rows + 6, 100), (7, 7)))


@pytest.mark.parametrize("rung", [RUNG, SEPARABLE])
@pytest.mark.parametrize(
    ("size", "config"),
    [
        ((ROWS - 1, 200), ()),
        ((200, COLUMNS - 1), ()),
        ((60, 300), (("tile", (ROWS - 1, 300)),)),
        ((60, 300), (("tile", (60, COLUMNS - 1)),)),
    ],
    ids=str,
)
def test_smaller_pictures_and_tiles_are_gathered(size: tuple[int, int], config: Any, rung: str) -> None:
    """Whole, and so they count in estimates."""
    case = picture((size[0] + 2, size[1] + 2), (3, 3), config=config, data="separable")
    plan = plan_of(case, rung)
    assert (plan.launch["input"], plan.launch["output"]) == (
        "gathered tile by tile",
        "converted tile by tile",
    )
    assert "inside" not in plan.paths
    assert {"staged", "converted"} <= set(plan.paths)
    case.check(rung)


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
    one_row = Memory(steps=(1, 1, 0, 1))
    check(picture((30, 700), (3, 5), x=one_row, flip=flip, padding="same"))


def test_columns_apart_and_samples_that_are_true_or_false() -> None:
    for dilation in ((1, 2), (1, 7)):
        check(picture((30, 200), (3, 5), dilation=dilation))
        check(picture((30, 200), (3, 5), dilation=dilation, data="separable"), SEPARABLE)
    check(picture((30, 200), (3, 3), x_dtype="bool", data="halves"))


@pytest.mark.parametrize(
    "given",
    [{"stride": (2, 1)}, {"stride": (1, 2)}, {"dilation": (2, 1)}, {"overflow": "raise", "data": "sparse"}, {"dtype": None, "overflow": "wrap"}, {"x_dtype": "int8"}, {"dtype": "int8"}, {"x": Memory(steps=(1, 1, 1, 2))}, {"out": Memory(steps=(1, 1, 1, 2))}],
    ids=str,
)  # fmt: skip
def test_what_is_gathered_all_the_same(given: dict[str, Any]) -> None:
    case = picture((40, 300), (3, 3), **given)
    assert "in registers" not in plan_of(case).launch["output"]
    case.check(RUNG)


@pytest.mark.parametrize("rung", [RUNG, SEPARABLE])
def test_sums_are_rounded_to_even_and_saturated_and_what_is_no_number_is_zero(rung: str) -> None:
    """The same at an edge and in the middle."""
    x = np.zeros((40, 700), np.uint8)
    x[:, ::2] = np.arange(40)[:, None] * 5 + 1
    middle = np.float32([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
    rules: dict[str, Any] = {"dtype": "uint8", "overflow": "saturate", "backend": rung}
    fractions = 0
    for weight in (0.5, 0.25, 1.5, -0.5, 100, -100, 1e30, -1e30, np.nan, np.inf, -np.inf):
        with np.errstate(invalid="ignore"):
            sums = x * np.float32(weight)
            w = middle * np.float32(weight)
        right = np.nan_to_num(np.clip(np.rint(sums), 0, 255)).astype(np.uint8)
        fractions += int(((sums > 0) & (sums < 255) & (sums != np.rint(sums))).sum())
        for padding in ("valid", "same"):
            if not np.isfinite(weight) and (padding == "same" or rung == SEPARABLE):
                continue  # Products of such weights' zeros aren't zeros.
            alone = not np.isfinite(weight)
            given = np.float32([[weight]]) if alone else w
            plan = plan_of(picture(x.shape, given.shape, padding=padding, data="halves"), rung)
            assert "inside" in plan.paths
            y = conv2d(x, given, padding=padding, boundary="mirror" if padding == "same" else "fill", **rules)
            cut = slice(None) if alone or padding == "same" else slice(1, -1)
            np.testing.assert_array_equal(y, right[cut, cut])
    assert fractions > 10_000


@pytest.mark.parametrize("high", range(2, 8))
@pytest.mark.parametrize("wide", [2, 3, 5, 8, 15])
def test_every_separable_filter(high: int, wide: int) -> None:
    """In strips of column sums, of which the last reaches back; of two terms where so large a filter has them."""
    for rows, columns in ((ROWS, COLUMNS), (ROWS + 3, 511), (21, 513), (13, 1040)):
        for data in ("separable", "uniform"):
            case = picture(
                (rows + high - 1, columns + wide - 1), (high, wide), data=data, bias_dtype="float32"
            )
            check(case, SEPARABLE)


@pytest.mark.parametrize("boundary", MODES)
def test_separable_filters_at_every_border_and_of_colours(boundary: str) -> None:
    for channels, taps in itertools.product((1, 2, 3), ((3, 4), (5, 4))):
        memory: dict[str, Any] = INTERLEAVED if channels == 3 else {}
        case = picture(
            (40, 700),
            taps,
            channels,
            padding="same",
            boundary=boundary,
            data="separable",
            threads=2,
            **memory,
        )
        check(case, SEPARABLE)


@pytest.mark.parametrize("weight", [1e36, 1e38, np.inf, np.nan])
def test_sums_of_a_column_that_overflow_are_summed_directly(weight: float) -> None:
    """They would meet a 0 of the row; beside a filter that has no factors, and one that is as it should be."""
    x = np.random.default_rng(0).integers(0, 256, (50, 300), dtype=np.uint8)
    w = np.zeros((3, 1, 3, 3), np.float32)
    w[0, 0, :, 0], w[0, 0, :, 2] = weight, -weight
    w[1] = np.random.default_rng(1).standard_normal((3, 3))
    w[2] = np.float32(1 / 16)
    for padding in ("valid", "same"):
        rules: dict[str, Any] = {"dtype": "uint8", "overflow": "saturate", "padding": padding}
        y = conv2d(x[None], w, backend=SEPARABLE, **rules)
        np.testing.assert_array_equal(y, conv2d(x[None], w, backend=RUNG, **rules))


def test_filters_without_factors_are_left_to_cpu_simd() -> None:
    """The same sums in the same order."""
    x = np.random.default_rng(0).integers(0, 256, (300, 300), dtype=np.uint8)
    w = np.random.default_rng(1).standard_normal((3, 3)).astype(np.float32)
    rules: dict[str, Any] = {"dtype": "uint8", "overflow": "saturate"}
    made = convpar.plan(x, w, backend=SEPARABLE, **rules)
    np.testing.assert_array_equal(made(x, w), conv2d(x, w, backend=RUNG, **rules))
    assert made.plan.paths_run() & {"inside", "staged", "factored"} == {"inside"}


def test_choosers_look_for_factors_of_a_large_picture() -> None:
    """It comes from memory, which doesn't limit 25 products."""
    x, w = np.zeros((4096, 4096), np.uint8), np.ones((5, 5), np.float32)
    assert convpar.plan(x, w, dtype="uint8", overflow="saturate").backend.name == SEPARABLE
