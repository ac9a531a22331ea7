"""`convpar backends`: every backend, whether this machine runs it, and what it takes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from .common import CONTEXT_SETTINGS, console, matching, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from convpar.backend import Backend, Capabilities, Option


@click.command("backends", context_settings=CONTEXT_SETTINGS)
@click.argument("pattern", required=False)
@click.option("--options", is_flag=True, help="List what config= may set, with defaults and allowed values.")
@click.option("--json", "as_json", is_flag=True, help="Everything, for programs to read.")
def command(pattern: str | None, options: bool, as_json: bool) -> None:
    """List the backends and what each takes.

    PATTERN selects some: a name, the beginning of some names, or a pattern such as '*-tiled*'.
    """
    found = matching(pattern)
    if as_json:
        print_json([as_record(b) for b in found])
        return
    out = console()
    out.print(_overview(found))
    for reason, names in unavailable(found).items():
        out.print(f"can't run here: {', '.join(names)}: {reason}", soft_wrap=True, markup=False)
    if options:
        for backend in found:
            out.print()
            out.print(f"[bold]{backend.name}[/]" + ("" if backend.options else " has no options"))
            if backend.options:
                out.print(options_table(backend))


def as_record(backend: Backend) -> dict[str, Any]:
    """What a backend says about itself, in plain types."""
    c = backend.capabilities
    reason = backend.unavailable()
    return {
        "name": backend.name,
        "summary": backend.summary,
        "builds_on": backend.builds_on,
        "device": c.device,
        "available": reason is None,
        "unavailable": reason,
        "input_dtypes": list(c.input_dtypes),
        "sum_dtypes": list(c.sum_dtypes),
        "out_dtypes": list(c.out_dtypes),
        "filter_sizes": None if c.filter_sizes is None else [list(size) for size in c.filter_sizes],
        "least_filter": list(c.least_filter),
        "least_channels": c.least_channels,
        "strided": c.strided,
        "strides": None if c.strides is None else [list(stride) for stride in c.strides],
        "dilated": c.dilated,
        "grouped": c.grouped,
        "depthwise": c.depthwise,
        "boundaries": list(c.boundaries),
        "sum_is_output": c.sum_is_output,
        "error": {
            "kind": c.error.kind,
            "factor": c.error.factor,
            "sum_dtype": c.error.sum_dtype,
            "flushes_subnormals": c.error.flushes_subnormals,
            "deterministic": c.error.deterministic,
            "operand_dtype": c.error.operand_dtype,
        },
        "options": {
            name: {
                "summary": option.summary,
                "default": option.default,
                "allowed": None if option.allowed is None else list(option.allowed),
                "kind": option.kind,
            }
            for name, option in backend.options.items()
        },
    }


def unavailable(found: Iterable[Backend]) -> dict[str, list[str]]:
    """Why some can't run here: reason -> the names of those that it holds for."""
    reasons: dict[str, list[str]] = {}
    for backend in found:
        reason = backend.unavailable()
        if reason is not None:
            reasons.setdefault(reason, []).append(backend.name)
    return reasons


def _overview(found: list[Backend]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("backend", "device", "here", "its one idea", "takes", header_style="bold", show_lines=True)
    for backend in found:
        table.add_row(
            Text(backend.name, style="bold", no_wrap=True),
            backend.capabilities.device,
            Text("yes", style="green") if backend.unavailable() is None else Text("no", style="yellow"),
            Text(backend.summary),
            Text(takes(backend.capabilities)),
        )
    return table


def takes(c: Capabilities) -> str:
    """What a backend takes, in a few words; what is usual goes without saying."""
    from convpar.boundary import MODES

    said = [_dtypes(c.input_dtypes)]
    sums = [d for d in c.sum_dtypes if d not in c.input_dtypes]
    if c.error.sum_dtype:
        said.append(f"sums kept in {c.error.sum_dtype}")
    elif not set(c.input_dtypes) - {"bool", "float16", "bfloat16"} <= set(c.sum_dtypes):
        said.append(f"sums in {_dtypes(c.sum_dtypes)}")
    elif sums:
        said.append(f"sums also in {_dtypes(tuple(sums))}")
    if c.error.operand_dtype:
        said.append(f"factors rounded to {c.error.operand_dtype}")
    if c.filter_sizes is not None:
        said.append("filters " + ", ".join(f"{a}x{b}" for a, b in c.filter_sizes))
    if c.least_filter != (1, 1):
        said.append("filters from {}x{}".format(*c.least_filter))
    if c.least_channels > 1:
        said.append(f"{c.least_channels} channels and more")
    if c.depthwise:
        said.append("groups of one channel and one output channel")
    lacking = [
        word
        for word, has in (("stride", c.strided), ("dilation", c.dilated), ("groups", c.grouped))
        if not has
    ]
    if c.strided and c.strides is not None:
        said.append("stride " + ", ".join(f"{a}x{b}" for a, b in c.strides))
    if lacking:
        said.append("no " + ", ".join(lacking))
    if set(c.boundaries) != set(MODES):
        said.append("boundary " + ", ".join(c.boundaries))
    if c.sum_is_output:
        said.append("result in the sum's type")
    if c.error.kind != "elementwise":
        said.append(f"{c.error.kind} error, factor {c.error.factor:g}")
    if c.error.flushes_subnormals:
        said.append("flushes subnormals")
    if not c.error.deterministic:
        said.append("bits may differ between runs")
    return "; ".join(said)


def _dtypes(names: tuple[str, ...]) -> str:
    """Type names with whole families in a word: all integers, float32/64."""
    from convpar.backend import INTEGERS

    rest = list(names)
    said = []
    if set(INTEGERS) <= set(rest):
        said.append("integers")
        rest = [name for name in rest if name not in INTEGERS]
    for family in ("int", "uint", "float", "complex"):
        sizes = [
            name[len(family) :] for name in rest if name.startswith(family) and name[len(family) :].isdigit()
        ]
        if sizes:
            said.append(f"{family}{'/'.join(sizes)}")
            rest = [name for name in rest if name not in {family + size for size in sizes}]
    return ", ".join(sorted(said + rest, key=lambda s: s != "bool"))


def options_table(backend: Backend) -> Table:
    """The keys of ``config=`` with their defaults and what they may be."""
    from rich.table import Table
    from rich.text import Text

    table = Table(
        "option", "default", "allowed", "what it sets", header_style="bold", box=None, pad_edge=True
    )
    for name, option in backend.options.items():
        table.add_row(
            Text(name, style="bold"),
            Text(written(option.default)),
            Text(allowed(option)),
            Text(option.summary),
        )
    return table


def written(value: object) -> str:
    """An option's value as `--config` takes it; a default of None is the plan's to choose."""
    if value is None:
        return "chosen"
    if isinstance(value, (tuple, list)):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def allowed(option: Option) -> str:
    """What an option may be, in words."""
    if option.allowed is not None:
        return ", ".join(written(value) for value in option.allowed)
    kinds = {"int": "a whole number", "pair": "two whole numbers: rows,columns", "bytes": "a number of bytes"}
    return kinds.get(option.kind, "any")
