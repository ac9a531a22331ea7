"""Other builds of the same sources: one rung more, no OpenMP, lower ISA levels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import convpar
from convpar.backends.cpu import compiled

SOURCE = Path(__file__).parent.parent
VERIFY = ["verify", "cpu-*", "--require", "cpu-simd", "--seed", "1", "--examples"]
"""With a vector kernel the engine is there; then only what the instruction set lacks may be missing (`_check_left_out`)."""


def _run(command: list[str], **kwargs: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False, **kwargs)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return str(done.stdout)


def _from(tree: Path) -> dict[str, str]:
    """The environment in which a subprocess imports the package from `tree`, which has the baseline alone."""
    return {**os.environ, "PYTHONPATH": str(tree), "PYTHONSAFEPATH": "1", "CONVPAR_ISA": "baseline"}


def _check_left_out(env: dict[str, str]) -> None:
    """Every CPU rung runs under `env`, but those that need instructions of a level that isn't in use."""
    code = (
        "from convpar.backends import cpu\n"
        "from convpar.backends.cpu.rungs import MASK_LEVELS\n"
        "for rung in cpu.backends():\n"
        "    levels = MASK_LEVELS if rung.masks else ('v4',) if rung.unit or rung.word_bits else (cpu.isa(),)\n"
        "    needs_more = cpu.isa() not in levels\n"
        "    assert (rung.unavailable() is not None) == needs_more, (rung.name, rung.unavailable())\n"
    )
    _run([sys.executable, "-c", code], env=env)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with a toy rung, built without OpenMP for the baseline alone, importable from its root."""
    scripts = [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    path = os.pathsep.join(scripts)
    if shutil.which("meson", path=path) is None or shutil.which("cython", path=path) is None:
        pytest.skip("building needs meson, ninja and cython: pip install 'convpar[test]'")
    root = tmp_path_factory.mktemp("built")
    copy = root / "tree"
    unwanted = shutil.ignore_patterns(".*", "build*", "*.so", "__pycache__", "benchmarks")
    shutil.copytree(SOURCE, copy, ignore=unwanted)
    folder = copy / "convpar" / "backends" / "cpu"
    before = {p: p.read_bytes() for p in copy.rglob("*") if p.is_file()}

    (folder / "kernels" / "toy.hpp").write_text((folder / "kernels" / "private.hpp").read_text())
    rows = folder / "rungs.inc"
    rows.write_text(rows.read_text() + 'RUNG(toy, honest, any, 3, any, 9, 0, private, "a toy")\n')

    changed = [p for p in copy.rglob("*") if p.is_file() and before.get(p) != p.read_bytes()]
    assert len(changed) == 2
    env = {**os.environ, "PATH": path}
    _run(
        [
            "meson",
            "setup",
            str(root / "build"),
            str(copy),
            "--buildtype=plain",
            "-Dopenmp=disabled",
            "-Dlevels=baseline",
            "-Dladder=unoptimised",
            "-Dkernels=unoptimised",
        ],
        env=env,
    )
    _run(["meson", "compile", "-C", str(root / "build")], env=env)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    shutil.copy(root / "build" / "convpar" / "backends" / "cpu" / f"engine{suffix}", folder)
    return copy


def test_a_rung_is_one_row_and_at_most_one_kernel_file(tree: Path) -> None:
    """The fixture touched two files; the toy is found everywhere by its name."""
    code = (
        "import numpy as np, convpar, json\n"
        "x = np.arange(36.).reshape(6, 6); w = np.ones((3, 3))\n"
        "y = convpar.conv2d(x, w, backend='cpu-toy')\n"
        "assert (y == convpar.conv2d(x, w, backend='numpy')).all()\n"
        "row = convpar.registry.find('cpu-toy')\n"
        "names = [b.name for b in convpar.list_backends()]\n"
        "print(json.dumps([convpar.__file__, names, row.summary, row.builds_on, row.source()[0][0]]))"
    )
    where, names, summary, before, file = json.loads(_run([sys.executable, "-c", code], env=_from(tree)))
    assert Path(where).is_relative_to(tree)
    assert "cpu-toy" in names
    assert (summary, before, file) == ("a toy", "cpu-private", "kernels/toy.hpp")
    assert "cpu-toy" in _run([sys.executable, "-m", "convpar", "backends"], env=_from(tree))


def test_every_rung_passes_without_openmp(tree: Path) -> None:
    code = "import convpar; print(convpar.show_config()['cpu']['OpenMP'], convpar.__file__)"
    config = _run([sys.executable, "-c", code], env=_from(tree))
    assert "not built in" in config
    assert str(tree) in config
    _check_left_out(_from(tree))
    # The kernels are those of the baseline, which has a test of its own.
    _run([sys.executable, "-m", "convpar", *VERIFY, "20"], env=_from(tree))


def _at(level: str) -> dict[str, str]:
    """The environment in which a subprocess uses that level of the package under test, installed or not."""
    path = os.pathsep.join([str(Path(convpar.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "CONVPAR_ISA": level, "PYTHONPATH": path}


LOWER = compiled.engine().isa_levels()[1:]


@pytest.mark.parametrize("level", LOWER)
def test_every_rung_passes_at_lower_isa_levels(level: str) -> None:
    code = f"import sys; sys.argv[1:] = {[*VERIFY, '40']!r}; from convpar.cli import main; sys.exit(main())"
    _check_left_out(_at(level))
    _run([sys.executable, "-c", code], env=_at(level))


@pytest.mark.parametrize("level", LOWER)
def test_narrow_numbers_are_converted_at_lower_isa_levels(level: str) -> None:
    """By instructions of their own, which random problems seldom ask for ties and what is no number."""
    tests = ["tests/test_cpu_rungs.py", "-k", "rounded_and_saturated or shorter_floats"]
    out = _run([sys.executable, "-m", "pytest", "-q", "-n", "0", *tests], env=_at(level), cwd=SOURCE)
    # One of bfloat16, which needs a package.
    assert "13 passed" in out or "12 passed, 1 skipped" in out
