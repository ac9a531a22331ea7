"""Report E on the GPU: the shared-memory tile against one thread per output, over block sizes and both lane mappings.

In the report's kernels neighbouring threads walk along rows of the image's columns (``lanes=rows``) and so read far-apart
addresses; ``lanes=columns`` is what a coalescing kernel does. A tile is loaded by as many threads as it has
outputs (strided), or, as in the report, as it has inputs (full).
"""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from . import published, show
from .session import Contender, Result, Results, Session

LANES = ("columns", "rows")
LOADINGS = ("strided", "full")
BLOCKS = ((4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
"""(rows, columns) of outputs that a block computes: 32 to 1024."""


def _naive(block: tuple[int, int], lanes: str) -> Contender:
    return Contender.of("gpu-naive", {"tile": block, "lanes": lanes})


def _tiled(block: tuple[int, int], lanes: str, loading: str) -> Contender:
    return Contender.of("gpu-tiled", {"tile": block, "lanes": lanes, "loading": loading})


def contenders() -> list[Contender]:
    """All that the table shows."""
    found = []
    for block in BLOCKS:
        for lanes in LANES:
            found += [_naive(block, lanes), *(_tiled(block, lanes, loading) for loading in LOADINGS)]
    return found


def run(session: Session) -> Iterator[Table | str]:
    """Measure, and give the tables and, last, the summary."""
    case = session.image()
    results = session.time("blocks", case, [Contender.of("gpu-naive"), *contenders()])
    least = published.find("E", "gpu-tiled", "speedup", config={"vs": "gpu-naive", "metric": "minimum"})
    most = published.find("E", "gpu-tiled", "speedup", config={"vs": "gpu-naive", "block_threads": "32"})
    assert least is not None
    assert most is not None
    naive, tiled = (
        published.find("E", rung, "share_of_peak", config={"filter": "7x7"})
        for rung in ("gpu-naive", "gpu-tiled")
    )
    assert naive is not None
    assert tiled is not None
    figures = (
        f"published: the tile is at least {least.value:g}x faster, {most.value:g}x at 32 threads a block; "
        f"{naive.value:g} and {tiled.value:g} % of the card's throughput by its profiler"
    )
    for lanes in LANES:
        yield _table(case.name, results, lanes, figures)
    yield "\n".join([f"blocks, {case.name}; {figures}", *_summary(results)])


def _table(case: str, results: Results, lanes: str, caption: str) -> Table:
    table = show.table(
        f"{case}, lanes along {lanes}",
        "block", "naive", "of limit", "tiled, strided", "naive / tiled", "tiled, full", "naive / tiled",
        caption=caption,
    )  # fmt: skip
    reasons: dict[str, None] = {}
    for block in BLOCKS:
        naive = results.get(_naive(block, lanes))
        row = [f"{block[0]}x{block[1]}", show.time(naive), show.share(naive)]
        for loading in LOADINGS:
            tiled = results.get(_tiled(block, lanes, loading))
            row += [show.time(tiled), show.ratio(_seconds(naive), _seconds(tiled))]
            if tiled is not None and tiled.reason:
                reasons[f"{block[0]}x{block[1]} {loading}: {tiled.reason}"] = None
        table.add_row(*row)
    if reasons:
        table.caption = "\n".join([caption, *reasons])
    return table


def _seconds(result: Result | None) -> float | None:
    return None if result is None else result.seconds


def _summary(results: Results) -> list[str]:
    """A line for each mapping and loading: naive / tiled by threads of a block of outputs."""
    lines = []
    for lanes in LANES:
        for loading in LOADINGS:
            parts = []
            for block in BLOCKS:
                naive, tiled = results.get(_naive(block, lanes)), results.get(_tiled(block, lanes, loading))
                ratio = show.ratio(_seconds(naive), _seconds(tiled)) or show.missing(tiled)
                parts.append(f"{block[0] * block[1]}: {ratio}")
            lines.append(
                f"  naive / tiled, lanes={lanes} loading={loading}, by outputs a block: {', '.join(parts)}"
            )
    return lines
