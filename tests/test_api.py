"""`conv2d` as a caller meets it: ranks, layouts, types, borders, bias, out and the rules between them.

What each backend computes is the conformance suite's matter. Here the answers are those of
scipy.signal or of a few lines of NumPy, from the reference, from a compiled rung that takes every problem,
and from whatever is chosen.
"""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import conv2d
from convpar.problem import LARGEST, LARGEST_PADDING

scipy_signal = pytest.importorskip("scipy.signal", reason="the results are checked against SciPy")
ndimage = pytest.importorskip("scipy.ndimage", reason="the results are checked against SciPy")

ROOT = Path(convpar.__file__).parent.parent
BACKENDS = ["numpy", "cpu-private", "auto"]

rng = np.random.default_rng(2024)
PICTURE = rng.integers(0, 256, (9, 11), np.uint8)
KERNEL = rng.integers(-9, 10, (3, 3), np.int16)


def small(*shape: int, dtype: Any = np.int64) -> Any:
    """Integers small enough that every sum is exact in every type."""
    return rng.integers(-4, 5, shape).astype(dtype)


def correlate(x: Any, w: Any, groups: int = 1) -> Any:
    """The valid correlation of (N, C, H, W) with (OC, C/groups, KH, KW), channel by channel with SciPy."""
    n, c = x.shape[:2]
    oc, per_group = w.shape[:2]
    planes = [
        [
            sum(
                scipy_signal.correlate2d(x[i, o // (oc // groups) * per_group + k], w[o, k], "valid")
                for k in range(per_group)
            )
            for o in range(oc)
        ]
        for i in range(n)
    ]
    assert c == groups * per_group
    return np.array(planes)


# -- ranks and layouts

# Every legal pair of ranks: shape of x, channel_axis, shape of w, shape of the result.
RANKS = [
    ((6, 7), None, (3, 2), (4, 6)),
    ((6, 7), None, (1, 1, 3, 2), (4, 6)),
    ((5, 6, 7), None, (3, 2), (5, 4, 6)),
    ((5, 6, 7), None, (4, 5, 3, 2), (4, 4, 6)),
    ((2, 5, 6, 7), None, (3, 2), (2, 5, 4, 6)),
    ((2, 5, 6, 7), None, (4, 5, 3, 2), (2, 4, 4, 6)),
    ((6, 7, 5), -1, (3, 2), (4, 6, 5)),
    ((6, 7, 5), -1, (4, 5, 3, 2), (4, 6, 4)),
    ((2, 6, 7, 5), -1, (3, 2), (2, 4, 6, 5)),
    ((2, 6, 7, 5), -1, (4, 5, 3, 2), (2, 4, 6, 4)),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("x_shape", "axis", "w_shape", "y_shape"), RANKS)
def test_ranks(x_shape: Any, axis: Any, w_shape: Any, y_shape: Any, backend: str) -> None:
    x, w = small(*x_shape), small(*w_shape)
    first = x if axis is None else np.moveaxis(x, -1, -3)
    canonical = first.reshape((1,) * (4 - x.ndim) + first.shape)
    if w.ndim == 2:
        c = canonical.shape[1]
        right = correlate(canonical, np.broadcast_to(w, (c, 1, *w.shape)), groups=c)
    else:
        right = correlate(canonical, w)
    right = right if axis is None else np.moveaxis(right, 1, -1)
    y = conv2d(x, w, channel_axis=axis, backend=backend)
    assert y.shape == y_shape
    assert y.flags.c_contiguous
    np.testing.assert_array_equal(y, right.reshape(y_shape))


def test_a_colour_picture_is_filtered_channel_by_channel() -> None:
    picture = rng.integers(0, 256, (8, 9, 3), np.uint8)
    y = conv2d(picture, KERNEL, padding="same", boundary="mirror", channel_axis=-1)
    for k in range(3):
        right = ndimage.correlate(picture[..., k].astype(np.int32), KERNEL, mode="mirror")
        np.testing.assert_array_equal(y[..., k], right)


@pytest.mark.parametrize("axis", [None, -1])
def test_groups(axis: Any) -> None:
    x, w = small(2, 6, 7, 8), small(4, 3, 3, 3)
    given = x if axis is None else np.moveaxis(x, 1, -1)
    y = conv2d(given, w, groups=2, channel_axis=axis)
    y = y if axis is None else np.moveaxis(y, -1, 1)
    np.testing.assert_array_equal(y, correlate(x, w, groups=2))


def test_depthwise_groups_are_a_filter_for_each_channel() -> None:
    x, w = small(3, 7, 8), small(3, 1, 3, 3)
    y = conv2d(x, w, groups=3)
    for k in range(3):
        np.testing.assert_array_equal(y[k], conv2d(x[k], w[k, 0]))


@pytest.mark.parametrize("axis", [np.int64(-1), np.int8(-1)])
def test_channel_axis_may_be_a_numpy_integer(axis: Any) -> None:
    x = small(5, 6, 3)
    np.testing.assert_array_equal(conv2d(x, KERNEL, channel_axis=axis), conv2d(x, KERNEL, channel_axis=-1))


# -- what is computed


def test_it_is_cross_correlation_and_flip_makes_it_convolution() -> None:
    x, w = small(7, 8), small(3, 2)
    np.testing.assert_array_equal(conv2d(x, w), scipy_signal.correlate2d(x, w, "valid"))
    np.testing.assert_array_equal(conv2d(x, w, flip=True), scipy_signal.convolve2d(x, w, "valid"))
    np.testing.assert_array_equal(conv2d(x, w, flip=np.True_), conv2d(x, w[::-1, ::-1]))


def test_nothing_is_conjugated() -> None:
    x, w = small(5, 6) + 1j * small(5, 6), small(2, 3) + 1j * small(2, 3)
    np.testing.assert_array_equal(conv2d(x, w), scipy_signal.correlate2d(x, w.conj(), "valid"))


@pytest.mark.parametrize("stride", [1, 2, 3, 5])
@pytest.mark.parametrize("kernel", [(1, 1), (2, 3), (4, 2), (5, 5), (9, 12)])
@pytest.mark.parametrize("flip", [False, True])
def test_same_gives_ceil_and_pads_the_odd_one_at_the_end(stride: int, kernel: Any, flip: bool) -> None:
    x, w = small(7, 10), small(*kernel)
    pads = []
    for n, k in zip(x.shape, kernel, strict=True):
        total = max((-(-n // stride) - 1) * stride + k - n, 0)
        pads.append((total // 2, total - total // 2))
    turned = w[::-1, ::-1] if flip else w
    right = scipy_signal.correlate2d(np.pad(x, pads), turned, "valid")[::stride, ::stride]
    y = conv2d(x, w, padding="same", stride=stride, flip=flip)
    assert y.shape == (-(-7 // stride), -(-10 // stride))
    np.testing.assert_array_equal(y, right)


def test_same_with_an_even_filter_is_not_scipys() -> None:
    x, w = small(5, 6), np.array([[1, 2]])
    same = conv2d(x, w, padding="same", flip=True)
    assert not np.array_equal(same, scipy_signal.convolve2d(x, w, "same"))
    np.testing.assert_array_equal(same, scipy_signal.convolve2d(x, w, "full")[:, 1:])
    np.testing.assert_array_equal(
        convpar.signal.convolve2d(x, w, "same"), scipy_signal.convolve2d(x, w, "same")
    )


def test_full_is_scipys() -> None:
    x, w = small(5, 6), small(3, 4)
    np.testing.assert_array_equal(conv2d(x, w, padding="full"), scipy_signal.correlate2d(x, w, "full"))


@pytest.mark.parametrize(
    ("padding", "sides"),
    [
        (0, (0, 0, 0, 0)),
        (2, (2, 2, 2, 2)),
        (np.int8(1), (1, 1, 1, 1)),
        (np.array(1), (1, 1, 1, 1)),
        ((1, 3), (1, 1, 3, 3)),
        ([1, 3], (1, 1, 3, 3)),
        (np.array([1, 3]), (1, 1, 3, 3)),
        ((1, 2, 3, 4), (1, 2, 3, 4)),
        ((np.int64(1), 2, 3, np.uint8(4)), (1, 2, 3, 4)),
        ("valid", (0, 0, 0, 0)),
        ("full", (2, 2, 2, 2)),
    ],
)
def test_forms_of_padding(padding: Any, sides: Any) -> None:
    top, bottom, left, right = sides
    padded = np.pad(PICTURE, ((top, bottom), (left, right)))
    np.testing.assert_array_equal(conv2d(PICTURE, KERNEL, padding=padding), conv2d(padded, KERNEL))


@pytest.mark.parametrize("steps", [2, (2, 2), [2, 2], np.array([2, 2]), (np.int16(2), 2)])
def test_forms_of_stride_and_dilation(steps: Any) -> None:
    np.testing.assert_array_equal(conv2d(PICTURE, KERNEL, stride=steps), conv2d(PICTURE, KERNEL)[::2, ::2])
    spread = np.zeros((5, 5), KERNEL.dtype)
    spread[::2, ::2] = KERNEL
    np.testing.assert_array_equal(conv2d(PICTURE, KERNEL, dilation=steps), conv2d(PICTURE, spread))


def test_pairs_are_vertical_then_horizontal() -> None:
    assert conv2d(PICTURE, KERNEL, stride=(2, 3)).shape == (4, 3)
    assert conv2d(PICTURE, KERNEL, dilation=(2, 3)).shape == (5, 5)
    assert conv2d(PICTURE, KERNEL, padding=(1, 2)).shape == (9, 13)


@pytest.mark.parametrize(
    ("boundary", "numpys"),
    [
        ("wrap", "wrap"),
        ("symm", "symmetric"),
        ("mirror", "reflect"),
        ("nearest", "edge"),
        ("fill", "constant"),
    ],
)
@pytest.mark.parametrize("padding", [1, (2, 5), (0, 7, 30, 1)])
def test_boundaries(boundary: str, numpys: str, padding: Any) -> None:
    x = small(3, 4)
    pads = ((2, 2), (5, 5)) if padding == (2, 5) else ((1, 1), (1, 1)) if padding == 1 else ((0, 7), (30, 1))
    right = conv2d(np.pad(x, pads, mode=numpys), KERNEL)
    np.testing.assert_array_equal(conv2d(x, KERNEL, padding=padding, boundary=boundary), right)


def test_a_mirror_of_one_sample_repeats_it() -> None:
    y = conv2d(np.array([[3]]), np.ones((3, 5), int), padding="same", boundary="mirror")
    np.testing.assert_array_equal(y, [[45]])


# -- fill values


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("x_type", "w_type", "value", "cast"),
    [
        ("u1", "u1", 1.7, 1),
        ("u1", "u1", -0.7, 0),
        ("i2", "i1", -2.9, -2),
        ("u1", "u1", True, 1),
        ("u1", "f4", 0.1, np.float32(0.1)),
        ("f4", "f4", 2**70, np.float32(2.0**70)),
        ("f4", "f4", 1e300, np.float32(np.inf)),
        ("f4", "f4", np.float64(0.1), np.float32(0.1)),
        ("f8", "f4", [[2.5]], 2.5),
        ("c8", "f4", 1 - 2j, 1 - 2j),
        ("u8", "u8", 2**64 - 1, np.uint64(2**64 - 1)),
    ],
)
def test_fillvalue_is_cast_to_the_promotion(
    x_type: str, w_type: str, value: Any, cast: Any, backend: str
) -> None:
    x, w = np.zeros((3, 3), x_type), np.ones((3, 3), w_type)
    y = conv2d(x, w, padding=(3, 0, 0, 0), fillvalue=value, backend=backend)
    right = np.full((3, 3), cast, y.dtype).sum(dtype=y.dtype)
    np.testing.assert_allclose(y[0, 0], right, rtol=1e-6)


def test_fillvalue_is_not_cast_to_dtype() -> None:
    x, w = np.zeros((1, 1), np.float32), np.ones((1, 1), np.float32)
    assert conv2d(x, w, padding=1, fillvalue=2.5, dtype="int32")[0, 0] == 2
    assert conv2d(x.astype("u1"), w.astype("u1"), padding=1, fillvalue=2.5, dtype="float64")[0, 0] == 2.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_data(backend: str) -> None:
    x, w = np.ones((2, 3)), np.array([[np.inf, 1, 1], [1, 1, 1], [1, 1, 1]])
    right = scipy_signal.correlate2d(x, w, "same")
    assert np.isnan(right).any()
    np.testing.assert_array_equal(conv2d(x, w, padding="same", backend=backend), right)
    y = conv2d(x, np.ones((3, 3)), padding="same", fillvalue=np.nan, backend=backend)
    assert np.isnan(y).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_products_with_nan_and_infinity_stay_where_their_window_is(backend: str) -> None:
    x = np.ones((7, 8))
    x[3, 4] = np.inf
    w = np.ones((3, 3))
    w[1, 1] = 0
    y = conv2d(x, w, padding="same", backend=backend)
    seen = np.zeros((7, 8), bool)
    seen[2:5, 3:6] = True
    assert np.isnan(y[3, 4])
    np.testing.assert_array_equal(np.isfinite(y), ~seen)


# -- result types


@pytest.mark.parametrize(
    ("x_type", "w_type", "y_type"),
    [
        ("u1", "i1", "i2"), ("i4", "f4", "f8"), ("u8", "i8", "f8"), ("?", "i1", "i1"), ("?", "f4", "f4"),
        ("f2", "f2", "f2"), ("f2", "f4", "f4"), ("f4", "c8", "c8"), ("i8", "c8", "c16"), ("g", "f4", "g"),
        ("g", "c8", "G"), ("u1", "u1", "u1"), (">i2", "<i2", "i2"), ("q", "l", "i8"),
    ],
)  # fmt: skip
def test_result_types_are_numpys_promotion(x_type: str, w_type: str, y_type: str) -> None:
    x, w = small(4, 5).astype(x_type), small(2, 2).astype(w_type)
    y = conv2d(x, w)
    assert y.dtype == np.dtype(y_type)
    assert y.dtype == np.result_type(x, w).newbyteorder("=")
    assert y.dtype.isnative


def test_a_blurred_picture_keeps_its_type_when_asked() -> None:
    cv2 = pytest.importorskip("cv2", reason="the result is checked against OpenCV")
    kernel = np.ones((3, 3)) / 9
    right = cv2.filter2D(PICTURE, -1, kernel, borderType=cv2.BORDER_REFLECT_101)
    y = conv2d(PICTURE, kernel, padding="same", boundary="mirror", dtype="uint8")
    assert y.dtype == np.uint8
    # A sum a hair away from one half may round either way.
    assert np.abs(y.astype(int) - right).max() <= 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_dtype_asks_for_a_wider_sum(backend: str) -> None:
    kernel = np.full((2, 2), 200, np.uint8)
    x = np.full((4, 4), 255, np.uint8)
    exact = 255 * 200 * kernel.size
    assert conv2d(x, kernel, backend=backend)[0, 0] == exact % 256
    assert conv2d(x, kernel, dtype="int64", backend=backend)[0, 0] == exact
    assert conv2d(x, kernel, dtype="float32", backend=backend)[0, 0] == exact


@pytest.mark.parametrize("dtype", ["f4", np.float32, np.dtype(">f4"), "float32", "single"])
def test_forms_of_dtype(dtype: Any) -> None:
    y = conv2d(PICTURE, KERNEL, dtype=dtype)
    assert y.dtype == np.dtype("float32")
    assert y.dtype.isnative


def test_bfloat16_is_known_by_name() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 comes with ml_dtypes")
    y = conv2d(small(5, 5, dtype=np.float32), np.ones((3, 3), np.float32), dtype="bfloat16")
    assert y.dtype == ml_dtypes.bfloat16


def test_dtype_bfloat16_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    monkeypatch.setattr(np, "dtype", _unknown(np.dtype))
    with pytest.raises(TypeError, match=r"dtype must be a NumPy dtype, not 'bfloat16'.*ml_dtypes"):
        convpar.problem.check_dtype("bfloat16", "dtype")


def _unknown(known: Any) -> Any:
    """numpy.dtype that has never heard of bfloat16."""

    def dtype(value: Any) -> Any:
        if value == "bfloat16":
            raise TypeError("data type 'bfloat16' not understood")
        return known(value)

    return dtype


@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_sums_in_single(backend: str) -> None:
    x, w = np.full((3, 3), 2048, np.float16), np.ones((3, 3), np.float16)
    x[1, 1] = 1
    # Half sums would lose the 1: 2048 + 1 is not a float16.
    right = np.float32(8 * 2048 + 1).astype(np.float16)
    y = conv2d(x, w, backend=backend)
    assert y.dtype == np.float16
    assert y[0, 0] == right
    one = conv2d(x, w, dtype="float32", backend=backend)
    assert one[0, 0] == 8 * 2048 + 1


# -- overflow


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [None, "uint8"])
def test_overflow_of_integers(backend: str, dtype: Any) -> None:
    x = np.zeros((5, 6), np.uint8)
    x[2, 3] = 200
    w = np.zeros((3, 3), np.uint8)
    w[0, 0], w[2, 2] = 4, 1
    assert conv2d(x, w, backend="numpy", dtype=dtype)[2, 3] == 200 * 4 % 256
    y = conv2d(x, w, overflow="saturate", backend=backend, dtype=dtype)
    assert y.dtype == np.uint8
    assert y[2, 3] == 255
    with pytest.raises(OverflowError, match=r"uint8.*\(0, 0, 2, 3\) \(n, oc, row, column\)"):
        conv2d(x, w, overflow="raise", backend=backend, dtype=dtype)
    x[2, 3] = 63
    assert conv2d(x, w, overflow="raise", backend=backend, dtype=dtype)[2, 3] == 252


@pytest.mark.parametrize("threads", [1, 3])
def test_overflow_names_the_first_place(threads: int) -> None:
    x = np.zeros((2, 40, 300), np.int16)
    x[1, 5, 7] = x[1, 30, 2] = x[0, 39, 299] = 30000
    w = np.array([[2]], np.int16)
    for backend in ("numpy", "cpu-private"):
        with pytest.raises(OverflowError, match=r"\(0, 0, 39, 299\)"):
            conv2d(x, w, overflow="raise", backend=backend, num_threads=threads)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overflow", ["wrap", "saturate"])
def test_floats_become_integers_by_rounding_half_to_even(overflow: str, backend: str) -> None:
    x = np.array([[0.5, 1.5, 2.5, -0.5, -1.5, 1e9, -1e9, np.inf, -np.inf, np.nan, 254.5, 255.5]])
    y = conv2d(x, np.ones((1, 1)), dtype="uint8", overflow=overflow, backend=backend)
    np.testing.assert_array_equal(y[0], [0, 2, 2, 0, 0, 255, 0, 255, 0, 0, 254, 255])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 255.6, -0.6])
def test_raise_refuses_what_no_integer_is(bad: float) -> None:
    x = np.full((3, 4), 7.25)
    x[1, 2] = bad
    for backend in ("numpy", "cpu-private"):
        with pytest.raises(OverflowError, match=r"uint8.*\(0, 0, 1, 2\)"):
            conv2d(x, np.ones((1, 1)), dtype="uint8", overflow="raise", backend=backend)
        x_right = np.where(np.isfinite(x) & (x >= -0.5) & (x <= 255.5), x, 0)
        assert conv2d(x_right, np.ones((1, 1)), dtype="uint8", overflow="raise", backend=backend)[0, 0] == 7


def test_saturate_needs_a_type_that_holds_every_sum() -> None:
    x = np.ones((4, 4), np.int64)
    with pytest.raises(convpar.Unsupported, match=r"64 bits.*narrower inputs"):
        conv2d(x, x[:2, :2], overflow="saturate")
    # Wrapping needs none.
    assert conv2d(np.full((2, 2), 2**62), np.full((2, 2), 2))[0, 0] == 0


def test_saturate_reckons_with_bias_and_fillvalue() -> None:
    x, w = np.full((3, 3), 127, np.int8), np.full((1, 1), 1, np.int8)
    assert conv2d(x, w, 127, overflow="saturate").max() == 127
    assert conv2d(x, w, np.array([2**31 - 1], np.int32), overflow="saturate").max() == 127
    with pytest.raises(convpar.Unsupported, match="bias of type int64"):
        conv2d(x, w, np.array([1]), overflow="saturate")
    y = conv2d(x, w, padding=1, fillvalue=100, overflow="saturate", dtype="int16")
    assert (y[0, 0], y[1, 1]) == (100, 127)
    y = conv2d(x, w, -(2**31), overflow="saturate")
    assert (y == -128).all()


# -- bias


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("bias", "added"),
    [
        (3, 3), (2.5, 2.5), (True, 1), (np.float32(2.5), 2.5), (np.int8(-3), -3), (np.array(2.5), 2.5),
        (np.array(2.5, ">f8"), 2.5), (-7, -7), (np.bool_(True), 1),
    ],
)  # fmt: skip
def test_scalar_bias(bias: Any, added: float, backend: str) -> None:
    x, w = small(3, 6, 7, dtype=np.float32), small(4, 3, 3, 3, dtype=np.float32)
    y = conv2d(x, w, bias, backend=backend)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, conv2d(x, w, backend=backend) + np.float32(added))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "form", ["list", "strided", "reversed", "big-endian", "bool", "int", "float64", "broadcast"]
)
def test_bias_arrays(form: str, backend: str) -> None:
    x, w = small(3, 6, 7, dtype=np.float32), small(4, 3, 3, 3, dtype=np.float32)
    values = np.array([1.0, -2.0, 0.0, 5.0], np.float32)
    bias: Any = {
        "list": values.tolist(),
        "strided": np.repeat(values, 3)[::3],
        "reversed": values[::-1].copy()[::-1],
        "big-endian": values.astype(">f4"),
        "bool": values > 0,
        "int": values.astype(np.int64),
        "float64": values.astype(np.float64),
        "broadcast": np.broadcast_to(np.float32(2), (4,)),
    }[form]
    right = conv2d(x, w) + np.asarray(bias).astype(np.float32)[:, None, None]
    y = conv2d(x, w, bias, backend=backend)
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, right)


def test_bias_has_no_part_in_promotion() -> None:
    x = small(4, 4, dtype=np.float32)
    assert conv2d(x, x[:2, :2], np.float64(1)).dtype == np.float32
    assert conv2d(x.astype("i1"), x[:2, :2].astype("i1"), np.int64(1)).dtype == np.int8
    assert conv2d(x, x[:2, :2] * 1j, 1j).dtype == np.complex64


def test_bias_is_added_before_conversion() -> None:
    x, w = np.full((2, 2), 0.25), np.ones((1, 1))
    assert (conv2d(x, w, 0.3, dtype="uint8") == 1).all()
    assert (conv2d(x, w, 0.2, dtype="uint8") == 0).all()


def test_bias_of_a_two_dimensional_filter_belongs_to_the_channels() -> None:
    x = small(3, 5, 5)
    y = conv2d(x, KERNEL, np.array([10, 20, 30]))
    np.testing.assert_array_equal(y, conv2d(x, KERNEL) + np.array([10, 20, 30])[:, None, None])


def test_a_python_integer_is_a_bias_for_every_sum_that_holds_it() -> None:
    x = np.ones((2, 2), np.uint8)
    assert conv2d(x, x[:1, :1], 254).max() == 255
    assert conv2d(x, x[:1, :1], 300).max() == 301 % 256
    big = np.ones((2, 2), np.uint64)
    assert conv2d(big, big[:1, :1], 2**64 - 2).max() == 2**64 - 1


# -- out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["plain", "strided", "reversed", "transposed", "big-endian", "odd address"])
def test_out_is_filled_and_returned(form: str, backend: str) -> None:
    x, w = small(6, 9, dtype=np.float32), small(3, 3, dtype=np.float32)
    right = conv2d(x, w)
    out: Any = {
        "plain": np.full((4, 7), np.nan, np.float32),
        "strided": np.full((8, 21), np.nan, np.float32)[::2, 1::3],
        "reversed": np.full((4, 7), np.nan, np.float32)[::-1, ::-1],
        "transposed": np.full((7, 4), np.nan, np.float32).T,
        "big-endian": np.full((4, 7), np.nan, ">f4"),
        "odd address": np.zeros(4 * 7 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(4, 7),
    }[form]
    assert conv2d(x, w, out=out, backend=backend) is out
    np.testing.assert_array_equal(out, right)


def test_out_of_a_larger_array_leaves_the_rest_alone() -> None:
    x, w = small(6, 9), small(3, 3)
    frame = np.full((8, 11), 99)
    conv2d(x, w, out=frame[2:6, 2:9])
    np.testing.assert_array_equal(frame[2:6, 2:9], conv2d(x, w))
    frame[2:6, 2:9] = 99
    assert (frame == 99).all()


@pytest.mark.parametrize("axis", [None, -1])
def test_out_has_the_layout_of_x(axis: Any) -> None:
    x, w = small(2, 3, 6, 7), small(4, 3, 3, 3)
    right = conv2d(x, w)
    if axis == -1:
        x, right = np.moveaxis(x, 1, -1), np.moveaxis(right, 1, -1)
    out = np.zeros(right.shape, right.dtype)
    assert conv2d(x, w, out=out, channel_axis=axis) is out
    np.testing.assert_array_equal(out, right)


def test_neighbouring_memory_is_not_overlap() -> None:
    both = np.zeros((6, 20))
    both[:, 0::2] = small(6, 10)
    x, out = both[:, 0::2], both[:4, 1:16:2]
    w = small(3, 3, dtype=float)
    right = conv2d(x.copy(), w)
    conv2d(x, w, out=out)
    np.testing.assert_array_equal(out, right)


# -- which backend, how exact, how it is set


@pytest.mark.parametrize("backend", ["auto", "cpu", "cpu-omp", "numpy", "cpu-naive", "cpu-unrolled"])
def test_names(backend: str) -> None:
    np.testing.assert_array_equal(conv2d(PICTURE, KERNEL, backend=backend), conv2d(PICTURE, KERNEL))


def test_kinds_of_refusal() -> None:
    assert issubclass(convpar.Unsupported, NotImplementedError)
    assert issubclass(convpar.Unavailable, RuntimeError)
    with pytest.raises(convpar.Unsupported, match=r"cpu-unrolled.*2x2.*3x3, 5x5, 7x7"):
        conv2d(PICTURE, KERNEL[:2, :2], backend="cpu-unrolled")


def test_what_no_rung_takes_the_reference_does() -> None:
    x = small(5, 5).astype(np.longdouble)
    assert convpar.explain(x, KERNEL).backend == "numpy"
    np.testing.assert_array_equal(conv2d(x, KERNEL), scipy_signal.correlate2d(x, KERNEL, "valid"))


@pytest.mark.parametrize("accuracy", [None, "elementwise", "normwise", 1e-3, np.float32(1e-3), 1])
@pytest.mark.parametrize("backend", ["auto", "cpu-private"])
def test_accuracies(accuracy: Any, backend: str) -> None:
    x, w = rng.random((9, 9), np.float32), rng.random((3, 3), np.float32)
    y = conv2d(x, w, accuracy=accuracy, backend=backend)
    np.testing.assert_allclose(y, scipy_signal.correlate2d(x, w, "valid"), rtol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "numpy", "cpu-private"])
def test_an_accuracy_nobody_reaches_is_unsupported(backend: str) -> None:
    with pytest.raises(convpar.Unsupported, match="1e-30"):
        conv2d(PICTURE * 1.0, KERNEL * 1.0, accuracy=1e-30, backend=backend)


def test_config() -> None:
    right = conv2d(PICTURE, KERNEL)
    for config in (
        {},
        {"tile": (2, 3)},
        {"tile": [2, 3]},
        {"block": 1},
        {"tile": None},
        {"tile": (2**40, 2**40)},
    ):
        y = conv2d(PICTURE, KERNEL, backend="cpu-private", config=config)
        np.testing.assert_array_equal(y, right)
    p = convpar.plan(PICTURE, KERNEL, backend="cpu-private", config={"tile": (2, 3), "block": 5})
    assert (p.plan.config["tile"], p.plan.config["block"]) == ((2, 3), 5)


# -- inputs


@pytest.mark.parametrize("backend", BACKENDS)
def test_inputs_are_never_modified(backend: str) -> None:
    x, w, bias = small(2, 3, 6, 7), small(4, 3, 3, 3), small(4)
    kept = x.copy(), w.copy(), bias.copy()
    for a in (x, w, bias):
        a.flags.writeable = False
    conv2d(x, w, bias, padding=2, boundary="wrap", backend=backend)
    for a, before in zip((x, w, bias), kept, strict=True):
        np.testing.assert_array_equal(a, before)


def test_an_array_may_be_image_and_filter() -> None:
    x = small(4, 4)
    np.testing.assert_array_equal(conv2d(x, x, padding="full"), scipy_signal.correlate2d(x, x))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "form", ["strided", "reversed", "transposed", "big-endian", "odd address", "broadcast"]
)
def test_memory_of_inputs(form: str, backend: str) -> None:
    x, w = small(7, 9, dtype=np.int32), small(3, 3, dtype=np.int32)
    if form == "broadcast":
        x = np.broadcast_to(x[0], x.shape)
    right = scipy_signal.correlate2d(x, w, "valid")

    def laid(a: Any) -> Any:
        if form == "strided":
            return np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3]
        if form == "reversed":
            return a[::-1, ::-1].copy()[::-1, ::-1]
        if form == "transposed":
            return a.T.copy().T
        if form == "big-endian":
            return a.astype(">i4")
        if form == "odd address":
            return np.frombuffer(b"\0" + a.tobytes(), np.uint8)[1:].view(np.int32).reshape(a.shape)
        return a

    np.testing.assert_array_equal(conv2d(laid(x), laid(w), backend=backend), right)


def test_a_field_of_a_record() -> None:
    record = np.zeros((6, 7), [("tag", "i1"), ("value", "f4"), ("rest", "S2")])
    record["value"] = small(6, 7)
    w = small(2, 2, dtype=np.float32)
    np.testing.assert_array_equal(conv2d(record["value"], w), conv2d(record["value"].copy(), w))


# -- nothing and next to nothing


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("x_shape", "w_shape", "y_shape", "settings"),
    [
        ((0, 6, 6), (3, 3), (0, 4, 4), {}),
        ((6, 6, 0), (3, 3), (4, 4, 0), {"channel_axis": -1}),
        ((0, 3, 6, 6), (4, 3, 3, 3), (0, 4, 4, 4), {}),
        ((2, 0, 6, 6), (4, 0, 3, 3), (2, 4, 4, 4), {}),
        ((2, 3, 6, 6), (0, 3, 3, 3), (2, 0, 4, 4), {}),
        ((0, 3), (3, 3), (0, 3), {"padding": "same"}),
        ((0, 3), (3, 3), (2, 5), {"padding": "full"}),
        ((0, 3), (1, 1), (0, 3), {"padding": "full"}),
        ((0, 0), (3, 3), (1, 1), {"padding": (1, 2, 3, 0)}),
        ((3, 0), (3, 3), (3, 0), {"padding": "same"}),
    ],
)
def test_empty(x_shape: Any, w_shape: Any, y_shape: Any, settings: Any, backend: str) -> None:
    y = conv2d(np.ones(x_shape, np.float32), np.ones(w_shape, np.float32), backend=backend, **settings)
    assert y.shape == y_shape
    assert y.dtype == np.float32
    assert (y == 0).all()


def test_no_channels_leave_the_bias() -> None:
    y = conv2d(np.ones((2, 0, 4, 4)), np.ones((3, 0, 3, 3)), np.array([1.0, 2.0, 3.0]))
    np.testing.assert_array_equal(y, np.broadcast_to(np.array([1.0, 2.0, 3.0])[:, None, None], (2, 3, 2, 2)))


def test_a_padded_nothing_is_fill() -> None:
    y = conv2d(np.ones((0, 3)), np.ones((2, 2)), padding=2, fillvalue=1)
    np.testing.assert_array_equal(y[:, 2:4], 4.0)


# -- numbers far too large

# Calls that would overflow an index or eat the memory if they were believed.
HUGE = [
    "conv2d(x, w, padding=2**24 + 1)",
    "conv2d(x, w, padding=2**40)",
    "conv2d(x, w, padding=2**62)",
    "conv2d(x, w, padding=2**64)",
    "conv2d(x, w, padding=(0, 0, 0, 2**31))",
    "conv2d(x, w, padding=2**31, stride=2**31)",
    "conv2d(x, w, padding='same', dilation=2**30)",
    "conv2d(x, w, padding='full', dilation=2**40)",
    "conv2d(x, w, dilation=2**62)",
    "conv2d(x, w[:1, :1], dilation=2**62)",
    "conv2d(x, w, stride=2**63)",
    "conv2d(x, w, stride=2**200)",
    "conv2d(x, w, groups=2**70)",
    "conv2d(x, np.broadcast_to(np.uint8(1), (2**40, 3)), padding='full')",
    "conv2d(np.broadcast_to(np.uint8(1), (2**30, 2**30)), w.astype('u1'))",
    "conv2d(np.broadcast_to(one, (2**31, 1, 1)), np.broadcast_to(np.uint8(1), (2**31, 2**31, 1, 1)))",
    "conv2d(np.broadcast_to(one, (4, 1, 1)), np.broadcast_to(np.uint8(1), (2**60, 4, 1, 1)))",
    "conv2d(np.broadcast_to(one, (2**40, 1, 1)), w[:1, :1])",
    "conv2d(np.broadcast_to(one, (2**20, 2**20)), w)",
    "conv2d(np.zeros((2**40, 0, 2**20), 'f4'), w)",
    "conv2d(x, w, backend='cpu-private', config={'tile': (2**63, 1)})",
    "conv2d(x, w, backend='cpu-private', config={'block': 2**70})",
    "conv2d(x, w, num_threads=2**40)",
    "conv2d(x, w, num_threads=1025)",
    "convpar.set_num_threads(2**31)",
    "convpar.plan(ArraySpec((2**40, 2**40)), ArraySpec((3, 3)))",
    "convpar.explain(ArraySpec((2**31, 2**31)), ArraySpec((3, 3)))",
]
WORKS = [
    ("conv2d(x, w, stride=2**48)", (1, 1)),
    ("conv2d(x, w[:1, :1], dilation=2**48)", (6, 8)),
    ("conv2d(x.astype('>f4'), w, stride=2**48)", (1, 1)),
    ("conv2d(x, w[:1], dilation=(2**48, 1))", (6, 6)),
    ("conv2d(np.broadcast_to(np.uint8(1), (2**20, 2**20)), w.astype('u1'), stride=2**19)", (2, 2)),
    ("conv2d(x, w, padding=(0, 0, 0, 2**20), stride=2**20)", (1, 2)),
]


def test_numbers_too_large_are_errors_or_work() -> None:
    """In a process that may not take much memory, so that believing one of them ends it."""
    code = f"""
import resource, json
import numpy as np, convpar
from convpar import ArraySpec, conv2d
resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
x, w, one = np.ones((6, 8), 'f4'), np.ones((3, 3), 'f4'), np.float32(1)
for call in {HUGE!r}:
    try:
        result = eval(call)
    except (ValueError, MemoryError) as e:
        assert str(e), call
    else:
        raise SystemExit(f"{{call}} gave {{result}}")
for call, shape in {WORKS!r}:
    y = eval(call)
    assert y.shape == shape, (call, y.shape)
    assert y.flat[0] in (1, 3, 9), (call, y)
print("done")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "done\n"), ran.stderr


def test_the_limits_themselves() -> None:
    assert LARGEST * 16 * 1024 < 2**63
    y = conv2d(np.ones((1, 1), np.uint8), np.ones((1, 1), np.uint8), padding=(0, 0, 0, LARGEST_PADDING // 64))
    assert y.shape == (1, 1 + LARGEST_PADDING // 64)
    assert y.sum() == 1


def test_an_output_that_overlaps_itself_is_refused_though_it_owns_its_memory() -> None:
    x, w = np.ones((8, 8), np.float32), np.ones((3, 3), np.float32)
    out = np.empty((6, 6), np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        out.strides = (0, 4)
    for bias in (None, np.float32(1)):
        with pytest.raises(ValueError, match="out has elements that share memory"):
            convpar.conv2d(x, w, bias, out=out)


@pytest.mark.parametrize("kind", [np.longdouble, np.clongdouble])
def test_a_bias_of_extended_precision_is_left_to_the_reference(kind: Any) -> None:
    x = np.ones((4, 4), np.complex64 if kind is np.clongdouble else np.float32)
    w, bias = np.ones((3, 3), np.float32), kind(2)
    y = conv2d(x, w, bias)
    assert y.dtype == x.dtype
    np.testing.assert_array_equal(y, np.full((2, 2), 11))
    for backend in convpar.list_backends():
        taken = x.dtype.name in backend.capabilities.input_dtypes
        if taken and backend.unavailable() is None and backend.name != "numpy":
            with pytest.raises(convpar.Unsupported, match=f"the bias is {np.dtype(kind)}; it takes bool"):
                conv2d(x, w, bias, backend=backend.name)
