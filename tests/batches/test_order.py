"""The order of samples in a batch: every sample stays whole, and the way back gives the batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec import JaggedTensor, KeyedJaggedTensor

from tests.train_pipeline.batches import assert_same, batches, kjt_of, sizes_of_parts
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.order import Looked, in_order, order_by_rows, places_of
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import CompatError, InputError


@given(data=st.data(), num_samples=st.integers(1, 6))
def test_every_sample_moves_as_a_whole(data: st.DataObject, num_samples: int) -> None:
    batch = data.draw(batches(num_samples))
    order = data.draw(st.permutations(range(num_samples)))
    alone = [1] * num_samples
    expected = [split_batch(batch, alone)[sample] for sample in order]
    moved = in_order(batch, torch.tensor(order))
    assert_same(split_batch(moved, alone), expected)


@given(data=st.data(), sizes=sizes_of_parts.filter(sum))
def test_outputs_come_back_as_the_batch_was(data: st.DataObject, sizes: list[int]) -> None:
    batch = data.draw(batches(sum(sizes)))
    order_B = torch.tensor(data.draw(st.permutations(range(sum(sizes)))))
    parts = split_batch(in_order(batch, order_B), sizes)
    assert_same(join_outputs(parts, sizes, order_B), batch)


def test_gradients_flow_back_to_their_samples() -> None:
    scores_B = torch.arange(4.0, requires_grad=True)
    order_B = torch.tensor([2, 0, 3, 1])
    parts = split_batch(in_order(scores_B, order_B), [1, 3])
    joined = join_outputs(parts, [1, 3], order_B)
    (joined * torch.tensor([1.0, 10.0, 100.0, 1000.0])).sum().backward()
    assert torch.equal(joined.detach(), torch.arange(4.0))
    assert scores_B.grad is not None
    assert scores_B.grad.tolist() == [1.0, 10.0, 100.0, 1000.0]


def test_what_has_no_samples_stays() -> None:
    loss, nothing = torch.tensor(3.0), KeyedJaggedTensor.empty()
    moved = in_order((torch.arange(3), loss, "name", nothing), torch.tensor([2, 1, 0]))
    assert moved[0].tolist() == [2, 1, 0]
    assert moved[1] is loss
    assert moved[2] == "name"
    assert moved[3] is nothing


def test_what_cannot_be_cut_is_refused_alike() -> None:
    order_B = torch.tensor([1, 0])
    with pytest.raises(InputError, match="3 samples, expected 2"):
        in_order([torch.zeros(2), torch.zeros(3)], order_B)
    with pytest.raises(CompatError, match="do not know how to cut object by samples"):
        in_order([torch.zeros(2), object()], order_B)


def test_lengths_that_do_not_fit_are_refused_by_place() -> None:
    order_B, values = torch.tensor([1, 0]), torch.arange(3)
    for lengths, reason in (([1, 3], "3 values, but its lengths sum to 4"), ([4, -1], "of -1")):
        for jagged in (
            KeyedJaggedTensor(["a"], values, lengths=torch.tensor(lengths)),
            JaggedTensor(values, lengths=torch.tensor(lengths)),
        ):
            with pytest.raises(InputError, match=rf"batch\[0\]: .*{reason}"):
                in_order([jagged, torch.zeros(2)], order_B)


@given(data=st.data(), num_samples=st.integers(1, 8))
def test_the_way_back(data: st.DataObject, num_samples: int) -> None:
    order_B = torch.tensor(data.draw(st.permutations(range(num_samples))))
    assert torch.equal(order_B[places_of(order_B)], torch.arange(num_samples))


def _weights(features: KeyedJaggedTensor, table_F: list[int]) -> list[float]:
    """Of each sample, the sum of 1 / count over its lookups, by hand."""
    bags = [
        (table, sample, ids.tolist())
        for table, key in zip(table_F, features.keys())
        for sample, ids in enumerate(features[key].to_dense())
    ]
    counts = Counter((table, row) for table, _, ids in bags for row in ids)
    weights = [0.0] * features.stride()
    for table, sample, ids in bags:
        if table >= 0:
            weights[sample] += sum(1 / counts[table, row] for row in ids)
    return weights


def test_samples_of_rare_rows_come_last() -> None:
    generator = torch.Generator().manual_seed(0)
    features = KeyedJaggedTensor(
        keys=["a", "b", "c", "not_rows"],
        values=(torch.rand(40 * 4 * 2, generator=generator) ** 3 * 50).to(torch.int64),
        lengths=torch.tensor([1, 3, 2, 2], dtype=torch.int32).repeat(40),
    )
    table_F = [0, 1, 0, -1]  # two features of one table: their ids are the same rows
    order_B = order_by_rows([Looked(features=features, table_F=torch.tensor(table_F))], 40)
    assert order_B is not None
    weights = _weights(features, table_F)
    found = [weights[sample] for sample in order_B.tolist()]
    assert found == pytest.approx(sorted(weights), rel=1e-5)
    assert len(set(weights)) > 30
    assert sorted(order_B.tolist()) == list(range(40))


def test_the_first_samples_need_few_rows() -> None:
    """Who looks up a rare row looks up more of them, as in clicks: most rows can wait."""
    generator = torch.Generator().manual_seed(1)
    num_samples, num_features = 512, 8
    rarity_FB = torch.rand(num_samples, generator=generator).repeat(num_features, 1)
    noise_FB = torch.rand(num_features, num_samples, generator=generator)
    rarity_FB = 0.7 * rarity_FB + 0.3 * noise_FB
    ids_N = (10_000**rarity_FB).to(torch.int64).view(-1)
    lengths = torch.ones(num_samples * num_features, dtype=torch.int32)
    keys = [f"f{number}" for number in range(num_features)]
    features = KeyedJaggedTensor(keys, ids_N, lengths=lengths)
    looked = Looked(features=features, table_F=torch.arange(num_features))
    order_B = order_by_rows([looked], num_samples)
    assert order_B is not None
    ids_FB = ids_N.view(num_features, num_samples)

    def rows_of(samples: torch.Tensor) -> int:
        return sum(len(ids_B[samples].unique()) for ids_B in ids_FB)

    first = num_samples // 4
    assert rows_of(order_B[:first]) < 0.5 * rows_of(torch.arange(first))


def test_lengths_that_lie_are_left_to_those_who_check_them() -> None:
    good = kjt_of({"a": [[1], [2, 3]], "b": [[4], []]})
    for lengths in ([1, 2, 1, 1], [2, -1, 3, 0], [1, 2, 1]):
        bad = KeyedJaggedTensor(["a", "b"], good.values(), lengths=torch.tensor(lengths))
        assert order_by_rows([Looked(features=bad, table_F=torch.tensor([0, 1]))], 2) is None
    assert order_by_rows([], 2) is None
    assert order_by_rows([Looked(features=good, table_F=torch.tensor([0, 1]))], 3) is None
    assert order_by_rows([Looked(features=good, table_F=torch.tensor([0, 1]))], 2) is not None
