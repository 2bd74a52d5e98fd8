"""Layers of the published models against the plain sums that their papers give."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.modules.deepfm import FactorizationMachine
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_picasso.app.zoo.layers import ACTIVATIONS, AttentionUnit, Dice, mask_of, padded, tower
from torchrec_picasso.app.zoo.models.can import CoAction
from torchrec_picasso.app.zoo.models.deepfm import factorization_machine
from torchrec_picasso.app.zoo.models.dhen import DHENLayer
from torchrec_picasso.app.zoo.models.dien import AUGRU, AuxiliaryLoss, InterestAttention
from torchrec_picasso.app.zoo.models.hstu import HSTULayer
from torchrec_picasso.app.zoo.models.mmoe import MixtureOfExperts
from torchrec_picasso.app.zoo.models.tbsm import TimeSeriesLayer
from torchrec_picasso.app.zoo.models.wukong import WukongLayer
from torchrec_picasso.batches.split import split_batch

B, D, H, T = 5, 4, 6, 7
LENGTHS = [3, 0, 7, 1, 9]  # none, all, and more than all positions


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def _histories(dim: int = D) -> JaggedTensor:
    return JaggedTensor(torch.randn(sum(LENGTHS), dim), lengths=torch.tensor(LENGTHS))


def _rows(histories: JaggedTensor, max_length: int = T) -> list[Tensor]:
    return [rows[:max_length] for rows in histories.to_dense()]


def _there() -> Tensor:
    return mask_of(_histories(), T)


def test_a_factorization_machine_is_the_sum_over_pairs() -> None:
    fields = torch.randn(B, 6, D)
    expected = sum(
        (fields[:, i] * fields[:, j]).sum(1) for i, j in itertools.combinations(range(6), 2)
    )
    torch.testing.assert_close(factorization_machine(fields), expected)
    others = FactorizationMachine()(list(fields.unbind(1))).squeeze(1)
    assert not torch.allclose(others, expected)  # TorchRec's formula differs


def test_dice_is_its_formula_and_is_known_to_mix_samples() -> None:
    dice = Dice(3)
    dice.slope_U.data.uniform_()
    values = torch.randn(B, 3)
    mean, variance = values.mean(0), values.var(0, unbiased=False)
    share = torch.sigmoid((values - mean) / torch.sqrt(variance + 1e-8))
    expected = share * values + (1 - share) * dice.slope_U * values
    torch.testing.assert_close(dice(values), expected)
    assert any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in dice.modules())


def test_padding_is_of_a_fixed_length() -> None:
    histories = _histories()
    dense, there = padded(histories, T), mask_of(histories, T)
    assert dense.shape == (B, T, D)
    assert there.sum(1).tolist() == [min(length, T) for length in LENGTHS]
    for row, mask, expected in zip(dense, there, _rows(histories)):
        torch.testing.assert_close(row[mask], expected)
        assert not row[~mask].any()


def test_an_attention_unit_is_a_loop_over_clicks() -> None:
    unit, target, histories = AttentionUnit(D, 8), torch.randn(B, D), _histories()
    expected = torch.stack(
        [
            sum(
                (unit.weigh(torch.cat([row, each, row * each])) * row for row in rows),
                start=torch.zeros(D),
            )
            for each, rows in zip(target, histories.to_dense())
        ]
    )
    torch.testing.assert_close(unit(target, histories), expected)


def test_an_augru_is_its_cell_in_a_loop() -> None:
    gru, weights = AUGRU(D, H), torch.rand(B, T)
    inputs = torch.randn(B, T, D)
    state = torch.zeros(B, H)
    for t in range(T):
        input_gates = gru.from_input(inputs[:, t])
        update, reset = torch.sigmoid(input_gates[:, : 2 * H] + gru.gates_from_state(state)).chunk(
            2, 1
        )
        new = torch.tanh(input_gates[:, 2 * H :] + gru.new_from_state(reset * state))
        scaled = weights[:, t : t + 1] * update
        state = (1 - scaled) * state + scaled * new
    torch.testing.assert_close(gru(inputs, weights), state)


def test_attention_of_interests_is_a_softmax_over_what_is_there() -> None:
    attention, states, target = InterestAttention(H, D), torch.randn(B, T, H), torch.randn(B, D)
    found = attention(states, target, _there())
    for each, state, wanted, length in zip(found, states, target, LENGTHS):
        there = min(length, T)
        expected = torch.softmax(state[:there] @ attention.fit(wanted), dim=0)
        torch.testing.assert_close(each[:there], expected)
        assert not each[there:].any()


def test_an_auxiliary_loss_is_a_sum_over_clicks_and_a_mean_over_samples() -> None:
    module = AuxiliaryLoss(H, D, (8,))
    states, clicks, negatives = torch.randn(B, T, H), _histories(), _histories()
    expected = torch.zeros(())
    for b, length in enumerate(LENGTHS):
        for t in range(min(length, T) - 1):
            for items, label in ((clicks, 1.0), (negatives, 0.0)):
                logit = module.classifier(torch.cat([states[b, t], items.to_dense()[b][t + 1]]))
                wanted = torch.full_like(logit, label)
                loss = nn.functional.binary_cross_entropy_with_logits(logit, wanted)
                expected = expected + loss / T / B
    found = module(states, clicks, negatives.values())
    torch.testing.assert_close(found, expected)
    cut = split_batch([states, clicks, negatives], [2, B - 2])
    halves = [module(each[0], each[1], each[2].values()) for each in cut]
    torch.testing.assert_close(halves[0] * 2 / B + halves[1] * (B - 2) / B, found)


def test_experts_are_weighed_by_each_tasks_gate() -> None:
    module, values = MixtureOfExperts(D, 3, (8, 3), num_tasks=2), torch.randn(B, D)
    for task, gate in zip(module(values), module.gates):
        weights = gate(values).softmax(1)
        expected = sum(weights[:, e : e + 1] * module.experts[e](values) for e in range(3))
        torch.testing.assert_close(task, expected)


def test_co_action_is_a_small_network_per_sample() -> None:
    module = CoAction((4, 3, 2), orders=2)
    assert module.num_weights == 4 * 3 + 3 * 2
    networks, read, there = torch.randn(B, module.num_weights), torch.randn(B, T, 4), _there()
    expected = torch.zeros(B, module.out_size)
    for b, t, order in itertools.product(range(B), range(T), (1, 2)):
        if not there[b, t]:
            continue
        values, start, outputs = read[b, t] ** order, 0, []
        for before, after in ((4, 3), (3, 2)):
            weight = networks[b, start : start + before * after].view(before, after)
            start += before * after
            values = torch.tanh(torch.einsum("i,io->o", values, weight))
            outputs.append(values)
        expected[b] += torch.cat(outputs)
    torch.testing.assert_close(module(networks, read, there), expected)


@pytest.mark.parametrize("in_fields", [5, 8])
def test_a_wukong_layer_is_its_formula(in_fields: int) -> None:
    layer = WukongLayer(in_fields, D, num_interacted=5, num_compressed=3, rank=2, hidden=(16,))
    fields = torch.randn(B, in_fields, D)
    for sample, found in zip(fields, layer(fields)):
        products = sample @ (sample.T @ layer.project.weight.T)
        flat = layer.norm_of_products(products.flatten()[None])
        interacted = layer.over_products(flat).view(5, D)
        compressed = layer.compress.weight @ sample
        passed = sample if in_fields == 8 else layer.residual.weight @ sample
        expected = layer.norm(torch.cat([interacted, compressed]) + passed)
        torch.testing.assert_close(found, expected)


def test_a_dhen_layer_treats_samples_alone() -> None:
    layer, fields = DHENLayer(6, 8, out_fields=4, num_heads=2), torch.randn(B, 6, 8)
    whole = layer(fields)
    assert whole.shape == (B, 8, 8)
    torch.testing.assert_close(whole, torch.cat([layer(one[None]) for one in fields]))
    attended, _ = layer.attention(fields, fields, fields)
    ensemble = torch.cat(
        [layer.compress_attended(attended.transpose(1, 2)), layer.linear(fields.transpose(1, 2))],
        dim=2,
    )
    expected = layer.norm((ensemble + layer.shortcut(fields.transpose(1, 2))).transpose(1, 2))
    torch.testing.assert_close(whole, expected)


def test_a_time_series_layer_weighs_by_cosines() -> None:
    layer, target, history = TimeSeriesLayer(T, (8,)), torch.randn(B, D), torch.randn(B, T, D)
    cosines = torch.cosine_similarity(history, target[:, None], dim=2)
    expected = (layer.weigh(cosines)[:, :, None] * history).sum(1)
    torch.testing.assert_close(layer(target, history), expected)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_a_tower_ends_in_a_linear_layer(activation: str) -> None:
    made: Any = tower(D, (8, 3), 2, activation, dropout=0.5)
    assert isinstance(made[-1], nn.Linear)
    assert made(torch.randn(B, D)).shape == (B, 2)
    assert sum(isinstance(layer, nn.Dropout) for layer in made) == 2
    assert tower(D, (8, 3), None)(torch.randn(B, D)).shape == (B, 3)


def test_an_hstu_layer_is_its_sum_over_pairs() -> None:
    heads, columns, longest = 2, 3, 6
    layer = HSTULayer(heads * columns, heads, longest)
    tokens = torch.randn(B, T, heads * columns)
    distance, bucket = torch.randint(longest + 2, (B, T, T)), torch.randint(32, (B, T, T))
    sees = torch.rand(B, T, T) < 0.5
    silu = nn.functional.silu
    u, v, q, k = silu(layer.project(layer.norm(tokens))).split(heads * columns, dim=2)
    summed = torch.zeros_like(v)
    for b, one, other, head in itertools.product(range(B), range(T), range(T), range(heads)):
        if sees[b, one, other]:
            own = slice(head * columns, (head + 1) * columns)
            score = q[b, one, own] @ k[b, other, own]
            score = score + layer.position_bias.weight[distance[b, one, other], head]
            score = score + layer.time_bias.weight[bucket[b, one, other], head]
            summed[b, one, own] += silu(score) / longest * v[b, other, own]
    expected = tokens + layer.out(layer.norm_attended(summed) * u)
    torch.testing.assert_close(layer(tokens, distance, bucket, sees), expected)
