"""``torchrec-picasso doctor``: checks the installed packages and the link between local ranks.

The head imports nothing heavy: what does not load is reported in one line.
"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from importlib.util import find_spec

from torchrec_picasso.app.launch.environment import describe_environment

_NEEDED = {"numpy": "numpy", "pandas": "pandas", "pyarrow": "pyarrow"}
_COMMAND_LINE = {"yaml": "pyyaml", "tqdm": "tqdm", "matplotlib": "matplotlib"}
_VERSIONS = ("python", "torch", "torchrec", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec-picasso")
_TIMEOUT_S = 60.0


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand; raises RankError if a rank fails.

    Returns:
        0; 1 if a package is missing or does not load.
    """
    facts = describe_environment()
    print("versions: " + ", ".join(f"{name} {facts[name]}" for name in _VERSIONS if name in facts))
    problem = _why_it_does_not_load()
    if problem is not None:
        print(f"torchrec-picasso: error: {problem}", file=sys.stderr)
        return 1
    print("packages: torch, FBGEMM and TorchRec load together")
    num_threads = os.environ.get("OMP_NUM_THREADS", "1")
    threads = f"{num_threads} thread" + "s" * (num_threads != "1")
    cpus = f"{facts['num_cpus']} CPUs ({facts['cpu']}, {facts['vectors']})"
    print(f"machine: {cpus}; {args.ranks} ranks x {threads}")
    _measure_and_plan(args.ranks)
    return 0


def _why_it_does_not_load() -> str | None:
    missing = [name for module, name in (_NEEDED | _COMMAND_LINE).items() if not find_spec(module)]
    if missing:
        return (
            f"not installed: {', '.join(missing)}; pip install 'torchrec_picasso[app]' has all "
            "that the command line needs"
        )
    try:
        import_module("torchrec")
    except Exception as error:  # a library that was built for another torch fails in many ways
        return f"TorchRec does not load ({type(error).__name__}: {error})"
    return None


def _measure_and_plan(ranks: int) -> None:
    """Prints the link between local ranks, and the plan of the demo's model on it."""
    from torchrec.distributed.planner import Topology

    from torchrec_picasso.app.cli.arguments import make_parser
    from torchrec_picasso.app.cli.calibrate import QUICK, calibrate_on_rank
    from torchrec_picasso.app.cli.demo import demo_spec
    from torchrec_picasso.app.launch.run_ranks import run_ranks
    from torchrec_picasso.app.runs.placements import hot_cold_sharders
    from torchrec_picasso.app.runs.trainer import unsharded_model
    from torchrec_picasso.app.zoo.registry import make_source
    from torchrec_picasso.planner.explain import summarize
    from torchrec_picasso.planner.planner import hot_cold_planner

    curves = run_ranks(calibrate_on_rank, ranks, *QUICK, timeout_s=_TIMEOUT_S)[0]
    link = curves.collectives["all_to_all"]
    # Beside other work the larger messages may not even seem slower.
    speed = f"{link.gbytes_per_s:.2f} GB/s" if link.ms_per_byte else "not measured, the CPU is busy"
    print(
        f"link: all-to-all {speed}, {link.latency_ms:.2f} ms latency between "
        f"{ranks} ranks of this machine ({curves.backend})"
    )
    if "busy" in curves.measured_on:
        print(f"warning: {curves.measured_on['busy']}")
    config = demo_spec(make_parser("").parse_args(["demo"])).config
    planner = hot_cold_planner(
        Topology(world_size=ranks, compute_device="cpu"),
        curves=curves,
        batch_size=config.data.batch_size,
        debug=False,
    )
    planner.plan(
        unsharded_model(config, make_source(config.data, config.seed)), hot_cold_sharders()
    )
    found = summarize(planner.decision)
    print(
        f"plan of the demo's DLRM on this link: {found['hot_cold_tables']} tables hot/cold with "
        f"{found['hot_rows']:,} replicated rows, {found['stock_tables']} stock; predicted step "
        f"{found['step_ms']:.1f} ms, stock {found['stock_ms']:.1f} ms"
    )
