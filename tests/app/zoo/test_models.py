"""Every published model trains as stock TorchRec trains it, whole and in micro-batches.

Small, over generated batches. With the dense part under FSDP2 or torch.compile: in whole batches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torchrec_picasso as picasso
from tests.train_pipeline.runs import run_to_the_end
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.feature_groups import FeatureGroup, FeatureGroups
from torchrec_picasso.app.zoo.initial_tables import write_initial_tables
from torchrec_picasso.app.zoo.models.can import CAN
from torchrec_picasso.app.zoo.models.deepfm import DeepFM
from torchrec_picasso.app.zoo.models.dhen import DHEN
from torchrec_picasso.app.zoo.models.dien import DIEN
from torchrec_picasso.app.zoo.models.din import DIN
from torchrec_picasso.app.zoo.models.hstu import HSTU
from torchrec_picasso.app.zoo.models.logistic_regression import LogisticRegression
from torchrec_picasso.app.zoo.models.mmoe import MMoE
from torchrec_picasso.app.zoo.models.pooled_history import PooledHistory
from torchrec_picasso.app.zoo.models.tbsm import TBSM
from torchrec_picasso.app.zoo.models.wide_deep import WideDeep
from torchrec_picasso.app.zoo.models.wukong import Wukong
from torchrec_picasso.app.zoo.tables import tables_of
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import CompatError, ConfigError

NUM_DENSE, DIM, LONGEST = 3, 8, 5
ONE_HOT = ("user", "device", "city")
TARGETS = ("item", "category")
HISTORIES = tuple(f"{name}_history" for name in TARGETS)
NEGATIVES = tuple(f"{name}_negatives" for name in TARGETS)
CROSSES = ("item_user", "item_user_history")
ROWS = {"user": 60, "device": 3, "city": 17, "item": 90, "category": 11}
NUM_ROWS = {
    **ROWS,
    **{f"{name}_{kind}": ROWS[name] for name in TARGETS for kind in ("history", "negatives")},
    **dict.fromkeys(CROSSES, 40),
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
    num_candidates: int | None = None
    num_dense: int = NUM_DENSE


CASES = {
    "logistic_regression": ModelCase(
        (group("wide", (*ONE_HOT, *TARGETS), 4),),
        lambda groups: LogisticRegression(groups, NUM_DENSE),
    ),
    "pooled_history": ModelCase(
        CLICKS, lambda groups: PooledHistory(groups, NUM_DENSE, (16,), "tanh")
    ),
    "wide_deep": ModelCase(WIDE, lambda groups: WideDeep(groups, NUM_DENSE, (16, 8))),
    "deepfm": ModelCase(WIDE, lambda groups: DeepFM(groups, NUM_DENSE, (16, 8))),
    "din": ModelCase(CLICKS, lambda groups: DIN(groups, NUM_DENSE, 6, (16,), "tanh")),
    "dien": ModelCase(
        (*CLICKS, group("negatives", NEGATIVES, tables_of="target")),
        lambda groups: DIEN(groups, NUM_DENSE, 6, (16,), activation="tanh"),
    ),
    "mmoe": ModelCase(
        (FIELDS,), lambda groups: MMoE(groups, NUM_DENSE, 3, (12, 6), (5,)), num_tasks=2
    ),
    "can": ModelCase(
        (*CLICKS, group("network", TARGETS, 8 * 4 + 4 * 4), group("read", HISTORIES)),
        lambda groups: CAN(groups, NUM_DENSE, (8, 4, 4), 2, 6, (16,), "tanh"),
    ),
    "wukong": ModelCase((FIELDS,), lambda g: Wukong(g, NUM_DENSE, (12,), 2, 3, 4, 5, (16,), (8,))),
    "dhen": ModelCase((FIELDS,), lambda groups: DHEN(groups, NUM_DENSE, 2, 4, 2, (16,))),
    "hstu": ModelCase(
        (
            group("target", TARGETS, kind="sequence"),
            *CLICKS[1:],
            group("cross", CROSSES[:1], kind="sequence"),
            group("cross_history", CROSSES[1:], tables_of="cross"),
        ),
        lambda groups: HSTU(groups, LONGEST, 2, 8, 2, (6,), num_candidates=3),
        num_tasks=2,
        num_candidates=3,
        num_dense=LONGEST,
    ),
    "tbsm": ModelCase(CLICKS, lambda groups: TBSM(groups, NUM_DENSE, (7,), (6,), (9,))),
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
    case = CASES[name]
    shape = (num_samples,) if case.num_tasks == 1 else (num_samples, case.num_tasks)
    dense = torch.randn(num_samples, case.num_dense, generator=generator)
    if case.num_candidates is not None:
        shape = (num_samples, case.num_candidates, case.num_tasks)
        lengths |= dict.fromkeys((*TARGETS, CROSSES[0]), case.num_candidates * ones)
        lengths |= {CROSSES[1]: history}
        dense = (9 * dense).exp()  # ages
    return Batch(
        dense_features=dense,
        sparse_features=KeyedJaggedTensor(
            keys=list(lengths),
            values=torch.cat([draw(column, int(each.sum())) for column, each in lengths.items()]),
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
    """A model, changed ``before`` and wrapped ``after`` it is sharded (then not by DDP)."""
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
        sharders = [
            picasso.HotColdEmbeddingBagCollectionSharder(),
            picasso.HotColdEmbeddingCollectionSharder(),
        ]
        stats = picasso.FrequencyStats.collect([batch_of(name, step) for step in range(8)], model)
        planner = picasso.hot_cold_planner(
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
    wrapped = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
    return sharded, CombinedOptimizer([sharded.fused_optimizer, wrapped])


STEPS = 4


def on_cpu(model: ClickModel) -> ClickModel:
    """The model; its tables, which have no data, get some."""
    for collection in model.embeddings.collections.values():
        collection.to_empty(device=CPU)
        for parameter in collection.parameters():
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
    return model


@pytest.mark.parametrize("name", list(CASES))
def test_a_loss_is_a_mean_over_samples_and_reaches_every_weight(name: str) -> None:
    model, batch = on_cpu(build(name)), batch_of(name, 0)
    loss, (same, logits, labels) = model(batch)
    assert torch.equal(loss, same)
    assert logits.shape == labels.shape == batch.labels.shape
    loss.backward()
    without = [
        key for key, one in model.named_parameters() if one.grad is None or not one.grad.any()
    ]
    assert not without
    alone = [model(sample)[1][1] for sample in split_batch(batch, [1, 1, 1, 1, 20])[:4]]
    torch.testing.assert_close(torch.cat(alone), logits[:4])


def test_groups_of_one_column_have_a_table_each_or_share_it() -> None:
    groups = [
        group("target", ("item",)),
        group("history", ("item_history",), tables_of="target"),
        group("wide", ("item",), 4),
    ]
    made = FeatureGroups(groups, NUM_ROWS)
    assert [(t.name, t.embedding_dim, tuple(t.feature_names)) for t in tables_of(made)] == [
        ("t_item", 8, ("item", "item_history")),
        ("t_item_wide", 4, ("item",)),
    ]
    assert set(made.collections) == {"target_8", "wide"}


@pytest.mark.parametrize(
    ("target", "history", "said"),
    [
        ({"dims": ()}, {}, "1 columns and 0 dims"),
        ({}, {"tables_of": "c"}, "reads the tables of 'c'"),
        ({}, {"dims": (4,), "tables_of": "a"}, "as many tables of its own"),
        (
            {"kind": "bag"},
            {"tables_of": "a", "kind": "sequence"},
            "one as bags and one as sequences",
        ),
    ],
)
def test_unfit_groups_refused(target: dict[str, Any], history: dict[str, Any], said: str) -> None:
    groups = [
        replace(group("a", ("item",)), **target),
        replace(group("b", ("item_history",)), **history),
    ]
    with pytest.raises(ConfigError, match=said):
        FeatureGroups(groups, NUM_ROWS)


def _shard_dense(model: nn.Module) -> None:
    fully_shard(model.head, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def _shard_all_but_tables(model: nn.Module) -> None:
    tables = set(model.embeddings.parameters())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model, ignored_params=tables, mesh=mesh)


def _compile_dense(model: nn.Module) -> None:
    model.head = torch.compile(model.head, backend="aot_eager")  # no compiler of C++ is needed


WRAPPED: dict[str, dict[str, Callable[[nn.Module], None]]] = {
    "": {},
    "fully_shard": {"after": _shard_dense},
    "fully_shard around all": {"after": _shard_all_but_tables},
    "compile": {"before": _compile_dense},
}


def _dense_weights(model: nn.Module) -> list[Tensor]:
    return [
        each.full_tensor() if isinstance(each, DTensor) else each.detach().clone()
        for each in model.module.head.parameters()
    ]


def _train(rank: int, world_size: int, name: str, wrapper: str) -> dict[Any, Any]:
    """Outputs and dense weights, of stock and by number of micro-batches."""
    batches = [batch_of(name, step * world_size + rank) for step in range(STEPS)]
    model, optimizer = sharded(name, is_stock=True)
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, CPU)
    found = {"stock": (run_to_the_end(pipeline, iter(batches)), _dense_weights(model))}
    for number in (None, 1, 2, 4) if wrapper else (1, 4):
        model, optimizer = sharded(name, is_stock=False, **WRAPPED[wrapper])
        pipeline = picasso.InterleavedTrainPipeline(
            model, optimizer, CPU, num_micro_batches=number, lookahead=True
        )
        if wrapper and number in (2, 4):  # what compilers and FSDP do inside is not seen
            with pytest.raises(CompatError, match=r"[Uu]se num_micro_batches=1"):
                run_to_the_end(pipeline, iter(batches))
            continue
        found[number] = run_to_the_end(pipeline, iter(batches)), _dense_weights(model)
        if not wrapper:
            assert pipeline.num_micro_batches == number
            lines = pipeline.summary().splitlines()[:-1]
            assert all(": interleaved" in line for line in lines), lines
    return found


@pytest.mark.parametrize(
    ("name", "wrapper"),
    [
        *((name, "") for name in CASES),
        ("mmoe", "fully_shard"),
        ("din", "fully_shard"),
        ("mmoe", "fully_shard around all"),
        ("mmoe", "compile"),
        ("din", "compile"),
    ],
)
def test_it_trains_as_stock_trains_it(name: str, wrapper: str) -> None:
    for found in run_ranks(_train, 2, name, wrapper, timeout_s=180):
        outputs, weights = found.pop("stock")
        assert len(outputs) == STEPS
        assert list(found) == ([None, 1] if wrapper else [1, 4])
        for mine, mine_weights in found.values():
            torch.testing.assert_close(mine, outputs, rtol=2e-5, atol=2e-5)
            if wrapper:
                torch.testing.assert_close(mine_weights, weights, rtol=2e-5, atol=2e-5)
