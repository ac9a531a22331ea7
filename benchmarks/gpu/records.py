"""What the experiments leave behind: one record for each (experiment, case, backend, options, place of the arrays)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from convpar.bench import machine
from convpar.bench.results import RecordFile, path_for


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRecord:
    """What one rung with some options did on one case, or why it couldn't.

    Attributes
    ----------
    experiment, case, backend, config, arrays, kernel
        The key, with `clock`. `config` holds the options that were asked for; the others had their defaults.
        `arrays` is "device", or "pinned" or "pageable" for arrays in host memory. `kernel` is empty but for
        counters, which are of one kernel.
    median, spread : float or None
        Seconds, and the interquartile range; None where it was refused.
    clock : str
        What the seconds are of: "op" (on the device, between events around the call), "layer" (on the host,
        with copies), "compute" (on the device, while any slice is computed), "call" (on the host, until an
        asynchronous call returns) or "first call".
    refused : str
        The reason.
    repeats, number : int
        Samples, and calls averaged in each.
    limit, limit_by, share
        The shortest time that the measured ceilings allow, which of them it is, and limit / median.
    ratios : mapping
        Median of others in the same run over this one's.
    numbers : mapping
        What else was measured: seconds, bytes per second, counts.
    checked, error : str
        What was compared with the reference, and what was wrong.
    worst : float
        The largest error over the contract's bound.
    contract, notes, versions, ceilings, date, commit
        As in `convpar.bench.results.Record`.
    """

    experiment: str
    case: str
    backend: str
    config: Mapping[str, Any] = field(default_factory=dict)
    arrays: str = "device"
    kernel: str = ""
    median: float | None = None
    spread: float | None = None
    clock: str = "op"
    refused: str = ""
    repeats: int = 0
    number: int = 1
    limit: float | None = None
    limit_by: str | None = None
    share: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)
    checked: str = ""
    error: str = ""
    worst: float = 0.0
    contract: str = ""
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    date: str = ""
    commit: str | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """What a newer record replaces an older one by."""
        return (
            self.experiment,
            self.case,
            self.backend,
            written(self.config),
            self.arrays,
            self.clock,
            self.kernel,
        )


def written(config: Mapping[str, Any]) -> str:
    """Options in a line, in alphabetical order: ``loops=unrolled tile=16x16``."""
    return " ".join(f"{k}={_value(v)}" for k, v in sorted(config.items()))


def _value(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "x".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def file_in(folder: Path) -> RecordFile[GpuRecord]:
    """The result file of this GPU model in `folder`.

    Raises
    ------
    ResultsError
        There is one that can't be read, or it is of other hardware.
    """
    hardware = machine.hardware("gpu")
    return RecordFile(GpuRecord, path_for(folder, machine.slug(hardware)), hardware)
