"""The compiled engine: whether it is there, and what this processor lets it use."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from convpar import threads as _threads

FOLDER = Path(__file__).parent
ISA_VARIABLE = "CONVPAR_ISA"
UNIT_VARIABLE = "CONVPAR_AMX"
WORD_VARIABLE = "CONVPAR_IFMA"
PAIR_VARIABLE = "CONVPAR_VNNI"


@functools.cache
def engine() -> ModuleType:
    with _threads.STATE:
        return importlib.import_module(".engine", __package__)


def missing_engine() -> str | None:
    try:
        engine()
    except ImportError as e:
        missing = f"the compiled module convpar.backends.cpu.engine can't be loaded ({e})"
        sources = FOLDER.parents[2]
        if (sources / "pyproject.toml").is_file():
            return f"{missing}: Python found convpar's sources, in which nothing is compiled, in {sources}; start it in another folder"
        return f"{missing}; install convpar again"
    return None


def missing_level() -> str | None:
    missing = missing_engine()
    if missing is None:
        try:
            isa()
        except ValueError as e:
            return str(e)
    return missing


def missing_instructions(levels: tuple[str, ...], units: Callable[[], bool] | None) -> str | None:
    """Why a rung that needs one of these levels can't run; `units` reads the setting for what it needs beyond that."""
    if isa() not in levels:
        return f"it needs the instruction set {' or '.join(levels)}, and {isa()} is in use"
    try:
        if units is not None:
            units()
    except ValueError as e:
        return str(e)
    return None


@functools.cache
def isa() -> str:
    """The ISA level in use: the best that the processor runs, or the one that CONVPAR_ISA names.

    Raises
    ------
    ValueError
        CONVPAR_ISA names a level that this build or processor doesn't have.
    """
    levels: tuple[str, ...] = engine().isa_levels()
    forced = os.environ.get(ISA_VARIABLE, "").strip()
    if not forced:
        return levels[0]
    if forced not in levels:
        raise ValueError(f"{ISA_VARIABLE} must be one of {', '.join(levels)} on this machine, not {forced!r}")
    return forced


def _wanted(variable: str) -> bool:
    wanted = os.environ.get(variable, "").strip()
    if wanted not in ("", "0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, not {wanted!r}")
    return wanted != "0"


@functools.cache
def matrix_unit() -> bool:
    """Whether products of matrices are the processor's: it has AMX, this process may use it, and CONVPAR_AMX isn't 0.

    Raises
    ------
    ValueError
        CONVPAR_AMX is neither 0 nor 1.
    """
    return _wanted(UNIT_VARIABLE) and bool(engine().matrix_unit())


@functools.cache
def word_unit() -> bool:
    """Whether products of 52 bits are the processor's: Intel's with AVX-512 IFMA, if CONVPAR_IFMA isn't 0.

    Raises
    ------
    ValueError
        CONVPAR_IFMA is neither 0 nor 1.
    """
    return _wanted(WORD_VARIABLE) and bool(engine().word_unit())


@functools.cache
def pair_unit() -> bool:
    """Whether pairs of 16 bits are multiplied and added in one operation: by AVX-512 VNNI, if CONVPAR_VNNI isn't 0.

    Raises
    ------
    ValueError
        CONVPAR_VNNI is neither 0 nor 1.
    """
    return _wanted(PAIR_VARIABLE) and bool(engine().pair_unit())


def build_info() -> dict[str, Any]:
    """What the compiled engine was built with and uses: compiler, OpenMP, ISA levels, threads."""
    missing = missing_engine()
    if missing is not None:
        return {"engine": missing}
    compiled = engine()
    return {
        "engine": compiled.__file__,
        "compiler": compiled.COMPILER,
        "OpenMP": compiled.OPENMP or "not built in: one thread",
        "ISA levels": compiled.isa_levels(),
        "ISA level in use": isa(),
        "matrix unit": "AMX" if matrix_unit() else "emulated",
        "products of 52 bits": "AVX-512 IFMA" if word_unit() else "emulated",
        "pairs of 16 bits": "AVX-512 VNNI" if pair_unit() else "multiplied, then added",
        "processors available": _threads.available(),
    }


def peak_fma(kind: str, num_threads: int, seconds: float = 0.3) -> float:
    """Multiply-accumulates a second in registers, measured at the ISA level in use.

    `kind` is "float32", "float64" or "int32"; `num_threads` is from 1 to 1024.
    """
    num_threads = _threads.threads_argument(num_threads)
    return float(engine().peak_fma(kind, num_threads, seconds, isa()))


def copy_bandwidth(size: int, num_threads: int, repeats: int = 5) -> float:
    """Bytes read and written a second by 1 to 1024 threads that copy `size` bytes, the best of `repeats`."""
    return float(engine().copy_bandwidth(size, _threads.threads_argument(num_threads), repeats))
