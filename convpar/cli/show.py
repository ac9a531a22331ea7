"""`convpar show`: a rung's kernel, the difference to another's, and what the compiler made of it."""

from __future__ import annotations

import difflib
import os
from typing import TYPE_CHECKING, Any

import click

from .backends import options_table, takes, written
from .common import (
    CONTEXT_SETTINGS,
    Numbers,
    UserError,
    backend_named,
    console,
    is_terminal,
    read_dtype,
    user_errors,
)

if TYPE_CHECKING:
    from convpar.backend import Backend
    from convpar.problem import Problem

Source = tuple[tuple[str, str], ...]

LEXERS = {".cu": "cuda", ".cuh": "cuda", ".py": "python", ".pyx": "cython", ".inc": "cpp", ".hpp": "cpp",
          ".h": "cpp", ".cpp": "cpp"}  # fmt: skip


@click.command("show", context_settings=CONTEXT_SETTINGS)
@click.argument("rung")
@click.option(
    "--diff", "other", metavar="OTHER", help="What RUNG's kernel changes in OTHER's: a unified diff."
)
@click.option("--asm", is_flag=True, help="What the compiler made of it (needs objdump).")
@click.option(
    "--dtype", help="With --asm: type of image and filter (default: float32, or the first that RUNG sums)."
)
@click.option("--filter-size", type=Numbers(1, 2), default="3", show_default=True, metavar="KH[,KW]",
              help="With --asm: the filter.")  # fmt: skip
@click.option("--isa", metavar="LEVEL", help="With --asm: the instruction set (default: the one in use).")
def command(
    rung: str, other: str | None, asm: bool, dtype: str | None, filter_size: Any, isa: str | None
) -> None:  # fmt: skip
    """Print the kernel of RUNG, its options and its place in its ladder."""
    if asm and other is not None:
        raise UserError("--asm and --diff can't be had together")
    backend = backend_named(rung)
    if asm:
        sums = backend.capabilities.sum_dtypes
        dtype = dtype or ("float32" if "float32" in sums else sums[0])
        _print(_assembly(backend, _problem(dtype, filter_size), isa), "gas")
        return
    if isa is not None:
        raise UserError("--isa chooses what --asm shows; say --asm too")
    if other is not None:
        _print_difference(backend_named(other), backend)
        return
    sources = _source(backend)
    _print_header(backend)
    for name, text in sources:
        _print(f"\n// {name}\n" if not name.endswith((".py", ".pyx")) else f"\n# {name}\n", _lexer(name))
        _print(text, _lexer(name))


def ladder(backend: Backend) -> list[Backend]:
    """The rungs below `backend`, from the lowest, then itself, then those that build on it."""
    from convpar import list_backends, registry

    chain = [backend]
    while chain[0].builds_on is not None:
        below = registry.find(chain[0].builds_on)
        if below is None or below in chain:
            break
        chain.insert(0, below)
    return chain + [b for b in list_backends() if b.builds_on == backend.name]


def _print_header(backend: Backend) -> None:
    from rich.markup import escape

    out = console()
    out.print(f"[bold]{escape(backend.name)}[/]: {escape(backend.summary)}", soft_wrap=True)
    out.print(f"takes: {takes(backend.capabilities)}", soft_wrap=True, markup=False)
    reason = backend.unavailable()
    if reason is not None:
        out.print(f"can't run here: {reason}", soft_wrap=True, markup=False)
    out.print("\nladder:")
    for step in ladder(backend):
        mark = "->" if step.name == backend.name else "  "
        out.print(f" {mark} {step.name:<20} {step.summary}", soft_wrap=True, markup=False)
    out.print("\noptions:" if backend.options else "\noptions: none")
    if backend.options:
        out.print(options_table(backend))


def _source(backend: Backend) -> Source:
    source = getattr(backend, "source", None)
    if source is None:
        raise UserError(f"{backend.name} doesn't show its source")
    with user_errors():
        found: Source = source()
    return found


def _print_difference(old: Backend, new: Backend) -> None:
    before, after = _source(old), _source(new)
    text = difference(old.name, before, new.name, after)
    if text:
        _print(text, "diff")
    else:
        _print(
            f"{old.name} and {new.name} have the same kernel files: {', '.join(n for n, _ in after)}\n",
            "text",
        )
    changed = [
        f"{name}: {written(old.options[name].default)} -> {written(option.default)}"
        for name, option in new.options.items()
        if name in old.options and old.options[name].default != option.default
    ]
    changed += [f"{name}: only {new.name} has it" for name in new.options if name not in old.options]
    changed += [f"{name}: only {old.name} has it" for name in old.options if name not in new.options]
    if changed:
        _print("\noptions\n" + "".join(f"  {line}\n" for line in changed), "text")


def difference(old_name: str, old: Source, new_name: str, new: Source) -> str:
    """A unified diff from the files of one rung to those of another, without the files they share.

    Files are paired by name, and what then remains in order.
    """
    before = [f for f in old if f not in new]
    after = [f for f in new if f not in old]
    pairs = []
    for name, text in list(after):
        same = next((f for f in before if f[0] == name), None)
        if same is not None:
            pairs.append((same, (name, text)))
            before.remove(same)
            after.remove((name, text))
    nothing = ("", "")
    for i in range(max(len(before), len(after))):
        pairs.append((before[i] if i < len(before) else nothing, after[i] if i < len(after) else nothing))
    lines: list[str] = []
    for (a, a_text), (b, b_text) in pairs:
        lines += difflib.unified_diff(
            _lines(a_text), _lines(b_text),
            f"{old_name}/{a}" if a else os.devnull, f"{new_name}/{b}" if b else os.devnull,
        )  # fmt: skip
    return "".join(lines)


def _lines(text: str) -> list[str]:
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n\\ No newline at end of file\n"
    return lines


def _problem(dtype: str, filter_size: int | tuple[int, int]) -> Problem:
    from convpar import Problem

    kh, kw = (filter_size, filter_size) if isinstance(filter_size, int) else filter_size
    with user_errors():
        return Problem.of((1, 1, 512, 512), (1, 1, kh, kw), read_dtype(dtype), padding="same")


def _assembly(backend: Backend, problem: Problem, isa: str | None) -> str:
    assembly = getattr(backend, "assembly", None)
    if assembly is None:
        raise UserError(f"{backend.name} doesn't show its machine code")
    with user_errors(f"{backend.name}: "):
        text: str = assembly(problem) if isa is None else assembly(problem, level=isa)
    return text


def _lexer(filename: str) -> str:
    return LEXERS.get(os.path.splitext(filename)[1], "text")


def _print(text: str, lexer: str) -> None:
    """Highlighted on a terminal, elsewhere as it is."""
    if not is_terminal():
        click.echo(text, nl=False)
        return
    from rich.syntax import Syntax

    console().print(Syntax("", lexer, theme="ansi_dark").highlight(text), soft_wrap=True, end="")
