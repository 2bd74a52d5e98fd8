"""The planner knows what the sharder refuses: what it plans is sharded, and trains.

Every kind of table that cannot be hot/cold, or have hot rows, is planned beside a plain one, by the
sharder's own settings, by an optimizer fused into the table or by constraints. Then the plan is
sharded and trained for a step.
"""

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torchrec
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import WeightDecayMode
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType
from torchrec.optim.optimizers import LarsSGD

from tests.support.tables import configs_of, stats_of, tables_of
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import CompatError, PlanError
from torchrec_picasso.frequency import FrequencyStats
from torchrec_picasso.placement import HotColdParams
from torchrec_picasso.planner import hot_cold_planner
from torchrec_picasso.planner.planner import HotColdPlanner
from torchrec_picasso.storage.exactness import check_exact, why_not_exact

CPU = torch.device("cpu")
ROWS, BATCH = 40, 8
PLANNED_BATCH = 512
"""Many lookups of few rows: the cost model wants every table hot/cold."""
TABLES = ("plain", "odd")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A table ``odd`` that the sharder refuses in some way.

    ``reason`` is part of what the planner says; ``hot_cold`` whether the table may be hot/cold
    without hot rows; ``trains`` whether TorchRec can train it on a CPU at all.
    """

    reason: str
    hot_cold: bool = False
    trains: bool = True
    dim: int = 8
    data_type: DataType = DataType.FP32
    optimizer: type = torchrec.optim.RowWiseAdagrad
    kwargs: dict[str, Any] = field(default_factory=dict)
    fused_params: dict[str, Any] = field(default_factory=dict)
    constraint: dict[str, Any] = field(default_factory=dict)
    totals: tuple[int | None, ...] = (None, 20)
    """Hot rows to train with; ``None`` = the cost model chooses."""
    is_dense: bool = False
    """Whether the table is left to a dense kernel."""
    both: bool = False
    """Whether the plain table is refused too, since the setting is the sharder's."""


KINDS = {
    "fp16": Kind(reason="stochastic rounding", data_type=DataType.FP16, hot_cold=True),
    "lars": Kind(reason="LARS_SGD has no CPU kernel", optimizer=LarsSGD, trains=False),
    "clipping": Kind(
        reason="gradient_clipping clips", kwargs={"gradient_clipping": True, "max_gradient": 0.1}
    ),
    "decay": Kind(
        reason="FBGEMM's CPU kernels ignore weight_decay_mode L2",
        kwargs={"weight_decay_mode": WeightDecayMode.L2, "weight_decay": 0.1},
    ),
    "counter": Kind(
        reason="weight_decay_mode COUNTER",
        trains=False,
        kwargs={"weight_decay_mode": WeightDecayMode.COUNTER, "weight_decay": 0.1},
    ),
    # TorchRec cannot exchange stock tables of two output types: the other one must be hot/cold
    "output": Kind(
        reason="rounds before pooling", constraint={"output_dtype": DataType.FP16}, totals=(20,)
    ),
    "output_of_all": Kind(
        reason="rounds before pooling",
        fused_params={"output_dtype": DataType.FP16},
        totals=(None, 0),
        both=True,
    ),
    "bf16": Kind(reason="weights of type BF16", data_type=DataType.BF16, trains=False),
    "dim": Kind(reason="it has embedding_dim 6", dim=6, trains=False),
    "kernel": Kind(
        reason="do not allow hot/cold", constraint={"compute_kernels": ["dense"]}, is_dense=True
    ),
    "type": Kind(reason="do not allow hot/cold", constraint={"sharding_types": ["table_wise"]}),
}


class Model(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        configs = configs_of(EmbeddingBagConfig, tables_of(dict.fromkeys(TABLES, ROWS), 8))
        odd = configs[TABLES.index("odd")]
        odd.embedding_dim, odd.data_type = kind.dim, kind.data_type
        self.ebc = EmbeddingBagCollection(tables=configs, device=CPU)
        for name in TABLES:
            is_odd = name == "odd"
            optimizer = kind.optimizer if is_odd else torchrec.optim.RowWiseAdagrad
            kwargs = {"lr": 0.1, **(kind.kwargs if is_odd else {})}
            apply_optimizer_in_backward(
                optimizer, self.ebc.embedding_bags[name].parameters(), kwargs
            )


def _stats() -> FrequencyStats:
    sizes = dict.fromkeys(TABLES, ROWS)
    return stats_of(sizes, lambda rows: 6 * torch.arange(rows, 0, -1), 10, PLANNED_BATCH)


def _batch(rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank)
    return KeyedJaggedTensor(
        keys=[f"f_{name}" for name in TABLES],
        values=torch.randint(ROWS, (BATCH * len(TABLES),), generator=generator),
        lengths=torch.ones(BATCH * len(TABLES), dtype=torch.int32),
    )


def _planned(
    kind: Kind,
    hot_rows: Any,
    world_size: int = 2,
    network: dict[str, float] | None = None,
    **constraint: Any,
) -> tuple[HotColdPlanner, Model, HotColdEmbeddingBagCollectionSharder]:
    asked = {**kind.constraint, **constraint}
    planner = hot_cold_planner(
        Topology(world_size=world_size, compute_device="cpu"),
        _stats(),
        hot_rows=hot_rows,
        curves=CommCurves.assumed(2, **(network or {"gbytes_per_s": 0.0001, "latency_ms": 0.1})),
        batch_size=PLANNED_BATCH,
        constraints={"odd": ParameterConstraints(**asked)} if asked else None,
        debug=False,
    )
    return planner, Model(kind), HotColdEmbeddingBagCollectionSharder(dict(kind.fused_params))


def _num_hot(plan: ShardingPlan) -> dict[str, int | None]:
    """Hot rows by table; None for stock."""
    placed = plan.plan["ebc"].items()  # type: ignore[attr-defined]
    return {
        name: each.cache_params.num_hot_rows
        if isinstance(each.cache_params, HotColdParams)
        else None
        for name, each in placed
    }


def _train(rank: int, world_size: int, kinds: dict[str, Kind]) -> dict[Any, Any]:
    """Plans, shards and trains every kind; returns hot rows by table and what changed."""
    pg, found = dist.group.WORLD, {}
    for name, kind in kinds.items():
        for hot_rows in kind.totals:
            planner, model, sharder = _planned(kind, hot_rows)
            plan = planner.collective_plan(model, [sharder], pg)
            sharded = DistributedModelParallel(
                model, ShardingEnv.from_process_group(pg), CPU, plan, sharders=[sharder]
            )
            before = sharded.module.ebc(_batch(rank)).wait().values()
            before.float().square().sum().backward()
            after = sharded.module.ebc(_batch(rank)).wait().values()
            changed = {
                table: not torch.equal(old, new)
                for table, old, new in zip(TABLES, before.split(8, 1), after.split(8, 1))
            }
            if kind.is_dense:
                del changed["odd"]  # it has an optimizer of its own, which does not step here
            found[name, hot_rows] = _num_hot(plan), changed
    return found


def test_what_is_planned_is_sharded_and_trains() -> None:
    trained = {name: kind for name, kind in KINDS.items() if kind.trains}
    assert len(trained) >= 6
    for rank in run_ranks(_train, 2, trained, timeout_s=200):
        for (name, hot_rows), (num_hot, changed) in rank.items():
            kind = KINDS[name]
            assert num_hot["odd"] == (0 if kind.hot_cold else None), name
            if kind.both:
                assert num_hot["plain"] is None
            elif hot_rows is not None:
                assert num_hot["plain"] == hot_rows
            assert all(changed.values()), (name, changed)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("hot_rows", [None, 0, 20])
def test_the_explanation_says_why(kind: Kind, hot_rows: int | None) -> None:
    if kind.both and hot_rows:
        return
    planner, model, sharder = _planned(kind, hot_rows)
    num_hot = _num_hot(planner.plan(model, [sharder]))
    assert num_hot["odd"] == (0 if kind.hot_cold else None)
    line = planner.explain().set_index("table").loc["odd"]
    assert kind.reason in line["why"]
    assert line["hot_rows"] == 0


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_wish_by_name_is_refused_with_the_reason(kind: Kind) -> None:
    planner, model, sharder = _planned(kind, {"odd": 3})
    # what the options lack is said with the options that there are
    reason = kind.reason if "do not allow" not in kind.reason else "its options are"
    with pytest.raises(PlanError, match=f"table 'odd'.* {reason}"):
        planner.plan(model, [sharder])
    if kind.hot_cold:
        planner, model, sharder = _planned(kind, {"odd": 0})
        assert _num_hot(planner.plan(model, [sharder])) == {"plain": None, "odd": 0}
    if not kind.constraint:
        wish = {"cache_params": HotColdParams(hot_rows=[1])}
        planner, model, sharder = _planned(kind, None, **wish)
        with pytest.raises(PlanError, match=f"the constraints name table 'odd'.*{kind.reason}"):
            planner.plan(model, [sharder])


@pytest.mark.parametrize(
    ("name", "hot_rows", "message"),
    [
        ("clipping", 41, "41 hot rows .* only 40 rows can be hot: 1 tables can .* 'odd': gradient"),
        ("fp16", 41, "such as 'odd': stochastic rounding .*, or request at most 40"),
        ("output_of_all", 1, "only 0 rows can be hot: 2 tables .* such as 'plain': output_dtype"),
    ],
)
def test_a_total_that_none_can_take_is_refused(name: str, hot_rows: int, message: str) -> None:
    planner, model, sharder = _planned(KINDS[name], hot_rows)
    with pytest.raises(PlanError, match=message):
        planner.plan(model, [sharder])


def test_a_table_that_only_ours_can_train_is_hot_cold() -> None:
    """FBGEMM has no CPU kernel for Adam, so a stock table could not even be made."""
    fast = {"gbytes_per_s": 100.0, "latency_ms": 0.01}  # stock is the cheaper
    for optimizer, is_hot_cold in (
        (torchrec.optim.RowWiseAdagrad, False),
        (torch.optim.Adam, True),
    ):
        kind = Kind(reason="", optimizer=optimizer)
        planner, model, sharder = _planned(kind, None, network=fast)
        assert (_num_hot(planner.plan(model, [sharder]))["odd"] is not None) == is_hot_cold


@pytest.mark.parametrize("how", ["fused_params", "kwargs", "constraint"])
def test_fp16_rows_are_hot_where_rounding_is_switched_off(how: str) -> None:
    off: dict[str, Any] = {how: {"stochastic_rounding": False}}
    planner, model, sharder = _planned(dataclasses.replace(KINDS["fp16"], **off), {"odd": 3})
    assert _num_hot(planner.plan(model, [sharder])) == {"plain": None, "odd": 3}


def test_planning_leaves_the_fused_optimizer_as_it_was() -> None:
    planner, model, sharder = _planned(KINDS["clipping"], 20)
    parameter = model.ebc.embedding_bags["odd"].weight
    before = dict(parameter._optimizer_kwargs[0])
    planner.plan(model, [sharder])
    assert parameter._optimizer_kwargs[0] == before


def test_the_sharder_gives_the_planners_reasons() -> None:
    options = [{"optimizer": EmbOptimType.LARS_SGD}, {"gradient_clipping": True}]
    for params in options:
        refusal = why_not_exact(params, data_type=DataType.FP32, device_type="cpu")
        with pytest.raises(CompatError, match=re.escape(refusal.what)):
            check_exact(params, ["t"], data_type=DataType.FP32, device=CPU, num_hot_rows=0)
