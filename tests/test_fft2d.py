"""cpu-fft2d where random small problems don't reach: every length, pairs of tiles, what is summed directly, who may pick it."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import registry
from convpar.backend import Device, Layout, Layouts, Plan
from convpar.backends.cpu.rungs import Rung, rungs
from convpar.problem import Problem

if registry.find("cpu-fft2d").unavailable():  # type: ignore[union-attr]
    pytest.skip("the compiled engine isn't there", allow_module_level=True)

Array = np.ndarray[Any, Any]
RUNG = next(rung for rung in rungs() if rung.row == "fft2d")
FACTOR = RUNG.capabilities.error.factor


def draw(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(dtype)


def excess(y: Array, x: Array, w: Array, bias: Array | None = None, **rules: Any) -> float:
    """The largest error over the normwise bound without its factor, by direct sums in float64."""
    wide, taps = x.astype(np.float64), w.astype(np.float64)
    added = None if bias is None else bias.astype(np.float64)
    right = convpar.conv2d(wide, taps, added, backend="cpu-simd", **rules)
    sizes = (np.abs(wide), np.abs(taps), None if added is None else np.abs(added))
    planes = convpar.conv2d(*sizes, backend="cpu-simd", **rules).max(axis=(-2, -1), keepdims=True)
    terms = w[0].size if w.ndim == 4 else w.size
    # Direct sums in float64 aren't exact either.
    unit = np.finfo(y.dtype).eps / 2 * (2 if y.dtype == np.float64 else 1)
    error = np.abs(y - right)
    assert (error[np.broadcast_to(planes == 0, error.shape)] == 0).all()
    return float((error / np.maximum(planes * (terms + 2) * unit, np.finfo(np.float64).tiny)).max())


def fresh_plan(x: Array, w: Array, config: Any = None, rung: Rung = RUNG, **rules: Any) -> Plan:
    """A plan that nothing has run; `x` and `w` have four axes."""
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules)
    layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.contiguous(p.out_shape, p.out_dtype.itemsize))
    plan = rung.plan(p, layouts, Device(), config)
    assert isinstance(plan, Plan), plan
    return plan


def run(plan: Plan, x: Array, w: Array, fill: int = 0, threads: int = 1) -> Array:
    """The result of a plan whose workspace held the byte `fill` everywhere."""
    y = np.empty(plan.problem.out_shape, plan.problem.out_dtype)
    workspace = np.full(plan.workspace_bytes(threads), fill, np.uint8)
    plan.run(x, w, None, y, workspace=workspace, num_threads=threads)
    return y


def summed_directly(y: Array, x: Array, w: Array, **rules: Any) -> Array:
    """Where a result has the bits of a direct sum, in one of the orders that tiles of different sizes have."""
    found = np.zeros(y.shape, bool)
    for tile in ((4096, 4096), (7, 4096), (4096, 7)):
        right = convpar.conv2d(x, w, backend="cpu-simd", config={"tile": tile}, **rules)
        found |= (y == right) | (np.isnan(y) & np.isnan(right))
    return found


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("length", RUNG.lengths)
def test_every_length_of_a_transform(length: int, dtype: str) -> None:
    rung = dataclasses.replace(RUNG, lengths=(length,))
    for rows, columns in ((length - 3, 3 * length), (3 * length, length - 3)):
        # The zeros before the image stand for those after it.
        x, w = draw(3, 1, rows, columns, dtype=dtype), draw(1, 1, 5, 6, dtype=dtype, seed=1)
        plan = fresh_plan(x, w, rung=rung, padding=2)
        assert plan.launch["transform"] == f"{length} x {length} samples"
        assert excess(run(plan, x, w), x, w, padding=2) <= FACTOR


@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm", "mirror", "nearest"])
@pytest.mark.parametrize("k", [(17, 64), (101, 33), (1, 129), (200, 2)])
def test_large_filters_at_every_boundary(boundary: str, k: tuple[int, int]) -> None:
    x, w = draw(210, 231), draw(*k, seed=1)
    for padding in ("same", "full"):
        rules: dict[str, Any] = {"padding": padding, "boundary": boundary}
        assert excess(convpar.conv2d(x, w, backend="cpu-fft2d", **rules), x, w, **rules) <= FACTOR


@pytest.mark.parametrize(
    ("x", "w", "rules"),
    [
        ((2, 6, 90, 120), (4, 3, 21, 30), {"groups": 2, "padding": (10, 10, 15, 14), "flip": True}),
        ((5, 8, 40, 56), (8, 1, 31, 31), {"groups": 8, "padding": 15}),
        ((3, 1, 40, 30), (5, 1, 25, 25), {"padding": "same", "fillvalue": 0.5}),
        ((1, 1, 300, 900), (1, 1, 19, 23), {}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_tiles_images_and_channels_meet_without_a_seam(x: Any, w: Any, rules: Any, dtype: Any) -> None:
    image, filters = draw(*x, dtype=dtype), draw(*w, dtype=dtype, seed=1)
    bias = draw(w[0], dtype=dtype, seed=2)
    for tile in (None, (1, 1000), (37, 41), (1000, 17)):
        for block in (None, 2):
            config = {"tile": tile, "block": block}
            y = convpar.conv2d(image, filters, bias, backend="cpu-fft2d", config=config, **rules)
            assert excess(y, image, filters, bias, **rules) <= FACTOR
            again = convpar.conv2d(
                image, filters, bias, backend="cpu-fft2d", config=config, num_threads=3, **rules
            )
            np.testing.assert_array_equal(again, y)


@pytest.mark.parametrize("rules", [{}, {"padding": 3}])
def test_bits_depend_on_no_memory_that_was_there_before(rules: Any) -> None:
    for shape in ((1, 1, 130, 141), (5, 1, 29, 33)):
        x, w = draw(*shape), draw(1, 1, 7, 9, seed=1)
        bits = set()
        for fill in (0, 0x7F, 0xFF):
            for threads in (1, 3):
                bits.add(run(fresh_plan(x, w, **rules), x, w, fill, threads).tobytes())
        assert len(bits) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["patch", "points", "signs", "wide", "one tap", "constant"])
@pytest.mark.parametrize("k", [(1, 1), (1, 2), (2, 2), (3, 3), (7, 5)])
def test_errors_follow_the_brightest_sums_only(dtype: str, kind: str, k: tuple[int, int]) -> None:
    for seed in range(12):
        random = np.random.default_rng(seed)
        x, w = draw(2, 1, 50, 61, dtype=dtype, seed=seed), draw(2, 1, *k, dtype=dtype, seed=seed + 1)
        i, j = random.integers(8, 40, 2)
        if kind == "patch":
            x[:, :, i : i + 5, j : j + 5] *= 1e6
        elif kind == "points":
            x[:, :, i, j] *= 1e6
        elif kind == "wide":
            x *= (2.0 ** random.integers(-20, 20, x.shape)).astype(dtype)
        elif kind == "constant":
            x[...] = x[0, 0, 0, 0]
        else:
            x = np.sign(x)
            if kind == "one tap":
                w *= np.arange(w[0].size).reshape(k) == random.integers(0, w[0].size, (2, 1, 1, 1))
        assert excess(convpar.conv2d(x, w, backend="cpu-fft2d"), x, w) <= FACTOR


# -- pairs


def test_images_of_different_brightness_keep_their_own_bounds() -> None:
    w = draw(3, 1, 9, 9, seed=1)
    for factor in (1e-12, 1e-3, 0.0, 1e9):
        x = draw(2, 3, 30, 30)
        x[1] *= np.float32(factor)
        for image in (x, x[::-1].copy()):
            y = convpar.conv2d(image, w, groups=3, padding=4, backend="cpu-fft2d")
            assert excess(y, image, w, groups=3, padding=4) <= FACTOR


def test_images_of_zeros_beside_others_stay_zeros() -> None:
    x, w = draw(3, 1, 30, 30), draw(2, 1, 9, 9, seed=1)
    x[1] = 0
    w[1] = 0
    bias = np.array([0.25, -3], np.float32)
    y = convpar.conv2d(x, w, bias, backend="cpu-fft2d")
    assert (y[1, 0] == 0.25).all()
    assert (y[:, 1] == -3).all()


# -- what is summed directly


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf, 3e38])
def test_only_tiles_with_special_samples_are_summed_directly(special: float) -> None:
    x, w = draw(1, 1, 300, 700), draw(1, 1, 15, 15, seed=1)
    assert not summed_directly(convpar.conv2d(x, w, backend="cpu-fft2d"), x, w).all()
    for place in ((0, 0), (200, 333), (299, 699)):
        hit = x.copy()
        hit[0, 0][place] = special
        y = convpar.conv2d(hit, w, backend="cpu-fft2d")
        right = convpar.conv2d(hit, w, backend="cpu-simd")
        np.testing.assert_array_equal(np.isfinite(y), np.isfinite(right))
        met = np.zeros(y.shape, bool)
        i, j = place
        met[0, 0, max(i - 14, 0) : i + 1, max(j - 14, 0) : j + 1] = True
        direct = summed_directly(y, hit, w)
        assert direct[met].all()
        assert direct.mean() < 0.7


def test_magnitudes_at_the_ends_of_the_range_are_summed_directly() -> None:
    x, w = draw(1, 1, 60, 70), draw(2, 1, 9, 9, seed=1)
    for a, b in ((1e-20, 1), (1, 1e-20), (1e-12, 1e-12), (1e20, 1), (1, 1e20), (1e12, 1e12)):
        hit, taps = x * np.float32(a), w * np.float32(b)
        assert summed_directly(convpar.conv2d(hit, taps, backend="cpu-fft2d"), hit, taps).all()
    for value in (np.nan, np.inf, 3e38):
        taps = w.copy()
        taps[1, 0, 4, 2] = value
        direct = summed_directly(convpar.conv2d(x, taps, backend="cpu-fft2d"), x, taps)
        assert direct[0, 1].all()
        assert not direct[0, 0].all()


def test_samples_that_outshine_those_at_the_largest_tap_are_summed_directly() -> None:
    x, w = draw(1, 1, 40, 50), np.zeros((1, 1, 9, 9), np.float32)
    w[..., 8, 8] = 0.7
    for place, direct in (((0, 5), True), ((7, 30), True), ((20, 7), True), ((20, 20), False)):
        hit = x.copy()
        hit[0, 0][place] = 1e6
        y = convpar.conv2d(hit, w, backend="cpu-fft2d")
        assert summed_directly(y, hit, w).all() == direct
        assert excess(y, hit, w) <= FACTOR


def test_direct_sums_of_a_narrow_last_tile_stay_inside_the_image() -> None:
    w = draw(1, 1, 9, 9, seed=1)
    for width in range(121, 147):
        # The image ends where its memory does.
        x = draw(1, 1, 60, width)
        x[0, 0, 59, width - 1] = np.nan
        y = convpar.conv2d(x, w, backend="cpu-fft2d", config={"tile": (1000, 1000)})
        assert np.isnan(y[0, 0, 51, width - 9])
        assert np.isnan(y).sum() == 1
        y[0, 0, 51, width - 9] = x[0, 0, 59, width - 1] = 0
        right = convpar.conv2d(x, w, dtype="float64", backend="cpu-simd")
        right[0, 0, 51, width - 9] = 0
        np.testing.assert_allclose(y, right, atol=1e-4)


# -- who picks it


def test_choosers_pick_it_only_under_the_normwise_contract_and_where_it_is_faster() -> None:
    x = convpar.ArraySpec((2048, 2048))

    def chosen(k: int, accuracy: Any) -> str:
        plan = convpar.plan(x, convpar.ArraySpec((k, k)), accuracy=accuracy, backend="cpu-omp")
        return plan.backend.name

    assert chosen(31, "normwise") == "cpu-fft2d"
    assert chosen(31, 1e-3) == "cpu-fft2d"
    assert chosen(31, None) != "cpu-fft2d"
    assert chosen(31, "elementwise") != "cpu-fft2d"
    assert chosen(3, "normwise") != "cpu-fft2d"


def test_what_it_cannot_do_is_refused() -> None:
    x = convpar.ArraySpec((1, 1, 600, 600))
    for w, rules, reason in (
        ((9, 9), {"stride": 2}, "stride"),
        ((9, 9), {"dilation": 2}, "dilation"),
        ((9, 9), {"accuracy": "elementwise"}, "it promises normwise"),
        ((300, 9), {}, "at most 256 rows and columns, not 300 x 9"),
    ):
        with pytest.raises(convpar.Unsupported, match=reason):
            convpar.plan(x, convpar.ArraySpec(w), backend="cpu-fft2d", **rules)
    with pytest.raises(convpar.Unsupported, match="MB of workspace"):
        convpar.plan(
            convpar.ArraySpec((1, 512, 28, 28)), convpar.ArraySpec((512, 512, 9, 9)), backend="cpu-fft2d"
        )
