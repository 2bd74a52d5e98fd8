"""Simulates the steps of a configuration's model on several clusters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_picasso.app.config import TrainConfig
from torchrec_picasso.app.simulation.count import Cluster, Stream, count_step
from torchrec_picasso.app.simulation.ids import from_counts, from_source
from torchrec_picasso.app.simulation.price import Priced, Pricing
from torchrec_picasso.app.zoo.data.source import BatchSource
from torchrec_picasso.app.zoo.registry import build_model, make_source
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.local import DenseTimes
from torchrec_picasso.cost.stock import over_mean
from torchrec_picasso.cost.table_work import TableLoad
from torchrec_picasso.frequency import FrequencyStats, select_hot_rows
from torchrec_picasso.frequency.collect import model_tables, table_configs
from torchrec_picasso.planner.choice import TableInfo
from torchrec_picasso.planner.decision import decide
from torchrec_picasso.planner.home_blocks import filled_blocks
from torchrec_picasso.planner.table_info import dense_bytes_of
from torchrec_picasso.schedule.setting_choice import pieces_for


@dataclass(frozen=True, kw_only=True)
class Question:
    """The model, clusters and network of a simulation.

    Args:
        config: Model, samples, and samples per rank.
        clusters: Number of hosts, and of ranks on each.
        curves: Curves of any cluster of several hosts.
        stats: Counts that ids are drawn from, and that hot rows and home blocks follow; ``None`` =
            the configuration's samples, and equal blocks.
        hot_rows: Hot rows of all tables together.
        dense_ms: Forward and backward of the model without its tables; ``None`` = that of the
            curves.
        num_micro_batches: ``None`` = the fastest number.
    """

    config: TrainConfig
    clusters: Sequence[tuple[int, int]]
    curves: CommCurves
    stats: FrequencyStats | None = None
    hot_rows: int = 0
    dense_ms: float | None = None
    num_micro_batches: int | None = None


@dataclass(frozen=True, kw_only=True)
class Simulated:
    """Counts and prices of one cluster. Rows are cold ones."""

    hosts: int
    ranks_per_host: int
    lookups: float
    """Lookups of a rank's batch, mean over ranks; so are rows."""
    rank_rows: float
    """Distinct rows of a rank's batch."""
    host_rows: float
    """Distinct rows of the batches of a host."""
    all_rows: float
    """Distinct rows of the batches of all ranks."""
    served_over_mean: float
    """Rows that the busiest home rank serves, divided by the mean."""
    dense_bytes: float
    """Bytes of the gradients of the dense part."""
    priced: list[Priced]

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    def as_dict(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {"ranks": self.ranks, **asdict(self)}


def simulate(question: Question, advance: Callable[[], None] = lambda: None) -> list[Simulated]:
    """Simulates a step on each cluster; ``advance`` is called twice for each rank of the largest.

    Raises:
        PicassoError: If samples, statistics or curves do not fit.
    """
    config, curves = question.config, question.curves
    model = build_model(config, source := make_source(config.data, config.seed))
    stream = _stream(question, model, source)
    clusters = [
        Cluster(stream, hosts, places, _home_blocks(question, stream.loads, hosts * places))
        for hosts, places in question.clusters
    ]
    first_used = count_step(stream, clusters, advance)
    dense = replace(curves.dense or DenseTimes(), parameter_bytes=dense_bytes_of(model))
    if question.dense_ms is not None:
        dense = DenseTimes.from_total(question.dense_ms, dense_bytes_of(model))
    counts = question.num_micro_batches
    pricing = Pricing(
        stream=stream,
        first_used=first_used.tolist(),
        curves=curves,
        dense=dense.at(stream.batch_size),
        micro_batch_counts=pieces_for(stream.batch_size) if counts is None else [counts],
    )
    return [_simulated(cluster, pricing) for cluster in clusters]


def _stream(question: Question, model: nn.Module, source: BatchSource) -> Stream:
    stats, batch_size = question.stats, question.config.data.batch_size
    tables, configs = model_tables(model), list(table_configs(model))
    if stats is None:
        world_size = max(hosts * places for hosts, places in question.clusters)
        read = from_source(source, tables, world_size)
    else:
        stats.check_model({config.name: config.num_embeddings for _, config in configs})
        read = from_counts(stats, tables, batch_size, question.config.seed)
    loads = [
        TableLoad(
            name=config.name,
            num_embeddings=config.num_embeddings,
            dim=config.embedding_dim,
            lookups=ids_N.size,
            bags=batch_size * len(config.feature_names),
            is_sequence=not isinstance(config, EmbeddingBagConfig),
            num_features=len(config.feature_names),
            module=path,
            spectrum=None if stats is None else stats.tables[config.name].spectrum,
        )
        for (path, config), (ids_N, _) in zip(configs, read(0, 0))
    ]
    num_rows = {load.name: load.num_embeddings for load in loads}
    hot = select_hot_rows(num_rows, question.hot_rows, stats)
    return Stream(
        loads=loads,
        batch_size=batch_size,
        read=read,
        hot_T=[hot[load.name].numpy() for load in loads],
    )


def _home_blocks(
    question: Question, loads: Sequence[TableLoad], world_size: int
) -> Sequence[Sequence[int]]:
    """Returns the home rows of each table on each rank, as the planner cuts them."""
    if question.stats is None:
        return [filled_blocks(load.num_embeddings, world_size) for load in loads]
    decision = decide(
        [TableInfo(load=load) for load in loads],
        question.stats,
        question.curves,
        world_size=world_size,
        batch_size=question.config.data.batch_size,
        hot_rows=question.hot_rows,
    )
    return [decision.block_rows[t] for t in range(len(loads))]


def _simulated(cluster: Cluster, pricing: Pricing) -> Simulated:
    priced = pricing.price(cluster)
    sums = {name: float(sums_T.sum()) for name, sums_T in cluster.sums_T.items()}
    return Simulated(
        hosts=cluster.num_hosts,
        ranks_per_host=cluster.num_places,
        lookups=sums["lookups"] / cluster.world_size,
        rank_rows=sums["cold"] / cluster.world_size,
        host_rows=sums["host"] / cluster.num_hosts,
        all_rows=sums["new_cold"],
        served_over_mean=over_mean(cluster.served_W.tolist()),
        dense_bytes=pricing.dense.parameter_bytes,
        priced=priced,
    )
