"""Cutting batches: parts are what one would build by hand, and nothing else is ever cut; what a
container holds beside its fields is part of the batch or made of its fields, copies share no
memory; joining undoes a cut, averages losses by size, and refuses to guess."""

import dataclasses
import functools
import threading
from collections import defaultdict
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed.types import NoWait

from tests.train_pipeline.batches import (
    Frozen,
    Open,
    Pair,
    assert_same,
    bags_of,
    batches,
    kjt_of,
    kjts,
    sizes_of_parts,
)
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.members import copy_batch
from torchrec_picasso.batches.split import children_of, micro_batch_sizes, num_samples, split_batch
from torchrec_picasso.errors import CompatError, InputError

INTEGERS = st.sampled_from([torch.int32, torch.int64])

BAGS = {"a": [[1, 2], [], [3]], "b": [[4], [5, 6, 7], []]}
"""Three samples of two features."""


def variable_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int32),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0], [0, 1]])),
    )


@pytest.mark.parametrize(
    ("samples", "parts", "sizes"),
    [
        (4096, 4, [410, 1229, 1229, 1228]),
        (4096, 2, [2048, 2048]),
        (4096, 1, [4096]),
        (700, 3, [100, 300, 300]),
        (8, 4, [2, 2, 2, 2]),
        (7, 4, [7, 0, 0, 0]),
        (2, 4, [2, 0, 0, 0]),
        (0, 3, [0, 0, 0]),
    ],
)
def test_the_first_micro_batch_is_a_third_of_the_others_and_two_are_equal(
    samples: int, parts: int, sizes: list[int]
) -> None:
    assert micro_batch_sizes(samples, parts) == sizes


@pytest.mark.parametrize(
    ("samples", "parts", "message"),
    [(8, 0, "into 0 micro-batches"), (-1, 2, "cannot cut -1 samples")],
)
def test_impossible_sizes_are_refused(samples: int, parts: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        micro_batch_sizes(samples, parts)


@given(data=st.data(), sizes=sizes_of_parts, weighted=st.booleans(), ids=INTEGERS, lengths=INTEGERS)
def test_parts_of_a_kjt_are_those_built_from_lists(
    data: st.DataObject, sizes: list[int], weighted: bool, ids: torch.dtype, lengths: torch.dtype
) -> None:
    bags = data.draw(bags_of(sum(sizes)))
    parts = split_batch(kjt_of(bags, weighted, ids, lengths), sizes)
    starts = [0, *accumulate(sizes)]
    assert len(parts) == len(sizes)
    for part, start, end in zip(parts, starts, starts[1:]):
        cut_bags = {feature: bags_B[start:end] for feature, bags_B in bags.items()}
        assert_same(part, kjt_of(cut_bags, weighted, ids, lengths))


@given(data=st.data(), sizes=sizes_of_parts.filter(lambda sizes: len(sizes) > 1))
def test_a_kjt_of_offsets_is_cut_like_one_of_lengths(data: st.DataObject, sizes: list[int]) -> None:
    kjt = data.draw(kjts(sum(sizes)))
    with_offsets = KeyedJaggedTensor(
        kjt.keys(), kjt.values(), kjt.weights_or_none(), offsets=kjt.offsets(), stride=kjt.stride()
    )
    assert_same(split_batch(with_offsets, sizes), split_batch(kjt, sizes))


@given(data=st.data(), sizes=sizes_of_parts)
def test_parts_of_a_jagged_tensor_are_its_kjts(data: st.DataObject, sizes: list[int]) -> None:
    kjt = data.draw(kjts(sum(sizes)))
    feature = kjt.keys()[0]
    parts = split_batch({"jt": kjt[feature], "kjt": kjt}, sizes)
    for part in parts:
        assert_same(part["jt"], part["kjt"][feature])


def test_a_cut_kjt_can_be_split_by_keys_and_permuted() -> None:
    for part in split_batch(kjt_of(BAGS, weighted=True), [1, 2]):
        a, b = part.split([1, 1])
        assert_same(KeyedJaggedTensor.concat([a, b]), part)
        assert_same(part.permute([1, 0]).permute([1, 0]), part)


def test_the_number_of_operations_does_not_grow_with_the_samples() -> None:
    class Counter(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.count += 1
            return func(*args, **(kwargs or {}))

    def operations(samples: int) -> int:
        kjt = kjt_of({f"f{i}": [[i, i]] * samples for i in range(3)}, weighted=True)
        with Counter() as counter:
            split_batch(kjt, [samples // 4] * 4)
        return counter.count

    assert 0 < operations(8) == operations(400)


def test_weights_of_lookups_get_gradients_through_the_cut() -> None:
    kjt = kjt_of(BAGS, weighted=True)
    weights_N = kjt.weights().requires_grad_()
    first, second = split_batch(kjt, [1, 2])
    (first.weights().sum() + 3 * second.weights().sum()).backward()
    # ids 1, 2 | 3 of a, then 4 | 5, 6, 7 of b
    assert_same(weights_N.grad, torch.tensor([1.0, 1, 3, 1, 3, 3, 3]))


def test_a_kjt_without_features_goes_to_every_part() -> None:
    batch = Pair(KeyedJaggedTensor.empty(), torch.arange(3))
    parts = split_batch(batch, [1, 2])
    assert [part.left.keys() for part in parts] == [[], []]
    assert [part.left.stride() for part in parts] == [1, 2]


def test_a_variable_batch_is_refused() -> None:
    with pytest.raises(CompatError, match=r"batch\[0\]: .*variable batch.*split_batch="):
        split_batch([variable_batch()], [1, 1])


@pytest.mark.parametrize(
    ("kjt", "message"),
    [
        (
            KeyedJaggedTensor(["a"], torch.arange(5), lengths=torch.tensor([1, 2]), stride=2),
            "batch: 5 values, but its lengths sum to 3",
        ),
        (
            KeyedJaggedTensor(
                ["a"], torch.arange(3), torch.rand(2), lengths=torch.tensor([1, 2]), stride=2
            ),
            "batch: 2 weights, but its lengths sum to 3",
        ),
        (
            KeyedJaggedTensor(["a", "b"], torch.arange(3), lengths=torch.ones(3).int(), stride=2),
            "batch: 3 lengths, expected 2 features x 2 samples",
        ),
        (
            JaggedTensor(torch.arange(5), lengths=torch.tensor([1, 2])),
            "batch: 5 values, but its lengths sum to 3",
        ),
    ],
)
def test_a_malformed_jagged_tensor_is_refused(kjt: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_batch(kjt, [1, 1])


def test_torchrec_batches_are_cut_and_dense_parts_are_views() -> None:
    batch = Batch(torch.arange(12.0).view(3, 4), kjt_of(BAGS), torch.tensor([0, 1, 1]))
    first, second = split_batch(batch, [1, 2])
    assert isinstance(first, Batch)
    assert_same(second.sparse_features, kjt_of({"a": [[], [3]], "b": [[5, 6, 7], []]}))
    assert_same(second.labels, torch.tensor([1, 1]))
    assert_same(second.dense_features, batch.dense_features[1:])
    assert second.dense_features.data_ptr() == batch.dense_features[1].data_ptr()
    assert first.labels.data_ptr() == batch.labels.data_ptr()


def test_things_without_samples_go_to_every_part_as_they_are() -> None:
    scale = torch.tensor(2.0)
    batch = (torch.arange(3), None, "name", 5, 2.5, True, scale, torch.float16)
    for part in split_batch(batch, [2, 1]):
        assert part[1:] == batch[1:]
        assert part[6] is scale


def test_containers_keep_their_type() -> None:
    by_name = defaultdict(list, ids=torch.arange(3))
    batch = Frozen(features=Pair([torch.arange(3)], (None,)), label=by_name)
    for part in split_batch(batch, [2, 1]):
        assert type(part) is Frozen
        assert type(part.features) is Pair
        assert type(part.features.left) is list
        assert part.label["unknown"] == []


def test_one_micro_batch_is_the_batch_itself() -> None:
    for batch in (torch.arange(3), variable_batch(), object()):
        (part,) = split_batch(batch, [3])
        assert part is batch


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            Batch(torch.rand(5, 2), kjt_of(BAGS), torch.rand(3)),
            r"batch\.dense_features: 5 samples, expected 3",
        ),
        ({"x": [torch.rand(3), torch.rand(4)]}, r"batch\['x'\]\[1\]: 4 samples, expected 3"),
        (Pair(torch.rand(3), (torch.rand(1),)), r"batch\.right\[0\]: 1 samples, expected 3"),
        (torch.rand(4), r"\[1, 2\] sum to 3, but the batch has 4 samples"),
    ],
)
def test_another_number_of_samples_is_refused_by_its_path(batch: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        split_batch(batch, [1, 2])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([torch.rand(3), object()], r"batch\[1\]: do not know how to cut object .*split_batch="),
        ({"s": torch.eye(3).to_sparse()}, r"batch\['s'\]: tensor of layout torch.sparse_coo"),
        (KeyedTensor(["x"], [3], torch.rand(3, 2), key_dim=0), "batch: KeyedTensor with its keys"),
    ],
)
def test_unknown_types_and_layouts_are_refused_with_advice(batch: Any, message: str) -> None:
    with pytest.raises(CompatError, match=message):
        split_batch(batch, [1, 2])


def test_a_dataclass_that_cannot_be_rebuilt_is_refused_with_advice() -> None:
    @dataclasses.dataclass
    class Picky:
        ids: torch.Tensor

        def __post_init__(self) -> None:
            if len(self.ids) != 3:
                raise ValueError("three samples only")

    with pytest.raises(CompatError, match=r"constructor of Picky .*three samples only.*split_b"):
        split_batch(Picky(torch.arange(3)), [1, 2])


@pytest.mark.parametrize("sizes", [[], [4, -1]])
def test_sizes_below_zero_or_none_at_all_are_refused(sizes: list[int]) -> None:
    with pytest.raises(InputError, match="expected one or more, none below 0"):
        split_batch(torch.rand(3), sizes)


def test_the_number_of_samples_is_that_of_the_first_kjt_else_of_the_first_tensor() -> None:
    assert num_samples([torch.rand(5), kjt_of(BAGS)]) == 3
    assert num_samples([torch.tensor(1.0), "name", torch.rand(5)]) == 5
    assert num_samples(variable_batch()) == 2


def test_the_number_of_samples_of_an_unknown_type_is_read_off_its_attributes() -> None:
    class Custom:
        def __init__(self) -> None:
            self.meta = torch.rand(7)
            self.features = [kjt_of(BAGS)]

    assert num_samples(Custom()) == 3


def test_a_batch_without_samples_has_no_number() -> None:
    message = "tuple without a tensor or KeyedJaggedTensor.*unknown.*split_batch="
    with pytest.raises(InputError, match=message):
        num_samples((1, None, torch.tensor(3)))
    assert split_batch((1, None), [3, 4]) == [(1, None), (1, None)]


class _Labels(dict):  # a container that takes attributes too
    pass


class _Pair(Pair):
    pass


@dataclasses.dataclass
class _Derived:
    labels: torch.Tensor
    total: torch.Tensor = dataclasses.field(init=False)
    features: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.labels.sum().view(1)  # one number, however many samples
        self.features = kjt_of({"f": [[int(label)] for label in self.labels]})
        self.doubled = self.labels * 2
        self.array = self.labels.numpy()

    @functools.cached_property
    def count(self) -> int:
        return len(self.labels)


@pytest.mark.parametrize(
    "batch",
    [
        Open(torch.arange(5)),
        Frozen(torch.arange(5), None),
        _Labels(x=torch.arange(5)),
        _Pair(torch.arange(5), 1),
    ],
)
def test_attributes_that_were_assigned_are_cut_as_fields_are(batch: Any) -> None:
    weights, owners = torch.rand(5), kjt_of({"owner": [[1], [], [2, 3], [4], [5]]})
    for name, value in {"weights": weights, "more": [owners, "name"]}.items():
        object.__setattr__(batch, name, value)
    parts = split_batch(batch, [2, 3])
    assert [type(part) for part in parts] == [type(batch)] * 2
    assert torch.equal(torch.cat([part.weights for part in parts]), weights)
    assert [part.more[0].stride() for part in parts] == [2, 3]
    assert parts[1].more[1] == "name"
    assert torch.equal(copy_batch(batch).weights, weights)
    assert torch.equal(join_outputs(parts, [2, 3]).weights, weights)
    batch.__dict__["more"] = np.zeros(5)
    with pytest.raises(CompatError, match=r"batch\.more: do not know how to cut ndarray"):
        split_batch(batch, [2, 3])


def test_what_a_constructor_makes_is_made_again_unless_somebody_changed_it() -> None:
    batch = _Derived(torch.arange(4))
    assert batch.count == 4
    first, second = split_batch(batch, [1, 3])
    assert (first.total, second.total) == (0, 6)
    assert (first.count, second.count) == (1, 3)
    assert second.array.tolist() == [1, 2, 3]
    batch.doubled = torch.arange(10, 14)
    batch.features = kjt_of({"f": [[9]] * 4})
    first, second = split_batch(batch, [1, 3])
    assert second.doubled.tolist() == [11, 12, 13]
    assert second.features.values().tolist() == [9, 9, 9]
    assert (first.total, second.total) == (0, 6)


@given(st.integers(0, 3).flatmap(batches))
def test_a_copy_is_the_same_and_shares_nothing(batch: object) -> None:
    copied = copy_batch(batch)
    assert_same(copied, batch)
    assert not _memory(batch) & _memory(copied)


def _memory(value: object) -> set[int]:
    members = children_of(value)
    if members is not None:
        return {place for _, member in members for place in _memory(member)}
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.numel()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def test_what_cannot_be_copied_stays() -> None:
    lock = threading.Lock()
    assert copy_batch([lock]) == [lock]


NAN = torch.tensor(float("nan"))


@given(data=st.data(), sizes=sizes_of_parts)
def test_joining_parts_gives_the_batch(data: st.DataObject, sizes: list[int]) -> None:
    batch = {"ids": data.draw(kjts(sum(sizes))), "more": data.draw(batches(sum(sizes)))}
    parts = split_batch(batch, sizes)
    assert [num_samples(part) for part in parts] == sizes
    assert_same(join_outputs(parts, sizes), batch)


@given(data=st.data(), sizes=sizes_of_parts.filter(sum))
def test_mean_loss_and_gradients_are_the_batchs(data: st.DataObject, sizes: list[int]) -> None:
    torch.manual_seed(data.draw(st.integers(0, 999)))
    x_BD, y_B = torch.rand(sum(sizes), 3, dtype=torch.float64), torch.rand(sum(sizes)).double()
    layer = nn.Linear(3, 1, dtype=torch.float64)

    def outputs(part: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        logits_B = layer(part[0]).squeeze(1)
        return nn.functional.mse_loss(logits_B, part[1]), {"logits": logits_B.detach()}

    # an empty part has a loss of NaN here, as in training
    loss, rest = join_outputs([outputs(part) for part in split_batch([x_BD, y_B], sizes)], sizes)
    expected_loss, expected_rest = outputs([x_BD, y_B])
    torch.testing.assert_close(loss, expected_loss)  # float64: sums run in another order
    torch.testing.assert_close(rest, expected_rest)
    gradients = torch.autograd.grad(loss, list(layer.parameters()))
    expected = torch.autograd.grad(expected_loss, list(layer.parameters()))
    torch.testing.assert_close(gradients, expected)


def test_half_precision_losses_are_averaged_in_float32() -> None:
    outputs = [torch.tensor(value, dtype=torch.float16) for value in (1000, 1001, 1003)]
    # 1001.33 rounds to 1001.5; terms rounded to float16 first would sum to 1001.25, that is 1001
    assert_same(join_outputs(outputs, [1, 1, 1]), torch.tensor(1001.5, dtype=torch.float16))


def test_a_loss_of_nan_counts_only_where_there_are_samples() -> None:
    loss = torch.tensor(2.0)
    assert_same(join_outputs([loss, NAN, loss], [1, 0, 3]), loss)
    assert join_outputs([loss, NAN], [1, 1]).isnan()


def test_an_empty_part_may_give_anything() -> None:
    assert_same(
        join_outputs([torch.arange(2), None, torch.arange(1)], [2, 0, 1]), torch.tensor([0, 1, 0])
    )


def test_the_output_of_an_empty_batch_is_that_of_its_first_part() -> None:
    first = (NAN, torch.zeros(0, 2))
    assert join_outputs([first, (NAN, torch.zeros(0, 2))], [0, 0]) is first


def test_the_output_of_one_micro_batch_is_given_back_as_it_is() -> None:
    output = object()
    assert join_outputs([output], [3]) is output
    assert join_outputs([None, output], [0, 3]) is output


def test_awaitable_outputs_are_awaited() -> None:
    assert_same(
        join_outputs([NoWait(torch.ones(1)), NoWait(torch.zeros(2))], [1, 2]),
        torch.tensor([1.0, 0, 0]),
    )


def test_a_tensor_that_all_parts_share_stays() -> None:
    temperature, bias = torch.tensor(0.7), torch.rand(5)
    outputs = [(temperature, bias, torch.ones(size)) for size in (1, 2)]
    joined = join_outputs(outputs, [1, 2])
    assert joined[0] is temperature
    assert joined[1] is bias


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ((torch.rand(3, 2), torch.rand(2, 2)), r"output: .*\(3, 2\) torch.float32 for 1 samples"),
        ((torch.rand(1, 2), torch.rand(2, 3)), r"output: .*\(2, 3\) torch.float32 for 2 samples"),
        ((torch.tensor(1), torch.tensor(1)), r"output: .*\(\) torch.int64"),
        (([torch.rand(())], [torch.rand(2)]), r"output\[0\]: .*\(\) torch.float32 for 1 samples"),
        (({"n": 1}, {"n": 2}), r"output\['n'\]: .*different values \(1, 2\)"),
        (({"n": 1}, {"m": 1}), r"output: .*different members \(\['n'\] and \['m'\]\)"),
        (((1,), (1, 1)), r"output: .*different members"),
        ((Open(1), Open(1.0)), r"output\.features: .*different types \(int, float\)"),
        ((None, torch.rand(2)), r"output: .*different types \(NoneType, Tensor\)"),
        ((Pair(1, object()), Pair(1, object())), r"output\.right: do not know how to join object"),
        (
            (kjt_of({"a": [[1]]}), kjt_of({"b": [[1], [2]]})),
            "output: expected KeyedJaggedTensors of the same keys",
        ),
        (
            (kjt_of({"a": [[1]]}), kjt_of({"a": [[1]]})),
            r"output: .*jagged tensors of \[1, 1\] samples, expected \[1, 2\]",
        ),
        (
            (kjt_of({"a": [[1]]}), kjt_of({"a": [[1], []]}, weighted=True)),
            "output: some micro-batches gave weights",
        ),
        (
            (
                JaggedTensor(torch.rand(2), lengths=torch.tensor([1, 1])),
                JaggedTensor(torch.rand(2), lengths=torch.tensor([1, 1])),
            ),
            r"output: .*jagged tensors of \[2, 2\] samples, expected \[1, 2\]",
        ),
        (
            (KeyedTensor(["x"], [2], torch.rand(1, 2)), KeyedTensor(["y"], [2], torch.rand(2, 2))),
            "output: expected KeyedTensors of the same keys",
        ),
        (
            (KeyedTensor(["x"], [2], torch.rand(1, 2)), KeyedTensor(["x"], [2], torch.rand(1, 2))),
            r"output\.values\(\): .*\(1, 2\) torch.float32 for 2 samples",
        ),
    ],
)
def test_what_cannot_be_joined_is_refused_by_path(outputs: tuple[Any, Any], message: str) -> None:
    with pytest.raises(CompatError, match=rf"{message}.*join_outputs="):
        join_outputs(outputs, [1, 2])


@pytest.mark.parametrize(("outputs", "sizes"), [([], []), ([torch.rand(1)], [1, 2])])
def test_every_output_needs_a_size(outputs: list[torch.Tensor], sizes: list[int]) -> None:
    with pytest.raises(InputError, match="expected one for each"):
        join_outputs(outputs, sizes)
