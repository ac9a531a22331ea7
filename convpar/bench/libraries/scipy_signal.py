"""scipy.signal: correlate2d, and overlap-add through the FFT."""

from __future__ import annotations

from typing import Any

import numpy as np

from convpar.cases import Case

from . import Array, Cannot, Job, centred_alike, correlated, keep, one_plane, padding_kind

_BOUNDARIES = {"fill": "fill", "wrap": "wrap", "symm": "symm"}


class ScipySignal:
    """One thread; no output array can be given."""

    def __init__(self, num_threads: int) -> None:
        try:
            import scipy.signal
        except ImportError as e:
            raise Cannot(f"not installed: {e}") from e
        self._version = scipy.__version__

    def about(self) -> dict[str, Any]:
        """SciPy's version."""
        return {"version": self._version, "threads": 1, "mode": "scipy.signal"}

    def settings(self, case: Case) -> list[str]:
        """correlate2d, and oaconvolve for floats with zeros around."""
        p = case.problem()
        one_plane(p)
        if padding_kind(p) is None:
            raise Cannot("padding valid, same and full only")
        if any(p.padding) and p.boundary not in _BOUNDARIES:
            raise Cannot(f"no boundary {p.boundary}")
        if np.dtype(p.x_dtype).name == "float16":
            raise Cannot("no float16")
        plain = p.boundary == "fill" and not p.fillvalue
        floats = p.out_dtype.kind == "f" and p.x_dtype.kind == "f"
        return ["correlate2d"] + (["oaconvolve"] if plain and floats and centred_alike(p) else [])

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """Sums are in the promotion of the inputs and are returned in it."""
        from scipy import signal

        p = case.problem()
        kind = padding_kind(p)
        assert kind is not None
        image, taps = x[0, 0], correlated(p, w)[0, 0]
        notes: tuple[str, ...] = ()
        # SciPy has no `dtype`: give it what makes the sums right, or say what comes back.
        if p.out_dtype.kind in "iu" and p.w_dtype.kind in "iu" and p.out_dtype != p.x_dtype:
            taps = taps.astype(p.out_dtype)
            notes = (f"filter given as {p.out_dtype}",)
        elif p.out_dtype != p.sum_dtype:
            notes = (f"returns {p.sum_dtype}, unrounded",)
        if setting == "oaconvolve":
            turned = np.ascontiguousarray(taps[::-1, ::-1])
            call, answer = keep(lambda: signal.oaconvolve(image, turned, mode=kind), np.asarray, p)
            return Job(call, answer, contract="normwise", factor=_FFT_FACTOR, notes=notes)
        options: dict[str, Any] = {
            "mode": kind,
            "boundary": _BOUNDARIES[p.boundary],
            "fillvalue": p.fillvalue,
        }
        call, answer = keep(lambda: signal.correlate2d(image, taps, **options), np.asarray, p)
        return Job(call, answer, notes=notes)


# An FFT's error grows with the logarithm of its length, and it has three of them.
_FFT_FACTOR = 8.0
