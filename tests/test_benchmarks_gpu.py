"""The published GPU experiments: the figures they are held against, and their logic, on the emulator."""

from __future__ import annotations

import dataclasses
import json
import re
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import registry
from convpar.backend import Capabilities, Device, ErrorContract, Layout, Layouts, resolve_config
from convpar.backends.gpu import ceilings, executors
from convpar.backends.gpu.executors.emulator import Emulator, Settings, compiler
from convpar.backends.gpu.launch import Limits
from convpar.backends.gpu.pipeline import STAGES, Span
from convpar.bench import machine
from convpar.bench.results import RecordFile, ResultsError
from convpar.cases import Case, find
from convpar.choose import choose

pytest.importorskip("click", reason="the experiments need click: pip install 'convpar[cli]'")
pytest.importorskip("rich", reason="the experiments need rich: pip install 'convpar[cli]'")
import click
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    # They live in the repository, not in the package; behind whatever is installed.
    sys.path.append(str(ROOT))
from benchmarks.gpu import __main__ as command  # noqa: E402
from benchmarks.gpu import counters, device, document, images, ladder, published, streams, widths  # noqa: E402
from benchmarks.gpu.check import Judge  # noqa: E402
from benchmarks.gpu.reasons import REASONS  # noqa: E402
from benchmarks.gpu.records import GpuRecord, file_in, written  # noqa: E402
from benchmarks.gpu.session import Contender, Session, planned  # noqa: E402
from benchmarks.gpu.steps import BASELINE, BATCHES, STEPS, Step, steps  # noqa: E402

GPU = {"gpu": "Some GPU"}
SMALL = Case(name="small", x_shape=(3, 2, 11, 13), w_shape=(4, 2, 3, 3))
INTEGERS = dataclasses.replace(SMALL, name="integers", x_dtype="int32", w_dtype="int32")


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if compiler() is None:
        pytest.skip("the emulator needs a C++ compiler")
    monkeypatch.setenv("CONVPAR_GPU", "emulate")


@pytest.fixture
def place() -> device.Place:
    return device.find()


@pytest.fixture
def file(tmp_path: Path) -> RecordFile[GpuRecord]:
    return RecordFile(GpuRecord, tmp_path / "some-gpu.json", GPU)


def call(*arguments: str, **env: str) -> Result:
    return CliRunner(env=env).invoke(command.main, list(arguments))


# -- published figures


def test_every_row_is_read() -> None:
    rows = published.figures()
    text = published.FILE.read_text(encoding="utf-8").splitlines()
    assert len(rows) == len(text) - 1
    assert {f.report for f in rows} == set("ABCDE")
    final = published.find("C", "final", "op_time", n=10000, layer=1)
    assert final is not None
    assert (final.value, final.unit) == (7.430304, "ms")
    assert published.op_seconds("B", "baseline", n=None, layer="both") == 15.0


def test_a_figure_that_several_rows_could_be_is_an_error() -> None:
    with pytest.raises(LookupError, match="report C, constant, op_time, 10000"):
        published.find("C", "constant", "op_time", n=10000, layer=1)
    found = published.find("C", "constant", "op_time", n=10000, layer=1, config={"tile": "8"})
    assert found is not None
    assert found.value == 28.91135


def test_derived_rows_are_left_out_unless_asked_for() -> None:
    assert published.find("D", "index-reuse", "kernel_time") is None
    found = published.find("D", "index-reuse", "kernel_time", config={"vs": "tensorcore", "metric": "change"})
    assert found is not None
    assert found.value == -50


@pytest.mark.parametrize("step", STEPS, ids=lambda s: f"{s.report}-{s.section}")
def test_every_step_has_its_figures(step: Step) -> None:
    for n in BATCHES[step.report]:
        times = ladder._published(step, n)
        assert all(t is not None and 1e-5 < t < 20 for t in times.values()), n


def test_no_step_of_a_report_is_forgotten() -> None:
    elsewhere = {("B", "pytorch"), ("B", "requirement"), ("C", "constant"), ("C", "cpu"), ("C", "tile-sweep")}
    timed = {(f.report, f.section) for f in published.figures() if f.quantity == "op_time"}
    assert timed - elsewhere == {(s.report, s.section) for s in STEPS}
    assert all(any(s.section == BASELINE[report] for s in steps(report)) for report in BATCHES)


@pytest.mark.parametrize(
    "step", [s for s in STEPS if s.rung is not None], ids=lambda s: f"{s.report}-{s.section}"
)
def test_every_step_names_a_rung_and_options_that_exist(step: Step, place: device.Place) -> None:
    assert step.rung is not None
    rung = registry.find(step.rung)
    assert rung is not None
    for layer in ladder.LAYERS:
        contender = ladder.contender(step, layer, 100)
        resolved = resolve_config(rung.options, contender.config, rung.name)
        assert step.options(layer).items() <= resolved.items()
        case = find(f"network-{layer}-n100")
        x, w = (np.zeros(s, np.float32) for s in (case.x_shape, case.w_shape))
        plan = planned(contender, case, x, w, None, place)
        assert not isinstance(plan, str), plan


def test_steps_without_a_rung_say_why() -> None:
    assert all(step.note for step in STEPS if step.rung is None)


def test_options_that_a_rung_has_anyway_are_left_out() -> None:
    assert Contender.of("gpu-naive", {"tile": (16, 16), "lanes": "rows"}) == Contender.of(
        "gpu-naive", {"lanes": "rows"}
    )
    assert (
        str(Contender.of("gpu-tiled", {"loading": "full", "tile": (8, 4)}))
        == "gpu-tiled loading=full tile=8x4"
    )
    assert written({"restrict": True, "loops": "pragma"}) == "loops=pragma restrict=true"


# -- the check


def judged(case: Case, change: Callable[[Any], None], contract: ErrorContract | None = None) -> str:
    x, w = case.arrays(np.random.default_rng(0))
    out = convpar.conv2d(x, w, backend="cpu-private")
    change(out)
    return (
        Judge(case, x, w, device.find()).judge(out, contract or ErrorContract(flushes_subnormals=True)).reason
    )


@pytest.mark.parametrize("case", [SMALL, INTEGERS], ids=lambda c: c.name)
def test_a_right_answer_passes(case: Case) -> None:
    assert judged(case, lambda out: None) == ""


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (SMALL, lambda out: out.__setitem__((2, 3, 8, 10), np.nan)),
        (SMALL, lambda out: out.__setitem__((2, 3, 8, 10), out[2, 3, 8, 10] + 1e-4)),
        (SMALL, lambda out: out.__setitem__((0, 0), np.roll(out[0, 0], 1, axis=1))),
        (INTEGERS, lambda out: out.__setitem__((2, 3, 8, 10), out[2, 3, 8, 10] + 1)),
    ],
    ids=["unwritten", "inaccurate", "shifted", "off by one"],
)
def test_a_wrong_answer_fails(case: Case, change: Callable[[Any], None]) -> None:
    assert "elements are wrong: element (" in judged(case, change)


def test_a_contract_gives_its_own_room() -> None:
    def nudge(out: Any) -> None:
        out += 1e-3

    assert judged(SMALL, nudge)
    assert not judged(SMALL, nudge, ErrorContract(sum_dtype="float16"))
    assert not judged(SMALL, nudge, ErrorContract(operand_dtype="float16"))
    assert not judged(SMALL, nudge, ErrorContract("normwise", 1e3))


def test_slices_are_numbered_through(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import check

    monkeypatch.setattr(check, "SLICE_BYTES", 1)
    assert not judged(SMALL, lambda out: None)
    assert "element (2, 3, 8, 10)" in judged(SMALL, lambda out: out.__setitem__((2, 3, 8, 10), 7))


def test_a_wrong_reference_is_noticed(monkeypatch: pytest.MonkeyPatch, place: device.Place) -> None:
    x, w = SMALL.arrays(np.random.default_rng(0))
    right = Judge._correlated
    monkeypatch.setattr(Judge, "_correlated", lambda self, a, b: right(self, a, b) + 1e-9)
    with pytest.raises(RuntimeError, match="there is nothing to check against"):
        Judge(SMALL, x, w, place)


# -- a session


class Spoiled:
    """gpu-naive's plan, and one element of the answer wrong."""

    def __init__(self, plan: Any) -> None:
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def run(self, x: Any, w: Any, bias: Any, out: Any, **more: Any) -> None:
        self._plan.run(x, w, bias, out, **more)
        out[-1, -1, -1, -1] += 1


class Wrong:
    """A backend whose every answer has one wrong element."""

    contract, name, summary, builds_on = 1, "gpu-wrong", "one wrong element", "gpu-naive"
    capabilities = Capabilities(device="gpu")

    @property
    def options(self) -> Any:
        return self._naive().options

    @staticmethod
    def _naive() -> Any:
        return registry.find("gpu-naive")

    def unavailable(self) -> str | None:
        return None

    def plan(self, *given: Any) -> Any:
        return Spoiled(self._naive().plan(*given))


@pytest.fixture
def wrong() -> Iterator[None]:
    convpar.register(Wrong())
    yield
    convpar.unregister("gpu-wrong")


def test_times_are_checked_and_recorded(
    place: device.Place, file: RecordFile[GpuRecord], wrong: None
) -> None:
    session = Session(place, quick=True, file=file, commit="abc")
    large = Contender.of("gpu-tiled", {"tile": (32, 32), "loading": "full"})
    unknown = Contender.of("gpu-no-such")
    contenders = [
        Contender.of("gpu-naive"),
        Contender.of("gpu-constant"),
        large,
        unknown,
        Contender.of("gpu-wrong"),
    ]
    results = session.time("trial", SMALL, contenders)
    assert list(results) == contenders
    right = results[contenders[1]]
    assert right.times is not None
    assert (right.times.repeats, right.error, right.reason) == (3, "", "")
    assert right.seconds == right.times.median
    assert 0 < right.worst < 1
    assert results[large].reason.startswith("needs 1156 threads a block")
    assert results[unknown].reason == "convpar has no such rung"
    last = results[contenders[-1]]
    assert last.seconds is None
    assert "1 elements are wrong: element (2, 3, 8, 10)" in last.error
    assert session.errors == [f"trial small gpu-wrong: {last.error}"]

    again = RecordFile(GpuRecord, file.path, GPU)
    by_key = {(r.backend, written(r.config)): r for r in again.records}
    assert len(by_key) == 5
    recorded = by_key["gpu-constant", ""]
    assert recorded.median == pytest.approx(right.times.median, rel=1e-4)
    assert recorded.checked == "every element"
    assert recorded.contract == "elementwise"
    naive = by_key["gpu-naive", ""].median
    assert naive is not None
    assert recorded.ratios["gpu-naive"] == pytest.approx(naive / right.times.median, rel=1e-3)
    assert recorded.versions["convpar"] == convpar.__version__
    assert recorded.date
    refused = by_key["gpu-tiled", "loading=full tile=32x32"]
    assert refused.median is None
    assert refused.refused == results[large].reason
    assert by_key["gpu-wrong", ""].error == last.error


def test_a_newer_record_takes_the_place_of_an_older_one(file: RecordFile[GpuRecord]) -> None:
    old = GpuRecord(
        experiment="widths", case="c", backend="gpu-naive", config={"tile": (8, 8)}, median=2.0, spread=0.0
    )
    file.merge([old])
    file.save()
    again = RecordFile(GpuRecord, file.path, GPU)
    again.merge([dataclasses.replace(old, median=1.0), dataclasses.replace(old, config={"tile": (4, 4)})])
    again.save()
    rows = json.loads(file.path.read_text())["records"]
    assert [(r["config"], r["median"]) for r in rows] == [({"tile": [4, 4]}, 2.0), ({"tile": [8, 8]}, 1.0)]
    assert len(RecordFile(GpuRecord, file.path, GPU).records) == 2


def test_a_file_is_named_after_the_gpu_and_of_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "hardware", lambda device: {"gpu": "NVIDIA H999"})
    mine = file_in(tmp_path)
    assert mine.path == tmp_path / "nvidia-h999.json"
    mine.save()
    mine.path.rename(tmp_path / "nvidia-h998.json")
    monkeypatch.setattr(machine, "hardware", lambda device: {"gpu": "NVIDIA H998"})
    with pytest.raises(ResultsError, match="H999"):
        file_in(tmp_path)


# -- the experiments


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The experiments start ``python -m benchmarks...``, which is found in the current folder alone."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)


@pytest.mark.parametrize("experiment", command.EXPERIMENTS)
def test_every_experiment_runs(experiment: str) -> None:
    done = call(experiment, "--quick", "-r", "gpu-tiled-constant", "-r", "gpu-tiled")
    assert done.exit_code == 0, done.output
    assert "summary" in done.output
    assert "WRONG" not in done.output


def test_the_ladder_stands_beside_the_published_figures() -> None:
    done = call("ladder", "--quick", "-r", "gpu-constant")
    lines = [line.split() for line in done.stdout.splitlines()]
    first = next(line for line in lines if line[:1] == ["constant"])
    assert first[:3] == ["constant", "gpu-constant", "tile=16x16"]
    # Both layers at N = 100, and 727.2 / 584.4 us.
    assert first[-5:] == ["138", "us", "447", "us", "1.24x"]
    assert any(line[:2] == ["baseline", "not"] for line in lines)
    assert any("left" in line and "out" in line for line in lines if line[:1] == ["tiled"])


def test_a_wrong_rung_is_named_and_gives_exit_code_1(wrong: None) -> None:
    done = call("ladder", "--quick", "-r", "gpu-wrong")
    assert done.exit_code == 1
    assert (
        "WRONG: ladder quick-network-1 gpu-wrong: 1 elements are wrong: element (2, 3, 15, 15)" in done.stdout
    )


def test_refusals_are_shown_with_their_reason() -> None:
    done = call("blocks", "--quick", "-r", "gpu-tiled")
    assert "32x32 full: needs 1444 threads a block" in done.stdout
    assert "1024: refused" in done.stdout
    assert "at least 2x faster, 2.8x at 32 threads a block" in done.stdout


def test_all_widths_of_the_sweep_are_there() -> None:
    done = call("widths", "--quick", "-r", "gpu-constant")
    table = done.stdout.partition("gpu-constant, tiny shapes")[2].partition("gpu-naive, lanes")[0]
    rows = {line.split()[0]: line for line in table.splitlines() if line[:1].isdigit()}
    assert set(rows) == {str(w) for w in widths.WIDTHS}
    assert rows["8"].endswith("5.06x")
    assert {c.config.get("lanes") for c in widths.contenders() if c.rung == "gpu-tiled"} == {None, "rows"}


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (["ladder"], {"CONVPAR_GPU": "emulate"}, "the emulator's times say nothing"),
        (
            ["ladder", "--quick", "--json-dir", "results"],
            {"CONVPAR_GPU": "emulate"},
            "neither the emulator nor --quick",
        ),
        (["ladder", "--quick"], {"CONVPAR_GPU": "no-such"}, "must be 'cuda' or 'emulate'"),
    ],
)
def test_where_there_is_nothing_to_measure(
    arguments: list[str], env: dict[str, str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = call(*arguments, **env)
    assert done.exit_code == 2
    assert "nothing to measure" in done.output
    assert message in done.output
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from convpar.backends.gpu.executors import cupy

    monkeypatch.setattr(cupy, "_missing", lambda: "CuPy finds no GPU")
    done = call("all", CONVPAR_GPU="cuda")
    assert done.exit_code == 2
    assert "nothing to measure: CuPy finds no GPU" in done.output


# -- streams


def spans(*rows: tuple[str, float, float], queue: int = 0) -> list[Span]:
    return [Span(k, queue, stage, start, stop) for k, (stage, start, stop) in enumerate(rows)]


def test_busy_time_counts_no_instant_twice() -> None:
    given = spans(
        ("copy in", 0, 4), ("copy in", 1, 2), ("copy in", 3, 6), ("compute", 5, 9), ("copy in", 8, 9)
    )
    assert streams.busy(given, "copy in") == 7
    assert streams.busy(given, "compute") == 4
    assert streams.busy(given, "copy out") == 0
    numbers = streams._numbers(given)
    assert numbers["device"] == 9
    assert numbers["overlap"] == 2


@pytest.mark.parametrize("pinned", [True, False])
def test_a_timeline_has_every_stage_of_every_slice(place: device.Place, pinned: bool) -> None:
    x, w = SMALL.arrays(np.random.default_rng(0))
    empty = convpar.empty_pinned if pinned else np.empty
    out = empty(SMALL.problem().out_shape, np.float32)
    if pinned:
        given, x = x, convpar.empty_pinned(x.shape, x.dtype)
        x[...] = given
    contender = Contender.of("gpu-naive", {"slice": 1, "streams": 2}, "pinned" if pinned else "pageable")
    plan = planned(contender, SMALL, x, w, out, place)
    timeline = plan.timeline(x, w, None, out)  # type: ignore[union-attr]
    np.testing.assert_allclose(out, convpar.conv2d(x, w, backend="numpy"), rtol=1e-5, atol=1e-6)
    assert sorted((s.slice, s.stage) for s in timeline) == [
        (k, stage) for k in range(3) for stage in sorted(STAGES)
    ]
    for k in range(3):
        at = {s.stage: s for s in timeline if s.slice == k}
        assert {s.queue for s in at.values()} == {k % 2}
        assert 0 <= at["copy in"].start <= at["copy in"].stop <= at["compute"].start
        assert at["compute"].stop <= at["copy out"].start <= at["copy out"].stop


def test_a_timeline_is_of_host_arrays(place: device.Place) -> None:
    x, w = SMALL.arrays(np.random.default_rng(0))
    plan = planned(Contender.of("gpu-naive"), SMALL, x, w, None, place)
    with pytest.raises(ValueError, match="arrays on the device"):
        plan.timeline(x, w, None, np.empty(SMALL.problem().out_shape, np.float32))  # type: ignore[union-attr]


def test_the_picture_has_a_bar_for_each_stage(tmp_path: Path) -> None:
    pytest.importorskip(
        "matplotlib", reason="the timeline is drawn by matplotlib: pip install 'convpar[demo]'"
    )
    one = spans(("copy in", 0, 1), ("compute", 1, 3), ("copy out", 3, 4))
    two = [*one, *spans(("copy in", 1, 2), ("compute", 2, 5), ("copy out", 5, 6), queue=1)]
    figure = streams.timeline_figure(["serial", "two streams"], [one, two], "a title")
    first, second = figure.axes
    assert [len(ax.collections) for ax in (first, second)] == [3, 6]
    # The second computation waits for the first to end.
    starts = sorted(c.get_paths()[0].get_extents().x0 for c in second.collections)
    assert starts == pytest.approx([0, 1000, 1000, 3000, 3000, 5000])
    figure.savefig(tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


# -- counters

CSV = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Grid Size","gpu__time_duration.sum","smsp__inst_executed.sum"
"","","","","nsecond","inst"
"0","1","convpar_naive","(1, 4, 3)","1,234","5000"
"1","1","convpar_naive","(1, 4, 3)","2000","n/a"
"""


def test_counters_are_read() -> None:
    rows = counters.parse(CSV)
    assert [counters.numbers(row) for row in rows] == [
        {"time, ns": 1234.0, "instructions": 5000.0},
        {"time, ns": 2000.0},
    ]
    with pytest.raises(ValueError, match="ncu gave no table"):
        counters.parse("==ERROR== no permission")


def test_counters_that_the_gpu_lacks_are_not_asked_for() -> None:
    asked = counters.known("gpu__time_duration  ns  time\nsmsp__inst_executed  inst  instructions\n")
    assert asked == ["gpu__time_duration.sum", "smsp__inst_executed.sum"]
    assert ",".join(asked) in counters.command("ncu", Path("log"), asked, quick=True)


def test_launches_meet_their_rows(place: device.Place) -> None:
    session = Session(place, quick=True, only=["gpu-im2col", "gpu-tiled"])
    made = list(counters.launched(session, run=False))
    assert made == list(counters.launched(session, run=True))
    assert {launch.kernel for launch in made} == {"naive", "tiled", "im2col", "gemm"}
    rows = [{"Kernel Name": f"convpar_{launch.kernel}", "smsp__inst_executed.sum": "7"} for launch in made]
    results = counters.matched(made, rows)
    assert [r.kernel for r in results] == [launch.kernel for launch in made]
    assert results[0].numbers == {"instructions": 7.0}
    with pytest.raises(
        click.ClickException, match=f"ncu saw {len(made) - 1} launches, and {len(made)} were made"
    ):
        counters.matched(made, rows[1:])


# -- ceilings


def test_the_loop_that_measures_the_peak_compiles() -> None:
    cupy = pytest.importorskip("cupy", reason="compiling for a GPU needs CuPy")
    nvrtc = cupy.cuda.nvrtc
    try:
        nvrtc.getVersion()
    except (RuntimeError, ImportError) as e:
        pytest.skip(f"CuPy finds no NVRTC: {e}")
    for kind in ("float32", "float64", "int32", "int64"):
        program = nvrtc.createProgram(ceilings.source(kind), "ceilings.cu", [], [])
        nvrtc.compileProgram(program, ("-std=c++17", "-arch=sm_80"))
        ptx = nvrtc.getPTX(program)
        if kind == "float32":
            # One fused multiply-add for each sum and turn, and nothing in memory.
            assert (ptx if isinstance(ptx, str) else ptx.decode()).count("fma.rn.f32") >= 16 * ceilings.CHAINS
        nvrtc.destroyProgram(program)


def test_there_is_no_peak_of_a_type_without_a_loop() -> None:
    with pytest.raises(ValueError, match="kind must be one of float32"):
        ceilings.peak_fma("complex64")


# -- the driver for memory checkers


def test_small_shapes_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    driver = runpy.run_path(str(ROOT / "tests" / "gpu" / "small_shapes.py"))
    with pytest.raises(SystemExit) as ended:
        driver["main"].main(["gpu-constant"], standalone_mode=False)
    assert ended.value.code == 0
    assert "gpu-constant: " in capsys.readouterr().out


def test_small_shapes_see_a_wrong_element(wrong: None) -> None:
    driver = runpy.run_path(str(ROOT / "tests" / "gpu" / "small_shapes.py"))
    rung = registry.find("gpu-wrong")
    assert driver["run"](rung, driver["SHAPES"][0], {}, device=False) == "1 of 6160 elements are wrong"


# -- the choosers' estimates


def test_the_chosen_rung_is_the_one_that_was_measured_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "benchmarks" / "results" / "studies"
    h200 = Limits(name="H200", shared=227 * 1024, fma_rate=132 * 128 * 1.98e9, bandwidth=4.8e12)
    monkeypatch.setattr(executors, "select", lambda: Emulator(Settings(limits=h200)))
    measured: dict[str, dict[str, float]] = {}
    for r in RecordFile(GpuRecord, folder / "nvidia-h200.json").records:
        asked = r.experiment == "images" or (r.experiment == "ladder" and r.case.startswith("network-"))
        if asked and not r.config and r.median is not None and r.case.endswith(("-n10000", "-valid")):
            measured.setdefault(r.case, {})[r.backend] = r.median
    assert len(measured) == 2 + len(images.FILTERS)
    for name, times in measured.items():
        problem = find(name).problem()
        layouts = Layouts(
            Layout.contiguous(problem.x_shape, 4),
            Layout.contiguous(problem.w_shape, 4),
            None,
            Layout.contiguous(problem.out_shape, 4),
        )
        choice = choose("gpu", problem, layouts, Device("gpu"), None)
        candidates = {backend.name: times[backend.name] for backend, _ in choice.candidates}
        assert len(candidates) > 4
        assert choice.backend is not None
        assert choice.backend.name == min(candidates, key=candidates.__getitem__), name


# -- the document

STUDIES = ROOT / "benchmarks" / "results" / "studies"


@pytest.mark.parametrize("name", document.TABLES)
def test_every_table_is_made_from_the_committed_results(name: str) -> None:
    text = document.table(name, STUDIES)
    assert text.startswith("**NVIDIA H200**")
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line.startswith("|")]
    assert all(len(row) == len(rows[0]) for row in rows)
    # A record under other options than those asked for would leave its cells empty.
    cells = [cell.strip() for row in rows[2:] for cell in row]
    assert sum(not cell for cell in cells) <= len(cells) / 4
    marks = (ROOT / "docs" / "gpu-ladder.md").read_text(encoding="utf-8")
    assert f"<!-- results:{name} -->" in marks


def test_ratios_stand_beside_the_published_ones() -> None:
    lines = document.table("gpu-report-a", STUDIES).splitlines()
    (row,) = [line.split("|")[1:-1] for line in lines if line.startswith("| 10000 | unrolled |")]
    cells = [cell.strip() for cell in row]
    # 12.24 over 11.44 ms, 55.41 over 48.12 ms, and both together.
    assert (cells[6], cells[10], cells[12]) == ("1.07", "1.15", "1.14")
    assert float(cells[5]) > 1.5


def test_there_may_be_no_results(tmp_path: Path) -> None:
    assert "Not measured yet" in document.table("gpu-rungs", tmp_path)


def test_a_gpu_whose_counters_nobody_read_has_tables_and_no_reasons(tmp_path: Path) -> None:
    (path,) = STUDIES.glob("*.json")
    whole = json.loads(path.read_text(encoding="utf-8"))
    whole["records"] = [r for r in whole["records"] if r["experiment"] != "counters"]
    (tmp_path / path.name).write_text(json.dumps(whole), encoding="utf-8")
    assert "Not measured yet" in document.table("gpu-reasons", tmp_path)
    assert document.table("gpu-rungs", tmp_path) == document.table("gpu-rungs", STUDIES)


@pytest.mark.parametrize("reason", REASONS, ids=lambda r: f"{r.report}, {r.about}")
def test_a_reason_quotes_counters_that_are_there(reason: Any) -> None:
    (path,) = STUDIES.glob("*.json")
    records = RecordFile(GpuRecord, path).records
    text = document._reason(document.Found(records), reason)
    assert "{" not in text
    assert reason.counters
    if reason.section:
        measured, published = (float(word) for word in re.findall(r"\d+\.\d+", text.partition("): ")[0])[-2:])
        # It is a contradiction: faster there and slower here, or by another half.
        assert (measured - 1) * (published - 1) < 0 or not 1 / 1.5 < measured / published < 1.5
    without = document.Found(r for r in records if r.experiment != "counters")
    with pytest.raises(ValueError, match="has no"):
        document._reason(without, reason)
