"""The group of commands: finds their modules when they are called, and turns errors into one line.

A command is a module beside this one that exposes a click command named
`command`, and a row of `COMMANDS`.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import click
from click.shell_completion import shell_complete

from .common import CONTEXT_SETTINGS, UserError, one_line

# As a shell counts: 128 + the number of the signal.
INTERRUPTED, CLOSED_PIPE = 130, 141
OK, WRONG_CALL = 0, 2
OF_WRITING = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG)


class Row(NamedTuple):
    """What is known of a command before its module is imported.

    Attributes
    ----------
    summary : str
        Its line in ``convpar --help``.
    extra : str
        The extra of convpar that brings everything it imports.
    """

    summary: str
    extra: str


COMMANDS = {
    "info": Row("Show versions, processors, settings and what was found.", "cli"),
    "backends": Row("List the backends and what each takes.", "cli"),
    "show": Row("Print a rung's kernel, options and place in its ladder.", "cli"),
    "explain": Row("Say what would run for given shapes and types, and why.", "cli"),
    "filter": Row("Apply a kernel to a PNG, JPEG or TIFF picture.", "image"),
    "demo": Row("Filter a photograph with every rung and compare them.", "demo"),
    "verify": Row("Check backends against SciPy.", "test"),
    "bench": Row("Time backends on named cases.", "bench"),
}


class Application(click.Group):
    """A click group whose commands are modules, imported one at a time."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of the commands, in the order of the help text."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of that name, its module imported; None if there is none."""
        if cmd_name not in COMMANDS:
            return None
        with _extras(cmd_name):
            command: click.Command = importlib.import_module(f"{__package__}.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands; click's own would import every one for its first line."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, row.summary) for name, row in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command that was called."""
        with _extras(None):
            return super().invoke(ctx)

    def main(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str = "_CONVPAR_COMPLETE",
        standalone_mode: bool = True,
        **extra: Any,
    ) -> int:
        """Run, with each error told in a line.

        Parameters
        ----------
        args : sequence of str, optional
            `sys.argv` without its first word by default.
        prog_name, complete_var, standalone_mode, **extra
            As click's own. In `standalone_mode` the process exits with the code instead of returning it.
        """
        name = prog_name or "convpar"
        completion = os.environ.get(complete_var)
        code: int
        if completion:
            code = shell_complete(self, extra, name, complete_var, completion)
        else:
            code = self._run(name, list(sys.argv[1:] if args is None else args), extra)
        if standalone_mode:
            sys.exit(code)
        return code

    def _run(self, name: str, args: list[str], extra: dict[str, Any]) -> int:
        # Not by click's main(), whose answer to a closed pipe is the exit code of an error.
        try:
            with self.make_context(name, args, **extra) as ctx:
                returned = self.invoke(ctx)
            sys.stdout.flush()
        except click.exceptions.Exit as e:
            returned = e.exit_code
        except click.ClickException as e:
            return _complain(_message(e))
        except (click.Abort, KeyboardInterrupt):
            return _complain("interrupted", INTERRUPTED)
        except MemoryError:
            return _complain("there isn't enough memory")
        except OSError as e:
            # What says so writes there, so only after an error that may have come from there.
            if e.errno not in OF_WRITING or not _stdout_fails():
                raise
            if e.errno == errno.EPIPE:
                return CLOSED_PIPE
            return _complain(f"can't write the output: {e.strerror}")
        return returned if isinstance(returned, int) else OK


@contextlib.contextmanager
def _extras(command: str | None) -> Iterator[None]:
    """Turn a missing package into the name of the extra that brings it."""
    try:
        yield
    except ModuleNotFoundError as e:
        missing = (e.name or "").partition(".")[0]
        if missing in ("", "convpar"):
            raise
        context = click.get_current_context(silent=True)
        called = command or (context and context.invoked_subcommand)
        extra = COMMANDS[called].extra if called in COMMANDS else "cli"
        raise UserError(f"this needs {missing}, which isn't installed: pip install 'convpar[{extra}]'") from e


def _message(error: click.ClickException) -> str:
    message = error.format_message()
    context = getattr(error, "ctx", None)
    if context is not None:
        message = f"{message.rstrip('.')} (try '{context.command_path} --help')"
    return message


def _complain(message: str, code: int = WRONG_CALL) -> int:
    with contextlib.suppress(BrokenPipeError):
        click.echo(f"convpar: {one_line(message)}", err=True)
    return code


def _stdout_fails() -> bool:
    """Whether stdout takes no more; if so, nothing more is sent there."""
    try:
        # An unbuffered stream has nothing left to flush: only one more character tells.
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError:
        # What is left in the buffer would be written, and fail again, when Python ends.
        with contextlib.suppress(OSError):
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, sys.stdout.fileno())
            os.close(devnull)
        return True
    return False


def _show_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value:
        from convpar import __version__

        click.echo(f"convpar {__version__}")
        ctx.exit()


@click.group(cls=Application, invoke_without_command=True, context_settings=CONTEXT_SETTINGS)
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
    help="Show the version and exit.",
)  # fmt: skip
@click.pass_context
def application(ctx: click.Context) -> None:
    """2-D convolution: every optimisation a rung, every rung checked and compared."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
