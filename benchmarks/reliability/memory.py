"""Does memory in use grow with steps, or with what batches have not been before?

    python -m benchmarks.reliability.memory -o benchmarks/results/reliability/memory.json

The soak's model is trained on batches of ever other sizes, and on a few batches over and over.
Memory in use (``malloc``'s own count) less that of live tensors is looked at now and then. What
grows under the first alone is bounded by the shapes that batches have; a leak grows under both.
"""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torchrec.datasets.utils import Batch

from benchmarks.command import command_parser
from benchmarks.reliability.process_figures import heap_kib, slope
from benchmarks.reliability.small_trainer import SmallTrainer
from benchmarks.reliability.soak import keep_few_records
from benchmarks.reliability.soak_batches import soak_batch
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks

_WORLD_SIZE, _NUM_REPEATED, _LOOKS = 2, 40, 10
_LAUNCH_S, _STEP_S = 60, 0.2


def memory_in_use(
    rank: int, world_size: int, steps: int, num_batches: int | None
) -> list[tuple[int, float]]:
    """Steps and KiB in use beside tensors, ten times."""
    quiet_upstream()
    trainer = SmallTrainer("rows", "rowwise_adagrad")
    pipeline = InterleavedTrainPipeline[Batch, torch.Tensor](
        trainer.model,
        trainer.optimizer,
        torch.device("cpu"),
        num_micro_batches=1,
        lookahead=True,
        refresh=None,
    )
    stream = _batches(rank, num_batches)
    every = steps // _LOOKS
    looks = []
    for step in range(1, steps + 1):
        pipeline.progress(stream)
        if step % every == 0:
            gc.collect()
            looks.append((step, heap_kib() - _tensor_kib()))
    return looks


def _batches(rank: int, num_batches: int | None) -> Iterator[Batch]:
    step = 0
    while True:
        yield soak_batch(step if num_batches is None else 1 + step % num_batches, rank)
        step += 1


def _tensor_kib() -> float:
    """KiB of all live tensors, each storage once."""
    nbytes = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # to look at an object may be deprecated
        for found in gc.get_objects():
            if type(found) in (torch.Tensor, torch.nn.Parameter):
                storage = found.untyped_storage()
                nbytes[storage.data_ptr()] = storage.nbytes()
    return sum(nbytes.values()) / 1024


def main(argv: Sequence[str] | None = None) -> int:
    """Trains twice, writes and prints KiB a step over the second half."""
    parser = command_parser("benchmarks.reliability.memory", __doc__)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FILE")
    parser.add_argument("--steps", type=int, default=4000, metavar="N")
    args = parser.parse_args(argv)
    steps = max(_LOOKS, args.steps)
    found = {}
    for name, num_batches in (("new", None), ("repeated", _NUM_REPEATED)):
        timeout_s = _LAUNCH_S + _STEP_S * steps
        ranks = run_ranks(
            memory_in_use,
            _WORLD_SIZE,
            steps,
            num_batches,
            timeout_s=timeout_s,
            on_start=keep_few_records,
        )
        late = [looks[_LOOKS // 2 :] for looks in ranks]
        slopes = [slope([step for step, _ in looks], [kib for _, kib in looks]) for looks in late]
        found[name] = {"kib_a_step": slopes, "looks": ranks}
        print(f"{name} batches: {', '.join(f'{kib:+.4f}' for kib in slopes)} KiB a step by rank")
    write_result({"steps": steps, **found}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
