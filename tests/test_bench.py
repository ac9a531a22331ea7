"""`convpar bench`: other libraries' answers, the check itself, processes that misbehave, and the command."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convpar
from convpar.backends import cpu
from convpar.bench import check, machine, measure, process
from convpar.bench.libraries import LIBRARIES, PEERS, Cannot, Library, rank_one
from convpar.bench.measure import Bench, Effort, Outcome
from convpar.bench.process import Died, LibraryProcess, first_cores
from convpar.bench.worker import Worker
from convpar.cases import Case, find
from convpar.cli.common import UserError
from convpar.timing import measure_ceilings

click_testing = pytest.importorskip(
    "click.testing", reason="the command needs click: pip install 'convpar[cli]'"
)

TINY = "single-8-k3-float32-valid"
QUICK = Effort(repeats=3, budget=1, call_limit=60)


def make(
    x: tuple[int, ...] = (1, 1, 23, 19),
    w: tuple[int, ...] = (1, 1, 3, 5),
    x_dtype: str = "float32",
    w_dtype: str = "float32",
    **options: Any,
) -> Case:
    return Case(name="made", x_shape=x, w_shape=w, x_dtype=x_dtype, w_dtype=w_dtype, options=options)  # type: ignore[arg-type]


# -- the check


def right_answer(case: Case, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    return convpar.conv2d(x, w, backend="numpy", **case.options)


PROBLEMS = {
    "plain": make(),
    "float64": make(x_dtype="float64", w_dtype="float64"),
    "float16": make(x_dtype="float16", w_dtype="float16"),
    "layer": make((3, 6, 17, 15), (4, 6, 3, 3), padding=(1, 2), stride=2),
    "groups": make((2, 6, 17, 15), (4, 3, 3, 3), groups=2, padding="same", boundary="mirror"),
    "depthwise": make((2, 5, 40, 30), (5, 1, 5, 5), groups=5, padding="full", boundary="wrap"),
    "dilated": make(dilation=(2, 1), padding="same", fillvalue=2.5),
    "flipped": make(w=(1, 1, 4, 2), flip=True, padding="same", boundary="symm"),
    "int32": make(x_dtype="int32", w_dtype="int32", padding="same", fillvalue=7),
    "uint8": make(x_dtype="uint8", w_dtype="float32", dtype="uint8", overflow="saturate", padding="same"),
    "uint8-int32": make(x_dtype="uint8", w_dtype="uint8", dtype="int32"),
    "int16": make(x_dtype="int16", w_dtype="float32", dtype="int16", padding="same", boundary="nearest"),
}


@pytest.mark.parametrize("sampled", [False, True], ids=["every element", "blocks"])
@pytest.mark.parametrize("case", PROBLEMS.values(), ids=PROBLEMS)
def test_a_right_answer_is_right(case: Case, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_BLOCK", 8)
    if sampled:
        monkeypatch.setattr(check, "FULL_CHECK", 0)
    x, w = case.arrays(np.random.default_rng(0))
    y = right_answer(case, x, w)
    verdict = check.Reference(case.problem(), x, w).judge(y)
    assert verdict.right, verdict.reason
    assert verdict.total == y.size
    assert verdict.checked == y.size if not sampled else verdict.checked > 0
    if np.issubdtype(y.dtype, np.floating):
        assert verdict.elementwise is not None
        assert verdict.normwise is not None
        assert 0 <= verdict.normwise <= verdict.elementwise <= 1


@pytest.mark.parametrize("case", PROBLEMS.values(), ids=PROBLEMS)
def test_one_wrong_element_is_found(case: Case) -> None:
    x, w = case.arrays(np.random.default_rng(0))
    y = right_answer(case, x, w)
    place = tuple(s // 2 for s in y.shape)
    if np.issubdtype(y.dtype, np.floating):
        y[place] += 40 * float(np.finfo(y.dtype).eps) * case.problem().terms
    else:
        y[place] ^= 2
    verdict = check.Reference(case.problem(), x, w).judge(y)
    assert not verdict.right
    assert str(place) in verdict.reason


@pytest.mark.parametrize("corner", [(0, 0), (0, -1), (-1, 0), (-1, -1)])
def test_blocks_cover_the_corners(corner: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FULL_CHECK", 0)
    monkeypatch.setattr(check, "_BLOCK", 4)
    case = make((1, 1, 60, 50), padding="same")
    x, w = case.arrays(np.random.default_rng(0))
    y = right_answer(case, x, w)
    y[0, 0][corner] += 1
    reference = check.Reference(case.problem(), x, w)
    verdict = reference.judge(y)
    assert not verdict.right
    assert verdict.checked < y.size / 2


def test_blocks_look_at_the_brightest_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FULL_CHECK", 0)
    monkeypatch.setattr(check, "_BLOCK", 4)
    case = make((1, 1, 60, 50), padding="same")
    x, w = case.arrays(np.random.default_rng(0))
    x[0, 0, 33, 21] = 1e4
    y = right_answer(case, x, w)
    y[0, 0, 33, 21] *= 1.01
    assert not check.Reference(case.problem(), x, w).judge(y).right


def test_an_unwritten_element_is_found_wherever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "FULL_CHECK", 0)
    case = make((1, 1, 400, 300))
    x, w = case.arrays(np.random.default_rng(0))
    y = right_answer(case, x, w)
    y[0, 0, 211, 107] = np.nan
    verdict = check.Reference(case.problem(), x, w).judge(y)
    assert not verdict.right
    assert "(0, 0, 211, 107)" in verdict.reason


def test_a_wrong_shape_is_wrong() -> None:
    case = make()
    x, w = case.arrays(np.random.default_rng(0))
    verdict = check.Reference(case.problem(), x, w).judge(right_answer(case, x, w)[:, :, 1:])
    assert not verdict.right
    assert "shape" in verdict.reason


def test_normwise_errors_pass_only_as_normwise() -> None:
    """An error as large as the plane's bound next to a bright patch, as an FFT makes it."""
    case = make((1, 1, 64, 64), (1, 1, 7, 7))
    x, w = case.arrays(np.random.default_rng(0), bright=True)
    y = right_answer(case, x, w)
    reference = check.Reference(case.problem(), x, w)
    largest = float(np.abs(y).max())
    y[0, 0, -1, -1] += 2e-7 * largest
    assert not reference.judge(y).right
    verdict = reference.judge(y, contract="normwise")
    assert verdict.right
    assert verdict.elementwise is not None
    assert verdict.elementwise > 1


def test_rounding_of_integers_is_told_apart() -> None:
    case = make(x_dtype="uint8", w_dtype="float32", dtype="uint8", overflow="saturate")
    x, w = case.arrays(np.random.default_rng(0))
    sums = convpar.conv2d(x, w, backend="numpy", dtype="float64")
    reference = check.Reference(case.problem(), x, w)
    rounded, cut = np.rint(sums).astype(np.uint8), np.trunc(sums).astype(np.uint8)
    assert (rounded != cut).any()
    assert reference.judge(rounded).right
    assert reference.judge(cut, rounding="truncate").right
    assert not reference.judge(cut).right
    assert not reference.judge(rounded, rounding="truncate").right
    # SciPy has no such result: the unrounded sums are a right answer to another question, and said to be.
    assert reference.judge(sums.astype(np.float32)).right


# -- how each library is driven


def _case_id(case: Case) -> str:
    p = case.problem()
    return f"{p.x_dtype}*{p.w_dtype}->{p.out_dtype}-{p.kh}x{p.kw}-{p.padding}-{p.boundary}{'-flip' * p.flip}"


DRIVEN = [
    *(
        make(w=(1, 1, *filter), padding=padding, flip=flip)
        for filter in ((3, 3), (4, 6), (5, 2))
        for padding in ("valid", "same", "full")
        for flip in (False, True)
    ),
    *(make(padding="same", boundary=b) for b in ("wrap", "symm", "mirror", "nearest")),
    make(padding="same", fillvalue=3),
    *(make(x_dtype=t, w_dtype=t) for t in ("float64", "float16", "int32")),
    make(x_dtype="int16", w_dtype="float32", dtype="int16", overflow="saturate"),
    make(x_dtype="uint8", w_dtype="float32", dtype="uint8", overflow="saturate", padding="same"),
    make(x_dtype="uint8", w_dtype="uint8", dtype="int32"),
    make((2, 6, 20, 18), (4, 3, 3, 3), groups=2, stride=(2, 1), padding=(1, 1, 2, 2), dilation=(1, 2)),
    make((2, 6, 20, 18), (8, 6, 3, 3), padding=(0, 1, 2, 1)),
    make((1, 1, 64, 64), (1, 1, 15, 15)),
    find("separable-512-k7-float32"),
    find("separable-512-k3-uint8"),
]


def library(name: str) -> Library:
    module, _, cls = LIBRARIES[name].partition(":")
    __import__(module)
    try:
        made: Library = getattr(sys.modules[module], cls)(1)
        made.about()
    except Cannot as e:
        pytest.skip(f"{name}: {e}")
    return made


@pytest.mark.parametrize("case", DRIVEN, ids=_case_id)
@pytest.mark.parametrize("name", LIBRARIES)
def test_every_setting_of_every_library_is_right_or_refused(name: str, case: Case) -> None:
    driven = library(name)
    x, w = case.arrays(np.random.default_rng(1))
    kept = x.copy(), w.copy()
    reference = check.Reference(case.problem(), x, w)
    reasons = []
    try:
        settings = driven.settings(case)
        assert settings
    except Cannot as e:
        settings = []
        reasons.append(str(e))
    served = 0
    for setting in settings:
        try:
            job = driven.prepare(case, setting, x, w)
        except Cannot as e:
            reasons.append(str(e))
            continue
        if job.out is not None:
            job.out.fill(77)
        if job.before is not None:
            job.before()
        job.call()
        verdict = reference.judge(
            job.answer(), contract=job.contract, factor=job.factor, rounding=job.rounding
        )
        assert verdict.right, (setting, verdict)
        served += 1
    assert served or reasons
    assert all(reasons)
    assert all(np.array_equal(a, b) for a, b in zip((x, w), kept, strict=True))


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("scipy", make(stride=2), "stride"),
        ("scipy", make((1, 2, 9, 9), (1, 2, 3, 3)), "one channel"),
        ("scipy", make(padding="same", boundary="mirror"), "mirror"),
        ("scipy", make(padding=(3, 1)), "padding"),
        ("ndimage", make(padding="full"), "size of the image"),
        ("ndimage", make(dilation=2), "dilation"),
        ("opencv", make(stride=2), "stride"),
        ("opencv", make(x_dtype="int32", w_dtype="int32"), "int32"),
        ("opencv", make(padding="same", boundary="wrap"), "wrap"),
        ("torch", make(x_dtype="uint8", w_dtype="uint8", dtype="int32"), "one type"),
        ("torch", make(x_dtype="int32", w_dtype="int32"), "int32"),
        ("torch", make(padding="same", boundary="symm"), "zeros"),
        ("torch", make((1, 1, 200_000, 200_000), (1, 1, 31, 31), "float64", "float64"), "GB of patches"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_what_a_library_cannot_do_has_a_reason(name: str, case: Case, reason: str) -> None:
    driven = library(name)
    with pytest.raises(Cannot, match=reason):
        driven.settings(case)


def test_convpars_refusals_are_reasons() -> None:
    driven = library("convpar")
    case = make(w=(1, 1, 4, 4))
    x, w = case.arrays(np.random.default_rng(0))
    with pytest.raises(Cannot, match="3x3, 5x5, 7x7 only"):
        driven.prepare(case, "cpu-unrolled", x, w)
    with pytest.raises(Cannot, match="unknown"):
        driven.prepare(case, "cpu-no-such", x, w)


def test_factors_of_a_separable_filter() -> None:
    _, w = find("separable-512-k7-float32").arrays(np.random.default_rng(0))
    column, row = rank_one(w)
    np.testing.assert_allclose(np.outer(column, row), w[0, 0], rtol=1e-5, atol=1e-7)


def test_every_peer_has_a_driver_and_a_device() -> None:
    assert {*PEERS, "convpar"} == {*LIBRARIES}
    assert set(PEERS.values()) == {"cpu", "gpu"}


def test_a_missing_library_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("scipy.signal", "scipy.ndimage", "cv2", "torch", "cupy"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in PEERS:
        module, _, cls = LIBRARIES[name].partition(":")
        __import__(module)
        with pytest.raises(Cannot, match="not installed"):
            getattr(sys.modules[module], cls)(1)


# -- processes


STUBS = '''
import os, sys, time
import numpy as np
import convpar
from convpar.bench.libraries import Cannot, Job, keep
from convpar.cases import Case


class Right:
    """Calls convpar's reference; the others break something."""

    def __init__(self, num_threads):
        self.num_threads = num_threads

    def about(self):
        return {"version": "1", "threads": self.num_threads, "affinity": sorted(os.sched_getaffinity(0)),
                "environment": os.environ["OMP_NUM_THREADS"],
                "places": [name for name in os.environ if name in ("OMP_PROC_BIND", "OMP_PLACES")]}

    def settings(self, case):
        return ["only"]

    def prepare(self, case, setting, x, w):
        p = case.problem()
        out = np.empty(p.out_shape, p.out_dtype)
        def call():
            convpar.conv2d(x, w, out=out, backend="numpy", **case.options)
            self.spoil(x, out)
        return Job(call, lambda: out, out)

    def spoil(self, x, out):
        pass


class Wrong(Right):
    def spoil(self, x, out):
        out[0, 0, 1, 1] += 1


class Unwritten(Right):
    kept = None
    def spoil(self, x, out):
        out[0, 0, 2, 3] = np.nan


class Fickle(Right):
    calls = 0
    def spoil(self, x, out):
        Fickle.calls += 1
        out *= 1 + (Fickle.calls > 2) * 1e-3


class Modifies(Right):
    def spoil(self, x, out):
        x[0, 0, -1, -1] += 1
        self.first = getattr(self, "first", out.copy())
        out[...] = self.first


class Wavers(Right):
    """Other bits in every call, all within the bounds."""
    calls = 0
    def spoil(self, x, out):
        Wavers.calls += 1
        out *= 1 + (Wavers.calls % 2) * 2e-7


class DiesOnce(Right):
    """One of its settings is its end."""
    def settings(self, case):
        return ["before", "deadly", "after"]

    def prepare(self, case, setting, x, w):
        job = super().prepare(case, setting, x, w)
        if setting == "deadly":
            job.call = lambda: os._exit(3)
        return job


class Loud(Right):
    def spoil(self, x, out):
        print("not for the other end")
        os.write(1, b"nor this\\n")


class Raises(Right):
    def spoil(self, x, out):
        raise ArithmeticError("something is odd")


class Dies(Right):
    def spoil(self, x, out):
        print("last words", file=sys.stderr)
        sys.stderr.flush()
        os._exit(7)


class DiesLate(Right):
    """Answers, and ends when it is timed."""
    def prepare(self, case, setting, x, w):
        job, turns = super().prepare(case, setting, x, w), []
        def before():
            # Checked, calibrated, timed.
            turns.append(None)
            if len(turns) > 3:
                os._exit(9)
        job.before = before
        return job


class DiesLateOfTwo(DiesLate):
    """Ends so before its other setting is timed."""
    def settings(self, case):
        return ["first", "second"]


class Hangs(Right):
    def spoil(self, x, out):
        time.sleep(60)


class Missing(Right):
    def __init__(self, num_threads):
        raise Cannot("not installed: no such package")


class TwoSettings(Right):
    def settings(self, case):
        return ["slow", "fast", "impossible", "wrong"]

    def prepare(self, case, setting, x, w):
        if setting == "impossible":
            raise Cannot("not this one")
        job = super().prepare(case, setting, x, w)
        call = job.call
        def slowly():
            call()
            time.sleep({"slow": 0.02, "fast": 0.002, "wrong": 0.0}[setting])
            if setting == "wrong":
                job.out[...] = 0
        job.call = slowly
        return job


class Contracts(Right):
    """The looser the faster."""
    def settings(self, case):
        return ["strict", "loose", "looser"]

    def prepare(self, case, setting, x, w):
        job = super().prepare(case, setting, x, w)
        call = job.call
        job.call = lambda: (call(), time.sleep({"strict": 0.02, "loose": 0.01, "looser": 0.001}[setting]))
        if setting != "strict":
            job.contract, job.factor = "normwise", {"loose": 8.0, "looser": 2.0**13}[setting]
        return job


class LooseOnly(Contracts):
    def settings(self, case):
        return ["looser", "loose"]
'''


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Name of a class of `STUBS` -> its specification, importable by the processes."""
    (tmp_path / "stub_libraries.py").write_text(textwrap.dedent(STUBS))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "stub_libraries:{}".format


def run(
    stubs: Callable[[str], str], names: list[str], cases: list[Case], effort: Effort = QUICK
) -> list[list[Outcome]]:
    """Outcomes of the stub libraries `names` beside convpar's own."""
    libraries = {**LIBRARIES, **{name: stubs(name) for name in names}}
    with Bench(["numpy"], names, num_threads=1, effort=effort, libraries=libraries) as bench:
        return [bench.run(case) for case in cases]


def one(outcomes: list[Outcome], name: str) -> Outcome:
    found = [o for o in outcomes if o.backend == name]
    assert len(found) == 1
    return found[0]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system can't pin processes")
def test_a_process_is_pinned_from_outside(stubs: Callable[[str], str]) -> None:
    core = first_cores(1)
    with LibraryProcess("stub", stubs("Right"), num_threads=1, cores=core) as stub:
        assert stub.about["affinity"] == core
        assert stub.about["environment"] == "1"
    assert not stub.alive
    assert os.sched_getaffinity(0) >= set(core)


def test_first_cores_are_the_first_allowed_and_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 4, 2, 3, 7}, raising=False)
    monkeypatch.setattr(process, "_siblings", lambda c, allowed: [2, 3] if c in (2, 3) else [c])
    assert first_cores(1) == [2]
    assert first_cores(3) == [2, 4, 7]
    assert first_cores(5) == [2, 3, 4, 7, 9]
    assert first_cores(99) == [2, 3, 4, 7, 9]
    monkeypatch.delattr(os, "sched_setaffinity")
    assert first_cores(3) == []


@pytest.mark.parametrize(
    ("text", "siblings"),
    [("2-3\n", [2, 3]), ("2,18", [2, 18]), ("0-1,2,16-17", [2, 16]), ("odd", [2]), (None, [2])],
)
def test_siblings_are_read(text: str | None, siblings: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(path: Path) -> str:
        if text is None:
            raise OSError
        return text

    monkeypatch.setattr(Path, "read_text", read)
    assert process._siblings(2, [2, 3, 16, 18]) == siblings


EDITABLE = """
import sys
from importlib.util import spec_from_file_location

class Finder:
    \"\"\"Like that of an editable install: before everything else, and always the same tree.\"\"\"
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "convpar":
            return spec_from_file_location(name, {init!r}, submodule_search_locations=[{folder!r}])

sys.meta_path.insert(0, Finder)
"""


def test_another_build_is_used_even_beside_an_editable_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = Path(convpar.__file__).parent
    shutil.copytree(package, tmp_path / "build" / "convpar", ignore=shutil.ignore_patterns("__pycache__"))
    text = EDITABLE.format(init=str(package / "__init__.py"), folder=str(package))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    # The process compares where convpar came from with where it should have.
    project = '[project]\nname = "convpar"\nversion = "9.8.7"\n'
    (tmp_path / "build" / "pyproject.toml").write_text(project)
    with LibraryProcess("other", LIBRARIES["convpar"], num_threads=1, package=tmp_path / "build") as other:
        assert other.about["version"] == "9.8.7"
    with LibraryProcess("this", LIBRARIES["convpar"], num_threads=1) as this:
        assert this.about["version"] == convpar.__version__


def test_a_build_that_isnt_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises((Cannot, Died)):
        LibraryProcess("none", LIBRARIES["convpar"], num_threads=1, package=tmp_path)


def test_what_goes_wrong_in_one_library_costs_the_others_nothing(stubs: Callable[[str], str]) -> None:
    bad = {
        "Raises": "ArithmeticError: something is odd",
        "Dies": "ended with code 7: last words",
        "Missing": "not installed: no such package",
    }
    cases = [find(TINY), find("single-64-k3-float32-valid")]
    # Two cases: one that died is started again, one that isn't there stays away.
    for outcomes in run(stubs, ["Right", *bad], cases):
        assert one(outcomes, "numpy").record is not None
        right = one(outcomes, "Right").record
        assert right is not None
        assert right.checked == "every element"
        for name, reason in bad.items():
            outcome = one(outcomes, name)
            assert outcome.record is None
            assert reason in outcome.reason
        ours = one(outcomes, "numpy").record
        assert ours is not None
        assert set(ours.ratios) == {"Right"}


@pytest.mark.parametrize("name", ["DiesLate", "DiesLateOfTwo"])
def test_a_library_that_ends_while_it_is_timed(stubs: Callable[[str], str], name: str) -> None:
    (outcomes,) = run(stubs, [name, "Right"], [find("single-128-k3-float32-valid")])
    late = one(outcomes, name)
    assert late.record is None
    assert "ended with code 9" in late.reason
    assert one(outcomes, "Right").record is not None


def test_a_library_that_has_ended_is_not_asked_again() -> None:
    with LibraryProcess("this", LIBRARIES["convpar"], num_threads=1) as this:
        this.close()
        with pytest.raises(Died, match=r"^ended before: it was closed$"):
            this.ask("ceilings", timeout=1)


def test_a_call_without_end_is_given_up(stubs: Callable[[str], str]) -> None:
    effort = Effort(repeats=3, budget=1, call_limit=2)
    (outcomes,) = run(stubs, ["Hangs"], [find(TINY)], effort)
    assert one(outcomes, "Hangs").reason == "took longer than 2 s"
    assert one(outcomes, "numpy").record is not None


def test_what_a_library_prints_is_no_answer(stubs: Callable[[str], str]) -> None:
    (outcomes,) = run(stubs, ["Loud"], [find(TINY)])
    record = one(outcomes, "Loud").record
    assert record is not None
    assert not record.error


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Wrong", "element (0, 0, 1, 1)"),
        ("Unwritten", "element (0, 0, 2, 3)"),
        ("Fickle", "element (0, 0, 0, 0)"),
        ("Modifies", "it modified its inputs"),
    ],
)
def test_a_wrong_answer_is_timed_but_never_compared(
    stubs: Callable[[str], str], name: str, reason: str
) -> None:
    (outcomes,) = run(stubs, [name], [find(TINY)])
    outcome = one(outcomes, name)
    assert outcome.wrong
    assert outcome.record is not None
    assert reason in outcome.record.error
    ours = one(outcomes, "numpy").record
    assert ours is not None
    assert ours.ratios == {}


def test_bits_may_differ_within_the_bounds(stubs: Callable[[str], str]) -> None:
    (outcomes,) = run(stubs, ["Wavers"], [find(TINY)])
    record = one(outcomes, "Wavers").record
    assert record is not None
    assert not record.error


def test_a_setting_that_is_the_end_of_its_process_costs_only_itself(stubs: Callable[[str], str]) -> None:
    (outcomes,) = run(stubs, ["DiesOnce"], [find(TINY)])
    record = one(outcomes, "DiesOnce").record
    assert record is not None
    assert record.setting in ("before", "after")
    assert not record.error
    kinds = {setting: type(time) for setting, time in record.settings.items()}
    assert kinds == {"before": float, "deadly": str, "after": float}


def test_the_best_right_setting_counts(stubs: Callable[[str], str]) -> None:
    (outcomes,) = run(stubs, ["TwoSettings"], [find(TINY)])
    record = one(outcomes, "TwoSettings").record
    assert record is not None
    assert record.setting == "fast"
    assert set(record.settings) == {"slow", "fast", "impossible", "wrong"}
    assert record.settings["impossible"] == "not this one"
    assert record.settings["slow"] > record.settings["fast"]
    assert not record.error
    ours = one(outcomes, "numpy").record
    assert ours is not None
    assert ours.ratios["TwoSettings"] == pytest.approx(record.median / ours.median)
    assert set(ours.peers["TwoSettings"]["settings"]) == {"slow", "fast"}


@pytest.mark.parametrize(
    ("accuracy", "name", "setting"),
    [
        (None, "Contracts", "strict"),
        ("elementwise", "Contracts", "strict"),
        ("normwise", "Contracts", "loose"),
        (None, "LooseOnly", "loose"),
        ("normwise", "LooseOnly", "loose"),
    ],
)
def test_the_fastest_under_the_cases_contract_counts(
    stubs: Callable[[str], str], accuracy: str | None, name: str, setting: str
) -> None:
    """A faster answer to an easier question is kept beside it, and is no ratio."""
    given = find(TINY)
    case = dataclasses.replace(given, options={**given.options, "accuracy": accuracy})
    (outcomes,) = run(stubs, [name], [case])
    record, ours = one(outcomes, name).record, one(outcomes, "numpy").record
    assert record is not None
    assert ours is not None
    assert record.setting == setting
    assert record.settings["looser"] < record.median
    assert ours.ratios == {name: pytest.approx(record.median / ours.median)}
    beside = ours.peers[name]
    assert beside["version"] == "1"
    assert {s: v["median"] for s, v in beside["settings"].items()} == record.settings
    contracts = {"strict": "elementwise", "loose": "normwise x 8", "looser": "normwise x 8192"}
    assert {s: v["contract"] for s, v in beside["settings"].items()} == {
        s: contracts[s] for s in record.settings
    }
    shown = beside["settings"][setting]
    assert (shown["threads"], shown["repeats"], shown["types"]) == (1, record.repeats, record.types)


def test_a_result_that_is_allocated_is_told() -> None:
    case = find(TINY)
    x, w = case.arrays(np.random.default_rng(0))
    for name, allocates in (
        ("scipy_signal:ScipySignal", True),
        ("ndimage:Ndimage", False),
        ("own:Convpar", False),
    ):
        pytest.importorskip("scipy", reason="a peer: pip install 'convpar[bench]'")
        worker = Worker(f"convpar.bench.libraries.{name}", 1)
        worker._case, worker._x, worker._w = case, x, w
        setting = worker.settings()["settings"][0]
        assert ("allocates its result" in worker.prepare(setting)["notes"]) == allocates


@pytest.mark.parametrize(
    ("types", "k", "contract"),
    [
        (("float32", "float32", {}), 11, "elementwise"),
        (("float32", "float32", {}), 12, "normwise"),
        (("uint8", "float32", {"dtype": "uint8"}), 11, "elementwise"),
        (("int16", "float32", {"dtype": "int16"}), 7, "elementwise"),
        (("int16", "float32", {"dtype": "int16"}), 8, "normwise"),
        (("float64", "float64", {}), 7, "elementwise"),
        (("float64", "float64", {}), 8, "normwise"),
    ],
)
def test_opencv_goes_over_to_a_transform(
    types: tuple[str, str, dict[str, Any]], k: int, contract: str
) -> None:
    driven = library("opencv")
    case = make((1, 1, 80, 80), (1, 1, k, k), x_dtype=types[0], w_dtype=types[1], **types[2])
    assert driven.prepare(case, "filter2D", *case.arrays(np.random.default_rng(0))).contract == contract


def test_a_plan_of_little_work_says_one_thread() -> None:
    own = Worker(LIBRARIES["convpar"], 1)
    for name, threads in (("single-8-k3-float32-valid", 1), ("single-512-k3-float32-valid", None)):
        case = find(name)
        own._case, (own._x, own._w) = case, case.arrays(np.random.default_rng(0))
        assert own.prepare("cpu-private")["threads"] == threads


def test_rounded_factors_widen_the_bound() -> None:
    """As those of matrix units do; what they round to is the contract's business."""
    from convpar.bench.libraries import own

    assert own._coarser("float16", np.dtype(np.float32)) == 2.0**13
    assert own._coarser(None, np.dtype(np.float32)) == 1.0


def test_no_variable_ties_a_process_to_one_processor(
    stubs: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", "true")
    monkeypatch.setenv("OMP_PLACES", "cores")
    with LibraryProcess("stub", stubs("Right"), num_threads=1) as stub:
        assert stub.about["places"] == []


@pytest.mark.parametrize(("budget", "repeats"), [(1000, 9), (1e-6, measure.LEAST_REPEATS)])
def test_samples_are_limited_by_the_budget(stubs: Callable[[str], str], budget: float, repeats: int) -> None:
    effort = Effort(repeats=9, budget=budget, call_limit=60)
    (outcomes,) = run(stubs, ["Right"], [find(TINY)], effort)
    records = [o.record for o in outcomes]
    assert [r.repeats for r in records if r is not None] == [repeats, repeats]


@pytest.fixture
def ceilings(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float] | None]:
    """What the processes measure next, (bandwidth, float32 peak) in turn; None for one that dies of it."""
    coming: list[tuple[float, float] | None] = []
    plain = LibraryProcess.ask

    def ask(self: LibraryProcess, request: str, **given: Any) -> dict[str, Any]:
        if request != "ceilings":
            return plain(self, request, **given)
        assert given["kinds"] == ["float32"]
        found = coming.pop(0)
        if found is None:
            raise Died("it ended")
        return {"bandwidth": found[0], "fma": {"float32": found[1]}}

    monkeypatch.setattr(LibraryProcess, "ask", ask)
    return coming


def test_the_largest_ceilings_of_a_run_count(ceilings: list[tuple[float, float] | None]) -> None:
    """Measured again after each case, before its records are made; a failure changes nothing."""
    case = find(TINY)
    ceilings += [(1e9, 4e9), (3e9, 2e9), None, (2e9, 5e9)]
    with Bench(["numpy"], num_threads=1, effort=QUICK) as bench:
        assert bench.measure_ceilings([case]) == ""
        assert bench.ceilings is not None
        assert (bench.ceilings.bandwidth, dict(bench.ceilings.fma)) == (1e9, {"float32": 4e9})
        for bandwidth, peak in ((3e9, 4e9), (3e9, 4e9), (3e9, 5e9)):
            record = one(bench.run(case), "numpy").record
            assert record is not None
            assert record.ceilings == {"bandwidth": bandwidth, "fma": {"float32": peak}}
            assert record.limit == bench.ceilings.limit(case.problem()).seconds
            assert record.share == pytest.approx(record.limit / record.median)
    assert not ceilings


def test_ceilings_that_cant_be_measured_are_not_tried_again(
    ceilings: list[tuple[float, float] | None],
) -> None:
    case = find(TINY)
    ceilings += [None, (1e9, 4e9)]
    with Bench(["numpy"], num_threads=1, effort=QUICK) as bench:
        assert bench.measure_ceilings([case]) == "it ended"
        record = one(bench.run(case), "numpy").record
    assert record is not None
    assert record.limit is None
    assert record.ceilings == {}
    assert len(ceilings) == 1


@pytest.mark.skipif(cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built")
@pytest.mark.parametrize("size", [1 << 12, (1 << 20) + 37])
@pytest.mark.parametrize("threads", [1, 3])
def test_copies_are_timed_whatever_the_size(size: int, threads: int) -> None:
    """Stores past the caches fault on addresses that aren't those of cache lines."""
    assert 0 < cpu.copy_bandwidth(size, threads, 2) < float("inf")


@pytest.mark.skipif(cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built")
@pytest.mark.parametrize("threads", [0, 100_000])
def test_ceilings_refuse_threads_that_no_call_takes(threads: int) -> None:
    """OpenMP would end the process."""
    for measured in (
        lambda: cpu.peak_fma("float32", threads, 0.01),
        lambda: cpu.copy_bandwidth(1 << 12, threads, 1),
        lambda: measure_ceilings(num_threads=threads, seconds=0.01),
    ):
        with pytest.raises(ValueError, match=rf"num_threads must be at (least|most) .* {threads}$"):
            measured()


@pytest.mark.skipif(cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built")
def test_levels_are_timed_beside_each_other_and_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each in a process that runs it, with the arithmetic peak of its own and the machine's copies."""
    levels = cpu.build_info()["ISA levels"]
    peaks = iter(range(1, 100))
    plain = LibraryProcess.ask

    def ask(self: LibraryProcess, request: str, **given: Any) -> dict[str, Any]:
        if request == "ceilings":
            n = next(peaks)
            return {"bandwidth": 1e9 * n, "fma": {"float32": 1e9 * n}}
        return plain(self, request, **given)

    monkeypatch.setattr(LibraryProcess, "ask", ask)
    with Bench(["cpu-simd"], num_threads=1, effort=QUICK, levels=levels) as bench:
        assert [about["level"] for about in bench.about().values()] == list(levels)
        assert bench.measure_ceilings([find(TINY)]) == ""
        outcomes = bench.run(find(TINY))
    records = [o.record for o in outcomes if o.record is not None]
    assert [r.level for r in records] == [o.level for o in outcomes] == list(levels)
    assert len({r.key for r in records}) == len(levels)
    first = 1 + len(levels)
    assert [r.ceilings for r in records] == [
        {"bandwidth": 1e9 * 2 * len(levels), "fma": {"float32": 1e9 * (first + k)}}
        for k in range(len(levels))
    ]
    assert all(r.copy is not None and r.copy > 0 for r in records)


def test_a_level_of_the_environment_is_kept_with_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cpu.ISA_VARIABLE, "baseline")
    with Bench(["numpy"], num_threads=1, effort=QUICK) as bench:
        record = one(bench.run(find(TINY)), "numpy").record
    assert record is not None
    assert (record.level, record.copy) == ("baseline", None)


def test_too_little_memory_is_a_reason(stubs: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_available", lambda: 10_000)
    (outcomes,) = run(stubs, ["Right"], [find("single-64-k3-float32-valid")])
    assert [o.backend for o in outcomes] == ["numpy", "Right"]
    assert all("are free" in o.reason and o.record is None for o in outcomes)


def test_errors_are_measured_on_plain_and_bright_images(stubs: Callable[[str], str]) -> None:
    effort = Effort(repeats=3, budget=1, call_limit=60, accuracy=True)
    (floats, integers) = run(
        stubs, ["Right"], [find("single-64-k7-float32-valid"), find("single-64-k3-int32-valid")], effort
    )
    record = one(floats, "Right").record
    assert record is not None
    assert set(record.errors) == {"plain", "bright"}
    for error in record.errors.values():
        assert 0 < error["normwise"] <= error["elementwise"] <= 1
    record = one(integers, "Right").record
    assert record is not None
    assert record.errors == {}


def test_a_worker_has_no_case_until_it_is_given_one(stubs: Callable[[str], str]) -> None:
    worker = Worker(LIBRARIES["convpar"], 1)
    with pytest.raises(RuntimeError, match="no case is loaded"):
        worker.settings()


# -- the machine


def test_the_same_hardware_has_the_same_file() -> None:
    first, second = machine.hardware(), machine.hardware()
    assert first == second
    assert machine.slug(first) == machine.slug(second)
    assert machine.slug({"gpu": "NVIDIA H200"}) == "nvidia-h200"
    made = {"processor": "Some CPU @ 3.0GHz", "family": "GenuineIntel family 6 model 85", "cores": 16}
    assert machine.slug(made) == "some-cpu-3-0ghz-family-6-model-85-16-cores"


def test_busy_is_a_share() -> None:
    share = machine.busy(0.05)
    assert share is None or -0.01 <= share <= 1.01


def test_a_commit_is_dirty_when_what_runs_was_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shutil.which("git") is None:
        pytest.skip("git isn't installed")
    monkeypatch.setattr(convpar, "__file__", str(tmp_path / "convpar" / "__init__.py"))
    assert machine.git_commit() is None
    (tmp_path / "convpar").mkdir()
    source, result = tmp_path / "convpar" / "api.py", tmp_path / "results.json"
    source.write_text("one")
    result.write_text("one")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    commit = machine.git_commit()
    assert commit is not None
    assert re.fullmatch("[0-9a-f]{40}", commit)
    result.write_text("two")
    assert machine.git_commit() == commit
    (tmp_path / "convpar" / "new.py").write_text("new")
    assert machine.git_commit() == f"{commit}-dirty"
    (tmp_path / "convpar" / "new.py").unlink()
    source.write_text("two")
    assert machine.git_commit() == f"{commit}-dirty"


def test_a_source_tree_has_its_own_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is installed beside it, and whatever project a package lies in."""
    from importlib.metadata import PackageNotFoundError

    from convpar import info

    def installed(name: str) -> str:
        if name != "convpar":
            raise PackageNotFoundError(name)
        return "1.2.3"

    monkeypatch.setattr(info, "version", installed)
    monkeypatch.setattr(info, "__file__", str(tmp_path / "convpar" / "info.py"))
    project = tmp_path / "pyproject.toml"
    found = []
    for text in (
        None,
        "not toml [",
        '[project]\nname = "other"\nversion = "4"\n',
        '[project]\nname = "convpar"\nversion = "5.6"\n',
    ):
        if text is not None:
            project.write_text(text)
        found.append(info._version())
    assert found == ["1.2.3", "1.2.3", "1.2.3", "5.6"]
    monkeypatch.setattr(info, "version", lambda name: installed("missing"))
    project.unlink()
    assert info._version() == "0+unknown"


# -- the command


def invoke(*arguments: str) -> Any:
    from convpar.cli.bench import command

    return click_testing.CliRunner().invoke(command, arguments, standalone_mode=False)


FAST = ("--repeats", "3", "--budget", "1", "--threads", "1")


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load", lambda: 0.0)
    monkeypatch.setattr(machine, "busy", lambda seconds=0.5: 0.0)


@pytest.mark.usefixtures("idle")
def test_bench_prints_and_keeps_times_side_by_side(tmp_path: Path) -> None:
    pytest.importorskip("scipy", reason="a peer: pip install 'convpar[bench]'")
    file = tmp_path / "results.json"
    shown = invoke(
        "--case", TINY, "--backend", "numpy", "--backend", "auto", "--peer", "scipy", "--peer", "ndimage",
        "--accuracy", "--json", str(file), *FAST,
    )  # fmt: skip
    assert shown.exit_code == 0, shown.output
    assert shown.return_value == 0
    for word in (
        "ceilings",
        "GB/s",
        "scipy 1.",
        "correlate2d",
        "of limit",
        "checked: every element",
        "elementwise",
    ):
        assert word in shown.output
    document = json.loads(file.read_text())
    records = {r["backend"]: r for r in document["records"]}
    assert set(records) == {"numpy", "auto", "scipy", "ndimage"}
    auto = records["auto"]
    assert auto["case"] == TINY
    assert auto["threads"] == 1
    assert set(auto["ratios"]) == {"scipy", "ndimage"}
    assert auto["ratios"]["ndimage"] == pytest.approx(records["ndimage"]["median"] / auto["median"], rel=1e-3)
    assert auto["share"] == pytest.approx(auto["limit"] / auto["median"], rel=1e-3)
    assert auto["chose"].startswith("cpu-")
    assert set(auto["errors"]) == {"plain", "bright"}
    for record in records.values():
        assert record["repeats"] == 3
        assert record["median"] > 0
        assert record["date"][:2] == "20"
        assert record["versions"]
        assert record["ceilings"]["bandwidth"] > 0
        assert record["busy"] == 0.0
    beside = auto["peers"]["scipy"]["settings"]
    assert set(beside) == {"correlate2d", "oaconvolve"}
    assert beside["correlate2d"]["median"] == records["scipy"]["median"]
    assert auto["versions"]["convpar"] == convpar.__version__


@pytest.mark.usefixtures("idle")
def test_a_second_run_adds_and_replaces(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    rows = []
    for backend in ("numpy", "cpu-naive", "numpy"):
        shown = invoke("--case", TINY, "--backend", backend, "--peer", "none", "--json", str(file), *FAST)
        assert shown.exit_code == 0, shown.output
        rows.append({r["backend"]: r for r in json.loads(file.read_text())["records"]})
    assert [set(r) for r in rows] == [{"numpy"}, {"numpy", "cpu-naive"}, {"numpy", "cpu-naive"}]
    assert rows[1]["numpy"] == rows[0]["numpy"]
    assert rows[2]["numpy"] != rows[0]["numpy"]
    assert rows[2]["cpu-naive"] == rows[1]["cpu-naive"]


@pytest.mark.usefixtures("idle")
def test_results_so_far_survive_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "results.json"
    plain = Bench.run

    def interrupted(self: Bench, case: Case) -> list[Outcome]:
        if case.name != TINY:
            raise KeyboardInterrupt
        return plain(self, case)

    monkeypatch.setattr(Bench, "run", interrupted)
    shown = invoke(
        "--case", TINY, "--case", "single-64-k3-float32-valid", "--backend", "numpy", "--peer", "none",
        "--json", str(file), *FAST,
    )  # fmt: skip
    assert shown.exit_code != 0
    assert [r["case"] for r in json.loads(file.read_text())["records"]] == [TINY]


@pytest.mark.usefixtures("idle")
def test_a_wrong_answer_of_ours_is_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        check.Reference,
        "judge",
        lambda self, answer, **how: check.Verdict(False, "element is off", 1, answer.size),
    )
    shown = invoke("--case", TINY, "--backend", "numpy", "--peer", "none", *FAST)
    assert shown.return_value == 1
    assert "WRONG: element is off" in shown.output


@pytest.mark.usefixtures("idle")
def test_nothing_timed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONVPAR_ISA", raising=False)  # a level that is asked for is told
    shown = invoke(
        "--case", "single-64-k5-float32-valid", "--backend", "cpu-winograd", "--peer", "none", *FAST
    )
    assert isinstance(shown.exception, UserError)
    assert shown.exception.message.startswith("nothing was timed; cpu-winograd: ")
    assert "cpu-winograd: not timed: " in shown.output


@pytest.mark.usefixtures("idle")
def test_something_timed_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CONVPAR_ISA", raising=False)  # a level that is asked for is told
    shown = invoke(
        "--case", "single-64-k5-float32-valid", "--backend", "cpu-winograd", "--backend", "numpy", "--peer", "none",
        "--call-limit", "1e300", *FAST,
    )  # fmt: skip
    assert (shown.return_value, shown.exception) == (0, None)
    assert "cpu-winograd: not timed: " in shown.output


def test_without_a_gpu_none_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "graphics", lambda: None)
    shown = invoke("--case", TINY, "--backend", "gpu-naive")
    assert isinstance(shown.exception, UserError)
    assert shown.exception.message == "gpu-naive: there is no GPU to be timed on"
    monkeypatch.setattr(machine, "graphics", lambda: "NVIDIA H999")
    monkeypatch.setenv("CONVPAR_GPU", " emulate")
    shown = invoke("--case", TINY, "--backend", "gpu-naive")
    assert isinstance(shown.exception, UserError)
    assert "CONVPAR_GPU is 'emulate', and the emulator's times say nothing" in shown.exception.message


def test_a_busy_machine_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "load", lambda: 5.25)
    monkeypatch.setattr(machine, "busy", lambda seconds=0.5: 0.61)
    shown = invoke("--case", TINY, "--backend", "numpy", "--peer", "none", *FAST)
    assert shown.exit_code == 0
    said = " ".join(shown.stderr.split())
    assert "the load average is 5.2" in said
    assert "61%" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--case", "no-such"), "no case and no tag matches 'no-such'"),
        (("--backend", "no-such-*"), "no backend matches 'no-such-*'.*auto.*numpy"),
        (("--backend", "gpu", "--backend", "cpu"), "different devices"),
        (("--budget", "nan"), "'--budget': 'nan' is not a finite number"),
        (("--call-limit", "inf"), "'--call-limit': 'inf' is not a finite number"),
        (("--isa", "v9"), "--isa must be all or one of .*, not 'v9'"),
        (("--threads", "100000"), "'--threads'.* 100000 is not in the range 1<=x<=1024"),
        (
            ("--backend", "numpy", "--peer", "cupy"),
            "cupy can't be compared on the cpu; peers there are scipy",
        ),
    ],
)
def test_a_wrong_call_is_told_before_anything_runs(arguments: tuple[str, ...], message: str) -> None:
    shown = invoke(*arguments)
    assert shown.exit_code != 0
    assert re.search(message.replace("*'", r"\*'"), str(shown.exception.format_message()))


@pytest.mark.usefixtures("idle")
@pytest.mark.parametrize("text", ["not json", '{"schema": 99, "hardware": {}, "records": []}'])
def test_a_file_that_holds_something_else_is_left_alone(tmp_path: Path, text: str) -> None:
    file = tmp_path / "results.json"
    file.write_text(text)
    shown = invoke("--case", TINY, "--backend", "numpy", "--peer", "none", "--json", str(file), *FAST)
    assert shown.exit_code != 0
    assert file.read_text() == text


def test_cases_are_listed() -> None:
    shown = invoke("--list", "--case", "small")
    assert shown.exit_code == 0
    assert TINY in shown.output
    assert "4 cases" in shown.output
