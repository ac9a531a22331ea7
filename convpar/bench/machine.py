"""What machine this is, and whether it is busy."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import convpar
from convpar import info

BUSY = 0.1
"""Share of the processors' time that others may take before times are worth little."""


def processor() -> dict[str, Any]:
    """Model of the processor; virtual machines often hide its name, so family and model go with it."""
    found = {"processor": info.processor(), "architecture": platform.machine()}
    family = info.family()
    return found if family is None else {**found, "family": family}


def graphics() -> str | None:
    """Model of the current GPU; None without one."""
    try:
        import cupy
    except ImportError:
        return None
    if not cupy.is_available():
        return None
    name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
    return name.decode() if isinstance(name, bytes) else str(name)


def hardware(device: str = "cpu") -> dict[str, Any]:
    """What makes two result files comparable: the model, and how many cores there are."""
    if device == "gpu":
        return {"gpu": graphics()}
    return {**processor(), "cores": os.cpu_count()}


def slug(hardware: dict[str, Any]) -> str:
    """A file name for `hardware`: lower case, words joined by hyphens."""
    words = [hardware.get("gpu") or hardware["processor"]]
    if "family" in hardware:
        words.append(hardware["family"].partition(" ")[2])
    if "cores" in hardware:
        words.append(f"{hardware['cores']} cores")
    return re.sub(r"[^a-z0-9]+", "-", " ".join(words).lower()).strip("-")


def load() -> float | None:
    """The load average of the last minute; None where there is none."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None


def busy(seconds: float = 0.5) -> float | None:
    """Share of the processors' time that is being used right now, while we sleep; None where it can't be read."""

    def times() -> tuple[int, int] | None:
        try:
            numbers = [int(i) for i in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        except (OSError, ValueError, IndexError):
            return None
        # user nice system idle iowait irq softirq steal
        return sum(numbers), numbers[3] + numbers[4]

    before = times()
    time.sleep(seconds)
    after = times()
    if before is None or after is None or after[0] == before[0]:
        return None
    return 1 - (after[1] - before[1]) / (after[0] - before[0])


SOURCES = ("convpar", "meson.build", "meson.options", "pyproject.toml")
"""What of the repository makes the package; changes elsewhere can't change a time."""


def git_commit() -> str | None:
    """The commit that convpar is run from, with "-dirty" if its sources were changed; None outside a repository."""
    root = Path(convpar.__file__).parents[1]
    if not (root / ".git").exists():
        return None
    try:
        commit, changed = (
            subprocess.run(["git", "-C", str(root), *command], capture_output=True, text=True, check=False)
            for command in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", *SOURCES])
        )
    except OSError:
        return None
    if commit.returncode or changed.returncode:
        return None
    return commit.stdout.strip() + ("-dirty" if changed.stdout else "")


def memory_available() -> int | None:
    """Bytes that could be used without swapping; None where it can't be read."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None
