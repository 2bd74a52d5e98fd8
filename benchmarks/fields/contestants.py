"""Who takes part: a plan under a train pipeline."""

from __future__ import annotations

import torch
from torchrec.distributed.train_pipeline import TrainPipeline

from benchmarks.pipelines.contestants import Contestant
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.runs.pipelines import sparse_dist

__all__ = ["CONTESTANTS", "make_pipeline", "named"]

CONTESTANTS = {
    of.name: of
    for of in (
        Contestant(name="table_wise", placement="table_wise"),
        Contestant(name="planner", placement="planner"),
        Contestant(name="table_wise_ours", placement="table_wise", pipeline="interleaved"),
        Contestant(name="ours", placement="hot_cold", pipeline="interleaved"),
        Contestant(name="ours_plain", placement="hot_cold"),
        Contestant(name="all_rows", placement="hot_cold", pipeline="interleaved", hot_rows=0),
        Contestant(name="all_rows_plain", placement="hot_cold", hot_rows=0),
        Contestant(name="all_bags", placement="bags", pipeline="interleaved"),
    )
}


def named(names: tuple[str, ...]) -> list[Contestant]:
    """The contestants of these names.

    Raises:
        ConfigError: If there is none of a name, or none of them is stock.
    """
    unknown = [name for name in names if name not in CONTESTANTS]
    if unknown:
        raise ConfigError(
            f"--contestants: got {unknown[0]!r}; the names are {', '.join(CONTESTANTS)}"
        )
    found = [CONTESTANTS[name] for name in names]
    if not any(of.is_stock for of in found):
        raise ConfigError("--contestants: there is no stock one to compare with; add table_wise")
    return found


def make_pipeline(
    contestant: Contestant,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> TrainPipeline:
    """What trains; the interleaved pipeline chooses all its settings itself."""
    if contestant.pipeline != "interleaved":
        return sparse_dist(model, optimizer, device)
    return InterleavedTrainPipeline(
        model, optimizer, device, num_micro_batches=None, lookahead=None
    )
