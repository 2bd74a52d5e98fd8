"""Memory of a training step of a sequence model, by source, on every rank: stock and ours.

    python -m benchmarks.sequence_memory -o sequence_memory.json

Two CPU ranks train an EmbeddingCollection of one table: `--samples` histories of `--history` ids,
`--dim` columns, ids by Zipf's law (exponent 1.1), row-wise Adagrad. The dense part is a dot product
with a vector, so what a step holds is the tables' own: at the least the output and its gradient,
lookups x dim x 4 bytes each. torch's profiler records each allocation of the whole process from
before the model is built; the peak is the most that is held at once after the first steps, weights
and optimizer state included. Predicted is what the planner says of such steps. With
`--ranks-per-host` the ranks pretend to be on hosts, and the rows of ours travel by host. Sources
are the innermost functions of torchrec, torchrec_picasso, or this file, that allocated what is held
at the peak; of micro-batches only operators are recorded.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile
from torchrec import EmbeddingCollection, EmbeddingConfig, JaggedTensor, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.command import add_numbers, can_write, command_parser
from torchrec_picasso import (
    FrequencyStats,
    HotColdEmbeddingCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
    hot_cold_planner,
)
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.cost.forms import hot_cold_memory_bytes
from torchrec_picasso.planner.decision import Decision
from torchrec_picasso.planner.explain import summarize

STOCK = ("row_wise", "table_wise", "column_wise")
VARIANTS = (*STOCK, "ours:1", "ours:1:ahead", "ours:4:ahead")
_STEPS, _WARM = 11, 8
_LETS_GO_S = 0.05
_OWN = ("torchrec_picasso/", "torchrec/", "benchmarks/sequence_memory")
_NAMED = 8
_SCATTER = 7919  # a prime: frequent ids are spread over the table


class Sequences(nn.Module):
    """Gives the loss of a history's mean dot product with a vector."""

    def __init__(self, rows: int, dim: int, history: int) -> None:
        super().__init__()
        self.history = history
        table = EmbeddingConfig(
            name="t", embedding_dim=dim, num_embeddings=rows, feature_names=["f"]
        )
        self.items = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.over = nn.Linear(dim, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Looks up the histories, all of one length."""
        found = self.items(batch.sparse_features)["f"]
        logits = JaggedTensor(values=self.over(found.values()), lengths=found.lengths())
        logits_B = logits.to_padded_dense(self.history).squeeze(2).mean(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, loss.detach()


def make_batches(rank: int, sizes: argparse.Namespace) -> Iterator[Batch]:
    """Draws histories of one length."""
    chance = np.arange(1.0, sizes.rows + 1) ** -1.1
    below, rng = np.cumsum(chance / chance.sum()), np.random.default_rng(rank)
    for _ in range(_STEPS):
        drawn = np.searchsorted(below, rng.random(sizes.samples * sizes.history))
        ids = torch.from_numpy(
            drawn.clip(max=sizes.rows - 1) * (1 if sizes.in_order else _SCATTER) % sizes.rows
        )
        lengths = torch.full((sizes.samples,), sizes.history, dtype=torch.int32)
        features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=lengths)
        labels = torch.from_numpy(rng.integers(2, size=sizes.samples)).float()
        yield Batch(torch.zeros(sizes.samples, 1), features, labels)


def make_pipeline(
    variant: str, sizes: argparse.Namespace, world_size: int
) -> tuple[Any, list[float] | None]:
    """Shards the model by the variant's plan; returns the pipeline, and on rank 0 the bytes of each
    rank that the planner predicts for ours. Collective."""
    torch.manual_seed(0)
    model = Sequences(sizes.rows, sizes.dim, sizes.history)
    apply_optimizer_in_backward(RowWiseAdagrad, model.items.parameters(), {"lr": 0.05})
    places = sizes.ranks_per_host
    topology = Topology(world_size=world_size, compute_device="cpu", local_world_size=places)
    kind, *setting = variant.split(":")
    planner: Any
    if kind == "ours":
        sharders: list[Any] = [HotColdEmbeddingCollectionSharder()]
        stats = FrequencyStats.collect(make_batches(world_size, sizes), model)
        params = HotColdParams(form="node_rows" if places else "rows")
        planner = hot_cold_planner(
            topology,
            stats,
            hot_rows={"t": sizes.hot_rows},
            constraints={"t": ParameterConstraints(cache_params=params)},
            batch_size=sizes.samples,
            debug=False,
        )
    else:
        sharders = [_Stock()]
        kernels = [EmbeddingComputeKernel.FUSED.value]
        only = {"t": ParameterConstraints(sharding_types=[kind], compute_kernels=kernels)}
        planner = EmbeddingShardingPlanner(topology, constraints=only, debug=False)
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    device = torch.device("cpu")
    sharded = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
    dense = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    optimizer = KeyedOptimizerWrapper(dense, lambda given: torch.optim.SGD(given, lr=0.1))
    if kind != "ours":
        return TrainPipelineSparseDist(sharded, optimizer, device), None
    predicted = None
    if dist.get_rank() == 0:
        predicted = _predicted(planner.decision, int(setting[0]), "ahead" in setting)
    pipeline = InterleavedTrainPipeline(
        sharded,
        optimizer,
        device,
        num_micro_batches=int(setting[0]),
        lookahead="ahead" in setting,
    )
    return pipeline, predicted


def _predicted(decision: Decision, num_parts: int, lookahead: bool) -> list[float]:
    """Returns the predicted memory of each rank in that number of micro-batches."""
    summary, tables = summarize(decision), zip(decision.works, decision.num_hot, decision.forms)
    memory = hot_cold_memory_bytes(tables, num_parts)
    buffers = memory["buffers"] - (0.0 if lookahead else memory["lookahead"])
    planned = summary["memory_bytes"]["buffers"]
    return [rank["memory_bytes"] - planned + buffers for rank in summary["ranks"]]


class _Stock(EmbeddingCollectionSharder):
    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(STOCK)


def measure(rank: int, world_size: int, variant: str, sizes: argparse.Namespace) -> dict[str, Any]:
    """Trains some steps; returns the most bytes held in the last ones, by source. Collective."""
    torch.set_num_threads(1)
    _wait_for_threads()
    if places := sizes.ranks_per_host:
        os.environ |= {"LOCAL_WORLD_SIZE": str(places), "LOCAL_RANK": str(rank % places)}
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, with_stack="4" not in variant
    ) as found:
        pipeline, predicted = make_pipeline(variant, sizes, world_size)
        batches = make_batches(rank, sizes)
        for _ in range(_WARM):
            pipeline.progress(batches)
        start_ns = time.time_ns()
        for _ in range(_STEPS - _WARM):
            pipeline.progress(batches)
    kineto: Any = found.profiler.kineto_results
    events = [_walk(root, ()) for root in kineto.experimental_event_tree()]
    allocations = sorted(itertools.chain(*events), key=lambda each: each[0])
    return _peak(allocations, start_ns, sizes) | {"predicted_bytes": predicted}


def _wait_for_threads() -> None:
    """Makes a wait for a message last until gloo's thread has let go of the tensors: torch's
    profiler does not see what that thread frees."""
    wait = dist.Work.wait

    def waiting(*args: Any, **kwargs: Any) -> Any:
        done = wait(*args, **kwargs)
        time.sleep(_LETS_GO_S)
        return done

    dist.Work.wait = waiting  # type: ignore[method-assign]


def _walk(event: Any, stack: tuple[str, ...]) -> Iterator[tuple[int, int, int, tuple[str, ...]]]:
    """Yields time, address, bytes (negative = freed) and stack of each allocation."""
    if event.tag == _EventType.Allocation:
        fields = event.extra_fields
        yield event.start_time_ns, fields.ptr, fields.alloc_size, stack
    for child in event.children:
        yield from _walk(child, (*stack, _name(event)))


def _name(event: Any) -> str:
    try:
        return str(event.name)
    except UnicodeDecodeError:  # of some of Python's own functions
        return "?"


def _peak(
    allocations: Sequence[tuple[int, int, int, tuple[str, ...]]],
    start_ns: int,
    sizes: argparse.Namespace,
) -> dict[str, Any]:
    """Replays allocations; returns the largest sum since ``start_ns`` and its sources."""
    held: dict[int, tuple[int, str]] = {}
    total = peak = 0
    at_peak: list[tuple[int, str]] = []
    for time_ns, address, num_bytes, stack in allocations:
        if num_bytes > 0:
            held[address] = (num_bytes, _source(stack))
            total += num_bytes
        elif address in held:
            total -= held.pop(address)[0]
        if time_ns > start_ns and total > peak:
            peak, at_peak = total, list(held.values())
    sources: Counter[str] = Counter()
    for num_bytes, source in at_peak:
        sources[source] += num_bytes
    lookups_bytes = sizes.samples * sizes.history * sizes.dim * 4
    return {
        "peak_bytes": peak,
        "lookups_x_dim_bytes": lookups_bytes,
        "sources": dict(sources.most_common(_NAMED)),
    }


def _source(stack: Sequence[str]) -> str:
    own = [name for name in stack if any(part in name for part in _OWN)]
    operators = [name for name in stack if name.startswith(("aten::", "fbgemm::", "autograd::"))]
    frame = own[-1] if own else (stack[-1] if stack else "?")
    place = frame.split("site-packages/")[-1]
    return f"{place.removeprefix(str(Path.cwd()) + '/')} > {operators[0] if operators else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the peak of each rank, and its sources.

    Returns:
        0; 2 where the options allow no answer.
    """
    args = _parser().parse_args(argv)
    quiet_upstream()
    if not can_write(args, "out"):
        return 2
    found = {}
    for variant in args.variants:
        ranks = run_ranks(measure, args.ranks, variant, args, timeout_s=1200)
        found[variant] = ranks
        for rank, measured in enumerate(ranks):
            peak, unit = measured["peak_bytes"], measured["lookups_x_dim_bytes"]
            line = f"{peak / 1e6:8.1f} MB, {peak / unit:.2f} lookups x dim"
            if (predicted := ranks[0]["predicted_bytes"]) is not None:
                line += f"; predicted {predicted[rank] / 1e6:.1f} MB"
            print(f"{variant:14} rank {rank}: {line}")
        for source, num_bytes in ranks[0]["sources"].items():
            print(f"    {num_bytes / 1e6:8.1f} {source}", flush=True)
    if args.out:
        question = {name: value for name, value in vars(args).items() if name != "out"}
        write_result({"question": question, "found": found}, args.out)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser("benchmarks.sequence_memory", __doc__)
    add = parser.add_argument
    add("-o", "--out", metavar="FILE", help="JSON to write")
    add("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="what is trained")
    add("--in-order", action="store_true", help="id 0 is the most frequent one, 1 the next one")
    add_numbers(
        parser,
        ("--samples", 512, 1, "samples per rank"),
        ("--history", 256, 1, "ids of each history"),
        ("--dim", 256, 1, "columns of the table"),
        ("--rows", 100_000, 1, "rows of the table"),
        ("--ranks", 2, 1, "ranks"),
        ("--ranks-per-host", 0, 0, "ranks of a host, if rows of ours travel by host; else 0"),
        ("--hot-rows", 0, 0, "hot rows of ours"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
