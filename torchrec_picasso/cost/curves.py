"""CommCurves: how long each collective takes here, measured once, kept in a file.

The planner reads two things from it: communication (a curve per collective) and local work
(:class:`LocalCosts`). Both come from the process group and the machine that will train, because
published bandwidths say little of either.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchrec_picasso.cost.collective_calls import COLLECTIVES
from torchrec_picasso.cost.curve import Curve
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.cost.local import LocalCosts
from torchrec_picasso.cost.measure import measure_curves
from torchrec_picasso.cost.read_numbers import read_numbers, shown_shortly
from torchrec_picasso.errors import PicassoError, PlanError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

__all__ = ["COLLECTIVES", "CommCurves"]

_FORMAT_VERSION = 1
_ASSUMED_CORE_NS = 1.0
"""Of a byte sent and one received through sockets, on one core of a server CPU."""
_HINT = "make it with `torchrec-picasso calibrate` or CommCurves.measure(pg).to_json(path)"


@dataclass(frozen=True, kw_only=True)
class CommCurves:
    """Measured time of the collectives of one process group.

    Sizes are the bytes that the busiest rank sends or receives, by the usual bandwidth-optimal
    algorithm: ``(W-1)/W`` of an all-to-all's buffer, ``2 (W-1)/W`` of an all-reduce's.

    Args:
        world_size: Ranks of the group.
        ranks_per_host: Ranks that share a host.
        backend: Its backend, such as ``"gloo"``.
        device: Where the tensors were, ``"cpu"`` or ``"cuda"``.
        collectives: Curve by name, one of :data:`COLLECTIVES`.
        local: Local work per row; assumed, not measured, when left out.
        dense: The dense part of a model; ``None`` = not known.
        wire_core_ns: What a byte takes of the core that its message is sent and received by,
            nanoseconds; ``None`` = not measured.
        measured_on: Date, hardware and versions, for the reader.
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

    @property
    def core_ns_per_byte(self) -> float:
        """What a byte on the wire takes of the core, measured or assumed."""
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
        """Measures the collectives of ``pg``; local costs stay the assumed ones.

        Collective: every rank of ``pg`` calls this, in the same order; nothing else may use the
        network or the cores meanwhile.

        Args:
            pg: Process group; of one rank it gives curves that are all zero.
            device: Where the tensors are; CPU if ``None``.
            max_bytes: Largest buffer per rank; sizes go from 4 KiB in powers of 4.
            seconds_per_point: About how long each size is repeated, at most.
            ranks_per_host: Ranks per host; ``None`` reads ``LOCAL_WORLD_SIZE``, else 1.
            budget_s: Seconds for all of it. A slow link gets no further than the sizes that fit,
                at least 4 and 16 KiB; curves go on in a straight line beyond.
            advance: Called after each size of each collective, measured or left out, with its name.

        Returns:
            The same curves on every rank.

        Raises:
            PicassoError: If the budget is not above 0.
        """
        advance = advance or (lambda point: None)
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
        """Curves of a network that cannot be measured: one line for every collective."""
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
        """Time of one collective.

        At another world size than measured, latency grows with the ``W - 1`` peers that each rank
        talks to (a ring's steps, an all-to-all's messages); bandwidth per rank stays.

        Args:
            collective: One of :data:`COLLECTIVES`.
            busiest_bytes: What the busiest rank sends or receives.
            world_size: Ranks; ``None`` = as measured. One rank costs nothing.

        Returns:
            Milliseconds.
        """
        world_size = world_size or self.world_size
        if world_size == 1:
            return 0.0
        curve = self.collectives[collective]
        more_peers = (world_size - 1) / max(1, self.world_size - 1) - 1
        return max(0.0, curve.ms_at(busiest_bytes) + curve.latency_ms * more_peers)

    def mismatch(self, *, world_size: int, device: str) -> str | None:
        """How these curves differ from what they are to be used for, or ``None``.

        Args:
            world_size: Ranks to plan for.
            device: Compute device to plan for, ``"cpu"`` or ``"cuda"``.

        Raises:
            PlanError: If they are of one rank and cannot be used for several.
        """
        if self.world_size == 1 and world_size > 1:
            raise PlanError(
                f"the curves are of 1 rank, which sends nothing, but the plan is for {world_size} "
                "ranks; measure them on a process group of at least 2 ranks"
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
        """Writes everything; the file appears under its name only when it is whole.

        Raises:
            PicassoError: If the folder does not exist.
        """
        target = Path(path)
        if not target.parent.is_dir():
            raise PicassoError(f"there is no folder {target.parent} to write {target.name} into")
        document = {"format_version": _FORMAT_VERSION, **dataclasses.asdict(self)}
        aside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            aside.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            os.replace(aside, target)
        finally:
            aside.unlink(missing_ok=True)

    @staticmethod
    def from_json(path: str | os.PathLike[str]) -> CommCurves:
        """Reads what :meth:`to_json` wrote.

        Raises:
            PicassoError: If the file is missing or not such curves.
        """
        source = Path(path)
        if not source.is_file():
            raise PicassoError(f"there is no curves file {source}; {_HINT}")
        try:
            document: dict[str, Any] = json.loads(source.read_text(encoding="utf-8"))
            version = document.pop("format_version")
            if version != _FORMAT_VERSION:
                raise PicassoError(
                    f"format version {shown_shortly(version)}, expected {_FORMAT_VERSION}; "
                    "measure again with this release"
                )
            return _read_curves(document)
        except PicassoError as error:
            raise PicassoError(f"{source} does not hold curves: {error}; {_HINT}") from error
        except (
            *(ValueError, KeyError, TypeError, AttributeError),
            *(RecursionError, ArithmeticError, IndexError),
        ) as error:
            what = f"{type(error).__name__}: {shown_shortly(str(error))}"
            raise PicassoError(f"{source} does not hold curves ({what}); {_HINT}") from error


def _read_curves(document: dict[str, Any]) -> CommCurves:
    """Curves of what ``dataclasses.asdict`` made of them."""
    document["collectives"] = _curves(document["collectives"])
    document.pop("levels", None)  # of earlier files; nothing was planned by them
    document["local"] = LocalCosts.from_dict(document["local"])
    if document.get("dense") is not None:
        document["dense"] = DenseTimes.from_dict(document["dense"])
    for name in ("world_size", "ranks_per_host"):
        number = document.get(name, 1)
        if type(number) is not int or not 1 <= number < 2**31:
            raise PicassoError(f"{name} is {shown_shortly(number)}, expected a number of ranks")
    for name in ("backend", "device"):
        if not isinstance(document[name], str):
            raise PicassoError(f"{name} is {shown_shortly(document[name])}, expected a name")
    if document.get("wire_core_ns") is not None:
        read_numbers([("wire_core_ns", document["wire_core_ns"])])
    if not isinstance(document.get("measured_on", {}), dict):
        raise PicassoError("measured_on is no mapping")
    return CommCurves(**document)


def _curves(document: Mapping[str, Mapping[str, Any]]) -> dict[str, Curve]:
    return {name: Curve.from_dict(of, shown_shortly(name)) for name, of in document.items()}
