"""`convpar filter`: apply a kernel to a picture file."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from click.core import ParameterSource

from convpar.boundary import MODES
from convpar.problem import shown

from .common import (
    CONTEXT_SETTINGS,
    Accuracy,
    Finite,
    Number,
    UserError,
    backend_options,
    read_config,
    user_errors,
)
from .files import check_target, replace_file
from .named_kernels import KERNELS, KernelError, parse

HELP = """Apply a kernel to the picture IN and write the result to OUT.

IN and OUT are PNG, JPEG or TIFF, by OUT's extension, and may be the same file. Grey, RGB
and RGBA with 8 or 16 bits (TIFF also 32- and 64-bit floats) stay what they are: each
colour is filtered by itself, rounded and clipped to the picture's own range; alpha is
left as it is. Palettes become RGB, 1 to 4 bits become 8. The result has IN's size.

The kernel is applied as it is written (cross-correlation): its first weight meets the
sample above and to the left. --flip turns it by 180 degrees first, which is convolution
in the mathematical sense.

OUT is replaced only when the result is whole; if anything goes wrong it stays as it
was. A picture is written upright, with its colour profile and, in PNG and JPEG, its
EXIF data. What couldn't be kept is refused: animations, several pages, CMYK.
"""


def _list_kernels(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if not value:
        return
    from rich.table import Table

    from .common import console

    table = Table("kernel", "what it is", box=None, header_style="bold")
    for name, kernel in KERNELS.items():
        table.add_row(kernel.usage(name).replace("[", r"\["), kernel.summary)
    console().print(table)
    ctx.exit()


@click.command("filter", help=HELP, context_settings=CONTEXT_SETTINGS)
@click.argument("source", metavar="IN")
@click.argument("target", metavar="OUT")
@click.option("--kernel", "-k", "text", required=True, metavar="KERNEL",
              help="A name (see --kernels), a file.npy, or weights: '1 2 1; 2 4 2; 1 2 1'.")  # fmt: skip
@click.option("--kernels", is_flag=True, is_eager=True, expose_value=False, callback=_list_kernels,
              help="List the kernels that have names, and exit.")  # fmt: skip
@click.option("--flip", is_flag=True, help="Turn the kernel by 180 degrees: convolution.")
@click.option("--normalize", is_flag=True, help="Divide the kernel by the sum of its weights.")
@click.option("--scale", type=Finite(), default=1.0, metavar="S", help="Multiply the kernel by S.")
@click.option("--offset", type=float, default=0.0, metavar="V",
              help="Add V to each result, in the picture's units: 128 makes signed edges visible.")  # fmt: skip
@click.option("--boundary", type=click.Choice(MODES), default="mirror", show_default=True,
              help="What lies beyond the picture's edge.")  # fmt: skip
@click.option("--fillvalue", type=Number(), default=0, metavar="V",
              help="What --boundary fill puts there, in the picture's units.")  # fmt: skip
@click.option("--quality", type=click.IntRange(1, 100), default=95, show_default=True,
              help="Quality of a JPEG that is written.")  # fmt: skip
@click.option("--accuracy", type=Accuracy(), metavar="A",
              help="elementwise (default), normwise, which is faster under large kernels, or a number.")  # fmt: skip
@click.option("--max-pixels", type=click.IntRange(min=1), metavar="N",
              help="Decode pictures of up to N pixels (default: 2^28).")  # fmt: skip
@click.option("--verbose", "-v", is_flag=True, help="Say what was done, on stderr.")
@backend_options
def command(
    source: str, target: str, text: str, flip: bool, normalize: bool, scale: float, offset: float,
    boundary: str, fillvalue: float, quality: int, accuracy: Any, max_pixels: int | None, verbose: bool,
    backend: str, pairs: tuple[str, ...], threads: int | None,
) -> None:  # fmt: skip
    from . import images

    weights = _kernel(text, normalize, scale)
    with _about(target):
        form = images.format_for(target)
    _refuse_idle("fillvalue", boundary == "fill", f"--boundary {boundary}")
    _refuse_idle("quality", form == "jpeg", f"a picture that is {form.upper()}")
    place = check_target(target)
    with _about(source):
        picture = images.read(source, max_pixels or images.MAX_PIXELS)
    with _about(target):
        images.check_fits(picture, form)
    for warning in picture.warnings:
        click.echo(f"convpar: {source}: the decoder says: {warning}", err=True)
    if picture.warnings and place.exists() and place.samefile(source):
        raise UserError(f"{source} may be damaged, so it is not replaced; write to another file")
    start = time.perf_counter()
    with user_errors():
        pixels, used = apply(
            picture.pixels, weights, offset=offset, flip=flip, boundary=boundary, fillvalue=fillvalue,
            backend=backend, config=read_config(pairs), accuracy=accuracy, num_threads=threads,
        )  # fmt: skip
    seconds = time.perf_counter() - start
    with _about(target):
        encoded = images.encode(replace(picture, pixels=pixels), form, quality)
    replace_file(target, encoded)
    if verbose:
        rows, columns = pixels.shape[:2]
        click.echo(
            f"convpar: {target}: {columns} x {rows} {picture.kind}, kernel {weights.shape[0]} x "
            f"{weights.shape[1]}, {used}, {seconds * 1e3:.3g} ms",
            err=True,
        )


def apply(
    pixels: npt.NDArray[Any],
    weights: npt.NDArray[np.float64],
    *,
    offset: float = 0.0,
    fillvalue: float = 0,
    **options: Any,
) -> tuple[npt.NDArray[Any], str]:
    """A picture filtered colour by colour, rounded and clipped to its own type.

    Parameters
    ----------
    pixels : ndarray, shape (H, W), (H, W, 3) or (H, W, 4)
        A fourth channel is alpha and stays as it is.
    weights : ndarray, shape (KH, KW)
    offset : float
        Added to each sum, in the picture's units.
    fillvalue : float
        For ``boundary="fill"``.
    **options
        Passed to `convpar.plan`: flip, boundary, backend, config, accuracy, num_threads.

    Returns
    -------
    ndarray, str
        The result, of the shape and type of `pixels`; the backend that made it.

    Raises
    ------
    ValueError
        `offset` or `fillvalue` isn't finite in the type of the sums, and `pixels` are integers.
    """
    import convpar

    # float32 is exact for 8-bit pixels and the named kernels of whole numbers; wider pixels need
    # the wider sum to be rounded as they should be.
    kind = np.float32 if pixels.dtype in (np.uint8, np.float32) else np.float64
    if pixels.dtype.kind == "u":
        for name, value in (("offset", offset), ("fillvalue", fillvalue)):
            if not _finite(value, kind):
                raise ValueError(
                    f"{name} must be finite in {kind.__name__} for {pixels.dtype} pixels, not {shown(value)}"
                )
    colours = pixels[..., :3] if pixels.ndim == 3 else pixels
    arrays = colours, weights.astype(kind), None if offset == 0 else np.asarray(offset, kind)
    planned = convpar.plan(
        *arrays, padding="same", channel_axis=-1 if pixels.ndim == 3 else None,
        dtype=pixels.dtype, overflow="saturate", fillvalue=fillvalue, **options,
    )  # fmt: skip
    with _interruptible():
        filtered = planned(*arrays)
    if colours.shape != pixels.shape:
        filtered = np.concatenate([filtered, pixels[..., 3:]], axis=-1)
    return filtered, planned.backend.name


def _refuse_idle(option: str, matters: bool, beside: str) -> None:
    """Refuse an option that was given and wouldn't matter."""
    given = click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE
    if given and not matters:
        raise UserError(f"--{option} does nothing with {beside}; leave it out")


def _finite(value: complex, kind: type[np.floating[Any]]) -> bool:
    with np.errstate(over="ignore"), contextlib.suppress(OverflowError):
        return all(np.isfinite(kind(part)) for part in (value.real, value.imag))
    return False


def _kernel(text: str, normalize: bool, scale: float) -> npt.NDArray[np.float64]:
    try:
        weights = parse(text)
    except KernelError as e:
        raise UserError(f"--kernel: {e}") from e
    if normalize:
        total = weights.sum()
        if abs(total) <= 1e-12 * np.abs(weights).sum():
            raise UserError("--normalize: the kernel's weights sum to 0")
        weights = weights / total
    with np.errstate(all="ignore"):
        weights = weights * scale
        finite = np.isfinite(weights.astype(np.float32)).all()
    if not finite:
        raise UserError("the kernel's weights, after --scale and --normalize, are too large")
    return weights


@contextlib.contextmanager
def _about(path: str) -> Iterator[None]:
    from .images import PictureError

    try:
        yield
    except PictureError as e:
        raise UserError(f"{path} {e}") from e


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C end the process at once.

    Python answers it only after the compiled kernel has returned. Nothing has been written
    yet that would have to be cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
