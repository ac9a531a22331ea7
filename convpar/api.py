"""`conv2d`, `plan` and `explain`: arrays to `Problem` to `Plan` to array.

A call is looked up by its raw arguments first; only a call of a new kind builds a
Problem and asks for a plan. Nothing is remembered about an array's identity or values.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from . import registry
from .arrays import (
    CPU,
    GPUS,
    NATIVE,
    as_native,
    as_output,
    current_stream,
    device_of,
    empty,
    exporter,
    is_native,
    module_of,
    on,
    overlap_inside,
    share_memory,
)
from .backend import Backend, Config, Device, Layout, Layouts, Plan, Refusal
from .choose import Choice, choose, planned
from .explanation import Explanation
from .problem import Accuracy, Padding, Pair, Problem, Unsupported, check_dtype, index_argument, shown
from .threads import STATE, threads_argument

__all__ = ["ArraySpec", "BoundPlan", "conv2d", "explain", "plan"]

CACHED_CALLS = 1024
"""Kinds of call that are remembered; the oldest is forgotten first."""
WIDEST_REMEMBERED = 2**16
"""The widest padding of a call that is remembered."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """Shape, dtype and device of an array that needn't exist, for `plan` and `explain`.

    Attributes
    ----------
    shape : tuple of int
    dtype : dtype
    device : Device or str
        "cpu", "gpu" or "gpu:1".
    """

    shape: tuple[int, ...]
    dtype: Any = np.float32
    device: Device | str = CPU


class _Array(NamedTuple):
    """What decides a plan about one array: everything but its address and values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...]
    aligned: bool
    device: Device


class _Arrays(NamedTuple):
    """The arrays of a call; without a bias or an out, None."""

    x: _Array
    w: _Array
    bias: _Array | None
    out: _Array | None


class _Rules(NamedTuple):
    """The keywords of a call that decide its plan."""

    stride: Pair = 1
    padding: Padding = "valid"
    dilation: Pair = 1
    groups: int = 1
    boundary: str = "fill"
    fillvalue: Any = 0
    flip: bool = False
    channel_axis: int | None = None
    dtype: Any = None
    overflow: str = "wrap"
    backend: str = "auto"
    config: Config | None = None
    accuracy: Accuracy = None
    tune: bool = False


# How an array becomes canonical: for each canonical axis the axis it comes from, None for a new one.
_Axes = tuple[int | None, ...]


class _Call(NamedTuple):
    """Everything about one kind of call."""

    backend: Backend
    plan: Plan
    device: Device
    x_view: Callable[[Any], Any] | None  # None for arrays that will do as they are
    w_view: Callable[[Any], Any] | None
    oc: int
    out_shape: tuple[int, ...]
    out_dtype: np.dtype[Any]
    out_overlaps: bool  # itself: two of its elements share memory


_calls: dict[Any, _Call] = {}


def conv2d(
    x: Any,
    w: Any,
    bias: Any = None,
    *,
    stride: Pair = 1,
    padding: Padding = "valid",
    dilation: Pair = 1,
    groups: int = 1,
    boundary: str = "fill",
    fillvalue: Any = 0,
    flip: bool = False,
    channel_axis: int | None = None,
    dtype: Any = None,
    overflow: str = "wrap",
    out: Any = None,
    backend: str = "auto",
    config: Config | None = None,
    accuracy: Accuracy = None,
    tune: bool = False,
    num_threads: int | None = None,
) -> Any:
    """2-D cross-correlation of images with filters, as deep learning defines convolution.

    Parameters
    ----------
    x : array_like
        Image of shape (H, W), (C, H, W) or (N, C, H, W); with ``channel_axis=-1``
        (H, W, C) or (N, H, W, C). NumPy or CuPy arrays, anything that speaks DLPack
        or the array interfaces, or nested sequences. Any strides and byte order.
    w : array_like
        Filter of shape (KH, KW), applied to every channel by itself, or
        (OC, C/groups, KH, KW). A two-dimensional `x` takes the latter only as (1, 1, KH, KW).
    bias : scalar or array_like of shape (OC,), optional
        Added to the sums before conversion to the output type. It has no part in
        type promotion and must be castable to the type of the sum within its kind.
    stride, dilation : int or (int, int)
        Steps between outputs and between taps, (vertical, horizontal); a dilation of 1 is dense.
    padding : "valid", "same", "full", int, (int, int) or four ints
        Samples added around the image: none; so that ceil(H / stride) rows result, the odd one
        at the bottom and right; as many as the filter reaches; (vertical, horizontal);
        (top, bottom, left, right). At most 2**24 on a side.
    groups : int
        Splits channels and output channels into independent groups. Must be 1 for a 2-D `w`.
    boundary : {"fill", "wrap", "symm", "mirror", "nearest"}
        What stands in the padding: `fillvalue`; the image again; its reflection with and
        without the edge sample (``d c b a | a b c d``, ``d c b | a b c d``); the edge sample.
    fillvalue : scalar
        Cast to the promotion of `x` and `w`; must fit it.
    flip : bool
        Turn the filter by 180 degrees: convolution in the sense of signal processing.
    channel_axis : None or -1
        Where the channels of `x` and of the result are.
    dtype : dtype, optional
        Type of the result. By default NumPy's promotion of `x` and `w`. With it, the sum is
        kept in the promotion of all three and then converted: to an integer by rounding half to even.
        float16 and bfloat16 are summed in float32.
    overflow : {"wrap", "saturate", "raise"}
        Integer results: modulo 2**bits; clipped to the type's range; or an OverflowError.
        For the last two the sum is kept in a type that provably holds it.
    out : array, optional
        Where the result goes: right shape and dtype, any strides, no memory shared with the inputs.
    backend : str
        A rung ("cpu-private", see `list_backends`), a chooser ("cpu", "gpu"), or "auto": the
        chooser of the device where the arrays live.
    config : mapping, optional
        Options of the named rung, as ``convpar backends --options`` lists them.
    accuracy : None, "elementwise", "normwise" or float
        The error that is allowed. None keeps the choosers to elementwise and leaves
        a named rung its own. A number is relative to the largest ``conv(|x|, |w|)``.
    tune : bool
        Time the candidates of a chooser once on these arrays, and remember the fastest
        for later calls that say ``tune=True`` too.
    num_threads : int, optional
        Exactly so many threads on the CPU, at most 1024. By default `set_num_threads`, ``OMP_NUM_THREADS`` or
        the processors available, and small problems stay on one. Where the system grants fewer, OpenMP ends the
        process.

    Returns
    -------
    array
        `out`, or a new C-contiguous array of the rank and layout of `x`: NumPy for NumPy, CuPy for
        CuPy on the same device, a torch tensor for a torch tensor.

    Raises
    ------
    ValueError, TypeError
        An argument is wrong; the message names it, what was given and what is allowed.
    Unsupported
        The backend can't do this problem.
    Unavailable
        This machine can't run the backend.
    OverflowError
        ``overflow="raise"``, and a sum doesn't fit; names the first place. `out` is then unspecified.

    Examples
    --------
    >>> import numpy as np, convpar
    >>> picture = np.arange(25, dtype=np.uint8).reshape(5, 5)
    >>> convpar.conv2d(picture, np.ones((3, 3)) / 9, padding="same", boundary="mirror", dtype="uint8")[2]
    array([11, 11, 12, 13, 13], dtype=uint8)
    """
    given = (
        stride, padding, dilation, groups, boundary, fillvalue, flip, channel_axis,
        dtype, overflow, backend, config, accuracy, tune,
    )  # fmt: skip
    if _keys is None:
        _load_keys()
    rules, frozen = _known_rules.get(_keys.identities(given)) or _rules_of(given)
    if num_threads is not None:
        num_threads = threads_argument(num_threads)
    if (
        type(x) in NATIVE
        and type(w) in NATIVE
        and (bias is None or type(bias) in NATIVE)
        and (out is None or type(out) in NATIVE)
    ):
        return _run(_find_call(x, w, bias, out, rules, frozen), x, w, bias, out, num_threads)
    with current_stream(x, w, bias, out):
        x, w, bias, out, export = _adopted(x, w, bias, out)
        return export(_run(_find_call(x, w, bias, out, rules, frozen), x, w, bias, out, num_threads))


def _run(call: _Call, x: Any, w: Any, bias: Any, out: Any, num_threads: int | None) -> Any:
    """Run `call`; `num_threads` has been checked."""
    if out is None:
        out = empty(call.device, call.out_shape, call.out_dtype)
    else:
        _check_out(call, x, w, bias, out)
    if bias is not None:
        bias = _bias_view(bias, call.oc)
    given = out
    if call.x_view is not None:
        x, given = call.x_view(x), call.x_view(out)
    if call.w_view is not None:
        w = call.w_view(w)
    call.plan.run(x, w, bias, given, num_threads=num_threads)
    return out


def _adopted(
    x: Any, w: Any, bias: Any, out: Any, bias_dtype: np.dtype[Any] | None = None
) -> tuple[Any, Any, Any, Any, Callable[[Any], Any]]:
    """The arrays as NumPy or CuPy arrays, and what turns the result into the caller's kind of array."""
    export = exporter(x) if out is None else _constant(out)
    x, w = (a if is_native(a) else as_native(a, name) for a, name in ((x, "x"), (w, "w")))
    if bias is not None and not is_native(bias):
        bias = _as_bias(bias, device_of(x), bias_dtype)
    if out is not None and not is_native(out):
        out = as_output(out)
    return x, w, bias, out, export


def _constant(value: Any) -> Callable[[Any], Any]:
    return lambda _: value


def _as_bias(bias: Any, device: Device, dtype: np.dtype[Any] | None = None) -> Any:
    """`bias` as an array; a Python number becomes one of `dtype` where that keeps its kind."""
    if isinstance(bias, (bool, int, float, complex)) and not isinstance(bias, np.generic):
        least = np.min_scalar_type(bias)
        if least.kind == "O":
            raise ValueError(f"bias must be a number of at most 64 bits, not {shown(bias)}")
        if dtype is None or not np.can_cast(least, dtype, "same_kind"):
            # A Python integer is as wide as its value, so that it fits every sum that holds it.
            dtype = least if isinstance(bias, (bool, int)) else None
        try:
            with on(device):
                return module_of(device).asarray(np.asarray(bias, dtype))
        except OverflowError as e:
            raise ValueError(f"bias must fit the planned dtype {dtype}, not {bias!r}") from e
    bias = as_native(bias, "bias")
    if device_of(bias) != device and bias.ndim == 0:
        with on(device):
            return module_of(device).asarray(bias)
    return bias


_PLAIN = frozenset((str, int, bool, type(None)))
_CONSTANT = _PLAIN | {float, complex}


class _Number:
    """Stands for equal rules in the keys of calls, quicker to look up than what they hold."""

    __slots__ = ("spellings",)

    def __init__(self) -> None:
        self.spellings = 0


MOST_SPELLINGS = 4
"""Equal keywords are known by so many sets of objects; more are compared by value, as those made anew for each call."""

# By the identities of keywords that can't change: they are kept here, so no others can come to lie where they do.
_known_rules: dict[bytes, tuple[_Rules, _Number]] = {}
_numbers: dict[Any, _Number] = {}


def _rules_of(given: tuple[Any, ...]) -> tuple[_Rules, Any]:
    """Keywords as rules, and what calls are looked up by: a number, or a key by value where no call has worked yet.

    None if they can't be compared.
    """
    rules = _Rules._make(given)
    frozen = _frozen_rules(rules)
    if frozen is None:
        return rules, None
    # Without a lock: what was called before never waits for others.
    number = _numbers.get(frozen)
    if number is None:
        return rules, frozen
    if number.spellings < MOST_SPELLINGS:
        _spell(given, rules, number)
    return rules, number


def _spell(given: tuple[Any, ...], rules: _Rules, number: _Number) -> None:
    identities = _keys.identities(given) if all(map(_is_constant, given)) else None
    if identities is None:
        number.spellings = MOST_SPELLINGS
        return
    with STATE:
        if identities in _known_rules:
            return
        while len(_known_rules) >= CACHED_CALLS:
            _, other = _known_rules.pop(next(iter(_known_rules)))
            other.spellings -= 1  # may be known again
        number.spellings += 1
        _known_rules[identities] = rules, number


def _is_constant(value: Any) -> bool:
    kind = type(value)
    if kind is tuple:
        return all(map(_is_constant, value))
    return kind in _CONSTANT or isinstance(value, (type, np.dtype))


def _number_of(frozen: Any) -> _Number:
    with STATE:
        number = _numbers.get(frozen)
        if number is None:
            _make_room(_numbers)
            number = _numbers[frozen] = _Number()
    return number


def _make_room(cache: dict[Any, Any]) -> None:
    while len(cache) >= CACHED_CALLS:
        del cache[next(iter(cache))]


def _frozen_rules(rules: _Rules) -> Any:
    """`rules` as a key that tells 1 from True and 1.0 and 0.0 from -0.0; None if it can't be one."""
    kinds = tuple(map(type, rules))
    if _PLAIN.issuperset(kinds):
        return kinds, rules
    try:
        key = tuple(map(_frozen, rules))
        hash(key)
    except TypeError:
        return None
    return key


def _frozen(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return (kind, value)
    if kind is float or kind is complex:
        return (kind, repr(value))
    if kind is tuple or kind is list:
        return (kind, tuple(map(_frozen, value)))
    if isinstance(value, np.generic):
        return (kind, value.tobytes())
    if isinstance(value, Mapping):
        return (kind, tuple((k, _frozen(v)) for k, v in value.items()))
    if isinstance(value, (np.dtype, type)):
        return value
    raise TypeError("not a key")


def _key(x: Any, w: Any, bias: Any, out: Any) -> Any:
    """What decides a plan about the arrays, to look it up by."""
    if _keys is None:
        _load_keys()
    return _keys.signature(x, w, bias, out) or _all_seen(x, w, bias, out)


class _NoKeys:
    """Stands in for keys.pyx in a source tree that isn't built: nothing is known, and Python finds out."""

    @staticmethod
    def signature(*arrays: Any) -> bytes | None:
        return None

    @staticmethod
    def identities(objects: tuple[Any, ...]) -> bytes | None:
        return None

    @staticmethod
    def apart(*arrays: Any) -> bool:
        return False


_keys: Any = None


def _load_keys() -> None:
    global _keys
    try:
        from . import keys as compiled
    except ImportError:
        _keys = _NoKeys
    else:
        _keys = compiled


# Plain tuples, equal to `_Arrays` of `_Array` and quicker to make.
_Seen = tuple[tuple[int, ...], Any, tuple[int, ...], bool, Device]


def _seen(a: Any) -> _Seen:
    if type(a) is np.ndarray:
        return a.shape, a.dtype, a.strides, a.flags.aligned, CPU
    return a.shape, a.dtype, a.strides, True, GPUS[a.data.device_id]


def _all_seen(x: Any, w: Any, bias: Any, out: Any) -> tuple[_Seen | None, ...]:
    return (
        _seen(x), _seen(w), None if bias is None else _seen(bias), None if out is None else _seen(out)
    )  # fmt: skip


def _named(seen: tuple[_Seen | None, ...]) -> _Arrays:
    x, w, bias, out = (None if a is None else _Array._make(a) for a in seen)
    assert x is not None
    assert w is not None
    return _Arrays(x, w, bias, out)


def _find_call(x: Any, w: Any, bias: Any, out: Any, rules: _Rules, frozen: Any) -> _Call:
    seen = _key(x, w, bias, out)
    if frozen is None:
        return _new_call(_named(_all_seen(x, w, bias, out)), rules, (x, w, bias))
    key: Any = (seen, frozen, registry.version())
    call = _calls.get(key)
    if call is None:
        place = registry.place_for_host_arrays(rules.backend) if type(x) is np.ndarray else None
        if place is not None:
            # Their own devices don't say which GPU they go to.
            key = (seen, frozen, (registry.version(), place))
            call = _calls.get(key)
        if call is None:
            call = _new_call(_named(_all_seen(x, w, bias, out)), rules, (x, w, bias))
            if type(frozen) is not _Number:
                key = (seen, _number_of(frozen), *key[2:])
            _remember(_calls, key, call)
    return call


def _remember(calls: dict[Any, _Call], key: Any, call: _Call) -> None:
    # A plan keeps a map of its border, 8 bytes a row and column; a very wide one is better made again.
    if max(call.plan.problem.padding) > WIDEST_REMEMBERED:
        return
    with STATE:
        _make_room(calls)
        calls[key] = call


def _new_call(arrays: _Arrays, rules: _Rules, given: Any) -> _Call:
    problem, layouts, shapes = _describe(arrays, rules)
    choice = choose(rules.backend, problem, layouts, arrays.x.device, rules.config)
    backend, chosen = choice.required()
    if rules.tune:
        from . import tuning

        backend, chosen = tuning.fastest(choice, layouts, *_canonical_arrays(shapes, problem, *given))
    return _call(backend, chosen, arrays.x.device, shapes)


def _call(backend: Backend, chosen: Plan, device: Device, shapes: _Shapes) -> _Call:
    problem = chosen.problem
    # A view has the address of its array.
    viewed = not getattr(chosen, "by_address", False)
    return _Call(
        backend,
        chosen,
        device,
        _viewer(shapes.x_axes) if viewed else None,
        _w_viewer(shapes, problem) if viewed else None,
        problem.oc,
        shapes.out_shape,
        problem.out_dtype,
        shapes.out_overlaps,
    )


def _canonical_arrays(shapes: _Shapes, problem: Problem, x: Any, w: Any, bias: Any) -> tuple[Any, Any, Any]:
    return (
        _viewed(x, _viewer(shapes.x_axes)),
        _viewed(w, _w_viewer(shapes, problem)),
        None if bias is None else _bias_view(bias, problem.oc),
    )


# -- ranks and layouts


class _Shapes(NamedTuple):
    x_axes: _Axes
    w_axes: _Axes
    out_shape: tuple[int, ...]
    out_overlaps: bool


_RANKS: dict[tuple[int, int | None], _Axes] = {
    (2, None): (None, None, 0, 1),
    (3, None): (None, 0, 1, 2),
    (4, None): (0, 1, 2, 3),
    (3, -1): (None, 2, 0, 1),
    (4, -1): (0, 3, 1, 2),
}


def _permuted(values: tuple[int, ...], axes: _Axes, new: int) -> tuple[int, ...]:
    return tuple(new if a is None else values[a] for a in axes)


def _describe(arrays: _Arrays, rules: _Rules) -> tuple[Problem, Layouts, _Shapes]:
    """The problem, the canonical layouts and how to get there, or the error that says what is wrong."""
    x, w, bias, out = arrays
    axis = rules.channel_axis
    if axis is not None and (isinstance(axis, bool) or not isinstance(axis, (int, np.integer)) or axis != -1):
        raise ValueError(f"channel_axis must be None or -1, not {shown(axis)}")
    ranks = {None: "(H, W), (C, H, W) or (N, C, H, W)", -1: "(H, W, C) or (N, H, W, C)"}[axis]
    x_axes = _RANKS.get((len(x.shape), axis))
    if x_axes is None:
        raise ValueError(f"x must have the shape {ranks} with channel_axis={axis}, not {x.shape}")
    n, c, h, width = _permuted(x.shape, x_axes, 1)
    groups = rules.groups
    if len(w.shape) == 4:
        if len(x.shape) == 2 and w.shape[:2] != (1, 1):
            raise ValueError(f"w must have the shape (KH, KW) or (1, 1, KH, KW) for a 2-D x, not {w.shape}")
        w_axes: _Axes = (0, 1, 2, 3)
        w_shape = w.shape
        w_strides = w.strides
    elif len(w.shape) == 2:
        if index_argument(groups, "groups", 1) != 1:
            raise ValueError(f"groups must be 1 for a 2-D w, which is applied to every channel, not {groups}")
        # One filter for all channels is a grouped problem whose filters are the same memory.
        w_axes = (None, None, 0, 1)
        w_shape = (c, min(c, 1), *w.shape)
        w_strides = (0, 0, *w.strides)
        groups = max(c, 1)
    else:
        raise ValueError(f"w must have the shape (KH, KW) or (OC, C/groups, KH, KW), not {w.shape}")
    for other, name in ((w, "w"), (bias, "bias"), (out, "out")):
        if other is not None and other.device != x.device:
            raise TypeError(f"{name} lives on {other.device} and x on {x.device}; they must be on one device")
    if bias is not None and bias.shape not in ((), (w_shape[0],)):
        raise ValueError(f"bias must be a scalar or have the shape ({w_shape[0]},), not {bias.shape}")
    problem = Problem.of(
        (n, c, h, width),
        w_shape,
        x.dtype,
        w.dtype,
        bias_dtype=None if bias is None else bias.dtype,
        stride=rules.stride,
        padding=rules.padding,
        dilation=rules.dilation,
        groups=groups,
        boundary=rules.boundary,
        fillvalue=rules.fillvalue,
        flip=rules.flip,
        dtype=rules.dtype,
        overflow=rules.overflow,
        accuracy=rules.accuracy,
    )
    if not isinstance(rules.tune, (bool, np.bool_)):
        raise TypeError(f"tune must be True or False, not {shown(rules.tune)}")
    out_shape = _back(problem.out_shape, x_axes)
    if out is None:
        made = Layout.contiguous(out_shape, problem.out_dtype.itemsize)
        out_layout = Layout(_permuted(made.strides, x_axes, 0))
    else:
        if out.shape != out_shape:
            raise ValueError(f"out must have the shape {out_shape}, not {out.shape}")
        if out.dtype.newbyteorder("=") != problem.out_dtype:
            raise TypeError(f"out must have the dtype {problem.out_dtype}, not {out.dtype}")
        out_layout = _layout(out, _permuted(out.strides, x_axes, 0))
    bias_layout = None
    if bias is not None:
        step = bias.strides[0] if bias.shape == (problem.oc,) else 0
        bias_layout = _layout(bias, (step,))
    layouts = Layouts(
        _layout(x, _permuted(x.strides, x_axes, 0)), _layout(w, w_strides), bias_layout, out_layout
    )
    overlaps = out is not None and overlap_inside(out.shape, out.strides, out.dtype.itemsize)
    return problem, layouts, _Shapes(x_axes, w_axes, out_shape, overlaps)


def _back(canonical: tuple[int, ...], axes: _Axes) -> tuple[int, ...]:
    """A canonical shape in the caller's order."""
    placed = sorted((a, size) for a, size in zip(axes, canonical, strict=True) if a is not None)
    return tuple(size for _, size in placed)


def _layout(a: _Array, strides: tuple[int, ...]) -> Layout:
    # A field of a record can be aligned and yet not a whole number of elements apart.
    whole = all(s % a.dtype.itemsize == 0 for s in strides)
    return Layout(strides, not a.dtype.isnative, a.aligned and whole)


def _viewed(a: Any, view: Callable[[Any], Any] | None) -> Any:
    return a if view is None else view(a)


def _viewer(axes: _Axes) -> Callable[[Any], Any] | None:
    """A function that gives the canonical view of an array; None for the array itself."""
    match axes:
        case (0, 1, 2, 3):
            return None
        case (None, None, 0, 1):
            return lambda a: a[None, None]
        case (None, 0, 1, 2):
            return lambda a: a[None]
        case (None, 2, 0, 1):
            return lambda a: a.transpose(2, 0, 1)[None]
        case _:
            return lambda a: a.transpose(0, 3, 1, 2)


def _w_viewer(shapes: _Shapes, problem: Problem) -> Callable[[Any], Any] | None:
    if shapes.w_axes == (0, 1, 2, 3) or problem.w_shape[:2] == (1, 1):
        return _viewer(shapes.w_axes)
    shape = problem.w_shape

    def repeated(w: Any) -> Any:
        return (
            np.broadcast_to(w, shape)
            if isinstance(w, np.ndarray)
            else module_of(device_of(w)).broadcast_to(w, shape)
        )

    return repeated


def _bias_view(bias: Any, oc: int) -> Any:
    if bias.shape == (oc,):
        return bias
    xp = np if isinstance(bias, np.ndarray) else module_of(device_of(bias))
    return xp.broadcast_to(bias.reshape(()), (oc,))


def _check_out(call: _Call, x: Any, w: Any, bias: Any, out: Any) -> None:
    if bias is None and not call.out_overlaps and _keys.apart(x, w, out):
        return
    if isinstance(out, np.ndarray):
        if not out.flags.writeable:
            raise ValueError("out is read-only")
        share = share_memory
    else:
        share = module_of(call.device).may_share_memory
    if call.out_overlaps:
        raise ValueError(
            f"out has elements that share memory (strides {out.strides}); it needs its own for each"
        )
    name = "x" if share(x, out) else "w" if share(w, out) else ""
    if not name and bias is not None and share(bias, out):
        name = "bias"
    if name:
        raise ValueError(f"out shares memory with {name}, which is still being read when out is written")


# -- plans to keep, and explanations


class BoundPlan:
    """A planned call, to be run on any arrays of the same shapes and types.

    Made by `convpar.plan`. Arrays that lie in memory in another way than planned are
    planned for inside, once.

    Attributes
    ----------
    problem : Problem
    backend : Backend
    plan : Plan
        The backend's plan for the layouts given.
    """

    def __init__(
        self, choice: Choice, arrays: _Arrays, shapes: _Shapes, rules: _Rules, num_threads: int | None
    ) -> None:
        self.backend, self.plan = choice.required()
        self.problem = self.plan.problem
        self._arrays = arrays
        self._rules = copy.deepcopy(rules)  # a list or array among them may change before the next layout
        self._num_threads = num_threads
        self._planned = _call(self.backend, self.plan, arrays.x.device, shapes)
        self._calls: dict[Any, _Call] = {}

    def __reduce__(self) -> Any:
        raise TypeError(
            "a plan holds kernels of this process and can't be pickled or copied; keep the arguments of plan()"
        )

    def __call__(
        self, x: Any, w: Any, bias: Any = None, *, out: Any = None, num_threads: int | None = None
    ) -> Any:
        """Run it; returns `out` or a new array, as `conv2d` does.

        Raises
        ------
        ValueError, TypeError
            An array differs from what was planned in shape, dtype or device.
        """
        given = self._arrays.bias
        num_threads = self._threads(num_threads)
        if (
            type(x) in NATIVE
            and type(w) in NATIVE
            and (bias is None or type(bias) in NATIVE)
            and (out is None or type(out) in NATIVE)
        ):
            return _run(self._find_call(x, w, bias, out), x, w, bias, out, num_threads)
        with current_stream(x, w, bias, out):
            x, w, bias, out, export = _adopted(x, w, bias, out, None if given is None else given.dtype)
            return export(_run(self._find_call(x, w, bias, out), x, w, bias, out, num_threads))

    def _find_call(self, x: Any, w: Any, bias: Any, out: Any) -> _Call:
        key = _key(x, w, bias, out)
        call = self._calls.get(key)
        if call is None:
            arrays = _named(_all_seen(x, w, bias, out))
            call = self._planned if arrays == self._arrays else self._plan_again(arrays)
            _remember(self._calls, key, call)
        return call

    def _plan_again(self, arrays: _Arrays) -> _Call:
        """The same problem for arrays that lie in memory in another way."""
        for a, given, name in zip(arrays[:3], self._arrays[:3], ("x", "w", "bias"), strict=True):
            if a is None and given is None:
                continue
            if given is None:
                raise ValueError(f"{name} must be left out: the plan has none")
            if a is None:
                raise ValueError(f"{name} must be given: the plan has one of shape {given.shape}")
            if a.shape != given.shape:
                raise ValueError(f"{name} must have the planned shape {given.shape}, not {a.shape}")
            if a.dtype.newbyteorder("=") != given.dtype.newbyteorder("="):
                raise TypeError(f"{name} must have the planned dtype {given.dtype}, not {a.dtype}")
            if a.device != given.device:
                raise TypeError(f"{name} must be on the planned device {given.device}, not {a.device}")
        problem, layouts, shapes = _describe(arrays, self._rules)
        made = planned(self.backend, problem, layouts, arrays.x.device, self._rules.config)
        if isinstance(made, Refusal):
            raise Unsupported(f"{self.backend.name} can't do this: {made.reason}")
        return _call(self.backend, made, arrays.x.device, shapes)

    def _threads(self, num_threads: int | None) -> int | None:
        return self._num_threads if num_threads is None else threads_argument(num_threads)

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Bytes of scratch memory that a run takes."""
        return self.plan.workspace_bytes(self._threads(num_threads))

    def __repr__(self) -> str:
        return f"<convpar plan: {self.backend.name} for a {self.problem}>"


def _specified(a: Any, name: str) -> _Array:
    if isinstance(a, ArraySpec):
        if not isinstance(a.shape, (tuple, list)):
            raise TypeError(f"the shape of {name} must be a tuple of integers, not {shown(a.shape)}")
        shape = tuple(index_argument(i, f"each axis of {name}", 0) for i in a.shape)
        check_dtype(a.dtype, f"the dtype of {name}")
        dtype = np.dtype(a.dtype)
        return _Array(shape, dtype, Layout.contiguous(shape, dtype.itemsize).strides, True, _device(a.device))
    return _Array._make(_seen(a if is_native(a) else as_native(a, name)))


def _device(value: Any) -> Device:
    if isinstance(value, Device):
        return value
    kind, _, index = str(value).partition(":")
    if (kind == "gpu" and (not index or index.isdecimal())) or value == "cpu":
        return Device(kind, int(index or 0))  # type: ignore[arg-type]
    raise ValueError(f"device must be 'cpu', 'gpu' or 'gpu:1' and so on, not {shown(value)}")


def _described(
    x: Any, w: Any, bias: Any, out: Any, rules: dict[str, Any]
) -> tuple[Problem, Layouts, _Shapes, _Arrays, _Rules]:
    for name in rules:
        if name not in _Rules._fields:
            raise TypeError(f"unknown keyword {name!r}; allowed are {', '.join(_Rules._fields)}")
    made = _Rules(**rules)
    seen_x, seen_w = _specified(x, "x"), _specified(w, "w")
    if bias is None:
        seen_bias = None
    elif isinstance(bias, ArraySpec):
        seen_bias = _specified(bias, "bias")
    else:
        seen_bias = _Array._make(_seen(bias if is_native(bias) else _as_bias(bias, seen_x.device)))
    seen_out = None if out is None else _specified(out, "out")
    arrays = _Arrays(seen_x, seen_w, seen_bias, seen_out)
    problem, layouts, shapes = _describe(arrays, made)
    return problem, layouts, shapes, arrays, made


def plan(
    x: Any, w: Any, bias: Any = None, *, out: Any = None, num_threads: int | None = None, **rules: Any
) -> BoundPlan:
    """Decide everything about a call once, to run it many times.

    Takes the arguments of `conv2d`, with arrays or `ArraySpec` in the place of `x`, `w`, `bias` and `out`.

    Returns
    -------
    BoundPlan
        ``p(x, w, bias, out=...)`` runs it; ``p.workspace_bytes()`` tells its scratch memory.

    Raises
    ------
    ValueError, TypeError, Unsupported, Unavailable
        As `conv2d`.
    """
    if num_threads is not None:
        num_threads = threads_argument(num_threads)
    problem, layouts, shapes, arrays, made = _described(x, w, bias, out, rules)
    choice = choose(made.backend, problem, layouts, arrays.x.device, made.config)
    if made.tune:
        if any(isinstance(a, ArraySpec) for a in (x, w, bias)):
            raise ValueError("tune=True times the candidates, so plan needs arrays, not ArraySpec")
        from . import tuning

        native = [a if is_native(a) else as_native(a, n) for a, n in ((x, "x"), (w, "w"))]
        if bias is not None and arrays.bias is not None and not is_native(bias):
            bias = _as_bias(bias, arrays.x.device, arrays.bias.dtype)
        choice.backend, choice.plan = tuning.fastest(
            choice, layouts, *_canonical_arrays(shapes, problem, native[0], native[1], bias)
        )
    return BoundPlan(choice, arrays, shapes, made, num_threads)


def explain(
    x: Any, w: Any, bias: Any = None, *, out: Any = None, num_threads: int | None = None, **rules: Any
) -> Explanation:
    """Say what a call would run and why, without running it.

    Takes the arguments of `plan`. A rung that can't serve is told with its reason instead of raised.

    Raises
    ------
    ValueError, TypeError
        An argument is wrong.
    """
    if num_threads is not None:
        num_threads = threads_argument(num_threads)
    problem, layouts, _, arrays, made = _described(x, w, bias, out, rules)
    choice = choose(made.backend, problem, layouts, arrays.x.device, made.config)
    return Explanation(problem, choice, num_threads)
