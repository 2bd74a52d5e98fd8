"""CommCurves: measured times of collectives and local work, stored in a file.

The planner reads communication (a curve per collective) and local work (:class:`LocalCosts`). Both
should be measured on the machines that will train, because published bandwidths predict neither.
"""

from __future__ import annotations

import dataclasses
import json
import os
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union, get_args, get_origin, get_type_hints

from torchrec_picasso.cost.curve import Curve
from torchrec_picasso.cost.local import DenseTimes, LocalCosts
from torchrec_picasso.cost.measure import COLLECTIVES, measure_curves
from torchrec_picasso.errors import PicassoError, PlanError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["COLLECTIVES", "CommCurves", "read"]

_FORMAT_VERSION = 1
_ASSUMED_CORE_NS = 1.0
"""CPU time to send and receive a byte through sockets on one core of a server CPU, nanoseconds."""
_LONGEST_SHOWN = 60
_LARGEST = 1e18  # far beyond any time or number of bytes
_HINT = "create it with `torchrec-picasso calibrate` or CommCurves.measure(pg).to_json(path)"


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
        collectives: Curve of each of :data:`COLLECTIVES`.
        local: Costs of local work; the default is assumed, not measured.
        dense: Times of the dense part of a model; ``None`` = not known.
        wire_core_ns: CPU time per byte sent and received, nanoseconds; ``None`` = not measured.
        measured_on: Date, hardware and versions, for information.
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
        advance: Callable[[str], None] | None = None,
    ) -> CommCurves:
        """Measures the collectives of ``pg``; local costs are the assumed ones. Collective.

        Nothing else may use the network or the cores during the measurement.

        Args:
            pg: Process group; all curves of a group with one rank are zero.
            device: Device of the tensors; ``None`` = CPU.
            max_bytes: Size of the largest buffer per rank; sizes are 4 KiB times powers of 4.
            seconds_per_point: Approximate maximum duration of the repetitions of one size.
            ranks_per_host: Ranks per host; ``None`` = ``LOCAL_WORLD_SIZE``, or 1 if it is not set.
            budget_s: Maximum duration, seconds. Sizes that do not fit, except 4 and 16 KiB, are
                left out; curves are extrapolated beyond the last size.
            advance: Called with a label after each size of each collective, measured or left out.

        Returns:
            The curves, equal on all ranks.

        Raises:
            PicassoError: If the budget is not above 0.
        """
        advance = advance or (lambda label: None)
        measured = measure_curves(
            pg, device, max_bytes, seconds_per_point, ranks_per_host, budget_s, advance
        )
        return CommCurves(**measured)

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
        line = Curve.line(latency_ms, gbytes_per_s)
        return CommCurves(
            world_size=world_size,
            ranks_per_host=ranks_per_host,
            backend=backend,
            device=device,
            collectives=dict.fromkeys(COLLECTIVES, line),
            local=local or LocalCosts(),
            measured_on={"assumed": f"{gbytes_per_s:g} GB/s, {latency_ms:g} ms latency"},
        )

    def ms(self, collective: str, busiest_bytes: float, world_size: int | None = None) -> float:
        """Predicts the time of one collective, in milliseconds.

        For another world size than the measured one, latency is proportional to the ``W - 1`` peers
        of a rank (steps of a ring, messages of an all-to-all); bandwidth per rank is the same.

        Args:
            collective: One of :data:`COLLECTIVES`.
            busiest_bytes: Bytes that the busiest rank sends or receives.
            world_size: Number of ranks, 1 = no communication; ``None`` = the measured number.
        """
        world_size = world_size or self.world_size
        if world_size == 1:
            return 0.0
        curve = self.collectives[collective]
        # the measured time includes the latency of the measured number of peers
        more_peers = (world_size - 1) / max(1, self.world_size - 1) - 1
        return max(0.0, curve.ms_at(busiest_bytes) + curve.latency_ms * more_peers)

    def mismatch(self, *, world_size: int, device: str) -> str | None:
        """Describes how the measured setup differs from the planned one; ``None`` = it does not.

        Args:
            world_size: Planned number of ranks.
            device: Planned compute device, ``"cpu"`` or ``"cuda"``.

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

        Args:
            path: File to write or to replace, in an existing folder.

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

        Args:
            path: The file.

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
                    f"format version {_shown(version)}, expected {_FORMAT_VERSION}; "
                    "measure again with this release"
                )
            document.pop("levels", None)  # a field of earlier files without any use
            curves: CommCurves = read(CommCurves, document, "curves")
            return curves
        except PicassoError as error:
            raise PicassoError(f"{source} does not contain curves: {error}; {_HINT}") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            reason = f"{type(error).__name__}: {_shown(str(error))}"
            raise PicassoError(f"{source} does not contain curves ({reason}); {_HINT}") from error


def read(kind: Any, value: Any, place: str) -> Any:
    """Reads a value from the output of ``dataclasses.asdict``; messages name its place.

    The file may be damaged or edited, so every value is checked. ``kind`` is a dataclass, mapping,
    tuple, union or plain type; numbers are finite and at least 0.

    Raises:
        PicassoError: If the value is of another type, or a field is unknown or missing.
    """
    arguments = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        other = [option for option in arguments if option is not type(None)][-1]
        return read(str if isinstance(value, str) and str in arguments else other, value, place)
    if is_dataclass(kind):
        return _read_fields(kind, _mapping(value, place), place)
    if get_origin(kind) is Mapping:
        items = _mapping(value, place).items()
        return {
            name: read(arguments[1], item, f"{place}.{str(name)[:_LONGEST_SHOWN]}")
            for name, item in items
        }
    if get_origin(kind) is tuple:
        kinds = arguments
        if arguments[-1] is Ellipsis:
            kinds = arguments[:1] * (len(value) if isinstance(value, list) else 0)
        if not isinstance(value, list) or len(value) != len(kinds):
            raise PicassoError(f"{place} is {_shown(value)}, expected a list of numbers")
        return tuple(read(one, item, place) for one, item in zip(kinds, value))
    if kind in (str, bool):
        if not isinstance(value, kind):
            raise PicassoError(f"{place} is {_shown(value)}, expected a {kind.__name__}")
        return value
    is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
    # NaN fails the comparison
    if not is_number or not 0 <= value <= _LARGEST:
        raise PicassoError(f"{place} is {_shown(value)}, expected a number from 0 to {_LARGEST:g}")
    return value


def _read_fields(kind: Any, document: Mapping[str, Any], place: str) -> Any:
    hints = get_type_hints(kind)
    unknown = sorted(map(str, document.keys() - {field.name for field in fields(kind)}))
    if unknown:
        raise PicassoError(f"{place}.{unknown[0][:_LONGEST_SHOWN]} is unknown")
    values = {name: read(hints[name], item, f"{place}.{name}") for name, item in document.items()}
    try:
        return kind(**values)
    except TypeError as error:
        raise PicassoError(f"{place} lacks a field ({error})") from error


def _mapping(value: Any, place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PicassoError(f"{place} is {_shown(value)}, expected a mapping")
    return value


def _shown(value: Any) -> str:
    """Formats a value for a message, on one line of limited length."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a huge number"
    return repr(value)[:_LONGEST_SHOWN]
