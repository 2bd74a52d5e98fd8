"""A sharded model with its optimizers and its train pipeline."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipeline
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso.app.config import OptimizerConfig, TrainConfig
from torchrec_picasso.app.launch.environment import other_hardware
from torchrec_picasso.app.runs.pipelines import MakePipeline, pipeline_maker
from torchrec_picasso.app.runs.placements import Placement, make_placement
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.registry import build_model
from torchrec_picasso.app.zoo.tables import tables_of
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.train_pipeline.interleaved import InterleavedTrainPipeline

_DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
}


class Trainer:
    """A sharded, initialised model with its pipeline.

    Collective: every rank of the default process group makes one, in the same order. Trainers of
    equal ``config.seed`` start from equal weights under any placement.

    Args:
        config: Model, optimizers, placement and hot rows.
        source: Defines the tables, and has the held-out samples that hot rows are chosen from.
        placement: Overrides ``config.sharding.placement``.
        device: Device of the model, CPU if ``None``; the process group must support it.
        make_pipeline: Builds the pipeline from sharded model, optimizer and device; overrides
            ``config.pipeline``.
        change_plan: Changes the plan in place before the model is sharded.
    """

    def __init__(
        self,
        config: TrainConfig,
        source: BatchSource,
        placement: str | None = None,
        device: torch.device | None = None,
        make_pipeline: MakePipeline | None = None,
        change_plan: Callable[[ShardingPlan], None] | None = None,
    ) -> None:
        pg = dist.group.WORLD
        assert pg is not None, "init_process_group comes first"
        self._pg = pg
        self.device = device or torch.device("cpu")
        name = placement or config.sharding.placement
        model = unsharded_model(config, source)
        stats = _stats(config, source, model, pg.size()) if name == "hot_cold" else None
        curves = config.sharding.curves if name == "hot_cold" else None
        _move_dense_part(model, self.device)
        self.placement: Placement = make_placement(
            name,
            model,
            pg,
            device_type=self.device.type,
            batch_size=config.data.batch_size,
            hot_rows=config.sharding.hot_rows,
            stats=stats,
            curves=None if curves is None else _read_curves(curves),
            num_waves=config.sharding.num_waves,
        )
        if change_plan is not None:
            change_plan(self.placement.plan)
        self.model, self.optimizer = shard_model(
            model, self.placement, pg, self.device, config.seed, config.optimizer
        )
        self._rates = config.optimizer
        self.num_trained = 0
        """Steps trained; of a resumed run those before it too."""
        make_pipeline = make_pipeline or pipeline_maker(config.pipeline)
        self.pipeline: TrainPipeline = make_pipeline(self.model, self.optimizer, self.device)

    @property
    def interleaved(self) -> InterleavedTrainPipeline | None:
        """The pipeline, if it is this package's."""
        return self.pipeline if isinstance(self.pipeline, InterleavedTrainPipeline) else None

    def steps(self, batches: Iterable[Batch], num_steps: int | None = None) -> Iterator[Tensor]:
        """Trains on batches one at a time, yielding this rank's loss of each step. Collective.

        Exhaust the iterator: the pipeline reads ahead, and is empty only after the last step.

        Args:
            batches: This rank's batches, as many as on each rank.
            num_steps: Number of steps; ``None`` = until the batches end.
        """
        self.model.train()
        for loss, _, _ in self._outputs(batches, num_steps, self._write_rates):
            self.num_trained += 1
            yield loss

    def train(self, batches: Iterable[Batch], num_steps: int | None = None) -> Tensor:
        """Exhausts :meth:`steps`; returns this rank's losses, shape ``(steps,)``. Collective."""
        return torch.stack(list(self.steps(batches, num_steps)))

    def predict(self, batches: Iterable[Batch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields labels and click probabilities of each batch, a row for each candidate,
        ``(B C, tasks)``. Collective."""
        self.model.eval()
        with torch.no_grad():
            for _, logits, labels in self._outputs(batches, None):
                yield _by_task(labels), _by_task(logits.sigmoid())
        self.model.train()

    def mean_over_ranks(self, losses: Tensor) -> list[float]:
        """Averages losses of equally large batches over ranks. Collective."""
        total = losses.to(torch.float64)
        dist.all_reduce(total, group=self._pg)
        return [float(loss) for loss in total / self._pg.size()]

    def state(self) -> dict[str, Any]:
        """State dicts of model and optimizer, sharded."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}

    def load_state(self, state: dict[str, Any]) -> None:
        """Loads the state dicts of a checkpoint. Collective."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optim"])

    def _write_rates(self) -> None:
        """Writes the learning rates of the next step into the parameter groups."""
        rates = self._rates
        if self.num_trained > rates.warmup_steps:
            return
        share = min(1.0, (self.num_trained + 1) / max(1, rates.warmup_steps))
        (_, tables), (_, dense) = self.optimizer.optimizers
        for part, rate in ((tables, rates.embedding_lr), (dense, rates.dense_lr)):
            for group in part.param_groups:
                group["lr"] = rate * share

    def _outputs(
        self,
        batches: Iterable[Batch],
        num_steps: int | None,
        before_step: Callable[[], None] = lambda: None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        # The pipeline reads ahead, so its iterator must end with the last step.
        stream = itertools.islice(iter(batches), num_steps)
        while True:
            before_step()
            try:
                yield self.pipeline.progress(stream)
            except StopIteration:
                return


def _by_task(values: Tensor) -> Tensor:
    """Labels or scores ``(B,)``, ``(B, tasks)`` or ``(B, C, tasks)`` as ``(rows, tasks)``."""
    return (values[:, None] if values.dim() == 1 else values).flatten(0, -2)


def unsharded_model(config: TrainConfig, source: BatchSource) -> nn.Module:
    """Builds an unsharded model: tables on the meta device, their optimizer fused into backward."""
    model = build_model(config, source)
    _fuse_table_optimizer(model, config.optimizer)
    return model


def shard_model(
    model: nn.Module,
    placement: Placement,
    pg: dist.ProcessGroup,
    device: torch.device,
    seed: int,
    optimizer: OptimizerConfig,
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """Shards a model and initialises its tables; also returns its optimizers. Collective.

    Args:
        model: Unsharded model, an optimizer fused into its tables.
        placement: Plan and sharders.
        pg: Process group.
        device: Device of the model.
        seed: Seed of the tables, which start the same in every plan.
        optimizer: Optimizer of the dense weights.
    """
    tables = tables_of(model)
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(pg),
        device=device,
        plan=placement.plan,
        sharders=placement.sharders,
    )
    write_initial_tables(sharded, tables, seed)
    return sharded, CombinedOptimizer(
        [sharded.fused_optimizer, _dense_optimizer(sharded, optimizer)]
    )


def _dense_optimizer(sharded: nn.Module, optimizer: OptimizerConfig) -> KeyedOptimizer:
    """The optimizer of the dense weights; its state is there from the start, to be resumed."""
    kind = _DENSE_OPTIMIZERS[optimizer.dense_optimizer]
    dense: KeyedOptimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(sharded.named_parameters())),
        lambda parameters: kind(parameters, lr=optimizer.dense_lr),
    )
    if kind is torch.optim.Adam:
        dense.init_state()  # a step of zero gradients, which moves no weight
        dense.zero_grad(set_to_none=True)
        for state in dense.state.values():
            state["step"].zero_()
    if optimizer.clip_norm is None:
        return dense
    return GradientClippingOptimizer(dense, GradientClipping.NORM, optimizer.clip_norm)


def _move_dense_part(model: nn.Module, device: torch.device) -> None:
    """Moves all but the tables, which are on the meta device."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def _stats(
    config: TrainConfig, source: BatchSource, model: nn.Module, world_size: int
) -> FrequencyStats | None:
    """Reads the statistics file, or counts the held-out samples of all ranks."""
    if config.sharding.stats is not None:
        return FrequencyStats.from_parquet(config.sharding.stats)
    if config.sharding.hot_rows == 0:
        return None
    shares = (source.heldout(rank, world_size) for rank in range(world_size))
    return FrequencyStats.collect(itertools.chain.from_iterable(shares), model)


def _read_curves(path: str) -> CommCurves:
    """Reads measured curves; warns on rank 0 if they are of other hardware."""
    curves = CommCurves.from_json(path)
    differs = other_hardware(curves.measured_on)
    if differs is not None and dist.get_rank() == 0:
        warnings.warn(
            f"{path} was measured on {differs}: the plan may be wrong; calibrate where and as you "
            "train",
            stacklevel=2,
        )
    return curves


def _fuse_table_optimizer(model: nn.Module, optimizer: OptimizerConfig) -> None:
    kinds = {
        "rowwise_adagrad": RowWiseAdagrad,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    settings = {"lr": optimizer.embedding_lr}
    if optimizer.embedding_optimizer != "sgd":
        settings["eps"] = optimizer.embedding_eps
    for module in model.modules():
        if isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            apply_optimizer_in_backward(
                kinds[optimizer.embedding_optimizer], module.parameters(), settings
            )
