"""Names to backends: the built-in families, `register`, and entry points of other packages.

Families are known as dotted strings, so nothing is imported before it is needed:
asking for a cpu rung loads neither CuPy nor anybody's plugin.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Hashable, Iterable, Mapping
from types import FrameType

from .backend import CONTRACT_VERSION, Backend, Capabilities
from .threads import STATE

ENTRY_POINT_GROUP = "convpar.backends"

# Prefix of a family's names -> the module whose backends() gives its rows.
FAMILIES = {
    "numpy": "convpar.backends.reference",
    "cpu-": "convpar.backends.cpu",
    "cpu-fft": "convpar.backends.cpu.fft",
    "gpu-": "convpar.backends.gpu",
}

CHOOSERS = {"auto": None, "cpu": "cpu", "cpu-omp": "cpu", "gpu": "gpu", "gpu-cuda": "gpu"}
"""Chooser -> the device whose rungs it picks from; None is the device where the arrays live.
No backend can have one of these names."""

_found: dict[str, Backend] = {}  # built in, or brought by an installed package
_given: dict[str, Backend] = {}  # by register(); they come first
_built_in: set[str] = set()  # names in _found that are convpar's own
_loaded: set[str] = set()
_plugins_loaded = False
_version = 0


def version() -> int:
    """A number that changes whenever a name may have come to mean something else."""
    return _version


def warn(message: str) -> None:
    """Warn whoever called into convpar, however deep in it this is."""
    frame: FrameType | None = sys._getframe()
    level = 0
    while frame is not None and str(frame.f_globals.get("__name__")).partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RuntimeWarning, stacklevel=level + 1)


def _check(backend: object) -> Backend:
    if isinstance(backend, type):
        raise TypeError(f"backend must be an object, not the class {backend.__name__}: make one of it")
    contract = getattr(backend, "contract", CONTRACT_VERSION)
    if contract != CONTRACT_VERSION:
        raise TypeError(
            f"backend {getattr(backend, 'name', backend)!r} was written for contract {contract}, "
            f"this convpar has {CONTRACT_VERSION}"
        )
    if not isinstance(backend, Backend):
        missing = [
            name
            for name in ("contract", "name", "summary", "builds_on", "capabilities", "options",
                         "unavailable", "plan")
            if not hasattr(backend, name)
        ]  # fmt: skip
        raise TypeError(f"backend {backend!r} lacks {', '.join(missing)}; see convpar.backend.Backend")
    if not isinstance(backend.name, str) or not backend.name:
        raise TypeError(f"a backend's name must be a non-empty string, not {backend.name!r}")
    if not backend.name.isprintable() or any(c.isspace() for c in backend.name):
        raise ValueError(f"a backend's name must be one word, not {backend.name!r}")
    if backend.name in CHOOSERS:
        raise ValueError(f"a backend can't be called {backend.name!r}: that is a chooser")
    if not isinstance(backend.capabilities, Capabilities):
        raise TypeError(
            f"the capabilities of backend {backend.name!r} must be a Capabilities, "
            f"not {backend.capabilities!r}"
        )
    if backend.capabilities.device not in ("cpu", "gpu"):
        raise ValueError(
            f"the device of backend {backend.name!r} must be 'cpu' or 'gpu', not {backend.capabilities.device!r}"
        )
    if not isinstance(backend.options, Mapping):
        raise TypeError(f"the options of backend {backend.name!r} must be a mapping, not {backend.options!r}")
    return backend


def _load_family(module: str) -> None:
    with STATE:
        if module in _loaded:
            return
        for backend in importlib.import_module(module).backends():
            if _found.setdefault(_check(backend).name, backend) is backend:
                _built_in.add(backend.name)
        _loaded.add(module)


def _load_plugins() -> None:
    global _plugins_loaded, _version
    with STATE:
        if _plugins_loaded:
            return
        _plugins_loaded = True
        from importlib.metadata import entry_points

        for point in sorted(entry_points(group=ENTRY_POINT_GROUP), key=lambda p: (p.name, p.value)):
            # Somebody else's package must not take convpar down with it.
            try:
                made = point.load()
                # A class has the contract's attributes and yet has to be called, as a function has.
                if isinstance(made, type) or (callable(made) and not isinstance(made, Backend)):
                    made = made()
                rows: Iterable[object] = made if isinstance(made, (list, tuple)) else [made]
                for row in rows:
                    backend = _check(row)
                    if backend.name in _all_known():
                        raise ValueError(f"the name {backend.name!r} is taken")
                    _found[backend.name] = backend
                    _version += 1
            except (Exception, SystemExit) as e:
                warn(
                    f"convpar leaves out the backend plugin {point.name!r} ({point.value}): "
                    f"{type(e).__name__}: {e}"
                )


def _all_known() -> dict[str, Backend]:
    for module in FAMILIES.values():
        _load_family(module)
    return _found | _given


def find(name: str) -> Backend | None:
    """The backend of that name, or None. Loads only the family that the name belongs to."""
    if name in CHOOSERS:
        return None
    for prefix, module in FAMILIES.items():
        if name.startswith(prefix) and module not in _loaded:
            _load_family(module)
    if name not in _given and name not in _found:
        _load_plugins()
    return _given.get(name, _found.get(name))


def place_for_host_arrays(name: object) -> Hashable:
    """What decides, besides a call's arguments, which GPU the backend or chooser `name` takes arrays from the host
    to; None where it takes them to none."""
    if not isinstance(name, str):
        return None
    if name in CHOOSERS:
        kind = CHOOSERS[name]
    else:
        backend = find(name)
        kind = None if backend is None else backend.capabilities.device
    return importlib.import_module(FAMILIES["gpu-"]).here() if kind == "gpu" else None


def backends() -> list[Backend]:
    """Every backend, built-in families first, then the others in the order they came."""
    with STATE:
        _load_plugins()
        # The sort is stable: what isn't built in stays as it came, whichever family was loaded first.
        return sorted(_all_known().values(), key=_family)


def _family(backend: Backend) -> int:
    if backend.name not in _built_in:
        return len(FAMILIES)
    return next(i for i, prefix in enumerate(FAMILIES) if backend.name.startswith(prefix))


def is_built_in(backend: Backend) -> bool:
    """Whether `backend` is one of convpar's own."""
    return backend.name in _built_in and _found[backend.name] is backend


def register(backend: Backend, *, replace: bool = False) -> None:
    """Make `backend` known under its name for the rest of the process.

    Parameters
    ----------
    backend : Backend
        An object that follows `convpar.backend.Backend`.
    replace : bool
        Take the name from the backend that has it, until `unregister` gives it back.

    Raises
    ------
    TypeError
        It doesn't follow the contract, or follows another version of it.
    ValueError
        The name is taken and `replace` is False, or it is a chooser's.
    """
    global _version
    row = _check(backend)
    with STATE:
        if find(row.name) is not None and not replace:
            raise ValueError(f"a backend named {row.name!r} exists; say replace=True to take its place")
        _given[row.name] = row
        _version += 1


def unregister(name: str) -> None:
    """Forget a backend given to `register`; what it replaced has its name again.

    Raises
    ------
    ValueError
        No backend of that name was given to `register`.
    """
    global _version
    with STATE:
        if not isinstance(name, str) or name not in _given:
            given = ", ".join(_given) or "none"
            raise ValueError(f"no backend named {name!r} was registered in this process; there are: {given}")
        del _given[name]
        _version += 1
