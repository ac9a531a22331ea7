"""The rungs whose words hold small integers of several channels: every type and shape, with and without their instructions."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import Unsupported, conv2d, explain, registry
from convpar.backends import cpu
from convpar.backends.cpu import compiled, splitting
from convpar.problem import Problem

PAIRS, BYTES = "cpu-pairs", "cpu-amx8"
MISSING = {name: registry.find(name).unavailable() for name in (PAIRS, BYTES)}  # type: ignore[union-attr]
RUNGS = [
    pytest.param(name, marks=pytest.mark.skipif(why is not None, reason=str(why)))
    for name, why in MISSING.items()
]
UNIT = pytest.param(
    "cpu-amx",
    marks=pytest.mark.skipif(
        (NO_UNIT := registry.find("cpu-amx").unavailable()) is not None,  # type: ignore[union-attr]
        reason=str(NO_UNIT),
    ),
)
TYPES = {PAIRS: ("bool", "int8", "uint8", "int16"), BYTES: ("bool", "int8", "uint8")}

# Words and chunks that channels fill, don't fill, and fill several of; blocks and tiles of output channels and of outputs, and what is left of
# them; grids of strides and dilations, with zeros around; rows shorter than a vector, that follow each other in it.
CASES = [
    ((1, 16, 1, 1), (1, 16, 1, 1), {}),
    ((1, 16, 9, 17), (9, 16, 3, 3), {"padding": 1}),
    ((3, 17, 7, 7), (16, 17, 3, 3), {"padding": 1}),
    ((2, 33, 9, 18), (17, 33, 2, 5), {"padding": (0, 2)}),
    ((1, 64, 12, 34), (40, 64, 3, 3), {"flip": True}),
    ((1, 65, 13, 40), (33, 65, 1, 1), {}),
    ((2, 66, 30, 31), (8, 33, 3, 3), {"groups": 2, "padding": 4}),
    ((1, 18, 20, 75), (7, 18, 3, 3), {"stride": 2, "padding": 1}),
    ((1, 20, 21, 40), (12, 20, 3, 4), {"stride": (3, 2), "dilation": (1, 3), "padding": (3, 0)}),
    ((2, 19, 25, 26), (8, 19, 5, 5), {"stride": 3, "padding": 9}),
    ((1, 130, 11, 50), (24, 130, 3, 3), {"dilation": 2, "padding": 2}),
    ((2, 16, 14, 90), (8, 16, 3, 3), {"padding": (1, 3), "boundary": "wrap"}),
    (
        (1, 17, 9, 64),
        (16, 17, 3, 4),
        {"stride": (1, 2), "dilation": (1, 18), "padding": 2, "boundary": "symm"},
    ),
    ((1, 21, 8, 20), (5, 21, 3, 3), {"padding": 2, "fillvalue": 1}),
    ((1, 34, 9, 50), (68, 17, 1, 3), {"groups": 2}),
]


def samples(rng: np.random.Generator, dtype: str, shape: Any) -> Any:
    """Of every bit, some of them the largest and the smallest that there are."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    of = np.iinfo(dtype)
    found = rng.integers(of.min, of.max, shape, dtype, endpoint=True)
    found[..., :1], found[..., 1:2] = of.min, of.max
    return found


def sums(backend: str, types: Any, num_threads: int = 1) -> list[str]:
    """Of all cases and pairs of types, as digests."""
    rng = np.random.default_rng(7)
    found = []
    for (x_shape, w_shape, rules), (x_type, w_type) in itertools.product(
        CASES, itertools.product(types, repeat=2)
    ):
        x, w = samples(rng, x_type, x_shape), samples(rng, w_type, w_shape)
        bias = samples(rng, "int32", w_shape[:1])
        y = conv2d(
            x, w, bias, backend=backend, num_threads=num_threads, dtype="int32", overflow="wrap", **rules
        )
        found.append(hashlib.sha256(y.tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("backend", RUNGS)
def test_sums_are_exact_modulo_their_bits(backend: str, num_threads: int) -> None:
    assert sums(backend, TYPES[backend], num_threads) == sums("numpy", TYPES[backend])


def run(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("backend", "variables"),
    [
        (PAIRS, {"CONVPAR_VNNI": "0"}),
        (BYTES, {"CONVPAR_AMX": "0"}),
        *((PAIRS, {"CONVPAR_ISA": level}) for level in compiled.engine().isa_levels()[1:]),
    ],
    ids=str,
)
def test_sums_are_the_same_without_the_instructions(backend: str, variables: dict[str, str]) -> None:
    if MISSING[backend]:
        pytest.skip(str(MISSING[backend]))
    program = (
        f"import json, sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\nimport test_integers as t\n"
        f"x = t.np.ones((1, 16, 5, 5), 'int8')\n"
        f"told = str(t.explain(x, x, backend={backend!r}, dtype='int32'))\n"
        f"print(json.dumps([told, t.sums({backend!r}, t.TYPES[{backend!r}])]))"
    )
    told, found = json.loads(run(program, **variables))
    assert ("multiplied, then added" if backend == PAIRS else "emulated") in told
    assert found == sums("numpy", TYPES[backend])


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize("value", ["min", "max"])
def test_sums_of_the_largest_products_wrap(backend: str, value: str) -> None:
    for x_type, w_type in itertools.product(TYPES[backend][1:], repeat=2):
        x = np.full((1, 600, 6, 20), getattr(np.iinfo(x_type), value), x_type)
        w = np.full((9, 600, 3, 3), getattr(np.iinfo(w_type), value), w_type)
        rules = {"dtype": "int32", "overflow": "wrap"}
        np.testing.assert_array_equal(
            conv2d(x, w, backend=backend, **rules), conv2d(x, w, backend="numpy", **rules)
        )
    # Without a sign sums have none.
    x, w = np.full((1, 16, 4, 20), 255, np.uint8), np.full((9, 16, 3, 3), 255, np.uint8)
    right = conv2d(x, w, backend="numpy", dtype="uint32")
    assert right.dtype == np.uint32
    np.testing.assert_array_equal(conv2d(x, w, backend=backend, dtype="uint32"), right)


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize(
    ("shape", "rules"),
    [
        ((2, 33, 40, 101), {"stride": 3, "padding": 2}),
        ((3, 50, 12, 12), {"stride": (1, 2)}),
        ((2, 16, 9, 7), {"padding": 1}),
        ((1, 16, 20, 30), {"padding": 30, "dilation": 2}),
    ],
    ids=str,
)
def test_samples_are_taken_where_they_lie(backend: str, shape: Any, rules: Any) -> None:
    rng = np.random.default_rng(3)
    w = samples(rng, "int8", (20, shape[1], 3, 3))
    for x_type in TYPES[backend]:
        x = samples(rng, x_type, shape)
        plan = convpar.plan(x, w, backend=backend, dtype="int32", **rules)
        np.testing.assert_array_equal(plan(x, w), conv2d(x, w, backend="numpy", dtype="int32", **rules))
        ran = plan.plan.paths_run()  # type: ignore[attr-defined]
        assert ran & {"inside", "border"}
        assert "staged" not in ran


@pytest.mark.parametrize("backend", RUNGS)
def test_samples_that_lie_otherwise_are_gathered(backend: str) -> None:
    rng = np.random.default_rng(4)
    x_type = TYPES[backend][-1]
    x, w = samples(rng, x_type, (2, 34, 20, 40)), samples(rng, x_type, (10, 34, 3, 3))
    views = [
        x[..., ::2],
        x[:, ::-1, :, ::-1],
        np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
        x.astype(x.dtype.newbyteorder()),
    ]
    for view in views:
        plan = convpar.plan(view, w, backend=backend, dtype="int32", padding=1)
        np.testing.assert_array_equal(
            plan(view, w), conv2d(view, w, backend="numpy", dtype="int32", padding=1)
        )
        swapped = view is views[-1] and x.dtype.itemsize > 1
        assert ("staged" in plan.plan.paths_run()) == (swapped or view is not views[-1])  # type: ignore[attr-defined]


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize("taps", [(1, 1), (1, 2), (3, 3), (4, 4), (5, 4), (7, 7)], ids=str)
def test_filters_are_taken_however_they_lie(backend: str, taps: tuple[int, int]) -> None:
    """Words, chunks and packs of output channels that filters fill or don't; taps that are fewer or more than a vector has."""
    rng = np.random.default_rng(6)
    rules = {"dtype": "int32", "overflow": "wrap"}
    for channels, (x_type, w_type) in itertools.product(
        (16, 67), itertools.product(("int8", "uint8"), TYPES[backend])
    ):
        x = samples(rng, x_type, (1, channels, 9, 20))
        w = samples(rng, w_type, (21, channels, *taps))
        right = conv2d(x, w, backend="numpy", **rules)
        larger = np.zeros((21, channels + 1, taps[0], taps[1] + 2), w.dtype)
        larger[:, 1:, :, 1:-1] = w
        for lies in (
            w,
            larger[:, 1:, :, 1:-1],
            np.asfortranarray(w),
            np.ascontiguousarray(w.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2),
            np.ascontiguousarray(w[::-1])[::-1],
        ):
            np.testing.assert_array_equal(conv2d(x, lies, backend=backend, **rules), right)
        flipped = conv2d(x, w[..., ::-1, ::-1], backend=backend, flip=True, **rules)
        np.testing.assert_array_equal(flipped, right)


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize("taps", [1, 3])
def test_results_lie_where_they_are_asked_for(backend: str, taps: int) -> None:
    """Beside each other as samples do, or with others between rows, which stay as they are."""
    rng = np.random.default_rng(8)
    x, w = samples(rng, "uint8", (2, 70, 11, 50)), samples(rng, "int8", (50, 70, taps, taps))
    bias = samples(rng, "int32", (50,))
    right = conv2d(x, w, bias, backend="numpy", dtype="int32", overflow="wrap")
    high, wide = right.shape[2:]
    around = np.full((2, 51, high + 2, wide + 5), 77, np.int32)
    out = around[:, :50, 1:-1, 2:-3]
    assert conv2d(x, w, bias, backend=backend, out=out, dtype="int32", overflow="wrap") is out
    np.testing.assert_array_equal(out, right)
    out[...] = 77
    assert (around == 77).all()


@pytest.mark.parametrize("first", [0, 1, 7, 15])
@pytest.mark.parametrize("backend", [*RUNGS, UNIT])
@pytest.mark.parametrize(
    ("shape", "channels", "config"),
    [
        ((2, 70, 12, 48), 50, {}),  # the plane is a multiple of a line
        ((2, 70, 11, 50), 50, {}),  # it isn't
        ((1, 1300, 24, 28), 40, {"tile": (24, 28), "block": 40}),  # in several passes
        ((3, 64, 2, 8), 34, {}),  # it is a line
    ],
    ids=str,
)
def test_results_begin_anywhere_in_a_line(
    backend: str, first: int, shape: Any, channels: int, config: Any
) -> None:
    """Under filters of one sample tiles begin with lines of the result, if all channels do."""
    rng = np.random.default_rng(9)
    dtype = np.dtype("float32" if backend == "cpu-amx" else "int32")
    if dtype.kind == "f":
        # Sums are exact.
        x, w = rng.integers(-9, 10, shape, "int8"), rng.integers(-9, 10, (channels, shape[1], 1, 1), "int8")
        x, w = x.astype(dtype), w.astype(dtype)
    else:
        x, w = samples(rng, "uint8", shape), samples(rng, "int8", (channels, shape[1], 1, 1))
    bias = np.zeros(channels, dtype)
    bias[-3:] = 1, 2, 3
    right = conv2d(x, w, bias, backend="numpy", dtype=dtype)
    room = np.full(right.size + 64, 77, dtype)
    first += -room.ctypes.data % 64 // 4 + 16
    out = room[first : first + right.size].reshape(right.shape)
    conv2d(x, w, bias, backend=backend, out=out, dtype=dtype, config=config)
    np.testing.assert_array_equal(out, right)
    out[...] = 77
    assert (room == 77).all()


def test_filters_become_words_from_where_they_lie() -> None:
    """Others are packed first, which takes room."""
    if MISSING[BYTES]:
        pytest.skip(str(MISSING[BYTES]))
    x, w = np.zeros((1, 64, 9, 20), np.uint8), np.zeros((32, 64, 3, 3), np.int8)

    def workspace(w: Any, **rules: Any) -> int:
        return convpar.plan(x, w, backend=BYTES, dtype="int32", **rules).workspace_bytes(1)

    as_they_lie = workspace(w)
    assert workspace(w[::-1]) == as_they_lie
    assert (
        workspace(w, flip=True) - as_they_lie == workspace(np.asfortranarray(w)) - as_they_lie == 4 * w.size
    )
    one = w[..., :1, :1].copy()
    assert workspace(one, flip=True) == workspace(one)


@pytest.mark.parametrize("backend", RUNGS)
@pytest.mark.parametrize(
    ("shape", "taps", "rules", "tile"),
    [
        ((1, 1100, 25, 27), 3, {"padding": 1}, (25, 27)),
        ((1, 1300, 25, 27), 1, {}, (25, 27)),
        ((1, 4400, 12, 20), 3, {"stride": 2}, (5, 9)),
        ((4, 1500, 12, 12), 3, {"padding": 1, "boundary": "wrap"}, (48, 12)),
    ],
    ids=str,
)
def test_channels_in_several_passes(backend: str, shape: Any, taps: int, rules: Any, tile: Any) -> None:
    """A tile's samples of all channels don't stay in the second cache: sums wait among the results, or where those are converted."""
    rng = np.random.default_rng(5)
    x, w = samples(rng, "int8", shape), samples(rng, "uint8", (40, shape[1], taps, taps))
    bias = samples(rng, "int32", (40,))
    rules = {**rules, "dtype": "int32", "overflow": "wrap"}
    # More than one takes, of so many outputs.
    assert splitting._passes(
        Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules),
        splitting.integers(
            Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules), 16 if backend == PAIRS else 8
        ),
        tile,
    ) > (1, 0)
    right = conv2d(x, w, bias, backend="numpy", **rules)
    config = {"tile": tile, "block": 40}
    np.testing.assert_array_equal(conv2d(x, w, bias, backend=backend, config=config, **rules), right)
    out = np.zeros(right.shape, ">i4")
    conv2d(x, w, bias, backend=backend, config=config, out=out, **rules)
    np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize("backend", RUNGS)
def test_what_no_word_holds_is_refused(backend: str) -> None:
    x, w = np.ones((1, 16, 9, 9), np.int8), np.ones((4, 16, 3, 3), np.int8)
    for wider in (np.uint16, np.int32, np.int64, np.float32):
        with pytest.raises(Unsupported, match=f"x is {np.dtype(wider)}; it takes"):
            conv2d(x.astype(wider), w, backend=backend, dtype="int32", overflow="wrap")
    with pytest.raises(Unsupported, match="the sum is int8; it keeps int32, uint32"):
        conv2d(x, w, backend=backend, dtype="int8", overflow="wrap")
    least = 2 if backend == PAIRS else 16
    with pytest.raises(Unsupported, match=f"a group has {least - 1} channels; it takes {least} and more"):
        conv2d(x[:, : least - 1], w[:, : least - 1], backend=backend, dtype="int32")


@pytest.mark.parametrize("backend", RUNGS)
def test_what_lies_around_an_image_must_fit_as_its_samples_do(backend: str) -> None:
    x, w = np.ones((1, 16, 9, 9), np.int8), np.ones((4, 16, 3, 3), np.uint8)
    rules = {"padding": 1, "dtype": "int32"}
    wide = (np.int16, -32768) if backend == PAIRS else (np.int8, -128)
    fitting: list[tuple[Any, int]] = [(np.int8, 127), (np.uint8, 255), wide]
    for x_type, value in fitting:
        image = x.astype(x_type)
        y = conv2d(image, w, backend=backend, fillvalue=value, **rules)
        np.testing.assert_array_equal(y, conv2d(image, w, backend="numpy", fillvalue=value, **rules))
    if backend == BYTES:
        with pytest.raises(
            Unsupported, match="the fill value is 128; it takes -128 to 127 around samples of int8"
        ):
            conv2d(x, w, backend=backend, fillvalue=128, **rules)
        with pytest.raises(
            Unsupported, match="the fill value is -1; it takes 0 to 255 around samples of uint8"
        ):
            conv2d(x.astype(np.uint8), w.astype(np.int8), backend=backend, fillvalue=-1, **rules)
        # Without a border there is nothing to be filled.
        conv2d(x, w, backend=backend, fillvalue=128, dtype="int32")


def test_what_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.ones((1, 16, 9, 9), np.int8), np.ones((4, 16, 3, 3), np.int8)
    text = str(explain(x, w, backend=PAIRS, dtype="int32"))
    assert "of 16 bits, in pairs" in text
    assert ("AVX-512 VNNI" in text) == (cpu.isa() == splitting.LEVEL and cpu.pair_unit())
    if not MISSING[BYTES]:
        assert ("emulated" in str(explain(x, w, backend=BYTES, dtype="int32"))) != cpu.matrix_unit()
        monkeypatch.setattr(compiled, "isa", lambda: "v3")
        told = registry.find(BYTES).unavailable()  # type: ignore[union-attr]
        assert told == "it needs the instruction set v4, and v3 is in use"


def test_a_wrong_setting_is_refused() -> None:
    program = f"import convpar\nprint(convpar.registry.find({PAIRS!r}).unavailable())"
    assert run(program, CONVPAR_VNNI="maybe") == "CONVPAR_VNNI must be 0 or 1, not 'maybe'"


def test_layers_of_small_integers_are_left_to_words() -> None:
    x, w = convpar.ArraySpec((4, 64, 56, 56), np.uint8), convpar.ArraySpec((64, 64, 3, 3), np.int8)
    chosen = convpar.plan(x, w, padding=1, dtype="int32").backend.name
    assert chosen == (BYTES if cpu.matrix_unit() and not MISSING[BYTES] else PAIRS)
    wide = convpar.ArraySpec((4, 64, 56, 56), np.int16)
    assert convpar.plan(wide, w, padding=1, dtype="int32").backend.name == PAIRS
