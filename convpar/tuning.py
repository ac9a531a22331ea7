"""``tune=True``: time a chooser's candidates once and remember the fastest.

What is remembered serves only calls that ask for it, so no other call's speed or bits depend on it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import platformdirs

from .arrays import device_of, empty
from .backend import Backend, Layouts, Plan
from .choose import Choice, left_out
from .threads import STATE
from .timing import CpuTimer, GpuTimer, Timer, interleave, sampler

CACHE_VARIABLE = "CONVPAR_CACHE_DIR"

_ROUNDS = 5


def cache_folder() -> Path:
    """Where convpar keeps what it may forget: CONVPAR_CACHE_DIR, or the user's cache folder."""
    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("convpar"))


def fastest(choice: Choice, layouts: Layouts, x: Any, w: Any, bias: Any) -> tuple[Backend, Plan]:
    """The candidate of `choice` that is fastest on these arrays, from memory if it was timed before.

    Parameters
    ----------
    choice : Choice
        Of a chooser; a rung named by the caller is its own only candidate.
    layouts : Layouts
        How the call's arrays lie in memory.
    x, w, bias : array
        In canonical form; they are read, and results go to scratch memory.
    """
    if len(choice.candidates) < 2:
        return choice.required()
    by_name = {backend.name: (backend, plan) for backend, plan in choice.candidates}
    key = _key(choice, layouts, x)
    with STATE:
        name = _remembered(cache_folder()).get(key)
    if name not in by_name:
        name = _race(choice, x, w, bias)
        _remember(key, name)
    return by_name[name]


def _race(choice: Choice, x: Any, w: Any, bias: Any) -> str:
    timer: Timer = CpuTimer() if device_of(x).kind == "cpu" else GpuTimer(flush=False)
    samplers = {}
    for backend, plan in choice.candidates:
        out = empty(device_of(x), plan.problem.out_shape, plan.problem.out_dtype)

        def call(plan: Plan = plan, out: Any = out) -> None:
            with contextlib.suppress(OverflowError):  # the caller's own run will raise it
                plan.run(x, w, bias, out)

        try:
            samplers[backend.name], _ = sampler(timer, call)
        except Exception as e:
            left_out(backend, e)
    if not samplers:
        return choice.required()[0].name
    samples = interleave(samplers, _ROUNDS)
    return min(samples, key=lambda name: min(samples[name]))


def _key(choice: Choice, layouts: Layouts, x: Any) -> str:
    from .info import __version__, family, processor

    problem = choice.candidates[0][1].problem
    kind = f"{processor()} {family()}" if device_of(x).kind == "cpu" else str(x.device.attributes)
    rivals = [(backend.name, repr(plan.launch)) for backend, plan in choice.candidates]
    text = "\n".join(map(repr, (__version__, kind, sorted(rivals), problem, layouts)))
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def _remembered(folder: Path) -> dict[str, str]:
    try:
        read = json.loads((folder / "tuned.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return {str(k): str(v) for k, v in read.items()} if isinstance(read, dict) else {}


def _remember(key: str, name: str) -> None:
    folder = cache_folder()
    with STATE:
        known = _remembered(folder)
        # Other processes may have added theirs since.
        _remembered.cache_clear()
        _remembered(folder).update(known | {key: name})
        # An unwritable folder costs only the memory of it.
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _replace(folder / "tuned.json", json.dumps(_remembered(folder), indent=1))


def _replace(path: Path, text: str) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as f:
        try:
            with f:
                f.write(text)
            os.replace(f.name, path)
        except OSError:
            os.unlink(f.name)
            raise
