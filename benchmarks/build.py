"""Builds of convpar beside the one that runs: of another commit, or with other options."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
"""The source tree."""


def build(source: Path, folder: Path, *options: str) -> Path:
    """Build the source tree `source` with Meson `options` and put the package into `folder`, which is returned."""
    command = [
        sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
        *(f"--config-settings=setup-args={option}" for option in options),
        "--target", str(folder), str(source),
    ]  # fmt: skip
    # Build tools lie beside this Python, also where its environment isn't activated.
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        command, env={**os.environ, "PATH": tools}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)} failed:\n{done.stderr}")
    return folder


def export(commit: str, folder: Path) -> Path:
    """Put the files of `commit` into `folder`, which is returned."""
    with subprocess.Popen(
        ["git", "-C", str(ROOT), "archive", "--format=tar", commit],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as archive:
        assert archive.stdout is not None
        assert archive.stderr is not None
        try:
            with tarfile.open(fileobj=archive.stdout, mode="r|") as files:
                # Python 3.11 before 3.11.4 has no filters, and git's archive needs none.
                rules: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
                files.extractall(folder, **rules)
        except tarfile.ReadError:
            raise click.ClickException(
                f"git knows no commit {commit!r}: {archive.stderr.read().decode()}"
            ) from None
    return folder
