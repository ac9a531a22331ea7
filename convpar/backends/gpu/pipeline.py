"""Host arrays through the device: slices of images on several queues, so that copies overlap with kernels.

Nothing host-side is ever copied as a whole. Data that the device can't fetch by itself (not pinned, strided, swapped,
misaligned) passes through small pinned pieces on its way in and out; a pinned array of the device's layout is copied
straight. On the device there are as many slices as are under way at a time.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from convpar.backend import Layout, Unavailable
from convpar.problem import check_dtype, index_argument

from . import executors
from .executors import Event, Executor, Queue

if TYPE_CHECKING:
    from .launch import Program
    from .plan import Addresses, GpuPlan

PIECE_BYTES = 4 * 2**20
PIECES = 4
"""Pinned memory that a call takes for each direction: this many pieces of this many bytes."""

STAGES = ("copy in", "compute", "copy out")
"""What is done for each slice, in this order."""

Array = np.ndarray[Any, Any]


def empty_pinned(shape: Any, dtype: Any = float) -> Array:
    """A new NumPy array in page-locked memory, which the GPU copies from and to without a detour.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Raises
    ------
    TypeError, ValueError
        `shape` isn't made of integers from 0, or `dtype` isn't one of numbers.
    Unavailable
        There is no GPU, and the emulator wasn't asked for.
    """
    kind = check_dtype(dtype, "dtype")
    sizes = tuple(
        index_argument(i, "shape", 0)
        for i in (shape if isinstance(shape, Iterable) and not isinstance(shape, str) else (shape,))
    )

    executor = executors.select()
    reason = executor if isinstance(executor, str) else executor.unavailable()
    if isinstance(executor, str) or reason is not None:
        raise Unavailable(f"page-locked memory can't be had: {reason}")
    count = math.prod(sizes)
    # A block of no bytes has no address.
    block = executor.pinned(max(count * kind.itemsize, 1))
    return np.ndarray(sizes, kind, block.data)


def pieces(shape: tuple[int, ...], itemsize: int, limit: int) -> Iterator[tuple[tuple[slice, ...], int, int]]:
    """Cut a dense array into runs of at most `limit` bytes: (index of the run, its first byte, its bytes).

    A run spans whole inner axes, a range of one axis, and one place on each outer axis, so it is dense too.
    """
    if 0 in shape:
        return
    axis = len(shape) - 1
    inner = itemsize
    while axis > 0 and inner * shape[axis] <= limit:
        inner *= shape[axis]
        axis -= 1
    step = max(limit // inner, 1)
    outer = shape[:axis]
    first = 0
    for place in itertools.product(*map(range, outer)):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            size = (stop - start) * inner
            yield (*(slice(i, i + 1) for i in place), slice(start, stop)), first, size
            first += size


def _in_memory_order(array: Array, layout: Layout) -> Array:
    """`array` with its axes in the order of the device's dense layout, outermost first."""
    order = sorted(range(array.ndim), key=lambda a: (-layout.strides[a], a))
    dense: Array = array.transpose(order)
    return dense


class _Staging:
    """Copies one way. What can't go straight passes through a ring of pinned pieces."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._pieces: list[Array] = []
        self._busy: list[Event | None] = []
        self._turn = 0

    def _straight(self, dense: Array) -> bool:
        return bool(dense.flags.c_contiguous and dense.dtype.isnative and self._executor.is_pinned(dense))

    def _take(self, size: int) -> int:
        """The number of a free piece of at least `size` bytes; waits for the oldest where all are busy."""
        number = self._turn % PIECES
        self._turn += 1
        if number == len(self._pieces):
            self._pieces.append(self._executor.pinned(size))
            self._busy.append(None)
        event = self._busy[number]
        if event is not None:
            event.synchronize()
        if self._pieces[number].nbytes < size:
            self._pieces[number] = self._executor.pinned(size)
        return number

    def _view(self, number: int, size: int, like: Array) -> Array:
        """The first `size` bytes of a piece as an array like `like`, in native byte order."""
        view: Array = self._pieces[number][:size].view(like.dtype.newbyteorder("=")).reshape(like.shape)
        return view


class Upload(_Staging):
    """Copies host arrays to dense device memory."""

    def copy(self, queue: Queue, to: int, array: Array, layout: Layout) -> None:
        """Queue the copy of `array`, which lies as `layout` says on the device, to address `to`.

        A pinned array must not change before `queue` has passed the copy.
        """
        dense = _in_memory_order(array, layout)
        if self._straight(dense):
            queue.copy_in(to, dense)
            return
        for index, first, size in pieces(dense.shape, dense.dtype.itemsize, PIECE_BYTES):
            part, number = dense[index], self._take(size)
            np.copyto(self._view(number, size, part), part, casting="equiv")
            queue.copy_in(to + first, self._pieces[number][:size])
            self._busy[number] = queue.record()


class Download(_Staging):
    """Copies dense device memory to host arrays."""

    def can_go_straight(self, array: Array, layout: Layout) -> bool:
        """Whether the device can write `array` by itself."""
        return self._straight(_in_memory_order(array, layout))

    def copy_straight(self, queue: Queue, array: Array, source: int, layout: Layout) -> None:
        """Queue the copy from `source` into `array`, which can go straight."""
        queue.copy_out(_in_memory_order(array, layout), source)

    def copy(self, queue: Queue, array: Array, source: int, layout: Layout) -> None:
        """Copy from `source` into `array`; it is there on return."""
        dense = _in_memory_order(array, layout)
        under_way: deque[tuple[Array, int, int, Event]] = deque()

        def land() -> None:
            part, number, size, event = under_way.popleft()
            event.synchronize()
            np.copyto(part, self._view(number, size, part), casting="equiv")

        for index, first, size in pieces(dense.shape, dense.dtype.itemsize, PIECE_BYTES):
            if len(under_way) == PIECES:
                land()
            number = self._take(size)
            queue.copy_out(self._pieces[number][:size], source + first)
            under_way.append((dense[index], number, size, queue.record()))
        while under_way:
            land()


class Span(NamedTuple):
    """A stage of a slice on the device.

    Attributes
    ----------
    slice, queue : int
        Numbers, from 0.
    stage : str
        One of `STAGES`.
    start, stop : float
        Seconds since the call's first operation. It starts when its queue has come to it, and may wait then.
    """

    slice: int
    queue: int
    stage: str
    start: float
    stop: float


class Timeline:
    """Notes when each stage of each slice begins and ends."""

    def __init__(self) -> None:
        self._marks: list[tuple[int, int, str, Event, Event]] = []
        self._origin: Event | None = None

    def begin(self, queue: Queue) -> None:
        """Seconds count from here."""
        self._origin = queue.record(timed=True)

    @contextlib.contextmanager
    def stage(self, name: str, number: int, queues: Sequence[Queue]) -> Iterator[None]:
        """Around the operations of a stage of slice `number`."""
        place = number % len(queues)
        start = queues[place].record(timed=True)
        yield
        self._marks.append((number, place, name, start, queues[place].record(timed=True)))

    def spans(self) -> tuple[Span, ...]:
        """What was noted, once everything is done."""
        origin = self._origin
        assert origin is not None
        return tuple(
            Span(number, place, name, start.seconds_since(origin), stop.seconds_since(origin))
            for number, place, name, start, stop in self._marks
        )


def run(
    plan: GpuPlan,
    executor: Executor,
    device: int,
    x: Array,
    w: Array,
    bias: Array | None,
    out: Array,
    timeline: Timeline | None = None,
) -> int | None:
    """Run `plan` on host arrays; all of `out` is there on return.

    Returns the index of the first result that doesn't fit, where that was asked for.
    """
    with executor.own_queues(device, plan.in_flight) as queues:
        return _run(plan, executor, queues, x, w, bias, out, timeline)


def _run(
    plan: GpuPlan,
    executor: Executor,
    queues: Sequence[Queue],
    x: Array,
    w: Array,
    bias: Array | None,
    out: Array,
    timeline: Timeline | None,
) -> int | None:
    p, main, layouts = plan.problem, plan.programs[0], plan.layouts
    x_bytes, out_bytes = plan.slice_bytes()
    up, down = Upload(executor), Download(executor)

    def stage(name: str, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if timeline is None else timeline.stage(name, number, queues)

    # What all slices share goes first, on the first queue; the others wait for it.
    leader = queues[0]
    if timeline is not None:
        timeline.begin(leader)
    sizes = {
        "w": math.prod(p.w_shape) * p.w_dtype.itemsize,
        "bias": 0 if bias is None else bias.nbytes,
        "kept": main.kept_bytes,
    }
    shared = {name: leader.allocate(max(size, 1)) for name, size in sizes.items()}
    common: Addresses = {name: memory.ptr for name, memory in shared.items()}
    up.copy(leader, common["w"], w, layouts.w)
    if bias is not None and layouts.bias is not None:
        up.copy(leader, common["bias"], bias, layouts.bias)
    plan.steps(main.images).once(leader, common)
    ready = leader.record()
    for queue in queues[1:]:
        queue.wait(ready)

    sizes = {"x": x_bytes, "out": out_bytes, "scratch": main.scratch_bytes}
    own = [{name: queue.allocate(max(size, 1)) for name, size in sizes.items()} for queue in queues]
    # By queue: the slice whose results wait on the device, and their part of `out`.
    waiting: list[tuple[int, Array] | None] = [None] * len(queues)

    def fetch(number: int) -> None:
        held, waiting[number] = waiting[number], None
        if held is not None:
            with stage("copy out", held[0]):
                down.copy(queues[number], held[1], own[number]["out"].ptr, layouts.out)

    for turn, (first, last) in enumerate(plan.slices):
        number = turn % len(queues)
        queue = queues[number]
        fetch(number)
        addresses = common | {name: memory.ptr for name, memory in own[number].items()}
        with stage("copy in", turn):
            up.copy(queue, addresses["x"], x[first:last], layouts.x)
        with stage("compute", turn):
            plan.steps(last - first).each(queue, addresses, first)
        part = out[first:last]
        if down.can_go_straight(part, layouts.out):
            with stage("copy out", turn):
                down.copy_straight(queue, part, addresses["out"], layouts.out)
        else:
            waiting[number] = turn, part
    for turn in range(len(plan.slices), len(plan.slices) + len(queues)):
        fetch(turn % len(queues))
    for queue in queues:
        queue.synchronize()
    return read_overflow(leader, main, common)


def read_overflow(queue: Queue, program: Program, addresses: Addresses) -> int | None:
    """The index of the first result that didn't fit, None if all did; waits for `queue` only if someone asked."""
    if program.overflow is None:
        return None
    word = np.zeros(1, np.uint64)
    queue.copy_out(word, addresses[program.overflow.base] + program.overflow.offset)
    queue.synchronize()
    return None if word[0] == np.iinfo(np.uint64).max else int(word[0])
