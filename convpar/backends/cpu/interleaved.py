"""Channels beside each other, as pictures (H, W, C) have them, taken as columns.

Where one filter serves every channel by itself, rows of W pixels of C channels are rows of W * C samples under a filter whose
columns lie C apart. Kernels then read and write whole vectors where they are, and nothing is parted by channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convpar.backend import Layout, Layouts
from convpar.boundary import FILL, IndexMap
from convpar.problem import Problem

_REACH = 512
"""Columns under the filter at most: cpu-separable takes no more, and so wide a filter gains little."""


def as_columns(p: Problem, layouts: Layouts) -> tuple[Problem, Layouts] | None:
    """The problem and the layouts of one channel that are the same work, or None.

    `p` must have one filter for all channels (a 2-D `w`), so that neighbouring columns are a stride apart.
    """
    same_filter = p.groups == p.c == p.oc > 1 and layouts.w.strides[0] == 0
    same_bias = layouts.bias is None or layouts.bias.strides[0] == 0
    beside = _beside(layouts.x, p.x_dtype.itemsize, p.c) and _beside(layouts.out, p.out_dtype.itemsize, p.c)
    # "raise" names the first place in the order of channels.
    if not (same_filter and same_bias and beside) or p.stride[1] != 1 or p.overflow == "raise":
        return None
    top, bottom, left, right = p.padding
    flat = replace(
        p,
        c=1,
        oc=1,
        groups=1,
        w=p.w * p.c,
        padding=(top, bottom, left * p.c, right * p.c),
        dilation=(p.dilation[0], p.dilation[1] * p.c),
    )
    if flat.extent[1] > _REACH:
        return None
    return flat, layouts._replace(x=_row_by_row(layouts.x, p.c), out=_row_by_row(layouts.out, p.c))


def border_maps(maps: tuple[IndexMap, IndexMap], channels: int) -> tuple[IndexMap, IndexMap]:
    """Those of columns of samples, from those of pixels (`convpar.boundary.border_maps`)."""
    before, after = (
        np.where(m[:, None] == FILL, FILL, m[:, None] * channels + np.arange(channels)).ravel() for m in maps
    )
    return before, after


def _beside(layout: Layout, itemsize: int, channels: int) -> bool:
    return layout.strides[1] == itemsize and layout.strides[3] == channels * itemsize


def _row_by_row(layout: Layout, channels: int) -> Layout:
    image, channel, row, _ = layout.strides
    return replace(layout, strides=(image, channel, row, channel))
