"""DIEN: a GRU over the history, then a GRU whose update gate is scaled by attention to the target.

Source: Zhou et al., Deep Interest Evolution Network (arXiv 1809.03672), section 4.

Shape letters: B samples, D embedding columns, H hidden units, N clicks of all samples, T positions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroups, Found, Reads
from torchrec_picasso.app.zoo.layers import mask_of, padded, tower


class InterestAttention(nn.Module):
    """Softmax attention of a target over the positions of a history, equation 14.

    Args:
        hidden_size: Columns H of the states.
        dim: Columns D of the target.
    """

    def __init__(self, hidden_size: int, dim: int) -> None:
        super().__init__()
        self.fit = nn.Linear(dim, hidden_size, bias=False)

    def forward(self, states_BTH: Tensor, target_BD: Tensor, is_there_BT: Tensor) -> Tensor:
        """Returns the weights, shape ``(B, T)``, zero at positions that ``is_there_BT`` excludes.

        Args:
            states_BTH: Shape ``(B, T, H)``.
            target_BD: Shape ``(B, D)``.
            is_there_BT: Positions of the history, bool, shape ``(B, T)``.
        """
        scores_BT = torch.einsum("bth,bh->bt", states_BTH, self.fit(target_BD))
        lowest = torch.finfo(scores_BT.dtype).min
        return scores_BT.masked_fill(~is_there_BT, lowest).softmax(dim=1) * is_there_BT


class AUGRU(nn.Module):
    """GRU whose update gate is scaled by attention, equations 14 to 16.

    Args:
        in_size: Columns of the input.
        hidden_size: Columns H of the state.
    """

    def __init__(self, in_size: int, hidden_size: int) -> None:
        super().__init__()
        self._hidden_size = hidden_size
        self.from_input = nn.Linear(in_size, 3 * hidden_size)
        self.gates_from_state = nn.Linear(hidden_size, 2 * hidden_size)
        self.new_from_state = nn.Linear(hidden_size, hidden_size)

    def forward(self, inputs_BTD: Tensor, weights_BT: Tensor) -> Tensor:
        """Returns the last state, shape ``(B, H)``; zero for an empty sequence.

        Args:
            inputs_BTD: Shape ``(B, T, D)``.
            weights_BT: Scale of the update gate, shape ``(B, T)``; 0 keeps the state.
        """
        size = self._hidden_size
        input_BTX = self.from_input(inputs_BTD)  # X = 3 H: update gate, reset gate, new state
        state_BH = inputs_BTD.new_zeros(inputs_BTD.size(0), size)
        for input_BX, weight_B in zip(input_BTX.unbind(1), weights_BT.unbind(1)):
            gates = input_BX[:, : 2 * size] + self.gates_from_state(state_BH)
            update_BH, reset_BH = gates.sigmoid().split(size, dim=1)
            new_BH = torch.tanh(input_BX[:, 2 * size :] + self.new_from_state(reset_BH * state_BH))
            update_BH = weight_B[:, None] * update_BH
            state_BH = state_BH + update_BH * (new_BH - state_BH)
        return state_BH


class AuxiliaryLoss(nn.Module):
    """Cross-entropy of a click against a negative, given the state before it; equation 5.

    The published code averages over positions up to the longest history of the batch. Here the sum
    of a sample is divided by a fixed number of positions, and the loss is the mean over samples, so
    micro-batches give the same loss as the batch.

    Args:
        hidden_size: Columns H of the states.
        dim: Columns D of the items.
        hidden: Units of the classifier's layers.
    """

    def __init__(self, hidden_size: int, dim: int, hidden: Sequence[int] = (100, 50)) -> None:
        super().__init__()
        self.classifier = tower(hidden_size + dim, hidden, 1, "sigmoid")

    def forward(self, states_BTH: Tensor, clicks: JaggedTensor, negatives_ND: Tensor) -> Tensor:
        """Returns the loss, a scalar.

        Args:
            states_BTH: State after each click, shape ``(B, T, H)``; clicks from T on are ignored.
            clicks: Embeddings of the clicks, ``(N, D)`` in B lists.
            negatives_ND: Embedding of an item that was not clicked, for each click.
        """
        (num_samples, max_length, _), clicks_ND = states_BTH.shape, clicks.values()
        offsets, num_clicks = clicks.offsets().long(), clicks_ND.size(0)
        before_BTH = nn.functional.pad(states_BTH, (0, 0, 1, 0))[:, :-1]
        before_NH, _ = torch.ops.fbgemm.dense_to_jagged(before_BTH, [offsets], num_clicks)
        starts_N = torch.repeat_interleave(offsets[:-1], clicks.lengths(), output_size=num_clicks)
        position_N = torch.arange(num_clicks, device=offsets.device) - starts_N
        # A first click has no state before it.
        is_used_N = (position_N > 0) & (position_N < max_length)
        loss_N = torch.zeros((), device=states_BTH.device)
        for items_ND, sign in ((clicks_ND, -1.0), (negatives_ND, 1.0)):
            logits_N = self.classifier(torch.cat([before_NH, items_ND], dim=1)).squeeze(1)
            loss_N = loss_N + nn.functional.softplus(sign * logits_N)
        return (loss_N * is_used_N).sum() / (max_length * num_samples)


class DIEN(nn.Module):
    """Reads ``target``, ``history`` and ``negatives`` from the same tables, and ``profile``.

    The columns of a click are concatenated. Negatives hold an item that was not clicked for each
    click of the history.

    Args:
        hidden_size: Columns of the GRUs' states.
        auxiliary_weight: Factor on the auxiliary loss.
    """

    reads: ClassVar[Mapping[str, Reads]] = {
        "target": Reads("target"),
        "history": Reads("history", SEQUENCE, tables_of="target"),
        "negatives": Reads("negatives", SEQUENCE, tables_of="target"),
        "profile": Reads("profile"),
    }

    def __init__(
        self,
        embeddings: FeatureGroups,
        num_dense: int,
        hidden_size: int = 32,
        hidden: Sequence[int] = (200, 80),
        auxiliary_weight: float = 1.0,
        activation: str = "prelu",
    ) -> None:
        super().__init__()
        self.max_length = embeddings.groups["history"].max_length
        self.auxiliary_weight = auxiliary_weight
        dim = sum(embeddings.dims("target"))
        self.extract = nn.GRU(dim, hidden_size, batch_first=True)
        self.auxiliary = AuxiliaryLoss(hidden_size, dim)
        self.attend = InterestAttention(hidden_size, dim)
        self.evolve = AUGRU(hidden_size, hidden_size)
        width = num_dense + 3 * dim + hidden_size + sum(embeddings.dims("profile"))
        self.over_arch = tower(width, hidden, 1, activation)

    def forward(self, found: Found, dense_BI: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits, shape ``(B,)``, and the weighted auxiliary loss."""
        target_BD = torch.cat(found["target"], dim=1)
        history, negatives = (
            JaggedTensor(
                torch.cat([column.values() for column in found[name]], dim=1),
                lengths=found[name][0].lengths(),
            )
            for name in ("history", "negatives")
        )
        clicks, is_there = padded(history, self.max_length), mask_of(history, self.max_length)
        states, _ = self.extract(clicks)
        auxiliary = self.auxiliary(states, history, negatives.values())
        evolved = self.evolve(states, self.attend(states, target_BD, is_there))
        summed_BD = clicks.sum(dim=1)
        parts = [dense_BI, target_BD, summed_BD, target_BD * summed_BD, evolved, *found["profile"]]
        logits_B: Tensor = self.over_arch(torch.cat(parts, dim=1)).squeeze(1)
        return logits_B, self.auxiliary_weight * auxiliary
