"""How many multiply-accumulates a GPU does at most: a loop in registers, timed."""

from __future__ import annotations

import statistics
from pathlib import Path

import numpy as np

from .compile import STANDARD
from .launch import CUDA_TYPES

CHAINS = 8
THREADS = 256
_BLOCKS_A_MULTIPROCESSOR = 32
_SAMPLES = 9

# Unsigned integers wrap by definition; signed ones take equally long.
_TYPES = {"float32": "float32", "float64": "float64", "int32": "uint32", "int64": "uint64"}


def peak_fma(kind: str, seconds: float = 0.5) -> float:
    """Multiply-accumulates a second of the current GPU, with its operands in registers.

    Parameters
    ----------
    kind : {"float32", "float64", "int32", "int64"}
        The element type.
    seconds : float
        How long to measure, roughly.

    Raises
    ------
    ValueError
        There is no loop for `kind`.
    ImportError
        CuPy is missing.
    """
    if kind not in _TYPES:
        raise ValueError(f"kind must be one of {', '.join(_TYPES)}, not {kind!r}")
    import cupy

    dtype = np.dtype(_TYPES[kind])
    blocks = _BLOCKS_A_MULTIPROCESSOR * int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    kernel = cupy.RawKernel(source(kind), "burn", options=(STANDARD,))
    out = cupy.empty(blocks * THREADS, dtype)
    # Sums stay finite, neither subnormal nor zero.
    factor, term = (dtype.type(0.5), dtype.type(1)) if dtype.kind == "f" else (dtype.type(3), dtype.type(1))

    def took(turns: int) -> float:
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        kernel((blocks,), (THREADS,), (out, factor, term, np.int32(turns)))
        stop.record()
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e-3

    turns = 1024
    took(turns)  # compiles and loads
    # The clock rises under load: a first long run, and the rest sized by it.
    turns = _scaled(turns, took(turns), seconds / (_SAMPLES + 2))
    turns = _scaled(turns, took(turns), seconds / (_SAMPLES + 2))
    median = statistics.median(took(turns) for _ in range(_SAMPLES))
    return blocks * THREADS * CHAINS * turns / median


def _scaled(turns: int, took: float, wanted: float) -> int:
    return min(max(round(turns * wanted / max(took, 1e-6)), 64), 2**30)


def source(kind: str) -> str:
    """The text to compile for element type `kind`."""
    text = (Path(__file__).parent / "ceilings.cu").read_text(encoding="utf-8")
    return f'typedef {CUDA_TYPES[_TYPES[kind]]} T;\n#define CHAINS {CHAINS}\n#line 1 "ceilings.cu"\n{text}'
