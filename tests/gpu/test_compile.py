"""Every rung compiles for every architecture, without a GPU; defaults don't spill.

``-s`` prints what each kernel takes; with ``CONVPAR_RESOURCES=FILE`` it is also added to FILE, a line a kernel.
"""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from convpar.backend import Refusal
from convpar.backends import gpu
from convpar.backends.gpu import compile
from convpar.backends.gpu.launch import Launch
from convpar.backends.gpu.nvrtc import ARCHITECTURES, CompileError, Resources, resources
from convpar.problem import Problem

RUNGS = {rung.name: rung for rung in gpu.ROWS}

SHAPES = {
    "7x7": ((100, 4, 40, 40), (16, 4, 7, 7), {}),
    "3x3, padded": ((4, 3, 224, 224), (8, 3, 3, 3), {"padding": 1, "boundary": "mirror"}),
    "13x31": ((1, 1, 512, 512), (1, 1, 13, 31), {}),
}
TYPES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "float32": ("float32", "float32", {}),
    "float64": ("float64", "float64", {}),
    "float16": ("float16", "float16", {}),
    "bfloat16": ("bfloat16", "bfloat16", {}),
    "narrowed": ("float64", "float64", {"dtype": "float16"}),
    "complex64": ("complex64", "complex64", {}),
    "uint8": ("uint8", "uint8", {}),
    "int64": ("int16", "int32", {"overflow": "raise", "dtype": "int16"}),
    "picture": ("uint8", "float32", {"dtype": "uint8"}),
    "complex128": ("int32", "complex128", {}),
}


@pytest.fixture(scope="module", autouse=True)
def compiler() -> None:
    cupy = pytest.importorskip("cupy", reason="compiling for a GPU needs CuPy")
    try:
        cupy.cuda.nvrtc.getVersion()
    except (RuntimeError, ImportError) as e:
        pytest.skip(f"CuPy finds no NVRTC: {e}")


@cache
def _compiled(launch: Launch, arch: str) -> Resources:
    return resources(launch, arch)


def _tell(line: str) -> None:
    print(line)
    file = os.environ.get("CONVPAR_RESOURCES")
    if file:
        # One short write: lines of several processes don't mix.
        with Path(file).open("a", encoding="utf-8") as table:
            table.write(line + "\n")


def launches(bench, name: str, shape: str, types: str, **config: Any) -> tuple[Launch, ...]:
    if types == "bfloat16":
        pytest.importorskip("ml_dtypes")
    x_dtype, w_dtype, rules = TYPES[types]
    x_shape, w_shape, more = SHAPES[shape]
    x, w = np.empty(x_shape, x_dtype), np.empty(w_shape, w_dtype)
    plan = bench.plan(name, x, w, in_place=True, config=config or None, **rules, **more)
    if isinstance(plan, Refusal):
        problem = Problem.of(x_shape, w_shape, x_dtype, w_dtype, **rules, **more)
        assert RUNGS[name].capabilities.refusal(problem) == plan, plan.reason
        return ()
    found: tuple[Launch, ...] = plan.programs[0].launches
    return found


def check(bench, name: str, shape: str, types: str, arch: str, **config: Any) -> int:
    """Compile, tell what it takes, and fail where a thread needs local memory."""
    found = launches(bench, name, shape, types, **config)
    for launch in found:
        # Only what the compiler sees counts: one compilation for all that share it.
        seen = dataclasses.replace(
            launch, grid=(1, 1, 1), scalars=(), x=None, w=None, bias=None, out=None, scratch=None, waste=1.0
        )
        made = _compiled(seen, arch)
        _tell(f"{name:20} {launch.kernel:10} {shape:12} {types:10} {arch:7} {made}")
        assert made.registers > 0
        assert (made.stack, made.spills) == (0, 0), (
            f"{launch.kernel} for {name}, {shape}, {types}, {arch}: {made}"
        )
    return len(found)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_for_every_architecture(bench, name, arch):
    assert sum(check(bench, name, shape, "float32", arch) for shape in ("7x7", "3x3, padded"))


@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_for_a_filter_that_is_not_compiled_in(bench, name):
    assert check(bench, name, "13x31", "float32", "sm_90")


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("name", RUNGS)
def test_every_rung_for_its_types(bench, name, types):
    for shape in ("7x7", "3x3, padded"):
        for arch in ("sm_75", "sm_90"):
            check(bench, name, shape, types, arch)


@pytest.mark.parametrize("name", ["gpu-naive", "gpu-tiled"])
def test_every_option(bench, name):
    for key, option in RUNGS[name].options.items():
        for value in option.allowed or ():
            assert check(bench, name, "3x3, padded", "float32", "sm_80", **{key: value})


def test_options_reach_the_code(bench):
    """What a rung claims is what the compiler did."""

    def ptx(name: str) -> str:
        (launch,) = launches(bench, name, "7x7", "float32")
        return _compiled(launch, "sm_90").ptx

    assert "ld.global.nc" not in ptx("gpu-naive")
    assert "ld.const" not in ptx("gpu-naive")
    assert "ld.shared" not in ptx("gpu-naive")
    assert "ld.const" in ptx("gpu-constant")
    assert "ld.shared" in ptx("gpu-tiled")
    assert "bar.sync" in ptx("gpu-tiled")
    assert "ld.const" in ptx("gpu-tiled-constant")
    assert "ld.global.nc" in ptx("gpu-unrolled")
    assert ptx("gpu-naive").count("fma.rn.ftz.f32") == 1
    assert ptx("gpu-unrolled").count("fma.rn.ftz.f32") == 49
    assert "fma.rn.f16" in ptx("gpu-half")
    atomic = launches(bench, "gpu-atomic", "7x7", "float32")[1]
    assert (
        "atom.global.add.f32" in _compiled(atomic, "sm_90").ptx
        or "red.global.add.f32" in _compiled(atomic, "sm_90").ptx
    )


def test_asynchronous_copies_are_the_hardware_s(bench):
    """copy_async becomes cp.async from sm_80 on and an ordinary copy before."""
    text = """
    #include "problem.cuh"
    template <class I>
    __device__ void trial(const Arrays<I>& arrays, const Problem&) {
        Shared<int> s = dynamic_shared<int>(0);
        copy_async<16>(s + 4 * thread_index(), arrays.x + 4 * thread_index(), arrays.first == 0);
        copy_async_commit();
        copy_async_wait<0>();
        __syncthreads();
        arrays.out[thread_index()] = shuffle_xor(s[thread_index()], 1) + shuffle(1, 2) + shuffle_down(3, 1);
    }
    """

    def read(name: str) -> str:
        return text if name == "trial.cu" else compile.read_kernel(name)

    types = dict.fromkeys(("X", "W", "Operand", "Sum", "Out", "Index"), "int")
    launch = Launch("trial", tuple(types.items()), (1, 1, 1), (32, 1, 1), (), shared=512)
    assert "cp.async" in resources(launch, "sm_80", read).ptx
    assert "cp.async" not in resources(launch, "sm_75", read).ptx


def test_a_kernel_that_does_not_compile_says_where(bench):
    (launch,) = launches(bench, "gpu-naive", "7x7", "float32")
    with pytest.raises(CompileError, match=r"naive\.cu\(\d+\): error"):
        resources(launch, "sm_90", lambda name: compile.read_kernel(name).replace("Sum sum{};", "Sum sum{}"))
