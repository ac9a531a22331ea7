"""`convpar demo`: one photograph, a few kernels, every rung; checked against SciPy, timed and drawn."""

# ruff: noqa: RUF001 - the picture is set in typographic signs

from __future__ import annotations

import functools
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np
import numpy.typing as npt

from convpar.backends.gpu import executors

from . import named_kernels
from .backends import unavailable
from .common import CONTEXT_SETTINGS, UserError, check_settings, console, matching
from .files import check_target, replace_file

if TYPE_CHECKING:
    from rich.console import RenderableType

    from convpar.backend import Backend
    from convpar.problem import Problem

Array = npt.NDArray[Any]

PHOTOGRAPH = "grace_hopper.jpg"
"""Comes with matplotlib: Rear Admiral Grace Hopper, US Navy, public domain."""

FORMATS = (".png", ".pdf", ".svg")
SLOW = 0.2
"""Seconds from which one sample of a rung has to do; emulated GPU rungs take some."""


@dataclass(frozen=True)
class Filter:
    """One panel of the picture.

    Attributes
    ----------
    title, subtitle : str
    weights : tuple of ndarray
        The kernels that the panel is made with: (KH, KW) each.
    exact : bool
        The weights are whole numbers, so that float32 sums of 8-bit pixels don't round.
    panel : callable
        Takes the filtered pictures, (3, H, W) each, one a kernel, and gives the RGB picture
        (H, W, 3) between 0 and 1 that is drawn.
    """

    title: str
    subtitle: str
    weights: tuple[Array, ...]
    exact: bool
    panel: Callable[..., Array]


def _colours(picture: Array) -> Array:
    return np.clip(picture / 255, 0, 1).transpose(1, 2, 0)


def _grey(picture: Array) -> Array:
    # Luma of ITU-R BT.601, as in JPEG files.
    return np.tensordot(np.array([0.299, 0.587, 0.114]), picture, 1)


def _ink(right: Array, down: Array) -> Array:
    """Edges as dark lines on white: the length of the gradient, a full step of a Sobel kernel being 4 x 255."""
    length = np.hypot(_grey(right), _grey(down)) / (4 * 255)
    return np.repeat(np.exp(-4.5 * length)[..., None], 3, axis=2)


def _relief(picture: Array) -> Array:
    return np.repeat(np.clip(_grey(picture) / 255, 0, 1)[..., None], 3, axis=2)


def filters() -> tuple[Filter, ...]:
    """What the demo computes: sizes 3, 5 and 7, which every rung of the ladders takes."""
    return (
        Filter("Blur", "mean of 7 × 7", (named_kernels.box(7),), False, _colours),
        Filter("Sharpen", "unsharp mask, σ 0.6, 5 × 5", (named_kernels.unsharp(0.6, 3),), False, _colours),
        Filter(
            "Edges",
            "Sobel, two kernels of 3 × 3",
            (named_kernels.sobel_x(), named_kernels.sobel_y()),
            True,
            _ink,
        ),
        Filter("Emboss", "light from the top left, 3 × 3", (named_kernels.emboss(),), True, _relief),
    )


@dataclass
class Row:
    """What came of one rung.

    Attributes
    ----------
    name : str
    emulated : bool
        A GPU rung that ran on the CPU: its time says nothing about a GPU.
    seconds : dict of int to float
        Median time of each kernel that it took, by the kernel's number.
    difference : float
        The largest difference to SciPy's float64 result, in grey levels of 255.
    wrong, refused : list of str
        Where it broke its contract; what it doesn't take.
    """

    name: str
    emulated: bool = False
    seconds: dict[int, float] = field(default_factory=dict)
    difference: float = 0.0
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        """The name, with what a reader of the times must know."""
        return f"{self.name}, emulated" if self.emulated else self.name

    def speed(self, other: Row) -> float | None:
        """How many times as fast as `other` it is, over the kernels that both took."""
        both = self.seconds.keys() & other.seconds.keys()
        if not both:
            return None
        return sum(other.seconds[i] for i in both) / sum(self.seconds[i] for i in both)


@click.command("demo", context_settings=CONTEXT_SETTINGS)
@click.option("--out", default="convpar-demo.png", show_default=True, metavar="PATH",
              help="The picture to write: .png, .pdf or .svg.")  # fmt: skip
@click.option("--size", type=click.IntRange(32, 4096), default=512, show_default=True, metavar="COLUMNS",
              help="Width that the photograph is brought to.")  # fmt: skip
@click.option("--backend", "pattern", metavar="PATTERN", help="Only these rungs: 'cpu-*', a name, ...")
@click.pass_context
def command(ctx: click.Context, out: str, size: int, pattern: str | None) -> None:
    """Filter a photograph with every rung, check each against SciPy, time them, and draw the results.

    The exit code is 1 if a rung gives a wrong result; no picture is written then.
    """
    # Whatever is missing should be known before the work, not after.
    import matplotlib  # noqa: F401
    import scipy  # noqa: F401

    if Path(out).suffix.lower() not in FORMATS:
        raise UserError(f"{out} must end in {', '.join(FORMATS)}")
    check_target(out)
    check_settings()
    found = matching(pattern)
    missing = [b for b in found if b.unavailable() is not None]
    runnable = [b for b in found if b not in missing]
    if not runnable:
        reasons = [f"{', '.join(names)}: {reason}" for reason, names in unavailable(missing).items()]
        hint = _emulation_hint(missing)
        raise UserError("; ".join(["none of these backends runs here", *reasons, *([hint] if hint else [])]))
    picture = photograph(size)
    shown = filters()
    rows, results = compare(picture, shown, runnable)
    screen = console()
    screen.print(
        f"{picture.shape[2]} x {picture.shape[1]} pixels, 3 colours, float32; "
        f"{sum(len(f.weights) for f in shown)} kernels of 3 x 3 to 7 x 7; times are for all of them",
        soft_wrap=True,
    )
    screen.print(_table(rows))
    for line in _notes(rows, missing):
        screen.print(line, soft_wrap=True, markup=False)
    if any(row.wrong for row in rows):
        click.echo("convpar: a rung gave a wrong result, so no picture was written", err=True)
        ctx.exit(1)
    panels = [f.panel(*pictures) for f, pictures in zip(shown, results, strict=True)]
    replace_file(out, draw(picture, shown, panels, rows, Path(out).suffix.lower()[1:]))
    screen.print(f"wrote {out}", soft_wrap=True, markup=False)


def photograph(columns: int) -> Array:
    """matplotlib's sample photograph as float32, (3, H, W), colours 0 to 255 in whole numbers."""
    import cv2
    from matplotlib import cbook

    from . import images

    path = cbook.get_sample_data(PHOTOGRAPH, asfileobj=False)
    try:
        pixels = images.read(path).pixels
    except images.PictureError as e:
        raise UserError(f"matplotlib's photograph {path} {e}") from e
    height, width = pixels.shape[:2]
    if width != columns:
        # Averaging suits a smaller picture, cubics a larger one.
        method = cv2.INTER_AREA if columns < width else cv2.INTER_CUBIC
        pixels = cv2.resize(pixels, (columns, round(height * columns / width)), interpolation=method)
    return np.ascontiguousarray(pixels[..., ::-1].transpose(2, 0, 1), np.float32)


# -- comparing


def compare(
    picture: Array, shown: Sequence[Filter], backends: Sequence[Backend]
) -> tuple[list[Row], list[list[Array]]]:
    """Run every kernel on SciPy and on every backend.

    Parameters
    ----------
    picture : ndarray of float32, shape (3, H, W)
    shown : sequence of Filter
    backends : sequence of Backend

    Returns
    -------
    rows : list of Row
        SciPy first, then the backends.
    results : list of list of ndarray
        For each filter and kernel SciPy's result, (3, H, W) in float64.
    """
    tasks = [(f, w) for f in shown for w in f.weights]
    emulating = executors.emulating()
    rows = [Row("SciPy"), *(Row(b.name, emulating and b.capabilities.device == "gpu") for b in backends)]
    references = []
    with _progress(len(tasks) * len(rows)) as advance:
        for number, (f, weights) in enumerate(tasks):
            reference = _scipy(picture.astype(np.float64), weights)
            references.append(reference)
            single = weights.astype(np.float32)
            calls: dict[int, Callable[[], object]] = {0: functools.partial(_scipy, picture, single)}
            check = _Check(
                picture, single, f.exact, _scipy(picture.astype(np.float64), single.astype(np.float64))
            )
            for place, backend in enumerate(backends, 1):
                call = check(rows[place], backend, f.title)
                if call is not None:
                    calls[place] = call
            for place, seconds in _times(calls, advance).items():
                rows[place].seconds[number] = seconds
    pictures = iter(references)
    return rows, [[next(pictures) for _ in f.weights] for f in shown]


def _scipy(picture: Array, weights: Array) -> Array:
    """Each colour by SciPy's own 2-D correlation, in the type of the arrays."""
    from scipy import signal

    return np.stack([signal.correlate2d(plane, weights, mode="same", boundary="symm") for plane in picture])


class _Check:
    """Runs one kernel on backends and holds the results against SciPy."""

    def __init__(self, picture: Array, weights: Array, exact: bool, reference: Array) -> None:
        self._picture = picture
        self._weights = weights
        self._exact = exact
        self._reference = reference
        self._expected: dict[Any, Any] = {}

    def __call__(self, row: Row, backend: Backend, title: str) -> Callable[[], object] | None:
        """Fill `row`; a call to be timed, or None if the backend doesn't take the kernel."""
        import convpar
        from convpar.conformance import error_bounds

        kh, kw = self._weights.shape
        try:
            planned = convpar.plan(
                self._picture, self._weights, padding="same", boundary="symm", backend=backend.name
            )
        except convpar.Unsupported as e:
            row.refused.append(f"{title} ({kh} x {kw}): {e}")
            return None
        try:
            got = planned(self._picture, self._weights)
        except Exception as e:
            # Whatever a rung stumbles over, the others are still to be seen.
            row.wrong.append(f"{title} ({kh} x {kw}): it raised {type(e).__name__}: {e}")
            return None
        right = self._allowed(planned.problem, planned.plan.accuracy)
        wrong = error_bounds.mismatch(planned.problem, right, np.asarray(got)[None])
        if wrong is not None:
            row.wrong.append(f"{title} ({kh} x {kw}): {wrong}")
        row.difference = max(row.difference, float(np.abs(got - self._reference).max()))
        return lambda: planned(self._picture, self._weights)

    def _allowed(self, problem: Problem, contract: Any) -> Any:
        """What SciPy's result and the contract allow each element to be."""
        from convpar.conformance import error_bounds

        if contract not in self._expected:
            w = np.broadcast_to(self._weights, problem.w_shape)
            self._expected[contract] = error_bounds.expected(
                problem, contract, self._picture[None], w, None, exact=self._exact
            )
        return self._expected[contract]


def _times(calls: dict[int, Callable[[], object]], advance: Callable[[], None]) -> dict[int, float]:
    """The median time of each call, all in turn, so that a drift of the machine meets them alike."""
    from convpar import timing

    timer = timing.CpuTimer()
    samplers, rounds = {}, {}
    for place, call in calls.items():
        first = timer.sample(call)
        number = 1 if first > timing.LEAST_SAMPLE else timing.calibrate(timer, call)[0]
        samplers[place] = functools.partial(timer.sample, call, number)
        rounds[place] = 1 if first > SLOW else 5
        advance()
    taken = timing.interleave(samplers, rounds)
    return {place: timing.Times(samples).median for place, samples in taken.items()}


@contextmanager
def _progress(steps: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr while the work goes on, if that is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    screen = console(stderr=True)
    columns = (TextColumn("filtering"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task("filtering", total=steps)
        yield lambda: bar.advance(task)


# -- telling


def _table(rows: Sequence[Row]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    scipy, naive = rows[0], next((r for r in rows if r.name == "cpu-naive"), None)
    table = Table(header_style="bold")
    table.add_column("rung")
    for title in ("time", "x naive", "x SciPy", "largest difference"):
        table.add_column(title, justify="right")
    table.add_column("as SciPy")
    for row in rows:
        if row is scipy:
            verdict = Text("")
        elif row.wrong:
            verdict = Text("no", style="bold red")
        elif not row.seconds:
            verdict = Text("takes none", style="yellow")
        else:
            verdict = Text("yes" if not row.refused else f"yes, {len(row.seconds)} kernels", style="green")
        table.add_row(
            Text(row.label, style="" if row is scipy else "bold"),
            _duration(sum(row.seconds.values())) if row.seconds else "",
            _ratio(row.speed(naive)) if naive else "",
            _ratio(row.speed(scipy)),
            "" if row is scipy or not row.seconds else f"{row.difference:.2g}",
            verdict,
        )
    return table


def _notes(rows: Sequence[Row], missing: Sequence[Backend]) -> Iterator[str]:
    yield "x naive, x SciPy: how many times as fast, over the kernels that both take"
    yield "largest difference: to SciPy in float64, in grey levels of 255"
    yield "as SciPy: every element within the rung's bound; whole-number kernels exactly, if sums are float32"
    if any(row.emulated for row in rows):
        yield "emulated: GPU kernels run on the CPU, to be checked; their times say nothing about a GPU"
    for row in rows:
        for wrong in row.wrong:
            yield f"{row.name} is wrong: {wrong}"
        for refused in row.refused:
            yield f"{row.name} left out: {refused}"
    for reason, names in unavailable(missing).items():
        yield f"not run: {', '.join(names)}: {reason}"
    hint = _emulation_hint(missing)
    if hint:
        yield hint


def _emulation_hint(missing: Sequence[Backend]) -> str:
    if not any(backend.capabilities.device == "gpu" for backend in missing):
        return ""
    if os.environ.get(executors.VARIABLE, "").strip():
        return ""
    return f"to see the GPU rungs without a GPU, slowly: {executors.VARIABLE}=emulate convpar demo"


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _ratio(ratio: float | None) -> str:
    if ratio is None:
        return ""
    return f"{ratio:.2g}" if ratio < 10 else f"{ratio:.0f}"


# -- drawing

INK, QUIET, LINE, ACCENT, PAPER = "#1d2430", "#66707f", "#d9dee5", "#2f6db5", "#ffffff"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")  # fmt: skip


def draw(
    picture: Array, shown: Sequence[Filter], panels: Sequence[Array], rows: Sequence[Row], form: str
) -> bytes:
    """The photograph, what became of it, and the time of each rung, as a file of format `form`.

    Parameters
    ----------
    picture : ndarray, shape (3, H, W)
        0 to 255.
    shown : sequence of Filter
    panels : sequence of ndarray
        For each filter an RGB picture (H, W, 3), 0 to 1.
    rows : sequence of Row
        SciPy first.
    form : str
        "png", "pdf" or "svg".
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    timed = [row for row in rows if row.seconds]
    pictures = [("Photograph", f"{picture.shape[2]} × {picture.shape[1]} pixels", _colours(picture))]
    pictures += [(f.title, f.subtitle, panel) for f, panel in zip(shown, panels, strict=True)]
    # Inches, from the top down; the bars grow with the rungs.
    wide, margin, gap = 12.0, 0.45, 0.18
    width = (wide - 2 * margin - gap * (len(pictures) - 1)) / len(pictures)
    height = width * picture.shape[1] / picture.shape[2]
    top, caption, heading, dots, axis, foot = 1.02, 0.95, 0.14, 0.27 * len(timed), 0.42, 0.42
    high = top + height + caption + heading + dots + axis + foot
    style: dict[Any, Any] = {"font.sans-serif": ["DejaVu Sans"], "text.color": INK, "svg.hashsalt": "convpar"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(wide, high), dpi=160, facecolor=PAPER)
        write = functools.partial(_write, figure, wide, high)
        kernels_run = NUMBERS[sum(len(f.weights) for f in shown)]
        count = len(timed) - 1
        backends = f"{NUMBERS[count] if count < len(NUMBERS) else count} backend{'s' if count != 1 else ''}"
        write(
            margin,
            0.42,
            f"One photograph, {kernels_run} kernels, {backends}, one answer",
            size=18,
            weight="bold",
        )
        write(
            margin,
            0.72,
            "Every element of every result is as close to SciPy’s as its backend promises.",
            size=10.5,
            color=QUIET,
        )
        for i, (title, subtitle, image) in enumerate(pictures):
            left = margin + i * (width + gap)
            axes = figure.add_axes((left / wide, 1 - (top + height) / high, width / wide, height / high))
            axes.imshow(image, interpolation="antialiased", aspect="auto")
            axes.set_axis_off()
            write(left, top + height + 0.24, title, size=11.5, weight="bold")
            write(left, top + height + 0.44, subtitle, size=8.8, color=QUIET)
        at = top + height + caption
        write(margin, at, "Time for all kernels on all three colours", size=11.5, weight="bold")
        indent = 0.088 * max(len(_label(row, timed[0])) for row in timed) + 0.15
        across = wide - 2 * margin - indent - 2.3
        axes = figure.add_axes(((margin + indent) / wide, (foot + axis) / high, across / wide, dots / high))
        _dots(axes, timed, indent)
        write(margin, high - 0.28, _footer(), size=7.8, color=QUIET)
        file = io.BytesIO()
        # No date: the same results make the same file.
        metadata: dict[str, Any] = {
            "png": {"Software": None},
            "pdf": {"CreationDate": None},
            "svg": {"Date": None},
        }
        figure.savefig(file, format=form, metadata=metadata[form])
    return file.getvalue()


def _write(figure: Any, wide: float, high: float, left: float, down: float, text: str, **style: Any) -> None:
    """Text with its baseline at `left` and `down` inches from the top left corner."""
    figure.text(left / wide, 1 - down / high, text, va="baseline", **style)


def _label(row: Row, scipy: Row) -> str:
    """The row's name, and how many kernels its time is of, unless of all."""
    taken, kernels = len(row.seconds), len(scipy.seconds)
    return row.label if taken == kernels else f"{row.label} ({taken} of {kernels} kernels)"


def _dots(axes: Any, rows: Sequence[Row], indent: float) -> None:
    """A dot for each time (a bar's length would mean nothing on a logarithmic scale), names `indent` inches left."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    scipy = rows[0]
    times = [sum(row.seconds.values()) for row in rows]
    least, most = min(times) / 1.6, max(times) * 1.25
    axes.set_xscale("log")
    axes.set_xlim(least, most)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_facecolor("none")
    for place, (row, seconds) in enumerate(zip(rows, times, strict=True)):
        colour = QUIET if row is scipy else ACCENT
        axes.plot(
            [least, seconds], [place, place], color=LINE, linewidth=1.2, solid_capstyle="butt", zorder=1
        )
        axes.plot(seconds, place, "o", color=colour, markersize=7.5, zorder=2)
        speed = row.speed(scipy)
        beside = "" if row is scipy or speed is None else f"    {_ratio(speed)} × as fast as SciPy"
        axes.annotate(
            f"{_duration(seconds)}{beside}", (seconds, place), (9, 0), textcoords="offset points",
            va="center_baseline", size=9, annotation_clip=False,
        )  # fmt: skip
        axes.annotate(
            _label(row, scipy), (0, place), (-72 * indent, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
            va="center_baseline", size=9.5, annotation_clip=False,
        )  # fmt: skip
    axes.set_yticks([])
    axes.xaxis.set_major_locator(LogLocator(10, (1, 2, 5) if most / least < 300 else (1,)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _duration(seconds)))
    axes.tick_params(axis="x", length=3, color=LINE, labelsize=8.5, labelcolor=QUIET, pad=4)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set(color=LINE, linewidth=0.8)


def _footer() -> str:
    import scipy

    import convpar
    from convpar.info import processor

    return (
        f"convpar {convpar.__version__}, SciPy {scipy.__version__}, {processor()}, "
        f"{convpar.get_num_threads()} threads, float32. Photograph: Grace Hopper, US Navy, public domain."
    )
