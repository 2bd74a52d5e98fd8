"""The arguments of every subcommand.

This file imports neither PyTorch nor TorchRec, so ``--help`` and wrong arguments answer at once.
"""

from __future__ import annotations

import argparse

from torchrec_picasso.app.cli.checks import (
    check_config,
    check_convert,
    check_quality,
    check_stats,
    check_train,
)
from torchrec_picasso.app.cli.command import (
    Command,
    Subcommands,
    at_least,
    more_than_zero,
    multiple_of,
    up_to,
)
from torchrec_picasso.app.zoo.kinds import DLRM, model_kinds


def make_parser(version: str) -> argparse.ArgumentParser:
    """The parser of the command line; ``command`` is the name of the subcommand."""
    parser = argparse.ArgumentParser(
        prog="torchrec-picasso",
        description="Hot/cold embedding rows and packed exchanges for TorchRec.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {version}")
    subcommands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        _demo,
        _doctor,
        _models,
        _stats,
        _calibrate,
        _order,
        _plan,
        _simulate,
        _train,
        _convert,
        _quality,
    ):
        add(subcommands)
    return parser


def _demo(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "demo",
        "compare stock TorchRec with this package",
        (
            "Trains a model twice from equal weights on the same batches: with the fastest stock "
            "plan of TorchRec and with hot/cold sharding, on the loopback and on a slower link. "
            "Prints a table, writes demo.json and demo.png."
        ),
        "torchrec-picasso demo",
        "torchrec-picasso demo --data day_0.tsv --hot-rows 20000 --out criteo_demo",
        "torchrec-picasso demo --model din",
        "torchrec-picasso demo --rate-mbit 0",
    )
    command.text(
        "--data",
        "FILE",
        "Criteo samples, Parquet or tab-separated text; for models of histories Alimama's rows or "
        "Globo's clicks (default: generated samples)",
    )
    command.parser.add_argument(
        "--model",
        choices=model_kinds(),
        default=DLRM,
        metavar="NAME",
        help=f"any of `torchrec-picasso models` (default: {DLRM})",
    )
    command.integer(
        "--steps",
        at_least(10),  # warm-up, counted steps and one timed block
        "steps of each side (default: 30, fewer where they take longer than a minute)",
    )
    command.integer(
        "--ranks", at_least(2, ", which share a link"), "processes on this machine (default: 2)", 2
    )
    command.integer("--seed", at_least(0), "seed of weights and generated samples (default: 0)", 0)
    command.integer(
        "--batch-size",
        at_least(1),
        "samples per rank and step (default: 4096 for a dlrm, 128 for an hstu, 512 for others)",
    )
    command.integer(
        "--dim", multiple_of(4), "columns of every table (default: 64, or 16 with histories)"
    )
    command.integer(
        "--hot-rows",
        at_least(0),
        "replicated rows, a total over all tables (default: the planner's choice)",
    )
    command.number(
        "--rate-mbit",
        "R",
        up_to(1_000_000),
        "compare also on a loopback that is held to R Mbit/s for each rank, if Linux has unshare "
        "and tc; 0 = only on the loopback (default: 1000)",
        1000.0,
    )
    command.folder("--out", "folder of the results (default: demo_out)", "demo_out")
    command.reads("data")


def _doctor(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "doctor",
        "check the installed packages and the link between local ranks",
        (
            "Prints versions, whether the packages load together, the link between ranks of this "
            "machine and the default plan on it; takes 20 seconds at most. Exit code 1 if a "
            "package is missing."
        ),
        "torchrec-picasso doctor",
    )
    command.integer(
        "--ranks", at_least(2, ", which share a link"), "processes to spawn (default: 2)", 2
    )


def _models(subcommands: Subcommands) -> None:
    Command(
        subcommands,
        "models",
        "list the models that a configuration can name",
        "Lists models with their groups of columns and their sizes.",
        "torchrec-picasso models",
    )


def _stats(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "stats",
        "count how often each row is looked up",
        (
            "Counts the ids of data files in one pass, writes the statistics that planning needs "
            "and prints a line per table."
        ),
        (
            "torchrec-picasso stats day_0.parquet day_1.parquet --features user,item "
            "-o stats.parquet"
        ),
        "torchrec-picasso stats day_0.tsv --config configs/dlrm_criteo.yaml -o stats.parquet",
        "torchrec-picasso stats --config configs/dlrm_criteo.yaml -o stats.parquet",
        check=check_stats,
    )
    parser = command.parser
    parser.add_argument("files", nargs="*", metavar="FILES", help="Parquet files of samples")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--features", metavar="C1,C2", help="columns of ids; each becomes a table of its name"
    )
    source.add_argument(
        "--config",
        metavar="FILE",
        help="YAML configuration whose tables and ids are counted; without FILES its own data",
    )
    command.out("statistics to write")
    command.text(
        "--rows", "N", "rows of the tables, one number or c1=N,c2=N (default: largest id + 1)"
    )
    parser.add_argument("--hash", action="store_true", help="take ids modulo the table's rows")
    command.integer("--batches", at_least(1), "generated batches (default: 100)", 100)
    command.integer(
        "--batch-size",
        at_least(1),
        "samples of a batch, for the printed figures (default: the configuration's, or 4096)",
    )
    command.integer("--hot-rows", at_least(1), "size of a hot set to evaluate")
    command.integer(
        "--max-rows-counted",
        at_least(1),
        "rows of a large table counted one by one, 16 bytes each (default: 1048576)",
        1 << 20,
    )
    command.file("--plot", "draw coverage curves, such as stats.png")
    command.reads("files")
    command.needs("features", "files", "FILES, at least one Parquet file")
    command.needs("rows", "features", "--features; --config has the rows of its tables")
    command.needs("hash", "rows", "--rows, which ids are taken modulo of")


def _calibrate(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "calibrate",
        "measure the network and the local work for the planner",
        (
            "Measures all-to-all, all-reduce, reduce-scatter and all-gather on the ranks, fits "
            "latency and bandwidth, and measures the local work of a step, with --config also the "
            "dense part of a model. Spawns its ranks on this machine, or uses those of torchrun."
        ),
        "torchrec-picasso calibrate --ranks 2 -o curves.json",
        "torchrec-picasso calibrate --ranks 2 --config configs/dlrm_criteo.yaml -o curves.json",
        ("torchrun --nnodes 2 --nproc-per-node 4 ... -m torchrec_picasso calibrate -o curves.json"),
        check=check_config,
    )
    command.out("JSON file to write")
    command.integer(
        "--ranks",
        at_least(1),
        "processes to spawn; under torchrun its world size counts (default: 2)",
        2,
    )
    command.number(
        "--max-mib",
        "M",
        at_least(1 / 256, " (4 KiB)"),
        "largest buffer per rank, MiB (default: 64)",
        64,
    )
    command.number(
        "--seconds",
        "S",
        more_than_zero(" seconds"),
        "largest time per size, approximate (default: 0.3)",
        0.3,
    )
    command.number(
        "--budget",
        "S",
        more_than_zero(" seconds"),
        "seconds for the network in all; a slow one gets fewer sizes (default: 4)",
        4.0,
    )
    command.parser.add_argument(
        "--no-local", action="store_true", help="leave local costs at their assumed values"
    )
    command.text(
        "--config",
        "FILE",
        "YAML configuration: also time its model without the tables, which overlaps exchanges",
    )
    command.rank_order()


def _order(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "order",
        "find the order of hosts in which sums of dense gradients are fastest",
        (
            "Measures by gloo how fast pairs of hosts exchange while the other hosts do, finds "
            "the fastest ring through all hosts, measures it beside the given order, and writes "
            "the order, which stays as it is unless the ring gains 5 % in each round. Runs under "
            "torchrun on four hosts or more; in another order hosts read the data of other ranks. "
            "Other programs use the order by the --node-rank of torchrun."
        ),
        "torchrun --nnodes 8 --nproc-per-node 1 ... -m torchrec_picasso order -o order.json",
        (
            "torchrun --nnodes 8 --nproc-per-node 4 ... -m torchrec_picasso train "
            "--config FILE \\\n      --rank-order order.json"
        ),
    )
    command.needs_torchrun(
        "command", "one machine has no order of hosts; start with torchrun on all"
    )
    command.out("JSON file to write")
    command.number("--mib", "M", more_than_zero(), "size of an exchange, MiB (default: 4)", 4)
    command.rank_order()


def _plan(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "plan",
        "decide hot rows and placements for a cluster, and say why",
        (
            "Plans the model of a configuration for N ranks, on any machine: prints the placement "
            "of each table with the reason, then the predicted step."
        ),
        (
            "torchrec-picasso plan --config configs/dlrm_criteo.yaml --stats stats.parquet \\\n"
            "      --curves curves.json --world-size 16 --plot plan.png"
        ),
        check=check_config,
    )
    command.config()
    command.text("--stats", "FILE", "access statistics (default: all rows equally frequent)")
    command.text("--curves", "FILE", "measured curves (default: TorchRec's bandwidths)")
    command.integer("--world-size", at_least(2), "ranks (default: those of the curves)")
    command.parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="compute device (default: cpu)"
    )
    command.number("--memory-gib", "G", more_than_zero(), "memory per rank (default: TorchRec's)")
    command.integer("--hot-rows", at_least(0), "a total over all tables (default: chosen)")
    command.number(
        "--dense-ms",
        "MS",
        at_least(0, " milliseconds"),
        "forward and backward of the model without its tables (default: that of the curves)",
    )
    command.file("--json", "write everything as JSON")
    command.file("--plot", "draw the plans that were priced")
    command.reads("stats", "curves")
    command.needs("hot_rows", "stats", "--stats, which say what rows are frequent")


def _simulate(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "simulate",
        "count and price a step on up to 1,024 ranks, without ranks",
        (
            "Reads or draws the batch of each rank, counts the rows and bytes that ranks and hosts "
            "exchange, as rows, rows by host and with each stock sharding type, and predicts the "
            "step. The batches of smaller clusters are those of the first ranks of the largest."
        ),
        "torchrec-picasso simulate --config configs/dlrm_criteo.yaml --link-mbit 10000",
        (
            "torchrec-picasso simulate --config FILE --stats stats.parquet --link-mbit 100000 \\\n"
            "      --ranks 8 64 512 --ranks-per-host 8 --json steps.json --plot steps.png"
        ),
        check=check_config,
    )
    command.config("YAML configuration: model, samples, and samples per rank")
    command.text("--stats", "FILE", "statistics to draw ids from (default: the samples themselves)")
    network = command.parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--curves", metavar="FILE", help="curves measured on several hosts")
    network.add_argument(
        "--link-mbit", type=float, metavar="R", help="rate of each host's link, Mbit/s"
    )
    command.limit("--link-mbit", more_than_zero())
    command.number(
        "--latency-ms",
        "MS",
        at_least(0, " milliseconds"),
        "with --link-mbit: latency per message (default: 0.05)",
        0.05,
    )
    command.parser.add_argument(
        "--ranks",
        nargs="+",
        type=int,
        metavar="N",
        default=[2**power for power in range(11)],
        help="ranks, several numbers (default: 1, 2, 4 to 1024)",
    )
    command.limit("--ranks", up_to(1024, 1))
    command.integer("--ranks-per-host", up_to(16, 1), "ranks of each host, 1 to 16 (default: 1)", 1)
    command.integer(
        "--hot-rows", at_least(0), "hot rows of all tables, with --stats (default: 0)", 0
    )
    command.integer("--micro-batches", at_least(1), "of a batch (default: the fastest number)")
    command.number(
        "--dense-ms",
        "MS",
        at_least(0, " milliseconds"),
        "forward and backward of the model without its tables (default: that of the curves)",
    )
    command.file("--json", "write everything as JSON")
    command.file("--plot", "draw steps and bytes over ranks")
    command.reads("stats", "curves")
    command.needs("hot_rows", "stats", "--stats, which say what rows are frequent")


def _train(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "train",
        "train a model from a configuration file",
        (
            "Trains a model, evaluates its AUC on held-out samples, writes checkpoints and resumes "
            "from them. Spawns its ranks, or uses those of torchrun."
        ),
        "torchrec-picasso train --config configs/dlrm_criteo.yaml",
        "torchrec-picasso train --config configs/dlrm_criteo.yaml --resume",
        (
            "torchrec-picasso train --config configs/dlrm_criteo.yaml --profile 3 "
            "--profile-out steps.svg"
        ),
        "torchrec-picasso train --config configs/din_taobao.yaml",
        ("torchrun --nproc-per-node 2 -m torchrec_picasso train --config configs/dlrm_criteo.yaml"),
        (
            "torchrun --nproc-per-node 2 --max-restarts 3 -m torchrec_picasso train --config FILE "
            "--resume auto"
        ),
        check=check_train,
    )
    command.config()
    command.parser.add_argument(
        "--resume",
        nargs="?",
        const="newest",
        choices=("newest", "auto"),
        help="continue from the newest complete checkpoint; auto: start if there is none, which is "
        "the default for torchrun's restarts",
    )
    command.rank_order()
    command.integer(
        "--profile",
        at_least(1),
        "draw a timeline of N steps, once the pipeline has found its setting",
    )
    command.file(
        "--profile-out",
        "picture of --profile (default: CHECKPOINT_FOLDER.timeline.svg, or timeline.svg)",
    )
    command.needs("profile_out", "profile", "--profile N, the steps to draw")


def _convert(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "convert",
        "turn a checkpoint into one plain file",
        (
            "Writes the weights of a training checkpoint, of any plan and number of ranks, as one "
            "unsharded state dict: model.load_state_dict(torch.load(FILE, weights_only=True)). "
            "Starts no ranks; needs as much memory as the model has weights."
        ),
        "torchrec-picasso convert --checkpoint runs/dlrm -o dlrm.pt",
        "torchrec-picasso convert --checkpoint runs/dlrm/step_00000200 -o dlrm_200.pt",
        check=check_convert,
    )
    command.parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="FOLDER",
        help="a checkpoint, or a run's folder, whose newest complete checkpoint is read",
    )
    command.out("file to write")
    command.reads("checkpoint")


def _quality(subcommands: Subcommands) -> None:
    command = Command(
        subcommands,
        "quality",
        "check that models train as stock does, and learn what they should",
        (
            "Runs checks: losses and AUC of a model equal stock TorchRec's, its AUC is above "
            "another model's, or its AUC or loss has a known value. Fails if a check does not hold."
        ),
        "torchrec-picasso quality --config configs/quality.yaml",
        (
            "torchrec-picasso quality --config configs/quality.yaml "
            "--only din_parity can_above_din --seed 1"
        ),
        (
            "torchrec-picasso quality --config configs/quality.yaml "
            "--json benchmarks/results/quality.json"
        ),
        check=check_quality,
    )
    command.config("YAML file of checks")
    command.parser.add_argument(
        "--only", nargs="+", metavar="NAME", help="some of them (default: all)"
    )
    command.integer(
        "--seed", at_least(0), "seed of weights and generated samples (default: as configured)"
    )
    command.file("--json", "results to write")
    command.reads("config")
