"""The embedding part of a step alone, timed by phase, for calibration.

A sharded collection of tables gets ready batches and a fixed gradient of its output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedTensor, ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from torchrec_picasso.app.runs.placements import Placement

_LEARNING_RATE = 0.01
_POOLED: Any = EmbeddingBagCollection, EmbeddingBagConfig
_SEQUENCES: Any = EmbeddingCollection, EmbeddingConfig


def table_collection(
    rows_T: Sequence[int], dims_T: Sequence[int], *, is_sequence: bool = False
) -> nn.Module:
    """Tables ``t_c1, t_c2, ...`` on the meta device, one feature each, with row-wise Adagrad and
    rows of zeros, that pool their rows or return those of sequences."""
    collection_type, config_type = _SEQUENCES if is_sequence else _POOLED
    collection: nn.Module = collection_type(
        tables=[
            config_type(
                name=f"t_c{index + 1}",
                embedding_dim=dim,
                num_embeddings=rows,
                feature_names=[f"c{index + 1}"],
                init_fn=nn.init.zeros_,  # several times faster than random numbers
            )
            for index, (rows, dim) in enumerate(zip(rows_T, dims_T))
        ],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": _LEARNING_RATE})
    return collection


def make_batch(ids_TBL: Tensor) -> KeyedJaggedTensor:
    """A batch with L ids per sample and feature ``c1, c2, ...``, from int64 ids ``(T, B, L)``."""
    num_tables, batch_size, num_ids = ids_TBL.shape
    return KeyedJaggedTensor.from_lengths_sync(
        keys=[f"c{index + 1}" for index in range(num_tables)],
        values=ids_TBL.reshape(-1),
        lengths=torch.full((num_tables * batch_size,), num_ids, dtype=torch.int32),
    )


class ExchangeStep:
    """A sharded collection of tables whose steps are timed phase by phase.

    Collective: every rank of ``pg`` makes one and runs its steps, in the same order.

    Args:
        collection: Unsharded tables.
        placement: Plan and sharders.
        pg: Process group.
        device: Device of the tables.
        clock: Timer in seconds; ``time.thread_time`` excludes waiting for the network.
    """

    def __init__(
        self,
        collection: nn.Module,
        placement: Placement,
        pg: dist.ProcessGroup,
        device: torch.device,
        clock: Callable[[], float],
    ) -> None:
        self._device, self._clock = device, clock
        self._module: Any = DistributedModelParallel(
            module=collection,
            env=ShardingEnv.from_process_group(pg),
            device=self._device,
            plan=placement.plan,
            sharders=placement.sharders,
        ).module
        self._grads: list[Tensor] = []
        for state in local_tensors(self._module.fused_optimizer.state_dict()["state"]):
            state.mul_(1)  # page in the memory, which would slow the first steps

    def run(self, batch: KeyedJaggedTensor) -> list[float]:
        """Takes one step on this rank's batch; returns the ms of each of ``PHASES``. Collective."""
        started_s = self._now_s()
        ctx = self._module.create_context()
        dist_input = self._module.input_dist(ctx, batch).wait().wait()
        received_s = self._now_s()
        output = self._module.compute_and_output_dist(ctx, dist_input).wait()
        parts = [output] if isinstance(output, KeyedTensor) else output.values()
        vectors = [part.values() for part in parts]
        looked_up_s = self._now_s()
        if [each.shape for each in self._grads] != [each.shape for each in vectors]:
            self._grads = [torch.full_like(each, 1e-3) for each in vectors]
        before_s = self._now_s()
        torch.autograd.backward(vectors, self._grads)
        end_s = self._now_s()
        spans_s = received_s - started_s, looked_up_s - received_s, end_s - before_s
        return [1e3 * span_s for span_s in spans_s]

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


def local_tensors(state: Any) -> Iterator[Tensor]:
    """This rank's tensors in nested containers, in order, detached; of a sharded one its shards."""
    if isinstance(state, Mapping):
        for value in state.values():
            yield from local_tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from local_tensors(value)
    elif isinstance(state, ShardedTensor):
        yield from (shard.tensor.detach() for shard in state.local_shards())
    elif isinstance(state, Tensor):
        yield state.detach()
