"""Transforms of real rows: all that convpar asks of SciPy when it computes. Loaded with the first transform."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def missing() -> str | None:
    """Why there are no transforms here, as a sentence a user can act on; None if there are."""
    if importlib.util.find_spec("scipy") is None:
        return "it needs SciPy's FFT: pip install 'convpar[fft]'"
    return None


@functools.cache
def _scipy() -> Any:
    return importlib.import_module("scipy.fft")


def smooth(least: int) -> int:
    """The smallest even size from `least` on without a prime factor beyond 5, which SciPy transforms fastest."""
    best = 2
    while best < least:
        best *= 2
    five = 2
    while five < best:
        three = five
        while three < best:
            size = three
            while size < least:
                size *= 2
            best = min(best, size)
            three *= 3
        five *= 5
    return best


def spectra(rows: Array, size: int) -> Array:
    """Spectra of `rows`, (..., m) float32 or float64 with m <= `size`: (..., size // 2 + 1), by this thread alone."""
    kind = np.complex64 if rows.dtype.itemsize == 4 else np.complex128
    # Callers may have set another library to serve SciPy's functions, and that has its own ways.
    return np.ascontiguousarray(_scipy().rfft(rows, size, axis=-1, workers=1), kind)


def rows(spectra: Array, size: int) -> Array:
    """The rows, (..., `size`), of `spectra`, by this thread alone."""
    kind = np.float32 if spectra.dtype.itemsize == 8 else np.float64
    return np.ascontiguousarray(_scipy().irfft(spectra, size, axis=-1, workers=1), kind)
