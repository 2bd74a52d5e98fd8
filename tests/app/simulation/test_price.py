"""Prices of counted steps: links shared by a host's ranks, and the planner's price where ids are
uniform."""

import dataclasses

import numpy as np
import pytest

from torchrec_picasso.app.simulation.count import Cluster, Stream, count_step
from torchrec_picasso.app.simulation.price import Pricing, curves_of
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.local import DenseTimes, LocalCosts
from torchrec_picasso.cost.step_price import StepPricer
from torchrec_picasso.cost.table_work import TableLoad, TableWork
from torchrec_picasso.errors import PlanError
from torchrec_picasso.planner.choice import price_plan
from torchrec_picasso.planner.home_blocks import even_blocks

ASSUMED = LocalCosts().stock
SLOW_MAP = dataclasses.replace(ASSUMED.backward, hash_ns=1e4)  # of stock's sequences
COSTS = LocalCosts(stock=dataclasses.replace(ASSUMED, backward=SLOW_MAP))
BATCH, LINK = 2000, CommCurves.assumed(2, gbytes_per_s=0.1, latency_ms=0.5, local=COSTS)


def _cluster(num_hosts: int, num_places: int, bags: int = BATCH) -> tuple[Stream, Cluster]:
    """``bags``: of a batch; if there are fewer than lookups, they are sequences."""
    own = {"dim": 16, "lookups": BATCH, "bags": bags, "is_sequence": bags < BATCH}
    loads = [TableLoad(name=f"t{rows}", num_embeddings=rows, **own) for rows in (8000, 20_000)]

    def read(rank: int, step: int) -> list[tuple[np.ndarray, np.ndarray]]:
        rng = np.random.default_rng([rank, step])
        samples = np.arange(BATCH)
        return [(rng.integers(load.num_embeddings, size=BATCH), samples) for load in loads]

    stream = Stream(
        loads=loads,
        batch_size=BATCH,
        read=lambda rank, step: iter(read(rank, step)),
        hot_T=[np.arange(0), np.arange(0)],
    )
    blocks = [even_blocks(load.num_embeddings, num_hosts * num_places) for load in loads]
    return stream, Cluster(stream, num_hosts, num_places, blocks)


def test_ranks_of_a_host_share_its_link() -> None:
    for num_hosts, num_places in ((4, 1), (2, 4), (4, 2)):
        _, cluster = _cluster(num_hosts, num_places)
        size, num_bytes = cluster.world_size, 7e6
        curves = curves_of(LINK, cluster)
        on_link = num_places * num_bytes * (size - num_places) / (size - 1)
        for name in ("all_to_all", "row_exchange"):
            ms = 0.5 * (size - 1) + on_link / 1e5
            assert curves.ms(name, num_bytes) == pytest.approx(ms)
        assert curves.ms("all_reduce", num_bytes) == pytest.approx(0.5 * (size - 1) + 70)
        if num_places > 1:
            across_ms = 0.5 * (num_hosts - 1) + num_places * num_bytes / 1e5
            assert curves.ms("across", num_bytes) == pytest.approx(across_ms)
            # 1 ns of a core per byte
            assert curves.ms("inside", num_bytes) == pytest.approx(0.5 * (num_places - 1) + 7)
        # and back: curves of several ranks on a host are those of one on each of two
        again = curves_of(curves, _cluster(2, 1)[1])
        assert again.ms("row_exchange", num_bytes) == pytest.approx(0.5 + 70)
    one_host = curves_of(LINK, _cluster(1, 4)[1])
    assert one_host.ms("all_to_all", 1e6) == pytest.approx(1.5 + 1)
    with pytest.raises(PlanError, match="the curves are of one host, the cluster has 2"):
        curves_of(one_host, _cluster(2, 1)[1])
    with pytest.raises(PlanError, match="the curves are of 1 rank, without communication"):
        curves_of(CommCurves.assumed(1, gbytes_per_s=0.1), _cluster(1, 2)[1])
    part_of_a_host = dataclasses.replace(LINK, ranks_per_host=8)
    assert curves_of(part_of_a_host, _cluster(1, 2)[1]).ms("row_exchange", 1e6) > 0


@pytest.mark.parametrize(("num_places", "bags"), [(1, BATCH), (2, BATCH), (2, BATCH // 10)])
def test_uniform_ids_have_the_planners_price(num_places: int, bags: int) -> None:
    stream, cluster = _cluster(4, num_places, bags)
    size, forms = cluster.world_size, list(cluster.rows)
    dense, first_used = DenseTimes.from_total(30.0, 1e6), count_step(stream, [cluster]).tolist()
    pricing = Pricing(
        stream=stream, first_used=first_used, curves=LINK, dense=dense, micro_batch_counts=[1, 4]
    )
    found = {each.name: each for each in pricing.price(cluster)}
    works = [TableWork(load, size, num_places) for load in stream.loads]
    pricer = StepPricer(curves_of(LINK, cluster), size, dense, [1, 4])
    for name in (*forms, "table_wise", "row_wise", "column_wise"):
        by_form = dict.fromkeys(range(2), name) if name in forms else {}
        plan = price_plan(works, by_form, {}, dict.fromkeys(range(2), name), pricer)
        assert found[name].step.step_ms == pytest.approx(plan.step.step_ms, rel=0.05), name
        assert found[name].step.num_micro_batches == plan.step.num_micro_batches
        # masks are not expected
        sent = {key: found[name].sent_bytes.get(key, 0) for key in plan.sent_bytes}
        assert sum(sent.values()) == pytest.approx(sum(plan.sent_bytes.values()), rel=0.01), name
    assert len(forms) == num_places
    assert pricing.price(cluster) == list(found.values())  # a price changes no count


def test_the_latency_of_every_message_is_priced() -> None:
    """Steps of ours and of stock, on links that carry bytes in no time."""
    stream, cluster = _cluster(4, 2)
    first_used = count_step(stream, [cluster]).tolist()
    pricing = Pricing(
        stream=stream,
        first_used=first_used,
        curves=CommCurves.assumed(2, gbytes_per_s=1e12, latency_ms=0.5),
        dense=DenseTimes(),
        micro_batch_counts=[1],
    )
    for each in pricing.price(cluster):
        assert each.step.wire_ms == pytest.approx(0.5 * each.messages), each.name
