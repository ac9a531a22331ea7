"""Pictures (H, W, C) under one filter: kernels over vectors take channels that lie beside each other as columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import registry
from convpar.backend import Refusal
from convpar.backends.cpu import build_info
from convpar.boundary import MODES
from convpar.conformance.case import Case
from convpar.conformance.memory import Memory

pytestmark = pytest.mark.skipif(
    "ISA levels" not in build_info(), reason="the CPU engine isn't built here; install convpar"
)

RUNGS = ["cpu-simd", "cpu-separable"]
LAST = Memory(order=(0, 2, 3, 1))
CROPPED = Memory(order=(0, 2, 3, 1), steps=(1, 1, 2, 1))
ONE_FILTER = Memory(steps=(0, 1, 1, 1))


def case(
    size: tuple[int, int], channels: int, taps: tuple[int, int], *, images: int = 1, **given: Any
) -> Case:
    """A picture of whose channels each has the same filter."""
    plain: dict[str, Any] = {"x": LAST, "w": ONE_FILTER, "out": LAST, "data": "uniform", "groups": channels}
    return Case(x_shape=(images, channels, *size), w_shape=(channels, 1, *taps), **{**plain, **given})


def taken(made: Case, rung: str) -> bool:
    """Whether the plan of `made` takes channels as columns."""
    backend = registry.find(rung)
    assert backend is not None
    plan = made.plan(backend, made.arrays("cpu"))
    assert not isinstance(plan, Refusal)
    return "beside each other" in str(plan.launch["output channels a tile"])


def check(made: Case, rung: str) -> None:
    """It is right, and taken so."""
    assert taken(made, rung)
    made.check(rung)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("boundary", MODES)
@pytest.mark.parametrize("data", ["uniform", "separable", "inf and nan"])
def test_every_border(boundary: str, data: str, rung: str) -> None:
    """What stands beside a pixel is a pixel: each of its channels, in order; also where padding is wider than the picture."""
    for channels in (2, 3, 4, 7):
        for size, padding in (((9, 41), (1, 1, 2, 2)), ((4, 3), (3, 2, 5, 4)), ((20, 90), (0, 2, 0, 1))):
            fill = {"fillvalue": 3.0} if boundary == "fill" else {}
            check(case(size, channels, (3, 5), padding=padding, boundary=boundary, data=data, **fill), rung)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    ("x", "w", "out", "overflow"),
    [
        ("uint8", "float32", "uint8", "saturate"),
        ("uint8", "uint8", "int32", "wrap"),
        ("int16", "float32", "int16", "saturate"),
        ("float16", "float16", None, "wrap"),
        ("float64", "float64", None, "wrap"),
        ("int64", "int64", None, "wrap"),
        ("uint8", "uint8", None, "wrap"),
    ],
)
def test_every_kind_of_type(x: str, w: str, out: str | None, overflow: str, rung: str) -> None:
    for taps in ((3, 3), (7, 7), (2, 4)):
        check(
            case((30, 70), 3, taps, x_dtype=x, w_dtype=w, dtype=out, overflow=overflow, padding="same"), rung
        )


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    "rules",
    [
        {"stride": (2, 1)},
        {"dilation": (2, 3)},
        {"flip": True},
        {"bias_dtype": "float32", "bias": Memory(steps=(0,))},
        {"images": 3, "x": CROPPED, "out": CROPPED},
        {"x": replace(LAST, swapped=True), "out": replace(LAST, swapped=True)},
        {"x": replace(LAST, offset=1)},
        {"config": (("tile", (5, 9)),), "threads": 2},
        {"config": (("tile", (16, 1)),), "threads": 3},
        {"overflow": "raise"},
    ],
    ids=lambda rules: "-".join(rules),
)
def test_rules_and_memory(rules: dict[str, Any], rung: str) -> None:
    for padding in ("valid", "same"):
        check(case((37, 50), 3, (5, 3), padding=padding, **rules), rung)


@pytest.mark.parametrize("rung", RUNGS)
def test_tiles_are_of_whole_pixels(rung: str) -> None:
    """Wider than a tile, and higher; options count pixels, and asked for again make the same plan."""
    x = np.random.default_rng(0).random((70, 6001, 3), np.float32)
    w = np.ones((3, 3), np.float32)
    found = convpar.plan(x, w, backend=rung, channel_axis=-1)
    rows, columns = found.plan.config["tile"]
    assert rows < 68
    assert columns < 5999
    again = convpar.plan(x, w, backend=rung, channel_axis=-1, config=found.plan.config)
    assert (again.plan.config, again.plan.launch) == (found.plan.config, found.plan.launch)
    y = found(x, w, num_threads=2)
    assert {"second row tile", "second column tile", "inside"} <= found.plan.paths_run()
    right = convpar.conv2d(x.astype(np.float64), w.astype(np.float64), backend="numpy", channel_axis=-1)
    np.testing.assert_allclose(y, right, rtol=1e-5)


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize(
    "made",
    [
        case((20, 30), 3, (3, 3), w=Memory()),
        case((20, 30), 3, (3, 3), x=Memory()),
        case((20, 30), 3, (3, 3), out=Memory()),
        case((20, 30), 3, (3, 3), stride=(1, 2)),
        case((20, 30), 3, (3, 3), bias_dtype="float32"),
        case((20, 30), 3, (3, 3), x_dtype="uint8", overflow="raise", dtype="int16"),
        case((20, 30), 1, (3, 3)),
    ],
    ids=["filters", "image", "result", "stride", "biases", "raise", "one"],
)
def test_what_is_parted_by_channels(made: Case, rung: str) -> None:
    """Other filters, layouts and rules are right, too, each channel by itself."""
    assert not taken(made, rung)
    made.check(rung)


@pytest.mark.parametrize("rung", ["cpu-simd", "cpu-packed", "cpu-unrolled"])
@pytest.mark.parametrize("x_dtype", ["float32", "uint8"])
def test_channels_of_a_tile_follow_each_other(x_dtype: str, rung: str) -> None:
    """Tiles, blocks of output channels, groups and images, in whatever order threads take them; rows longer than are converted at once."""
    rules: dict[str, Any] = {"x_dtype": x_dtype, "w_dtype": "float32", "threads": 3, "data": "uniform"}
    if x_dtype == "uint8" and rung != "cpu-unrolled":
        rules |= {"dtype": "uint8", "overflow": "saturate"}
    for last in ({"x": LAST, "out": LAST}, {"x": LAST}, {"out": LAST}):
        for groups, config in (
            (1, (("tile", (6, 9)), ("block", 2))),
            (2, (("tile", (16, 700)), ("block", 3))),
        ):
            Case(
                x_shape=(2, 4, 15, 610),
                w_shape=(6, 4 // groups, 3, 3),
                groups=groups,
                config=config,
                **rules,
                **last,
            ).check(rung)


def test_a_result_that_does_not_fit_is_named_in_the_order_of_channels() -> None:
    x = np.zeros((1, 3, 9, 9), np.uint8).transpose(0, 2, 3, 1).copy()
    x[0, 2, 2, 1] = x[0, 7, 7, 0] = 255
    w = np.full((2, 2), 200, np.uint8)
    with pytest.raises(OverflowError, match=r"\(0, 0, 6, 6\)"):
        convpar.conv2d(x, w, channel_axis=-1, overflow="raise", dtype="uint8", backend="cpu-simd")


def test_choosers_take_pictures_where_they_lie() -> None:
    for x, taps in (
        (np.zeros((200, 300, 3), np.uint8), 3),
        (np.zeros((200, 300, 3), np.uint8), 15),
        (np.zeros((40, 50, 256), np.float32), 3),
    ):
        chosen = convpar.plan(x, np.ones((taps, taps), np.float32), dtype=x.dtype, channel_axis=-1)
        assert "beside each other" in chosen.plan.launch["output channels a tile"]


def test_many_channels_and_wide_filters() -> None:
    """cpu-separable takes no filters of such a reach, and leaves off the columns; cpu-simd any."""
    for made in (
        case((9, 11), 300, (3, 3), padding="same", boundary="mirror"),
        case((6, 60), 5, (2, 57)),
        case((5, 700), 2, (2, 300), data="separable"),
    ):
        check(made, "cpu-simd")
    for columns, columnar in ((257, True), (258, False)):
        made = case((4, 300), 2, (2, columns), data="separable")
        assert taken(made, "cpu-separable") == columnar
        made.check("cpu-separable")


def test_borders_are_kept_of_so_many_columns_only() -> None:
    for left, columnar in ((8192, True), (8193, False)):
        made = case((2, 9), 2, (2, 3), padding=(0, 0, left, 0), boundary="wrap")
        assert taken(made, "cpu-simd") == columnar
        made.check("cpu-simd")


def test_sizes_beyond_the_engine() -> None:
    """Of filters of one column the dilation, and of tiles what is wider than the result, count for nothing."""
    x = np.random.default_rng(0).random((5, 6, 3), np.float32)
    for rules in ({"dilation": (1, 2**48)}, {"config": {"tile": (16, 2**48)}}):
        y = convpar.conv2d(x, np.ones((3, 1), np.float32), backend="cpu-simd", channel_axis=-1, **rules)
        np.testing.assert_allclose(y, x[:3] + x[1:4] + x[2:], rtol=1e-6)


@pytest.mark.parametrize("rung", RUNGS)
def test_thresholds_are_those_of_pixels(rung: str) -> None:
    """Where a plan says that another path begins, it does."""
    backend = registry.find(rung)
    assert backend is not None
    small = case((20, 30), 3, (3, 3), config=(("tile", (16, 24)),))
    plan = small.plan(backend, small.arrays("cpu"))
    assert not isinstance(plan, Refusal)
    found = {t.axis: (t.value, t.path) for t in plan.thresholds}
    assert found["oh"] == (17, "second row tile")
    assert found["ow"] == (25, "second column tile")
    assert "oc" not in found
    for size, paths in (
        ((18, 26), set()),
        ((19, 26), {"second row tile"}),
        ((18, 27), {"second column tile"}),
    ):
        made = replace(small, x_shape=(1, 3, *size))
        again = made.plan(backend, made.arrays("cpu"))
        assert not isinstance(again, Refusal)
        assert {"second row tile", "second column tile"} & set(again.paths) == paths
