"""Result files, the tables made from them, and the scripts in benchmarks/."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import registry
from convpar.bench import results
from convpar.bench.results import Record, RecordFile, ResultFile, ResultsError, duration, path_for
from convpar.cases import HEADLINE, all_cases

ROOT = Path(__file__).resolve().parents[1]
HARDWARE = {"processor": "Some CPU", "architecture": "x86_64", "cores": 2}

pytest.importorskip("click", reason="the scripts need click: pip install 'convpar[cli]'")
from click.testing import CliRunner  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def _source_tree() -> Iterator[None]:
    """The scripts live in the repository, not in the package; behind whatever is installed."""
    sys.path.append(str(ROOT))
    yield
    sys.path.remove(str(ROOT))


def script(name: str) -> Any:
    return importlib.import_module(f"benchmarks.{name}")


def record(case: str = HEADLINE[0], backend: str = "auto", threads: int = 2, **more: Any) -> Record:
    given: dict[str, Any] = {"median": 0.002, "spread": 0.0001, "repeats": 15, "number": 1, **more}
    return Record(case=case, backend=backend, threads=threads, **given)


def setting(median: float, contract: str = "elementwise", **more: Any) -> dict[str, Any]:
    given = {"spread": 0.0, "repeats": 15, "threads": 2, "types": "float32 * float32 -> float32", "notes": []}
    return {"median": median, "contract": contract, **given, **more}


def beside(**settings: dict[str, Any]) -> dict[str, Any]:
    """One peer in `Record.peers`; in the names of settings, _ is a comma and a blank."""
    named = {name.replace("__", ", ").replace("_", " "): s for name, s in settings.items()}
    return {"version": "1.2", "mode": "as it comes", "settings": named}


def full_record() -> Record:
    return record(
        chose="cpu-made",
        settings={"a": 0.5, "b": "no"},
        limit=0.001,
        limit_by="bytes",
        share=0.5,
        ratios={"scipy": 80.5},
        peers={"scipy": beside(correlate2d=setting(0.161, threads=1, notes=["unrounded"]))},
        types="float32 * float32 -> float32",
        contract="elementwise",
        notes=("one", "two"),
        checked="every element",
        errors={
            "plain": {"elementwise": 0.25, "normwise": 0.125},
            "bright": {"elementwise": 0.5, "normwise": 0.25},
        },
        versions={"convpar": "1.0"},
        effective_threads=2,
        mode="m",
        ceilings={"bandwidth": 4e10, "fma": {"float32": 2.5e11}},
        copy=5e10,
        date="2026-01-02T03:04:05+00:00",
        commit="abc",
        load=0.25,
    )


# -- files


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "r.json", HARDWARE)
    kept = [full_record(), record(backend="scipy", error="wrong", build="unoptimised"), record(level="v3")]
    file.merge(kept)
    file.save()
    again = ResultFile(tmp_path / "r.json", HARDWARE)
    assert {r.key: r for r in again.records} == {r.key: r for r in kept}
    assert again.find(*kept[0].key) == kept[0]
    assert ResultFile(tmp_path / "r.json").hardware == HARDWARE
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["schema"] == results.SCHEMA


def test_a_record_is_replaced_by_one_with_its_key_only(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "r.json", HARDWARE)
    others = [
        record(threads=1),
        record(backend="numpy"),
        record(case=HEADLINE[1]),
        record(build="unoptimised"),
        record(level="v3"),
    ]
    file.merge([record(median=1.0), *others])
    file.save()
    file = ResultFile(tmp_path / "r.json", HARDWARE)
    file.merge([record(median=2.0)])
    assert len(file.records) == 6
    found = file.find(HEADLINE[0], "auto", 2)
    assert found is not None
    assert found.median == 2.0
    assert all(file.find(*o.key) == o for o in others)
    # The same records in any order give the same file.
    file.save()
    text = file.path.read_text()
    mixed = ResultFile(tmp_path / "s.json", HARDWARE)
    mixed.merge(reversed(file.records))
    mixed.save()
    assert mixed.path.read_text() == text


@pytest.mark.parametrize("fails", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    file = ResultFile(tmp_path / "r.json", HARDWARE)
    file.merge([record()])
    file.save()
    before = file.path.read_text()

    def broken(*arguments: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, fails, broken)
    file.merge([record(threads=1)])
    with pytest.raises(OSError, match="full"):
        file.save()
    assert file.path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]


def test_nan_is_no_result(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "r.json", HARDWARE)
    file.merge([record(median=float("nan"))])
    with pytest.raises(ValueError, match="JSON"):
        file.save()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"schema": 99, "hardware": {}, "records": []}',
        '{"schema": 1, "hardware": {}, "records": [{"case": "a"}]}',
        '{"schema": 1, "hardware": {}, "records": [7]}',
    ],
)
def test_what_isnt_a_result_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.json").write_text(text)
    with pytest.raises(ResultsError, match=r"r\.json"):
        ResultFile(tmp_path / "r.json")


def test_other_hardware_is_refused(tmp_path: Path) -> None:
    ResultFile(tmp_path / "r.json", HARDWARE).save()
    with pytest.raises(ResultsError, match="Some CPU"):
        ResultFile(tmp_path / "r.json", {**HARDWARE, "cores": 4})
    with pytest.raises(ResultsError, match="doesn't exist"):
        ResultFile(tmp_path / "other.json")


def test_numbers_are_kept_to_five_digits(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "r.json", HARDWARE)
    file.merge([record(median=1.23456789e-3)])
    file.save()
    assert ResultFile(file.path).records[0].median == 1.2346e-3


def test_a_folder_gets_a_file_named_after_the_hardware(tmp_path: Path) -> None:
    assert path_for(tmp_path, "some-cpu") == tmp_path / "some-cpu.json"
    assert path_for(tmp_path / "mine.json", "some-cpu") == tmp_path / "mine.json"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.34, "12.3 s"),
        (2.914e-3, "2.91 ms"),
        (0.9996e-3, "1000 us"),
        (57e-6, "57.0 us"),
        (0.25e-6, "0.25 us"),
        (0.252, "252 ms"),
    ],
)
def test_durations_have_three_digits(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_committed_results_are_of_cases_and_backends_that_exist() -> None:
    names = (
        {b.name for b in registry.backends()}
        | {"auto", "gpu"}
        | set(importlib.import_module("convpar.bench.libraries").PEERS)
    )
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        for r in ResultFile(path).records:
            assert r.case in all_cases(), path
            assert r.backend in names, path
            assert not r.error, path


# -- tables


def test_the_table_of_backends_lists_what_convpar_brings() -> None:
    table = script("tables").backends_table()
    rows = table.splitlines()[2:]
    assert [r.split("|")[1].strip(" `") for r in rows] == [
        b.name for b in registry.backends() if b.name.startswith(("numpy", "cpu-", "gpu-"))
    ]
    cells = {r.split("|")[1].strip(" `"): [c.strip() for c in r.split("|")[1:-1]] for r in rows}
    private = cells["cpu-private"]
    assert private[1] == "cpu"
    assert "private variable" in private[2]
    assert private[4:] == ["`cpu-naive`", "E"]
    assert cells["numpy"][5] == ""
    assert cells["gpu-constant"][5] == "A, B, C"


def test_a_plugin_is_not_in_the_table_of_backends() -> None:
    numpy = registry.find("numpy")
    assert numpy is not None

    class Plugin:
        contract, summary, builds_on = 1, "somebody's", None
        name = "zz-plugin"
        capabilities, options = numpy.capabilities, numpy.options
        unavailable, plan = numpy.unavailable, numpy.plan

    registry.register(Plugin())  # type: ignore[arg-type]
    try:
        assert "zz-plugin" not in script("tables").backends_table()
    finally:
        registry.unregister("zz-plugin")


def rows_of(text: str) -> dict[str, list[str]]:
    """The rows of the only table in `text` by their first cell, the header under ""."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {"": cells[0], **{row[0].strip("`"): row for row in cells[2:]}}


def test_comparison_shows_times_ratios_and_conditions() -> None:
    ours = full_record()
    # A peer's own record may be of another run, and nothing of it is shown.
    stray = [record(backend="scipy", median=99.0), record(backend="torch", median=0.5, error="wrong")]
    other = record(
        case=HEADLINE[1],
        median=0.0042,
        chose="cpu-unrolled",
        contract="elementwise",
        date="2026-01-03T00:00:00+00:00",
        peers=ours.peers,
    )
    text = script("tables").comparison_table(HEADLINE, [ours, *stray, other])
    assert (
        "2 threads; copy 40 GB/s; float32 250 GMAC/s; convpar 1.0 (abc); 2026-01-02 to 2026-01-03\n" in text
    )
    rows = rows_of(text)
    assert rows[""] == ["case", "convpar", "rung", "of limit", "scipy `correlate2d`"]
    assert rows[ours.case][1:] == ["2.00 ms ± 100 us", "cpu-made", "50%", "161 ms (80.50x)"]
    assert rows[other.case][2:] == ["cpu-unrolled", "", "161 ms (38.33x)"]
    assert "torch" not in text
    assert (
        "- convpar: 2 threads; output array given; float32 * float32 -> float32: elementwise, one, two"
        in text
    )
    assert (
        "- scipy 1.2, `correlate2d`: 1 thread; as it comes; float32 * float32 -> float32: elementwise, unrounded"
        in text
    )


def test_what_ran_alone_is_in_no_comparison() -> None:
    """Neither as a row, nor in the conditions, nor as a section of its own; nor is a peer whose every answer was wrong."""
    tables = script("tables")
    alone = [
        record(case=HEADLINE[1], date="2026-05-05T00:00:00+00:00", ceilings={"bandwidth": 9e10, "fma": {}}),
        record(case=HEADLINE[2], peers={"scipy": beside()}),
        record(threads=16),
        dataclasses.replace(full_record(), case=HEADLINE[3], level="baseline"),
    ]
    ours = full_record()
    for targets in (False, True):
        text = tables.comparison_table(HEADLINE, [ours, *alone], targets=targets)
        assert text == tables.comparison_table(HEADLINE, [ours], targets=targets)
        assert ours.case in text
        assert tables.comparison_table(HEADLINE, alone, targets=targets) == ""


def test_the_table_of_peers_is_of_the_default_cases(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "a.json", HARDWARE)
    other = next(name for name in all_cases() if name not in HEADLINE)
    file.merge([dataclasses.replace(full_record(), case=case) for case in (HEADLINE[0], other)])
    text = script("tables").results_table("peers", [file])
    assert f"`{HEADLINE[0]}`" in text
    assert f"`{other}`" not in text


def scaling_records(case: str = HEADLINE[0], **more: Any) -> list[Record]:
    return [
        record(
            case=case, threads=n, median=0.008 / gain, chose="cpu-simd", share=share,
            ceilings={"bandwidth": n * 1e10, "fma": {"float32": n * 1e11}}, **more,
        )
        for n, gain, share in ((1, 1.0, 0.5), (2, 1.6, 0.4), (16, 8.0, 1.25))
    ]  # fmt: skip


def test_scaling_has_a_column_for_each_number_of_threads() -> None:
    table = script("tables").scaling_table
    few = scaling_records(HEADLINE[1])[:2]
    noise = [
        record(backend="cpu-simd", threads=4, median=9.0),
        record(backend="scipy", threads=4, median=9.0),
        record(threads=4, median=9.0, build="unoptimised"),
        record(threads=4, median=9.0, level="v3"),
        record(backend="gpu", threads=0, median=9.0),
    ]
    text = table([*few, *scaling_records(), *noise])
    rows = rows_of(text)
    assert rows[""] == ["case", "rung", "1 thread", "2 threads", "16 threads"]
    assert set(rows) == {"", HEADLINE[0]}
    assert rows[HEADLINE[0]][1:] == [
        "cpu-simd",
        "8.00 ms ± 100 us (1.00x, 50% of limit)",
        "5.00 ms ± 100 us (1.60x, 40% of limit)",
        "1.00 ms ± 100 us (8.00x, 125% of limit)",
    ]
    assert "- 2 threads: copy 20 GB/s, float32 200 GMAC/s\n- 16 threads: copy 160 GB/s" in text
    assert table([*few, *noise]) == ""


def test_scaling_leaves_out_what_wasnt_measured() -> None:
    """No speedup without one thread's time of the same commit, no share without a limit, a blank for a missing count."""
    records = [
        *scaling_records(),
        *(record(case=HEADLINE[1], threads=n, median=0.004, chose=f"cpu-{n > 4}") for n in (2, 4, 8)),
    ]
    rows = rows_of(script("tables").scaling_table(records))
    assert rows[""][2:] == ["1 thread", "2 threads", "4 threads", "8 threads", "16 threads"]
    assert rows[HEADLINE[1]][1:] == ["cpu-False, cpu-True", "", *["4.00 ms ± 100 us"] * 3, ""]
    one, two, many = scaling_records()
    rows = rows_of(script("tables").scaling_table([one, dataclasses.replace(two, commit="another"), many]))
    assert [cell.split("(")[1] for cell in rows[HEADLINE[0]][2:]] == [
        "1.00x, 50% of limit)",
        "40% of limit)",
        "8.00x, 125% of limit)",
    ]


def test_a_ratio_is_its_cell_over_convpars() -> None:
    """Each method of a peer has its column: what it does first, and what is its fastest somewhere."""
    first = record(
        median=0.01,
        contract="elementwise",
        peers={
            "scipy": beside(correlate2d=setting(0.5), oaconvolve=setting(0.02, "normwise x 8")),
            "opencv": beside(filter2D=setting(0.03), filter2D__1_thread=setting(0.02, threads=1)),
            "torch": beside(NCHW=setting(0.03), channels_last=setting(0.04), other=setting(0.05)),
        },
    )
    second = record(
        case=HEADLINE[1],
        median=0.1,
        contract="normwise",
        peers={
            "scipy": beside(correlate2d=setting(0.05), oaconvolve=setting(0.2, "normwise x 8")),
            "torch": beside(NCHW=setting(0.03), channels_last=setting(0.02), other=setting(0.05)),
        },
    )
    text = script("tables").comparison_table(HEADLINE, [first, second])
    rows = rows_of(text)
    assert rows[""][4:] == [
        "scipy `correlate2d`", "scipy `oaconvolve`", "opencv `filter2D`", "torch `NCHW`", "torch `channels last`",
    ]  # fmt: skip
    assert rows[first.case][4:] == [
        "500 ms (50.00x)", "20.0 ms (2.00x) normwise", "20.0 ms (2.00x) 1 thread", "30.0 ms (3.00x)",
        "40.0 ms (4.00x)",
    ]  # fmt: skip
    assert rows[second.case][4:] == [
        "50.0 ms (0.50x) elementwise", "200 ms (2.00x)", "", "30.0 ms (0.30x) elementwise",
        "20.0 ms (0.20x) elementwise",
    ]  # fmt: skip
    assert "nowhere the fastest of its library: torch `other`" in text


def test_a_busy_machine_and_few_samples_are_told() -> None:
    slow = {"scipy": beside(correlate2d=setting(9.0, repeats=3))}
    text = script("tables").comparison_table(HEADLINE, [record(peers=slow, busy=0.345)])
    assert "others used up to 34% of the processors" in text
    assert "15 samples, of the slowest at least 3" in text
    text = script("tables").comparison_table(HEADLINE, [dataclasses.replace(full_record(), busy=0.01)])
    assert "others used" not in text
    assert "medians of 15 samples;" in text


def test_targets_are_met_or_not() -> None:
    tables = script("tables")

    def reached(case: str, median: float, share: float | None = None, **peers: dict[str, Any]) -> list[str]:
        row = record(case=case, median=median, share=share, peers=peers)
        text = tables.comparison_table([case], [row], targets=True)
        rows = rows_of(text)
        assert rows[""][-2:] == ["target", "met"]
        return rows[case][-2:]

    k3, k31 = "single-4096-k3-float32-valid", "single-4096-k31-float32-valid-normwise"
    opencv = beside(filter2D=setting(0.0023), filter2D__1_thread=setting(0.004))
    assert reached(k3, 0.001, opencv=opencv) == ["2.3x opencv", "yes, 2.30x"]
    assert reached(k3, 0.0011, opencv=opencv) == ["2.3x opencv", "no, 2.09x"]
    # Where even the limit misses it.
    assert reached(k3, 0.0011, 0.95, opencv=opencv) == ["2.3x opencv", "no, 2.09x (2.20x at the limit)"]
    assert reached(k3, 0.0011, 0.9, opencv=opencv) == ["2.3x opencv", "no, 2.09x"]
    assert reached(k3, 0.001, 0.99, opencv=opencv) == ["2.3x opencv", "yes, 2.30x"]
    # Fewer multiplications than the limit counts, say: then it limits nothing.
    assert reached(k3, 0.0011, 1.5, opencv=opencv) == ["2.3x opencv", "no, 2.09x"]
    other = beside(correlate2d=setting(0.1))
    assert reached(k3, 0.001, scipy=other) == ["2.3x opencv", ""]
    assert reached(k31, 1.0, opencv=beside(filter2D=setting(5.0, "normwise x 8"))) == [
        "4x opencv",
        "yes, 5.00x",
    ]
    scipy, ndimage = beside(correlate2d=setting(0.09, "exact")), beside(correlate=setting(0.02, "exact"))
    assert reached("single-4096-k7-int32-valid", 0.001, scipy=scipy, ndimage=ndimage) == [
        "80x scipy, 25x ndimage", "yes, 90.00x; no, 20.00x",
    ]  # fmt: skip
    # Which of two it is must show where the other's library wasn't timed.
    assert reached("single-4096-k7-int32-valid", 0.001, ndimage=ndimage) == [
        "80x scipy, 25x ndimage", "not timed; no, 20.00x",
    ]  # fmt: skip
    assert reached("single-8-k3-float32-valid", 2.9e-6, scipy=other) == ["at most 3.00 us", "yes"]
    assert reached("single-8-k3-float32-valid", 3.1e-6, scipy=other) == ["at most 3.00 us", "no"]
    assert reached("single-4096-k3-uint8-int32-valid", 1.0, scipy=other) == ["", ""]
    # Targets are of CPUs.
    gpu = record(case=k3, backend="gpu", threads=0, peers={"cupy": beside(fast=setting(0.1))})
    assert tables.comparison_table([k3], [gpu], targets=True) == ""


def test_targets_are_of_cases_and_peers_that_exist() -> None:
    targets = script("targets").TARGETS
    peers = importlib.import_module("convpar.bench.libraries").PEERS
    for case, goals in targets.items():
        assert case in all_cases()
        assert all((g.peer in peers) == (g.ratio > 0) != (g.seconds > 0) for g in goals), case
    tables = script("tables").TABLES
    free = {
        "table-levels",
        "table-pictures",
        "table-layers-last",
        "table-networks",
        "table-one-image",
        "table-integers",
    }
    plain = {f"table-{name}" for name in tables} - free
    tabled = {
        name
        for name, case in all_cases().items()
        if plain & {t for t in case.tags if not t.startswith("table-growth-")}
    }
    assert set(targets) <= tabled
    without = ("uint8-int32", "uint8-float32")
    assert {name for name in tabled - set(targets) if not any(label in name for label in without)} == set()


def ladder_records(scale: float = 1.0, **more: Any) -> list[Record]:
    return [
        record(case="single-4096-k3-int32-valid", backend=b, median=scale * t, **more)
        for b, t in (("cpu-naive", 0.08), ("cpu-private", 0.04), ("cpu-unrolled", 0.016))
    ]


def test_ladder_shows_each_rung_over_the_one_before() -> None:
    records = [*ladder_records(), *ladder_records(10, build="unoptimised"), *ladder_records(2, threads=1)]
    lines = script("tables").ladder_table(records).splitlines()
    assert lines[-3] == "| shipped | int32 | 3x3 | 1 | 160 ms | 80.0 ms | 32.0 ms | 2.00 | 2.50 |"
    assert lines[-2] == "| shipped | int32 | 3x3 | 2 | 80.0 ms | 40.0 ms | 16.0 ms | 2.00 | 2.50 |"
    assert lines[-1] == "| unoptimised | int32 | 3x3 | 2 | 800 ms | 400 ms | 160 ms | 2.00 | 2.50 |"
    # A rung that is missing leaves its row out rather than a hole.
    assert script("tables").ladder_table(records[:2]) == ""


def test_accuracy_shows_both_contracts() -> None:
    text = script("tables").accuracy_table([HEADLINE[0]], [full_record(), record(threads=1)])
    assert f"| `{HEADLINE[0]}` | `auto` | elementwise | 0.25 | 0.5 | 0.12 | 0.25 |" in text
    assert text.count(HEADLINE[0]) == 1


def test_a_table_without_results_is_empty(tmp_path: Path) -> None:
    tables = script("tables")
    other = ResultFile(tmp_path / "a.json", HARDWARE)
    other.merge([record(case="vgg-64-64-224x224-k3-n1")])
    for name in tables.TABLES:
        assert tables.results_table(name, []) == tables.results_table(name, [other]) == ""
    with pytest.raises(ValueError, match=r"no table is called 'other'.*peers"):
        tables.results_table("other", [])


def test_every_table_is_made_for_the_hardware_that_has_it(tmp_path: Path) -> None:
    file = ResultFile(tmp_path / "a.json", HARDWARE)
    file.merge([full_record(), *ladder_records()])
    gpu = ResultFile(tmp_path / "b.json", {"gpu": "Some GPU"})
    cupy = {"cupy": beside(fast=setting(1e-3))}
    gpu.merge([record(backend="gpu", threads=0, chose="gpu-direct", median=1e-4, peers=cupy)])
    tables = script("tables")
    peers = tables.results_table("peers", [file, gpu])
    assert "**Some CPU (x86_64), 2 cores**, 2 threads; " in peers
    assert "**Some GPU**, " in peers
    assert "gpu-direct" in peers
    ladder = tables.results_table("ladder", [file, gpu])
    assert "Some CPU" in ladder
    assert "Some GPU" not in ladder


# -- growth and levels


def test_growth_with_the_image_is_held_against_a_copy_of_its_size() -> None:
    table = script("tables").growth_size_table
    case = "single-4096-k3-float32-same"
    n = 4096 * 4096
    least = all_cases()[case].problem().least_bytes
    made = record(
        case=case, median=1.25 * least / 4e10, chose="cpu-simd", contract="elementwise", copy=4e10,
        peers={"opencv": beside(filter2D=setting(2.5 * least / 4e10))},
    )  # fmt: skip
    noise = [
        record(case=case, level="v3", copy=1e10),
        record(case=f"{case}-normwise", copy=1e10),
        record(case="single-512-k3-float32-same"),
        record(case=HEADLINE[0], copy=1e10),
    ]
    rows = rows_of(table([made, *noise]))
    assert list(rows) == ["", *(f"{s} x {s}" for s in (512, 1024, 2048, 4096, 8192, 16384, 32768))]
    time = 1.25 * least / 4e10
    assert rows["4096 x 4096"][2:] == [
        "cpu-simd", f"{time / n * 1e9:.3f}", "0.200", "+25%", "40", f"opencv `filter2D` {2e3 * time:.2f} ms (2.00x)",
    ]  # fmt: skip
    # What has no time says how much it would move.
    assert rows["32768 x 32768"][1:] == ["not timed: arrays of 8590 MB", *[""] * 6]
    assert table(noise) == ""


def test_growth_with_the_filter_names_the_fastest_that_keeps_the_contract() -> None:
    table = script("tables").growth_filter_table
    dft = setting(0.15, "normwise x 8")
    peers = {
        "scipy": beside(correlate2d=setting(4.0), oaconvolve=setting(0.4, "normwise x 8")),
        "opencv": beside(filter2D=dft),
    }
    case = "single-4096-k15-float32-same"
    strict = record(case=case, median=0.1, chose="cpu-simd", contract="elementwise", share=0.5, peers=peers)
    loose = record(
        case=f"{case}-normwise",
        median=0.05,
        chose="cpu-fft2d",
        contract="normwise x 8",
        share=2.0,
        peers=peers,
    )
    alone = dataclasses.replace(
        strict, case="single-4096-k63-float32-same", peers={"opencv": peers["opencv"]}
    )
    text = table([strict, loose, alone, record(case="single-4096-k3-float32-same")])
    rows = rows_of(text)
    assert list(rows) == ["", "15x15", "63x63"]
    assert rows["15x15"][1:] == [
        "100 ms ± 100 us", "cpu-simd", "50%", "scipy `correlate2d` 4.00 s (40.00x)",
        "50.0 ms ± 100 us", "cpu-fft2d", "200%", "opencv `filter2D` 150 ms (3.00x)",
    ]  # fmt: skip
    # Nobody keeps it: then the fastest at all, and that it doesn't.
    assert rows["63x63"][4:] == ["opencv `filter2D` 150 ms (1.50x) normwise", "", "", "", ""]
    assert "- opencv 1.2, `filter2D`: 2 threads; " in text
    assert table([record(case="single-4096-k3-float32-same")]) == ""


def test_levels_have_a_row_each_and_limits_of_their_own() -> None:
    table = script("tables").levels_table
    peers = {"opencv": beside(filter2D=setting(0.008))}
    held = [
        record(
            level=level, median=0.002 * slower, chose="cpu-simd", contract="elementwise", share=0.5, peers=peers,
            ceilings={"bandwidth": 4e10, "fma": {"float32": 2e11 / slower}},
        )
        for level, slower in (("baseline", 4), ("v4", 1), ("v3", 2))
    ]  # fmt: skip
    text = table([*held, record(median=9.0), record(level="v3", backend="cpu-simd")])
    lines = [line for line in text.splitlines() if line.startswith(f"| `{HEADLINE[0]}`")]
    assert [line.split(" | ")[1:] for line in lines] == [
        ["v4", "2.00 ms ± 100 us", "cpu-simd", "50%", "opencv `filter2D` 8.00 ms (4.00x) |"],
        ["v3", "4.00 ms ± 100 us", "cpu-simd", "50%", "opencv `filter2D` 8.00 ms (2.00x) |"],
        ["baseline", "8.00 ms ± 100 us", "cpu-simd", "50%", "opencv `filter2D` 8.00 ms (1.00x) |"],
    ]
    assert "\n- v3: copy 40 GB/s, float32 100 GMAC/s\n- baseline: copy 40 GB/s, float32 50 GMAC/s" in text
    assert table([record()]) == ""


# -- documents


DOCUMENT = (
    "# Title\n\n<!-- backends -->\n<!-- end -->\ntext\n<!-- results:peers -->\nold\n<!-- end -->\nmore\n"
)


def test_marked_parts_are_replaced_and_nothing_else(tmp_path: Path) -> None:
    render = script("render").render
    file = ResultFile(tmp_path / "a.json", HARDWARE)
    file.merge([full_record()])
    made = render(DOCUMENT, [file])
    assert "cpu-naive" in made
    assert "80.50x" in made
    assert "old" not in made
    assert [line for line in made.splitlines() if line in ("# Title", "text", "more")] == [
        "# Title",
        "text",
        "more",
    ]
    assert render(made, [file]) == made
    file.merge([dataclasses.replace(full_record(), chose="cpu-other")])
    assert render(made, [file]) == made.replace("| cpu-made |", "| cpu-other |")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- results:peers -->\n",
        "<!-- end -->\n",
        "<!-- results:peers -->\n<!-- backends -->\n<!-- end -->\n",
        "<!-- results:no-such -->\n<!-- end -->\n",
    ],
)
def test_marks_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"marks must come in pairs|no table is called"):
        script("render").render(text, [])


def test_a_document_may_have_marks_without_results(tmp_path: Path) -> None:
    text = "a\n<!-- results:{} -->\nold\n<!-- end -->\nb\n"
    module = script("render")
    for name in ("peers", "levels", *module.FOLDERS):
        made = module.render(text.format(name), [], tmp_path)
        assert made == f"a\n<!-- results:{name} -->\n<!-- end -->\nb\n"
        assert module.render(made, [], tmp_path) == made


def test_check_fails_until_the_document_is_rendered(tmp_path: Path) -> None:
    main = script("render").main
    document, folder = tmp_path / "doc.md", tmp_path / "results"
    document.write_text(DOCUMENT)
    file = ResultFile(folder / "a.json", HARDWARE)
    file.merge([full_record()])
    file.save()

    def run(*more: str) -> Any:
        return CliRunner().invoke(main, [str(document), "--results", str(folder), *more])

    stale = run("--check")
    assert stale.exit_code == 1
    assert "+| `numpy`" in stale.output
    assert document.read_text() == DOCUMENT
    assert run().exit_code == 0
    assert run("--check").exit_code == 0
    file.merge([dataclasses.replace(full_record(), median=9.0)])
    file.save()
    assert run("--check").exit_code == 1


def test_a_broken_result_file_stops_the_rendering(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "doc.md").write_text(DOCUMENT)
    shown = CliRunner().invoke(script("render").main, [str(tmp_path / "doc.md"), "--results", str(tmp_path)])
    assert shown.exit_code == 1
    assert "a.json" in shown.output
    assert (tmp_path / "doc.md").read_text() == DOCUMENT


# -- two commits


def rounds(rng: np.random.Generator, factor: float, noise: float, count: int = 25) -> tuple[list[float], ...]:
    """Samples of three runs, the last slower by `factor`, with lognormal noise and a drift that all share."""
    drift = np.exp(np.cumsum(rng.normal(0, 0.05, count)))
    return tuple((f * drift * np.exp(rng.normal(0, noise, count))).tolist() for f in (1.0, 1.0, factor))


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.08])
def test_a_slowdown_of_a_fifth_is_found(noise: float) -> None:
    judge = script("compare").judge
    rng = np.random.default_rng(0)
    for factor, change in ((1.2, "slower"), (1 / 1.2, "faster")):
        found = [judge(1.1, *rounds(rng, factor, noise)).change for _ in range(100)]
        assert found.count(change) >= 95
    verdict = judge(1.1, *rounds(rng, 1.2, noise))
    assert verdict.ratio == pytest.approx(1.2, rel=4 * noise)


@pytest.mark.parametrize("noise", [0.01, 0.1, 0.5, 2.0])
def test_noise_is_no_slowdown(noise: float) -> None:
    judge = script("compare").judge
    rng = np.random.default_rng(1)
    found = [judge(1.1, *rounds(rng, 1.0, noise)).change for _ in range(1000)]
    assert found.count("slower") + found.count("faster") <= 2


def test_a_base_that_differs_from_itself_says_nothing() -> None:
    base = [1.0] * 25
    verdict = script("compare").judge(1.1, base, [1.3] * 25, [1.6] * 25)
    assert verdict == ("unclear", 1.6, 1.3)


@pytest.mark.parametrize(
    ("found", "reported", "asked"),
    [
        (["same", "slower", "slower"], "same", 1),
        (["slower", "slower", "same"], "slower", 2),
        (["faster", "same", "faster"], "same", 2),
        (["unclear", "slower", "slower"], "slower", 3),
        (["slower", "unclear", "slower"], "slower", 3),
        (["unclear", "unclear", "slower"], "unclear", 2),
        (["slower", "faster", "unclear"], "unclear", 3),
        (["slower"], "unclear", 1),
    ],
)
def test_a_change_is_reported_when_found_twice(found: list[str], reported: str, asked: int) -> None:
    compare = script("compare")
    used: list[str] = []

    def verdicts() -> Iterator[Any]:
        for change in found:
            used.append(change)
            yield compare.Verdict(change, 1.0, 1.0)

    assert compare.settle(verdicts()).change == reported
    assert len(used) == asked


def test_a_commit_is_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = script("build")
    repository = tmp_path / "repository"
    repository.mkdir()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(repository)]
    (repository / "file.txt").write_text("committed")
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    (repository / "file.txt").write_text("changed since")
    monkeypatch.setattr(build, "ROOT", repository)
    assert (build.export("HEAD", tmp_path / "out") / "file.txt").read_text() == "committed"
    click = importlib.import_module("click")
    with pytest.raises(click.ClickException, match="no commit 'no-such'"):
        build.export("no-such", tmp_path / "other")


# -- asv


def suites() -> list[Any]:
    modules = [
        p.stem
        for p in sorted((ROOT / "benchmarks" / "suites").glob("*.py"))
        if p.stem not in ("__init__", "common")
    ]
    found = []
    for name in modules:
        module = script(f"suites.{name}")
        found += [v for v in vars(module).values() if isinstance(v, type) and v.__module__ == module.__name__]
    return found


def test_the_suites_name_cases_that_exist() -> None:
    classes = suites()
    assert len(classes) >= 5
    for suite in classes:
        named = np.ravel(np.array(suite.params, dtype=object)).tolist()
        flat = [n for entry in named for n in (entry if isinstance(entry, (list, tuple)) else [entry])]
        unknown = [n for n in flat if n not in all_cases() and not n.startswith("cpu-")]
        assert not unknown, suite
        assert any(name.startswith(("time_", "track_")) for name in vars(suite))


def test_a_suite_runs_a_small_case_and_skips_what_isnt_there() -> None:
    small = script("suites.calls").Small()
    name = "single-8-k3-float32-valid"
    small.setup(name)
    for method in ("time_conv2d", "time_conv2d_new_output", "time_plan_run", "time_plan"):
        getattr(small, method)(name)
    assert np.isfinite(small.out).all()
    with pytest.raises(NotImplementedError, match="no case"):
        small.setup("a case of another commit")
    with pytest.raises(NotImplementedError, match="cpu-no-such"):
        script("suites.single").Ladder().setup("cpu-no-such", name)


def test_the_gpu_suite_skips_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(NotImplementedError, match="needs CuPy"):
        script("suites.gpu").Gpu().setup("single-4096-k3-float32-valid")


# -- the scripts from end to end, on copies of the package instead of builds


def copied(folder: Path, *, patch: tuple[str, str, str] | None = None) -> Path:
    """The package that runs, copied into `folder`, with (file, old, new) replaced."""
    package = Path(convpar.__file__).parent
    shutil.copytree(
        package, folder / "convpar", ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True
    )
    if patch is not None:
        name, old, new = patch
        path = folder / "convpar" / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))
    return folder


def test_the_ladder_is_measured_in_both_builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = script("ladder")
    asked: list[tuple[Any, ...]] = []

    def build(source: Path, folder: Path, *options: str) -> Path:
        asked.append(options)
        return copied(folder)

    monkeypatch.setattr(ladder, "build", build)
    monkeypatch.delenv("CONVPAR_ISA", raising=False)  # the table leaves out levels that are asked for
    shown = CliRunner().invoke(
        ladder.main,
        [
            "--case",
            "single-64-k3-int32-valid",
            "--threads",
            "1",
            "--repeats",
            "3",
            "--json",
            str(tmp_path / "r.json"),
        ],
    )
    assert shown.exit_code == 0, shown.output
    assert asked == [("-Dladder=unoptimised",)]
    found = {(r.backend, r.build) for r in ResultFile(tmp_path / "r.json").records}
    assert found == {(b, k) for b in ladder.LADDER for k in ("shipped", "unoptimised")}
    assert "| shipped | int32 | 3x3 | 1 |" in shown.output
    assert "| unoptimised | int32 | 3x3 | 1 |" in shown.output


def test_a_commit_that_computes_nonsense_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = script("compare")
    wrong = (
        "api.py",
        "def conv2d(",
        "def conv2d(*a, **k):\n    y = _conv2d(*a, **k)\n    y += 1\n    return y\n\n\ndef _conv2d(",
    )

    def build(source: Path, folder: Path, *options: str) -> Path:
        return copied(folder, patch=wrong if folder.name == "new" else None)

    monkeypatch.setattr(compare, "build", build)
    monkeypatch.setattr(compare, "export", lambda commit, folder: folder)
    arguments = ["one", "two", "--case", "single-8-k3-float32-valid", "--threads", "1", "--rounds", "10"]
    shown = CliRunner().invoke(compare.main, arguments)
    assert shown.exit_code == 1, shown.output
    row = next(line for line in shown.output.splitlines() if "single-8-k3" in line)
    assert "new is wrong" in row
    assert "base is wrong" not in row


def test_a_planted_slowdown_lengthens_every_call(tmp_path: Path) -> None:
    compare = script("compare")
    slow = compare.planted(copied(tmp_path / "base"), tmp_path / "slow", 1.5)
    code = """
import sys, time
sys.path.insert(0, sys.argv[1])
# That of an editable install looks before the path.
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
import numpy as np, convpar
told = [10.0, 12.0, 12.5, 12.9, 13.1]
time.perf_counter = lambda: told.pop(0)
print(convpar.conv2d(np.ones((3, 3)), np.ones((3, 3)), backend="numpy"), told, convpar.__file__)
"""
    # The call took 2 s, so it ends when 3 have passed.
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, str(slow)], capture_output=True, text=True, check=True
    )
    assert ran.stdout.strip() == f"[[9.]] [] {slow / 'convpar' / '__init__.py'}"
    shown = CliRunner().invoke(compare.main, ["one", "two", "--plant", "1.2"])
    assert shown.exit_code == 2
    assert "takes the place of NEW" in shown.output


def test_a_planted_slowdown_is_held_against_its_base(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = script("compare")
    monkeypatch.setattr(compare, "build", lambda source, folder: copied(folder))
    monkeypatch.setattr(compare, "export", lambda commit, folder: folder)
    slowed: list[tuple[str, str, float]] = []
    plant = compare.planted

    def planted(package: Path, folder: Path, factor: float) -> Path:
        slowed.append((package.name, folder.name, factor))
        return plant(package, folder, factor)  # type: ignore[no-any-return]

    monkeypatch.setattr(compare, "planted", planted)
    found = compare.Verdict("slower", 1.2, 1.0)
    monkeypatch.setattr(compare, "judge", lambda factor, base, again, new: found)
    arguments = ["one", "--case", "single-8-k3-float32-valid", "--threads", "1", "--rounds", "10"]
    shown = CliRunner().invoke(compare.main, [*arguments, "--plant", "1.2"])
    assert shown.exit_code == 1, shown.output
    assert "slower" in shown.output
    assert slowed == [("base", "new", 1.2)]


def test_a_commit_that_cannot_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    compare = script("compare")
    refuses = (
        "api.py",
        "def conv2d(",
        "def conv2d(*a, **k):\n    raise ValueError('not in this commit')\n\n\ndef _conv2d(",
    )

    def build(source: Path, folder: Path, *options: str) -> Path:
        return copied(folder, patch=refuses if folder.name == "new" else None)

    monkeypatch.setattr(compare, "build", build)
    monkeypatch.setattr(compare, "export", lambda commit, folder: folder)
    shown = CliRunner().invoke(
        compare.main, ["one", "--case", "single-8-k3-float32-valid", "--threads", "1", "--rounds", "10"]
    )
    assert shown.exit_code == 0, shown.output
    assert "new: ValueError: not in this commit" in " ".join(shown.output.split())


def test_the_choosers_losses_are_measured_and_shown(tmp_path: Path) -> None:
    regret = script("regret")
    done = CliRunner().invoke(
        regret.main,
        ["--case", "single-64-k3-float32-valid", "--repeats", "2", "--threads", "1", "--json", str(tmp_path)],
    )
    convpar.set_num_threads(None)
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.json")
    (loss,) = RecordFile(regret.Loss, path).records
    assert (loss.case, loss.threads) == ("single-64-k3-float32-valid", 1)
    assert loss.chose in loss.times
    assert loss.ratios.keys() == loss.times.keys()
    assert loss.ratios[loss.chose] == 1
    assert "by shortest times" not in regret.table(tmp_path)
    assert f"| `{loss.case}` | {loss.chose} |" in regret.table(tmp_path)
    twice = dataclasses.replace(loss, chose="a", times={"a": 2.0, "b": 1.0}, ratios={})
    assert (twice.fastest, twice.regret) == ("b", 1)
    assert "1 cases, 1 by shortest times" in regret._summary([twice])
    in_turn = dataclasses.replace(twice, ratios={"a": 1.0, "b": 0.9})
    assert (in_turn.fastest, in_turn.regret) == ("a", 0)
    assert regret.table(tmp_path / "nowhere") == ""


@pytest.mark.parametrize(("agree", "taken", "loss"), [(1, 1, 0.04), (2, 3, 0.04), (99, 5, 1.0)])
def test_a_loss_is_looked_at_again(
    agree: int, taken: int, loss: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    regret = script("regret")
    case = all_cases()["single-64-k3-float32-valid"]
    chosen = regret.measure(case, 1).chose
    rounds = []

    def interleave(samplers: Any, repeats: int) -> dict[str, list[float]]:
        rounds.append(repeats)
        mine = 1.04 if len(rounds) >= agree else 2.0
        # Now slow and now fast, and others once by chance.
        turns = [9.0, 1.0, 7.0, 8.0, 2.0]
        return {
            name: [mine * t for t in turns] if name == chosen else [9.0, 1.0, 0.1, 8.0, 2.0]
            for name in samplers
        }

    monkeypatch.setattr(regret, "interleave", interleave)
    # Else a busy machine could leave the chosen rung alone.
    monkeypatch.setattr(regret, "HOPELESS", float("inf"))
    found = regret.measure(case, 5)
    assert rounds == [5] * taken
    assert found.rounds == taken
    assert found.regret == pytest.approx(loss)
    assert found.fastest != chosen
    assert found.times[found.fastest] == 2.0


def test_steps_over_the_rung_below_are_measured_and_shown(tmp_path: Path) -> None:
    steps = script("steps")
    done = CliRunner().invoke(
        steps.main,
        [
            "--rung", "cpu-private", "--rung", "cpu-unrolled", "--case", "single-8-k3-float32-valid",
            "--repeats", "2", "--threads", "1", "--json", str(tmp_path),
        ],
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.json")
    found = {s.rung: s for s in RecordFile(steps.Step, path).records}
    assert {s.rung: s.builds_on for s in found.values()} == {
        "cpu-private": "cpu-naive",
        "cpu-unrolled": "cpu-private",
    }
    assert all(s.before > 0 and s.after > 0 and s.threads == 1 for s in found.values())
    twice = dataclasses.replace(
        found["cpu-private"], before=3e-3, after=2e-3, before_spread=1e-4, after_spread=0
    )
    file = RecordFile(steps.Step, tmp_path / "other.json", HARDWARE)
    file.merge([dataclasses.replace(twice, rung="cpu-packed", after_contract="normwise x 8"), twice])
    file.save()
    path.unlink()
    text = steps.table(tmp_path)
    assert "**Some CPU (x86_64), 2 cores**, 1 thread; convpar " in text
    # In the order of the registry, whatever that of the file.
    rows = text.splitlines()[-2:]
    assert rows[0] == (
        "| `cpu-private` | `cpu-naive` | `single-8-k3-float32-valid` | 3.00 ms ± 100 us | 2.00 ms ± 0.00 us | 1.50x "
        "| elementwise |"
    )
    assert rows[1].endswith("| normwise x 8, over elementwise |")
    refused = CliRunner().invoke(
        steps.main,
        [
            "--rung",
            "cpu-unrolled",
            "--case",
            "single-64-k9-float32-valid",
            "--threads",
            "1",
            "--repeats",
            "1",
        ],
    )
    assert refused.exit_code == 1
    assert "3x3, 5x5, 7x7 only" in " ".join(refused.output.split())
    assert "not timed: cpu-unrolled" in refused.output


def test_the_cases_of_steps_are_of_rungs_that_build_on_one() -> None:
    steps = script("steps")
    below = steps.ladder()
    assert set(steps.CASES) <= set(below)
    names = {name for cases in (*steps.CASES.values(), steps.OTHERS) for name in cases}
    assert names <= set(all_cases())
    for rung, over in below.items():
        for name in steps.CASES.get(rung, steps.OTHERS):
            case = all_cases()[name]
            for backend in (rung, over):
                made = registry.find(backend)
                assert made is not None
                if made.unavailable() is None:
                    convpar.plan(
                        convpar.ArraySpec(case.x_shape, case.x_dtype),
                        convpar.ArraySpec(case.w_shape, case.w_dtype),
                        backend=backend,
                        **case.options,
                    )


def test_the_largest_workspaces_are_found_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = script("workspace")
    small, large = (f"single-{n}-k3-float32-valid" for n in (8, 4096))
    done = CliRunner().invoke(workspace.main, ["--case", small, "--case", large, "--json", str(tmp_path)])
    assert done.exit_code == 0, done.output
    (path,) = tmp_path.glob("*.json")
    found = {r.key: r for r in RecordFile(workspace.Largest, path).records}
    # Some take neither of the two.
    served = {backend for backend, _ in found}
    assert set(workspace.names(usable=True)) - served <= {
        "cpu-pairs",
        "cpu-amx8",
        "cpu-amx",
        "cpu-toeplitz",
        "cpu-ifma",
        "cpu-depthwise",
    }
    assert "numpy" not in workspace.names()
    case = all_cases()[large]
    for (backend, threads), r in found.items():
        plan = convpar.plan(
            convpar.ArraySpec(case.x_shape), convpar.ArraySpec(case.w_shape), backend=backend, **case.options
        )
        assert r.cases == 2
        convpar.set_num_threads(threads)
        try:
            assert r.size >= plan.workspace_bytes()
        finally:
            convpar.set_num_threads(None)
        assert backend in ("cpu", r.rung)
    one = workspace.Largest(backend="cpu", threads=2, cases=9, size=3 * 2**19, case="c", rung="cpu-simd")
    assert "| `cpu` | 9 | 1.5 MiB, `c` |" in workspace._summary([one])
    shown = workspace.table(tmp_path)
    assert "| `cpu` |" in shown
    for backend in registry.backends():
        monkeypatch.setattr(type(backend), "unavailable", lambda self: "not built")
    assert workspace.names(usable=True) == ["cpu"]
    assert workspace.table(tmp_path) == shown  # a document is the same wherever it is made


def test_a_case_too_large_to_time_is_left_out(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        script("regret").main,
        ["--case", "single-64-k3-float32-valid", "--bytes", "1000", "--json", str(tmp_path)],
    )
    assert "left out, its arrays take" in done.output
    assert not list(tmp_path.glob("*.json"))
