"""How well hot rows follow real ids that drift, and how still they stand where none do.

    python -m benchmarks.reliability.drift -o runs/drift --data-folder ../shared/data

Two ranks of this machine train a table under InterleavedTrainPipeline, once with the hot rows of
the first hours for good and once with ``refresh``:

- Globo's clicks in order of time, articles as rows, 1 % of them hot. Every hour's coverage, the
  share of lookups that hot rows serve, stands beside that of an oracle which knows the hour's own
  counts, and that of the hour before.
- Criteo's samples in random order, which do not drift: how many hot rows change places.

Both trainings see the same batches, so their losses tell whether a change of hot rows changes what
is learned. The figures are those of the hot rows in use, counted on the batches themselves.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from benchmarks.command import command_parser
from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    HotColdParams,
    InterleavedTrainPipeline,
    PicassoError,
    Refresh,
)
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError, run_ranks

_DIM, _HOT_SHARE, _HOUR_MS = 16, 0.01, 3_600_000
_TIMEOUT_S = 1800.0
_FROZEN, _REFRESHED = "frozen", "refreshed"
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Ids in the order in which they are trained on.

    Args:
        ids_NF: A row per sample, a column per feature; all look up one table.
        hour_N: Hour of each sample, from 0 on, ascending; all 0 where there is no time.
        batch_size: Samples of a rank.
        counted: First samples that the hot rows are chosen from.
        refresh: When hot rows change.
    """

    ids_NF: Ids
    hour_N: Ids
    batch_size: int
    counted: int
    refresh: Refresh

    @property
    def num_rows(self) -> int:
        """Rows of the table."""
        return int(self.ids_NF.max()) + 1

    @property
    def num_hot(self) -> int:
        """Hot rows."""
        return max(1, int(_HOT_SHARE * self.num_rows))

    def most_used(self, ids: Ids) -> Ids:
        """The rows that some lookups use most, ascending; of those used alike the first."""
        counts = np.bincount(ids.reshape(-1), minlength=self.num_rows)
        return np.sort(np.argsort(-counts, kind="stable")[: self.num_hot])

    def num_steps(self, world_size: int) -> int:
        """Whole global batches."""
        return len(self.ids_NF) // (world_size * self.batch_size)

    def samples(self, step: int, world_size: int) -> slice:
        """Samples of a global batch."""
        size = world_size * self.batch_size
        return slice(step * size, (step + 1) * size)


class _Model(nn.Module):
    """Bags of one table under a linear layer."""

    def __init__(self, num_rows: int, num_features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        features = [f"f{feature}" for feature in range(num_features)]
        self.ebc = EmbeddingBagCollection(
            device=torch.device("cpu"),
            tables=[
                EmbeddingBagConfig(
                    name="t", embedding_dim=_DIM, num_embeddings=num_rows, feature_names=features
                )
            ],
        )
        self.over = nn.Linear(num_features * _DIM, 1)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        logits_B = self.over(self.ebc(batch.sparse_features).values()).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, loss.detach()


def _train(rank: int, world_size: int, stream: Stream, refresh: Refresh | None) -> dict[str, Any]:
    """Trains a stream once; hot rows and losses of every step."""
    quiet_upstream()
    first = stream.most_used(stream.ids_NF[: stream.counted])
    pipeline = pipeline_with(stream, first, world_size, refresh)
    batches = batches_of(stream, rank, world_size)
    hot, losses, looks, seen = first, [], [], None
    hot_hits, num_lookups = defaultdict(int), defaultdict(int)
    is_hot = np.zeros(stream.num_rows, dtype=bool)
    is_hot[first] = True
    for step in range(stream.num_steps(world_size)):
        ids_nF = stream.ids_NF[stream.samples(step, world_size)]
        hour = int(stream.hour_N[stream.samples(step, world_size).start])
        hot_hits[hour] += int(is_hot[ids_nF].sum())
        num_lookups[hour] += ids_nF.size
        losses.append(float(pipeline.progress(batches)))
        if pipeline.last_refresh is not seen:
            seen = pipeline.last_refresh
            assert seen is not None
            looks.append(asdict(seen))
            hot = pipeline.hot_rows()["t"].numpy()
            is_hot[:] = False
            is_hot[hot] = True
    return {
        "coverage": {hour: hot_hits[hour] / num_lookups[hour] for hour in hot_hits},
        "losses": losses,
        "looks": looks,
    }


def pipeline_with(
    stream: Stream, hot: Ids, world_size: int, refresh: Refresh | None
) -> InterleavedTrainPipeline[Batch, Any]:
    """A pipeline over a model of one table with these hot rows. Its setting is fixed: a trial could
    part two pipelines."""
    model = _Model(stream.num_rows, stream.ids_NF.shape[1])
    apply_optimizer_in_backward(RowWiseAdagrad, model.ebc.parameters(), {"lr": 0.05})
    sharder = HotColdEmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.ebc,
        {"t": row_wise()},
        sharder=sharder,
        local_size=world_size,
        world_size=world_size,
        device_type="cpu",
    )
    plan["t"].cache_params = HotColdParams(hot_rows=hot.tolist())
    pg = dist.group.WORLD
    assert pg is not None
    sharded = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(pg),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={"ebc": plan}),
        sharders=[sharder],
    )
    dense = [parameter for name, parameter in sharded.named_parameters() if "over" in name]
    return InterleavedTrainPipeline(
        sharded,
        torch.optim.SGD(dense, lr=0.05),
        torch.device("cpu"),
        num_micro_batches=1,
        lookahead=True,
        refresh=refresh,
    )


def batches_of(stream: Stream, rank: int, world_size: int) -> Iterator[Batch]:
    """This rank's batches; what is learned does not matter here."""
    keys = [f"f{feature}" for feature in range(stream.ids_NF.shape[1])]
    for step in range(stream.num_steps(world_size)):
        start = stream.samples(step, world_size).start + rank * stream.batch_size
        ids_BF = stream.ids_NF[start : start + stream.batch_size]
        yield Batch(
            dense_features=torch.zeros(len(ids_BF), 1),
            sparse_features=KeyedJaggedTensor(
                keys=keys,
                values=torch.from_numpy(np.ascontiguousarray(ids_BF.T).reshape(-1)),
                lengths=torch.ones(ids_BF.size, dtype=torch.int64),
            ),
            labels=torch.from_numpy((ids_BF.sum(1) % 3 == 0).astype(np.float32)),
        )


def globo(path: Path) -> Stream:
    """Clicks in order of time, articles as rows; half an hour is about eight steps."""
    table = pq.read_table(path, columns=["ts_ms", "article"])
    times_N = table["ts_ms"].to_numpy()
    _, ids_N = np.unique(table["article"].to_numpy(), return_inverse=True)
    hour_N = (times_N - times_N[0]) // _HOUR_MS
    return Stream(
        ids_NF=ids_N.astype(np.int64)[:, None],
        hour_N=hour_N,
        batch_size=256,
        counted=int(np.searchsorted(hour_N, 2)),
        refresh=Refresh(every_steps=8, half_life_steps=16),
    )


def criteo(path: Path, num_steps: int = 1000, batch_size: int = 512, seed: int = 0) -> Stream:
    """Samples drawn at random, with the categorical columns behind each other in one table."""
    table = pq.read_table(path, columns=[f"c{column}" for column in range(1, 27)])
    columns, base = [], 0
    for column in table.columns:
        _, ids_N = np.unique(column.fill_null(-1).to_numpy(), return_inverse=True)
        columns.append(ids_N + base)
        base += int(ids_N.max()) + 1
    ids_NF = np.stack(columns, axis=1).astype(np.int64)
    drawn = np.random.default_rng(seed).integers(len(ids_NF), size=num_steps * 2 * batch_size)
    return Stream(
        ids_NF=ids_NF[drawn],
        hour_N=np.zeros(len(drawn), dtype=np.int64),
        batch_size=batch_size,
        counted=len(drawn),
        refresh=Refresh(),
    )


def measure(stream: Stream, world_size: int = 2) -> dict[str, Any]:
    """Trains a stream with and without refresh."""
    runs = {
        name: run_ranks(_train, world_size, stream, refresh, timeout_s=_TIMEOUT_S)
        for name, refresh in ((_FROZEN, None), (_REFRESHED, stream.refresh))
    }
    losses = [np.array([rank["losses"] for rank in runs[name]]) for name in (_FROZEN, _REFRESHED)]
    by_hour = {}
    before: Ids | None = None
    for hour in np.unique(stream.hour_N).tolist():
        ids_of_hour = stream.ids_NF[stream.hour_N == hour]
        by_hour[hour] = {
            "lookups": ids_of_hour.size,
            "oracle": _coverage(stream, stream.most_used(ids_of_hour), ids_of_hour),
            "hour_before": None if before is None else _coverage(stream, before, ids_of_hour),
            **{name: runs[name][0]["coverage"].get(hour) for name in runs},
        }
        before = stream.most_used(ids_of_hour)
    return {
        "num_rows": stream.num_rows,
        "num_hot": stream.num_hot,
        "num_steps": stream.num_steps(world_size),
        "batch_size": stream.batch_size,
        "world_size": world_size,
        "refresh": asdict(stream.refresh),
        "by_hour": by_hour,
        "looks": runs[_REFRESHED][0]["looks"],
        "loss_difference": float(np.abs(losses[0] - losses[1]).max()),
    }


def _coverage(stream: Stream, hot: Ids, ids: Ids) -> float:
    is_hot = np.zeros(stream.num_rows, dtype=bool)
    is_hot[hot] = True
    return float(is_hot[ids].mean())


def summary_of(found: dict[str, Any], skipped_hours: int = 2) -> dict[str, float]:
    """Means over hours, those left out that the first hot rows were chosen from."""
    hours = [
        shares
        for hour, shares in found["by_hour"].items()
        if int(hour) >= skipped_hours and shares[_REFRESHED] is not None
    ]
    named = (_FROZEN, _REFRESHED, "oracle", "hour_before")
    means = {
        name: float(np.mean([shares[name] for shares in hours if shares[name] is not None]))
        for name in named
    }
    return {**means, "of_oracle": means[_REFRESHED] / means["oracle"]}


def moved_shares(found: dict[str, Any]) -> list[float]:
    """Part of the hot rows that changed at each look."""
    return [look["num_moved"] / look["num_hot"] for look in found["looks"]]


def _print(name: str, found: dict[str, Any]) -> None:
    shares = moved_shares(found)
    settled = shares[len(shares) // 2 :]
    print(
        f"{name}: {found['num_steps']} steps, {found['num_hot']} of {found['num_rows']} rows hot, "
        f"{len(shares)} looks, moved {np.mean(shares):.2%} of the hot rows at each, in the second "
        f"half at most {max(settled):.3%}; losses within {found['loss_difference']:.1e}"
    )
    if len(found["by_hour"]) > 1:
        summary = summary_of(found)
        print(
            f"  coverage by hour, mean: refreshed {summary[_REFRESHED]:.3f}, that is "
            f"{summary['of_oracle']:.3f} of an oracle's {summary['oracle']:.3f}; the hour before's "
            f"{summary['hour_before']:.3f}, frozen {summary[_FROZEN]:.3f}"
        )


def main(argv: Sequence[str] | None = None) -> int:
    """Measures what is not there yet, and shows all.

    Returns:
        0; 2 where the options allow no answer.
    """
    parser = command_parser("benchmarks.reliability.drift", __doc__)
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="results go there")
    parser.add_argument(
        "--data-folder", required=True, metavar="FOLDER", help="Globo's clicks, Criteo's samples"
    )
    args = parser.parse_args(argv)
    folder, data = Path(args.out), Path(args.data_folder)
    folder.mkdir(parents=True, exist_ok=True)
    streams = {
        "globo": lambda: globo(data / "globo_clicks_8days.parquet"),
        "criteo": lambda: criteo(data / "criteo_tb_80k.parquet"),
    }
    try:
        for name, stream in streams.items():
            path = folder / f"drift_{name}.json"
            if not path.exists():
                write_result(measure(stream()), path)
            found = json.loads(path.read_text())
            _print(name, found)
    except (PicassoError, RankError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
