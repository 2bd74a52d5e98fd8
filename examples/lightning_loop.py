"""Under PyTorch Lightning: `torchrun --nproc-per-node 2 examples/lightning_loop.py`.

`training_step(dataloader_iter)` lets the pipeline read ahead. Optimization is manual: the pipeline
calls backward and the optimizer. Needs pytorch-lightning.
"""

import contextlib
import os

import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

import torchrec_picasso as picasso

ROWS, DIM, BATCH_SIZE, STEPS_PER_EPOCH = 5000, 16, 512, 20


class Sharded(DDPStrategy):
    def configure_ddp(self) -> None:
        """The model stays as it is: DistributedModelParallel has wrapped its dense part."""


class Clicks(pl.LightningModule):
    automatic_optimization = False

    def configure_model(self) -> None:  # here ranks have their process group
        torch.manual_seed(0)  # equal weights on all ranks
        tables = [EmbeddingBagConfig(ROWS, DIM, name="t", feature_names=["f"])]
        model = DLRMTrain(DLRM(EmbeddingBagCollection(tables), 4, [32, DIM], [32, 1]))
        weights = model.model.sparse_arch.parameters()
        apply_optimizer_in_backward(RowWiseAdagrad, weights, {"lr": 0.05})
        sharders = [picasso.HotColdEmbeddingBagCollectionSharder()]
        topology = Topology(world_size=self.trainer.world_size, compute_device="cpu")
        planner = picasso.hot_cold_planner(topology, hot_rows=0)
        plan = planner.collective_plan(model, sharders, torch.distributed.group.WORLD)
        self.model = DistributedModelParallel(model, None, self.device, plan, sharders)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        return KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))

    def on_train_start(self) -> None:
        self.pipeline = picasso.InterleavedTrainPipeline(self.model, self.optimizers(), self.device)

    def training_step(self, dataloader_iter) -> None:
        loss, *_ = self.pipeline.progress(batch for batch, _, _ in dataloader_iter)
        self.log("loss", loss, batch_size=BATCH_SIZE)

    def on_train_epoch_end(self) -> None:
        """An epoch ends when its last batch is read: two batches are still in flight."""
        with contextlib.suppress(StopIteration):
            while True:
                self.pipeline.progress(iter(()))


def make_batch() -> Batch:
    ids = (torch.rand(BATCH_SIZE) ** 4 * ROWS).long()
    features = KeyedJaggedTensor(keys=["f"], values=ids, lengths=torch.ones_like(ids))
    return Batch(torch.rand(BATCH_SIZE, 4), features, (ids % 2).float())


ranks = int(os.environ["LOCAL_WORLD_SIZE"])
off = dict.fromkeys(("logger", "enable_checkpointing", "use_distributed_sampler"), False)
trainer = pl.Trainer(accelerator="cpu", devices=ranks, strategy=Sharded(), max_epochs=2, **off)
torch.manual_seed(trainer.global_rank)
model = Clicks()
trainer.fit(model, DataLoader([make_batch() for _ in range(STEPS_PER_EPOCH)], batch_size=None))
loss, summary = trainer.callback_metrics["loss"], model.pipeline.summary()
print(f"rank {trainer.global_rank}: loss {loss:.6f}\n{summary}")
