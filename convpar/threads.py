"""How many threads a call uses, decided once for the whole package.

In this order: the call's own ``num_threads``, `set_num_threads`, ``OMP_NUM_THREADS``,
and the smaller of the processor affinity and the control group's limit.
"""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path

from .problem import index_argument


def _affinity() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def _cgroup_limit() -> int | None:
    """Processors that the control group grants this process, rounded up; None without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        # Version 2: every group from ours up to the root may set a limit.
        group = next(
            line.split(":", 2)[2].strip("/")
            for line in Path("/proc/self/cgroup").read_text().splitlines()
            if line.startswith("0::")
        )
    except (OSError, StopIteration):
        group = ""
    limits = []
    for folder in (root / group, *(root / group).parents):
        try:
            quota, period = (folder / "cpu.max").read_text().split()[:2]
            if quota != "max":
                limits.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass
        if folder == root:
            break
    try:
        quota_us = int((root / "cpu" / "cpu.cfs_quota_us").read_text())
        period_us = int((root / "cpu" / "cpu.cfs_period_us").read_text())
        if quota_us > 0:
            limits.append(quota_us / period_us)
    except (OSError, ValueError):
        pass
    return max(1, math.ceil(min(limits))) if limits else None


def _from_environment() -> int | None:
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    # OpenMP allows a list, one number for each level of nesting.
    first = text.split(",")[0].strip()
    if first.isdecimal() and int(first) > 0:
        return int(first)
    warnings.warn(
        f"convpar ignores OMP_NUM_THREADS={text!r}: it must begin with a positive integer",
        RuntimeWarning,
        stacklevel=3,
    )
    return None


# Read here, before OpenMP starts: OpenMP's own binding narrows the affinity later on.
_available = min(_affinity(), _cgroup_limit() or _affinity())
_environment = _from_environment()
_chosen: int | None = None


def available() -> int:
    """Processors that this process may use: the smaller of affinity and control group limit."""
    return _available


def get_num_threads() -> int:
    """Threads that a call uses when it doesn't say ``num_threads=``."""
    return _chosen or _environment or _available


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads for the whole process.

    Parameters
    ----------
    num_threads : int or None
        At least 1; it may exceed the processors. None goes back to ``OMP_NUM_THREADS``
        or the processors available.

    Raises
    ------
    TypeError, ValueError
        It is neither None nor an integer of at least 1.
    """
    global _chosen
    _chosen = None if num_threads is None else index_argument(num_threads, "num_threads", 1)
