"""From a `Launch` to the text that a compiler gets, and each compiled kernel once per device.

A kernel file's own includes are expanded first: CuPy's disk cache knows the text of a source and its options,
not the headers it includes. Lines keep their numbers and relative file names.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from .launch import KERNELS, Launch, parameter_dtype

STANDARD = "-std=c++17"
CONSTANT_BYTES = 64 * 1024

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"\s*$')

Reader = Callable[[str], str]
"""File name -> text."""


def read_kernel(name: str) -> str:
    """The text of a file among the kernels."""
    return (KERNELS / name).read_text(encoding="utf-8")


def files(kernel: str, read: Reader = read_kernel) -> tuple[tuple[str, str], ...]:
    """(file name, text) of a kernel's .cu file and of all that it includes, in the order a reader wants them."""
    found: dict[str, str] = {}

    def visit(name: str) -> None:
        if name in found:
            return
        found[name] = read(name)
        for line in found[name].splitlines():
            include = _INCLUDE.match(line)
            if include:
                visit(include[1])

    visit(f"{kernel}.cu")
    return tuple(found.items())


def expanded(kernel: str, read: Reader = read_kernel) -> str:
    """The text of a kernel's .cu file with every file it includes put in place, once."""
    seen: set[str] = set()

    def lines(name: str) -> list[str]:
        seen.add(name)
        out = [f'#line 1 "{name}"']
        for number, line in enumerate(read(name).splitlines(), 1):
            include = _INCLUDE.match(line)
            if include:
                if include[1] not in seen:
                    out += [*lines(include[1]), f'#line {number + 1} "{name}"']
                else:
                    out.append("")
            else:
                out.append("" if line.strip() == "#pragma once" else line)
        return out

    return "\n".join(lines(f"{kernel}.cu")) + "\n"


def entry_name(launch: Launch) -> str:
    """The name under which the compiled kernel is found."""
    return f"convpar_{launch.kernel}"


def unit(launch: Launch, read: Reader = read_kernel) -> str:
    """The whole text to compile for `launch`: the kernel, its instance and its entry."""
    bounds = f"{launch.threads}, {launch.min_blocks}" if launch.min_blocks else str(launch.threads)
    members = []
    for name, value in launch.template:
        if isinstance(value, str) and not value.isupper():
            members.append(f"    using {name} = {value};")
        else:
            text = str(value).lower() if isinstance(value, bool) else str(value)
            members.append(f"    static constexpr auto {name} = {text};")
    return "\n".join(
        [
            f"#define RESTRICT {'__restrict__' if launch.restrict else ''}",
            # Without need a module would carry 64 KB of zeros.
            f"#define CONSTANT_BYTES {CONSTANT_BYTES if launch.constant else 16}",
            expanded(launch.kernel, read),
            '#line 1 "instance"',
            f'static_assert(sizeof(Problem) == {parameter_dtype().itemsize}, "launch.py misreads struct Problem");',
            "struct Instance {",
            *members,
            "};",
            f"CONVPAR_ENTRY({launch.kernel}, Instance, {bounds})",
            "",
        ]
    )


def identity(launch: Launch) -> Hashable:
    """What two launches share when one compiled kernel serves both."""
    return (
        launch.kernel, launch.template, launch.restrict, launch.threads, launch.min_blocks, launch.constant > 0
    )  # fmt: skip


Kernel = TypeVar("Kernel")


class Memo(Generic[Kernel]):
    """Compiled kernels by device and identity. Two threads that want the same one compile it once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._locks: dict[Hashable, threading.Lock] = {}
        self._made: dict[Hashable, Kernel] = {}

    def get(self, key: Hashable, make: Callable[[], Kernel]) -> Kernel:
        """What `make` gave for `key`, made at most once unless it raises."""
        try:
            return self._made[key]
        except KeyError:
            pass
        with self._lock:
            lock = self._locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self._made:
                self._made[key] = make()
            return self._made[key]

    def made(self) -> list[Kernel]:
        """All that have been made."""
        return list(self._made.values())
