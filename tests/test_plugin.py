"""A backend of another package, installed as such: examples/plugin, and packages that are wrong."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import convpar

ROOT = Path(convpar.__file__).parent.parent
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plugin"
NAME = "np-matmul"


def run(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    """A Python process that sees the packages in `path` beside this convpar."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )


def python(code: str, path: Path) -> list[str]:
    """The lines that a program prints; it must end well."""
    ran = run("-c", code, path=path)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


def package(folder: Path, name: str, source: str, entry_points: dict[str, str]) -> None:
    """An installed package as pip leaves it: a module and its metadata."""
    (folder / f"{name}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8"
    )
    lines = [f"{point} = {value}" for point, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text(
        "\n".join(["[convpar.backends]", *lines, ""]), encoding="utf-8"
    )


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the example is installed: by pip where it can build, else file by file."""
    target = tmp_path_factory.mktemp("site")
    if importlib.util.find_spec("pip") and importlib.util.find_spec("setuptools"):
        # Building leaves files beside the sources, so it gets its own.
        sources = tmp_path_factory.mktemp("sources") / "plugin"
        shutil.copytree(EXAMPLE, sources)
        subprocess.run(
            [
                sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                "--no-index", "--disable-pip-version-check", "--target", str(target), str(sources),
            ],
            check=True, capture_output=True, timeout=300,
        )  # fmt: skip
    else:
        project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))
        (module,) = project["tool"]["setuptools"]["py-modules"]
        source = (EXAMPLE / f"{module}.py").read_text(encoding="utf-8")
        package(target, module, source, project["project"]["entry-points"]["convpar.backends"])
    return target


# -- the example


def test_the_example_is_listed_and_serves(installed: Path) -> None:
    code = f"""
import numpy as np, convpar
names = [b.name for b in convpar.list_backends()]
print(names.index("numpy"), names[-1])
rng = np.random.default_rng(1)
x, w = rng.integers(-9, 10, (2, 4, 30, 31)), rng.integers(-9, 10, (6, 2, 3, 3))
same = {{"padding": "same", "boundary": "mirror", "stride": 2}}
for settings in ({{}}, same, {{"flip": True, "dilation": 2}}):
    y = convpar.conv2d(x, w, groups=2, backend={NAME!r}, **settings)
    print(np.array_equal(y, convpar.conv2d(x, w, groups=2, backend="numpy", **settings)))
p = convpar.plan(x, w, groups=2, backend={NAME!r}, config={{"rows": 5}})
p(x, w)
print(sorted(p.plan.paths_run()), p.plan.launch["strips"])
for asked in ({NAME!r}, "auto"):
    print(convpar.explain(x, w, groups=2, backend=asked).backend == {NAME!r})
try:
    convpar.conv2d(x.astype("u1"), w, groups=2, dtype="u1", backend={NAME!r})
except convpar.Unsupported as e:
    print(e)
"""
    out = python(code, installed)
    assert out[:4] == [f"0 {NAME}", "True", "True", "True"]
    assert out[4] == "['second strip', 'strip'] 6"
    assert out[5:7] == ["True", "False"]
    assert out[7].startswith(f"{NAME} can't do this: the sum is int64 and the result uint8")


def test_built_in_names_do_not_load_it(installed: Path) -> None:
    code = (
        "import sys, numpy as np, convpar\n"
        "convpar.conv2d(np.ones((5, 5)), np.ones((3, 3)), backend='cpu-private')\n"
        "print('convpar_matmul' in sys.modules)\n"
        f"convpar.conv2d(np.ones((5, 5)), np.ones((3, 3)), backend={NAME!r})\n"
        "print('convpar_matmul' in sys.modules)\n"
    )
    assert python(code, installed) == ["False", "True"]


def test_the_command_line_lists_and_explains_it(installed: Path) -> None:
    pytest.importorskip("rich", reason="the command line needs convpar[cli]")
    pytest.importorskip("click", reason="the command line needs convpar[cli]")
    listed = run("-m", "convpar", "backends", NAME, path=installed)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert NAME in listed.stdout
    assert "matrix product" in listed.stdout
    told = run("-m", "convpar", "explain", "--x", "48,64", "--w", "5,5", "--backend", NAME, path=installed)
    assert told.returncode == 0, told.stderr
    assert f"Runs: {NAME}" in told.stdout


def test_it_passes_the_checks_of_the_built_in_rungs(installed: Path) -> None:
    for needed in ("scipy", "hypothesis", "click", "rich"):
        pytest.importorskip(needed, reason=f"convpar verify needs {needed}")
    ran = run("-m", "convpar", "verify", NAME, "--examples", "12", path=installed)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "0 failed" in ran.stdout
    assert f"{NAME} ran the paths second strip, strip" in ran.stdout


# -- packages that are wrong

GOOD = """
from convpar.backends.reference import Reference
class Backend(Reference):
    name = "good"
"""

LISTED = """
import warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import numpy as np, convpar
    names = [b.name for b in convpar.list_backends()]
    convpar.list_backends()
print(" ".join(names))
for w in caught:
    print(w.category.__name__, w.message)
y = convpar.conv2d(np.ones((5, 5)), np.ones((3, 3)))
assert (y == 9).all()
"""


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import a_module_that_does_not_exist", "ModuleNotFoundError"),
        ("Backend = 1 / 0", "ZeroDivisionError"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("", "AttributeError"),
        ("class Backend: name = 'half'", "lacks contract, summary, builds_on, capabilities"),
        (
            GOOD.replace('"good"', '"good"\n    contract = 99'),
            "was written for contract 99, this convpar has",
        ),
        (GOOD.replace('"good"', '"cpu-private"'), "the name 'cpu-private' is taken"),
        (GOOD.replace('"good"', '"gpu"'), "can't be called 'gpu': that is a chooser"),
        (GOOD + "    def __init__(self): raise OSError('no licence')", "OSError: no licence"),
    ],
)
def test_a_wrong_package_warns_and_is_left_out(source: str, reason: str, tmp_path: Path) -> None:
    package(tmp_path, "wrong_backend", source, {"wrong": "wrong_backend:Backend"})
    package(tmp_path, "good_backend", GOOD, {"right": "good_backend:Backend"})
    names, *warned = python(LISTED, tmp_path)
    assert names.split()[-1] == "good"
    assert names.split().count("cpu-private") == 1
    assert len(warned) == 1
    assert warned[0].startswith(
        "RuntimeWarning convpar leaves out the backend plugin 'wrong' (wrong_backend:Backend)"
    )
    assert reason in warned[0]


def test_two_packages_with_one_name_warn_once(tmp_path: Path) -> None:
    package(tmp_path, "first_backend", GOOD, {"a": "first_backend:Backend"})
    package(tmp_path, "second_backend", GOOD, {"b": "second_backend:Backend"})
    names, *warned = python(LISTED, tmp_path)
    assert names.split().count("good") == 1
    assert [("plugin 'b'" in w, "the name 'good' is taken" in w) for w in warned] == [(True, True)]


def test_a_wrong_package_costs_a_call_nothing(tmp_path: Path) -> None:
    """Somebody who names a built-in rung never meets it."""
    package(tmp_path, "wrong_backend", "raise SystemExit('stop')", {"wrong": "wrong_backend:Backend"})
    code = (
        "import warnings, numpy as np, convpar\n"
        "warnings.simplefilter('error')\n"
        "print(convpar.conv2d(np.ones((3, 3)), np.ones((3, 3)), backend='cpu-private')[0, 0])"
    )
    assert python(code, tmp_path) == ["9.0"]
