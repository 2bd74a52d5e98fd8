"""``torchrec-picasso calibrate``: measures the inputs of the cost model on the ranks at hand."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import torch
import torch.distributed as dist

from torchrec_picasso.app.cli.launcher import run_on_ranks
from torchrec_picasso.app.config import TrainConfig, load_config
from torchrec_picasso.app.launch.environment import describe_environment
from torchrec_picasso.app.launch.progress import Progress
from torchrec_picasso.app.launch.quiet import quiet_upstream
from torchrec_picasso.app.runs.dense_probe import measure_dense
from torchrec_picasso.app.runs.local_probe import NUM_CALLS, measure_local_costs
from torchrec_picasso.app.runs.pace import Pace
from torchrec_picasso.app.runs.step_probe import StepProbe
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.local import PHASES
from torchrec_picasso.cost.measure import num_points

QUICK = (1 << 20, 0.02, False, 2.0)
"""Arguments of :func:`calibrate_on_rank` that measure a link in two seconds: largest buffer in
bytes, seconds per size, no local costs, budget in seconds."""

_TIMEOUT_S = 1800.0
_WINDOWS = 8
"""Windows of a busy loop before the network; local probes take more."""


def run(args: argparse.Namespace) -> None:
    """Runs the subcommand; raises PicassoError for unusable input."""
    config = load_config(args.config) if args.config else None
    curves = run_on_ranks(
        calibrate_on_rank,
        args,
        int(args.max_mib * (1 << 20)),
        args.seconds,
        not args.no_local,
        args.budget,
        config,
        timeout_s=_TIMEOUT_S,
    )
    if curves is None:  # another rank of torchrun writes
        return
    measured_on = {**describe_environment(), **curves.measured_on}
    curves = dataclasses.replace(curves, measured_on=measured_on)
    curves.to_json(Path(args.out))
    print_curves(curves)
    print(f"wrote {args.out}")


def calibrate_on_rank(
    rank: int,
    world_size: int,
    max_bytes: int,
    seconds_per_point: float,
    with_local: bool,
    budget_s: float = 4.0,
    config: TrainConfig | None = None,
) -> CommCurves:
    """Measures curves and local costs. Collective: the main function of every rank.

    Args:
        rank: This rank.
        world_size: Ranks in the default process group.
        max_bytes: Largest buffer per rank.
        seconds_per_point: Largest time per size and collective, seconds, approximate.
        with_local: Whether to measure local costs.
        budget_s: Seconds for all network measurements.
        config: Configuration of a model whose dense part is timed.
    """
    quiet_upstream()
    pg = dist.group.WORLD
    assert pg is not None, "init_process_group comes first"
    device = torch.device("cpu")
    if torch.cuda.is_available() and "nccl" in dist.get_backend(pg):
        device = torch.device("cuda", torch.cuda.current_device())
    pace = Pace()
    points = num_points(world_size, max_bytes)
    points += (NUM_CALLS + 1) * with_local + (config is not None)
    progress = Progress("calibrate", points, shown=rank == 0)

    def advance(point: str) -> None:
        progress.tell(point)
        progress.advance()

    for _ in range(_WINDOWS):
        pace.sample()
    curves = CommCurves.measure(
        pg,
        device=device,
        max_bytes=max_bytes,
        seconds_per_point=seconds_per_point,
        budget_s=budget_s,
        advance=advance,
    )
    if device.type == "cuda":
        gpu = torch.cuda.get_device_name(device)
        curves = dataclasses.replace(curves, measured_on={"gpu": gpu})
    if with_local:
        advance("local work and whole steps")
        steps = StepProbe(device, NUM_CALLS)

        def between() -> None:
            progress.advance()
            steps.take_turn()

        local = measure_local_costs(device, between, pace)
        curves = steps.add_costs(dataclasses.replace(curves, local=local))
    if config is not None:
        advance("dense part")
        curves = dataclasses.replace(curves, dense=measure_dense(config, device))
    progress.close()
    warning = pace.warning()
    if warning is not None:
        curves = dataclasses.replace(curves, measured_on={**curves.measured_on, "busy": warning})
    return curves


def print_curves(curves: CommCurves) -> None:
    """Prints the fits on stdout."""
    environment = curves.measured_on
    print(
        f"\n{curves.world_size} ranks, {curves.ranks_per_host} per host, {curves.backend} on "
        f"{curves.device} ({environment.get('gpu', environment.get('cpu', '?'))}), "
        f"{environment.get('date_utc', '?')}"
    )
    print(f"  {'collective':<20}{'latency ms':>12}{'GB/s':>9}{'largest, MB':>13}")
    for name, curve in curves.collectives.items():
        print(
            f"  {name:<20}{curve.latency_ms:>12.3f}{curve.gbytes_per_s:>9.3f}"
            f"{curve.sent_bytes[-1] / 1e6:>13.3f}"
        )
    local = curves.local
    print(f"  local work per step ({'measured' if local.measured else 'assumed'}), ns per element:")
    for side in ("hot_cold", "stock"):
        costs = getattr(local, side)
        feature_us = sum(getattr(costs, phase).feature_us for phase in PHASES)
        cells = ", ".join(
            f"{phase} {getattr(costs, phase).lookup_element_ns:.2f} per lookup "
            f"{getattr(costs, phase).bag_element_ns:.2f} per bag "
            f"{getattr(costs, phase).row_element_ns:.2f} per row"
            for phase in PHASES[1:]
        )
        print(
            f"    {side:<10}{cells}; input_dist {costs.input_dist.lookup_ns:.0f} ns per lookup; "
            f"update {costs.backward.update_ns:.0f} ns per row; {feature_us:.0f} us per feature, "
            f"{costs.once_ms:.1f} ms per step, however small"
        )
    measured = "measured" if curves.wire_core_ns is not None else "assumed"
    print(f"  a byte on the wire takes {curves.core_ns_per_byte:.2f} ns of a core ({measured})")
    if curves.dense is not None:
        print(
            f"  dense part: forward {curves.dense.forward_ms:.1f} ms, backward "
            f"{curves.dense.backward_ms:.1f} ms for {curves.dense.batch_size:,} samples"
        )
    sides = {"hot/cold": local.hot_cold, "stock": local.stock}
    no_time = [name for name, costs in sides.items() if local.measured and not costs.step_ms]
    if no_time:
        print(
            f"warning: steps of {' and '.join(no_time)} tables took less than the work measured "
            "apart, so a step is priced without what it costs once; calibrate again on an idle "
            "machine"
        )
    if "busy" in environment:
        print(f"warning: {environment['busy']}")
