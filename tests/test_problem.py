"""`Problem`: sizes by counting, types by the spec, extremes by brute force, and every error's words."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest

from convpar.problem import (
    LARGEST,
    LARGEST_PADDING,
    Problem,
    Unsupported,
    fill_argument,
    is_float,
    is_integer,
    sum_and_output_types,
)

X, W = (1, 1, 5, 6), (1, 1, 3, 2)

INTEGERS = [np.dtype(c + str(b)) for c in "iu" for b in (1, 2, 4, 8)]


def of(x: tuple[int, ...] = X, w: tuple[int, ...] = W, dtype: Any = "float32", **rules: Any) -> Problem:
    return Problem.of(x, w, dtype, **rules)


# -- sizes


def _outputs(size: int, before: int, after: int, k: int, dilation: int, stride: int) -> int:
    """Counted: the filter is laid at every stride while its last tap stays in the padded axis."""
    count, start = 0, 0
    while start + dilation * (k - 1) < size + before + after:
        count += 1
        start += stride
    return count


@pytest.mark.parametrize(("stride", "dilation"), list(itertools.product((1, 2, 3, 7), (1, 2, 3))))
def test_output_sizes_are_those_counted(stride: int, dilation: int) -> None:
    for size, k, before, after in itertools.product(range(1, 8), range(1, 5), range(3), range(3)):
        if size + before + after < dilation * (k - 1) + 1:
            continue
        for other in (True, False):
            # The other axis is kept at one output, so that a mix-up of the axes shows.
            shape = (1, 1, size, 1) if other else (1, 1, 1, size)
            filters = (1, 1, k, 1) if other else (1, 1, 1, k)
            padding = (before, after, 0, 0) if other else (0, 0, before, after)
            axes = (stride, 1) if other else (1, stride)
            dilations = (dilation, 1) if other else (1, dilation)
            p = of(shape, filters, stride=axes, dilation=dilations, padding=padding)
            counted = _outputs(size, before, after, k, dilation, stride)
            assert (p.oh, p.ow) == ((counted, 1) if other else (1, counted))


@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("n", range(8))
def test_named_paddings_give_scipys_sizes(n: int, k: int) -> None:
    assert of((1, 1, n, 9), (1, 1, k, 1), padding="same").oh == n
    assert of((1, 1, n, 9), (1, 1, k, 1), padding="full").oh == max(n + k - 1, 0)
    if n >= k:
        assert of((1, 1, n, 9), (1, 1, k, 1), padding="valid").oh == n - k + 1


@pytest.mark.parametrize("dilation", [1, 2, 3])
@pytest.mark.parametrize("stride", [1, 2, 3, 5])
def test_same_gives_as_many_outputs_as_strides_begin(stride: int, dilation: int) -> None:
    for n, k in itertools.product(range(12), range(1, 6)):
        p = of((1, 1, 4, n), (1, 1, 1, k), padding="same", stride=(1, stride), dilation=(1, dilation))
        assert p.ow == math.ceil(n / stride)
        left, right = p.padding[2:]
        assert right - left in (0, 1)
        if n:
            # No more than what the last output needs.
            assert left + right == max((p.ow - 1) * stride + dilation * (k - 1) + 1 - n, 0)


@pytest.mark.parametrize(
    ("padding", "sides"),
    [
        ("valid", (0, 0, 0, 0)),
        ("same", (1, 1, 0, 1)),
        ("full", (2, 2, 1, 1)),
        (0, (0, 0, 0, 0)),
        (2, (2, 2, 2, 2)),
        ((1, 3), (1, 1, 3, 3)),
        ([1, 3], (1, 1, 3, 3)),
        ((1, 2, 3, 4), (1, 2, 3, 4)),
        (np.array([1, 2, 3, 4]), (1, 2, 3, 4)),
        (np.int64(2), (2, 2, 2, 2)),
        (np.array(2), (2, 2, 2, 2)),
    ],
)
def test_forms_of_padding(padding: Any, sides: tuple[int, ...]) -> None:
    p = of(padding=padding)
    assert p.padding == sides
    assert all(type(i) is int for i in p.padding)


def test_padding_counts_the_dilated_filter() -> None:
    assert of(padding="full", dilation=(2, 3)).padding == (4, 4, 3, 3)
    assert of(padding="same", dilation=(2, 3)).padding == (2, 2, 1, 2)


@pytest.mark.parametrize("name", ["stride", "dilation"])
def test_forms_of_pairs(name: str) -> None:
    assert getattr(of(**{name: 2}), name) == (2, 2)
    assert getattr(of((1, 1, 20, 20), **{name: (2, 3)}), name) == (2, 3)
    assert getattr(of((1, 1, 20, 20), **{name: np.array([2, 3])}), name) == (2, 3)
    assert getattr(of((1, 1, 20, 20), **{name: [np.int8(2), 3]}), name) == (2, 3)


def test_empty_images() -> None:
    # SciPy: (0, 3) * (2, 2) is (1, 4) in full and (0, 3) in same.
    assert of((1, 1, 0, 3), (1, 1, 2, 2), padding="full").out_shape == (1, 1, 1, 4)
    assert of((1, 1, 0, 3), (1, 1, 2, 2), padding="same").out_shape == (1, 1, 0, 3)
    assert of((0, 1, 4, 4), (1, 1, 2, 2)).out_shape == (0, 1, 3, 3)
    assert of((1, 0, 4, 4), (2, 0, 2, 2)).out_shape == (1, 2, 3, 3)
    assert of((1, 1, 4, 4), (0, 1, 2, 2)).out_shape == (1, 0, 3, 3)
    with pytest.raises(ValueError, match="x has no rows"):
        of((1, 1, 0, 3), (1, 1, 2, 2), padding="full", boundary="wrap")
    with pytest.raises(ValueError, match="x has no columns"):
        of((1, 1, 3, 0), (1, 1, 2, 2), padding=(0, 0, 1, 1), boundary="nearest")


def test_derived_quantities() -> None:
    p = Problem.of((2, 6, 8, 9), (4, 3, 3, 2), "uint8", "int16", groups=2, bias_dtype="int8", dtype="int32")
    assert p.x_shape == (2, 6, 8, 9)
    assert p.w_shape == (4, 3, 3, 2)
    assert p.out_shape == (2, 4, 6, 8)
    assert p.terms == 18
    assert p.outputs == 2 * 4 * 6 * 8
    assert p.macs == p.outputs * 18
    assert p.gemm == (2, 2 * 6 * 8, 18)
    assert p.least_bytes == 2 * 6 * 8 * 9 + 2 * 4 * 3 * 3 * 2 + 4 * p.outputs + 4
    assert p.arithmetic_intensity == pytest.approx(2 * p.macs / p.least_bytes)
    assert of((0, 1, 4, 4), (0, 1, 2, 2)).arithmetic_intensity == 0


# -- types


def test_promotion_and_the_sums_type() -> None:
    plain = {
        ("uint8", "int8"): "int16",
        ("int32", "float32"): "float64",
        ("uint64", "int64"): "float64",
        ("uint8", "uint8"): "uint8",
        ("bool", "uint8"): "uint8",
        ("int64", "float32"): "float64",
        ("float32", "complex64"): "complex64",
        ("longdouble", "float32"): np.dtype("longdouble").name,
    }
    for (x, w), expected in plain.items():
        p = Problem.of(X, W, x, w)
        assert p.out_dtype == p.sum_dtype == np.dtype(expected)
        assert p.out_dtype == np.result_type(x, w)


@pytest.mark.parametrize("w", ["float16", "int8", "bool"])
def test_half_sums_in_single(w: str) -> None:
    p = Problem.of(X, W, "float16", w)
    assert (p.sum_dtype, p.out_dtype) == (np.float32, np.float16)


def test_bfloat16_sums_in_single() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="it brings the type")
    for given in ("bfloat16", ml_dtypes.bfloat16):
        p = Problem.of(X, W, given)
        assert (p.sum_dtype, p.out_dtype) == (np.float32, np.dtype(ml_dtypes.bfloat16))
    with pytest.raises(TypeError, match="no common type"):
        Problem.of(X, W, "bfloat16", "float16")


@pytest.mark.parametrize(
    ("x", "w", "dtype", "total"),
    [
        ("uint8", "uint8", "int32", "int32"),
        ("uint8", "int8", "uint8", "int16"),
        ("uint8", "float32", "uint8", "float32"),
        ("uint8", "float64", "uint8", "float64"),
        ("uint8", "uint8", "float32", "float32"),
        ("int32", "int32", "float32", "float64"),
        ("int8", "int8", "float16", "float32"),
        ("float64", "float64", "float16", "float64"),
        ("float32", "float32", "complex64", "complex64"),
        ("int64", "int64", "uint64", "float64"),
        ("bool", "bool", "int8", "int8"),
    ],
)
def test_dtype_joins_the_promotion_and_is_then_converted_to(x: str, w: str, dtype: str, total: str) -> None:
    p = Problem.of(X, W, x, w, dtype=dtype)
    assert p.out_dtype == np.dtype(dtype)
    assert p.sum_dtype == np.dtype(total)


def test_byte_order_is_no_part_of_a_type() -> None:
    swapped = np.dtype("float32").newbyteorder("S")
    assert Problem.of(X, W, swapped, swapped, bias_dtype=swapped, dtype=swapped) == Problem.of(
        X, W, "float32", "float32", bias_dtype="float32", dtype="float32"
    )
    assert Problem.of(X, W, swapped).x_dtype.isnative


def _extreme_sums(x: np.dtype, w: np.dtype, bias: np.dtype | None, terms: int, fill: int) -> tuple[int, int]:
    """The least and the greatest sum that extreme samples, filters and biases make."""

    def ends(dtype: np.dtype) -> list[int]:
        if dtype.kind == "b":
            return [0, 1]
        return [int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)]

    products = [a * b for a in [*ends(x), fill] for b in ends(w)]
    added = ends(bias) if bias is not None else [0]
    return terms * min(products) + min(added), terms * max(products) + max(added)


@pytest.mark.parametrize("overflow", ["saturate", "raise"])
@pytest.mark.parametrize("terms", [1, 2, 9, 1000, 2**20])
def test_integer_sums_that_must_not_wrap_provably_fit(terms: int, overflow: str) -> None:
    kinds = [np.dtype(bool), *INTEGERS]
    held, refused = 0, 0
    for x, w, bias in itertools.product(kinds, kinds, [None, *INTEGERS]):
        if not is_integer(np.result_type(x, w)):
            continue
        low, high = _extreme_sums(x, w, bias, terms, 0)
        fitting = [
            t for t in ("int32", "int64", "uint64") if np.iinfo(t).min <= low and high <= np.iinfo(t).max
        ]
        if fitting:
            total, _ = sum_and_output_types(x, w, None, bias=bias, overflow=overflow, terms=terms)
            assert total == np.dtype(fitting[0])
            held += 1
        else:
            with pytest.raises(Unsupported, match=rf"{terms} products {x} \* {w}"):
                sum_and_output_types(x, w, None, bias=bias, overflow=overflow, terms=terms)
            refused += 1
    assert held
    assert refused


def test_the_fill_value_counts_among_the_samples() -> None:
    # u8 * i16 promotes to i16, so the border may be far below any sample.
    least = int(np.iinfo(np.int16).min)
    low, high = _extreme_sums(np.dtype("u1"), np.dtype("i2"), None, 6, 0)
    assert low >= -(2**31)
    assert high < 2**31
    assert _extreme_sums(np.dtype("u1"), np.dtype("i2"), None, 6, least)[1] >= 2**31
    assert Problem.of(X, W, "uint8", "int16", padding=1, overflow="saturate").sum_dtype == np.int32
    p = Problem.of(X, W, "uint8", "int16", padding=1, overflow="saturate", fillvalue=least)
    assert p.sum_dtype == np.int64


def test_no_integer_type_may_hold_the_sum() -> None:
    with pytest.raises(Unsupported, match=r"sums of 6 products int64 \* int64 may exceed 64 bits"):
        Problem.of(X, W, "int64", overflow="saturate")
    with pytest.raises(Unsupported, match="with a bias of type int64"):
        Problem.of(X, W, "uint32", bias_dtype="int64", overflow="raise")
    assert Problem.of(X, (1, 1, 1, 1), "uint32", overflow="raise").sum_dtype == np.uint64
    # With wrap the sum is modulo, so any type will do.
    assert Problem.of(X, W, "int64").sum_dtype == np.int64


def test_saturation_of_float_sums_needs_no_integer_type() -> None:
    p = Problem.of(X, W, "int64", "float32", dtype="uint8", overflow="saturate")
    assert (p.sum_dtype, p.out_dtype) == (np.float64, np.uint8)


@pytest.mark.parametrize("bias", ["int8", "int64", "float16", "float64"])
def test_bias_is_no_part_of_the_promotion(bias: str) -> None:
    p = Problem.of(X, W, "float32", bias_dtype=bias)
    assert (p.sum_dtype, p.out_dtype, p.bias_dtype) == (np.float32, np.float32, np.dtype(bias))


@pytest.mark.parametrize(
    ("x", "bias"), [("uint8", "float32"), ("uint8", "int8"), ("float32", "complex64"), ("int16", "float16")]
)
def test_bias_keeps_its_kind(x: str, bias: str) -> None:
    with pytest.raises(TypeError, match=f"bias is {bias}.* without changing its kind"):
        Problem.of(X, W, x, bias_dtype=bias)


# -- fill values


@pytest.mark.parametrize("value", [0, 1, 1.7, -0.5, 255, 255.9, True, np.float32(2.5), np.int8(3), [4]])
def test_fill_values_are_cast_as_scipy_casts_them(value: Any) -> None:
    signal = pytest.importorskip("scipy.signal", reason="the fill values are compared with SciPy's")
    for dtype in ("uint8", "int16", "float32", "float64", "complex64"):
        image, one = np.zeros((2, 2), dtype), np.ones((1, 1), dtype)
        corner = np.zeros((2, 2), dtype)
        corner[0, 0] = 1
        # Full, so that the top left sample of the result is the border's alone.
        theirs = signal.correlate2d(image, corner, "full", "fill", value)[0, 0]
        ours = fill_argument(value, np.result_type(image, one))
        assert ours.dtype == np.dtype(dtype)
        assert ours == theirs


@pytest.mark.filterwarnings("ignore::numpy.exceptions.ComplexWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("value", [-1, 300, 256, np.nan, np.inf, 1 + 2j, 1 + 0j, 10**30])
def test_fill_values_that_scipy_rejects(value: Any) -> None:
    signal = pytest.importorskip("scipy.signal", reason="the fill values are compared with SciPy's")
    image = np.zeros((2, 2), np.uint8)
    with pytest.raises(ValueError, match="fillvalue"):
        signal.correlate2d(image, image, "full", "fill", value)
    with pytest.raises(ValueError, match="fillvalue"):
        fill_argument(value, np.dtype(np.uint8))


def test_fill_values_keep_what_floats_hold() -> None:
    single = np.dtype(np.float32)
    assert math.isnan(fill_argument(math.nan, single))
    assert fill_argument(-math.inf, single) == -math.inf
    assert np.signbit(fill_argument(-0.0, single))
    assert fill_argument(1e300, single) == math.inf
    assert fill_argument(10**30, single) == np.float32(1e30)
    assert fill_argument(1 + 2j, np.dtype(np.complex64)) == np.complex64(1 + 2j)
    with pytest.raises(ValueError, match="fillvalue must fit float32"):
        fill_argument(10**400, single)


@pytest.mark.parametrize("value", ["3", None, object(), b"1"])
def test_fill_values_must_be_numbers(value: Any) -> None:
    with pytest.raises(TypeError, match="fillvalue must be a number"):
        fill_argument(value, np.dtype(np.float32))


def test_fill_values_must_be_single() -> None:
    with pytest.raises(ValueError, match=r"fillvalue must be one number, not an array of shape \(2,\)"):
        fill_argument([1, 2], np.dtype(np.float32))


def test_the_fill_value_has_the_type_of_image_and_filter_not_of_dtype() -> None:
    p = Problem.of(X, W, "uint8", padding=1, fillvalue=1.7, dtype="float32")
    assert p.fillvalue == 1
    assert p.fillvalue.dtype == np.uint8
    with pytest.raises(ValueError, match="0 to 255"):
        Problem.of(X, W, "uint8", padding=1, fillvalue=-1, dtype="float32")


def test_other_boundaries_have_no_fill_value() -> None:
    assert of(boundary="wrap", padding=1, fillvalue=3) == of(boundary="wrap", padding=1)


# -- equality


def test_equality_tells_nan_and_negative_zero_apart() -> None:
    def filled(value: float) -> Problem:
        return of(padding=1, fillvalue=value)

    assert filled(math.nan) == filled(float("nan"))
    assert hash(filled(math.nan)) == hash(filled(float("nan")))
    assert filled(0.0) != filled(-0.0)
    assert filled(0.0) == filled(0)
    assert hash(filled(0.0)) == hash(filled(0))
    assert filled(1.0) != filled(math.nan)
    assert len({filled(v) for v in (0.0, -0.0, math.nan, math.nan, math.inf)}) == 4


def test_equality_sees_every_rule() -> None:
    base = Problem.of((1, 4, 9, 9), (4, 4, 2, 2), "int16")
    other = [
        {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"boundary": "wrap"}, {"fillvalue": 1},
        {"flip": True}, {"dtype": "int32"}, {"overflow": "saturate"}, {"accuracy": "elementwise"},
        {"bias_dtype": "int16"},
    ]  # fmt: skip
    changed = [Problem.of((1, 4, 9, 9), (4, 4, 2, 2), "int16", **rules) for rules in other]
    changed += [
        Problem.of((2, 4, 9, 9), (4, 4, 2, 2), "int16"),
        Problem.of((1, 4, 9, 9), (4, 2, 2, 2), "int16", groups=2),
        Problem.of((1, 4, 9, 9), (4, 4, 2, 2), "int16", "uint8"),
    ]
    assert len({base, *changed}) == len(changed) + 1
    again = Problem.of((1, 4, 9, 9), (4, 4, 2, 2), "int16", stride=(1, 1), padding=(0, 0, 0, 0))
    assert again == base
    assert hash(again) == hash(base)


def test_problems_are_frozen_and_travel() -> None:
    p = of(padding=1, fillvalue=math.nan)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.n = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(p)) == p
    assert dataclasses.replace(p, flip=True).flip


def test_the_written_form_says_what_differs_from_the_plain_case() -> None:
    assert (
        str(of())
        == "cross-correlation of x(1, 1, 5, 6) float32 with w(1, 1, 3, 2) float32 -> (1, 1, 3, 5) float32, sums in float32"
    )
    text = str(
        Problem.of(
            (1, 4, 9, 9), (4, 2, 2, 2), "uint8", groups=2, stride=(1, 2), dilation=2, padding=(0, 1, 2, 3),
            fillvalue=7, flip=True, bias_dtype="uint8", overflow="saturate", accuracy=1e-3,
        )
    )  # fmt: skip
    for part in (
        "convolution of", "bias uint8", "stride 1x2", "dilation 2x2", "2 groups",
        "(top, bottom, left, right) = (0, 1, 2, 3)", "boundary fill with 7", "overflow saturate", "accuracy 0.001",
    ):  # fmt: skip
        assert part in text


# -- errors


@pytest.mark.parametrize(
    ("arguments", "rules", "error", "words"),
    [
        (((1, 5, 6), W), {}, ValueError, r"x must have four axes here, not shape \(1, 5, 6\)"),
        ((X, (3, 2)), {}, ValueError, r"w must have four axes here, not shape \(3, 2\)"),
        (((1, 1, -5, 6), W), {}, ValueError, "each axis of x must be at least 0, not -5"),
        (((1, 1, 5.0, 6), W), {}, TypeError, "each axis of x must be an integer, not 5.0"),
        ((X, (1, 1, 0, 2)), {}, ValueError, "w must have at least one row and one column, not 0 x 2"),
        ((X, (1, 1, 2, 0)), {}, ValueError, "w must have at least one row and one column, not 2 x 0"),
        ((X, (1, 2, 3, 2)), {}, ValueError, "w must have C/groups = 1/1 = 1 input channels .* not 2"),
        (((1, 3, 5, 6), (2, 1, 3, 2)), {"groups": 2}, ValueError, r"groups must divide the channels of x \(3\)"),
        (((1, 2, 5, 6), (3, 1, 3, 2)), {"groups": 2}, ValueError, r"output channels of w \(3\), and 2 doesn't"),
        ((X, W), {"groups": 0}, ValueError, "groups must be at least 1, not 0"),
        ((X, W), {"groups": True}, TypeError, "groups must be an integer, not True"),
        ((X, W), {"stride": 0}, ValueError, "stride must be at least 1, not 0"),
        ((X, W), {"stride": 1.5}, TypeError, "stride must be an integer or a pair .* not 1.5"),
        ((X, W), {"stride": "2"}, TypeError, "stride must be an integer or a pair .* not '2'"),
        ((X, W), {"stride": (1, 2, 3)}, ValueError, r"stride must be an integer or a pair .* not \(1, 2, 3\)"),
        ((X, W), {"stride": (1, -2)}, ValueError, "each stride must be at least 1, not -2"),
        ((X, W), {"stride": {1, 2}}, TypeError, "stride must be"),
        ((X, W), {"dilation": (0, 1)}, ValueError, "each dilation must be at least 1, not 0"),
        ((X, W), {"dilation": None}, TypeError, "dilation must be an integer or a pair .* not None"),
        ((X, W), {"stride": LARGEST + 1}, ValueError, f"stride must be at most {LARGEST}"),
        ((X, W), {"padding": "SAME"}, ValueError, "padding must be 'valid', 'same', 'full', .* not 'SAME'"),
        ((X, W), {"padding": -1}, ValueError, "padding must be at least 0, not -1"),
        ((X, W), {"padding": (1, -2)}, ValueError, "padding.* must be at least 0, not -2"),
        ((X, W), {"padding": (1, 2, 3)}, ValueError, r"padding must be .* not \(1, 2, 3\)"),
        ((X, W), {"padding": 1.0}, TypeError, "padding must be .* not 1.0"),
        ((X, W), {"padding": True}, TypeError, "padding must be an integer, not True"),
        ((X, W), {"padding": LARGEST_PADDING + 1}, ValueError, f"padding may be {LARGEST_PADDING} on a side"),
        ((X, W), {"boundary": "reflect"}, ValueError, "'reflect' means two things: say 'symm' .* or 'mirror'"),
        ((X, W), {"boundary": "pad"}, ValueError, "boundary must be one of fill, wrap, symm, mirror, nearest, not 'pad'"),
        ((X, W), {"boundary": 1}, ValueError, "boundary must be one of .* not 1"),
        ((X, W), {"flip": 1}, TypeError, "flip must be True or False, not 1"),
        ((X, W), {"overflow": "clip"}, ValueError, "overflow must be one of wrap, saturate, raise, not 'clip'"),
        ((X, W), {"overflow": None}, ValueError, "overflow must be one of"),
        ((X, W), {"accuracy": "high"}, ValueError, "accuracy must be None, 'elementwise', 'normwise' or a positive"),
        ((X, W), {"accuracy": 0}, ValueError, "accuracy must be"),
        ((X, W), {"accuracy": -1e-3}, ValueError, "accuracy must be"),
        ((X, W), {"accuracy": math.nan}, ValueError, "accuracy must be"),
        ((X, W), {"accuracy": math.inf}, ValueError, "accuracy must be"),
        ((X, W), {"accuracy": True}, ValueError, "accuracy must be"),
        ((X, (1, 1, 6, 2)), {}, ValueError, "its rows span 6 with dilation, x has 5 and padding adds 0"),
        ((X, (1, 1, 3, 2)), {"dilation": (1, 6)}, ValueError, "its columns span 7 with dilation, x has 6"),
        ((X, (1, 1, 9, 2)), {"padding": np.array([1, 0])}, ValueError, "its rows span 9 .* padding adds 2"),
        (((2**20, 1, 2**15, 2**15), W), {}, ValueError, f"more than {LARGEST} elements"),
        (((0, 2**30, 2**15, 2**15), (1, 2**30, 1, 1)), {}, ValueError, f"more than {LARGEST} elements"),
    ],
)  # fmt: skip
def test_errors_name_the_argument_what_was_given_and_what_is_allowed(
    arguments: tuple[Any, Any], rules: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Problem.of(*arguments, "float32", **rules)


@pytest.mark.parametrize(
    ("dtypes", "rules", "words"),
    [
        (("datetime64[s]",), {}, "x must be bool, an integer, floating point or complex, not datetime64"),
        (("float32", "object"), {}, "w must be bool, .* not object"),
        (("float32", "S3"), {}, "w must be bool"),
        (("nonsense",), {}, "x must be a NumPy dtype, not 'nonsense'"),
        (("float32",), {"bias_dtype": "U4"}, "bias must be bool"),
        (("float32",), {"dtype": "V8"}, "dtype must be bool"),
        (("bool",), {}, "the result would be bool, which has no sum; ask for another type with dtype="),
        (("float32",), {"dtype": "bool"}, "the result would be bool"),
        (("complex64",), {"dtype": "float32"}, "dtype is float32, but the sum is complex64"),
        (("complex64",), {"dtype": "int8"}, "a complex sum needs a complex dtype"),
    ],
)
def test_errors_of_types(dtypes: tuple[str, ...], rules: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Problem.of(X, W, *dtypes, **rules)


def test_kinds_of_types() -> None:
    assert [is_integer(np.dtype(t)) for t in "?bBhHiIlLqQefdgFD"] == [False] + [True] * 10 + [False] * 6
    assert [is_float(np.dtype(t)) for t in "?befdgFD"] == [False, False, True, True, True, True, False, False]


@pytest.mark.parametrize("accuracy", [None, "elementwise", "normwise", 1e-3, 1, np.float32(0.5)])
def test_accuracies(accuracy: Any) -> None:
    kept = of(accuracy=accuracy).accuracy
    assert kept == accuracy
    assert kept is None or isinstance(kept, (str, float))
