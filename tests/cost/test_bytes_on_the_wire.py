"""The cost model's bytes of a step against the byte meter in a real step.

Given the true numbers of rows, the model's formula is exact, purpose by purpose: flags and header,
ids, rows, gradients and hot sums, under TorchRec's pipeline and under ours in one piece. Looking
ahead adds one byte per fetched row, which the model leaves out. By host a rank sends to the others
of its host and to those of its place on other hosts, and to nobody else. Expected rows from
statistics are exact up to chance; the tolerance is reasoned where it stands.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from tests.sharding.jobs import OPTIMIZERS, Job, Model, Table, build
from tests.support.hosts import pretend_hosts
from tests.support.placing import CPU
from tests.support.shared_run import run_once
from tests.support.wire import Message, MessageRecorder, elements
from tests.train_pipeline.runs import Driver, make_driver
from torchrec_picasso import FrequencyStats, HotColdEmbeddingBagCollectionSharder, hot_cold_planner
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.by_host import ByHost
from torchrec_picasso.cost.curves import COLLECTIVES, Curve
from torchrec_picasso.cost.hot_cold import Exchange, HotColdTable, HotColdTotals
from torchrec_picasso.cost.stock import rank_loads, stock_cost
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.exchange.waiting import tallied
from torchrec_picasso.frequency.spectrum import CountSpectrum
from torchrec_picasso.placement import Form
from torchrec_picasso.planner import choice
from torchrec_picasso.planner.explain import summarize

DRIVERS: tuple[Driver, ...] = (None, (1, False), (1, True))
NUM_WARM = 4  # DDP makes new buckets in the second step


def _sent_by_purpose(pipeline: Any, batches: Iterator[Batch]) -> dict[str, float]:
    """Bytes of one step of this rank, told apart by their types; "all" is the byte meter's."""
    with WireMeter() as meter, MessageRecorder() as recorder, tallied() as tally:
        pipeline.progress(batches)
    messages, world_size = recorder.messages, dist.get_world_size()
    reduced = 4 * elements(messages, torch.float32, reduced=True)
    return {
        "header": 8 * elements(messages, torch.int64),
        "ids": 4 * elements(messages, torch.int32),
        "rows_and_gradients": 4 * elements(messages, torch.float32),
        "marks": elements(messages, torch.uint8),
        "sums": reduced * 2 * (world_size - 1) / world_size,
        "all": meter.count.sent_bytes,
        "received": tally.received_bytes,
    }


def _predicted(sent_bytes: Any, num_dense: int, world_size: int) -> dict[str, float]:
    """The model's bytes, summed as they can be told apart; dense gradients are not its business."""
    dense = 4 * num_dense * 2 * (world_size - 1) / world_size
    return {
        "header": sent_bytes["flags"] + sent_bytes["header"],
        "ids": sent_bytes["ids"],
        "rows_and_gradients": sent_bytes["rows"] + sent_bytes["gradients"],
        "sums": sent_bytes["hot"] + dense,
        "all": sum(sent_bytes.values()) + dense,
    }


TABLES = (Table("a", 8, 720, ("f0",)), Table("b", 16, 1080, ("f1",)))
NUM_HOT = 150
"""So many that three and more ranks unite the bits of hot slots in parts, and two do not."""
JOB = Job(placement={"*": NUM_HOT}, tables=TABLES, batch_sizes=(6,))
HOSTS, PLACES = 2, 2
BY_HOST = replace(JOB, by_host=("*",), num_places=PLACES)
HOT_ROWS = tuple(range(0, 3 * NUM_HOT, 3))
"""The first rows by thirds, as the job's plan has them."""


def _known_rows(table: Table, rank: int, world_size: int) -> tuple[list[int], list[int]]:
    """Cold rows, as many at each home, and hot rows; other ranks use others."""
    block = table.rows // world_size
    cold = [
        home * block + 10 + 3 * i for home in range(world_size) for i in range(2 + rank % 2)
    ]  # blocks have a multiple of 3 rows, so these are not hot
    return cold, list(HOT_ROWS[rank : rank + 2])


def _known_batch(rank: int, world_size: int) -> Batch:
    """Six samples that look up every known row three times; the fourth is an empty bag."""
    values, lengths = [], []
    for table in TABLES:
        cold, hot = _known_rows(table, rank, world_size)
        lookups = [*cold, *hot] * 3
        parts = np.array_split(np.array(lookups), 5)
        parts.insert(3, np.array([], dtype=np.int64))
        values += [torch.from_numpy(part).long() for part in parts]
        lengths += [len(part) for part in parts]
    features = KeyedJaggedTensor(
        keys=["f0", "f1"], values=torch.cat(values), lengths=torch.tensor(lengths)
    )
    return Batch(torch.zeros(6, 1), features, torch.ones(6))


def _known_totals(world_size: int) -> HotColdTotals:
    """Returns what the tables ask of a step, mean over ranks."""
    cold = {
        t.name: np.mean([len(_known_rows(t, r, world_size)[0]) for r in range(world_size)])
        for t in TABLES
    }
    touched = {
        t.name: len({row for r in range(world_size) for row in _known_rows(t, r, world_size)[1]})
        for t in TABLES
    }
    return HotColdTotals(
        features=len(TABLES),
        cold=sum(cold.values()),
        cold_elements=sum(cold[t.name] * t.dim for t in TABLES),
        touched=sum(touched.values()),
        touched_elements=sum(touched[t.name] * t.dim for t in TABLES),
        hot=NUM_HOT * len(TABLES),
        rows=sum(t.rows for t in TABLES),
    )


def _count_known(rank: int, world_size: int) -> dict[Driver, dict[str, float]]:
    found = {}
    for driver in DRIVERS:
        pipeline = make_driver(driver, build(JOB, rank, world_size))
        batches = itertools.repeat(_known_batch(rank, world_size))
        for _ in range(NUM_WARM):
            pipeline.progress(batches)
        found[driver] = _sent_by_purpose(pipeline, batches)
    return found


@pytest.mark.parametrize("driver", DRIVERS, ids=str)
@pytest.mark.parametrize("world_size", [2, 3])
def test_bytes_of_true_numbers_are_exact(world_size: int, driver: Driver) -> None:
    """Within two bytes: the meter rounds each sum's share of W ranks down."""
    totals = _known_totals(world_size)
    sent_bytes = Exchange(totals=totals, num_packs=2).ways(world_size)[0].sent
    num_dense = 1 + sum(table.dim for table in TABLES)
    expected = _predicted(sent_bytes, num_dense, world_size)
    by_rank = [by_driver[driver] for by_driver in run_once(_count_known, world_size)]
    mean = {name: float(np.mean([sent[name] for sent in by_rank])) for name in by_rank[0]}
    marks, _ = mean.pop("marks"), mean.pop("received")
    assert mean.pop("all") == pytest.approx(expected.pop("all") + marks, abs=2)
    assert mean == pytest.approx(expected, rel=1e-12)
    # a byte for each row that is asked of another rank
    asked = totals.cold * (world_size - 1) / world_size
    assert marks == pytest.approx(asked if driver is not None and driver[1] else 0)


def _sent_for_weights(rank: int, world_size: int) -> dict[str, float]:
    """Bytes that weights of lookups add to a step, by placement; as many lookups at each home."""
    found = {}
    for placement in ("table_wise", "bags"):
        sent = []
        for weighted in (False, True):
            job = replace(JOB, placement={"*": placement}, weighted=weighted)
            ids = [torch.tensor(_known_rows(table, rank, world_size)[0]) for table in TABLES]
            features = KeyedJaggedTensor(
                keys=["f0", "f1"],
                values=torch.cat(ids),
                lengths=torch.tensor([length for each in ids for length in (len(each), *[0] * 5)]),
                weights=torch.ones(sum(map(len, ids))) if weighted else None,
            )
            batches = itertools.repeat(Batch(torch.zeros(6, 1), features, torch.ones(6)))
            pipeline = make_driver(None, build(job, rank, world_size))
            for _ in range(NUM_WARM):
                pipeline.progress(batches)
            sent.append(_sent_by_purpose(pipeline, batches)["all"])
        found[placement] = sent[1] - sent[0]
    return found


def test_bytes_of_weights_are_exact() -> None:
    """Four bytes a lookup, of stock tables and of bags; with rows no weight is sent."""
    by_rank = run_ranks(_sent_for_weights, 2, timeout_s=60)
    both = []
    for table in TABLES:
        lookups = float(np.mean([len(_known_rows(table, rank, 2)[0]) for rank in range(2)]))
        load = TableLoad(
            name=table.name, num_embeddings=table.rows, dim=table.dim, lookups=lookups, bags=6.0
        )
        both.append([TableWork(replace(load, is_weighted=has), 2) for has in (False, True)])

    def added(ids: Callable[[list[TableWork]], float]) -> float:
        without, weighted = (ids([works[has] for works in both]) for has in (False, True))
        return weighted - without

    def sent_by(form: Form) -> Callable[[list[TableWork]], float]:
        def sent(works: list[TableWork]) -> float:
            tables: list[HotColdTable] = [(work, 0, form) for work in works]
            return Exchange.from_tables(tables, 1).ways(2)[0].sent["ids"]

        return sent

    curves = CommCurves.assumed(2, gbytes_per_s=1.0)
    stock = added(lambda works: stock_cost("table_wise", works, curves, 2).sent_bytes["ids"])
    # TorchRec sends each peer the number of weights, too: 8 bytes, without a price
    assert stock == np.mean([sent["table_wise"] - 8 for sent in by_rank]) == 4 * 5
    assert added(sent_by("bags")) == np.mean([sent["bags"] for sent in by_rank]) == 4 * 5
    assert added(sent_by("rows")) == 0
    # each rank's ids go to the column shards of both others
    wide = [replace(work.load, dim=96) for work in (both[0][1], both[0][0])]
    loaded = [rank_loads("column_wise", [load], 3) for load in wide]
    sent = [sum(rank["sent_bytes"] for rank in ranks) for ranks in loaded]
    assert sent[0] - sent[1] == pytest.approx(3 * 4 * wide[0].lookups * 2)
    costs = [stock_cost("column_wise", [TableWork(load, 3)], curves, 3) for load in wide]
    sent_ids = [3 * cost.sent_bytes["ids"] for cost in costs]
    assert sent_ids[0] - sent_ids[1] == pytest.approx(sent[0] - sent[1])


def _count_by_host(rank: int, world_size: int) -> dict[str, dict[str, float]]:
    """Bytes of a step inside this rank's host and across hosts."""
    pipeline = make_driver((1, False), build(BY_HOST, rank, world_size))
    batches = itertools.repeat(_known_batch(rank, world_size))
    for _ in range(NUM_WARM):
        pipeline.progress(batches)
    with MessageRecorder() as recorder:
        pipeline.progress(batches)
    by_level: dict[str, list[Message]] = {"inside": [], "across": []}
    for message in recorder.messages:
        if message.to >= 0:
            is_inside = message.to // PLACES == rank // PLACES
            by_level["inside" if is_inside else "across"].append(message)
            assert is_inside or message.to % PLACES == rank % PLACES
    return {
        level: {
            "header": 8 * elements(messages, torch.int64),
            "ids": 4 * elements(messages, torch.int32),
            "rows_and_gradients": 4 * elements(messages, torch.float32),
        }
        for level, messages in by_level.items()
    }


def test_bytes_of_true_numbers_are_exact_by_host() -> None:
    world_size = HOSTS * PLACES
    totals = _known_totals(world_size)
    # the ranks of a host look up two and three rows at each home, two of them both
    elements = 3 * world_size / PLACES * sum(table.dim for table in TABLES)
    crossing = HotColdTotals(cold_elements=elements)
    by_host = ByHost(totals=totals, crossing=crossing, num_packs=2, ranks_per_host=PLACES)
    expected = {way.collective: dict(way.sent) for way in by_host.ways(world_size)}
    by_rank = run_ranks(_count_by_host, world_size, timeout_s=60)
    expected["across"]["hot"] = 0.0  # an all-reduce, which has no receiver
    for level, sent in expected.items():
        joined = {
            "header": sent["flags"] + sent["header"],
            "ids": sent["ids"],
            "rows_and_gradients": sent["rows"] + sent["gradients"] + sent["hot"],
        }
        mean = {name: float(np.mean([rank[level][name] for rank in by_rank])) for name in joined}
        assert mean == pytest.approx(joined, rel=1e-12)


@pytest.mark.data
@pytest.mark.parametrize(("places", "size", "most"), [(2, 2048, 0.87), (4, 1024, 0.75)])
def test_rows_of_real_ids_that_cross_hosts(
    places: int, size: int, most: float, criteo_path: Path
) -> None:
    """Within 3 %: the rows of four steps, from the counts of all samples."""
    dim, num_steps, world_size = 16, 4, HOSTS * places
    features = [f"c{number + 1}" for number in range(26)]
    data = pq.read_table(criteo_path, columns=features).to_pandas()
    tables: list[HotColdTable] = []
    per_rank = per_host = 0
    for name in features:
        ids = np.unique(data[name].fillna(-1), return_inverse=True)[1]
        counts = np.bincount(ids)
        load = TableLoad(
            name=name,
            num_embeddings=len(counts),
            dim=dim,
            lookups=size,
            bags=size,
            spectrum=CountSpectrum.from_counts(torch.from_numpy(counts), len(counts)),
        )
        tables.append((TableWork(load, world_size, places), 0, "node_rows"))
        block = -(-len(counts) // world_size)
        for step in ids[: num_steps * world_size * size].reshape(num_steps, HOSTS, places, size):
            for host, on_ranks in enumerate(step):
                rows = np.concatenate([np.unique(on_rank) for on_rank in on_ranks])
                rows = rows[rows // block // places != host]
                per_rank, per_host = per_rank + len(rows), per_host + len(np.unique(rows))
    across = ByHost.from_tables(tables, num_packs=1).ways(world_size)[1].sent
    expected = {"rows": 4 * dim * per_host, "ids": 4 * per_rank}  # row numbers cross as they came
    for what, num_bytes in expected.items():
        assert across[what] * num_steps * world_size == pytest.approx(num_bytes, rel=0.03)
    # of the bytes of ids, rows and gradients that cross without hosts
    assert (per_rank + 2 * dim * per_host) / (per_rank + 2 * dim * per_rank) <= most


SKEWED = (
    Table("a", 16, 6000, ("f0",)),
    Table("b", 8, 3000, ("f1", "f2")),
    Table("c", 16, 500, ("f3",)),
)
BATCH_SIZE, NUM_SAMPLED, NUM_COUNTED = 512, 40, 6
TOTAL_HOT = 300
LOOKUPS_OF_BAG = 3  # of feature f3; the others look up one row


def _drawn_batch(rank: int, step: int) -> Batch:
    rng = np.random.default_rng([rank, step])
    values, lengths = [], []
    for table in SKEWED:
        for feature in table.features:
            per_bag = LOOKUPS_OF_BAG if feature == "f3" else 1
            rank_in_table = rng.zipf(1.2, BATCH_SIZE * per_bag) % table.rows
            values.append(torch.from_numpy(rank_in_table * 7 % table.rows))
            lengths += [per_bag] * BATCH_SIZE
    features = KeyedJaggedTensor(
        keys=["f0", "f1", "f2", "f3"], values=torch.cat(values), lengths=torch.tensor(lengths)
    )
    return Batch(torch.zeros(BATCH_SIZE, 1), features, torch.zeros(BATCH_SIZE))


def _curves_on_hosts() -> CommCurves:
    """Hosts behind a slow link."""
    slow, fast = Curve.line(0.1, 0.0005), Curve.line(0.01, 1.0)
    return CommCurves(
        world_size=HOSTS * PLACES,
        ranks_per_host=PLACES,
        backend="gloo",
        device="cpu",
        collectives={**dict.fromkeys(COLLECTIVES, slow), "inside": fast, "across": slow},
    )


def _lookups_by_home(plan: ShardingPlan, world_size: int) -> list[float]:
    """Lookups of rows that have no replica, by home rank: of the batches that are counted."""
    served_W = np.zeros(world_size)
    for rank, step in itertools.product(range(world_size), range(NUM_COUNTED)):
        features = _drawn_batch(rank, NUM_WARM + step).sparse_features.to_dict()
        for table in SKEWED:
            placed = plan.plan["ebc"][table.name]  # type: ignore[index]
            sizes_W = [shard.shard_sizes[0] for shard in placed.sharding_spec.shards]
            for feature in table.features:
                rows = features[feature].values().numpy()
                cold = rows[~np.isin(rows, placed.cache_params.hot_rows)]
                home = np.searchsorted(np.cumsum(sizes_W), cold, side="right")
                served_W += np.bincount(home, minlength=world_size)
    return (served_W / NUM_COUNTED).tolist()


def _plan_and_count(
    rank: int, world_size: int, by_host: bool
) -> tuple[dict[str, Any], dict[str, float]]:
    """Returns what rank 0's planner expects of a step, and what steps on further batches send."""
    if by_host:
        pretend_hosts(rank, PLACES)
    choice._ANY_HOT_MARGIN = 0.0  # replicas are counted too, although they gain little here
    model = Model(Job(placement={}, tables=SKEWED))
    for table in SKEWED:
        parameters = model.ebc.embedding_bags[table.name].parameters()
        apply_optimizer_in_backward(OPTIMIZERS["rowwise_adagrad"], parameters, {"lr": 0.1})
    planner = hot_cold_planner(
        Topology(world_size=world_size, compute_device="cpu"),
        FrequencyStats.collect([_drawn_batch(9, step) for step in range(NUM_SAMPLED)], model),
        hot_rows=None if by_host else TOTAL_HOT,
        curves=_curves_on_hosts() if by_host else None,
        batch_size=BATCH_SIZE,
    )
    sharders = [HotColdEmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    num_dense = sum(parameter.numel() for parameter in model.over.parameters())
    expected: dict[str, Any] = {}
    if rank == 0:
        expected = _predicted(planner.decision.sent_bytes, num_dense, world_size)
        expected["ranks"] = summarize(planner.decision)["ranks"]
        expected["lookups"] = _lookups_by_home(plan, world_size)
        assert set(planner.decision.forms) == {"node_rows" if by_host else "rows"}
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env=env, device=CPU, plan=plan, sharders=sharders)
    pipeline = make_driver(None, sharded)
    batches = (_drawn_batch(rank, step) for step in itertools.count())
    for _ in range(NUM_WARM):
        pipeline.progress(batches)
    steps = [_sent_by_purpose(pipeline, batches) for _ in range(NUM_COUNTED)]
    return expected, {name: float(np.mean([s[name] for s in steps])) for name in steps[0]}


@pytest.mark.parametrize("by_host", [False, True])
def test_the_planners_bytes_are_those_of_a_step(by_host: bool) -> None:
    """Within 4 %: chance, of the batches and of the sample.

    Each of the batches counted here has U = 700 distinct cold rows; as each row is in a batch or
    not, their number has a deviation of at most sqrt(U), 4 %, and the mean over 12 batches 1.1 %.
    The statistics hold 40 batches, and rows seen once or never are estimated: 1 % more.
    """
    world_size = HOSTS * PLACES if by_host else 2
    ranks = run_ranks(_plan_and_count, world_size, by_host, timeout_s=100)
    expected = ranks[0][0]
    predicted, lookups = expected.pop("ranks"), expected.pop("lookups")
    assert [each["served_lookups"] for each in predicted] == pytest.approx(lookups, rel=0.04)
    mean = {name: float(np.mean([sent[name] for _, sent in ranks])) for name in ranks[0][1]}
    assert mean.pop("marks") == 0
    assert mean["header"] == expected["header"]
    del mean["received"]
    if by_host:  # sums of hot rows are messages, too
        mean, expected = ({name: one[name] for name in ("ids", "all")} for one in (mean, expected))
    else:
        received = [measured["received"] for _, measured in ranks]
        assert [each["received_bytes"] for each in predicted] == pytest.approx(received, rel=0.04)
    assert mean == pytest.approx(expected, rel=0.04)
