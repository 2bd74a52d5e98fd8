"""Clicks as columns, a log of them, the teacher of pairs, and the DIN that reads them."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks.fields.sequences import build_din
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.click_log import generate_log, samples_of_log
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
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
        histories={"item": History.from_lists([np.array(of, dtype=np.int64) for of in lists])},
        profiles={"user": np.array(users)} if users else {},
        clicked=np.array(clicked or [0] * len(targets), dtype=np.float32),
    )


def make_clicks() -> Clicks:
    return clicks_of([3, 1, 4, 1], LISTS, users=[7, 0, 7, 2], clicked=[1, 0, 0, 1])


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
        sum(pairs[target, click] for click in of) / np.sqrt(max(1, len(of)))
        for target, of in zip(targets, lists)
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
    batches = [next(make_source(of, 0).batches(0, 1)) for of in (own, taught, taught)]
    values = [batch.sparse_features.values() for batch in batches]
    assert values[0].equal(values[1])
    assert not batches[0].labels.equal(batches[1].labels)
    assert batches[1].labels.equal(batches[2].labels)


def _on_cpu() -> ClickModel:
    train = build_din(make_clicks(), sequence_dim=4, profile_dim=8, seed=3).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in train.parameters():
        torch.nn.init.normal_(parameter)
    return train


def test_the_history_counts_and_so_does_the_profile() -> None:
    clicks, train = make_clicks(), _on_cpu()
    logits = train(clicks.batch(np.arange(4)))[1][1]
    for kind, table in (("target_4.embeddings", "t_item"), ("profile.embedding_bags", "t_user")):
        parameter = train.get_parameter(f"embeddings.collections.{kind}.{table}.weight")
        before = parameter.detach().clone()
        with torch.no_grad():
            parameter[7 if table == "t_user" else 9] += 1  # rows of samples 0 and 2 alone
        changed = train(clicks.batch(np.arange(4)))[1][1] != logits
        assert changed.tolist() == [True, False, True, False]
        with torch.no_grad():
            parameter.copy_(before)


def test_the_seed_draws_the_dense_weights() -> None:
    first, again, other = (build_din(make_clicks(), seed=seed) for seed in (0, 0, 1))
    weights = [of.head.model.over_arch[0].weight for of in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert all(of.is_meta for of in first.embeddings.parameters())
