"""Models, a stand-in sharder and statistics that the tests of this package share."""

import torch
from torch import nn
from torchrec.distributed.planner import Topology

from tests.sharding.jobs import RowWiseOnCpuSharder
from tests.support.tables import bags_of, sequences_of, tables_of
from torchrec_picasso.frequency import FrequencyStats, TableCounts

META = torch.device("meta")
ROWS = {"a": 10, "b": 100, "c": 5}
DIM = 8


class AbleSharder(RowWiseOnCpuSharder):
    """Stands in for the hot/cold sharder: planning needs no more of it."""

    supports_hot_cold = True


class Model(nn.Module):
    """Tables a, b, c in a pooled collection; with ``sequence``, table s in another kind."""

    def __init__(self, *, sequence: bool = False) -> None:
        super().__init__()
        self.pooled = bags_of(tables_of(ROWS, DIM), "meta")
        if sequence:
            self.sequence = sequences_of(tables_of({"s": 50}, DIM), "meta")


def topology(compute_device: str = "cpu", world_size: int = 2) -> Topology:
    return Topology(world_size, compute_device, local_world_size=world_size)


def stats() -> FrequencyStats:
    """Row 7 of b is looked up most, then row 2 of a, then rows 50 and 3 of b, then row 0 of c."""
    counts = {"a": {2: 9}, "b": {3: 5, 7: 10, 50: 7}, "c": {0: 1}}
    return FrequencyStats(
        tables={
            name: TableCounts(
                num_embeddings=ROWS[name],
                feature_names=(f"f_{name}",),
                rows_U=torch.tensor(list(seen), dtype=torch.int64),
                counts_U=torch.tensor(list(seen.values()), dtype=torch.int64),
            )
            for name, seen in counts.items()
        },
        num_batches=1,
    )
