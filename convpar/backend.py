"""The contract between convpar and whatever computes: built-in rungs and plugins alike.

A backend turns a `Problem` into a `Plan`, or into a `Refusal` with its reason.
Everything is decided in `Backend.plan`, from shapes and types; `Plan.run` only
passes arrays. See examples/plugin for a complete third-party backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np

from .boundary import MODES
from .problem import LARGEST, Problem, Unsupported, shown

__all__ = [
    "CONTRACT_VERSION",
    "Backend",
    "Capabilities",
    "Config",
    "Device",
    "ErrorContract",
    "Layout",
    "Layouts",
    "Option",
    "Plan",
    "Refusal",
    "Threshold",
    "Unavailable",
    "Unsupported",
    "resolve_config",
]

CONTRACT_VERSION = 1
"""Raised whenever a backend written for the old contract would stop working."""

Config = Mapping[str, Any]


class Unavailable(RuntimeError):
    """This machine can't run the backend; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a backend can't serve a problem, as a sentence for the caller."""

    reason: str


class Device(NamedTuple):
    """Where arrays live: ``("cpu", 0)`` or ``("gpu", ordinal)``."""

    kind: Literal["cpu", "gpu"] = "cpu"
    ordinal: int = 0

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.ordinal}"


@dataclass(frozen=True, slots=True)
class Layout:
    """How an array lies in memory.

    Attributes
    ----------
    strides : tuple of int
        Bytes from one element to the next, per axis of the canonical form:
        NCHW for image and output, OIHW for the filter, (OC,) for the bias.
    swapped : bool
        Elements are in the other byte order.
    aligned : bool
        Base address and strides suit the element type.
    """

    strides: tuple[int, ...]
    swapped: bool = False
    aligned: bool = True

    @classmethod
    def of(cls, array: Any) -> Layout:
        """The layout of a NumPy or CuPy array."""
        dtype = array.dtype
        aligned = array.flags.aligned if isinstance(array, np.ndarray) else True
        # A field of a record can be aligned and yet not a whole number of elements apart.
        whole = all(s % dtype.itemsize == 0 for s in array.strides)
        return cls(array.strides, not dtype.isnative, aligned and whole)

    @classmethod
    def contiguous(cls, shape: tuple[int, ...], itemsize: int) -> Layout:
        """The layout of a new C-contiguous array."""
        strides = []
        step = itemsize
        for size in reversed(shape):
            strides.append(step)
            step *= size
        return cls(tuple(reversed(strides)))


class Layouts(NamedTuple):
    """The layouts of one call's arrays, in canonical axis order; `bias` is None without one."""

    x: Layout
    w: Layout
    bias: Layout | None
    out: Layout


@dataclass(frozen=True, slots=True)
class ErrorContract:
    """What a backend promises about floating-point sums (integers are always exact).

    Attributes
    ----------
    kind : {"elementwise", "normwise"}
        ``elementwise``: ``|y - ref| <= (K + 2) * u * conv(|x|, |w|)`` at every element.
        ``normwise``: the same with the largest ``conv(|x|, |w|)`` of each plane, times `factor`.
    factor : float
        Only for ``normwise``.
    sum_dtype : str or None
        The type sums are kept in where that is narrower than the problem's sum type.
    flushes_subnormals : bool
        Subnormal inputs and results may count as zero.
    deterministic : bool
        The same call gives the same bits.
    operand_dtype : str or None
        The type that factors are rounded to before they are multiplied, where that is narrower than the
        problem's sum type; those beyond its range promise nothing. The bound then also has what this rounding
        makes of the sum, counts ``u`` twice, since matrix units may cut sums where others round, and counts
        factors that are subnormal there as its smallest normal number, whose exponent such units give them.
    """

    kind: Literal["elementwise", "normwise"] = "elementwise"
    factor: float = 1.0
    sum_dtype: str | None = None
    flushes_subnormals: bool = False
    deterministic: bool = True
    operand_dtype: str | None = None

    def meets(self, accuracy: Any) -> bool:
        """Whether a caller who asked for `accuracy` may be served under this contract."""
        if accuracy is None:
            return True
        full = self.sum_dtype is None and self.operand_dtype is None
        if accuracy == "elementwise":
            return full and self.kind == "elementwise"
        if accuracy == "normwise":
            return full
        # A number is relative to the largest conv(|x|, |w|) of the plane.
        unit = {None: 2.0**-24, "tf32": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
        factors = 0 if self.operand_dtype is None else 2 * unit[self.operand_dtype]
        return float(accuracy) >= 16 * unit[self.sum_dtype] * self.factor + factors

    def __str__(self) -> str:
        sums = f", sums in {self.sum_dtype}" if self.sum_dtype else ""
        factors = f", factors rounded to {self.operand_dtype}" if self.operand_dtype else ""
        return f"{self.kind}{sums}{factors}"


INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
NARROW_FLOATS = ("float16", "bfloat16")
"""Stored narrow, summed in float32."""
FLOATS = ("float32", "float64")
COMPLEX = ("complex64", "complex128")


INPUTS = ("bool", *INTEGERS, *NARROW_FLOATS, *FLOATS, *COMPLEX)
"""The types that images and filters may have without extended precision."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend takes. Tests, docs and the command line all read this one declaration.

    Attributes
    ----------
    device : {"cpu", "gpu"}
        Where its arrays live.
    input_dtypes, sum_dtypes, out_dtypes : tuple of str
        Names of the types taken for image and filter, for sums and for results.
    filter_sizes : tuple of (int, int), or None
        The (KH, KW) taken; None takes all.
    least_filter : (int, int)
        The fewest rows and columns of a filter that is taken.
    least_channels : int
        The fewest channels of a group that are taken.
    strided, dilated, grouped : bool
        Whether stride, dilation and groups other than 1 are taken.
    depthwise : bool
        Only groups of one channel and one output channel each are taken, two or more.
    strides : tuple of (int, int), or None
        Of a backend that is `strided` the strides taken, of rows and columns; None takes all.
    boundaries : tuple of str
        The boundary modes taken.
    sum_is_output : bool
        Only problems whose sum type is their output type are taken.
    error : ErrorContract
        What is promised about rounding.
    """

    device: Literal["cpu", "gpu"] = "cpu"
    input_dtypes: tuple[str, ...] = INPUTS
    sum_dtypes: tuple[str, ...] = (*INTEGERS, *FLOATS, *COMPLEX)
    out_dtypes: tuple[str, ...] = (*INTEGERS, *NARROW_FLOATS, *FLOATS, *COMPLEX)
    filter_sizes: tuple[tuple[int, int], ...] | None = None
    least_filter: tuple[int, int] = (1, 1)
    least_channels: int = 1
    strided: bool = True
    dilated: bool = True
    grouped: bool = True
    depthwise: bool = False
    strides: tuple[tuple[int, int], ...] | None = None
    boundaries: tuple[str, ...] = MODES
    sum_is_output: bool = False
    error: ErrorContract = field(default_factory=ErrorContract)

    @property
    def least_layer(self) -> tuple[int, int, int]:
        """Channels, output channels and groups of the smallest problems that are taken."""
        return (2, 2, 2) if self.depthwise else (self.least_channels, 1, 1)

    @property
    def plain_types(self) -> tuple[str, str]:
        """Types of images and filters, and of results, that are taken: float32 of both where it is."""
        same = [t for t in ("float32", *self.sum_dtypes) if t in self.sum_dtypes and t in self.input_dtypes]
        return (same[0], same[0]) if same else (self.input_dtypes[-1], self.sum_dtypes[0])

    def refusal(self, problem: Problem) -> Refusal | None:
        """Why the declaration rules `problem` out, or None if it doesn't."""
        p = problem
        for name, dtype in (("x", p.x_dtype), ("w", p.w_dtype)):
            if dtype.name not in self.input_dtypes:
                return Refusal(f"{name} is {dtype}; it takes {', '.join(self.input_dtypes)}")
        # A bias is converted once, so it may have types that images may not.
        biases = (*INPUTS, *self.input_dtypes)
        if p.bias_dtype is not None and p.bias_dtype.name not in biases:
            return Refusal(f"the bias is {p.bias_dtype}; it takes {', '.join(dict.fromkeys(biases))}")
        if p.sum_dtype.name not in self.sum_dtypes:
            return Refusal(f"the sum is {p.sum_dtype}; it keeps {', '.join(self.sum_dtypes)}")
        if p.out_dtype.name not in self.out_dtypes:
            return Refusal(f"the result is {p.out_dtype}; it gives {', '.join(self.out_dtypes)}")
        if self.filter_sizes is not None and (p.kh, p.kw) not in self.filter_sizes:
            sizes = ", ".join(f"{a}x{b}" for a, b in self.filter_sizes)
            return Refusal(f"the filter is {p.kh}x{p.kw}; it takes {sizes} only")
        if p.kh < self.least_filter[0] or p.kw < self.least_filter[1]:
            least = "x".join(map(str, self.least_filter))
            return Refusal(f"the filter is {p.kh}x{p.kw}; it takes {least} and larger")
        channels = p.c // p.groups
        if self.least_channels > 1 and channels < self.least_channels:
            return Refusal(f"a group has {channels} channels; it takes {self.least_channels} and more")
        if not self.strided and p.stride != (1, 1):
            return Refusal(f"the stride is {p.stride}; it takes 1 only")
        if self.strides is not None and p.stride not in self.strides:
            taken = ", ".join(f"{a}x{b}" for a, b in self.strides)
            return Refusal("the stride is {}x{}; it takes {} only".format(*p.stride, taken))
        if not self.dilated and p.dilation != (1, 1):
            return Refusal(f"the dilation is {p.dilation}; it takes 1 only")
        if not self.grouped and p.groups != 1:
            return Refusal(f"there are {p.groups} groups; it takes 1 only")
        if self.depthwise and not 1 < p.groups == p.c == p.oc:
            return Refusal(
                f"groups, channels and output channels are {p.groups}, {p.c} and {p.oc}; "
                "it takes several groups of one channel and one output channel each"
            )
        if any(p.padding) and p.boundary not in self.boundaries:
            return Refusal(f"the boundary is {p.boundary}; it takes {', '.join(self.boundaries)}")
        if self.sum_is_output and p.sum_dtype != p.out_dtype:
            return Refusal(
                f"the sum is {p.sum_dtype} and the result {p.out_dtype}; "
                "it accumulates in the output array, so they must be the same"
            )
        if not self.error.meets(p.accuracy):
            return Refusal(f"accuracy {p.accuracy!r} is asked for; it promises {self.error}")
        return None


@dataclass(frozen=True, slots=True)
class Option:
    """One key of ``config=``.

    Attributes
    ----------
    summary : str
        What it sets, in a line.
    default : object
        None means that the plan chooses.
    allowed : tuple or None
        The values taken; None means that `check` decides.
    kind : str
        How to read `allowed` None: "int", "pair" (two positive ints) or "bytes".
    """

    summary: str
    default: Any = None
    allowed: tuple[Any, ...] | None = None
    kind: Literal["choice", "int", "pair", "bytes"] = "choice"

    def check(self, name: str, value: Any) -> Any:
        """`value` in its normal form, or a ValueError that names the key and what is allowed."""
        if value is None and self.default is None:
            return None
        if self.allowed is not None:
            for known in self.allowed:
                if type(known) is type(value) and known == value:
                    return value
            raise ValueError(
                f"config[{name!r}] must be one of {', '.join(map(repr, self.allowed))}, not {shown(value)}"
            )
        numbers = value if self.kind == "pair" else (value,)
        whole = (
            isinstance(numbers, (tuple, list))
            and len(numbers) == (2 if self.kind == "pair" else 1)
            and all(
                isinstance(i, (int, np.integer)) and not isinstance(i, bool) and 0 < i <= LARGEST
                for i in numbers
            )
        )
        if not whole:
            form = "a pair of positive integers" if self.kind == "pair" else "a positive integer"
            raise ValueError(f"config[{name!r}] must be {form} up to {LARGEST}, not {shown(value)}")
        return tuple(int(i) for i in numbers) if self.kind == "pair" else int(value)


def resolve_config(options: Mapping[str, Option], config: Config | None, backend: str) -> dict[str, Any]:
    """Every option's value: the caller's where given, else the default.

    Raises
    ------
    TypeError
        `config` is not a mapping.
    ValueError
        A key or value is not allowed; the message lists those that are.
    """
    values = {name: option.default for name, option in options.items()}
    if config is None:
        return values
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a mapping of options, not {shown(config)}")
    for name, value in config.items():
        if name not in options:
            known = ", ".join(options) or "none"
            raise ValueError(f"config has no key {shown(name)} for backend {backend}; its options: {known}")
        values[name] = options[name].check(name, value)
    return values


def check_workspace(workspace: Any, needed: int) -> None:
    """See that a caller's `workspace`, a NumPy array, has the bytes that a plan said it needs.

    Raises
    ------
    TypeError, ValueError
        It is no writable, contiguous uint8 array of `needed` bytes or more.
    """
    if not isinstance(workspace, np.ndarray) or workspace.dtype != np.uint8:
        given = f"an array of {workspace.dtype}" if isinstance(workspace, np.ndarray) else repr(workspace)
        raise TypeError(f"workspace must be a NumPy array of uint8, not {given}")
    if not (workspace.flags.c_contiguous and workspace.flags.writeable and workspace.ndim == 1):
        raise ValueError("workspace must be writable, of one axis, its bytes one after the other")
    if workspace.size < needed:
        raise ValueError(
            f"workspace must have at least {needed} bytes, as workspace_bytes says, not {workspace.size}"
        )


@dataclass(frozen=True, slots=True)
class Threshold:
    """A size at which a plan starts to do something else; tests draw problems around it.

    Attributes
    ----------
    axis : str
        "oh", "ow", "oc", "n" (output sizes), "c" (input channels) or "macs".
    value : int
        The size at which the other path begins.
    path : str
        The path's name, as `Plan.paths` lists it.
    """

    axis: Literal["oh", "ow", "oc", "n", "c", "macs"]
    value: int
    path: str


@runtime_checkable
class Plan(Protocol):
    """Everything decided for one problem, one set of layouts and one device.

    Attributes
    ----------
    problem : Problem
    config : mapping
        The value of every option, defaults filled in.
    launch : mapping
        How the work is laid out (tiles, grid, instruction set), for people to read.
    thresholds : tuple of Threshold
    paths : tuple of str
        Names of the code paths that this plan can take.
    accuracy : ErrorContract
    cost : float or None
        Estimated seconds, by which a chooser picks; None is never chosen by itself.

    A plan may have an attribute `by_address`. Where that is true, `run` takes x, w and out for where they begin alone, and
    may be given them with the caller's axes; the layouts that it was planned for are those of the canonical ones.
    """

    # Properties, so that an implementation may have plain attributes of narrower types.
    @property
    def problem(self) -> Problem: ...
    @property
    def config(self) -> Config: ...
    @property
    def launch(self) -> Mapping[str, Any]: ...
    @property
    def thresholds(self) -> tuple[Threshold, ...]: ...
    @property
    def paths(self) -> tuple[str, ...]: ...
    @property
    def accuracy(self) -> ErrorContract: ...
    @property
    def cost(self) -> float | None: ...

    def workspace_bytes(self, num_threads: int | None = None) -> int:
        """Scratch memory that `run` needs, in bytes."""
        ...

    def run(
        self,
        x: Any,
        w: Any,
        bias: Any,
        out: Any,
        *,
        workspace: Any = None,
        num_threads: int | None = None,
        stream: Any = None,
    ) -> None:
        """Fill `out`. Arrays have the problem's canonical shapes and the plan's layouts.

        `workspace` is a writable uint8 array of at least ``workspace_bytes(num_threads)``
        on the same device; without it the plan takes its own.
        """
        ...

    def paths_run(self) -> frozenset[str]:
        """Which of `paths` have run since the plan was made."""
        ...


@runtime_checkable
class Backend(Protocol):
    """Something that can compute problems. `contract` is the `CONTRACT_VERSION` it was written for.

    Attributes
    ----------
    name : str
        What callers say in ``backend=``: "gpu-tiled".
    summary : str
        Its one idea in a line.
    builds_on : str or None
        The rung before it in its ladder.
    capabilities : Capabilities
    options : mapping of str to Option
        The keys of ``config=``.
    """

    @property
    def contract(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def summary(self) -> str: ...
    @property
    def builds_on(self) -> str | None: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def options(self) -> Mapping[str, Option]: ...

    def unavailable(self) -> str | None:
        """Why this machine can't run it, as a sentence a user can act on; None if it can."""
        ...

    def plan(
        self, problem: Problem, layouts: Layouts, device: Device, config: Config | None
    ) -> Plan | Refusal:
        """Decide everything for `problem`, or say why not. Looks at no array values."""
        ...
