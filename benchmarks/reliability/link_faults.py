"""A link that drops while a model trains: survived while the transport survives it, else named.

    python -m benchmarks.reliability.link_faults -o runs/faults

Two hosts on one machine, each with a link of its own. At a step one link goes down: for some
seconds, then training must go on to the losses of a run with a whole link; or for good, then every
rank must raise within the process group's timeout, and name the operation and the awaited rank.

FOLDER gets a line in link_faults.jsonl per case and a link_faults_summary.json.
"""

from __future__ import annotations

import functools
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster.emulated import EmulatedCluster, why_unavailable
from benchmarks.command import command_parser
from benchmarks.reliability.fault_ranks import join_again
from benchmarks.reliability.outcomes import FAILED, Outcome, conclude, outcomes_of
from benchmarks.reliability.small_model import rank_batch
from benchmarks.reliability.small_trainer import SmallTrainer
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import run_ranks

LOSS_RTOL = 1e-5
_WORLD_SIZE, _STEPS = 2, 40
_GROUP_TIMEOUT_S, _RUN_S = 8.0, 120
_RATE_MBIT = 1000.0
_RESULTS, _SUMMARY = "link_faults.jsonl", "link_faults_summary.json"
_SURVIVED, _NAMED = "survived", "named"
_POLL_S = 0.005


@dataclass(frozen=True)
class Drop:
    """A link that goes down.

    Args:
        host: Host whose link it is.
        step: Steps trained before.
        down_s: Seconds until it is up again; ``None`` = never.
    """

    host: int
    step: int
    down_s: float | None

    @property
    def name(self) -> str:
        """Name of the case."""
        return f"host{self.host}-step{self.step}-{self.down_s}s"


DROPS = tuple(
    Drop(host, step, down_s)
    for down_s in (0.2, 1.0, 3.0, None)
    for host, step in ((0, 5), (1, 17), (0, 30))
)


def train_on_rank(rank: int, world_size: int, folder: str, drop_step: int | None) -> Any:
    """The losses, or how it ended, when by the clock, and whether it was named."""
    quiet_upstream()
    join_again(rank, world_size, folder, _GROUP_TIMEOUT_S)
    trainer = SmallTrainer("rows", "rowwise_adagrad")
    pipeline: Any = InterleavedTrainPipeline(trainer.model, trainer.optimizer, torch.device("cpu"))
    batches = (rank_batch(step, rank, world_size) for step in range(_STEPS))
    losses = []
    try:
        for step in range(_STEPS):
            if step == drop_step:
                Path(folder, f"there_{rank}").touch()
            losses.append(float(pipeline.progress(batches).square().mean()))
    except Exception as error:
        return type(error).__name__, str(error), time.time()
    return "trained", losses, time.time()


def _run(folder: Path, drop: Drop | None) -> list[Any]:
    """Result of each rank."""
    with EmulatedCluster(_WORLD_SIZE, _RATE_MBIT) as cluster:
        breaker = threading.Thread(target=_break, args=(cluster, folder, drop), daemon=True)
        breaker.start()
        args = (str(folder), None if drop is None else drop.step)
        try:
            return run_ranks(
                train_on_rank, _WORLD_SIZE, *args, timeout_s=_RUN_S, on_start=cluster.on_start
            )
        finally:
            (folder / "over").touch()
            breaker.join()


def _break(cluster: EmulatedCluster, folder: Path, drop: Drop | None) -> None:
    """Takes the link down when both ranks are there."""
    there = [folder / f"there_{rank}" for rank in range(_WORLD_SIZE)]
    while drop is not None and not (folder / "over").exists():
        if all(path.exists() for path in there):
            cluster.set_link(drop.host, up=False)
            (folder / "down").touch()
            if drop.down_s is not None:
                time.sleep(drop.down_s)
                cluster.set_link(drop.host, up=True)
            return
        time.sleep(_POLL_S)


def _judged(folder: Path, drop: Drop, whole: Sequence[float]) -> Outcome:
    ended = _run(folder, drop)
    if not (folder / "down").exists():
        return Outcome(drop.name, FAILED, "the link was not taken down")
    down_s = (folder / "down").stat().st_mtime
    if all(kind == "trained" for kind, _, _ in ended):
        apart = max(abs(a / b - 1) for a, b in zip(ended[0][1], whole, strict=True))
        after_s = min(at_s for _, _, at_s in ended) - down_s
        has_waited = drop.down_s is not None and after_s > drop.down_s
        verdict = _SURVIVED if apart < LOSS_RTOL and has_waited else FAILED
        return Outcome(drop.name, verdict, losses_apart=apart, after_s=after_s)
    after_s = max(at_s for _, _, at_s in ended) - down_s
    is_named = all(
        kind == "PeerError" and " waited in vain in step " in text for kind, text, _ in ended
    )
    in_time = after_s < _GROUP_TIMEOUT_S + 3
    detail = "; ".join(str(text) for _, text, _ in ended)
    verdict = _NAMED if is_named and in_time and drop.down_s is None else FAILED
    return Outcome(drop.name, verdict, detail, after_s=after_s)


def _drop(folder: Path, drops: Sequence[Drop]) -> Iterator[Outcome]:
    """Makes the drops that a folder has no outcome of, and yields those of all."""

    @functools.cache
    def whole() -> list[float]:
        """Losses with a whole link."""
        with tempfile.TemporaryDirectory(dir=folder) as work:
            losses: list[float] = _run(Path(work), None)[0][1]
            return losses

    def run(drop: Drop) -> Outcome:
        work = Path(tempfile.mkdtemp(prefix=f"link_{drop.name}_", dir=folder))
        outcome = _judged(work, drop, whole())
        if outcome.verdict != FAILED:
            shutil.rmtree(work)
        return outcome

    return outcomes_of(folder / _RESULTS, drops, run)


def main(argv: Sequence[str] | None = None) -> int:
    """Drops links and prints a summary line.

    Returns:
        0 if every case went as it should, or no link can be emulated here; else 1.
    """
    parser = command_parser("benchmarks.reliability.link_faults", __doc__)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="FOLDER")
    args = parser.parse_args(argv)
    if (reason := why_unavailable()) is not None:
        print(f"link_faults: passed over, {reason}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    return conclude(
        _drop(args.out, DROPS),
        args.out / _SUMMARY,
        "drops",
        len(DROPS),
        *(_SURVIVED, _NAMED),
        loss_rtol=LOSS_RTOL,
    )


if __name__ == "__main__":
    sys.exit(main())
