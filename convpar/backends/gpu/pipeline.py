"""Host arrays through the device: slices of images on several queues, so that copies overlap with kernels.

Nothing host-side is ever copied as a whole. Data that the device can't fetch by itself (not pinned, strided, swapped,
misaligned) passes through small pinned pieces on its way in and out; a pinned array of the device's layout is copied
straight. On the device there are as many slices as are under way at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from convpar.backend import Layout, Unavailable

from . import executors
from .executors import Event, Executor, Queue

if TYPE_CHECKING:
    from .plan import GpuPlan

PIECE_BYTES = 4 * 2**20
PIECES = 4
"""Pinned memory that a call takes for each direction: this many pieces of this many bytes."""

Array = np.ndarray[Any, Any]


def empty_pinned(shape: Any, dtype: Any = float) -> Array:
    """A new NumPy array in page-locked memory, which the GPU copies from and to without a detour.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype

    Raises
    ------
    Unavailable
        There is no GPU, and the emulator wasn't asked for.
    """
    executor = executors.select()
    reason = executor if isinstance(executor, str) else executor.unavailable()
    if isinstance(executor, str) or reason is not None:
        raise Unavailable(f"page-locked memory can't be had: {reason}")
    kind = np.dtype(dtype)
    sizes = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    count = math.prod(int(i) for i in sizes)
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


class _Staging:
    """A ring of pinned pieces, each free again once the copy that used it has passed."""

    def __init__(self, executor: Executor, size: int) -> None:
        self._executor = executor
        self._size = min(PIECE_BYTES, max(size, 1))
        self._ring: list[tuple[Array, Event | None]] = []
        self._turn = 0

    @property
    def size(self) -> int:
        """Bytes of a piece."""
        return self._size

    def take(self) -> tuple[int, Array]:
        """A free piece and its number; waits for the oldest one where all are in use."""
        if len(self._ring) < PIECES:
            self._ring.append((self._executor.pinned(self._size), None))
            return len(self._ring) - 1, self._ring[-1][0]
        number = self._turn % PIECES
        self._turn += 1
        piece, event = self._ring[number]
        if event is not None:
            event.synchronize()
        return number, piece

    def in_use_until(self, number: int, event: Event) -> None:
        """The piece of that number is free once `event` has passed."""
        self._ring[number] = (self._ring[number][0], event)


def _in_memory_order(array: Array, layout: Layout) -> Array:
    """`array` with the axes in the order of the device's dense layout, outermost first."""
    order = sorted(range(array.ndim), key=lambda a: (-layout.strides[a], a))
    return array.transpose(order)


class _Mover:
    """Copies host arrays to and from dense device memory."""

    def __init__(self, executor: Executor, largest: int) -> None:
        self._executor = executor
        self._up = _Staging(executor, largest)
        self._down = _Staging(executor, largest)

    def _direct(self, array: Array) -> bool:
        return bool(array.flags.c_contiguous and array.dtype.isnative and self._executor.is_pinned(array))

    def up(self, queue: Queue, to: int, array: Array, layout: Layout) -> None:
        """Queue the copy of `array` to device address `to`."""
        dense = _in_memory_order(array, layout)
        if self._direct(dense):
            queue.copy_in(to, dense)
            return
        native = array.dtype.newbyteorder("=")
        for index, first, size in pieces(dense.shape, native.itemsize, self._up.size):
            number, piece = self._up.take()
            part = dense[index]
            np.copyto(piece[:size].view(native).reshape(part.shape), part, casting="equiv")
            queue.copy_in(to + first, piece[:size])
            self._up.in_use_until(number, queue.record())

    def down_later(self, queue: Queue, array: Array, source: int, layout: Layout) -> bool:
        """Queue the copy from `source` if it can go straight into `array`."""
        dense = _in_memory_order(array, layout)
        if not self._direct(dense):
            return False
        queue.copy_out(dense, source)
        return True

    def down(self, queue: Queue, array: Array, source: int, layout: Layout) -> None:
        """Copy from `source` into `array`, waiting for each piece."""
        dense = _in_memory_order(array, layout)
        native = array.dtype.newbyteorder("=")
        waiting: list[tuple[Any, Array, int, Event]] = []

        def land(index: Any, piece: Array, size: int, event: Event) -> None:
            event.synchronize()
            part = dense[index]
            np.copyto(part, piece[:size].view(native).reshape(part.shape), casting="equiv")

        for index, first, size in pieces(dense.shape, native.itemsize, self._down.size):
            if len(waiting) == PIECES:
                land(*waiting.pop(0))
            _, piece = self._down.take()
            queue.copy_out(piece[:size], source + first)
            waiting.append((index, piece, size, queue.record()))
        for arrived in waiting:
            land(*arrived)


def run(
    plan: GpuPlan, executor: Executor, device: int, x: Array, w: Array, bias: Any, out: Array
) -> int | None:
    """Run `plan` on host arrays; all of `out` is there on return.

    Returns the index of the first result that doesn't fit, where that was asked for.
    """
    from .plan import read_overflow

    p, main, layouts = plan.problem, plan.programs[0], plan.layouts
    queues = executor.own_queues(device, plan.in_flight)
    x_bytes, out_bytes = plan.slice_bytes(main.images)
    mover = _Mover(executor, max(x_bytes, out_bytes))

    # What all slices share goes first, on the first queue; the others wait for it.
    first_queue = queues[0]
    shared_memory = [first_queue.allocate(max(size, 1)) for size in (
        math.prod(p.w_shape) * p.w_dtype.itemsize,
        0 if p.bias_dtype is None else p.oc * p.bias_dtype.itemsize,
        main.kept_bytes,
    )]  # fmt: skip
    common = dict(zip(("w", "bias", "kept"), (m.ptr for m in shared_memory), strict=True))
    mover.up(first_queue, common["w"], w, layouts.w)
    if bias is not None and layouts.bias is not None:
        mover.up(first_queue, common["bias"], bias, layouts.bias)
    plan.steps(main.images).once(first_queue, common)
    ready = first_queue.record()
    for queue in queues[1:]:
        queue.wait(ready)

    buffers = [
        [queue.allocate(max(size, 1)) for size in (x_bytes, out_bytes, main.scratch_bytes)]
        for queue in queues
    ]
    # Per queue: the part of `out` whose results are on the device and have no copy queued.
    pending: list[Array | None] = [None] * len(queues)

    def fetch(number: int) -> None:
        part, pending[number] = pending[number], None
        if part is not None:
            mover.down(queues[number], part, buffers[number][1].ptr, layouts.out)

    for turn, (first, last) in enumerate(plan.slices):
        number = turn % len(queues)
        queue, memory = queues[number], buffers[number]
        fetch(number)
        addresses = common | dict(zip(("x", "out", "scratch"), (m.ptr for m in memory), strict=True))
        mover.up(queue, addresses["x"], x[first:last], layouts.x)
        plan.steps(last - first).each(queue, addresses, first)
        if not mover.down_later(queue, out[first:last], addresses["out"], layouts.out):
            pending[number] = out[first:last]
    for turn in range(len(plan.slices), len(plan.slices) + len(queues)):
        fetch(turn % len(queues))
    for queue in queues:
        queue.synchronize()
    return read_overflow(first_queue, main, common)
