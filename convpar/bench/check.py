"""Is a timed answer right? Held against the ``numpy`` backend in a wider type, block by block.

All of a small answer is checked; of a large one its corners, the surroundings of the
brightest sample and blocks at random places, because the reference takes longer than
all that is timed. No element of any floating-point answer may be left unwritten.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import convpar
from convpar.boundary import FILL, source_index
from convpar.problem import Problem, is_integer, is_narrow_float

Array = npt.NDArray[Any]

FULL_CHECK = 150_000_000
"""MACs up to which every element is checked; of more, blocks that add up to about a quarter of it."""

_BLOCK = 96


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    Attributes
    ----------
    right : bool
    reason : str
        What is wrong, and where first; empty if nothing is.
    checked, total : int
        Elements compared, and elements of the answer.
    elementwise, normwise : float or None
        The largest error over the bound of either contract, at the checked elements;
        None where answers are integers.
    """

    right: bool
    reason: str
    checked: int
    total: int
    elementwise: float | None = None
    normwise: float | None = None


@dataclass(frozen=True, slots=True)
class _Block:
    """Outputs with consecutive places, and what they should be."""

    place: tuple[slice, slice, slice, slice]
    sums: Array
    magnitude: Array | None


class Reference:
    """The right answer to a case, where it is looked at.

    Parameters
    ----------
    problem : Problem
    x, w : ndarray
        (N, C, H, W) and (OC, C/groups, KH, KW).
    seed : int
        Which blocks of a large answer are looked at.
    everything : bool
        Check every element, however long it takes.
    """

    def __init__(
        self, problem: Problem, x: Array, w: Array, *, seed: int = 0, everything: bool = False
    ) -> None:
        self.problem = problem
        # Sums of float32 and narrower products are next to exact in float64; float64's need more.
        self._sum_type: np.dtype[Any] = (
            np.dtype(np.longdouble) if problem.sum_dtype == np.float64 else np.dtype(np.float64)
        )
        self._exact = is_integer(problem.sum_dtype)
        places = _places(problem, x, np.random.default_rng(seed), everything)
        self._blocks = [self._block(place, x, w) for place in places]
        # The largest magnitude of each plane, as far as it is looked at.
        self._largest = np.zeros((problem.n, problem.oc, 1, 1), self._sum_type)
        for block in self._blocks:
            if block.magnitude is not None:
                plane = self._largest[block.place[:2]]
                np.maximum(plane, block.magnitude.max(axis=(2, 3), keepdims=True), out=plane)

    def _block(self, place: tuple[slice, slice, slice, slice], x: Array, w: Array) -> _Block:
        p = self.problem
        n, oc, rows, columns = place
        group = oc.start // (p.oc // p.groups)
        cg = p.c // p.groups
        seen = _window(p, x[n, group * cg : (group + 1) * cg], rows, columns)
        options: dict[str, Any] = {
            "stride": p.stride,
            "dilation": p.dilation,
            "flip": p.flip,
            "backend": "numpy",
        }
        taps = w[oc]
        if self._exact:
            sums = convpar.conv2d(
                seen.astype(p.x_dtype), taps, dtype=p.out_dtype, overflow=p.overflow, **options
            )
            return _Block(place, np.asarray(sums), None)
        wide = self._sum_type
        sums = convpar.conv2d(seen.astype(wide), taps.astype(wide), **options)
        magnitude = convpar.conv2d(np.abs(seen.astype(wide)), np.abs(taps.astype(wide)), **options)
        return _Block(place, np.asarray(sums), np.asarray(magnitude))

    def judge(
        self,
        answer: Array,
        *,
        contract: Literal["elementwise", "normwise"] = "elementwise",
        factor: float = 1.0,
        rounding: Literal["nearest", "truncate"] = "nearest",
        flushes: bool = False,
    ) -> Verdict:
        """Hold `answer`, of any type, against the reference.

        Parameters
        ----------
        answer : ndarray
            (N, OC, OH, OW). A floating-point answer to an integer problem is held against the unrounded sums.
        contract, factor
            The bound on its rounding errors: see the project's accuracy contracts.
        rounding : {"nearest", "truncate"}
            How it converts sums to integers.
        flushes : bool
            Subnormal numbers may be taken as zero.
        """
        p = self.problem
        total = p.outputs
        if answer.shape != p.out_shape:
            return Verdict(False, f"its shape is {answer.shape}, not {p.out_shape}", 0, total)
        if answer.dtype.kind in "fc" and not np.isfinite(answer).all():
            first = tuple(int(i) for i in np.argwhere(~np.isfinite(answer))[0])
            return Verdict(False, f"element {first} is {answer[first]}: not written, or not finite", 0, total)
        checked, reason = 0, ""
        worst_elementwise = worst_normwise = 0.0
        for block in self._blocks:
            got = answer[block.place]
            checked += got.size
            if block.magnitude is None:
                wrong = got != block.sums
            else:
                bound = self._bound(block.magnitude, flushes)
                wide = self._bound(self._largest[block.place[:2]], flushes)
                allowed = factor * (bound if contract == "elementwise" else wide)
                if is_integer(got.dtype):
                    low, high = (_convert(block.sums + s * allowed, got.dtype, rounding) for s in (-1, 1))
                    wrong = (got < low) | (got > high)
                else:
                    error = np.abs(got.astype(self._sum_type) - block.sums)
                    # A narrower result adds its own rounding.
                    slack = _half_ulp(block.sums, got.dtype) if _narrows(got.dtype, p.sum_dtype) else 0.0
                    wrong = error > allowed + slack
                    error = np.maximum(error - slack, 0)
                    if error.size:
                        worst_elementwise = max(worst_elementwise, float((error / bound).max()))
                        worst_normwise = max(worst_normwise, float((error / wide).max()))
            if wrong.any() and not reason:
                at = tuple(int(i) for i in np.argwhere(wrong)[0])
                place = tuple(s.start + i for s, i in zip(block.place, at, strict=True))
                reason = f"element {place} is {got[at]}, and should be {block.sums[at]!s:.12}"
        measured = not self._exact and not is_integer(answer.dtype)
        return Verdict(
            not reason,
            reason,
            checked,
            total,
            worst_elementwise if measured else None,
            worst_normwise if measured else None,
        )

    def _bound(self, magnitude: Array, flushes: bool) -> Array:
        """(K + 2) u conv(|x|, |w|) + K * (smallest number), the contract's bound at factor 1."""
        p = self.problem
        info = np.finfo(p.sum_dtype)
        smallest = info.smallest_normal if flushes else info.smallest_subnormal
        bound: Array = (p.terms + 2) * (float(info.eps) / 2) * magnitude + p.terms * float(smallest)
        return bound


def _narrows(out: np.dtype[Any], sums: np.dtype[Any]) -> bool:
    return is_narrow_float(out) or out.itemsize < sums.itemsize


def _half_ulp(sums: Array, dtype: np.dtype[Any]) -> Array:
    spacing: Array = np.spacing(np.abs(sums).astype(dtype)).astype(np.float64) / 2
    return spacing


def _convert(sums: Array, dtype: np.dtype[Any], rounding: str) -> Array:
    limits = np.iinfo(dtype)
    whole = np.rint(sums) if rounding == "nearest" else np.trunc(sums)
    converted: Array = np.clip(whole, limits.min, limits.max).astype(dtype)
    return converted


def _window(p: Problem, x: Array, rows: slice, columns: slice) -> Array:
    """The padded image as far as the outputs in `rows` and `columns` see it."""
    picked = []
    for axis, (size, span) in enumerate(((p.h, rows), (p.w, columns))):
        first = span.start * p.stride[axis] - p.padding[2 * axis]
        count = (span.stop - span.start - 1) * p.stride[axis] + p.extent[axis]
        picked.append(source_index(np.arange(first, first + count), size, p.boundary))
    r, c = picked
    seen = x[:, :, r[:, None], c]
    if p.boundary == "fill":
        seen[:, :, (r == FILL)[:, None] | (c == FILL)] = p.fillvalue
    return seen


def _places(
    p: Problem, x: Array, rng: np.random.Generator, everything: bool
) -> Iterator[tuple[slice, slice, slice, slice]]:
    """Which outputs to look at, in blocks of one image and some output channels of one group."""
    if not p.outputs:
        return
    per_group = p.oc // p.groups
    if everything or p.macs <= FULL_CHECK:
        for n in range(p.n):
            for group in range(p.groups):
                for row in range(0, p.oh, _BLOCK):
                    for column in range(0, p.ow, _BLOCK):
                        yield (
                            slice(n, n + 1),
                            slice(group * per_group, (group + 1) * per_group),
                            slice(row, min(row + _BLOCK, p.oh)),
                            slice(column, min(column + _BLOCK, p.ow)),
                        )
        return
    height, width = min(_BLOCK, p.oh), min(_BLOCK, p.ow)
    channels = min(per_group, 8)
    lowest, rightmost = p.oh - height, p.ow - width
    n, c, i, j = (int(k) for k in np.unravel_index(int(np.argmax(x)), x.shape))
    row = min(max((i + p.padding[0]) // p.stride[0] - height // 2, 0), lowest)
    column = min(max((j + p.padding[2]) // p.stride[1] - width // 2, 0), rightmost)
    places = [(n, c // (p.c // p.groups) * per_group, row, column)]
    corners = [(row, column) for row in (0, lowest) for column in (0, rightmost)]
    extra = FULL_CHECK // 4 // max(channels * height * width * p.terms, 1) - len(corners) - 1
    anywhere = rng.integers((lowest + 1, rightmost + 1), size=(max(extra, 0), 2)).tolist()
    for row, column in [*corners, *anywhere]:
        first = int(rng.integers(p.groups)) * per_group + int(rng.integers(per_group - channels + 1))
        places.append((int(rng.integers(p.n)), first, row, column))
    for n, first, row, column in places:
        yield (
            slice(n, n + 1),
            slice(first, first + channels),
            slice(row, row + height),
            slice(column, column + width),
        )
