"""The command line, `convpar`: one file a command, each imported when it is called.

`COMMANDS` in `convpar.cli.app` lists them. Importing this package loads neither
click nor rich, so that `main` can say what is missing.
"""

from __future__ import annotations

import os
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line on `sys.argv`; the exit code.

    0: done; 1: something was checked and found wrong; 2: the call was wrong or can't
    be served, with one line on stderr that says why; 130, 141: Ctrl-C, closed pipe.
    """
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as e:
        print(
            f"convpar: the command line needs {e.name}, which isn't installed: pip install 'convpar[cli]'",
            file=sys.stderr,
        )
        return 2
    from .app import application

    # Started with a closed stream, a file opened later would take its number, and what is printed.
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115
    return application.main(prog_name="convpar", standalone_mode=False)
