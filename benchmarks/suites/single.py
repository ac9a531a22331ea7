"""One image with one channel: sizes, filters, types, borders."""

from __future__ import annotations

import convpar

from .common import prepared


class Single:
    """The chooser's pick."""

    params = (
        "single-4096-k3-float32-valid",
        "single-4096-k5-float32-valid",
        "single-4096-k7-float32-valid",
        "single-4096-k11-float32-valid",
        "single-4096-k3-float32-same",
        "single-4096-k3-float64-valid",
        "single-4096-k3-int32-valid",
        "single-4096-k3-int16-valid",
        "single-4096-k3-uint8-valid",
        "single-4096-k3-uint8-int32-valid",
        "single-2048-k15-float32-valid",
        "single-2048-k31-float32-valid",
        "single-2048-k31-float32-valid-normwise",
        "separable-4096-k7-float32",
    )
    param_names = ("case",)

    def setup(self, case: str) -> None:
        self.x, self.w, self.out, self.keywords = prepared(case, "auto")

    def time_conv2d(self, case: str) -> None:
        convpar.conv2d(self.x, self.w, out=self.out, **self.keywords)

    def peakmem_conv2d(self, case: str) -> None:
        convpar.conv2d(self.x, self.w, out=self.out, **self.keywords)

    def track_workspace(self, case: str) -> int:
        return convpar.plan(self.x, self.w, **self.keywords).workspace_bytes()

    track_workspace.unit = "bytes"  # type: ignore[attr-defined]


class Ladder:
    """The published CPU rungs."""

    params = (
        ("cpu-naive", "cpu-private", "cpu-unrolled"),
        ("single-1024-k3-float32-valid", "single-1024-k7-float32-valid", "single-1024-k3-int32-valid"),
    )
    param_names = ("backend", "case")

    def setup(self, backend: str, case: str) -> None:
        self.x, self.w, self.out, self.keywords = prepared(case, backend)

    def time_conv2d(self, backend: str, case: str) -> None:
        convpar.conv2d(self.x, self.w, out=self.out, **self.keywords)
