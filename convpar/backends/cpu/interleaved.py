"""Channels beside each other, as pictures (H, W, C) have them, taken as columns.

Where one filter serves every channel by itself, rows of W pixels of C channels are rows of W * C samples under a filter whose
columns lie C apart. Kernels then read and write whole vectors where they are, and nothing is parted by channels.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from convpar.backend import Layout, Layouts
from convpar.boundary import FILL, IndexMap
from convpar.problem import Problem, is_integer

_MOST_BORDER = 2**14
"""Columns beyond the image at most, for each of which a plan keeps where its sample is."""


def as_columns(p: Problem, layouts: Layouts) -> tuple[Problem, Layouts] | None:
    """The problem and the layouts of one channel that are the same work, or None.

    `p` must have one filter for all channels (a 2-D `w`) and one bias, and its neighbouring outputs neighbouring windows.
    """
    same_filter = p.groups == p.c == p.oc > 1 and layouts.w.strides[0] == 0
    same_bias = layouts.bias is None or layouts.bias.strides[0] == 0
    beside = _beside(layouts.x, p.x_dtype.itemsize, p.c) and _beside(layouts.out, p.out_dtype.itemsize, p.c)
    # "raise" names the first place in the order of channels.
    raises = p.overflow == "raise" and is_integer(p.out_dtype)
    top, bottom, left, right = p.padding
    far = (left + right) * p.c > _MOST_BORDER
    if not (same_filter and same_bias and beside) or p.stride[1] != 1 or raises or far:
        return None
    down, along = p.dilation
    flat = replace(
        p,
        c=1,
        oc=1,
        groups=1,
        w=p.w * p.c,
        padding=(top, bottom, left * p.c, right * p.c),
        # Of one column any dilation is the same.
        dilation=(down, along * p.c if p.kw > 1 else 1),
    )
    return flat, layouts._replace(x=_row_by_row(layouts.x), out=_row_by_row(layouts.out))


def spread(maps: tuple[IndexMap, IndexMap], channels: int) -> tuple[IndexMap, IndexMap]:
    """Border maps of columns of samples, from those of pixels (`convpar.boundary.border_maps`)."""
    before, after = (
        np.where(m[:, None] == FILL, FILL, m[:, None] * channels + np.arange(channels)).ravel() for m in maps
    )
    return before, after


def _beside(layout: Layout, itemsize: int, channels: int) -> bool:
    return layout.strides[1] == itemsize and layout.strides[3] == channels * itemsize


def _row_by_row(layout: Layout) -> Layout:
    image, channel, row, _ = layout.strides
    return replace(layout, strides=(image, channel, row, channel))
