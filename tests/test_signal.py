"""`convpar.signal` stands in for scipy.signal: the same dtypes, values and kinds of error."""

from __future__ import annotations

import itertools
from typing import Any

import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

import convpar.signal

# SciPy tells of the complex and undefined casts by which it tries a fill value.
pytestmark = pytest.mark.filterwarnings(
    "ignore::numpy.exceptions.ComplexWarning", "ignore:invalid value encountered in cast:RuntimeWarning"
)
scipy_signal = pytest.importorskip("scipy.signal", reason="the results are checked against SciPy")

NAMES = ("convolve2d", "correlate2d")
MODES = ("full", "valid", "same")
BOUNDARIES = ("fill", "pad", "wrap", "circular", "symm", "symmetric")
FEW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# One code of each of NumPy's number types.
INTEGERS = "bBhHiIlL"
TYPES = "?" + INTEGERS + "qQ" + "efdgFDG"


def pair(name: str) -> tuple[Any, Any]:
    return getattr(scipy_signal, name), getattr(convpar.signal, name)


def outcome(function: Any, *arguments: Any, **keywords: Any) -> Any:
    """The result, or the error."""
    try:
        return function(*arguments, **keywords)
    except (ValueError, TypeError, RuntimeError, OverflowError) as e:
        return e


def bound(name: str, in1: Any, in2: Any, rules: tuple[Any, ...], y: Any) -> Any:
    """Twice the published bound of sums in y's type, since SciPy may be off as far as convpar."""
    limits = np.finfo(y.dtype)
    # At most so many products; a component of a complex one is two.
    terms = in2.size + in1.size * (rules[0] == "valid")
    terms *= 2 if y.dtype.kind == "c" else 1
    magnitudes = (np.abs(a).astype(np.longdouble) for a in (in1, in2))
    sums = getattr(scipy_signal, name)(*magnitudes, *rules[:2], abs(rules[2]))
    return 2 * (terms + 2) * (limits.eps / 2) * sums + terms * limits.smallest_subnormal


def agree(
    name: str, in1: Any, in2: Any, mode: str = "full", boundary: str = "fill", fillvalue: Any = 0
) -> None:
    """Both give the same, or the same kind of error."""
    rules = (mode, boundary, fillvalue)
    scipys, convpars = pair(name)
    right, y = outcome(scipys, in1, in2, *rules), outcome(convpars, in1, in2, *rules)
    if isinstance(right, Exception):
        assert type(y) is type(right), (y, right)
        return
    if isinstance(y, Exception):
        raise AssertionError(f"SciPy gives {right!r}") from y
    assert type(y) is np.ndarray
    assert (y.dtype, y.shape) == (right.dtype, right.shape)
    if y.dtype.kind in "iu" or not (in1.size and in2.size and y.size):
        np.testing.assert_array_equal(y, right)
        return
    allowed = bound(name, in1, in2, rules, y)
    for got, wanted in ((y.real, right.real), (y.imag, right.imag)):
        with np.errstate(invalid="ignore"):
            near = (np.abs(got - wanted) <= allowed) | (got == wanted)
        assert np.all(near | (np.isnan(got) & np.isnan(wanted))), (y, right)


def dies(in1: Any, mode: str, boundary: str) -> bool:
    """Whether SciPy 1.17 ends the interpreter: an empty image that has to be repeated."""
    return 0 in in1.shape and mode == "full" and boundary not in ("fill", "pad")


@st.composite
def operand(draw: Any, *, least: int = 1, most: int = 7, types: str = TYPES) -> Any:
    """A matrix of a small-valued number type, laid out in memory in one of many ways."""
    shape = draw(st.tuples(st.integers(least, most), st.integers(least, most)))
    dtype = np.dtype(draw(st.sampled_from(types)))
    a = draw(hnp.arrays(np.int8, shape, elements=st.integers(-4 * (dtype.kind not in "bu"), 4))).astype(dtype)
    if dtype.kind == "c":
        a = a + 1j * draw(hnp.arrays(np.int8, shape, elements=st.integers(-4, 4))).astype(dtype)
        a = a.astype(dtype)
    way = draw(st.sampled_from(["plain", "strided", "reversed", "transposed", "swapped"]))
    if way == "strided":
        return np.repeat(np.repeat(a, 2, 0), 3, 1)[::2, ::3]
    if way == "reversed":
        return a[::-1, ::-1].copy()[::-1, ::-1]
    if way == "transposed":
        return a.T.copy().T
    if way == "swapped":
        return a.astype(dtype.newbyteorder())
    return a


# -- values


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.data())
def test_small_whole_numbers_of_every_type(name: str, data: Any) -> None:
    """Every product and sum is exact, so nothing is allowed for."""
    in1, in2 = data.draw(operand()), data.draw(operand(most=9))
    mode, boundary = data.draw(st.sampled_from(MODES)), data.draw(st.sampled_from(BOUNDARIES))
    fillvalue = data.draw(st.sampled_from([0, 1, 2.0, True]))
    right = outcome(getattr(scipy_signal, name), in1, in2, mode, boundary, fillvalue)
    y = outcome(getattr(convpar.signal, name), in1, in2, mode, boundary, fillvalue)
    if isinstance(right, Exception):
        assert type(y) is type(right)
    else:
        assert (y.dtype, y.shape) == (right.dtype, right.shape)
        np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.data())
def test_fractions_obey_the_contract(name: str, data: Any) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    shapes = [tuple(rng.integers(1, 9, 2)) for _ in range(2)]
    in1, in2 = (
        (rng.standard_normal(s) + 1j * rng.standard_normal(s) * (t in "FD")).astype(t)
        if t in "FD"
        else rng.standard_normal(s).astype(t)
        for s, t in zip(shapes, data.draw(st.tuples(*[st.sampled_from("efdFD")] * 2)), strict=True)
    )
    agree(
        name,
        in1,
        in2,
        data.draw(st.sampled_from(MODES)),
        data.draw(st.sampled_from(BOUNDARIES)),
        data.draw(st.sampled_from([0, 0.1, -3.7])),
    )


@pytest.mark.parametrize("name", NAMES)
@FEW
@given(data=st.data())
def test_integers_wrap_as_scipys(name: str, data: Any) -> None:
    types = data.draw(st.tuples(*[st.sampled_from(INTEGERS)] * 2))
    in1, in2 = (
        data.draw(hnp.arrays(np.dtype(t), st.tuples(st.integers(1, 6), st.integers(1, 6)))) for t in types
    )
    if np.result_type(*types).kind != "f":
        agree(name, in1, in2, data.draw(st.sampled_from(MODES)), data.draw(st.sampled_from(BOUNDARIES)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("type1", TYPES)
def test_every_pair_of_types(name: str, type1: str) -> None:
    rng = np.random.default_rng(7)
    for type2 in TYPES:
        agree(name, rng.integers(0, 3, (4, 5)).astype(type1), rng.integers(0, 3, (2, 3)).astype(type2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("boundary", BOUNDARIES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape1", "shape2"),
    [
        ((5, 6), (2, 2)), ((5, 6), (3, 4)), ((2, 2), (5, 6)), ((2, 6), (5, 6)), ((3, 3), (9, 11)),
        ((1, 1), (4, 4)), ((1, 5), (3, 1)), ((5, 6), (5, 6)), ((1, 1), (1, 1)), ((2, 3), (30, 31)),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(name: str, boundary: str, mode: str, shape1: Any, shape2: Any) -> None:
    rng = np.random.default_rng(3)
    in1, in2 = rng.integers(-9, 10, shape1), rng.integers(-9, 10, shape2)
    agree(name, in1, in2, mode, boundary, 5)
    agree(name, in1 + 2j * in1[::-1], in2 - 1j * in2[:, ::-1], mode, boundary, 5)


def test_a_swapped_complex_correlation_is_conjugated_as_scipys() -> None:
    """By its definition the result would be the conjugate of this."""
    in1, in2 = np.array([[1 + 2j]]), np.array([[3 - 1j, 4j]])
    y = convpar.signal.correlate2d(in1, in2, "valid")
    np.testing.assert_array_equal(y, scipy_signal.correlate2d(in1, in2, "valid"))
    by_definition = scipy_signal.correlate2d(in1, in2, "full")
    np.testing.assert_array_equal(y, by_definition.conj())
    assert not np.array_equal(y, by_definition)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_special_values_stay_in_their_windows(name: str, value: float) -> None:
    in1, in2 = np.ones((6, 7)), np.ones((3, 3))
    in1[2, 3], in2[0, 1] = value, 0
    for mode, boundary in itertools.product(MODES, ("fill", "wrap", "symm")):
        agree(name, in1, in2, mode, boundary)
        agree(name, in2, in1, mode, boundary)
        agree(name, np.ones((4, 4)), in1, mode, boundary, value)


# -- nothing


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("boundary", ["fill", "wrap", "symm"])
def test_empty_arrays(name: str, mode: str, boundary: str) -> None:
    sizes = [(0, 0), (0, 3), (3, 0), (2, 2), (3, 3), (1, 0), (0, 2)]
    for shape1, shape2 in itertools.product(sizes, sizes):
        for dtype in ("f4", "u1"):
            in1, in2 = np.ones(shape1, dtype), np.ones(shape2, np.int8)
            swapped = mode == "valid" and not all(n >= k for n, k in zip(shape1, shape2, strict=True))
            if not dies(in2 if swapped else in1, mode, boundary):
                agree(name, in1, in2, mode, boundary)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("boundary", ["wrap", "symm", "circular", "symmetric"])
def test_where_scipy_ends_the_interpreter_convpar_raises(name: str, boundary: str) -> None:
    with pytest.raises(ValueError, match=r"boundary.*sample to repeat.*\(0, 3\)"):
        getattr(convpar.signal, name)(np.ones((0, 3)), np.ones((2, 2)), "full", boundary)


# -- errors

IMAGE, FILTER = np.arange(12.0).reshape(3, 4), np.ones((2, 2))
BYTES = IMAGE.astype(np.uint8), FILTER.astype(np.uint8)

# What SciPy refuses; convpar refuses it with the same type of error.
REFUSED = {
    "mode: unknown": (IMAGE, FILTER, "foo"),
    "mode: None": (IMAGE, FILTER, None),
    "mode: a number": (IMAGE, FILTER, 2),
    "mode: a list": (IMAGE, FILTER, ["full"]),
    "mode: capitals": (IMAGE, FILTER, "FULL"),
    "boundary: unknown": (IMAGE, FILTER, "full", "foo"),
    "boundary: reflect": (IMAGE, FILTER, "full", "reflect"),
    "boundary: mirror": (IMAGE, FILTER, "full", "mirror"),
    "boundary: nearest": (IMAGE, FILTER, "full", "nearest"),
    "boundary: None": (IMAGE, FILTER, "full", None),
    "boundary: a list": (IMAGE, FILTER, "full", ["fill"]),
    "rank: 1 and 2": (IMAGE[0], FILTER),
    "rank: 3 and 2": (IMAGE[None], FILTER),
    "rank: scalars": (1.0, 2.0),
    "rank: 2 and 0": (IMAGE, 1.0),
    "rank before mode": (IMAGE[0], FILTER, "foo"),
    "valid: neither contains the other": (IMAGE, np.ones((4, 2)), "valid"),
    "fillvalue: none": (IMAGE, FILTER, "full", "fill", []),
    "fillvalue: two": (IMAGE, FILTER, "full", "fill", [1, 2]),
    "fillvalue: complex": (IMAGE, FILTER, "full", "fill", 1j),
    "fillvalue: complex without imaginary part": (IMAGE, FILTER, "same", "fill", 1 + 0j),
    "fillvalue: an object": (IMAGE, FILTER, "full", "fill", object()),
    "fillvalue: a word": (IMAGE, FILTER, "full", "fill", "black"),
    "fillvalue: 300 for uint8": (*BYTES, "full", "fill", 300),
    "fillvalue: 300.5 for uint8": (*BYTES, "full", "fill", 300.5),
    "fillvalue: -1 for uint8": (*BYTES, "full", "fill", -1),
    "fillvalue: NaN for uint8": (*BYTES, "full", "fill", np.nan),
    "fillvalue: None for uint8": (*BYTES, "full", "fill", None),
    "fillvalue: 2**70 for uint8": (*BYTES, "full", "fill", 2**70),
    "fillvalue: too wide in an array": (*BYTES, "full", "fill", np.array(300)),
    "fillvalue: also without padding": (*BYTES, "valid", "fill", 300),
    "fillvalue: also for nothing": (np.ones((0, 3)), FILTER, "full", "fill", [1, 2]),
    "type: object": (IMAGE.astype(object), FILTER),
    "type: object filter": (IMAGE, FILTER.astype(object)),
    "type: object in a list": ([[None]], FILTER),
    "type: object filter in a list": (IMAGE, [[None]]),
    "type: text": ([["a"]], FILTER),
    "type: text filter": (IMAGE, [["a"]]),
    "type: bytes": (np.array([[b"a"]]), FILTER),
    "type: dates": (IMAGE.astype("M8[s]"), FILTER),
    "type: two dates": (IMAGE.astype("M8[s]"), FILTER.astype("M8[s]")),
    "type: durations": (IMAGE.astype("m8[s]"), FILTER.astype(int)),
    "type: record": (np.zeros((3, 3), [("a", "f4")]), FILTER),
    "type: bool": (IMAGE > 1, FILTER > 0),
    "type: bool and float16": (IMAGE > 1, FILTER.astype("f2")),
    "type: float16": (IMAGE.astype("f2"), FILTER.astype("f2")),
    "type: float16 and int8": (IMAGE.astype("f2"), FILTER.astype("i1")),
    "no array: None": (None, FILTER),
    "no array: None as filter": (IMAGE, None),
    "no array: ragged": ([[1, 2], [3]], FILTER),
    "no array: empty lists": ([], []),
    "both empty": (np.ones((0, 0)), np.ones((0, 0))),
    "both empty along one axis": (np.ones((0, 3)), np.ones((0, 2))),
    "arguments: none": (),
    "arguments: one": (IMAGE,),
    "arguments: six": (IMAGE, FILTER, "full", "fill", 0, 1),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("arguments", REFUSED.values(), ids=list(REFUSED))
def test_errors_are_scipys(name: str, arguments: Any) -> None:
    scipys, convpars = pair(name)
    right, got = outcome(scipys, *arguments), outcome(convpars, *arguments)
    assert isinstance(right, Exception), right
    assert type(got) is type(right), (got, right)
    assert str(got)


def test_a_tensor_that_needs_its_gradient_is_refused_alike() -> None:
    torch = pytest.importorskip("torch", reason="checks tensors of PyTorch")
    tensor = torch.ones((3, 3), requires_grad=True)
    for name in NAMES:
        right, got = (outcome(f, tensor, FILTER) for f in pair(name))
        assert type(got) is type(right) is RuntimeError


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", [300, None, "black", [1, 2], [], object()], ids=lambda v: type(v).__name__)
def test_fillvalue_is_looked_at_only_for_fill(name: str, value: Any) -> None:
    for mode, boundary in itertools.product(MODES, ("wrap", "symm")):
        agree(name, *BYTES, mode, boundary, value)


@pytest.mark.parametrize("value", [1.75, -0.5, True, 2**63, np.float32(2.5), [3], [[3]]], ids=repr)
def test_fillvalue_is_cast_as_scipy_casts_it(value: Any) -> None:
    for name, (in1, in2) in itertools.product(NAMES, (BYTES, (IMAGE, FILTER))):
        scipys, convpars = pair(name)
        right, got = outcome(scipys, in1, in2, fillvalue=value), outcome(convpars, in1, in2, fillvalue=value)
        if isinstance(right, Exception):
            assert type(got) is type(right)
        else:
            np.testing.assert_array_equal(got, right)


# What SciPy takes, reading meaning into it that convpar doesn't.
STRICTER = {
    "None as NaN": ((IMAGE, FILTER), None, np.nan, ValueError),
    "a text as a number": ((IMAGE, FILTER), "3", 3, ValueError),
    "bytes as a number": ((IMAGE, FILTER), b"3", 3, TypeError),
    "a date as its count": ((IMAGE, FILTER), np.datetime64("2020"), 50, TypeError),
    "a time as its count": (BYTES, np.timedelta64(3, "s"), 3, TypeError),
    "a NumPy scalar beyond the type, wrapped": (BYTES, np.int64(300), 44, ValueError),
    "a float scalar beyond the type, wrapped": (BYTES, np.float64(-1), 255, ValueError),
}


@pytest.mark.parametrize(("arrays", "value", "read_as", "error"), STRICTER.values(), ids=list(STRICTER))
def test_fill_values_that_only_scipy_takes(arrays: Any, value: Any, read_as: Any, error: Any) -> None:
    np.testing.assert_array_equal(
        scipy_signal.convolve2d(*arrays, fillvalue=value), scipy_signal.convolve2d(*arrays, fillvalue=read_as)
    )
    with pytest.raises(error, match="fillvalue must"):
        convpar.signal.convolve2d(*arrays, fillvalue=value)


@pytest.mark.parametrize("result", ["uint8", "float32", "float64"])
@pytest.mark.parametrize(
    "value", [np.array(4), np.array([4]), np.array(4.5), np.array(4, np.uint8)], ids=repr
)
def test_scipy_takes_an_array_only_of_a_type_that_casts_safely(result: str, value: Any) -> None:
    arrays = IMAGE.astype(result), FILTER.astype(result)
    number = np.dtype(result).type(value.item())
    right = outcome(scipy_signal.convolve2d, *arrays, fillvalue=number)
    np.testing.assert_array_equal(convpar.signal.convolve2d(*arrays, fillvalue=value), right)
    scipys = outcome(scipy_signal.convolve2d, *arrays, fillvalue=value)
    if np.can_cast(value.dtype, result):
        np.testing.assert_array_equal(scipys, right)
    else:
        assert type(scipys) is ValueError


def test_a_masked_array_is_refused() -> None:
    masked = np.ma.masked_greater(IMAGE, 5)
    assert isinstance(scipy_signal.convolve2d(masked, FILTER), np.ndarray)
    with pytest.raises(TypeError, match="in1 is a masked array"):
        convpar.signal.convolve2d(masked, FILTER)


def test_messages_name_what_was_given() -> None:
    for keywords, message in (
        ({"mode": "foo"}, "mode must be one of full, valid, same, not 'foo'"),
        ({"boundary": "reflect"}, "boundary must be one of fill, pad, wrap, circular, symm, symmetric, not"),
    ):
        with pytest.raises(ValueError, match=message):
            convpar.signal.convolve2d(IMAGE, FILTER, **keywords)
    with pytest.raises(ValueError, match=r"correlate2d is not available for sums of bool"):
        convpar.signal.correlate2d(IMAGE > 1, FILTER > 0)


# -- kinds of arrays


def test_lists_and_subclasses() -> None:
    np.testing.assert_array_equal(
        convpar.signal.convolve2d([[1, 2], [3, 4]], [[1, 1]]),
        scipy_signal.convolve2d([[1, 2], [3, 4]], [[1, 1]]),
    )


def test_a_tensor_comes_back_as_a_tensor() -> None:
    torch = pytest.importorskip("torch", reason="checks tensors of PyTorch")
    y = convpar.signal.correlate2d(torch.tensor(IMAGE), FILTER, "valid")
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y.numpy(), scipy_signal.correlate2d(IMAGE, FILTER, "valid"))


def test_inputs_are_never_modified() -> None:
    in1, in2 = IMAGE + 1j, FILTER * 2j
    kept = in1.copy(), in2.copy()
    for a in (in1, in2):
        a.flags.writeable = False
    convpar.signal.correlate2d(in1, in2, "full", "symm")
    convpar.signal.correlate2d(in2, in1, "valid")
    np.testing.assert_array_equal(in1, kept[0])
    np.testing.assert_array_equal(in2, kept[1])
