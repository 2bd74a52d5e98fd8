"""Streams of clicks, the HSTU that reads them, and training in the order of time.

No candidate's result depends on another's, no click's on a later one; a window is evaluated before
it is trained on."""

import dataclasses
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torchrec.datasets.utils import Batch

from tests.app.zoo.test_clicks import globo_log
from tests.app.zoo.test_models import BATCH, HISTORIES, LONGEST, batch_of, build, on_cpu
from torchrec_picasso.app.config import DataConfig, OptimizerConfig, TrainConfig, load_config
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.quality import as_hot_cold, as_stock, score_on_rank
from torchrec_picasso.app.runs.train import train_on_rank
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.data import alimama
from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.app.zoo.data.click_source import ClickSource
from torchrec_picasso.app.zoo.data.clicks import history_of
from torchrec_picasso.app.zoo.data.stream import Stream, hashed_pairs
from torchrec_picasso.app.zoo.registry import check_run, make_source
from torchrec_picasso.errors import ConfigError, InputError

CONFIG = load_config(Path(__file__).parents[3] / "configs" / "hstu_stream.yaml")
C, TASKS, LONGEST_READ = 4, 2, 6


def stream(num_candidates: int, num_clicks: int = 600) -> tuple[dict[str, np.ndarray], Stream]:
    log = generate_log(num_clicks, num_users=20, num_items=80, in_visits=True)
    made = samples_of_log(
        log,
        user="user",
        targets=["item", "category"],
        profiles=["user", "device"],
        num_candidates=num_candidates,
        crosses={"item_user": ("item", "user")},
    )
    assert isinstance(made, Stream)
    return log, dataclasses.replace(made.latest(LONGEST_READ), cross_rows=50)


def test_samples_of_candidates_are_those_of_a_loop() -> None:
    log, made = stream(C)
    assert len(made) == len(log["user"]) - 1
    dense, features = made.dense(), made.batch(np.arange(len(made))).sparse_features
    crossed = features["item_user"].values().reshape(-1, C)
    lists = features[history_of("item_user")].to_dense()
    seconds = log["second"]
    for sample in range(0, len(made), 7):
        click, user = sample + 1, log["user"][sample + 1]
        items = made.targets["item"][sample]
        is_click = items == log["item"][click]
        assert is_click[0]
        before = np.flatnonzero(log["user"][:click] == user)[-LONGEST_READ:]
        after = np.flatnonzero(log["user"][click + 1 :] == user)[:1] + click + 1
        gaps = seconds[after] - seconds[click]
        reads_on = bool(((gaps >= 60) & (gaps <= 1800)).any())
        assert made.clicked[sample].tolist() == [[hit, hit and reads_on] for hit in is_click]
        ages = [*(seconds[click] - seconds[before]), *[0] * (LONGEST_READ - len(before))]
        assert dense[sample].tolist() == ages
        for each, ids in ((items, crossed[sample]), (log["item"][before], lists[sample])):
            assert ids.tolist() == hashed_pairs(each, np.full(len(each), user), 0, 50).tolist()
    assert 0.05 < made.clicked[:, 0, 1].mean() < 0.95


def test_hashes_of_pairs_spread() -> None:
    one, other = (side.reshape(-1) for side in np.meshgrid(np.arange(100), np.arange(100)))
    found = hashed_pairs(one, other, 0, 1000)
    counts = np.bincount(found, minlength=1000)
    assert (found.min() >= 0, len(counts), int(counts.max()) < 30) == (True, 1000, True)
    assert (found != hashed_pairs(one, other, 1, 1000)).mean() > 0.99
    assert (found != hashed_pairs(other, one, 0, 1000))[one != other].mean() > 0.99


def test_visits_are_several_clicks_of_a_user_in_a_row() -> None:
    stay = [
        float((log[1:] == log[:-1]).mean())
        for log in (generate_log(3000, in_visits=which)["user"] for which in (False, True))
    ]
    assert stay[0] < 0.2 < 0.7 < stay[1]


def _changed(batch: Batch, column: str, places: Tensor) -> Batch:
    """The batch with other ids at some places of a column."""
    features = batch.sparse_features
    start = features.offset_per_key()[features.keys().index(column)]
    values = features.values().clone()
    values[start + places] = (values[start + places] + 1) % 10
    changed = type(features)(features.keys(), values, lengths=features.lengths())
    return Batch(batch.dense_features, changed, batch.labels)


def _run(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Logits, and the tokens after the last layer."""
    tokens: list[Tensor] = []
    hook = model.head.model.layers[-1].register_forward_hook(lambda *call: tokens.append(call[2]))
    with torch.no_grad():
        logits = model(batch)[1][1]
    hook.remove()
    return logits, tokens[0]


def test_a_candidate_sees_no_other_and_a_click_no_later_one() -> None:
    model, batch = on_cpu(build("hstu")), batch_of("hstu", 0)
    logits, tokens = _run(model, batch)
    last_candidates = torch.arange(2, 3 * BATCH, 3)
    found, moved = _run(model, _changed(batch, "item", last_candidates))
    assert found[:, :2].equal(logits[:, :2])
    assert not torch.isclose(found[:, 2], logits[:, 2]).all(dim=1).any()
    assert moved[:, : 1 + LONGEST].equal(tokens[:, : 1 + LONGEST])

    lengths = batch.sparse_features[HISTORIES[0]].lengths()
    last_clicks = (lengths.cumsum(0) - 1)[lengths > 0]
    found, moved = _run(model, _changed(batch, HISTORIES[0], last_clicks))
    at = torch.arange(1 + LONGEST) - lengths[:, None]  # 0: the last click; above: padding
    assert moved[:, : 1 + LONGEST][at < 0].equal(tokens[:, : 1 + LONGEST][at < 0])
    assert not torch.isclose(found, logits).flatten(1).all(dim=1)[lengths > 0].any()
    assert found[lengths == 0].equal(logits[lengths == 0])


def test_times_count_by_powers_of_two_between_clicks() -> None:
    model, batch = on_cpu(build("hstu")), batch_of("hstu", 0)
    history, hstu = batch.sparse_features[HISTORIES[0]], model.head.model
    ages = torch.tensor([100.0, 40.0, 7.0, 0.0, 0.0]).repeat(BATCH, 1)
    distance, bucket, sees = hstu._relations(history, ages)
    candidate, length = -1, int(history.lengths()[0])
    assert bucket[0, candidate].tolist() == [31, 6, 5, 3, 0, 0, 0, 0, 0]  # log2 of 1 + seconds
    assert bucket[0, 2, :3].tolist() == [31, 5, 0]
    there = distance[0, candidate, 1 : 1 + length].tolist()
    assert there == list(range(length, 0, -1))
    assert sees[0].sum(1).tolist()[-3:] == [2 + length] * 3


@pytest.fixture(scope="module")
def log_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return globo_log(tmp_path_factory, np.arange(900) * 1000)


@pytest.mark.parametrize("num_candidates", [1, 3])
@pytest.mark.parametrize("most_samples", [300, 1 << 18])
def test_steps_in_order_are_later_and_later(
    log_file: Path, num_candidates: int, most_samples: int
) -> None:
    settings = {"kind": "stream", "path": str(log_file), "batch_size": 8}
    data = DataConfig(**settings, num_candidates=num_candidates)  # type: ignore[arg-type]
    source = ClickSource(data, 0, most_samples=most_samples)
    steps = source.steps_in_order(2)
    assert steps > 10
    clicks = []
    for batches in zip(*(islice(source.batches(rank, 2), steps) for rank in range(2))):
        for batch in batches:
            is_click = batch.labels[..., 0].reshape(-1) > 0.5
            clicks += batch.sparse_features["article"].values()[is_click].tolist()
    assert clicks == sorted(clicks)
    assert (len(set(clicks)) == len(clicks)) or num_candidates > 1
    assert clicks[0] > 300


def test_rows_without_times_have_one_candidate_and_no_windows(tmp_path: Path) -> None:
    rows = {column: np.arange(40) % 7 for column in (*alimama.COLUMNS, "buy")}
    lists = {column: [[1, 2]] * 40 for column in alimama.COLUMNS if column.endswith("_list")}
    frame = pd.DataFrame({**rows, **lists, "clk": 1})
    path = tmp_path / "rows.parquet"
    frame.to_parquet(path)
    data = DataConfig(kind="stream", path=str(path), num_tasks=2, batch_size=4)
    source = make_source(data, 0)
    batch = next(source.batches(0, 1))
    assert batch.labels.shape == (4, 1, 2)
    assert batch.dense_features.equal(torch.zeros(4, data.max_history))
    assert source.columns["cross"] == ("cate_id_user", "brand_user")
    with pytest.raises(InputError, match=r"have one candidate, not 2; set data\.num"):
        make_source(dataclasses.replace(data, num_candidates=2), 0)
    windowed = dataclasses.replace(data, window_steps=2)
    with pytest.raises(ConfigError, match="than this data has in time order, 0; lower steps"):
        check_run(dataclasses.replace(CONFIG, data=windowed), 1)


def tiny(**more: object) -> TrainConfig:
    """A run of a tiny stream."""
    data = dataclasses.replace(CONFIG.data, batch_size=16, max_history=6, window_steps=3)
    settings = {"data": data, "steps": 8, **more}
    checkpoint = dataclasses.replace(CONFIG.checkpoint, folder=None)
    return dataclasses.replace(CONFIG, checkpoint=checkpoint, **settings)  # type: ignore[arg-type]


def test_each_window_is_evaluated_before_it_is_trained_on() -> None:
    found = run_ranks(train_on_rank, 2, tiny(), False, timeout_s=120)[0]
    assert list(found["by_window"]) == [3, 6, 8]
    assert all(len(aucs) == TASKS for aucs in found["by_window"].values())
    assert found["aucs"] == found["by_window"][8]


def _rates(rank: int, world_size: int, config: TrainConfig) -> list[list[float]]:
    source = make_source(config.data, config.seed)
    trainer, found = Trainer(config, source), []
    for _ in trainer.steps(source.batches(rank, world_size), config.steps):
        groups = [part.param_groups for _, part in trainer.optimizer.optimizers]
        found.append([group["lr"] for part in groups for group in part])
    return found


def test_a_warm_up_writes_the_rates_of_each_step() -> None:
    optimizer = OptimizerConfig(
        embedding_lr=0.4, dense_optimizer="adam", dense_lr=0.2, warmup_steps=4, clip_norm=1.0
    )
    found = run_ranks(_rates, 1, tiny(steps=6, optimizer=optimizer), timeout_s=120)[0]
    shares = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [set(rates) for rates in found] == [{0.4 * each, 0.2 * each} for each in shares]


def _moved(rank: int, world_size: int, config: TrainConfig) -> tuple[float, set[float]]:
    """Norm of the change of all dense weights in a step, and Adam's steps before it."""
    source = make_source(config.data, config.seed)
    trainer = Trainer(config, source)
    (_, (_, dense)) = trainer.optimizer.optimizers
    weights = [weight for group in dense.param_groups for weight in group["params"]]
    trained = {float(each["step"]) for each in dense.state.values() if "step" in each}
    before = [weight.detach().clone() for weight in weights]
    trainer.train(source.batches(rank, world_size), 1)
    changes = [(old - new).norm() for old, new in zip(before, weights)]
    return float(torch.stack(changes).norm()), trained


def test_all_dense_gradients_together_are_clipped() -> None:
    def moved(clip_norm: float | None, kind: str = "sgd") -> tuple[float, set[float]]:
        asked = OptimizerConfig(dense_optimizer=kind, dense_lr=1.0, clip_norm=clip_norm)
        (found,) = run_ranks(_moved, 1, tiny(optimizer=asked), timeout_s=120)
        return found

    assert moved(0.125)[0] == pytest.approx(0.125, rel=1e-3)
    assert moved(None)[0] > 0.2
    assert moved(None, "adam")[1] == {0.0}  # its state is there, and no step is counted


def test_it_trains_as_stock_with_its_own_optimizers() -> None:
    config = tiny(steps=12)
    ours, stock = (
        run_ranks(score_on_rank, 2, each, timeout_s=120)[0]
        for each in (as_hot_cold(config, 50, 2), as_stock(config))
    )
    np.testing.assert_allclose(ours.losses, stock.losses, rtol=1e-4)
    assert len(ours) == 2 * 16 * 3 * C
    assert ours.auc == pytest.approx(stock.auc, abs=1e-2)
