"""Arrays from wherever they come, and what comes back; pictures past 2**31 elements."""

from __future__ import annotations

import array
import contextlib
import itertools
import os
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy import signal as scipy_signal

import convpar
from convpar import arrays, conv2d
from convpar.arrays import CPU
from convpar.backends.reference import Reference
from convpar.signal import correlate2d

X = np.arange(48, dtype=np.float32).reshape(6, 8)
W = np.arange(9, dtype=np.float32).reshape(3, 3) - 4
RIGHT = conv2d(X, W)


class Interface:
    """Speaks the array interface alone."""

    def __init__(self, a: Any) -> None:
        self.a = a

    @property
    def __array_interface__(self) -> Any:
        return self.a.__array_interface__


class Copying:
    """Gives out a copy of its elements, whatever it is asked for."""

    def __init__(self, a: Any) -> None:
        self.a = a

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.array(self.a, dtype)


class Sharing(Copying):
    """Gives out its own memory."""

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.a


class Exchange:
    """Speaks DLPack alone."""

    def __init__(self, a: Any) -> None:
        self.a = a

    def __dlpack__(self, **settings: Any) -> Any:
        return self.a.__dlpack__(**settings)

    def __dlpack_device__(self) -> Any:
        return self.a.__dlpack_device__()


class Standard(Exchange):
    """Also names its array API, whose arrays are made of DLPack."""

    def __array_namespace__(self) -> Any:
        return SimpleNamespace(from_dlpack=lambda y: Standard(np.from_dlpack(y)))


class Subclass(np.ndarray):
    """An array with a name of its own."""


KINDS = {
    "interface": Interface,
    "copying": Copying,
    "sharing": Sharing,
    "exchange": Exchange,
    "subclass": lambda a: a.view(Subclass),
    "list": lambda a: a.tolist(),
    "tuple of arrays": tuple,
    "memoryview": memoryview,
    "read-only": lambda a: np.frombuffer(a.tobytes(), a.dtype).reshape(a.shape),
}


class Odd:
    """Fails in a way of its own."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ZeroDivisionError("planted"), r"ZeroDivisionError\('planted'\)"), (KeyError("a"), r"KeyError\('a'\)"),
        (ImportError("planted"), r"ImportError\('planted'\)"), (AssertionError(), r"AssertionError\(\)"),
        (ValueError("planted"), "planted"),
    ],
)  # fmt: skip
def test_whatever_an_array_raises_is_the_cause_of_a_type_error(error: Exception, text: str) -> None:
    for name, given in (("x", (Odd(error), W)), ("w", (X, Odd(error))), ("bias", (X, W, Odd(error)))):
        with pytest.raises(TypeError, match=f"^{name} can't be seen as an array: {text}$") as caught:
            conv2d(*given)
        assert caught.value.__cause__ is error


def test_memory_that_runs_out_is_no_type_error() -> None:
    with pytest.raises(MemoryError):
        conv2d(Odd(MemoryError()), W)


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_arrays_give_numpy_arrays(kind: str) -> None:
    make = KINDS[kind]
    for x, w in ((make(X), W), (X, make(W)), (make(X), make(W))):
        y = conv2d(x, w)
        assert type(y) is np.ndarray
        np.testing.assert_array_equal(y, RIGHT)
    y = conv2d(X, W[None, None].repeat(1, 0), make(np.float32([1.5])))
    np.testing.assert_array_equal(y, RIGHT + 1.5)


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("dtype", ["f4", "?", "g", ">i2", "c16"])
def test_subclasses_give_plain_arrays_of_every_type(dtype: str) -> None:
    x = np.asmatrix(X.astype(dtype))
    y = conv2d(x, W)
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, conv2d(np.asarray(x), W))


def test_an_array_of_the_array_api_comes_back_as_one() -> None:
    y = conv2d(Standard(X), W)
    assert isinstance(y, Standard)
    np.testing.assert_array_equal(y.a, RIGHT)


def test_other_libraries_never_see_negative_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr(
        Standard,
        "__array_namespace__",
        lambda self: SimpleNamespace(from_dlpack=lambda y: seen.append(y) or y),
    )
    small, large = X[:2, :2], X[:4, :5]
    y = correlate2d(Standard(small), large, "valid")
    np.testing.assert_array_equal(y, scipy_signal.correlate2d(small, large, "valid"))
    assert [a is y for a in seen] == [True]
    assert min(y.strides) > 0


def test_a_memory_map(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "picture", np.float32, "w+", shape=X.shape)
    mapped[:] = X
    y = conv2d(mapped, W)
    assert type(y) is np.ndarray
    np.testing.assert_array_equal(y, RIGHT)
    out = np.memmap(tmp_path / "result", np.float32, "w+", shape=RIGHT.shape)
    assert conv2d(mapped, W, out=out) is out
    np.testing.assert_array_equal(out, RIGHT)


def test_lists_have_numpys_types() -> None:
    assert conv2d([[1, 2], [3, 4]], [[1]]).dtype == np.int64
    assert conv2d([[1.0, 2], [3, 4]], [[1]]).dtype == np.float64
    assert conv2d([[True, False]], [[1]]).dtype == np.int64


@pytest.mark.parametrize("kind", ["interface", "sharing", "exchange", "subclass", "memoryview"])
def test_out_of_another_kind_is_written_through(kind: str) -> None:
    memory = np.full(RIGHT.shape, np.nan, np.float32)
    out = KINDS[kind](memory)
    assert conv2d(X, W, out=out) is out
    np.testing.assert_array_equal(memory, RIGHT)


def test_out_of_another_kind_is_checked_for_overlap() -> None:
    memory = np.zeros((8, 8), np.float32)
    with pytest.raises(ValueError, match="out shares memory with x"):
        conv2d(memory, W, out=Interface(memory[:6, :6]))
    with pytest.raises(ValueError, match="out shares memory with w"):
        conv2d(memory[:5, :5], Interface(memory[5:8, 5:8]), out=memory[5:8, 5:8])
    with pytest.raises(ValueError, match="out shares memory with bias"):
        conv2d(X, W, memory[0, :1].reshape(()), out=memory[:4, :6])


@pytest.mark.parametrize(
    "out",
    [Copying(RIGHT), RIGHT.tolist(), tuple(RIGHT), 3.0, array.array("f", [0.0] * 4)],
    ids=lambda o: type(o).__name__,
)
def test_out_that_only_gives_copies_is_refused(out: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="out must"):
        conv2d(X, W, out=out)


# -- torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="checks tensors of PyTorch")


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float64", "float16", "bfloat16", "complex64", "uint8", "int8", "int64", "uint16", "bool"],
)
def test_a_tensor_comes_back_as_a_tensor(torch: Any, dtype: str) -> None:
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes", reason="bfloat16 comes with ml_dtypes")
    x = (torch.tensor(X) / 8).to(getattr(torch, dtype))
    w = torch.ones((3, 3), dtype=torch.int8).to(torch.float32 if dtype == "bool" else x.dtype)
    y = conv2d(x, w)
    assert isinstance(y, torch.Tensor)
    assert y.device == x.device
    assert y.dtype == w.dtype
    right = conv2d(x.to(torch.complex128).numpy(), np.ones((3, 3)))
    got = y.to(torch.complex128).numpy()
    if dtype in ("uint8", "int8"):
        right = right.real.astype(np.int64).astype(dtype)
    np.testing.assert_allclose(got, right, rtol=1e-2)


def test_a_tensor_of_swapped_operands(torch: Any) -> None:
    small, large = X[:2, :2], X[:4, :5]
    y = correlate2d(torch.tensor(small), torch.tensor(large), "valid")
    np.testing.assert_array_equal(y.numpy(), scipy_signal.correlate2d(small, large, "valid"))


def test_a_tensor_is_read_where_it_lies(torch: Any) -> None:
    x = torch.tensor(X).T[:, ::2]
    assert not x.is_contiguous()
    np.testing.assert_array_equal(conv2d(x, torch.tensor(W)).numpy(), conv2d(X.T[:, ::2], W))
    step = torch.tensor(X).view(torch.int32)
    np.testing.assert_array_equal(conv2d(step, W).numpy(), conv2d(X.view(np.int32), W))


def test_the_image_decides_the_kind_of_the_result(torch: Any) -> None:
    assert isinstance(conv2d(torch.tensor(X), W, torch.tensor(1.0)), torch.Tensor)
    assert type(conv2d(X, torch.tensor(W), torch.tensor([1.0]))) is np.ndarray
    assert type(conv2d(X.tolist(), torch.tensor(W))) is np.ndarray


def test_a_tensor_as_out(torch: Any) -> None:
    out = torch.zeros(RIGHT.shape[::-1]).T
    assert conv2d(X, W, out=out) is out
    np.testing.assert_array_equal(out.numpy(), RIGHT)
    x = torch.tensor(X)
    with pytest.raises(ValueError, match="out shares memory with x"):
        conv2d(x, W, out=x[:4, :6])


def test_bfloat16_tensors_as_out(torch: Any) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 comes with ml_dtypes")
    out = torch.zeros(RIGHT.shape, dtype=torch.bfloat16)
    assert conv2d(torch.tensor(X), torch.tensor(W), dtype="bfloat16", out=out) is out
    np.testing.assert_array_equal(out.float().numpy(), torch.tensor(RIGHT).bfloat16().float().numpy())


def _tensor(torch: Any, kind: str) -> Any:
    x = torch.tensor(X)
    return {
        "grad": lambda: x.requires_grad_(),
        "bfloat16 grad": lambda: x.bfloat16().requires_grad_(),
        "sparse": lambda: x.to_sparse(),
        "conjugate": lambda: (x + 1j).conj(),
        "meta": lambda: x.to("meta"),
    }[kind]()


@pytest.mark.parametrize(
    ("kind", "advice"),
    [
        ("grad", r"detach\(\)"), ("bfloat16 grad", r"detach\(\)"), ("sparse", r"to_dense\(\)"),
        ("conjugate", r"resolve_conj\(\)"), ("meta", "meta"),
    ],
)  # fmt: skip
def test_tensors_that_have_no_plain_memory(torch: Any, kind: str, advice: str) -> None:
    pytest.importorskip("ml_dtypes", reason="bfloat16 comes with ml_dtypes")
    tensor = _tensor(torch, kind)
    with pytest.raises(TypeError, match=f"x can't be seen as an array: .*{advice}"):
        conv2d(tensor, W)
    with pytest.raises(TypeError, match=f"w can't be seen as an array: .*{advice}"):
        conv2d(X, tensor)
    if kind != "sparse":
        with pytest.raises(TypeError, match=f"out can't be seen as an array: .*{advice}"):
            conv2d(X, W, out=tensor)


def test_a_result_that_torch_has_no_type_for(torch: Any) -> None:
    with pytest.raises(TypeError, match=f"{np.dtype(np.longdouble)}.*Tensor can't hold"):
        conv2d(torch.tensor(X), W, dtype="longdouble")


def test_a_tensor_of_bfloat16_without_its_package(torch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(dtype: Any, name: str) -> Any:
        raise TypeError("that type comes with the package ml_dtypes")

    monkeypatch.setattr("convpar.arrays.check_dtype", unknown)
    with pytest.raises(TypeError, match=r"x can't be seen as an array: .*ml_dtypes"):
        conv2d(torch.tensor(X).bfloat16(), W)


# -- other devices, told by stand-ins


class GpuArray:
    """What convpar asks of a CuPy array before any work is done."""

    def __init__(self, shape: Any, dtype: Any = np.float32, ordinal: int = 0) -> None:
        like = np.empty(shape, dtype)
        self.shape, self.dtype, self.strides, self.ndim = like.shape, like.dtype, like.strides, like.ndim
        self.device = SimpleNamespace(id=ordinal)
        self.data = SimpleNamespace(device_id=ordinal)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = SimpleNamespace(ndarray=GpuArray)
    monkeypatch.setitem(sys.modules, "cupy", module)
    return module


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"out": GpuArray((4, 6))}, "out lives on gpu:0 and x on cpu"),
        ({"bias": GpuArray((1,))}, "bias lives on gpu:0 and x on cpu"),
        ({"w": GpuArray((3, 3))}, "w lives on gpu:0 and x on cpu"),
        ({"x": GpuArray((6, 8))}, "w lives on cpu and x on gpu:0"),
        ({"x": GpuArray((6, 8)), "w": GpuArray((3, 3), ordinal=1)}, "w lives on gpu:1 and x on gpu:0"),
        ({"x": GpuArray((6, 8)), "w": GpuArray((3, 3)), "out": np.empty((4, 6), "f4")}, "out lives on cpu"),
    ],
)
@pytest.mark.usefixtures("cupy")
def test_arrays_must_be_on_one_device(given: dict[str, Any], message: str) -> None:
    arguments = {"x": X, "w": W, **given}
    with pytest.raises(TypeError, match=message):
        conv2d(**arguments)
    with pytest.raises(TypeError, match=message):
        convpar.plan(**arguments)


@pytest.mark.parametrize("backend", ["numpy", "cpu-private", "cpu"])
@pytest.mark.usefixtures("cupy")
def test_nothing_is_downloaded_unasked(backend: str) -> None:
    with pytest.raises(
        convpar.Unsupported, match=r"live on gpu:0.*(nothing is downloaded|downloads nothing)"
    ):
        conv2d(GpuArray((6, 8)), GpuArray((3, 3)), backend=backend)


def test_a_gpu_array_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    far = Exchange(SimpleNamespace(__dlpack_device__=lambda: (2, 0)))
    with pytest.raises(TypeError, match="x lives on a GPU, and CuPy, which convpar needs there, is missing"):
        conv2d(far, W)
    old = SimpleNamespace(__cuda_array_interface__={})
    with pytest.raises(TypeError, match="w lives on a GPU, and CuPy"):
        conv2d(X, old)


class Streams:
    """Stand-ins for CuPy's and torch's streams, and for tensors and CuPy arrays; `seen` is what happened on them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self.stack: list[Any] = []
        self.torchs = 0
        streams = self

        class Base:
            def __init__(self, ptr: int, device_id: int) -> None:
                self.ptr, self.device_id = ptr, device_id

            def __enter__(self) -> Any:
                streams.stack.append(self)
                return self

            def __exit__(self, *error: Any) -> None:
                streams.stack.pop()

            def record(self, event: Any) -> int:
                return self.ptr

            def wait_event(self, event: int) -> None:
                streams.seen.append(f"{self.ptr} waits for {event}")

        class ExternalStream(Base):
            def __init__(self, ptr: int, device_id: int = -1) -> None:
                raise AssertionError("deprecated")

        class Tensor:
            dtype = np.dtype(np.float32)
            requires_grad = False

            def __init__(self, shape: Any) -> None:
                self.shape, self.device = shape, SimpleNamespace(type="cuda", index=0)

            def __dlpack_device__(self) -> Any:
                return 2, 0

        self.Tensor, self.Stream = Tensor, Base
        self.stack.append(Base(0, -1))
        cuda = SimpleNamespace(
            ExternalStream=ExternalStream,
            Stream=SimpleNamespace(null=self.stack[0]),
            Event=lambda disable_timing: None,
            Device=lambda ordinal: contextlib.nullcontext(),
            get_current_stream=lambda ordinal: self.stack[-1],
            runtime=SimpleNamespace(getDevice=lambda: 0),
        )
        cupy = SimpleNamespace(
            cuda=cuda, ndarray=GpuArray, empty=self._noted("empty", GpuArray), may_share_memory=lambda a, b: False,
            from_dlpack=self._noted("from_dlpack", lambda a: GpuArray(a.shape)),
        )  # fmt: skip
        torch = SimpleNamespace(
            Tensor=Tensor,
            cuda=SimpleNamespace(current_stream=lambda device: SimpleNamespace(cuda_stream=self.torchs)),
            from_dlpack=self._noted("result", lambda y: Tensor(y.shape)),
        )
        monkeypatch.setitem(sys.modules, "cupy", cupy)
        monkeypatch.setitem(sys.modules, "torch", torch)

    def _noted(self, name: str, function: Any) -> Any:
        def noted(*given: Any) -> Any:
            self.note(name)
            return function(*given)

        return noted

    def note(self, what: str) -> None:
        self.seen.append(f"{what} on {self.stack[-1].ptr}")


class OnStreams(Reference):
    """A backend of GPUs that notes on which stream it is run."""

    name = "on-streams"
    capabilities = replace(Reference.capabilities, device="gpu")

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def plan(self, problem: Any, layouts: Any, device: Any, config: Any) -> Any:
        made: Any = super().plan(problem, layouts, CPU, config)
        made.run = lambda x, w, bias, out, **settings: self.streams.note("run")
        return made


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Any:
    arrays._stream.cache_clear()
    monkeypatch.setattr(GpuArray, "__getitem__", lambda a, index: a, raising=False)
    made = Streams(monkeypatch)
    convpar.register(OnStreams(made))
    yield made
    convpar.unregister("on-streams")
    arrays._stream.cache_clear()


def _on_streams(planned: bool, x: Any, w: Any, **given: Any) -> Any:
    if planned:
        specs = (convpar.ArraySpec(a.shape, np.float32, "gpu") for a in (x, w))
        return convpar.plan(*specs, backend="on-streams")(x, w, **given)
    return conv2d(x, w, backend="on-streams", **given)


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(("torchs", "cupys"), [(7, 0), (7, 5), (0, 5), (7, 7), (0, 0)])
def test_tensors_on_a_gpu_belong_to_torchs_stream(
    streams: Any, torchs: int, cupys: int, planned: bool
) -> None:
    streams.torchs = torchs
    if cupys:
        streams.stack.append(streams.Stream(cupys, 0))
    before = list(streams.stack)
    y = _on_streams(planned, streams.Tensor((6, 8)), streams.Tensor((3, 3)))
    assert isinstance(y, streams.Tensor)
    assert y.shape == (4, 6)
    steps = ("from_dlpack", "from_dlpack", "empty", "run", "result")
    assert streams.seen == [f"{step} on {torchs}" for step in steps]
    assert streams.stack == before
    streams.seen.clear()
    out = streams.Tensor((4, 6))
    assert _on_streams(planned, streams.Tensor((6, 8)), streams.Tensor((3, 3)), out=out) is out
    assert set(streams.seen) == {f"from_dlpack on {torchs}", f"run on {torchs}"}


@pytest.mark.parametrize("planned", [False, True])
def test_tensors_and_cupys_arrays_wait_for_each_other(streams: Any, planned: bool) -> None:
    streams.torchs = 7
    given = {"x": GpuArray((6, 8)), "w": GpuArray((3, 3)), "out": GpuArray((4, 6))}
    _on_streams(planned, **given)
    assert streams.seen == ["run on 0"]
    for name, inside, other in (("x", 7, 0), ("w", 0, 7), ("out", 7, 0)):
        streams.seen.clear()
        tensor = streams.Tensor(given[name].shape)
        _on_streams(planned, **{**given, name: tensor})
        assert streams.seen[0] == f"{inside} waits for {other}"
        assert f"run on {inside}" in streams.seen
        assert streams.seen[-1] == f"{other} waits for {inside}"
        assert len(streams.stack) == 1


def test_streams_are_put_back_after_an_error(streams: Any) -> None:
    streams.torchs = 7
    with pytest.raises(ValueError, match="stride"):
        conv2d(streams.Tensor((6, 8)), GpuArray((3, 3)), stride=0, backend="on-streams")
    assert streams.seen[-1] == "0 waits for 7"
    assert len(streams.stack) == 1


# -- past 2**31 elements


def _memory() -> int:
    """Bytes of memory that are free, 0 where the system doesn't tell."""
    try:
        with open("/proc/meminfo", encoding="ascii") as f:
            facts = dict(line.split(":") for line in f)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


LONG = 2**31 + 9
SHAPES = {"square": (46341, 46349), "row": (1, LONG), "column": (LONG, 1)}


def _pattern(size: int) -> Any:
    """Small numbers whose period is no power of two, so that an index that wraps finds others."""
    return np.resize((np.arange(251) % 11 - 5).astype(np.int8), size)


@pytest.mark.slow
@pytest.mark.skipif(
    os.environ.get("CONVPAR_SLOW") != "1", reason="takes minutes and 5 GB: set CONVPAR_SLOW=1 to run it"
)
@pytest.mark.parametrize("backend", ["cpu-unrolled", "cpu-private"])
@pytest.mark.parametrize("kind", [*SHAPES, "strided view"])
def test_more_elements_than_32_bits_count(kind: str, backend: str) -> None:
    if _memory() < 6 * 2**30:
        pytest.skip(f"needs 6 GB of free memory, and {_memory() / 2**30:.1f} GB are")
    scipy_signal = pytest.importorskip("scipy.signal", reason="the results are checked against SciPy")
    # Of the view every second column counts: it reaches past 2**31 bytes with half as many elements.
    shape = SHAPES.get(kind, (2**16, 2**15 + 1))
    memory = _pattern(shape[0] * shape[1]).reshape(shape)
    x = memory if kind in SHAPES else memory[:, ::2]
    w = np.array([[1, -2, 3], [0, 2, -1], [4, 1, -3]], np.int8)
    if backend == "cpu-private":
        w = w[:, :2]
    y = conv2d(x, w, padding=1, boundary="nearest", backend=backend)
    assert y.shape == tuple(n + 3 - k for n, k in zip(x.shape, w.shape, strict=True))
    # Windows of outputs at both ends and in the middle of each axis, from the samples under their taps.
    for i, j in itertools.product(*(sorted({0, n // 2, max(n - 300, 0)}) for n in y.shape)):
        window = y[i : i + 300, j : j + 300]
        rows, columns = (
            np.clip(np.arange(start, start + size + k - 1) - 1, 0, n - 1)
            for start, size, k, n in zip((i, j), window.shape, w.shape, x.shape, strict=True)
        )
        np.testing.assert_array_equal(window, scipy_signal.correlate2d(x[np.ix_(rows, columns)], w, "valid"))
