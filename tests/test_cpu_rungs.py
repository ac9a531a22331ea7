"""The CPU rungs over vectors where random problems seldom reach: long rows, row ends, what a filter's values decide."""

from __future__ import annotations

import itertools
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import registry
from convpar.backend import Device, Layout, Layouts, Plan
from convpar.backends import cpu
from convpar.backends.cpu import compiled
from convpar.backends.cpu.plan import FAR_BYTES, OFF_CORE_BYTES, STREAM_BYTES, CpuPlan, Gathered
from convpar.problem import Problem

if registry.find("cpu-simd").unavailable():  # type: ignore[union-attr]
    pytest.skip("the compiled engine isn't there", allow_module_level=True)

VECTOR_RUNGS = ("cpu-simd", "cpu-packed", "cpu-im2col", "cpu-implicit", "cpu-separable")
COLUMN, ROW = np.array([1, -2, 1]), np.array([-1, 2, 1])
Array = np.ndarray[Any, Any]


def picture(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> Array:
    """Small whole numbers, so that any order of summation is exact."""
    return np.random.default_rng(seed).integers(0, 100, shape).astype(dtype)


def bell(taps: int, width: float) -> Array:
    y = np.exp(-np.square((np.arange(taps) - taps // 2) / width) / 2)
    return np.asarray(y / y.sum())


def two_terms(kind: str, taps: int) -> Array:
    """A filter of rank two."""
    middle = np.arange(taps) == taps // 2
    blurred = np.outer(bell(taps, taps / 6), bell(taps, taps / 6))
    inner = np.abs(np.arange(taps) - taps // 2) <= taps // 5
    square = np.square(np.arange(taps) - taps // 2)
    half = taps**2 / 72
    kinds = {
        "unsharp": 1.8 * np.outer(middle, middle) - 0.8 * blurred,
        "less its mean": np.outer(middle, middle) - 1 / taps**2,
        "centre and surround": np.outer(inner, inner) / inner.sum() ** 2 - 1 / taps**2,
        "cross": np.outer(bell(taps, 3), middle) + np.outer(middle, bell(taps, 4)),
        "Laplacian of Gaussian": (np.add.outer(square, square) / (2 * half) - 1) * blurred,
        "disc": np.add.outer(square, square) <= (taps // 2) ** 2 + 0.5,
    }
    return np.asarray(kinds[kind], np.float64)


def fresh_plan(backend: str, x: Array, w: Array, config: Any = None, **rules: Any) -> Plan:
    """A plan that nothing has run; `x` and `w` have four axes."""
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules)
    layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.contiguous(p.out_shape, p.out_dtype.itemsize))
    plan = registry.find(backend).plan(p, layouts, Device("cpu", 0), config)  # type: ignore[union-attr]
    assert isinstance(plan, Plan), plan
    return plan


def run(plan: Plan, x: Array, w: Array, fill: int = 0, threads: int = 1) -> Array:
    """The result of a plan whose workspace held the byte `fill` everywhere, and the result 77, of which every place is written."""
    y = np.full(plan.problem.out_shape, 77, plan.problem.out_dtype)
    workspace = np.full(plan.workspace_bytes(threads), fill, np.uint8)
    plan.run(x, w, None, y, workspace=workspace, num_threads=threads)
    return y


# -- ends of arrays

ENDS = """
import ctypes, itertools, mmap, sys
import numpy as np, convpar
page, rows = mmap.PAGESIZE, 24
libc = ctypes.CDLL(None, use_errno=True)
sizes = [(40, 3), (33, 7), (17, 2), (64, 4), (20, 5), (50, 10), (66, 3), (150, 3), (70, 9), (150, 5), (150, 7)]
# Whose last vector holds fewer outputs than zeros lie beside the image.
sizes += [(14, 7), (25, 6), (25, 7), (49, 5), (91, 3)] if sys.argv[1] == "cpu-masked" else []
for width, kernel in sizes:
    # The image's last sample is the last one before a page that mayn't be read, and its first the first behind one.
    size = -(-rows * width * 8 // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for forbidden in (start, start + page + size):
        if libc.mprotect(ctypes.c_void_p(forbidden), ctypes.c_size_t(page), 0):
            sys.exit("mprotect failed")
    dtype = np.dtype(sys.argv[2])
    inside = np.frombuffer(memory, dtype, size // dtype.itemsize, page)
    if sys.argv[1] in ("cpu-amx", "cpu-pairs", "cpu-amx8", "cpu-toeplitz"):
        continue
    taps = np.arange(1, kernel + 1, dtype=dtype)
    for samples in (inside[: rows * width], inside[-rows * width :]):
        samples[:] = np.arange(rows * width)
        x = samples.reshape(rows, width)
        for w in (np.outer(taps, taps), np.outer(taps, taps) + np.diag(taps**3)):
            beside = {0, 1, kernel // 2, 4} if sys.argv[1] == "cpu-masked" else {0, 1}
            for padding, stride in itertools.product(beside, (1, 2)):
                rules = {"padding": padding, "stride": stride}
                if stride > 1 and sys.argv[1] == "cpu-ifma":
                    continue
                y = convpar.conv2d(x, w, backend=sys.argv[1], **rules)
                assert np.array_equal(y, convpar.conv2d(x, w, backend="numpy", **rules))
# Of the last memory, which is the largest: filters that a window holds, whole and in pieces, and zeros around the image.
for width, kernel in ((40, 6), (50, 7), (150, 7), (70, 9), (66, 10), (31, 13), (149, 15), (90, 17), (33, 21)):
    if sys.argv[1] != "cpu-toeplitz":
        continue
    w = np.arange(kernel * kernel, dtype=dtype).reshape(kernel, kernel) % 3 - 1
    for samples in (inside[: rows * width], inside[-rows * width :]):
        samples[:] = np.arange(rows * width) % 13
        x = samples.reshape(rows, width)
        for padding in (0, 1, kernel // 2):
            y = convpar.conv2d(x, w, backend=sys.argv[1], padding=padding)
            assert np.array_equal(y, convpar.conv2d(x, w, backend="numpy", padding=padding))
# Of the last memory, which is the largest: pictures of bytes, which some levels make floats of in registers.
for width, kernel in ((17, 2), (18, 3), (19, 3), (25, 3), (26, 3), (65, 2), (66, 3), (67, 3), (97, 3), (70, 7)):
    if sys.argv[1] not in ("cpu-simd", "cpu-separable"):
        continue
    rules = {"dtype": "uint8", "overflow": "saturate"}
    # Powers of two, of which factors and sums are exact.
    taps = np.float32(2) ** -np.arange(kernel, dtype=np.float32)
    as_bytes = inside.view(np.uint8)
    for samples in (as_bytes[: rows * width], as_bytes[-rows * width :]):
        samples[:] = np.arange(rows * width) * 7
        x = samples.reshape(rows, width)
        for w in (np.outer(taps, taps) / 4, np.outer(taps, taps) / 4 - np.diag(taps) / 8):
            y = convpar.conv2d(x, w, backend=sys.argv[1], **rules)
            assert np.array_equal(y, convpar.conv2d(x, w, backend="numpy", **rules))
# Of it, and of many channels in one block: their samples are laid out.
for high, wide in ((1, 13), (3, 5), (2, 28), (3, 31), (1, 49)):
    if sys.argv[1] not in ("cpu-packed", "cpu-implicit"):
        continue
    count = 64 * high * wide
    w = np.ones((128, 64, 1, 1), dtype)
    for samples in (inside[:count], inside[-count:]):
        samples[:] = np.arange(count)
        x = samples.reshape(1, 64, high, wide)
        for stride in (1, 2, 3):
            y = convpar.conv2d(x, w, backend=sys.argv[1], stride=stride, config={"block": 128})
            assert np.array_equal(y, convpar.conv2d(x, w, backend="numpy", stride=stride))
# Of it, and of several output channels: columns beyond the last whole vector are turned.
for high, wide, kernel in ((18, 19, 3), (11, 19, 3), (17, 34, 5), (13, 16, 1)):
    if sys.argv[1] != "cpu-implicit":
        continue
    count = 2 * high * wide
    w = np.ones((8, 2, kernel, kernel), dtype)
    for samples in (inside[:count], inside[-count:]):
        samples[:] = np.arange(count)
        x = samples.reshape(1, 2, high, wide)
        y = convpar.conv2d(x, w, backend="cpu-implicit")
        assert np.array_equal(y, convpar.conv2d(x, w, backend="numpy"))
# Of it, and of a channel more than there are lanes: samples are split, or become words, where they lie.
for high, wide, kernel in ((9, 40, 3), (8, 13, 3), (10, 47, 5), (7, 7, 1), (5, 49, 1)):
    if sys.argv[1] not in ("cpu-amx", "cpu-pairs", "cpu-amx8"):
        continue
    count = 17 * high * wide
    w = np.ones((18, 17, kernel, kernel), dtype)
    for samples in (inside[:count], inside[-count:]):
        samples[:] = np.arange(count) % 13
        x = samples.reshape(1, 17, high, wide)
        for padding, stride in itertools.product({0, kernel // 2}, (1, 2, 3)):
            rules = {"stride": stride, "padding": padding}
            rules |= {} if sys.argv[1] == "cpu-amx" else {"dtype": "int32"}
            y = convpar.conv2d(x, w, backend=sys.argv[1], **rules)
            assert np.array_equal(y, convpar.conv2d(x, w, backend="numpy", **rules))
# And filters that become words where they lie, and sums that the unit itself stores.
for high, wide, kernel in ((6, 40, 3), (8, 13, 5), (3, 47, 1), (7, 7, 2)):
    if sys.argv[1] != "cpu-amx8":
        continue
    x = np.arange(17 * high * wide, dtype=np.uint8).reshape(1, 17, high, wide)
    count = 34 * 17 * kernel * kernel
    for filters in (inside[:count], inside[-count:]):
        filters[:] = np.arange(count) % 11
        w = filters.reshape(34, 17, kernel, kernel)
        right = convpar.conv2d(x, w, backend="numpy", dtype="int32")
        assert np.array_equal(convpar.conv2d(x, w, backend="cpu-amx8", dtype="int32"), right)
        sums = inside.view(np.int32)
        w = w.copy()
        for out in (sums[: right.size], sums[-right.size :]):
            out = out.reshape(right.shape)
            convpar.conv2d(x, w, backend="cpu-amx8", dtype="int32", out=out)
            assert np.array_equal(out, right)
print("done")
"""

WIDE = cpu.isa() == "v4" or platform.machine() in ("aarch64", "arm64")
"""Whether there are 32 registers."""

VECTOR_BYTES = {"v4": 64, "v3": 32}.get(cpu.isa(), 16)


@pytest.mark.skipif(sys.platform == "win32", reason="pages are forbidden in another way there")
@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        *itertools.product(
            ["cpu-simd", "cpu-separable", "cpu-packed", "cpu-implicit", "cpu-ifma"], ["int32"]
        ),
        ("cpu-masked", "float64"),
        ("cpu-masked", "float32"),
        ("cpu-simd", "float32"),
        ("cpu-packed", "float32"),
        ("cpu-implicit", "float32"),
        ("cpu-amx", "float32"),
        ("cpu-toeplitz", "float32"),
        ("cpu-pairs", "int8"),
        ("cpu-pairs", "uint8"),
        ("cpu-pairs", "int16"),
        ("cpu-amx8", "int8"),
        ("cpu-amx8", "uint8"),
    ],
)
def test_nothing_is_read_beyond_the_image(rung: str, dtype: str) -> None:
    missing = registry.find(rung).unavailable()  # type: ignore[union-attr]
    if missing:
        pytest.skip(missing)
    done = subprocess.run(
        [sys.executable, "-c", ENDS, rung, dtype], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr


# -- where results lie


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(["cpu-simd", "cpu-separable"], ["float32", "float64", "int32", "int8"]),
        *itertools.product(["cpu-masked"], ["float32", "float64"]),
    ],
)
def test_rows_of_results_begin_anywhere_in_a_line(backend: str, dtype: str) -> None:
    """All at the same place in a line of the cache, or each at another; short rows and long, and nothing around them."""
    missing = registry.find(backend).unavailable()  # type: ignore[union-attr]
    if missing:
        pytest.skip(missing)
    size = np.dtype(dtype).itemsize
    vector = 64 // size
    w = picture((3, 3), dtype, seed=1)
    for width in (8 * vector, 8 * vector + 1, 9 * vector, 21 * vector - 1, 37 * vector + 3):
        x = picture((15, width), dtype)
        right = convpar.conv2d(x, w, padding=1, backend="numpy")
        pitch = -(-width // vector) * vector
        for skip in (0, 1, vector // 2, vector - 1):
            for apart in (pitch, pitch + vector, pitch + 3):
                memory = np.full(vector + 15 * apart + 2 * vector, 77, dtype)
                first = -memory.ctypes.data % 64 // size + skip
                y = memory[first : first + 15 * apart].reshape(15, apart)[:, :width]
                y[...] = 55
                convpar.conv2d(x, w, backend=backend, out=y, padding=1, config={"stores": "cached"})
                np.testing.assert_array_equal(y, right)
                y[...] = 77
                assert (memory == 77).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
def test_results_at_every_place_beside_samples(dtype: type) -> None:
    """Rows of both 4 KiB apart, results at the samples' place modulo that, up to several lines on, and farther; one block of
    a row, an even number and an odd one; of results that begin with a line and don't."""
    size = np.dtype(dtype).itemsize
    columns, vector = 4096 // size, 64 // size
    memory = np.zeros(53 * columns, dtype)
    start = -memory.ctypes.data % 4096 // size
    for taps in (1, 2, 3, 5, 9, 11):
        w = picture((1, 1, taps, taps), dtype, seed=taps)
        for outputs in (vector + 1, 9 * vector, 13 * vector + 2, columns - 10):
            x = memory[start : start + 20 * columns].reshape(1, 1, 20, columns)[..., : outputs + taps - 1]
            x[...] = picture(x.shape, dtype)
            right = convpar.conv2d(x, w, backend="numpy")
            for later in (0, 1, vector, 5 * vector, 6 * vector, columns // 2, columns - 1):
                first = start + 24 * columns + later
                y = memory[first : first + 20 * columns].reshape(1, 1, 20, columns)
                y = y[:, :, : 21 - taps, :outputs]
                y[...] = -1
                p = Problem.of(x.shape, w.shape, x.dtype, w.dtype)
                layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.of(y))
                plan = registry.find("cpu-simd").plan(p, layouts, Device("cpu", 0), None)  # type: ignore[union-attr]
                assert isinstance(plan, Plan), plan
                plan.run(x, w, None, y, workspace=np.empty(plan.workspace_bytes(1), np.uint8), num_threads=1)
                np.testing.assert_array_equal(y, right)


# -- stores past the caches


STREAMED = [
    *itertools.product(["cpu-simd", "cpu-separable"], ["uint8", "int16", "int32", "float32", "float64"]),
    ("cpu-ifma", "int32"),
]


@pytest.mark.parametrize(("backend", "dtype"), STREAMED)
def test_streamed_rows_are_whole_at_every_alignment(backend: str, dtype: str) -> None:
    missing = registry.find(backend).unavailable()  # type: ignore[union-attr]
    if missing:
        pytest.skip(missing)
    w = np.outer(COLUMN, ROW).astype(dtype)
    size = w.itemsize
    vector = 64 // size
    # cpu-ifma streams rows of more than a vector, cpu-simd of more than two blocks, cpu-separable of more than 512 columns.
    for width in (
        vector - 1,
        vector + 1,
        2 * vector,
        5 * vector,
        8 * vector + 1,
        12 * vector + 3,
        513,
        512 + vector,
        1025 + vector,
    ):
        x = picture((13, width + 2), dtype)
        right = convpar.conv2d(x, w, backend="numpy")
        for skip in sorted({0, 1, vector // 2, vector - 1}):
            for gap in (0, 3):
                memory = np.full(2 * vector + 11 * (width + gap) + 2 * vector, 77, dtype)
                first = -memory.ctypes.data % 64 // size + skip
                block = memory[first : first + 11 * (width + gap)].reshape(11, width + gap)
                y = block[:, :width]
                y[...] = 55
                convpar.conv2d(x, w, backend=backend, out=y, config={"stores": "streamed"})
                np.testing.assert_array_equal(y, right)
                y[...] = 77
                assert (memory == 77).all()


def test_large_results_are_streamed_in_whole_lines_and_small_ones_not() -> None:
    side = int((STREAM_BYTES / 4) ** 0.5) + 4
    cases: list[tuple[int, str, tuple[str, ...]]] = [
        (3, "float32", ("v3", "v4")),
        (5, "float32", ("v4",)),
        (3, "int32", ("v4",)),
    ]
    for k, dtype, levels in cases:
        w = np.ones((1, 1, k, k), dtype)
        for n, streamed in ((side, cpu.isa() in levels), (side // 2, False)):
            plan = fresh_plan("cpu-simd", np.empty((1, 1, n, n), dtype), w)
            assert plan.config["stores"] == ("streamed" if streamed else "cached")
            assert ("streamed" in plan.paths) == streamed


@pytest.mark.parametrize("stores", ["cached", "streamed"])
@pytest.mark.parametrize(("backend", "k"), [("cpu-simd", 3), ("cpu-simd", 5), ("cpu-separable", 5)])
def test_images_that_come_from_memory(backend: str, k: int, stores: str) -> None:
    side = int((FAR_BYTES / 8) ** 0.5) + k  # the result, though smaller, is still half of FAR_BYTES
    x, w = picture((side, side), np.float32), np.outer(np.arange(k) - 1, 2 - np.arange(k)).astype(np.float32)
    y = convpar.conv2d(x, w, backend=backend, config={"stores": stores})
    np.testing.assert_array_equal(y, convpar.conv2d(x, w, backend="cpu-private"))


@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-separable"])
@pytest.mark.parametrize(("taps", "columns"), [(3, 16384), (7, 16384), (8, 8192)])
def test_long_rows_under_low_filters_are_few_tiles(backend: str, taps: int, columns: int) -> None:
    """Where memory is read ahead along them; rows as far apart as 32 KiB and more, across a second tile of rows and of columns."""
    x, product = picture((1, 1, 50, 17000), np.float32), np.outer(COLUMN.repeat(3), ROW.repeat(3))
    for w in (
        picture((1, 1, taps, taps), np.float32, 1),
        product[None, None, :taps, :taps].astype(np.float32),
    ):
        plan = fresh_plan(backend, x, w, padding="same")
        assert plan.config["tile"][1] == columns
        y = run(plan, x, w, threads=2)
        np.testing.assert_array_equal(y, convpar.conv2d(x, w, backend="cpu-private", padding="same"))
        # What is converted waits in the second cache.
        narrow = fresh_plan(backend, x.astype(np.float16), w.astype(np.float16))
        assert narrow.config["tile"][1] == 3456  # five tiles, whole lines of results


@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-masked"])
@pytest.mark.parametrize("dtype", ["int16", "float32"])
@pytest.mark.parametrize("columns", [4080, 4096, 4160, 8200])
@pytest.mark.parametrize("taps", [5, 6, 9, 10])
def test_gathered_tiles_have_the_rows_of_the_blocks_that_slide_over_them(
    backend: str, dtype: str, columns: int, taps: int
) -> None:
    x, w = picture((1, 1, 400, columns), np.uint8), picture((1, 1, taps, taps), np.float32, 1)
    plan = fresh_plan(backend, x, w, padding="same", dtype=dtype, overflow="saturate")
    rows, wide = plan.config["tile"]
    assert rows == (24 if taps in (6, 9) else 16)
    # Not a narrow tile of what is left.
    assert wide == columns or (columns - 1) % wide + 1 > wide / 2
    y = run(plan, x, w, threads=2)
    right = convpar.conv2d(x, w, backend="cpu-private", padding="same", dtype=dtype, overflow="saturate")
    np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize(
    ("types", "channels", "columns", "taps", "shared", "rows"),
    [
        (("uint8", "float32"), 3, 2048, 7, False, 24),
        (("uint16", "float32"), 4, 4096, 9, False, 24),
        (("int16", "int16"), 3, 4096, 7, True, 16),
        (("uint8", "float32"), 3, 4096, 5, True, 16),
        (("uint8", "uint8"), 3, 4100, 9, True, 16),
    ],
)
def test_gathered_tiles_of_colours_are_as_high_and_none_is_a_sliver(
    types: tuple[str, str], channels: int, columns: int, taps: int, shared: bool, rows: int
) -> None:
    x = np.zeros((300, columns, channels), types[0])
    w = np.ones((channels, 1, taps, taps), np.float32)
    overflow = "wrap" if types[1] == "float32" else "saturate"
    rules = {
        "channel_axis": -1,
        "groups": channels,
        "padding": "same",
        "dtype": types[1],
        "overflow": overflow,
    }
    planned = convpar.plan(x, np.broadcast_to(w[:1], w.shape) if shared else w, backend="cpu-simd", **rules)
    high, wide = planned.plan.config["tile"]
    assert high == rows
    assert (columns - 1) % wide + 1 > wide / 2


def test_input_and_output_are_far_by_their_size_or_where_results_go_past_the_caches() -> None:
    side = int((FAR_BYTES / 8) ** 0.5)
    w = np.ones((1, 1, 3, 3), np.float32)
    for n, stores, far in (
        (side + 4, "cached", True),
        (side, "cached", False),
        (side // 2, "streamed", True),
    ):
        plan = fresh_plan("cpu-simd", np.empty((1, 1, n, n), np.float32), w, {"stores": stores})
        assert plan._task.far == far  # type: ignore[attr-defined]


def test_looking_for_factors_of_few_taps_is_no_gain_from_memory() -> None:
    far = int((FAR_BYTES / 8) ** 0.5) + 8
    slides = cpu.isa() == "v4"
    for n, k, dtype, gains in (
        (far, 3, np.float32, False),
        (far, 5, np.float32, not slides),
        (far // 2, 5, np.float32, True),
        (far, 7, np.float32, True),
        (far, 5, np.int32, True),
    ):
        x, w = np.empty((1, 1, n, n), dtype), np.ones((1, 1, k, k), dtype)
        plan = fresh_plan("cpu-separable", x, w)
        direct = plan._direct or plan  # type: ignore[attr-defined]
        assert (plan.cost < direct.direct_seconds) == gains, (n, k, dtype)  # type: ignore[operator]


def test_planes_that_leave_the_caches_of_a_core() -> None:
    masked = registry.find("cpu-masked")
    assert masked is not None
    missing = masked.unavailable()
    if missing:
        pytest.skip(missing)
    n = 1 + OFF_CORE_BYTES // (2 * 4 * 56 * 56)
    w = picture((n, 1, 3, 3), np.float32)
    for planes, off_core in ((n, True), (n - 1, False)):
        x = picture((1, planes, 56, 56), np.float32)
        plan = fresh_plan("cpu-masked", x, w[:planes], padding=1, groups=planes)
        assert plan._task.off_core == off_core  # type: ignore[attr-defined]
        y = convpar.conv2d(x, w[:planes], padding=1, groups=planes, backend="cpu-masked")
        expected = convpar.conv2d(x, w[:planes], padding=1, groups=planes, backend="cpu-private")
        np.testing.assert_array_equal(y, expected)


def test_masked_tells_of_streams_only_where_the_rung_before_has_columns_for_them() -> None:
    masked = registry.find("cpu-masked")
    assert masked is not None
    missing = masked.unavailable()
    if missing:
        pytest.skip(missing)
    w = picture((1, 1, 3, 3), np.float32)
    narrow = 4 * VECTOR_BYTES
    # Of the last, the first tile is mostly border, and little of the second is inside.
    for shape, tile, streamed in (
        ((40, 2000), None, True),
        ((40, 2000), (16, 2000), True),
        ((40, 2000), (1, 2000), True),
        ((40, 2000), (16, narrow - 56), False),
        ((3, narrow + 65), (2, narrow + 44), False),
    ):
        x = picture((1, 1, *shape), np.float32)
        config = {"stores": "streamed", **({"tile": tile} if tile else {})}
        right = convpar.conv2d(x, w, padding=(1, 0, 1, 0), backend="numpy")
        plan = fresh_plan("cpu-masked", x, w, config, padding=(1, 0, 1, 0))
        assert ("streamed" in plan.paths) == streamed, tile
        np.testing.assert_array_equal(run(plan, x, w), right)
        assert ("streamed" in plan.paths_run()) == streamed, tile


def test_converted_results_are_not_streamed() -> None:
    """Neither tile by tile nor in registers."""
    x = picture((80, 300), np.uint8)
    for w, dtype in ((np.ones((3, 3), np.int8), "int8"), (np.ones((3, 3), np.float32), "uint8")):
        rules: dict[str, Any] = {"dtype": dtype, "overflow": "saturate", "config": {"stores": "streamed"}}
        with pytest.raises(convpar.Unsupported, match="the results are converted"):
            convpar.conv2d(x, w, backend="cpu-simd", **rules)


# -- narrow types

WIDTHS = (*range(1, 70), 127, 128, 129, 191, 256, 257)


@pytest.mark.parametrize("sums", ["float32", "float64"])
@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16"])
def test_sums_are_rounded_and_saturated_at_every_width(dtype: str, sums: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    special = [
        np.nan,
        np.inf,
        -np.inf,
        high,
        high + 0.5,
        low - 0.5,
        high - 0.5,
        low + 0.5,
        1e30,
        -1e30,
        0.5,
        1.5,
        -2.5,
    ]
    rng = np.random.default_rng(0)
    for width in WIDTHS:
        x = (rng.standard_normal((5, width)) * high).astype(sums)
        x[rng.random(x.shape) < 0.3] = rng.choice(special)
        memory = np.full((7, width + 3), 7, dtype)
        convpar.conv2d(
            x,
            np.ones((1, 1), sums),
            dtype=dtype,
            overflow="saturate",
            backend="cpu-simd",
            out=memory[1:-1, 1:-2],
        )
        right = np.where(np.isnan(x), 0, np.clip(np.rint(x), low, high)).astype(dtype)
        np.testing.assert_array_equal(memory[1:-1, 1:-2], right)
        memory[1:-1, 1:-2] = 7
        assert (memory == 7).all()


# Every number of 16 bits.
HALVES = np.arange(2**16, dtype=np.uint16).view(np.float16)
# Around the largest half, beyond it, and too small for any but zero.
EXTREMES = np.array([65519.9, 65520, 65520.1, 1e30, np.inf, np.nan, 1e-8, 1e-30])


def ties(sums: str, dtype: Any) -> Array:
    """Numbers of `dtype` as sums, halfway to each one's neighbour, and what is next to that on both sides."""
    if dtype == "float32":
        numbers = np.random.default_rng(0).standard_normal(2**16).astype(np.float32)
        numbers = np.concatenate([numbers, np.nextafter(numbers, np.float32(np.inf))]).astype(sums)
        finite = numbers.reshape(2, -1).T.ravel()
    else:
        numbers = (
            np.arange(2**16, dtype=np.uint16).view(convpar.problem.check_dtype(dtype, "dtype")).astype(sums)
        )
        finite = np.unique(numbers[np.isfinite(numbers)])
    with np.errstate(over="ignore"):
        half = finite[1:] / 2 + finite[:-1] / 2
        beside = [np.nextafter(half, -np.inf, dtype=sums), half, np.nextafter(half, np.inf, dtype=sums)]
        last = EXTREMES.astype(sums)
    return np.concatenate([finite, *beside, last, -last])


@pytest.mark.parametrize(
    ("sums", "dtype"),
    [("float32", "float16"), ("float64", "float16"), ("float32", "bfloat16"), ("float64", "float32")],
)
def test_sums_become_shorter_floats_at_every_width(sums: str, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 comes with ml_dtypes")
    rng = np.random.default_rng(0)
    numbers, one = ties(sums, dtype)[None], np.ones((1, 1), sums)
    extremes = np.concatenate([EXTREMES, -EXTREMES]).astype(sums)

    def check(x: Array, **rules: Any) -> Array:
        y = convpar.conv2d(x, one, dtype=dtype, backend="cpu-simd", **rules)
        with np.errstate(over="ignore"):
            # A sum is never minus zero.
            right = (x + 0).astype(y.dtype)
        word = y.dtype.str.replace("f", "u").replace("V", "u")
        bits, expected = (np.ascontiguousarray(a).view(word) for a in (y, right))
        same = np.where(np.isnan(x), np.isnan(y), bits == expected)
        assert same.all(), (x[~same], y[~same])
        return y

    type_ = check(numbers).dtype
    swapped = type_.newbyteorder()
    assert not swapped.isnative
    for width in WIDTHS:
        x = rng.choice(numbers[0], (5, width))
        special = rng.random(x.shape) < 0.3
        x[special] = rng.choice(extremes, special.sum())
        memory = np.full((7, width + 3), 7, type_)
        check(x, out=memory[1:-1, 1:-2])
        memory[1:-1, 1:-2] = 7
        assert (memory == 7).all()
        check(x, overflow="raise")
        check(x, out=np.empty((5, 2 * width), type_)[:, ::2], overflow="raise")
        check(x, out=np.empty((5, width), type_)[:, ::-1])
        check(x, out=np.empty((5, width), swapped))


def test_shorter_floats_become_samples_at_every_width() -> None:
    one = np.ones((1, 1), np.float32)
    y = convpar.conv2d(HALVES[None], one, backend="cpu-simd")
    assert y.dtype == np.float32
    np.testing.assert_array_equal(y, HALVES[None].astype(np.float32))
    for width in WIDTHS:
        x = np.random.default_rng(width).permutation(HALVES)[: 5 * width].reshape(5, width)
        for same in (x, x[:, ::-1], x.repeat(2, 1)[:, ::2], x.astype(x.dtype.newbyteorder())):
            np.testing.assert_array_equal(
                convpar.conv2d(same, one, backend="cpu-simd"), same.astype(np.float32)
            )


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint16"])
def test_narrow_samples_are_gathered_at_every_width(dtype: str) -> None:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    cases: tuple[tuple[Any, dict[str, Any]], ...] = (
        (np.float32, {"dtype": dtype, "overflow": "saturate"}),
        (dtype, {"dtype": "int32"}),
    )
    for width in WIDTHS:
        x = np.random.default_rng(width).integers(low, high + 1, (5, width)).astype(dtype)
        for same in (x, x[:, ::-1], x.repeat(2, 1)[:, ::2], x.astype(x.dtype.newbyteorder())):
            for filter_dtype, rules in cases:
                y = convpar.conv2d(same, np.ones((1, 1), filter_dtype), backend="cpu-simd", **rules)
                np.testing.assert_array_equal(y, same)


def test_the_first_sum_that_overflows_is_named_across_tiles() -> None:
    x = np.zeros((40, 600), np.uint8)
    for place in ((39, 5), (17, 300), (17, 299), (0, 599)):
        x[place] = 200
        with pytest.raises(OverflowError, match=rf"\(0, 0, {place[0]}, {place[1]}\)"):
            convpar.conv2d(
                x, np.full((1, 1), 2, np.float32), dtype="uint8", overflow="raise", backend="cpu-simd"
            )


# -- tiles


@pytest.mark.parametrize("backend", VECTOR_RUNGS)
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"padding": (2, 1, 3, 2), "boundary": "mirror"},
        {"stride": (2, 3), "padding": 1},
        {"dilation": (3, 2), "padding": "same", "boundary": "wrap"},
        {"stride": (3, 2), "dilation": (2, 25), "padding": (0, 0, 20, 20)},
        {"dtype": "float64"},
    ],
    ids=str,
)
def test_tiles_meet_without_a_seam(backend: str, rules: dict[str, Any]) -> None:
    x = picture((3, 29, 143), np.float32)
    w = np.stack([np.outer(COLUMN, ROW), np.outer(ROW, COLUMN), np.eye(3)]).astype(np.float32)[:, None]
    right = convpar.conv2d(x, w, groups=3, backend="numpy", **rules)
    for rows in (1, 2, 5, 16):
        for columns in (1, 15, 16, 17, 63, 64, 65, 128):
            y = convpar.conv2d(x, w, groups=3, backend=backend, config={"tile": (rows, columns)}, **rules)
            np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-separable"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "uint8"])
@pytest.mark.parametrize(
    "rules", [{"padding": (2, 1, 3, 2), "boundary": "mirror"}, {"padding": (1, 1, 0, 1)}], ids=str
)
def test_wide_tiles_are_cut_at_a_border_and_narrow_ones_gathered(
    backend: str, dtype: str, rules: dict[str, Any]
) -> None:
    """On both sides of the width where one way ends, at every instruction set: 16 times the border's vectors."""
    w = np.outer(COLUMN, ROW).astype(dtype)
    beyond = rules["padding"][2] + rules["padding"][3] - w.shape[1] + 1
    for size in (16, 32, 64):  # bytes of a vector
        limit = 16 * (size // w.itemsize) * sum(side > 0 for side in rules["padding"][2:])
        for outputs in (limit - 1, limit, limit + 1, limit + 77):
            x = picture((19, outputs - beyond), dtype)
            right = convpar.conv2d(x, w, backend="numpy", **rules)
            for config in ({}, {"tile": (7, outputs)}):
                y = convpar.conv2d(x, w, backend=backend, config=config, **rules)
                np.testing.assert_array_equal(y, right)
    for outputs, paths in ((3000, {"inside", "staged"}), (20, {"staged"})):
        x = picture((1, 1, 19, outputs - beyond), dtype)
        plan = fresh_plan(backend, x, w[None, None], **rules)
        assert {"inside", "staged"} & set(plan.paths) == paths


@pytest.mark.parametrize("backend", ["cpu-simd", "cpu-separable"])
def test_rows_that_share_cache_lines_are_gathered(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("convpar.backends.cpu.plan.GATHERED", {cpu.isa(): Gathered(7, False)})
    memory, w = picture((3, 2, 40, 2064), np.float32), picture((1, 1, 7, 5), np.float32, 1)
    apart, x, two = memory[:, :1], memory[:, :1, :, :2048].copy(), memory[..., :2048].copy()
    inside, staged = {"inside"}, {"staged"}
    for image, filters, rules, paths in (
        (x, w, {}, staged),
        (apart, w, {}, inside),
        (apart[..., :2048], w, {}, inside),  # the distance counts, not the width
        (x, w[:, :, :6], {}, inside),
        # More rows are too, but cpu-simd meets those one at a time where it can; cpu-separable leaves it those without factors.
        (x, np.repeat(w, 2, 2), {}, inside if backend == "cpu-simd" else inside | staged),
        (x, np.repeat(w, 2, 2), {"stride": (2, 1)}, staged),
        (x.astype(np.int32), np.repeat(w, 2, 2).astype(np.int32), {}, staged),
        (np.broadcast_to(x[:, :, :1], x.shape), w, {}, inside),
        (x, w, {"dilation": (2, 1)}, inside),
        # Filters of one channel are all that cpu-separable takes.
        *([(two, np.repeat(w, 2, 1), {}, inside)] if backend == "cpu-simd" else []),
        (two, np.repeat(w, 2, 0), {"groups": 2}, staged),
    ):
        plan = fresh_plan(backend, image, filters, **rules)
        assert {"inside", "staged"} & set(plan.paths) == paths, (image.shape, filters.shape, rules)
        right = convpar.conv2d(image, filters, backend="numpy", **rules)
        np.testing.assert_array_equal(run(plan, image, filters), right)
    assert "inside" in fresh_plan(backend, x, w, {"tile": (8, 64)}).paths


def test_rows_met_one_by_one_are_gathered_for_cpu_simd_alone(
    monkeypatch: pytest.MonkeyPatch, processor_with: Callable[..., None]
) -> None:
    """cpu-separable, which meets them where they are if its filter has factors, leaves other filters to it."""
    processor_with(intel=compiled.engine().INTEL, unit=False)
    monkeypatch.setattr("convpar.backends.cpu.plan.GATHERED", {cpu.isa(): Gathered(16, True)})
    x = picture((1, 1, 60, 2048), np.float32)
    high = picture((1, 1, 31, 31), np.float32, 1)
    product = np.outer(COLUMN.repeat(10), ROW.repeat(10)).astype(np.float32)[None, None]
    for w, gathered in ((high, True), (high[:, :, :15], False), (high.astype(np.int32), False)):
        plan = fresh_plan("cpu-simd", x.astype(w.dtype), w)
        assert ("staged" in plan.paths) == gathered
        assert not gathered or plan.launch["tile"] == "16 x 2018 outputs"
        np.testing.assert_array_equal(
            run(plan, x.astype(w.dtype), w, threads=2), convpar.conv2d(x.astype(w.dtype), w, backend="numpy")
        )
    for w, paths in ((high, {"staged"}), (product, {"inside", "factored"})):
        plan = fresh_plan("cpu-separable", x, w)
        assert plan.launch["direct sums"].startswith("by cpu-simd")
        np.testing.assert_array_equal(run(plan, x, w, threads=2), convpar.conv2d(x, w, backend="numpy"))
        assert plan.paths_run() & {"inside", "staged", "factored"} == paths


@pytest.mark.parametrize("set_lines", [8, 12])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int16, np.int32])
@pytest.mark.parametrize("rules", [{}, {"stride": (2, 1)}, {"dilation": (2, 1)}, {"groups": 3}], ids=str)
def test_passes_over_rows_that_share_cache_lines(
    rules: dict[str, Any], dtype: type, set_lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 KiB apart, up and down, a little more, and all in one place; and filters on each side of where passes change."""
    monkeypatch.setattr(compiled.engine(), "SET_LINES", set_lines)
    columns = 4096 // np.dtype(dtype).itemsize
    memory = picture((1, 3, 52, columns + 16), dtype)
    apart = memory[..., 16 : columns // 4]
    together = memory[..., :columns].copy()[..., 16 : columns // 4]
    same = np.broadcast_to(apart[:, :, :1], apart.shape)
    for rows in (3, 4, 5, 6, 7, 8, 9, 12, 13, 16, 17, 19, 25):
        w = picture((3, 3 // rules.get("groups", 1), rows, 3), dtype, seed=rows)
        right = convpar.conv2d(apart, w, backend="numpy", **rules)
        for x, y in ((together, right), (apart, right), (together[:, :, ::-1], None), (same, None)):
            # Blocks of 8, 4, 2 and 1 rows, where they don't slide.
            plan = fresh_plan("cpu-simd", x, w, {"tile": (15, columns)}, **rules)
            assert "inside" in plan.paths
            y = convpar.conv2d(x, w, backend="numpy", **rules) if y is None else y
            np.testing.assert_array_equal(run(plan, x, w), y)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("set_lines", [8, 12])
@pytest.mark.parametrize("rows", range(1, 20))
def test_rows_one_by_one(rows: int, set_lines: int, dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    """Filters of fewer rows than a block, as many and more, and than blocks that slide take; blocks of 1 to 8 rows and 1 to 4
    vectors; several channels."""
    monkeypatch.setattr(compiled.engine(), "SET_LINES", set_lines)
    columns = 4096 // np.dtype(dtype).itemsize
    x = picture((1, 2, rows + 14, columns), dtype)
    for groups, width in ((2, 3), (1, 1), (1, 6)):
        w = picture((2, 2 // groups, rows, width), dtype, seed=width)
        for outputs in (columns, 203, 41, 17, 16, 9, 8, 4):
            image = x[..., : min(outputs + width - 1, columns)]
            right = convpar.conv2d(image, w, groups=groups, backend="numpy")
            for tile, stores in (((15, 4096), "cached"), ((8, 64), "cached"), ((15, 4096), "streamed")):
                config = {"tile": tile, "stores": stores}
                plan = fresh_plan("cpu-simd", image, w, config, groups=groups)
                assert outputs < 203 or "inside" in plan.paths
                assert outputs < 203 or stores == "cached" or "streamed" in plan.paths
                np.testing.assert_array_equal(run(plan, image, w), right)


@pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        *itertools.product(("cpu-packed",), (np.float32, np.float64, np.int32, np.int64)),
        *itertools.product(("cpu-im2col", "cpu-implicit"), (np.float32, np.float64, np.int32, np.int64)),
        *itertools.product(("cpu-winograd",), (np.float32, np.float64)),
        ("cpu-amx", np.float32),
    ],
)
def test_filters_are_packed_alike_wherever_they_lie(rung: str, dtype: type) -> None:
    """In one row per output channel, which is turned by squares of vectors, and otherwise, element by element."""
    backend = registry.find(rung)
    assert backend is not None
    if missing := backend.unavailable():
        pytest.skip(missing)
    for channels, outputs, k in ((1, 1, 1), (3, 5, 1), (16, 33, 3), (17, 16, 3), (20, 48, 1), (33, 70, 3)):
        if (rung == "cpu-winograd" and k != 3) or channels < backend.capabilities.least_channels:
            continue
        x = picture((1, channels, 12, 13), dtype)
        w = picture((outputs, channels, k, k), dtype, seed=outputs)
        rules = {"accuracy": "normwise"} if rung == "cpu-winograd" else {}
        apart = np.zeros((outputs, channels, k, 2 * k), dtype)[..., ::2]
        apart[...] = w
        there = w.transpose(1, 0, 2, 3).copy().transpose(1, 0, 2, 3)
        packed = [run(fresh_plan(rung, x, v, None, **rules), x, v) for v in (w, apart, there)]
        np.testing.assert_array_equal(packed[0], packed[1])
        np.testing.assert_array_equal(packed[0], packed[2])
        if rung != "cpu-winograd":
            np.testing.assert_array_equal(packed[0], convpar.conv2d(x, w, backend="numpy"))


@pytest.mark.parametrize("columns", range(1, 10))
@pytest.mark.parametrize("stride", [1, 2])
def test_filter_columns_fall_into_passes(columns: int, stride: int) -> None:
    """As many in one as the registers have room for beside the sums of a block, however wide that is."""
    for outputs, width in itertools.product((5, 70), range(1, 60, 3)):
        x = picture((1, 3, 4, columns + (width - 1) * stride), np.float32)
        w = picture((outputs, 3, 2, columns), np.float32, seed=1)
        right = convpar.conv2d(x, w, stride=stride, backend="numpy")
        plan = fresh_plan("cpu-packed", x, w, stride=stride)
        np.testing.assert_array_equal(run(plan, x, w), right)


@pytest.mark.parametrize("rows", [7, 15, 16, 20])
def test_the_lines_of_a_set_reach_the_kernel(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows taken one by one are summed in another order; blocks that slide, and other levels, keep the order."""
    random = np.random.default_rng(rows)
    x = random.random((1, 1, 64, 1024), np.float32)
    w = random.random((1, 1, rows, 5), np.float32)
    found = []
    for lines in (8, 12, 16):
        monkeypatch.setattr(compiled.engine(), "SET_LINES", lines)
        found.append(run(fresh_plan("cpu-simd", x, w, {"tile": (64, 1024)}), x, w))
    by_columns = found[2]
    for y in found[:2]:
        assert np.array_equal(y, by_columns) == (rows < 16 or not WIDE)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int8, np.int16, np.int32, np.int64])
@pytest.mark.parametrize("rows", [1, 2, 3, 6, 7, 8, 9, 10, 14, 15, 16])
def test_blocks_that_slide_meet_without_a_seam(rows: int, dtype: type) -> None:
    """All widths around a block of four vectors or fewer, one more row than a block's, tall ones with few and many rows left below
    them, and rows that lie apart."""
    lanes = 64 // np.dtype(dtype).itemsize
    x = picture((1, 2, 39 + 2 * rows, 10 * lanes + rows), dtype)
    for filters, rules in (
        (picture((2, 1, rows, rows), dtype), {"groups": 2}),
        (picture((1, 2, rows, 3), dtype), {}),
        (picture((2, 1, rows, 3), dtype), {"groups": 2, "dilation": (2, 1)}),
    ):
        extent = (rows - 1) * rules.get("dilation", (1, 1))[0] + 1
        right = convpar.conv2d(x, filters, backend="numpy", **rules)
        widths = lanes // 2, lanes, *range(2 * lanes - 1, 5 * lanes + 2, max(lanes // 5, 1)), 9 * lanes + 3
        for width in widths:
            for height in (8, 9, 16, 17, 24, 27, 33, 41):
                image = x[..., : height + extent - 1, : width + filters.shape[3] - 1]
                for stores in ("cached", "streamed"):
                    config = {"tile": (64, 4096), "stores": stores}
                    np.testing.assert_array_equal(
                        convpar.conv2d(image, filters, backend="cpu-simd", config=config, **rules),
                        right[..., :height, :width],
                    )


@pytest.mark.parametrize("rows", [2, 5, 7, 8, 9, 10])
def test_blocks_slide_where_they_fit(rows: int) -> None:
    """With 32 registers under filters of any width; their sums have another order than those of tiles with fewer rows, or less wide."""
    random = np.random.default_rng(rows)
    high = 8
    x = random.random((1, 1, high - 1 + rows, 100), np.float32)
    w = random.random((1, 1, rows, 5), np.float32)

    def tiled(*tile: int) -> np.ndarray[Any, Any]:
        return convpar.conv2d(x, w, backend="cpu-simd", config={"tile": tile})

    y = tiled(high, 96)
    for tile in ((high - 1, 96), (high, 15)):
        other = tiled(*tile)
        np.testing.assert_allclose(other, y, rtol=1e-5)
        assert not (WIDE and np.array_equal(other, y))
    # Five vectors, as 80 columns are with AVX-512, are no blocks of four and three; blocks of three slide under other numbers of
    # filter rows than seven.
    five = tiled(high, 80)[..., :80]
    assert np.array_equal(five, y[..., :80]) == (cpu.isa() != "v4" or rows != 7)


@pytest.mark.parametrize("rung", ["cpu-simd", "cpu-separable"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize(
    ("size", "taps", "edge"),
    [((5, 5), 9, 4), ((14, 20), 27, 13), ((40, 9), 31, 15), ((3, 40), 21, 20), ((1, 7), 10, 12)],
)
def test_rows_of_a_filter_over_the_edge(
    size: tuple[int, int], taps: int, edge: int, dtype: type, rung: str
) -> None:
    """More rows than a band of outputs has: left out where they meet zeros only, as some do at every size with some padding."""
    x = picture((2, 3, *size), dtype)
    w = picture((3, 1, taps, taps), dtype, seed=taps)
    same: dict[str, Any] = {"groups": 3, "padding": edge}
    for rules in (
        same,
        same | {"fillvalue": 7},
        same | {"boundary": "wrap"},
        same | {"stride": (2, 1)},
        {"groups": 3, "padding": (edge, 0, edge, edge)},
        {"groups": 3, "padding": (0, edge + 9, edge, edge)},
    ):
        right = convpar.conv2d(x, w, backend="numpy", **rules)
        for config in (None, {"tile": (11, 5)}):
            np.testing.assert_array_equal(convpar.conv2d(x, w, backend=rung, config=config, **rules), right)
    # Several filters of one image, together and one by one.
    right = convpar.conv2d(x[:, :1], w, padding=edge, backend="numpy")
    for block in (1, 3):
        y = convpar.conv2d(x[:, :1], w, padding=edge, backend=rung, config={"block": block})
        np.testing.assert_array_equal(y, right)
    for value in (np.inf, np.nan) if dtype != np.int32 else ():
        other = w.copy()
        other[1, 0, 0, 0] = value
        with np.errstate(invalid="ignore"):
            right = convpar.conv2d(x, other, backend="numpy", **same)
        np.testing.assert_array_equal(convpar.conv2d(x, other, backend=rung, **same), right)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rows_of_zeros_are_left_out(dtype: type) -> None:
    """To the last bit it is the filter without its outer rows. The whole one sums in another order: of 32 registers in more passes."""
    random = np.random.default_rng(0)
    x = random.random((1, 1, 4, 40)).astype(dtype)
    w = random.random((1, 1, 27, 27)).astype(dtype)
    y = convpar.conv2d(x, w, padding=13, backend="cpu-simd")
    inner = convpar.conv2d(x, w[:, :, 10:17], padding=(3, 13), backend="cpu-simd")
    np.testing.assert_array_equal(y, inner)
    filled = np.pad(x, ((0, 0), (0, 0), (13, 13), (13, 13)))
    if WIDE:
        assert (y != convpar.conv2d(filled, w, backend="cpu-simd")).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32])
@pytest.mark.parametrize("rows", range(1, 15))
def test_heights_of_passes_and_columns_that_are_known(rows: int, dtype: type) -> None:
    """Square filters, and those that differ by what the choice of a kernel looks at: width, dilation, stride."""
    x = picture((1, 2, 45, 203), dtype)
    for columns, rules in (
        (rows, {}),
        (rows, {"dilation": (1, 2)}),
        (rows, {"dilation": (2, 1)}),
        (rows, {"stride": (2, 1)}),
        (rows, {"stride": (1, 2)}),
        (rows + 1, {}),
        (max(rows - 1, 1), {}),
    ):
        w = picture((2, 1, rows, columns), dtype, seed=columns)
        right = convpar.conv2d(x, w, groups=2, backend="numpy", **rules)
        # Blocks of 1 to 8 rows; of 1 vector to 4, whose last one reaches back or fits.
        for tile in ((15, 203), (15, 41), (8, 64), (7, 11)):
            y = convpar.conv2d(x, w, groups=2, backend="cpu-simd", config={"tile": tile}, **rules)
            np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize("seed", range(20))
def test_the_estimate_knows_windows_over_the_edge(seed: int) -> None:
    random = np.random.default_rng(seed)
    for _ in range(20):
        h, w, kh, kw = (int(v) for v in (*random.integers(1, 12, 2), *random.integers(1, 5, 2)))
        rules = {
            "stride": tuple(map(int, random.integers(1, 4, 2))),
            "dilation": tuple(map(int, random.integers(1, 4, 2))),
            "padding": tuple(map(int, random.integers(0, 6, 4))),
        }
        reach = [(k - 1) * d + 1 for k, d in zip((kh, kw), rules["dilation"], strict=True)]
        if h + sum(rules["padding"][:2]) < reach[0] or w + sum(rules["padding"][2:]) < reach[1]:
            continue
        x, taps = picture((1, 1, h, w), np.float32), picture((1, 1, kh, kw), np.float32)
        p = Problem.of(x.shape, taps.shape, np.float32, **rules)  # type: ignore[arg-type]
        within = 1
        for axis, n in enumerate((h, w)):
            first = [i * p.stride[axis] - p.padding[2 * axis] for i in range(p.out_shape[2 + axis])]
            within *= sum(i >= 0 and i + p.extent[axis] <= n for i in first)
        plan = fresh_plan("cpu-private", x, taps, **rules)
        assert isinstance(plan, CpuPlan)
        assert plan._task.inside == within, p


def test_windows_over_the_edge_cost_scalar_kernels_more() -> None:
    x, w = picture((1, 1, 8, 8), np.float64), picture((1, 1, 3, 3), np.float64)
    inside, over = (fresh_plan("cpu-unrolled", x, w, padding=padding) for padding in ("valid", "same"))
    assert inside.cost is not None
    assert over.cost is not None
    # 64 outputs rather than 36, 28 of them at the border.
    assert over.cost - inside.cost > 28 * 9 * 3e-9


@pytest.mark.parametrize(
    "rules", [{}, {"padding": "same", "boundary": "wrap"}, {"padding": (3, 0, 1, 5)}], ids=str
)
def test_tiles_of_words_meet_without_a_seam(rules: dict[str, Any]) -> None:
    missing = registry.find("cpu-ifma").unavailable()  # type: ignore[union-attr]
    if missing:
        pytest.skip(missing)
    x, w = picture((3, 29, 143), np.int32), picture((3, 1, 9, 4), np.int32, seed=1)
    right = convpar.conv2d(x, w, groups=3, backend="numpy", **rules)
    for rows in (1, 2, 5, 16):
        for columns in (1, 15, 16, 17, 33, 64, 128):
            config = {"tile": (rows, columns)}
            y = convpar.conv2d(x, w, groups=3, backend="cpu-ifma", config=config, **rules)
            np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize("backend", VECTOR_RUNGS)
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_bits_depend_on_no_memory_that_was_there_before(backend: str, threads: int) -> None:
    random = np.random.default_rng(3)
    one, two = np.outer(random.random(5), random.random(5)), two_terms("cross", 9)
    x = random.random((1, 1, 64, 170)).astype(np.float32)
    x[..., 30:50] = np.inf  # under the first tile only
    cases: list[tuple[Array, Any, dict[str, Any]]] = [
        (x[..., 60:70].copy(), None, {}),
        (x, {"tile": (64, 30)}, {"stride": (1, 2)}),
        (x, {"tile": (16, 20)}, {"dilation": (1, 20)}),
        (x, {"tile": (8, 13)}, {"padding": (2, 2, 2, 2)}),
    ]
    for (image, config, rules), taps in itertools.product(cases, (one, two)):
        w = taps.astype(np.float32)[None, None]
        bits = set()
        for fill in (0, 0x7F, 0xFF):
            plan = fresh_plan(backend, image, w, config, **rules)
            bits |= {run(plan, image, w, fill, threads).tobytes(), run(plan, image, w, fill, 1).tobytes()}
        assert len(bits) == 1


# -- filters that are a column times a row


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float64", 53)])
@pytest.mark.parametrize("place", [(1, 1), (2, 2)])
def test_a_filter_is_factored_as_far_as_the_contract_allows(
    dtype: str, bits: int, place: tuple[int, int]
) -> None:
    # For 3 x 3 taps the contract has room for 9 + 2 roundings, and two sums take 3 + 3 + 1.
    x = picture((1, 1, 20, 70), dtype)
    for units, factored in ((0, True), (3, True), (4, False)):
        w = np.ones((1, 1, 3, 3), dtype)
        w[0, 0][place] -= units * 2.0**-bits
        plan = fresh_plan("cpu-separable", x, w)
        right = convpar.conv2d(x, w, backend="numpy", dtype="float64")
        error = np.abs(run(plan, x, w) - right)
        assert ("factored" in plan.paths_run()) == factored
        assert (error <= 11 * 2.0**-bits * right).all()


def test_filters_of_subnormal_numbers_keep_their_taps() -> None:
    least = 2.0**-1074
    x = np.full((1, 1, 20, 40), 2.0**1000)
    for taps in ([[2, 1], [1, 1]], [[4, 3], [3, 2]], [[2, 2], [2, 1]]):
        w = np.array([[taps]]) * least
        y = run(fresh_plan("cpu-separable", x, w), x, w)
        np.testing.assert_array_equal(y, np.sum(taps) * 2.0**-74)
    # The product of the small ones is lost, and there is a tap in its place, or none.
    small = 2.0**-540
    for corner in (0.0, least):
        w = np.array([[[[1, small], [small, corner]]]])
        plan = fresh_plan("cpu-separable", x, w)
        run(plan, x, w)
        assert "factored" not in plan.paths_run()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_filters_of_extreme_integers(dtype: str) -> None:
    limits = np.iinfo(dtype)
    half = limits.min or limits.max // 2 + 1
    minus = np.iinfo(dtype).max if limits.min == 0 else -1
    x = picture((20, 70), dtype)
    for a in (half, limits.max, minus, 1):
        for b in (half, limits.max, minus, 2):
            for taps in (
                [[minus, minus], [a, b]],
                [[a, minus], [b, minus]],
                [[a, b], [b, a]],
                [[a, a], [b, b]],
            ):
                w = np.array(taps, dtype)
                right = convpar.conv2d(x, w, backend="numpy")
                np.testing.assert_array_equal(convpar.conv2d(x, w, backend="cpu-separable"), right)


def test_integer_filters_are_found() -> None:
    x = picture((1, 1, 20, 70), np.int16)
    for taps, factored in (
        (np.outer([0, 6, -9], [4, 0, -10]), True),
        (np.outer([1, 300, 2], [200, 7, 1]), True),  # 300 * 200 wraps
        (np.eye(3), False),
        (np.zeros((3, 3)), False),
    ):
        w = taps.astype(np.int64).astype(np.int16)[None, None]
        plan = fresh_plan("cpu-separable", x, w)
        np.testing.assert_array_equal(run(plan, x, w)[0, 0], convpar.conv2d(x, w, backend="numpy")[0, 0])
        assert ("factored" in plan.paths_run()) == factored


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_special_sample_reaches_its_windows_only(special: float, dtype: str) -> None:
    # The row has a zero, and sums of columns beside a window belong to its neighbours.
    w = np.outer([1, 2, 1], [1, 0, -1]).astype(dtype)
    x = picture((24, 90), dtype)
    for place in ((0, 0), (11, 47), (23, 89)):
        x[place], old = special, x[place]
        y = convpar.conv2d(x, w, padding=1, backend="cpu-separable")
        np.testing.assert_array_equal(y, convpar.conv2d(x, w, padding=1, backend="numpy"))
        x[place] = old


def test_a_sum_of_a_column_that_overflows_alone() -> None:
    # Only the tap of least weight meets the first column of samples.
    w = np.outer([1, 1], [2.0**-100, 1]).astype(np.float32)
    x = picture((9, 50), np.float32)
    x[:, 0] = 3e38
    right = convpar.conv2d(x.astype(np.float64), w.astype(np.float64), backend="numpy")
    np.testing.assert_allclose(convpar.conv2d(x, w, backend="cpu-separable"), right, rtol=1e-6)


def test_filters_that_reach_too_far_are_refused() -> None:
    w = np.outer(COLUMN, ROW).astype(np.float32)
    x = picture((5, 1400), np.float32)
    for dilation in (250, 256):
        y = convpar.conv2d(x, w, dilation=(1, dilation), backend="cpu-separable")
        np.testing.assert_array_equal(y, convpar.conv2d(x, w, dilation=(1, dilation), backend="numpy"))
    for dilation in (257, 600):
        with pytest.raises(convpar.Unsupported, match="at most 512 columns"):
            convpar.conv2d(x, w, dilation=(1, dilation), backend="cpu-separable")


# -- filters that are the sum of two terms


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 24), ("float64", 53)])
@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("unsharp", True),
        ("less its mean", True),
        ("centre and surround", True),
        ("cross", True),  # terms through its middle would meet taps that are zero
        ("Laplacian of Gaussian", False),  # terms cancel where it changes its sign
        ("disc", False),  # of rank five
    ],
)
def test_two_terms_stand_for_a_filter_as_far_as_the_contract_allows(
    kind: str, found: bool, dtype: str, bits: int
) -> None:
    w = two_terms(kind, 15).astype(dtype)[None, None]
    x = np.random.default_rng(0).standard_normal((1, 1, 40, 100)).astype(dtype)
    x[..., 20:, 50:] *= 1e4
    plan = fresh_plan("cpu-separable", x, w)
    y = run(plan, x, w)
    exactly = np.longdouble if dtype == "float64" else np.float64
    right = convpar.conv2d(x.astype(exactly), w.astype(exactly), backend="numpy")
    products = convpar.conv2d(np.abs(x).astype(exactly), np.abs(w).astype(exactly), backend="numpy")
    assert ("factored" in plan.paths_run()) == found
    assert (np.abs(y - right) <= (w.size + 2) * 2.0**-bits * products).all()


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint32", "int64", "float32", "float64"])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"padding": (2, 1, 9, 2), "boundary": "mirror"},
        {"stride": (2, 3), "padding": 1},
        {"dilation": (3, 2), "padding": "same", "boundary": "wrap"},
        {"padding": (0, 0, 2, 0)},
    ],
    ids=str,
)
def test_two_terms_of_whole_numbers_are_exact(rules: dict[str, Any], dtype: str) -> None:
    column = np.array([1, 8, 28, 56, 70, 56, 28, 8, 1])
    middle = column == 70
    unsharp = 255 * np.outer(middle, middle) - np.outer(column[:9] // 8, column // 8)
    crossed = 2 * np.outer(middle, column) + np.outer(column, middle)
    inner = np.abs(np.arange(9) - 4) < 2
    boxes = 4 * np.outer(inner, inner) - 2
    w = np.stack([unsharp, crossed, boxes]).astype(np.int64).astype(dtype)[:, None]
    for shape in ((3, 29, 143), (3, 25, 17), (3, 25, 24)):
        x = picture(shape, dtype) % 16
        p = fresh_plan("cpu-separable", x[None], w, groups=3)
        run(p, x[None], w)
        assert "factored" in p.paths_run()
        right = convpar.conv2d(x, w, groups=3, backend="numpy", **rules)
        for tile in ((1, 15), (5, 64), (16, 128)):
            y = convpar.conv2d(x, w, groups=3, backend="cpu-separable", config={"tile": tile}, **rules)
            np.testing.assert_array_equal(y, right)


def test_two_terms_are_streamed() -> None:
    w = np.round(two_terms("cross", 9) * 256).astype(np.float32)
    x = picture((30, 1100), np.float32)
    y = convpar.conv2d(x, w, backend="cpu-separable", config={"stores": "streamed"})
    np.testing.assert_array_equal(y, convpar.conv2d(x, w, backend="numpy"))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_two_terms_of_any_integers_leave_no_remainder(dtype: str) -> None:
    random = np.random.default_rng(1)
    limits = np.iinfo(dtype)
    x = random.integers(limits.min, limits.max, (1, 1, 20, 70), dtype, endpoint=True)
    for factor in (1, 2, 12, limits.max // 2 + 1):
        terms = random.integers(limits.min, limits.max, (2, 2, 9), dtype, endpoint=True)
        w = (terms[0, 0][:, None] * terms[0, 1] + terms[1, 0][:, None] * terms[1, 1]) * np.array(
            factor, dtype
        )
        w = w.astype(dtype)[None, None]
        plan = fresh_plan("cpu-separable", x, w)
        np.testing.assert_array_equal(run(plan, x, w), convpar.conv2d(x, w, backend="numpy"))
        assert "factored" in plan.paths_run()


@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_special_sample_reaches_its_windows_only_through_two_terms(special: float, dtype: str) -> None:
    w = two_terms("cross", 9).astype(dtype)
    x = np.ones((24, 90), dtype)
    for place in ((0, 0), (11, 47), (23, 89)):
        x[place], old = special, x[place]
        y = convpar.conv2d(x, w, padding=1, backend="cpu-separable")
        np.testing.assert_allclose(y, convpar.conv2d(x, w, padding=1, backend="numpy"), rtol=1e-5)
        x[place] = old


@pytest.mark.parametrize("width", [20, 90])
def test_terms_that_overflow_where_their_sum_does_not(width: int) -> None:
    inner = np.abs(np.arange(15) - 7) <= 3
    w = (2 * np.outer(inner, inner) - 1).astype(np.float32)
    x = np.zeros((20, width), np.float32)
    x[7, 7:11] = 8e37  # of which a column's sum overflows in no term, and a row's does
    plan = fresh_plan("cpu-separable", x[None, None], w[None, None])
    right = convpar.conv2d(x, w, backend="numpy")
    np.testing.assert_array_equal(run(plan, x[None, None], w[None, None])[0, 0], right)
    assert "factored" in plan.paths_run()
    assert np.isfinite(right).all()


# -- filters packed by output channels


@pytest.mark.parametrize("backend", ["cpu-packed", "cpu-im2col", "cpu-implicit"])
@pytest.mark.parametrize("channels", [1, 3, 15, 16, 17, 31, 33, 49, 130])
def test_channels_beside_those_packed_together(backend: str, channels: int) -> None:
    x = picture((2, 6, 9, 40), np.float32)
    w = picture((2 * channels, 3, 3, 3), np.float32, seed=1)
    bias = np.arange(2 * channels, dtype=np.float32)
    right = convpar.conv2d(x, w, bias, groups=2, padding=1, backend="numpy")
    for block in (1, 8, 17, 64, 256):
        y = convpar.conv2d(
            x, w, bias, groups=2, padding=1, backend=backend, config={"block": block, "tile": (4, 27)}
        )
        np.testing.assert_array_equal(y, right)


def lays_out(plan: Plan) -> bool:
    """Whether every thread has room for samples of all channels under a few outputs."""
    samples = plan.problem.c // plan.problem.groups * min(plan.problem.oh * plan.problem.ow, 24)
    each = plan.workspace_bytes(2) - plan.workspace_bytes(1)
    return each >= samples * plan.problem.sum_dtype.itemsize


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("stride", [1, 2, (2, 1), (1, 3)], ids=str)
@pytest.mark.parametrize("rung", ["cpu-packed", "cpu-implicit"])
def test_samples_that_are_laid_out(rung: str, stride: Any, dtype: type) -> None:
    """Of blocks over several rows, blocks of a part of a row, several strips; of an odd vector of output channels."""
    for images, channels, filters, high, wide, columns in (
        (2, 64, 145, 7, 7, 7),
        (1, 64, 160, 2, 9, 9),
        (1, 70, 130, 31, 31, 33),
        (1, 300, 129, 9, 44, 44),
        (1, 1000, 128, 3, 50, 51),
        (2, 130, 40, 16, 64, 64),  # few filters, but channels whose lines push each other out
        (1, 64, 130, 600, 1, 2),  # each sample in a row of its own
        (
            1,
            70,
            130,
            64,
            31,
            31,
        ),  # columns beyond the last whole vector are turned where rows of outputs don't follow each other
    ):
        memory = np.full((images, channels, high, columns), 10**6, dtype)
        x = memory[..., :wide]
        x[...] = picture(x.shape, dtype)
        w = picture((filters, channels, 1, 1), dtype, seed=1)
        bias = np.arange(filters, dtype=dtype)
        right = convpar.conv2d(x, w, bias, stride=stride, backend="numpy")
        plan = fresh_plan(rung, x, w, {"block": filters}, stride=stride)
        packed, apart = rung == "cpu-packed", stride not in (1, (2, 1))
        # The other one gathers rows that a vector doesn't fit.
        if (dtype == np.float32 or not apart) if packed else right.shape[3] > 16:
            assert plan.launch["input"] == "read in place"
            # Samples that are neighbours it lays out under many weights only.
            assert lays_out(plan) or (channels * filters < 8192 and not packed and not apart)
        for threads in (1, 2):
            y = run(plan, x, w, fill=0xFF, threads=threads)
            np.testing.assert_array_equal(y + bias[:, None, None], right)
        for config in (
            None,
            {"tile": (5, 100)},
            {"tile": (2, 9), "block": 128},
            {"block": 33},
            {"tile": (600, 44)},
        ):
            y = np.full_like(right, 77)
            convpar.conv2d(x, w, bias, stride=stride, backend=rung, config=config, out=y)
            np.testing.assert_array_equal(y, right)
        # Rows of outputs that don't follow each other, and sums that wait for their conversion.
        memory = np.full((*right.shape[:3], right.shape[3] + 3), 77, dtype)
        convpar.conv2d(x, w, bias, stride=stride, backend=rung, out=memory[..., 1:-2])
        np.testing.assert_array_equal(memory[..., 1:-2], right)
        assert (memory[..., [0, -2, -1]] == 77).all()
        if np.issubdtype(dtype, np.integer):
            continue  # no type holds all sums of these
        rules = {"stride": stride, "dtype": np.int16, "overflow": "saturate"}
        y = convpar.conv2d(x, w, bias, backend=rung, **rules)
        np.testing.assert_array_equal(y, convpar.conv2d(x, w, bias, backend="numpy", **rules))


@pytest.mark.parametrize(
    ("shape", "filters", "taps", "rules"),
    [
        ((1, 64, 14, 14), 28, 1, {}),
        ((1, 32, 14, 14), 512, 1, {}),
        ((1, 64, 14, 14), 256, 3, {}),
        ((1, 256, 14, 14), 1024, 1, {"groups": 8}),
    ],
)
def test_samples_that_are_met_where_they_are(
    shape: tuple[int, ...], filters: int, taps: int, rules: dict[str, Any]
) -> None:
    """Few output channels or few channels, and larger filters."""
    x, w = (
        picture(shape, np.float32),
        picture((filters, shape[1] // rules.get("groups", 1), taps, taps), np.float32, 1),
    )
    plan = fresh_plan("cpu-packed", x, w, **rules)
    np.testing.assert_array_equal(run(plan, x, w), convpar.conv2d(x, w, backend="numpy", **rules))
    assert not lays_out(plan)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
def test_filters_that_stay_while_images_pass(groups: int, last: bool) -> None:
    """Blocks of output channels whose filters fit the second cache: each meets all images before the next one comes."""
    x = picture((5, 512, 8, 7), np.float32)
    w = picture((320, 512 // groups, 3, 3), np.float32, seed=1)
    right = convpar.conv2d(x, w, groups=groups, backend="numpy")
    if last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    plan = fresh_plan("cpu-packed", x, w, groups=groups)
    filters = plan.launch["output channels a tile"] * w[0].nbytes
    assert filters <= 640 * 1024 < w.nbytes // groups
    assert "second block" in plan.paths
    for threads in (1, 2, 3):
        np.testing.assert_array_equal(run(plan, x, w, fill=0xFF, threads=threads), right)
    for config in ({"block": 1000}, {"block": 48}, {"tile": (4, 3)}, {"tile": (2, 9), "block": 16}):
        y = run(fresh_plan("cpu-packed", x, w, config, groups=groups), x, w, threads=2)
        np.testing.assert_array_equal(y, right)


@pytest.mark.parametrize(
    ("shape", "filters", "taps", "rows", "channels"),
    [
        ((1, 256, 56, 56), 64, 1, 2, 64),  # samples are laid out: once, for all output channels
        ((1, 256, 14, 14), 1024, 1, 14, 64),  # filters are larger, and read once
        # Samples and filters are both read again, for about as much; or where edges are gathered, samples once.
        ((1, 64, 56, 56), 64, 3, *((7, 32) if WIDE else (4, 64))),
        # Filters are larger, and read once; or few times.
        ((1, 512, 14, 14), 512, 3, *((14, 32) if WIDE else (7, 96))),
        ((1, 3, 64, 64), 64, 7, 4, 64),  # tiles are gathered: once
        ((2, 512, 14, 14), 256, 1, 2, 128),  # some of both
        ((16, 256, 14, 14), 256, 1, 14, 256),  # images enough
        ((1, 16, 8, 8), 32, 3, 8, 32),  # too little work
        *(
            [
                ((1, 256, 56, 56), 640, 3, 14, 160),  # in blocks that are alike
                # Samples don't stay in the caches: halved as far as it is worth it.
                ((1, 256, 112, 112), 64, 3, 4, 64),
            ]
            if WIDE
            else []
        ),
    ],
)
def test_how_few_images_are_cut(
    shape: tuple[int, ...], filters: int, taps: int, rows: int, channels: int
) -> None:
    x, w = picture(shape, np.float32), picture((filters, shape[1], taps, taps), np.float32, seed=1)
    plan = fresh_plan("cpu-packed", x, w, padding=taps // 2)
    assert plan.launch["output channels a tile"] == channels
    assert plan.launch["tile"] == f"{rows} x {shape[3]} outputs"
    # Sums are exact; the reference would take half a minute.
    right = convpar.conv2d(x, w, padding=taps // 2, backend="cpu-simd")
    np.testing.assert_array_equal(run(plan, x, w, threads=2), right)


@pytest.mark.parametrize(
    ("shape", "filters", "rules", "config", "dtype", "rows", "channels"),
    [
        ((1, 256, 28, 28), 512, {}, {}, "float32", 4, 128),
        (
            (1, 256, 56, 56),
            512,
            {"stride": 2},
            {},
            "float32",
            4,
            256,
        ),  # to lay samples out again takes longer
        ((1, 256, 56, 56), 512, {"stride": 2}, {}, "float64", 2, 256),  # vectors are half as long
        ((1, 128, 28, 28), 512, {"groups": 2}, {}, "float32", 4, 256),  # all of a group
        ((3, 320, 9, 5), 200, {}, {}, "float32", 3, 200),  # three images are a few items
        ((1, 100, 53, 30), 72, {}, {}, "float32", 3, 72),  # the last rows are fewer
        ((1, 256, 28, 28), 256, {}, {"tile": (14, 28)}, "float32", 14, 64),  # rows are as given
        ((1, 256, 28, 28), 256, {}, {"tile": (600, 44)}, "float32", 28, 32),
    ],
)
def test_how_few_images_are_cut_under_points(
    shape: tuple[int, ...],
    filters: int,
    rules: dict[str, Any],
    config: Any,
    dtype: str,
    rows: int,
    channels: int,
) -> None:
    x = picture(shape, np.dtype(dtype))
    w = picture((filters, shape[1] // rules.get("groups", 1), 1, 1), np.dtype(dtype), seed=1)
    plan = fresh_plan("cpu-implicit", x, w, config, **rules)
    assert plan.launch["tile"].startswith(f"{rows} x ")
    assert plan.launch["output channels a tile"] == channels
    right = convpar.conv2d(x, w, backend="cpu-simd", **rules)
    for threads in (1, 2, 5):
        np.testing.assert_array_equal(run(plan, x, w, fill=0xFF, threads=threads), right)


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_large_filters_are_packed_block_by_block(dtype: type, groups: int, flip: bool) -> None:
    """By each thread those of the blocks that it comes to, however they lie and whatever their type."""
    x = picture((3, 256, 6, 5), dtype)
    w = picture((320, 256 // groups, 3, 3), dtype, seed=1)
    rules = {"padding": 1, "groups": groups, "flip": flip}
    right = convpar.conv2d(x, w, backend="numpy", **rules)
    apart = np.zeros((*w.shape[:3], 6), dtype)[..., ::2]
    apart[...] = w
    for filters in (w, apart, w.astype(w.dtype.newbyteorder(">")), w.astype(np.int8)):
        for config in ({"block": 48}, {"block": 48, "tile": (4, 3)}):
            plan = fresh_plan("cpu-packed", x, filters, config, **rules)
            one, two = (plan.workspace_bytes(threads) for threads in (1, 2))
            assert 48 * w[0].nbytes < two - one <= one < w.nbytes // 2
            for threads in (1, 2, 3, 9):
                y = run(plan, x, filters, fill=0xFF, threads=threads)
                np.testing.assert_array_equal(y, right)


def test_a_block_of_filters_that_are_not_finite_is_one_by_itself() -> None:
    """Zeros around an image are gathered for it, and left out for the others, whichever was packed before."""
    x = picture((2, 256, 6, 5), np.float32)
    w = picture((192, 256, 3, 3), np.float32, seed=1)
    w[70, 5, 0, 0], w[100, 7, 2, 1] = np.inf, np.nan
    plan = fresh_plan("cpu-packed", x, w, {"block": 32}, padding=1)
    with np.errstate(invalid="ignore"):
        right = convpar.conv2d(x, w, padding=1, backend="numpy")
    for threads in (1, 2):
        np.testing.assert_array_equal(run(plan, x, w, fill=0xFF, threads=threads), right)
    assert {"staged", "border"} <= plan.paths_run() or not WIDE
    # The order of sums goes by that, and mustn't by the number of threads.
    random = np.random.default_rng(0)
    x, w = random.random((1, 256, 6, 13), np.float32), random.random(w.shape, np.float32)
    w[70, 5, 0, 0] = np.inf
    plan = fresh_plan("cpu-packed", x, w, {"block": 32}, padding=1)
    bits = [run(plan, x, w, threads=threads).tobytes() for threads in (1, 2, 6, 7, 20)]
    assert len(set(bits)) == 1


@pytest.mark.parametrize("backend", VECTOR_RUNGS)
@pytest.mark.parametrize(
    ("shape", "rules"),
    [
        ((0, 16, 4, 4), {}),
        ((1, 16, 4, 0), {"padding": "same"}),
        ((1, 16, 0, 4), {"padding": "same"}),
        ((1, 16, 0, 70), {"padding": "same"}),
    ],
)
def test_empty_results(backend: str, shape: tuple[int, ...], rules: dict[str, Any]) -> None:
    groups = 16 if backend == "cpu-separable" else 1
    x, w = np.zeros(shape, np.float32), np.ones((32, 16 // groups, 3, 3), np.float32)
    right = convpar.conv2d(x, w, groups=groups, backend="numpy", **rules)
    assert right.size == 0
    y = convpar.conv2d(x, w, groups=groups, backend=backend, **rules)
    assert (y.shape, y.dtype) == (right.shape, right.dtype)


def test_filters_stay_beside_converted_results() -> None:
    """Blocks of them fit the second cache there, too."""
    x, w = picture((16, 512, 7, 7), np.float32), picture((512, 512, 3, 3), np.float32, seed=1)
    plan = fresh_plan("cpu-packed", x, w, dtype=np.float16)
    assert plan.launch["output"] == "converted tile by tile"
    assert plan.launch["output channels a tile"] * w[0].nbytes <= 640 * 1024


@pytest.mark.parametrize(
    ("shape", "filters", "taps"),
    [
        ((5, 64, 6, 6), 256, 3),
        ((3, 256, 56, 56), 256, 3),
        ((5, 1024, 6, 6), 256, 1),
        ((5, 256, 6, 6), 256, 7),
    ],
)
def test_filters_of_one_block(shape: tuple[int, ...], filters: int, taps: int) -> None:
    """Few, beside large images, of one sample, or where a tile is gathered: there are items enough."""
    x, w = picture(shape, np.float32), picture((filters, shape[1], taps, taps), np.float32, seed=1)
    plan = fresh_plan("cpu-packed", np.repeat(x, 4, axis=0), w, padding=taps // 2)
    assert plan.launch["output channels a tile"] == filters


def reaches_over_edge(x: Array, w: Array, rung: str = "cpu-packed", **rules: Any) -> bool:
    """Whether the rung took the zeros around an image in place; its answer is right."""
    plan = fresh_plan(rung, x, w, rules.pop("config", None), **rules)
    with np.errstate(invalid="ignore"):
        right = convpar.conv2d(x, w, backend="numpy", **rules)
    for threads in (1, 2):
        np.testing.assert_array_equal(run(plan, x, w, fill=0xFF, threads=threads), right)
    if rung == "cpu-packed":
        assert ("border" in plan.paths) == ("finite" in plan.launch["input"])
    elif "border" in plan.paths:
        assert plan.launch["input"] == "read in place"
    return "border" in plan.paths_run()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("padding", [*itertools.product((0, 1), repeat=4)], ids=str)
def test_zeros_around_an_image_in_place(padding: tuple[int, int, int, int], dtype: type) -> None:
    """From a single sample to several blocks, strips, tiles and parts of the channels, with other samples around."""
    for images, channels, filters, high, wide in (
        (2, 3, 5, 1, 1),
        (1, 1, 16, 1, 3),
        (1, 2, 33, 3, 1),
        (1, 3, 17, 2, 2),
        (2, 30, 40, 9, 31),
        (3, 80, 17, 14, 14),
        (1, 3, 48, 5, 250),
    ):
        if min(high + padding[0] + padding[1], wide + padding[2] + padding[3]) < 3:
            continue
        memory = np.full((images, channels, high + 2, wide + 2), 10**6, dtype)
        x = memory[:, :, 1:-1, 1:-1]
        x[...] = picture(x.shape, dtype)
        w = picture((filters, channels, 3, 3), dtype, seed=1)
        for config in (None, {"tile": (4, 20)}, {"tile": (1, 7), "block": 16}):
            in_place = reaches_over_edge(x, w, padding=padding, config=config)
            assert in_place == WIDE or not any(padding)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("taps", [(3, 3), (3, 4), (4, 5), (5, 3), (5, 5)], ids=str)
def test_zeros_around_an_image_under_all_filters_and_strides(
    taps: tuple[int, int], stride: tuple[int, int], dtype: type
) -> None:
    """Of several rows and columns that lie beyond, at one edge or both, of images smaller than the filter and larger."""
    down, across = ((k - 1) // 2 for k in taps)
    for images, channels, filters, high, wide in (
        (2, 3, 5, 1, 1),
        (1, 2, 33, 3, 2),
        (1, 9, 16, 4, 7),
        (1, 70, 17, 9, 15),
        (2, 30, 40, 8, 44),
        (1, 3, 48, 6, 121),
    ):
        memory = np.full((images, channels, high + 6, wide + 6), 10**6, dtype)
        x = memory[:, :, 3:-3, 3:-3]
        x[...] = picture(x.shape, dtype)
        w = picture((filters, channels, *taps), dtype, seed=1)
        for padding in ((down, down, across, across), (1, 0, 0, 1), (0, down, across, 0)):
            room = high + sum(padding[:2]) - taps[0], wide + sum(padding[2:]) - taps[1]
            if min(room) < 0:
                continue
            # The last rows and columns may be left over.
            beyond = (
                padding[0],
                padding[1] - room[0] % stride[0],
                padding[2],
                padding[3] - room[1] % stride[1],
            )
            taken = WIDE and max(beyond) > 0 and (max(stride) == 1 or dtype == np.float32)
            for config in (None, {"tile": (2, 9)}, {"tile": (1, 5), "block": 16}):
                in_place = reaches_over_edge(x, w, padding=padding, stride=stride, config=config)
                assert in_place == taken


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int32, np.int64])
@pytest.mark.parametrize("dilation", [(1, 2), (2, 1), (2, 2), (3, 5), (6, 4), (12, 17)], ids=str)
@pytest.mark.parametrize("taps", [(3, 3), (3, 4), (5, 5)], ids=str)
def test_zeros_around_an_image_under_dilated_filters(
    taps: tuple[int, int], dilation: tuple[int, int], dtype: type
) -> None:
    """Columns that meet the image for a few outputs of a block, for all or for none; strides that go on over the edge."""
    down, across = (d * ((k - 1) // 2) for d, k in zip(dilation, taps, strict=True))
    # With AVX2 only where gathering takes long.
    taken = WIDE or (cpu.isa() == "v3" and dilation[1] > 2)
    for images, channels, filters, high, wide in (
        (1, 2, 33, 3, 2),
        (1, 70, 17, 9, 15),
        (2, 30, 40, 8, 44),
        (1, 3, 48, 6, 121),
    ):
        memory = np.full((images, channels, high + 6, wide + 6), 10**6, dtype)
        x = memory[:, :, 3:-3, 3:-3]
        x[...] = picture(x.shape, dtype)
        w = picture((filters, channels, *taps), dtype, seed=1)
        for padding in ((down, down, across, across), (1, 0, 0, 1), (0, down, across - 1, min(across, 2))):
            rules: dict[str, Any] = {"padding": padding, "dilation": dilation}
            room = high + sum(padding[:2]), wide + sum(padding[2:])
            if any(n <= d * (k - 1) for n, d, k in zip(room, dilation, taps, strict=True)):
                continue
            for config in (None, {"tile": (2, 9)}, {"tile": (1, 5), "block": 16}):
                assert reaches_over_edge(x, w, config=config, **rules) == taken
            if dtype == np.float32:
                # The last rows and columns may be left over.
                left = tuple((n - d * (k - 1) - 1) % 2 for n, d, k in zip(room, dilation, taps, strict=True))
                beyond = padding[0], padding[1] - left[0], padding[2], padding[3] - left[1]
                assert reaches_over_edge(x, w, stride=2, **rules) == (taken and max(beyond) > 0)
                assert not reaches_over_edge(x, w, stride=(1, 3), **rules)
                channels_last = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
                assert reaches_over_edge(channels_last, w, **rules) == taken


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("channels", "rules"),
    [
        (600, {}),
        (600, {"dilation": 3}),
        (600, {"dilation": 2, "stride": 2}),
        (3000, {"dilation": (2, 3)}),  # a row of samples is too many
        (600, {"groups": 2, "dtype": np.float16}),
    ],
    ids=str,
)
def test_a_tile_is_gathered_in_pieces_if_a_filter_is_not_finite(
    channels: int, rules: dict[str, Any], last: bool
) -> None:
    """There is no room for more: gathered at once, its samples would take several times as much."""
    x = picture((1, channels, 22, 31), np.float32) % 9
    groups = rules.get("groups", 1)
    w = picture((34, channels // groups, 3, 3), np.float32, 1) % 5
    if last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    rules = {"padding": rules.get("dilation", 1), **rules}
    if isinstance(rules["padding"], tuple):
        rules["padding"] = tuple(side for side in rules["padding"] for _ in range(2))
    config = {"tile": (22, 31)}
    taken = WIDE or (cpu.isa() == "v3" and rules.get("dilation") in (3, (2, 3)))
    assert reaches_over_edge(x, w, config=config, **rules) == taken
    workspace = fresh_plan("cpu-packed", x, w, config, **rules).workspace_bytes(1)
    sums = 48 * 22 * 32 * 4 if "dtype" in rules else 0
    if taken:
        assert workspace < 48 * channels * 9 * 4 + sums + x.nbytes // 2
    w[5, 7, 0, 2], w[33, -1, 1, 1] = np.inf, np.nan
    assert not reaches_over_edge(x, w, config=config, **rules)


@pytest.mark.parametrize("stride", [2, (2, 1), (1, 3), 4], ids=str)
@pytest.mark.parametrize("taps", [(1, 1), (3, 3), (2, 5), (7, 7), (1, 9)], ids=str)
def test_float32_is_read_in_place_with_any_stride(taps: tuple[int, int], stride: Any) -> None:
    for high, wide in ((9, 9), (20, 7), (31, 130)):
        x = picture((2, 40, high, wide), np.float32)[:, ::2]
        w = picture((35, 20, *taps), np.float32, seed=1)
        if high < taps[0] or wide < taps[1]:
            continue
        plan = fresh_plan("cpu-packed", x, w, stride=stride)
        right = convpar.conv2d(x, w, stride=stride, backend="numpy")
        for threads in (1, 2):
            np.testing.assert_array_equal(run(plan, x, w, fill=0xFF, threads=threads), right)
        assert plan.launch["input"] == "read in place"


@pytest.mark.parametrize("rules", [{"padding": 1}, {"padding": (1, 1, 1, 0), "groups": 2}], ids=str)
def test_what_is_not_taken_in_place(rules: dict[str, Any]) -> None:
    x, w = picture((2, 6, 9, 40), np.float32), picture((34, 6 // rules.get("groups", 1), 3, 3), np.float32, 1)
    assert reaches_over_edge(x, w, **rules) == WIDE
    assert reaches_over_edge(x[:, :, ::-1], w, **rules) == WIDE
    for value in (np.inf, np.nan):
        for place in (0, -1):
            other = w.copy()
            other.flat[place] = value
            assert not reaches_over_edge(x, other, **rules)
    assert not reaches_over_edge(x[..., ::-1], w, **rules)
    assert not reaches_over_edge(x.astype(np.int16), w, **rules)
    for more in (
        {"stride": (3, 1)},
        {"stride": (1, 3)},
        {"dilation": (1, 2), "padding": (1, 1, 3, 1)},
        {"dilation": (2, 1), "padding": (1, 3, 1, 1)},
        {"boundary": "wrap"},
        {"fillvalue": 2},
        {"padding": 2},
        {"padding": (0, 2, 1, 1)},
    ):
        assert not reaches_over_edge(x, w, **{**rules, **more})
    assert not reaches_over_edge(x, w[..., :2], **rules)
    assert not reaches_over_edge(x, w[:, :, :2], **rules)


@pytest.mark.parametrize("place", [0, 64 * 64 * 9 // 2 - 1, 64 * 64 * 9 // 2, -1])
def test_filters_that_several_threads_pack_are_all_looked_at(place: int) -> None:
    """So many that one thread wouldn't pack them alone."""
    x, w = picture((1, 64, 5, 5), np.float32) % 3, picture((64, 64, 3, 3), np.float32, 1)
    assert reaches_over_edge(x, w, padding=1) == WIDE
    w.flat[place] = np.inf
    assert not reaches_over_edge(x, w, padding=1)


# -- cpu-masked

needs_masks = pytest.mark.skipif(
    registry.find("cpu-masked").unavailable() is not None,  # type: ignore[union-attr]
    reason="cpu-masked needs AVX2 or AVX-512",
)
needs_avx512 = pytest.mark.skipif(cpu.isa() != "v4", reason="it is so with AVX-512 only")


@pytest.fixture
def processor_with(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes plans as if the processor were Intel's or not, and had a matrix unit or not; nothing may run."""

    def pretend(*, intel: bool, unit: bool) -> None:
        monkeypatch.setattr(compiled.engine(), "INTEL", intel)
        monkeypatch.setattr(compiled.engine(), "matrix_unit", lambda: unit)
        compiled.matrix_unit.cache_clear()

    monkeypatch.delenv(cpu.UNIT_VARIABLE, raising=False)
    yield pretend
    compiled.matrix_unit.cache_clear()


@needs_avx512
@pytest.mark.parametrize(
    ("name", "x", "w", "rules", "least"),
    [
        # Masked loads take turns with products there, ...
        ("cpu-masked", (1, 64, 28, 28), (64, 1, 9, 9), {"padding": "same", "groups": 64}, 1.2),
        # ... lanes move in one port, ...
        ("cpu-depthwise", (1, 64, 56, 56), (64, 1, 3, 3), {"padding": "same", "groups": 64}, 1.1),
        # ... a second cache gives too little for every product, ...
        ("cpu-depthwise", (1, 64, 56, 56), (64, 1, 31, 31), {"padding": "same", "groups": 64}, 1.5),
        # ... and transforms of small images gain less on what is beside them.
        ("cpu-fft2d", (1, 1, 64, 64), (1, 1, 9, 9), {"accuracy": "normwise"}, 1.1),
    ],
)
def test_estimates_hang_on_the_maker_and_not_on_a_matrix_unit_that_is_not_used(
    processor_with: Callable[..., None],
    name: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    rules: dict[str, Any],
    least: float,
) -> None:
    cost = {}
    for intel, unit in itertools.product((False, True), repeat=2):
        processor_with(intel=intel, unit=unit)
        assert compiled.matrix_unit() == unit
        cost[intel, unit] = fresh_plan(name, np.empty(x, np.float32), np.empty(w, np.float32), **rules).cost
    assert cost[False, False] == cost[False, True]
    assert cost[True, False] == cost[True, True]
    assert cost[True, True] > least * cost[False, True]  # type: ignore[operator]


@needs_avx512
def test_results_that_go_to_memory_cost_more_where_strides_slide() -> None:
    near, far = (
        fresh_plan(
            "cpu-masked",
            np.empty((n, 1, 161, 161), np.float32),
            np.empty((64, 1, 5, 5), np.float32),
            stride=2,
        )
        for n in (1, 64)
    )
    assert far.cost > 1.3 * 64 * near.cost  # type: ignore[operator]


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("taps", "padding"),
    [
        ((3, 3), 1),
        ((3, 3), (1, 0, 0, 1)),
        ((5, 5), 2),
        ((5, 5), (0, 3, 1, 0)),
        ((7, 7), 3),
        ((7, 7), (4, 4, 2, 3)),
        ((1, 2), (0, 0, 1, 1)),
        ((2, 4), 3),
        ((4, 3), (2, 1, 1, 1)),
        ((6, 6), 3),
        ((6, 2), (5, 6, 1, 0)),
        ((9, 3), (8, 1, 1, 2)),
        ((17, 8), 4),
    ],
    ids=str,
)
@pytest.mark.parametrize("stride", [1, 2])
def test_masks_at_every_width(taps: tuple[int, int], padding: Any, dtype: type, stride: int) -> None:
    """From a lane to four blocks of four vectors, every number of rows that a strip may leave, with other samples around the image."""
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    # More zeros than a vector has lanes are gathered.
    sides = (padding,) * 4 if isinstance(padding, int) else padding
    top, bottom, left, right = (min(side, lanes) for side in sides)
    w = picture((3, 1, *taps), dtype, seed=1) - 50
    widths = [1, 5, *(n * lanes + more for n in (1, 2, 3, 4, 5, 8, 13) for more in (-1, 0, 1, lanes // 2))]
    for number, width in enumerate(widths):
        # Half of the times a column and a row is left over.
        odd = number % stride
        columns = (width - 1) * stride + taps[1] + odd - left - right
        rows = number % 19 * stride + taps[0] + odd - top - bottom
        if columns < 1 or rows < 1:
            continue
        memory = np.full((2, 3, rows + 2, columns + 2), np.nan, dtype)
        x = memory[:, :, 1:-1, 1:-1]
        x[...] = picture(x.shape, dtype)
        for config in (None, {"tile": (3, lanes + 5)}):
            in_place = reaches_over_edge(
                x, w, "cpu-masked", groups=3, padding=(top, bottom, left, right), stride=stride, config=config
            )
            assert in_place == (max(taps) <= 16)


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("taps", [(3, 3), (1, 1), (4, 4), (5, 5), (6, 3), (7, 7), (9, 2)], ids=str)
def test_masks_over_several_channels(taps: tuple[int, int], dtype: type) -> None:
    x, w = picture((2, 6, 11, 70), dtype), picture((8, 3, *taps), dtype, seed=1)
    for stride in (1, 2):
        for config in (None, {"block": 1}, {"block": 3, "tile": (4, 40 // stride)}):
            assert reaches_over_edge(x, w, "cpu-masked", groups=2, padding=1, stride=stride, config=config)
        assert reaches_over_edge(x[:, :, ::-1], w, "cpu-masked", groups=2, padding=1, stride=stride)


@needs_masks
@pytest.mark.parametrize("stride", [1, 2])
def test_filters_far_wider_than_zeros_that_are_kept(stride: int) -> None:
    """Three rows of outputs, of which blocks have four."""
    x, w = np.ones((1, 1, 6, 150_010)), np.ones((1, 1, 1, 150_000))
    y = convpar.conv2d(x[:, :, : 3 * stride], w, stride=stride, backend="cpu-masked")
    assert y.shape == (1, 1, 3, 10 // stride + 1)
    assert (y == 150_000).all()


@needs_masks
def test_masks_with_a_stride_store_through_the_caches() -> None:
    x, w = np.ones((1, 1, 600, 1200), np.float32), np.ones((1, 1, 3, 3), np.float32)
    plan = fresh_plan("cpu-masked", x, w, stride=2, padding=1)
    assert (plan.launch["output"], plan.config["stores"]) == ("written in place", "cached")
    assert "streamed" not in plan.paths
    with pytest.raises(convpar.Unsupported, match=r"with a stride of .* through the caches"):
        convpar.conv2d(x, w, stride=2, backend="cpu-masked", config={"stores": "streamed"})


@needs_masks
def test_masks_with_a_stride_where_samples_are_gathered_at_edges_or_everywhere() -> None:
    """Other boundaries, types that are converted, and strides that aren't taken."""
    w = picture((3, 1, 5, 4), np.float32, seed=1)
    for high, wide in ((9, 20), (40, 80), (5, 200)):
        x = picture((2, 3, high, wide), np.float32)
        for boundary in ("wrap", "symm", "nearest", "fill"):
            rules: dict[str, Any] = {"groups": 3, "stride": 2, "padding": 2, "boundary": boundary}
            fill = {"fillvalue": 3} if boundary == "fill" else {}
            assert not reaches_over_edge(x, w, "cpu-masked", **rules, **fill)
        half = x.astype(np.float16)
        right = convpar.conv2d(x, w, groups=3, stride=2, padding=2, backend="numpy")
        rules = {"groups": 3, "stride": 2, "padding": 2, "dtype": np.float32}
        plan = fresh_plan("cpu-masked", half, w.astype(np.float16), **rules)
        np.testing.assert_array_equal(run(plan, half, w.astype(np.float16), fill=0xFF), right)
        for stride in ((1, 2), (2, 1), (3, 3)):
            with pytest.raises(convpar.Unsupported, match=r"the stride is \dx\d; it takes 1x1, 2x2 only"):
                convpar.conv2d(x, w, groups=3, stride=stride, backend="cpu-masked")


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("taps", [(3, 3), (1, 2), (6, 4), (7, 7), (9, 2)], ids=str)
def test_small_planes_are_taken_together(taps: tuple[int, int], dtype: type) -> None:
    """Groups of one filter, narrow ones in pairs with one left, and of two; the last item's fewer; filters that aren't finite; zeros
    beyond the reach of masks."""
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    narrow = (9, lanes // 2), (3, 5), (20, lanes // 2 + 1)
    others = ((71, 1, side) for side in narrow if side[1] + 2 >= taps[1])
    for groups, filters, side in ((70, 1, (7, 7)), (37, 2, (5, 20)), (101, 1, (12, 40)), *others):
        x, w = picture((2, groups, *side), dtype), picture((groups * filters, 1, *taps), dtype, seed=1)
        bias = picture((groups * filters,), dtype, seed=2)
        infinite = w.copy()
        infinite[groups // 2, 0, 0, 0] = np.inf
        for padding in ((taps[0] // 2, taps[0] // 2, 1, 1), (taps[0], 0, taps[1], 4), (17, 2, 2, 17)):
            rules: dict[str, Any] = {"groups": groups, "padding": padding}
            for given, rules["stride"] in itertools.product((w, infinite), (1, 2)):
                assert fresh_plan("cpu-masked", x, given, **rules).launch["work items"] < 2 * groups
                with np.errstate(invalid="ignore"):
                    right = convpar.conv2d(x, given, bias, backend="numpy", **rules)
                for threads in (1, 3):
                    y = convpar.conv2d(x, given, bias, backend="cpu-masked", num_threads=threads, **rules)
                    np.testing.assert_array_equal(y, right)


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [3, 5, 7])
def test_outputs_two_apart_slide_at_every_width(side: int, dtype: type) -> None:
    """Of planes in pairs with one left, and with NaN behind their rows; each has the bits that it has alone, and in other tiles."""
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    w = np.random.default_rng(side).random((3, 1, side, side)).astype(dtype)
    # The last have blocks between the first and the last one.
    widths = (*range(1, 3 * lanes + 2), 6 * lanes + 1, 7 * lanes, 14 * lanes - 1)
    for width, left, odd in itertools.product(widths, (0, side // 2), (0, 1)):
        columns = (width - 1) * 2 + side + odd - 2 * left
        if columns < 1:
            continue
        # Planes of so many images are taken together.
        memory = np.full((32, 3, 8 + side + odd, columns + 1), np.nan, dtype)
        x = memory[..., :columns]
        rules: dict[str, Any] = {"stride": 2, "padding": (1, 1, left, left)}
        x[...] = picture(x.shape, dtype, seed=width)
        assert reaches_over_edge(x, np.rint(9 * w), "cpu-masked", groups=3, **rules)
        x[...] = np.random.default_rng(width).random(x.shape)
        plan = fresh_plan("cpu-masked", x, w, groups=3, **rules)
        assert plan._task.together == 3
        parts = fresh_plan("cpu-masked", x, w, {"tile": (2, lanes + 3)}, groups=3, **rules)
        together = run(plan, x, w)
        np.testing.assert_array_equal(run(parts, x, w), together)
        for k in range(3):
            alone = convpar.conv2d(x[:, k : k + 1], w[k : k + 1], backend="cpu-masked", **rules)
            np.testing.assert_array_equal(alone[:, 0], together[:, k])


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("columns", [15, 16, 17, 130])
@pytest.mark.parametrize("rows", [2, 7])
def test_filters_wider_than_the_masks_that_are_kept(rows: int, columns: int, dtype: type) -> None:
    x, w = picture((1, 2, 4 + rows, 200), dtype), picture((2, 1, rows, columns), dtype, seed=1)
    for padding in (0, 1, 7):
        in_place = reaches_over_edge(x, w, "cpu-masked", groups=2, padding=padding)
        assert in_place == (columns <= 16 and 0 < padding <= VECTOR_BYTES // np.dtype(dtype).itemsize)


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [3, 5, 6, 7, 9])
def test_masks_keep_what_zeros_make_of_infinite_taps(side: int, dtype: type) -> None:
    """No such product is left out: 0 times infinity is NaN, as in cpu-simd, and infinite samples stay where they are."""
    x, w = picture((1, 2, 10, 20), dtype), picture((2, 1, side, side), dtype, seed=1)
    for value in (np.inf, -np.inf, np.nan):
        taps, samples = w.copy(), x.copy()
        taps[0, 0, 0, 0] = taps[1, 0, -1, 1] = value
        samples[0, 0, 0, 0] = samples[0, 0, 4, 19] = samples[0, 1, 9, 19] = value
        for a, b in ((x, taps), (samples, w), (samples, taps)):
            for padding in (1, min(side - 1, VECTOR_BYTES // np.dtype(dtype).itemsize)):
                assert reaches_over_edge(a, b, "cpu-masked", groups=2, padding=padding)
        # Of the second of two channels only.
        several = picture((2, 2, side, side), dtype, seed=1)
        several[0, 1, 0, 1] = several[1, 1, -1, -1] = value
        assert reaches_over_edge(picture((1, 4, 10, 20), dtype), several, "cpu-masked", groups=2, padding=1)


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("side", [3, 7])
def test_blocks_of_masks_take_turns(side: int, dtype: type) -> None:
    """Several blocks beside each other, and more rows than one of them slides down at once."""
    columns = 13 * (VECTOR_BYTES // np.dtype(dtype).itemsize) + 1
    for stride in (1, 2):
        x = picture((1, 2, 35 * stride, columns * stride), dtype)
        w = picture((2, 1, side, side), dtype, seed=1)
        rules: dict[str, Any] = {"groups": 2, "padding": side // 2, "stride": stride}
        # In one piece, or as it is cut otherwise.
        for config in ({"tile": (35, columns)}, None):
            assert reaches_over_edge(x, w, "cpu-masked", config=config, **rules)
            assert reaches_over_edge(x[:, :, ::-1], w, "cpu-masked", config=config, **rules)


@needs_avx512
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("taps", [(7, 7), (7, 1), (7, 3)], ids=str)
@pytest.mark.parametrize("rows", [15, 16, 17, 18, 19, 35])
def test_columns_that_fill_half_a_vector_are_folded(rows: int, taps: tuple[int, int], dtype: type) -> None:
    """Every remainder of rows by four parts, behind one block and several, with other samples around the image."""
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    w = picture((2, 1, *taps), dtype, seed=1) - 50
    several = picture((2, 2, *taps), dtype, seed=2)
    infinite = w.copy()
    infinite[1, 0, -1, 0] = np.inf
    for width in (lanes + 1, lanes + 2, 3 * lanes + lanes // 2, 4 * lanes + 1, 7 * lanes + 2):
        for top, bottom, left, right in ((3, 3, 0, 1), (0, 6, 0, 0), (5, 0, taps[1] - 1, taps[1] - 1)):
            high, wide = rows + 6 - top - bottom, width + taps[1] - 1 - left - right
            memory = np.full((1, 4, high + 2, wide + 2), np.nan, dtype)
            x = memory[:, :, 1:-1, 1:-1]
            x[...] = picture(x.shape, dtype)
            # In one piece.
            rules: dict[str, Any] = {
                "groups": 2,
                "padding": (top, bottom, left, right),
                "config": {"tile": (rows, width)},
            }
            for image, filters in ((x[:, :2], w), (x[:, :2], infinite), (x, several)):
                assert reaches_over_edge(image, filters, "cpu-masked", **rules)
            x[0, 0, high // 2, -1] = np.inf
            assert reaches_over_edge(x[:, :2], infinite, "cpu-masked", **rules)


@needs_masks
def test_what_masks_do_not_serve_is_gathered() -> None:
    x, w = picture((2, 3, 9, 40), np.float32), picture((3, 1, 3, 3), np.float32, seed=1)
    swapped = x.astype(x.dtype.newbyteorder())
    for image, rules in (
        (x, {"boundary": "wrap", "padding": 1}),
        (x, {"boundary": "symm", "padding": 2}),
        (x, {"fillvalue": 3, "padding": 1}),
        (x, {"padding": 17}),
        (x[..., ::-1], {"padding": 1}),
        (swapped, {"padding": 1}),
        (x.astype(np.int16), {"padding": 1}),
    ):
        assert not reaches_over_edge(image, w, "cpu-masked", groups=3, **rules)


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("width", [17, 18, 19, 31, 32, 33, 40])
def test_the_middle_of_wide_planes_is_left_to_the_rung_before(width: int, dtype: type) -> None:
    """Which stores it past the caches if asked to; so widths, in vectors, on both sides of where that begins."""
    columns = width * VECTOR_BYTES // np.dtype(dtype).itemsize - 3
    x = picture((1, 2, 33, columns), dtype)
    for taps, padding in (
        *((3, padding) for padding in ((0, 0, 0, 0), (1, 1, 1, 1), (1, 1, 1, 0), (0, 0, 0, 1), (1, 1, 0, 0))),
        *((7, padding) for padding in ((3, 3, 3, 3), (0, 2, 6, 0), (1, 0, 0, 6))),
        *((9, padding) for padding in ((4, 4, 4, 4), (0, 2, 8, 0))),
    ):
        w = picture((2, 1, taps, taps), dtype, seed=1)
        for image in (x, x[..., ::-1]):
            right = convpar.conv2d(image, w, groups=2, padding=padding, backend="numpy")
            plan = fresh_plan("cpu-masked", image, w, {"stores": "streamed"}, groups=2, padding=padding)
            told = plan.launch["output"] == "stored past the caches"
            np.testing.assert_array_equal(run(plan, image, w, fill=0xFF), right)
            assert told == ("streamed" in plan.paths) == ("streamed" in plan.paths_run())
            inside = image is x and width >= 19 and (width > 32 or not any(padding[2:]))
            assert told or not inside


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("taps", [(8, 3), (9, 9), (15, 15), (16, 2)], ids=str)
def test_the_middle_of_narrow_planes_is_left_under_high_filters(taps: tuple[int, int], dtype: type) -> None:
    """Three vectors of it and more, beside edges of a vector each: with whole, partial and no strips of blocks that slide."""
    lanes = VECTOR_BYTES // np.dtype(dtype).itemsize
    w = picture((2, 1, *taps), dtype, seed=1) - 50
    infinite = w.copy()
    infinite[1, 0, -1, 0] = np.inf
    top, left = (taps[0] - 1) // 2, (taps[1] - 1) // 2
    padding = (top, taps[0] - 1 - top, left, taps[1] - 1 - left)
    beside = (left > 0) + (taps[1] - 1 - left > 0)
    for vectors in (3, 4, 5, 6, 8, 15):
        for more in (0, lanes // 2):
            rows = 33 + vectors
            memory = np.full((1, 2, rows + 2, vectors * lanes + more + 2), np.nan, dtype)
            x = memory[:, :, 1:-1, 1:-1]
            x[...] = picture(x.shape, dtype)
            for filters in (w, infinite):
                reaches = reaches_over_edge(x, filters, "cpu-masked", groups=2, padding=padding)
                assert reaches == (max(padding) <= lanes)
            if not reaches:
                continue
            plan = fresh_plan("cpu-masked", x, w, groups=2, padding=padding)
            assert plan._task.narrow == 3 * lanes - 1  # type: ignore[attr-defined]
            run(plan, x, w)
            assert ("inside" in plan.paths_run()) == (vectors - beside >= 3)


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_what_is_gathered_under_high_filters_is_left_to_the_rung_before(dtype: type) -> None:
    """Whatever it is gathered for, of planes taken together, tile by tile: its sums to the last bit, from a poisoned workspace."""
    x = np.random.default_rng(0).random((2, 3, 21, 70)).astype(dtype)
    for taps, rules in (
        ((9, 9), {"padding": "same", "boundary": "wrap"}),
        ((9, 3), {"padding": (4, 4, 1, 1), "fillvalue": 3}),
        ((11, 2), {"padding": 17}),
        ((3, 17), {"padding": "same"}),
    ):
        w = np.random.default_rng(1).random((3, 1, *taps)).astype(dtype)
        # The same tiles, for the order of sums may follow their size.
        for config in ({"tile": (21, 70)}, {"tile": (7, 70)}):
            sums = [
                run(fresh_plan(rung, x, w, config, groups=3, **rules), x, w, fill=0xFF, threads=2)  # type: ignore[arg-type]
                for rung in ("cpu-masked", "cpu-simd")
            ]
            np.testing.assert_array_equal(*sums)


@needs_masks
def test_only_high_filters_of_one_channel_leave_the_middle_of_narrow_planes() -> None:
    x = picture((1, 4, 40, 60), np.float32)
    lanes = VECTOR_BYTES // 4
    for taps, groups, stride, narrow in (
        ((9, 9), 4, 1, 3 * lanes - 1),
        ((1, 17), 4, 1, 3 * lanes - 1),
        ((5, 16), 4, 1, 16 * lanes),
        ((7, 16), 4, 1, 16 * lanes if VECTOR_BYTES == 64 else 3 * lanes - 1),
        ((9, 9), 2, 1, 16 * lanes),
        ((9, 9), 4, 2, 0),
    ):
        w = picture((4, 4 // groups, *taps), np.float32, seed=1)
        plan = fresh_plan("cpu-masked", x, w, groups=groups, stride=stride)
        assert plan._task.narrow == narrow, taps  # type: ignore[attr-defined]


@needs_masks
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("padding", [(1, 1, 1, 1), (0, 1, 2, 0), (1, 0, 0, 1)], ids=str)
def test_edges_on_both_sides_of_a_gap(padding: tuple[int, int, int, int], dtype: type) -> None:
    """Of several channels in and out, tiles beside each other and blocks, in place and converted."""
    x, w = picture((2, 6, 20, 1300), dtype), picture((8, 3, 3, 3), dtype, seed=1)
    right = convpar.conv2d(x, w, groups=2, padding=padding, backend="numpy")
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, groups=2, padding=padding)
    for config in (None, {"tile": (16, 650)}, {"block": 3}, {"tile": (9, 1300), "stores": "streamed"}):
        # What is converted isn't streamed.
        for step in (1,) if config and "stores" in config else (1, 2):
            y = np.full((*right.shape[:3], step * right.shape[3]), -1, dtype)[..., ::step]
            layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.of(y))
            plan = registry.find("cpu-masked").plan(p, layouts, Device("cpu", 0), config)  # type: ignore[union-attr]
            assert isinstance(plan, Plan), plan
            plan.run(x, w, None, y, workspace=np.full(plan.workspace_bytes(2), 0xFF, np.uint8), num_threads=2)
            np.testing.assert_array_equal(y, right)
            assert {"inside", "border"} <= set(plan.paths_run())


@needs_avx512
def test_direct_sums_have_room_in_the_same_workspace() -> None:
    """Of a rung that needs more than the one that looks for factors."""
    x, w = picture((1, 1, 60, 70), np.float32), picture((1, 1, 7, 7), np.float32, seed=1)
    plan = fresh_plan("cpu-separable", x, w)
    other = fresh_plan("cpu-toeplitz", x, w)
    alone = plan.workspace_bytes(2)
    plan.leave_direct_sums_to(other, "cpu-toeplitz")  # type: ignore[attr-defined]
    size = plan.workspace_bytes(2)
    assert size == other.workspace_bytes(2) > alone
    right = convpar.conv2d(x, w, backend="cpu-toeplitz")
    memory = np.full(size + 4096, 0xA5, np.uint8)
    for workspace in (memory[:size], None):
        y = np.empty_like(right)
        plan.run(x, w, None, y, workspace=workspace, num_threads=2)
        np.testing.assert_array_equal(y, right)
    assert (memory[size:] == 0xA5).all()


@needs_masks
def test_direct_sums_of_planes_are_left_to_masks() -> None:
    """What cpu-separable finds no factors in; where it finds some, it uses them."""
    taps = 7 if VECTOR_BYTES == 64 else 5
    x = np.random.default_rng(0).random((2, 8, 56, 56), np.float32)
    w = np.random.default_rng(1).random((8, 1, taps, taps), np.float32)
    plan = fresh_plan("cpu-separable", x, w, groups=8, padding=taps // 2)
    assert plan.launch["direct sums"].startswith("by cpu-masked")
    right = convpar.conv2d(x, w, groups=8, padding=taps // 2, backend="cpu-masked")
    np.testing.assert_array_equal(run(plan, x, w), right)
    assert "border" in plan.paths_run()
    assert "factored" not in plan.paths_run()
    y = np.empty_like(right)
    plan.run(x, w, None, y, num_threads=2)
    np.testing.assert_array_equal(y, right)
    plan = fresh_plan("cpu-separable", x, w, groups=8, padding=taps // 2)
    run(plan, x, np.einsum("ci,cj->cij", w[:, 0, 0], w[:, 0, 1])[:, None].astype(np.float32))
    assert "factored" in plan.paths_run()


# -- cpu-im2col


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("taps", [(1, 1), (3, 2)])
def test_columns_of_panels_that_begin_anywhere_in_a_row(taps: tuple[int, int], dtype: str) -> None:
    # With 37 channels the 3 x 2 taps are two slices of columns.
    w = picture((5, 37, *taps), dtype, seed=1)
    for width in (1, 2, 7, 16, 17, 30, 47, 48, 49, 101):
        memory = picture((2, 37, 13, width + taps[1] + 2), dtype)
        # In place up to the end of the memory; gathered; and into rows that don't follow each other.
        for x, rules in ((memory[..., 3:], {}), (memory[..., ::-1], {}), (memory, {"padding": 1})):
            right = convpar.conv2d(x, w, backend="numpy", **rules)
            np.testing.assert_array_equal(convpar.conv2d(x, w, backend="cpu-im2col", **rules), right)
            apart = np.zeros((*right.shape[:3], right.shape[3] + 3), dtype)
            convpar.conv2d(x, w, backend="cpu-im2col", out=apart[..., :-3], **rules)
            np.testing.assert_array_equal(apart[..., :-3], right)
            assert not apart[..., -3:].any()


# -- cpu-implicit


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64"])
@pytest.mark.parametrize("outputs", [1, 3, 4, 6, 8, 10, 13, 31])
def test_blocks_of_vectors_in_any_rows(outputs: int, dtype: str) -> None:
    """Blocks over several rows, of fewer vectors and output channels; rows narrower than a vector; columns beyond the last whole one, turned; one
    strip and several."""
    bias = np.arange(outputs, dtype=dtype)
    for channels, taps in ((1, (1, 1)), (3, (3, 2)), (90, (1, 1)), (90, (2, 3))):
        w = picture((outputs, channels, *taps), dtype, seed=1)
        for high, wide in ((1, 1), (5, 2), (4, 7), (9, 16), (2, 17), (13, 33), (37, 19), (3, 49), (21, 5)):
            memory = picture((2, channels, high + 3, wide + 4), dtype)
            # In place up to the end of the memory; from the end on, gathered; and rows that follow each other.
            for x, rules in (
                (memory[..., 2:], {}),
                (memory[..., ::-1], {"stride": (1, 2)}),
                (memory, {"padding": 1}),
                (memory.copy(), {}),
                (memory.copy(), {"stride": (2, 1), "dilation": (1, 2)}),
                (memory[..., 2:], {"stride": (2, 2)}),
                (memory.copy(), {"stride": (1, 3)}),
            ):
                if (memory.shape[3] - 3) // 2 < taps[1]:
                    continue
                right = convpar.conv2d(x, w, bias, backend="numpy", **rules)
                np.testing.assert_array_equal(
                    convpar.conv2d(x, w, bias, backend="cpu-implicit", **rules), right
                )
                # Results whose rows don't follow each other.
                apart = np.zeros((*right.shape[:3], right.shape[3] + 3), dtype)
                convpar.conv2d(x, w, bias, backend="cpu-implicit", out=apart[..., :-3], **rules)
                np.testing.assert_array_equal(apart[..., :-3], right)
                assert not apart[..., -3:].any()


@pytest.mark.parametrize("taps", range(1, 12))
@pytest.mark.parametrize("channels", [8, 33])
@pytest.mark.parametrize("rules", [{}, {"stride": (1, 2)}, {"dilation": 3}], ids=str)
def test_filter_columns_that_fall_into_passes(taps: int, channels: int, rules: dict[str, Any]) -> None:
    """One pass of up to five columns, or several; where registers are few, two of them in one loop."""
    w = picture((channels, 3, 2, taps), np.float32, 1)
    step, apart = rules.get("stride", (1, 1))[1], rules.get("dilation", 1)
    for width in (1, 2, 3, 4, 7, 26, 54):
        x = picture((3, 6, (width - 1) * step + (taps - 1) * apart + 1), np.float32)
        right = convpar.conv2d(x, w, backend="numpy", **rules)
        np.testing.assert_array_equal(convpar.conv2d(x, w, backend="cpu-packed", **rules), right)


@pytest.mark.parametrize("columns", [1, 7, 11])
@pytest.mark.parametrize("channels", [5, 40])
def test_narrow_rows_into_an_array_with_gaps(columns: int, channels: int) -> None:
    """Each row of results is turned by itself: the last one of a strip has no vectors of outputs behind it."""
    rng = np.random.default_rng(columns)
    x = rng.integers(-4, 5, (1, 3, 132, columns + 2)).astype(np.float32)
    w = rng.integers(-4, 5, (channels, 3, 3, 3)).astype(np.float32)
    room = np.full((1, channels, 130, columns + 3), 7, np.float32)
    convpar.conv2d(x, w, out=room[..., :columns], backend="cpu-packed")
    np.testing.assert_array_equal(room[..., :columns], convpar.conv2d(x, w, backend="numpy"))
    assert (room[..., columns:] == 7).all()


@pytest.mark.parametrize("channels", [16, 17, 40])
@pytest.mark.parametrize(
    ("x_shape", "filters", "rules"),
    [
        ((70, 14, 37), (70, 3, 3), {"padding": 1}),
        ((2, 40, 45), (2, 19, 17), {"padding": 3}),
        ((1, 4, 330), (1, 2, 301), {}),
        ((5, 29, 61), (5, 7, 7), {"stride": 2, "padding": 3}),
        ((5, 23, 61), (5, 5, 5), {"stride": (1, 3), "dilation": (2, 3)}),
        ((6, 9, 50), (6, 3, 4), {"stride": (1, 2), "dilation": 3}),
        ((250, 3, 20), (250, 1, 1), {}),
    ],
    ids=str,
)
def test_filters_beyond_the_first_cache(
    channels: int, x_shape: tuple[int, ...], filters: tuple[int, ...], rules: dict[str, Any]
) -> None:
    x, w = picture(x_shape, np.float32), picture((channels, *filters), np.float32, 1) % 7
    right = convpar.conv2d(x, w, backend="numpy", **rules)
    np.testing.assert_array_equal(convpar.conv2d(x, w, backend="cpu-packed", **rules), right)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_filters_of_whole_numbers_and_of_nothing_are_exact(dtype: str) -> None:
    x = np.arange(70, dtype=dtype).reshape(7, 10) % 7 - 3
    for w in ([[3, 2, 1], [6, 4, 2], [0, 0, 0]], [[0.75, 0.5], [1.5, 1]], [[0, 0], [0, 0]]):
        filters = np.array(w, dtype)
        y = convpar.conv2d(x, filters, backend="cpu-separable")
        np.testing.assert_array_equal(y, convpar.conv2d(x, filters, backend="numpy"))


# -- transformed filters and samples

DIRECT, TRANSFORMED = "cpu-packed", "cpu-winograd"


def numbers(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(dtype)


def excess(y: Array, x: Array, w: Array, bias: Array | None = None, **rules: Any) -> float:
    """The largest error of a sum, over the normwise bound without its factor; `y` has the sum's type."""
    right = convpar.conv2d(x, w, bias, backend="numpy", dtype=np.longdouble, **rules)
    size = convpar.conv2d(
        np.abs(x),
        np.abs(w),
        None if bias is None else np.abs(bias),
        backend="numpy",
        dtype=np.longdouble,
        **rules,
    )
    unit = np.finfo(y.dtype).eps / 2
    bound = (w[0].size + 2) * unit * size.max(axis=(-2, -1), keepdims=True)
    return float((np.abs(y - right) / bound).max())


def is_transformed(x: Array, w: Array, **rules: Any) -> bool:
    """Whether any output has other bits than a direct sum of the same filters."""
    y = convpar.conv2d(x, w, backend=TRANSFORMED, **rules)
    return not np.array_equal(y, convpar.conv2d(x, w, backend=DIRECT, **rules), equal_nan=True)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"padding": 1},
        {"padding": (2, 0, 1, 3), "boundary": "mirror", "flip": True},
        {"padding": (0, 5, 4, 0), "boundary": "wrap", "groups": 2},
        {"padding": 2, "fillvalue": 0.5},
    ],
    ids=str,
)
def test_transformed_tiles_and_images_meet_without_a_seam(dtype: str, rules: dict[str, Any]) -> None:
    x, bias = numbers((7, 6, 13, 22), dtype), numbers((34,), dtype, seed=2)
    w = numbers((34, 6 // rules.get("groups", 1), 3, 3), dtype, seed=1)
    plain = convpar.conv2d(x, w, bias, backend=TRANSFORMED, **rules)
    assert excess(plain, x, w, bias, **rules) <= 16
    for tile in ((4, 4), (3, 5), (8, 100), (13, 7), (30, 22), (45, 9), (1000, 1000)):
        for block in (None, 1, 20):
            config = {"tile": tile, "block": block}
            y = convpar.conv2d(x, w, bias, backend=TRANSFORMED, config=config, **rules)
            assert excess(y, x, w, bias, **rules) <= 16
            again = convpar.conv2d(x, w, bias, backend=TRANSFORMED, config=config, num_threads=3, **rules)
            np.testing.assert_array_equal(again, y)


def test_several_images_are_one_item_where_they_are_small() -> None:
    x, w = numbers((16, 256, 14, 14)), numbers((256, 256, 3, 3))
    plan = fresh_plan(TRANSFORMED, x, w, padding=1)
    assert "images" in plan.launch["tile"]
    assert plan.launch["work items"] < 16


@pytest.mark.parametrize("shape", [(1, 20, 30, 41), (5, 3, 9, 9)])
def test_transformed_bits_depend_on_no_memory_that_was_there_before(shape: tuple[int, ...]) -> None:
    x, w = numbers(shape), numbers((19, shape[1], 3, 3), seed=1)
    for rules in ({}, {"padding": 1}):
        bits = set()
        for fill in (0, 0x7F, 0xFF):
            for threads in (1, 3):
                plan = fresh_plan(TRANSFORMED, x, w, {"tile": (23, 14)}, **rules)
                bits.add(run(plan, x, w, fill, threads).tobytes())
        assert len(bits) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["patch", "points", "signs", "wide", "one tap"])
def test_errors_follow_the_brightest_sums_only(dtype: str, kind: str) -> None:
    for seed in range(20):
        random = np.random.default_rng(seed)
        x, w = (
            numbers((2, 1 + seed % 3, 14, 17), dtype, seed),
            numbers((32, 1 + seed % 3, 3, 3), dtype, seed + 1),
        )
        i, j = random.integers(0, 12, 2)
        if kind == "patch":
            x[:, :, i : i + 3, j : j + 3] *= 1e6
        elif kind == "points":
            x[:, :, i, j] *= 1e6
        elif kind == "wide":
            x *= (2.0 ** random.integers(-20, 20, x.shape)).astype(dtype)
        else:
            x = np.sign(x)
            if kind == "one tap":
                w *= np.arange(9).reshape(3, 3) == random.integers(0, 9, (32, 1, 1, 1))
        assert excess(convpar.conv2d(x, w, backend=TRANSFORMED), x, w) <= 16


def test_samples_that_could_break_the_contract_are_summed_directly() -> None:
    x, w = numbers((1, 3, 12, 20)), numbers((5, 3, 3, 3), seed=1)
    # Of all channels, however few fit a vector, as the direct sums they are compared with.
    item = {"block": 5}
    assert is_transformed(x, w, config=item)
    for value in (np.nan, np.inf, -np.inf, 3e38, 1e31, -1e31):
        special = x.copy()
        special[0, 1, 4, 7] = value
        assert not is_transformed(special, w, config=item)
        y = convpar.conv2d(special, w, backend=TRANSFORMED)
        np.testing.assert_array_equal(
            np.isfinite(y), np.isfinite(convpar.conv2d(special, w, backend="numpy"))
        )
    for scale in (1e-31, 1e-38, 1e-43):
        assert not is_transformed(x * np.float32(scale), w, config=item)
        assert not is_transformed(x, w * np.float32(scale), config=item)
    assert not is_transformed(x * np.float32(1e-20), w * np.float32(1e-20), config=item)


def test_filters_that_could_break_the_contract_are_not_transformed() -> None:
    x, w = numbers((1, 3, 12, 20)), numbers((5, 3, 3, 3), seed=1)
    for value in (np.nan, np.inf, 3e38):
        special = w.copy()
        special[2, 1, 0, 2] = value
        # A work item is summed in one way; here it has all channels, however few fit a vector.
        y, direct = (
            convpar.conv2d(x, special, backend=b, config={"block": 5}) for b in (TRANSFORMED, DIRECT)
        )
        np.testing.assert_array_equal(y, direct)
    # Nothing is lost by filters and channels of zeros.
    w[1] = w[:, 2] = 0
    x[:, 0] = 0
    assert is_transformed(x, w)
    y = convpar.conv2d(np.zeros_like(x), w, np.arange(5, dtype=np.float32), backend=TRANSFORMED)
    np.testing.assert_array_equal(y[0, :, 0, 0], np.arange(5))


def test_an_edge_that_outshines_the_rest_is_summed_directly() -> None:
    # Only the last tap is not zero, and the brightest samples never meet it.
    x, w = numbers((1, 1, 12, 20)), np.zeros((1, 1, 3, 3), np.float32)
    w[..., 2, 2] = 0.7
    assert is_transformed(x, w)
    for place in ((0, 5), (1, 1), (1, 7), (6, 1)):
        bright = x.copy()
        bright[0, 0][place] = 1e6
        assert not is_transformed(bright, w)
        assert excess(convpar.conv2d(bright, w, backend=TRANSFORMED), bright, w) <= 1
    inner = x.copy()
    inner[0, 0, 5, 8] = 1e6
    assert is_transformed(inner, w)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [6, 8])
def test_the_brightest_edge_that_is_transformed_keeps_the_contract(dtype: str, size: int) -> None:
    """One channel and one tap, which the edge never meets: the worst that the rule lets through."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        x = (random.uniform(0.9, 1, (8, 1, size, size)) * random.choice((-1, 1), (8, 1, size, size))).astype(
            dtype
        )
        x[..., :2, :] *= np.asarray(1.79, dtype)
        x[..., 2:, :2] *= np.asarray(1.79, dtype)
        w = np.zeros((1, 1, 3, 3), dtype)
        w[..., 2, 2] = random.uniform(0.5, 1)
        assert excess(convpar.conv2d(x, w, backend=TRANSFORMED), x, w) <= 16
        assert is_transformed(x, w)


def test_a_workspace_of_large_pages_holds_as_much() -> None:
    x, w = numbers((1, 512, 8, 8)), numbers((512, 512, 3, 3), seed=1)
    plan = fresh_plan(TRANSFORMED, x, w, padding=1)
    assert plan.workspace_bytes(1) > 2**25
    assert excess(convpar.conv2d(x, w, backend=TRANSFORMED, padding=1, num_threads=2), x, w, padding=1) <= 16


def test_too_few_outputs_are_refused() -> None:
    x, w = numbers((1, 4, 9, 4)), numbers((4, 4, 3, 3), seed=1)
    with pytest.raises(convpar.Unsupported, match="3 rows and columns of outputs or more, not 7 x 2"):
        convpar.plan(x, w, backend=TRANSFORMED)


@pytest.mark.parametrize("processors", [1, 64])
def test_too_much_workspace_is_refused_on_any_machine(
    monkeypatch: pytest.MonkeyPatch, processors: int
) -> None:
    monkeypatch.setattr("convpar.threads._available", processors)

    def planned(channels: int) -> Any:
        w = convpar.ArraySpec((channels, channels, 3, 3))
        return convpar.plan(convpar.ArraySpec((16, channels, 14, 14)), w, backend=TRANSFORMED)

    assert planned(512).workspace_bytes(1) < 2**26
    with pytest.raises(convpar.Unsupported, match="of workspace on one thread; at most 64 MB"):
        planned(768)


def test_the_weaker_contract_is_asked_for_by_name() -> None:
    x, w = numbers((4, 64, 56, 56)), numbers((64, 64, 3, 3))
    with_unit = registry.find("cpu-amx").unavailable() is None and cpu.matrix_unit()  # type: ignore[union-attr]
    assert convpar.plan(x, w, padding=1).backend.name == ("cpu-amx" if with_unit else DIRECT)
    # The unit takes less time even so.
    weaker = convpar.plan(x, w, padding=1, accuracy="normwise").backend.name
    assert weaker == ("cpu-amx" if with_unit else TRANSFORMED)
    assert convpar.plan(x, w, backend=TRANSFORMED).plan.accuracy.kind == "normwise"
    # Few channels aren't worth a transform.
    assert convpar.plan(x[:, :2], w[:, :2], accuracy="normwise").backend.name != TRANSFORMED
    for rules, reason in (
        ({"accuracy": "elementwise"}, "it promises normwise"),
        ({"stride": 2}, "stride"),
        ({"dilation": 2}, "dilation"),
    ):
        with pytest.raises(convpar.Unsupported, match=reason):
            convpar.conv2d(x, w, backend=TRANSFORMED, **rules)
    with pytest.raises(convpar.Unsupported, match="3x3 only"):
        convpar.conv2d(x, w[..., :2], backend=TRANSFORMED)


def test_a_filter_larger_than_what_is_gathered() -> None:
    """What one output needs is more than a tile may take; it is gathered for many at once even so."""
    x = picture((1, 1, 60, 90), np.uint8)
    w = np.ones((1, 1, 401, 401), np.uint8)
    found = convpar.plan(x, w, padding="same", dtype="int32", backend="cpu-simd")
    rows, columns = found.plan.config["tile"]
    assert rows * columns >= 8 * 90
    assert found.plan.workspace_bytes(1) < 16 * 2**20
    # Every window has all of the image in it.
    assert np.unique(found(x, w)).tolist() == [x.sum(dtype=np.int64)]
