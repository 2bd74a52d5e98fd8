"""Loss and bytes of dense weights that are averaged every k steps, beside gradients in each step.

    OMP_NUM_THREADS=1 python -m benchmarks.dense_average -o dense_average.json

Two CPU ranks train the DLRM of the application on real Criteo ids, one epoch, from equal weights,
with each dense optimizer and each k; 1 is exact. The held-out loss is of samples that no run
trained. Bytes are those that a rank sends in a step, dense part and tables.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipeline

from benchmarks.command import at_least, can_write, command_parser
from torchrec_picasso import InterleavedTrainPipeline, StepReports
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.config import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ShardingConfig,
    TrainConfig,
)
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.runs.trainer import Trainer
from torchrec_picasso.app.zoo.registry import make_source

RANKS, LAST = 2, 30
"""Number of ranks; steps whose mean loss is reported."""
RATES = {"sgd": 0.05, "adagrad": 0.01, "adam": 0.001}
"""Learning rate of each dense optimizer."""


def configuration(path: Path, steps: int, optimizer: str) -> TrainConfig:
    """Returns the run's configuration: a DLRM with its usual towers."""
    return TrainConfig(
        steps=steps,
        ranks=RANKS,
        data=DataConfig(path=str(path), batch_size=128, max_rows=100_000, heldout_steps=20),
        model=ModelConfig(embedding_dim=16),
        optimizer=OptimizerConfig(dense_optimizer=optimizer, dense_lr=RATES[optimizer]),
        sharding=ShardingConfig(hot_rows=0),
    )


def train(rank: int, world_size: int, config: TrainConfig, every: int) -> dict[str, float]:
    """Trains one run; the main function of every rank."""
    quiet_upstream()
    warnings.filterwarnings("ignore", "average_dense_every")
    reports, source = StepReports(), make_source(config.data, config.seed)

    def pipeline(
        model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> TrainPipeline:
        options: dict[str, Any] = {"num_micro_batches": 1, "refresh": None, "on_step": reports}
        return InterleavedTrainPipeline(
            model, optimizer, device, average_dense_every=every, **options
        )

    trainer = Trainer(config, source, make_pipeline=pipeline)
    losses = trainer.mean_over_ranks(trainer.train(source.batches(rank, world_size), config.steps))
    heldout = [
        nn.functional.binary_cross_entropy(clicks, labels)
        for labels, clicks in trainer.predict(source.heldout(rank, world_size))
    ]
    mean = torch.stack(heldout).mean()
    dist.all_reduce(mean)
    sent = reports.to_frame()["sent_bytes"].iloc[16:]  # whole turns of every k
    return {
        "last_loss": sum(losses[-LAST:]) / LAST,
        "heldout_loss": float(mean) / world_size,
        "sent_bytes_per_step": float(sent.iloc[: len(sent) // 16 * 16].mean()),
    }


def main() -> int:
    """Trains with every optimizer and k, and writes what they gave."""
    parser = command_parser("benchmarks.dense_average", __doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data/criteo_tb_80k.parquet"))
    parser.add_argument("--steps", type=at_least(LAST), default=290)
    parser.add_argument("-o", "--output", type=Path, default=Path("dense_average.json"))
    args = parser.parse_args()
    if not can_write(args, "output"):
        return 2
    results = {}
    for optimizer in RATES:
        for every in (1, 4, 16):
            config = configuration(args.data, args.steps, optimizer)
            found = run_ranks(train, RANKS, config, every, timeout_s=1200)[0]
            results[f"{optimizer}, every {every}"] = found
            print(f"{optimizer}, every {every}: {found}", flush=True)
    write_result({"steps": args.steps, "runs": results}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
