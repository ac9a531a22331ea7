"""scipy.ndimage: correlate, and correlate1d twice for filters known to be separable."""

from __future__ import annotations

from typing import Any

import numpy as np

from convpar.cases import Case

from . import Array, Cannot, Job, correlated, one_plane, padding_kind, rank_one

_MODES = {
    "fill": "constant",
    "wrap": "grid-wrap",
    "symm": "reflect",
    "mirror": "mirror",
    "nearest": "nearest",
}


class Ndimage:
    """One thread; sums in float64; the output has the image's size, whatever is wanted of it."""

    def __init__(self, num_threads: int) -> None:
        try:
            import scipy.ndimage
        except ImportError as e:
            raise Cannot(f"not installed: {e}") from e
        self._version = scipy.__version__

    def about(self) -> dict[str, Any]:
        """SciPy's version."""
        return {
            "version": self._version,
            "threads": 1,
            "mode": "scipy.ndimage, sums in float64",
        }

    def settings(self, case: Case) -> list[str]:
        """correlate, where the output isn't larger than the image, and correlate1d where the filter has factors."""
        p = case.problem()
        one_plane(p)
        if padding_kind(p) not in ("valid", "same"):
            raise Cannot("the output has the size of the image")
        if p.x_dtype.name == "float16":
            raise Cannot("no float16")
        return ["correlate"] + (["correlate1d"] if case.separable and not p.fillvalue else [])

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """``valid`` is cut out of the whole; its integer outputs are cut off, not rounded, and wrap."""
        from scipy import ndimage

        p = case.problem()
        image, taps = x[0, 0], correlated(p, w)[0, 0]
        out = np.empty(image.shape, p.out_dtype)
        top, left = (p.kh - 1) // 2, (p.kw - 1) // 2
        options: dict[str, Any] = {"mode": _MODES[p.boundary], "cval": p.fillvalue}
        # Its centre is K//2, ours (K-1)//2.
        origin: Any = (-(1 - p.kh % 2), -(1 - p.kw % 2))
        notes: tuple[str, ...] = ()
        if p.out_dtype.kind in "iu" and p.w_dtype.kind == "f":
            notes += ("cuts fractions off and wraps",)
        inner: tuple[slice, slice] = (slice(None), slice(None))
        if padding_kind(p) == "valid":
            inner = (slice(top, top + p.oh), slice(left, left + p.ow))
            notes += ("computes the image's size, cut to valid",)
        if setting == "correlate1d":
            column, row = rank_one(taps[None, None])
            half = np.empty(image.shape, p.sum_dtype)
            notes += ("told the filter's factors",)

            def call() -> None:
                ndimage.correlate1d(image, column, 0, output=half, origin=origin[0], **options)
                ndimage.correlate1d(half, row, 1, output=out, origin=origin[1], **options)
        else:

            def call() -> None:
                ndimage.correlate(image, taps, output=out, origin=origin, **options)

        return Job(
            call=call,
            answer=lambda: np.ascontiguousarray(out[inner]).reshape(p.out_shape),
            out=out,
            rounding="truncate",
            notes=notes,
        )
