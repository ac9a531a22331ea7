"""The oracle and its bounds, against sums written out, scipy.ndimage, SciPy's own modes, and PyTorch."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the oracle is SciPy: pip install 'convpar[test]'")
pytest.importorskip("hypothesis", reason="problems are drawn by Hypothesis: pip install 'convpar[test]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage, signal

from convpar.backend import ErrorContract
from convpar.conformance import Case, error_bounds, oracle, strategies
from convpar.conformance.case import DATA
from convpar.conformance.memory import GUARD, NAN_BYTE, OTHER_BYTE, Buffer, Memory, Place
from convpar.problem import Problem, is_integer

Array = np.ndarray[Any, Any]

RNG = np.random.default_rng(20)


def whole(shape: tuple[int, ...], dtype: Any = np.float64) -> Array:
    """Small integers: any order of summation gives the same."""
    return RNG.integers(-5, 6, shape).astype(dtype)


def problem(x: Array, w: Array, bias: Array | None = None, **rules: Any) -> Problem:
    return Problem.of(
        x.shape, w.shape, x.dtype, w.dtype, bias_dtype=None if bias is None else bias.dtype, **rules
    )


def answer(x: Array, w: Array, bias: Array | None = None, **rules: Any) -> Array:
    return oracle.answer(problem(x, w, bias, **rules), x, w, bias)


# -- against the definition, written out


def sample(x: Array, p: Problem, n: int, c: int, i: int, j: int) -> Any:
    """The sample seen at (i, j), which may lie outside, by walking there one step at a time."""

    def walk(position: int, size: int) -> int | None:
        if 0 <= position < size:
            return position
        if p.boundary == "fill":
            return None
        if p.boundary == "nearest":
            return 0 if position < 0 else size - 1
        if p.boundary == "wrap":
            return walk(position + size if position < 0 else position - size, size)
        if p.boundary == "mirror" and size == 1:
            return 0
        edge = 0 if p.boundary == "mirror" else 1
        return walk(-position - edge if position < 0 else 2 * (size - 1) - position + edge, size)

    row, column = walk(i, p.h), walk(j, p.w)
    return p.fillvalue if row is None or column is None else x[n, c, row, column]


def written_out(p: Problem, x: Array, w: Array, bias: Array | None, number: Any) -> Array:
    """The sums of the definition in `Problem`'s docstring, each operand first made a `number`."""
    y = np.empty(p.out_shape, object)
    turned = w[:, :, ::-1, ::-1] if p.flip else w
    cg = p.c // p.groups
    for n, o, i, j in np.ndindex(p.out_shape):
        group = o // (p.oc // p.groups)
        total = number(0) if bias is None else number(bias[o])
        for c, k, m in np.ndindex(cg, p.kh, p.kw):
            row = i * p.stride[0] - p.padding[0] + k * p.dilation[0]
            column = j * p.stride[1] - p.padding[2] + m * p.dilation[1]
            total += number(sample(x, p, n, group * cg + c, row, column)) * number(turned[o, c, k, m])
        y[n, o, i, j] = total
    return y


def _small(*kinds: str) -> st.SearchStrategy[Case]:
    """Cases of at most some hundred products, any types."""
    style = strategies.Style(data=kinds)
    return strategies.cases(strategies.EVERYTHING, {}, style).filter(lambda case: case.problem.macs <= 1500)


drawn = settings(max_examples=150, deadline=None, database=None, derandomize=True)


@drawn
@given(_small("sparse", "uniform", "extremes"))
def test_integers_are_the_sums_written_out(case: Case) -> None:
    p = case.problem
    if not is_integer(p.sum_dtype):
        return
    x, w, bias = case.arrays("cpu").operands()
    bits = np.iinfo(p.sum_dtype).bits
    exact = written_out(p, x, w, bias, int)
    found = oracle.integer_sums(p, x, w, bias)
    if p.overflow == "wrap":
        assert not ((exact - found.astype(object)) % 2**bits).any()
    else:
        # The sum's type holds every sum.
        assert (exact == found.astype(object)).all()


@drawn
@given(_small("sparse", "uniform", "wide", "bright", "subnormal"))
def test_exact_sums_are_the_fractions_written_out(case: Case) -> None:
    p = case.problem
    if p.sum_dtype != np.float64:
        return
    x, w, bias = case.arrays("cpu").operands()
    given_ = oracle.operands(p, x, w, bias)
    sums, exponent = oracle.exact_sums(p, [(1, given_.x, given_.w)], given_.bias)
    scale = Fraction(2) ** exponent
    exact = written_out(p, x, w, bias, lambda v: Fraction(float(v)))
    assert all(int(s) * scale == e for s, e in zip(sums.flat, exact.flat, strict=True))


@drawn
@given(_small("sparse", "inf", "nan", "inf and nan"))
def test_floats_are_ieee_sums_written_out(case: Case) -> None:
    p = case.problem
    if p.sum_dtype.kind != "f" or p.overflow == "raise":
        return
    x, w, bias = case.arrays("cpu").operands()
    with np.errstate(all="ignore"):
        sums = written_out(p, x, w, bias, np.float64).astype(np.float64)
        # NumPy compares no NaN of bfloat16.
        found, right = (y.astype(np.float64) for y in (oracle.answer(p, x, w, bias), oracle.convert(p, sums)))
        np.testing.assert_array_equal(found, right)


def test_complex_products_are_four_real_ones() -> None:
    x = np.array([complex(np.inf, 0), 2 + 1j, 1 - 1j]).reshape(1, 1, 1, 3)
    w = np.array([1 + 0j, 3 - 2j]).reshape(1, 1, 1, 2)
    y = answer(x, w)[0, 0, 0]
    assert y[0].real == np.inf
    assert math.isnan(y[0].imag)
    assert y[1] == (2 + 1j) * 1 + (1 - 1j) * (3 - 2j)  # never conjugated


# -- against SciPy's own modes


@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm"])
@pytest.mark.parametrize("mode", ["full", "same", "valid"])
@pytest.mark.parametrize("flip", [False, True])
def test_scipys_modes(mode: str, boundary: str, flip: bool) -> None:
    function = signal.convolve2d if flip else signal.correlate2d
    for size in [(5, 6), (3, 4), (7, 3)]:
        for k in [(3, 3), (2, 3), (1, 1), (3, 2)]:
            x, w = whole((1, 1, *size)), whole((1, 1, *k))
            theirs = function(x[0, 0], w[0, 0], mode, boundary, 2.0)
            # SciPy centres "same" its own way for even sizes.
            centred = [((i - 1) // 2, i // 2) for i in k]
            if flip:
                centred = [(after, before) for before, after in centred]
            padding: Any = sum(centred, ()) if mode == "same" else mode
            ours = answer(x, w, padding=padding, boundary=boundary, fillvalue=2.0, flip=flip)
            np.testing.assert_array_equal(ours[0, 0], theirs)


@pytest.mark.parametrize(
    "dtypes",
    [("u1", "u1"), ("i8", "i8"), ("u1", "i1"), ("i4", "f4"), ("f4", "f4"), ("u8", "i8"), ("c8", "f8")],
)
def test_scipys_types(dtypes: tuple[str, str]) -> None:
    x, w = (RNG.integers(0, 200, (1, 1, n, n)).astype(t) for n, t in zip((6, 3), dtypes, strict=True))
    theirs = signal.correlate2d(x[0, 0], w[0, 0], "valid")
    ours = answer(x, w)
    assert ours.dtype == theirs.dtype
    np.testing.assert_array_equal(ours[0, 0], theirs)


def test_nothing_empty_reaches_scipy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("SciPy was called")

    monkeypatch.setattr(signal, "convolve2d", refuse)
    for x, w, rules in [
        ((1, 1, 0, 3), (1, 1, 2, 2), {"padding": "same"}),
        ((0, 2, 4, 4), (3, 2, 2, 2), {"padding": 1, "boundary": "wrap"}),
        ((2, 0, 4, 4), (3, 0, 2, 2), {"padding": 1, "boundary": "symm"}),
        ((2, 1, 4, 4), (0, 1, 2, 2), {}),
    ]:
        y = answer(np.zeros(x), np.zeros(w), **rules)
        assert not y.any()
    bias = np.array([1.5, -2.0, 0.25])
    y = answer(np.zeros((2, 0, 4, 4)), np.zeros((3, 0, 2, 2)), bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias[None, :, None, None], (2, 3, 3, 3)))


# -- against scipy.ndimage, which has mirror and nearest


@pytest.mark.parametrize(
    ("boundary", "mode"),
    [
        ("fill", "constant"),
        ("wrap", "grid-wrap"),
        ("symm", "reflect"),
        ("mirror", "mirror"),
        ("nearest", "nearest"),
    ],
)
@pytest.mark.parametrize("flip", [False, True])
def test_ndimage(boundary: str, mode: str, flip: bool) -> None:
    for size in [(6, 7), (4, 1), (2, 3), (1, 1)]:
        for k in [(3, 3), (5, 3), (1, 7), (7, 7)]:
            x, w = whole((1, 1, *size)), whole((1, 1, *k))
            function = ndimage.convolve if flip else ndimage.correlate
            theirs = function(x[0, 0], w[0, 0], mode=mode, cval=3.0)
            ours = answer(x, w, padding="same", boundary=boundary, fillvalue=3.0, flip=flip)
            np.testing.assert_array_equal(ours[0, 0], theirs)


# -- against PyTorch, which has stride, dilation, groups and channels


@pytest.mark.parametrize("stride", [1, 2, (1, 3)])
@pytest.mark.parametrize("dilation", [1, 2, (3, 1)])
@pytest.mark.parametrize("groups", [1, 2])
def test_torch(stride: Any, dilation: Any, groups: int) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch isn't installed; it is compared where it is")
    x, w, bias = whole((2, 4, 11, 12)), whole((6, 4 // groups, 3, 2)), whole((6,))
    theirs = torch.nn.functional.conv2d(
        *map(torch.from_numpy, (x, w, bias)), stride=stride, padding=(2, 1), dilation=dilation, groups=groups
    )
    ours = answer(x, w, bias, stride=stride, padding=(2, 1), dilation=dilation, groups=groups)
    np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.parametrize(
    ("boundary", "mode"), [("wrap", "circular"), ("mirror", "reflect"), ("nearest", "replicate")]
)
def test_torchs_borders(boundary: str, mode: str) -> None:
    torch = pytest.importorskip("torch", reason="PyTorch isn't installed; it is compared where it is")
    x, w = whole((2, 3, 6, 5)), whole((2, 3, 3, 3))
    # torch.nn.functional.pad names the last axis first.
    padded = torch.nn.functional.pad(torch.from_numpy(x), (1, 3, 2, 0), mode=mode)
    theirs = torch.nn.functional.conv2d(padded, torch.from_numpy(w), stride=(2, 1))
    ours = answer(x, w, padding=(2, 0, 1, 3), boundary=boundary, stride=(2, 1))
    np.testing.assert_array_equal(ours, theirs.numpy())


@pytest.mark.filterwarnings("ignore:Using padding='same'")
def test_torchs_same() -> None:
    torch = pytest.importorskip("torch", reason="PyTorch isn't installed; it is compared where it is")
    x, w = whole((1, 2, 8, 9)), whole((3, 2, 4, 5))
    for dilation in (1, 2):
        theirs = torch.nn.functional.conv2d(
            torch.from_numpy(x), torch.from_numpy(w), padding="same", dilation=dilation
        )
        np.testing.assert_array_equal(answer(x, w, padding="same", dilation=dilation), theirs.numpy())


# -- conversion


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
@pytest.mark.parametrize("source", ["float32", "float64"])
def test_floats_become_integers_half_to_even_and_saturate(dtype: str, source: str) -> None:
    limits = np.iinfo(dtype)
    values = [0.0, 0.5, 1.5, 2.5, -0.5, -1.5, 3.49, -3.51, 1e30, -1e30, math.inf, -math.inf, 127.5, 255.5]
    values += [float(limits.max), float(limits.min), 2.0**62, 2.0**63, 2.0**64, -(2.0**63)]
    sums = np.array(values, source)
    y, outside = oracle.clip(sums, np.dtype(dtype))
    for value, got, out in zip(sums.tolist(), y.tolist(), outside.tolist(), strict=True):
        rounded = round(value) if math.isfinite(value) else (10**40 if value > 0 else -(10**40))
        assert got == min(max(rounded, int(limits.min)), int(limits.max))
        assert out == (not limits.min <= rounded <= limits.max)
    y, outside = oracle.clip(np.array([math.nan], source), np.dtype(dtype))
    assert (y.tolist(), outside.tolist()) == ([0], [True])


def test_integers_wrap_clip_or_raise() -> None:
    x, w = np.full((1, 1, 2, 3), 200, np.uint8), np.full((1, 1, 2, 2), 1, np.uint8)
    assert answer(x, w).tolist() == [[[[800 % 256] * 2]]]
    assert answer(x, w, overflow="saturate").tolist() == [[[[255] * 2]]]
    x[..., 0] = 10
    with pytest.raises(OverflowError, match=r"\(0, 0, 0, 0\)"):
        answer(x, w, overflow="raise")
    x[..., 1] = 10
    with pytest.raises(OverflowError, match=r"\(0, 0, 0, 1\)"):
        answer(x, w, overflow="raise")
    x[...] = 60
    assert answer(x, w, overflow="raise").tolist() == [[[[240] * 2]]]


# -- the bounds


def interval(
    x: Array,
    w: Array,
    bias: Array | None = None,
    contract: ErrorContract | None = None,
    exact: bool = False,
    **rules: Any,
) -> tuple[Problem, error_bounds.Expected]:
    p = problem(x, w, bias, **rules)
    return p, error_bounds.expected(p, contract or ErrorContract(), x, w, bias, exact=exact)


UNIT = {"float32": Fraction(1, 2**24), "float64": Fraction(1, 2**53)}
TINY = {"float32": Fraction(1, 2**149), "float64": Fraction(1, 2**1074)}


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("data", ["uniform", "wide", "bright", "cancelling", "subnormal"])
def test_the_elementwise_bound_ends_where_the_spec_says(dtype: str, data: str) -> None:
    rng = np.random.default_rng(5)
    shapes = {"x": (1, 2, 5, 6), "w": (2, 2, 3, 2), "bias": (2,)}
    x, w, bias = (DATA[data](rng, shape, np.dtype(dtype), role) for role, shape in shapes.items())
    p, right = interval(x, w, bias, padding=1)

    def fraction(v: Any) -> Fraction:
        return Fraction(float(v))

    sums = written_out(p, x, w, bias, fraction)
    sizes = written_out(p, abs(x), abs(w), abs(bias), fraction)
    allowed = (p.terms + 2) * UNIT[dtype] * sizes + p.terms * TINY[dtype]
    for place in np.ndindex(p.out_shape):
        for side in (-1, 1):
            end = sums[place] + side * allowed[place]
            # The outermost number of the output type inside the bound, and its neighbour outside.
            number = np.dtype(dtype).type(float(end))
            away, back = np.dtype(dtype).type(side * math.inf), np.dtype(dtype).type(-side * math.inf)
            while (Fraction(float(number)) - end) * side > 0:
                number = np.nextafter(number, back)
            while (Fraction(float(np.nextafter(number, away))) - end) * side <= 0:
                number = np.nextafter(number, away)
            y = np.array([[float(s) for s in sums.flat]], dtype).reshape(p.out_shape)
            y[place] = number
            assert error_bounds.mismatch(p, right, y) is None
            y[place] = np.nextafter(number, away)
            # The sizes are summed in float64, so the last step may take one number more.
            y[place] = np.nextafter(y[place], away)
            message = error_bounds.mismatch(p, right, y)
            assert message is not None
            assert str(place) in message


def test_the_normwise_bound_is_the_planes_largest() -> None:
    x = np.full((2, 1, 4, 4), 1e-3, np.float32)
    x[0, 0, 0, 0] = 1e6
    w = np.full((2, 1, 1, 1), 1, np.float32)
    w[1] = 0.5
    p, right = interval(x, w, contract=ErrorContract("normwise", factor=2.0))
    room = (right.high[0] - right.low[0]) / 2
    largest = np.array([[1e6, 5e5], [1e-3, 5e-4]])[:, :, None, None]
    np.testing.assert_allclose(room, np.broadcast_to(2 * 3 * 2.0**-24 * largest, p.out_shape), rtol=1e-6)
    _, elementwise = interval(x, w)
    assert (elementwise.high[0] - elementwise.low[0])[0, 0, 3, 3] < 1e-9


def test_a_number_as_accuracy_is_relative_to_the_planes_largest() -> None:
    x = np.array([[1.0, 100.0, 1.0]], np.float32).reshape(1, 1, 1, 3)
    w = np.ones((1, 1, 1, 1), np.float32)
    contract = ErrorContract("normwise", factor=1e9)
    _, right = interval(x, w, contract=contract, accuracy=1e-3)
    np.testing.assert_allclose((right.high[0] - right.low[0]).ravel() / 2, 1e-3 * 100, rtol=1e-6)


def test_exact_data_leave_no_room() -> None:
    x, w = whole((1, 3, 6, 6), np.float32), whole((2, 3, 3, 3), np.float32)
    p, right = interval(x, w, exact=True)
    np.testing.assert_array_equal(right.low[0], right.high[0])
    np.testing.assert_array_equal(right.low[0], oracle.answer(p, x, w))
    # A sum that needs more bits than the type has is rounded in some order or other.
    _, right = interval(x * np.float32(2**20) + 1, w, exact=True)
    assert (right.low[0] < right.high[0]).any()
    # A normwise contract promises nothing of the kind.
    _, right = interval(x, w, exact=True, contract=ErrorContract("normwise"))
    assert (right.low[0] < right.high[0]).all()


def test_narrow_results_are_rounded_ends() -> None:
    x, w = np.full((1, 1, 1, 2), 1, np.float32), np.full((1, 1, 1, 1), 1 + 2.0**-11, np.float32)
    p, right = interval(x, w, dtype="float16")
    # 1 + 2**-11 lies midway between two halves: the interval admits both.
    assert (right.low[0][0, 0, 0, 0], right.high[0][0, 0, 0, 0]) == (np.float16(1), np.float16(1 + 2.0**-10))
    assert right.low[0].dtype == np.float16
    for wrong in (np.float16(1) - np.float16(2**-11), np.float16(1 + 2.0**-9)):
        assert error_bounds.mismatch(p, right, np.full(p.out_shape, wrong)) is not None


def test_integer_results_are_any_rounding_of_the_interval() -> None:
    x = np.array([0.5, 0.25, 300.0, -5.0], np.float32).reshape(1, 1, 1, 4)
    w = np.ones((1, 1, 1, 1), np.float32)
    _, right = interval(x, w, dtype="uint8")
    assert right.low[0].ravel().tolist() == [0, 0, 255, 0]
    assert right.high[0].ravel().tolist() == [1, 0, 255, 0]
    _, right = interval(x, w, dtype="uint8", overflow="raise")
    assert right.must_raise.ravel().tolist() == [False, False, True, True]
    x[0, 0, 0, 0] = 255.5
    _p, right = interval(x, w, dtype="uint8", overflow="raise")
    # 255.5 may round to 255 or, by an error that is allowed, to 256.
    assert (right.must_raise.ravel()[0], right.may_raise.ravel()[0]) == (False, True)


def test_special_values_where_they_belong_and_nowhere_else() -> None:
    x = np.zeros((1, 1, 1, 7), np.float32)
    x[..., 1], x[..., 4] = np.inf, np.nan
    w = np.array([1, 0], np.float32).reshape(1, 1, 1, 2)
    p, right = interval(x, w)
    # inf * 0 and anything with NaN is NaN; inf * 1 + 0 * 0 is inf.
    assert right.nan[0].ravel().tolist() == [True, False, False, True, True, False]
    y = np.array([np.nan, np.inf, 0, np.nan, np.nan, 0], np.float32).reshape(p.out_shape)
    assert error_bounds.mismatch(p, right, y) is None
    for place, wrong in [(0, 0.0), (0, np.inf), (1, -np.inf), (1, np.nan), (2, np.nan), (5, np.inf)]:
        z = y.copy()
        z[0, 0, 0, place] = wrong
        assert error_bounds.mismatch(p, right, z) is not None


def test_nothing_is_promised_where_the_sizes_overflow() -> None:
    largest = np.finfo(np.float32).max
    x = np.array([largest, largest / 2, 1.0], np.float32).reshape(1, 1, 1, 3)
    w = np.array([1, -1], np.float32).reshape(1, 1, 1, 2)
    p, right = interval(x, w)
    assert right.free[0].ravel().tolist() == [True, False]
    for anything in (0.0, np.inf, np.nan):
        y = np.array([anything, largest / 2], np.float32).reshape(p.out_shape)
        assert error_bounds.mismatch(p, right, y) is None


def test_flushed_subnormals_are_allowed_only_where_declared() -> None:
    x, w = np.full((1, 1, 1, 1), 1e-40, np.float32), np.full((1, 1, 1, 1), 1000, np.float32)
    exact = np.float32(1e-40) * np.float32(1000)
    for contract, zero_is_right in [(ErrorContract(), False), (ErrorContract(flushes_subnormals=True), True)]:
        p, right = interval(x, w, contract=contract)
        assert error_bounds.mismatch(p, right, np.full(p.out_shape, exact, np.float32)) is None
        wrong = error_bounds.mismatch(p, right, np.zeros(p.out_shape, np.float32))
        assert (wrong is None) == zero_is_right


def test_sums_kept_in_a_narrow_type() -> None:
    x = np.array([1.0, 7e4, 2.0], np.float32).reshape(1, 1, 1, 3)
    w = np.full((1, 1, 1, 1), 0.1, np.float32)
    p, right = interval(x, w, contract=ErrorContract(sum_dtype="float16"))
    # 7e4 * 0.1 would do, but 7e4 is no half.
    assert right.free[0].ravel().tolist() == [False, True, False]
    with np.errstate(over="ignore"):
        y = (x.astype(np.float16) * w.astype(np.float16)).astype(np.float32)
    assert error_bounds.mismatch(p, right, y) is None
    p, right = interval(x, w)
    assert error_bounds.mismatch(p, right, y) is not None


def test_complex_components_have_bounds_of_their_own() -> None:
    x = np.array([[1e6 + 1e-3j]], np.complex64).reshape(1, 1, 1, 1)
    w = np.ones((1, 1, 1, 1), np.complex64)
    p, right = interval(x, w)
    y = np.array(x, np.complex64)
    assert error_bounds.mismatch(p, right, y) is None
    assert error_bounds.mismatch(p, right, y + np.complex64(0.1j)) is not None
    assert error_bounds.mismatch(p, right, y + np.complex64(0.1)) is None


def test_a_result_of_the_wrong_type_or_shape_is_wrong() -> None:
    x, w = whole((1, 1, 4, 4), np.float32), whole((1, 1, 2, 2), np.float32)
    p, right = interval(x, w)
    y = oracle.answer(p, x, w)
    assert "float64" in str(error_bounds.mismatch(p, right, y.astype(np.float64)))
    assert "(1, 1, 3, 2)" in str(error_bounds.mismatch(p, right, y[..., :2]))
    assert error_bounds.mismatch(p, right, y.astype(y.dtype.newbyteorder("S"))) is None


# -- arrays


@drawn
@given(strategies.cases(strategies.EVERYTHING, {}, strategies.Style(layouts=True)))
def test_arrays_hold_their_values_wherever_they_lie(case: Case) -> None:
    plain = Case(
        **{
            **{f: getattr(case, f) for f in case.__dataclass_fields__},
            **dict.fromkeys(("x", "w", "bias", "out"), Memory()),
        }
    )
    odd, even = case.arrays("cpu"), plain.arrays("cpu")
    for name in ("x", "w", "bias"):
        there, here = getattr(odd, name), getattr(even, name)
        if there is None:
            continue
        memory = getattr(case, name)
        if 0 not in memory.steps:
            assert np.array_equal(there.given(), here.given(), equal_nan=there.dtype.kind in "fc")
        assert there.array.dtype.isnative != memory.swapped
        assert not there.changed()
        assert not there.changed_outside()
    # An untouched output shows as such, and a touched one doesn't show outside.
    assert odd.out.unwritten().all()
    odd.out.array[...] = 0
    assert not odd.out.unwritten().any()
    assert not odd.out.changed_outside()
    assert not odd.out.values().any()


@pytest.mark.parametrize("pattern", [NAN_BYTE, OTHER_BYTE])
def test_stray_bytes_show(pattern: int) -> None:
    memory = Memory(steps=(1, 1, 1, 2), gap=1)
    for offset in (-1, 4):
        buffer = Buffer((1, 1, 2, 3), np.dtype(np.float32), memory, Place(), pattern=pattern)
        buffer.array[...] = 1
        assert not buffer.changed_outside()
        raw = np.ndarray((1,), np.uint8, buffer._raw, offset=buffer.offset + offset)
        raw[0] ^= 1
        assert buffer.changed_outside()


def test_addresses_are_as_aligned_as_asked() -> None:
    for offset in (0, 1, 4, 6):
        for steps in ((), (-1, -1, -1, -1), (1, 1, -2, 3)):
            buffer = Buffer((2, 2, 3, 3), np.dtype(np.float64), Memory(steps=steps, offset=offset), Place())
            assert buffer.array.ctypes.data % GUARD == offset


def test_cases_are_written_so_that_they_come_back() -> None:
    case = Case(
        x_shape=(1, 2, 3, 4), w_shape=(1, 2, 1, 1), padding=(0, 1, 2, 3), fillvalue=math.nan, stride=(1, 2),
        x=Memory(order=(0, 2, 3, 1), swapped=True), config=(("tile", (2, 3)),), threads=2, data="nan",
    )  # fmt: skip
    again = eval(repr(case), {"Case": Case, "Memory": Memory})
    assert repr(again) == repr(case)
    assert again.problem == case.problem
    assert "w_dtype" not in repr(case)
    assert repr(Case(x_shape=(1, 1, 1, 1), w_shape=(1, 1, 1, 1), fillvalue=-0.0)).endswith("fillvalue=-0.0)")


def test_kinds_of_data_are_what_they_say() -> None:
    rng = np.random.default_rng(0)
    for name, kind in DATA.items():
        for dtype in strategies.known_dtypes(strategies.EVERYTHING.input_dtypes):
            for role, shape in (
                ("x", (2, 3, 8, 9)),
                ("w", (2, 3, 3, 3)),
                ("bias", (4,)),
                ("x", (0, 1, 2, 0)),
            ):
                y = kind(rng, shape, dtype, role)
                assert (y.dtype, y.shape) == (dtype, shape), name
    single = np.dtype(np.float32)
    x = DATA["bright"](rng, (1, 1, 30, 30), single, "x")
    assert np.median(np.abs(x)) < 1e-5 < 1e5 < np.abs(x).max()
    x = DATA["subnormal"](rng, (1, 1, 30, 30), single, "x")
    assert ((x != 0) & (np.abs(x) < np.finfo(np.float32).tiny)).mean() > 0.3
    assert np.isnan(DATA["nan"](rng, (1, 1, 30, 30), single, "x")).any()
    assert np.isinf(DATA["inf"](rng, (1, 1, 30, 30), single, "x")).any()
    w = DATA["cancelling"](rng, (1, 1, 5, 5), single, "w")
    assert abs(w.sum()) < 1e-5 < np.abs(w).sum()
    sums = DATA["halves"](rng, (1, 1, 9, 9), single, "w") * 2
    assert (sums == np.rint(sums)).all()
    assert (sums % 2 == 1).any()
