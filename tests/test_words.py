"""The rung that multiplies 32-bit integers in words of 52 bits: every block of rows and taps, with and without IFMA."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import numpy as np
import pytest

import convpar
from convpar import Unsupported, conv2d, explain, registry
from convpar.backends import cpu
from convpar.backends.cpu import compiled

RUNG = "cpu-ifma"
MISSING = registry.find(RUNG).unavailable()  # type: ignore[union-attr]
if MISSING:
    pytest.skip(str(MISSING), allow_module_level=True)

# Blocks of 8, 4, 2 and 1 rows; up to 7 filter rows at once, and twice as many; rows of less than a vector, of whole
# ones and of what is left; several channels and groups; borders, gathered and filled.
CASES = [
    *(((1, 1, high + 2, 37), (1, 1, 3, 3), {}) for high in (1, 2, 3, 4, 7, 8, 15)),
    *(((1, 1, kh + 9, kw + 33), (1, 1, kh, kw), {}) for kh in range(1, 9) for kw in (1, 2, 5)),
    *(((1, 1, kh + 8, 60), (1, 1, kh, 4), {}) for kh in (9, 13, 14, 15, 22)),
    *(
        ((1, 1, 11, wide + 4), (1, 1, 3, 5), {})
        for wide in (1, 2, 15, 16, 17, 31, 32, 33, 127, 128, 129, 300)
    ),
    ((2, 3, 20, 21), (4, 3, 5, 5), {"padding": 2}),
    ((1, 3, 30, 20), (2, 3, 9, 2), {}),
    ((2, 4, 19, 40), (6, 2, 3, 3), {"groups": 2, "padding": "same", "boundary": "wrap"}),
    ((1, 5, 12, 18), (5, 1, 7, 7), {"groups": 5, "padding": 3, "fillvalue": -7}),
    ((1, 1, 60, 2100), (1, 1, 7, 7), {"padding": "same", "boundary": "mirror"}),
]


def sums(backend: str, num_threads: int = 1) -> list[str]:
    """Of all cases, with samples and taps of every bit, as digests."""
    rng = np.random.default_rng(5)
    found = []
    for dtype in ("int32", "uint32"):
        of = np.iinfo(dtype)
        for x_shape, w_shape, rules in CASES:
            x, w, bias = (
                rng.integers(of.min, of.max, shape, dtype, endpoint=True)
                for shape in (x_shape, w_shape, w_shape[:1])
            )
            if dtype == "uint32" and "fillvalue" in rules:
                rules = {**rules, "fillvalue": 7}
            y = conv2d(x, w, bias=bias, backend=backend, num_threads=num_threads, **rules)
            found.append(hashlib.sha256(y.tobytes()).hexdigest())
    return found


@pytest.mark.parametrize("num_threads", [1, 2])
def test_sums_are_exact_modulo_their_bits(num_threads: int) -> None:
    assert sums(RUNG, num_threads) == sums("numpy")


def run(program: str, **variables: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


@pytest.mark.parametrize("wanted", ["0", "1"])
def test_sums_are_the_same_with_and_without_the_instructions(wanted: str) -> None:
    program = (
        f"import json, sys\nsys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import test_words\nfrom convpar.backends import cpu\n"
        f"print(json.dumps([cpu.word_unit(), test_words.sums({RUNG!r})]))"
    )
    used, found = json.loads(run(program, CONVPAR_IFMA=wanted))
    if wanted == "1" and not used:
        pytest.skip("this processor has no AVX-512 IFMA, or isn't Intel's")
    assert used == (wanted == "1")
    assert found == sums("numpy")


def test_what_runs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = np.ones((60, 60), np.int32), np.ones((5, 5), np.int32)
    text = str(explain(x, w, backend=RUNG))
    assert "of 52 bits" in text
    assert ("emulated" in text) != cpu.word_unit()
    for rules, reason in (({"stride": 2}, "stride"), ({"dilation": 2}, "dilation")):
        with pytest.raises(Unsupported, match=reason):
            conv2d(x, w, backend=RUNG, **rules)
    with pytest.raises(Unsupported, match="float32"):
        conv2d(x.astype(np.float32), w.astype(np.float32), backend=RUNG)
    monkeypatch.setattr(compiled, "isa", lambda: "v3")
    told = registry.find(RUNG).unavailable()  # type: ignore[union-attr]
    assert told == "it needs the instruction set v4, and v3 is in use"


def test_a_wrong_setting_is_refused() -> None:
    program = f"import convpar\nprint(convpar.registry.find({RUNG!r}).unavailable())"
    assert run(program, CONVPAR_IFMA="maybe") == "CONVPAR_IFMA must be 0 or 1, not 'maybe'"


@pytest.mark.skipif(not cpu.word_unit(), reason="this processor has no AVX-512 IFMA, or isn't Intel's")
def test_direct_sums_are_left_to_words() -> None:
    rng = np.random.default_rng(3)
    x = rng.integers(-99, 99, (1, 1, 300, 600), np.int32)
    w = rng.integers(-99, 99, (1, 1, 7, 7), np.int32)
    product = np.outer(w[0, 0, 0], w[0, 0, 1])[None, None]
    plan = convpar.plan(x, w).plan
    assert plan.launch["direct sums"].startswith(f"by {RUNG}: of 52 bits, AVX-512 IFMA")
    for filters in (w, product):
        out = np.empty((1, 1, 294, 594), np.int32)
        workspace = np.full(plan.workspace_bytes(2), 255, np.uint8)
        plan.run(x, filters, None, out, workspace=workspace, num_threads=2)
        np.testing.assert_array_equal(out, conv2d(x, filters, backend="numpy"))
    assert "factored" in plan.paths_run()
    # Where there is nothing to be saved, nothing is looked for.
    large = convpar.plan(convpar.ArraySpec((4096, 4096), np.int32), convpar.ArraySpec((3, 3), np.int32))
    assert large.backend.name == "cpu-simd"
