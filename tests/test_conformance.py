"""Every registered backend against every check; nothing here knows any of their names.

CONVPAR_EXAMPLES says how many problems a check draws. Where there is no GPU the GPU's backends run on
the emulator, which compiles kernels as it goes, with a share of that.
"""

from __future__ import annotations

import io
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

pytest.importorskip("scipy", reason="the oracle is SciPy: pip install 'convpar[test]'")
pytest.importorskip("hypothesis", reason="problems are drawn by Hypothesis: pip install 'convpar[test]'")

from convpar import registry
from convpar.backend import Backend, Option, Refusal
from convpar.conformance import (
    CHECKS,
    Case,
    Memory,
    NotApplicable,
    Outcome,
    Report,
    Tally,
    Trial,
    Wrong,
    run_check,
    verify,
)
from convpar.conformance.properties import resized

EXAMPLES = int(os.environ.get("CONVPAR_EXAMPLES", "200"))
EMULATED_SHARE = 7
SEED = 0


def _available(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many examples to draw for `backend`; skips if this machine can't run it."""
    if backend.unavailable() is None:
        return EXAMPLES
    if backend.capabilities.device == "gpu":
        monkeypatch.setenv("CONVPAR_GPU", "emulate:unchecked")
        if backend.unavailable() is None:
            return max(EXAMPLES // EMULATED_SHARE, 1)
    pytest.skip(f"{backend.name}: {backend.unavailable()}")


@pytest.mark.parametrize("check", CHECKS)
@pytest.mark.parametrize("backend", registry.backends(), ids=lambda b: b.name)
def test_every_backend_passes_every_check(
    backend: Backend, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = _available(backend, monkeypatch)
    found = run_check(backend, check, examples=examples, seed=SEED)
    if found.status == "not applicable":
        pytest.skip(f"{backend.name}: {found.message}")
    assert found.status == "passed", found.message


def test_every_family_of_backends_is_checked() -> None:
    names = [b.name for b in registry.backends()]
    assert all(any(n.startswith(prefix) for n in names) for prefix in registry.FAMILIES)


# -- the suite itself


@pytest.fixture(scope="module")
def first() -> Backend:
    """A backend that this machine runs and that refuses nothing."""
    return registry.backends()[0]


class Elsewhere:
    """A backend that no machine runs."""

    contract = registry.backends()[0].contract
    name = "elsewhere"
    summary = "runs nowhere"
    builds_on = None
    capabilities = registry.backends()[0].capabilities
    options: ClassVar[Mapping[str, Option]] = {}

    def unavailable(self) -> str | None:
        return "there is no such machine"

    def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
        raise AssertionError("planned although unavailable")


class Dies(Elsewhere):
    """A backend that takes its process down."""

    name = "dies"

    def unavailable(self) -> str | None:
        return None

    def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)


def test_checks_have_a_name_and_a_summary() -> None:
    for name, check in CHECKS.items():
        assert check.name == name
        assert len(check.summary) > 20
        assert "\n" not in check.summary


def test_the_same_seed_draws_the_same_problems(first: Backend) -> None:
    def drawn(seed: int) -> list[str]:
        seen: list[str] = []
        trial = Trial(first, "agrees-with-scipy", examples=30, seed=seed)
        from convpar.conformance.strategies import Style

        trial.each(trial.strategy(Style()), lambda case: seen.append(repr(case)))
        return seen

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert len(set(drawn(1))) >= 25


def test_unavailable_backends_are_skipped_with_their_reason_or_fail_where_required(first: Backend) -> None:
    backends = [first, Elsewhere()]
    report = verify(backends, ["declaration", "overflow-raise"], examples=3)
    statuses = {(o.backend, o.check): o.status for o in report.outcomes}
    assert statuses["elsewhere", "declaration"] == "skipped"
    assert statuses[first.name, "declaration"] == "passed"
    assert not report.failures
    assert "there is no such machine" in str(report)
    report = verify(backends, ["declaration"], examples=3, require=["elsewhere"])
    assert [(o.backend, o.message) for o in report.failures] == [
        ("elsewhere", "required, but unavailable: there is no such machine")
    ]
    assert "1 failed" in str(report)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no backend is named 'nobody'; there are .*numpy"):
        verify("nobody")
    with pytest.raises(ValueError, match=r"no check is named 'nothing'; there are .*agrees-with-scipy"):
        verify("numpy", ["nothing"])


def test_other_processes_see_what_this_one_sees(first: Backend) -> None:
    checks = ["conversions", "declaration", "same-bits"]
    here = verify(first, checks, examples=10, seed=3)
    there = verify(first, checks, examples=10, seed=3, jobs=2)
    assert [(o.check, o.status, o.tally) for o in here.outcomes] == [
        (o.check, o.status, o.tally) for o in there.outcomes
    ]


def test_a_process_that_dies_is_a_failure_and_no_more(
    first: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other processes find it as they find any plugin.
    package = tmp_path / "dying-0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: dying\nVersion: 0\n")
    (package / "entry_points.txt").write_text("[convpar.backends]\ndies = dying:Dies\n")
    (tmp_path / "dying.py").write_text(
        "import os, signal\n"
        "from convpar.backends.reference import Reference\n"
        "class Dies(Reference):\n"
        "    name = 'dies'\n"
        "    def plan(self, problem, layouts, device, config):\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.syspath_prepend(str(tmp_path))
    report = verify([Dies(), first], ["conversions", "overflow-raise"], examples=3, jobs=2)
    assert [(o.backend, o.status) for o in report.outcomes] == [
        ("dies", "failed"), ("dies", "failed"), (first.name, "passed"), (first.name, "passed"),
    ]  # fmt: skip
    assert all("the process died (signal 9)" in o.message for o in report.failures)


def test_failures_say_how_to_see_them_again(first: Backend) -> None:
    class OffByOne(type(first)):  # type: ignore[misc]
        name = "off-by-one"

        def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
            made = super().plan(problem, layouts, device, config)
            if not isinstance(made, Refusal):
                run = made.run
                made.run = lambda x, w, bias, out, **how: (
                    run(x, w, bias, out, **how),
                    np.add(out, 1, out=out),
                )
            return made

    backend = OffByOne()
    found = run_check(backend, "agrees-with-scipy", examples=50, seed=4)
    assert found.status == "failed"
    assert "convpar verify off-by-one --check agrees-with-scipy --seed 4 --examples 50" in found.message
    line = next(i for i in found.message.splitlines() if i.startswith("case:"))
    case = eval(line.removeprefix("case:"), {"Case": Case, "Memory": Memory})
    # The one line alone fails in the same way, and passes where it should.
    with pytest.raises(Wrong, match="elements are wrong"):
        case.check(backend)
    case.check(first)
    assert case.problem.outputs == 1
    again = run_check(backend, "agrees-with-scipy", examples=50, seed=4)
    assert again.message == found.message


def test_a_check_without_anything_to_look_at_says_so(first: Backend) -> None:
    with pytest.raises(NotApplicable, match="it has no options"):
        CHECKS["options"](Trial(first, "options"))
    assert run_check(first, "options").status == "not applicable"


def test_a_check_that_stops_by_itself_fails_with_the_place(
    first: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of tune")

    monkeypatch.setattr(Trial, "each", broken)
    found = run_check(first, "conversions")
    assert found.status == "failed"
    assert "the check itself stopped" in found.message
    assert "RuntimeError: out of tune" in found.message


def test_case_check_takes_a_name() -> None:
    case = Case(x_shape=(1, 1, 4, 4), w_shape=(1, 1, 2, 2))
    case.check("numpy")
    with pytest.raises(ValueError, match="no backend named 'nobody'"):
        case.check("nobody")
    with pytest.raises(Wrong, match="refused: accuracy"):
        Case(x_shape=(1, 1, 4, 4), w_shape=(1, 1, 2, 2), accuracy=1e-12).check("numpy")


@pytest.mark.parametrize("axis", ["n", "c", "oc", "oh", "ow"])
def test_resized_cases_have_the_size_asked_for(axis: str) -> None:
    case = Case(
        x_shape=(2, 4, 5, 6), w_shape=(6, 2, 3, 2), groups=2, stride=(2, 3), dilation=(1, 2),
        padding=(4, 3, 2, 1), boundary="mirror", x_dtype="float64",
    )  # fmt: skip
    for size in (1, 2, 7, 40):
        grown = resized(case, axis, size, 10**9)
        assert grown is not None
        assert getattr(grown.problem, axis) == size
        assert grown.problem.macs <= 10**9
    cheap = resized(case, axis, 200, 2000)
    assert cheap is not None
    assert cheap.problem.macs <= 2000
    assert resized(case, axis, 10**6, 1000) is None
    assert resized(case, axis, 0, 1000) is None


def test_cases_resized_by_work_lie_around_it() -> None:
    case = Case(x_shape=(2, 2, 9, 9), w_shape=(3, 2, 3, 3))
    for macs in (1000, 99_999, 100_000, 100_001):
        grown = resized(case, "macs", macs, 10**6)
        assert grown is not None
        assert macs <= grown.problem.macs <= 1.2 * macs + 2 * 2 * 3 * 9 * 100


# -- the command


@pytest.fixture
def command() -> Any:
    """Runs `convpar verify` with arguments."""
    testing = pytest.importorskip("click.testing", reason="the command line needs convpar[cli]")
    pytest.importorskip("rich", reason="the command line needs convpar[cli]")
    from convpar.cli.app import application

    return lambda *arguments: testing.CliRunner().invoke(application, ["verify", *arguments])


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """`Elsewhere` among the backends."""
    registry.register(Elsewhere())
    yield
    registry.unregister("elsewhere")


def test_the_command_prints_a_table_and_what_reproduces_it(command: Any) -> None:
    done = command("numpy", "--check", "o*", "--examples", "20", "--seed", "7")
    assert done.exit_code == 0, done.output
    rows = {line.split()[0]: line.split()[1:] for line in done.output.splitlines() if line.strip()}
    assert rows["check"] == ["numpy"]
    assert (rows["overflow-raise"], rows["options"], rows["outside-capabilities"]) == (
        ["passed"],
        ["-"],
        ["passed"],
    )
    assert "agrees-with-scipy" not in rows
    assert "2 passed, 0 failed, 0 skipped;" in done.output
    assert "--examples 20 --seed 7" in done.output


def test_the_command_shows_refusals_paths_notes_and_failures() -> None:
    console = pytest.importorskip("rich.console", reason="the command line needs convpar[cli]")
    from convpar.cli.verify import show

    refusals = Counter({f"reason {letter}": 9 - i for i, letter in enumerate("abcdefg")})
    tally = Tally(
        examples=100, served=58, refusals=refusals, declared={"left", "right"}, run={"left", "right"}
    )
    tally.notes.append("a word aside")
    report = Report(
        (
            Outcome("one", "first", "passed", tally=tally),
            Outcome("one", "second", "failed", "[3] is wrong\nagain: so", Tally(examples=5)),
            Outcome("two", "first", "skipped", "no such machine"),
            Outcome("two", "second", "skipped", "no such machine"),
        ),
        examples=50,
        seed=8,
    )
    out = console.Console(width=100, record=True, file=io.StringIO())
    show(report, out)
    text = out.export_text()
    assert [line.split() for line in text.splitlines()[:3]] == [
        ["check", "one", "two"], ["first", "passed", "skipped"], ["second", "FAILED", "skipped"],
    ]  # fmt: skip
    for part in (
        "skipped two: no such machine", "one refused 42 of 105 problems:", "9 reason a", "7 for 2 other reasons",
        "one ran the paths left, right", "one: a word aside", "FAILED one second", "[3] is wrong\nagain: so",
        "1 passed, 1 failed, 2 skipped; 105 problems; --examples 50 --seed 8",
    ):  # fmt: skip
        assert part in text


@pytest.mark.usefixtures("elsewhere")
def test_the_command_skips_what_is_unavailable_unless_required(command: Any) -> None:
    done = command("elsewhere", "--check", "declaration")
    assert done.exit_code == 0
    assert "skipped elsewhere: there is no such machine" in done.output.replace("\n", " ")
    done = command("elsewhere", "--check", "declaration", "--require", "else*")
    assert done.exit_code == 1
    assert "FAILED elsewhere declaration" in done.output
    assert "required, but unavailable: there is no such machine" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nobody"], "no backend matches 'nobody'"),
        (["--check", "nothing"], "no check matches nothing; there are agrees-with-scipy"),
        (["numpy", "--require", "nobody"], "no backend matches 'nobody'"),
        (["numpy", "--require", "cpu-*"], "which 'numpy' leaves out"),
        (["--jobs", "0"], "--jobs"),
        (["--examples", "0"], "--examples"),
    ],
)
def test_the_command_says_what_is_wrong_with_the_call(command: Any, arguments: list[str], words: str) -> None:
    done = command(*arguments)
    assert done.exit_code == 2
    assert words in done.output


def test_the_command_lists_the_checks(command: Any) -> None:
    done = command("--list")
    assert done.exit_code == 0
    assert all(name in done.output for name in CHECKS)


@pytest.mark.parametrize("missing", ["scipy", "hypothesis"])
def test_the_command_says_what_to_install(
    command: Any, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [n for n in sys.modules if n.startswith("convpar.conformance")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr("convpar.conformance")
    monkeypatch.setitem(sys.modules, missing, None)
    done = command("numpy")
    assert done.exit_code == 2
    assert f'checking needs {missing}, which isn\'t installed: pip install "convpar[test]"' in done.output


def test_the_command_draws_as_many_problems_as_the_suite() -> None:
    pytest.importorskip("click", reason="the command line needs convpar[cli]")
    from convpar.cli.verify import EXAMPLES as DRAWN

    assert run_check.__kwdefaults__ == {"examples": DRAWN, "seed": 0, "shrink": True}
