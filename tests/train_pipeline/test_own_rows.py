"""Features with rows of their own, and processors of features, are interleaved as others are.

The witness is TorchRec's ``TrainPipelineSparseDist`` over stock tables, where it has no backward on
the same samples written out.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from tests.sharding.jobs import ATOL, RTOL, assert_same_results, result_of_module, whole
from tests.support.shared_run import run_once
from tests.train_pipeline import runs
from tests.train_pipeline.feature_cells import (
    MODULES,
    TABLES,
    Feature,
    Model,
    Outcome,
    batch_of,
    build,
    collection,
    dense_optimizer,
    own_rows,
    run_cell,
)
from tests.train_pipeline.features import BAGS, OWN_ROWS, ProcessedFirst, Two
from torchrec_picasso import HotColdEmbeddingBagCollectionSharder


class _Both(Two):
    def make(self, feature: Feature) -> None:
        self.tables = collection(feature, "sequences", feature.tables[:1])
        self.more_tables = collection(feature, "bags", feature.tables[1:])


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
    """The second batch of rank 1, and no other, has no inverse indices."""
    features = own_rows(batch, step).sparse_features
    if (step, dist.get_rank()) != (1, 1):
        return batch
    batch.sparse_features = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        lengths=features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank(),
    )
    return batch


class _ProcessedLast(Two):
    """Processed tables after weighted ones."""

    def make(self, feature: Feature) -> None:
        weighted = dataclasses.replace(feature, processors=None)
        self.tables = collection(weighted, self.kind, feature.tables[:1])
        self.more_tables = collection(feature, self.kind, feature.tables[1:])


MEAN_AND_SUM = (TABLES[0], dataclasses.replace(TABLES[1], mean=True), TABLES[2])
CASES: Mapping[str, tuple[Feature, tuple[int | None, ...]]] = {
    "bags": (Feature("", tables=MEAN_AND_SUM, **OWN_ROWS), (1, None)),
    "no_lookahead": (Feature("", settings={"lookahead": False}, **OWN_ROWS), (1,)),
    "sequences": (Feature("", ("sequences",), need_indices=True, **OWN_ROWS), (1, None)),
    "both": (Feature("", model=_Both, **OWN_ROWS), (1,)),
    "bags_travel": (Feature("", tables=MEAN_AND_SUM, hot_rows=BAGS, **OWN_ROWS), (1, None)),
    "weighted_bags_travel": (Feature("", weighted=True, hot_rows=BAGS, **OWN_ROWS), (1,)),
    "rows_beside_bags": (
        Feature("", tables=MEAN_AND_SUM, hot_rows={**BAGS, "t_b": 2}, **OWN_ROWS),
        (1,),
    ),
    "sequences_beside_bags": (
        Feature("", model=_Both, hot_rows={**BAGS, "t_a": 2}, **OWN_ROWS),
        (1,),
    ),
    "four_bags": (Feature("", model=_OverRows, hot_rows=BAGS, change_batch=_four_rows), (1,)),
    "four_rows": (Feature("", model=_OverRows, change_batch=_four_rows), (1,)),
    "processors": (Feature("", processors="by_feature"), (1, 4, None)),
    "processors_for_all": (Feature("", processors="together"), (2,)),
    "beside_weighted": (
        Feature("", processors="together", weighted=True, model=ProcessedFirst),
        (2,),
    ),
    "after_weighted_bags_travel": (
        Feature(
            "",
            processors="by_feature",
            weighted=True,
            model=_ProcessedLast,
            hot_rows={"t_a": "bags", "*": 2},
        ),
        (1, 4, None),
    ),
}


def _torchrecs_sharder() -> Mapping[type, Any]:
    inner = HotColdEmbeddingBagCollectionSharder()
    outer = FeatureProcessedEmbeddingBagCollectionSharder(inner)
    return {FeatureProcessedEmbeddingBagCollection: outer}


AROUND_OURS = dataclasses.replace(
    CASES["processors_for_all"][0], hot_rows={"*": 5, "t_b": 0}, more_sharders=_torchrecs_sharder
)
"""Processors that TorchRec's own sharder puts around our tables, by TorchRec's pipeline."""


def _run(rank: int, world_size: int) -> dict[tuple[str, Any], Outcome]:
    found: dict[tuple[str, Any], Outcome] = {}
    for name, (feature, numbers) in CASES.items():
        kind = feature.kinds[0]
        found[name, 0] = run_cell(feature, kind, rank, False, 0)
        for number in numbers:
            found[name, number] = run_cell(feature, kind, rank, True, number)
    found["processors_for_all", "around ours"] = run_cell(AROUND_OURS, "bags", rank, True, 0)
    without = Feature("", change_batch=_without_inverse)
    found["without_inverse", 1] = run_cell(without, "bags", rank, True, 1)
    found["bags", 2] = run_cell(CASES["bags"][0], "bags", rank, True, 2)
    return found


@pytest.mark.parametrize(
    ("name", "number"),
    [
        *((name, number) for name, (_, numbers) in CASES.items() for number in numbers),
        ("processors_for_all", "around ours"),
    ],
)
def test_trains_as_torchrec_does(name: str, number: Any) -> None:
    mine, its = ([found[name, n] for found in run_once(_run, 2)] for n in (number, 0))
    for one, other in zip(mine, its):
        assert not one.error
        assert not other.error
        assert "computed once" not in one.summary
        torch.testing.assert_close(one.trained, other.trained, rtol=RTOL, atol=ATOL)
        torch.testing.assert_close(one.evaluated, other.evaluated, rtol=RTOL, atol=ATOL)
    results, expected = ([outcome.result for outcome in each] for each in (mine, its))
    assert whole(expected, "states")
    assert_same_results(results, expected)


BY_HAND = {
    "processors": CASES["processors"][0],
    "TorchRec's processors": AROUND_OURS,
    "own rows": Feature("", tables=MEAN_AND_SUM[::-1], **OWN_ROWS),
}
"""Features by name, of which own rows come in another order than their tables."""


def _by_hand(rank: int, world_size: int) -> dict[tuple[str, bool], runs.Run]:
    """Batch 2 after detach() with others in flight, 5 at the end; stock trains all by hand."""
    found = {}
    for name, feature in BY_HAND.items():
        for is_ours in (True, False):
            model = build(feature, "bags", is_ours)
            optimizer = dense_optimizer(model)
            batches = [batch_of(feature, rank, step, is_ours) for step in range(6)]
            outputs = []
            if is_ours:
                pipeline = runs.pipeline_of(model, optimizer=optimizer)
                reader = iter([*batches[:2], *batches[3:5]])
                outputs += [pipeline.progress(reader) for _ in range(2)]
                pipeline.detach()
                outputs += runs.plain_steps(model, batches[2:3], optimizer)
                pipeline.attach()
                outputs += runs.run_to_the_end(pipeline, reader)
                pipeline.detach()
                batches = batches[5:]
            outputs += runs.plain_steps(model, batches, optimizer)
            found[name, is_ours] = result_of_module(model, [], MODULES), outputs
    return found


@pytest.mark.parametrize("name", BY_HAND)
def test_they_are_trained_by_hand_after_detach(name: str) -> None:
    runs.compare_runs(run_once(_by_hand, 2), (name, True), (name, False))


def test_modules_with_rows_of_their_own_share_an_exchange() -> None:
    summary = run_once(_run, 2)[0]["both", 1].summary
    assert "tables: interleaved in one exchange with more_tables" in summary


@pytest.mark.parametrize("name", ["beside_weighted", "after_weighted_bags_travel"])
def test_processed_tables_share_the_exchange_of_weighted_ones(name: str) -> None:
    number = CASES[name][1][0]
    summary = run_once(_run, 2)[0][name, number].summary
    assert "tables: interleaved in one exchange with more_tables" in summary


def test_they_are_not_cut_and_the_summary_says_why() -> None:
    for found in run_once(_run, 2):
        assert "batches are whole: tables: its KeyedJagged" in found["bags", None].summary
        refused = found["bags", 2].error
        assert refused.startswith("CompatError: tables: its KeyedJaggedTensor has a batch size per")
        assert "use num_micro_batches=1" in refused


def test_rows_of_no_sample_are_refused_by_name_on_all_ranks() -> None:
    refused, *others = (found["without_inverse", 1].error for found in run_once(_run, 2))
    assert others == [refused]
    assert refused.startswith("CompatError: rank 1: the KeyedJaggedTensor of features f, g, h has")
    assert "no inverse_indices" in refused
