"""The process that one library runs in: ``python -m convpar.bench.worker module:Class THREADS``.

Reads one JSON object a line from standard input and answers each with one. What
the library itself prints goes to standard error. `convpar.bench.process` is the other end.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import convpar
from convpar.bench.libraries import Cannot, Job, Library
from convpar.cases import Case
from convpar.timing import LEAST_SAMPLE, calibrate

PROTOCOL = 1
"""Raised when a worker of another version would misunderstand."""

# Seconds of calls before the clock starts; a call as long as the least needs no other. After a pause, while others are timed,
# one of a virtual machine's processors may be as slow as two thirds of itself for a tenth of a second, or for several, until its
# host has moved it back: calls go on until some take no longer than such have at their best, or for the most.
_LEAST_WARM, _MOST_WARM = 0.25, 1.5
_AS_FAST = 1.08


class Worker:
    """One library and the case it has at hand. Each public method answers a request of that name."""

    def __init__(self, spec: str, num_threads: int) -> None:
        module, _, name = spec.partition(":")
        self._library: Library = getattr(importlib.import_module(module), name)(num_threads)
        self._case: Case | None = None
        self._x: npt.NDArray[Any] | None = None
        self._w: npt.NDArray[Any] | None = None
        self._given: list[int] = []
        self._jobs: dict[str, Job] = {}
        # Setting -> seconds a call at its best.
        self._best: dict[str, float] = {}

    def hello(self) -> dict[str, Any]:
        """Version, threads and mode of the library, and where this convpar was imported from."""
        root = str(Path(convpar.__file__).resolve().parents[1])
        return {**self._library.about(), "protocol": PROTOCOL, "root": root}

    def load(self, case: dict[str, Any], folder: str) -> dict[str, Any]:
        """Take up a case with the arrays x.npy and w.npy in `folder`."""
        self._jobs.clear()
        self._best.clear()
        self._case = Case(**case)
        self._x, self._w = (np.load(Path(folder) / f"{name}.npy") for name in ("x", "w"))
        self._given = [_checksum(self._x), _checksum(self._w)]
        return {}

    def drop(self) -> dict[str, Any]:
        """Let go of the case and its arrays."""
        self._jobs.clear()
        self._case = self._x = self._w = None
        return {}

    def settings(self) -> dict[str, Any]:
        """The settings worth trying on the case."""
        return {"settings": self._library.settings(self._loaded()[0])}

    def prepare(self, setting: str) -> dict[str, Any]:
        """Make a job ready; what is known of it."""
        job = self._library.prepare(self._loaded()[0], setting, *self._loaded()[1:])
        self._jobs[setting] = job
        return {
            "contract": job.contract,
            "factor": job.factor,
            "rounding": job.rounding,
            "notes": [*job.notes, *(() if job.out is not None else ("allocates its result",))],
            "chose": job.chose,
            "threads": job.threads,
            "device": job.timer.device,
        }

    def answer(self, setting: str, path: str) -> dict[str, Any]:
        """Run once over a poisoned output and save what came out to `path`."""
        job = self._jobs[setting]
        if job.out is not None:
            job.out.fill(np.nan if job.out.dtype.kind in "fc" else _POISON.astype(job.out.dtype))
        self._before(job)
        job.call()
        return self.last(setting, path)

    def last(self, setting: str, path: str) -> dict[str, Any]:
        """Save the answer of the last call to `path`."""
        answer = self._jobs[setting].answer()
        np.save(path, answer)
        return {"checksum": _checksum(answer), "dtype": answer.dtype.name}

    def calibrate(self, setting: str) -> dict[str, Any]:
        """How many calls make a sample, and about how long one takes."""
        job = self._jobs[setting]
        self._before(job)
        number, seconds = calibrate(job.timer, job.call, least=LEAST_SAMPLE)
        return {"number": number, "seconds": seconds}

    def time(self, setting: str, number: int, about: float) -> dict[str, Any]:
        """One sample: seconds per call, the mean of `number` calls of `about` seconds each, after a warm-up."""
        job = self._jobs[setting]
        self._before(job)
        if about < _LEAST_WARM:
            self._warm_up(setting, number)
        return {"seconds": self._sample(setting, number)}

    def _warm_up(self, setting: str, number: int) -> None:
        began = time.perf_counter()
        while True:
            seconds = self._sample(setting, number)
            passed = time.perf_counter() - began
            if passed > _MOST_WARM or (passed > _LEAST_WARM and seconds <= _AS_FAST * self._best[setting]):
                return

    def _sample(self, setting: str, number: int) -> float:
        job = self._jobs[setting]
        seconds = job.timer.sample(job.call, number)
        self._best[setting] = min(self._best.get(setting, seconds), seconds)
        return seconds

    def changed(self, setting: str, checksum: int) -> dict[str, Any]:
        """Whether the last answer has another checksum, and whether the inputs are no longer what they were."""
        _, x, w = self._loaded()
        return {
            "answer": _checksum(self._jobs[setting].answer()) != checksum,
            "inputs": [_checksum(x), _checksum(w)] != self._given,
        }

    def ceilings(self, kinds: list[str], num_threads: int, device: str, seconds: float) -> dict[str, Any]:
        """The machine's ceilings, measured here because this process is pinned."""
        from convpar.timing import measure_ceilings

        try:
            found = measure_ceilings(kinds, num_threads=num_threads, device=device, seconds=seconds)  # type: ignore[arg-type]
        except ImportError as e:
            raise Cannot(str(e)) from e
        return {"bandwidth": found.bandwidth, "fma": dict(found.fma)}

    def copy(self, size: int, num_threads: int) -> dict[str, Any]:
        """Bytes a second of copies of `size` bytes, read and written."""
        from convpar.timing import measure_copy

        try:
            return {"bandwidth": measure_copy(size, num_threads=num_threads)}
        except ImportError as e:
            raise Cannot(str(e)) from e

    def _loaded(self) -> tuple[Case, npt.NDArray[Any], npt.NDArray[Any]]:
        if self._case is None or self._x is None or self._w is None:
            raise RuntimeError("no case is loaded")
        return self._case, self._x, self._w

    def _before(self, job: Job) -> None:
        if job.before is not None:
            job.before()


# Unlikely as an answer in any integer type, and different from what fresh memory holds.
_POISON = np.array(0xA5, np.uint8)


def _checksum(a: npt.NDArray[Any]) -> int:
    return zlib.crc32(np.ascontiguousarray(a).view(np.uint8).reshape(-1).data)


def serve(spec: str, num_threads: int) -> None:
    """Answer requests until standard input ends."""
    # Whatever prints to standard output must not reach the other end.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker: Worker | None = None

    def send(reply: dict[str, Any]) -> None:
        replies.write(json.dumps(reply) + "\n")
        replies.flush()

    for line in sys.stdin:
        request = json.loads(line)
        try:
            if worker is None:
                worker = Worker(spec, num_threads)
            method: Callable[..., dict[str, Any]] = getattr(worker, request.pop("request"))
            send(method(**request))
        except Cannot as e:
            send({"cannot": str(e)})
        # Whatever the library raises belongs in the report, and the next request may work.
        except Exception as e:
            traceback.print_exc()
            send({"error": f"{type(e).__name__}: {e}"})


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
