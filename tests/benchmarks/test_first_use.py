"""Bytes of first-use chunks and of micro-batches: as metered in real steps of two ranks.

The benchmark counts requests that it never sends. Here the same batches are trained on: cut into
micro-batches by our pipeline, and with every micro-batch as a step of its own. What the byte meter
sees must be what the benchmark says, to the byte.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torchrec.datasets.utils import Batch

from benchmarks.first_use.__main__ import main
from benchmarks.first_use.compare import compare
from benchmarks.first_use.streams import STREAMS, Steps, read_stream
from benchmarks.first_use.travel import Tables
from tests.sharding.jobs import Job, Table, build
from tests.support.shared_run import run_once
from tests.train_pipeline.runs import pipeline_of, run_to_the_end
from torchrec_picasso.app.runs.wire_meter import WireMeter
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.app.zoo.data.history import History
from torchrec_picasso.batches.split import micro_batch_sizes, split_batch
from torchrec_picasso.errors import InputError
from torchrec_picasso.exchange import all_to_all

DIM, BATCH_SIZE, WORLD_SIZE, NUM_STEPS = 8, 20, 2, 2
NUM_MICRO_BATCHES = (1, 4)
NUM_HOT = (0, 3)
"""Of each table."""
ROWS = {"user": 90, "item": 37}
WORD_BYTES = 8


def make_clicks(num_samples: int = 90) -> Clicks:
    """Skewed users, and items with a history of 0 to 4."""
    rng = np.random.default_rng(0)

    def draw(num: int, rows: int) -> np.ndarray:
        return (rng.random(num) ** 3 * rows).astype(np.int64)

    lists = [draw(length, ROWS["item"]) for length in rng.integers(5, size=num_samples)]
    item, user = draw(num_samples, ROWS["item"]), draw(num_samples, ROWS["user"])
    item[0], user[0] = ROWS["item"] - 1, ROWS["user"] - 1  # tables are as large as the largest id
    return Clicks(
        targets={"item": item},
        histories={"item": History.from_lists(lists)},
        profiles={"user": user},
        clicked=rng.integers(2, size=num_samples).astype(np.float32),
    )


def make_steps() -> Steps:
    return Steps(
        samples=make_clicks(), batch_size=BATCH_SIZE, world_size=WORLD_SIZE, num_steps=NUM_STEPS
    )


def _hot_by_thirds(num_hot: int) -> torch.Tensor:
    """Linear ids of the rows that ``Job`` makes hot."""
    ids, base = [], 0
    for rows in ROWS.values():
        hot = sorted(range(rows), key=lambda row: (row % 3, row))[:num_hot]
        ids += [base + row for row in hot]
        base += rows
    return torch.tensor(sorted(ids), dtype=torch.int64)


def _job(num_hot: int) -> Job:
    tables = (
        Table("user", DIM, ROWS["user"], ("user",)),
        Table("item", DIM, ROWS["item"], ("item", history_of("item"))),
    )
    return Job(placement={"*": num_hot}, tables=tables)


def _metered(rank: int, world_size: int) -> dict[tuple[int, int, str], dict[str, int]]:
    all_to_all._SMALL_BYTES = 0  # in this process: messages, which are told apart from flags
    all_to_all._SMALL_S = 0.0
    steps = make_steps()
    mine = [steps.batches(step)[rank] for step in range(len(steps))]
    found = {}
    for num_hot in NUM_HOT:
        for num in NUM_MICRO_BATCHES:
            sizes = micro_batch_sizes(BATCH_SIZE, num)
            ways: dict[str, tuple[int, list[Batch]]] = {
                "first_use": (num, mine),
                "per_micro_batch": (1, [p for batch in mine for p in split_batch(batch, sizes)]),
            }
            for way, (cut, batches) in ways.items():
                pipeline = pipeline_of(
                    build(_job(num_hot), rank, world_size), num_micro_batches=cut, lookahead=False
                )
                # DDP makes new buckets in the second step
                run_to_the_end(pipeline, iter(mine[:1] * 3))
                with WireMeter() as meter:
                    assert len(run_to_the_end(pipeline, iter(batches))) == len(batches)
                found[num_hot, num, way] = meter.count.bytes_by_kind
    return found


@pytest.mark.parametrize("way", ["first_use", "per_micro_batch"])
@pytest.mark.parametrize("num_hot", NUM_HOT)
@pytest.mark.parametrize("num", NUM_MICRO_BATCHES)
def test_what_is_counted_is_what_travels(num: int, num_hot: int, way: str) -> None:
    steps, tables = make_steps(), Tables(make_clicks(), DIM, WORLD_SIZE)
    tables.replicate(_hot_by_thirds(num_hot))
    sizes = micro_batch_sizes(BATCH_SIZE, num)
    travels = [getattr(tables, way)(steps.batches(step), sizes) for step in range(len(steps))]
    summed = 2 * (WORLD_SIZE - 1) * 4 * DIM * sum(travel.hot_rows for travel in travels)
    counted = sum(travel.sent_bytes for travel in travels) - summed
    by_rank = [found[num_hot, num, way] for found in run_once(_metered, WORLD_SIZE)]
    # the header that tells of the end of data
    hot_words = -(-2 * num_hot // 64)
    chunks = num if way == "first_use" else 1
    last_header = WORLD_SIZE * WORD_BYTES * (chunks + 3 + hot_words)
    assert sum(kinds["send"] for kinds in by_rank) == counted + last_header
    if way == "first_use":  # a micro-batch that is a step of its own sums hot rows of its own
        without_hot = [found[0, num, way]["allreduce_"] for found in run_once(_metered, 2)]
        assert sum(kinds["allreduce_"] for kinds in by_rank) == summed + sum(without_hot)
    assert (summed > 0) == (num_hot > 0)


def test_hot_rows_are_those_looked_up_most() -> None:
    clicks = make_clicks()
    tables = Tables(clicks, DIM, WORLD_SIZE)
    batch = clicks.batch(np.arange(60))
    most = tables.most_looked_up([batch], 5).tolist()
    lookups = np.zeros(sum(ROWS.values()), dtype=int)
    np.add.at(lookups, batch.sparse_features["user"].values().numpy(), 1)
    for feature in ("item", history_of("item")):
        np.add.at(lookups, ROWS["user"] + batch.sparse_features[feature].values().numpy(), 1)
    assert most == sorted(most)
    assert sorted(lookups[most]) == sorted(np.sort(lookups)[-5:])
    (only,) = compare(
        "x", clicks, batch_size=20, micro_batches=(2,), dim=8, hot_rows=5, num_steps=1
    )
    assert only.hot_rows == 5


def test_a_short_stream_is_refused() -> None:
    with pytest.raises(InputError, match=r"x: 90 samples, but 2 x 2 x 30 are needed"):
        next(compare("x", make_clicks(), batch_size=30, micro_batches=(2,), dim=8, hot_rows=1))


def test_the_command_counts_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    options = ["--data", str(tmp_path), "--streams", *STREAMS, "--batch-sizes", "64", "100000"]
    assert main([*options, "--micro-batches", "4", "--steps", "1", "-o", str(out)]) == 0
    written = json.loads(out.read_text())
    (zipf,) = written["found"]
    assert zipf["stream"] == "zipf"
    assert zipf["lookups"] == 26 * 64
    assert zipf["ratio"] > zipf["clustered_ratio"] > 1
    left_out = written["left_out"]
    assert [why.split(":")[0] for why in left_out] == [*STREAMS]
    assert all("no such file" in why for why in left_out[:-1])
    assert "are needed (steps x ranks x batch size" in left_out[-1]
    printed = capsys.readouterr().out
    assert all(f"left out: {why}" in printed for why in left_out)


@pytest.mark.data
def test_criteo_sends_half_as_much_again_by_micro_batches(criteo_path: Path) -> None:
    samples = read_stream("criteo", criteo_path.parent)
    tables = Tables(samples, dim=64, world_size=2)
    batches = Steps(samples=samples, batch_size=4096, world_size=2, num_steps=1).batches(0)
    sizes = micro_batch_sizes(4096, 8)
    each = tables.per_micro_batch(batches, sizes).sent_bytes
    assert each >= 1.5 * tables.first_use(batches, sizes).sent_bytes
