"""The arguments of every subcommand; what a subcommand does is in the file of its name.

This file imports neither PyTorch nor TorchRec, so ``--help`` and a wrong argument answer at once.
"""

from __future__ import annotations

import argparse
from typing import TypeAlias

from torchrec_picasso.app.zoo.kinds import DLRM, model_kinds

__all__ = ["make_parser"]

_Subcommands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def make_parser(version: str) -> argparse.ArgumentParser:
    """The parser of the whole command line; ``command`` is the subcommand's name.

    Args:
        version: What ``--version`` prints.
    """
    parser = argparse.ArgumentParser(
        prog="torchrec-picasso",
        description="Hot/cold embedding rows and packed exchanges for TorchRec.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_demo, _doctor, _models, _stats, _calibrate, _plan, _train, _convert, _quality):
        add(subcommands)
    return parser


_DEMO_EXAMPLE = """\
example:
  torchrec-picasso demo
  torchrec-picasso demo --data day_0.tsv --hot-rows 20000 --out criteo_demo
  torchrec-picasso demo --model din
  torchrec-picasso demo --rate-mbit 1000
"""


def _demo(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "demo",
        help="compare stock TorchRec with this package",
        description=(
            "Trains one model twice from equal weights on the same batches: with TorchRec's best "
            "stock plan and with hot/cold sharding. Prints a table, writes demo.json and demo.png."
        ),
        epilog=_DEMO_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data",
        metavar="FILE",
        help="Criteo samples, Parquet or tab-separated text; for models of histories Alimama's "
        "rows or Globo's clicks (default: generated samples)",
    )
    parser.add_argument(
        "--model",
        choices=model_kinds(),
        default=DLRM,
        metavar="NAME",
        help=f"any of `torchrec-picasso models` (default: {DLRM})",
    )
    for flag, default, text in (
        ("--ranks", 2, "processes on this machine"),
        ("--seed", 0, "seed of weights and generated samples"),
    ):
        parser.add_argument(
            flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})"
        )
    for flag, text in (
        ("--steps", "steps of each side (default: 30, fewer where they take longer than a minute)"),
        ("--batch-size", "samples per rank and step (default: 4096, or 512 with histories)"),
        ("--dim", "columns of every table (default: 64, or 16 with histories)"),
        ("--hot-rows", "replicated rows, a total over all tables (default: the planner's choice)"),
    ):
        parser.add_argument(flag, type=int, metavar="N", help=text)
    parser.add_argument(
        "--rate-mbit",
        type=float,
        metavar="R",
        help="hold the loopback between ranks to R Mbit/s each, where Linux has unshare and tc",
    )
    parser.add_argument(
        "--out", metavar="DIR", default="demo_out", help="folder of the results (default: demo_out)"
    )


_DOCTOR_EXAMPLE = """\
example:
  torchrec-picasso doctor
"""


def _doctor(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "doctor",
        help="check the installed packages and the link between local ranks",
        description=(
            "Prints versions, whether the packages load together, the link between ranks of this "
            "machine and the default plan on it; takes 20 seconds at most. Exit code 1 if a "
            "package is missing."
        ),
        epilog=_DOCTOR_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks", type=int, default=2, metavar="N", help="processes to spawn (default: 2)"
    )


_MODELS_EXAMPLE = """\
example:
  torchrec-picasso models
"""


def _models(subcommands: _Subcommands) -> None:
    subcommands.add_parser(
        "models",
        help="list the models that a configuration can name",
        description="Lists models, the groups of columns that each reads and its sizes.",
        epilog=_MODELS_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


_STATS_EXAMPLE = """\
example:
  torchrec-picasso stats day_0.parquet day_1.parquet --features user,item -o stats.parquet
  torchrec-picasso stats day_0.tsv --config configs/dlrm_criteo.yaml -o stats.parquet
  torchrec-picasso stats --config configs/dlrm_criteo.yaml -o stats.parquet
"""


def _stats(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "stats",
        help="count how often each row is looked up",
        description=(
            "Counts the ids of data files in one pass, writes the statistics that planning needs "
            "and prints a line per table."
        ),
        epilog=_STATS_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILES", help="Parquet files of samples")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--features", metavar="C1,C2", help="columns of ids; each becomes a table of its name"
    )
    what.add_argument(
        "--config",
        "--tables-from",
        metavar="FILE",
        help="YAML configuration whose tables and ids are counted; without FILES its own data",
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="statistics to write")
    parser.add_argument(
        "--rows",
        metavar="N",
        help="rows of the tables, one number or c1=N,c2=N (default: largest id + 1)",
    )
    parser.add_argument("--hash", action="store_true", help="take ids modulo the table's rows")
    parser.add_argument(
        "--batches", type=int, default=100, metavar="N", help="generated batches (default: 100)"
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        metavar="N",
        help="samples of the batch that is judged (default: the configuration's, or 4096)",
    )
    parser.add_argument("--hot-rows", type=int, metavar="N", help="rows to judge as a hot set")
    parser.add_argument(
        "--max-rows-counted",
        type=int,
        default=1 << 20,
        metavar="N",
        help="rows of a large table counted one by one, 16 bytes each (default: 1048576)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw coverage curves, such as stats.png")


_CALIBRATE_EXAMPLE = """\
example:
  torchrec-picasso calibrate --ranks 2 -o curves.json
  torchrec-picasso calibrate --ranks 2 --config configs/dlrm_criteo.yaml -o curves.json
  torchrun --nnodes 2 --nproc-per-node 4 ... -m torchrec_picasso calibrate -o curves.json
"""


def _calibrate(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "calibrate",
        help="measure the network and the local work for the planner",
        description=(
            "Measures all-to-all, all-reduce, reduce-scatter and all-gather on the process group "
            "at hand, fits latency and bandwidth, and measures what a step does "
            "on the rank itself, and with --config the dense part of a model. Spawns its ranks on "
            "this machine, or uses those of torchrun."
        ),
        epilog=_CALIBRATE_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="JSON file to write")
    parser.add_argument(
        "--ranks",
        type=int,
        default=2,
        metavar="N",
        help="processes to spawn; under torchrun its world size counts (default: 2)",
    )
    parser.add_argument(
        "--max-mib",
        type=float,
        default=64,
        metavar="M",
        help="largest buffer per rank, MiB (default: 64)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=0.3,
        metavar="S",
        help="about how long each size is repeated, at most (default: 0.3)",
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds for the network in all; a slow one gets fewer sizes (default: 30)",
    )
    parser.add_argument(
        "--no-local", action="store_true", help="leave local costs at their assumed values"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML configuration: also measure its model without the tables, which is what a "
        "schedule hides exchanges under",
    )


_PLAN_EXAMPLE = """\
example:
  torchrec-picasso plan --config configs/dlrm_criteo.yaml --stats stats.parquet \\
      --curves curves.json --world-size 16 --plot plan.png
"""


def _plan(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "plan",
        help="decide hot rows and placements for a cluster, and say why",
        description=(
            "Plans the model of a configuration for N ranks, on any machine: prints for each table "
            "what was chosen and why, then the predicted step."
        ),
        epilog=_PLAN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--stats", metavar="FILE", help="frequency statistics (default: all rows equally frequent)"
    )
    parser.add_argument(
        "--curves", metavar="FILE", help="measured curves (default: TorchRec's bandwidths)"
    )
    parser.add_argument(
        "--world-size", type=int, metavar="N", help="ranks (default: those of the curves)"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="compute device (default: cpu)"
    )
    parser.add_argument(
        "--memory-gib", type=float, metavar="G", help="memory per rank (default: TorchRec's)"
    )
    parser.add_argument(
        "--hot-rows", type=int, metavar="N", help="a total over all tables (default: chosen)"
    )
    parser.add_argument(
        "--dense-ms",
        type=float,
        metavar="MS",
        help="forward and backward of the model without its tables (default: that of the curves)",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw the plans that were priced")


_TRAIN_EXAMPLE = """\
example:
  torchrec-picasso train --config configs/dlrm_criteo.yaml
  torchrec-picasso train --config configs/dlrm_criteo.yaml --resume
  torchrec-picasso train --config configs/dlrm_criteo.yaml --profile 3 --profile-out steps.svg
  torchrec-picasso train --config configs/din_taobao.yaml
  torchrun --nproc-per-node 2 -m torchrec_picasso train --config configs/dlrm_criteo.yaml
  torchrun --nproc-per-node 2 --max-restarts 3 -m torchrec_picasso train --config FILE --resume auto
"""


def _train(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "train",
        help="train a model from a configuration file",
        description=(
            "Trains a model, evaluates its AUC on held-out samples, writes checkpoints and resumes "
            "from them. Spawns its ranks, or uses those of torchrun."
        ),
        epilog=_TRAIN_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML configuration")
    parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        choices=("newest", "auto"),
        help="continue from the newest whole checkpoint; auto: or start where there is none, as "
        "torchrun's restarts do by themselves",
    )
    parser.add_argument(
        "--profile",
        type=int,
        metavar="N",
        help="draw when the operations of N steps ran, once the pipeline has found its setting",
    )
    parser.add_argument(
        "--profile-out",
        metavar="FILE",
        help="picture of --profile (default: CHECKPOINT_FOLDER.timeline.svg, or timeline.svg)",
    )


_CONVERT_EXAMPLE = """\
example:
  torchrec-picasso convert --checkpoint runs/dlrm -o dlrm.pt
  torchrec-picasso convert --checkpoint runs/dlrm/step_00000200 -o dlrm_200.pt
"""


def _convert(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "convert",
        help="turn a checkpoint into one plain file",
        description=(
            "Writes the weights of a training checkpoint, of any plan and number of ranks, as one "
            "unsharded state dict: model.load_state_dict(torch.load(FILE, weights_only=True)). "
            "Starts no ranks; needs as much memory as the model has weights."
        ),
        epilog=_CONVERT_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="one checkpoint, or a run's folder, of which the newest whole one is taken",
    )
    parser.add_argument("-o", "--out", required=True, metavar="FILE", help="file to write")


_QUALITY_EXAMPLE = """\
example:
  torchrec-picasso quality --config configs/quality.yaml
  torchrec-picasso quality --config configs/quality.yaml --only din_parity can_above_din --seed 1
  torchrec-picasso quality --config configs/quality.yaml --json benchmarks/results/quality.json
"""


def _quality(subcommands: _Subcommands) -> None:
    parser = subcommands.add_parser(
        "quality",
        help="check that models train as stock does, and learn what they should",
        description=(
            "Runs checks: a model's losses and AUC are stock TorchRec's, its AUC is above another "
            "model's, or its AUC or loss is a known one. Fails if one does not hold."
        ),
        epilog=_QUALITY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="YAML file of checks")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="some of them (default: all)")
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="of weights and generated samples (default: as configured)",
    )
    parser.add_argument("--json", metavar="FILE", help="where to write what was found")
