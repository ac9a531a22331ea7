"""What runs launches: a GPU through CuPy, or the emulator. Both offer the same few operations, defined here.

``CONVPAR_GPU`` chooses: unset or "cuda" for a GPU, "emulate" for the emulator; see `emulator.Settings` for
what may follow it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from ..launch import Launch, Limits

VARIABLE = "CONVPAR_GPU"


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


class Kernel(Protocol):
    """A compiled kernel on one device."""

    @property
    def banks(self) -> Banks:
        """Its module's constant memory."""
        ...


class Queue(Protocol):
    """A stream of one device: operations run in the order in which they are given, and the caller goes on.

    Addresses are integers. Host arrays are contiguous; those copied from or to must stay until the queue has
    passed the copy, and only pinned ones are copied while the caller goes on.
    """

    def launch(self, kernel: Kernel, launch: Launch, arguments: Sequence[Any]) -> None:
        """Run `kernel` over the grid of `launch`; `arguments` as CONVPAR_ENTRY in problem.cuh has them."""
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

    def limits(self, device: int) -> Limits:
        """What `device` allows."""
        ...

    def load(self, launch: Launch, device: int) -> Kernel:
        """The compiled kernel of `launch`; compiled at the first request."""
        ...

    def queue(self, device: int, stream: Any) -> Queue:
        """`stream` as a queue, or the current stream where it is None."""
        ...

    def own_queues(self, device: int, count: int) -> AbstractContextManager[Sequence[Queue]]:
        """Queues that no one else uses in the context; all they were given is done when it ends."""
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
    would race. Banks follow one another round the memory; whoever takes one first lets its queue wait for those
    that used any part of it.
    """

    def __init__(self, address: int, size: int) -> None:
        self._address = address
        self._size = size
        self._next = 0
        self._users: list[tuple[int, int, Event]] = []
        self._lock = threading.Lock()

    def use(self, queue: Queue, source: int, size: int, run: Callable[[int], None]) -> None:
        """Copy `size` bytes from device address `source` into a bank, and call `run` with the bank's offset."""
        room = -(-size // 256) * 256
        # Everything here only queues work; the lock keeps two callers from the same bank until the event is set.
        with self._lock:
            first = self._next if self._next + room <= self._size else 0
            last = first + room
            for user in [u for u in self._users if u[0] < last and first < u[1]]:
                queue.wait(user[2])
                self._users.remove(user)
            queue.copy(self._address + first, source, size)
            run(first)
            self._users.append((first, last, queue.record()))
            self._next = last


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
