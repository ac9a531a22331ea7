"""A rung of the GPU family as a `convpar.backend.Backend`, and its plans.

A `Rung` is a row: a kernel with some of its options fixed. Its recipe draws a `Program` for a problem, and a
`GpuPlan` hands the program's steps to an executor.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from convpar.backend import (
    CONTRACT_VERSION,
    Capabilities,
    Config,
    Device,
    ErrorContract,
    Layouts,
    Option,
    Plan,
    Refusal,
    Threshold,
    resolve_config,
)
from convpar.problem import Problem

from . import compile, executors, pipeline
from .executors import Executor, Kernel, Memory, Queue
from .launch import Fill, Launch, Limits, Place, Program, Recipe, Step, dense_layouts, draw

WORKSPACE_LIMIT = 2**30

COMMON_OPTIONS: Mapping[str, Option] = {
    "workspace_limit": Option(
        "device memory for scratch and for copies of host arrays, in bytes", WORKSPACE_LIMIT, kind="bytes"
    ),
    "streams": Option("slices of host arrays under way at a time", 3, kind="int"),
    "slice": Option("images a slice; chosen by size if None", kind="int"),
}

_SLICE_BYTES = 32 * 2**20  # large enough to copy at full speed, small enough to overlap copies with kernels


def _image_bytes(p: Problem) -> tuple[int, int]:
    """Bytes of one image and of its result."""
    return p.c * p.h * p.w * p.x_dtype.itemsize, p.oc * p.oh * p.ow * p.out_dtype.itemsize


class _Ready(NamedTuple):
    """A launch with its compiled kernel and its `Problem`, packed."""

    launch: Launch
    kernel: Kernel
    parameters: np.ndarray[Any, Any]


class Steps:
    """A program on one device: kernels are compiled or loaded, and arguments packed, at the first run."""

    def __init__(self, program: Program, executor: Executor, device: int) -> None:
        self.program = program
        self._executor = executor
        self._device = device
        self._ready: tuple[tuple[_Ready | Fill, ...], tuple[_Ready | Fill, ...]] | None = None
        self._borders: Memory | None = None
        self._lock = threading.Lock()

    def once(self, queue: Queue, addresses: Mapping[str, int]) -> None:
        """Queue the steps that come once a call. `addresses` has a device address for each base of a `Place`."""
        self._run((self._ready or self.load())[0], queue, addresses, 0)

    def each(self, queue: Queue, addresses: Mapping[str, int], first: int) -> None:
        """Queue the steps for the slice that begins with image `first`."""
        self._run((self._ready or self.load())[1], queue, addresses, first)

    def load(self) -> tuple[tuple[_Ready | Fill, ...], tuple[_Ready | Fill, ...]]:
        """Compile or load what a run needs."""
        with self._lock:
            if self._ready is None:
                if self.program.borders.size:
                    self._borders = self._executor.upload(self.program.borders, self._device)
                self._ready = self._made_ready(self.program.once), self._made_ready(self.program.each)
            return self._ready

    def _made_ready(self, steps: Sequence[Step]) -> tuple[_Ready | Fill, ...]:
        return tuple(
            s if isinstance(s, Fill) else _Ready(s, self._executor.load(s, self._device), s.parameters())
            for s in steps
        )

    def _run(
        self, steps: tuple[_Ready | Fill, ...], queue: Queue, addresses: Mapping[str, int], first: int
    ) -> None:
        def at(place: Place | None) -> int:
            return 0 if place is None else addresses[place.base] + place.offset

        borders = 0 if self._borders is None else self._borders.ptr
        overflow = at(self.program.overflow)
        for step in steps:
            if isinstance(step, Fill):
                queue.fill(at(step.place), step.size, step.value)
                continue
            launch, kernel, parameters = step

            def run(
                bank: int, launch: Launch = launch, kernel: Kernel = kernel, parameters: Any = parameters
            ) -> None:
                arguments = (
                    at(launch.x), at(launch.w), at(launch.bias), at(launch.out), borders, overflow,
                    at(launch.scratch), first, bank, parameters,
                )  # fmt: skip
                queue.launch(kernel, launch, arguments)

            if launch.constant:
                kernel.banks.use(queue, at(launch.w), launch.constant, run)
            else:
                run(0)


class GpuPlan:
    """A `convpar.backend.Plan` of launches."""

    def __init__(
        self,
        rung: Rung,
        problem: Problem,
        config: Config,
        layouts: Layouts,
        executor: Executor,
        device: int,
        programs: tuple[Program, ...],
        host: bool,
    ) -> None:
        p = problem
        self.problem = p
        self.config = config
        self.accuracy: ErrorContract = rung.capabilities.error
        self.cost = rung.seconds(p, executor.limits(device))
        self.programs = programs
        self._layouts = layouts
        self._executor = executor
        self._device = device
        self._host = host
        self._steps = tuple(Steps(program, executor, device) for program in programs)
        self._ran: set[str] = set()

        main = programs[0]
        self.slices = tuple((first, min(first + main.images, p.n)) for first in range(0, p.n, main.images))
        self.in_flight = 1
        if host:
            each = max(main.scratch_bytes + sum(self.slice_bytes()), 1)
            fitting = (config["workspace_limit"] - main.kept_bytes) // each
            self.in_flight = max(min(config["streams"], len(self.slices), fitting), 1)
        self.thresholds: tuple[Threshold, ...] = main.thresholds
        if len(self.slices) > 1:
            self.thresholds += (Threshold("n", main.images + 1, "several slices"),)
        self.paths = self._declare()
        self.launch: Mapping[str, Any] = self._described(executor.limits(device).name)

    def _declare(self) -> tuple[str, ...]:
        if not self.problem.outputs:
            return ()
        taken = [path for program in self.programs for launch in program.launches for path in launch.paths]
        taken.append("copied in and out" if self._host else "in place")
        if len(self.slices) > 1:
            taken.append("several slices")
        return tuple(dict.fromkeys(taken))

    def _described(self, name: str) -> Mapping[str, Any]:
        main = self.programs[0]
        text: dict[str, Any] = {"device": name}
        for number, launch in enumerate(main.launches, 1):
            text[f"launch {number}" if len(main.launches) > 1 else "launch"] = str(launch)
        text["images a slice"] = f"{main.images} ({len(self.slices)} slices)"
        if self._host:
            text["arrays"] = f"copied from and to the host, {self.in_flight} slices under way at a time"
        return text

    # -- memory

    def slice_bytes(self) -> tuple[int, int]:
        """Bytes of a slice's images and of their results on the device."""
        x, out = _image_bytes(self.problem)
        return self.programs[0].images * x, self.programs[0].images * out

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Scratch memory on the device, and for host arrays also the copies of the slices under way."""
        main = self.programs[0]
        size = main.kept_bytes + self.in_flight * main.scratch_bytes
        if self._host:
            size += self.in_flight * sum(self.slice_bytes())
        return size

    @property
    def layouts(self) -> Layouts:
        """Of the arrays on the device."""
        return self._layouts

    # -- running

    def load(self) -> None:
        """Compile and load all kernels, so that the first run doesn't have to."""
        for steps in self._steps:
            steps.load()

    def steps(self, images: int) -> Steps:
        """The steps for slices of `images` images."""
        return self._steps[0 if images == self.programs[0].images else 1]

    def run(
        self,
        x: Any,
        w: Any,
        bias: Any,
        out: Any,
        *,
        workspace: Any = None,
        num_threads: int | None = None,
        stream: Any = None,
    ) -> None:
        """Fill `out`; threads play no part. Host arrays bring no workspace and no stream."""
        if not self.problem.outputs:
            return
        if self._host:
            bad = pipeline.run(self, self._executor, self._device, x, w, bias, out)
        else:
            bad = self._run_in_place(x, w, bias, out, workspace, stream)
        self._finish(bad)

    def timeline(self, x: Any, w: Any, bias: Any, out: Any) -> tuple[pipeline.Span, ...]:
        """Run on host arrays as `run` does, and say when the device copied each slice in, computed it and copied it out.

        Raises
        ------
        ValueError
            The plan is for arrays on the device, where nothing is copied.
        """
        if not self._host:
            raise ValueError("a timeline is of host arrays, and this plan is for arrays on the device")
        if not self.problem.outputs:
            return ()
        timeline = pipeline.Timeline()
        self._finish(pipeline.run(self, self._executor, self._device, x, w, bias, out, timeline))
        return timeline.spans()

    def _finish(self, bad: int | None) -> None:
        """What follows every run; `bad` is the index of the first result that didn't fit."""
        self._ran.update(self.paths)
        if bad is not None:
            place = tuple(int(i) for i in np.unravel_index(bad, self.problem.out_shape))
            raise OverflowError(
                f"the result doesn't fit {self.problem.out_dtype}: "
                f"the first place is {place} (n, oc, row, column)"
            )

    def _run_in_place(self, x: Any, w: Any, bias: Any, out: Any, workspace: Any, stream: Any) -> int | None:
        address = self._executor.address
        queue = self._executor.queue(self._device, stream)
        main, layouts = self.programs[0], self._layouts
        addresses = {
            "x": address(x),
            "w": address(w),
            "bias": 0 if bias is None else address(bias),
            "out": address(out),
        }
        if main.kept_bytes + main.scratch_bytes:
            if workspace is not None:
                addresses["kept"] = address(workspace)
            else:
                memory = queue.allocate(main.kept_bytes + main.scratch_bytes)
                addresses["kept"] = memory.ptr
            addresses["scratch"] = addresses["kept"] + main.kept_bytes
        self._steps[0].once(queue, addresses)
        x_first, out_first = addresses["x"], addresses["out"]
        for first, last in self.slices:
            addresses["x"] = x_first + first * layouts.x.strides[0]
            addresses["out"] = out_first + first * layouts.out.strides[0]
            self.steps(last - first).each(queue, addresses, first)
        return pipeline.read_overflow(queue, main, addresses)

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run."""
        return frozenset(self._ran)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A row of the GPU family; see `convpar.backend.Backend`.

    Attributes
    ----------
    name, summary, builds_on : str
    recipe : callable
        Draws the program: which kernels with which blocks. See `launch.Draft`.
    kernels : tuple of str
        Names of its .cu files, the one that holds its idea first.
    capabilities : Capabilities
    choices : mapping of str to Option
        The options of its kernels; a row fixes one by allowing a single value. All rungs have `COMMON_OPTIONS` too.
    efficiency : float or None
        The share of the device's float32 rate that it reaches with float32, for estimates; a rung without
        one isn't chosen by itself.
    """

    name: str
    summary: str
    builds_on: str | None
    recipe: Recipe
    kernels: tuple[str, ...]
    choices: Mapping[str, Option] = field(default_factory=dict)
    capabilities: Capabilities
    efficiency: float | None = None

    contract = CONTRACT_VERSION

    @property
    def options(self) -> Mapping[str, Option]:
        """The keys of ``config=``."""
        return {**self.choices, **COMMON_OPTIONS}

    def unavailable(self) -> str | None:
        """It needs a GPU and CuPy, or the emulator and a C++ compiler."""
        executor = executors.select()
        return executor if isinstance(executor, str) else executor.unavailable()

    def source(self) -> tuple[tuple[str, str], ...]:
        """(file name, text) of its kernels and of what they share."""
        found = {name: text for kernel in self.kernels for name, text in compile.files(kernel)}
        return tuple((f"kernels/{name}", text) for name, text in found.items())

    def seconds(self, problem: Problem, limits: Limits) -> float | None:
        """Estimated time: launching, then the slower of arithmetic and memory."""
        if self.efficiency is None:
            return None
        p = problem
        slower: float = {"float64": 2, "complex64": 4, "complex128": 8, "int64": 4, "uint64": 4}.get(
            p.sum_dtype.name, 1
        )
        return 5e-6 + max(
            p.macs * slower / (limits.fma_rate * self.efficiency), p.least_bytes / limits.bandwidth
        )

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """A plan, or why the rung can't serve `problem` on this device."""
        resolved = resolve_config(self.options, config, self.name)
        executor = executors.select()
        missing = executor if isinstance(executor, str) else executor.unavailable()
        if isinstance(executor, str) or missing is not None:
            return Refusal(str(missing))
        refusal = self.capabilities.refusal(problem)
        if refusal is not None:
            return refusal
        host = device.kind == "cpu"
        if not host:
            for name, layout in zip(layouts._fields, layouts, strict=True):
                if layout is not None and (layout.swapped or not layout.aligned):
                    return Refusal(
                        f"{name} on {device} is not aligned to its elements, or in the other byte order"
                    )
        on_device = dense_layouts(problem, layouts) if host else layouts
        index = executor.current_device() if host else device[1]
        programs = self._programs(problem, on_device, resolved, executor, index, host)
        if isinstance(programs, Refusal):
            return programs
        return GpuPlan(self, problem, resolved, on_device, executor, index, programs, host)

    def _programs(
        self,
        p: Problem,
        layouts: Layouts,
        config: dict[str, Any],
        executor: Executor,
        device: int,
        host: bool,
    ) -> tuple[Program, ...] | Refusal:
        """The program for full slices, and the one for a smaller last slice."""
        limits = executor.limits(device)
        one = draw(self.recipe, p, layouts, config, limits, 1)
        if isinstance(one, Refusal):
            return one
        limit = config["workspace_limit"]
        if one.kept_bytes + one.scratch_bytes > limit:
            return Refusal(
                f"needs {one.kept_bytes + one.scratch_bytes} bytes of workspace, one image at a time, "
                f"and workspace_limit is {limit}"
            )
        image = sum(_image_bytes(p)) if host else 0
        images = config["slice"]
        if images is None:
            images = _SLICE_BYTES // image if image else p.n
        # Copies of host arrays count too, but one image at a time must be there. Parts of the scratch memory are
        # rounded up each, so several images take no more than so many times one.
        each = max(image + one.scratch_bytes, 1)
        at_once = max((limit - one.kept_bytes) // each, 1)
        images = max(min(images, p.n, at_once), 1)
        sizes = [images] + ([p.n % images] if p.n % images else [])
        programs = []
        for size in sizes:
            program = draw(self.recipe, p, layouts, config, limits, size)
            if isinstance(program, Refusal):
                return program
            programs.append(program)
        return tuple(programs)
