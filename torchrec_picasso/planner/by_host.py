"""Reasons why rows of a module cannot travel by host."""

from __future__ import annotations

from torch import nn
from torchrec.distributed.planner.types import Topology
from torchrec.distributed.types import CommOp, ModuleSharder

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.exchange.by_host import launched_place, why_no_hosts


def why_not(
    sharder: ModuleSharder[nn.Module], curves: CommCurves, topology: Topology
) -> str | None:
    """Returns the reason why a sharder's rows cannot travel by host; ``None`` = they can."""
    codecs = sharder.qcomm_codecs_registry or {}
    if codecs.get(CommOp.SEQUENCE_EMBEDDINGS_ALL_TO_ALL.name) is not None:
        return "its sharder has a codec for rows"
    if topology.compute_device != "cpu":
        return "rows by host are built and tested for the CPU with gloo"
    places = _ranks_per_host(curves, topology)
    reason = why_no_hosts([(places, r % places) for r in range(topology.world_size)])
    return reason and f"{reason}, by LOCAL_WORLD_SIZE or the topology's local_world_size"


def why_not_unasked(
    curves: CommCurves, topology: Topology, no_launched_hosts: str | None
) -> str | None:
    """Returns the reason why rows do not travel by host unless that is requested: this launch, or a
    price is missing; ``None`` = they may."""
    if no_launched_hosts is not None:
        return no_launched_hosts
    if not curves.has_levels:
        return "the curves have no times inside and across hosts"
    places = curves.ranks_per_host
    if topology.local_world_size in (places, topology.world_size) and places == _ranks_per_host(
        curves, topology
    ):
        return None
    return f"the curves are of {places} ranks per host, unlike the topology or this launch"


def _ranks_per_host(curves: CommCurves, topology: Topology) -> int:
    """Returns the ranks of each host: those of this launch, else of the topology, else of the
    curves, since a topology of one host, TorchRec's default, says nothing of hosts."""
    if (launched := launched_place()[0]) >= 0:
        return max(1, launched)
    planned = topology.local_world_size
    return curves.ranks_per_host if planned == topology.world_size else planned
