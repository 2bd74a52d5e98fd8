"""Every published model, small, over generated batches; sharded by stock TorchRec or by us."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso import (
    FrequencyStats,
    HotColdEmbeddingBagCollectionSharder,
    HotColdEmbeddingCollectionSharder,
    hot_cold_planner,
)
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.feature_groups import FeatureGroup, FeatureGroups
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.models.can import CAN
from torchrec_picasso.app.zoo.models.deepfm import DeepFM
from torchrec_picasso.app.zoo.models.dhen import DHEN
from torchrec_picasso.app.zoo.models.dien import DIEN
from torchrec_picasso.app.zoo.models.din import DIN
from torchrec_picasso.app.zoo.models.logistic_regression import LogisticRegression
from torchrec_picasso.app.zoo.models.mmoe import MMoE
from torchrec_picasso.app.zoo.models.pooled_history import PooledHistory
from torchrec_picasso.app.zoo.models.tbsm import TBSM
from torchrec_picasso.app.zoo.models.wide_deep import WideDeep
from torchrec_picasso.app.zoo.models.wukong import Wukong
from torchrec_picasso.app.zoo.tables import tables_of

NUM_DENSE, DIM, LONGEST = 3, 8, 5
ONE_HOT = ("user", "device", "city")
TARGETS = ("item", "category")
HISTORIES = tuple(f"{name}_history" for name in TARGETS)
NEGATIVES = tuple(f"{name}_negatives" for name in TARGETS)
ROWS = {"user": 60, "device": 3, "city": 17, "item": 90, "category": 11}
NUM_ROWS = {
    **ROWS,
    **{f"{name}_{kind}": ROWS[name] for name in TARGETS for kind in ("history", "negatives")},
}


def group(name: str, columns: tuple[str, ...], dim: int = DIM, **more: Any) -> FeatureGroup:
    """Of equal dims; sequences if it reads another's tables."""
    if "tables_of" in more or name == "read":
        more = {"kind": "sequence", "max_length": LONGEST, **more}
    return FeatureGroup(name=name, columns=columns, dims=(dim,) * len(columns), **more)


FIELDS = group("fields", (*ONE_HOT, *TARGETS))
WIDE = (group("deep", (*ONE_HOT, *TARGETS)), group("wide", (*ONE_HOT, *TARGETS), 4))
CLICKS = (
    group("target", TARGETS),
    group("history", HISTORIES, tables_of="target"),
    group("profile", ONE_HOT),
)


@dataclass(frozen=True)
class ModelCase:
    groups: tuple[FeatureGroup, ...]
    head: Callable[[FeatureGroups], nn.Module]
    num_tasks: int = 1


CASES = {
    "logistic_regression": ModelCase(
        (group("wide", (*ONE_HOT, *TARGETS), 4),), lambda of: LogisticRegression(of, NUM_DENSE)
    ),
    "pooled_history": ModelCase(CLICKS, lambda of: PooledHistory(of, NUM_DENSE, (16,), "tanh")),
    "wide_deep": ModelCase(WIDE, lambda of: WideDeep(of, NUM_DENSE, (16, 8))),
    "deepfm": ModelCase(WIDE, lambda of: DeepFM(of, NUM_DENSE, (16, 8))),
    "din": ModelCase(CLICKS, lambda of: DIN(of, NUM_DENSE, 6, (16,), "tanh")),
    "dien": ModelCase(
        (*CLICKS, group("negatives", NEGATIVES, tables_of="target")),
        lambda of: DIEN(of, NUM_DENSE, 6, (16,), activation="tanh"),
    ),
    "mmoe": ModelCase((FIELDS,), lambda of: MMoE(of, NUM_DENSE, 3, (12, 6), (5,)), num_tasks=2),
    "can": ModelCase(
        (*CLICKS, group("network", TARGETS, 8 * 4 + 4 * 4), group("read", HISTORIES)),
        lambda of: CAN(of, NUM_DENSE, (8, 4, 4), 2, 6, (16,), "tanh"),
    ),
    "wukong": ModelCase(
        (FIELDS,), lambda of: Wukong(of, NUM_DENSE, (12,), 2, 3, 4, 5, (16,), (8,))
    ),
    "dhen": ModelCase((FIELDS,), lambda of: DHEN(of, NUM_DENSE, 2, 4, 2, (16,))),
    "tbsm": ModelCase(CLICKS, lambda of: TBSM(of, NUM_DENSE, (7,), (6,), (9,))),
}


def build(name: str, seed: int = 0) -> ClickModel:
    case = CASES[name]
    torch.manual_seed(seed)
    groups = FeatureGroups(case.groups, NUM_ROWS)
    return ClickModel(groups, case.head(groups))


def batch_of(name: str, step: int, num_samples: int = 24) -> Batch:
    """A batch, the same for the same step."""
    generator = torch.Generator().manual_seed(step)

    def draw(column: str, num_ids: int) -> torch.Tensor:
        return torch.randint(NUM_ROWS[column], (num_ids,), generator=generator)

    ones = torch.ones(num_samples, dtype=torch.int64)
    history = torch.randint(LONGEST + 1, (num_samples,), generator=generator)
    lengths = dict.fromkeys((*ONE_HOT, *TARGETS), ones)
    lengths |= dict.fromkeys((*HISTORIES, *NEGATIVES), history)
    tasks = CASES[name].num_tasks
    shape = (num_samples,) if tasks == 1 else (num_samples, tasks)
    return Batch(
        dense_features=torch.randn(num_samples, NUM_DENSE, generator=generator),
        sparse_features=KeyedJaggedTensor(
            keys=list(lengths),
            values=torch.cat([draw(column, int(of.sum())) for column, of in lengths.items()]),
            lengths=torch.cat(list(lengths.values())),
        ),
        labels=torch.randint(2, shape, generator=generator).float(),
    )


CPU = torch.device("cpu")
BATCH, HOT_ROWS = 24, 20


def sharded(
    name: str,
    *,
    is_stock: bool,
    before: Callable[[nn.Module], None] = lambda model: None,
    after: Callable[[nn.Module], None] | None = None,
) -> tuple[DistributedModelParallel, Any]:
    """A model and its optimizers. Collective.

    Args:
        name: Of a case.
        is_stock: Whole tables of stock TorchRec; else hot/cold ones.
        before: Changes the model before it is sharded.
        after: Wraps its dense part once it is, instead of DDP.
    """
    model, pg = build(name), dist.group.WORLD
    before(model)
    apply_optimizer_in_backward(RowWiseAdagrad, model.embeddings.parameters(), {"lr": 0.1})
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    sharders: list[Any]
    if is_stock:
        sharders = [EmbeddingBagCollectionSharder(), EmbeddingCollectionSharder()]
        whole = ParameterConstraints(sharding_types=["table_wise"])
        planner: Any = EmbeddingShardingPlanner(
            topology=topology,
            batch_size=BATCH,
            constraints={table.name: whole for table in tables_of(model)},
            debug=False,
        )
    else:
        sharders = [HotColdEmbeddingBagCollectionSharder(), HotColdEmbeddingCollectionSharder()]
        stats = FrequencyStats.collect([batch_of(name, step) for step in range(8)], model)
        planner = hot_cold_planner(
            topology, stats, hot_rows=HOT_ROWS, batch_size=BATCH, debug=False
        )
    plan, tables = planner.collective_plan(model, sharders, pg), tables_of(model)
    env = ShardingEnv.from_process_group(pg)
    sharded = DistributedModelParallel(
        model, env, CPU, plan, sharders, init_data_parallel=after is None
    )
    write_initial_tables(sharded, tables, seed=0)
    if after is not None:
        after(sharded.module)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, lambda of: torch.optim.SGD(of, lr=0.1))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, wrapped])
