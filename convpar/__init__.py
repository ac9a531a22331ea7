"""convpar: 2-D convolution on CPU and GPU. One spec, every kernel."""

from __future__ import annotations

from . import signal
from .api import ArraySpec, conv2d, explain, plan
from .backend import Unavailable, Unsupported
from .info import __version__, show_config
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
