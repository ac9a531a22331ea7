"""What this installation is: versions, build, instruction set, GPU."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import platform
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from .threads import get_num_threads


def _version() -> str:
    """The source tree's own version if this is one, since another convpar may be installed; else the installed one's."""
    try:
        text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
        project = tomllib.loads(text)["project"]
    except (OSError, tomllib.TOMLDecodeError, KeyError):
        project = {}
    if project.get("name") == "convpar":
        return str(project["version"])
    try:
        return version("convpar")
    except PackageNotFoundError:  # the package's folder alone
        return "0+unknown"


__version__ = _version()


def show_config() -> dict[str, Any]:
    """Versions, the processor, the compiler, the ISA level in use, OpenMP, threads, and CuPy with its GPUs.

    Returns
    -------
    dict
        Section -> {name: value}; every value prints.
    """
    from .backends import cpu

    return {
        "convpar": {"version": __version__},
        "python": {"version": platform.python_version(), "numpy": np.__version__},
        "cpu": {
            "processor": processor(),
            "family": family() or "not told",
            **cpu.build_info(),
            "threads": get_num_threads(),
        },
        "gpu": _gpu(),
    }


def check_settings() -> None:
    """See that the CPU rungs can follow what the environment says.

    Raises
    ------
    ValueError
        CONVPAR_ISA names a level that this build or processor doesn't have, or CONVPAR_AMX, CONVPAR_IFMA or
        CONVPAR_VNNI is neither 0 nor 1.
    """
    from .backends import cpu

    # Without the compiled engine its setting plays no part.
    with contextlib.suppress(ImportError):
        cpu.isa()
        cpu.matrix_unit()
        cpu.word_unit()
        cpu.pair_unit()


def processor() -> str:
    """The processor's model name, as the system tells it."""
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def family() -> str | None:
    """Maker, family and model of an x86 processor, whose name virtual machines often hide; None where it isn't known."""
    told = _cpuinfo()
    if not {"vendor_id", "cpu family", "model"} <= told.keys():
        return None
    return f"{told['vendor_id']} family {told['cpu family']} model {told['model']}"


@functools.cache
def _cpuinfo() -> dict[str, str]:
    """What the system says of one of the processors."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}


def _gpu() -> dict[str, Any]:
    if importlib.util.find_spec("cupy") is None:
        return {"cupy": "not installed (pip install 'convpar[cuda13x]' or 'convpar[cuda12x]')"}
    try:
        import cupy

        facts: dict[str, Any] = {"cupy": cupy.__version__}
        if not cupy.cuda.is_available():
            return {**facts, "devices": "none that CUDA can use"}
        runtime = cupy.cuda.runtime
        names = [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
        return {**facts, "CUDA": runtime.runtimeGetVersion(), "devices": ", ".join(names)}
    except Exception as e:
        # A broken CUDA installation is a fact to show, not a reason to show nothing.
        return {"cupy": f"can't be used: {type(e).__name__}: {e}"}
