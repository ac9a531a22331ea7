"""What the CUDA compiler makes of a launch, for any architecture and without a GPU: registers, spills, PTX."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .compile import STANDARD, Reader, entry_name, read_kernel, unit
from .launch import Launch

_CACHES = (12, 9)
"""Since this version NVRTC keeps what it has compiled."""

ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What kernels are checked for, oldest first."""


class CompileError(RuntimeError):
    """The compiler's own words about a kernel that doesn't compile."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel takes.

    Attributes
    ----------
    registers : int
        A thread.
    stack, spills : int
        Bytes of local memory a thread, and of those stored there because registers ran out.
    shared : int
        Bytes of shared memory a block, dynamic ones included.
    ptx : str
    log : str
        All that the compiler said.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    ptx: str
    log: str

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.stack} bytes of stack, {self.spills} bytes spilled, "
            f"{self.shared} bytes of shared memory"
        )


def resources(launch: Launch, arch: str, read: Reader = read_kernel) -> Resources:
    """Compile `launch` for `arch`, "sm_90" for example, as CuPy would.

    Raises
    ------
    ImportError
        CuPy or NVRTC is missing.
    CompileError
        The kernel doesn't compile.
    """
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(unit(launch, read), f"{launch.kernel}.cu", [], [])
    try:
        options = [STANDARD, f"-arch={arch}", "-ftz=true", "--ptxas-options=-v"]
        # What it finds in its cache it says nothing about.
        if nvrtc.getVersion() >= _CACHES:
            options.append("-no-cache")
        try:
            nvrtc.compileProgram(program, tuple(options))
        except nvrtc.NVRTCError as e:
            raise CompileError(
                f"{launch.kernel} doesn't compile for {arch}:\n{nvrtc.getProgramLog(program)}"
            ) from e
        log = str(nvrtc.getProgramLog(program))
        ptx = nvrtc.getPTX(program)
    finally:
        nvrtc.destroyProgram(program)
    # The log tells about each function; the entry's own paragraph starts with its name.
    part = log[log.index(f"'{entry_name(launch)}'") :]

    def number(pattern: str) -> int:
        found = re.search(pattern, part)
        return int(found[1]) if found else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack=number(r"(\d+) bytes stack frame"),
        spills=number(r"(\d+) bytes spill stores"),
        shared=launch.shared + number(r"(\d+) bytes smem"),
        ptx=ptx.decode() if isinstance(ptx, bytes) else str(ptx),
        log=log,
    )
