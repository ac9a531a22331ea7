"""Channels that are neighbours in memory, (N, H, W, C): read and written in place by cpu-packed, parted and joined for the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import convpar
from convpar import conv2d
from convpar.backends import cpu

pytestmark = pytest.mark.skipif(
    cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built"
)

Array = npt.NDArray[Any]

RUNGS = ["cpu-private", "cpu-simd", "cpu-masked", "cpu-packed", "cpu-im2col", "cpu-implicit", "cpu-separable"]
CHANNELS = [1, 2, 3, 4, 5, 16, 17, 35]
"""One; those that are parted by lanes of a few vectors; less than a vector, a whole one, and one or two and a rest."""
WIDTHS = [3, 18, 37, 70]
"""Too narrow for squares; and vectors of pixels with a last one that reaches back."""


def numbers(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Whole numbers, so that sums are exact in every type and order."""
    low = 0 if dtype[0] == "u" else -9
    return rng.integers(low, 10, shape).astype(dtype)


def planes(a: Array) -> Array:
    return np.ascontiguousarray(np.moveaxis(a, -1, -3))


def serves(backend: str, x: Array, w: Array, **rules: Any) -> bool:
    try:
        convpar.plan(x, w, backend=backend, **rules)
    except (convpar.Unsupported, convpar.Unavailable):
        return False
    return True


def check(backend: str, x: Array, w: Array, threads: int = 1, config: Any = None, **rules: Any) -> None:
    """The same as of planes, whichever of image and result has its channels last, and nothing else is written."""
    right = np.moveaxis(conv2d(planes(x), w, backend="numpy", **rules), -3, -1)
    rules = {**rules, "backend": backend, "channel_axis": -1}
    for image in (x, np.moveaxis(planes(x), -3, -1)):
        for beyond in (None, 0, 3):
            # In planes, whole pixels, and pixels with a gap behind each.
            if beyond is None:
                out = np.moveaxis(planes(np.full_like(right, 77)), -3, -1)
            else:
                room = np.full((*right.shape[:-1], right.shape[-1] + beyond), 77, right.dtype)
                out = room[..., : right.shape[-1]]
            conv2d(image, w, out=out, num_threads=threads, config=config, **rules)
            assert np.array_equal(out, right), (backend, beyond, image.strides)
            if beyond:
                assert (room[..., right.shape[-1] :] == 77).all()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("c", CHANNELS)
@pytest.mark.parametrize("backend", [b for b in RUNGS if b != "cpu-separable"])
def test_all_channels_into_all(backend: str, c: int, width: int) -> None:
    rng = np.random.default_rng(c)
    served = 0
    for oc, dtype in ((c, "float32"), (c % 5 + 16, "float32"), (3, "float64"), (4, "int32")):
        x, w = numbers(rng, (2, 20, width, c), dtype), numbers(rng, (oc, c, 3, 3), dtype)
        if serves(backend, planes(x), w, padding=1):
            served += 1
            check(backend, x, w, padding=1, bias=numbers(rng, (oc,), dtype))
    if not served:
        pytest.skip(f"{backend} needs another instruction set")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("c", CHANNELS)
@pytest.mark.parametrize("backend", RUNGS)
def test_a_filter_for_each_channel(backend: str, c: int, width: int) -> None:
    rng = np.random.default_rng(c)
    served = 0
    for each, dtype in ((1, "float32"), (2, "float64"), (1, "int32"), (1, "int16")):
        x, w = numbers(rng, (2, 20, width, c), dtype), numbers(rng, (c * each, 1, 3, 3), dtype)
        rules = {"padding": "same", "boundary": "mirror", "groups": c}
        if serves(backend, planes(x), w, **rules):
            served += 1
            check(backend, x, w, **rules)
    if not served:
        pytest.skip(f"{backend} needs another instruction set")


@pytest.mark.parametrize("out", ["uint8", "int16", "float32", "float16"])
@pytest.mark.parametrize("dtype", ["uint8", "int16", "float16"])
@pytest.mark.parametrize("c", CHANNELS)
@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-packed"])
def test_other_types(backend: str, c: int, dtype: str, out: str) -> None:
    rng = np.random.default_rng(c)
    x = numbers(rng, (2, 20, 37, c), dtype)
    for groups, overflow in ((1, "saturate"), (c, "wrap")):
        w = numbers(rng, (c, c // groups, 3, 3), "float32")
        check(backend, x, w, padding="same", groups=groups, dtype=out, overflow=overflow)


@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm", "mirror", "nearest"])
@pytest.mark.parametrize(
    "rules", [{}, {"stride": 2}, {"stride": (1, 3)}, {"dilation": (2, 3)}, {"flip": True}]
)
@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-packed", "cpu-separable"])
def test_rules_and_borders(backend: str, rules: dict[str, Any], boundary: str) -> None:
    rng = np.random.default_rng(0)
    for c, groups in ((20, 1), (20, 20), (3, 3), (24, 2)):
        x, w = numbers(rng, (1, 25, 41, c), "float32"), numbers(rng, (c, c // groups, 3, 5), "float32")
        rules = {**rules, "padding": (3, 2, 4, 5), "boundary": boundary, "groups": groups}
        if boundary == "fill":
            rules["fillvalue"] = 3
        if serves(backend, planes(x), w, **rules):
            check(backend, x, w, **rules)


@pytest.mark.parametrize("stride", [1, 2, (2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (3, 5), (5, 5)], ids=str)
def test_strides_and_zeros_around_an_image_in_place(taps: tuple[int, int], stride: Any) -> None:
    rng = np.random.default_rng(0)
    padding = tuple(k // 2 for k in taps for _ in (0, 1))
    for c, width in ((1, 7), (20, 14), (3, 70), (33, 41)):
        x, w = numbers(rng, (2, 11, width, c), "float32"), numbers(rng, (c + 1, c, *taps), "float32")
        rules = {"stride": stride, "padding": padding}
        check("cpu-packed", x, w, threads=2, **rules)
        plan = convpar.plan(x, w, backend="cpu-packed", channel_axis=-1, **rules).plan
        in_place = not any(padding) or (cpu.isa() == "v4" and stride != (1, 3))
        assert plan.launch["input"].startswith("read in place" if in_place else "gathered")


@pytest.mark.parametrize("stride", [1, 2, (1, 2)], ids=str)
@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-packed"])
def test_columns_or_rows_that_are_one_and_the_same(backend: str, stride: Any) -> None:
    rng = np.random.default_rng(0)
    x, w = numbers(rng, (1, 14, 14, 8), "float32"), numbers(rng, (4, 8, 5, 5), "float32")
    for image in (x[:, :, :1], x[:, :1]):
        check(backend, np.broadcast_to(image, x.shape), w, padding=2, stride=stride)


@pytest.mark.parametrize("tile", [(1, 1), (5, 7), (8, 33), (16, 64)])
@pytest.mark.parametrize("groups", [1, 2, 40])
@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-packed"])
def test_second_tiles_blocks_and_threads(backend: str, groups: int, tile: tuple[int, int]) -> None:
    """40 channels of 4 bytes are more than are taken together."""
    rng = np.random.default_rng(0)
    x, w = numbers(rng, (2, 33, 70, 40), "float32"), numbers(rng, (40, 40 // groups, 3, 3), "float32")
    for block in (None, 1, 16):
        check(backend, x, w, threads=2, config={"tile": tile, "block": block}, groups=groups, padding="same")


def test_reversed_rows_and_columns() -> None:
    rng = np.random.default_rng(0)
    x, w = numbers(rng, (1, 20, 40, 19), "float32"), numbers(rng, (19, 19, 3, 3), "float32")
    for image in (x[:, ::-1], x[:, :, ::-1], x[..., ::-1], x[:, ::2, ::3]):
        for backend in ("cpu-simd", "cpu-packed"):
            check(backend, image, w, padding="same")
            check(backend, image, w[:, :1], padding="same", groups=19)


@pytest.mark.parametrize("rules", [{"k": 3, "dilation": 50}, {"k": 61}, {"k": 3, "tile": (256, 256)}])
@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-private"])
def test_many_groups_take_no_more_room_than_they_may(backend: str, rules: dict[str, Any]) -> None:
    """What is gathered for 128 channels of 2048 x 2048 leaves room for sixteen threads."""
    k, tile = rules["k"], rules.get("tile")
    x, w = (convpar.ArraySpec(s) for s in ((1, 2048, 2048, 128), (128, 1, k, k)))
    plan = convpar.plan(
        x,
        w,
        groups=128,
        channel_axis=-1,
        padding="same",
        dilation=rules.get("dilation", 1),
        config=tile and {"tile": tile},
        backend=backend,
    ).plan
    assert plan.workspace_bytes(17) - plan.workspace_bytes(1) <= 16 * 2**22


@pytest.mark.parametrize("c", [3, 40])
def test_what_does_not_fit_is_named_by_its_first_place(c: int) -> None:
    x = np.zeros((1, 20, 40, c), np.int16)
    x[0, 7, 30, c - 1] = x[0, 11, 5, 1] = 1000
    w = np.ones((c, 1, 1, 1), np.float32)
    with pytest.raises(OverflowError, match=r"the first place is \(0, 1, 11, 5\)"):
        conv2d(x, w, groups=c, channel_axis=-1, dtype="int8", overflow="raise", backend="cpu-simd")


def test_what_is_told() -> None:
    image, each = np.ones((2, 33, 70, 40), np.float32), np.ones((40, 1, 3, 3), np.float32)
    plan = convpar.plan(image, each, groups=40, channel_axis=-1, backend="cpu-simd").plan
    assert plan.launch["output channels a tile"] == 16
    assert {"staged", "converted"} <= set(plan.paths)
    every = np.ones((32, 40, 3, 3), np.float32)
    plan = convpar.plan(image, every, channel_axis=-1, backend="cpu-packed").plan
    assert (plan.launch["input"], plan.launch["output"]) == ("read in place", "written in place")
