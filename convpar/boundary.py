"""Borders: which image row or column stands at each position of the padded image.

This is the only definition of every boundary mode. Kernels never compute a
border: they look positions before and after the image up in tables made here.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

MODES = ("fill", "wrap", "symm", "mirror", "nearest")
FILL = -1
"""What a map holds where the fill value stands instead of a sample."""

IndexMap = npt.NDArray[np.int64]


def source_index(positions: npt.ArrayLike, n: int, mode: str) -> IndexMap:
    """Index of the sample seen at each position of an axis of `n` samples.

    Parameters
    ----------
    positions : array_like of int
        Positions relative to the first sample; negative ones lie before it.
    n : int
        Samples on the axis.
    mode : {"fill", "wrap", "symm", "mirror", "nearest"}
        For the samples ``a b c d``: ``wrap`` continues ``| a b c``, ``symm``
        ``| d c b``, ``mirror`` ``| c b a``, ``nearest`` ``| d d d``. Positions
        further out than the axis is long go round again.

    Returns
    -------
    ndarray of int64
        Indices in ``[0, n)``, or `FILL` outside the image in mode ``fill``.

    Raises
    ------
    ValueError
        The mode is unknown, or the axis is empty and the mode needs a sample.
    """
    if mode not in MODES:
        raise ValueError(f"boundary must be one of {', '.join(MODES)}, not {mode!r}")
    p = np.asarray(positions, dtype=np.int64)
    inside = (p >= 0) & (p < n)
    if mode == "fill":
        return np.where(inside, p, FILL)
    if n <= 0:
        if p.size:
            raise ValueError(f"boundary {mode!r} needs at least one sample on each axis")
        return p.copy()
    if mode == "wrap":
        return p % n
    if mode == "nearest":
        return np.clip(p, 0, n - 1)
    # Reflections repeat with a period; its second half runs backwards.
    # On an axis of one sample, mirror's period would be 0.
    period = 2 * n if mode == "symm" else max(2 * n - 2, 1)
    q = p % period
    back = period - 1 - q if mode == "symm" else period - q
    return np.where(q < n, q, back)


def index_map(n: int, before: int, after: int, mode: str) -> IndexMap:
    """Index of the sample at each of the ``before + n + after`` padded positions."""
    return source_index(np.arange(-before, n + after), n, mode)


def border_maps(n: int, before: int, after: int, mode: str) -> tuple[IndexMap, IndexMap]:
    """The two ends of `index_map`; between them it is the identity."""
    return (
        source_index(np.arange(-before, 0), n, mode),
        source_index(np.arange(n, n + after), n, mode),
    )
