"""Clicks as columns: histories against a loop, batches against the samples they are made of."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.app.zoo.data.history import History

LISTS = [[4, 9], [], [9, 9, 1], [2]]


def make_clicks() -> Clicks:
    return Clicks(
        targets={"item": np.array([3, 1, 4, 1])},
        histories={"item": History.from_lists([np.array(of, dtype=np.int64) for of in LISTS])},
        profiles={"user": np.array([7, 0, 7, 2])},
        clicked=np.array([1, 0, 0, 1], dtype=np.float32),
    )


def test_lists_come_back() -> None:
    history = History.from_lists([np.array(of, dtype=np.int64) for of in LISTS])
    assert len(history) == len(LISTS)
    assert [of.tolist() for of in history] == LISTS
    assert history.lengths_n.tolist() == [2, 0, 3, 1]
    assert history.take(np.array([2, 1])).joined().tolist() == [9, 9, 1]
    assert [of.tolist() for of in history.hashed(4)] == [[0, 1], [], [1, 1, 1], [2]]


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


def test_a_batch_holds_its_samples() -> None:
    clicks = make_clicks()
    batch = clicks.batch(np.array([2, 1, 0]))
    features = batch.sparse_features
    assert features.keys() == ["user", "item", history_of("item")] == clicks.features
    assert features["item"].values().tolist() == [4, 1, 3]
    assert [of.tolist() for of in features[history_of("item")].to_dense()] == [
        [9, 9, 1],
        [],
        [4, 9],
    ]
    assert features["user"].values().tolist() == [7, 0, 7]
    assert batch.labels.tolist() == [0, 0, 1]


def test_tables_hold_targets_and_histories() -> None:
    clicks = make_clicks()
    assert (clicks.num_rows("item"), clicks.num_rows("user")) == (10, 8)
    assert clicks.hashed(4).num_rows("item") == 4
    assert clicks.hashed(4).profiles["user"].tolist() == [3, 0, 3, 2]
