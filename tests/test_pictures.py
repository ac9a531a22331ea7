"""Pictures of 8 and 16 bits: cpu-simd and cpu-separable make floats of their samples in registers, and samples of sums unless these are
asked for. With AVX2 they do so for filters of three rows at most; samples under higher ones are gathered."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import conv2d, registry
from convpar.backend import Refusal
from convpar.backends.cpu import build_info, isa
from convpar.backends.cpu import plan as cpu_plan
from convpar.boundary import MODES
from convpar.conformance.case import Case
from convpar.conformance.memory import Memory

pytestmark = [
    pytest.mark.skipif(
        "ISA levels" not in build_info(), reason="the CPU engine isn't built here; install convpar"
    ),
    pytest.mark.skipif(
        "ISA levels" in build_info() and isa() not in ("v3", "v4"),
        reason="samples are gathered as floats: they become floats in registers from AVX2 on",
    ),
]

RUNG, SEPARABLE = "cpu-simd", "cpu-separable"
WIDE = "ISA levels" in build_info() and isa() == "v4"
ROWS, COLUMNS = 8, 64 if WIDE else 16
"""Of the smallest rectangle."""
MOST_ROWS, MOST_ROWS_FAR = (5, 7) if WIDE else (3, 3)
"""Of a filter; and where samples come from memory and results are of their type."""


@pytest.fixture(autouse=True)
def from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures count as larger than the caches, as small as they are here."""
    monkeypatch.setattr(cpu_plan, "FAR_BYTES", 0)


INTERLEAVED: dict[str, Any] = {
    "x": Memory(order=(0, 2, 3, 1)),
    "w": Memory(steps=(0, 1, 1, 1)),
    "out": Memory(order=(0, 2, 3, 1)),
    "groups": 3,
}


BYTES: dict[str, Any] = {"dtype": "uint8", "overflow": "saturate"}
FLOATS: dict[str, Any] = {"dtype": None, "overflow": "wrap"}
TYPES: dict[str, dict[str, Any]] = {
    "uint8": {"x_dtype": "uint8", **BYTES},
    "uint8-float32": {"x_dtype": "uint8", **FLOATS},
    "uint16": {"x_dtype": "uint16", "dtype": "uint16", "overflow": "saturate"},
    "uint16-float32": {"x_dtype": "uint16", **FLOATS},
    "int16": {"x_dtype": "int16", "dtype": "int16", "overflow": "saturate"},
    "int16-float32": {"x_dtype": "int16", **FLOATS},
}
"""Of samples and results. Kernels are made for each; how the engine cuts pictures depends on the widths alone."""
all_types = pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
_SOME = "uint8", "uint8-float32", "int16"
some_types = pytest.mark.parametrize("types", [TYPES[kind] for kind in _SOME], ids=_SOME)


def picture(
    size: tuple[int, int], taps: tuple[int, int], channels: int = 1, filters: int = 1, **given: Any
) -> Case:
    """Of one channel, or of several with filters of their own; bytes, and to bytes, unless something else is given."""
    plain: dict[str, Any] = {
        "w_dtype": "float32",
        **TYPES["uint8"],
        "data": "uniform",
        "groups": channels,
    }
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
    taken = case.w_shape[2] <= (MOST_ROWS if case.dtype is None else MOST_ROWS_FAR)
    assert ("in registers" in plan.launch["input"]) == taken
    assert ("in registers" in plan.launch["output"]) == (taken and case.dtype is not None)
    assert "inside" in plan.paths or not taken
    case.check(rung)


@all_types
@pytest.mark.parametrize("high", range(1, 8))
@pytest.mark.parametrize("wide", [1, 2, 3, 5, 8])
def test_every_filter(high: int, wide: int, types: dict[str, Any]) -> None:
    """Weights that stay in registers, and others; sums of all filter rows at once."""
    for data in ("uniform", "bright", "extremes"):
        check(picture((high + 11, wide + 90), (high, wide), data=data, bias_dtype="float32", **types))


@all_types
@pytest.mark.parametrize(
    "columns", [*range(COLUMNS, COLUMNS + 17), 79, 80, 81, 95, 96, 97, 127, 128, 129, 143, 177, 255, 300]
)
def test_every_width(columns: int, types: dict[str, Any]) -> None:
    """Blocks of four and of three vectors, or of two and of one, and a last one that reaches back."""
    for taps in ((3, 3), (2, 3), (5, 4)):
        check(picture((ROWS + taps[0], columns + taps[1] - 1), taps, **types))


@some_types
@pytest.mark.parametrize("rows", range(ROWS, 2 * ROWS + 3))
def test_every_height(rows: int, types: dict[str, Any]) -> None:
    """The last blocks of a rectangle reach back; of tiles of fewer rows samples are gathered."""
    check(picture((rows + 2, 100), (3, 3), **types))
    check(picture((rows + 6, 100), (7, 7), **types))


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


@some_types
@pytest.mark.parametrize("boundary", MODES)
@pytest.mark.parametrize("channels", [1, 3])
def test_every_border(boundary: str, channels: int, types: dict[str, Any]) -> None:
    """What lies at an edge is gathered and converted, and nothing else."""
    for padding in ("same", (0, 2, 0, 0), (1, 0, 3, 0), (0, 0, 0, 5)):
        for taps in ((3, 3), (4, 7)):
            fill = {"fillvalue": 200} if boundary == "fill" else {}
            case = picture((40, 700), taps, channels, padding=padding, boundary=boundary, **fill, **types)
            check(case)
            assert "staged" in plan_of(case).paths
            assert ("converted" in plan_of(case).paths) == (types["dtype"] is not None)


@pytest.mark.parametrize("rung", [RUNG, SEPARABLE])
def test_under_high_filters_what_is_in_caches_is_gathered(monkeypatch: pytest.MonkeyPatch, rung: str) -> None:
    """There taller blocks are worth more."""
    monkeypatch.setattr(cpu_plan, "FAR_BYTES", 2**30)
    for high in range(2, 9):
        case = picture((60 + high, 301), (high, 3), data="separable")
        launch = plan_of(case, rung).launch
        assert ("in registers" in launch["input"]) == (high <= MOST_ROWS)
        case.check(rung)


@pytest.mark.parametrize("rung", [RUNG, SEPARABLE])
@some_types
def test_narrow_pictures_with_a_border_are_gathered(rung: str, types: dict[str, Any]) -> None:
    """More lies at their edges than between; so plans say, and estimates count."""
    case = picture((60, 300), (3, 3), padding="same", data="separable", **types)
    plan = plan_of(case, rung)
    assert "inside" not in plan.paths or not WIDE
    assert plan.launch["input"].startswith("gathered" if WIDE else "read in place")
    case.check(rung)


def test_without_a_border_nothing_is_gathered() -> None:
    plan = plan_of(picture((50, 300), (3, 3)))
    assert not {"staged", "converted"} & set(plan.paths)
    assert plan.launch["output"] == "converted in registers"
    assert plan.workspace_bytes(1) < 300 * 50


@pytest.mark.parametrize("x_dtype", ["uint8", "uint16", "int16"])
def test_sums_that_stay_floats_overflow_nowhere(x_dtype: str) -> None:
    """So those that are to be checked are no others."""
    check(picture((30, 300), (3, 3), x_dtype=x_dtype, dtype=None, overflow="raise"))


@some_types
@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (5, 5), (7, 7), (2, 6)], ids=str)
def test_colours_beside_each_other(taps: tuple[int, int], types: dict[str, Any]) -> None:
    """They are columns, under a filter whose own lie as far apart as there are colours."""
    for padding, boundary in ((0, "fill"), ("same", "mirror")):
        check(picture((30, 400), taps, 3, padding=padding, boundary=boundary, **INTERLEAVED, **types))


@some_types
def test_planes_filters_images_tiles_and_threads(types: dict[str, Any]) -> None:
    """Of each the first and others; also where tiles end within a block."""
    for config in ((), (("tile", (9, 67)),), (("tile", (17, 512)), ("block", 1))):
        for threads in (1, 3):
            for padding in (0, "same"):
                check(
                    picture(
                        (60, 600), (3, 3), 2, 3, images=2, config=config, threads=threads,
                        padding=padding, bias_dtype="float32", **types,
                    )
                )  # fmt: skip


@some_types
@pytest.mark.parametrize("flip", [False, True])
def test_rows_and_planes_anywhere(flip: bool, types: dict[str, Any]) -> None:
    """Of a larger picture, in reverse, at any address."""
    for steps in ((1, 1, 2, 1), (1, 1, -1, 1), (1, 2, 3, 1)):
        memory = Memory(steps=steps, offset=1)
        # Floats that aren't aligned would be converted.
        out = memory if types["dtype"] else Memory(steps=steps, offset=4)
        check(picture((30, 700), (3, 5), 2, x=memory, out=out, flip=flip, padding="same", **types))
    one_row = Memory(steps=(1, 1, 0, 1))
    check(picture((30, 700), (3, 5), x=one_row, flip=flip, padding="same", **types))


def test_columns_apart_and_samples_that_are_true_or_false() -> None:
    for dilation in ((1, 2), (1, 7)):
        check(picture((30, 200), (3, 5), dilation=dilation))
        check(picture((30, 200), (3, 5), dilation=dilation, data="separable"), SEPARABLE)
    check(picture((30, 200), (3, 3), x_dtype="bool", data="halves"))


@pytest.mark.parametrize(
    "given",
    [{"stride": (2, 1)}, {"stride": (1, 2)}, {"dilation": (2, 1)}, {"overflow": "raise", "data": "sparse"}, {"dtype": "float64", "overflow": "wrap"}, {"x_dtype": "int8"}, {"dtype": "int8"}, {"dtype": "int16"}, {"x_dtype": "int16"}, {"x_dtype": "int16", "dtype": "uint16"}, {"x": Memory(steps=(1, 1, 1, 2))}, {"out": Memory(steps=(1, 1, 1, 2))}],
    ids=str,
)  # fmt: skip
def test_what_is_gathered_all_the_same(given: dict[str, Any]) -> None:
    case = picture((40, 300), (3, 3), **given)
    launch = plan_of(case).launch
    assert "in registers" not in launch["input"] + launch["output"]
    case.check(RUNG)


@pytest.mark.parametrize("rung", [RUNG, SEPARABLE])
@pytest.mark.parametrize("columns", [513, 515, 591, 1000, 1300])
def test_sums_that_stay_floats_past_the_caches(columns: int, rung: str) -> None:
    """In whole lines; blocks and strips that reach back store what lies there already."""
    for taps, rows in (((3, 3), 12), ((5, 4), 21)):
        for memory in (Memory(), Memory(offset=4)):
            size = (rows + taps[0] - 1, columns + taps[1] - 1)
            config = (("stores", "streamed"),)
            for types in (TYPES["uint8-float32"], TYPES["uint16-float32"]):
                case = picture(size, taps, config=config, data="separable", threads=2, out=memory, **types)
                assert "streamed" in plan_of(case, rung).paths
                check(case, rung)


@pytest.mark.parametrize("kind", ["uint16", "int16"])
def test_words_that_lie_otherwise_are_gathered(kind: str) -> None:
    """In the other byte order, at odd addresses, or in rows an odd number of bytes apart; results, too."""
    for types in (TYPES[kind], TYPES[f"{kind}-float32"]):
        for array in ("x", "out"):
            for memory in (Memory(swapped=True), Memory(offset=1)):
                case = picture((40, 300), (3, 3), **types, **{array: memory})
                # Where the address alone is odd, vectors may be loaded and stored all the same.
                if memory.swapped or (array == "out" and not types["dtype"]):
                    assert "in registers" not in plan_of(case).launch["input"]
                case.check(RUNG)
    # Rows an odd number of bytes apart, as in records.
    record = np.dtype([("row", np.dtype(kind), (300,)), ("mark", np.uint8)])
    rows = np.zeros(40, record)["row"]
    rows[...] = np.random.default_rng(0).integers(0, 30000, rows.shape)
    w = np.random.default_rng(1).random((3, 3), np.float32) / 9
    rules = {k: v for k, v in TYPES[kind].items() if k != "x_dtype"}
    np.testing.assert_array_equal(
        conv2d(rows, w, backend=RUNG, **rules), conv2d(rows.copy(), w, backend=RUNG, **rules)
    )


@pytest.mark.parametrize("rung", [RUNG, SEPARABLE])
@pytest.mark.parametrize("kind", ["uint8", "uint16", "int16"])
def test_sums_are_rounded_to_even_and_saturated_and_what_is_no_number_is_zero(kind: str, rung: str) -> None:
    """The same at an edge and in the middle."""
    types, bounds = TYPES[kind], np.iinfo(kind)
    x = np.zeros((40, 700), kind)
    x[:, ::2] = np.arange(40)[:, None] * (bounds.max // 45) + 1
    x[:, 1::8] = bounds.min
    middle = np.float32([[0, 0, 0], [0, 1, 0], [0, 0, 0]])
    rules: dict[str, Any] = {k: v for k, v in types.items() if k != "x_dtype"} | {"backend": rung}
    fractions = 0
    for weight in (0.5, 0.25, 1.5, -0.5, 100, -100, 1e30, -1e30, np.nan, np.inf, -np.inf):
        with np.errstate(invalid="ignore"):
            sums = x * np.float32(weight)
            w = middle * np.float32(weight)
        right = np.nan_to_num(np.clip(np.rint(sums), bounds.min, bounds.max)).astype(kind)
        fractions += int(((sums > bounds.min) & (sums < bounds.max) & (sums != np.rint(sums))).sum())
        for padding in ("valid", "same"):
            if not np.isfinite(weight) and (padding == "same" or rung == SEPARABLE):
                continue  # Products of such weights' zeros aren't zeros.
            alone = not np.isfinite(weight)
            given = np.float32([[weight]]) if alone else w
            plan = plan_of(
                picture(x.shape, given.shape, padding=padding, **{**types, "data": "halves"}), rung
            )
            assert "inside" in plan.paths
            y = conv2d(x, given, padding=padding, boundary="mirror" if padding == "same" else "fill", **rules)
            cut = slice(None) if alone or padding == "same" else slice(1, -1)
            np.testing.assert_array_equal(y, right[cut, cut])
    assert fractions > 10_000


@all_types
@pytest.mark.parametrize("high", range(2, 8))
@pytest.mark.parametrize("wide", [2, 3, 5, 8, 15])
def test_every_separable_filter(high: int, wide: int, types: dict[str, Any]) -> None:
    """In strips of column sums, of which the last reaches back; of two terms where so large a filter has them."""
    for rows, columns in ((ROWS, COLUMNS), (ROWS + 3, 511), (21, 513), (13, 1040)):
        for data in ("separable", "uniform"):
            case = picture(
                (rows + high - 1, columns + wide - 1), (high, wide), data=data, bias_dtype="float32", **types
            )
            check(case, SEPARABLE)


@some_types
@pytest.mark.parametrize("boundary", MODES)
def test_separable_filters_at_every_border_and_of_colours(boundary: str, types: dict[str, Any]) -> None:
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
            **types,
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
    for result in (BYTES, FLOATS):
        assert convpar.plan(x, w, **result).backend.name == SEPARABLE
