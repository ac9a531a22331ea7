"""Picture files in and out: PNG, JPEG and TIFF, decoded and encoded by OpenCV.

A picture comes upright, whatever its EXIF orientation, and is written upright with
the orientation set to match. Its colour profile and EXIF data go with it, as far as
the format that is written holds them (EXIF is not written to TIFF); so does the
resolution where the format stays the same. Other metadata (text, XMP, thumbnails,
which show the picture before) is left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from .containers import Format, Header, Metadata, PictureError, embed, format_of, inspect

__all__ = [
    "EXTENSIONS",
    "MAX_PIXELS",
    "Picture",
    "PictureError",
    "check_fits",
    "encode",
    "format_for",
    "read",
]

EXTENSIONS: dict[str, Format] = {
    ".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".tif": "tiff", ".tiff": "tiff",
}  # fmt: skip

MAX_PIXELS = 1 << 28
"""Pixels of the largest picture that is decoded without being asked to: a file of a few
kilobytes can announce a picture that fills the memory."""

_EXTENSION: dict[Format, str] = {"png": ".png", "jpeg": ".jpg", "tiff": ".tif"}


@dataclass(frozen=True)
class Picture:
    """A decoded picture.

    Attributes
    ----------
    pixels : ndarray
        (H, W), (H, W, 3) or (H, W, 4), upright, colours in OpenCV's order: blue, green, red,
        alpha. uint8 or uint16; float32 or float64 from TIFF. May be a view with any strides.
    format : {"png", "jpeg", "tiff"} or None
        What it was read from.
    metadata : Metadata
    warnings : tuple of str
        What the decoder found wrong with the pixels and yet decoded.
    """

    pixels: npt.NDArray[Any]
    format: Format | None = None
    metadata: Metadata = field(default_factory=Metadata)
    warnings: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """Type and channels in words, "uint8 RGB"."""
        channels = self.pixels.shape[2] if self.pixels.ndim == 3 else 1
        return f"{self.pixels.dtype} {({1: 'grey', 3: 'RGB', 4: 'RGBA'})[channels]}"


def format_for(path: str | os.PathLike[str]) -> Format:
    """The format that a file's extension asks for, or a PictureError that lists those there are."""
    extension = Path(path).suffix.lower()
    if extension not in EXTENSIONS:
        raise PictureError(f"must end in {', '.join(EXTENSIONS)}, not {extension or 'nothing'!r}")
    return EXTENSIONS[extension]


def read(path: str | os.PathLike[str], max_pixels: int = MAX_PIXELS) -> Picture:
    """Read a whole picture, or say why not.

    Raises
    ------
    PictureError
        The file isn't there, isn't a picture, is damaged, too large, or of a kind that couldn't be
        written back faithfully: several pages, an animation, CMYK, 12 bits.
    """
    try:
        # A pipe or a device has no end that could be waited for.
        if not os.path.isfile(path):
            os.stat(path)
            raise PictureError("is a folder" if os.path.isdir(path) else "is not a regular file")
        with open(path, "rb") as file:
            start = file.read(8)
            format_of(start)
            data = start + file.read()
    except OSError as e:
        raise PictureError(f"can't be read: {e.strerror}") from e
    header = inspect(data)
    if not header.width or not header.height:
        raise PictureError(f"is damaged: it says it has {header.width} x {header.height} pixels")
    if header.width * header.height > max_pixels:
        raise PictureError(
            f"has {header.width} x {header.height} pixels, more than the {max_pixels} allowed; "
            "--max-pixels allows more"
        )
    pixels, warnings = _decode(data, header)
    return Picture(_upright(pixels, header.orientation), header.format, header.metadata, warnings)


def _decode(data: bytes, header: Header) -> tuple[npt.NDArray[Any], tuple[str, ...]]:
    buffer = np.frombuffer(data, np.uint8).copy()
    for at, new in header.patches:
        buffer[at : at + len(new)] = np.frombuffer(new, np.uint8)
    name = header.format.upper()
    with _messages() as messages:
        try:
            pixels = cv2.imdecode(buffer, cv2.IMREAD_UNCHANGED)
        except cv2.error as e:
            raise PictureError(f"can't be decoded: {e.err}") from e
    # A TIFF that libtiff couldn't decode comes back as if it were black.
    failed = [m for m in messages if "error" in m.lower()]
    if pixels is None or failed:
        reason = f" ({(failed or messages)[0]})" if messages else ""
        raise PictureError(f"is damaged, or of a kind of {name} that OpenCV doesn't read{reason}")
    expected = (header.height, header.width) + ((header.channels,) if header.channels > 1 else ())
    if pixels.shape != expected or pixels.dtype != header.dtype:
        raise PictureError(
            f"is of a kind of {name} that OpenCV doesn't read whole: {pixels.dtype} {pixels.shape} "
            f"came of {header.dtype} {expected}"
        )
    # Other messages are about what surrounds the pixels: profiles, unknown fields.
    return pixels, tuple(m for m in messages if m.startswith(("Corrupt JPEG", "Premature end of JPEG")))


def _upright(pixels: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """A view of stored pixels as they are meant to be seen; `orientation` as EXIF 3.0 numbers it (tag 274)."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def check_fits(picture: Picture, name: Format) -> None:
    """Raise a PictureError if the format can't hold the picture as it is."""
    dtype, label = picture.pixels.dtype, name.upper()
    if dtype.kind == "f" and name != "tiff":
        raise PictureError(f"{label} can't hold {dtype} pixels; TIFF can")
    if dtype != np.uint8 and name == "jpeg":
        raise PictureError(f"JPEG can't hold {dtype} pixels; PNG and TIFF can")
    if picture.pixels.shape[2:] == (4,):
        if name == "jpeg":
            raise PictureError("JPEG can't hold transparency; PNG and TIFF can")
        if picture.format == "tiff" and name != "tiff" and picture.metadata.alpha == 1:
            raise PictureError(f"{label} can't hold colours premultiplied by their alpha; TIFF can")
    if name == "jpeg" and max(picture.pixels.shape[:2]) > 65500:
        raise PictureError("JPEG can't hold more than 65500 rows or columns; PNG and TIFF can")


def encode(picture: Picture, name: Format, quality: int = 95) -> bytes:
    """The bytes of a file of that format; `quality` (1 to 100) is JPEG's.

    Raises
    ------
    PictureError
        The format can't hold the picture.
    """
    check_fits(picture, name)
    options = {
        "png": [cv2.IMWRITE_PNG_COMPRESSION, 6],
        # Colours at full resolution: OpenCV's default would halve it.
        "jpeg": [
            cv2.IMWRITE_JPEG_QUALITY, quality,
            cv2.IMWRITE_JPEG_SAMPLING_FACTOR, cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
        ],
        "tiff": [],
    }[name]  # fmt: skip
    with _messages() as messages:
        try:
            done, encoded = cv2.imencode(_EXTENSION[name], np.ascontiguousarray(picture.pixels), options)
        except cv2.error as e:
            raise PictureError(f"{name.upper()} can't hold it: {e.err}") from e
    if not done:
        raise PictureError(f"{name.upper()} can't hold it{f': {messages[-1]}' if messages else ''}")
    return embed(encoded.tobytes(), name, picture.metadata, picture.format)


@contextlib.contextmanager
def _messages() -> Iterator[list[str]]:
    """What the libraries inside OpenCV write to stderr by themselves, as a list of lines."""
    lines: list[str] = []
    try:
        kept = os.dup(2)
    except OSError:  # the process was started without a stderr
        yield lines
        return
    if sys.stderr is not None:
        sys.stderr.flush()
    try:
        with tempfile.TemporaryFile() as file:
            os.dup2(file.fileno(), 2)
            try:
                yield lines
            finally:
                os.dup2(kept, 2)
                file.seek(0)
                written = file.read().decode(errors="replace").splitlines()
                # Without "[ WARN:0@0.085] global grfmt_png.cpp:793 function" in front.
                lines += [re.sub(r"^\[.*?\] global \S+ ", "", line) for line in written if line.strip()]
    finally:
        os.close(kept)
