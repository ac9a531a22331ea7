"""`convpar filter`: right pictures, and nothing lost whatever goes wrong."""

from __future__ import annotations

import io
import os
import signal
import stat
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import ExifTags, Image, ImageOps
from scipy import ndimage

import convpar
from convpar.cli import containers, files, images
from convpar.cli import filter as filter_module
from convpar.cli import named_kernels as kernels
from convpar.cli.app import application

ROOT = Path(convpar.__file__).parent.parent
MODES = {
    "mirror": "mirror",
    "symm": "reflect",
    "nearest": "nearest",
    "wrap": "grid-wrap",
    "fill": "grid-constant",
}
THUMBNAIL = ExifTags.IFD.IFD1
SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1.0]])


# -- helpers


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(application, ["filter", *map(str, arguments)], catch_exceptions=False)


def done(*arguments: Any) -> Result:
    """A run that must succeed, silently."""
    result = run(*arguments)
    assert (result.exit_code, result.output) == (0, "")
    return result


def refused(*arguments: Any) -> str:
    """The one line that a run must fail with."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("convpar: ")
    return lines[0]


def spawn(code: str, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """A Python process that runs `code` with `arguments` in sys.argv, beside this convpar."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options,
    )  # fmt: skip


MAIN = "import sys; from convpar.cli import main; sys.exit(main())"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def noise(channels: int, dtype: Any = np.uint8, size: tuple[int, int] = (23, 31)) -> np.ndarray:
    shape = size if channels == 1 else (*size, channels)
    if np.dtype(dtype).kind == "f":
        return rng().normal(size=shape).astype(dtype)
    return rng().integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def opencv_order(pixels: np.ndarray) -> np.ndarray:
    return pixels[..., [2, 1, 0, 3][: pixels.shape[2]]] if pixels.ndim == 3 else pixels


def save(path: Path, pixels: np.ndarray, *options: int) -> Path:
    """Write RGB(A) pixels with OpenCV."""
    assert cv2.imwrite(str(path), opencv_order(pixels), list(options))
    return path


def load(path: Path) -> np.ndarray:
    """RGB(A) pixels as they are in the file; right for the files that convpar writes."""
    return opencv_order(images.read(path).pixels)


def expected(
    pixels: np.ndarray, weights: np.ndarray, mode: str = "mirror", offset: float = 0, fill: float = 0
) -> np.ndarray:
    """The right picture, from scipy.ndimage in float64."""
    colours = np.atleast_3d(pixels)[..., :3].astype(np.float64)
    sums = np.stack(
        [
            ndimage.correlate(colours[..., i], weights, mode=MODES[mode], cval=fill)
            for i in range(colours.shape[2])
        ],
        axis=-1,
    )
    sums = sums + offset
    if pixels.dtype.kind == "u":
        sums = np.clip(np.rint(sums), 0, np.iinfo(pixels.dtype).max)
    y = np.concatenate([sums.astype(pixels.dtype), np.atleast_3d(pixels)[..., 3:]], axis=-1)
    return y.reshape(pixels.shape)


def folder_state(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file()}


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png(width: int, height: int, bits: int, colour: int, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    """A PNG file from its parts; `rows` with a filter byte in front of each."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(png_chunk(*c) for c in chunks)


def tiff(pixels: np.ndarray, order: str = "<", big: bool = False, pages: int = 1, **changes: Any) -> bytes:
    """An uncompressed TIFF file of one strip; `changes` are fields by name, as numbers or bytes, None to omit."""
    samples = pixels.shape[2] if pixels.ndim == 3 else 1
    data = pixels.astype(pixels.dtype.newbyteorder(order)).tobytes()
    bits = 8 * pixels.dtype.itemsize
    named = {
        "width": (256, pixels.shape[1]), "height": (257, pixels.shape[0]), "bits": (258, (bits,) * samples),
        "compression": (259, 1), "photometric": (262, 2 if samples >= 3 else 1), "offsets": (273, 0),
        "orientation": (274, None), "samples": (277, samples), "rows": (278, pixels.shape[0]),
        "counts": (279, len(data)), "x_resolution": (282, None), "y_resolution": (283, None), "planar": (284, 1),
        "unit": (296, None), "colours": (320, None), "extra": (338, None),
        "format": (339, ({"u": 1, "i": 2, "f": 3}[pixels.dtype.kind],) * samples), "profile": (34675, None),
    }  # fmt: skip
    fields = {tag: changes.get(name, value) for name, (tag, value) in named.items()}
    fields = {tag: value for tag, value in fields.items() if value is not None}
    head = 16 if big else 8
    fields[273] = changes.get("offsets", head)
    directory_at = head + len(data) + len(data) % 2
    word = "Q" if big else "I"
    entry = 20 if big else 12
    body = b""
    for page in range(pages):
        at = directory_at + len(body)
        values_at = at + (8 if big else 2) + entry * len(fields) + (8 if big else 4)
        table, values = struct.pack(order + ("Q" if big else "H"), len(fields)), b""
        for tag in sorted(fields):
            value = fields[tag]
            if isinstance(value, bytes):
                kind, count, raw = (5 if tag in (282, 283) else 7), len(value), value
                count = 1 if kind == 5 else count
            else:
                many = value if isinstance(value, tuple) else (value,)
                kind, code = (4, "I") if tag in (256, 257, 273, 279) else (3, "H")
                count, raw = len(many), struct.pack(f"{order}{len(many)}{code}", *many)
            size = struct.calcsize("=" + word)
            if len(raw) > size:
                place = struct.pack(order + word, values_at + len(values))
                values += raw + b"\0" * (len(raw) % 2)
            else:
                place = raw.ljust(size, b"\0")
            table += struct.pack(f"{order}HH{word}", tag, kind, count) + place
        following = values_at + len(values) if page + 1 < pages else 0
        body += table + struct.pack(order + word, following) + values
    mark = b"II" if order == "<" else b"MM"
    if big:
        header = mark + struct.pack(order + "HHHQ", 43, 8, 0, directory_at)
    else:
        header = mark + struct.pack(order + "HI", 42, directory_at)
    return header + data + b"\0" * (len(data) % 2) + body


def pillow(image: Any, form: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def profile(space: bytes = b"RGB ", size: int = 400) -> bytes:
    """Bytes that begin as an ICC profile of that colour space does."""
    head = struct.pack(
        ">I4s4s4s4s4s12s4s", size, b"none", b"\x04\x30\0\0", b"mntr", space, b"XYZ ", b"\0" * 12, b"acsp"
    )
    return (head + rng(3).bytes(size))[:size]


# -- right pictures


@pytest.mark.parametrize("channels", [1, 3, 4])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64"])
@pytest.mark.parametrize("extension", [".png", ".tif", ".TIFF"])
def test_each_kind_of_picture_stays_what_it_is(
    tmp_path: Path, channels: int, dtype: str, extension: str
) -> None:
    if dtype.startswith("float"):
        if extension == ".png":
            assert "can't hold float" in refused(
                _float_file(tmp_path, channels, dtype), tmp_path / "out.png", "-k", "emboss"
            )
            return
        source = _float_file(tmp_path, channels, dtype)
        pixels = noise(channels, dtype)
    else:
        pixels = noise(channels, dtype)
        source = tmp_path / "in.tif"
        source.write_bytes(tiff(pixels, extra=2 if channels == 4 else None))
    target = tmp_path / f"out{extension}"
    done(source, target, "-k", "emboss")
    got, right = load(target), expected(pixels, kernels.emboss())
    assert (got.dtype, got.shape) == (pixels.dtype, pixels.shape)
    if pixels.dtype.kind == "u":
        assert np.array_equal(got, right)
    else:
        bound = 11 * np.finfo(dtype).eps * expected(np.abs(pixels), np.abs(kernels.emboss()))
        assert (np.abs(got - right) <= bound).all()
        if channels == 4:
            assert np.array_equal(got[..., 3], pixels[..., 3])


def _float_file(folder: Path, channels: int, dtype: str) -> Path:
    source = folder / "in.tif"
    source.write_bytes(tiff(noise(channels, dtype), extra=2 if channels == 4 else None))
    return source


@pytest.mark.parametrize("channels", [1, 3])
def test_jpeg(tmp_path: Path, channels: int) -> None:
    smooth = ndimage.gaussian_filter(noise(channels, np.float64, (64, 80)), (3, 3, 0)[: 2 + (channels > 1)])
    pixels = np.clip(128 + 400 * smooth, 0, 255).astype(np.uint8)
    source = tmp_path / "in.jpg"
    source.write_bytes(pillow(Image.fromarray(pixels), "jpeg", quality=95))
    stored = np.asarray(Image.open(source))
    done(source, tmp_path / "out.png", "-k", "sharpen")
    assert np.array_equal(load(tmp_path / "out.png"), expected(stored, kernels.sharpen()))
    done(source, tmp_path / "out.jpeg", "-k", "box:3", "--quality", 100)
    written = load(tmp_path / "out.jpeg").astype(int)
    assert np.abs(written - expected(stored, kernels.box(3))).mean() < 1
    done(source, tmp_path / "small.jpg", "-k", "box:3", "--quality", 10)
    assert (tmp_path / "small.jpg").stat().st_size < (tmp_path / "out.jpeg").stat().st_size / 2


@pytest.mark.parametrize(
    ("mode", "right"),
    [("P", "RGB"), ("PA", "RGBA"), ("LA", "RGBA"), ("1", "L"), ("L4", "L"), ("L2", "L")],
)
def test_png_kinds_that_are_widened(tmp_path: Path, mode: str, right: str) -> None:
    source = tmp_path / "in.png"
    if mode in ("L4", "L2"):
        bits = int(mode[1])
        values = rng().integers(0, 2**bits, (6, 8))
        each = 8 // bits
        packed = sum(values[:, i::each] << (8 - bits * (i + 1)) for i in range(each)).astype(np.uint8)
        rows = b"".join(b"\0" + row.tobytes() for row in packed)
        source.write_bytes(png(8, 6, bits, 0, rows))
        pixels = (values * (255 // (2**bits - 1))).astype(np.uint8)
    else:
        colours = Image.fromarray(noise(3))
        if mode == "P":
            made, options = colours.quantize(16), {}
        elif mode == "PA":
            made, options = colours.quantize(16), {"transparency": bytes(range(0, 160, 10))}
        elif mode == "LA":
            made, options = (
                Image.merge("LA", [Image.fromarray(noise(1)), Image.fromarray(noise(1)[::-1].copy())]),
                {},
            )
        else:
            made, options = colours.convert("1"), {}
        source.write_bytes(pillow(made, "png", **options))
        pixels = np.asarray(Image.open(source).convert(right))
    done(source, tmp_path / "out.png", "-k", "sobel-x", "--offset", 128)
    assert np.array_equal(load(tmp_path / "out.png"), expected(pixels, SOBEL, offset=128))


def test_png_colour_made_transparent_in_rgb(tmp_path: Path) -> None:
    pixels = noise(3)
    pixels[2:5, 3:9] = (1, 2, 3)
    source = tmp_path / "in.png"
    source.write_bytes(pillow(Image.fromarray(pixels), "png", transparency=(1, 2, 3)))
    done(source, tmp_path / "out.png", "-k", "box:3")
    got = load(tmp_path / "out.png")
    assert np.array_equal(got[..., 3], np.where((pixels == (1, 2, 3)).all(-1), 0, 255))
    assert np.array_equal(got[..., :3], expected(pixels, kernels.box(3)))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("kind", ["<", ">", "big <", "big >"])
def test_tiff_byte_orders_and_sizes(tmp_path: Path, dtype: str, kind: str) -> None:
    pixels = noise(3, dtype)
    source = tmp_path / "in.tif"
    source.write_bytes(tiff(pixels, order=kind[-1], big=kind.startswith("big")))
    done(source, tmp_path / "out.tif", "-k", "emboss")
    assert np.array_equal(load(tmp_path / "out.tif"), expected(pixels, kernels.emboss()))


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("meaning", [0, 1, 2])
def test_tiff_alpha_comes_through_whatever_it_means(tmp_path: Path, dtype: str, meaning: int) -> None:
    pixels = noise(4, dtype)
    source, target = tmp_path / "in.tif", tmp_path / "out.tif"
    source.write_bytes(tiff(pixels, extra=meaning))
    done(source, target, "-k", "emboss")
    assert np.array_equal(load(target), expected(pixels, kernels.emboss()))
    assert images.read(target).metadata.alpha == meaning
    if meaning == 1:
        assert "premultiplied" in refused(source, tmp_path / "out.png", "-k", "emboss")
    else:
        done(source, tmp_path / "out.png", "-k", "emboss")
        assert np.array_equal(load(tmp_path / "out.png"), load(target))


def test_tiff_white_is_zero_palette_and_one_bit(tmp_path: Path) -> None:
    grey = noise(1)
    (tmp_path / "white.tif").write_bytes(tiff(grey, photometric=0))
    done(tmp_path / "white.tif", tmp_path / "out.tif", "-k", "emboss")
    assert np.array_equal(load(tmp_path / "out.tif"), expected(255 - grey, kernels.emboss()))
    picture = Image.fromarray(noise(3)).quantize(32)
    (tmp_path / "palette.tif").write_bytes(pillow(picture, "tiff"))
    done(tmp_path / "palette.tif", tmp_path / "out.tif", "-k", "emboss")
    assert np.array_equal(
        load(tmp_path / "out.tif"), expected(np.asarray(picture.convert("RGB")), kernels.emboss())
    )
    bits = Image.fromarray(grey > 128)
    for compression in (None, "group4"):
        (tmp_path / "bits.tif").write_bytes(pillow(bits, "tiff", compression=compression))
        done(tmp_path / "bits.tif", tmp_path / "out.tif", "-k", "emboss")
        assert np.array_equal(
            load(tmp_path / "out.tif"), expected(np.asarray(bits) * np.uint8(255), kernels.emboss())
        )


@pytest.mark.parametrize("compression", ["tiff_lzw", "tiff_adobe_deflate", "packbits"])
def test_tiff_compressions(tmp_path: Path, compression: str) -> None:
    pixels = noise(3)
    source = tmp_path / "in.tif"
    source.write_bytes(pillow(Image.fromarray(pixels), "tiff", compression=compression))
    done(source, tmp_path / "out.tif", "-k", "emboss")
    assert np.array_equal(load(tmp_path / "out.tif"), expected(pixels, kernels.emboss()))


@pytest.mark.parametrize("boundary", sorted(MODES))
@pytest.mark.parametrize("size", [(23, 31), (3, 5), (1, 1)])
def test_boundaries(tmp_path: Path, boundary: str, size: tuple[int, int]) -> None:
    pixels = noise(3, size=size)
    source = save(tmp_path / "in.png", pixels)
    weights = "1 2 3 4 5; 0 -1 2 0 1; 3 1 4 1 5"
    matrix = np.array([row.split() for row in weights.split(";")], float)
    done(
        source,
        tmp_path / "out.png",
        "-k",
        weights,
        "--boundary",
        boundary,
        *(("--fillvalue", 40) if boundary == "fill" else ()),
        "--scale",
        0.03125,
    )
    got = load(tmp_path / "out.png")
    assert np.array_equal(got, _by_padding(pixels, matrix * 0.03125, boundary, 40))


def _by_padding(pixels: np.ndarray, weights: np.ndarray, boundary: str, fill: float) -> np.ndarray:
    """For sizes where ndimage's modes are not to be relied on: numpy.pad, one step at a time."""
    modes = {"mirror": "reflect", "symm": "symmetric", "nearest": "edge", "wrap": "wrap", "fill": "constant"}
    options = {"constant_values": fill} if boundary == "fill" else {}
    reach = [k // 2 for k in weights.shape]
    padded = np.pad(
        pixels.astype(float), [(reach[0],) * 2, (reach[1],) * 2, (0, 0)], mode=modes[boundary], **options
    )
    windows = np.lib.stride_tricks.sliding_window_view(padded, weights.shape, axis=(0, 1))
    return np.clip(np.rint(np.tensordot(windows, weights, 2)), 0, 255).astype(np.uint8)


def test_flip_normalize_scale_and_offset(tmp_path: Path) -> None:
    pixels = noise(1)
    source, target = save(tmp_path / "in.png", pixels), tmp_path / "out.png"
    weights = np.array([[1, 2, 0], [0, 4, 1], [0, 0, 8.0]])
    text = "1 2 0; 0 4 1; 0 0 8"
    done(source, target, "-k", text, "--normalize")
    assert np.array_equal(load(target), expected(pixels, weights / 16))
    done(source, target, "-k", text, "--normalize", "--flip")
    assert np.array_equal(load(target), expected(pixels, weights[::-1, ::-1] / 16))
    done(source, target, "-k", text, "--scale", -0.25, "--offset", 200.25)
    assert np.array_equal(load(target), expected(pixels, -0.25 * weights, offset=200.25))
    assert "sum to 0" in refused(source, target, "-k", "sobel-x", "--normalize")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--offset", "nan"), "offset must be finite in float32 for uint8 pixels, not nan"),
        (("--offset", "-inf"), "offset must be finite in float32 for uint8 pixels, not -inf"),
        (("--boundary", "fill", "--fillvalue", "nan"), "fillvalue must be finite in float32 for uint8"),
        (("--boundary", "fill", "--fillvalue", "1e400"), "fillvalue must be finite in float32 for uint8"),
        (("--boundary", "fill", "--fillvalue", "1e39"), "fillvalue must be finite in float32 for uint8"),
        (("--boundary", "fill", "--fillvalue", "nan+1j"), "fillvalue must be finite in float32 for uint8"),
        (("--scale", "nan"), "'--scale': 'nan' is not a finite number"),
        (("--scale", "1e400"), "'--scale': '1e400' is not a finite number"),
    ],
)
def test_what_integers_cannot_hold_is_refused(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    source, target = save(tmp_path / "in.png", noise(3)), tmp_path / "out.png"
    target.write_bytes(b"before")
    assert says in refused(source, target, "-k", "box:3", *options)
    assert target.read_bytes() == b"before"


@pytest.mark.parametrize(
    ("extension", "options", "says"),
    [
        (".png", ("--fillvalue", 0), "--fillvalue does nothing with --boundary mirror; leave it out"),
        (".jpg", ("--boundary", "wrap", "--fillvalue", 3), "--fillvalue does nothing with --boundary wrap"),
        (".png", ("--quality", 95), "--quality does nothing with a picture that is PNG; leave it out"),
        (".tif", ("--quality", 50), "--quality does nothing with a picture that is TIFF; leave it out"),
    ],
)
def test_options_that_would_not_matter_are_refused(
    tmp_path: Path, extension: str, options: tuple[Any, ...], says: str
) -> None:
    source, target = save(tmp_path / "in.png", noise(3)), tmp_path / f"out{extension}"
    target.write_bytes(b"before")
    assert says in refused(source, target, "-k", "box:3", *options)
    assert target.read_bytes() == b"before"
    done(source, target, "-k", "box:3")


def test_the_accuracy_contract_is_passed_on(tmp_path: Path) -> None:
    source, target = save(tmp_path / "in.png", noise(1, size=(300, 400))), tmp_path / "out.png"
    normwise = ("-k", "gaussian:20", "--accuracy", "normwise", "--backend", "cpu-fft2d")
    done(source, target, *normwise)
    assert "promises normwise" in refused(
        source, target, *normwise[:2], "--accuracy", "elementwise", *normwise[4:]
    )
    assert "must be elementwise, normwise or a number" in refused(
        source, target, "-k", "box:3", "--accuracy", "x"
    )


def test_pictures_of_floats_may_have_nan_beyond_the_edge(tmp_path: Path) -> None:
    pixels = noise(1).astype(np.float32)
    source, target = save(tmp_path / "in.tif", pixels), tmp_path / "out.tif"
    done(source, target, "-k", "box:3", "--boundary", "fill", "--fillvalue", "nan")
    got = load(target)
    assert np.isfinite(got[1:-1, 1:-1]).all()
    assert np.isnan(got[[0, -1]]).all()


def test_sixteen_bits_are_rounded_as_exactly_as_doubles_are(tmp_path: Path) -> None:
    pixels = noise(1, np.uint16, (64, 64))
    source = save(tmp_path / "in.png", pixels)
    done(source, tmp_path / "out.png", "-k", "gaussian:3")
    exact = ndimage.correlate(pixels.astype(float), kernels.gaussian(3), mode="mirror")
    assert np.abs(load(tmp_path / "out.png") - exact).max() <= 0.5 + 1e-6


@pytest.mark.parametrize(
    "backend", [b.name for b in convpar.list_backends() if b.capabilities.device == "cpu"]
)
def test_every_rung_gives_the_same_picture(tmp_path: Path, backend: str) -> None:
    pixels = noise(3)
    source, target = save(tmp_path / "in.png", pixels), tmp_path / "out.png"
    result = run(source, target, "-k", "emboss", "--backend", backend, "--threads", 2, "-v")
    missing = next(b for b in convpar.list_backends() if b.name == backend).unavailable()
    if result.exit_code == 2 or missing is not None:
        assert result.exit_code == 2
        assert ("can't do this" if missing is None else "can't run here") in result.stderr
        assert not target.exists()
    else:
        assert f", {backend}, " in result.stderr
        assert np.array_equal(load(target), expected(pixels, kernels.emboss()))


def test_backend_options_are_passed_on(tmp_path: Path) -> None:
    source = save(tmp_path / "in.png", noise(3))
    rung = next(b for b in convpar.list_backends() if b.name == "cpu-private")
    assert rung.options
    done(source, tmp_path / "out.png", "-k", "box:3", "--backend", rung.name, "--config", "tile=4,8")
    assert "config has no key 'speed'" in refused(
        source, tmp_path / "out.png", "-k", "box:3", "--backend", rung.name, "--config", "speed=9"
    )
    assert "KEY=VALUE" in refused(source, tmp_path / "out.png", "-k", "box:3", "--config", "tile")
    assert "'cpu-none' is unknown" in refused(
        source, tmp_path / "out.png", "-k", "box:3", "--backend", "cpu-none"
    )


# -- what travels with the pixels


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("extension", [".jpg", ".png", ".tif"])
def test_orientation(tmp_path: Path, orientation: int, extension: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture = Image.fromarray(noise(3))
    source = tmp_path / f"in{extension}"
    if extension == ".tif":
        source.write_bytes(tiff(np.asarray(picture), orientation=orientation))
    else:
        source.write_bytes(pillow(picture, {".jpg": "jpeg", ".png": "png"}[extension], exif=exif.tobytes()))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(source)))
    done(source, tmp_path / "out.png", "-k", "sobel-x", "--offset", 128)
    assert np.array_equal(load(tmp_path / "out.png"), expected(upright, SOBEL, offset=128))
    done(source, tmp_path / f"same{extension}", "-k", "identity")
    with Image.open(tmp_path / f"same{extension}") as written:
        assert written.getexif().get(0x0112, 1) == 1
        assert written.size == upright.shape[1::-1]


@pytest.mark.parametrize("before", [".png", ".jpg", ".tif"])
@pytest.mark.parametrize("after", [".png", ".jpg", ".tif"])
@pytest.mark.parametrize("size", [400, 200_000])
def test_colour_profile_is_kept(tmp_path: Path, before: str, after: str, size: int) -> None:
    kept = profile(size=size)
    source, target = tmp_path / f"in{before}", tmp_path / f"out{after}"
    form = {".png": "png", ".jpg": "jpeg", ".tif": "tiff"}[before]
    source.write_bytes(pillow(Image.fromarray(noise(3)), form, icc_profile=kept))
    done(source, target, "-k", "identity")
    with Image.open(target) as written:
        written.load()
        assert written.info["icc_profile"] == kept
    assert load(target).shape == (23, 31, 3)


def test_a_profile_for_other_colours_is_left_out(tmp_path: Path) -> None:
    grey_with_alpha = Image.merge("LA", [Image.fromarray(noise(1))] * 2)
    source = tmp_path / "in.png"
    source.write_bytes(pillow(grey_with_alpha, "png", icc_profile=profile(b"GRAY")))
    done(source, tmp_path / "out.png", "-k", "identity")
    with Image.open(tmp_path / "out.png") as written:
        assert written.mode == "RGBA"
        assert "icc_profile" not in written.info


@pytest.mark.parametrize("before", [".png", ".jpg"])
@pytest.mark.parametrize("after", [".png", ".jpg"])
def test_exif_is_kept_without_its_thumbnail(tmp_path: Path, before: str, after: str) -> None:
    order = "<" if before == ".png" else ">"
    name = b"A. Photographer\0"
    thumbnail = 8 + 2 + 2 * 12 + 4 + len(name)
    exif = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(order + "IH", 8, 2)
    exif += struct.pack(order + "HHIHH", 0x0112, 3, 1, 6, 0)
    exif += struct.pack(order + "HHII", 0x013B, 2, len(name), thumbnail - len(name))
    exif += struct.pack(order + "I", thumbnail) + name
    exif += struct.pack(order + "HHHIHH", 1, 0x0103, 3, 1, 6, 0) + struct.pack(order + "I", 0)
    source, target = tmp_path / f"in{before}", tmp_path / f"out{after}"
    form, head = {".png": ("png", b""), ".jpg": ("jpeg", b"Exif\0\0")}[before]
    source.write_bytes(pillow(Image.fromarray(noise(3)), form, exif=head + exif))
    with Image.open(source) as given:
        assert given.getexif().get_ifd(THUMBNAIL)
    done(source, target, "-k", "identity")
    with Image.open(target) as written:
        kept = written.getexif()
        assert kept[0x013B] == "A. Photographer"
        assert kept[0x0112] == 1
        assert not kept.get_ifd(THUMBNAIL)
        assert written.size == (23, 31)


def test_damaged_exif_is_left_out(tmp_path: Path) -> None:
    source = tmp_path / "in.jpg"
    for exif in (b"II*\0\xff\xff\xff\xff", b"garbage!", b"II*\0\x08\0\0\0\xff\xff"):
        source.write_bytes(pillow(Image.fromarray(noise(3)), "jpeg", exif=b"Exif\0\0" + exif))
        done(source, tmp_path / "out.jpg", "-k", "identity")
        assert images.read(tmp_path / "out.jpg").metadata.exif is None


@pytest.mark.parametrize("extension", [".png", ".jpg", ".tif"])
def test_resolution_is_kept_within_a_format(tmp_path: Path, extension: str) -> None:
    source, target = tmp_path / f"in{extension}", tmp_path / f"out{extension}"
    form = {".png": "png", ".jpg": "jpeg", ".tif": "tiff"}[extension]
    source.write_bytes(pillow(Image.fromarray(noise(3)), form, dpi=(300, 150)))
    done(source, target, "-k", "identity")
    with Image.open(target) as written:
        assert tuple(round(d) for d in written.info["dpi"]) == (300, 150)


# -- kernels


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("sobel-x", lambda a: ndimage.sobel(a, 1)),
        ("sobel-y", lambda a: ndimage.sobel(a, 0)),
        ("prewitt-x", lambda a: ndimage.prewitt(a, 1)),
        ("prewitt-y", lambda a: ndimage.prewitt(a, 0)),
        ("laplacian", ndimage.laplace),
        ("box:3,5", lambda a: ndimage.uniform_filter(a, (3, 5))),
        ("box:7", lambda a: ndimage.uniform_filter(a, 7)),
        ("gaussian:1.3", lambda a: ndimage.gaussian_filter(a, 1.3)),
        ("gaussian:0.1", lambda a: a),
        ("identity", lambda a: a),
        ("sharpen", lambda a: a - ndimage.laplace(a)),
        ("unsharp:1.5", lambda a: 2 * a - ndimage.gaussian_filter(a, 1.5)),
        ("unsharp:1.5,0.5", lambda a: 1.5 * a - 0.5 * ndimage.gaussian_filter(a, 1.5)),
        ("scharr-x", lambda a: ndimage.correlate(a, np.outer([3, 10, 3], [-1, 0, 1]))),
        ("scharr-y", lambda a: ndimage.correlate(a, np.outer([-1, 0, 1], [3, 10, 3]))),
        ("laplacian-8", lambda a: 9 * ndimage.uniform_filter(a, 3) - 9 * a),
        ("1 2 1; 2 4 2;1,2,1;", lambda a: ndimage.correlate(a, np.outer([1, 2, 1], [1, 2, 1]))),
        ("-1 .5e1", lambda a: ndimage.correlate(a, [[-1, 5]], origin=(0, -1))),
    ],
)
def test_kernels_are_what_scipy_means_by_them(text: str, right: Any) -> None:
    picture = rng().normal(size=(40, 50))
    weights = kernels.parse(text)
    kh, kw = weights.shape
    inner = np.s_[kh : 40 - kh, kw : 50 - kw]
    origin = [-1 if k % 2 == 0 else 0 for k in weights.shape]
    got = ndimage.correlate(picture, weights, origin=origin)
    np.testing.assert_allclose(got[inner], right(picture)[inner], rtol=0, atol=1e-12)


def test_log_kernel() -> None:
    weights = kernels.parse("log:2")
    assert abs(weights.sum()) < 1e-15
    picture = rng().normal(size=(60, 60))
    got = ndimage.correlate(picture, weights)
    right = ndimage.gaussian_laplace(picture, 2, truncate=4)
    # ndimage samples the derivative along each axis by itself and doesn't take the mean off.
    np.testing.assert_allclose(got, right, rtol=0, atol=2e-3)


def test_emboss_lights_the_top_left() -> None:
    disc = np.zeros((21, 21))
    disc[6:15, 6:15] = 100
    relief = ndimage.correlate(disc, kernels.emboss())
    assert relief[6, 6] > 100 > relief[14, 14]
    assert np.array_equal(relief[9:12, 9:12], np.full((3, 3), 100))


def test_every_named_kernel_is_documented() -> None:
    for name, kernel in kernels.KERNELS.items():
        assert kernel.summary.endswith(".")
        assert kernel.usage(name).startswith(name)
    listing = run("--kernels")
    assert listing.exit_code == 0
    for name in kernels.KERNELS:
        assert name in listing.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nope", "is no kernel"),
        ("", "is no kernel"),
        ("sobel", "is no kernel"),
        ("gaussian", "gaussian:SIGMA"),
        ("gaussian:", "SIGMA of gaussian"),
        ("gaussian:0", "0.1 to"),
        ("gaussian:nan", "0.1 to"),
        ("gaussian:1e9", "0.1 to"),
        ("gaussian:1,2", "gaussian:SIGMA"),
        ("box:0", "whole number"),
        ("box:2.5", "whole number"),
        ("box:99999999999", "whole number"),
        ("unsharp:1,inf", "must be a number"),
        ("sobel-x:3", "is written sobel-x"),
        ("1 2; 3", "one length"),
        (";", "one length"),
        ("1 2 x", "no number"),
        ("1 nan", "aren't finite"),
        ("1 1e400", "aren't finite"),
        ("missing.npy", "there is no file"),
    ],
)
def test_kernels_that_are_refused(tmp_path: Path, text: str, says: str) -> None:
    source = save(tmp_path / "in.png", noise(1))
    assert says in refused(source, tmp_path / "out.png", f"--kernel={text}")
    assert not (tmp_path / "out.png").exists()


def test_too_large_weights(tmp_path: Path) -> None:
    source = save(tmp_path / "in.png", noise(1))
    assert "too large" in refused(source, tmp_path / "out.png", "-k", "1e30", "--scale", "1e30")


def test_kernel_from_a_file(tmp_path: Path) -> None:
    pixels = noise(3)
    source, target = save(tmp_path / "in.png", pixels), tmp_path / "out.png"
    weights = rng().integers(-3, 4, (5, 3))
    file = tmp_path / "kernel.npy"
    np.save(file, weights)
    done(source, target, "-k", file)
    assert np.array_equal(load(target), expected(pixels, weights.astype(float)))
    before = target.read_bytes()
    for array, says in (
        (np.ones(3), "must hold a matrix"),
        (np.ones((0, 3)), "must hold a matrix"),
        (np.ones((2, 2), complex), "must hold a matrix"),
        (np.array([[np.inf]]), "aren't finite"),
        (np.ones((5000, 1)), "are the most"),
    ):
        np.save(file, array)
        assert says in refused(source, target, "-k", file)
    np.save(file, np.array([[print]], dtype=object), allow_pickle=True)
    assert "can't be read as an array" in refused(source, target, "-k", file)
    file.write_bytes(b"\x93NUMPY")
    assert "can't be read as an array" in refused(source, target, "-k", file)
    file.write_bytes(b"")
    assert "can't be read as an array" in refused(source, target, "-k", file)
    assert target.read_bytes() == before


# -- what can't be read


def _png_with(*extra: tuple[bytes, bytes], colour: int = 0, bits: int = 8) -> bytes:
    return png(2, 2, bits, colour, b"\0\1\2\0\3\4", *extra)


HOSTILE: dict[str, tuple[Any, str]] = {
    "empty": (b"", "is empty"),
    "text": (b"hello, world\n" * 100, "is not a PNG, JPEG or TIFF picture"),
    "zeros": (b"\0" * 5000, "is not a PNG, JPEG or TIFF picture"),
    "gif": (lambda: pillow(Image.fromarray(noise(1)), "gif"), "is not a PNG, JPEG or TIFF picture"),
    "bmp": (lambda: pillow(Image.fromarray(noise(1)), "bmp"), "is not a PNG, JPEG or TIFF picture"),
    "png of a signature": (b"\x89PNG\r\n\x1a\n", "cut short"),
    "png cut in half": (lambda: pillow(Image.fromarray(noise(3)), "png")[:900], "cut short"),
    "png without its end": (lambda: pillow(Image.fromarray(noise(3)), "png")[:-12], "cut short"),
    "png with a wrong checksum": (lambda: _flipped(pillow(Image.fromarray(noise(3)), "png"), 500), "checksum"),
    "png without pixels": (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 0))
                           + png_chunk(b"IEND", b""), "no pixels"),
    "png with too few pixels": (png(200, 200, 8, 2, b"\0" * 100), "damaged"),
    "png with noise for pixels": (b"\x89PNG\r\n\x1a\n"
                                  + png_chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 2, 8, 0, 0, 0, 0))
                                  + png_chunk(b"IDAT", b"not deflated") + png_chunk(b"IEND", b""), "damaged"),
    "png with a late header": (b"\x89PNG\r\n\x1a\n" + png_chunk(b"IDAT", b"") + png_chunk(b"IEND", b""), "one header"),
    "png of no size": (png(0, 5, 8, 0, b""), "0 x 5"),
    "png of unknown colour": (_png_with(colour=5), "colour type 5"),
    "png of 3 bits": (_png_with(bits=3), "3 bits"),
    "png, animated": (_png_with((b"acTL", struct.pack(">II", 2, 0))), "animated"),
    "png, grey with a transparent colour": (_png_with((b"tRNS", b"\0\1")), "transparent"),
    "png bomb": (png(60_000, 60_000, 8, 2, b"\0" * 1000), "more than the 268435456 allowed"),
    "jpeg of a marker": (b"\xff\xd8\xff", "cut short"),
    "jpeg of two markers": (b"\xff\xd8\xff\xd9", "no pixels"),
    "jpeg cut in half": (lambda: pillow(Image.fromarray(noise(3, size=(200, 200))), "jpeg")[:9000], "damaged"),
    "jpeg without its end": (lambda: pillow(Image.fromarray(noise(3)), "jpeg")[:-2], "damaged"),
    "jpeg header only": (lambda: pillow(Image.fromarray(noise(3)), "jpeg")[:300], "cut short"),
    "jpeg out of step": (b"\xff\xd8\xff\xe0\0\4\0\0nonsense", "no marker"),
    "jpeg, CMYK": (lambda: pillow(Image.fromarray(noise(4), "CMYK"), "jpeg"), "CMYK"),
    "jpeg, 12 bits": (lambda: _patched(pillow(Image.fromarray(noise(1)), "jpeg"), b"\xff\xc0", 4, 12), "12 bits"),
    "jpeg bomb": (lambda: _patched(pillow(Image.fromarray(noise(1)), "jpeg"), b"\xff\xc0", 5, 250, 0, 250, 0),
                  "64000 x 64000"),
    "tiff of a signature": (b"II*\0\x08\0\0\0", "incomplete"),
    "tiff far directory": (b"II*\0\xff\xff\xff\x7f" + b"\0" * 100, "incomplete"),
    "tiff farthest directory": (b"II+\0\x08\0\0\0" + b"\xff" * 8, "incomplete"),
    "tiff huge directory": (b"II*\0\x08\0\0\0\xff\xff" + b"\0" * 100, "past the end"),
    "tiff far field": (lambda: tiff(noise(1), profile=b"x" * 300)[:-200], "past the end"),
    "tiff cut short": (lambda: tiff(noise(3), counts=10**6), "cut short"),
    "tiff of 3 pages": (lambda: tiff(noise(1), pages=3), "several pages"),
    "tiff, CMYK": (lambda: tiff(noise(4), photometric=5), "CMYK"),
    "tiff, Lab": (lambda: tiff(noise(3), photometric=8), "Lab"),
    "tiff, planes": (lambda: tiff(noise(3, "uint16"), planar=2), "one plane each"),
    "tiff, white is zero, 16 bits": (lambda: tiff(noise(1, "uint16"), photometric=0), "white-is-zero"),
    "tiff, grey and alpha": (lambda: tiff(np.dstack([noise(1)] * 2), photometric=1), "2 samples"),
    "tiff, signed": (lambda: tiff(noise(1).astype(np.int16)), "isn't supported"),
    "tiff, 32-bit integers": (lambda: tiff(noise(1).astype(np.uint32)), "32 bits"),
    "tiff, half floats": (lambda: tiff(noise(1).astype(np.float16)), "16 bits"),
    "tiff, mixed": (lambda: tiff(noise(3), bits=(8, 8, 16)), "8/16 bits"),
    "tiff, five channels": (lambda: tiff(np.dstack([noise(4), noise(1)])), "5 samples"),
    "tiff, unknown compression": (lambda: tiff(noise(3), compression=4242), "damaged, or of a kind"),
    "tiff bomb": (lambda: tiff(noise(3), width=100_000, height=100_000), "100000 x 100000"),
}  # fmt: skip


def _flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :]


def _patched(data: bytes, marker: bytes, offset: int, *new: int) -> bytes:
    at = data.index(marker) + offset
    return data[:at] + bytes(new) + data[at + len(new) :]


@pytest.mark.parametrize("name", HOSTILE)
def test_what_cannot_be_read_is_refused_and_loses_nothing(tmp_path: Path, name: str) -> None:
    made, says = HOSTILE[name]
    source = tmp_path / "in.png"
    source.write_bytes(made() if callable(made) else made)
    target = save(tmp_path / "out.png", noise(3))
    before = folder_state(tmp_path)
    line = refused(source, target, "-k", "box:3")
    assert says in line
    assert str(source) in line
    refused(source, source, "-k", "box:3")
    assert folder_state(tmp_path) == before


def test_sources_that_are_no_files(tmp_path: Path) -> None:
    target = tmp_path / "out.png"
    assert "No such file" in refused(tmp_path / "none.png", target, "-k", "box:3")
    assert "is a folder" in refused(tmp_path, target, "-k", "box:3")
    assert "Not a directory" in refused(save(tmp_path / "a.png", noise(1)) / "b.png", target, "-k", "box:3")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        assert "not a regular file" in refused(tmp_path / "pipe.png", target, "-k", "box:3")
    if os.path.exists("/dev/zero"):
        assert "not a regular file" in refused("/dev/zero", target, "-k", "box:3")
    assert not target.exists()


def test_max_pixels(tmp_path: Path) -> None:
    source, target = save(tmp_path / "in.png", noise(1, size=(20, 30))), tmp_path / "out.png"
    assert "more than the 599 allowed" in refused(source, target, "-k", "box:3", "--max-pixels", 599)
    done(source, target, "-k", "box:3", "--max-pixels", 600)


def test_a_picture_the_decoder_doubts_is_not_overwritten(tmp_path: Path) -> None:
    data = bytearray(pillow(Image.fromarray(noise(3, size=(64, 64))), "jpeg", quality=90))
    start = data.index(b"\xff\xda") + 60
    data[start : start + 40] = b"\0" * 40
    source = tmp_path / "in.jpg"
    source.write_bytes(data)
    result = run(source, tmp_path / "out.png", "-k", "box:3")
    assert result.exit_code == 0
    assert result.stderr.count("\n") == 1
    assert "the decoder says: Corrupt JPEG data" in result.stderr
    result = run(source, source, "-k", "box:3")
    assert result.exit_code == 2
    assert "so it is not replaced" in result.stderr
    assert source.read_bytes() == data


def test_mutations_are_read_or_refused(tmp_path: Path) -> None:
    random = rng(20)
    seeds = [
        pillow(Image.fromarray(noise(3)), "png", icc_profile=profile()),
        pillow(Image.fromarray(noise(3)), "jpeg", icc_profile=profile(), dpi=(72, 72)),
        tiff(noise(4), extra=2, orientation=6, profile=profile()),
        tiff(noise(3, "uint16"), order=">", big=True),
        pillow(Image.fromarray(noise(3)), "tiff", compression="tiff_lzw"),
    ]
    source, target = tmp_path / "in.png", tmp_path / "out.tif"
    codes = set()
    for turn in range(150):
        data = bytearray(seeds[turn % len(seeds)])
        for _ in range(random.integers(1, 6)):
            # Mostly where the structure is, not the pixels.
            ends = random.integers(0, 200), len(data) - 1 - random.integers(0, min(400, len(data)))
            data[random.choice(ends)] = random.integers(0, 256)
        if random.random() < 0.2:
            del data[random.integers(1, len(data)) :]
        source.write_bytes(data)
        target.unlink(missing_ok=True)
        result = run(source, target, "-k", "box:3", "--max-pixels", 10**6)
        codes.add(result.exit_code)
        assert result.exit_code in (0, 2)
        assert target.exists() == (result.exit_code == 0)
        assert "Traceback" not in result.output
        assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
            {"in.png", *(["out.tif"] if target.exists() else [])}
        )
    assert codes == {0, 2}


# -- where it is written


def test_same_file_in_and_out(tmp_path: Path) -> None:
    pixels = noise(3)
    source = save(tmp_path / "in.png", pixels)
    done(source, source, "-k", "emboss")
    assert np.array_equal(load(source), expected(pixels, kernels.emboss()))
    assert [p.name for p in tmp_path.iterdir()] == ["in.png"]


def test_permissions_are_kept_and_new_files_obey_the_umask(tmp_path: Path) -> None:
    source, target = save(tmp_path / "in.png", noise(3)), save(tmp_path / "out.png", noise(3))
    for mode in (0o600, 0o664, 0o640):
        target.chmod(mode)
        done(source, target, "-k", "box:3")
        assert stat.S_IMODE(target.stat().st_mode) == mode
    old = os.umask(0o027)
    try:
        done(source, tmp_path / "new.png", "-k", "box:3")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "new.png").stat().st_mode) == 0o640


def test_symbolic_links_are_followed_and_stay(tmp_path: Path) -> None:
    pixels = noise(3)
    source = save(tmp_path / "in.png", pixels)
    (tmp_path / "inside").mkdir()
    real = save(tmp_path / "inside" / "real.png", noise(1))
    link = tmp_path / "link.png"
    link.symlink_to(Path("inside") / "real.png")
    done(source, link, "-k", "identity")
    assert link.is_symlink()
    assert np.array_equal(load(real), pixels)
    assert [p.name for p in (tmp_path / "inside").iterdir()] == ["real.png"]
    dangling = tmp_path / "dangling.png"
    dangling.symlink_to(Path("inside") / "new.png")
    done(source, dangling, "-k", "identity")
    assert dangling.is_symlink()
    assert (tmp_path / "inside" / "new.png").is_file()
    nowhere = tmp_path / "nowhere.png"
    nowhere.symlink_to(Path("missing") / "new.png")
    assert "there is no folder" in refused(source, nowhere, "-k", "identity")
    loop = tmp_path / "loop.png"
    loop.symlink_to("loop.png")
    assert "leads back to itself" in refused(source, loop, "-k", "identity")
    assert loop.is_symlink()
    assert "can't be read" in refused(loop, tmp_path / "out.png", "-k", "identity")


def test_places_that_are_refused(tmp_path: Path) -> None:
    source = save(tmp_path / "in.png", noise(4))
    (tmp_path / "folder.png").mkdir()
    assert "is a folder" in refused(source, tmp_path / "folder.png", "-k", "box:3")
    assert "there is no folder" in refused(source, tmp_path / "none" / "out.png", "-k", "box:3")
    assert "there is no folder" in refused(source, source / "out.png", "-k", "box:3")
    for name in ("out.gif", "out", "out.png.bak", ".png"):
        assert "must end in .png" in refused(source, tmp_path / name, "-k", "box:3")
    assert "transparency" in refused(source, tmp_path / "out.jpg", "-k", "box:3")
    assert "too long" in refused(source, tmp_path / ("n" * 300 + ".png"), "-k", "box:3")
    done(source, tmp_path / ("n" * 251 + ".png"), "-k", "box:3")
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.png")
        assert "not a regular file" in refused(source, tmp_path / "pipe.png", "-k", "box:3")
    save(tmp_path / "wide.png", noise(1, np.uint16))
    assert "uint16" in refused(tmp_path / "wide.png", tmp_path / "out.jpg", "-k", "box:3")
    save(tmp_path / "long.png", noise(1, size=(1, 70_000)))
    assert "65500" in refused(tmp_path / "long.png", tmp_path / "out.jpg", "-k", "identity")


AS_NOBODY = """
import os, sys
from convpar.cli import main
warm, *wanted = sys.argv[1:]
if os.getuid() == 0:
    # Python itself may lie where nobody else can read: a first run imports everything.
    sys.argv[1:] = ["filter", warm, warm, "-k", "identity"]
    assert main() == 0
    os.setgroups([]); os.setgid(65534); os.setuid(65534)
sys.argv[1:] = ["filter", *wanted, "-k", "box:3"]
sys.exit(main())
"""


def as_nobody(folder: Path, source: Path, target: Path) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run by a user who isn't the superuser."""
    warm = save(folder / "warm.png", noise(1))
    process = spawn(AS_NOBODY, warm, source, target, cwd=folder)
    out, err = process.communicate(timeout=60)
    warm.unlink()
    return process.returncode, out, err


@pytest.fixture
def open_folder(tmp_path: Path) -> Path:
    """A folder whose parents everybody may pass."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.getuid() and not folder.stat().st_mode & stat.S_IXOTH:
            folder.chmod(folder.stat().st_mode | 0o755)
    return tmp_path


@pytest.mark.skipif(not hasattr(os, "setuid"), reason="POSIX permissions")
def test_places_that_another_user_may_not_write(open_folder: Path) -> None:
    source = save(open_folder / "in.png", noise(3))
    closed = open_folder / "closed"
    closed.mkdir()
    save(closed / "old.png", noise(1))
    protected = save(open_folder / "protected.png", noise(1))
    secret = save(open_folder / "secret.png", noise(1))
    before = {**folder_state(open_folder), **folder_state(closed)}
    closed.chmod(0o555)
    protected.chmod(0o444)
    secret.chmod(0)
    open_folder.chmod(0o777)
    try:
        for arguments, says in (
            ((source, closed / "new.png"), "no permission to write in the folder"),
            ((source, closed / "old.png"), "can't be written" if os.getuid() else "write-protected"),
            ((source, protected), "write-protected"),
            ((secret, open_folder / "new.png"), "can't be read: Permission denied"),
        ):
            code, out, err = as_nobody(open_folder, *arguments)
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert says in err
    finally:
        closed.chmod(0o755)
        secret.chmod(0o600)
    assert {**folder_state(open_folder), **folder_state(closed)} == before


@pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="needs the superuser")
def test_owner_is_kept_where_the_system_lets_it(open_folder: Path) -> None:
    source, target = save(open_folder / "in.png", noise(3)), save(open_folder / "out.png", noise(1))
    os.chown(target, 65534, 65534)
    target.chmod(0o664)
    done(source, target, "-k", "box:3")
    assert (target.stat().st_uid, stat.S_IMODE(target.stat().st_mode)) == (65534, 0o664)
    # The other way round the file changes hands, as a copy would.
    os.chown(target, 0, 65534)
    target.chmod(0o666)
    open_folder.chmod(0o777)
    assert as_nobody(open_folder, source, target) == (0, "", "")
    assert target.stat().st_uid == 65534


SMALL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
from convpar.cli import main
sys.exit(main())
"""


def test_disk_that_is_full(tmp_path: Path) -> None:
    pytest.importorskip("resource", reason="limits of a process are POSIX")
    source = save(tmp_path / "in.png", noise(3, size=(200, 200)))
    target = save(tmp_path / "out.png", noise(1))
    before = folder_state(tmp_path)
    process = spawn(SMALL_DISK, "filter", source, target, "-k", "identity")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (2, "")
    assert err == f"convpar: {target} can't be written: File too large\n"
    assert folder_state(tmp_path) == before


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Any:
    """A mounted file system of 64 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="tmpfs is Linux's")
def test_file_system_that_is_full(tmp_path: Path, tiny_disk: Path) -> None:
    source = save(tmp_path / "in.png", noise(3, size=(200, 200)))
    target = save(tiny_disk / "out.png", noise(1))
    before = folder_state(tiny_disk)
    assert "No space left on device" in refused(source, target, "-k", "identity")
    assert folder_state(tiny_disk) == before
    done(save(tmp_path / "small.png", noise(1)), target, "-k", "identity")
    assert np.array_equal(load(target), noise(1))


# -- interruptions


@pytest.mark.parametrize("step", ["fsync", "chmod", "replace"])
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(5, "Input/output error"), SystemExit(3)])
def test_whatever_stops_the_writing_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
) -> None:
    source, target = save(tmp_path / "in.png", noise(3)), save(tmp_path / "out.png", noise(1))
    before = folder_state(tmp_path)
    reached = []

    def fail(*arguments: Any) -> None:
        # By now the whole file stands beside its place.
        reached.append(len(list(tmp_path.iterdir())))
        raise error

    monkeypatch.setattr(files.os, step, fail)
    result = CliRunner().invoke(application, ["filter", str(source), str(target), "-k", "box:3"])
    monkeypatch.undo()
    assert reached == [3]
    assert result.exit_code == {KeyboardInterrupt: 130, OSError: 2, SystemExit: 3}[type(error)]
    assert folder_state(tmp_path) == before


def test_the_new_file_is_whole_before_it_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = noise(3)
    source, target = save(tmp_path / "in.png", pixels), tmp_path / "out.png"
    order: list[str] = []
    replace, fsync = os.replace, os.fsync

    def synced(handle: int) -> None:
        order.append("fsync folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "fsync file")
        fsync(handle)

    def replaced(old: str, new: str) -> None:
        order.append("replace")
        assert np.array_equal(load(Path(old)), expected(pixels, kernels.box(3)))
        assert Path(old).parent == Path(new).parent
        replace(old, new)

    monkeypatch.setattr(files.os, "fsync", synced)
    monkeypatch.setattr(files.os, "replace", replaced)
    done(source, target, "-k", "box:3")
    assert order == ["fsync file", "replace", "fsync folder"]


@pytest.mark.skipif(os.name != "posix", reason="signals are POSIX")
def test_ctrl_c_during_a_long_kernel_ends_at_once(tmp_path: Path) -> None:
    source = save(tmp_path / "in.png", noise(3, size=(2000, 2000)))
    target = save(tmp_path / "out.png", noise(1))
    before = folder_state(tmp_path)
    # Hours of work: 4 million outputs of 16 million products each.
    process = spawn(
        "import sys; from convpar.cli import filter as f\n"
        "started = f._interruptible\n"
        "def tell():\n    print('computing', flush=True); return started()\n"
        "f._interruptible = tell\n"
        "from convpar.cli import main; sys.exit(main())",
        "filter", source, target, "-k", "box:4001", "--backend", "cpu-private",
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "computing\n"
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (-signal.SIGINT, 130)
    assert folder_state(tmp_path) == before


def test_ctrl_c_is_python_s_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGINT)
    with filter_module._interruptible():
        assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before is signal.default_int_handler


# -- the containers by themselves


def test_embedding_nothing_changes_nothing_that_matters() -> None:
    for name, extension in (("png", ".png"), ("jpeg", ".jpg"), ("tiff", ".tif")):
        encoded = cv2.imencode(extension, noise(3))[1].tobytes()
        again = containers.embed(encoded, name, containers.Metadata(), None)
        assert containers.inspect(again) == containers.inspect(encoded)
        decode = [cv2.imdecode(np.frombuffer(d, np.uint8), cv2.IMREAD_UNCHANGED) for d in (encoded, again)]
        assert np.array_equal(*decode)


def test_a_profile_that_unpacks_to_too_much_is_left_out() -> None:
    bomb = b"name\0\0" + zlib.compress(b"\0" * (containers.LARGEST_PROFILE + 1))
    data = png(2, 2, 8, 2, b"\0" * 14, (b"iCCP", bomb))
    assert containers.inspect(data).metadata.icc is None


def test_stderr_is_given_back(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "in.png").write_bytes(_png_with((b"iCCP", b"x\0\0" + zlib.compress(b"short"))))
    images.read(tmp_path / "in.png")
    os.write(2, b"still here\n")
    assert capfd.readouterr().err == "still here\n"
