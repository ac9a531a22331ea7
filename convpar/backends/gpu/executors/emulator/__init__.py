"""The emulator: the same launches of the same .cu text, compiled as C++ and run on the CPU.

It is for reading results and for finding faults, not for speed: threads run one at a time, in an order that can
be chosen, shared memory is poisoned and watched, device memory lies between guard zones, and queues put their
work off as long as the rules of streams allow.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import hashlib
import os
import random
import shlex
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from convpar.backend import Unavailable

from ...compile import CONSTANT_BYTES, STANDARD, Memo, Reader, entry_name, identity, read_kernel, unit
from ...launch import Launch, Limits
from .. import Banks

CACHE_VARIABLE = "CONVPAR_CACHE_DIR"
COMPILER_VARIABLE = "CXX"
FOLDER = Path(__file__).parent
ORDERS = ("forward", "reverse", "shuffle")

_GUARD = 4096
_POISON = 0xFF  # NaN in every floating-point type, -1 in the integers
_GUARDED = 0xFD  # something else, or writing what was read there would go unseen
_FLAGS = (STANDARD, "-O1", "-g0", "-fPIC", "-shared", "-fno-exceptions", "-fno-rtti", "-ffp-contract=off",
          "-fno-strict-aliasing", "-fvisibility=hidden", "-Wno-unknown-pragmas", "-Wno-attributes")  # fmt: skip


# The runtime's state is global, so one launch runs at a time. A child process has no thread that could hold it.
_running = threading.RLock()


def _after_fork() -> None:
    global _running
    _running = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


LIMITS = Limits(name="emulator", shared=227 * 1024, fma_rate=1e8, bandwidth=1e9)
"""What the emulated device allows unless the settings say otherwise: sm_90's limits."""


class EmulationError(RuntimeError):
    """A kernel did what no kernel may: the message says which thread did what."""


@dataclass(frozen=True)
class Settings:
    """How the emulator runs, as ``CONVPAR_GPU=emulate:reverse`` says it; several are set off by commas.

    Attributes
    ----------
    order : str
        "forward", "reverse" or "shuffle": in which order blocks, threads and queues take their turns.
    seed : int
        Of the shuffle: "shuffle=7".
    checked : bool
        Whether each access to shared memory is checked for bounds and races; "unchecked" is faster.
    limits : Limits
        What the emulated device allows.
    """

    order: str = "forward"
    seed: int = 0
    checked: bool = True
    limits: Limits = LIMITS

    @classmethod
    def parse(cls, text: str) -> Settings:
        """Settings from what follows "emulate:"; ValueError says what is allowed."""
        values: dict[str, Any] = {}
        for word in filter(None, (w.strip() for w in text.split(","))):
            name, _, number = word.partition("=")
            if name in ORDERS and (not number or (name == "shuffle" and number.isdecimal())):
                values["order"], values["seed"] = name, int(number or 0)
            elif word in ("checked", "unchecked"):
                values["checked"] = word == "checked"
            else:
                raise ValueError(
                    f"after 'emulate:' come forward, reverse, shuffle or shuffle=<seed>, and checked or "
                    f"unchecked, set off by commas, not {word!r}"
                )
        return cls(**values)


# -- compiling


def compiler() -> tuple[str, ...] | None:
    """The command of the system's C++ compiler: CXX, else the first one found; None without one.

    Raises
    ------
    Unavailable
        CXX isn't the command of a program.
    """
    return _compiler(os.environ.get(COMPILER_VARIABLE, "").strip())


@cache
def _compiler(named: str) -> tuple[str, ...] | None:
    if named:
        try:
            command = shlex.split(named)
        except ValueError as e:
            raise _no_compiler(named, f"can't be read as a command: {e}") from e
        if not command or shutil.which(command[0]) is None:
            raise _no_compiler(named, "isn't found")
        return tuple(command)
    for name in ("c++", "g++", "clang++"):
        found = shutil.which(name)
        if found:
            return (found,)
    return None


def _no_compiler(command: str, what: str) -> Unavailable:
    return Unavailable(
        f"the emulator needs a C++ compiler, and {command!r} {what}; name another one in {COMPILER_VARIABLE}"
    )


@cache
def _version(command: tuple[str, ...]) -> str:
    """What the compiler says of itself."""
    try:
        return subprocess.run([*command, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as e:
        raise _no_compiler(shlex.join(command), f"doesn't tell its version: {_one_line(e)}") from e


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def cache_folder() -> Path:
    """Where compiled kernels are kept: CONVPAR_CACHE_DIR, or the user's cache folder."""
    import platformdirs

    return Path(os.environ.get(CACHE_VARIABLE) or platformdirs.user_cache_dir("convpar")) / "emulator"


def _built(text: str, name: str) -> ctypes.CDLL:
    """`text` as a loaded library, compiled unless some process already did.

    Raises
    ------
    EmulationError
        The text isn't C++.
    Unavailable
        The compiler, or the folder for what it makes, is of no use.
    """
    command = compiler()
    if command is None:
        raise Unavailable(
            f"the emulator needs a C++ compiler; install one, or name it in {COMPILER_VARIABLE}"
        )
    key = hashlib.sha256("\0".join((text, _version(command), *command, *_FLAGS)).encode()).hexdigest()
    try:
        target = cache_folder() / f"{name}-{key[:32]}.so"
        if not target.exists():
            _compile(text, command, target, name)
        return ctypes.CDLL(str(target))
    except OSError as e:
        raise Unavailable(
            f"the emulator can't keep compiled kernels in {cache_folder()} ({_one_line(e)}); "
            f"name another folder in {CACHE_VARIABLE}"
        ) from e


def _compile(text: str, command: tuple[str, ...], target: Path, name: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        source, made = Path(folder) / f"{name}.cpp", Path(folder) / target.name
        source.write_text(text, encoding="utf-8")
        done = subprocess.run(
            [*command, *_FLAGS, "-I", str(FOLDER), "-o", str(made), str(source)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise EmulationError(f"{name} doesn't compile as C++:\n{done.stderr}")
        if not made.exists():
            raise _no_compiler(shlex.join(command), "makes no file")
        os.replace(made, target)


def _missing() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    return _missing_with(*(os.environ.get(name, "").strip() for name in (COMPILER_VARIABLE, CACHE_VARIABLE)))


@cache
def _missing_with(*_settings: str) -> str | None:
    """The same under these settings, found out once; what this compiles is kept as kernels are."""
    try:
        _built("", "empty")
    except Unavailable as e:
        return str(e)
    except EmulationError as e:
        return f"the emulator's C++ compiler can't make a library ({_one_line(e)}); name another one in {COMPILER_VARIABLE}"
    return None


def _runtime_text() -> str:
    header = (FOLDER / "emulator.hpp").read_text(encoding="utf-8").replace("#pragma once\n", "")
    return header + (FOLDER / "runtime.cpp").read_text(encoding="utf-8").replace(
        '#include "emulator.hpp"\n', ""
    )


@cache
def _runtime() -> Any:
    return _built(_runtime_text(), "runtime").convpar_emulate


def emulated_unit(launch: Launch, read: Reader = read_kernel) -> str:
    """The C++ text of a launch's kernel, with the functions that the runtime calls."""
    header = (FOLDER / "emulator.hpp").read_text(encoding="utf-8").replace("#pragma once\n", "")
    return (
        f'#line 1 "emulator.hpp"\n{header}{unit(launch, read)}'
        f"CONVPAR_EXPORT void bind_state(emulator::State* given) {{ emulator::state = given; }}\n"
        f"CONVPAR_EXPORT void run_thread(void* const* arguments) {{\n"
        f"    emulator::call({entry_name(launch)}, arguments);\n"
        f"}}\n"
        f"CONVPAR_EXPORT unsigned char* constant_memory() {{ return constant_bytes; }}\n"
    )


class _Kernel:
    def __init__(self, launch: Launch, read: Reader) -> None:
        self.code = code = _built(emulated_unit(launch, read), launch.kernel)
        code.constant_memory.restype = ctypes.c_void_p
        self.banks = Banks(code.constant_memory(), CONSTANT_BYTES)


class _Loaded(NamedTuple):
    """A launch with its kernel and its `Problem`, packed."""

    kernel: _Kernel
    launch: Launch
    parameters: np.ndarray[Any, Any]

    @property
    def banks(self) -> Banks:
        return self.kernel.banks


# -- memory and queues


class _Memory:
    """Poisoned memory between guard zones."""

    def __init__(self, size: int) -> None:
        self._bytes = np.full(size + 2 * _GUARD + 256, _GUARDED, np.uint8)
        self.size = size
        self.ptr = -(-(self._bytes.ctypes.data + _GUARD) // 256) * 256
        ctypes.memset(self.ptr, _POISON, size)

    def intact(self) -> bool:
        """Whether nothing was written around it."""
        start = self.ptr - self._bytes.ctypes.data
        return bool(
            (self._bytes[:start] == _GUARDED).all() and (self._bytes[start + self.size :] == _GUARDED).all()
        )


def _move(to: int, source: int, size: int) -> None:
    ctypes.memmove(to, source, size)


class _Event:
    def __init__(self, queue: _Queue) -> None:
        self.queue = queue
        self.passed = False
        self._when = 0.0

    def happen(self) -> None:
        self.passed = True
        self._when = time.perf_counter()

    def synchronize(self) -> None:
        self.queue.emulator.run_until(self.queue, lambda: self.passed)

    def seconds_since(self, earlier: Any) -> float:
        return float(self._when - earlier._when)


class _Queue:
    """Operations that are run when somebody waits for them, or at once in an eager queue."""

    def __init__(self, emulator: Emulator, eager: bool) -> None:
        self.emulator = emulator
        self.eager = eager
        self.waiting: collections.deque[Callable[[], bool]] = collections.deque()

    def _give(self, operation: Callable[[], Any]) -> None:
        def run() -> bool:
            operation()
            return True

        self.waiting.append(run)
        if self.eager:
            self.synchronize()

    @property
    def order(self) -> Hashable:
        # What an eager queue was given is done, so they all are in one order.
        return "eager" if self.eager else self

    def launch(self, loaded: Any, numbers: Sequence[int]) -> None:
        self._give(lambda: self.emulator.run(loaded, numbers))

    def fill(self, address: int, size: int, value: int) -> None:
        self._give(lambda: ctypes.memset(address, value, size))

    def copy(self, to: int, source: int, size: int) -> None:
        self._give(lambda: _move(to, source, size))

    def copy_in(self, to: int, source: np.ndarray[Any, Any]) -> None:
        self._give(lambda: _move(to, source.ctypes.data, source.nbytes))

    def copy_out(self, to: np.ndarray[Any, Any], source: int) -> None:
        self._give(lambda: _move(to.ctypes.data, source, to.nbytes))

    def allocate(self, size: int) -> _Memory:
        return self.emulator.allocate(size)

    def capturing(self) -> bool:
        return False

    def record(self, *, timed: bool = False) -> _Event:
        event = _Event(self)
        self._give(event.happen)
        return event

    def wait(self, event: Any) -> None:
        self.waiting.append(lambda: event.passed)
        if self.eager:
            self.synchronize()

    def synchronize(self) -> None:
        self.emulator.run_until(self, lambda: not self.waiting)


class Emulator:
    """An executor without a GPU; see `Settings` and `convpar.backends.gpu.executors.Executor`.

    `read` gives the text of kernel files; tests put faults in there.
    """

    def __init__(self, settings: Settings | None = None, read: Reader = read_kernel) -> None:
        self.settings = settings or Settings()
        self._read = read
        self._kernels: Memo[_Kernel] = Memo()
        self._queues: weakref.WeakSet[_Queue] = weakref.WeakSet()
        self._memory: weakref.WeakSet[_Memory] = weakref.WeakSet()
        # Host threads add to these sets while another one runs a launch and walks over them.
        self._members = threading.Lock()
        self._pinned: weakref.WeakValueDictionary[int, np.ndarray[Any, Any]] = weakref.WeakValueDictionary()
        self._random = random.Random(self.settings.seed)

    def unavailable(self) -> str | None:
        """It needs a C++ compiler, and a folder for what that makes."""
        return _missing()

    def current_device(self) -> int:
        """There is one."""
        return 0

    def on(self, device: int) -> contextlib.AbstractContextManager[Any]:
        """It always is."""
        return contextlib.nullcontext()

    def limits(self, device: int) -> Limits:
        """Those of the settings."""
        return self.settings.limits

    def load(self, launch: Launch, device: int) -> _Loaded:
        """Compiled at the first request, by any process that shares the cache folder."""
        kernel = self._kernels.get(identity(launch), lambda: _Kernel(launch, self._read))
        return _Loaded(kernel, launch, launch.parameters())

    def queue(self, device: int, stream: Any) -> _Queue:
        """A queue that runs everything at once."""
        return _Queue(self, eager=True)

    @contextlib.contextmanager
    def own_queues(self, device: int, count: int) -> Iterator[Sequence[_Queue]]:
        """Queues that run when they are waited for."""
        queues = [_Queue(self, eager=False) for _ in range(count)]
        with self._members:
            self._queues.update(queues)
        try:
            yield queues
            for queue in queues:
                queue.synchronize()
        finally:
            # After an error nothing more may run: what it would use is being freed.
            for queue in queues:
                queue.waiting.clear()

    def allocate(self, size: int) -> _Memory:
        """Guarded memory."""
        memory = _Memory(size)
        with self._members:
            self._memory.add(memory)
        return memory

    def address(self, array: np.ndarray[Any, Any]) -> int:
        """An emulated device array is a NumPy array."""
        return int(array.ctypes.data)

    def upload(self, array: np.ndarray[Any, Any], device: int) -> _Memory:
        """A copy in guarded memory."""
        memory = self.allocate(array.nbytes)
        _move(memory.ptr, array.ctypes.data, array.nbytes)
        return memory

    def pinned(self, size: int) -> np.ndarray[Any, Any]:
        """Ordinary memory, remembered as pinned."""
        block = np.empty(size, np.uint8)
        self._pinned[block.ctypes.data] = block
        return block

    def is_pinned(self, array: np.ndarray[Any, Any]) -> bool:
        """Whether `pinned` gave its memory."""
        low, high = np.lib.array_utils.byte_bounds(array)
        return any(at <= low and high <= at + block.size for at, block in list(self._pinned.items()))

    # -- running

    def run(self, loaded: _Loaded, numbers: Sequence[int]) -> None:
        """Run one launch now.

        Raises
        ------
        EmulationError
            A thread broke a rule.
        """
        kernel, launch, parameters = loaded
        values = (ctypes.c_int64 * len(numbers))(*numbers)
        pointers = (ctypes.c_void_p * (len(numbers) + 1))(
            *(ctypes.addressof(values) + 8 * i for i in range(len(numbers))), parameters.ctypes.data
        )
        text = ctypes.create_string_buffer(1000)
        with _running:
            failed = _runtime()(
                kernel.code.bind_state,
                kernel.code.run_thread,
                pointers,
                (ctypes.c_uint * 3)(*launch.grid),
                (ctypes.c_uint * 3)(*launch.block),
                ctypes.c_uint(launch.shared),
                ORDERS.index(self.settings.order),
                ctypes.c_uint64(self.settings.seed),
                int(self.settings.checked),
                text,
                ctypes.c_size_t(len(text)),
            )
        if failed:
            raise EmulationError(f"{launch.kernel}: {text.value.decode()}")
        with self._members:
            memories = list(self._memory)
        if not all(memory.intact() for memory in memories):
            raise EmulationError(f"{launch.kernel}: wrote outside the device memory that it was given")

    def run_until(self, queue: _Queue, reached: Callable[[], bool]) -> None:
        """Run operations until `queue` has reached what its caller waits for; others only where they must.

        "forward" lets all queues take turns, "reverse" runs another queue only when the waited one is held
        by it, "shuffle" picks at random.
        """
        with _running:
            while not reached():
                with self._members:
                    others = [q for q in self._queues if q.waiting and q is not queue]
                if self.settings.order == "shuffle":
                    turns = [queue, *others]
                    self._random.shuffle(turns)
                elif self.settings.order == "reverse":
                    turns = [queue, *reversed(others)]
                else:
                    turns = [*others, queue]
                if not self._turn(turns, all_of_them=self.settings.order == "forward"):
                    raise EmulationError("queues wait for one another")

    def _turn(self, queues: list[_Queue], all_of_them: bool) -> bool:
        ran = False
        for queue in queues:
            if queue.waiting and self._step(queue):
                ran = True
                if not all_of_them:
                    break
        return ran

    @staticmethod
    def _step(queue: _Queue) -> bool:
        operation = queue.waiting[0]
        try:
            done = operation()
        except BaseException:
            queue.waiting.clear()
            raise
        if done:
            queue.waiting.popleft()
        return done
