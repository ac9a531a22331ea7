"""cpu-fft where random small problems don't reach: large filters, who may pick it, SciPy's absence, memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import tracemalloc
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import registry
from convpar.backend import Device, Layout, Layouts, Plan
from convpar.backends.cpu import fft, transforms
from convpar.problem import Problem

if registry.find("cpu-fft").unavailable():  # type: ignore[union-attr]
    pytest.skip("the compiled engine or SciPy isn't there", allow_module_level=True)

Array = np.ndarray[Any, Any]
PAD = {"fill": "constant", "wrap": "wrap", "symm": "symmetric", "mirror": "reflect", "nearest": "edge"}
RANDOM = np.random.default_rng(5)


def draw(*shape: int, dtype: Any = np.float32) -> Array:
    return RANDOM.uniform(-1, 1, shape).astype(dtype)


def fresh_plan(x: Array, w: Array, config: Any = None, **rules: Any) -> Plan:
    """A plan that nothing has run; `x` and `w` have four axes."""
    p = Problem.of(x.shape, w.shape, x.dtype, w.dtype, **rules)
    layouts = Layouts(Layout.of(x), Layout.of(w), None, Layout.contiguous(p.out_shape, p.out_dtype.itemsize))
    plan = registry.find("cpu-fft").plan(p, layouts, Device(), config)  # type: ignore[union-attr]
    assert isinstance(plan, Plan), plan
    return plan


def run(plan: Plan, x: Array, w: Array, threads: int | None = 1) -> Array:
    y = np.empty(plan.problem.out_shape, plan.problem.out_dtype)
    plan.run(x, w, None, y, num_threads=threads)
    return y


def check(y: Array, x: Array, w: Array, **rules: Any) -> None:
    """`y` keeps the bound against direct sums in float64."""
    wide, taps = x.astype(np.float64), w.astype(np.float64)
    right = convpar.conv2d(wide, taps, backend="cpu-simd", **rules)
    largest = convpar.conv2d(np.abs(wide), np.abs(taps), backend="cpu-simd", **rules)
    planes = largest.max(axis=(-2, -1), keepdims=True)
    terms = w.shape[-3] * w.shape[-2] * w.shape[-1] if w.ndim == 4 else w.size
    # The sums in float64 aren't exact either.
    unit = np.finfo(y.dtype).eps / 2 * (2 if y.dtype == np.float64 else 1)
    assert (np.abs(y - right) <= fft.FACTOR * (terms + 2) * unit * planes).all()


@pytest.mark.parametrize("boundary", PAD)
@pytest.mark.parametrize("k", [(17, 64), (101, 33), (1, 129)])
def test_large_filters_at_every_boundary(boundary: str, k: tuple[int, int]) -> None:
    x, w = draw(300, 331), draw(*k)
    for padding in ("same", "full"):
        rules = {"padding": padding, "boundary": boundary}
        check(convpar.conv2d(x, w, backend="cpu-fft", **rules), x, w, **rules)


@pytest.mark.parametrize(
    ("x", "w", "rules"),
    [
        ((2, 6, 90, 120), (4, 3, 21, 30), {"groups": 2, "padding": (10, 10, 15, 14), "flip": True}),
        ((3, 8, 40, 56), (8, 1, 31, 31), {"groups": 8, "padding": 15}),
        ((1, 2, 150, 190), (3, 2, 15, 16), {"dilation": (3, 5), "padding": 9, "boundary": "mirror"}),
        ((9, 1, 64, 64), (5, 1, 25, 25), {"padding": "same"}),
        ((1, 1, 700, 2500), (1, 1, 19, 23), {}),
    ],
)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_layers_with_large_filters(x: Any, w: Any, rules: dict[str, Any], dtype: Any) -> None:
    image, filters = draw(*x, dtype=dtype), draw(*w, dtype=dtype)
    check(convpar.conv2d(image, filters, backend="cpu-fft", **rules), image, filters, **rules)


def test_a_picture_of_bytes_is_rounded_as_by_direct_sums() -> None:
    x = RANDOM.integers(0, 256, (200, 260, 3)).astype(np.uint8)
    w = np.full((25, 25), 1 / 625, np.float32)
    rules = {"channel_axis": -1, "dtype": "uint8", "padding": "same", "boundary": "symm"}
    y, right = (convpar.conv2d(x, w, backend=b, **rules).astype(int) for b in ("cpu-fft", "cpu-simd"))
    assert np.abs(y - right).max() <= 1
    assert (y == right).mean() > 0.99


# -- what is summed directly


def test_only_tiles_that_hold_what_is_not_finite_are_summed_directly() -> None:
    x, w = draw(1, 1, 500, 200), draw(1, 1, 15, 15)
    x[0, 0, 400, 60], x[0, 0, 30, 100] = np.inf, np.nan
    plan = fresh_plan(x, w, {"tile": (32, 100), "batch": 1})
    y = run(plan, x, w)
    assert {"direct", "transformed"} <= plan.paths_run()
    hit = np.zeros((486, 186), bool)
    hit[386:401, 46:61] = hit[16:31, 86:101] = True
    assert (np.isfinite(y[0, 0]) == ~hit).all()
    x[~np.isfinite(x)] = 0
    right = convpar.conv2d(x, w, dtype="float64", backend="numpy")
    np.testing.assert_allclose(y[0, 0][~hit], right[0, 0][~hit], atol=1e-3)


def test_a_bright_corner_that_meets_no_tap_keeps_the_bound() -> None:
    # A transform's error follows the corner, and the contract the rest.
    x, w = draw(1, 1, 60, 70), draw(1, 1, 11, 12)
    x[0, 0, 0, 0], w[0, 0, 0, 0] = 1e9, 0
    plan = fresh_plan(x, w)
    check(run(plan, x, w), x, w)
    assert plan.paths_run() >= {"direct"}
    x[0, 0, 0, 0] = 0
    plan = fresh_plan(x, w)
    check(run(plan, x, w), x, w)
    assert "direct" not in plan.paths_run()


# -- memory


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    ("shape", "kernel", "rules"),
    [
        ((900, 2100), (9, 9), {}),
        ((900, 2100), (65, 65), {}),
        ((4000, 70), (2001, 31), {}),
        ((100_000, 64), (9, 129), {"padding": (4, 4, 64, 64), "boundary": "wrap"}),
    ],
)
def test_no_more_memory_than_said(
    shape: tuple[int, int], kernel: tuple[int, int], rules: dict[str, Any], threads: int
) -> None:
    x, w = draw(1, 1, *shape), draw(1, 1, *kernel)
    plan = fresh_plan(x, w, **rules)
    y = run(plan, x, w, threads)
    tracemalloc.start()
    try:
        plan.run(x, w, None, y, num_threads=threads)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert 100_000 < peak <= plan.workspace_bytes(threads) + 200_000
    assert plan.workspace_bytes(threads) < 16e6 * threads


def test_when_the_system_has_no_more_threads_the_caller_does_their_shares(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    start = threading.Thread.start

    def few(thread: threading.Thread) -> None:
        if len(started) == 1:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    x, w = draw(1, 1, 900, 2100), draw(1, 1, 33, 33)
    plan = fresh_plan(x, w)
    right = run(plan, x, w, 1)
    monkeypatch.setattr(threading.Thread, "start", few)
    assert run(plan, x, w, 4).tobytes() == right.tobytes()
    assert not any(thread.is_alive() for thread in started)


def test_threads_leave_the_processor_that_openmp_bound_their_caller_to() -> None:
    code = (
        "import os, threading, convpar\n"
        "from convpar import threads\n"
        "everywhere = os.sched_getaffinity(0)\n"
        "os.sched_setaffinity(0, {min(everywhere)})\n"
        "threads.leave_processor()\n"
        "assert os.sched_getaffinity(0) == {min(everywhere)}\n"
        "os.environ['OMP_PROC_BIND'] = 'true'\n"
        "threads.leave_processor()\n"
        "assert os.sched_getaffinity(0) == everywhere\n"
    )
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system binds no threads")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_whatever_library_serves_scipys_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may answer in double precision, and in another order of memory."""

    class Other:
        rfft = staticmethod(lambda *a, **k: np.asfortranarray(np.fft.rfft(a[0].astype(np.float64), a[1])))
        irfft = staticmethod(
            lambda *a, **k: np.asfortranarray(np.fft.irfft(a[0].astype(np.complex128), a[1]))
        )

    x, w = draw(2, 3, 60, 80), draw(4, 3, 21, 21)
    monkeypatch.setattr(transforms, "_scipy", lambda: Other)
    check(run(fresh_plan(x, w), x, w), x, w)


def test_what_is_read_in_place_gives_the_bits_of_what_is_gathered() -> None:
    memory, w = draw(1, 1, 210, 520), draw(1, 1, 12, 10)
    for x in (memory[..., 5:400], memory[..., ::-1, 400:5:-1], memory.swapaxes(2, 3)):
        plan = fresh_plan(x, w, {"tile": (20, 51), "batch": 2})
        swapped = x.astype(x.dtype.newbyteorder())
        gathering = fresh_plan(swapped, w, {"tile": (20, 51), "batch": 2})
        assert run(plan, x, w).tobytes() == run(gathering, swapped, w).tobytes()
        assert "read in place" in plan.paths_run()
        assert "read in place" not in gathering.paths_run()


# -- who picks it


def test_choosers_pick_it_only_under_the_normwise_contract_and_where_it_is_faster() -> None:
    x = convpar.ArraySpec((2048, 2048))

    def chosen(k: int, accuracy: Any) -> str:
        # cpu-fft2d takes no dilation.
        w = convpar.ArraySpec((k, k))
        return convpar.plan(x, w, dilation=2, accuracy=accuracy, backend="cpu-omp").backend.name

    assert chosen(63, "normwise") == "cpu-fft"
    assert chosen(63, 1e-3) == "cpu-fft"
    assert chosen(63, None) != "cpu-fft"
    assert chosen(63, "elementwise") != "cpu-fft"
    assert chosen(5, "normwise") != "cpu-fft"


def test_without_scipy_it_is_unavailable_and_nothing_else_is() -> None:
    code = (
        "import sys, numpy as np\n"
        "class Hidden:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'scipy': raise ModuleNotFoundError(name)\n"
        "import importlib.util as u; found = u.find_spec\n"
        "u.find_spec = lambda name, package=None: None if name == 'scipy' else found(name, package)\n"
        "sys.meta_path.insert(0, Hidden())\n"
        "import convpar\n"
        "x, w = np.ones((300, 300)), np.ones((31, 31))\n"
        "assert convpar.conv2d(x, w, accuracy='normwise')[0, 0] == 961\n"
        "try: convpar.conv2d(x, w, backend='cpu-fft')\n"
        "except convpar.Unavailable as e: print(e)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert "pip install 'convpar[fft]'" in done.stdout


def test_scipy_is_loaded_with_the_first_transform() -> None:
    code = (
        "import sys, numpy as np, convpar\n"
        "x, w = np.ones((300, 300)), np.ones((31, 31))\n"
        "convpar.conv2d(x, w); p = convpar.plan(x, w, backend='cpu-fft')\n"
        "assert 'scipy' not in sys.modules\n"
        "p(x, w); assert 'scipy.fft' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_sizes_of_transforms_are_the_least_without_large_factors() -> None:
    def is_smooth(n: int) -> bool:
        for prime in (2, 3, 5):
            while n % prime == 0:
                n //= prime
        return n == 1

    for least in range(1, 1500):
        assert transforms.smooth(least) == next(
            n for n in range(max(least, 2), 9999) if n % 2 == 0 and is_smooth(n)
        )


def test_a_filter_whose_spectra_would_fill_the_memory_is_refused() -> None:
    with pytest.raises(convpar.Unsupported, match="filters' spectra would take"):
        convpar.plan(
            convpar.ArraySpec((1, 512, 28, 28)), convpar.ArraySpec((512, 512, 9, 9)), backend="cpu-fft"
        )
