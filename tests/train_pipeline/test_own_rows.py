"""Features with rows of their own, and processors of features, are interleaved as others are.

The witness is TorchRec's ``TrainPipelineSparseDist`` over stock tables, where it has no backward on
the same samples written out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cache

import pytest
import torch
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch

from tests.sharding.jobs import whole
from tests.train_pipeline.feature_cells import (
    TABLES,
    Feature,
    Model,
    Outcome,
    collection,
    own_rows,
    own_rows_by_sample,
    pooled_by,
    run_cell,
)
from torchrec_picasso.app.launch.run_ranks import run_ranks


class _Both(Model):
    """Sequences and bags."""

    def make(self, feature: Feature) -> None:
        self.tables = collection(feature, "sequences", feature.tables[:1])
        self.more_tables = collection(feature, "bags", feature.tables[1:])

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return [
            *pooled_by(self.tables(features), self.keys[:1]),
            *pooled_by(self.more_tables(features), self.keys[1:]),
        ]


class _BesideWeighted(Model):
    """Processed tables beside weighted ones, in one exchange."""

    def make(self, feature: Feature) -> None:
        self.tables = collection(feature, "bags", feature.tables[1:])
        without = dataclasses.replace(feature, processors=None)
        self.more_tables = collection(without, "bags", feature.tables[:1])

    def look_up(self, features: KeyedJaggedTensor) -> list[Tensor]:
        return [
            *pooled_by(self.more_tables(features), self.keys[:1]),
            *pooled_by(self.tables(features), self.keys[1:]),
        ]


class _OverRows(Model):
    """Looks up four rows for six samples, which all have the mean of them."""

    def predict(self, pooled: list[Tensor], batch: Batch) -> Tensor:
        mean = torch.cat(pooled, dim=1).mean(dim=0, keepdim=True)
        return self.over(mean).squeeze(1) + 0 * batch.labels


def _four_rows(batch: Batch, step: int) -> Batch:
    features = batch.sparse_features
    lengths = features.lengths().view(len(features.keys()), -1)[:, :4]
    values = [features[key].values()[: int(n)] for key, n in zip(features.keys(), lengths.sum(1))]
    batch.sparse_features = KeyedJaggedTensor(
        features.keys(), torch.cat(values), lengths=lengths.flatten()
    )
    return batch


def _without_inverse(batch: Batch, step: int) -> Batch:
    features = own_rows(batch, step).sparse_features
    batch.sparse_features = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
    )
    return batch


OWN = {"change_batch": own_rows, "change_of_witness": own_rows_by_sample}
BAGS = {"*": "bags"}
MEAN_AND_SUM = (TABLES[0], dataclasses.replace(TABLES[1], mean=True), TABLES[2])
CASES: Mapping[str, tuple[Feature, str, tuple[int | None, ...]]] = {
    "bags": (Feature("", tables=MEAN_AND_SUM, **OWN), "bags", (1, None)),
    "no_lookahead": (Feature("", settings={"lookahead": False}, **OWN), "bags", (1,)),
    "sequences": (Feature("", need_indices=True, **OWN), "sequences", (1, None)),
    "both": (Feature("", model=_Both, **OWN), "bags", (1,)),
    "bags_travel": (Feature("", tables=MEAN_AND_SUM, hot_rows=BAGS, **OWN), "bags", (1, None)),
    "weighted_bags_travel": (Feature("", weighted=True, hot_rows=BAGS, **OWN), "bags", (1,)),
    "rows_beside_bags": (
        Feature("", tables=MEAN_AND_SUM, hot_rows={**BAGS, "t_b": 2}, **OWN),
        "bags",
        (1,),
    ),
    "sequences_beside_bags": (
        Feature("", model=_Both, hot_rows={**BAGS, "t_a": 2}, **OWN),
        "bags",
        (1,),
    ),
    "four_bags": (
        Feature("", model=_OverRows, hot_rows=BAGS, change_batch=_four_rows),
        "bags",
        (1,),
    ),
    "four_rows": (Feature("", model=_OverRows, change_batch=_four_rows), "bags", (1,)),
    "processors": (Feature("", processors="by_feature"), "bags", (1, 2, 4, None)),
    "processors_for_all": (Feature("", processors="together"), "bags", (1, 2, 4)),
    "beside_weighted": (
        Feature("", processors="together", weighted=True, model=_BesideWeighted),
        "bags",
        (1, 2, 4),
    ),
}


def _run(rank: int, world_size: int) -> dict[tuple[str, int | None], Outcome]:
    found: dict[tuple[str, int | None], Outcome] = {}
    for name, (feature, kind, numbers) in CASES.items():
        found[name, 0] = run_cell(feature, kind, rank, False, 0)
        for number in numbers:
            found[name, number] = run_cell(feature, kind, rank, True, number)
    without = Feature("", change_batch=_without_inverse)
    found["without_inverse", 1] = run_cell(without, "bags", rank, True, 1)
    own = CASES["bags"][0]
    found["bags", 2] = run_cell(own, "bags", rank, True, 2)
    return found


@cache
def _by_rank() -> list[dict[tuple[str, int | None], Outcome]]:
    return run_ranks(_run, 2, timeout_s=200)


@pytest.mark.parametrize(
    ("name", "number"), [(name, number) for name, (*_, ns) in CASES.items() for number in ns]
)
def test_trains_as_torchrec_does(name: str, number: int | None) -> None:
    mine, its = ([found[name, n] for found in _by_rank()] for n in (number, 0))
    for one, other in zip(mine, its):
        assert not one.error
        assert not other.error
        assert "computed once" not in one.summary
        torch.testing.assert_close(one.trained, other.trained, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(one.evaluated, other.evaluated, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(one.result.dense, other.result.dense, rtol=1e-4, atol=2e-5)
    for kind in ("weights", "states"):
        expected = whole([outcome.result for outcome in its], kind)
        assert expected
        torch.testing.assert_close(
            whole([outcome.result for outcome in mine], kind), expected, rtol=1e-4, atol=2e-5
        )


def test_modules_with_rows_of_their_own_share_an_exchange() -> None:
    summary = _by_rank()[0]["both", 1].summary
    assert "tables: interleaved in one exchange with more_tables" in summary


def test_processed_tables_share_the_exchange_of_weighted_ones() -> None:
    summary = _by_rank()[0]["beside_weighted", 2].summary
    assert "tables: interleaved in one exchange with more_tables" in summary


def test_they_are_not_cut_and_the_summary_says_why() -> None:
    for found in _by_rank():
        assert "batches are whole: tables: its KeyedJagged" in found["bags", None].summary
        refused = found["bags", 2].error
        assert refused.startswith("CompatError: tables: its KeyedJaggedTensor has a batch size per")
        assert "use num_micro_batches=1" in refused


def test_rows_of_no_sample_are_refused_by_name() -> None:
    for found in _by_rank():
        refused = found["without_inverse", 1].error
        assert refused.startswith("InputError: the KeyedJaggedTensor of features f, g, h has a")
        assert "no inverse_indices" in refused
