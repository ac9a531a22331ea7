"""The list of cases: static, complete, and what the published numbers say of it."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import convpar
from convpar import cases
from convpar.backends import cpu
from convpar.problem import is_integer

ALL = list(cases.all_cases().values())


def test_the_list_needs_nothing_that_may_be_missing() -> None:
    code = (
        "import sys\n"
        "from convpar import cases\n"
        "cases.all_cases()\n"
        "print(*sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert not set(loaded) & {"scipy", "cv2", "torch", "cupy", "click", "rich", "matplotlib", "hypothesis"}


def test_every_case_is_a_problem_with_a_speaking_name() -> None:
    assert len(ALL) > 500
    for case in ALL:
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", case.name), case.name
        problem = case.problem()
        assert problem.x_shape == case.x_shape
        assert problem.outputs > 0
        assert case.tags
        assert cases.find(case.name) is case


def test_cases_cannot_be_changed() -> None:
    case = ALL[0]
    with pytest.raises(dataclasses.FrozenInstanceError):
        case.name = "other"  # type: ignore[misc]
    with pytest.raises(TypeError):
        case.options["padding"] = "full"  # type: ignore[index]
    assert len({*ALL}) == len(ALL)


@pytest.mark.parametrize(
    ("layer", "output", "macs", "traffic"),
    [(1, (4, 80, 80), 1_254_400, 131_984), (2, (16, 34, 34), 3_625_216, 99_584)],
)
@pytest.mark.parametrize("n", [100, 1000, 5000, 10000])
def test_network_layers_are_the_published_ones(
    layer: int, output: tuple[int, int, int], macs: int, traffic: int, n: int
) -> None:
    problem = cases.find(f"network-{layer}-n{n}").problem()
    assert problem.out_shape == (n, *output)
    assert problem.macs == n * macs
    filters = problem.oc * problem.c * 49 * 4
    assert problem.least_bytes - filters == n * traffic


def test_report_b_has_the_ratio_of_its_starter_times() -> None:
    first, second = (cases.find(f"report-b-{layer}-n10000").problem() for layer in (1, 2))
    assert second.macs / first.macs == pytest.approx(11970 / 3030, rel=0.03)


@pytest.mark.parametrize("size", [64, 512, 4096, 32768])
@pytest.mark.parametrize("k", [3, 5, 7, 9, 11, 15, 31])
@pytest.mark.parametrize("padding", ["valid", "same"])
@pytest.mark.parametrize(
    ("label", "types"),
    [
        ("float32", ("float32", "float32", "float32", "float32")),
        ("float64", ("float64", "float64", "float64", "float64")),
        ("int32", ("int32", "int32", "int32", "int32")),
        ("int16", ("int16", "float32", "float32", "int16")),
        ("uint8", ("uint8", "float32", "float32", "uint8")),
        ("uint8-int32", ("uint8", "uint8", "int32", "int32")),
    ],
)
def test_single_channel_grid(size: int, k: int, padding: str, label: str, types: tuple[str, ...]) -> None:
    problem = cases.find(f"single-{size}-k{k}-{label}-{padding}").problem()
    side = size if padding == "same" else size - k + 1
    assert problem.out_shape == (1, 1, side, side)
    assert problem.w_shape == (1, 1, k, k)
    found = (problem.x_dtype, problem.w_dtype, problem.sum_dtype, problem.out_dtype)
    assert tuple(d.name for d in found) == types


def test_the_families_that_are_measured_are_there() -> None:
    families = {
        "network",
        "report-b",
        "report-e",
        "single",
        "small",
        "separable",
        "resnet",
        "vgg",
        "deepbench",
    }
    assert families | {"mobilenet", "convnext", "depthwise", "ladder", "normwise"} <= set(cases.tags())
    large = [c for c in cases.select(["depthwise"]) if c.w_shape[2:] == (31, 31)]
    assert {c.x_shape[0] for c in large} == {4, 64}
    assert all(c.problem().groups == c.x_shape[1] for c in cases.select(["depthwise"]))
    assert {c.x_shape[-1] for c in cases.select(["small"])} == {8, 64, 512, 1024}
    assert {c.x_shape[-1] for c in cases.select(["report-e"])} >= {64, 256, 512, 1024, 2048, 4096}


def test_the_ladder_is_two_types_and_three_filters_on_one_image() -> None:
    ladder = cases.select(["ladder"])
    assert {(c.x_dtype, c.w_shape[-1]) for c in ladder} == {
        (t, k) for t in ("int32", "float32") for k in (3, 5, 7)
    }
    assert {c.x_shape for c in ladder} == {(1, 1, 4096, 4096)}


def test_the_rows_of_the_tables_that_have_targets() -> None:
    def names(tag: str) -> set[str]:
        return {c.name for c in cases.select([tag])}

    assert names("table-single") == {
        *(f"single-4096-k{k}-float32-valid" for k in (3, 5, 7, 9, 11, 15, 31)),
        *(f"single-4096-k{k}-float32-valid-normwise" for k in (15, 31)),
    }
    assert names("table-types") == {
        f"single-4096-k{k}-{label}-valid"
        for k in (3, 5, 7)
        for label in ("float64", "int32", "uint8", "uint8-float32", "uint8-int32", "int16")
    }
    assert names("table-small") == names("small")
    assert names("table-separable") == {f"separable-4096-k{k}-float32" for k in (3, 5, 7, 15, 31)}
    layers = cases.select(["table-layers"])
    plain = [c for c in layers if "normwise" not in c.tags]
    assert len(plain) == 8
    assert {c.w_shape[-1] for c in layers if "normwise" in c.tags} == {3, 31}
    assert {c.x_dtype for c in layers} == {"float32"}
    assert {c.pixels for c in cases.select(["table-pictures"])} == {True, False}
    last = cases.select(["table-layers-last"])
    assert {c.channels_last for c in last} == {True}
    assert names("table-layers-last").isdisjoint(names("table-layers"))
    assert names("table-networks") == set(cases.NETWORKS)
    assert names("table-one-image") == set(cases.ONE_IMAGE)
    assert {c.x_shape[0] for c in cases.select(["table-one-image"])} == {1}
    integers = cases.select(["table-integers"])
    assert {(c.x_dtype, c.w_dtype) for c in integers} == {("uint8", "int8"), ("int16", "int16")}
    assert {c.problem().out_dtype.name for c in integers} == {"int32"}
    free = (
        "table-growth-",
        "table-pictures",
        "table-layers-last",
        "table-networks",
        "table-one-image",
        "table-integers",
    )
    targets = [t for t in cases.tags() if t.startswith("table-") and not t.startswith(free)]
    assert all("targets-cpu" in c.tags for t in targets for c in cases.select([t]))
    assert names("table-levels") == set(cases.LEVELS)


def test_arrays_lie_as_a_case_says() -> None:
    small = {"x_shape": (2, 3, 8, 9), "w_shape": (4, 3, 3, 3), "options": {"padding": 1}}
    for case in (cases.Case(name="planes", **small), cases.Case(name="last", **small, channels_last=True)):
        x, w, out = case.operands(np.random.default_rng(0))
        same_x, same_w = case.arrays(np.random.default_rng(0))
        assert np.array_equal(x, same_x)
        assert np.array_equal(w, same_w)
        assert (x.shape, out.shape) == ((2, 3, 8, 9), (2, 4, 8, 9))
        for a in (x, out):
            assert a.transpose(0, 2, 3, 1).flags.c_contiguous == case.channels_last


def test_growth_goes_with_the_image_the_filter_and_the_channels() -> None:
    sizes = cases.select(["table-growth-size"])
    assert [c.x_shape[2:] for c in sizes] == [(n, n) for n in (512, 1024, 2048, 4096, 8192, 16384, 32768)]
    assert {(c.w_shape, c.x_dtype) for c in sizes} == {((1, 1, 3, 3), "float32")}
    filters = cases.select(["table-growth-filter"])
    growth = {
        accuracy: [c.w_shape[2] for c in filters if c.problem().accuracy == accuracy]
        for accuracy in (None, "normwise")
    }
    assert growth[None] == growth["normwise"] == [3, 5, 7, 9, 11, 13, 15, 21, 31, 47, 63]
    assert {c.x_shape for c in filters} == {(1, 1, 4096, 4096)}
    channels = cases.select(["table-growth-channels"])
    assert [c.x_shape[1] for c in channels[::2]] == [2**n for n in range(10)]
    for plain, normwise in zip(channels[::2], channels[1::2], strict=True):
        assert normwise.name == f"{plain.name}-normwise"
        assert plain.w_shape == (plain.x_shape[1], plain.x_shape[1], 3, 3)
        assert plain.problem().out_shape == plain.x_shape
        # About as much work, but where the images would be too many.
        assert 1e9 < plain.problem().macs < 2e9 or plain.x_shape[0] == 8192


MOST_WORKSPACE = 64 * 2**20


@pytest.fixture
def default_threads() -> Iterator[None]:
    yield
    convpar.set_num_threads(None)


@pytest.mark.skipif(cpu.build_info().keys() == {"engine"}, reason="the compiled engine isn't built")
@pytest.mark.parametrize("threads", [1, 2, 16, 1024])
def test_the_workspace_of_every_case_is_bounded(threads: int, default_threads: None) -> None:
    beyond = {}
    convpar.set_num_threads(threads)
    for case in ALL:
        x, w = (
            convpar.ArraySpec(shape, dtype)
            for shape, dtype in ((case.x_shape, case.x_dtype), (case.w_shape, case.w_dtype))
        )
        plan = convpar.plan(x, w, backend="cpu", **case.options)
        if plan.workspace_bytes() > MOST_WORKSPACE:
            beyond[case.name] = plan.backend.name
    assert not beyond


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["network-1-n100"], ["network-1-n100"]),
        (["network-?-n1000"], ["network-1-n1000", "network-2-n1000"]),
        (["small"], [f"single-{n}-k3-float32-valid" for n in (8, 64, 512, 1024)]),
        (["network-2-n100", "network-1-n100"], ["network-1-n100", "network-2-n100"]),
        ([], None),
    ],
)
def test_select(patterns: list[str], names: list[str] | None) -> None:
    found = [c.name for c in cases.select(patterns)]
    assert sorted(found) == sorted(cases.HEADLINE if names is None else names)
    order = list(cases.all_cases())
    assert found == sorted(found, key=order.index)


@pytest.mark.parametrize("choose", [cases.find, lambda name: cases.select(["small", name])])
def test_an_unknown_name_lists_the_tags(choose: object) -> None:
    with pytest.raises(ValueError, match=r"'no-such-\*'.*network.*resnet"):
        choose("no-such-*")  # type: ignore[operator]


SMALL = [c for c in ALL if np.prod(c.x_shape) <= 300_000 and np.prod(c.w_shape) <= 300_000]


@pytest.mark.parametrize("case", SMALL, ids=lambda c: c.name)
def test_arrays(case: cases.Case) -> None:
    x, w = case.arrays(np.random.default_rng(3))
    assert (x.shape, w.shape, x.dtype, w.dtype) == (case.x_shape, case.w_shape, case.x_dtype, case.w_dtype)
    assert x.flags.c_contiguous
    assert w.flags.c_contiguous
    again = case.arrays(np.random.default_rng(3))
    assert all(np.array_equal(a, b) for a, b in zip((x, w), again, strict=True))
    assert len(np.unique(x)) > min(20, x.size // 4)


def test_integer_sums_are_exact_in_float32() -> None:
    """So that a library which sums integers in floats gives the same answer."""
    checked = 0
    for case in ALL:
        problem = case.problem()
        if is_integer(problem.sum_dtype):
            assert problem.terms * case.largest**2 < 2**24
            assert case.largest >= 50
            checked += 1
    assert checked > 100
    for name in ("single-64-k31-int32-valid", "single-64-k31-uint8-int32-valid"):
        x, w = cases.find(name).arrays(np.random.default_rng(0))
        assert max(np.abs(x.astype(int)).max(), np.abs(w.astype(int)).max()) <= 100


@pytest.mark.parametrize(
    "name", ["single-64-k5-uint8-valid", "single-64-k5-int16-same", "separable-512-k7-uint8"]
)
def test_filters_for_pictures_blur(name: str) -> None:
    """No sum leaves the picture's type: wrapping and saturating libraries agree."""
    x, w = cases.find(name).arrays(np.random.default_rng(0))
    assert (w >= 0).all()
    assert w.sum() == pytest.approx(1, rel=1e-6)
    assert x.max() > 0.9 * np.iinfo(x.dtype).max


@pytest.mark.parametrize("name", ["separable-512-k15-float32", "separable-512-k3-uint8"])
def test_separable_filters_are(name: str) -> None:
    case = cases.find(name)
    assert case.separable
    singular = np.linalg.svd(case.arrays(np.random.default_rng(0))[1][0, 0].astype(float), compute_uv=False)
    assert singular[1] < 1e-6 * singular[0]
    dense = cases.find("single-512-k15-float32-valid")
    singular = np.linalg.svd(dense.arrays(np.random.default_rng(0))[1][0, 0].astype(float), compute_uv=False)
    assert singular[1] > 1e-2 * singular[0]
    assert not dense.separable


def test_bright_patch() -> None:
    case = cases.find("single-64-k3-float32-valid")
    plain, _ = case.arrays(np.random.default_rng(0))
    bright, _ = case.arrays(np.random.default_rng(0), bright=True)
    changed = plain != bright
    assert 0 < changed.mean() < 0.05
    assert np.abs(bright).max() > 100 * np.abs(plain).max()
