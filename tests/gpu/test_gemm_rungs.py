"""The rungs that multiply matrices: every tile edge, where taps are kept, the matrix units' fragments and rounding."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest
from scipy import signal

import convpar
from convpar.backend import ErrorContract, Refusal
from convpar.backends import gpu
from convpar.backends.gpu import compile
from convpar.backends.gpu.executors.emulator import ORDERS, EmulationError, Emulator, Settings
from convpar.backends.gpu.launch import Launch, aligned
from convpar.backends.gpu.nvrtc import resources
from convpar.conformance import error_bounds
from convpar.conformance.case import DATA
from convpar.problem import Problem

RUNGS = ("gpu-im2col", "gpu-fused", "gpu-tensorcore")
Array = np.ndarray[Any, Any]


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any = "float32") -> Array:
    """Small whole numbers: exact in half precision, and in every order of summation."""
    kind = np.dtype(dtype)
    values = rng.integers(0 if kind.kind in "ub" else -4, 2 if kind.kind == "b" else 5, shape)
    return (values + (1j * rng.integers(-4, 5, shape) if kind.kind == "c" else 0)).astype(kind)


def by_scipy(x: Array, w: Array) -> Array:
    """A plain "valid" convolution layer, summed over channels of SciPy's own results."""
    return np.array([[sum(map(_plane, image, f)) for f in w] for image in x])


def _plane(x: Array, w: Array) -> Array:
    return signal.correlate2d(x, w, mode="valid")


# -- Every edge of the three dimensions of the product


@pytest.mark.parametrize("oc", [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 33, 65])
@pytest.mark.parametrize("name", RUNGS)
def test_output_channels(bench, name, oc):
    rng = np.random.default_rng(oc)
    x, w = whole(rng, (2, 3, 11, 13)), whole(rng, (oc, 3, 3, 5))
    np.testing.assert_array_equal(bench.run(name, x, w), by_scipy(x, w))


@pytest.mark.parametrize("positions", [1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 257])
@pytest.mark.parametrize("oc", [4, 20])
@pytest.mark.parametrize("name", RUNGS)
def test_positions(bench, name, oc, positions):
    rng = np.random.default_rng(positions)
    x, w = whole(rng, (1, 2, 1, positions + 2)), whole(rng, (oc, 2, 1, 3))
    np.testing.assert_array_equal(bench.run(name, x, w), by_scipy(x, w))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("terms", [1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 49, 64, 65])
@pytest.mark.parametrize("name", RUNGS)
def test_taps(bench, name, terms, order):
    """Fewer taps than a slab, just one slab, and one more."""
    bench.settings(order)
    rng = np.random.default_rng(terms)
    channels = 7 if terms == 49 else 1
    columns = terms // channels
    x, w = whole(rng, (1, channels, 5, columns + 6)), whole(rng, (3, channels, 1, columns))
    np.testing.assert_array_equal(bench.run(name, x, w), by_scipy(x, w))


LAYERS = {
    "layer 1": ((1, 1, 26, 26), (4, 1, 7, 7)),
    "layer 2": ((1, 4, 16, 18), (16, 4, 7, 7)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", RUNGS)
def test_the_studies_layers(bench, name, layer, order):
    bench.settings(order)
    rng = np.random.default_rng(0)
    x_shape, w_shape = LAYERS[layer]
    x, w = whole(rng, x_shape), whole(rng, w_shape)
    np.testing.assert_array_equal(bench.run(name, x, w), by_scipy(x, w))


# -- Options


RULES: dict[str, Any] = {
    "groups": 2,
    "padding": (2, 1, 0, 3),
    "boundary": "mirror",
    "flip": True,
    "stride": (1, 2),
    "dilation": (2, 1),
}


def options(name: str) -> list[dict[str, Any]]:
    """What belongs together, together; for the tensor cores each shape with each grid of warps too."""
    kept = {"reuse": ("none", "registers", "shared"), "loops": ("rolled", "unrolled")}
    if name == "gpu-tensorcore":
        sizes = {"block": ("16x16x16", "8x32x16"), "warps": ((1, 1), (1, 8), (4, 2)), "depth": (16, 32)}
    else:
        tiles = ((None, (1, 1)), (None, (4, 4)), ((8, 32), (4, 1)), ((4, 4), (1, 1)), ((10, 10), (1, 2)))
        sizes = {"tile and block": tiles, "depth": (4, 16)}
    if name == "gpu-im2col":
        kept = {"loops": ("pragma",), "filters": ("global", "constant")}
    found = []
    for values in itertools.product(*kept.values(), *sizes.values()):
        config = dict(zip((*kept, *sizes), values, strict=True))
        if "tile and block" in config:
            config["tile"], config["block"] = config.pop("tile and block")
        found.append({key: value for key, value in config.items() if value is not None})
    return found


@pytest.mark.parametrize("name", RUNGS)
def test_options_together(bench, name):
    rng = np.random.default_rng(4)
    x, w = whole(rng, (2, 4, 9, 23)), whole(rng, (18, 2, 3, 5))
    bias = whole(rng, (18,))
    right = bench.reference(x, w, bias, **RULES)
    for number, config in enumerate(options(name)):
        bench.settings(f"shuffle={number}")
        y = bench.run(name, x, w, bias, config=config, **RULES)
        np.testing.assert_array_equal(y, right, err_msg=str(config))


@pytest.mark.parametrize("reuse", ["none", "registers", "shared"])
@pytest.mark.parametrize("sizes", [(1, 1), (1, 9), (9, 1), (2, 3), (5, 5)])
@pytest.mark.parametrize("name", ["gpu-fused", "gpu-tensorcore"])
def test_taps_are_carried_from_row_to_row_and_channel_to_channel(bench, name, sizes, reuse):
    """Steps that are shorter and longer than a filter's row, and than a whole filter."""
    rng = np.random.default_rng(5)
    x, w = whole(rng, (1, 11, 10, 12)), whole(rng, (3, 11, *sizes))
    y = bench.run(name, x, w, config={"reuse": reuse})
    np.testing.assert_array_equal(y, by_scipy(x, w))


def test_the_plan_says_what_it_chose(bench):
    x = np.zeros((1, 1, 20, 20), np.float32)

    def config(name: str, oc: int, size: int, given: dict[str, Any] | None = None) -> dict[str, Any]:
        return dict(bench.plan(name, x, np.zeros((oc, 1, size, size), np.float32), config=given).config)

    assert config("gpu-fused", 4, 3, {"block": (4, 4)})["tile"] == (64, 64)
    few, many = config("gpu-tensorcore", 8, 3), config("gpu-tensorcore", 9, 7)
    assert (few["block"], few["warps"], few["depth"]) == ("8x32x16", (1, 4), 16)
    assert (many["block"], many["warps"], many["depth"]) == ("16x16x16", (1, 4), 32)
    assert config("gpu-tensorcore", 100, 3)["warps"] == (4, 4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"tile": (18, 16), "block": (4, 4)}, r"tile \(18, 16\) is not made up of whole blocks \(4, 4\)"),
        ({"tile": (4, 64), "block": (4, 4)}, r"each of the tile's 64 positions needs a thread .* leaves 16"),
        ({"tile": (64, 64)}, "needs 4096 threads a block, this GPU has 1024"),
    ],
)
@pytest.mark.parametrize("name", ["gpu-im2col", "gpu-fused"])
def test_what_has_no_launch_is_refused(bench, name, config, reason):
    x, w = np.zeros((1, 1, 9, 9)), np.zeros((1, 1, 3, 3))
    refusal = bench.plan(name, x, w, config=config)
    assert isinstance(refusal, Refusal)
    assert re.search(reason, refusal.reason)


# -- Types


@pytest.mark.parametrize("dtype", gpu.ROWS[0].capabilities.input_dtypes)
@pytest.mark.parametrize("name", RUNGS)
def test_types(bench, name, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(6)
    x, w = whole(rng, (1, 3, 9, 20), dtype), whole(rng, (18, 3, 3, 3), dtype)
    takes = next(r for r in gpu.ROWS if r.name == name).capabilities
    rules: dict[str, Any] = {"padding": "same"}
    if name == "gpu-tensorcore" and np.dtype(dtype).kind in "biu":
        rules["dtype"] = "float32"
    elif dtype == "bool":
        rules["dtype"] = "int32"
    if dtype not in takes.input_dtypes:
        assert f"x is {dtype}" in bench.plan(name, x, w, **rules).reason
        return
    np.testing.assert_array_equal(bench.run(name, x, w, **rules), bench.reference(x, w, **rules))


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "dtype", "overflow"),
    [
        ("uint8", "float32", "uint8", "wrap"),
        ("uint8", "float32", "int8", "saturate"),
        ("float16", "float32", None, "wrap"),
        ("float32", "float16", "float16", "wrap"),
        ("uint8", "float16", None, "wrap"),
    ],
)
@pytest.mark.parametrize("name", RUNGS)
def test_mixed_types(bench, name, x_dtype, w_dtype, dtype, overflow):
    rng = np.random.default_rng(7)
    x, w = whole(rng, (1, 3, 9, 20), x_dtype), whole(rng, (9, 3, 3, 3), w_dtype)
    x[0, :, 0, 0] = 120
    bias = np.arange(9, dtype=w_dtype)
    rules = {"dtype": dtype, "overflow": overflow, "fillvalue": 1, "padding": 1}
    np.testing.assert_array_equal(bench.run(name, x, w, bias, **rules), bench.reference(x, w, bias, **rules))


# -- Infinity and NaN


@pytest.mark.parametrize("name", RUNGS)
def test_zeros_past_the_edges_meet_no_infinity(bench, name):
    """A slab's rest beyond the last tap, channel and position is zero or unused: 0 * inf must not come up there."""
    rng = np.random.default_rng(8)
    x, w = whole(rng, (1, 2, 7, 30)), whole(rng, (5, 2, 3, 3))
    x[0, 1, 6, 29], x[0, 0, 0, 0], w[4, 1, 2, 2] = np.inf, np.nan, -np.inf
    np.testing.assert_array_equal(bench.run(name, x, w), bench.reference(x, w))


# -- Workspace


def test_patches_stay_within_the_limit(bench):
    rng = np.random.default_rng(9)
    x, w = whole(rng, (7, 2, 9, 20)), whole(rng, (5, 2, 3, 3))
    each = aligned(2 * 9 * 7 * 18 * 4)  # channels, taps, positions, bytes
    for in_place in (False, True):
        extra = 0 if in_place else x[0].nbytes + 5 * 7 * 18 * 4
        for images in (1, 3, 7):
            limit = images * (each + extra)
            rules: dict[str, Any] = {"config": {"workspace_limit": limit}, "in_place": in_place}
            plan = bench.plan("gpu-im2col", x, w, **rules)
            assert plan.workspace_bytes() <= limit
            assert plan.programs[0].images == images
            y = bench.run("gpu-im2col", x, w, **rules)
            np.testing.assert_array_equal(y, by_scipy(x, w))
    refusal = bench.plan("gpu-im2col", x, w, config={"workspace_limit": each // 2}, in_place=True)
    assert "one image at a time" in refusal.reason


def test_offsets_into_many_patches_take_64_bits(bench):
    w = np.empty((1, 32, 7, 7), np.float32)

    def product(size: int) -> str:
        x = np.broadcast_to(np.float32(0), (1, 32, size, size))
        out = np.broadcast_to(np.float32(0), (1, 1, size - 6, size - 6))
        config = {"workspace_limit": 2**40}
        plan = bench.plan("gpu-im2col", x, w, out=out, config=config, in_place=True)
        return str(plan.programs[0].launches[-1])

    assert "Index=int" in product(500)
    assert "Index=long long" in product(900)


@pytest.mark.parametrize("name", ["gpu-fused", "gpu-tensorcore"])
def test_fused_patches_take_no_memory(bench, name):
    x, w = np.zeros((3, 2, 40, 40), np.float16), np.zeros((4, 2, 3, 3), np.float16)
    plan = bench.plan(name, x, w, in_place=True)
    assert plan.workspace_bytes() < 1024


# -- Matrix units


# Row and column of the half in register `i // 2` of a lane, as the PTX manual lists them for mma.m16n8k16:
# with g = lane // 4 and t = lane % 4.
def _a(lane: int, i: int) -> tuple[int, int]:
    g, t = divmod(lane, 4)
    row = g if i < 2 or 4 <= i < 6 else g + 8
    return row, t * 2 + (i & 1) + (0 if i < 4 else 8)


def _b(lane: int, i: int) -> tuple[int, int]:
    g, t = divmod(lane, 4)
    return t * 2 + (i & 1) + (0 if i < 2 else 8), g


def _c(lane: int, i: int) -> tuple[int, int]:
    g, t = divmod(lane, 4)
    return (g if i < 2 else g + 8), t * 2 + (i & 1)


def _multiplied(a: Array, b: Array, c: Array, settings: str = "") -> Array:
    """a @ b + c by one warp of the emulator: every lane is handed its fragments and hands back its own of the sum."""
    body = """
    #include "problem.cuh"
    template <class I>
    __device__ void trial(const Arrays<I>& arrays, const Problem&) {
        const int* given = arrays.x + 10 * lane();
        MatrixA a;
        MatrixB b;
        MatrixC c;
        for (int i = 0; i < 4; ++i) a.pairs[i].bits = unsigned(given[i]);
        for (int i = 0; i < 2; ++i) b.pairs[i].bits = unsigned(given[4 + i]);
        for (int i = 0; i < 4; ++i) memcpy(c.values + i, given + 6 + i, 4);
        matrix_multiply_add(c, a, b);
        for (int i = 0; i < 4; ++i) memcpy(arrays.out + 4 * lane() + i, c.values + i, 4);
    }
    """
    executor = Emulator(
        Settings.parse(settings), lambda name: body if name == "trial.cu" else compile.read_kernel(name)
    )
    types = dict.fromkeys(("X", "W", "Operand", "Sum", "Out", "Index"), "int")
    launch = Launch("trial", tuple(types.items()), (1, 1, 1), (32, 1, 1), ())
    given, out = np.zeros((32, 10), np.int32), np.zeros((32, 4), np.int32)
    for lane in range(32):
        given[lane, :4] = np.array([a[_a(lane, i)] for i in range(8)], np.float16).view(np.int32)
        given[lane, 4:6] = np.array([b[_b(lane, i)] for i in range(4)], np.float16).view(np.int32)
        given[lane, 6:] = np.array([c[_c(lane, i)] for i in range(4)], np.float32).view(np.int32)
    queue = executor.queue(0, None)
    queue.launch(executor.load(launch, 0), [given.ctypes.data, 0, 0, out.ctypes.data, 0, 0, 0, 0, 0])
    result = np.zeros((16, 8), np.float32)
    for lane, i in itertools.product(range(32), range(4)):
        result[_c(lane, i)] = out[lane].view(np.float32)[i]
    return result


@pytest.mark.parametrize("order", ORDERS)
def test_a_warp_multiplies_the_fragments_of_its_lanes(order):
    rng = np.random.default_rng(10)
    a, b, c = rng.integers(-9, 10, (16, 16)), rng.integers(-9, 10, (16, 8)), rng.integers(-99, 99, (16, 8))
    np.testing.assert_array_equal(_multiplied(a, b, c, order), a @ b + c)


def test_each_element_of_a_fragment_goes_to_its_own_place():
    """One 1 among zeros at a time finds every wrong row, column and register."""
    for k in range(16):
        a, b = np.zeros((16, 16)), np.zeros((16, 8))
        a[:, k], b[k] = np.arange(1, 17), 32.0 * np.arange(1, 9)
        np.testing.assert_array_equal(_multiplied(a, b, np.zeros((16, 8))), np.outer(a[:, k], b[k]))


def test_sums_of_the_emulated_unit_are_cut():
    a, b = np.zeros((16, 16)), np.zeros((16, 8))
    # The float after 1 is 1 + 2**-23; three quarters of the way there would be rounded up to it.
    a[:2, 0], b[0, 0] = (3 * 2.0**-12, -3 * 2.0**-12), 2.0**-13
    c = np.zeros((16, 8))
    c[:2, 0] = 1, -1
    np.testing.assert_array_equal(_multiplied(a, b, c)[:2, 0], [1, -1])


def test_a_subnormal_factor_cuts_the_sum_as_the_smallest_normal_one_would(bench):
    x = np.array([7 * 2.0**-24, 9 * 2.0**-24], np.float32).reshape(1, 1, 1, 2)
    w = np.array([-1218 * 2.0**-14, 1031 * 2.0**-21], np.float32).reshape(1, 1, 1, 2)
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype)
    y = bench.run("gpu-tensorcore", x, w)
    exact = np.float64(x[0, 0, 0]) @ np.float64(w[0, 0, 0])
    # All factors are halves. The first product has exponent -14 - 4, so bits below 2**-41 are lost.
    assert 0 < abs(y.item() - exact) < 2.0**-41
    assert error_bounds.mismatch(p, error_bounds.expected(p, _contract(), x, w, None), y) is None
    off = (y - 2.0**-38).astype(np.float32)
    assert error_bounds.mismatch(p, error_bounds.expected(p, _contract(), x, w, None), off) is not None


def _contract() -> ErrorContract:
    return next(r for r in gpu.ROWS if r.name == "gpu-tensorcore").capabilities.error


@pytest.mark.parametrize("data", ["uniform", "wide", "bright", "cancelling", "subnormal", "extremes"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", ["8x32x16", "16x16x16"])
def test_tensor_cores_keep_the_contract(bench, shape, dtype, data):
    rng = np.random.default_rng(11)
    kind = np.dtype(dtype)
    x, w = DATA[data](rng, (1, 8, 12, 14), kind, "x"), DATA[data](rng, (9, 8, 3, 3), kind, "w")
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, padding=1)
    y = bench.run("gpu-tensorcore", x, w, padding=1, config={"block": shape})
    right = error_bounds.expected(p, _contract(), x, w, None)
    assert error_bounds.mismatch(p, right, y) is None
    if data == "uniform":
        # It tells: a channel too few is wrong, and so are rounded factors where none are declared.
        fewer = bench.run("gpu-tensorcore", x[:, :7], w[:, :7], padding=1)
        assert error_bounds.mismatch(p, right, fewer) is not None
        plain = error_bounds.expected(p, dataclasses.replace(_contract(), operand_dtype=None), x, w, None)
        assert (error_bounds.mismatch(p, plain, y) is None) == (dtype == "float16")


def test_factors_are_rounded_and_sums_are_not(bench):
    x = np.array([1 + 2.0**-12, 2048, 1, 1], np.float32).reshape(1, 1, 1, 4)
    one = np.ones((1, 1, 1, 1), np.float32)
    assert bench.run("gpu-tensorcore", x, one)[0, 0, 0, 0] == 1  # half precision ends at 2**-10
    assert bench.run("gpu-tensorcore", x[..., 1:], np.ones((1, 1, 1, 3), np.float32))[0, 0, 0, 0] == 2050


def test_choosers_take_tensor_cores_only_where_asked(monkeypatch):
    monkeypatch.setenv("CONVPAR_GPU", "emulate")
    x, w = np.zeros((4, 8, 40, 40), np.float32), np.zeros((16, 8, 3, 3), np.float32)

    def served(accuracy: Any) -> list[str]:
        made = convpar.explain(x, w, backend="gpu", accuracy=accuracy)
        return [name for name, why in made.considered if why is None or why.startswith("estimated")]

    assert "gpu-fused" in served(None)
    assert "gpu-tensorcore" not in served(None)
    assert "gpu-tensorcore" in served(1e-3)
    said = str(convpar.explain(x, w, backend="gpu-tensorcore"))
    assert "sums in float32, factors rounded to float16" in said
    with pytest.raises(convpar.Unsupported, match="elementwise, factors rounded to float16"):
        convpar.conv2d(x, w, backend="gpu-tensorcore", accuracy="elementwise")


# -- Faults that the emulator must see


@pytest.mark.parametrize(
    ("name", "kernel", "old"),
    [
        ("gpu-im2col", "gemm", "            __syncthreads();\n            block.add_product"),
        ("gpu-fused", "fused", "            __syncthreads();\n            tabulate_taps"),
        ("gpu-tensorcore", "tensorcore", "            __syncthreads();\n            tabulate_taps"),
    ],
)
def test_a_missing_barrier_between_load_and_product(bench, name, kernel, old):
    rng = np.random.default_rng(12)
    x, w = whole(rng, (1, 4, 9, 12)), whole(rng, (9, 4, 3, 3))
    bench.edited(**{kernel: (old, old.split("\n")[1])})
    with pytest.raises(EmulationError, match=r"no barrier between|no thread of the block has written"):
        bench.run(name, x, w)


@pytest.mark.parametrize("name", ["gpu-fused", "gpu-tensorcore"])
def test_a_missing_barrier_after_the_product(bench, name):
    rng = np.random.default_rng(12)
    x, w = whole(rng, (1, 4, 9, 12)), whole(rng, (9, 4, 3, 3))
    kernel = name.removeprefix("gpu-")
    text = compile.read_kernel(f"{kernel}.cu")
    last = text.rindex("            __syncthreads();\n")
    bench.edited(**{kernel: (text[last:], text[last:].replace("            __syncthreads();\n", "", 1))})
    with pytest.raises(EmulationError, match="no barrier between"):
        bench.run(name, x, w)


# -- What the compiler makes of them


@pytest.fixture(scope="module")
def nvrtc() -> None:
    cupy = pytest.importorskip("cupy", reason="compiling for a GPU needs CuPy")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError) as e:
        pytest.skip(f"CuPy finds no NVRTC: {e}")


def product(bench, name: str, oc: int, **config: Any) -> Launch:
    """The launch that multiplies, for the second layer of the studies."""
    x, w = np.empty((10, 4, 40, 40), np.float32), np.empty((oc, 4, 7, 7), np.float32)
    return bench.plan(name, x, w, in_place=True, config=config or None).programs[0].launches[-1]


@pytest.mark.parametrize(
    ("arch", "instruction"),
    [
        ("sm_75", "mma.sync.aligned.m16n8k8."),
        ("sm_80", "mma.sync.aligned.m16n8k16."),
        ("sm_120", "m16n8k16."),
    ],
)
def test_tensor_cores_are_used(bench, nvrtc, arch, instruction):
    made = resources(product(bench, "gpu-tensorcore", 16), arch)
    assert instruction in made.ptx
    assert ("m16n8k8." in made.ptx) == (arch == "sm_75")


@pytest.mark.parametrize("name", ["gpu-fused", "gpu-tensorcore"])
def test_kept_taps_need_fewer_divisions(bench, nvrtc, name):
    """In the loop over slabs there is none."""

    def divisions(reuse: str) -> int:
        ptx = resources(product(bench, name, 16, reuse=reuse), "sm_90").ptx
        load, end = ptx.index("bar.sync"), ptx.rindex("bar.sync")
        # The innermost loop around both barriers: the last label before them that is jumped back to.
        heads = (
            ptx.index(f"{jump[1]}:")
            for jump in re.finditer(r"bra (?:.uni )?\s*(\$\w+);", ptx)
            if jump.start() > end
        )
        loop = ptx[max(head for head in heads if head < load) : end]
        return loop.count("div.s32") + loop.count("rem.s32")

    assert divisions("none") > 0
    assert divisions("registers") == 0


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
@pytest.mark.parametrize("name", RUNGS)
def test_no_option_spills(bench, nvrtc, name, arch):
    for key, option in next(r for r in gpu.ROWS if r.name == name).options.items():
        for value in option.allowed or ():
            made = resources(product(bench, name, 16, **{key: value}), arch)
            assert (made.stack, made.spills) == (0, 0), (key, value, made)
