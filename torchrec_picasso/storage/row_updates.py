"""Updates of rows in host memory: by FBGEMM's kernels, or by torch operators with their state.

FBGEMM has CPU kernels for SGD, Adagrad and row-wise Adagrad, which :class:`UpdateKernel` calls. Its
row-wise Adagrad takes 0.7 to 1.1 us per distinct row on Intel's processors, for 8 as well as 64
columns, because its generated code mixes SSE with AVX instructions. A sort, a segmented sum and a
few operators over all rows take a quarter to a half of that, also in float32; only the order of the
sums of squares differs. On an EPYC without AVX-512 they take half to three quarters of FBGEMM's 0.4
us up to 64 columns, and as long for 128.

Adam, LAMB and their partial row-wise kinds exist on the CPU only here. The TBE of such a pack is
created for SGD, which keeps no state; the state is stored beside the TBE, with the names, shapes
and types of FBGEMM's state on a GPU.

    m = beta1 m + (1 - beta1) g         v = beta2 v + (1 - beta2) g^2
    u = m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps) + decay w
    Adam: w -= lr u                     LAMB: w -= lr |w| / |u| u

t counts steps of the optimizer, not of a row; a row that is not looked up keeps m, v and w. The
partial row-wise kinds keep one v per row, from the mean of g^2. LAMB's norms are norms of one row;
if u is zero in all columns, LAMB gives NaN, as in FBGEMM.

A separate call updates the replicas. The shapes of that call are equal on all ranks, so the
operators sum in the same order on all ranks and replicas stay bitwise identical.

Source: Duchi et al., Adaptive Subgradient Methods (JMLR 2011), with one accumulator per row; Kingma
and Ba, Adam (ICLR 2015), with the decay of Loshchilov and Hutter (ICLR 2019); You et al., Large
Batch Optimization (ICLR 2020); as in FBGEMM's ``codegen/genscript/optimizers.py``.

Shape letters: D dim, R rows of a matrix, U unique rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import DataType

from torchrec_picasso._torchrec import EmbOptimType, SplitTableBatchedEmbeddingBagsCodegen
from torchrec_picasso.ops.sorts import is_intel


@dataclass(frozen=True, kw_only=True)
class UpdateStep:
    """The numbers of one step of a fused optimizer, rounded to float32, as kernel arguments are.

    ``number`` counts steps from 1. Adam and LAMB add ``weight_decay`` times the weight to their
    update.
    """

    number: int
    learning_rate: float
    eps: float
    beta1: float
    beta2: float
    weight_decay: float

    @staticmethod
    def begin(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> UpdateStep:
        """Counts a step, and reads the TBE's current hyperparameters."""
        _count_step(tbe)
        # Hyperparameters are read in every step, because a scheduler may change them.
        args = tbe.optimizer_args
        return UpdateStep(
            number=int(tbe.iter_cpu),
            learning_rate=tbe.get_learning_rate(),
            **{
                name: float(np.float32(getattr(args, name)))
                for name in ("eps", "beta1", "beta2", "weight_decay")
            },
        )


def _count_step(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> None:
    """Counts a step as the TBE's forward does."""
    if tbe.iter_cpu.item() == 0:  # ``set_optimizer_step`` writes ``iter`` only
        tbe.iter_cpu.copy_(tbe.iter)
    tbe.iter_cpu.add_(1)
    tbe.iter.add_(1)


RowUpdate = Callable[[UpdateStep, Tensor, Sequence[Tensor], Tensor, Tensor], None]
"""An optimizer: updates rows of a matrix in place, by the numbers of this step.

After the step its arguments are the weights ``(R, D)``; the states in FBGEMM's order, shape
``(R, D)`` or ``(R,)`` each; the distinct numbers of the updated rows, int64, shape ``(U,)``; and
their gradients ``(U, D)``, which may be overwritten. All but the numbers are float32."""


def row_wise_adagrad(
    step: UpdateStep, weights_RD: Tensor, states: Sequence[Tensor], rows_U: Tensor, grads_UD: Tensor
) -> None:
    """``sum += mean(g^2)``, ``w -= lr g / (sqrt(sum) + eps)``; no decay. A ``RowUpdate``."""
    (sums_R,) = states
    norm_U = torch.linalg.vector_norm(grads_UD, dim=1)
    before_U = sums_R.index_select(0, rows_U)
    # mean(g^2) = |g|^2 / D, shape (U,).
    sums_U = torch.addcmul(before_U, norm_U, norm_U, value=1 / grads_UD.size(1))
    sums_R.index_copy_(0, rows_U, sums_U)
    # -lr / (sqrt(sum) + eps), in place of the sums, which are already copied back.
    scale_U = sums_U.sqrt_().add_(step.eps).reciprocal_().mul_(-step.learning_rate)
    steps_UD = grads_UD.mul_(scale_U.unsqueeze(1))
    weights_RD.scatter_add_(0, rows_U.unsqueeze(1).expand_as(steps_UD), steps_UD)


def _adam(
    step: UpdateStep,
    weights_RD: Tensor,
    states: Sequence[Tensor],
    rows_U: Tensor,
    grads_UD: Tensor,
    *,
    is_lamb: bool = False,
) -> None:
    """Adam or LAMB, partial row-wise if the second state has one value per row. A ``RowUpdate``."""
    weights_UD = weights_RD.index_select(0, rows_U)
    steps_UD = _adam_steps(step, weights_UD, states, rows_U, grads_UD)
    if is_lamb:
        weight_norms_U1 = torch.linalg.vector_norm(weights_UD, dim=1, keepdim=True)
        step_norms_U1 = torch.linalg.vector_norm(steps_UD, dim=1, keepdim=True)
        # (U, 1) scales every column of a row by |w| / |u|.
        steps_UD.mul_(weight_norms_U1.div_(step_norms_U1))
    weights_UD.add_(steps_UD, alpha=-step.learning_rate)
    weights_RD.index_copy_(0, rows_U, weights_UD)


def _adam_steps(
    step: UpdateStep, weights_UD: Tensor, states: Sequence[Tensor], rows_U: Tensor, grads_UD: Tensor
) -> Tensor:
    """Updates both states; returns u, shape ``(U, D)``, for rows of the given weights."""
    means_RD, squares = states
    means_UD = means_RD.index_select(0, rows_U).mul_(step.beta1)
    means_UD.add_(grads_UD, alpha=1 - step.beta1)
    # Rows are distinct, so a copy back is exact; rows that were not looked up are not touched.
    means_RD.index_copy_(0, rows_U, means_UD)
    # The state of squares has one value per row, shape (R,), or per weight, shape (R, D).
    new_squares = grads_UD.square().mean(1) if squares.dim() == 1 else grads_UD.square_()
    new_squares.mul_(1 - step.beta2)
    new_squares.add_(squares.index_select(0, rows_U), alpha=step.beta2)
    squares.index_copy_(0, rows_U, new_squares)
    root = new_squares.div_(_bias_correction(step.beta2, step.number)).sqrt_().add_(step.eps)
    root = root.unsqueeze(1) if root.dim() == 1 else root  # (U, 1) divides every column of a row
    steps_UD = means_UD.div_(_bias_correction(step.beta1, step.number)).div_(root)
    return steps_UD.add_(weights_UD, alpha=step.weight_decay)


def _bias_correction(beta: float, number: int) -> float:
    """``1 - beta^t``, the power rounded to float32 as by FBGEMM's ``powf``."""
    return 1 - float(torch.tensor(beta, dtype=torch.float32) ** number)


_lamb = partial(_adam, is_lamb=True)

ONLY_HERE: Mapping[EmbOptimType, RowUpdate] = {
    **dict.fromkeys([EmbOptimType.ADAM, EmbOptimType.PARTIAL_ROWWISE_ADAM], _adam),
    **dict.fromkeys([EmbOptimType.LAMB, EmbOptimType.PARTIAL_ROWWISE_LAMB], _lamb),
}
"""Optimizers without a CPU kernel in FBGEMM."""

PARTIAL_ROW_WISE = (EmbOptimType.PARTIAL_ROWWISE_ADAM, EmbOptimType.PARTIAL_ROWWISE_LAMB)
"""Optimizers whose second state has one value per row."""

_KERNELS: Mapping[EmbOptimType, str] = {
    EmbOptimType.EXACT_SGD: "split_embedding_backward_codegen_sgd_cpu",
    EmbOptimType.EXACT_ADAGRAD: "split_embedding_backward_codegen_adagrad_cpu",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "split_embedding_backward_codegen_rowwise_adagrad_cpu",
}
"""Operators of FBGEMM that update rows on the CPU."""

_GIVEN = {
    *("grad_output", "host_weights", "pooling_mode"),
    *("indices", "offsets", "indice_weights"),
}
"""Arguments of these operators that are no attributes of a TBE or of its ``optimizer_args``."""

_PLAIN = {
    "gradient_clipping": False,
    "max_norm": 0.0,
    "weight_decay": 0.0,
    "counter_based_regularization": None,
    "cowclip_regularization": None,
    "ensemble_mode": None,
    "emainplace_mode": None,
    "global_weight_decay": None,
    "extra_optimizer_config": None,
    "optimizer_state_dtypes": None,
}
"""TBE arguments that modify an update, with the values that disable the modification."""


def row_update(
    fused_params: Mapping[str, Any], *, data_type: DataType, is_on_host: bool, has_replicas: bool
) -> RowUpdate | None:
    """Returns the update of a pack with torch operators, from its TBE arguments of FBGEMM types.

    ``None`` if FBGEMM updates: another optimizer, memory or type of weights, an argument that
    modifies the update, or a processor on which FBGEMM's kernel is faster.
    """
    optimizer = fused_params.get("optimizer")
    if not is_on_host or data_type != DataType.FP32:
        return None
    if optimizer != EmbOptimType.EXACT_ROWWISE_ADAGRAD:
        return ONLY_HERE.get(optimizer) if optimizer is not None else None
    if any(fused_params.get(name, plain) != plain for name, plain in _PLAIN.items()):
        return None
    # Replicas are updated on all ranks: by the same operators, whatever processor a rank has.
    return row_wise_adagrad if has_replicas or torch_is_faster() else None


@cache
def torch_is_faster() -> bool:
    """Whether torch's operators update rows by row-wise Adagrad faster than FBGEMM's kernel: so on
    Intel's processors and on others without AVX-512 (docs/decisions/cpu_updates.md)."""
    return is_intel() or torch.backends.cpu.get_cpu_capability() != "AVX512"


class UpdateKernel:
    """The CPU kernel that a TBE calls in backward to update rows, without the forward before it.

    A TBE looks rows up before it updates them, into an output that nobody reads here: a tenth to a
    quarter of the time, and more than half for 600 rows. The kernel's other arguments are read from
    the TBE in each call, because a scheduler may change the learning rate.
    """

    def __init__(
        self,
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        kernel: Any,
        *,
        tbe_names: Sequence[str],
        optimizer_names: Sequence[str],
    ) -> None:
        self._tbe, self._kernel = tbe, kernel
        self._tbe_names, self._optimizer_names = tbe_names, optimizer_names

    @staticmethod
    def find(
        tbe: SplitTableBatchedEmbeddingBagsCodegen, fused_params: Mapping[str, Any]
    ) -> UpdateKernel | None:
        """Returns the kernel of a TBE that was made with these arguments; ``None`` if its update is
        more than a call of a CPU kernel, or FBGEMM's kernel has an argument that is not known."""
        is_plain = all(fused_params.get(name, plain) == plain for name, plain in _PLAIN.items())
        operator = _KERNELS.get(tbe.optimizer)
        kernel = getattr(torch.ops.fbgemm, operator, None) if operator is not None else None
        if not (tbe.use_cpu and is_plain and kernel is not None):
            return None
        names = {argument.name for argument in kernel.default._schema.arguments} - _GIVEN
        optimizer_names = {name for name in names if hasattr(tbe.optimizer_args, name)}
        tbe_names = names - optimizer_names
        if not all(hasattr(tbe, name) for name in tbe_names):
            return None
        return UpdateKernel(
            tbe,
            kernel.default,
            tbe_names=sorted(tbe_names),
            optimizer_names=sorted(optimizer_names),
        )

    def __call__(
        self, rows_N: Tensor, offsets_S1: Tensor, weights_N: Tensor | None, grads_SD: Tensor
    ) -> None:
        """Updates rows by the gradients of their bags, and counts a step.

        Args:
            rows_N: Row of each lookup, int64; gradients of a repeated row are summed first.
            offsets_S1: First lookup of each bag, and N, int64.
            weights_N: Weights of the lookups, float32; ``None`` = ones.
            grads_SD: Gradients of the bags, float32.
        """
        tbe = self._tbe
        if tbe.optimizer == EmbOptimType.EXACT_ROWWISE_ADAGRAD:  # the others count none
            _count_step(tbe)
        self._kernel(
            grad_output=grads_SD,
            host_weights=tbe.weights_host,
            pooling_mode=int(tbe.pooling_mode),
            indices=rows_N,
            offsets=offsets_S1,
            indice_weights=weights_N,
            **{name: getattr(tbe.optimizer_args, name) for name in self._optimizer_names},
            **{name: getattr(tbe, name) for name in self._tbe_names},
        )


def new_states(
    optimizer: EmbOptimType, num_rows: int, dim: int, device: torch.device
) -> dict[str, Tensor]:
    """Returns the initial state of a table, for an optimizer of :data:`ONLY_HERE`. State tensors
    have FBGEMM's names; float32, shape ``(num_rows, dim)`` or ``(num_rows,)``."""
    squares_shape = (num_rows,) if optimizer in PARTIAL_ROW_WISE else (num_rows, dim)
    return {
        "exp_avg": torch.zeros(num_rows, dim, device=device),
        "exp_avg_sq": torch.zeros(squares_shape, device=device),
    }
