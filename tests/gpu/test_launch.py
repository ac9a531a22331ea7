"""Launch arithmetic: what is decided from shapes and types alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from convpar import registry
from convpar.backend import Device, Layout, Layouts, Refusal
from convpar.backends import gpu
from convpar.backends.gpu import compile, launch
from convpar.backends.gpu.executors.emulator import LIMITS, Emulator, Settings
from convpar.backends.gpu.launch import (
    COMPILED_COLUMNS,
    COMPILED_ROWS,
    Draft,
    Launch,
    Limits,
    NoLaunch,
    Place,
    Program,
    dense_layouts,
    draw,
    is_dense,
    parameter_dtype,
)
from convpar.problem import Problem

RUNGS = {rung.name: rung for rung in gpu.ROWS}
GPU = Limits(name="a GPU")


def contiguous(p: Problem) -> Layouts:
    """The layouts of new arrays."""
    return Layouts(
        Layout.contiguous(p.x_shape, p.x_dtype.itemsize),
        Layout.contiguous(p.w_shape, p.w_dtype.itemsize),
        None if p.bias_dtype is None else Layout((p.bias_dtype.itemsize,)),
        Layout.contiguous(p.out_shape, p.out_dtype.itemsize),
    )


def program(name: str, p: Problem, limits: Limits = GPU, images: int | None = None, **config: Any) -> Program:
    """What the rung draws."""
    rung = RUNGS[name]
    values = {key: option.default for key, option in rung.options.items()} | config
    found = draw(rung.recipe, p, contiguous(p), values, limits, p.n if images is None else images)
    assert isinstance(found, Program), found
    return found


def members(step: Launch) -> dict[str, Any]:
    """The template of a launch as a mapping."""
    return dict(step.template)


def test_a_launch_says_everything():
    (step,) = program("gpu-naive", Problem.of((100, 4, 40, 40), (16, 4, 7, 7), "float32")).launches
    assert step.grid == (9, 16, 100)
    assert step.block == (16, 16, 1)
    assert step.shared == 0
    assert (step.x, step.w, step.bias, step.out) == (Place("x"), Place("w"), None, Place("out"))
    text = str(step)
    assert text.startswith(
        "naive<X=float, W=float, Operand=float, Sum=float, Out=float, Index=int, OVERFLOW=WRAP, KH=0"
    )
    assert text.endswith("grid (9, 16, 100), block (16, 16, 1)")


def test_the_cuda_struct_is_read_from_its_declaration():
    names = parameter_dtype().names
    assert names is not None
    assert names[:4] == ("n", "c", "h", "w")
    assert "fill_high" in names
    (step,) = program(
        "gpu-naive", Problem.of((2, 3, 9, 11), (4, 3, 3, 3), "float32", padding=(1, 2, 3, 4))
    ).launches
    record = step.parameters().view(parameter_dtype())
    for name, value in {
        "h": 9,
        "oc": 4,
        "top": 1,
        "right": 4,
        "x_c": 99,
        "out_w": 1,
        "tiles_across": 1,
    }.items():
        assert record[name] == value, name


def test_an_unknown_scalar_is_an_error():
    (step,) = program("gpu-naive", Problem.of((1, 1, 9, 9), (1, 1, 3, 3), "float32")).launches
    with pytest.raises(ValueError, match="no field"):
        dataclasses.replace(step, scalars=(("tiles_sideways", 1),)).parameters()


@pytest.mark.parametrize(
    ("sum_dtype", "overflow", "kept"),
    [
        ("uint8", "wrap", "int32"),
        ("uint32", "wrap", "int32"),
        ("uint64", "wrap", "int64"),
        ("int8", "saturate", "int32"),
        ("float64", "wrap", "float64"),
    ],
)
def test_integers_share_the_types_of_sums(sum_dtype, overflow, kept):
    p = Problem.of((1, 1, 9, 9), (1, 1, 3, 3), sum_dtype, overflow=overflow)
    assert launch.arithmetic_dtype(p) == kept


def test_signed_and_unsigned_share_a_kernel():
    kernels = {
        compile.unit(program("gpu-naive", Problem.of((1, 1, 9, 9), (1, 1, 3, 3), dtype)).launches[-1])
        for dtype in ("int32", "uint32")
    }
    assert len(kernels) == 1


def test_filter_sizes_are_compiled_in_from_a_bounded_set():
    seen = set()
    for k in range(1, 40):
        (step,) = program("gpu-unrolled", Problem.of((1, 1, 40, 40), (1, 1, k, k), "float32")).launches
        found = members(step)
        assert found["KH"] in (0, k)
        assert found["KW"] in (0, k)
        seen.add((found["KH"], found["KW"]))
    assert seen == {(k if k in COMPILED_ROWS else 0, k if k in COMPILED_COLUMNS else 0) for k in range(1, 40)}
    assert (7, 7) in seen


def test_offsets_are_wide_where_they_must_be():
    small = Problem.of((1, 1, 2**14, 2**14), (1, 1, 3, 3), "uint8")
    large = Problem.of((1, 1, 2**16, 2**15), (1, 1, 3, 3), "uint8")
    long = Problem.of((1, 1, 1, 2**33), (1, 1, 1, 3), "uint8")
    many = Problem.of((2**20, 2**7, 32, 32), (2, 2**7, 3, 3), "uint8")
    for p, index in ((small, "int"), (large, "long long"), (long, "long long"), (many, "int")):
        for name in RUNGS:
            if p.x_dtype.name in RUNGS[name].capabilities.input_dtypes:
                main = program(name, p).each
                step = next(s for s in main if isinstance(s, Launch) and s.kernel != "prepare")
                assert members(step)["Index"] == index, (name, p.x_shape)
                assert all(a <= b for a, b in zip(step.grid, GPU.grid, strict=True))


@pytest.mark.parametrize("name", RUNGS)
def test_wide_offsets_are_right(bench, monkeypatch, name):
    monkeypatch.setattr(launch, "_INDEX_LIMIT", 1)
    rng = np.random.default_rng(0)
    x = rng.integers(-4, 5, (2, 4, 20, 35)).astype(np.float32)
    w = rng.integers(-4, 5, (4, 2, 3, 3)).astype(np.float32)
    rules = {"groups": 2, "padding": "same", "boundary": "wrap"}
    assert "Index=long long" in str(bench.plan(name, x, w, **rules).programs[0].each[-1])
    np.testing.assert_array_equal(bench.run(name, x, w, **rules), bench.reference(x, w, **rules))


def test_an_array_past_two_to_the_31(bench):
    x = np.zeros((1, 1, 47_000, 47_000), np.uint8)  # pages that nobody touches take no memory
    x[0, 0, ::5000, ::5000] = np.arange(100, dtype=np.uint8).reshape(10, 10)
    y = bench.run("gpu-naive", x, np.full((1, 1, 1, 1), 2, np.uint8), stride=5000, in_place=True)
    np.testing.assert_array_equal(y[0, 0], 2 * np.arange(100).reshape(10, 10))


def test_filters_are_prepared_only_if_they_must_be():
    def prepared(p: Problem, layouts: Layouts | None = None) -> int:
        rung = RUNGS["gpu-naive"]
        values = {key: option.default for key, option in rung.options.items()}
        found = draw(rung.recipe, p, layouts or contiguous(p), values, GPU, p.n)
        assert isinstance(found, Program)
        return len(found.once)

    plain = Problem.of((1, 2, 9, 9), (3, 2, 3, 3), "float32", bias_dtype="float32")
    assert prepared(plain) == 0
    assert prepared(Problem.of((1, 2, 9, 9), (3, 2, 3, 3), "float32", flip=True)) == 1
    assert prepared(Problem.of((1, 2, 9, 9), (3, 2, 1, 1), "float32", flip=True)) == 0
    assert prepared(Problem.of((1, 2, 9, 9), (3, 2, 3, 3), "uint8", "float32")) == 0
    assert prepared(Problem.of((1, 2, 9, 9), (3, 2, 3, 3), "float32", "uint8", bias_dtype="uint8")) == 2
    assert prepared(Problem.of((1, 1, 9, 9), (1, 1, 3, 3), "uint32")) == 0
    strided = contiguous(plain)
    strided = strided._replace(w=Layout(tuple(2 * s for s in strided.w.strides)))
    assert prepared(plain, strided) == 1


def test_dense():
    assert is_dense((2, 3, 4), Layout((48, 16, 4)), 4)
    assert is_dense((1, 3, 4), Layout((0, 16, 4)), 4)
    assert is_dense((0, 3, 4), Layout((7, 7, 7)), 4)
    assert not is_dense((2, 3, 4), Layout((4, 8, 24)), 4)


def test_device_copies_keep_the_order_of_the_host():
    p = Problem.of((5, 3, 7, 9), (2, 3, 3, 3), "int16")
    x = np.zeros((5, 7, 9, 3), np.int16).transpose(0, 3, 1, 2)
    layouts = dense_layouts(
        p,
        contiguous(p)._replace(
            x=Layout.of(x[:, :, ::-1]), w=Layout.of(np.asfortranarray(np.zeros(p.w_shape, np.int16)))
        ),
    )
    assert layouts.x.strides == x.strides
    assert layouts.w == Layout.contiguous(p.w_shape, 2)
    assert layouts.out == Layout.contiguous(p.out_shape, 2)


def test_workspace_parts_are_aligned_and_apart():
    p = Problem.of((3, 2, 9, 9), (2, 2, 3, 3), "uint8", bias_dtype="uint8", dtype="int8", overflow="raise")
    found = program("gpu-atomic", p)
    places = {s.out.offset for s in found.once if isinstance(s, Launch) and s.out is not None}
    assert found.overflow is not None
    places.add(found.overflow.offset)
    assert len(places) == 3
    assert all(offset % launch.ALIGNMENT == 0 for offset in places)
    assert found.kept_bytes == 3 * launch.ALIGNMENT
    assert found.scratch_bytes == launch.aligned(3 * 2 * 7 * 7 * 4)


@pytest.mark.parametrize("streams", [1, 3])
@pytest.mark.parametrize("host", [True, False])
def test_a_workspace_limit_makes_slices(bench, host, streams):
    x, w = np.zeros((10, 2, 9, 9), np.uint8), np.zeros((2, 2, 3, 3), np.uint8)
    limit = 2500
    rules: dict[str, Any] = {"dtype": "int8", "overflow": "saturate", "in_place": not host}
    plan = bench.plan("gpu-atomic", x, w, config={"workspace_limit": limit, "streams": streams}, **rules)
    assert plan.workspace_bytes() <= limit
    assert len(plan.slices) > 1
    assert sum(last - first for first, last in plan.slices) == 10
    roomy = bench.plan("gpu-atomic", x, w, **rules)
    assert len(roomy.slices) == 1


def test_a_recipe_may_refuse():
    def recipe(draft: Draft) -> None:
        raise NoLaunch("only on Sundays")

    p = Problem.of((1, 1, 9, 9), (1, 1, 3, 3), "float32")
    assert draw(recipe, p, contiguous(p), {}, GPU, 1) == Refusal("only on Sundays")


def test_limits_of_the_device_are_limits_of_the_launch():
    (step,) = program("gpu-tiled", Problem.of((1, 8, 99, 99), (64, 8, 7, 7), "float32"), LIMITS).launches
    assert step.refusal(LIMITS) is None
    for small, text in (
        ({"threads": 128}, "needs 256 threads a block, this GPU has 128"),
        ({"shared": 8 * 1024}, "needs 46 kB of shared memory, this GPU has 8"),
    ):
        refusal = dataclasses.replace(step, shared=46 * 1024).refusal(dataclasses.replace(LIMITS, **small))
        assert refusal == Refusal(text)


def test_a_tile_takes_more_shared_memory_only_where_it_must():
    def step(**rules: Any) -> Launch:
        p = Problem.of((1, 64, 99, 99), (2, 64, 3, 3), "float32", **rules)
        return program("gpu-tiled", p, LIMITS).launches[0]

    assert step().shared <= launch.PLAIN_SHARED
    assert dict(step().scalars)["stage"] == launch.PLAIN_SHARED // (18 * 18 * 4)
    wide = step(stride=7, dilation=9)
    assert dict(wide.scalars)["stage"] == 1
    assert wide.shared == ((15 * 7 + 19) ** 2) * 4 > launch.PLAIN_SHARED


def test_includes_are_expanded_once_and_keep_their_lines():
    text = compile.expanded("tiled")
    assert '#include "' not in text
    assert text.count("struct Problem {") == 1
    lines = text.splitlines()
    number, name = 0, ""
    original = {n: t.splitlines() for n, t in compile.files("tiled")}
    for line in lines:
        if line.startswith("#line "):
            _, number_text, quoted = line.split()
            number, name = int(number_text) - 1, quoted.strip('"')
            continue
        assert line in ("", original[name][number])
        number += 1


def test_two_threads_compile_a_kernel_once():
    import threading

    memo: compile.Memo[object] = compile.Memo()
    made: list[object] = []
    ready = threading.Barrier(4)

    def want() -> None:
        ready.wait()
        memo.get("key", lambda: made.append(object()) or made[-1])

    threads = [threading.Thread(target=want) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1


def test_a_kernel_is_compiled_once_for_all_processes(bench, tmp_path, monkeypatch):
    import subprocess

    from convpar.backends.gpu.executors import emulator

    monkeypatch.setenv("CONVPAR_CACHE_DIR", str(tmp_path))
    emulator._runtime.cache_clear()
    x, w = np.ones((1, 1, 9, 9), np.float32), np.ones((1, 1, 3, 3), np.float32)
    expected = bench.reference(x, w)
    np.testing.assert_array_equal(bench.run("gpu-naive", x, w), expected)
    files = sorted(p.name for p in (tmp_path / "emulator").iterdir())
    assert [name.partition("-")[0] for name in files] == ["empty", "naive", "runtime"]

    def no_compiler(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled again")

    bench.use(Emulator(Settings()))
    monkeypatch.setattr(subprocess, "run", no_compiler)
    np.testing.assert_array_equal(bench.run("gpu-naive", x, w), expected)
    emulator._runtime.cache_clear()


def test_the_family_is_registered_in_the_order_of_the_ladder():
    names = [b.name for b in registry.backends() if b.name.startswith("gpu-")]
    assert names == list(RUNGS)
    for rung in RUNGS.values():
        assert rung.builds_on is None or names.index(rung.builds_on) < names.index(rung.name)
        assert set(launch_options(rung)) == {"workspace_limit", "streams", "slice"}


def launch_options(rung: gpu.Rung) -> set[str]:
    """The options of a rung that its kernels don't see."""
    return set(rung.options) - set(rung.choices)


def test_misaligned_device_arrays_are_refused(bench):
    rung = RUNGS["gpu-naive"]
    p = Problem.of((1, 1, 9, 9), (1, 1, 3, 3), "float32")
    odd = contiguous(p)._replace(x=Layout((325, 325, 37, 4), aligned=False))
    refusal = rung.plan(p, odd, Device("gpu", 0), None)
    assert isinstance(refusal, Refusal)
    assert "x on gpu:0 is not aligned" in refusal.reason
    assert not isinstance(rung.plan(p, odd, Device("cpu", 0), None), Refusal)
