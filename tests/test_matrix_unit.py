"""The rungs that split floats for the processor's matrix unit: every shape of tiles, the contract's edge, odd values."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import Unsupported, conv2d, explain, registry
from convpar.backends import cpu
from convpar.backends.cpu import compiled, splitting
from convpar.problem import Problem, check_dtype

RUNGS = ("cpu-amx", "cpu-toeplitz")
MISSING = {name: registry.find(name).unavailable() for name in RUNGS}  # type: ignore[union-attr]
if MISSING["cpu-amx"]:
    pytest.skip(str(MISSING["cpu-amx"]), allow_module_level=True)

U = 2.0**-24
rng = np.random.default_rng(17)

# Tiles of 16 channels and of 2 x 8, 4 x 4 or 8 x 2 outputs, alone, in pairs, in fours, and what is left of them; one chunk
# of 32 channels or window of columns and several; six, five, four and three products of parts.
AMX = [
    ((1, 16, 4, 5), (1, 16, 1, 1), {}),
    ((1, 16, 9, 17), (16, 16, 3, 3), {}),
    ((2, 17, 9, 18), (17, 17, 3, 3), {"padding": 1}),
    ((1, 32, 11, 33), (33, 32, 3, 3), {"padding": "same", "boundary": "wrap"}),
    ((1, 33, 12, 34), (40, 33, 2, 3), {"stride": (2, 1)}),
    ((1, 64, 13, 40), (48, 64, 3, 3), {"stride": (1, 2), "dilation": (1, 2)}),
    ((2, 65, 21, 20), (64, 65, 3, 3), {"stride": 3, "dilation": (2, 1), "padding": 2}),
    ((3, 128, 7, 7), (32, 128, 3, 3), {"padding": 1}),
    ((1, 40, 30, 30), (70, 40, 5, 5), {}),
    ((2, 64, 10, 30), (34, 32, 3, 3), {"groups": 2}),
    ((1, 200, 6, 50), (20, 200, 2, 2), {}),
    ((2, 64, 41, 33), (20, 64, 3, 3), {"stride": (3, 2), "dilation": (1, 2)}),
    # Samples in grids: of even and of odd rows and columns, with zeros around; of every third; of each filter column, as they are gathered.
    ((1, 20, 30, 75), (18, 20, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 33, 40, 101), (16, 33, 5, 5), {"stride": 3}),
    ((1, 17, 9, 64), (16, 17, 3, 3), {"dilation": (1, 25), "padding": (1, 5), "boundary": "wrap"}),
    (
        (1, 17, 9, 64),
        (16, 17, 3, 4),
        {"stride": (1, 2), "dilation": (1, 18), "padding": 2, "boundary": "wrap"},
    ),
    # All sums of three images by the lines that they lie in, and 5 x 5 filters of so many channels that these take turns.
    ((3, 50, 12, 12), (33, 50, 1, 1), {"stride": 2}),
    ((2, 600, 7, 7), (33, 600, 5, 5), {"padding": 2}),
]
TOEPLITZ = [
    ((1, 1, 6, 6), (1, 1, 6, 6), {}),
    ((1, 1, 40, 23), (1, 1, 7, 7), {}),
    ((1, 1, 70, 131), (1, 1, 9, 9), {}),
    ((1, 1, 71, 140), (2, 1, 11, 11), {"padding": "same", "boundary": "mirror"}),
    ((1, 1, 50, 200), (1, 1, 15, 15), {}),
    ((1, 1, 80, 150), (1, 1, 31, 31), {"padding": "same"}),
    ((1, 1, 90, 101), (1, 1, 21, 21), {}),
    ((1, 1, 60, 90), (1, 1, 6, 40), {}),
    ((1, 1, 90, 60), (1, 1, 40, 6), {}),
    ((2, 3, 30, 47), (3, 3, 7, 8), {"padding": 3}),
    ((2, 4, 40, 37), (4, 1, 13, 13), {"groups": 4, "padding": 6}),
    ((5, 1, 9, 11), (2, 1, 7, 7), {}),
    ((1, 1, 300, 1200), (1, 1, 9, 9), {}),
    # Blocks side by side, steps whose groups of rows take turns, and a last one with a row of outputs under its second bands.
    ((1, 2, 90, 620), (3, 2, 7, 7), {}),
    ((1, 1, 60, 300), (1, 1, 14, 14), {}),
    ((1, 1, 45, 200), (2, 1, 17, 17), {}),
]
CASES = [("cpu-amx", *c) for c in AMX] + [("cpu-toeplitz", *c) for c in TOEPLITZ]


def measure(x: Any, w: Any, **rules: Any) -> Any:
    """What errors are measured by: conv(|x|, |w|), in double precision."""
    return conv2d(np.abs(x.astype(np.float64)), np.abs(w.astype(np.float64)), backend="numpy", **rules)


def exact(x: Any, w: Any, **rules: Any) -> Any:
    return conv2d(x.astype(np.float64), w.astype(np.float64), backend="numpy", **rules)


def tiling_of(backend: str, x: Any, w: Any, **rules: Any) -> splitting.Tiling:
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules)
    found = splitting.tiling(p, backend == "cpu-amx")
    assert found is not None
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("backend", "x_shape", "w_shape", "rules"), CASES)
def test_every_shape_of_tiles(
    backend: str, x_shape: Any, w_shape: Any, rules: dict[str, Any], num_threads: int
) -> None:
    # One bright patch: next to it, errors must be as small as elsewhere.
    x = rng.standard_normal(x_shape).astype(np.float32)
    x[..., :2, :2] *= 1e6
    w = rng.standard_normal(w_shape).astype(np.float32)
    bias = rng.standard_normal(w_shape[0]).astype(np.float32)
    y = conv2d(x, w, bias=bias, backend=backend, num_threads=num_threads, **rules)
    right = exact(x, w, **rules) + bias[:, None, None].astype(np.float64)
    allowed = (w[0].size + 2) * U * (measure(x, w, **rules) + np.abs(bias)[:, None, None])
    assert np.all(np.abs(y - right) <= allowed)


def test_the_shapes_above_take_every_number_of_products_and_every_shape_of_outputs() -> None:
    taken = {
        (backend, t.products, t.rows, t.out_rows)
        for backend, x, w, rules in CASES
        for t in [tiling_of(backend, np.empty(x, np.float32), np.empty(w, np.float32), **rules)]
    }
    for rung in RUNGS:
        assert {products for backend, products, *_ in taken if backend == rung} == {3, 4, 5, 6}
    assert {tuple(shape) for backend, _, *shape in taken if backend == "cpu-toeplitz"} == set(
        splitting.WINDOWS
    )


@pytest.mark.parametrize(("backend", "x_shape", "w_shape", "rules"), CASES)
def test_the_parts_left_out_stay_within_the_contract_where_they_add_up(
    backend: str, x_shape: Any, w_shape: Any, rules: dict[str, Any]
) -> None:
    # Rounded, its second part is nearly 2**-8 of the first, its third nearly 2**-9 of the second, and all have its sign; truncated, the second
    # of another is nearly 2**-7 of the first, and the third nearly 2**-8 of the second.
    rounded, truncated = (np.float32(1 + 2.0**-k - less - 2.0**-23) for k, less in ((8, 2.0**-17), (7, 0)))
    products = tiling_of(
        backend, np.empty(x_shape, np.float32), np.empty(w_shape, np.float32), **rules
    ).products
    x = np.full(x_shape, truncated if (backend, products) == ("cpu-toeplitz", 6) else rounded)
    w = np.full(w_shape, rounded)
    right = exact(x, w, **rules)
    error = np.abs(conv2d(x, w, backend=backend, **rules) - right)
    assert np.all(error <= (w[0].size + 2) * U * right)
    left_out = {3: 512, 4: 256, 5: 128, 6: 1}[products]
    # The sums' own rounding may make good a part of it.
    assert error.max() >= 0.4 * left_out * U * right.max() or left_out == 1


@pytest.mark.parametrize(("parts", "products"), [(1, 2), (1, 3), (2, 3), (2, 4), (2, 5), (3, 6)])
@pytest.mark.parametrize("windows", splitting.WINDOWS, ids=str)
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "rules"),
    [
        ((2, 3, 40, 37), (4, 3, 13, 13), {"padding": 6}),
        ((1, 2, 33, 70), (2, 2, 6, 18), {}),
        ((3, 4, 21, 19), (4, 2, 9, 7), {"groups": 2, "padding": 3}),
        ((1, 1, 75, 150), (1, 1, 31, 31), {"padding": "same", "boundary": "mirror"}),
        # Two blocks of any shape beside each other, and a last row of outputs by itself.
        ((1, 1, 31, 330), (1, 1, 7, 9), {}),
    ],
)
def test_every_way_to_fill_a_row_with_every_number_of_products(
    monkeypatch: pytest.MonkeyPatch,
    x_shape: Any,
    w_shape: Any,
    rules: dict[str, Any],
    windows: tuple[int, int],
    parts: int,
    products: int,
) -> None:
    rows, out_rows = windows
    forced = splitting.Tiling(rows, 32 // rows, out_rows, 16 // out_rows, products, parts=parts)
    monkeypatch.setattr(splitting, "tiling", lambda p, channels: forced)
    # Samples of two parts or one, taps of one: whatever is left out is zero.
    most = 255 if parts == 1 else 1023
    x = rng.integers(-most, most + 1, x_shape).astype(np.float32)
    w = rng.integers(-7, 8, w_shape).astype(np.float32)
    planned = convpar.plan(x, w, **rules, backend="cpu-toeplitz", config={"tile": (4 * out_rows + 1, 400)})
    assert planned.plan._tiling._replace(emulated=False) == forced  # type: ignore[attr-defined]
    np.testing.assert_array_equal(planned(x, w), exact(x, w, **rules))


NARROW = {"bool": 1, "int8": 1, "uint8": 1, "bfloat16": 1, "int16": 2, "uint16": 2, "float16": 2}
SUMMED = {1: {6: 3, 7: 3, 13: 2, 15: 2, 31: 2}, 2: {6: 5, 7: 5, 13: 5, 15: 4, 31: 3}}


@pytest.mark.parametrize("kernel", SUMMED[1])
@pytest.mark.parametrize(("dtype", "parts"), NARROW.items())
def test_samples_that_fewer_parts_hold_need_fewer_products(dtype: str, parts: int, kernel: int) -> None:
    x_type = check_dtype(dtype, "x")
    # All of one sign, and of taps the parts that are left out, too.
    tap = np.float32(1 + 2.0**-8 - 2.0**-17 - 2.0**-23)
    if dtype == "float16" or dtype == "bfloat16":
        x = (rng.random((2, 1, 70, 80)) + 1).astype(x_type)
    else:
        most = 1 if dtype == "bool" else np.iinfo(x_type).max
        x = rng.integers(most // 2 + 1, most, (2, 1, 70, 80), endpoint=True).astype(x_type)
        x[1, 0, ::2] = 0 if dtype == "bool" else np.iinfo(x_type).min
    w = np.full((2, 1, kernel, kernel), tap)
    w[1] = rng.standard_normal(w.shape[1:])
    rules: Any = {"padding": kernel // 2, "dtype": "float32"}
    found = tiling_of("cpu-toeplitz", x, w, **rules)
    assert (found.parts, found.products) == (parts, SUMMED[parts][kernel])
    y = conv2d(x, w, backend="cpu-toeplitz", **rules)
    right = exact(x, w, padding=kernel // 2)
    error = np.abs(y - right) / (U * measure(x, w, padding=kernel // 2))
    assert error.max() <= kernel**2 + 2
    # The third parts of taps are left out indeed; the sums' own rounding may make good a part of them.
    assert found.products == {1: 3, 2: 5}[parts] or error[0, 0].max() >= 0.3 * 128


# Sizes from which on fewer products are summed, and some between.
KERNELS = [(6, 6), (7, 8), (9, 10), (11, 12), (13, 12), (15, 12), (13, 16), (17, 19), (19, 25)]


@pytest.mark.parametrize("kernel", KERNELS, ids=str)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("uint8", 129),
        ("int8", -127),
        ("uint16", 32895),
        ("int16", -16447),
        ("float16", 1 + 2.0**-8 - 2.0**-10),
    ],
)
def test_narrow_samples_keep_the_contract_where_what_is_left_out_adds_up(
    dtype: str, value: float, kernel: tuple[int, int]
) -> None:
    # Second parts are nearly as large as they can be, and those of taps, and their third ones, have the sign of the first.
    x = np.full((1, 1, kernel[0] + 5, kernel[1] + 20), value, dtype)
    w = np.full((1, 1, *kernel), np.float32(1 + 2.0**-8 - 2.0**-17 - 2.0**-23))
    found = tiling_of("cpu-toeplitz", x, w, dtype="float32")
    right = exact(x, w)
    error = np.abs(conv2d(x, w, dtype="float32", backend="cpu-toeplitz") - right) / (U * np.abs(right))
    assert error.max() <= w.size + 2
    left_out = {2: 128, 3: 385 if found.parts == 2 else 0, 4: 129, 5: 0}[found.products]
    assert error.max() >= 0.9 * left_out or dtype == "float16"


def test_fewer_products_begin_with_the_filters_above() -> None:
    def products(dtype: str) -> list[int]:
        return [
            tiling_of("cpu-toeplitz", np.empty((1, 1, 99, 99), dtype), np.empty((1, 1, *k), np.float32), dtype="float32").products
            for k in KERNELS
        ]  # fmt: skip

    assert products("uint8") == [3, 3, 3, 3, 2, 2, 2, 2, 2]
    assert products("int16") == [5, 5, 5, 5, 5, 4, 4, 4, 3]


@pytest.mark.parametrize(("dtype", "rows"), [("float32", 256), ("int16", 128), ("uint8", 128)])
def test_what_waits_in_the_second_cache_limits_the_rows_of_an_item(dtype: str, rows: int) -> None:
    x, w = np.empty((1, 1, 4096, 4096), dtype), np.ones((1, 1, 9, 9), np.float32)
    planned = convpar.plan(
        x, w, dtype=dtype, overflow="saturate" if dtype != "float32" else "wrap", backend="cpu-toeplitz"
    )
    assert planned.plan.config["tile"] == (rows, 512)


@pytest.mark.parametrize(
    ("dtype", "fill", "parts"),
    [
        ("uint8", 200, 1),
        ("uint8", 0.3, 3),
        ("uint8", 300, 3),
        ("int8", -1, 1),
        ("float16", 0.5, 2),
        ("float16", 0.3, 3),
        ("int16", -7, 2),
        ("int16", np.nan, 3),
        ("uint16", -7, 3),
    ],
)
def test_what_lies_around_an_image_has_parts_as_its_samples(dtype: str, fill: float, parts: int) -> None:
    x = rng.integers(0, 100, (1, 1, 40, 50)).astype(dtype)
    w = rng.standard_normal((1, 1, 9, 9)).astype(np.float32)
    rules: Any = {"padding": 4, "fillvalue": fill}
    assert tiling_of("cpu-toeplitz", x, w, **rules, dtype="float32").parts == parts
    y = conv2d(x, w, backend="cpu-toeplitz", dtype="float32", **rules)
    wide = np.pad(x.astype(np.float64), [(0, 0), (0, 0), (4, 4), (4, 4)], constant_values=np.float32(fill))
    right = exact(wide, w)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(right))
    assert np.all((np.abs(y - right) <= 83 * U * measure(wide, w)) | np.isnan(right))


BYTES: Any = {"dtype": "uint8", "overflow": "saturate"}


@pytest.mark.parametrize("tile", [None, (9, 20), (24, 70), (200, 600)], ids=str)
@pytest.mark.parametrize("windows", splitting.WINDOWS, ids=str)
@pytest.mark.parametrize(
    "rules",
    [{}, {"padding": 6}, {"padding": (20, 3)}, {"padding": 6, "fillvalue": 9}, {"padding": 6, "boundary": "wrap"}],
    ids=str,
)  # fmt: skip
def test_pictures_of_bytes_are_read_and_stored_as_they_are(
    monkeypatch: pytest.MonkeyPatch, rules: Any, windows: tuple[int, int], tile: Any
) -> None:
    rows, out_rows = windows
    forced = splitting.Tiling(rows, 32 // rows, out_rows, 16 // out_rows, 3, parts=1)
    monkeypatch.setattr(splitting, "tiling", lambda p, channels: forced)
    around = rng.integers(0, 256, (2, 2, 57, 340), np.uint8)
    x = around[:, :, 1:-1, 3:-4]
    # Sums are whole numbers, of which some are beyond a byte.
    w = rng.integers(-3, 4, (4, 1, 13, 11)).astype(np.float32)
    bias = np.array([128, 0, -70, 300], np.float32)
    right = conv2d(x, w, bias=bias, groups=2, backend="cpu-private", **BYTES, **rules)
    beside = np.full((*right.shape[:3], right.shape[3] + 9), 77, np.uint8)
    out = beside[..., 4:-5]
    planned = convpar.plan(
        x, w, bias, out=out, groups=2, backend="cpu-toeplitz", config={"tile": tile}, **BYTES, **rules
    )
    if not rules.keys() & {"fillvalue", "boundary"}:
        # Only filters that aren't finite ask for a copy of what lies around.
        assert planned.plan.launch["output"].startswith("converted in registers")
    for num_threads in (1, 2):
        out[...] = 77
        conv2d(
            x, w, bias, out=out, groups=2, backend="cpu-toeplitz", config={"tile": tile}, num_threads=num_threads,
            **BYTES, **rules,
        )  # fmt: skip
        np.testing.assert_array_equal(out, right)
        assert np.all(beside[..., :4] == 77)
        assert np.all(beside[..., -5:] == 77)


@pytest.mark.parametrize("fill", [128.5, -1, 300])
@pytest.mark.parametrize("kernel", [9, 13, 15, 21, 31])
def test_pictures_of_bytes_that_something_else_surrounds_are_floats(fill: float, kernel: int) -> None:
    # Tiles inside don't meet it, but filters are split for all alike.
    x = rng.integers(0, 256, (1, 1, 150, 400), np.uint8)
    w = rng.integers(-1, 2, (1, 1, kernel, kernel)).astype(np.float32)
    rules: Any = {"padding": "same", "fillvalue": fill, **BYTES}
    y = conv2d(x, w, backend="cpu-toeplitz", config={"tile": (32, 128)}, **rules)
    np.testing.assert_array_equal(y, conv2d(x, w, backend="cpu-private", **rules))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e-31, 1e-40])
@pytest.mark.parametrize("padding", [0, 5])
def test_pictures_of_bytes_under_taps_that_cant_be_split(value: float, padding: int) -> None:
    x = rng.integers(1, 256, (1, 2, 40, 77), np.uint8)
    w = rng.integers(-3, 4, (2, 1, 9, 11)).astype(np.float32)
    w[1, 0, 4, 7] = value
    y, right = (
        conv2d(x, w, groups=2, padding=padding, backend=backend, **BYTES)
        for backend in ("cpu-toeplitz", "cpu-private")
    )
    np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize("windows", splitting.WINDOWS, ids=str)
def test_taps_in_a_row_of_a_tile(windows: tuple[int, int]) -> None:
    high, out_rows = windows
    # By columns, from top to bottom: pairs are neighbours in a column.
    window = [(n % high, n // high) for n in range(32)]
    for columns in range(1, 41):
        # An output `k` columns from the first meets a column's tap or nothing; its rows are all met somewhere.
        most = max(
            sum(0 <= at + window[n][1] - k < columns for n in range(half, 32, 2))
            for half in (0, 1)
            for k in range(16 // out_rows)
            for at in range(0, columns + 16, 32 // high)
        )
        assert splitting._in_row(columns, high) == most, columns


def test_fillings_of_a_row_differ_in_the_products_that_they_need() -> None:
    def chosen(*kernel: int) -> tuple[int, int, int]:
        p = Problem.of((1, 1, 4096, 4096), (1, 1, *kernel), np.float32, np.float32)
        found = splitting.tiling(p, False)
        assert found is not None
        return found.rows, found.out_rows, found.products

    assert {k: chosen(k, k) for k in (9, 13, 15, 21, 31)} == {
        9: (2, 2, 6), 13: (2, 4, 6), 15: (2, 8, 5), 21: (4, 4, 4), 31: (2, 8, 3)
    }  # fmt: skip


def test_numbers_of_products_are_the_fewest_that_the_contract_allows() -> None:
    def products(channels: int, kernel: int) -> int | None:
        p = Problem.of((1, channels, 64, 64), (1, channels, kernel, kernel), np.float32, np.float32)
        found = splitting.tiling(p, True)
        return found and found.products

    assert [products(16, 1), products(24, 3), products(64, 3), products(128, 3)] == [6, 5, 4, 3]
    assert products(8, 1) is None
    assert products(0, 3) == 3  # nothing is left out of no products


SMALLEST = {"cpu-amx": ((1, 16, 5, 20), (20, 16, 2, 2)), "cpu-toeplitz": ((1, 2, 30, 40), (3, 2, 8, 8))}
BEFORE = {"cpu-amx": "cpu-packed", "cpu-toeplitz": "cpu-simd"}


def split_differs(backend: str, x: Any, w: Any) -> bool:
    """Whether the results of `backend` aren't, bit for bit, those of the rung that it leaves odd values to."""
    # In one piece: others than that of the odd value stay split.
    whole = {"tile": (64, 64), "block": 64}
    given, left = conv2d(x, w, backend=backend, config=whole), conv2d(x, w, backend=BEFORE[backend])
    return not np.array_equal(given, left, equal_nan=True)


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3e38, 1e-31, 1e-40, 2.0**-149])
def test_values_that_cant_be_split_are_left_to_the_rung_before(backend: str, value: float) -> None:
    x_shape, w_shape = SMALLEST[backend]
    x = rng.standard_normal(x_shape).astype(np.float32)
    w = rng.standard_normal(w_shape).astype(np.float32)
    assert split_differs(backend, x, w)
    odd_x, odd_w = x.copy(), w.copy()
    odd_x[0, -1, 2, 3] = value
    odd_w[-1, -1, 1, 0] = value
    assert not split_differs(backend, odd_x, w)
    assert not split_differs(backend, x, odd_w)


def test_the_rung_before_leaves_the_memory_of_this_one_alone() -> None:
    """Of filters of one sample cpu-packed lays samples out, where it has memory of its own."""
    x = rng.standard_normal((3, 128, 15, 15)).astype(np.float32)
    w = rng.standard_normal((256, 128, 1, 1)).astype(np.float32)
    config = {"tile": (45, 15), "block": 256}
    plain = conv2d(x, w, backend="cpu-amx", config=config)
    x[1, 5, 7, 7] = np.nan
    y = conv2d(x, w, backend="cpu-amx", config=config)
    np.testing.assert_array_equal(y[[0, 2]], plain[[0, 2]])
    np.testing.assert_array_equal(y[1], conv2d(x, w, backend="cpu-packed")[1])
    assert np.isnan(y[1, :, 7, 7]).all()


@pytest.mark.parametrize("backend", RUNGS)
def test_magnitudes_are_split_as_far_as_no_bit_is_lost(backend: str) -> None:
    x_shape, w_shape = SMALLEST[backend]
    x = rng.uniform(0.5, 1.5, x_shape).astype(np.float32)
    w = rng.uniform(0.5, 1.5, w_shape).astype(np.float32)
    terms = w[0].size
    for exponent in range(-126, 128, 6):
        scaled = np.ldexp(x, min(exponent, 126))
        y, right = conv2d(scaled, w, backend=backend), exact(scaled, w)
        fits = right < np.finfo(np.float32).max / 2
        allowed = (terms + 2) * U * right + terms * 2.0**-149
        assert np.all(np.abs(y[fits] - right[fits]) <= allowed[fits]), exponent
    # Zeros are no small magnitudes.
    x[0, 0, 1:3] = 0
    w[0, 0, :, 1] = 0
    assert split_differs(backend, x, w)


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize(
    ("of_samples", "of_taps", "split"),
    [
        (-38, -38, True),
        (-40, -40, False),
        (-62, -62, False),
        (55, 55, True),
        (57, 62, False),
        (-60, 100, True),
    ],
)
def test_products_are_split_as_far_as_no_bit_is_lost(
    backend: str, of_samples: int, of_taps: int, split: bool
) -> None:
    x_shape, w_shape = SMALLEST[backend]
    x = np.ldexp(rng.choice([-1, 1], x_shape) * rng.uniform(1, 1.5, x_shape), of_samples).astype(np.float32)
    w = np.ldexp(rng.choice([-1, 1], w_shape) * rng.uniform(1, 1.5, w_shape), of_taps).astype(np.float32)
    allowed = (w[0].size + 2) * U * measure(x, w) + w[0].size * 2.0**-149
    assert np.all(np.abs(conv2d(x, w, backend=backend) - exact(x, w)) <= allowed)
    assert split_differs(backend, x, w) == split


@pytest.mark.parametrize(
    ("backend", "x_shape", "w_shape", "tile", "rules"),
    [
        # With a stride, gathered rows of a narrower last tile have gaps in the workspace.
        (
            "cpu-amx",
            (1, 32, 7, 1100),
            (16, 32, 3, 3),
            (2, 275),
            {"stride": (1, 2), "padding": 1, "boundary": "wrap"},
        ),
        (
            "cpu-amx",
            (5, 500, 14, 14),
            (80, 500, 3, 3),
            (28, 14),
            {"padding": 1},
        ),  # two images in two passes, and one in one
        ("cpu-toeplitz", (2, 2, 45, 90), (2, 2, 13, 13), (20, 33), {"padding": 6}),
        ("cpu-toeplitz", (2, 2, 45, 90), (2, 2, 15, 15), (20, 33), {"padding": 6}),
        ("cpu-toeplitz", (2, 2, 45, 90), (2, 2, 8, 9), (20, 33), {"padding": 6}),
    ],
)
def test_bits_depend_neither_on_threads_nor_on_what_a_workspace_held(
    backend: str, x_shape: Any, w_shape: Any, tile: tuple[int, int], rules: dict[str, Any]
) -> None:
    x = rng.standard_normal(x_shape).astype(np.float32)
    w = rng.standard_normal(w_shape).astype(np.float32)
    plan = convpar.plan(x, w, **rules, backend=backend, config={"tile": tile}).plan
    found = []
    for held in (0, 1, 255):
        for num_threads in (1, 2):
            out = np.empty(plan.problem.out_shape, np.float32)
            workspace = np.full(plan.workspace_bytes(num_threads), held, np.uint8)
            plan.run(x, w, None, out, workspace=workspace, num_threads=num_threads)
            found.append(out)
    assert all(np.array_equal(out, found[0]) for out in found)


@pytest.mark.parametrize("tile", [(1, 9), (3, 37), (40, 40)], ids=str)
@pytest.mark.parametrize(
    ("dilation", "stride"),
    [(1, 1), ((2, 3), 1), ((7, 1), 1), (1, 2), ((1, 3), (1, 2)), ((2, 1), (2, 1))],
    ids=str,
)
@pytest.mark.parametrize(
    ("taps", "padding"),
    [((3, 3), (1, 1, 1, 1)), ((4, 5), (0, 1, 2, 0)), ((5, 4), (2, 0, 0, 1)), ((5, 5), (2, 2, 2, 2))],
    ids=str,
)
def test_zeros_around_an_image_are_split_where_they_are(
    taps: tuple[int, int],
    padding: tuple[int, int, int, int],
    dilation: Any,
    stride: Any,
    tile: tuple[int, int],
) -> None:
    """By any zeros, in tiles that have fewer rows than a filter's rows lie apart; beside numbers that mustn't be read."""
    down, across = np.broadcast_to(dilation, 2).tolist()
    padding = (padding[0] * down, padding[1] * down, padding[2] * across, padding[3] * across)
    memory = np.full((2, 66, 31, 29), np.nan, np.float32)
    x = memory[:, :, 1:-1, 1:-1]
    x[...] = rng.standard_normal(x.shape)
    w = rng.standard_normal((40, 33, *taps)).astype(np.float32)
    around = np.pad(x, ((0, 0), (0, 0), padding[:2], padding[2:]))
    rules: dict[str, Any] = {"dilation": dilation, "stride": stride, "groups": 2 if taps == (3, 3) else 1}
    if rules["groups"] == 1:
        x, around = x[:, :33], around[:, :33]

    def plan(image: Any, **padding: Any) -> Any:
        return convpar.plan(image, w, **rules, **padding, backend="cpu-amx", config={"tile": tile})

    in_place, right = plan(x, padding=padding), plan(around)(around, w)
    for num_threads in (1, 2):
        np.testing.assert_array_equal(in_place(x, w, num_threads=num_threads), right)
    assert in_place.plan.paths_run() >= {"border"}
    assert not in_place.plan.paths_run() & {"staged"}
    # An image that can't be split is left to the rung before, which takes it in place, too. Filters may make zeros something else.
    x[1, 3, 0, 0] = 1e-40
    y = in_place(x, w)
    np.testing.assert_array_equal(y[0], right[0])
    if tile == (40, 40):
        left, of_group = conv2d(x, w, padding=padding, backend="cpu-packed", **rules), 40 // rules["groups"]
        np.testing.assert_array_equal(y[1, :of_group], left[1, :of_group])
        assert not np.array_equal(y[0], left[0])
    allowed = (w[0].size + 2) * U * measure(x, w, padding=padding, **rules)
    assert np.all(np.abs(y - exact(x, w, padding=padding, **rules)) <= allowed)
    assert not in_place.plan.paths_run() & {"staged"}
    w[3, 3, -1, -1] = np.inf
    np.testing.assert_array_equal(
        np.isnan(in_place(x, w)), np.isnan(conv2d(x, w, padding=padding, backend="cpu-private", **rules))
    )
    assert in_place.plan.paths_run() >= {"staged"}


@pytest.mark.parametrize("tile", [(9, 20), (24, 70), (200, 200)], ids=str)
@pytest.mark.parametrize(
    ("taps", "padding"),
    [
        ((7, 7), (3, 3, 3, 3)),
        ((13, 9), (0, 40, 20, 1)),
        ((15, 15), (14, 0, 0, 70)),
        ((17, 17), (8, 8, 8, 8)),
        ((31, 31), (15, 15, 15, 15)),
    ],
    ids=str,
)
def test_zeros_around_a_plane_are_split_where_they_are(
    taps: tuple[int, int], padding: tuple[int, int, int, int], tile: tuple[int, int]
) -> None:
    """Fewer than a vector's and several vectors of them, and rows of nothing else; beside numbers that mustn't be read."""
    memory = np.full((3, 2, 66, 95), np.nan, np.float32)
    x = memory[:, :, 1:-1, 2:-1]
    x[...] = rng.standard_normal(x.shape)
    w = rng.standard_normal((3, 2, *taps)).astype(np.float32)
    around = np.pad(x, ((0, 0), (0, 0), padding[:2], padding[2:]))
    config = {"tile": tile}
    in_place = convpar.plan(x, w, padding=padding, backend="cpu-toeplitz", config=config)
    right = convpar.plan(around, w, backend="cpu-toeplitz", config=config)(around, w)
    for num_threads in (1, 2):
        np.testing.assert_array_equal(in_place(x, w, num_threads=num_threads), right)
    ran = in_place.plan.paths_run  # type: ignore[attr-defined]
    assert ran() >= {"border"}
    assert not ran() & {"staged"}
    # Outputs of a tile that can't be split are the rung's before, which is given what it has no way to skip.
    x[1, 1, 0, 0] = 1e-40
    y = in_place(x, w)
    np.testing.assert_array_equal(y[[0, 2]], right[[0, 2]])
    # Of one tile all outputs are, those that don't meet the sample too.
    sample = np.zeros_like(x[1, 0])
    sample[0, 0] = 1
    others = conv2d(sample, np.ones_like(w[0, 0]), padding=padding, backend="numpy") == 0
    if tile == (200, 200):
        assert not np.array_equal(y[1, :, others], right[1, :, others])
    allowed = (w[0].size + 2) * U * measure(x, w, padding=padding)
    assert np.all(np.abs(y - exact(x, w, padding=padding)) <= allowed)
    assert not ran() & {"staged"}
    w[1, 1, -1, -1] = np.inf
    np.testing.assert_array_equal(
        np.isnan(in_place(x, w)), np.isnan(conv2d(x, w, padding=padding, backend="cpu-private"))
    )
    assert ran() >= {"staged"}


@pytest.mark.parametrize(
    ("shape", "taps", "stride"),
    [((2, 33, 40, 101), 5, 3), ((3, 50, 12, 12), 1, 2), ((2, 16, 9, 7), 3, 1), ((2, 20, 30, 75), 3, (2, 1))],
    ids=str,
)
def test_strides_and_narrow_images_are_taken_in_place(shape: tuple[int, ...], taps: int, stride: Any) -> None:
    x = rng.standard_normal(shape).astype(np.float32)
    w = rng.standard_normal((20, shape[1], taps, taps)).astype(np.float32)
    plan = convpar.plan(x, w, stride=stride, backend="cpu-amx")
    split = plan(x, w)
    # An image that can't be split is left to the rung before, where it lies.
    before, x[1, 3, 2, 2] = x.copy(), 1e-40
    y = plan(x, w)
    assert plan.plan.paths_run() >= {"inside"}  # type: ignore[attr-defined]
    assert not plan.plan.paths_run() & {"staged", "border"}  # type: ignore[attr-defined]
    np.testing.assert_array_equal(y[0], split[0])
    assert not np.array_equal(y[1], split[1])
    for images, found in ((before, split), (x, y)):
        allowed = (w[0].size + 2) * U * measure(images, w, stride=stride)
        assert np.all(np.abs(found - exact(images, w, stride=stride)) <= allowed)


@pytest.mark.parametrize(("taps", "outputs"), [(1, 9), (3, 1), (3, 4), (3, 17), (5, 8)])
@pytest.mark.parametrize(("stride", "dilation"), [(1, 1), (1, 6), (2, 1), (2, 3), (3, 2), (4, 2), (6, 4)])
def test_samples_counted_along_an_axis_are_those_that_grids_hold(
    taps: int, outputs: int, stride: int, dilation: int
) -> None:
    grids, places = splitting._met(outputs, taps, stride, dilation)
    positions = [{tap * dilation + k * stride for k in range(outputs)} for tap in range(taps)]
    # Taps of one grid meet samples that are a stride apart, from its first tap's first one on.
    for tap in range(taps):
        first = tap % grids * dilation
        assert positions[tap] <= {first + k * stride for k in range(places)}
    assert grids * places <= taps * outputs
    # Nothing is left out that is met, and little held that isn't: what lies between taps of one grid.
    assert len(set().union(*positions)) <= grids * places


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("shape", "rules", "tile"),
    [
        ((1, 530, 25, 27), {"padding": 1}, (25, 27)),
        ((1, 1100, 12, 20), {"stride": 2}, (5, 9)),
        ((1, 300, 33, 33), {"padding": 6, "dilation": 6}, (9, 33)),
        ((4, 700, 12, 12), {}, (40, 10)),
    ],
    ids=str,
)
def test_channels_in_several_passes(
    shape: tuple[int, ...], rules: dict[str, Any], tile: tuple[int, int], swapped: bool
) -> None:
    """A tile's samples of all channels don't stay in the second cache: sums wait among the results, or where those are converted."""
    x = rng.standard_normal(shape).astype(np.float32)
    w, bias = (
        rng.standard_normal((72, shape[1], 3, 3)).astype(np.float32),
        rng.standard_normal(72).astype(np.float32),
    )

    def run() -> Any:
        config = {"tile": tile, "block": 72}
        y = conv2d(x, w, bias, backend="cpu-amx", config=config, **rules)
        if swapped:
            out = np.full(y.shape, np.nan, ">f4")
            np.testing.assert_array_equal(
                conv2d(x, w, bias, backend="cpu-amx", config=config, out=out, **rules), y
            )
        right = exact(x, w, **rules) + bias[:, None, None].astype(np.float64)
        allowed = (w[0].size + 2) * U * (measure(x, w, **rules) + np.abs(bias)[:, None, None])
        assert np.all(np.abs(y - right) <= allowed)
        return y

    split = run()
    # What can't be split is met in the last pass, when sums of others have been stored.
    x[0, -1, 3, 3] = 1e-40
    left = run()
    assert not np.array_equal(left[0], split[0])
    np.testing.assert_array_equal(left[1:], split[1:])


@pytest.mark.parametrize("tile", [None, (96, 64)], ids=str)
@pytest.mark.parametrize("backend", RUNGS)
def test_one_image_that_cant_be_split_leaves_the_others_alone(
    backend: str, tile: tuple[int, int] | None
) -> None:
    """Nor if all are one work item's."""
    x_shape, w_shape = SMALLEST[backend]
    config = tile and {"tile": tile}
    x = rng.standard_normal((3, *x_shape[1:])).astype(np.float32)
    w = rng.standard_normal(w_shape).astype(np.float32)
    before = conv2d(x, w, backend=backend, config=config)
    x[1, 0, 3, 3] = np.nan
    y = conv2d(x, w, backend=backend, config=config)
    for n in (0, 2):
        assert np.array_equal(y[n], before[n])
    assert np.isnan(y[1]).any()
    assert not np.isnan(y[1]).all()


PROGRAM = """
import hashlib, json, sys
import numpy as np, convpar
from convpar import conv2d
rng = np.random.default_rng(3)
found = []
for backend, x, w, rules in json.load(sys.stdin):
    x, w = rng.standard_normal(x, np.float32), rng.standard_normal(w, np.float32)
    pictures = [({}, x)]
    if backend == "cpu-toeplitz":
        pictures += [({"dtype": "uint8", "overflow": "saturate"}, (40 * x + 128).astype(np.uint8))]
        pictures += [({"dtype": "float32"}, (9000 * x).astype(np.int16))]
    for types, picture in pictures:
        y = conv2d(picture, w, backend=backend, **rules, **types)
        found.append(hashlib.sha256(y.tobytes()).hexdigest())
print(json.dumps([convpar.backends.cpu.matrix_unit(), found]))
"""


def run(unit: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(CASES),
        env={**os.environ, cpu.UNIT_VARIABLE: unit},
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)


def test_the_unit_and_its_emulation_give_the_same_bits() -> None:
    used, found = run("1")
    if not used:
        pytest.skip("this processor has no AMX, or the system doesn't let processes use it")
    emulated, same = run("0")
    assert (used, emulated) == (True, False)
    assert found == same


def test_what_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.ones((60, 60), np.float32), np.ones((9, 9), np.float32)
    text = str(explain(x, w, backend="cpu-toeplitz"))
    assert "6 of 9 products of three parts" in text
    of_bytes = explain(x.astype(np.uint8), w, backend="cpu-toeplitz")
    assert "3 of 3 products of samples of one part with taps of three" in str(of_bytes)
    of_two = explain(x.astype(np.int16), w, backend="cpu-toeplitz")
    assert "5 of 6 products of samples of two parts with taps of three" in str(of_two)
    assert ("emulated" in text) != cpu.matrix_unit()
    with pytest.raises(Unsupported, match=r"the filter is 5x7; it takes 6x6 and larger"):
        conv2d(x, w[:5, :7], backend="cpu-toeplitz")
    with pytest.raises(Unsupported, match=r"a group has 15 channels; it takes 16 and more"):
        conv2d(np.ones((1, 15, 9, 9), np.float32), np.ones((4, 15, 3, 3), np.float32), backend="cpu-amx")
    monkeypatch.setattr(compiled, "isa", lambda: "v3")
    for name in RUNGS:
        assert registry.find(name).unavailable() == "it needs the instruction set v4, and v3 is in use"  # type: ignore[union-attr]


def test_a_wrong_setting_is_refused() -> None:
    env = {**os.environ, cpu.UNIT_VARIABLE: "maybe"}
    program = "import convpar\nprint(convpar.registry.find('cpu-amx').unavailable())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "CONVPAR_AMX must be 0 or 1, not 'maybe'"


needs_unit = pytest.mark.skipif(
    not cpu.matrix_unit(), reason="this processor has no AMX, or the system doesn't let processes use it"
)


def test_filters_without_channels_leave_the_bias() -> None:
    x, w = np.ones((2, 0, 30, 30), np.float32), np.ones((3, 0, 8, 8), np.float32)
    y = conv2d(x, w, np.arange(3, dtype=np.float32), backend="cpu-toeplitz")
    np.testing.assert_array_equal(y, np.broadcast_to(np.arange(3)[:, None, None], (2, 3, 23, 23)))


@needs_unit
def test_direct_sums_of_a_large_filter_are_left_to_the_unit() -> None:
    x = rng.standard_normal((1, 1, 300, 600)).astype(np.float32)
    w = rng.standard_normal((1, 1, 31, 31)).astype(np.float32)
    product = np.outer(w[0, 0, 0], w[0, 0, 1])[None, None]
    plan = convpar.plan(x, w, backend="cpu-separable").plan
    assert plan.launch["direct sums"].startswith("by cpu-toeplitz: AMX")
    alone = {"tile": (16, 570)}
    assert "direct sums" not in convpar.plan(x, w, backend="cpu-separable", config=alone).plan.launch
    found = {}
    for name, filters in (("none", w), ("a product", product)):
        # What a caller gives is enough for either.
        out = np.full((1, 1, 270, 570), np.nan, np.float32)
        workspace = np.full(plan.workspace_bytes(2), 255, np.uint8)
        plan.run(x, filters, None, out, workspace=workspace, num_threads=2)
        found[name] = out
    np.testing.assert_array_equal(found["none"], conv2d(x, w, backend="cpu-toeplitz"))
    np.testing.assert_array_equal(
        found["a product"], conv2d(x, product, backend="cpu-separable", config=alone)
    )
    assert not np.array_equal(found["a product"], conv2d(x, product, backend="cpu-toeplitz"))
    assert "factored" in plan.paths_run()


@needs_unit
def test_what_doesnt_fit_is_told_whoever_sums() -> None:
    x = np.zeros((1, 1, 300, 600), np.float32)
    w = rng.uniform(0.5, 1, (1, 1, 31, 31)).astype(np.float32)
    x[0, 0, 140, 250] = 1000
    rules = {"dtype": np.uint8, "overflow": "raise", "backend": "cpu-separable"}
    with pytest.raises(OverflowError, match=r"the first place is \(0, 0, 110, 220\)"):
        conv2d(x, w, **rules)
