"""What several commands share: errors, the console, patterns, and options that read conv2d's arguments."""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from convpar.threads import MOST_THREADS

if TYPE_CHECKING:
    import numpy as np
    from rich.console import Console

    from convpar.backend import Backend

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

THREADS = click.IntRange(1, MOST_THREADS)
"""What every --threads takes."""

# Where nobody's window sets it: wide enough for the tables, narrow enough to read.
PIPE_WIDTH = 120

_Command = TypeVar("_Command", bound=Callable[..., Any])


class UserError(click.ClickException):
    """The call is wrong or can't be served; the message goes to stderr in one line, exit code 2."""

    exit_code = 2


def one_line(message: object) -> str:
    """`message` with every run of blanks and line ends as one blank."""
    return " ".join(str(message).split())


@contextlib.contextmanager
def user_errors(prefix: str = "") -> Iterator[None]:
    """What convpar raises about its arguments, as a `UserError`.

    Put it around a call whose arguments come from the command line, and around
    nothing else: a TypeError from anywhere else is a mistake in convpar.
    """
    from convpar import Unavailable, Unsupported

    try:
        yield
    except (ValueError, TypeError, OverflowError, Unsupported, Unavailable) as e:
        raise UserError(f"{prefix}{e}") from e


def check_settings() -> None:
    """Refuse a wrong CONVPAR_ISA, CONVPAR_AMX or CONVPAR_IFMA before anything runs: what would fail then is no backend's fault."""
    from convpar import info

    with user_errors():
        info.check_settings()


def console(*, stderr: bool = False) -> Console:
    """A rich console; piped output is plain and `PIPE_WIDTH` wide, and a closed pipe is an error as usual."""
    from rich.console import Console

    class PipeConsole(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return PipeConsole(stderr=stderr, highlight=False, width=width)


def print_json(value: object) -> None:
    """`value` as indented JSON on stdout; NumPy scalars, types and anything else in their written form."""
    import json

    click.echo(json.dumps(value, indent=2, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    item = getattr(value, "item", None)
    return item() if callable(item) and getattr(value, "ndim", None) == 0 else str(value)


def matching(pattern: str | None) -> list[Backend]:
    """The backends whose names match `pattern` (``cpu-*``, ``cpu``: a name or the beginning of some).

    Raises
    ------
    UserError
        None matches; the message lists the names.
    """
    from convpar import list_backends

    known = list_backends()
    if pattern is None:
        return known
    exact = [b for b in known if b.name == pattern]
    shape = pattern if re.search(r"[*?\[]", pattern) else f"{pattern}*"
    found = exact or [b for b in known if fnmatch.fnmatchcase(b.name, shape)]
    if not found:
        raise UserError(f"no backend matches {pattern!r}; there are {', '.join(b.name for b in known)}")
    return found


def backend_named(name: str) -> Backend:
    """The backend of that name, or a `UserError` that suggests one."""
    import difflib

    from convpar import registry

    if name in registry.CHOOSERS:
        raise UserError(
            f"{name!r} picks a backend for each problem; `convpar explain` says which, and this takes one by its name"
        )
    found = registry.find(name)
    if found is None:
        names = [b.name for b in registry.backends()]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}"
        raise UserError(f"no backend is named {name!r}; {hint}")
    return found


MOST_DIGITS = 100
"""Of an integer; Python reads a few thousand, and no argument takes as many."""


def read_integer(text: str) -> int:
    """The integer that `text` writes, or a ValueError that can be shown."""
    if len(text.strip()) > MOST_DIGITS:
        raise ValueError(
            f"{text.strip()[:10]}... has more than {MOST_DIGITS} digits, more than any number here"
        )
    return int(text)


class Numbers(click.ParamType):  # type: ignore[type-arg]
    """Whole numbers with commas between: ``2``, ``2,1``. One becomes an int, more a tuple; `words` stay."""

    name = "numbers"

    def __init__(self, *counts: int, words: Iterable[str] = ()) -> None:
        self.counts = counts
        self.words = tuple(words)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` read, or click's error that says what is allowed."""
        if not isinstance(value, str) or value in self.words:
            return value
        parts = value.split(",")
        if len(parts) not in self.counts or not all(re.fullmatch(r"-?\d+", p.strip()) for p in parts):
            counts = " or ".join(map(str, self.counts))
            words = f"{', '.join(self.words)}, or " if self.words else ""
            self.fail(f"{value!r} must be {words}{counts} whole numbers with commas between", param, ctx)
        try:
            numbers = tuple(map(read_integer, parts))
        except ValueError as e:
            self.fail(str(e), param, ctx)
        return numbers[0] if len(numbers) == 1 else numbers


class Accuracy(click.ParamType):  # type: ignore[type-arg]
    """``elementwise``, ``normwise`` or a number."""

    name = "accuracy"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` read, or click's error."""
        if value in ("elementwise", "normwise"):
            return value
        try:
            return float(value)
        except ValueError:
            return self.fail(f"{value!r} must be elementwise, normwise or a number", param, ctx)


class Finite(click.FloatRange):
    """A number that is neither infinite nor nan, in a range if one is given."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` read, or click's error."""
        number: float = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number", param, ctx)
        return number

    def _describe_range(self) -> str:
        # Click's says "x<=None" of none.
        return "" if self.min is None and self.max is None else super()._describe_range()


class Number(click.ParamType):  # type: ignore[type-arg]
    """A real or complex number; one written without point or exponent stays an int."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """`value` read, or click's error."""
        if not isinstance(value, str):
            return value
        if re.fullmatch(r"\s*[+-]?\d+\s*", value):
            try:
                return read_integer(value)
            except ValueError as e:
                self.fail(str(e), param, ctx)
        for kind in (int, float, complex):
            with contextlib.suppress(ValueError):
                return kind(value)
        return self.fail(f"{value!r} is not a number", param, ctx)


def read_dtype(name: str) -> np.dtype[Any]:
    """The NumPy dtype of that name; bfloat16 comes from ml_dtypes."""
    import numpy as np

    from convpar.problem import NOT_A_DTYPE

    try:
        if name == "bfloat16":
            import ml_dtypes

            name = ml_dtypes.bfloat16
        dtype: np.dtype[Any] = np.dtype(name)
    except NOT_A_DTYPE:
        raise UserError(f"{name!r} is no dtype; say uint8, int32, float16, float32 and so on") from None
    return dtype


def _read_config_value(text: str) -> Any:
    words = {"none": None, "true": True, "false": False}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"-?\d+(,-?\d+)*", text):
        numbers = tuple(map(read_integer, text.split(",")))
        return numbers[0] if len(numbers) == 1 else numbers
    return text


def read_config(pairs: Iterable[str]) -> dict[str, Any] | None:
    """``key=value`` pairs as the mapping that ``config=`` takes; None without any."""
    config = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise UserError(f"--config takes KEY=VALUE, not {pair!r}")
        try:
            config[key] = _read_config_value(value)
        except ValueError as e:
            raise UserError(f"--config {key}: {e}") from e
    return config or None


def backend_options(command: _Command) -> _Command:
    """The options --backend, --config and --threads."""
    for option in (
        click.option("--threads", type=THREADS, metavar="N",
                     help="Use exactly N threads (default: what the machine allows)."),
        click.option("--config", "pairs", multiple=True, metavar="KEY=VALUE",
                     help="Set an option of the backend; 'convpar backends --options' lists them."),
        click.option("--backend", default="auto", show_default=True, metavar="NAME",
                     help="A rung, a chooser (cpu, gpu) or auto."),
    ):  # fmt: skip
        command = option(command)
    return command


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()
