"""Every border against `numpy.pad`, which knows nothing of convpar."""

from __future__ import annotations

import numpy as np
import pytest

from convpar.boundary import FILL, MODES, border_maps, index_map, source_index

NUMPY_MODE = {"wrap": "wrap", "symm": "symmetric", "mirror": "reflect", "nearest": "edge"}
REPEATING = sorted(NUMPY_MODE)


@pytest.mark.parametrize("mode", REPEATING)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_maps_are_numpys_padding(mode: str, n: int) -> None:
    samples = np.arange(n)
    for before in range(3 * n + 3):
        for after in range(3 * n + 3):
            padded = np.pad(samples, (before, after), mode=NUMPY_MODE[mode])
            np.testing.assert_array_equal(index_map(n, before, after, mode), padded)


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_fill_marks_what_is_outside(n: int) -> None:
    for before in range(3 * n + 3):
        for after in range(3 * n + 3):
            padded = np.pad(np.arange(n), (before, after), constant_values=FILL)
            np.testing.assert_array_equal(index_map(n, before, after, "fill"), padded)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("fill", [-1, -1, -1, 0, 1, 2, 3, -1, -1, -1]),
        ("wrap", [1, 2, 3, 0, 1, 2, 3, 0, 1, 2]),
        ("symm", [2, 1, 0, 0, 1, 2, 3, 3, 2, 1]),
        ("mirror", [3, 2, 1, 0, 1, 2, 3, 2, 1, 0]),
        ("nearest", [0, 0, 0, 0, 1, 2, 3, 3, 3, 3]),
    ],
)
def test_four_samples_as_the_docs_draw_them(mode: str, expected: list[int]) -> None:
    assert index_map(4, 3, 3, mode).tolist() == expected


@pytest.mark.parametrize("mode", MODES)
def test_border_maps_are_the_ends_of_the_index_map(mode: str) -> None:
    for n, before, after in [(1, 0, 0), (1, 5, 2), (4, 3, 0), (4, 0, 3), (3, 11, 10)]:
        whole = index_map(n, before, after, mode)
        first, last = border_maps(n, before, after, mode)
        np.testing.assert_array_equal(whole, np.concatenate([first, np.arange(n), last]))
        assert (len(first), len(last)) == (before, after)


@pytest.mark.parametrize("mode", MODES)
def test_maps_are_int64_in_any_shape(mode: str) -> None:
    positions = np.array([[-2, -1, 0], [1, 2, 3]], np.int16)
    found = source_index(positions, 2, mode)
    assert found.dtype == np.int64
    assert found.shape == (2, 3)
    for place in np.ndindex(2, 3):
        assert found[place] == source_index(int(positions[place]), 2, mode)


@pytest.mark.parametrize("mode", REPEATING)
@pytest.mark.parametrize("n", [1, 2, 3, 10**6 + 3])
def test_positions_far_outside(mode: str, n: int) -> None:
    # By the period: wrap repeats after n, symm after 2n, mirror after 2n - 2; nearest is constant there.
    period = {"wrap": n, "symm": 2 * n, "mirror": max(2 * n - 2, 1), "nearest": 1}[mode]
    near = np.arange(0, min(n, 50))
    for times in (1, -1, 10**9 // period, -(10**9) // period, 2**60 // period, -(2**60) // period):
        far = near + times * period
        if mode == "nearest":
            far = far[(far < 0) | (far >= n)]
            expected = np.where(far < 0, 0, n - 1)
        else:
            expected = near
        np.testing.assert_array_equal(source_index(far, n, mode), expected)


@pytest.mark.parametrize("mode", REPEATING)
def test_an_empty_axis_has_nothing_to_repeat(mode: str) -> None:
    assert index_map(0, 0, 0, mode).tolist() == []
    with pytest.raises(ValueError, match=rf"{mode}.* needs at least one sample"):
        index_map(0, 1, 0, mode)
    with pytest.raises(ValueError, match=rf"{mode}.* needs at least one sample"):
        index_map(0, 0, 1, mode)


def test_an_empty_axis_can_be_filled() -> None:
    assert index_map(0, 2, 1, "fill").tolist() == [FILL] * 3


@pytest.mark.parametrize("mode", ["reflect", "", "FILL", "constant"])
def test_unknown_modes_name_the_known_ones(mode: str) -> None:
    with pytest.raises(ValueError, match="fill, wrap, symm, mirror, nearest"):
        index_map(3, 1, 1, mode)


def test_repeating_maps_stay_inside() -> None:
    rng = np.random.default_rng(0)
    for mode in REPEATING:
        for n in (1, 2, 3, 17):
            found = source_index(rng.integers(-(2**62), 2**62, 1000), n, mode)
            assert found.min() >= 0
            assert found.max() < n
