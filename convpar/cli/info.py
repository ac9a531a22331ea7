"""`convpar info`: versions, processors, settings and what was found."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from .common import CONTEXT_SETTINGS, print_json, user_errors


@click.command("info", context_settings=CONTEXT_SETTINGS)
@click.option("--json", "as_json", is_flag=True, help="For programs to read.")
def command(as_json: bool) -> None:
    """Show versions, processors, settings and what was found: what a bug report needs."""
    import convpar

    with user_errors():
        config = convpar.show_config()
    if as_json:
        print_json(config)
    else:
        click.echo(as_text(config))


def as_text(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The sections of `convpar.show_config`, a fact a line."""
    lines = []
    for section, facts in config.items():
        lines.append(section)
        width = max(map(len, facts), default=0)
        lines += [f"  {name:<{width}}  {_written(value)}" for name, value in facts.items()]
    return "\n".join(lines)


def _written(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
