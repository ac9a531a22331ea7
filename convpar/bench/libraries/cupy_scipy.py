"""CuPy's own filters: cupyx.scipy.ndimage and cupyx.scipy.signal."""

from __future__ import annotations

from typing import Any

from convpar.cases import Case
from convpar.timing import GpuTimer

from . import Array, Cannot, Job, centred_alike, correlated, keep, one_plane, padding_kind

_MODES = {
    "fill": "constant",
    "wrap": "grid-wrap",
    "symm": "reflect",
    "mirror": "mirror",
    "nearest": "nearest",
}


class CuPy:
    """One thread a pixel; timed with events on the current stream."""

    def __init__(self, num_threads: int) -> None:
        try:
            import cupy
        except ImportError as e:
            raise Cannot(f"not installed: {e}") from e
        self._cupy = cupy

    def about(self) -> dict[str, Any]:
        """Version and CUDA runtime."""
        cupy = self._cupy
        if not cupy.is_available():
            raise Cannot("CuPy sees no GPU")
        return {
            "version": cupy.__version__,
            "threads": 0,
            "mode": f"CUDA {cupy.cuda.runtime.runtimeGetVersion()}",
        }

    def settings(self, case: Case) -> list[str]:
        """ndimage.correlate, signal.correlate2d, and signal.oaconvolve for floats with zeros around."""
        p = case.problem()
        one_plane(p)
        if padding_kind(p) not in ("valid", "same"):
            raise Cannot("the output has the size of the image")
        settings = ["ndimage.correlate"]
        if p.w_dtype == p.x_dtype == p.out_dtype and p.boundary in ("fill", "wrap", "symm"):
            settings.append("signal.correlate2d")
            if p.x_dtype.kind == "f" and p.boundary == "fill" and not p.fillvalue and centred_alike(p):
                settings.append("signal.oaconvolve")
        return settings

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """``valid`` is cut out of ndimage's whole."""
        cupy, p = self._cupy, case.problem()
        image, taps = cupy.asarray(x[0, 0]), cupy.asarray(correlated(p, w)[0, 0])
        timer = GpuTimer()
        if setting == "ndimage.correlate":
            from cupyx.scipy import ndimage

            out = cupy.empty(image.shape, p.out_dtype)
            options: dict[str, Any] = {
                "output": out,
                "mode": _MODES[p.boundary],
                "cval": p.fillvalue,
                "origin": (-(1 - p.kh % 2), -(1 - p.kw % 2)),
            }
            inner: tuple[slice, slice] = (slice(None), slice(None))
            notes: tuple[str, ...] = ()
            if padding_kind(p) == "valid":
                top, left = (p.kh - 1) // 2, (p.kw - 1) // 2
                inner = (slice(top, top + p.oh), slice(left, left + p.ow))
                notes = ("computes the image's size, cut to valid",)
            return Job(
                call=lambda: ndimage.correlate(image, taps, **options),
                answer=lambda: cupy.asnumpy(out[inner]).reshape(p.out_shape),
                out=out,
                rounding="truncate",
                notes=notes,
                timer=timer,
            )
        from cupyx.scipy import signal

        kind = padding_kind(p)
        if setting == "signal.oaconvolve":
            turned = cupy.ascontiguousarray(taps[::-1, ::-1])
            call, answer = keep(lambda: signal.oaconvolve(image, turned, mode=kind), cupy.asnumpy, p)
            return Job(call, answer, contract="normwise", factor=8.0, timer=timer)
        extra = {"mode": kind, "boundary": p.boundary, "fillvalue": p.fillvalue}
        call, answer = keep(lambda: signal.correlate2d(image, taps, **extra), cupy.asnumpy, p)
        return Job(call, answer, timer=timer)
