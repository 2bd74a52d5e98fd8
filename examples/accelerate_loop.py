"""Under Hugging Face accelerate: `torchrun --nproc-per-node 2 examples/accelerate_loop.py`.

Only the optimizer is prepared. The model is sharded and wrapped by DistributedModelParallel, the
pipeline copies batches to the device and calls backward. Needs accelerate.
"""

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso import (
    HotColdEmbeddingBagCollectionSharder,
    InterleavedTrainPipeline,
    hot_cold_planner,
)

ROWS, DIM, BATCH_SIZE, STEPS = 5000, 16, 512, 40
dist.init_process_group("gloo")  # Accelerator makes none for a single rank
accelerator = Accelerator(cpu=True)
pg = dist.group.WORLD
assert pg is not None

torch.manual_seed(0)  # equal weights on all ranks
tables = [EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["f"])]
sizes = {"dense_arch_layer_sizes": [32, DIM], "over_arch_layer_sizes": [32, 1]}
model = DLRMTrain(DLRM(EmbeddingBagCollection(tables=tables), dense_in_features=4, **sizes))
apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05})
sharders = [HotColdEmbeddingBagCollectionSharder()]
topology = Topology(world_size=pg.size(), compute_device="cpu")
planner = hot_cold_planner(topology=topology, hot_rows=0)  # rows packed, none replicated
plan = planner.collective_plan(model, sharders, pg)
model = DistributedModelParallel(model, device=accelerator.device, plan=plan, sharders=sharders)
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
optimizer = accelerator.prepare(optimizer)
pipeline = InterleavedTrainPipeline(model, optimizer, accelerator.device)


def make_batch() -> Batch:
    ids = (torch.rand(BATCH_SIZE) ** 4 * ROWS).long()
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))
    return Batch(torch.rand(BATCH_SIZE, 4), features, (ids % 2).float())


torch.manual_seed(pg.rank())
batches = iter([make_batch() for _ in range(STEPS)])
for _ in range(STEPS):
    loss, *_ = pipeline.progress(batches)
mean = accelerator.reduce(loss, "mean").item()
accelerator.print(f"loss {mean:.6f}\n{pipeline.summary()}")
dist.destroy_process_group()
