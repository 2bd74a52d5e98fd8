"""A log of clicks and the samples made of it; against a loop in tests/benchmarks/test_sequences."""

from __future__ import annotations

import numpy as np
import pytest

from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.errors import InputError

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


def test_columns_of_a_target_go_together() -> None:
    log = generate_log(NUM_CLICKS, num_categories=20)
    clicks = samples_of_log(log, user="user", targets=["item", "category"], profiles=["device"])
    assert clicks.features == ["device", "item", "category", "item_history", "category_history"]
    assert (clicks.targets["item"] % 20 == clicks.targets["category"]).all()
    items, categories = (clicks.histories[name].joined() for name in ("item", "category"))
    assert len(items) > NUM_CLICKS
    assert (items % 20 == categories).all()


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
