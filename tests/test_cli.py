"""The command line: quick to start, plain errors, and what each command prints."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from click.testing import CliRunner, Result

import convpar
from convpar import registry
from convpar.backend import Refusal
from convpar.backends import cpu
from convpar.backends.cpu import compiled, disassembly
from convpar.cli import app, backends, common, show
from convpar.cli.app import application
from convpar.problem import Problem

ROOT = Path(convpar.__file__).parent.parent
LONG = "9" * 5000
"""More digits than Python reads."""
CPU_RUNGS = [b.name for b in convpar.list_backends() if b.name.startswith("cpu-")]


def run(*arguments: Any) -> Result:
    # Wide enough that no table breaks a sentence.
    return CliRunner(env={"COLUMNS": "160"}).invoke(
        application, list(map(str, arguments)), catch_exceptions=False
    )


def printed(*arguments: Any) -> str:
    """The output of a run that must succeed without complaint."""
    result = run(*arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return result.stdout


def refused(*arguments: Any) -> str:
    """The one line that a run must fail with."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("convpar: ")
    return result.stderr


def python(code: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A Python process beside this convpar."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment, capture_output=True, text=True, timeout=120, check=False, **options,
    )  # fmt: skip


MAIN = "import sys; from convpar.cli import main; sys.exit(main())"


# -- the group


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom convpar.cli import main\nsys.argv = ['convpar', '--help']\ncode = main()\n"
        "print(code, *sorted(m for m in sys.modules), file=sys.stderr)"
    )
    done = python(code)
    assert done.returncode == 0
    for name, row in app.COMMANDS.items():
        assert f"  {name} " in done.stdout
        assert row.summary in done.stdout
    code, *loaded = done.stderr.split()
    assert code == "0"
    heavy = {"rich.console", "rich.table", "cv2", "scipy", "matplotlib", "hypothesis", "cupy"}
    assert not heavy & set(loaded)
    assert not {f"convpar.cli.{name}" for name in app.COMMANDS} & set(loaded)


def test_no_command_is_a_call_for_help() -> None:
    assert printed() == printed("--help")
    assert printed("--version") == f"convpar {convpar.__version__}\n"


@pytest.mark.parametrize("name", app.COMMANDS)
def test_each_command_is_a_module_with_help(name: str) -> None:
    text = printed(name, "--help")
    assert text.startswith("Usage: ")
    assert f" {name} " in text.splitlines()[0] + " "
    assert printed(name, "-h") == text


def test_every_module_with_a_command_has_a_row() -> None:
    folder = Path(app.__file__).parent
    holding = {p.stem for p in folder.glob("*.py") if "\ndef command(" in p.read_text(encoding="utf-8")}
    assert holding == set(app.COMMANDS)


def test_the_demo_needs_no_more_than_its_extra(tmp_path: Path) -> None:
    block = "import sys; sys.modules.update(dict.fromkeys(('hypothesis', 'pytest'))); "
    done = python(block + MAIN, "demo", "--size", "64", "--backend", "cpu-private", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir())


def test_the_extras_named_exist() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8") if (ROOT / "pyproject.toml").exists() else ""
    if not text:
        pytest.skip("not a source tree: pyproject.toml isn't installed")
    import tomllib

    extras = tomllib.loads(text)["project"]["optional-dependencies"]
    assert {row.extra for row in app.COMMANDS.values()} <= set(extras)
    assert {"cli", "image", "demo"} <= set(extras)


@pytest.mark.parametrize("missing", ["click", "rich"])
def test_without_the_libraries_of_the_command_line(missing: str) -> None:
    done = python(f"import sys; sys.modules[{missing!r}] = None; sys.argv = ['convpar', 'info']; {MAIN}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"convpar: the command line needs {missing}, which isn't installed: pip install 'convpar[cli]'\n"
    )


@pytest.mark.parametrize(
    ("missing", "extra", "arguments"),
    [
        ("cv2", "image", ["filter", "in.png", "out.png", "-k", "identity"]),
        ("matplotlib", "demo", ["demo"]),
        ("scipy", "demo", ["demo"]),
    ],
)
def test_without_the_libraries_of_one_command(
    tmp_path: Path, missing: str, extra: str, arguments: list[str]
) -> None:
    block = f"import sys; sys.modules[{missing!r}] = None; "
    done = python(block + MAIN, *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == f"convpar: this needs {missing}, which isn't installed: pip install 'convpar[{extra}]'\n"
    )
    assert not list(tmp_path.iterdir())
    # The other commands go on.
    assert python(block + MAIN, "backends", "--json").returncode == 0


def test_a_missing_module_of_convpar_itself_is_a_mistake_to_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(app.COMMANDS, "nothere", app.Row("Isn't there.", "cli"))
    with pytest.raises(ModuleNotFoundError, match=r"convpar\.cli\.nothere"):
        run("nothere")


def test_module_and_entry_point_are_the_same() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "convpar", "--version"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == python(MAIN, "--version").stdout == f"convpar {convpar.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing"], "No such command"),
        (["--nothing"], "No such option"),
        (["backends", "--nothing"], "'convpar backends --help'"),
        (["filter", "a.png"], "Missing"),
        (["filter", "a", "b", "-k", "box:3", "--threads", "0"], "--threads"),
        (["filter", "a", "b", "-k", "box:3", "--threads", "1025"], "1<=x<=1024"),
        (["filter", "a", "b", "-k", "box:3", "--boundary", "reflect"], "--boundary"),
        (["filter", "a", "b", "-k", "box:3", "--fillvalue", "red"], "is not a number"),
        (["explain", "--x", "3,3"], "--w"),
        (["explain", "--x", "3,3", "--w", "3,3", "--stride", "x"], "'x' must be 1 or 2 whole numbers"),
        (["demo", "--size", "9"], "--size"),
    ],
)
def test_wrong_calls_take_one_line(arguments: list[str], says: str) -> None:
    done = python(MAIN, *arguments)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("convpar: ")
    assert says in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="pipes and signals are POSIX")
@pytest.mark.parametrize(
    "arguments", [["backends", "--json"], ["backends", "--options"], ["show", "numpy"], ["--help"]]
)
def test_closed_pipe_ends_quietly(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments],
        env=environment, stdout=writing, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writing)
    assert (done.returncode, done.stderr) == (app.CLOSED_PIPE, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is Linux's")
@pytest.mark.parametrize("arguments", [["info"], ["backends"], ["show", "numpy"], ["--help"]])
def test_output_that_cannot_be_written_is_an_error(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, *arguments],
            env=environment, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "convpar: can't write the output: No space left on device\n")


@pytest.mark.skipif(os.name != "posix", reason="closed descriptors are POSIX")
@pytest.mark.parametrize("closed", [1, 2])
def test_started_without_a_stream(tmp_path: Path, closed: int) -> None:
    cv2.imwrite(str(tmp_path / "in.png"), np.full((5, 6), 7, np.uint8))
    arguments = f"filter {tmp_path}/in.png {tmp_path}/out.png -k identity -v"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = f"exec {sys.executable} -m convpar {arguments} {closed}>&-"
    done = subprocess.run(["sh", "-c", command], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr.count("\n") == (closed == 1)
    assert (cv2.imread(str(tmp_path / "out.png"), cv2.IMREAD_UNCHANGED) == 7).all()


@pytest.mark.skipif(os.name != "posix", reason="pipes and signals are POSIX")
def test_ctrl_c_ends_cleanly() -> None:
    code = (
        "import sys, time, convpar\n"
        "def wait(): print('waiting', flush=True); time.sleep(60)\n"
        "convpar.show_config = wait\n" + MAIN
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "info"], env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err.strip()) == (app.INTERRUPTED, "convpar: interrupted")


@pytest.mark.skipif(os.name != "posix", reason="pipes and signals are POSIX")
@pytest.mark.parametrize("seconds", [0.1, 3])
def test_ctrl_c_ends_the_processes_of_verify_cleanly(seconds: float) -> None:
    """A terminal sends it to all of them, whether they are at work or still being imported."""
    code = (
        "from convpar.conformance import report\nplain = report.wait\n"
        "def wait(pipes): print('waiting', flush=True); return plain(pipes)\n"
        "report.wait = wait\n" + MAIN
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, "verify", "numpy", "--jobs", "2", "--examples", "5000"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, err) == (app.INTERRUPTED, "convpar: interrupted\n")


def test_a_mistake_in_convpar_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise LookupError("a bug")

    monkeypatch.setattr(convpar, "show_config", broken)
    with pytest.raises(LookupError, match="a bug"):
        run("info")


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def greedy() -> None:
        raise MemoryError

    monkeypatch.setattr(convpar, "show_config", greedy)
    assert refused("info") == "convpar: there isn't enough memory\n"


# -- info


def test_info_shows_the_configuration() -> None:
    config = convpar.show_config()
    text = printed("info")
    for section, facts in config.items():
        assert f"{section}\n" in text
        for name in facts:
            assert name in text
    assert json.loads(printed("info", "--json")) == json.loads(json.dumps(config, default=str))


def test_info_with_a_wrong_setting() -> None:
    done = python(MAIN, "info", env={"CONVPAR_ISA": "v9"})
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "CONVPAR_ISA must be one of" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["demo", "--size", "32"],
        ["verify", "cpu-naive", "--examples", "2"],
        ["bench", "--case", "single-64-k3-float32-valid", "--peer", "none"],
        ["explain", "--x", "9,9:uint8", "--w", "3,3:uint8"],
    ],
)
def test_a_wrong_instruction_set_is_no_backends_fault(tmp_path: Path, arguments: list[str]) -> None:
    done = python(MAIN, *arguments, env={"CONVPAR_ISA": "v9"}, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("convpar: CONVPAR_ISA must be one of")


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ({"CONVPAR_CACHE_DIR": "/dev/null/x"}, "CONVPAR_CACHE_DIR"),
        ({"CXX": "false"}, "CXX"),
        ({"CXX": '"'}, "CXX"),
    ],
)
def test_a_wrong_setting_of_the_emulator_is_named(tmp_path: Path, setting: dict[str, str], says: str) -> None:
    cv2.imwrite(str(tmp_path / "in.png"), np.full((5, 6), 7, np.uint8))
    environment = {"CONVPAR_GPU": "emulate", "CONVPAR_CACHE_DIR": str(tmp_path / "cache"), **setting}
    filtered = ["filter", "in.png", "out.png", "-k", "identity", "--backend", "gpu-naive"]
    done = python(MAIN, *filtered, env=environment, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert says in done.stderr
    verified = python(MAIN, "verify", "gpu-naive", "--examples", "2", env=environment)
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "skipped gpu-naive: the emulator" in verified.stdout
    assert says in verified.stdout


def test_other_errors_leave_stdout_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise NotADirectoryError(errno.ENOTDIR, "not a folder")

    monkeypatch.setattr(convpar, "show_config", broken)
    result = CliRunner().invoke(application, ["info"])
    assert isinstance(result.exception, NotADirectoryError)
    assert result.stdout == ""


# -- backends


def test_backends_lists_all() -> None:
    text = printed("backends")
    for backend in convpar.list_backends():
        assert backend.name in text
    records = json.loads(printed("backends", "--json"))
    assert [r["name"] for r in records] == [b.name for b in convpar.list_backends()]
    for record, backend in zip(records, convpar.list_backends(), strict=True):
        assert record["available"] == (backend.unavailable() is None)
        assert record["summary"] == backend.summary
        assert set(record["options"]) == set(backend.options)
        assert record["input_dtypes"] == list(backend.capabilities.input_dtypes)


@pytest.mark.parametrize("pattern", ["cpu", "cpu-*", "*-private", "numpy", "[cn]*"])
def test_backends_by_pattern(pattern: str) -> None:
    names = [r["name"] for r in json.loads(printed("backends", pattern, "--json"))]
    assert names
    assert names == [b.name for b in common.matching(pattern)]
    assert set(names) < {b.name for b in convpar.list_backends()}


def test_a_whole_name_is_not_the_beginning_of_others(made_up: list[Any]) -> None:
    made_up.append(Made("cpu-private-extra"))
    registry.register(made_up[-1])
    assert [b.name for b in common.matching("cpu-private")] == ["cpu-private"]
    assert "no backend matches 'tpu'" in refused("backends", "tpu")


def test_backends_options() -> None:
    text = printed("backends", "cpu-private", "--options")
    rung = registry.find("cpu-private")
    assert rung is not None
    for name, option in rung.options.items():
        assert name in text
        assert option.summary in text


def test_unavailable_backends_say_why(made_up: list[Any]) -> None:
    made_up.append(Made("made-up", reason="there is no [such] machine"))
    registry.register(made_up[-1])
    assert "can't run here: made-up: there is no [such] machine" in printed("backends", "made-up")
    record = json.loads(printed("backends", "made-up", "--json"))[0]
    assert (record["available"], record["unavailable"]) == (False, "there is no [such] machine")


def test_what_a_backend_takes_in_words() -> None:
    from convpar.backend import Capabilities, ErrorContract

    all_of_it = backends.takes(Capabilities())
    assert all_of_it == "bool, integers, float16/32/64, complex64/128, bfloat16"
    narrow = Capabilities(
        input_dtypes=("float16", "float32"), sum_dtypes=("float32",), filter_sizes=((3, 3), (5, 7)), strided=False,
        grouped=False, boundaries=("fill",), sum_is_output=True,
        error=ErrorContract("normwise", 4.0, "float16", flushes_subnormals=True, deterministic=False),
    )  # fmt: skip
    assert backends.takes(narrow) == (
        "float16/32; sums kept in float16; filters 3x3, 5x7; no stride, groups; boundary fill; result in the "
        "sum's type; normwise error, factor 4; flushes subnormals; bits may differ between runs"
    )
    assert backends.takes(Capabilities(strides=((1, 1), (2, 2)))).endswith("; stride 1x1, 2x2")
    assert "uint8/16" in backends.takes(Capabilities(input_dtypes=("uint8", "uint16"), sum_dtypes=("int32",)))


# -- show


def test_show_prints_kernel_options_and_ladder() -> None:
    text = printed("show", "cpu-private")
    rung = registry.find("cpu-private")
    assert rung is not None
    for _, kernel in rung.source():
        assert kernel in text
    lines = text.splitlines()
    below, own = (
        next(i for i, line in enumerate(lines) if f" {name} " in line)
        for name in ("cpu-naive", "cpu-private")
    )
    assert below < own
    assert lines[own].startswith(" -> ")
    for option in rung.options:
        assert any(line.split()[:1] == [option] for line in lines)
    assert "\x1b" not in text


@pytest.mark.parametrize("name", [b.name for b in convpar.list_backends() if hasattr(b, "source")])
def test_show_every_rung(name: str) -> None:
    assert f"\n -> {name} " in printed("show", name)


def test_show_is_coloured_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(show, "is_terminal", lambda: True)
    show._print("int main() { return 0; }\n", "cpp")
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured
    import re

    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == "int main() { return 0; }\n"


def test_diff_of_two_kernels_is_a_patch(tmp_path: Path) -> None:
    text = printed("show", "cpu-private", "--diff", "cpu-naive")
    old, new = (registry.find(name).source()[0] for name in ("cpu-naive", "cpu-private"))  # type: ignore[union-attr]
    assert text.startswith(f"--- cpu-naive/{old[0]}\n+++ cpu-private/{new[0]}\n")
    patch = shutil.which("patch")
    if patch is None:
        removed = [line[1:] for line in text.splitlines()[2:] if line.startswith("-")]
        assert set(removed) <= set(old[1].splitlines())
        return
    file = tmp_path / "kernel.hpp"
    file.write_text(old[1])
    subprocess.run([patch, "-s", str(file)], input=text, text=True, check=True)
    assert file.read_text() == new[1]


def test_diff_of_the_same_kernel_tells_the_options(made_up: list[Any]) -> None:
    from convpar.backend import Option

    for name, default in (("one", "a"), ("two", "b")):
        made_up.append(Made(name, options={"kind": Option("which", default, ("a", "b"))}))
        registry.register(made_up[-1])
    text = printed("show", "two", "--diff", "one")
    assert "one and two have the same kernel files: made.cu" in text
    assert "  kind: a -> b\n" in text


def test_difference_pairs_files_and_leaves_out_the_shared() -> None:
    old = (("common.h", "c\n"), ("a.h", "1\n2\n"), ("x.h", "x"))
    new = (("common.h", "c\n"), ("b.h", "1\n3\n"), ("x.h", "x\n"), ("new.h", "n\n"))
    assert show.difference("old", old, "new", new) == (
        "--- old/x.h\n+++ new/x.h\n@@ -1 +1 @@\n-x\n\\ No newline at end of file\n+x\n"
        "--- old/a.h\n+++ new/b.h\n@@ -1,2 +1,2 @@\n 1\n-2\n+3\n"
        f"--- {os.devnull}\n+++ new/new.h\n@@ -0,0 +1 @@\n+n\n"
    )


def test_show_suggests_and_refuses(made_up: list[Any]) -> None:
    assert "did you mean cpu-private?" in refused("show", "cpu-privat")
    assert "there are numpy, " in refused("show", "zzz")
    assert "'cpu' picks a backend for each problem" in refused("show", "cpu")
    assert "no backend is named 'zzz'" in refused("show", "numpy", "--diff", "zzz")
    assert "doesn't show its machine code" in refused("show", "numpy", "--asm")
    assert "can't be had together" in refused("show", "cpu-naive", "--asm", "--diff", "numpy")
    assert "say --asm too" in refused("show", "cpu-naive", "--isa", "v3")
    made_up.append(Made("secret"))
    made_up[-1].source = None
    registry.register(made_up[-1])
    assert "secret doesn't show its source" in refused("show", "secret")
    made_up.append(Made("away", reason="install convpar[cuda13x]"))
    registry.register(made_up[-1])
    assert "can't run here: install convpar[cuda13x]\n" in printed("show", "away")


# -- show --asm

needs_objdump = pytest.mark.skipif(shutil.which("objdump") is None, reason="binutils isn't installed")
LEVELS = [] if compiled.missing_engine() else compiled.engine().isa_levels()


@needs_objdump
@pytest.mark.parametrize("rung", [b.name for b in cpu.backends()])
@pytest.mark.parametrize("level", LEVELS)
def test_assembly_of_each_rung_and_level(rung: str, level: str) -> None:
    has = {"cpu-masked": ("v3", "v4"), "cpu-amx": ("v4",), "cpu-toeplitz": ("v4",), "cpu-ifma": ("v4",)}
    has["cpu-amx8"] = ("v4",)
    if level not in has.get(rung, LEVELS):
        told = refused("show", rung, "--asm", "--isa", level)
        assert (
            f"must be one of {', '.join(has[rung])}, for which {rung.removeprefix('cpu-')} was built" in told
        )
        return
    text = printed("show", rung, "--asm", "--isa", level)
    heads = [line for line in text.splitlines() if line.startswith("# ") and "convpar::" in line]
    assert heads
    assert all(f"::{level}::" in line for line in heads)
    own = "unsigned int" if rung in ("cpu-ifma", "cpu-pairs", "cpu-amx8") else "float"
    last = rf"<(.*(Heights<[\d, ]*>|RowByRow), )?(\d+, )*(false, )?({own}, ){{0,2}}{own}>"
    assert all("<float, float, " in line or re.search(last, line) for line in heads)
    assert " ret" in text
    if rung in ("cpu-simd", "cpu-masked", "cpu-ifma") and level == "v4":
        # Three filter rows in the largest block, and any number.
        three, any_number = {
            "cpu-simd": ("slid_strip<3, 3, 8, 4, ", "Heights<>, 0, 8, "),
            "cpu-masked": ("slid_strip<3, 3, 4, ", "strip<8, 2, "),
            "cpu-ifma": ("<3, 8, ", "<0, 8, "),
        }[rung]
        assert all(three in line for line in heads)
        assert any_number in printed("show", rung, "--asm", "--isa", level, "--filter-size", 17)
    if rung == "cpu-masked" and level == "v3":
        assert all("slid_strip<3, 3, 3, " in line for line in heads)
        assert "vmaskmovps" in text
    if rung == "cpu-simd" and level == "v3":
        assert all("slid_strip<3, 3, 8, 2, false, float, float, float>" in line for line in heads)
        picture = Problem.of(
            (1, 1, 64, 64), (1, 1, 3, 3), "uint8", "float32", dtype="uint8", overflow="saturate"
        )
        shown = disassembly.assembly(compiled.engine().__file__, "simd", level, picture)
        assert "slid_strip<3, 3, 8, 2, false, unsigned char, unsigned char, float>" in shown
        assert "vpmovzxbd" in shown
    if rung == "cpu-simd" and level == "v4":
        for size, block in ((5, "5, 0, 8, 4"), (7, "7, 0, 24, 4"), (9, "9, 0, 24, 3"), (11, "11, 0, 8, 3")):
            shown = printed("show", rung, "--asm", "--isa", level, "--filter-size", str(size))
            assert f"slid_strip<{block}, false, float, float, float>" in shown
        picture = Problem.of(
            (1, 1, 64, 64), (1, 1, 5, 3), "uint8", "float32", dtype="uint8", overflow="saturate"
        )
        shown = disassembly.assembly(compiled.engine().__file__, "simd", level, picture)
        assert "slid_strip<5, 0, 8, 4, false, unsigned char, unsigned char, float>" in shown
        assert "vpmovzxbd" in shown
        floats = Problem.of((1, 1, 64, 64), (1, 1, 5, 3), "uint8", "float32")
        shown = disassembly.assembly(compiled.engine().__file__, "simd", level, floats)
        assert "slid_strip<5, 0, 8, 4, false, unsigned char, float, float>" in shown
        assert "vpmovzxbd" in shown
        shown = disassembly.assembly(compiled.engine().__file__, "separable", level, picture)
        assert "Heights<5>, 4, unsigned char, unsigned char, float>" in shown
        assert "vpmovzxbd" in shown
    if rung == "cpu-masked":
        # What seven columns meet behind an output's first doesn't fit a vector of four.
        for size in (3, 5, 7) if level == "v4" else (3, 5):
            two_apart = Problem.of((1, 9, 64, 64), (9, 1, size, size), "float64", groups=9, stride=2)
            shown = disassembly.assembly(compiled.engine().__file__, "masked", level, two_apart)
            assert f"strip_apart<{size}, {4 if level == 'v4' else 2}, double>" in shown
            assert "slid_strip<" not in shown
    if rung == "cpu-separable":
        assert all("strip<" in line and ">, 4, float, float, float>" in line for line in heads)
    if rung == "cpu-simd" and level == "v3":
        assert "RowByRow, 0, 4, 3, " in printed("show", rung, "--asm", "--isa", level, "--filter-size", 15)
    # Compilers leave out calls of what only fetches, unless it is inline: lines for each row of the blocks of both widths.
    fetched = {
        ("cpu-simd", "v4"): (10 + 8) * (4 + 3),
        ("cpu-simd", "v3"): (10 + 8) * (2 + 1),
        ("cpu-masked", "v4"): 40,
        ("cpu-masked", "v3"): 32,
        ("cpu-ifma", "v4"): 3 * 8,
        ("cpu-separable", "v4"): 40,
        ("cpu-implicit", "v4"): 3 * 8,
    }
    assert text.count("prefetch") >= fetched.get((rung, level), 0)
    own_products = {"cpu-amx8": "tdpbusd", "cpu-pairs": "vpdpwssd" if level == "v4" else "pmaddwd"}
    if rung in own_products and platform.machine() in ("x86_64", "AMD64"):
        assert own_products[rung] in text
        return
    assert (
        "tdpbf16ps" in text
        or "vpmadd52luq" in text
        or "mulss" in text
        or "mulps" in text
        or "fmadd" in text
        or "fmul" in text
        or "fmla" in text
    )


@needs_objdump
def test_assembly_follows_types_sizes_and_the_level_in_use() -> None:
    text = printed("show", "cpu-unrolled", "--asm", "--filter-size", 5)
    assert "inside<float, float, 5, 5>" in text
    assert f"::{cpu.isa()}::" in text
    assert "inside<unsigned char, unsigned char, 0, 0>" in printed(
        "show", "cpu-naive", "--asm", "--dtype", "int8"
    )
    assert "complex<float>, 0, 0>" in printed("show", "cpu-naive", "--asm", "--dtype", "complex64").replace(
        "convpar::rung_naive::", ""
    )
    assert "has no function of its own" in refused("show", "cpu-unrolled", "--asm", "--filter-size", "3,4")
    assert "ISA level must be one of baseline" in refused("show", "cpu-naive", "--asm", "--isa", "v9")
    assert "is no dtype" in refused("show", "cpu-naive", "--asm", "--dtype", "int9")
    assert "'f4,(' is no dtype" in refused("show", "cpu-naive", "--asm", "--dtype", "f4,(")
    assert "at least one row" in refused("show", "cpu-naive", "--asm", "--filter-size", "0")


def test_assembly_without_objdump(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disassembly.shutil, "which", lambda name: None)
    assert "objdump isn't installed; it comes with binutils" in refused("show", "cpu-naive", "--asm")


@needs_objdump
@pytest.mark.skipif(shutil.which("strip") is None, reason="binutils isn't installed")
def test_assembly_of_a_stripped_module(tmp_path: Path) -> None:
    stripped = tmp_path / "engine.so"
    subprocess.run(["strip", "-o", str(stripped), compiled.engine().__file__], check=True)
    with pytest.raises(convpar.Unavailable, match="stripped of its symbols"):
        disassembly.assembly(stripped, "naive", "baseline")
    stripped.write_bytes(b"no library")
    with pytest.raises(convpar.Unavailable, match="objdump failed"):
        disassembly.assembly(stripped, "naive", "baseline")


def test_template_arguments_are_read_from_either_form() -> None:
    assert disassembly._arguments("float, complex<float>, 3, 5") == (("float", "complex<float>"), (3, 5))
    assert disassembly._arguments("float, 3, 3, Inside<unsigned char, float>") == (
        ("unsigned char", "float"),
        (3, 3),
    )


# -- explain


def test_explain_says_what_the_function_says() -> None:
    text = printed(
        "explain", "--x", "1,3,512,512:uint8", "--w", "3,3:float32", "--padding", "same", "--dtype", "uint8"
    )
    spec = convpar.ArraySpec
    right = convpar.explain(
        spec((1, 3, 512, 512), "uint8"), spec((3, 3), "float32"), padding="same", dtype=np.dtype("uint8")
    )
    assert text == f"{right}\n"


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        (["--stride", "2"], {"stride": 2}),
        (["--stride", "2,1", "--dilation", "1,2"], {"stride": (2, 1), "dilation": (1, 2)}),
        (["--padding", "1,2,3,4"], {"padding": (1, 2, 3, 4)}),
        (["--padding", "full", "--boundary", "wrap", "--flip"], {"padding": "full", "boundary": "wrap", "flip": True}),
        (["--padding", "1", "--fillvalue", "2.5"], {"padding": 1, "fillvalue": 2.5}),
        (["--backend", "cpu-private", "--config", "tile=8,16", "--config", "block=none"],
         {"backend": "cpu-private", "config": {"tile": (8, 16), "block": None}}),
        (["--accuracy", "normwise"], {"accuracy": "normwise"}),
        (["--accuracy", "1e-3"], {"accuracy": 1e-3}),
        (["--backend", "numpy", "--overflow", "saturate"], {"backend": "numpy", "overflow": "saturate"}),
    ],
)  # fmt: skip
def test_explain_options(options: list[str], keywords: dict[str, Any]) -> None:
    spec = convpar.ArraySpec
    right = convpar.explain(spec((2, 4, 20, 30)), spec((8, 4, 3, 3)), **keywords)
    assert printed("explain", "--x", "2x4x20x30", "--w", "8,4,3,3", *options) == f"{right}\n"


def test_explain_bias_channels_and_json() -> None:
    spec = convpar.ArraySpec
    right = convpar.explain(spec((20, 30, 3), "uint8"), spec((5, 5)), spec((), "float32"), channel_axis=-1)
    text = printed("explain", "--x", "20,30,3:uint8", "--w", "5,5", "--bias", ":float32", "--channels-last")
    assert text == f"{right}\n"
    record = json.loads(printed("explain", "--x", "20,30", "--w", "5,5", "--json"))
    chosen = [c["name"] for c in record["considered"] if c["reason"] is None]
    assert chosen == [record["backend"]]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--x", "3", "--w", "3,3"], "x must have the shape"),
        (["--x", "3,3", "--w", "5,5"], "larger than the padded x"),
        (["--x", "a,b", "--w", "5,5"], "sizes with commas"),
        (["--x", "9,9:float33", "--w", "3,3"], "is no dtype"),
        (["--x", "9,9:str", "--w", "3,3"], "x must be bool"),
        (["--x", "9,9:f4,(", "--w", "3,3"], "'f4,(' is no dtype"),
        (["--x", "9,9", "--w", "3,3", "--dtype", "f4,("], "'f4,(' is no dtype"),
        (
            ["--x", f"9,{LONG}", "--w", "3,3"],
            "Invalid value for '--x': 9999999999... has more than 100 digits",
        ),
        (
            ["--x", "9,9", "--w", "3,3", "--stride", LONG],
            "'--stride': 9999999999... has more than 100 digits",
        ),
        (["--x", "9,9", "--w", "3,3", "--groups", LONG], "Invalid value for '--groups'"),
        (["--x", "9,9", "--w", "3,3", "--fillvalue", LONG], "'--fillvalue': 9999999999... has more than"),
        (
            ["--x", "9,9", "--w", "3,3", "--backend", "cpu-private", "--config", f"tile={LONG}"],
            "--config tile: 9999999999... has more than 100 digits",
        ),
        (["--x", "9,9", "--w", "3,3", "--stride", "0"], "stride must be at least 1"),
        (["--x", "9,9", "--w", "3,3", "--stride", "1,2,3"], "whole numbers"),
        (["--x", "9,9", "--w", "3,3", "--padding", "sane"], "valid, same, full"),
        (["--x", "9,9", "--w", "3,3", "--accuracy", "high"], "elementwise, normwise or a number"),
        (["--x", "9,9", "--w", "3,3", "--backend", "tpu"], "'tpu' is unknown"),
        (["--x", "9,9", "--w", "3,3", "--config", "tile=3,3"], "options of one rung"),
    ],
)
def test_explain_refuses(arguments: list[str], says: str) -> None:
    assert says in refused("explain", *arguments)


def test_explain_fails_when_nothing_serves() -> None:
    result = run("explain", "--x", "9,9", "--w", "3,3", "--backend", "numpy", "--device", "gpu")
    assert result.exit_code == 2
    assert "downloads nothing unasked" in result.stdout
    assert result.stderr == "convpar: no backend can do this\n"


# -- demo


@pytest.fixture
def made_up() -> Any:
    """A list; the backends put into it are unregistered afterwards."""
    added: list[Any] = []
    yield added
    for backend in added:
        if registry.find(backend.name) is backend:
            convpar.unregister(backend.name)


@dataclass
class Made:
    """A backend that passes everything to another one and may spoil the result."""

    name: str
    reason: str | None = None
    spoil: Any = None
    options: dict[str, Any] = field(default_factory=dict)
    served_by: str = "cpu-private"
    refusal: str | None = None

    contract = convpar.backend.CONTRACT_VERSION
    summary = "somebody else's work"
    builds_on = None

    @property
    def capabilities(self) -> Any:
        return registry.find(self.served_by).capabilities  # type: ignore[union-attr]

    def unavailable(self) -> str | None:
        return self.reason

    def source(self) -> tuple[tuple[str, str], ...]:
        return (("made.cu", "// made\n"),)

    def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
        if self.refusal and problem.kh == 7:
            return Refusal(self.refusal)
        made = registry.find(self.served_by).plan(problem, layouts, device, None)  # type: ignore[union-attr]
        if self.spoil is not None:
            right = made.run

            def wrong(x: Any, w: Any, bias: Any, out: Any, **options: Any) -> None:
                right(x, w, bias, out, **options)
                self.spoil(out)

            made.run = wrong
        return made


def demo(tmp_path: Path, *arguments: str) -> tuple[Result, Path]:
    target = tmp_path / "out.png"
    return run("demo", "--out", target, "--size", "64", *arguments), target


def test_demo_compares_and_draws(tmp_path: Path) -> None:
    result, target = demo(tmp_path, "--backend", "cpu-*")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "64 x 75 pixels" in result.stdout
    lines = result.stdout.splitlines()
    for rung in convpar.list_backends():
        if rung.name not in CPU_RUNGS:
            continue
        missing = rung.unavailable()
        if missing is not None:
            left_out = next(line for line in lines if line.startswith("not run: ") and rung.name in line)
            assert missing in left_out
            continue
        row = next(line for line in lines if f" {rung.name} " in line)
        # The picture has no channels to sum over.
        assert (
            "takes none" if rung.name in ("cpu-amx", "cpu-ifma", "cpu-pairs", "cpu-amx8") else " yes"
        ) in row
    drawn = cv2.imread(str(target))
    assert drawn.shape[1] == 1920
    assert np.ptp(drawn) == 255
    assert [p.name for p in tmp_path.iterdir()] == ["out.png"]


@pytest.mark.parametrize("extension", ["pdf", "svg"])
def test_demo_draws_other_formats(tmp_path: Path, extension: str) -> None:
    target = tmp_path / f"out.{extension}"
    assert run("demo", "--out", target, "--size", 32, "--backend", "cpu-private").exit_code == 0
    assert target.read_bytes().startswith({"pdf": b"%PDF", "svg": b"<?xml"}[extension])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda out: out.__setitem__((0, 0, 3, 5), out[0, 0, 3, 5] + 1),
        lambda out: out.__setitem__((0, 2, -1, -1), np.nan),
        lambda out: out.__imul__(np.float32(1 + 3e-5)),
        lambda out: (_ for _ in ()).throw(RuntimeError("it broke")),
    ],
    ids=["one element", "nan", "slightly off", "raises"],
)
def test_demo_finds_a_wrong_rung(tmp_path: Path, made_up: list[Any], spoil: Any) -> None:
    made_up.append(Made("wrong", spoil=spoil))
    registry.register(made_up[-1])
    result, target = demo(tmp_path, "--backend", "[cw]*")
    assert result.exit_code == 1
    assert "wrong is wrong: Blur (7 x 7)" in result.stdout
    assert result.stderr == "convpar: a rung gave a wrong result, so no picture was written\n"
    assert not target.exists()
    assert "cpu-private is wrong" not in result.stdout


def test_demo_tells_what_is_left_out(tmp_path: Path, made_up: list[Any]) -> None:
    made_up.append(Made("picky", refusal="no sevens"))
    made_up.append(Made("absent", reason="it is away"))
    for backend in made_up:
        registry.register(backend)
    result, target = demo(tmp_path, "--backend", "[cpa]*")
    assert result.exit_code == 0
    assert "yes, 4 kernels" in result.stdout
    assert "picky left out: Blur (7 x 7)" in result.stdout
    assert "no sevens" in result.stdout
    assert "not run: absent: it is away" in result.stdout
    assert target.exists()


def test_demo_refuses_beforehand(tmp_path: Path, made_up: list[Any]) -> None:
    assert "must end in .png, .pdf, .svg" in refused("demo", "--out", tmp_path / "out.jpg")
    assert "there is no folder" in refused("demo", "--out", tmp_path / "none" / "out.png")
    assert "no backend matches" in refused("demo", "--out", tmp_path / "out.png", "--backend", "tpu-*")
    made_up.append(Made("absent", reason="it is away"))
    registry.register(made_up[-1])
    assert "absent: it is away" in refused("demo", "--out", tmp_path / "out.png", "--backend", "absent")


def test_demo_says_how_to_see_gpu_rungs(monkeypatch: pytest.MonkeyPatch, made_up: list[Any]) -> None:
    from convpar.cli import demo as demo_module

    class GpuMade(Made):
        @property
        def capabilities(self) -> Any:
            return convpar.backend.Capabilities(device="gpu")

    missing = [GpuMade("gpu-made", reason="there is no GPU")]
    monkeypatch.delenv("CONVPAR_GPU", raising=False)
    assert any("CONVPAR_GPU=emulate convpar demo" in note for note in demo_module._notes([], missing))
    monkeypatch.setenv("CONVPAR_GPU", "emulate")
    assert not any("CONVPAR_GPU=emulate convpar" in note for note in demo_module._notes([], missing))
    assert not any("CONVPAR_GPU" in note for note in demo_module._notes([], [Made("cpu-made", reason="no")]))


def test_demo_marks_emulated_rungs(monkeypatch: pytest.MonkeyPatch) -> None:
    from convpar.cli import demo as demo_module

    class GpuMade(Made):
        @property
        def capabilities(self) -> Any:
            return convpar.backend.Capabilities(device="gpu")

    picture = np.zeros((3, 8, 8), np.float32)
    rungs: list[Any] = [Made("cpu-made"), GpuMade("gpu-made")]
    for value, label in ((" emulate:reverse", "gpu-made, emulated"), ("", "gpu-made")):
        monkeypatch.setenv("CONVPAR_GPU", value)
        rows, _ = demo_module.compare(picture, (), rungs)
        assert [row.label for row in rows] == ["SciPy", "cpu-made", label]
        assert any("say nothing about a GPU" in note for note in demo_module._notes(rows, [])) == bool(value)


def test_demo_says_of_how_many_kernels_a_time_is() -> None:
    from convpar.cli.demo import Row, _label

    scipy = Row("SciPy", seconds={0: 1.0, 1: 2.0})
    assert _label(scipy, scipy) == "SciPy"
    assert _label(Row("cpu-few", seconds={1: 0.5}), scipy) == "cpu-few (1 of 2 kernels)"
    assert _label(Row("gpu-all", emulated=True, seconds={0: 0.5, 1: 0.5}), scipy) == "gpu-all, emulated"


def test_demo_ratios_are_over_what_both_took() -> None:
    from convpar.cli.demo import Row

    fast = Row("fast", seconds={0: 1.0, 2: 3.0})
    slow = Row("slow", seconds={0: 2.0, 1: 100.0, 2: 10.0})
    assert fast.speed(slow) == 3.0
    assert slow.speed(fast) == 1 / 3
    assert fast.speed(Row("none")) is None


# -- what is shared


def test_config_values_are_read_as_options_take_them() -> None:
    pairs = ["a=1", "b=2,3", "c=none", "d=True", "e=global", "f=-4", "g="]
    assert common.read_config(pairs) == {
        "a": 1,
        "b": (2, 3),
        "c": None,
        "d": True,
        "e": "global",
        "f": -4,
        "g": "",
    }
    assert common.read_config([]) is None


def test_json_of_what_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_json({"a": np.float32(0.5), "b": np.dtype("uint8"), "c": {1}, "d": Path("x")})
    assert json.loads(capsys.readouterr().out) == {"a": 0.5, "b": "uint8", "c": [1], "d": "x"}


def test_one_line() -> None:
    assert common.one_line("two\n  lines\tand more ") == "two lines and more"
