"""Put the tables into the documents: ``python -m benchmarks.render``, or ``--check`` that they are up to date.

A document has ``<!-- results:NAME -->`` or ``<!-- backends -->`` on a line of its own and
``<!-- end -->`` on a later one; what is between them is replaced.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import click

from benchmarks import regret, steps, workspace
from benchmarks.gpu import document
from benchmarks.tables import backends_table, results_table
from convpar.bench.results import ResultFile, ResultsError

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

FOLDERS = {"regret": regret.table, "steps": steps.table, "workspace": workspace.table}
"""Tables of records of their own, in a folder of their name -> how they are made."""

_SECTION = re.compile(
    r"^<!-- (results:(?P<name>[^ ]*)|backends) -->$\n(?P<body>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"^<!-- (?:results:.*|backends|end) -->$", re.MULTILINE)


def render(text: str, files: list[ResultFile], folder: Path = RESULTS) -> str:
    """`text` with every marked section made anew from `files`, and from the folders in `folder`; empty without records.

    Raises
    ------
    ValueError
        A table is unknown, or a mark lacks its partner.
    """

    def section(match: re.Match[str]) -> str:
        name = match["name"]
        if name is None:
            table = backends_table()
        elif name in document.TABLES:
            table = document.table(name, folder / "studies")
        elif name in FOLDERS:
            table = FOLDERS[name](folder / name)
        else:
            table = results_table(name, files)
        body = f"\n\n{table}\n\n" if table else "\n"
        return f"<!-- {match[1]} -->{body}<!-- end -->"

    marks = [m[0] for m in _MARK.finditer(text)]
    if any((mark == "<!-- end -->") != (k % 2 == 1) for k, mark in enumerate(marks)) or len(marks) % 2:
        raise ValueError(f"marks must come in pairs, each with an <!-- end -->; found {', '.join(marks)}")
    return _SECTION.sub(section, text)


def marked_documents(root: Path = ROOT) -> list[Path]:
    """README.md and the Markdown files of docs and benchmarks that have a mark."""
    found = [
        root / "README.md",
        *sorted((root / "docs").rglob("*.md")),
        *sorted((root / "benchmarks").glob("*.md")),
    ]
    return [path for path in found if path.exists() and _MARK.search(path.read_text(encoding="utf-8"))]


@click.command()
@click.argument("documents", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--check", is_flag=True, help="Write nothing; exit code 1 and the difference if something is out of date."
)
@click.option(
    "--results", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), default=RESULTS,
    help="Folder of result files. [default: benchmarks/results]",
)  # fmt: skip
@click.pass_context
def main(ctx: click.Context, documents: tuple[Path, ...], check: bool, folder: Path) -> None:
    """Make the tables in DOCUMENTS anew; without any, in README.md, docs and benchmarks."""
    try:
        files = [ResultFile(path) for path in sorted(folder.glob("*.json"))]
    except ResultsError as e:
        raise click.ClickException(str(e)) from e
    stale = False
    for path in documents or marked_documents():
        old = path.read_text(encoding="utf-8")
        try:
            new = render(old, files, folder)
        except ValueError as e:
            raise click.ClickException(f"{path}: {e}") from e
        if new == old:
            continue
        stale = True
        if check:
            lines = difflib.unified_diff(
                old.splitlines(), new.splitlines(), f"{path}", f"{path}, rendered", lineterm=""
            )
            click.echo("\n".join(lines))
        else:
            path.write_text(new, encoding="utf-8")
            click.echo(f"wrote {path}")
    if check and stale:
        click.echo("out of date; run: python -m benchmarks.render", err=True)
        ctx.exit(1)


if __name__ == "__main__":
    main()
