"""What the compiler made of a CPU rung: its functions in the compiled module, through binutils' objdump."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from convpar.backend import Unavailable
from convpar.problem import Problem

# Types as the demangler spells them. Sums of integers are kept in unsigned types (see types.h).
_SPELLED = {
    "bool": "unsigned char",
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned int",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "f16",
    "float32": "float",
    "float64": "double",
    "complex64": "complex<float>",
    "complex128": "complex<double>",
}
_UNSIGNED = {
    "signed char": "unsigned char",
    "short": "unsigned short",
    "int": "unsigned int",
    "long long": "unsigned long long",
}


class _Function(NamedTuple):
    """A function of a rung: where it is, and the template arguments that tell it from its siblings."""

    address: int
    size: int
    name: str
    level: str
    types: tuple[str, ...]
    sizes: tuple[int, ...]


def assembly(library: str | os.PathLike[str], row: str, level: str, problem: Problem | None = None) -> str:
    """The machine code of a rung's functions, for people to read.

    Parameters
    ----------
    library : path
        The compiled module.
    row : str
        The rung as rungs.inc names it: "naive".
    level : str
        The ISA level: "baseline", "v3" or "v4".
    problem : Problem, optional
        Its types and filter size choose the functions; float32 with 3x3 without one.

    Returns
    -------
    str
        A heading for each function, then its instructions. First what runs where every tap
        lies inside the image, then what runs at its border; of a kernel over vectors, its largest block.

    Raises
    ------
    Unavailable
        There is no objdump, or the module was stripped of its symbols.
    ValueError
        The rung wasn't built for that level, or has no function for these types or that filter.
    """
    if problem is None:
        problem = Problem.of((1, 1, 512, 512), (1, 1, 3, 3), np.float32)
    functions = list(_functions(library, row))
    levels = sorted({f.level for f in functions})
    if level not in levels:
        raise ValueError(
            f"the ISA level must be one of {', '.join(levels)}, for which {row} was built, not {level!r}"
        )
    chosen = _choose([f for f in functions if f.level == level], problem)
    if not chosen:
        raise ValueError(
            f"{row} has no function of its own for {problem.x_dtype} images, {problem.sum_dtype} sums "
            f"and {problem.kh}x{problem.kw} filters"
        )
    return "\n".join(_listing(library, f) for f in chosen)


def _choose(functions: list[_Function], problem: Problem) -> list[_Function]:
    """The functions that the rung's table gives `problem`: exact types and size before general ones."""
    apart = [f for f in functions if "::strip_apart<" in f.name]
    square = problem.kh == problem.kw and problem.c == problem.groups and problem.stride == (2, 2)
    strided = [f for f in apart if square and f.sizes[0] == problem.kh]
    functions = strided or [f for f in functions if f not in apart]
    total = _UNSIGNED.get(_spelled(problem.sum_dtype), _spelled(problem.sum_dtype))
    x = _spelled(problem.x_dtype)
    x = total if _UNSIGNED.get(x, x) == total else x
    # Images of other types are converted to the type of the sum, tile by tile.
    for types in ((x, total), (total, total)):
        for sizes in ((problem.kh, problem.kw), (0, 0)):
            found = [f for f in functions if f.types == types and f.sizes == sizes]
            if found:
                return sorted(found, key=lambda f: ("bordered" in f.name.lower(), f.name))
    # A kernel over vectors knows the sum only, but for pictures; its largest block of sums is where the time goes.
    blocks = [f for f in functions if _columns(f.name) in (0, problem.kw)]
    found = [f for f in blocks if f.types == (total,)]
    # Narrow blocks of six and seven rows run for pictures from memory alone, whatever the size of this one.
    if x != total:
        out = _spelled(problem.out_dtype)
        of = (x, total) if out == total else (x, out, total)
        narrow = [f for f in blocks if f.types == of and "strip<" in f.name]
        found = [f for f in narrow if (f.sizes[0] or f.sizes[1]) == problem.kh] or found
    # Blocks for a certain number of filter rows say it first; 0 stands for any.
    rows = {f.sizes[0] for f in found if f.sizes}
    if 0 in rows:
        own = problem.kh if problem.kh in rows else 0
        found = [f._replace(sizes=f.sizes[1:]) for f in found if f.sizes and f.sizes[0] == own]
    # Blocks that slide before others, which take what those don't fit; of blocks alike in size the tallest.
    return sorted(
        found,
        key=lambda f: ("::slid_strip<" in f.name, math.prod(f.sizes or (0,)), f.sizes, "block<" in f.name),
        reverse=True,
    )[:1]


def _spelled(dtype: np.dtype) -> str:
    return _SPELLED.get(dtype.name, dtype.name)


def _functions(library: str | os.PathLike[str], row: str) -> Iterator[_Function]:
    table = _objdump("--syms", "--demangle", os.fspath(library))
    lines = re.findall(r"^([0-9a-f]+) [\w ]{7} (?:\.text\S*)\s([0-9a-f]+)\s+(.*)$", table, re.MULTILINE)
    if not any("convpar::" in name for _, _, name in lines):
        raise Unavailable(
            f"{Path(library).name} was stripped of its symbols, so nothing in it has a name; "
            "build convpar without stripping to see its machine code"
        )
    own = re.compile(rf"convpar::(?:rung_)?{re.escape(row)}::(\w+)::")
    for address, size, name in lines:
        found = own.search(name)
        arguments = re.search(
            r"::(?:inside|bordered|filters|strip|slid_strip|strip_apart|block|images|work)<(.*)>\(", name
        )
        if not found or not arguments:
            continue
        plain = own.sub("", arguments[1]).replace("(anonymous namespace)::", "")
        plain = _WAY.sub("", _WHOLE.sub(r", \1", _EDGES.sub("", plain)))
        if _special(found[1], plain):
            continue
        if "strip<" in name:
            plain = _SAME.sub(r", \1", plain)
        if "::slid_strip<" in name:
            plain = _SLID.sub(_slid, plain)
        types, sizes = _arguments(_PASSES.sub(_known, plain))
        if "(Fill)" in plain:
            continue  # planes in pairs, or outputs a stride apart
        if "::strip<" in name and len(sizes) == 2:
            sizes = (0, *sizes)  # rows and vectors alone: of any filter
        yield _Function(int(address, 16), int(size, 16), name, found[1], types, sizes)


_EDGES = re.compile(r", \(Edges\)\d")
"""Which vectors of a block are masked; blocks alike otherwise are much the same."""

_WAY = re.compile(r", \(Way\)0")
"""How most blocks of cpu-packed meet filters."""

_WHOLE = re.compile(r"(?<=^\d, \d), 1, \(Fill\)0, (\w+), \1$")
"""Of cpu-masked's blocks that don't slide those of whole vectors, without a stride."""

_SLID = re.compile(r"^(\d+), (\d+), (?:(\d+), )?(?=\d+, (?:true|false))")
"""Filter rows and columns of blocks that slide, 0 for any number of columns, and rows of outputs where these are few; vectors follow."""


_SAME = re.compile(r", ([\w ]+)(?:, \1)+$")
"""Types of the samples, the results and the sums where they are the same, or the last two."""


def _slid(sizes: re.Match[str]) -> str:
    """The same with rows of outputs, of blocks that slide down all as many as of the tallest others, to be compared with them."""
    return f"{sizes[1]}, {max(int(sizes[2]), 1)}, {sizes[3] or 8}, "


def _columns(name: str) -> int:
    """Columns of the filters that blocks that slide are made for, 0 for any."""
    sliding = re.search(r"::slid_strip<\d+, (\d+), ", name)
    return int(sliding[1]) if sliding else 0


_PASSES = re.compile(r"\b(?:Heights<([\d, ]*)>|RowByRow\b)(?:, 0\b)?")
"""Filter rows of each pass in kernels over columns, or that they come one by one; a 0 behind stands for any number of filter columns."""


def _special(level: str, arguments: str) -> bool:
    """Whether it runs only where rows of the image push each other out of the first cache, over an image's edge, for several channels
    or where those are neighbours in memory, or for filters of one sample."""
    if "(Way)" in arguments or re.search(
        r"\d, (true|true, false|false, true|true, true)(, [\w ]+)+$", arguments
    ):
        return True
    return level != "v3" and "RowByRow," in arguments


def _known(passes: re.Match[str]) -> str:
    """The filter's rows, 0 where they aren't known; and one for its columns, so that blocks can be compared by size."""
    return f"{sum(map(int, _split(passes[1]))) if passes[1] else 0}" + (", 1" if passes[0][-1] == "0" else "")


def _arguments(text: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Types (x, sum; or x, out, sum) and sizes (kh, kw, or a block's) among template arguments such as ``float, 3, 3, Inside<u8, float>``."""
    window = re.search(r"\b(?:Inside|Bordered)<(.*)>\s*$", text)
    types = _split(window[1] if window else text)
    return (
        tuple(t for t in types if not t.isdigit() and t != "false")[: 2 if window else 3],
        tuple(int(t) for t in _split(text) if t.isdigit()),
    )


def _split(text: str) -> list[str]:
    """Template arguments at the outermost level."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts]


def _listing(library: str | os.PathLike[str], function: _Function) -> str:
    text = _objdump(
        "--disassemble", "--demangle", "--no-show-raw-insn",
        f"--start-address={function.address:#x}", f"--stop-address={function.address + function.size:#x}",
        os.fspath(library),
    )  # fmt: skip
    # Addresses relative to the function, so that two listings can be compared.
    own = re.compile(rf"[0-9a-f]+ <{re.escape(function.name)}(\+0x[0-9a-f]+)?>")
    code = [
        f"{int(address, 16) - function.address:6x}:  {own.sub(lambda m: m[1] or '+0x0', line).expandtabs()}"
        for address, line in re.findall(r"^\s*([0-9a-f]+):\t(.*)$", text, re.MULTILINE)
    ]
    short = function.name.replace("(anonymous namespace)::", "")
    return "\n".join([f"# {short}", f"# {function.size} bytes, {len(code)} instructions", *code, ""])


def _objdump(*arguments: str) -> str:
    program = shutil.which("objdump")
    if program is None:
        raise Unavailable("objdump isn't installed; it comes with binutils")
    done = subprocess.run(
        [program, *arguments], capture_output=True, text=True, errors="replace",
        env={**os.environ, "LC_ALL": "C"}, check=False,
    )  # fmt: skip
    if done.returncode:
        raise Unavailable(f"objdump failed: {' '.join(done.stderr.split()) or done.returncode}")
    return done.stdout
