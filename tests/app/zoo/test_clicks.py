"""Clicks as columns, a log of them, the teacher of pairs, and the DIN that reads them.

Files of clicks in windows: what is read, drawn and held out, against the whole file. Rows with
histories of their own first, then a log, whose histories are the clicks before."""

import dataclasses
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torchrec.datasets.utils import Batch

from benchmarks.fields.sequences import build_din
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data import alimama, globo
from torchrec_picasso.app.zoo.data.click_files import ClickFile, read_clicks
from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.app.zoo.data.click_source import ClickSource
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.data.co_action_teacher import co_action_logits, with_co_action_labels
from torchrec_picasso.app.zoo.data.history import History
from torchrec_picasso.app.zoo.registry import make_source
from torchrec_picasso.errors import InputError

LISTS = [[4, 9], [], [9, 9, 1], [2]]


def clicks_of(
    targets: list[int],
    lists: list[list[int]],
    users: Sequence[int] = (),
    clicked: Sequence[int] = (),
) -> Clicks:
    return Clicks(
        targets={"item": np.array(targets)},
        histories={"item": History.from_lists([np.array(each, dtype=np.int64) for each in lists])},
        profiles={"user": np.array(users)} if users else {},
        clicked=np.array(clicked or [0] * len(targets), dtype=np.float32),
    )


def make_clicks() -> Clicks:
    return clicks_of([3, 1, 4, 1], LISTS, users=[7, 0, 7, 2], clicked=[1, 0, 0, 1])


def test_lists_come_back() -> None:
    history = History.from_lists([np.array(each, dtype=np.int64) for each in LISTS])
    assert len(history) == len(LISTS)
    assert [each.tolist() for each in history] == LISTS
    assert history.lengths_n.tolist() == [2, 0, 3, 1]
    assert history.take(np.array([2, 1])).joined().tolist() == [9, 9, 1]
    assert [each.tolist() for each in history.hashed(4)] == [[0, 1], [], [1, 1, 1], [2]]


def test_no_lists_have_no_ids() -> None:
    history = History.from_lists([])
    assert (len(history), history.largest) == (0, 0)
    assert history.joined().tolist() == []


@pytest.mark.parametrize("most", [1, 3, 100])
def test_history_before_is_that_of_a_loop(most: int) -> None:
    rng = np.random.default_rng(0)
    keys, ids = rng.integers(7, size=60), rng.integers(30, size=60)
    found = History.before(keys, ids, most)
    for event in range(60):
        earlier = [int(ids[other]) for other in range(event) if keys[other] == keys[event]]
        assert found[event].tolist() == earlier[-most:]


def test_tables_hold_targets_and_histories() -> None:
    clicks = make_clicks()
    assert (clicks.num_rows("item"), clicks.num_rows("user")) == (10, 8)
    assert clicks.hashed(4).num_rows("item") == 4
    assert clicks.hashed(4).profiles["user"].tolist() == [3, 0, 3, 2]


NUM_CLICKS = 3000


def test_the_log_is_the_same_again() -> None:
    first, again, other = (generate_log(NUM_CLICKS, seed=seed) for seed in (0, 0, 1))
    for column, ids in first.items():
        assert ids.tolist() == again[column].tolist()
    assert first["item"].tolist() != other["item"].tolist()


def test_users_return_to_their_categories() -> None:
    log = generate_log(NUM_CLICKS, num_users=50, num_items=400, num_categories=20)
    assert (log["item"] % 20 == log["category"]).all()
    assert log["item"].min() >= 0
    assert log["item"].max() < 400
    assert log["user"].max() < 50
    busiest = log["category"][log["user"] == 0]
    two_most = np.sort(np.bincount(busiest))[-2:].sum()
    assert two_most > 0.6 * len(busiest)


def test_what_was_not_clicked_is_drawn_from_the_latest_clicks() -> None:
    log = {"user": np.zeros(100, dtype=np.int64), "item": np.arange(100)}
    clicks = samples_of_log(log, user="user", targets=["item"], most=4, recent=3)
    clicked, other = clicks.targets["item"][::2], clicks.targets["item"][1::2]
    assert clicks.clicked.tolist() == [1, 0] * 99
    assert clicked.tolist() == list(range(1, 100))
    assert set(clicked - other) == {1, 2, 3}
    assert clicks.histories["item"][20].tolist() == [7, 8, 9, 10]


def test_one_click_is_not_enough() -> None:
    log = {"user": np.array([1]), "item": np.array([1])}
    with pytest.raises(InputError, match=r"at least 2 clicks, .* got 1; give a longer log"):
        samples_of_log(log, user="user", targets=["item"])


NUM_IDS = 9


def test_a_history_adds_up_its_pairs() -> None:
    pairs = {
        (target, click): co_action_logits(clicks_of([target], [[click]]), seed=3)[0]
        for target in range(NUM_IDS)
        for click in range(NUM_IDS)
    }
    rng = np.random.default_rng(0)
    # more samples than are worked on at once, empty histories among them
    lists = [rng.integers(NUM_IDS, size=length).tolist() for length in rng.integers(4, size=5000)]
    targets = rng.integers(NUM_IDS, size=len(lists)).tolist()
    found = co_action_logits(clicks_of(targets, lists), seed=3)
    expected = [
        sum(pairs[target, click] for click in each) / np.sqrt(max(1, len(each)))
        for target, each in zip(targets, lists)
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    # neither the target alone nor the click alone tells a pair: what both add up to leaves most
    table = np.array([pairs[key] for key in sorted(pairs)]).reshape(NUM_IDS, NUM_IDS)
    apart = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    assert apart.var() > 0.5 * table.var()


def test_labels_follow_the_teacher_and_the_seed() -> None:
    rng = np.random.default_rng(1)
    lists = rng.integers(NUM_IDS, size=(4000, 3)).tolist()
    clicks = clicks_of(rng.integers(NUM_IDS, size=4000).tolist(), lists)
    labels = with_co_action_labels(clicks, seed=2).clicked
    logits = co_action_logits(clicks, seed=2)
    assert set(labels) == {0.0, 1.0}
    assert logits[labels == 1].mean() > logits[labels == 0].mean() + 1
    np.testing.assert_array_equal(with_co_action_labels(clicks, seed=2).clicked, labels)
    assert (with_co_action_labels(clicks, seed=2, part=1).clicked != labels).any()
    assert (co_action_logits(clicks, seed=4) != logits).any()


def test_a_source_takes_its_labels_from_the_teacher() -> None:
    own = DataConfig(kind="clicks", batch_size=64, max_rows=50)
    taught = dataclasses.replace(own, labels="co_action")
    batches = [next(make_source(each, 0).batches(0, 1)) for each in (own, taught, taught)]
    values = [batch.sparse_features.values() for batch in batches]
    assert values[0].equal(values[1])
    assert not batches[0].labels.equal(batches[1].labels)
    assert batches[1].labels.equal(batches[2].labels)


def test_the_seed_draws_the_dense_weights() -> None:
    first, again, other = (build_din(make_clicks(), seed=seed) for seed in (0, 0, 1))
    weights = [each.head.model.over_arch[0].weight for each in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(each.is_meta for each in first.embeddings.parameters())


NUM_ROWS, GROUP_ROWS, WINDOW = 600, 100, 250
BATCH = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows whose user is their place in the file."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(0, 5, NUM_ROWS)
    frame = pd.DataFrame({column: rng.integers(1, 40, NUM_ROWS) for column in alimama.COLUMNS})
    frame["clk"] = rng.integers(0, 2, NUM_ROWS)
    frame["user_id"] = np.arange(NUM_ROWS)
    for column in ("tag_category_list", "tag_brand_list"):
        frame[column] = [rng.integers(1, 60, length).tolist() for length in lengths]
    path: Path = tmp_path_factory.mktemp("alimama") / "rows.parquet"
    frame.to_parquet(path, row_group_size=GROUP_ROWS)
    return path


@pytest.fixture
def windowed(path: Path) -> ClickSource:
    data = DataConfig(kind="clicks", path=str(path), batch_size=BATCH, heldout_steps=2)
    return ClickSource(data, seed=0, most_samples=WINDOW)


def users_of(batch: Batch) -> list[int]:
    return (batch.sparse_features["user_id"].values() - 1).tolist()


@pytest.mark.parametrize(
    ("most_samples", "expected"), [(WINDOW, [200, 200, 200]), (50, [100] * 6), (600, [600])]
)
def test_windows_are_whole_row_groups(path: Path, most_samples: int, expected: list[int]) -> None:
    file = ClickFile(path, most_samples)
    windows = [file.window(number) for number in range(file.num_windows)]
    assert list(map(len, windows)) == expected
    assert [file.num_samples(number) for number in range(len(windows))] == expected
    whole = read_clicks(path)
    joined = np.concatenate([each.histories["brand"].joined() for each in windows])
    assert joined.tolist() == whole.histories["brand"].joined().tolist()
    for column in whole.profiles:
        together = np.concatenate([each.profiles[column] for each in windows])
        assert together.tolist() == whole.profiles[column].tolist()


@pytest.mark.parametrize("with_statistics", [True, False])
def test_largest_ids_are_the_files(path: Path, tmp_path: Path, with_statistics: bool) -> None:
    if not with_statistics:
        frame, path = pd.read_parquet(path), tmp_path / "plain.parquet"
        frame.to_parquet(path, row_group_size=GROUP_ROWS, write_statistics=False)
    whole, file = read_clicks(path), ClickFile(path, WINDOW)
    for column in (*whole.profiles, *whole.targets):
        assert file.num_rows(column) == whole.num_rows(column)


def test_what_is_held_out_is_never_trained_on(windowed: ClickSource) -> None:
    heldout = [user for rank in range(2) for b in windowed.heldout(rank, 2) for user in users_of(b)]
    assert len(set(heldout)) == len(heldout) == 2 * 2 * BATCH
    assert len({user // 200 for user in heldout}) > 1
    steps = 6 * NUM_ROWS // (2 * BATCH)
    batches = [b for rank in range(2) for b in islice(windowed.batches(rank, 2), steps)]
    trained = {user for batch in batches for user in users_of(batch)}
    assert not trained & set(heldout)
    assert len(trained) > 0.8 * NUM_ROWS


def test_too_few_can_be_held_out(path: Path) -> None:
    data = DataConfig(kind="clicks", path=str(path), batch_size=BATCH, heldout_steps=20)
    with pytest.raises(InputError, match=r"samples can be held out, but 320 are needed"):
        next(ClickSource(data, seed=0).heldout(0, 2))


NUM_LOGGED, LOG_WINDOW, NUM_USERS = 900, 150, 12


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    users = np.random.default_rng(1).integers(0, NUM_USERS, NUM_LOGGED)
    return globo_log(tmp_path_factory, np.arange(NUM_LOGGED) // 3, user=users)


def globo_log(folders: pytest.TempPathFactory, ts_ms: np.ndarray, **columns: np.ndarray) -> Path:
    """Clicks at given times whose article is their place in the file, in row groups of 500."""
    rng = np.random.default_rng(1)
    frame = pd.DataFrame({column: rng.integers(0, 9, len(ts_ms)) for column in globo.COLUMNS})
    frame = frame.assign(ts_ms=ts_ms, article=np.arange(len(ts_ms)), **columns)
    path: Path = folders.mktemp("globo") / "log.parquet"
    frame.to_parquet(path, row_group_size=500)
    return path


def source_of(path: Path, heldout_steps: int = 4) -> ClickSource:
    data = DataConfig(
        kind="clicks", path=str(path), batch_size=BATCH, heldout_steps=heldout_steps, max_history=9
    )
    return ClickSource(data, seed=0, most_samples=2 * LOG_WINDOW)


def places_of(batch: Batch) -> list[int]:
    """Places of the clicks that happened."""
    articles = batch.sparse_features["article"].values() - 1
    return articles[batch.labels > 0.5].tolist()


def test_a_log_is_trained_on_from_its_middle_and_held_out_before(log: Path) -> None:
    steps = 2 * LOG_WINDOW // (2 * BATCH)
    batches = [places_of(batch) for batch in islice(source_of(log).batches(0, 2), 3 * steps + 1)]
    windows = [{click // LOG_WINDOW for click in clicks} for clicks in batches]
    assert windows == [{3}] * steps + [{4}] * steps + [{5}] * steps + [{3}]
    assert batches[3 * steps] == batches[0]
    again = next(source_of(log).batches(0, 2, start_step=steps + 3))
    assert places_of(again) == batches[steps + 3]
    ranks = [source_of(log).batches(rank, 2) for rank in range(2)]
    in_turn = [click for _ in range(3) for rank in ranks for click in places_of(next(rank))]
    assert in_turn == list(range(3 * LOG_WINDOW, 3 * LOG_WINDOW + len(in_turn)))

    source = source_of(log, heldout_steps=13)
    heldout = [c for rank in range(2) for b in source.heldout(rank, 2) for c in places_of(b)]
    assert len(set(heldout)) == len(heldout)
    assert {click // LOG_WINDOW for click in heldout} == {1, 2}
    with pytest.raises(InputError, match="samples can be held out, but 480 are needed"):
        next(source_of(log, heldout_steps=30).heldout(0, 2))


def test_rows_of_a_log_are_those_of_its_file(log: Path) -> None:
    file, frame = ClickFile(log, 2 * LOG_WINDOW), pd.read_parquet(log)
    for column in ("article", "user", "device"):
        assert file.num_rows(column) == frame[column].max() + 2


def test_a_long_log_must_be_in_time_order(log: Path, tmp_path: Path) -> None:
    shuffled = tmp_path / "shuffled.parquet"
    pd.read_parquet(log).sample(frac=1, random_state=0).to_parquet(shuffled)
    with pytest.raises(InputError, match=r"rows 450 to 600 are not in order of ts_ms, .* sort the"):
        ClickFile(shuffled, 2 * LOG_WINDOW).window(3)
    in_memory = ClickFile(shuffled, 2 * NUM_LOGGED).window(0)
    # one window is sorted; of three clicks in the same second any may come first
    clicked = in_memory.targets["article"][in_memory.clicked > 0.5] - 1
    assert (clicked // 3).tolist() == sorted((clicked // 3).tolist())
    assert in_memory.targets["article"].max() == NUM_LOGGED
