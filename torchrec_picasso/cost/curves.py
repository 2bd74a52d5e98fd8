"""CommCurves: measured times of collectives and local work, stored in a file.

The planner reads communication (a :class:`Curve` per collective) and local work
(:class:`.LocalCosts`). Both should be measured on the machines that will train, because published
bandwidths predict neither.

Times are interpolated between measured points, because no line fits the steps of real links (socket
buffers, token buckets, protocol switches). The line ``latency + bytes / bandwidth`` describes the
link to a reader; its latency is used at other world sizes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from itertools import pairwise
from pathlib import Path
from reprlib import repr as shorten
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

import numpy as np

from torchrec_picasso.cost.local import DenseTimes, LocalCosts, non_negative_least_squares
from torchrec_picasso.errors import PicassoError, PlanError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

COLLECTIVES = ("all_to_all", "row_exchange", "all_reduce", "reduce_scatter", "all_gather")
"""Names of the measured collectives. ``row_exchange`` is this package's all-to-all, see
:mod:`torchrec_picasso.exchange.all_to_all`."""
LEVELS = ("inside", "across")
"""Names of the row exchanges among the ranks of each host, and among those of each place on all
hosts, see :mod:`torchrec_picasso.exchange.by_host`."""

_FORMAT_VERSION = 3  # 1 had no price of bags' lookups, 2 another one of sequences
_BYTES_PER_MS_TO_GB_PER_S = 1e-6
_ASSUMED_CORE_NS = 1.0
"""CPU time to send and receive a byte through sockets on one core of a server CPU, nanoseconds."""
_CLEARLY = 1.25
"""Factor by which times of neighbouring sizes, one 4 times the other, differ beyond noise."""
_LARGEST = 1e18  # far beyond any time or number of bytes
_LONGEST_SHOWN = 200
_HINT = "create it with `torchrec-picasso calibrate` or CommCurves.measure(pg).to_json(path)"


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Milliseconds of a collective by the bytes that its busiest rank sends or receives."""

    sent_bytes: tuple[int, ...]  # measured sizes, ascending, at least one
    ms: tuple[float, ...]  # median time of each size on the slowest rank
    latency_ms: float  # of the fitted line, at least 0
    ms_per_byte: float  # slope of the fitted line, at least 0

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in pairwise(self.sent_bytes))
        if not self.sent_bytes or len(self.sent_bytes) != len(self.ms) or not ascending:
            raise PicassoError(
                f"a curve has {len(self.ms)} times for sizes {str(self.sent_bytes)[:60]}, expected "
                "ascending sizes with one time each"
            )

    @staticmethod
    def fit(sent_bytes: Sequence[int], ms: Sequence[float]) -> Curve:
        """Fits the line to measured points, minimizing relative errors, because sizes span four
        decades; refuses sizes that do not ascend, and times of 0."""
        points = tuple(map(int, sent_bytes)), tuple(map(float, ms))
        curve = Curve(sent_bytes=points[0], ms=points[1], latency_ms=0.0, ms_per_byte=0.0)
        if min(ms) <= 0:
            raise PicassoError(f"expected times above 0, got {list(ms)}; measure the curve again")
        x, t = np.asarray(sent_bytes, dtype=float), np.asarray(ms, dtype=float)
        # divided by the times, so that residuals are relative errors; one point is a pure slope
        design = np.stack([1 / t if len(t) > 1 else 0 * t, x / t], axis=1)
        latency, slope = map(float, non_negative_least_squares(design, np.ones_like(t)))
        return dataclasses.replace(curve, latency_ms=latency, ms_per_byte=slope)

    @staticmethod
    def line(latency_ms: float, gbytes_per_s: float) -> Curve:
        """Returns a curve with a given latency and bandwidth, without measured points."""
        slope = _BYTES_PER_MS_TO_GB_PER_S / gbytes_per_s
        return Curve(sent_bytes=(0,), ms=(latency_ms,), latency_ms=latency_ms, ms_per_byte=slope)

    @property
    def gbytes_per_s(self) -> float:
        """Bandwidth of the fitted line, GB/s (10^9 bytes); infinite if the slope is 0."""
        return _BYTES_PER_MS_TO_GB_PER_S / self.ms_per_byte if self.ms_per_byte else float("inf")

    def ms_at(self, num_bytes: float) -> float:
        """Interpolates the time of a size, in milliseconds.

        Sizes below the first point take the time of the first point. Sizes above the last point
        are extrapolated with the slope between the two largest sizes, which latency hardly affects;
        in proportion to the size, an upper bound, if time does not grow clearly there.
        """
        beyond = num_bytes - self.sent_bytes[-1]
        if beyond <= 0:
            return float(np.interp(num_bytes, self.sent_bytes, self.ms))
        if not self.sent_bytes[-1]:  # a line without measured points
            slope = self.ms_per_byte
        elif len(self.ms) > 1 and self.ms[-1] > _CLEARLY * self.ms[-2]:
            slope = (self.ms[-1] - self.ms[-2]) / (self.sent_bytes[-1] - self.sent_bytes[-2])
        else:
            slope = self.ms[-1] / self.sent_bytes[-1]
        return self.ms[-1] + beyond * slope

    def is_disturbed(self, index: int) -> bool:
        """Whether a point's time is clearly above that of a larger size, or above the other points'
        curve. Not by the curve alone: of two disturbed neighbours each would justify the other."""
        points = [*zip(self.sent_bytes, self.ms)]
        num_bytes, ms = points.pop(index)
        expected_ms = Curve.fit(*zip(*points)).ms_at(num_bytes) if points else ms
        return ms > _CLEARLY * min(expected_ms, *self.ms[index:])


@dataclass(frozen=True, kw_only=True)
class CommCurves:
    """Measured times of the collectives of one process group.

    Sizes are the bytes that the busiest rank sends or receives with a bandwidth-optimal algorithm:
    ``(W-1)/W`` of the buffer of an all-to-all, ``2 (W-1)/W`` of the buffer of an all-reduce.

    Args:
        world_size: Number of ranks.
        ranks_per_host: Number of ranks per host.
        backend: Backend of the process group, such as ``"gloo"``.
        device: Device of the tensors, ``"cpu"`` or ``"cuda"``.
        collectives: Curve of each of :data:`COLLECTIVES`; with several ranks on each of several
            hosts also of :data:`LEVELS`.
        local: Costs of local work; the default is assumed, not measured.
        dense: Times of the dense part of a model; ``None`` = not known.
        wire_core_ns: CPU time per byte sent and received, nanoseconds; ``None`` = not measured.
        measured_on: Date, hardware and versions, for information; set by ``torchrec-picasso
            calibrate``.
    """

    world_size: int
    ranks_per_host: int = 1
    backend: str
    device: str
    collectives: Mapping[str, Curve]
    local: LocalCosts = field(default_factory=LocalCosts)
    dense: DenseTimes | None = None
    wire_core_ns: float | None = None
    measured_on: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in COLLECTIVES if name not in self.collectives]
        if missing:
            raise PicassoError(f"curves of {', '.join(missing)} are missing; {_HINT}")
        for name in ("world_size", "ranks_per_host"):
            if not 1 <= getattr(self, name) < 2**31:
                raise PicassoError(f"{name} is {getattr(self, name)}, expected a number of ranks")
        num_hosts, rest = divmod(self.world_size, self.ranks_per_host)
        if self.has_levels and (rest or num_hosts < 2 or self.ranks_per_host < 2):
            raise PicassoError(
                f"curves inside and across hosts are of {self.world_size} ranks, "
                f"{self.ranks_per_host} per host, expected several ranks on each of several hosts; "
                f"{_HINT}"
            )

    @property
    def has_levels(self) -> bool:
        """Whether exchanges inside and across hosts were measured."""
        return all(name in self.collectives for name in LEVELS)

    @property
    def core_ns_per_byte(self) -> float:
        """CPU time per byte sent and received, nanoseconds, measured or assumed."""
        if self.wire_core_ns is not None:
            return self.wire_core_ns
        return _ASSUMED_CORE_NS if self.device == "cpu" else 0.0

    @staticmethod
    def measure(
        pg: dist.ProcessGroup,
        *,
        device: torch.device | None = None,
        max_bytes: int = 64 << 20,
        seconds_per_point: float = 0.3,
        ranks_per_host: int | None = None,
        budget_s: float = 30.0,
        advance: Callable[[str], None] = lambda label: None,
    ) -> CommCurves:
        """Measures the collectives of ``pg``; local costs are the assumed ones. Collective.

        Nothing else may use the network or the cores during the measurement. The curves are equal
        on all ranks.

        Args:
            pg: Process group; all curves of a group with one rank are zero.
            device: Device of the tensors; ``None`` = CPU.
            max_bytes: Size of the largest buffer per rank; sizes are 4 KiB times powers of 4.
            seconds_per_point: Approximate maximum duration of the repetitions of one size.
            ranks_per_host: Ranks per host; ``None`` = ``LOCAL_WORLD_SIZE``, or 1 if it is not set.
                With ``None``, exchanges inside and across hosts are measured where rows may travel
                by host (``form="node_rows"``).
            budget_s: Maximum duration, seconds, but for disturbed sizes, which are measured again
                in a twentieth of it each, if they fit. Sizes that do not fit, except 4 and 16 KiB,
                are left out; curves are extrapolated beyond the last size.
            advance: Called with a label after each size of each collective, measured or left out.

        Raises:
            PicassoError: If the budget is not above 0.
        """
        import torch

        from torchrec_picasso.cost.measure import Measurement  # it imports this file

        device = device or torch.device("cpu")
        measurement = Measurement(pg, device, seconds_per_point, budget_s, advance)
        return measurement.curves(max_bytes, ranks_per_host)

    @staticmethod
    def assumed(
        world_size: int,
        *,
        gbytes_per_s: float,
        latency_ms: float = 0.05,
        backend: str = "assumed",
        device: str = "cpu",
        ranks_per_host: int = 1,
        local: LocalCosts | None = None,
    ) -> CommCurves:
        """Returns curves of a network that cannot be measured: one line for all collectives."""
        return CommCurves(
            world_size=world_size,
            ranks_per_host=ranks_per_host,
            backend=backend,
            device=device,
            collectives=dict.fromkeys(COLLECTIVES, Curve.line(latency_ms, gbytes_per_s)),
            local=local or LocalCosts(),
            measured_on={"assumed": f"{gbytes_per_s:g} GB/s, {latency_ms:g} ms latency"},
        )

    def ms(self, collective: str, busiest_bytes: float, world_size: int | None = None) -> float:
        """Predicts the time of one of :attr:`collectives`, in milliseconds.

        For another world size than the measured one, latency is proportional to the ``W - 1`` peers
        of a rank (steps of a ring, messages of an all-to-all); bandwidth per rank is the same.

        Args:
            collective: Name of the collective.
            busiest_bytes: Bytes that the busiest rank sends or receives.
            world_size: Number of ranks, 1 = no communication; ``None`` = the measured number.
        """
        world_size = world_size or self.world_size
        if world_size == 1:
            return 0.0
        curve = self.collectives[collective]
        return max(0.0, curve.ms_at(busiest_bytes) + self._more_ms(collective, world_size))

    def least_ms(self, collective: str, world_size: int) -> float:
        """Predicts the part of :meth:`ms` that does not depend on the number of bytes: the least
        measured time, because that of the smallest message alone is easily disturbed."""
        if world_size == 1:
            return 0.0
        least_ms = min(self.collectives[collective].ms)
        return max(0.0, least_ms + self._more_ms(collective, world_size))

    def _more_ms(self, collective: str, world_size: int) -> float:
        """Returns the latency beyond that of the measured number of peers."""
        peers, measured = (
            self._num_peers(collective, size) for size in (world_size, self.world_size)
        )
        return self.collectives[collective].latency_ms * (peers / measured - 1)

    def _num_peers(self, collective: str, world_size: int) -> int:
        """Returns the peers of a rank in a collective, at least 1; a host keeps its ranks."""
        sizes = (self.ranks_per_host, world_size // self.ranks_per_host)
        return max(1, dict(zip(LEVELS, sizes)).get(collective, world_size) - 1)

    def mismatch(self, *, world_size: int, device: str) -> str | None:
        """Describes how the measured setup differs from the planned ranks and device, ``"cpu"`` or
        ``"cuda"``; ``None`` = it does not.

        Raises:
            PlanError: If the curves of a single rank are used for several ranks.
        """
        if self.world_size == 1 and world_size > 1:
            raise PlanError(
                f"the curves are of 1 rank, without communication, but the plan has {world_size} "
                "ranks; measure curves on a process group of at least 2 ranks"
            )
        found, wanted = [], []
        if self.world_size != world_size:
            found.append(f"{self.world_size} ranks")
            wanted.append(f"{world_size} ranks")
        if self.device != device:
            found.append(f"backend {self.backend} on {self.device}")
            wanted.append(device)
        if not found:
            return None
        return f"curves of {', '.join(found)} are used for {', '.join(wanted)}"

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Writes the curves to a file, which gets its name only after it is complete.

        Raises:
            PicassoError: If the folder does not exist.
        """
        target = Path(path)
        if not target.parent.is_dir():
            raise PicassoError(f"there is no folder {target.parent} to write {target.name} into")
        document = {"format_version": _FORMAT_VERSION, **dataclasses.asdict(self)}
        unfinished = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            unfinished.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, target)
        finally:
            unfinished.unlink(missing_ok=True)

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> CommCurves:
        """Reads a file of :meth:`to_json`.

        Raises:
            PicassoError: If the file is missing or contains no valid curves.
        """
        source = Path(path)
        if not source.is_file():
            raise PicassoError(f"there is no curves file {source}; {_HINT}")
        try:
            document: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
            version = document.pop("format_version")
            if version != _FORMAT_VERSION:
                raise PicassoError(
                    f"format version {shorten(version)}, expected {_FORMAT_VERSION}; "
                    "measure again with this release"
                )
            return read(CommCurves, document, "curves")
        except PicassoError as error:
            raise PicassoError(f"{source} does not contain curves: {error}; {_HINT}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {str(error)[:_LONGEST_SHOWN]}"
            raise PicassoError(f"{source} does not contain curves ({reason}); {_HINT}") from error


def read(kind: Any, value: Any, place: str) -> Any:
    """Reads a value of a type from the output of ``dataclasses.asdict``.

    The file may be damaged or edited, so every value is checked; numbers are at least 0.

    Raises:
        PicassoError: If the value is of another type, or a field is unknown or missing; names the
            place of the value in the file.
    """
    origin, arms = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        if value is None and types.NoneType in arms:
            return None
        return read(type(value) if type(value) in arms else arms[0], value, place)
    if origin is tuple:
        _expect(isinstance(value, (list, tuple)), "a list", value, place)
        items = arms[:1] * len(value) if arms[-1] is ... else arms
        _expect(len(value) == len(items), f"a list of {len(items)} items", value, place)
        pairs = enumerate(zip(items, value))
        return tuple(read(item, x, f"{place}[{i}]") for i, (item, x) in pairs)
    if origin is Mapping or is_dataclass(kind):
        _expect(isinstance(value, Mapping), "a mapping", value, place)
        if origin is Mapping:
            return {name: read(arms[1], item, f"{place}.{name}") for name, item in value.items()}
        return _read_dataclass(kind, value, place)
    # a whole number is a number, but a bool is none
    fits = type(value) is kind or (kind is float and type(value) is int)
    _expect(fits, _SPELLED[kind], value, place)
    if isinstance(value, (int, float)):
        _expect(0 <= value <= _LARGEST, f"a number from 0 to {_LARGEST:g}", value, place)
    return value


def _read_dataclass(kind: Any, value: Mapping[str, Any], place: str) -> Any:
    hints = get_type_hints(kind)
    unknown = value.keys() - hints.keys()
    if unknown:
        raise PicassoError(f"{place}.{shorten(min(unknown))[1:-1]} is unknown")
    fields = {name: read(hints[name], item, f"{place}.{name}") for name, item in value.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise PicassoError(f"{place} lacks a field ({error})") from error


_SPELLED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


def _expect(fits: bool, expected: str, value: Any, place: str) -> None:
    if not fits:
        raise PicassoError(f"{place}: expected {expected}, got {shorten(value)}")
