"""The chooser's pick on a GPU: time between events on the device, and of the call on the host."""

from __future__ import annotations

from functools import partial

import numpy as np

import convpar
from convpar import cases
from convpar.timing import CpuTimer, GpuTimer, measure


class Gpu:
    """Arrays are on the device before the clock starts."""

    params = (
        "network-1-n10000",
        "network-2-n10000",
        "single-16384-k3-float32-valid",
        "single-16384-k7-float32-valid",
        "single-16384-k15-float32-valid",
        "single-4096-k3-float32-valid",
        "single-16384-k3-uint8-valid",
        "resnet-64-64-56x56-k3-n256",
        "depthwise-96-56x56-k7-n64",
    )
    param_names = ("case",)

    def setup(self, case: str) -> None:
        try:
            import cupy
        except ImportError as e:
            raise NotImplementedError(f"needs CuPy: {e}") from e
        if not cupy.is_available():
            raise NotImplementedError("CuPy sees no GPU")
        found = cases.find(case)
        problem = found.problem()
        x, w = (cupy.asarray(a) for a in found.arrays(np.random.default_rng(0)))
        out = cupy.empty(problem.out_shape, problem.out_dtype)
        self.synchronize = cupy.cuda.get_current_stream().synchronize
        self.call = partial(convpar.conv2d, x, w, out=out, **found.options)
        try:
            self.call()
        except (convpar.Unsupported, convpar.Unavailable) as e:
            raise NotImplementedError(str(e)) from e

    def track_device(self, case: str) -> float:
        return measure(self.call, timer=GpuTimer()).median

    track_device.unit = "seconds"  # type: ignore[attr-defined]

    def track_call(self, case: str) -> float:
        """Until the call returns, the device still at work."""
        self.synchronize()
        timer = CpuTimer()
        samples = []
        for _ in range(50):
            samples.append(timer.sample(self.call))
            self.synchronize()
        return sorted(samples)[len(samples) // 2]

    track_call.unit = "seconds"  # type: ignore[attr-defined]
