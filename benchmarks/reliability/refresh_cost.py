"""Cost of refreshing hot rows: steps with a refresh beside steps without.

    python -m benchmarks.reliability.refresh_cost -o cost.json --data-folder ../shared/data

Two emulated hosts of one core train two models in turn, a block of steps each, on the same batches:
one with hot rows that stay, one with ``Refresh()``, the default. On
Criteo's samples rows hardly move, on Globo's clicks they move at every look.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.cluster import ClusterError, run_on_hosts, usable_rate
from benchmarks.command import command_parser
from benchmarks.reliability.drift import Stream, batches_of, criteo, globo, pipeline_with
from torchrec_picasso import PicassoError, Refresh
from torchrec_picasso.app.cli.outputs import write_result
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.launch.run_ranks import RankError

_BLOCK, _ROUNDS, _WARM_UP, _TIMEOUT_S = 100, 7, 20, 900.0
_STAY, _FOLLOW = "hot rows stay", "hot rows follow"


def _train(rank: int, world_size: int, stream: Stream) -> dict[str, Any]:
    """Seconds of every block, by model."""
    quiet_upstream()
    first = stream.most_used(stream.ids_NF[: stream.counted])
    pipelines = {
        name: pipeline_with(stream, first, world_size, refresh)
        for name, refresh in ((_STAY, None), (_FOLLOW, Refresh()))
    }
    batches = {name: batches_of(stream, rank, world_size) for name in pipelines}
    for name, pipeline in pipelines.items():
        for _ in range(_WARM_UP):
            pipeline.progress(batches[name])
    seconds: dict[str, list[float]] = {name: [] for name in pipelines}
    moved, seen = 0, None
    for _ in range(_ROUNDS):
        for name, pipeline in pipelines.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(_BLOCK):
                pipeline.progress(batches[name])
                if pipeline.last_refresh is not seen and name == _FOLLOW:
                    seen = pipeline.last_refresh
                    assert seen is not None
                    moved += seen.num_moved
            dist.barrier()
            seconds[name].append(time.perf_counter() - start)
    return {"seconds": seconds, "moved": moved}


def _measure(stream: Stream, rate: float | None) -> dict[str, Any]:
    found = run_on_hosts(_train, 2, rate, stream, timeout_s=_TIMEOUT_S)[0]
    stay, follow = (found["seconds"][name] for name in (_STAY, _FOLLOW))
    return {
        "num_hot": stream.num_hot,
        "num_rows": stream.num_rows,
        "batch_size": stream.batch_size,
        "steps": _BLOCK * _ROUNDS,
        "moved": found["moved"],
        "step_ms": {_STAY: _mean_ms(stay), _FOLLOW: _mean_ms(follow)},
        "by_round": [b / a for a, b in zip(stay, follow)],
        "cost": sum(follow) / sum(stay) - 1,
    }


def _mean_ms(seconds: Sequence[float]) -> float:
    return 1e3 * sum(seconds) / len(seconds) / _BLOCK


def main(argv: Sequence[str] | None = None) -> int:
    """Measures, and shows.

    Returns:
        0; 2 where the options allow no answer.
    """
    parser = command_parser("benchmarks.reliability.refresh_cost", __doc__)
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="a JSON file")
    parser.add_argument(
        "--data-folder", required=True, metavar="FOLDER", help="Globo's clicks, Criteo's samples"
    )
    parser.add_argument(
        "--rate-mbit", type=float, default=1000.0, help="0 = loopback (default: 1000)"
    )
    args = parser.parse_args(argv)
    data = Path(args.data_folder)
    num_steps = _WARM_UP + _BLOCK * _ROUNDS + 3
    try:
        rate = usable_rate(args.rate_mbit or None)
        streams = {
            "criteo": criteo(data / "criteo_tb_80k.parquet", num_steps, batch_size=1024),
            "globo": dataclasses.replace(
                globo(data / "globo_clicks_8days.parquet"), batch_size=1024
            ),
        }
        found = {name: _measure(stream, rate) for name, stream in streams.items()}
    except (PicassoError, RankError, ClusterError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, figures in found.items():
        rounds = ", ".join(f"{ratio:.3f}" for ratio in figures["by_round"])
        print(
            f"{name}: {figures['step_ms'][_STAY]:.2f} ms where hot rows stay, "
            f"{figures['step_ms'][_FOLLOW]:.2f} where they follow ({figures['moved']} moved): "
            f"{figures['cost']:+.2%}; by round {rounds}"
        )
    write_result({"rate_mbit": args.rate_mbit, **found}, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
