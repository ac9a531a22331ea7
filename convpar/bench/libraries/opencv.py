"""OpenCV: filter2D, and sepFilter2D for filters known to be separable."""

from __future__ import annotations

from typing import Any

import numpy as np

from convpar.cases import Case

from . import (
    ONE_THREAD,
    SMALL,
    Array,
    Cannot,
    Job,
    correlated,
    one_plane,
    padding_kind,
    pixels_of,
    planes_of,
    rank_one,
)

# filter2D leaves the direct method for a DFT from this many taps on, where its vector code has the types.
_DFT_TAPS = 130
_DFT_TAPS_OTHERS = 50
_VECTOR_TYPES = {("uint8", "uint8"), ("uint8", "int16"), ("float32", "float32")}
# Types of (image, result) that filter2D has, and the depth that names the result.
_PAIRS = {
    "uint8": ("uint8", "int16", "float32", "float64"),
    "uint16": ("uint16", "float32", "float64"),
    "int16": ("int16", "float32", "float64"),
    "float32": ("float32", "float64"),
    "float64": ("float64",),
}


class OpenCV:
    """Its own thread pool; the output has the image's size; integers saturate."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        try:
            import cv2
        except ImportError as e:
            raise Cannot(f"not installed: {e}") from e
        self._cv2 = cv2
        cv2.setNumThreads(num_threads)

    def about(self) -> dict[str, Any]:
        """Version, threads in use and the processor features it was dispatched to."""
        cv2 = self._cv2
        features = getattr(cv2, "getCPUFeaturesLine", lambda: "")().split()
        return {
            "version": cv2.__version__,
            "threads": cv2.getNumThreads(),
            "mode": f"dispatches to {' '.join(f for f in features if f.startswith('*')) or 'its baseline'}",
        }

    def settings(self, case: Case) -> list[str]:
        """filter2D, sepFilter2D where the filter is known to be separable, each also with one thread if small."""
        p = case.problem()
        if not case.pixels:
            one_plane(p)
        if padding_kind(p) not in ("valid", "same"):
            raise Cannot("the output has the size of the image")
        if p.out_dtype.name not in _PAIRS.get(p.x_dtype.name, ()):
            raise Cannot(f"no {p.x_dtype} image with a {p.out_dtype} result")
        if any(p.padding) and p.boundary == "wrap":
            raise Cannot("filter2D has no boundary wrap")
        if any(p.padding) and p.boundary == "fill" and p.fillvalue:
            raise Cannot("filter2D fills with 0 only")
        methods = ["filter2D"] + (["sepFilter2D"] if case.separable else [])
        if p.macs < SMALL and self._num_threads > 1:
            methods += [m + ONE_THREAD for m in methods]
        return methods

    def prepare(self, case: Case, setting: str, x: Array, w: Array) -> Job:
        """``valid`` is cut out of the whole; the filter is float32, or float64 for a float64 image."""
        cv2, p = self._cv2, case.problem()
        method = setting.removesuffix(ONE_THREAD)
        threads = 1 if setting != method else self._num_threads
        kernel_type = np.float64 if p.x_dtype == np.float64 else np.float32
        image = pixels_of(x)[0] if case.pixels else x[0, 0]
        taps = np.ascontiguousarray(correlated(p, w)[0, 0], kernel_type)
        depth = {
            "uint8": cv2.CV_8U,
            "int16": cv2.CV_16S,
            "uint16": cv2.CV_16U,
            "float32": cv2.CV_32F,
            "float64": cv2.CV_64F,
        }[p.out_dtype.name]
        border = {
            "fill": cv2.BORDER_CONSTANT,
            "symm": cv2.BORDER_REFLECT,
            "mirror": cv2.BORDER_REFLECT_101,
            "nearest": cv2.BORDER_REPLICATE,
        }[p.boundary if any(p.padding) else "nearest"]
        top, left = (p.kh - 1) // 2, (p.kw - 1) // 2
        out = np.empty(image.shape, p.out_dtype)
        options: dict[str, Any] = {"dst": out, "anchor": (left, top), "borderType": border}
        notes: tuple[str, ...] = ()
        inner: tuple[slice, slice] = (slice(None), slice(None))
        if padding_kind(p) == "valid":
            inner = (slice(top, top + p.oh), slice(left, left + p.ow))
            notes += ("computes the image's size, cut to valid",)
        vector = (p.x_dtype.name, p.out_dtype.name) in _VECTOR_TYPES
        dft = method == "filter2D" and p.kh * p.kw >= (_DFT_TAPS if vector else _DFT_TAPS_OTHERS)
        if method == "sepFilter2D":
            column, row = rank_one(taps[None, None])
            notes += ("told the filter's factors",)

            def call() -> object:
                return cv2.sepFilter2D(image, depth, row, column, **options)
        else:

            def call() -> object:
                return cv2.filter2D(image, depth, taps, **options)

        return Job(
            call=call,
            answer=lambda: np.ascontiguousarray(planes_of(out[inner]) if case.pixels else out[inner]).reshape(
                p.out_shape
            ),
            out=out,
            # Two passes keep the elementwise bound: their magnitudes multiply to those of the whole filter.
            contract="normwise" if dft else "elementwise",
            factor=8.0 if dft else 1.0,
            notes=notes + (("DFT",) if dft else ()),
            threads=threads,
            before=lambda: cv2.setNumThreads(threads),
        )
