"""The GPU family on the emulator: a rung run by itself, on host arrays or on emulated device arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from convpar import registry
from convpar.backend import Device, Layout, Layouts, Refusal
from convpar.backends import reference
from convpar.backends.gpu import compile, executors
from convpar.backends.gpu.executors.emulator import Emulator, Settings, compiler
from convpar.problem import Problem

Array = np.ndarray[Any, Any]


class Bench:
    """Runs rungs on an emulator of the test's choice."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.use(Emulator())

    def use(self, emulator: Emulator) -> None:
        """Run on `emulator` from now on."""
        self.emulator = emulator
        self._monkeypatch.setattr(executors, "select", lambda: emulator)

    def settings(self, text: str) -> None:
        """Run on an emulator with the settings that follow ``CONVPAR_GPU=emulate:``."""
        self.use(Emulator(Settings.parse(text)))

    def edited(self, settings: str = "", **edits: tuple[str, str]) -> None:
        """Run kernels whose text is changed: ``naive=("old", "new")`` edits naive.cu."""

        def read(name: str) -> str:
            text = compile.read_kernel(name)
            old, new = edits.get(name.removesuffix(".cu"), ("", ""))
            assert old in text, f"{name} no longer has {old!r}"
            return text.replace(old, new, 1) if old else text

        self.use(Emulator(Settings.parse(settings), read))

    def plan(
        self,
        rung: str,
        x: Array,
        w: Array,
        bias: Array | None = None,
        out: Array | None = None,
        *,
        config: dict[str, Any] | None = None,
        in_place: bool = False,
        **rules: Any,
    ) -> Any:
        """The plan or refusal of `rung` for 4-D arrays; `in_place` takes them as device arrays."""
        backend = registry.find(rung)
        assert backend is not None
        problem = Problem.of(
            x.shape, w.shape, x.dtype, w.dtype, bias_dtype=None if bias is None else bias.dtype, **rules
        )
        layouts = Layouts(
            Layout.of(x),
            Layout.of(w),
            None if bias is None else Layout.of(bias),
            Layout.contiguous(problem.out_shape, problem.out_dtype.itemsize)
            if out is None
            else Layout.of(out),
        )
        return backend.plan(problem, layouts, Device("gpu" if in_place else "cpu"), config)

    def run(
        self,
        rung: str,
        x: Array,
        w: Array,
        bias: Array | None = None,
        out: Array | None = None,
        *,
        workspace: Array | None = None,
        **rules: Any,
    ) -> Array:
        """The result of `rung`, in `out` or a new poisoned array."""
        plan = self.plan(rung, x, w, bias, out, **rules)
        assert not isinstance(plan, Refusal), plan.reason
        if out is None:
            out = np.empty(plan.problem.out_shape, plan.problem.out_dtype)
            out.view(np.uint8)[...] = 0xFF
        plan.run(x, w, bias, out, workspace=workspace)
        return out

    def reference(self, x: Array, w: Array, bias: Array | None = None, **rules: Any) -> Array:
        """What the readable reference gives."""
        problem = Problem.of(
            x.shape, w.shape, x.dtype, w.dtype, bias_dtype=None if bias is None else bias.dtype, **rules
        )
        return reference.convert(reference.correlate(problem, x, w, bias), problem)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A `Bench` on a checking emulator."""
    if compiler() is None:
        pytest.skip("the emulator needs a C++ compiler")
    return Bench(monkeypatch)


@pytest.fixture
def small() -> tuple[Array, Array]:
    """Whole numbers: every order of summation gives the same. More than one tile each way, and a smaller last one."""
    rng = np.random.default_rng(1)
    x = rng.integers(-4, 5, (2, 3, 21, 37)).astype(np.float32)
    w = rng.integers(-4, 5, (2, 3, 3, 3)).astype(np.float32)
    return x, w
