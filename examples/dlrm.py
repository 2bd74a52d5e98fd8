"""A DLRM on TorchRec with this package: `torchrun --nproc-per-node 2 examples/dlrm.py`.

The README's diff is marked: `# -` are the lines of a plain TorchRec script, `# +` ends a line that
takes their place. All other lines are plain TorchRec.
"""

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel

# - from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
# - from torchrec.distributed.planner import EmbeddingShardingPlanner
# - from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from torchrec_picasso import HotColdEmbeddingBagCollectionSharder  # +
from torchrec_picasso import InterleavedTrainPipeline, hot_cold_planner  # +

FEATURES, ROWS, DIM, BATCH_SIZE, STEPS = ["user", "item", "shop"], 5000, 16, 512, 40
device = torch.device("cpu")
dist.init_process_group("gloo")
pg = dist.group.WORLD
assert pg is not None

torch.manual_seed(0)  # equal weights on all ranks
tables = [
    EmbeddingBagConfig(
        name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
    )
    for name in FEATURES
]
model = DLRMTrain(
    DLRM(
        EmbeddingBagCollection(tables=tables),
        dense_in_features=4,
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
    )
)
apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.05})


def make_batch() -> Batch:
    """Samples with two ids per feature; a few ids are frequent."""
    ids = (torch.rand(len(FEATURES) * BATCH_SIZE * 2) ** 4 * ROWS).long()
    lengths = torch.full((len(FEATURES) * BATCH_SIZE,), 2)
    features = KeyedJaggedTensor(keys=FEATURES, values=ids, lengths=lengths)
    return Batch(
        torch.rand(BATCH_SIZE, 4), features, (ids.view(-1, BATCH_SIZE, 2)[0, :, 0] % 2).float()
    )


topology = Topology(world_size=pg.size(), compute_device="cpu")
# - sharders = [EmbeddingBagCollectionSharder()]
# - planner = EmbeddingShardingPlanner(topology=topology)
sharders = [HotColdEmbeddingBagCollectionSharder()]  # +
# every table in the packed exchange; without hot_rows, measured curves decide
planner = hot_cold_planner(topology=topology, hot_rows=0)  # +
plan = planner.collective_plan(model, sharders, pg)
model = DistributedModelParallel(model, device=device, plan=plan, sharders=sharders)
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
# - pipeline = TrainPipelineSparseDist(model, optimizer, device)
pipeline = InterleavedTrainPipeline(model, optimizer, device)  # +
torch.manual_seed(pg.rank())
batches = iter([make_batch() for _ in range(STEPS)])
for _ in range(STEPS):
    loss, *_ = pipeline.progress(batches)
print(f"rank {pg.rank()}: loss {loss.item():.6f}")
if pg.rank() == 0:  # +
    print(pipeline.summary())  # +
dist.destroy_process_group()
