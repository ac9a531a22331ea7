"""The rules that hold the house up: import directions, one row a rung, no shared code between ISA levels."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import convpar
from convpar import registry
from convpar.backends import cpu
from convpar.backends.cpu import compiled
from convpar.backends.gpu.executors import emulator

PACKAGE = Path(convpar.__file__).parent

# Layers from the bottom up: a module may import from its own layer's folder and from those below.
LAYERS = [
    ["problem", "boundary"],
    ["backend", "threads"],
    ["backends"],
    ["registry"],
    ["arrays", "keys", "info", "timing", "choose", "explanation", "tuning"],
    ["api", "cases"],
    ["signal"],
    ["conformance", "bench"],
    ["cli", "__main__"],
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def _imports(path: Path) -> set[str]:
    """First parts of the convpar modules that a file imports, at any depth of its code."""
    package = ("convpar", *path.relative_to(PACKAGE).parent.parts)
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *(node.module or "").split("."))).strip(".")
            names = [f"{module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {n for n in names if n.split(".")[0] == "convpar"}
    return found


def _arrows(root: Path = PACKAGE) -> list[tuple[str, str]]:
    """(file, convpar module it imports) for every file of the package."""
    return [
        (str(path.relative_to(root)), name)
        for path in sorted(root.rglob("*.py"))
        for name in sorted(_imports(path))
    ]


def _wrong_way(file: str, imported: str) -> str | None:
    """Why an import points up or across, or None."""
    parts = Path(file).with_suffix("").parts
    here = parts[0]
    there = imported.split(".")[1] if "." in imported else "__init__"
    if here == "__init__":
        return None
    if there not in RANK:
        # `from convpar import conv2d`: the public face, for those above the api.
        return None if RANK[here] > RANK["api"] else "only the layers above the api use the public names"
    if here == "backends":
        family = parts[1] if len(parts) > 1 else ""
        target = imported.split(".")[2] if there == "backends" and imported.count(".") > 1 else ""
        if there == "backends":
            return None if target in ("", family) else "a backend imports another backend"
        return None if there in ("backend", "problem", "boundary", "threads") else "a backend imports upwards"
    if there == "backends" and here not in ("info", "timing", "bench", "cli", "conformance"):
        return "only the registry knows the backends, as dotted strings"
    return None if RANK[there] <= RANK[here] else f"{here} is below {there}"


def test_imports_run_one_way() -> None:
    wrong = [(f, i, why) for f, i in _arrows() if (why := _wrong_way(f, i))]
    assert not wrong
    # The walk saw the files it is about.
    assert {"api.py", "registry.py", str(Path("backends", "cpu", "__init__.py"))} <= {f for f, _ in _arrows()}


@pytest.mark.parametrize(
    ("file", "imported"),
    [
        ("problem.py", "convpar.backend"),
        ("backend.py", "convpar.api"),
        ("backends/reference.py", "convpar.registry"),
        ("backends/reference.py", "convpar.backends.cpu"),
        ("backends/cpu/plan.py", "convpar.choose"),
        ("registry.py", "convpar.api"),
        ("choose.py", "convpar.backends.cpu"),
        ("api.py", "convpar.cli"),
        ("api.py", "convpar.conv2d"),
        ("signal.py", "convpar.conformance"),
    ],
)
def test_a_wrong_arrow_is_seen(file: str, imported: str) -> None:
    assert _wrong_way(file, imported) is not None


def test_every_module_has_a_layer() -> None:
    top = {
        p.stem if p.suffix else p.name
        for p in PACKAGE.iterdir()
        if p.suffix == ".py" or (p / "__init__.py").exists()
    }
    assert top - {"__init__"} <= set(RANK)


def test_import_loads_no_more_than_it_needs() -> None:
    code = (
        "import sys, json, convpar; convpar.api; "
        "print(json.dumps(sorted({m.split('.')[0] for m in sys.modules} | "
        "{m for m in sys.modules if m.startswith('convpar.backends')})))"
    )
    loaded = set(json.loads(_python(code)))
    unwanted = {"scipy", "cupy", "click", "rich", "matplotlib", "hypothesis", "cv2", "torch", "ml_dtypes"}
    assert not loaded & unwanted
    assert not {m for m in loaded if m.startswith("convpar.backends")}
    # The compiled module and entry points wait too.
    assert "convpar.backends.cpu.engine" not in loaded


def _python(code: str, **env: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True, check=True,
        timeout=120,
    ).stdout  # fmt: skip


def test_rungs_are_read_alike_by_python_and_by_the_build() -> None:
    lines = (PACKAGE / "backends" / "cpu" / "rungs.inc").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("RUNG(")]
    assert [f"cpu-{re.split(r'[(,]', r)[1]}" for r in rows] == [b.name for b in cpu.backends()]
    for backend in cpu.backends():
        for level in compiled.engine().isa_levels():
            assert compiled.engine().compiled_for(backend.name.removeprefix("cpu-"), level) == level


def test_a_rung_builds_on_one_that_exists() -> None:
    names = {b.name for b in registry.backends()}
    for backend in registry.backends():
        assert backend.builds_on is None or backend.builds_on in names


@pytest.mark.skipif(shutil.which("nm") is None, reason="needs nm (binutils)")
def test_isa_levels_share_no_code() -> None:
    """A weak symbol may be kept from the level that this processor can't run."""
    module = compiled.engine().__file__
    symbols = subprocess.run(["nm", "-C", module], capture_output=True, text=True, check=True).stdout
    if "rung_" not in symbols:
        pytest.skip("the module is stripped; build without stripping to check its symbols")
    weak = [line for line in symbols.splitlines() if re.match(r"[0-9a-f]+ [WVu] ", line)]
    assert not weak
    shared = [
        line for line in symbols.splitlines()
        if re.search(r"::v[34]::", line) and re.match(r"[0-9a-f]+ [A-Z] ", line)
        and not re.search(r"::(table|burn)\b", line)
    ]  # fmt: skip
    assert not shared


@pytest.mark.parametrize("level", [*compiled.engine().isa_levels()])
def test_the_forced_isa_level_runs(level: str) -> None:
    code = (
        "import numpy as np, convpar\n"
        "x = (np.arange(6.4e5) % 7 + 1).reshape(1, 16, 200, 200)\n"
        "for b in convpar.list_backends():\n"
        "    if b.name.startswith('cpu-') and b.unavailable() is None:\n"
        "        side, (channels, outputs, groups) = max(3, *b.capabilities.least_filter), b.capabilities.least_layer\n"
        "        dtype, result = b.capabilities.plain_types\n"
        "        w, image = np.ones((outputs, channels // groups, side, side), dtype), x[:, :channels].astype(dtype)\n"
        "        rules = {'groups': groups, 'dtype': result}\n"
        "        p = convpar.plan(image, w, backend=b.name, **rules)\n"
        "        assert np.allclose(p(image, w), convpar.conv2d(image, w, backend='numpy', **rules))\n"
        "        print(p.plan.launch['instruction set'])\n"
    )
    assert set(_python(code, CONVPAR_ISA=level).split()) == {level}


def test_a_wrong_isa_level_lists_the_right_ones() -> None:
    code = (
        "import numpy as np, convpar\n"
        "for dtype in ('float64', 'int32'):\n"
        "    try: convpar.conv2d(np.ones((4, 4), dtype), np.ones((3, 3), dtype))\n"
        "    except ValueError as e: print(e)\n"
        "print(convpar.registry.find('cpu-simd').unavailable())\n"
        "assert convpar.conv2d(np.ones((4, 4)), np.ones((3, 3)), backend='numpy').sum() == 36"
    )
    lines = _python(code, CONVPAR_ISA="v9").splitlines()
    assert len(lines) == 3
    for text in lines:
        assert "CONVPAR_ISA" in text
        assert "'v9'" in text
        assert all(level in text for level in compiled.engine().isa_levels())


def test_every_setting_is_documented() -> None:
    document = PACKAGE.parent / "docs" / "command-line.md"
    if not document.exists():
        pytest.skip("docs/ isn't part of this checkout")
    text = document.read_text(encoding="utf-8").partition("## Settings")[2].partition("\n## ")[0]
    sources = "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    variables = set(re.findall(r'"(CONVPAR_\w+|CXX|OMP_NUM_THREADS)"', sources))
    assert variables >= {cpu.ISA_VARIABLE, emulator.CACHE_VARIABLE, emulator.COMPILER_VARIABLE}
    assert [name for name in sorted(variables) if f"| `{name}` |" not in text] == []
    assert all(f"`{word}`" in text for word in (*emulator.ORDERS, "checked", "unchecked"))
