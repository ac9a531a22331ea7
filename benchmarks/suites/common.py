"""What the suites share: a case's arrays, or the reason to skip it."""

from __future__ import annotations

from typing import Any

import numpy as np

import convpar
from convpar import cases


def prepared(name: str, backend: str) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(x, w, out, keywords) of a call of `convpar.conv2d`.

    Raises
    ------
    NotImplementedError
        This commit has no such case or backend, or this machine can't run it: asv skips it.
    """
    try:
        case = cases.find(name)
    except ValueError as e:
        raise NotImplementedError(str(e)) from e
    problem = case.problem()
    x, w, out = case.operands(np.random.default_rng(0))
    if problem.n == problem.c == problem.oc == 1:
        x, w, out = x[0, 0], w[0, 0], out[0, 0]
    keywords = {**case.options, "backend": backend}
    try:
        convpar.conv2d(x, w, out=out, **keywords)
    except (convpar.Unsupported, convpar.Unavailable, ValueError) as e:
        raise NotImplementedError(f"{backend}: {e}") from e
    return x, w, out, keywords
