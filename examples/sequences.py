"""A sequence model on EmbeddingCollection: `torchrun --nproc-per-node 2 examples/sequences.py`.

A click is predicted from the item shown and the items clicked before, both rows of one table.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso import (
    HotColdEmbeddingCollectionSharder,
    InterleavedTrainPipeline,
    hot_cold_planner,
)

ROWS, DIM, BATCH_SIZE, HISTORY, STEPS = 5000, 16, 256, 10, 40
device = torch.device("cpu")
dist.init_process_group("gloo")
pg = dist.group.WORLD
assert pg is not None


class Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        features = ["history", "target"]
        table = EmbeddingConfig(
            name="t_item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=features
        )
        self.items = EmbeddingCollection(tables=[table])
        self.over = nn.Sequential(nn.Linear(2 * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        found = self.items(batch.sparse_features)
        target_BD = found["target"].values()
        history_BLD = found["history"].to_padded_dense(HISTORY)
        fit_BL = (history_BLD * target_BD.unsqueeze(1)).sum(2)
        interest_BD = (history_BLD * fit_BL.unsqueeze(2)).sum(1)
        logits_B = self.over(torch.cat([target_BD, interest_BD], dim=1)).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits_B, batch.labels)
        return loss, (loss.detach(), logits_B.detach())


def make_batch() -> Batch:
    """Histories of up to HISTORY clicks, and one target each; a few items are frequent."""
    lengths = torch.cat([torch.randint(HISTORY + 1, (BATCH_SIZE,)), torch.ones(BATCH_SIZE).long()])
    ids = (torch.rand(int(lengths.sum())) ** 4 * ROWS).long()
    features = KeyedJaggedTensor(keys=["history", "target"], values=ids, lengths=lengths)
    return Batch(torch.zeros(BATCH_SIZE, 1), features, (ids[-BATCH_SIZE:] % 2).float())


torch.manual_seed(0)  # equal weights on all ranks
model = Clicks()
apply_optimizer_in_backward(RowWiseAdagrad, model.items.parameters(), {"lr": 0.05})
sharders = [HotColdEmbeddingCollectionSharder()]
topology = Topology(world_size=pg.size(), compute_device="cpu")
planner = hot_cold_planner(topology=topology, hot_rows=0)  # rows packed, none replicated
plan = planner.collective_plan(model, sharders, pg)
model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
pipeline = InterleavedTrainPipeline(model, optimizer, device)
torch.manual_seed(pg.rank())
batches = iter([make_batch() for _ in range(STEPS)])
for _ in range(STEPS):
    loss, _ = pipeline.progress(batches)
print(f"rank {pg.rank()}: loss {loss.item():.6f}")
if pg.rank() == 0:
    print(pipeline.summary())
dist.destroy_process_group()
