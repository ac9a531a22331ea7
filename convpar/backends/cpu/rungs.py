"""The rungs: lines of rungs.inc as backends."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

from convpar import threads as _threads
from convpar.backend import (
    CONTRACT_VERSION,
    INPUTS,
    Capabilities,
    Config,
    Device,
    ErrorContract,
    Layouts,
    Option,
    Plan,
    Refusal,
    Unavailable,
    resolve_config,
)
from convpar.problem import Problem

from . import interleaved, splitting
from .compiled import (
    FOLDER,
    engine,
    isa,
    matrix_unit,
    missing_engine,
    missing_instructions,
    missing_level,
    pair_unit,
    word_unit,
)
from .plan import CpuPlan

OPTIONS: Mapping[str, Option] = {
    "tile": Option("outputs (rows, columns) of a work item", kind="pair"),
    "block": Option("output channels of a work item", kind="int"),
}
STORES = Option(
    "whether results go through the caches or past them; by their size and the level if None",
    allowed=("cached", "streamed"),
)

MASK_LEVELS = ("v3", "v4")
"""ISA levels that have masked loads."""


@dataclass(frozen=True)
class Rung:
    """A line of rungs.inc as a `convpar.backend.Backend`."""

    row: str
    summary: str
    builds_on: str | None
    capabilities: Capabilities
    dense: bool
    streams: bool
    seconds_per_mac: float
    seconds_per_pass: float
    side: int
    """Rows and columns of outputs that a transform makes at once, 0 without one or if it is any."""
    lengths: tuple[int, ...]
    """Rows and columns of samples that a transform may take, if it makes any number of outputs."""
    unit: str
    """What fills the tiles of a kernel for the matrix unit: channels, rows, or none."""
    operand_bits: int
    """Bits of the integers whose products a kernel sums over the channels of a word, 0 for kernels that take any type."""
    word_bits: int
    """Bits of the words that a kernel multiplies in place of its sums' type, 0 in that type."""
    masks: bool
    """Whether it loads some lanes of a vector and leaves the others."""
    blocks: bool
    """Whether a sample meets a block of output channels at once, along which few images may be cut."""

    contract = CONTRACT_VERSION

    @property
    def options(self) -> Mapping[str, Option]:
        """What ``config=`` may set."""
        return {**OPTIONS, "stores": STORES} if self.streams else OPTIONS

    @property
    def transformed(self) -> bool:
        """Whether the kernel transforms filters and samples."""
        return bool(self.side or self.lengths or self.split)

    @property
    def split(self) -> bool:
        """Whether floats are split for the matrix unit, or integers put in words: see `splitting`."""
        return bool(self.unit or self.operand_bits)

    @property
    def by_channels(self) -> bool:
        """Whether channels fill what a product takes: tiles, or words."""
        return self.unit == "channels" or bool(self.operand_bits)

    @property
    def takes_columns(self) -> bool:
        """Whether channels that lie beside each other may be columns (`interleaved`): lanes are columns, and may be dilated."""
        return self.dense and self.streams and self.capabilities.dilated

    @property
    def emulated(self) -> bool:
        """Whether other instructions do the work of its own, far more slowly, for this processor lacks those or gains nothing by them, or it mayn't use them."""
        return bool(self.unit and not matrix_unit()) or bool(self.word_bits and not word_unit())

    @property
    def name(self) -> str:
        """What callers say."""
        return f"cpu-{self.row}"

    @property
    def before(self) -> Rung:
        """The one that it builds on."""
        return next(rung for rung in rungs() if rung.name == self.builds_on)

    def unavailable(self) -> str | None:
        """It needs the compiled engine, and an ISA level that the engine has; some rungs a certain one."""
        missing = missing_level()
        if missing is not None:
            return missing
        if self.unit or self.word_bits or self.masks:
            levels = MASK_LEVELS if self.masks else (splitting.LEVEL,)
            return missing_instructions(
                levels, matrix_unit if self.unit else word_unit if self.word_bits else None
            )
        return missing_instructions((isa(),), pair_unit) if self.operand_bits else None

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """A plan, or why the rung can't serve `problem`."""
        options = resolve_config(self.options, config, self.name)
        if device.kind != "cpu":
            return Refusal(f"the arrays live on {device}; it runs on the CPU and downloads nothing unasked")
        refusal = self.capabilities.refusal(problem)
        if refusal is not None:
            return refusal
        least = self.side - 1
        if self.side and problem.outputs and min(problem.oh, problem.ow) < least:
            return Refusal(
                f"it makes {least} rows and columns of outputs or more, not {problem.oh} x {problem.ow}"
            )
        if self.lengths and max(problem.extent) > self.lengths[-1]:
            return Refusal(
                f"it takes filters of at most {self.lengths[-1]} rows and columns, not {problem.kh} x {problem.kw}"
            )
        if self.operand_bits == 8:
            refusal = splitting.fill_refusal(problem)
            if refusal is not None:
                return refusal
        if self.unit and not self.operand_bits and splitting.tiling(problem, self.unit == "channels") is None:
            terms = problem.c // problem.groups * problem.kh * problem.kw
            return Refusal(f"it can't keep the contract in sums of as few as {terms} products")
        columns = interleaved.as_columns(problem, layouts) if self.takes_columns else None
        plan = CpuPlan(self, problem, layouts, options, columns)
        if columns and plan.factored is False:
            # So wide a filter is for it only channel by channel.
            plan = CpuPlan(self, problem, layouts, options)
        if self.transformed or self.capabilities.depthwise:
            # Of one thread: what is refused mustn't depend on the machine.
            workspace = plan.workspace_bytes(1)
            if workspace > _threads.MOST_WORKSPACE:
                return Refusal(
                    f"it would need {workspace >> 20} MB of workspace on one thread; at most {_threads.MOST_WORKSPACE >> 20} MB"
                )
        if plan.factored is False:
            return Refusal(
                "it takes filters of one channel, of two rows and columns or more, that reach over at most 512 columns"
            )
        if plan.factored and not any(options.values()):
            self._pair(plan, layouts, device)
        if options.get("stores") == "streamed" and plan.config["stores"] != "streamed":
            why = (
                "the results are converted"
                if plan.converts
                else f"with a stride of {problem.stride} it stores them through the caches"
            )
            return Refusal(f"config['stores'] is 'streamed', and {why}")
        return plan

    def _pair(self, plan: CpuPlan, layouts: Layouts, device: Device) -> None:
        """Leave direct sums to another rung for filters of one channel, where that is faster, or to the rung before as it does them
        by itself: it may gather what this one reads in place.

        Only without ``config=``, whose tiles would not be that rung's.
        """
        least = plan.direct_seconds
        best: tuple[CpuPlan, str] | None = None
        for other in rungs():
            of_one_channel = (
                other.masks or other.unit == "rows" or other.word_bits or other.capabilities.depthwise
            )
            if not (of_one_channel or other.name == self.builds_on) or other.unavailable() is not None:
                continue
            made = other.plan(plan.problem, layouts, device, None)
            if isinstance(made, CpuPlan) and made.direct_seconds < least:
                least = made.direct_seconds
                best = made, other.name
        if best is not None:
            plan.leave_direct_sums_to(*best)

    def source(self) -> tuple[tuple[str, str], ...]:
        """(file name, text) of the rung's kernel and of the headers that it includes."""
        names = [f"kernels/{self.row}.hpp"]
        texts = {}
        for name in names:
            texts[name] = (FOLDER / name).read_text(encoding="utf-8")
            names += re.findall(r'^#include "(.*)"$', texts[name], re.MULTILINE)
        return tuple(texts.items())

    def assembly(self, problem: Problem | None = None, *, level: str | None = None) -> str:
        """What the compiler made of the rung at an ISA level (the one in use); see `disassembly.assembly`."""
        from . import disassembly

        missing = missing_engine()
        if missing is not None:
            raise Unavailable(missing)
        return disassembly.assembly(str(engine().__file__), self.row, level or isa(), problem)


_LINE = re.compile(
    r"^RUNG\((\w+), (\w+), ([\w ]+), ([\d ]+?)(?: of (\d+) bits)?(?: at (\d+)x\d+| in ([\d ]+?)|( on 16x16x\d+)? from (?:(\d+) channels|(\d+)x\d+)| by (\d+) bits| by (masks|channels|blocks))?(?: within (\d+))?, "
    r'(\w+), ([\d.]+), ([\d.]+), (\w+), "(.*)"\)$',
    re.MULTILINE,
)


def _sums(types: list[str]) -> tuple[str, ...]:
    """Sum types of a vector kernel: ``u8`` serves int8 and uint8, ``f32`` float32."""
    names: list[str] = []
    for t in types:
        bits = t[1:]
        names += [f"float{bits}"] if t[0] == "f" else [f"int{bits}", f"uint{bits}"]
    return tuple(names)


def _rung(line: re.Match[str]) -> Rung:
    row, _flags, sums, sizes, operands, side, lengths, unit, channels, rows, bits, by, *others = line.groups()
    factor, output, mac, a_pass, before, summary = others
    filters = tuple((int(k), int(k)) for k in sizes.split() if k != "0")
    return Rung(
        row=row,
        summary=summary,
        builds_on=None if before == "none" else f"cpu-{before}",
        dense=sums != "any",
        streams=output == "streamed",
        capabilities=Capabilities(
            input_dtypes=splitting.INTEGERS[int(operands)] if operands else INPUTS,
            sum_dtypes=Capabilities().sum_dtypes if sums == "any" else _sums(sums.split()),
            filter_sizes=filters or None,
            least_filter=(int(rows or 1),) * 2,
            least_channels=int(channels or 1),
            strided=not (factor or rows or bits),
            strides=((1, 1), (2, 2)) if by == "masks" else None,
            dilated=not (factor or rows or bits or by == "masks"),
            depthwise=by == "channels",
            sum_is_output=output == "sum",
            error=ErrorContract("normwise", float(factor)) if factor else ErrorContract("elementwise"),
        ),
        seconds_per_mac=float(mac) * 1e-9,
        seconds_per_pass=float(a_pass) * 1e-9,
        side=int(side or 0),
        lengths=tuple(map(int, (lengths or "").split())),
        unit=("channels" if channels else "rows") if unit else "",
        operand_bits=int(operands or 0),
        word_bits=int(bits or 0),
        masks=by == "masks",
        blocks=by == "blocks",
    )


@functools.cache
def rungs() -> tuple[Rung, ...]:
    """All lines of rungs.inc, in their order."""
    return tuple(map(_rung, _LINE.finditer((FOLDER / "rungs.inc").read_text(encoding="utf-8"))))
