"""What a call costs besides the work: small images, plans, the import."""

from __future__ import annotations

import sys

import convpar

from .common import prepared


class Small:
    """Images so small that the call itself counts."""

    params = (
        "single-8-k3-float32-valid",
        "single-64-k3-float32-valid",
        "single-512-k3-float32-valid",
        "single-1024-k3-float32-valid",
    )
    param_names = ("case",)

    def setup(self, case: str) -> None:
        self.x, self.w, self.out, self.keywords = prepared(case, "auto")
        self.plan = convpar.plan(self.x, self.w, **self.keywords)

    def time_conv2d(self, case: str) -> None:
        convpar.conv2d(self.x, self.w, out=self.out, **self.keywords)

    def time_conv2d_new_output(self, case: str) -> None:
        convpar.conv2d(self.x, self.w, **self.keywords)

    def time_plan_run(self, case: str) -> None:
        self.plan(self.x, self.w, out=self.out)

    def time_plan(self, case: str) -> None:
        convpar.plan(self.x, self.w, **self.keywords)


def timeraw_import() -> tuple[str, str]:
    """The import, in a new process each time; that process finds convpar where this one does."""
    return "import convpar", f"import sys; sys.path[:] = {sys.path!r}"
