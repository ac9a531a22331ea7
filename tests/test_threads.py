"""Threads: how many, whoever asks; callers at once; and processes that fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import convpar
from convpar import conv2d, get_num_threads, plan, set_num_threads, threads
from convpar.backends import cpu

ROOT = Path(convpar.__file__).parent.parent
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
needs_openmp = pytest.mark.skipif(
    isinstance(cpu.build_info().get("OpenMP", ""), str), reason="the engine was built without OpenMP"
)


@pytest.fixture(autouse=True)
def default_threads() -> Any:
    yield
    set_num_threads(None)


def python(code: str, timeout: float = 60, **environment: str) -> str:
    """What a new process prints; it must end by itself, and well."""
    kept = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env={**kept, "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        # Children that hang are of its session too.
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s: {out}{err}") from None
    assert process.returncode == 0, err
    return out.strip()


# -- how many


def test_the_setting_is_process_wide_and_can_be_taken_back() -> None:
    before = get_num_threads()
    set_num_threads(3)
    seen: list[int] = []
    t = threading.Thread(target=lambda: seen.append(get_num_threads()))
    t.start()
    t.join()
    assert seen == [get_num_threads()] == [3]
    set_num_threads(np.int64(threads.available() + 5))
    assert get_num_threads() == threads.available() + 5
    set_num_threads(None)
    assert get_num_threads() == before


@needs_openmp
def test_calls_follow_the_setting_although_they_are_remembered() -> None:
    x, w = np.ones((300, 300), np.float32), np.ones((3, 3), np.float32)
    p = plan(x, w, backend="cpu-private")
    set_num_threads(1)
    p(x, w)
    assert "parallel" not in p.plan.paths_run()
    set_num_threads(2)
    p(x, w)
    assert "parallel" in p.plan.paths_run()


@needs_openmp
def test_only_by_default_do_small_problems_stay_on_one_thread() -> None:
    x = np.ones((8, 8))
    p = plan(x, x[:3, :3], backend="cpu-private")
    set_num_threads(4)
    p(x, x[:3, :3])
    assert p.plan.paths_run() >= {"serial"}
    assert "parallel" not in p.plan.paths_run()
    p(x, x[:3, :3], num_threads=2)
    assert "parallel" in p.plan.paths_run()


@needs_openmp
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads in /proc")
def test_num_threads_is_exact_and_may_exceed_the_processors() -> None:
    code = (
        "import os, numpy as np, convpar\n"
        "x, w = np.ones((60, 60)), np.ones((3, 3))\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "convpar.conv2d(x, w, num_threads=1)\n"
        "before = count()\n"
        "for n in (3, 7, 40):\n"
        "    assert (convpar.conv2d(x, w, num_threads=n) == 9).all()\n"
        "    print(count() - before)\n"
    )
    assert python(code).split() == ["2", "6", "39"]


@pytest.mark.parametrize("n", [1, 2, 3, 5, 64])
def test_more_threads_than_work(n: int) -> None:
    x, w = np.arange(25.0).reshape(5, 5), np.ones((3, 3))
    np.testing.assert_array_equal(conv2d(x, w, num_threads=n), conv2d(x, w, backend="numpy"))
    assert conv2d(x[:0], w, padding="same", num_threads=n).shape == (0, 5)


# -- shares

_ONE_DOES_ALL = """
import numpy as np, convpar
rng = np.random.default_rng(3)
x = rng.integers(-9, 10, ({h}, {w})).astype(np.float32)
filter = rng.integers(2, 4, ({k}, {k})).astype(np.float32)
p = convpar.plan(x, filter, dtype=np.int16, overflow="raise", backend="cpu-simd", num_threads=4)
right = convpar.conv2d(x, filter, dtype=np.int16, overflow="raise", backend="cpu-simd", num_threads=1)
assert np.array_equal(p(x, filter), right)
print("stolen" in p.plan._task.paths_run())
x[-20:, -20:] = x[{first}:{first} + 10, 5:10] = 30_000
try:
    p(x, filter)
except OverflowError as error:
    assert f"(0, 0, {{{first} - {k} + 1}}, {{max(6 - {k}, 0)}})" in str(error), error
    print("the first of those that don't fit")
"""


@needs_openmp
@pytest.mark.parametrize(
    ("h", "w", "k", "stolen"),
    [(600, 300, 7, True), (600, 300, 3, False), (2900, 2000, 3, True)],
    ids=["many products", "few, from caches", "few, from memory"],
)
def test_a_thread_that_is_done_takes_items_of_others(h: int, w: int, k: int, stolen: bool) -> None:
    # The first of four shares is the only one with a thread until it's done; of the others the larger are taken first, so that
    # the last share comes before the third.
    out = python(_ONE_DOES_ALL.format(h=h, w=w, k=k, first=h * 13 // 20), OMP_THREAD_LIMIT="1")
    assert out.splitlines() == [str(stolen), "the first of those that don't fit"]


@needs_openmp
@pytest.mark.parametrize("number", [2, 3, 7])
def test_every_item_is_computed_whoever_takes_it(number: int) -> None:
    rng = np.random.default_rng(17)
    x, w = rng.standard_normal((300, 200), np.float32), rng.standard_normal((7, 7), np.float32)
    p = plan(x, w, backend="cpu-simd", config={"tile": (4, 16)}, num_threads=number)
    right = p(x, w, num_threads=1)
    np.testing.assert_allclose(right, conv2d(x, w, backend="cpu-naive"), rtol=1e-4, atol=1e-4)
    out, workspace = np.empty_like(right), np.empty(p.workspace_bytes(), np.uint8)
    for _ in range(100):
        out.fill(np.nan)
        workspace.fill(0xFF)
        p.plan.run(x, w, None, out, workspace=workspace, num_threads=number)
        np.testing.assert_array_equal(out, right)
    assert "stolen" in p.plan._task.paths_run()


# -- what the environment says


@pytest.mark.parametrize(
    ("text", "number"),
    [("4", 4), (" 3 ", 3), ("2,4", 2), ("5,", 5), ("1024", 1024), ("", None), ("   ", None)],
)
def test_omp_num_threads(text: str, number: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert threads._from_environment() == number


@pytest.mark.parametrize("text", ["0", "-2", "two", "2.5", ",3", "1025", "99999999999999999999", "0x4"])
def test_a_wrong_omp_num_threads_is_ignored_with_a_warning(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    with pytest.warns(RuntimeWarning, match=rf"OMP_NUM_THREADS='{text}'.*from 1 to 1024"):
        assert threads._from_environment() is None


def test_the_order_of_precedence() -> None:
    code = (
        "import convpar\n"
        "print(convpar.get_num_threads())\n"
        "convpar.set_num_threads(2); print(convpar.get_num_threads())\n"
        "convpar.set_num_threads(None); print(convpar.get_num_threads())\n"
    )
    assert python(code, OMP_NUM_THREADS="3,1").split() == ["3", "2", "3"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no processor affinity")
def test_affinity_is_honoured_and_read_once() -> None:
    code = (
        "import os\n"
        "cpus = sorted(os.sched_getaffinity(0))\n"
        "os.sched_setaffinity(0, cpus[:1])\n"
        "import numpy as np, convpar\n"
        "print(convpar.get_num_threads())\n"
        "os.sched_setaffinity(0, cpus)\n"
        "convpar.conv2d(np.ones((300, 300)), np.ones((3, 3)))\n"
        "print(convpar.get_num_threads(), convpar.threads.available())\n"
    )
    assert python(code).split() == ["1", "1", "1"]


def _tree(root: Path, files: dict[str, str]) -> Path:
    """A control group hierarchy; the file of the process's groups lies beside it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        # Version 2, in a container: the root is ours, whatever the path says.
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/docker/abc", {"cpu.max": "300000 100000"}, 3),
        ("0::/../..", {"cpu.max": "300000 100000"}, 3),
        # Version 2, on a host: the tightest from ours up.
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "250000 100000", "cpu.max": "max 1"}, 3),
        ("0::/a/b", {"a/b/cpu.max": "100000 100000", "a/cpu.max": "800000 100000"}, 1),
        ("0::/a/b", {"other/cpu.max": "100000 100000"}, None),
        # Version 1.
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4),
        ("4:cpu,cpuacct:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        (
            "9:memory:/m\n4:cpuacct,cpu:/a\n0::/",
            {
                "cpu/a/cpu.cfs_quota_us": "250000",
                "cpu/a/cpu.cfs_period_us": "100000",
                "cpu/cpu.cfs_quota_us": "-1",
                "cpu/cpu.cfs_period_us": "100000",
            },
            3,
        ),
        # Another controller's quota, and files that say nothing.
        ("2:cpuset:/a", {"cpuset/a/cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "lots 100000"}, None),
        ("0::/", {"cpu.max": "100000"}, None),
        ("0::/", {"cpu.max": "100000 0"}, None),
        ("0::/", {"cpu.max": ""}, None),
        ("nonsense", {"cpu.max": "200000 100000"}, 2),
        ("", {}, None),
    ],
)
def test_control_group_limits(groups: str, files: dict[str, str], limit: Any, tmp_path: Path) -> None:
    root = _tree(tmp_path / "cgroup", files)
    (tmp_path / "groups").write_text(groups + "\n")
    assert threads._cgroup_limit(root, tmp_path / "groups") == limit


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert threads._cgroup_limit(tmp_path / "none", tmp_path / "nothing") is None


# -- callers at once


def _problems() -> list[tuple[Any, Any, dict[str, Any]]]:
    rng = np.random.default_rng(11)

    def whole(*shape: int) -> Any:
        return rng.integers(-9, 10, shape)

    return [
        (whole(70, 90).astype("f4"), whole(3, 3).astype("f4"), {"padding": "same", "boundary": "wrap"}),
        (whole(3, 40, 41), whole(4, 3, 5, 5), {"stride": 2}),
        (whole(2, 33, 47, 3).astype(">i2"), whole(3, 3).astype("i1"), {"channel_axis": -1, "dtype": "int64"}),
        (whole(64, 64).astype("c8"), whole(7, 7).astype("c8"), {"flip": True, "padding": "full"}),
    ]


@pytest.mark.parametrize("number", [None, 1, 3])
def test_callers_at_once_each_get_their_own_answer(number: Any) -> None:
    problems = _problems()
    right = [conv2d(x, w, backend="numpy", **rules) for x, w, rules in problems]
    start = threading.Barrier(len(problems))
    wrong: list[Any] = []

    def work(k: int) -> None:
        x, w, rules = problems[k]
        start.wait()
        for _ in range(15):
            try:
                np.testing.assert_array_equal(conv2d(x, w, num_threads=number, **rules), right[k])
            except BaseException as e:
                wrong.append((k, e))

    callers = [threading.Thread(target=work, args=(k,)) for k in range(len(problems))]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert not wrong


def test_one_plan_serves_callers_at_once() -> None:
    rng = np.random.default_rng(13)
    w = rng.integers(-9, 10, (3, 3)).astype(np.float32)
    images = [rng.integers(-9, 10, (80, 80)).astype(np.float32) for _ in range(4)]
    p = plan(images[0], w, padding=1, dtype="int16", num_threads=2)
    right = [p(x, w) for x in images]
    wrong: list[Any] = []

    def work(k: int) -> None:
        out = np.empty_like(right[k])
        for _ in range(20):
            if not np.array_equal(p(images[k], w, out=out), right[k]):
                wrong.append(k)

    callers = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in callers:
        t.start()
    for t in callers:
        t.join()
    assert not wrong


# -- processes that fork

# Opens with what every one of these needs; `work` is right or raises.
SETTING = """
import os, sys, threading, time, warnings
import numpy as np, convpar
warnings.simplefilter("ignore", DeprecationWarning)  # newer Pythons warn of a fork beside threads
x, w = np.arange(250000.0).reshape(500, 500) % 7, np.ones((3, 3))
right = convpar.conv2d(x, w, backend="numpy")
def work(n=2):
    assert np.array_equal(convpar.conv2d(x, w, num_threads=n), right)
def child(n=2):
    pid = os.fork()
    if pid == 0:
        work(n)
        os._exit(0)
    return pid
def ended(pid):
    assert os.waitpid(pid, 0)[1] == 0
def thread(target):
    t = threading.Thread(target=target)
    t.start()
    return t
"""

FORKS = {
    "before anything ran": "ended(child())",
    "after a parallel call": "work(); ended(child()); work(); ended(child(3)); work(3)",
    "a serial child": "work(); ended(child(1)); work()",
    "many children at once": "work(); [ended(p) for p in [child() for _ in range(6)]]; work()",
    "from another thread than the one that ran": "thread(work).join(); ended(child()); work()",
    "in a thread, after the main thread ran": "work(); thread(lambda: ended(child())).join(); work()",
    "a child's child": """
work()
pid = os.fork()
if pid == 0:
    work()
    ended(child())
    work()
    os._exit(0)
ended(pid)
""",
    "while another thread runs": """
going = True
def keep():
    while going:
        work()
t = thread(keep)
try:
    for _ in range(10):
        ended(child())
finally:
    going = False
    t.join()
work()
""",
    "while another thread makes its first call": """
load = convpar.registry._load_family
def slowly(module):
    with convpar.registry.STATE:
        loading.set()
        time.sleep(0.1)
        load(module)
loading = threading.Event()
convpar.registry._load_family = slowly
t = thread(work)
loading.wait()
ended(child())
t.join()
""",
    "by the default number of threads": "work(None); ended(child(None)); work(None)",
}


@needs_fork
@pytest.mark.parametrize("case", FORKS)
def test_a_fork_returns(case: str) -> None:
    assert python(SETTING + FORKS[case] + "\nprint('done')") == "done"


@needs_fork
def test_a_pool_of_forked_processes() -> None:
    code = SETTING + (
        "import multiprocessing\n"
        "def task(k):\n"
        "    return bool(np.array_equal(convpar.conv2d(x + k, w, num_threads=2), right + 9 * k))\n"
        "work()\n"
        "with multiprocessing.get_context('fork').Pool(3) as pool:\n"
        "    print(all(pool.map(task, range(8))))\n"
        "work()\n"
    )
    assert python(code) == "True"
