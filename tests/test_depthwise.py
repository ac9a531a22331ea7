"""cpu-depthwise: lanes are channels, wherever those lie."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convpar
from convpar import conv2d, registry
from convpar.backend import Device, Layout, Layouts, Plan
from convpar.backends import cpu
from convpar.backends.cpu import compiled
from convpar.problem import Problem

pytestmark = pytest.mark.skipif(
    cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built"
)

Array = npt.NDArray[Any]
RUNG = "cpu-depthwise"
LINE, GUARD = 64, 4096
PLANES, PIXELS = (0, 1, 2, 3), (0, 2, 3, 1)
"""The order of the axes in memory."""


def numbers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Whole numbers, so that sums are exact in every order."""
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(dtype)


def placed(a: Array, order: tuple[int, ...], offset: int = 0) -> Array:
    """A copy whose axes lie in that order, `offset` bytes behind the beginning of a line of the cache."""
    shape = [a.shape[axis] for axis in order]
    memory = np.empty(a.nbytes + 2 * LINE, np.uint8)
    first = -memory.ctypes.data % LINE + offset
    lain = memory[first : first + a.nbytes].view(a.dtype).reshape(shape).transpose(np.argsort(order))
    lain[...] = a
    return lain


TILES = ((None, 1), (None, 2), ({"tile": (3, 5)}, 2))
"""Options, and threads."""


def check(
    x: Array, w: Array, orders: Any = None, offset: int = 0, *, tiles: Any = TILES, **rules: Any
) -> Any:
    """It gives what `numpy` does, from and to planes and pixels, and writes nothing else. Returns the last plan."""
    right = conv2d(x, w, groups=x.shape[1], backend="numpy", **rules)
    plan: Any = None
    for source, target in orders or itertools.product((PLANES, PIXELS), repeat=2):
        for config, threads in tiles:
            image = placed(x, source, offset)
            room = placed(np.full((*right.shape[:3], right.shape[3] + 1), 77, right.dtype), target, offset)
            out = room[..., :-1]
            keywords = {**rules, "groups": x.shape[1], "backend": RUNG, "config": config}
            conv2d(image, w, out=out, num_threads=threads, **keywords)
            assert np.array_equal(out, right, equal_nan=True), (source, target, config)
            assert (room[..., -1] == 77).all()
            plan = convpar.plan(image, w, out=out, **keywords).plan
            # No more workspace than it asks for, whatever that holds.
            out[...] = 78
            workspace = np.full(plan.workspace_bytes(1) + GUARD, 0xAB, np.uint8)
            plan.run(image, w, rules.get("bias"), out, workspace=workspace[:-GUARD], num_threads=1)
            assert np.array_equal(out, right, equal_nan=True), (source, target, config)
            assert (workspace[-GUARD:] == 0xAB).all()
    return plan


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("channels", [2, 7, 8, 15, 16, 17, 33, 64])
def test_channels_that_fill_some_lanes_or_vectors_and_more(channels: int, dtype: type) -> None:
    """Of planes of one sample up to several squares of them, with few samples left over or many."""
    for high, wide in ((1, 1), (2, 3), (7, 7), (5, 9), (8, 17)):
        check(numbers((2, channels, high, wide), dtype), numbers((channels, 1, 3, 3), dtype, 1), padding=1)


@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (5, 5), (7, 7), (2, 4), (8, 6), (1, 17), (13, 13)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 2), (2, 1), (3, 3)], ids=str)
def test_filters_of_one_pass_and_of_several_and_every_stride(
    taps: tuple[int, int], stride: tuple[int, int]
) -> None:
    """Pairs of rows of outputs share samples, a few, or none; blocks meet no edge, one, or both."""
    x, w = numbers((1, 18, 23, 37), np.float32), numbers((18, 1, *taps), np.float32, 1)
    down, across = taps[0] // 2, taps[1] // 2
    for padding in (0, (down, down, across, across), (taps[0] - 1, 0, 0, taps[1] - 1)):
        plan = check(x, w, stride=stride, padding=padding)
        assert plan is not None
        assert ("border" in plan.paths) == (padding != 0 and taps != (1, 1))


@pytest.mark.parametrize("dilation", [(2, 2), (1, 3), (2, 1)], ids=str)
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 1)], ids=str)
def test_dilated_filters(dilation: tuple[int, int], stride: tuple[int, int]) -> None:
    x, w = numbers((1, 20, 17, 21), np.float32), numbers((20, 1, 3, 4), np.float32, 1)
    for padding in (0, 3):
        check(x, w, stride=stride, dilation=dilation, padding=padding)


def test_more_zeros_than_an_image_has_rows_and_columns() -> None:
    """Some outputs meet none of the samples."""
    x, w = numbers((1, 17, 3, 2), np.float32), numbers((17, 1, 3, 3), np.float32, 1)
    for padding in (4, (9, 0, 0, 12), (0, 30, 20, 0)):
        check(x, w, padding=padding, bias=numbers((17,), np.float32, 2))


@pytest.mark.parametrize("columns", [4, 8])
def test_tiles_beyond_an_image_whose_rows_are_reversed(columns: int) -> None:
    """Below it and to the right: such a tile has no samples, and no place among them."""
    x, w = numbers((1, 16, 2, 2 * columns), np.float32)[:, :, ::-1], numbers((16, 1, 3, 3), np.float32, 1)
    for padding in ((0, 60, 0, 40), (60, 0, 40, 0)):
        right = conv2d(x, w, groups=16, padding=padding, backend="numpy")
        out = np.full_like(right, 77)
        plan = convpar.plan(
            x, w, groups=16, padding=padding, out=out, backend=RUNG, config={"tile": (4, columns)}
        ).plan
        workspace = np.full(plan.workspace_bytes(1) + 4096, 0xAB, np.uint8)
        plan.run(x, w, None, out, workspace=workspace[:-4096], num_threads=1)
        np.testing.assert_array_equal(out, right)
        assert (workspace[-4096:] == 0xAB).all()


def test_no_more_workspace_than_a_plan_may_take() -> None:
    """Of long rows of many channels, whose edges may have to be gathered; and refused where a dilated filter would ask for it."""
    x = np.empty((1, 256, 256, 4096), np.float32)
    rules: dict[str, Any] = {"groups": 4096, "padding": 1, "channel_axis": -1, "backend": RUNG}
    plan = convpar.plan(x, np.ones((4096, 1, 3, 3), np.float32), **rules).plan
    assert plan.workspace_bytes(16) <= 64 << 20
    wide = np.empty((1, 2, 4001, 4001), np.float32)
    with pytest.raises(convpar.Unsupported, match="MB of workspace"):
        conv2d(wide, np.ones((2, 1, 3, 3), np.float32), groups=2, dilation=2000, backend=RUNG)


@pytest.mark.parametrize("channels", [128, 144, 160])
@pytest.mark.parametrize("offset", [0, 4, 16, 60])
def test_vectors_begin_with_lines_where_channels_are_many(channels: int, offset: int) -> None:
    """Then the first and the last one overlap others."""
    x, w = numbers((32, channels, 4, 9), np.float32), numbers((channels, 1, 3, 3), np.float32, 1)
    for bias in (None, numbers((channels,), np.float32, 2)):
        plan = check(x, w, [(PIXELS, PIXELS)], offset, padding=1, bias=bias)
        assert plan.launch["output channels a tile"] >= 128


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("rows", range(1, 17))
def test_slabs_of_every_height(rows: int, stride: int) -> None:
    """Of 3 x 3: as even as can be, the last one reaching back; one or two of their samples' rows and columns may be missing, at either end."""
    for columns, padding in ((9, 0), (19, 1), (2, (2, 0, 0, 2)), (5, (0, 2, 2, 0)), (33, 1)):
        above, below, before, after = (padding,) * 4 if isinstance(padding, int) else padding
        high, wide = (rows - 1) * stride + 3 - above - below, (columns - 1) * stride + 3 - before - after
        if high < 1 or wide < 1:
            continue
        x, w = numbers((1, 35, high, wide), np.float32), numbers((35, 1, 3, 3), np.float32, 1)
        tiles = [({"tile": (rows, 40)}, 1)]
        check(x, w, tiles=tiles, padding=padding, stride=stride, bias=numbers((35,), np.float32, 2))


@pytest.mark.parametrize("offset", [0, 16])
@pytest.mark.parametrize(
    ("channels", "dtype"), [(256, np.float32), (128, np.float64), (336, np.float32), (512, np.float32)]
)
def test_pixels_that_share_sets_wait_until_some_are_beside_each_other(
    channels: int, dtype: type, offset: int
) -> None:
    """Four vectors, and what is left of them; in rows of one slab and of several. Others are stored at once."""
    for high, wide, stride in ((7, 13, 1), (9, 31, 1), (8, 9, 2)):
        x, w = numbers((1, channels, high, wide), dtype), numbers((channels, 1, 3, 3), dtype, 1)
        tiles = [({"tile": (high, 64)}, 1), (None, 2)]
        check(x, w, [(PIXELS, PIXELS)], offset, tiles=tiles, padding=1, stride=stride)


@pytest.mark.parametrize(("high", "wide"), [(7, 7), (4, 28), (2, 28)])
def test_waiting_results_have_room_where_the_last_groups_are_few(high: int, wide: int) -> None:
    """Fewer than lanes, so that those are turned; the others wait, for their pixels lie far apart."""
    x, w = numbers((32, 68, high, wide), np.float32), numbers((68, 1, 3, 3), np.float32, 1)
    rules: dict[str, Any] = {"groups": 68, "padding": 1, "backend": RUNG}
    image = placed(x, PIXELS)
    out = np.empty((32, high, wide, 512), np.float32)[..., :68].transpose(0, 3, 1, 2)
    plan = convpar.plan(image, w, out=out, **rules).plan
    workspace = np.full(plan.workspace_bytes(1) + 2 * GUARD, 0xAB, np.uint8)
    plan.run(image, w, None, out, workspace=workspace[: -2 * GUARD], num_threads=1)
    assert (workspace[-2 * GUARD :] == 0xAB).all()
    np.testing.assert_array_equal(out, conv2d(x, w, **{**rules, "backend": "numpy"}))


@pytest.mark.parametrize("set_lines", [8, 12])
def test_arrays_from_memory_are_fetched_and_right(set_lines: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large enough that rows ahead of a block or slab are fetched, beyond the array's end as well, whatever the first cache."""
    monkeypatch.setattr(compiled.engine(), "SET_LINES", set_lines)
    for shape in ((3, 96, 100, 100), (12, 64, 112, 112), (4, 512, 38, 39)):
        x, w = numbers(shape, np.float32), numbers((shape[1], 1, 3, 3), np.float32, 1)
        for stride in (1, 2):
            rules: dict[str, Any] = {"groups": shape[1], "padding": 1, "stride": stride}
            right = conv2d(x, w, backend="cpu-simd", **rules)
            for order, offset in ((PIXELS, 0), (PIXELS, 16), (PLANES, 16)):
                image, out = placed(x, order, offset), placed(np.empty_like(right), order, offset)
                p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules)
                layouts = Layouts(Layout.of(image), Layout.of(w), None, Layout.of(out))
                plan = registry.find(RUNG).plan(p, layouts, Device("cpu", 0), None)  # type: ignore[union-attr]
                assert isinstance(plan, Plan)
                plan.run(image, w, None, out, num_threads=2)
                np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_filters_that_are_not_finite_meet_zeros(value: float) -> None:
    """Zeros around the image times infinity are no number: they may not be left out."""
    x, w = numbers((1, 20, 5, 6), np.float32) + 20, numbers((20, 1, 3, 3), np.float32, 1)
    w[3, 0, 0, 2] = w[19, 0, 1, 1] = value
    plan = check(x, w, padding=1)
    assert {"staged", "border"} <= set(plan.paths)


@pytest.mark.parametrize("boundary", ["wrap", "symm", "mirror", "nearest"])
def test_other_borders_are_gathered(boundary: str) -> None:
    x, w = numbers((2, 19, 9, 11), np.float32), numbers((19, 1, 3, 5), np.float32, 1)
    for stride in (1, 2):
        check(x, w, padding=2, stride=stride, boundary=boundary)
    check(x, w, padding=2, fillvalue=3)


@pytest.mark.parametrize("order", [PLANES, PIXELS], ids=["planes", "pixels"])
def test_views_in_reverse_and_with_gaps(order: tuple[int, ...]) -> None:
    x, w = numbers((2, 48, 12, 14), np.float32), numbers((48, 1, 3, 3), np.float32, 1)
    lain = placed(x, order)
    for view in (
        lain[:, :, ::-1],
        lain[..., ::-1],
        lain[..., ::2],
        lain[:, ::-1],
        lain[:, 5:40],
        lain[..., 1:-2],
    ):
        filters, groups = w[: view.shape[1]], view.shape[1]
        right = conv2d(view, filters, groups=groups, padding=1, backend="numpy")
        out = placed(np.full_like(right, 77), order)
        conv2d(view, filters, groups=groups, padding=1, out=out, backend=RUNG)
        np.testing.assert_array_equal(out, right)


def test_only_groups_of_one_channel_and_one_output_channel() -> None:
    for x_shape, w_shape, groups in (
        ((1, 1, 9, 9), (1, 1, 3, 3), 1),
        ((1, 4, 9, 9), (8, 1, 3, 3), 4),
        ((1, 4, 9, 9), (4, 2, 3, 3), 2),
        ((1, 4, 9, 9), (4, 4, 3, 3), 1),
    ):
        with pytest.raises(convpar.Unsupported, match="one channel and one output channel each"):
            conv2d(np.ones(x_shape, np.float32), np.ones(w_shape, np.float32), groups=groups, backend=RUNG)
