"""Result files: one JSON file for each hardware model, one record for each (case, backend, threads, build, level).

Times are seconds. A file is only ever replaced as a whole by a newer one that
holds everything the old one did.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar

SCHEMA = 1
"""Version of the file format."""

SHIPPED = "shipped"
"""The build that users get; the other is named after the Meson option that makes it."""


class ResultsError(ValueError):
    """The file isn't a result file, or is one of other hardware."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What one library, in its best setting, did on one case.

    Attributes
    ----------
    case, backend, threads, build, level
        The key. `backend` is a backend of convpar or the name of a peer; `threads` what it
        was given (0 on a GPU), `build` how convpar was compiled, and `level` the ISA level that convpar was held to,
        empty where it took the best by itself.
    median, spread : float
        Seconds a call, and their interquartile range.
    repeats, number : int
        Samples, and calls averaged in each.
    setting : str
        The peer's fastest setting under the case's accuracy contract, or under the strictest that it has if it
        hasn't that; empty for convpar.
    chose : str
        What a chooser picked.
    settings : mapping
        Median of each setting that was tried, or the reason why it couldn't be.
    limit, limit_by : float, str
        The shortest time that the ceilings of the same run allow, and which of them; None without ceilings.
    share : float
        limit / median.
    ratios : mapping
        Median of each peer in the same run over ours, the peer in the setting that its own record is of.
    peers : mapping
        The peers that were timed in turn with us, by name: version, mode, and in "settings" the median, spread,
        repeats, threads, types, contract and notes of each setting that gave a right answer. A peer's own record
        may be of another run.
    types, contract, notes
        Types of image, filter, sum and result with the overflow rule; the error contract; what differs from what was asked.
    checked, error, errors
        How much was compared with the reference, what was wrong, and the largest errors
        over either contract's bound by kind of data.
    versions, effective_threads, mode
        Of the library.
    ceilings : mapping
        Bytes per second and multiply-accumulates per second, these at the ISA level of the record.
    copy : float
        Bytes per second of a copy as large as the case: half of its least bytes read, half written. In a cache where
        that fits in one.
    date, commit : str
        When, in UTC; the commit of convpar's sources, with "-dirty" if they differ from it.
    load, busy : float
        Just before: the load average of the last minute, our own share included, and the share of the processors'
        time that others were using.
    """

    case: str
    backend: str
    threads: int
    build: str = SHIPPED
    level: str = ""
    median: float
    spread: float
    repeats: int
    number: int
    setting: str = ""
    chose: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    limit: float | None = None
    limit_by: str | None = None
    share: float | None = None
    ratios: Mapping[str, float] = field(default_factory=dict)
    peers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    types: str = ""
    contract: str = ""
    notes: tuple[str, ...] = ()
    checked: str = ""
    error: str = ""
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    effective_threads: int | None = None
    mode: str = ""
    ceilings: Mapping[str, Any] = field(default_factory=dict)
    copy: float | None = None
    date: str = ""
    commit: str | None = None
    load: float | None = None
    busy: float | None = None

    @property
    def key(self) -> tuple[str, str, int, str, str]:
        """What a newer record replaces an older one by."""
        return self.case, self.backend, self.threads, self.build, self.level


class Keyed(Protocol):
    """A record, a frozen dataclass."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def key(self) -> tuple[Any, ...]:
        """What a newer record replaces an older one by."""
        ...


Kind = TypeVar("Kind", bound=Keyed)


class RecordFile(Generic[Kind]):
    """The records of one hardware model, of one class.

    Parameters
    ----------
    kind : type
        The class of its records.
    path : path
        Need not exist yet.
    hardware : mapping, optional
        The machine at hand. An existing file of another is refused.

    Raises
    ------
    ResultsError
        The file can't be read as results, or is of other hardware.
    """

    def __init__(self, kind: type[Kind], path: Path, hardware: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self.hardware: dict[str, Any] = dict(hardware or {})
        self._kind = kind
        self._records: dict[tuple[Any, ...], Kind] = {}
        if self.path.exists():
            self._read(hardware)
        elif hardware is None:
            raise ResultsError(f"{path} doesn't exist")

    def _read(self, hardware: Mapping[str, Any] | None) -> None:
        try:
            document = json.loads(self.path.read_text())
            schema, self.hardware = document["schema"], document["hardware"]
            rows = document["records"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ResultsError(f"{self.path} isn't a result file: {type(e).__name__}: {e}") from e
        if schema != SCHEMA:
            raise ResultsError(f"{self.path} has schema {schema}, this convpar writes {SCHEMA}")
        if hardware is not None and dict(hardware) != self.hardware:
            raise ResultsError(
                f"{self.path} holds results of {self.hardware}, and this machine is {dict(hardware)}; "
                "give another file, or a folder to have it named"
            )
        for row in rows:
            try:
                # JSON has no tuples.
                record = self._kind(**{k: tuple(v) if k == "notes" else v for k, v in row.items()})
            except (TypeError, AttributeError) as e:
                raise ResultsError(f"{self.path} has a record that isn't one: {e}") from e
            self._records[record.key] = record

    @property
    def records(self) -> list[Kind]:
        """All records, by key."""
        return [self._records[key] for key in sorted(self._records)]

    def merge(self, records: Iterable[Kind]) -> None:
        """Add records, each in the place of an older one with its key."""
        for record in records:
            self._records[record.key] = record

    def save(self) -> None:
        """Write the file so that whoever reads it sees the old one or the new one, whole."""
        document = {
            "schema": SCHEMA,
            "hardware": self.hardware,
            "records": [_compact(record) for record in self.records],
        }
        text = json.dumps(document, indent=1, allow_nan=False) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}.")
        try:
            with os.fdopen(descriptor, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            # mkstemp makes files that only their owner reads.
            os.chmod(name, 0o644)
            os.replace(name, self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


class ResultFile(RecordFile[Record]):
    """The `Record`s of one hardware model; see `RecordFile`."""

    def __init__(self, path: Path, hardware: Mapping[str, Any] | None = None) -> None:
        super().__init__(Record, path, hardware)

    @property
    def records(self) -> list[Record]:
        """All records, by case, threads, build, level and backend."""
        return sorted(self._records.values(), key=lambda r: (r.case, r.threads, r.build, r.level, r.backend))

    def find(
        self, case: str, backend: str, threads: int, build: str = SHIPPED, level: str = ""
    ) -> Record | None:
        """The record of that key, or None."""
        return self._records.get((case, backend, threads, build, level))


def _compact(record: Keyed) -> dict[str, Any]:
    """`record` without what has its default, and numbers to five digits."""
    defaults = {f.name: f.default for f in fields(record)}
    row = {k: _rounded(v) for k, v in asdict(record).items()}
    return {k: v for k, v in row.items() if v != defaults[k] and v not in ({}, [])}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, Mapping):
        return {k: _rounded(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(v) for v in value]
    return value


def path_for(target: Path, slug: str) -> Path:
    """`target` itself if it is called something.json, else the file for the hardware `slug` in that folder."""
    return target if target.suffix == ".json" else target / f"{slug}.json"


def duration(seconds: float) -> str:
    """`seconds` with three digits in the unit that suits them: "2.91 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} us"


def _three(value: float) -> str:
    digits = 2 if value < 9.995 else 1 if value < 99.95 else 0
    return f"{value:.{digits}f}"
