"""The rungs on the emulator: every option against the reference, in several orders of the threads."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from convpar.backend import Refusal
from convpar.backends import gpu
from convpar.backends.gpu.executors.emulator import LIMITS, ORDERS, Emulator, Settings

RUNGS = {rung.name: rung for rung in gpu.ROWS}
Array = np.ndarray[Any, Any]


def whole(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Array:
    """Small whole numbers, exact in every type and every order of summation."""
    kind = np.dtype(dtype)
    low = 0 if kind.kind in "ub" else -4
    values = rng.integers(low, 2 if kind.kind == "b" else 5, shape)
    return (values + (1j * rng.integers(low, 5, shape) if kind.kind == "c" else 0)).astype(kind)


PROBLEMS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "several tiles": ((2, 3, 21, 37), (4, 3, 3, 5), {}),
    "one pixel": ((1, 1, 1, 1), (1, 1, 1, 1), {}),
    "one row": ((1, 2, 1, 40), (1, 2, 1, 7), {}),
    "stride": ((2, 2, 19, 33), (3, 2, 3, 3), {"stride": (2, 3), "padding": 2}),
    "dilation": ((1, 2, 19, 33), (3, 2, 3, 2), {"dilation": (3, 2), "padding": "same"}),
    "groups": ((2, 6, 9, 18), (4, 3, 3, 3), {"groups": 2, "flip": True}),
    "fill": ((1, 2, 7, 9), (2, 2, 5, 4), {"padding": "full", "fillvalue": 2}),
    "wrap further than the image": (
        (1, 1, 3, 4),
        (1, 1, 3, 3),
        {"padding": (7, 6, 9, 8), "boundary": "wrap"},
    ),
    "symm": ((1, 1, 9, 4), (1, 1, 9, 3), {"padding": "full", "boundary": "symm"}),
    "mirror": ((1, 1, 5, 1), (1, 1, 3, 3), {"padding": "same", "boundary": "mirror"}),
    "nearest": ((1, 2, 18, 17), (2, 2, 7, 7), {"padding": (9, 0, 0, 9), "boundary": "nearest"}),
    "filter larger than the image": ((1, 1, 2, 3), (1, 1, 5, 7), {"padding": "same"}),
    "many channels": ((1, 40, 9, 9), (2, 40, 3, 3), {}),
    "no channels": ((2, 0, 9, 9), (2, 0, 3, 3), {}),
    "no images": ((0, 2, 9, 9), (2, 2, 3, 3), {}),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", RUNGS)
@pytest.mark.parametrize("case", PROBLEMS)
def test_problems(bench, name, case, order):
    bench.settings(order)
    x_shape, w_shape, rules = PROBLEMS[case]
    rng = np.random.default_rng(3)
    x, w = whole(rng, x_shape, "float32"), whole(rng, w_shape, "float32")
    bias = whole(rng, w_shape[:1], "float32")
    np.testing.assert_array_equal(bench.run(name, x, w, bias, **rules), bench.reference(x, w, bias, **rules))


def configs(name: str) -> list[dict[str, Any]]:
    """Each option of a rung set to each of its values, and some values for those without a list."""
    free = {
        "tile": ((1, 1), (3, 5), (17, 17), (2, 64)),
        "slice": (1, 2),
        "streams": (1, 2),
        "workspace_limit": (),
    }
    singles = []
    for key, option in RUNGS[name].options.items():
        for value in option.allowed or free[key]:
            if value != option.default:
                singles.append({key: value})
    return singles


@pytest.mark.parametrize(
    ("name", "config"),
    [pytest.param(n, c, id=f"{n}-{'-'.join(map(str, c.items()))}") for n in RUNGS for c in configs(n)],
)
def test_options(bench, name, config):
    rng = np.random.default_rng(4)
    x, w = whole(rng, (3, 4, 20, 35), "float32"), whole(rng, (2, 2, 3, 5), "float32")
    rules = {"groups": 2, "padding": (2, 1, 0, 3), "boundary": "symm", "flip": True}
    np.testing.assert_array_equal(
        bench.run(name, x, w, config=config, **rules), bench.reference(x, w, **rules)
    )


@pytest.mark.parametrize(
    "config",
    [
        dict(zip(("filters", "loops", "lanes", "loading", "layout"), values, strict=True))
        for values in itertools.product(
            ("constant", "shared"),
            ("pragma", "unrolled"),
            ("columns", "rows"),
            ("unrolled", "full"),
            ("channel-last",),
        )
    ],
    ids=lambda c: "-".join(c.values()),
)
def test_options_of_the_tile_together(bench, config):
    bench.settings("shuffle=1")
    rng = np.random.default_rng(5)
    x, w = whole(rng, (1, 3, 12, 19), "int16"), whole(rng, (2, 3, 3, 5), "int16")
    rules = {"padding": "same", "stride": (1, 2)}
    y = bench.run("gpu-tiled", x, w, config=config | {"tile": (4, 6), "restrict": True}, **rules)
    np.testing.assert_array_equal(y, bench.reference(x, w, **rules))


INPUTS = RUNGS["gpu-naive"].capabilities.input_dtypes


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-tiled-constant", "gpu-atomic"])
@pytest.mark.parametrize("dtype", INPUTS)
def test_types(bench, name, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(6)
    x, w = whole(rng, (1, 2, 9, 20), dtype), whole(rng, (2, 2, 3, 3), dtype)
    rules = {"dtype": "int32"} if dtype == "bool" else {}
    rules["padding"] = "same"
    np.testing.assert_array_equal(bench.run(name, x, w, **rules), bench.reference(x, w, **rules))


MIXED = [
    ("uint8", "int8", None, "wrap"),
    ("uint8", "float32", "uint8", "wrap"),
    ("int16", "float32", "int16", "saturate"),
    ("uint8", "uint8", "int8", "saturate"),
    ("int16", "int32", "uint8", "saturate"),
    ("uint64", "int64", None, "wrap"),
    ("uint32", "uint16", "uint32", "saturate"),
    ("uint32", "uint16", "uint64", "saturate"),
    ("int8", "int64", "uint64", "wrap"),
    ("int32", "float32", None, "wrap"),
    ("float16", "uint8", None, "wrap"),
    ("float64", "int8", "float16", "wrap"),
    ("float64", "float64", "int64", "wrap"),
    ("float32", "complex64", None, "wrap"),
    ("complex128", "uint16", "complex64", "wrap"),
    ("bool", "float16", "float16", "wrap"),
]


@pytest.mark.parametrize(("x_dtype", "w_dtype", "dtype", "overflow"), MIXED)
@pytest.mark.parametrize("name", ["gpu-naive", "gpu-tiled", "gpu-atomic"])
def test_mixed_types(bench, name, x_dtype, w_dtype, dtype, overflow):
    rng = np.random.default_rng(7)
    x, w = whole(rng, (1, 3, 9, 20), x_dtype), whole(rng, (2, 3, 3, 3), w_dtype)
    x[0, :, 0, 0] = 1 if x.dtype.kind == "b" else 120
    bias = np.arange(2, dtype=w_dtype)
    rules = {"dtype": dtype, "overflow": overflow, "fillvalue": 1, "padding": 1}
    np.testing.assert_array_equal(bench.run(name, x, w, bias, **rules), bench.reference(x, w, bias, **rules))


def test_floats_become_integers_by_rounding_half_to_even(bench):
    values = [0.5, 1.5, 2.5, -0.5, 254.5, 255.4, 255.5, 1e30, -1e30, np.inf, -np.inf, np.nan, -1.0]
    x = np.array(values, np.float64).reshape(1, 1, 1, -1)
    w = np.ones((1, 1, 1, 1))
    for dtype in ("uint8", "int8", "int32", "int64", "uint64"):
        y = bench.run("gpu-naive", x, w, dtype=dtype)
        np.testing.assert_array_equal(y, bench.reference(x, w, dtype=dtype), err_msg=dtype)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", ["float32", "float64"])
def test_narrow_results_are_rounded_once(bench, dtype, wide):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    rng = np.random.default_rng(8)
    bits = np.arange(2**16, dtype=np.uint16)
    other = rng.integers(0, 2**32, 4000, dtype=np.uint64).astype(np.uint32)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = bits.view(dtype).astype(wide)
        exact = exact[np.isfinite(exact)]
        near = [exact * (1 + step) for step in (0, 2.0**-12, 2.0**-11, 2.0**-9, -(2.0**-30))]
        more = [other.view(np.float32), [np.inf, -np.inf, np.nan, 65519.99, 65520.0]]
        x = np.concatenate([*near, *more]).astype(wide).reshape(1, 1, 1, -1)
        y = bench.run("gpu-naive", x, np.ones((1, 1, 1, 1), wide), dtype=dtype)
        np.testing.assert_array_equal(y.astype(wide), x.astype(dtype).astype(wide))


def test_the_smallest_float64_numbers_become_zero_in_bfloat16(bench):
    pytest.importorskip("ml_dtypes", reason="ml_dtypes isn't installed: pip install 'convpar[test]'")
    x = np.array([[1e-308, -1e-308, 5e-324, 1e-46, 0.0, -1.0]]).reshape(1, 1, 1, 6)
    w = np.ones((1, 1, 1, 1))
    y = bench.run("gpu-naive", x, w, dtype="bfloat16")
    np.testing.assert_array_equal(np.asarray(y, np.float64), [[[[0, 0, 0, 0, 0, -1]]]])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_narrow_number_is_read_right(bench, dtype):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    x = np.arange(2**16, dtype=np.uint16).view(dtype).reshape(1, 1, 256, 256)
    y = bench.run("gpu-naive", x, np.ones((1, 1, 1, 1), np.float32))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(y, x.astype(np.float32))


def test_overflow_raises_with_the_first_place(bench):
    x = np.zeros((3, 1, 6, 40), np.uint8)
    x[2, 0, 5, 39] = x[1, 0, 4, 33] = x[1, 0, 4, 35] = 255
    w = np.full((2, 1, 1, 1), 1, np.uint8)
    w[1] = 2
    for config in (None, {"slice": 1}):
        with pytest.raises(OverflowError, match=r"doesn't fit uint8: the first place is \(1, 1, 4, 33\)"):
            bench.run("gpu-naive", x, w, overflow="raise", config=config)
    y = bench.run("gpu-naive", x, w[:1], overflow="raise")
    np.testing.assert_array_equal(y, x)


def test_zero_times_infinity_stays_where_it_belongs(bench):
    x = np.ones((1, 1, 20, 20), np.float32)
    x[0, 0, 7, 8] = np.inf
    x[0, 0, 15, 3] = np.nan
    w = np.zeros((1, 1, 3, 3), np.float32)
    w[0, 0, 1, 1] = 1
    for name in RUNGS:
        y = bench.run(name, x, w, padding="same")
        np.testing.assert_array_equal(y, bench.reference(x, w, padding="same"), err_msg=name)


@pytest.mark.parametrize("name", RUNGS)
def test_device_arrays_of_any_strides(bench, name):
    """In place, the kernel walks the caller's strides; gaps in the output stay as they were."""
    rng = np.random.default_rng(9)
    store = whole(rng, (2, 30, 44, 6), "float32")
    x = store[:, ::-1, 1:40:2, ::3].transpose(0, 3, 1, 2)
    w = whole(rng, (6, 3, 2, 4), "float32")[::2, :, ::-1, ::-1].transpose(0, 2, 1, 3)
    bias = whole(rng, (6,), "float32")[::-2]
    big = np.full((2, 60, 60, 7), 77.0, np.float32)
    expected = bench.reference(x, w, bias)
    out = big[:, : 2 * expected.shape[2] : 2, -1 : -1 - expected.shape[3] : -1, 1 : 1 + 2 * 3 : 2].transpose(
        0, 3, 1, 2
    )
    assert out.shape == expected.shape
    copies = store.copy(), w.copy(), bias.copy()
    bench.run(name, x, w, bias, out, in_place=True)
    np.testing.assert_array_equal(out, expected)
    out[...] = 77
    assert (big == 77).all()
    for now, before in zip((store, w, bias), copies, strict=True):
        np.testing.assert_array_equal(now, before)


def test_workspace_of_just_the_size_told(bench):
    rng = np.random.default_rng(10)
    x, w = whole(rng, (5, 2, 9, 20), "uint8"), whole(rng, (2, 2, 3, 3), "uint8")
    rules: dict[str, Any] = {
        "dtype": "uint8",
        "overflow": "saturate",
        "in_place": True,
        "config": {"slice": 2},
    }
    plan = bench.plan("gpu-atomic", x, w, **rules)
    size = plan.workspace_bytes()
    block = np.full(size + 512, 0xA5, np.uint8)
    y = bench.run("gpu-atomic", x, w, workspace=block[256:-256], **rules)
    np.testing.assert_array_equal(y, bench.reference(x, w, dtype="uint8", overflow="saturate"))
    assert (block[:256] == 0xA5).all()
    assert (block[-256:] == 0xA5).all()


def test_half_sums_are_half(bench):
    x = np.full((1, 1, 1, 2), 1.0, np.float32)
    x[..., 1] = 2.0**-12
    w = np.ones((1, 1, 1, 2), np.float32)
    assert bench.run("gpu-half", x, w)[0, 0, 0, 0] == 1
    assert bench.run("gpu-half", x, w, config={"sum": "float"})[0, 0, 0, 0] == np.float32(1 + 2.0**-12)


def tiled_small(name: str) -> dict[str, Any]:
    """A config with small tiles where the rung has any, and two images a slice."""
    return {"slice": 2} | ({"tile": (4, 8)} if "tile" in RUNGS[name].options else {})


@pytest.mark.parametrize("name", RUNGS)
def test_paths_and_thresholds(bench, name):
    """Each path begins at its threshold, and every path that a plan declares is run."""

    def plan(sizes: dict[str, int], config: dict[str, Any]) -> Any:
        x = np.ones((sizes["n"], sizes["c"], sizes["oh"] + 2, sizes["ow"] + 2), np.float32)
        w = np.ones((sizes["oc"], sizes["c"], 3, 3), np.float32)
        made = bench.plan(name, x, w, config=config)
        assert not made.paths_run()
        made.run(x, w, None, np.empty(made.problem.out_shape, np.float32))
        assert made.paths_run() == set(made.paths)
        return made

    base = {"n": 1, "c": 1, "oh": 3, "ow": 3, "oc": 1}
    small = plan(base | {"n": 3}, tiled_small(name))
    assert ("n", 3, "several slices") in [(t.axis, t.value, t.path) for t in small.thresholds]
    for t in small.thresholds:
        # Beyond, a problem would be too large for the emulator to be worth it. What the plan chose by the sizes stays.
        if t.axis in base and t.value <= 200:
            assert t.path in plan(base | {t.axis: t.value}, small.config).paths, t
            assert t.path not in plan(base | {t.axis: t.value - 1}, small.config).paths, t


def test_a_grid_smaller_than_the_work(bench):
    bench.use(Emulator(Settings(limits=dataclasses.replace(LIMITS, grid=(2, 2, 2)))))
    rng = np.random.default_rng(11)
    x, w = whole(rng, (5, 2, 21, 37), "float32"), whole(rng, (3, 2, 3, 3), "float32")
    for name, rung in RUNGS.items():
        for filters in rung.options["filters"].allowed or ():
            config = tiled_small(name) | {"filters": filters}
            assert "several tiles a block" in bench.plan(name, x, w, config=config).paths
            np.testing.assert_array_equal(bench.run(name, x, w, config=config), bench.reference(x, w))


def test_refusals_say_what_is_missing(bench):
    x, w = np.zeros((1, 4, 40, 40), np.float32), np.zeros((16, 4, 7, 7), np.float32)

    def reason(name: str, x: Array = x, w: Array = w, **rules: Any) -> str:
        plan = bench.plan(name, x, w, **rules)
        assert isinstance(plan, Refusal)
        return plan.reason

    assert reason("gpu-tiled", config={"loading": "full", "tile": (32, 32)}) == (
        "needs 1444 threads a block, this GPU has 1024"
    )
    big = np.zeros((64, 16, 7, 7), np.float32)
    assert reason("gpu-constant", np.zeros((1, 16, 9, 9), np.float32), big) == (
        "needs 196 kB of constant memory for the filters, this GPU has 64"
    )
    bench.use(Emulator(Settings(limits=dataclasses.replace(LIMITS, shared=48 * 1024))))
    assert reason("gpu-tiled", stride=9, padding=99, dilation=9) == (
        "needs 142 kB of shared memory, this GPU has 48"
    )
    assert reason("gpu-atomic", dtype="float16", config={"workspace_limit": 100}) == (
        "needs 73984 bytes of workspace, one image at a time, and workspace_limit is 100"
    )
    assert "float64" in reason("gpu-half", x.astype(float), w.astype(float))


def test_a_rung_shows_its_sources():
    for rung in RUNGS.values():
        names = [name for name, _ in rung.source()]
        assert names[0] == f"kernels/{rung.kernels[0]}.cu"
        assert {"kernels/device.cuh", "kernels/numbers.cuh", "kernels/problem.cuh"} < set(names)
        header = rung.source()[0][1].splitlines()[:4]
        assert [line for line in header if line.startswith(("// Builds on: ", "// Idea: ", "// Limit: "))]
