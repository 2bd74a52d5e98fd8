"""The teacher of pairs: against a loop over pairs, repeatable, and blind to what is not a pair."""

from __future__ import annotations

import dataclasses

import numpy as np

from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.data.co_action_teacher import co_action_logits, with_co_action_labels
from torchrec_picasso.app.zoo.data.history import History
from torchrec_picasso.app.zoo.registry import make_source

NUM_IDS = 9


def make_clicks(targets: list[int], lists: list[list[int]]) -> Clicks:
    return Clicks(
        targets={"item": np.array(targets)},
        histories={"item": History.from_lists([np.array(of, dtype=np.int64) for of in lists])},
        profiles={},
        clicked=np.zeros(len(targets), dtype=np.float32),
    )


def test_a_history_adds_up_its_pairs() -> None:
    pairs = {
        (target, click): co_action_logits(make_clicks([target], [[click]]), seed=3)[0]
        for target in range(NUM_IDS)
        for click in range(NUM_IDS)
    }
    rng = np.random.default_rng(0)
    # more samples than are worked on at once, empty histories among them
    lists = [rng.integers(NUM_IDS, size=length).tolist() for length in rng.integers(4, size=5000)]
    targets = rng.integers(NUM_IDS, size=len(lists)).tolist()
    found = co_action_logits(make_clicks(targets, lists), seed=3)
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
    clicks = make_clicks(rng.integers(NUM_IDS, size=4000).tolist(), lists)
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
