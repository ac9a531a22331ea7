"""The cases that convpar is measured on: names, dimensions and types, and nothing that runs.

Benchmarks, the command line and the studies choose from this one list, by name
or by tag (``single-4096-*``, ``resnet``). It is static: the same on every machine
and whatever is installed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache
from itertools import product
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from .problem import Problem, is_integer

Shape = tuple[int, int, int, int]
Array = npt.NDArray[Any]

BRIGHT = 1e4
"""Factor of the patch in `Case.arrays` with ``bright=True``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One problem with a name.

    Attributes
    ----------
    name : str
        Lower case, words joined by hyphens, sizes among them.
    x_shape, w_shape : (int, int, int, int)
        (N, C, H, W) and (OC, C/groups, KH, KW).
    x_dtype, w_dtype : str
        Element types of image and filter.
    options : mapping
        The remaining keywords of `convpar.conv2d`: padding, stride, dtype ...
    tags : tuple of str
        What `select` finds it by besides its name.
    separable : bool
        The filter is the product of a column and a row. Nobody is told but
        peers with a function for it.
    pixels : bool
        Channels lie beside each other in memory, (H, W, C), and have one filter, as with a 2-D `w`.
        Shapes and `options` are those of the same work channel by channel: one image, as many groups as
        channels. Peers without a function for it get planes.
    channels_last : bool
        Image and result lie as (N, H, W, C) in memory.
    """

    name: str
    x_shape: Shape
    w_shape: Shape
    x_dtype: str = "float32"
    w_dtype: str = "float32"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    tags: tuple[str, ...] = ()
    separable: bool = False
    pixels: bool = False
    channels_last: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", MappingProxyType(dict(self.options)))
        channels = self.x_shape[1]
        if self.pixels and (
            self.x_shape[0] != 1 or not channels == self.w_shape[0] == self.options.get("groups", 1) > 1
        ):
            raise ValueError(
                f"{self.name}: a case of pixels must have one image, and as many filters and groups as "
                f"channels, 2 or more; not x_shape {self.x_shape}, w_shape {self.w_shape} and "
                f"groups {self.options.get('groups')}"
            )

    def problem(self) -> Problem:
        """The `Problem` that backends are asked to plan."""
        return Problem.of(self.x_shape, self.w_shape, self.x_dtype, self.w_dtype, **self.options)

    @property
    def largest(self) -> int:
        """Of what magnitude integers are, at most, under a filter of integers: so that float32 sums of them are exact."""
        return min(100, math.isqrt((2**24 - 1) // max(math.prod(self.w_shape[1:]), 1)))

    def arrays(self, rng: np.random.Generator, *, bright: bool = False) -> tuple[Array, Array]:
        """An image (N, C, H, W) and a filter (OC, C/groups, KH, KW) of the case's types.

        Floats are uniform in [-1, 1). Integers with an integer filter are small
        enough that float32 sums of them are exact. A floating-point filter for an
        integer image has positive taps that sum to 1, as in a blur, so libraries that
        wrap and libraries that saturate agree.

        Parameters
        ----------
        rng : numpy.random.Generator
            The same state gives the same arrays.
        bright : bool
            Multiply one patch of a floating-point image by `BRIGHT`: next to it,
            methods whose error follows the largest value show their error.
        """
        w_type = np.dtype(self.w_dtype)
        blurs = not is_integer(w_type) and is_integer(np.dtype(self.x_dtype))
        if self.separable:
            _, _, kh, kw = self.w_shape
            u, v = _uniform(rng, (kh, 1), "float64"), _uniform(rng, (1, kw), "float64")
            w = np.broadcast_to(np.abs(u * v) if blurs else u * v, self.w_shape)
        else:
            w = _uniform(rng, self.w_shape, self.w_dtype, most=self.largest)
            w = np.abs(w) if blurs else w
        if blurs:
            w = w / w.sum(axis=(1, 2, 3), keepdims=True)
        x = _uniform(rng, self.x_shape, self.x_dtype, most=None if blurs else self.largest)
        if bright and not is_integer(x.dtype):
            h, width = self.x_shape[2:]
            x[:, :, h // 4 : h // 4 + max(h // 8, 1), width // 4 : width // 4 + max(width // 8, 1)] *= BRIGHT
        if self.pixels:
            w = np.broadcast_to(w[:1], self.w_shape)
        return x, np.ascontiguousarray(w, w_type)

    def operands(self, rng: np.random.Generator) -> tuple[Array, Array, Array]:
        """`arrays`, and one for the result, as they lie in memory."""
        x, w = self.arrays(rng)
        p = self.problem()
        out = np.empty(p.out_shape, p.out_dtype)
        if self.pixels or self.channels_last:
            x, out = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2) for a in (x, out))
        return x, np.broadcast_to(w[:1], w.shape) if self.pixels else w, out


def _uniform(rng: np.random.Generator, shape: Sequence[int], dtype: str, *, most: int | None = None) -> Array:
    d = np.dtype(dtype)
    if is_integer(d):
        limits = np.iinfo(d)
        low, high = limits.min, limits.max
        if most is not None:
            low, high = max(low, -most), min(high, most)
        return rng.integers(low, high, shape, d, endpoint=True)
    values = rng.random(shape, np.float64 if d == np.float64 else np.float32)
    values *= 2
    values -= 1
    return values.astype(d, copy=False)


# -- the list

SINGLE_SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
SINGLE_FILTERS = (3, 5, 7, 9, 11, 15, 31)
# How time grows: with the image (3x3), and with the filter (on 4096 x 4096).
GROWTH_SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768)
GROWTH_FILTERS = (3, 5, 7, 9, 11, 13, 15, 21, 31, 47, 63)
# Label -> types of image and filter, and what is asked of the result.
SINGLE_TYPES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "float32": ("float32", "float32", {}),
    "float64": ("float64", "float64", {}),
    "int32": ("int32", "int32", {}),
    "int16": ("int16", "float32", {"dtype": "int16", "overflow": "saturate"}),
    "uint8": ("uint8", "float32", {"dtype": "uint8", "overflow": "saturate"}),
    "uint8-float32": ("uint8", "float32", {}),
    "uint8-int32": ("uint8", "uint8", {"dtype": "int32"}),
}
# Of labels that differ from others in the type of the result alone.
FEW_SIZES = {"uint8-float32": (512, 4096)}
NETWORK_BATCHES = (100, 1000, 5000, 10000)
# Of the layers that have a target on a CPU. A tag table-NAME stands for the rows of one table in the documents.
_LAYER_TAGS = ("targets-cpu", "table-layers")


def _network() -> Iterator[Case]:
    """The two-layer network of reports A, C and D."""
    for layer, c, oc, size in ((1, 1, 4, 86), (2, 4, 16, 40)):
        for n in NETWORK_BATCHES:
            targets = {1000: _LAYER_TAGS, 10000: ("targets-gpu",)}.get(n, ())
            for dtype, suffix in (("float32", ""), ("float16", "-float16")):
                yield Case(
                    name=f"network-{layer}-n{n}{suffix}",
                    x_shape=(n, c, size, size),
                    w_shape=(oc, c, 7, 7),
                    x_dtype=dtype,
                    w_dtype=dtype,
                    tags=("network", "layers", dtype, *(targets if dtype == "float32" else ())),
                )


def _report_b() -> Iterator[Case]:
    """Report B gives no shapes; these are of a public harness of the same course and fit its ratios.

    Its 72x66 and 33x27 are read as input and output sizes: 66 halves to 33, and
    the work of the layers is then 1 to 4.0 where the report's times are 1 to 3.95.
    """
    for layer, c, oc, size in ((1, 1, 12, 72), (2, 12, 24, 33)):
        yield Case(
            name=f"report-b-{layer}-n10000",
            x_shape=(10000, c, size, size),
            w_shape=(oc, c, 7, 7),
            tags=("report-b", "layers", "float32"),
        )


def _single_tags(size: int, k: int, label: str, padding: str) -> tuple[str, ...]:
    tags = ["single", label, f"k{k}", f"size-{size}", padding]
    if label == "float32" and k == 3 and padding == "valid" and size in (8, 64, 512, 1024):
        tags += ["small", "targets-cpu", "table-small"]
    if size == 4096 and padding == "valid" and (label == "float32" or k <= 7):
        tags += ["targets-cpu", "table-single" if label == "float32" else "table-types"]
    if padding == "valid" and (
        (label == "float32" and size == 16384)
        or (label == "float32" and size == 4096 and k in (3, 7, 15, 31))
        or (label in ("float64", "int32", "uint8") and size == 16384 and k in (3, 7))
    ):
        tags.append("targets-gpu")
    if label == "float32" and padding == "same":
        tags += ["table-growth-size"] if k == 3 and size in GROWTH_SIZES else []
        tags += ["table-growth-filter"] if size == 4096 else []
    if label in ("int32", "float32") and size == 4096 and k <= 7 and padding == "valid":
        tags.append("ladder")
    if label == "int32" and k <= 7 and 64 <= size <= 4096 and padding == "valid":
        tags.append("report-e")
    return tuple(tags)


def _single() -> Iterator[Case]:
    """One channel, one image; K*K filters. Report E's images are among the int32 ones."""
    for label, (x_dtype, w_dtype, options) in SINGLE_TYPES.items():
        sizes = FEW_SIZES.get(label, (8, *SINGLE_SIZES))
        for size, k, padding in product(sizes, GROWTH_FILTERS, ("valid", "same")):
            growth = (label, size, padding) == ("float32", 4096, "same")
            if k > size or not (growth or k in SINGLE_FILTERS):
                continue
            name = f"single-{size}-k{k}-{label}-{padding}"
            case = Case(
                name=name,
                x_shape=(1, 1, size, size),
                w_shape=(1, 1, k, k),
                x_dtype=x_dtype,
                w_dtype=w_dtype,
                options={**options, "padding": padding},
                tags=_single_tags(size, k, label, padding),
            )
            yield case
            # Only floats can be had cheaper under the weaker contract, and only with large filters.
            if growth or (label == "float32" and k >= 15):
                yield _normwise(case)


def _normwise(case: Case) -> Case:
    """The same under the weaker contract; how time grows with the image is a matter of the other."""
    return replace(
        case,
        name=f"{case.name}-normwise",
        options={**case.options, "accuracy": "normwise"},
        tags=(*(tag for tag in case.tags if tag != "table-growth-size"), "normwise"),
    )


def _pictures() -> Iterator[Case]:
    """Grey and coloured pictures of a size that is no power of two."""
    rows, columns = 1080, 1920
    for label, channels, k in product(("float32", "uint8"), (1, 3), (3, 5, 7, 11)):
        x_dtype, w_dtype, options = SINGLE_TYPES[label]
        colours = f"x{channels}" if channels > 1 else ""
        yield Case(
            name=f"picture-{rows}x{columns}{colours}-k{k}-{label}",
            x_shape=(1, channels, rows, columns),
            w_shape=(channels, 1, k, k),
            x_dtype=x_dtype,
            w_dtype=w_dtype,
            options={**options, "padding": "same", "boundary": "mirror", "groups": channels},
            tags=("pictures", label, f"k{k}", "table-pictures"),
            pixels=channels > 1,
        )


def _separable() -> Iterator[Case]:
    for label in ("float32", "uint8"):
        x_dtype, w_dtype, options = SINGLE_TYPES[label]
        for size in (512, 4096, 16384):
            for k in (3, 5, 7, 15, 31):
                yield Case(
                    name=f"separable-{size}-k{k}-{label}",
                    x_shape=(1, 1, size, size),
                    w_shape=(1, 1, k, k),
                    x_dtype=x_dtype,
                    w_dtype=w_dtype,
                    options={**options, "padding": "valid"},
                    tags=(
                        "separable",
                        label,
                        f"k{k}",
                        f"size-{size}",
                        *(("targets-cpu", "table-separable") if size == 4096 and label == "float32" else ()),
                    ),
                    separable=True,
                )


def _layer(
    family: str,
    n: int,
    c: int,
    oc: int,
    image: tuple[int, int],
    filter: tuple[int, int],
    *,
    stride: tuple[int, int] = (1, 1),
    dilation: int = 1,
    padding: int | tuple[int, int] | None = None,
    groups: int = 1,
    tags: tuple[str, ...] = (),
) -> Case:
    """A float32 layer; without `padding`, half the filter on every side."""
    sides = (filter[0] // 2 * dilation, filter[1] // 2 * dilation) if padding is None else padding
    sides = (sides, sides) if isinstance(sides, int) else sides
    step = "" if stride == (1, 1) else f"-s{stride[0]}"
    step += "" if dilation == 1 else f"-d{dilation}"
    size = f"k{filter[0]}" if filter[0] == filter[1] else f"k{filter[0]}x{filter[1]}"
    channels = f"{c}" if groups == c == oc else f"{c}-{oc}"
    return Case(
        name=f"{family}-{channels}-{image[0]}x{image[1]}-{size}{step}-n{n}",
        x_shape=(n, c, *image),
        w_shape=(oc, c // groups, *filter),
        options={"stride": stride, "padding": sides, "dilation": dilation, "groups": groups},
        tags=(family, "layers", "float32", f"k{filter[0]}", *tags),
    )


def _resnet() -> Iterator[Case]:
    # Channels, output channels, size, filter, stride of the convolutions of ResNet-50.
    shapes = (
        (3, 64, 224, 7, 2),
        (64, 64, 56, 1, 1),
        (64, 64, 56, 3, 1),
        (64, 256, 56, 1, 1),
        (256, 128, 56, 1, 1),
        (128, 128, 56, 3, 2),
        (128, 128, 28, 3, 1),
        (256, 512, 56, 1, 2),
        (256, 256, 14, 3, 1),
        (512, 512, 7, 3, 1),
        (2048, 512, 7, 1, 1),
    )
    targets = {(64, 64, 56, 3, 1), (256, 256, 14, 3, 1), (3, 64, 224, 7, 2)}
    for shape in shapes:
        c, oc, size, k, stride = shape
        for n, tags in ((1, ()), (16, _LAYER_TAGS), (256, ("targets-gpu",))):
            case = _layer(
                "resnet",
                n,
                c,
                oc,
                (size, size),
                (k, k),
                stride=(stride, stride),
                tags=tags if shape in targets else (),
            )
            yield case
            if shape in targets and k == 3 and n > 1:
                yield _normwise(case)


def _channels() -> Iterator[Case]:
    """As many channels in as out: images of 56x56 that make 1.5 GMAC, 8192 of them at most.

    Where a single one takes more than 2 GMAC its sides are halved.
    """
    for c in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512):
        size = 56
        while (each := 9 * c * c * size * size) > 2e9:
            size //= 2
        n = min(max(round(1.5e9 / each), 1), 8192)
        case = _layer("channels", n, c, c, (size, size), (3, 3), tags=("table-growth-channels",))
        yield case
        yield _normwise(case)


def _vgg() -> Iterator[Case]:
    for c, oc, size in (
        (3, 64, 224),
        (64, 64, 224),
        (64, 128, 112),
        (128, 128, 112),
        (128, 256, 56),
        (256, 256, 56),
        (256, 512, 28),
        (512, 512, 28),
        (512, 512, 14),
    ):
        for n in (1, 16):
            yield _layer("vgg", n, c, oc, (size, size), (3, 3))


def _deeplab() -> Iterator[Case]:
    """Dilated layers of DeepLab v2 and v3 on images of 513 x 513: of its last blocks, and of its pyramid."""
    for c, oc, size, dilation in (
        (256, 256, 65, 2),
        (512, 512, 65, 4),
        (2048, 256, 33, 6),
        (2048, 256, 33, 12),
    ):
        yield _layer("deeplab", 1, c, oc, (size, size), (3, 3), dilation=dilation)


def _deepbench() -> Iterator[Case]:
    """Shapes of Baidu's DeepBench training set that the other families lack, one batch size each."""
    # N, C, OC, (H, W), (KH, KW), (stride), (padding)
    for n, c, oc, image, filter, stride, padding in (
        (16, 1, 32, (161, 700), (5, 20), (2, 2), (0, 0)),
        (16, 32, 32, (79, 341), (5, 10), (2, 2), (0, 0)),
        (16, 1, 16, (48, 480), (3, 3), (1, 1), (1, 1)),
        (16, 16, 32, (24, 240), (3, 3), (1, 1), (1, 1)),
        (16, 32, 64, (12, 120), (3, 3), (1, 1), (1, 1)),
        (16, 64, 128, (6, 60), (3, 3), (1, 1), (1, 1)),
        (8, 3, 64, (108, 108), (3, 3), (2, 2), (1, 1)),
        (8, 64, 64, (54, 54), (3, 3), (1, 1), (1, 1)),
        (8, 128, 128, (27, 27), (3, 3), (1, 1), (1, 1)),
        (8, 128, 256, (14, 14), (3, 3), (1, 1), (1, 1)),
        (8, 256, 512, (7, 7), (3, 3), (1, 1), (1, 1)),
        (16, 192, 32, (28, 28), (5, 5), (1, 1), (2, 2)),
        (16, 192, 64, (28, 28), (1, 1), (1, 1), (0, 0)),
        (16, 512, 48, (14, 14), (5, 5), (1, 1), (2, 2)),
        (16, 832, 256, (7, 7), (1, 1), (1, 1), (0, 0)),
        (16, 832, 128, (7, 7), (5, 5), (1, 1), (2, 2)),
        (16, 1, 64, (161, 700), (5, 5), (2, 2), (1, 1)),
        (16, 64, 64, (80, 350), (3, 3), (1, 1), (1, 1)),
        (16, 64, 128, (80, 350), (5, 5), (2, 2), (1, 1)),
        (16, 128, 128, (40, 175), (3, 3), (1, 1), (1, 1)),
        (16, 128, 256, (40, 175), (5, 5), (2, 2), (1, 1)),
        (16, 256, 256, (20, 84), (3, 3), (1, 1), (1, 1)),
        (16, 256, 512, (20, 84), (5, 5), (2, 2), (1, 1)),
        (16, 512, 512, (10, 42), (3, 3), (1, 1), (1, 1)),
    ):
        yield _layer("deepbench", n, c, oc, image, filter, stride=stride, padding=padding)


def _depthwise() -> Iterator[Case]:
    """Every channel by itself: groups = C = OC."""

    def case(
        family: str, n: int, c: int, size: int, k: int, stride: int = 1, tags: tuple[str, ...] = ()
    ) -> Case:
        return _layer(
            family,
            n,
            c,
            c,
            (size, size),
            (k, k),
            stride=(stride, stride),
            groups=c,
            tags=tags if family == "depthwise" else ("depthwise", *tags),
        )

    for c, size, k, cpu, gpu in ((96, 56, 3, 16, 64), (96, 56, 7, 16, 64), (128, 56, 31, 4, 64)):
        for n, tags in ((cpu, _LAYER_TAGS), (gpu, ("targets-gpu",))):
            made = case("depthwise", n, c, size, k, tags=tags)
            yield made
            if k == 31:
                yield _normwise(made)
    for c, size, stride in (
        (32, 112, 1),
        (64, 112, 2),
        (128, 56, 1),
        (128, 56, 2),
        (256, 28, 1),
        (256, 28, 2),
        (512, 14, 1),
        (512, 14, 2),
        (1024, 7, 1),
    ):
        yield case("mobilenet", 16, c, size, 3, stride)
    for c, size in ((96, 56), (192, 28), (384, 14), (768, 7)):
        yield case("convnext", 16, c, size, 7)
    # RepLKNet's stages after the first.
    for c, size, k in ((256, 28, 29), (512, 14, 27), (1024, 7, 13)):
        yield case("depthwise", 4, c, size, k)


HEADLINE = (
    "single-4096-k3-float32-valid",
    "single-4096-k7-float32-valid",
    "single-4096-k15-float32-valid",
    "single-4096-k3-uint8-valid",
    "single-512-k3-float32-valid",
    "picture-1080x1920x3-k5-uint8",
    "separable-4096-k7-float32",
    "network-1-n1000",
    "network-2-n1000",
    "resnet-64-64-56x56-k3-n16",
    "depthwise-96-56x56-k7-n16",
)
"""What ``convpar bench`` measures unless told otherwise: one of each kind, a few minutes in all."""


LEVELS = (
    "single-4096-k3-float32-valid",
    "single-4096-k7-float32-valid",
    "single-4096-k3-uint8-valid",
    "network-1-n1000",
    "resnet-64-64-56x56-k3-n16",
    "depthwise-96-56x56-k3-n16",
)
"""What the instruction sets are compared on; tagged ``table-levels``."""

NETWORKS = (
    "resnet-128-128-56x56-k3-s2-n16",
    "resnet-256-512-56x56-k1-s2-n16",
    "resnet-512-512-7x7-k3-n16",
    "resnet-2048-512-7x7-k1-n16",
    "vgg-512-512-28x28-k3-n16",
    "deepbench-32-32-79x341-k5x10-s2-n16",
    "deepbench-192-32-28x28-k5-n16",
    "deepbench-512-48-14x14-k5-n16",
    "deepbench-832-128-7x7-k5-n16",
    "deepbench-256-512-20x84-k5-s2-n16",
    "mobilenet-64-112x112-k3-s2-n16",
    "mobilenet-128-56x56-k3-s2-n16",
    "mobilenet-256-28x28-k3-s2-n16",
    "mobilenet-512-14x14-k3-s2-n16",
    "mobilenet-512-14x14-k3-n16",
    "mobilenet-1024-7x7-k3-n16",
    "convnext-384-14x14-k7-n16",
    "convnext-768-7x7-k7-n16",
)
"""Layers of networks that the ones with a target are no example of: strides, narrow images, filters that fill no cache; tagged
``table-networks``."""

ONE_IMAGE = (
    "resnet-3-64-224x224-k7-s2-n1",
    "resnet-64-64-56x56-k1-n1",
    "resnet-64-64-56x56-k3-n1",
    "resnet-256-128-56x56-k1-n1",
    "resnet-128-128-56x56-k3-s2-n1",
    "resnet-256-512-56x56-k1-s2-n1",
    "resnet-256-256-14x14-k3-n1",
    "resnet-512-512-7x7-k3-n1",
    "resnet-2048-512-7x7-k1-n1",
    "vgg-3-64-224x224-k3-n1",
    "vgg-64-64-224x224-k3-n1",
    "vgg-512-512-14x14-k3-n1",
    "deeplab-256-256-65x65-k3-d2-n1",
    "deeplab-512-512-65x65-k3-d4-n1",
    "deeplab-2048-256-33x33-k3-d6-n1",
    "deeplab-2048-256-33x33-k3-d12-n1",
)
"""Layers that meet a single image, as where a network answers rather than learns; tagged ``table-one-image``."""


_LAST = (
    "network-2-n1000",
    "resnet-64-64-56x56-k1-n16",
    "resnet-64-64-56x56-k3-n16",
    "resnet-256-256-14x14-k3-n16",
    "resnet-3-64-224x224-k7-s2-n16",
    "depthwise-96-56x56-k3-n16",
    "depthwise-96-56x56-k7-n16",
    "mobilenet-64-112x112-k3-s2-n16",
    "mobilenet-512-14x14-k3-n16",
    "mobilenet-512-14x14-k3-s2-n16",
    "mobilenet-1024-7x7-k3-n16",
    "convnext-384-14x14-k7-n16",
    "convnext-768-7x7-k7-n16",
)


_SMALL_INTEGERS = {
    "uint8": (
        "resnet-64-64-56x56-k3-n1",
        "resnet-64-64-56x56-k3-n16",
        "resnet-64-256-56x56-k1-n16",
        "resnet-256-128-56x56-k1-n16",
        "resnet-128-128-56x56-k3-s2-n16",
        "resnet-256-512-56x56-k1-s2-n16",
        "resnet-256-256-14x14-k3-n1",
        "resnet-256-256-14x14-k3-n16",
        "resnet-512-512-7x7-k3-n16",
        "resnet-3-64-224x224-k7-s2-n16",
    ),
    "int16": ("resnet-64-64-56x56-k3-n16", "resnet-256-256-14x14-k3-n16"),
}


def _small_integers(cases: Mapping[str, Case]) -> Iterator[Case]:
    """Layers of images of small integers under such filters, bytes with signs for images of bytes, and sums of 32 bits: quantised networks."""
    for x_dtype, names in _SMALL_INTEGERS.items():
        for case in (cases[name] for name in names):
            kept = [t for t in case.tags if not (t == "float32" or t.startswith(("table-", "targets-")))]
            yield replace(
                case,
                name=f"{case.name}-{x_dtype}",
                x_dtype=x_dtype,
                w_dtype={"uint8": "int8"}.get(x_dtype, x_dtype),
                options={**case.options, "dtype": "int32"},
                tags=(*kept, "integers", x_dtype, "table-integers"),
            )


def _channels_last(cases: Mapping[str, Case]) -> Iterator[Case]:
    """Layers whose arrays lie as (N, H, W, C)."""
    for case in (cases[name] for name in _LAST):
        yield replace(
            case,
            name=f"{case.name}-last",
            channels_last=True,
            tags=(
                *(tag for tag in case.tags if tag not in (*_LAYER_TAGS, "table-levels", "table-networks")),
                "table-layers-last",
            ),
        )


@cache
def all_cases() -> Mapping[str, Case]:
    """Every case by its name, in the order of the list."""
    cases: dict[str, Case] = {}
    tables = {"table-levels": LEVELS, "table-networks": NETWORKS, "table-one-image": ONE_IMAGE}
    for family in (
        _network, _report_b, _single, _pictures, _separable, _resnet, _channels, _vgg, _deeplab, _deepbench, _depthwise,
        lambda: _small_integers(cases), lambda: _channels_last(cases),
    ):  # fmt: skip
        for case in family():
            if case.name in cases:
                raise ValueError(f"two cases are named {case.name!r}")
            tabled = (tag for tag, names in tables.items() if case.name in names)
            cases[case.name] = replace(case, tags=(*case.tags, *tabled))
    return MappingProxyType(cases)


def find(name: str) -> Case:
    """The case of that name.

    Raises
    ------
    ValueError
        There is none; the message names the tags.
    """
    try:
        return all_cases()[name]
    except KeyError:
        raise ValueError(_unknown(name)) from None


def select(patterns: Iterable[str] = ()) -> list[Case]:
    """The cases whose name or tag matches one of `patterns`, in the order of the list.

    Parameters
    ----------
    patterns : iterable of str
        Names or tags, with ``*``, ``?`` and ``[...]`` as in file names; none gives `HEADLINE`.

    Raises
    ------
    ValueError
        A pattern matches nothing; the message names the tags.
    """
    wanted = list(patterns) or list(HEADLINE)
    chosen: set[str] = set()
    for pattern in wanted:
        found = {
            case.name
            for case in all_cases().values()
            if fnmatchcase(case.name, pattern) or any(fnmatchcase(tag, pattern) for tag in case.tags)
        }
        if not found:
            raise ValueError(_unknown(pattern))
        chosen |= found
    return [case for name, case in all_cases().items() if name in chosen]


def tags() -> list[str]:
    """Every tag that some case bears, in alphabetical order."""
    return sorted({tag for case in all_cases().values() for tag in case.tags})


def _unknown(pattern: str) -> str:
    families = ", ".join(t for t in tags() if not t.startswith(("size-", "k")))
    return f"no case and no tag matches {pattern!r}; tags: {families}, k3 ... k63, size-8 ... size-32768"
