"""convpar itself: each backend is a setting."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import convpar
from convpar import registry
from convpar.backends import cpu
from convpar.cases import Case
from convpar.timing import CpuTimer, GpuTimer

from . import Array, Cannot, Job, is_plane, pixels_of, planes_of


class Convpar:
    """Calls `convpar.conv2d` as a user does, with ``out=``."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads

    def about(self) -> dict[str, Any]:
        """Version, thread count, and the ISA level in use where the engine is there."""
        return {
            "version": convpar.__version__,
            "threads": convpar.get_num_threads(),
            "level": cpu.build_info().get("ISA level in use", ""),
        }

    def settings(self, case: Case) -> list[str]:
        """Every backend that this machine can run; the caller usually has names of its own."""
        return [backend.name for backend in registry.backends() if backend.unavailable() is None]

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """`setting` is what ``backend=`` takes: a rung, a chooser or "auto"."""
        problem = case.problem()
        shape: tuple[int, ...] = problem.out_shape
        options = dict(case.options)
        xs, ws = x, w
        if is_plane(problem):
            shape, xs, ws = shape[2:], x[0, 0], w[0, 0]
        elif case.pixels:
            shape = (*shape[2:], shape[1])
            xs, ws = pixels_of(x)[0], w[0, 0]
            del options["groups"]
        elif case.channels_last:
            n, oc, oh, ow = shape
            shape, xs = (n, oh, ow, oc), pixels_of(x)
        last = not is_plane(problem) and (case.pixels or case.channels_last)
        if last:
            options["channel_axis"] = -1
        on_gpu = _on_gpu(setting)
        if on_gpu:
            try:
                import cupy
            except ImportError as e:
                raise Cannot(f"needs CuPy: {e}") from e
            if not cupy.is_available():
                raise Cannot("no GPU")
            xs, ws = cupy.asarray(xs), cupy.asarray(ws)
            out = cupy.empty(shape, problem.out_dtype)
            timer: Any = GpuTimer()
            to_numpy = cupy.asnumpy
        else:
            out = np.empty(shape, problem.out_dtype)
            timer, to_numpy = CpuTimer(), np.asarray
        call = partial(convpar.conv2d, xs, ws, backend=setting, out=out, **options)
        try:
            plan = convpar.plan(xs, ws, backend=setting, **options)
        except (convpar.Unsupported, convpar.Unavailable, ValueError) as e:
            raise Cannot(str(e)) from e
        contract = plan.plan.accuracy
        return Job(
            call=call,
            answer=lambda: (planes_of(to_numpy(out)) if last else to_numpy(out)).reshape(problem.out_shape),
            out=out,
            contract=contract.kind,
            # Units round factors and sums: either may be what the error is made of.
            factor=contract.factor
            * max(_coarser(d, problem.sum_dtype) for d in (contract.sum_dtype, contract.operand_dtype)),
            notes=tuple(
                f"{what} in {d}"
                for what, d in (("sums", contract.sum_dtype), ("factors", contract.operand_dtype))
                if d
            ),
            chose=plan.backend.name,
            # A plan of little work keeps to the calling thread.
            threads=0 if on_gpu else 1 if str(plan.plan.launch.get("threads")).startswith("1") else None,
            timer=timer,
        )


def _coarser(kept: str | None, wanted: np.dtype[Any]) -> float:
    """How much coarser sums kept in a narrower type are than the type that the problem asks for."""
    if kept is None:
        return 1.0
    return _UNITS[kept] / (float(np.finfo(wanted).eps) / 2)


# Unit roundoffs; NumPy doesn't know all of these types.
_UNITS = {"tf32": 2.0**-11, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def _on_gpu(name: str) -> bool:
    backend = registry.find(name)
    return backend.capabilities.device == "gpu" if backend is not None else name.startswith("gpu")
