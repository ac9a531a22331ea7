"""A library in a process of its own, pinned from outside and asked over pipes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import convpar

from .libraries import Cannot
from .worker import PROTOCOL

START_SECONDS = 120.0
"""How long a library may take to be imported."""

# An editable install would be found before any folder: folders first, and this one before the others.
_FROM_FOLDER = (
    "import runpy, sys; "
    "from importlib.machinery import PathFinder; "
    "sys.meta_path.remove(PathFinder); sys.meta_path.insert(0, PathFinder); "
    "sys.path.insert(0, sys.argv.pop(1)); "
    "runpy.run_module('convpar.bench.worker', run_name='__main__', alter_sys=True)"
)

# Pins itself, then becomes the worker: NumPy's and OpenMP's threads read the affinity when they start.
_PIN = (
    "import os, sys; "
    "os.sched_setaffinity(0, [int(i) for i in sys.argv[1].split(',')]); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


# With these OpenMP ties the first thread to one processor, and every other thread pool in the process to that one.
_PLACES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


class Died(RuntimeError):
    """The process ended, or didn't answer in time; the message has its last words."""


def first_cores(num_threads: int) -> list[int]:
    """The first `num_threads` processors that this process may use; empty where it can't be pinned.

    One of each core before the second of any: two that share a core share its multipliers.
    """
    if not hasattr(os, "sched_setaffinity"):
        return []
    allowed = sorted(os.sched_getaffinity(0))
    return sorted(sorted(allowed, key=lambda c: (_siblings(c, allowed).index(c), c))[:num_threads])


def _siblings(processor: int, allowed: Sequence[int]) -> list[int]:
    """The processors of the same core among `allowed`, `processor` included."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    try:
        ranges = [part.partition("-") for part in path.read_text().strip().split(",")]
        same = {c for first, _, last in ranges for c in range(int(first), int(last or first) + 1)}
    except (OSError, ValueError):
        same = set()
    return [c for c in allowed if c in same or c == processor]


class LibraryProcess:
    """One library, running until `close`.

    Parameters
    ----------
    name : str
        For messages.
    spec : str
        ``module:Class``, as in `convpar.bench.libraries.LIBRARIES`.
    num_threads : int
        Threads it may use.
    cores : sequence of int
        Processors it is pinned to; empty leaves it where it is.
    package : path, optional
        Folder that holds another build of convpar to use instead of this one.
    variables : mapping of str to str
        Of the environment, besides those of this process and the number of threads.

    Raises
    ------
    Cannot
        The library isn't there.
    Died
        It ended while it was being imported.
    """

    def __init__(
        self,
        name: str,
        spec: str,
        *,
        num_threads: int,
        cores: Sequence[int] = (),
        package: Path | None = None,
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        root = Path(convpar.__file__).parents[1] if package is None else package
        environment = {
            **{k: v for k, v in os.environ.items() if k not in _PLACES},
            "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")])),
            "OMP_NUM_THREADS": str(num_threads),
            "OPENBLAS_NUM_THREADS": str(num_threads),
            "MKL_NUM_THREADS": str(num_threads),
            **variables,
        }
        # -P: the current folder may hold another convpar.
        worker = ["-m", "convpar.bench.worker"] if package is None else ["-c", _FROM_FOLDER, str(package)]
        command = [sys.executable, "-P", *worker, spec, str(num_threads)]
        if cores:
            command = [sys.executable, "-S", "-c", _PIN, ",".join(map(str, cores)), *command[1:]]
        # Closed with the process; a pipe would fill and block it.
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            env=environment,
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._ended = "it was closed"
        threading.Thread(target=self._read, daemon=True).start()
        _die_first(self._process.pid)
        try:
            self.about = self.ask("hello", timeout=START_SECONDS)
            if self.about.pop("protocol") != PROTOCOL:
                raise Cannot(f"the convpar in {root} speaks another version of the protocol")
            found = Path(self.about.pop("root"))
            if found != root.resolve():
                raise Cannot(f"convpar was imported from {found}, not from {root}")
        except BaseException:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        # An empty line can't be an answer: it says that there will be no more.
        self._lines.put("")

    def ask(self, request: str, *, timeout: float, **arguments: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises
        ------
        Cannot
            The library says that it can't, or raised.
        Died
            It ended, or took longer than `timeout` seconds and was ended.
        """
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            raise Died(f"ended before: {self._ended}")
        try:
            self._process.stdin.write(json.dumps({"request": request, **arguments}) + "\n")
            self._process.stdin.flush()
            # A longer wait is an error to Python.
            line = self._lines.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            self.close()
            self._ended = f"took longer than {timeout:.0f} s"
            raise Died(self._ended) from None
        except OSError:
            line = ""
        if not line:
            words = self._last_words()
            self.close()
            self._ended = f"ended with code {self._process.returncode}{words}"
            raise Died(self._ended)
        reply: dict[str, Any] = json.loads(line)
        for refusal in ("cannot", "error"):
            if refusal in reply:
                raise Cannot(reply[refusal])
        return reply

    def _last_words(self) -> str:
        self._process.wait()
        self._stderr.seek(0)
        lines = [line for line in self._stderr.read().splitlines() if line.strip()]
        return f": {lines[-1].strip()}" if lines else ""

    @property
    def alive(self) -> bool:
        """Whether it can still be asked."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process, by force if it doesn't end by itself."""
        if self._process.stdin is not None and not self._process.stdin.closed:
            try:
                self._process.stdin.close()
            except OSError:
                # It ended with a request unread.
                self._process.kill()
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._stderr.close()

    def __enter__(self) -> LibraryProcess:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _die_first(pid: int) -> None:
    """Where memory runs out, let it take this process and not the one with the results."""
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
    except OSError:
        # Not Linux, or not allowed: then the kernel chooses by size, which mostly is the same.
        return
