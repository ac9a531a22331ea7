"""What runs launches: a GPU through CuPy, or the emulator. Both offer the same few operations, defined here.

``CONVPAR_GPU`` chooses: unset or "cuda" for a GPU, "emulate" for the emulator; see `emulator.Settings` for
what may follow it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from convpar.problem import Unsupported

from ..launch import Launch, Limits, aligned

VARIABLE = "CONVPAR_GPU"

CAPTURABLE = (
    "gpu-naive, gpu-tiled and gpu-unrolled can be captured where filters and bias are contiguous and of the type of "
    "the sum, without flip and overflow='raise'"
)
"""What a call under capture can do instead."""


class Memory(Protocol):
    """Device memory; it is freed with the object."""

    @property
    def ptr(self) -> int:
        """Its address on the device."""
        ...


class Event(Protocol):
    """A point in a queue's order."""

    def synchronize(self) -> None:
        """Wait, on the host, until the queue has passed it."""
        ...

    def seconds_since(self, earlier: Event) -> float:
        """From when a queue passed `earlier` until one passed this; both are timed, and have been passed."""
        ...


class Loaded(Protocol):
    """A launch with its compiled kernel on one device."""

    @property
    def banks(self) -> Banks:
        """Its module's constant memory."""
        ...


class Queue(Protocol):
    """A stream of one device: operations run in the order in which they are given, and the caller goes on.

    They are given while the device is the current one. Addresses are integers. Host arrays are contiguous; those
    copied from or to must stay until the queue has passed the copy, and only pinned ones are copied while the
    caller goes on.
    """

    @property
    def order(self) -> Hashable:
        """Equal for queues whose operations run in one order, whoever gives them, as long as one of the queues is
        held; None if that can't be promised."""
        ...

    def launch(self, loaded: Loaded, numbers: Sequence[int]) -> None:
        """Run a launch; `numbers` are the arguments that CONVPAR_ENTRY in problem.cuh has before the `Problem`."""
        ...

    def fill(self, address: int, size: int, value: int) -> None:
        """Set `size` bytes to the byte `value`."""
        ...

    def copy(self, to: int, source: int, size: int) -> None:
        """Copy inside the device."""
        ...

    def copy_in(self, to: int, source: np.ndarray[Any, Any]) -> None:
        """Copy from the host."""
        ...

    def copy_out(self, to: np.ndarray[Any, Any], source: int) -> None:
        """Copy to the host."""
        ...

    def allocate(self, size: int) -> Memory:
        """Device memory for operations of this queue."""
        ...

    def capturing(self) -> bool:
        """Whether operations are being written to a graph, to be run later and perhaps often, instead of run."""
        ...

    def record(self, *, timed: bool = False) -> Event:
        """The point after all operations given so far; `timed` if it will be asked when it was passed."""
        ...

    def wait(self, event: Event) -> None:
        """Hold operations given from now on until `event` has passed, without holding the host."""
        ...

    def synchronize(self) -> None:
        """Wait, on the host, until all operations given so far are done."""
        ...


class Executor(Protocol):
    """A way to run launches."""

    def unavailable(self) -> str | None:
        """Why this machine can't, None if it can."""
        ...

    def current_device(self) -> int:
        """The device that arrays from the host go to."""
        ...

    def on(self, device: int) -> AbstractContextManager[Any]:
        """Inside it, `device` is the current one."""
        ...

    def limits(self, device: int) -> Limits:
        """What `device` allows."""
        ...

    def load(self, launch: Launch, device: int) -> Loaded:
        """`launch` with its kernel, which is compiled at the first request."""
        ...

    def queue(self, device: int, stream: Any) -> Queue:
        """`stream` as a queue, or the current stream where it is None; `device` is the current one."""
        ...

    def own_queues(self, device: int, count: int) -> AbstractContextManager[Sequence[Queue]]:
        """Queues that no one else uses in the context, where `device` is the current one; all they were given is
        done when it ends."""
        ...

    def address(self, array: Any) -> int:
        """Where a device array's first element is."""
        ...

    def upload(self, array: np.ndarray[Any, Any], device: int) -> Memory:
        """A small host array in device memory, ready for every queue on return."""
        ...

    def pinned(self, size: int) -> np.ndarray[Any, Any]:
        """`size` bytes of host memory that copies reach while the caller goes on."""
        ...

    def is_pinned(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether a host array lies in such memory."""
        ...


class Banks:
    """Hands out a module's constant memory, in banks, to calls that may be in flight on several queues.

    Constant memory belongs to a module, so a call that wrote its filters where another call's kernel still reads
    would race. Calls of one queue follow one another anyway and share a bank. Where another queue's call comes, an
    event marks how far the queue before has got, and the next bank is taken; banks follow one another round the
    memory, and whoever takes one lets its queue wait for those that used any part of it.

    Attributes
    ----------
    lock : threading.Lock
        Held from `fill` to `leave`, so that two callers' copies and launches don't mix. Both only queue work.
    """

    def __init__(self, address: int, size: int) -> None:
        self.lock = threading.Lock()
        self._address = address
        self._size = size
        # The bank in use, and the last queue that used it.
        self._first = self._last = 0
        self._queue: Queue | None = None
        self._before: list[tuple[int, int, Event]] = []

    def fill(self, queue: Queue, source: int, size: int) -> int:
        """Copy `size` bytes from device address `source` into a bank; returns the bank's offset.

        Raises
        ------
        Unsupported
            The queue is capturing. A graph would keep the bank, which is others' by the time the graph runs.
        """
        if queue.capturing():
            raise Unsupported(
                "a CUDA graph can't capture a call whose filters go to constant memory, where later calls put theirs; "
                + CAPTURABLE
            )
        if (
            self._queue is None
            or queue.order is None
            or queue.order != self._queue.order
            or size > self._last - self._first
        ):
            self._turn_to(queue, size)
        queue.copy(self._address + self._first, source, size)
        return self._first

    def leave(self, queue: Queue) -> None:
        """The launch that reads the bank has been queued."""
        # A stream that isn't held may be gone when the next caller comes.
        if queue.order is None:
            self._end_turn()

    def _end_turn(self) -> None:
        if self._queue is not None:
            self._before.append((self._first, self._last, self._queue.record()))
            self._queue = None

    def _turn_to(self, queue: Queue, size: int) -> None:
        self._end_turn()
        room = aligned(size)
        first = self._last if self._last + room <= self._size else 0
        last = first + room
        for user in [u for u in self._before if u[0] < last and first < u[1]]:
            queue.wait(user[2])
            self._before.remove(user)
        self._first, self._last, self._queue = first, last, queue


@functools.lru_cache(maxsize=16)
def _named(name: str) -> Executor | str:
    if name in ("", "cuda"):
        from .cupy import CupyExecutor

        return CupyExecutor()
    if name.partition(":")[0] == "emulate":
        from .emulator import Emulator, Settings

        try:
            return Emulator(Settings.parse(name.partition(":")[2]))
        except ValueError as e:
            return f"{VARIABLE} is {name!r}: {e}"
    return f"{VARIABLE} must be 'cuda' or 'emulate', not {name!r}"


def select() -> Executor | str:
    """The executor that `VARIABLE` asks for, or why there is none."""
    return _named(os.environ.get(VARIABLE, "").strip())


def emulating() -> bool:
    """Whether the emulator runs launches."""
    executor = select()
    if isinstance(executor, str):
        return False
    from .emulator import Emulator

    return isinstance(executor, Emulator)


def here() -> Hashable:
    """What decides, besides a call's arguments, where arrays from the host go: the executor and its current device."""
    executor = select()
    if isinstance(executor, str) or executor.unavailable() is not None:
        return None
    return executor, executor.current_device()
