"""A rung of the GPU family as a `convpar.backend.Backend`, and its plans.

A `Rung` is a row: a kernel with some of its options fixed. Its recipe draws a `Program` for a problem, and a
`GpuPlan` hands the program's steps to an executor.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn

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
from convpar.problem import Problem, Unsupported

from . import compile, executors, pipeline
from .executors import Executor, Loaded, Memory, Queue
from .launch import (
    COMPILED_COLUMNS,
    COMPILED_ROWS,
    Fill,
    Launch,
    Limits,
    Place,
    Program,
    Recipe,
    Step,
    dense_layouts,
    draw,
)

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


_Key = str | Place | None
"""A base of a `Place`; a place inside one; "borders", "overflow", "first" or "bank"; None for what isn't there."""

Addresses = dict[_Key, int]
"""What a call's arguments are taken from; a run of `Steps` adds to it what it needs besides the bases."""


class _Ready(NamedTuple):
    """A launch, loaded.

    Attributes
    ----------
    loaded : Loaded
    numbers : callable
        Takes the numbers of a launch from the `Addresses`.
    filters : Place, str or None
        Where filters are that must be copied to constant memory before.
    constant : int
        Their bytes.
    """

    loaded: Loaded
    numbers: Callable[[Addresses], tuple[int, ...]]
    filters: _Key
    constant: int


def _key(place: Place | None) -> _Key:
    return place if place is None or place.offset else place.base


_Steps = tuple[_Ready | Fill, ...]


class Steps:
    """A program on one device: kernels are compiled or loaded, and arguments packed, at the first run."""

    def __init__(self, program: Program, executor: Executor, device: int) -> None:
        self.program = program
        self._executor = executor
        self._device = device
        self._ready: tuple[_Steps, _Steps] | None = None
        self._borders: Memory | None = None
        self._lock = threading.Lock()
        places = {p for s in (*program.once, *program.each) for p in _places(s)} | {program.overflow}
        self._inside = tuple(p for p in places if p is not None and p.offset)

    def once(self, queue: Queue, addresses: Addresses) -> None:
        """Queue the steps that come once a call. `addresses` has a device address for each base of a `Place`."""
        self._run((self._ready or self.load())[0], queue, addresses, 0)

    def each(self, queue: Queue, addresses: Addresses, first: int) -> None:
        """Queue the steps for the slice that begins with image `first`."""
        self._run((self._ready or self.load())[1], queue, addresses, first)

    def load(self) -> tuple[_Steps, _Steps]:
        """Compile or load what a run needs."""
        with self._lock:
            if self._ready is None:
                if self.program.borders.size:
                    self._borders = self._executor.upload(self.program.borders, self._device)
                self._ready = self._made_ready(self.program.once), self._made_ready(self.program.each)
            return self._ready

    def _made_ready(self, steps: Sequence[Step]) -> _Steps:
        return tuple(s if isinstance(s, Fill) else self._loaded(s) for s in steps)

    def _loaded(self, launch: Launch) -> _Ready:
        places = (launch.x, launch.w, launch.bias, launch.out)
        # As in CONVPAR_ENTRY.
        keys = (
            *map(_key, places), "borders", _key(self.program.overflow), _key(launch.scratch), "first",
            "bank" if launch.constant else None,
        )  # fmt: skip
        loaded = self._executor.load(launch, self._device)
        return _Ready(loaded, itemgetter(*keys), _key(launch.w), launch.constant)

    def _run(self, steps: _Steps, queue: Queue, addresses: Addresses, first: int) -> None:
        addresses[None] = 0
        addresses["first"] = first
        addresses["borders"] = 0 if self._borders is None else self._borders.ptr
        for place in self._inside:
            if place.base in addresses:
                addresses[place] = addresses[place.base] + place.offset
        for step in steps:
            if isinstance(step, Fill):
                queue.fill(addresses[_key(step.place)], step.size, step.value)
            elif step.constant:
                banks = step.loaded.banks
                with banks.lock:
                    addresses["bank"] = banks.fill(queue, addresses[step.filters], step.constant)
                    try:
                        queue.launch(step.loaded, step.numbers(addresses))
                    finally:
                        # Also after an error: the copy is under way, and the next caller may not find this queue any more.
                        banks.leave(queue)
            else:
                queue.launch(step.loaded, step.numbers(addresses))


def _places(step: Step) -> tuple[Place | None, ...]:
    if isinstance(step, Fill):
        return (step.place,)
    return step.x, step.w, step.bias, step.out, step.scratch


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
        self.cost = rung.seconds(p, executor.limits(device), programs[0])
        self.programs = programs
        self._layouts = layouts
        self._executor = executor
        self._device = device
        self._host = host
        self._steps = tuple(Steps(program, executor, device) for program in programs)
        self._ran: frozenset[str] = frozenset()

        main = programs[0]
        self._workspace = main.kept_bytes + main.scratch_bytes
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
        self._paths = frozenset(self.paths)
        self._empty = not p.outputs
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
        if self._empty:
            return
        if self._host:
            bad = pipeline.run(self, self._executor, self._device, x, w, bias, out)
        else:
            bad = self._run_in_place(x, w, bias, out, workspace, stream)
        self._ran = self._paths
        if bad is not None:
            self._overflowed(bad)

    def timeline(self, x: Any, w: Any, bias: Any, out: Any) -> tuple[pipeline.Span, ...]:
        """Run on host arrays as `run` does, and say when the device copied each slice in, computed it and copied it out.

        Raises
        ------
        ValueError
            The plan is for arrays on the device, where nothing is copied.
        """
        if not self._host:
            raise ValueError("a timeline is of host arrays, and this plan is for arrays on the device")
        if self._empty:
            return ()
        timeline = pipeline.Timeline()
        bad = pipeline.run(self, self._executor, self._device, x, w, bias, out, timeline)
        self._ran = self._paths
        if bad is not None:
            self._overflowed(bad)
        return timeline.spans()

    def _overflowed(self, bad: int) -> NoReturn:
        place = tuple(int(i) for i in np.unravel_index(bad, self.problem.out_shape))
        raise OverflowError(
            f"the result doesn't fit {self.problem.out_dtype}: the first place is {place} (n, oc, row, column)"
        )

    def _run_in_place(self, x: Any, w: Any, bias: Any, out: Any, workspace: Any, stream: Any) -> int | None:
        executor = self._executor
        if executor.current_device() != self._device:
            with executor.on(self._device):
                return self._run_in_place(x, w, bias, out, workspace, stream)
        address = executor.address
        queue = executor.queue(self._device, stream)
        addresses: Addresses = {
            "x": address(x),
            "w": address(w),
            "bias": 0 if bias is None else address(bias),
            "out": address(out),
        }
        if self._workspace:
            if workspace is None and queue.capturing():
                raise Unsupported(
                    "a CUDA graph can't capture a call that takes scratch memory, which others have by the time the "
                    f"graph runs; {executors.CAPTURABLE}"
                )
            memory = None if workspace is not None else queue.allocate(self._workspace)
            addresses["kept"] = address(workspace) if memory is None else memory.ptr
            addresses["scratch"] = addresses["kept"] + self.programs[0].kept_bytes
        steps = self._steps[0]
        if steps.program.once:
            steps.once(queue, addresses)
        if len(self.slices) == 1:
            steps.each(queue, addresses, 0)
        else:
            x_first, out_first = addresses["x"], addresses["out"]
            for first, last in self.slices:
                addresses["x"] = x_first + first * self._layouts.x.strides[0]
                addresses["out"] = out_first + first * self._layouts.out.strides[0]
                self.steps(last - first).each(queue, addresses, first)
        if self.programs[0].overflow is None:
            return None
        return pipeline.read_overflow(queue, self.programs[0], addresses)

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run."""
        return self._ran


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
        The share of the device's float32 rate that it reaches with float32 on large problems, lanes without a
        result counted in; for estimates. A rung without one isn't chosen by itself.
    efficiency_beyond : float or None
        The same for filters whose size isn't compiled in, where that differs.
    """

    name: str
    summary: str
    builds_on: str | None
    recipe: Recipe
    kernels: tuple[str, ...]
    choices: Mapping[str, Option] = field(default_factory=dict)
    capabilities: Capabilities
    efficiency: float | None = None
    efficiency_beyond: float | None = None

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

    def seconds(self, problem: Problem, limits: Limits, program: Program) -> float | None:
        """Estimated time: launching, then the slower of arithmetic and memory."""
        efficiency = self.efficiency
        if efficiency is None:
            return None
        p = problem
        if self.efficiency_beyond is not None and not (p.kh in COMPILED_ROWS and p.kw in COMPILED_COLUMNS):
            efficiency = self.efficiency_beyond
        slower: float = {"float64": 2, "complex64": 4, "complex128": 8, "int64": 4, "uint64": 4}.get(
            p.sum_dtype.name, 1
        )
        waste = max((launch.waste for launch in program.launches), default=1.0)
        arithmetic = p.macs * slower * waste / (limits.fma_rate * efficiency)
        return 5e-6 * len(program.launches) + max(arithmetic, p.least_bytes / limits.bandwidth)

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
