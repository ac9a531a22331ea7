"""A process of its own for `calls`: how long the first call of each rung takes, and what it compiles.

``python -m benchmarks.gpu.first_call FOLDER RUNG ...`` prints JSON; FOLDER is where the caches are.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np

import convpar
from convpar.backends.gpu.compile import STANDARD

from .calls import case
from .device import CudaPlace, find

_COMPILED = (".cubin", ".ptx", ".so")


def _kernels(folder: Path) -> int:
    return sum(path.suffix in _COMPILED for path in folder.rglob("*") if path.is_file())


def main(folder: Path, rungs: list[str]) -> dict[str, dict[str, float]]:
    """Rung -> seconds of its first and second call, and how many kernels the first one compiled."""
    place = find()
    if isinstance(place, CudaPlace):
        # What any first kernel of a process pays: the device's context, and the compiler's start with these options.
        text = 'extern "C" __global__ void nothing() {}'
        place.xp.RawKernel(text, "nothing", options=(STANDARD,))((1,), (1,), ())
    x, w = (place.xp.asarray(a) for a in case().arrays(np.random.default_rng(0)))
    out = place.xp.empty(case().problem().out_shape, np.float32)

    def took(rung: str) -> float:
        place.synchronize()
        started = time.perf_counter()
        convpar.conv2d(x, w, out=out, backend=rung)
        place.synchronize()
        return time.perf_counter() - started

    found = {}
    for rung in rungs:
        before = _kernels(folder)
        found[rung] = {"first": took(rung), "compiled": _kernels(folder) - before, "second": took(rung)}
    return found


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:])))
