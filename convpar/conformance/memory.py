"""Arrays as they may lie in memory, between guard bytes: strided, reversed, swapped, misaligned, broadcast.

A `Memory` is the recipe, a `Buffer` one array made by it. The bytes that belong to no element of an
array keep a known pattern, so a stray write shows, and one made of NaN, so a stray read shows too.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from convpar.backends.gpu import executors

Array = npt.NDArray[Any]

GUARD = 64
"""Bytes before and after each array, and what its base address is a multiple of unless misaligned."""

NAN_BYTE, OTHER_BYTE = 0xFF, 0x5B
"""Two patterns: NaN or -1 in every type, and an ordinary number in every type."""


@dataclass(frozen=True, slots=True)
class Memory:
    """How to lay an array out. The default is C-contiguous, native, aligned.

    Attributes
    ----------
    order : tuple of int
        The axes from the slowest to the fastest in memory; empty for C order.
    steps : tuple of int
        For each axis, how many elements apart its elements are in an otherwise dense array: 2 leaves out every
        other, -1 is reversed, 0 repeats one element (inputs only). Empty for 1 everywhere.
    swapped : bool
        The other byte order.
    offset : int
        Bytes by which the base address misses the alignment.
    gap : int
        Bytes between neighbouring elements, as between the fields of a record.
    read_only : bool
        NumPy's flag.
    """

    order: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    swapped: bool = False
    offset: int = 0
    gap: int = 0
    read_only: bool = False

    def __repr__(self) -> str:
        given = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return f"Memory({', '.join(given)})"

    def strides(self, shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        steps = self.steps or (1,) * len(shape)
        strides = [0] * len(shape)
        stride = itemsize + self.gap
        for axis in reversed(self.order or range(len(shape))):
            strides[axis] = stride * steps[axis]
            stride *= max(shape[axis], 1) * abs(steps[axis]) if steps[axis] else 1
        return tuple(strides)


class Place:
    """Where arrays live and how bytes get there: host memory."""

    takes_any_layout = True

    def upload(self, raw: Array) -> Any:
        """`raw`, uint8 bytes in host memory, in this place."""
        return raw

    def download(self, raw: Any) -> Array:
        """The bytes of this place in host memory."""
        return np.asarray(raw)

    def view(
        self, raw: Any, offset: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]
    ) -> Any:
        """An array over `raw` whose first element begins at byte `offset`."""
        return np.ndarray(shape, dtype, buffer=raw, offset=offset, strides=strides)

    def wait(self) -> None:
        """Return when everything given to the place has been done."""


class CudaPlace(Place):
    """The memory of the current CUDA device, through CuPy."""

    # CuPy has neither swapped nor misaligned arrays.
    takes_any_layout = False

    def upload(self, raw: Array) -> Any:
        import cupy

        return cupy.asarray(raw)

    def download(self, raw: Any) -> Array:
        import cupy

        return np.asarray(cupy.asnumpy(raw))

    def view(
        self, raw: Any, offset: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...]
    ) -> Any:
        import cupy

        return cupy.ndarray(shape, dtype, memptr=raw.data + offset, strides=strides)

    def wait(self) -> None:
        import cupy

        cupy.cuda.get_current_stream().synchronize()


class EmulatedPlace(Place):
    """Where convpar's emulator keeps device arrays: in host memory, under the rules of a device."""

    takes_any_layout = False


def device_place(kind: str) -> Place:
    """The memory that a backend of device `kind` computes in."""
    if kind == "cpu":
        return Place()
    if executors.emulating():
        return EmulatedPlace()
    return CudaPlace()


class Buffer:
    """One array between guard bytes.

    Parameters
    ----------
    shape, dtype
        Of the array, the type in native order.
    memory : Memory
    place : Place
    values : ndarray or None
        What it holds; None leaves the pattern.
    pattern : int
        The byte that fills whatever `values` doesn't.

    Attributes
    ----------
    array : array of `place`
        The array itself.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        memory: Memory,
        place: Place,
        values: Array | None = None,
        pattern: int = NAN_BYTE,
    ) -> None:
        self.memory, self.place, self.shape, self.pattern = memory, place, shape, pattern
        self.dtype = dtype.newbyteorder("S") if memory.swapped else dtype
        self.strides = memory.strides(shape, dtype.itemsize)
        reach = [(n - 1) * s for n, s in zip(shape, self.strides, strict=True) if n > 1]
        before = -sum(r for r in reach if r < 0)
        after = sum(r for r in reach if r > 0) + (dtype.itemsize if 0 not in shape else 0)
        # Elements before the first one, along reversed axes, must not cost the alignment.
        self.offset = GUARD + -(-before // GUARD) * GUARD + memory.offset
        base = aligned_bytes(self.offset + after + GUARD, pattern)
        host = np.ndarray(shape, self.dtype, buffer=base, offset=self.offset, strides=self.strides)
        if values is not None:
            host[...] = values
        self._before = base.copy()
        self._raw = place.upload(base)
        self.array = place.view(self._raw, self.offset, shape, self.dtype, self.strides)
        if memory.read_only and isinstance(self.array, np.ndarray):
            self.array.flags.writeable = False

    def _host(self, raw: Array) -> Array:
        return np.ndarray(self.shape, self.dtype, buffer=raw, offset=self.offset, strides=self.strides)

    def refill(self, values: Array) -> None:
        """Put `values` where the array lies, as its owner may between two runs."""
        base = self._before.copy()
        self._host(base)[...] = values
        self._before = base
        self._raw[...] = self.place.upload(base)

    def given(self) -> Array:
        """What the array was given, C-contiguous and native."""
        return self._host(self._before).astype(self.dtype.newbyteorder("="), order="C")

    def values(self) -> Array:
        """What the array holds now, C-contiguous and native."""
        return self._host(self.place.download(self._raw)).astype(self.dtype.newbyteorder("="), order="C")

    def bits(self) -> bytes:
        """The bytes of the elements in C order."""
        return np.ascontiguousarray(self._host(self.place.download(self._raw))).tobytes()

    def changed(self) -> bool:
        """Whether any byte differs from what it was given."""
        return not np.array_equal(self.place.download(self._raw), self._before)

    def changed_outside(self) -> bool:
        """Whether a byte that belongs to no element differs from the pattern."""
        now = self.place.download(self._raw)
        mine = np.zeros(now.size, np.uint8)
        element = np.dtype((np.void, self.dtype.itemsize))
        view = np.ndarray(self.shape, element, buffer=mine, offset=self.offset, strides=self.strides)
        view[...] = np.void(b"\xff" * self.dtype.itemsize)
        return bool(np.any((now != self.pattern) & (mine == 0)))

    def unwritten(self) -> Array:
        """Elements whose bytes are all still the pattern, as a mask."""
        now = np.ascontiguousarray(self._host(self.place.download(self._raw)))
        if not now.size:
            return np.zeros(self.shape, bool)
        as_bytes = now.view(np.uint8).reshape(*self.shape, self.dtype.itemsize)
        return np.asarray((as_bytes == self.pattern).all(axis=-1))


def aligned_bytes(size: int, pattern: int) -> Array:
    """`size` uint8 that hold `pattern`, their base address a multiple of `GUARD`."""
    raw = np.full(size + GUARD, pattern, np.uint8)
    start = -raw.ctypes.data % GUARD
    return raw[start : start + size]
