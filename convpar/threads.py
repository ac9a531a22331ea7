"""How many threads a call uses, decided once for the whole package; and the lock of the package.

In this order: the call's own ``num_threads``, `set_num_threads`, ``OMP_NUM_THREADS``,
and the smaller of the processor affinity and the control group's limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import warnings
from pathlib import Path
from typing import Any

from .problem import index_argument

STATE = threading.RLock()
"""Held while what the process shares is changed: names, remembered plans, loaded modules. A fork waits
for it, so that no child finds it held by a thread that it doesn't have."""

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=STATE.acquire, after_in_parent=STATE.release, after_in_child=STATE.release)

MOST_THREADS = 1024
"""The largest ``num_threads``: OpenMP ends the process when the system refuses it a thread."""


# Not on macOS and Windows.
_processors = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None


def _affinity() -> int:
    return os.cpu_count() or 1 if _processors is None else len(_processors)


_BINDING = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def leave_processor() -> None:
    """Let the calling thread, one of the package's own, run wherever the process might when it began.

    OpenMP may have bound the thread that started it to one processor, and threads inherit that. What else narrowed
    the caller's choice is kept, unless it too left a single one.
    """
    if _processors is None or not any(name in os.environ for name in _BINDING):
        return
    if len(os.sched_getaffinity(0)) == 1:
        # They may have been taken from the process since.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, _processors)


def _cgroup_limit(
    root: Path = Path("/sys/fs/cgroup"), groups: Path = Path("/proc/self/cgroup")
) -> int | None:
    """Processors that the control group grants this process, rounded up; None without a limit.

    `root` is where the hierarchies are mounted, `groups` the file that names this process's groups.
    """
    try:
        lines = groups.read_text().splitlines()
    except OSError:
        lines = []
    limits = []
    # A line is "0::/path" in version 2 and "4:cpu,cpuacct:/path" in version 1. Every group from ours
    # up to the root may set a limit; in a container the path often isn't there, and the root is ours.
    for line in ("0::/", ":cpu:/", *lines):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "cpu" if controllers else root
        folder = top / path.strip("/")
        for group in (folder, *folder.parents):
            limits.append(_quota(group))
            if group == top:
                break
    found = [limit for limit in limits if limit is not None]
    return max(1, math.ceil(min(found))) if found else None


def _quota(group: Path) -> float | None:
    """Processors that one control group grants, in the files of either version."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()[:2]
        else:
            quota = (group / "cpu.cfs_quota_us").read_text()
            period = (group / "cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if quota != "max" and int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):
        return None


def _from_environment() -> int | None:
    text = os.environ.get("OMP_NUM_THREADS", "").strip()
    if not text:
        return None
    # OpenMP allows a list, one number for each level of nesting.
    first = text.split(",")[0].strip()
    if first.isdecimal() and 0 < int(first) <= MOST_THREADS:
        return int(first)
    warnings.warn(
        f"convpar ignores OMP_NUM_THREADS={text!r}: it must begin with an integer from 1 to {MOST_THREADS}",
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


def threads_argument(num_threads: Any) -> int:
    """`num_threads` as an int from 1 to `MOST_THREADS`, or an error that names it."""
    return index_argument(num_threads, "num_threads", 1, MOST_THREADS)


def get_num_threads() -> int:
    """Threads that a call uses when it doesn't say ``num_threads=``."""
    return _chosen or _environment or _available


_FEW = 64
"""A bound of fewer threads is told."""

MOST_WORKSPACE = 64 * 2**20
"""Bytes of scratch memory that a CPU plan takes on as many threads as it likes."""


def within_workspace(shared: int, each: int) -> int:
    """The most threads, at least one, whose `shared` bytes and `each` one's own stay within `MOST_WORKSPACE`.

    Where what they share is too much by itself, fewer of them wouldn't help.
    """
    return max((MOST_WORKSPACE - shared) // each, 1) if each and shared < MOST_WORKSPACE else MOST_THREADS


def told(serial: bool, most: int) -> str:
    """What an explanation says of a plan's threads, of which at most `most` have room for their scratch memory."""
    if serial:
        return "1 unless num_threads says otherwise"
    bound = f", at most {most}, or scratch memory would pass its bound" if most < _FEW else ""
    return f"all that the call may use{bound}"


def set_num_threads(num_threads: int | None) -> None:
    """Set the number of threads for the whole process.

    Parameters
    ----------
    num_threads : int or None
        From 1 to 1024; it may exceed the processors. None goes back to ``OMP_NUM_THREADS``
        or the processors available.

    Raises
    ------
    TypeError, ValueError
        It is neither None nor an integer from 1 to 1024.
    """
    global _chosen
    _chosen = None if num_threads is None else threads_argument(num_threads)
