"""One table trained on ids in order of time, with hot rows that stay or follow, and by TorchRec.

Every training starts from equal weights and sees the same batches, so losses compare step by step,
and so do hot sets: :meth:`DriftTask.uses` lists what a hot set could have served.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.zoo.data.history import Ids
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.tables import tables_of
from torchrec_picasso.errors import InputError
from torchrec_picasso.exchange.meter import WireMeter
from torchrec_picasso.options.refresh import Refresh
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.refresh.refresher import Refreshed
from torchrec_picasso.sharding.sharder import HotColdEmbeddingBagCollectionSharder
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline
from torchrec_picasso.train_pipeline.step_report import StepReports

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["DriftRun", "DriftTask", "most_used", "train_following", "train_stock"]

_TABLE, _FEATURE = "t_id", "id"
_TABLE_LR, _DENSE_LR = 0.1, 0.05
_LABELLED = 3  # ids that this divides are clicked


@dataclass(frozen=True, kw_only=True, eq=False)
class DriftTask:
    """What is trained: a sample has one id, and is clicked or not by it.

    Args:
        ids_N: Ids in order of time, int64; rows of the table.
        hour_N: Hour of each, ascending.
        counted_hours: First hours, which hot rows are chosen from and nothing is trained on.
        num_hot: Hot rows.
        batch_size: Samples per rank and step.
        dim: Columns of the table.
        seed: Draws first weights.
    """

    ids_N: Ids
    hour_N: Ids
    counted_hours: int
    num_hot: int
    batch_size: int
    dim: int = 16
    seed: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return int(self.ids_N.max()) + 1

    def num_steps(self, world_size: int) -> int:
        """Whole global batches of the hours that are trained on.

        Raises:
            InputError: If there is none, or nothing is counted.
        """
        num_trained = len(self.ids_N) - self._num_counted
        steps = num_trained // (world_size * self.batch_size)
        if not steps or not self._num_counted:
            raise InputError(
                f"the first {self.counted_hours} hours have {self._num_counted:,} ids and those "
                f"after them {num_trained:,}, expected some to count and at least "
                f"{world_size * self.batch_size:,} to train on (ranks x batch_size); change "
                "counted_hours, or give a longer stream"
            )
        return steps

    def first_hot_rows(self) -> Ids:
        """The rows that most lookups of the counted hours go to, ascending."""
        return most_used(self.ids_N[: self._num_counted], self.num_hot)

    def uses(self, world_size: int) -> pd.DataFrame:
        """What is looked up: a line for each distinct row of each rank's batch.

        Returns:
            Columns ``hour, step, rank, row``, in this order; an hour is that of the step's first
            sample.
        """
        import pandas as pd

        steps = self.num_steps(world_size)
        ids_N = self.ids_N[self._num_counted :][: steps * world_size * self.batch_size]
        batch_N = np.arange(len(ids_N)) // self.batch_size
        batch_n, row_n = np.divmod(np.unique(batch_N * self.num_rows + ids_N), self.num_rows)
        step_n = batch_n // world_size
        first_n = self._num_counted + step_n * world_size * self.batch_size
        of = {"hour": self.hour_N[first_n], "step": step_n, "rank": batch_n % world_size}
        return pd.DataFrame({**of, "row": row_n}).sort_values(["hour", "step"], kind="stable")

    def batches(self, rank: int, world_size: int) -> Iterator[Batch]:
        """One rank's batches."""
        for step in range(self.num_steps(world_size)):
            start = self._num_counted + (step * world_size + rank) * self.batch_size
            ids_B = torch.from_numpy(self.ids_N[start : start + self.batch_size])
            yield Batch(
                dense_features=torch.zeros(self.batch_size, 1),
                sparse_features=KeyedJaggedTensor(
                    keys=[_FEATURE],
                    values=ids_B,
                    lengths=torch.ones(self.batch_size, dtype=torch.int64),
                ),
                labels=(ids_B % _LABELLED == 0).float(),
            )

    @property
    def _num_counted(self) -> int:
        return int(np.searchsorted(self.hour_N, self.hour_N[0] + self.counted_hours))


@dataclass(frozen=True, kw_only=True)
class DriftRun:
    """What a training left behind.

    Args:
        losses: Of every global batch.
        sent_bytes: Bytes that this rank sent, of every step.
        steps: What this rank's pipeline reported; empty for TorchRec's own.
    """

    losses: list[float]
    sent_bytes: list[int]
    steps: StepReports

    def looks(self) -> list[Refreshed]:
        """What came of every look at the hot set."""
        looks = {of.refreshed.step: of.refreshed for of in self.steps.reports if of.refreshed}
        return list(looks.values())


def most_used(rows_N: Sequence[int] | Ids, most: int) -> Ids:
    """The rows that come most often, ascending; of those alike the ones of least number.

    Args:
        rows_N: Rows, each as often as it is used.
        most: How many, unless there are fewer.
    """
    rows_U, count_U = np.unique(np.asarray(rows_N), return_counts=True)
    found: Ids = np.sort(rows_U[np.argsort(-count_U, kind="stable")[:most]])
    return found


def train_following(
    rank: int, world_size: int, task: DriftTask, refreshes: Mapping[str, Refresh | None]
) -> dict[str, DriftRun]:
    """Trains under ``InterleavedTrainPipeline``, once for each. Collective.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        task: What is trained.
        refreshes: How hot rows follow, by name; ``None`` = they stay.
    """
    quiet_upstream()
    batches = list(task.batches(rank, world_size))
    return {name: _train(task, batches, refresh) for name, refresh in refreshes.items()}


def train_stock(rank: int, world_size: int, task: DriftTask) -> DriftRun:
    """Trains under TorchRec's own sharding, row-wise, and its own pipeline. Collective."""
    quiet_upstream()
    model, optimizer = _sharded(task, EmbeddingBagCollectionSharder(), hot_rows=None)
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    losses, sent_bytes = [], []
    stream = task.batches(rank, world_size)
    for _ in range(task.num_steps(world_size)):
        with WireMeter() as meter:
            losses.append(pipeline.progress(stream))
        sent_bytes.append(meter.count.sent_bytes)
    return DriftRun(losses=_means(losses), sent_bytes=sent_bytes, steps=StepReports())


def _train(task: DriftTask, batches: Sequence[Batch], refresh: Refresh | None) -> DriftRun:
    sharder = HotColdEmbeddingBagCollectionSharder()
    model, optimizer = _sharded(task, sharder, hot_rows=task.first_hot_rows())
    steps = StepReports()
    pipeline: Any = InterleavedTrainPipeline(
        model,
        optimizer,
        torch.device("cpu"),
        num_micro_batches=1,  # steps compare from the first one on
        lookahead=True,
        refresh=refresh,
        on_step=steps,
    )
    stream = iter(batches)
    losses = [pipeline.progress(stream) for _ in batches]
    return DriftRun(
        losses=_means(losses), sent_bytes=[of.sent_bytes for of in steps.reports], steps=steps
    )


class _Model(nn.Module):
    """A table under a linear layer."""

    def __init__(self, num_rows: int, dim: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        config = EmbeddingBagConfig(
            name=_TABLE, embedding_dim=dim, num_embeddings=num_rows, feature_names=[_FEATURE]
        )
        self.ebc = EmbeddingBagCollection(tables=[config], device=torch.device("cpu"))
        self.over = nn.Linear(dim, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_B = self.over(self.ebc(batch.sparse_features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, loss.detach()


def _sharded(
    task: DriftTask, sharder: Any, hot_rows: Ids | None
) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """The model, its table row-wise and marked if there are hot rows; its dense optimizer."""
    pg = dist.group.WORLD
    assert pg is not None, "init_process_group comes first"
    unsharded = _Model(task.num_rows, task.dim, task.seed)
    apply_optimizer_in_backward(RowWiseAdagrad, unsharded.ebc.parameters(), {"lr": _TABLE_LR})
    tables = tables_of(unsharded)
    plan = construct_module_sharding_plan(
        unsharded.ebc,
        {_TABLE: row_wise()},
        sharder=sharder,
        local_size=pg.size(),
        world_size=pg.size(),
        device_type="cpu",
    )
    if hot_rows is not None:
        plan[_TABLE].cache_params = HotColdParams(hot_rows=torch.from_numpy(hot_rows))
    model = DistributedModelParallel(
        unsharded,
        env=ShardingEnv.from_process_group(pg),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[sharder],
    )
    write_initial_tables(model, tables, task.seed)
    dense = [of for name, of in model.named_parameters() if "over" in name]
    return model, torch.optim.SGD(dense, lr=_DENSE_LR)


def _means(losses: Sequence[Tensor]) -> list[float]:
    """Over ranks, of every step. Collective."""
    total = torch.stack(list(losses)).to(torch.float64)
    dist.all_reduce(total)
    return [float(loss) / dist.get_world_size() for loss in total]
