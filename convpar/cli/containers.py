"""What PNG, JPEG and TIFF files say about their pictures, read and written without their pixels.

OpenCV decodes and encodes the pixels. It doesn't say how many pages a file has or what
its alpha means, premultiplies 8-bit TIFF colours by their alpha, turns CMYK into RGB
without the profile, and leaves colour profiles out; so the containers are read here:
`inspect` refuses what would come back wrong, and `embed` puts a picture's colour
profile, EXIF data and resolution into an encoded file.

Layouts: PNG (ISO/IEC 15948, 3rd edition), JPEG (ITU-T T.81; JFIF in T.871; ICC profiles
in ICC.1:2022 annex B.4), TIFF 6.0 with BigTIFF, EXIF 3.0.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

Format = Literal["png", "jpeg", "tiff"]

MAGIC: dict[bytes, Format] = {
    b"\x89PNG\r\n\x1a\n": "png",
    b"\xff\xd8\xff": "jpeg",
    b"II*\0": "tiff",
    b"MM\0*": "tiff",
    b"II+\0": "tiff",
    b"MM\0+": "tiff",
}

LARGEST_PROFILE = 1 << 24
"""Bytes of a colour profile that are unpacked; real ones have some thousand, rarely a million."""


class PictureError(Exception):
    """The file isn't a picture that can be read or written; the message says why, without its name."""


@dataclass(frozen=True)
class Metadata:
    """What travels with the pixels.

    Attributes
    ----------
    icc : bytes or None
        Colour profile.
    exif : bytes or None
        EXIF data, from its TIFF header on, its orientation set to upright, without its thumbnail.
    native : tuple
        What only a file of the same format takes as it stands: PNG chunks (kind, payload),
        the JFIF segment of a JPEG, TIFF fields (tag, type, count, value).
    alpha : int
        What TIFF's ExtraSamples says of the fourth channel: 0 unspecified, 1 premultiplied, 2 plain.
    """

    icc: bytes | None = None
    exif: bytes | None = None
    native: tuple[tuple[bytes, bytes], ...] | tuple[Field, ...] = ()
    alpha: int = 2


@dataclass(frozen=True)
class Header:
    """What a file says about its picture.

    Attributes
    ----------
    format : str
    width, height : int
        As stored, before `orientation` is applied.
    channels : int
        1, 3 or 4, as decoded: a palette counts as 3.
    dtype : numpy.dtype
        As decoded: fewer than 8 bits become 8.
    orientation : int
        EXIF's 1 to 8: how the stored pixels must be turned to stand upright.
    metadata : Metadata
    patches : tuple of (int, bytes)
        Bytes to be replaced before decoding, by offset.
    """

    format: Format
    width: int
    height: int
    channels: int
    dtype: np.dtype[Any]
    orientation: int = 1
    metadata: Metadata = field(default_factory=Metadata)
    patches: tuple[tuple[int, bytes], ...] = ()


def format_of(data: bytes) -> Format:
    """The format that the first bytes of a file announce; a PictureError if it is none of ours."""
    for magic, name in MAGIC.items():
        if data.startswith(magic):
            return name
    raise PictureError("is empty" if not data else "is not a PNG, JPEG or TIFF picture")


def inspect(data: bytes) -> Header:
    """The header of a whole file.

    Raises
    ------
    PictureError
        It is no picture, is damaged, or holds what can't be filtered and written back faithfully.
    """
    readers = {"png": _inspect_png, "jpeg": _inspect_jpeg, "tiff": _inspect_tiff}
    name = format_of(data)
    try:
        return readers[name](data)
    # An offset of 64 bits may be too large to be looked at.
    except (struct.error, IndexError, OverflowError) as e:
        raise PictureError(f"is cut short or damaged: its {name.upper()} header is incomplete") from e


def embed(encoded: bytes, name: Format, metadata: Metadata, source: Format | None) -> bytes:
    """An encoded file with `metadata` in it; `source` is the format that it came from."""
    native = metadata.native if source == name else ()
    writers = {"png": _embed_png, "jpeg": _embed_jpeg, "tiff": _embed_tiff}
    return writers[name](encoded, metadata, native)


# -- EXIF


def _upright_exif(exif: bytes) -> tuple[int, bytes | None]:
    """The orientation in `exif`, and the same data saying upright and naming no thumbnail."""
    try:
        order = {b"II*\0": "<", b"MM\0*": ">"}[exif[:4]]
        at = struct.unpack_from(order + "I", exif, 4)[0]
        count = struct.unpack_from(order + "H", exif, at)[0]
        edited = bytearray(exif)
        orientation = 1
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind = struct.unpack_from(order + "HH", exif, entry)
            if tag == ORIENTATION and kind == SHORT:
                orientation = struct.unpack_from(order + "H", exif, entry + 8)[0]
                struct.pack_into(order + "H", edited, entry + 8, 1)
        # The second directory describes the thumbnail, which shows the picture before.
        struct.pack_into(order + "I", edited, at + 2 + 12 * count, 0)
    except (KeyError, struct.error):
        return 1, None
    return orientation if 1 <= orientation <= 8 else 1, bytes(edited)


# -- PNG

# Colour, transparency of colour and resolution; text stays behind (XMP repeats the orientation there).
_PNG_KEPT = (b"cHRM", b"gAMA", b"sRGB", b"cICP", b"mDCV", b"cLLI", b"pHYs")


def _png_chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 8
    while True:
        size, kind = struct.unpack_from(">I4s", data, at)
        payload = data[at + 8 : at + 8 + size]
        (crc,) = struct.unpack_from(">I", data, at + 8 + size)
        if zlib.crc32(payload, zlib.crc32(kind)) != crc:
            raise PictureError("is damaged: a checksum in the PNG file is wrong")
        yield kind, payload
        if kind == b"IEND":
            return
        at += 12 + size


def _inspect_png(data: bytes) -> Header:
    width = height = bits = colour = 0
    icc = exif = None
    orientation, transparent, pixels = 1, False, False
    native = []
    for position, (kind, payload) in enumerate(_png_chunks(data)):
        if (kind == b"IHDR") != (position == 0):
            raise PictureError("is damaged: the PNG file doesn't begin with one header")
        if kind == b"IHDR":
            width, height, bits, colour = struct.unpack_from(">IIBB", payload)
        elif kind == b"acTL":
            raise PictureError("is an animated PNG, of which only one frame would be kept")
        elif kind == b"tRNS":
            transparent = True
        elif kind == b"IDAT":
            pixels = True
        elif kind == b"iCCP":
            icc = _unpack_profile(payload)
        elif kind == b"eXIf":
            orientation, exif = _upright_exif(payload)
        elif kind in _PNG_KEPT:
            native.append((kind, payload))
    if not pixels:
        raise PictureError("is damaged: the PNG file holds no pixels")
    if colour == 0 and transparent:
        raise PictureError("is a grey PNG with one colour made transparent (tRNS), which isn't supported")
    if colour not in (0, 2, 3, 4, 6) or bits not in (1, 2, 4, 8, 16):
        raise PictureError(f"is damaged: PNG has no colour type {colour} with {bits} bits")
    channels = {0: 1, 2: 4 if transparent else 3, 3: 4 if transparent else 3, 4: 4, 6: 4}[colour]
    return Header(
        "png", width, height, channels, np.dtype(np.uint16 if bits == 16 else np.uint8), orientation,
        Metadata(_fitting(icc, channels), exif, tuple(native)),
    )  # fmt: skip


def _unpack_profile(payload: bytes) -> bytes | None:
    packed = payload.partition(b"\0")[2][1:]
    unpacker = zlib.decompressobj()
    try:
        profile = unpacker.decompress(packed, LARGEST_PROFILE)
    except zlib.error:
        return None
    return profile if unpacker.eof else None


def _png_chunk(kind: bytes, payload: bytes) -> bytes:
    crc = zlib.crc32(payload, zlib.crc32(kind))
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", crc)


def _embed_png(encoded: bytes, metadata: Metadata, native: tuple[Any, ...]) -> bytes:
    added = [] if metadata.icc is None else [(b"iCCP", b"ICC profile\0\0" + zlib.compress(metadata.icc))]
    # A profile overrules these; sRGB beside it isn't allowed.
    added += [(kind, payload) for kind, payload in native if not (metadata.icc and kind == b"sRGB")]
    if metadata.exif is not None:
        added.append((b"eXIf", metadata.exif))
    header, *rest = _png_chunks(encoded)
    kept = [chunk for chunk in rest if chunk[0] not in (*_PNG_KEPT, b"iCCP", b"eXIf")]
    return encoded[:8] + b"".join(_png_chunk(*chunk) for chunk in (header, *added, *kept))


# -- JPEG

_EXIF = b"Exif\0\0"
_ICC = b"ICC_PROFILE\0"
_SEGMENT = 65533
"""Bytes that a JPEG segment holds after its length."""


def _jpeg_segments(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Marker and payload of each segment up to the first scan."""
    at = 2
    while True:
        if data[at] != 0xFF:
            raise PictureError("is damaged: the JPEG file has no marker where one must be")
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
            continue
        if marker == 0xD9:
            raise PictureError("is damaged: the JPEG file holds no pixels")
        (size,) = struct.unpack_from(">H", data, at + 2)
        yield marker, data[at + 4 : at + 2 + size]
        if marker == 0xDA:
            return
        at += 2 + size


def _inspect_jpeg(data: bytes) -> Header:
    width = height = channels = 0
    orientation, exif = 1, None
    profile: dict[int, bytes] = {}
    native = []
    for marker, payload in _jpeg_segments(data):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            bits, height, width, channels = struct.unpack_from(">BHHB", payload)
            if bits != 8:
                raise PictureError(f"is a JPEG with {bits} bits a sample; 8 are supported")
        elif marker == 0xE0 and payload.startswith(b"JFIF\0") and len(payload) >= 14:
            # Without its thumbnail, which shows the picture before.
            native.append((b"JFIF", payload[:12] + b"\0\0"))
        elif marker == 0xE1 and payload.startswith(_EXIF) and exif is None:
            orientation, exif = _upright_exif(payload[len(_EXIF) :])
        elif marker == 0xE2 and payload.startswith(_ICC):
            profile[payload[len(_ICC)]] = payload[len(_ICC) + 2 :]
    if channels == 4:
        raise PictureError("is a CMYK JPEG; convert it to RGB first, with its colour profile")
    if channels not in (1, 3):
        raise PictureError(f"is a JPEG with {channels} channels; 1 and 3 are supported")
    icc = b"".join(profile[i] for i in sorted(profile)) or None
    return Header(
        "jpeg", width, height, channels, np.dtype(np.uint8), orientation,
        Metadata(_fitting(icc, channels), exif, tuple(native[:1])),
    )  # fmt: skip


def _jpeg_segment(marker: int, payload: bytes) -> bytes:
    return struct.pack(">BBH", 0xFF, marker, len(payload) + 2) + payload


def _embed_jpeg(encoded: bytes, metadata: Metadata, native: tuple[Any, ...]) -> bytes:
    added = [_jpeg_segment(0xE0, payload) for _, payload in native]
    at = 2
    if native and encoded[2:4] == b"\xff\xe0":
        at += 2 + struct.unpack_from(">H", encoded, 4)[0]
    elif encoded[2:4] == b"\xff\xe0":
        at += 2 + struct.unpack_from(">H", encoded, 4)[0]
        added = [encoded[2:at]]
    if metadata.exif is not None and len(metadata.exif) <= _SEGMENT - len(_EXIF):
        added.append(_jpeg_segment(0xE1, _EXIF + metadata.exif))
    if metadata.icc is not None:
        step = _SEGMENT - len(_ICC) - 2
        parts = [metadata.icc[i : i + step] for i in range(0, len(metadata.icc), step)]
        if len(parts) <= 255:
            added += [
                _jpeg_segment(0xE2, _ICC + bytes([number, len(parts)]) + part)
                for number, part in enumerate(parts, 1)
            ]
    return encoded[:2] + b"".join(added) + encoded[at:]


# -- TIFF

SHORT, LONG, UNDEFINED = 3, 4, 7
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 1, 7: 1, 8: 2, 9: 4, 10: 8, 11: 4, 12: 8, 13: 4, 16: 8, 17: 8, 18: 8}  # fmt: skip
_CODES = {1: "B", SHORT: "H", LONG: "I", 13: "I", 16: "Q"}

WIDTH, HEIGHT, BITS, COMPRESSION, PHOTOMETRIC = 256, 257, 258, 259, 262
STRIP_OFFSETS, ORIENTATION, SAMPLES, STRIP_COUNTS, PLANAR = 273, 274, 277, 279, 284
X_RESOLUTION, Y_RESOLUTION, RESOLUTION_UNIT = 282, 283, 296
TILE_OFFSETS, TILE_COUNTS, EXTRA_SAMPLES, SAMPLE_FORMAT, PROFILE = 324, 325, 338, 339, 34675

_PHOTOMETRIC = {
    0: "white-is-zero", 1: "grey", 2: "RGB", 3: "palette", 4: "mask", 5: "CMYK", 6: "YCbCr", 8: "Lab",
    9: "ICC Lab", 10: "ITU Lab", 32803: "raw sensor (CFA)", 34892: "raw linear", 32844: "LogL", 32845: "LogLuv",
}  # fmt: skip


class Field(NamedTuple):
    """A TIFF field; `value` holds its bytes in the file's order, `at` where they stand."""

    tag: int
    kind: int
    items: int
    value: bytes | memoryview
    at: int = 0


class _Tiff:
    """The directories of a TIFF or BigTIFF file."""

    def __init__(self, data: bytes) -> None:
        # A view: the fields of a malicious file may all name the same megabytes.
        self.data = memoryview(data)
        self.order = "<" if data[:2] == b"II" else ">"
        self.big = data[2:4] in (b"+\0", b"\0+")
        # Width of the directory's count, of a field's count, and of offsets.
        self.directory, self.word = ("Q", "Q") if self.big else ("H", "I")
        self.first = self._at(self.word, 8 if self.big else 4)

    def _at(self, code: str, at: int) -> int:
        return int(struct.unpack_from(self.order + code, self.data, at)[0])

    def fields(self, at: int) -> tuple[dict[int, Field], int]:
        """The fields of the directory at an offset, by tag, and the offset of the next directory."""
        head, word = struct.calcsize("=" + self.directory), struct.calcsize("=" + self.word)
        entry = 4 + 2 * word
        count = self._at(self.directory, at)
        if at + head + count * entry + word > len(self.data):
            raise PictureError("is cut short or damaged: a TIFF directory reaches past the end of the file")
        found: dict[int, Field] = {}
        for start in range(at + head, at + head + count * entry, entry):
            tag, kind = struct.unpack_from(self.order + "HH", self.data, start)
            items = self._at(self.word, start + 4)
            size = items * _SIZES.get(kind, 0)
            place = start + 4 + word
            if size > word:
                place = self._at(self.word, place)
            if place + size > len(self.data):
                raise PictureError("is cut short or damaged: a TIFF field reaches past the end of the file")
            found.setdefault(tag, Field(tag, kind, items, self.data[place : place + size], place))
        return found, self._at(self.word, at + head + count * entry)

    def numbers(self, entry: Field | None, default: tuple[int, ...]) -> tuple[int, ...]:
        """The whole numbers in a field, or `default` without it."""
        if entry is None or entry.kind not in _CODES:
            return default
        return struct.unpack(f"{self.order}{entry.items}{_CODES[entry.kind]}", entry.value)


def _inspect_tiff(data: bytes) -> Header:
    tiff = _Tiff(data)
    fields, following = tiff.fields(tiff.first)

    def number(tag: int, default: int) -> int:
        return (tiff.numbers(fields.get(tag), (default,)) or (default,))[0]

    if following:
        raise PictureError("is a TIFF of several pages, of which only the first would be kept")
    width, height = number(WIDTH, 0), number(HEIGHT, 0)
    samples = number(SAMPLES, 1)
    bits = set(tiff.numbers(fields.get(BITS), (1,)))
    kinds = set(tiff.numbers(fields.get(SAMPLE_FORMAT), (1,)))
    photometric = number(PHOTOMETRIC, -1)
    alpha = tiff.numbers(fields.get(EXTRA_SAMPLES), ())
    kind = (photometric, samples, *sorted(bits), *sorted(kinds))
    colour = {3: 3, 4: 4}.get(samples, 0)
    known = {
        (0, 1, 1, 1): (1, "u1"), (1, 1, 1, 1): (1, "u1"), (0, 1, 8, 1): (1, "u1"), (3, 1, 8, 1): (3, "u1"),
        (6, 3, 8, 1): (3, "u1"),
        **{(1, 1, 8 * s, f): (1, f"{t}{s}") for t, s, f in _TIFF_TYPES},
        **{(2, samples, 8 * s, f): (colour, f"{t}{s}") for t, s, f in _TIFF_TYPES if colour},
    }  # fmt: skip
    if kind not in known or (samples > 1 and number(PLANAR, 1) != 1):
        raise PictureError(
            f"is a TIFF of a kind that isn't supported: {_PHOTOMETRIC.get(photometric, photometric)}, "
            f"{samples} samples of {'/'.join(map(str, sorted(bits)))} bits"
            f"{', one plane each' if number(PLANAR, 1) != 1 else ''}; supported are grey, RGB and RGBA "
            "with 8 or 16 bits, or 32- and 64-bit floats, 8-bit palettes and 1-bit black and white"
        )
    for offsets, counts in ((STRIP_OFFSETS, STRIP_COUNTS), (TILE_OFFSETS, TILE_COUNTS)):
        starts = tiff.numbers(fields.get(offsets), ())
        sizes = tiff.numbers(fields.get(counts), ())
        if any(start + size > len(data) for start, size in zip(starts, sizes, strict=False)):
            raise PictureError("is cut short: its pixels reach past the end of the file")
    patches = []
    orientation = number(ORIENTATION, 1)
    # OpenCV would turn some kinds by itself and not others.
    if ORIENTATION in fields and fields[ORIENTATION].kind == SHORT:
        patches.append((fields[ORIENTATION].at, struct.pack(tiff.order + "H", 1)))
    # Colours of 8 bits beside plain alpha come back multiplied by it, beside premultiplied alpha as stored.
    if alpha[:1] == (2,) and fields[EXTRA_SAMPLES].kind == SHORT:
        patches.append((fields[EXTRA_SAMPLES].at, struct.pack(tiff.order + "H", 1)))
    channels, dtype = known[kind]
    profile = fields.get(PROFILE)
    resolution = tuple(
        fields[t]._replace(value=_little(fields[t], tiff.order))
        for t in (X_RESOLUTION, Y_RESOLUTION, RESOLUTION_UNIT)
        if t in fields and fields[t].kind in (SHORT, 5)
    )
    return Header(
        "tiff", width, height, channels, np.dtype(dtype), orientation if 1 <= orientation <= 8 else 1,
        Metadata(_fitting(bytes(profile.value) if profile else None, channels), None, resolution, (alpha or (0,))[0]),
        tuple(patches),
    )  # fmt: skip


_TIFF_TYPES = (("u", 1, 1), ("u", 2, 1), ("f", 4, 3), ("f", 8, 3))


def _little(entry: Field, order: str) -> bytes:
    code = "H" if entry.kind == SHORT else "I"
    count = len(entry.value) // struct.calcsize("=" + code)
    return struct.pack(f"<{count}{code}", *struct.unpack(f"{order}{count}{code}", entry.value))


def _embed_tiff(encoded: bytes, metadata: Metadata, native: tuple[Any, ...]) -> bytes:
    """`encoded`, a little-endian TIFF, with a directory at its end that has more fields."""
    tiff = _Tiff(encoded)
    fields, _ = tiff.fields(tiff.first)
    added = list(native)
    if metadata.icc is not None:
        added.append(Field(PROFILE, UNDEFINED, len(metadata.icc), metadata.icc))
    if tiff.numbers(fields.get(SAMPLES), (1,)) == (4,):
        added.append(Field(EXTRA_SAMPLES, SHORT, 1, struct.pack("<H", metadata.alpha)))
    if not added or tiff.big or tiff.order != "<":
        return encoded
    fields |= {new.tag: new for new in added}
    start = len(encoded) + len(encoded) % 2
    values = start + 2 + 12 * len(fields) + 4
    directory, tail = struct.pack("<H", len(fields)), b""
    for tag in sorted(fields):
        _, kind, items, view, _ = fields[tag]
        value = bytes(view)
        if len(value) > 4:
            place = struct.pack("<I", values + len(tail))
            tail += value + b"\0" * (len(value) % 2)
        else:
            place = value.ljust(4, b"\0")
        directory += struct.pack("<HHI", tag, kind, items) + place
    whole = encoded[:4] + struct.pack("<I", start) + encoded[8:] + b"\0" * (start - len(encoded))
    return whole + directory + b"\0\0\0\0" + tail


def _fitting(icc: bytes | None, channels: int) -> bytes | None:
    """`icc` if it describes pictures of that many channels: a grey profile doesn't fit RGB."""
    if icc is None or icc[16:20] != (b"GRAY" if channels == 1 else b"RGB "):
        return None
    return icc
