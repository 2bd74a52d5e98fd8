"""The same model on other clusters: decisions over a range of world sizes or bandwidths."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.dense import DenseTimes
from torchrec_picasso.decision.decision import TableFacts, decide
from torchrec_picasso.decision.explain import summarize
from torchrec_picasso.errors import PlanError
from torchrec_picasso.frequency import FrequencyStats

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["sweep"]


def sweep(
    facts: Sequence[TableFacts],
    stats: FrequencyStats | None,
    curves: CommCurves,
    *,
    batch_size: int,
    world_sizes: Iterable[int] = (),
    bandwidths: Iterable[float] = (1.0,),
    dense: DenseTimes | None = None,
) -> pd.DataFrame:
    """Decides anew for every world size and bandwidth. Extrapolates; nothing is run.

    Args:
        facts: The tables, see :func:`torchrec_picasso.planner.table_facts.facts_of_model`.
        stats: Lookup counts, or ``None``.
        curves: Measured costs at one world size.
        batch_size: Samples per rank and step, the same at every world size.
        world_sizes: World sizes to try; empty = that of the curves.
        bandwidths: Factors on the measured bandwidth.
        dense: The dense part of a step; ``None`` = what the curves know of it.

    Returns:
        One line per pair, with ``bandwidth`` and the entries of
        :func:`torchrec_picasso.decision.explain.summarize`, without ``memory_bytes``.

    Raises:
        PlanError: If a world size or a bandwidth cannot be.
    """
    import pandas as pd

    lines = []
    for world_size in tuple(world_sizes) or (curves.world_size,):
        if world_size < 2:
            raise PlanError(f"world size {world_size}: expected at least 2 ranks")
        for bandwidth in bandwidths:
            if not bandwidth > 0:
                raise PlanError(f"bandwidth factor {bandwidth}: expected a number above 0")
            decision = decide(
                facts,
                stats,
                curves.with_bandwidth(bandwidth),
                world_size=world_size,
                batch_size=batch_size,
                dense=dense,
            )
            summary = summarize(decision)
            del summary["memory_bytes"]
            lines.append({"bandwidth": bandwidth, **summary})
    frame = pd.DataFrame(lines)
    # None, not a number that is none, where nothing is interleaved
    frame["num_micro_batches"] = pd.Series(
        [line["num_micro_batches"] for line in lines], dtype=object
    )
    return frame
