"""The rung ``cpu-fft``: rows in the frequency domain, where the sums over the filter's rows are taken.

Rows are cut into overlapping strips of `size` samples (overlap-save); spectra of the filter's rows are made once a run.
An output's spectrum is the sum over channels and filter rows of products of spectra (Mathieu, Henaff and LeCun 2013 sum
so over channels, with spectra of whole planes): 2 KH real products a sample and channel in place of KH * KW, and no
transform along the columns, so that tall filters cost no halo.

It builds on cpu-simd: six tenths of its time at 31 x 31, a quarter at 63 x 63 (docs/cpu-speed.md, Steps).

Where a transform would lose what the contract promises, a tile is summed directly: see `_Filters.allow`.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from convpar import threads as _threads
from convpar.backend import (
    CONTRACT_VERSION,
    Backend,
    Capabilities,
    Config,
    Device,
    ErrorContract,
    Layout,
    Layouts,
    Option,
    Plan,
    Refusal,
    Threshold,
    check_workspace,
    resolve_config,
)
from convpar.boundary import source_index
from convpar.problem import Problem, is_integer

from . import transforms
from .compiled import FOLDER, engine, isa, missing_level
from .rungs import rungs

Array = npt.NDArray[Any]

FACTOR = 8.0
"""Of the normwise bound; docs/semantics.md says what was measured."""

BRIGHTER = 2.0
"""A tile's largest sample may be so many times the largest that is known to meet the filter's largest tap."""

SERIAL_SECONDS = 1e-3
"""Below this estimate, starting threads costs more than it saves."""

_TILE_BYTES = 7 * 2**20
"""Of a tile's samples and spectra: whole rows of most images, few calls, and yet in the last cache."""
_ROWS = 64
_ITEMS = 16
_SOME_ROWS = 8
_LONGEST = 2048
_LARGEST_FILTERS = 24 * 2**20
_LARGEST_TILE = 16 * 2**20
_LINE = 64

# Seconds on one thread, float32: of a sample's two transforms and moves, of a product of spectra, and of a tile's calls,
# which keep other threads from theirs.
_PER_SAMPLE = 2.0e-9
_PER_PRODUCT = 1.5e-11
_PER_TILE = 800e-6
_PER_RUN = 100e-6


class Box(NamedTuple):
    """A rectangle of outputs: images, groups, rows and columns, each from the first to before the last."""

    n: tuple[int, int]
    g: tuple[int, int]
    rows: tuple[int, int]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(images, groups, rows, columns)."""
        a, b, c, d = (last - first for first, last in self)
        return a, b, c, d


class FftPlan:
    """A `convpar.backend.Plan` on rows' spectra."""

    def __init__(
        self, problem: Problem, layouts: Layouts, config: Mapping[str, Any], error: ErrorContract
    ) -> None:
        p = self.problem = problem
        self.accuracy = error
        self._isa = isa()
        self._cg, self._ocg = p.c // p.groups, p.oc // p.groups
        self._in_place = p.x_dtype == p.sum_dtype and layouts.x.aligned and not layouts.x.swapped
        self._item = p.sum_dtype.itemsize
        self.size, rows, columns = _sizes(p, config["tile"])
        self._strips = -(-p.ow // columns)
        # Zeros on one side of a row may stand for those on the other too: the transform goes round.
        self._left = p.padding[2] if self.size < p.ow + p.extent[1] - 1 and self._strips == 1 else 0
        # Strips of one width, so that they lie evenly.
        self._step = -(-p.ow // max(self._strips, 1))
        self._rows = max(min(rows, p.oh), 1)
        each = (
            self._item * self.size * (self._cg * (3 * self._rows + p.extent[0]) + self._ocg * 3 * self._rows)
        )
        # Strips of one image, or else images one strip wide. An image's rows can be cut where there are too few tiles.
        several = self._strips > 1
        units, items = (self._strips, 1) if several else (p.n * p.groups, _ITEMS)
        batch = config["batch"] or _batch(units, _TILE_BYTES // max(each, 1), items)
        self.config: Config = {"tile": (rows, columns), "batch": batch}
        self._b_strips = min(batch, self._strips) if several else 1
        self._b_groups = 1 if several else min(batch, p.groups)
        self._b_images = 1 if several else max(min(batch // p.groups, p.n), 1)
        self._spans = self._cut()
        self._items = math.prod(map(len, self._spans)) if p.outputs else 0
        self._bins = self.size // 2 + 1
        self._seen: set[str] = set()
        self._inner: dict[Any, Any] = {}
        self.cost: float | None = self._estimate()
        serial = self.cost < SERIAL_SECONDS
        self._worthwhile = not serial
        self._most = _threads.within_workspace(self._shared_bytes(), self._each_bytes())
        self.launch: Mapping[str, Any] = {
            "instruction set": engine().compiled_for("simd", self._isa),
            "transform": f"{self.size} samples, {self._step} columns of outputs",
            "tile": f"{self._rows} rows of {self._b_strips} strips, {self._b_groups} groups, {self._b_images} images",
            "work items": self._items,
            "threads": _threads.told(serial, self._most),
        }
        share = max(self.cost - _PER_RUN, 1e-9) / max(p.macs, 1)
        self.thresholds = (
            Threshold("oh", rows + 1, "second row tile"),
            Threshold("ow", columns + 1, "second strip"),
            Threshold("macs", math.ceil((SERIAL_SECONDS - _PER_RUN) / share), "parallel"),
        )
        self.paths = self._declare()

    # -- what is decided

    def _cut(self) -> tuple[range, range, range, range]:
        """Where tiles begin along images, groups and columns, and segments of rows that one thread goes down.

        They are the same whatever the number of threads, so that bits don't depend on it.
        """
        p = self.problem
        images, groups = range(0, p.n, self._b_images), range(0, p.groups, self._b_groups)
        columns = range(0, p.ow, self._b_strips * self._step) if p.ow else range(0)
        # A thread that begins in the middle of an image transforms some rows that another did before.
        wanted = -(-_ITEMS // max(len(images) * len(groups) * len(columns), 1))
        segment = max(-(-p.oh // wanted), 2 * p.extent[0], 2 * self._rows)
        return images, groups, columns, range(0, p.oh, -(-segment // self._rows) * self._rows)

    def item(self, k: int) -> Box:
        """The outputs of a work item; the next one, as a rule, lies below."""
        p = self.problem
        spans = []
        for starts, end in zip(reversed(self._spans), (p.oh, p.ow, p.groups, p.n), strict=True):
            k, place = divmod(k, len(starts))
            spans.append((starts[place], min(starts[place] + starts.step, end)))
        rows, columns, groups, images = spans
        return Box(images, groups, rows, columns)

    def _estimate(self) -> float:
        p = self.problem
        # A row takes some time in itself.
        width = self._strips * (self.size + 24) * self._item / 4
        images, groups, columns, _ = map(len, self._spans)
        through = p.n * width * (p.c * p.h + p.oc * p.oh)
        products = p.n * width * p.oc * p.oh * self._cg * 2 * p.kh
        tiles = images * groups * columns * -(-p.oh // self._rows)
        return (
            _PER_RUN
            + _PER_TILE * tiles
            + _PER_SAMPLE * (through + self._filter_bytes() / 4)
            + _PER_PRODUCT * products
        )

    def _declare(self) -> tuple[str, ...]:
        p = self.problem
        if not self._items:
            return ()
        named = {
            "transformed": p.terms > 0,
            "direct": True,
            "read in place": bool(
                self._in_place and p.terms and not any(p.padding) and self._read(self.item(0)) <= p.w
            ),
            "border": any(p.padding),
            "second row tile": p.oh > self._rows,
            "second strip": self._strips > 1,
            "serial": True,
            "parallel": self._items > 1,
        }
        return tuple(name for name, possible in named.items() if possible)

    # -- memory

    def _filter_bytes(self) -> int:
        p = self.problem
        return p.oc * self._cg * p.kh * 2 * self._bins * 2 * self._item

    def _read(self, box: Box) -> int:
        """Columns of the padded image under the strips of a box."""
        return (-(-box.shape[3] // self._step) - 1) * self._step + self.size

    def _tile_bytes(self) -> tuple[int, int, int]:
        """Of each thread: gathered samples, sums or spectra of outputs, and what transforms allocate."""
        if not self._items:
            return 0, 0, 0
        box = self.item(0)
        a, b, _, width = box.shape
        e = self.problem.extent
        rows, strips = self._rows, -(-width // self._step)
        gathered = b * self._cg * a * max(rows * self._read(box), (rows + e[0] - 1) * (width + e[1] - 1))
        spectrum = a * b * strips * self._bins * 2
        out = self._ocg * rows * max(spectrum, a * b * width)
        kept = self._cg * (2 * rows + e[0]) * spectrum + self._ocg * rows * spectrum
        return tuple(-(-count * self._item // _LINE) * _LINE for count in (gathered, out, kept))  # type: ignore[return-value]

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Spectra of the filters, and each thread's samples and spectra; what SciPy allocates is counted with them."""
        return self._shared_bytes() + self._threads(num_threads) * self._each_bytes()

    def _shared_bytes(self) -> int:
        return _LINE + -(-self._filter_bytes() // _LINE) * _LINE

    def _each_bytes(self) -> int:
        """Of a thread that makes spectra of filters, and then sums."""
        return max(sum(self._tile_bytes()) + self._direct_bytes(), self._making_bytes())

    def _making_bytes(self) -> int:
        """Of a thread that makes the filters' spectra: taps, their magnitudes, padded and spread rows, and spectra."""
        rows = min(self.chunk, self.problem.oc) * self._cg * self.problem.kh
        return rows * self._item * 2 * (self.problem.kw + self.size + self._bins)

    def _direct_bytes(self) -> int:
        """Of the packed filters of a tile that is summed directly."""
        p = self.problem
        return self._b_groups * self._ocg * self._cg * p.kh * p.kw * self._item

    @property
    def chunk(self) -> int:
        """Output channels whose filters are transformed together."""
        return max(_TILE_BYTES // 8 // max(self._cg * self.problem.kh * self.size * 16, 1), 1)

    def _threads(self, num_threads: int | None) -> int:
        if num_threads is None:
            num_threads = min(_threads.get_num_threads(), self._most) if self._worthwhile else 1
        return max(min(num_threads, self._items), 1)

    # -- a run

    def run(
        self,
        x: Any,
        w: Any,
        bias: Any,
        out: Any,
        *,
        workspace: Any = None,
        num_threads: int | None = None,
        stream: Any = None,
    ) -> None:
        """Fill `out`; `stream` plays no part."""
        if not self._items:
            return
        team = self._threads(num_threads)
        packed = -(-self._filter_bytes() // _LINE) * _LINE
        each = sum(self._tile_bytes()[:2])
        if workspace is None:
            # The rest of what is counted is SciPy's.
            workspace = np.empty(_LINE + packed + team * each, np.uint8)
        else:
            check_workspace(workspace, self.workspace_bytes(num_threads))
        room = workspace[-workspace.ctypes.data % _LINE :]
        filters = _Filters(self, w, room[:packed])
        runs = [
            _Run(self, filters, x, w, bias, out, room[packed + k * each : packed + (k + 1) * each])
            for k in range(team)
        ]
        few = max(min(team, filters.parts), 1)
        _together(few, lambda k: filters.transform(_share(k, few, filters.parts)))
        _together(team, lambda k: runs[k].compute(_share(k, team, self._items)))
        self._seen.add("parallel" if team > 1 else "serial")
        for run in runs:
            self._seen |= run.paths
        bad = min((run.bad for run in runs if run.bad is not None), default=None)
        if bad is not None:
            raise OverflowError(
                f"the result doesn't fit {self.problem.out_dtype}: the first place is {bad} (n, oc, row, column)"
            )

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run."""
        return frozenset(self._seen) & frozenset(self.paths)

    def direct(self, x: Array, w: Array, out: Array) -> None:
        """Direct sums: `x` (N, G*C/groups, rows, columns) without a border, `w` the filters of G groups."""
        p = self.problem
        layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.of(out))
        groups = w.shape[0] // self._ocg if self._ocg else 1

        def problem() -> Problem:
            return Problem.of(
                x.shape, w.shape, p.sum_dtype, p.w_dtype, dilation=p.dilation, groups=groups, flip=p.flip,
                dtype=p.sum_dtype,
            )  # fmt: skip

        self._of_simd(("direct", x.shape, layouts), problem, layouts)._task.run(x, w, None, out, None, 1)

    def convert(self, sums: Array, out: Array) -> int:
        """`sums` as integers in `out`, both (N, OC, rows, columns): a filter of one tap that is 1."""
        p = self.problem
        one = np.ones((sums.shape[1], 1, 1, 1), p.sum_dtype)
        layouts = Layouts(Layout.of(sums), Layout.of(one), None, Layout.of(out))

        def problem() -> Problem:
            return Problem.of(
                sums.shape,
                one.shape,
                p.sum_dtype,
                groups=sums.shape[1],
                dtype=p.out_dtype,
                overflow=p.overflow,
            )

        plan = self._of_simd(("convert", sums.shape, layouts), problem, layouts)
        return int(plan._task.run(sums, one, None, out, None, 1))

    def _of_simd(self, key: Any, problem: Callable[[], Problem], layouts: Layouts) -> Any:
        found = self._inner.get(key)
        if found is None:
            found = _simd().plan(problem(), layouts, Device(), None)
            self._inner[key] = found
        return found


@functools.cache
def _simd() -> Any:
    return next(rung for rung in rungs() if rung.row == "simd")


def _share(k: int, team: int, count: int) -> range:
    """Thread `k`'s share of `count` items: neighbours, so that spectra of rows serve two of them."""
    return range(k * count // team, (k + 1) * count // team)


def _together(team: int, work: Callable[[int], None]) -> None:
    """``work(k)`` by `team` threads that end with it: none is left for a fork to break."""
    errors: list[BaseException] = []

    def quietly(k: int) -> None:
        try:
            with np.errstate(all="ignore"):
                work(k)
        except BaseException as e:
            errors.append(e)

    def elsewhere(k: int) -> None:
        _threads.leave_processor()
        quietly(k)

    others: list[threading.Thread] = []
    try:
        for k in range(1, team):
            thread = threading.Thread(target=elsewhere, args=(k,))
            thread.start()
            others.append(thread)
    except RuntimeError:
        # The system has no more threads: the caller does their shares.
        for k in range(len(others) + 1, team):
            quietly(k)
    finally:
        quietly(0)
        for thread in others:
            _finish(thread)
    if errors:
        raise errors[0]


def _finish(thread: threading.Thread) -> None:
    """Wait for `thread`, which writes to the caller's array, whatever interrupts the waiting."""
    while thread.is_alive():
        try:
            thread.join()
        except KeyboardInterrupt:
            _finish(thread)
            raise


class _Filters:
    """The filters' spectra, and when they may be used."""

    def __init__(self, plan: FftPlan, w: Array, room: Array) -> None:
        p = plan.problem
        self._plan, self._w = plan, w
        self._chunk = plan.chunk
        self.parts = -(-p.oc // self._chunk) if p.terms else 0
        shape = (p.groups, plan._ocg, plan._cg, p.kh, 2, plan._bins)
        kind = np.dtype(f"c{2 * plan._item}")
        self.packed = room[: plan._filter_bytes()].view(kind).reshape(shape)
        self._largest = np.zeros(p.oc)
        self._sum = np.zeros(p.oc)
        # Taps, from the first to the last, that are some filter's largest.
        self._places = np.zeros((p.oc, plan._cg, 2), np.int64)

    def transform(self, parts: range) -> None:
        """Make the spectra of some output channels' filters."""
        for part in parts:
            self._transform(slice(part * self._chunk, (part + 1) * self._chunk))

    def _transform(self, chosen: slice) -> None:
        plan = self._plan
        p = plan.problem
        w = self._w[chosen].astype(p.sum_dtype)
        if p.flip:
            w = w[:, :, ::-1, ::-1]
        size = np.abs(w)
        self._largest[chosen] = size.max(axis=(1, 2, 3))
        self._sum[chosen] = size.sum(axis=(1, 2, 3), dtype=np.float64)
        flat = size.reshape(*size.shape[:2], -1).argmax(axis=2)
        self._places[chosen] = np.stack(np.divmod(flat, p.kw), axis=-1)
        if p.dilation[1] > 1 or plan._left:
            spread = np.zeros((*w.shape[:3], plan.size), w.dtype)
            spread[..., (np.arange(p.kw) * p.dilation[1] - plan._left) % plan.size] = w
            w = spread
        spectra = transforms.spectra(w, plan.size)
        both = self.packed.reshape(p.oc, *self.packed.shape[2:])[chosen]
        both.real[..., 0, :] = both.imag[..., 0, :] = spectra.real
        both.real[..., 1, :] = both.imag[..., 1, :] = spectra.imag

    @functools.cached_property
    def _range(self) -> tuple[float, float] | None:
        """Magnitudes of samples, zero aside, whose products neither overflow nor lose bits; None if spectra overflow."""
        info = np.finfo(self._plan.problem.sum_dtype)
        taps = self._largest[self._largest > 0]
        total = float(self._sum.max(initial=0))
        if not total < info.max / 2:
            return None
        high = float(info.max) / 4 / max(total, 1) / self._plan.size**2
        if not taps.size:
            return 0, high
        faint = float(taps.min())
        low = 128 * float(info.tiny)
        if faint < low:
            return math.inf, 0
        return low / min(faint, 1), high

    @functools.cached_property
    def seen(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows and columns of the padded image, from the first to before the last, where every sample meets the
        largest tap of every filter."""
        p = self._plan.problem
        places = self._places.reshape(-1, 2) * p.dilation
        first, last = places.max(axis=0), places.min(axis=0)
        return (int(first[0]), int(last[0]) + p.oh), (int(first[1]), int(last[1]) + p.ow)

    def allow(self, largest: Array, seen: Array) -> bool:
        """Whether outputs may be had through spectra.

        Parameters
        ----------
        largest : ndarray
            For each channel and image the largest magnitude among samples of a tile, NaN if there is one.
        seen : ndarray
            The same among those of them that meet the largest tap of every filter.

        The error of a transform follows the largest sample, whichever taps that meets, and the contract the largest
        ``conv(|x|, |w|)`` of the plane: at least `seen` times the largest tap. So a sample near the edge that is much
        brighter than the rest isn't for spectra, nor is one that isn't finite, nor magnitudes whose products would
        overflow, or lose bits as subnormals.
        """
        if not (largest <= BRIGHTER * seen).all():
            return False
        if self._range is None:
            return False
        low, high = self._range
        return bool(((largest >= low) & (largest <= high) | (largest == 0)).all())


@dataclass
class _Rows:
    """Rows of the padded image that a thread has transformed."""

    first: int
    last: int
    spectra: Array  # (groups, C/groups, rows, images, strips, bins), or of one row for all
    addresses: Array  # (groups, C/groups, rows)
    largest: Array  # (images, groups * C/groups)
    seen: Array


class _Run:
    """One thread's part of a run: its memory, and what it has to tell."""

    def __init__(
        self,
        plan: FftPlan,
        filters: _Filters,
        x: Array,
        w: Array,
        bias: Array | None,
        out: Array,
        room: Array,
    ) -> None:
        self._plan, self._filters, self._x, self._w, self._out = plan, filters, x, w, out
        p = self._p = plan.problem
        with np.errstate(all="ignore"):
            self._bias = None if bias is None else bias.astype(p.sum_dtype)
        gathered = plan._tile_bytes()[0]
        self._samples = room[:gathered].view(p.sum_dtype)
        self._sums = room[gathered:]
        self._fill: dict[Any, Array] = {}
        self.paths: set[str] = set()
        self.bad: tuple[int, ...] | None = None

    def compute(self, share: range) -> None:
        """All outputs of work items, tile by tile downwards; spectra of rows serve several tiles."""
        p, plan = self._p, self._plan
        kept: list[_Rows] = []
        before: Box | None = None
        for k in share:
            item = plan.item(k)
            if before is None or before._replace(rows=item.rows) != item:
                kept = []
            before = item
            for first in range(*item.rows, plan._rows):
                box = item._replace(rows=(first, min(first + plan._rows, item.rows[1])))
                sums = None
                if p.terms:
                    kept = [rows for rows in kept if rows.last > first]
                    last = box.rows[1] + p.extent[0] - 1
                    while not kept or kept[-1].last < last:
                        kept.append(self._transformed(box, kept[-1].last if kept else first))
                    if self._allowed(kept):
                        sums = self._from_spectra(box, kept)
                self._store(box, self._direct(box) if sums is None else sums)
                if first > 0:
                    self.paths.add("second row tile")
            if item.columns[1] > plan._step:
                self.paths.add("second strip")

    def _allowed(self, kept: list[_Rows]) -> bool:
        largest = functools.reduce(np.maximum, (rows.largest for rows in kept))
        seen = functools.reduce(np.fmax, (rows.seen for rows in kept))
        return self._filters.allow(largest, seen)

    def _from_spectra(self, box: Box, kept: list[_Rows]) -> Array:
        """Sums (images, groups * OC/groups, rows, strips, size) of a tile."""
        p, plan = self._p, self._plan
        a, b, rows, width = box.shape
        strips = -(-width // plan._step)
        first, last = box.rows[0], box.rows[1] + p.extent[0] - 1
        addresses = np.concatenate(
            [part.addresses[:, :, max(first - part.first, 0) : last - part.first] for part in kept], axis=2
        )
        kind = self._filters.packed.dtype
        shape = (b, plan._ocg, rows, a * strips, plan._bins)
        y = self._sums[: math.prod(shape) * kind.itemsize].view(kind).reshape(shape)
        filters = self._filters.packed[box.g[0] : box.g[1]]
        engine().sum_spectra(addresses, filters, y, p.dilation[0], plan._isa)
        sums = transforms.rows(y, plan.size).reshape(b * plan._ocg, rows, a, strips, plan.size)
        self.paths.add("transformed")
        return sums.transpose(2, 0, 1, 3, 4)

    def _fill_spectra(self, strips: int) -> Array:
        """`strips` spectra of the fill value."""
        found = self._fill.get(strips)
        if found is None:
            rows = np.full((strips, self._plan.size), self._p.fillvalue, self._p.sum_dtype)
            found = self._fill[strips] = transforms.spectra(rows, self._plan.size)
        return found

    def _direct(self, box: Box) -> Array:
        """Direct sums (images, groups * OC/groups, rows, columns) of a tile."""
        p, plan = self._p, self._plan
        a, b, rows, width = box.shape
        shape = (a, b * plan._cg, rows + p.extent[0] - 1, width + p.extent[1] - 1)
        samples = self._samples[: math.prod(shape)].reshape(shape)
        self._gather(samples, box, box.rows[0], box.columns[0])
        shape = (a, b * plan._ocg, rows, width)
        sums = self._sums[: math.prod(shape) * plan._item].view(p.sum_dtype).reshape(shape)
        plan.direct(samples, self._w[box.g[0] * plan._ocg : box.g[1] * plan._ocg], sums)
        self.paths.add("direct")
        return sums

    def _store(self, box: Box, sums: Array) -> None:
        """Add the bias to sums, whole or by strips, and convert them into the output."""
        p, plan = self._p, self._plan
        channels = slice(box.g[0] * plan._ocg, box.g[1] * plan._ocg)
        if self._bias is not None:
            sums += self._bias[channels].reshape(-1, *(1,) * (sums.ndim - 2))
        out = self._out[box.n[0] : box.n[1], channels, slice(*box.rows), slice(*box.columns)]
        parts = [(0, sums)]
        if sums.ndim == 5:
            parts = [(k * plan._step, sums[:, :, :, k, : plan._step]) for k in range(sums.shape[3])]
        for start, part in parts:
            to = out[..., start : start + part.shape[3]]
            part = part[..., : to.shape[3]]
            if not is_integer(p.out_dtype):
                np.copyto(to, part, casting="unsafe")
                continue
            bad = plan.convert(part, to)
            if bad >= 0:
                inside = np.unravel_index(bad, to.shape)
                corner = (box.n[0], channels.start, box.rows[0], box.columns[0] + start)
                place = tuple(int(i) + k for i, k in zip(inside, corner, strict=True))
                self.bad = place if self.bad is None else min(self.bad, place)

    def _transformed(self, box: Box, first: int) -> _Rows:
        """Spectra of rows of the padded image from `first` on, as far as they are taken together."""
        p, plan = self._p, self._plan
        top = p.padding[0]
        a, b, _, columns = box.shape
        strips, width = -(-columns // plan._step), plan._read(box)
        # Which rows these are mustn't depend on where a thread begins: neither do `largest` and `seen` then.
        last = min((first // plan._rows + 1) * plan._rows, p.h + p.padding[0] + p.padding[1])
        shape = (a, b * plan._cg)
        # Where rows begin or cease to hold nothing but the fill value.
        for edge in (top, top + p.h) if p.boundary == "fill" else ():
            if first < edge:
                last = min(last, edge)
        if p.boundary == "fill" and not top <= first < top + p.h:
            self.paths.add("border")
            fill = np.full(shape, abs(p.fillvalue), p.sum_dtype)
            met = self._met(box, first, last)
            spectra = self._fill_spectra(a * strips)
            addresses = np.full((b, plan._cg, last - first), spectra.ctypes.data)
            return _Rows(
                first,
                last,
                spectra,
                addresses,
                fill,
                fill if met is not None else np.full_like(fill, -np.inf),
            )
        samples = self._samples_of(box, first, last, width)
        largest = _largest(samples)
        met = self._met(box, first, last)
        if met is None:
            seen = np.full(shape, -np.inf, p.sum_dtype)
        elif met == ((0, last - first), (0, width)):
            seen = largest
        else:
            part = samples[:, :, slice(*met[0]), slice(*met[1])]
            # Some rows tell enough as a rule.
            seen = _largest(part[:, :, :: -(-part.shape[2] // _SOME_ROWS)])
            if not (largest <= BRIGHTER * seen).all():
                seen = _largest(part)
        image, channel, row, column = samples.strides
        cut = np.lib.stride_tricks.as_strided(
            samples,
            (b, plan._cg, last - first, a, strips, plan.size),
            (plan._cg * channel, channel, row, image, plan._step * column, column),
        )
        spectra = transforms.spectra(cut, plan.size)
        places = np.full(spectra.shape[:3], spectra.ctypes.data)
        for axis, step in zip(np.ix_(*map(np.arange, spectra.shape[:3])), spectra.strides, strict=False):
            places += axis * step
        return _Rows(first, last, spectra, places, largest, seen)

    def _samples_of(self, box: Box, first: int, last: int, width: int) -> Array:
        """Rows of the padded image, `width` columns of them, (images, channels, rows, columns) in the sum's type."""
        p, plan = self._p, self._plan
        start = box.columns[0] + plan._left
        top, left = first - p.padding[0], start - p.padding[2]
        if plan._in_place and min(top, left) >= 0 and top + last - first <= p.h and left + width <= p.w:
            self.paths.add("read in place")
            channels = slice(box.g[0] * plan._cg, box.g[1] * plan._cg)
            return self._x[slice(*box.n), channels, top : top + last - first, left : left + width]
        a, b, _, _ = box.shape
        shape = (a, b * plan._cg, last - first, width)
        samples = self._samples[: math.prod(shape)].reshape(shape)
        self._gather(samples, box, first, start)
        return samples

    def _met(self, box: Box, first: int, last: int) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Gathered rows and columns that meet the largest tap of every filter."""
        p, plan = self._p, self._plan
        rows, columns = self._filters.seen
        start = box.columns[0] + plan._left
        end = min(start + plan._read(box), p.w + p.padding[2] + p.padding[3])
        r = max(rows[0], first) - first, min(rows[1], last) - first
        c = max(columns[0], start) - start, min(columns[1], end) - start
        return (r, c) if r[0] < r[1] and c[0] < c[1] else None

    def _gather(self, to: Array, box: Box, row: int, column: int) -> None:
        """Samples of the padded image from (`row`, `column`) on, in the sum's type, `to` (images, channels, rows, columns)."""
        p, plan = self._p, self._plan
        x = self._x[box.n[0] : box.n[1], box.g[0] * plan._cg : box.g[1] * plan._cg]
        row, column = row - p.padding[0], column - p.padding[2]
        for rows, from_rows in _pieces(row, row + to.shape[2], p.h, p.boundary):
            for columns, from_columns in _pieces(column, column + to.shape[3], p.w, p.boundary):
                part = to[:, :, rows, columns]
                if from_rows is None or from_columns is None:
                    part[...] = p.fillvalue
                elif isinstance(from_rows, slice):
                    np.copyto(part, x[:, :, from_rows][:, :, :, from_columns], casting="unsafe")
                elif isinstance(from_columns, slice):
                    np.copyto(part, x[:, :, from_rows, from_columns], casting="unsafe")
                else:
                    np.copyto(part, x[:, :, from_rows[:, None], from_columns], casting="unsafe")
        if any(p.padding) and (
            row < 0 or column < 0 or row + to.shape[2] > p.h or column + to.shape[3] > p.w
        ):
            self.paths.add("border")


def _largest(samples: Array) -> Array:
    """The largest magnitude of each plane of (images, channels, rows, columns), NaN if there is one."""
    if samples.flags.c_contiguous:
        samples = samples.reshape(*samples.shape[:2], 1, -1)
    most: Array = samples.max(axis=3).max(axis=2)
    least: Array = samples.min(axis=3).min(axis=2)
    return np.maximum(most, -least)


def _pieces(first: int, last: int, n: int, mode: str) -> list[tuple[slice, Any]]:
    """Positions of an axis of `n` samples in up to three pieces: where each goes, and the samples it takes.

    These are a slice inside the image, indices beside it, or None for the fill value.
    """
    found: list[tuple[slice, Any]] = []
    for start, end in ((first, min(last, 0)), (max(first, 0), min(last, n)), (max(first, n), last)):
        if start >= end:
            continue
        source: Any = None
        if 0 <= start < n:
            source = slice(start, end)
        elif mode != "fill":
            source = source_index(np.arange(start, end), n, mode)
        found.append((slice(start - first, end - first), source))
    return found


def _batch(units: int, most: int, least_items: int) -> int:
    """Units of a tile: at most `most`, for `least_items` items if there are as many, and all tiles alike."""
    items = max(-(-units // max(most, 1)), min(least_items, units), 1)
    return max(-(-units // items), 1)


def _sizes(p: Problem, tile: tuple[int, int] | None) -> tuple[int, int, int]:
    """Samples of a transform, and rows and columns of outputs of a tile."""
    reach = p.extent[1] - 1
    whole = transforms.smooth(max(p.ow, 1) + reach)
    if p.boundary == "fill" and p.fillvalue == 0:
        whole = min(whole, transforms.smooth(max(p.w + max(p.padding[2:]), p.ow, p.extent[1])))
    if tile is not None:
        return (whole if tile[1] >= p.ow else transforms.smooth(tile[1] + reach)), *tile
    size, columns = whole, max(p.ow, 1)
    if whole > max(_LONGEST, 2 * reach):
        lowest = math.inf
        tried = transforms.smooth(2 * reach + 2)
        while tried < min(whole, max(_LONGEST, 4 * reach)):
            # A strip takes some time in itself, and sizes that are no power of two a little more.
            each = (tried + 24) * (20 + math.log2(tried)) * (1.0 if tried & (tried - 1) == 0 else 1.06)
            cost = -(-p.ow // (tried - reach)) * each
            if cost < lowest:
                size, columns, lowest = tried, tried - reach, cost
            tried = transforms.smooth(tried + 1)
    row = max((p.c + p.oc) // p.groups * size * p.sum_dtype.itemsize * 3, 1)
    return size, max(min(_TILE_BYTES // row, _ROWS), 8), columns


OPTIONS: Mapping[str, Option] = {
    "tile": Option("rows of outputs of a tile, and columns that one transform gives", kind="pair"),
    "batch": Option("strips of a tile, or planes of images that are one strip wide", kind="int"),
}


class Fft:
    """The backend ``cpu-fft``."""

    contract = CONTRACT_VERSION
    name = "cpu-fft"
    summary = "rows in the frequency domain, where the sums over the filter's rows are taken; SciPy's FFT"
    builds_on = "cpu-simd"
    options: Mapping[str, Option] = OPTIONS
    capabilities = Capabilities(
        sum_dtypes=("float32", "float64"), strided=False, error=ErrorContract("normwise", FACTOR)
    )

    def unavailable(self) -> str | None:
        """It needs the compiled engine, an ISA level that the engine has, and SciPy."""
        return missing_level() or transforms.missing()

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """A plan, or why the rung can't serve `problem`."""
        options = resolve_config(self.options, config, self.name)
        if device.kind != "cpu":
            return Refusal(f"the arrays live on {device}; it runs on the CPU and downloads nothing unasked")
        refusal = self.capabilities.refusal(problem)
        if refusal is not None:
            return refusal
        plan = FftPlan(problem, layouts, options, self.capabilities.error)
        if plan._filter_bytes() > _LARGEST_FILTERS:
            return Refusal(
                f"the filters' spectra would take {plan._filter_bytes() >> 20} MB; at most {_LARGEST_FILTERS >> 20} MB"
            )
        each = sum(plan._tile_bytes())
        if each > _LARGEST_TILE:
            return Refusal(f"a thread's tile would take {each >> 20} MB; at most {_LARGEST_TILE >> 20} MB")
        return plan

    def source(self) -> tuple[tuple[str, str], ...]:
        """(file name, text) of what computes."""
        names = ("fft.py", "transforms.py", "spectra.cpp")
        return tuple((name, (FOLDER / name).read_text(encoding="utf-8")) for name in names)


def backends() -> list[Backend]:
    """The rows of the family."""
    return [Fft()]
