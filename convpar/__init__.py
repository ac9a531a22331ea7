"""convpar: 2-D convolution on CPU and GPU. One spec, every kernel."""

from __future__ import annotations

from typing import Any

from . import signal
from .api import ArraySpec, conv2d, explain, plan
from .backend import Unavailable, Unsupported
from .problem import Problem
from .registry import backends as list_backends
from .registry import register, unregister
from .threads import get_num_threads, set_num_threads

__all__ = [
    "ArraySpec",
    "Problem",
    "Unavailable",
    "Unsupported",
    "__version__",
    "conv2d",
    "empty_pinned",
    "explain",
    "get_num_threads",
    "list_backends",
    "plan",
    "register",
    "set_num_threads",
    "show_config",
    "signal",
    "unregister",
]


def __getattr__(name: str) -> Any:
    # Reading the installed version takes longer than the rest of this import; few callers need the GPU family.
    if name in ("__version__", "show_config"):
        from . import info

        return getattr(info, name)
    if name == "empty_pinned":
        from .backends.gpu import pipeline

        return pipeline.empty_pinned
    raise AttributeError(f"module 'convpar' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
