"""Joining outputs: undoing a cut, averaging losses by size, and refusing to guess."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec import JaggedTensor, KeyedTensor
from torchrec.distributed.types import NoWait

from tests.train_pipeline.batches import Open, Pair, assert_same, batches, kjt_of, sizes_of_parts
from torchrec_picasso.batches.join import join_outputs
from torchrec_picasso.batches.split import split_batch
from torchrec_picasso.errors import CompatError, InputError

NAN = torch.tensor(float("nan"))


@given(data=st.data(), sizes=sizes_of_parts)
def test_joining_the_parts_of_a_batch_gives_the_batch(
    data: st.DataObject, sizes: list[int]
) -> None:
    batch = data.draw(batches(sum(sizes)))
    assert_same(join_outputs(split_batch(batch, sizes), sizes), batch)


@given(data=st.data(), sizes=sizes_of_parts.filter(sum))
def test_a_mean_loss_and_its_gradients_are_those_of_the_whole_batch(
    data: st.DataObject, sizes: list[int]
) -> None:
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
def test_what_cannot_be_joined_is_refused_by_its_path_with_advice(
    outputs: tuple[Any, Any], message: str
) -> None:
    with pytest.raises(CompatError, match=rf"{message}.*join_outputs="):
        join_outputs(outputs, [1, 2])


@pytest.mark.parametrize(("outputs", "sizes"), [([], []), ([torch.rand(1)], [1, 2])])
def test_every_output_needs_a_size(outputs: list[torch.Tensor], sizes: list[int]) -> None:
    with pytest.raises(InputError, match="expected one for each"):
        join_outputs(outputs, sizes)
