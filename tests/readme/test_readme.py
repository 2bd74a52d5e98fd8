"""Every command and every line of Python in the pages of :data:`PAGES` runs, made short.

Shell commands run literally, one after the other, in a folder of their own that holds what they
name: the repository's configuration with few steps, and files of samples. Changed are only:

- the program: this package in this process for ``torchrec-picasso`` and for its ``torchrun``, which
  ``tests/app/cli/test_cli.py`` starts, and this Python in place of other ``torchrun`` and
  ``.venv/bin/python``; ``torchrun`` also looks for a free port;
- ``make TARGET``: the target is looked for in the Makefile, not run;
- ``pip``, ``git``, ``export`` and ``cd``: not run, since they would change the machine;
- commands of :data:`SHORT`: they get arguments that make them short;
- ``train`` without ``--resume`` starts without checkpoints: the text shows several ways to start;
- ``plan`` finds statistics of the configuration it plans;
- commands of :data:`ONLY_HELP`: their options are looked for in ``--help``.

Python blocks of a page run in sequence, in one namespace, on two ranks, after :data:`PREAMBLE`,
which makes the things that the text takes for granted.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.readme.blocks import Block, blocks_of, commands_of, unknown_options
from torchrec_picasso.app.cli.main import main
from torchrec_picasso.app.launch.run_ranks import run_ranks

CHECKOUT = Path(__file__).parents[2]
PAGES = {
    page: blocks_of((CHECKOUT / page).read_text())
    for page in (
        "README.md",
        "docs/quickstart.md",
        "docs/migration.md",
        "docs/recipes.md",
        "docs/usage.md",
    )
}
BLOCKS = [block for blocks in PAGES.values() for block in blocks]
FEWEST_BLOCKS, FEWEST_PYTHON, FEWEST_COMMANDS = 8, 6, 6
"""The walk must see at least these; a walk that sees nothing finds nothing."""
TIMEOUT_S = 120

SHORT = {
    "demo": "--steps 10 --ranks 2 --batch-size 32 --dim 8 --rate-mbit 0",
    "calibrate": "--max-mib 1 --seconds 0.01 --no-local",
}
"""Arguments added to our subcommands, unless they are asked for help only."""

SHORT_CONFIG = {
    "steps": 4,
    "log_every": 2,
    "data": {"batch_size": 16, "row_scale": 0.001, "heldout_steps": 1},
    "model": {"embedding_dim": 8, "dense_layers": [8], "over_layers": [8]},
    "checkpoint": {"every_steps": 2},
}
"""Laid over every configuration of the repository."""

ONLY_HELP = ("benchmarks.",)
"""Modules that take minutes, root or hosts of their own."""

NOT_RUN = ("pip", "git", "export", "cd", "source")

PREAMBLE = """
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.models.dlrm import DLRM, DLRMTrain

from torchrec_picasso import CommCurves

torch.manual_seed(0)
device = torch.device("cpu")
pg = dist.group.WORLD
folder = "../checkpoint"  # each rank runs in a folder of its own
tables = [
    EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=100, feature_names=[feature])
    for name, feature in (("t_user", "user"), ("t_item", "item"))
]


def make_model():
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables),
            dense_in_features=4,
            dense_arch_layer_sizes=[8, 8],
            over_arch_layer_sizes=[8, 1],
        )
    )


model = make_model()
topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
CommCurves.assumed(dist.get_world_size(), gbytes_per_s=0.1).to_json("curves.json")


def make_batch():
    ids = (torch.rand(2 * 16) ** 3 * 100).long()
    lengths = torch.ones(2 * 16, dtype=torch.int32)
    features = KeyedJaggedTensor(keys=["user", "item"], values=ids, lengths=lengths)
    return Batch(torch.rand(16, 4), features, torch.randint(0, 2, (16,)).float())


sample_batches = [make_batch() for _ in range(10)]
batches = iter([make_batch() for _ in range(6)])
dataloader = iter([make_batch() for _ in range(6)])
"""

AFTER_SHARDING = """
if isinstance(model, DistributedModelParallel) and "optimizer" not in globals():
    dense = [p for name, p in model.named_parameters() if "embedding_bags" not in name]
    optimizer = torch.optim.SGD(dense, lr=0.1)
"""
"""Run before each block: the optimizer is that of the sharded model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("readme")
    for config in (CHECKOUT / "configs").glob("*.yaml"):
        short = yaml.safe_load(config.read_text())
        if "data" not in short:  # a list of checks
            continue
        for key, value in SHORT_CONFIG.items():
            short[key] = {**short[key], **value} if isinstance(value, dict) else value
        (path / "configs").mkdir(exist_ok=True)
        (path / "configs" / config.name).write_text(yaml.safe_dump(short))
    rng = np.random.default_rng(0)
    columns = {name: rng.zipf(1.3, 2000) % 500 for name in ("user", "item")}
    pq.write_table(pa.table(columns), path / "day_0.parquet")
    return path


def _run(argv: list[str], folder: Path) -> str:
    """The output of a command that must succeed.

    Our own command line runs in this process, as a test of it does: imports take seconds.
    """
    if argv[:3] == [sys.executable, "-m", "torchrec_picasso"]:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            try:
                code: object = main(argv[3:])
            except SystemExit as end:  # of the parser: asked for help, or refused
                code = end.code
        assert code in (0, None), shlex.join(argv)
        return ""
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _as_python(words: list[str]) -> list[str]:
    """The command of this Python that a command line means."""
    program, *arguments = words
    if program == "torchrun" and "torchrec_picasso" in arguments:
        place = arguments.index("torchrec_picasso")
        assert arguments[:place] == ["--nproc-per-node", "2", "-m"]
        return [sys.executable, "-m", *arguments[place:]]
    if program == "torchrun":
        return [sys.executable, "-m", "torch.distributed.run", "--standalone", *arguments]
    if Path(program).name == "torchrec-picasso":
        return [sys.executable, "-m", "torchrec_picasso", *arguments]
    if re.fullmatch(r"python(3(\.\d+)?)?", Path(program).name):
        return [sys.executable, *arguments]
    raise AssertionError(f"{shlex.join(words)}: no rule how to run {program!r}; add one here")


def _subcommand(argv: list[str]) -> str:
    """Of our command line; empty for other programs."""
    if "torchrec_picasso" not in argv:
        return ""
    return argv[argv.index("torchrec_picasso") + 1]


def run_command(command: str, extra: str, folder: Path) -> None:
    """Runs one command, or checks it as the head of this file says."""
    words = shlex.split(command)
    if words[0] in NOT_RUN:
        return
    if words[0] == "make":
        targets = re.findall(r"^(\w+):", (CHECKOUT / "Makefile").read_text(), re.MULTILINE)
        asked = [word for word in words[1:] if "=" not in word]
        assert asked, command
        assert set(asked) <= set(targets), f"{command}: the Makefile has {targets}"
        return
    argv = _as_python(words)
    module = argv[argv.index("-m") + 1] if "-m" in argv else ""
    if module.startswith(ONLY_HELP):
        unknown = unknown_options(module, argv[3:])
        assert not unknown, f"{command}: {unknown} not in --help"
        return
    subcommand = _subcommand(argv)
    if "--help" not in argv:
        argv += shlex.split(extra) if extra else shlex.split(SHORT.get(subcommand, ""))
    if subcommand == "plan" and "--stats" in argv:
        _make_stats(argv, folder)
    if subcommand == "train" and "--resume" not in argv:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # several ways to start one run
    _run(argv, folder)


def _make_stats(argv: list[str], folder: Path) -> None:
    """Statistics of the very configuration that is planned; a reader has counted real data."""
    config, file = (argv[argv.index(option) + 1] for option in ("--config", "--stats"))
    count = [sys.executable, "-m", "torchrec_picasso", "stats", "--config", config]
    _run([*count, "--batches", "5", "-o", file], folder)


SHELL = [block for block in BLOCKS if block.kind == "shell" and block.marker != "skip"]
PYTHON = [block for block in BLOCKS if block.kind == "python" and block.marker != "skip"]


def test_there_are_blocks() -> None:
    assert len(BLOCKS) >= FEWEST_BLOCKS
    assert len(PYTHON) >= FEWEST_PYTHON
    assert sum(len(commands_of(block)) for block in SHELL) >= FEWEST_COMMANDS


def test_commands_run(folder: Path) -> None:
    """In one test, since later ones read what earlier ones wrote."""
    for block in SHELL:
        for command in commands_of(block):
            run_command(command, block.note, folder)


@pytest.mark.parametrize("page", PAGES)
def test_python_runs(page: str, tmp_path: Path) -> None:
    together = []
    for block in PAGES[page]:
        if block.kind != "python" or block.marker == "skip":
            continue
        if block.marker == "needs" and importlib.util.find_spec(block.note) is None:
            continue
        if block.marker != "script":
            together.append(block)
            continue
        file = tmp_path / f"line_{block.line}.py"
        file.write_text(block.text)
        ranks = ["torchrun", f"--nproc-per-node={block.note}"] if block.note else ["python"]
        _run(_as_python([*ranks, str(file)]), tmp_path)
    if together:
        names = run_ranks(_exec, 2, page, together, str(tmp_path), timeout_s=TIMEOUT_S)
        assert all("model" in on_rank for on_rank in names)


def _exec(rank: int, world_size: int, page: str, blocks: list[Block], folder: str) -> list[str]:
    """Runs the blocks of a page; the names that they define."""
    own = Path(folder, f"rank_{rank}")
    own.mkdir()
    os.chdir(own)
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(PREAMBLE, "the test's preamble", "exec"), names)
    for block in blocks:
        exec(AFTER_SHARDING, names)
        # lines of errors are those of the file
        source = "\n" * block.line + block.source
        exec(compile(source, page, "exec"), names)
    return sorted(names)


EXAMPLE = """
Text.

```
make demo    # a comment
tool --a 1 \\
    --b 2
```
<!-- test: args --steps 4 -->

```console
$ tool run
its output
```
<!-- test: skip needs a GPU -->
```python
print(1)
```
```mermaid
graph
```
"""


def test_blocks_are_taken_apart() -> None:
    plain, console, python, other = blocks_of(EXAMPLE)
    assert [b.kind for b in (plain, console, python, other)] == [
        *("shell", "shell", "python", "other")
    ]
    assert commands_of(plain) == ["make demo", "tool --a 1 --b 2"]
    assert commands_of(console) == ["tool run"]
    assert (console.marker, console.note) == ("args", "--steps 4")
    assert (python.marker, python.note, python.line) == ("skip", "needs a GPU", 16)


@pytest.mark.parametrize(
    ("markdown", "message"),
    [("```\na", "does not end"), ("<!-- test: skip -->\n```\na\n```", "without a reason")],
)
def test_blocks_that_are_refused(markdown: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks_of(markdown)


@pytest.mark.parametrize(
    "command",
    [
        "make coffee",
        "torchrec-picasso brew",
        "torchrec-picasso demo --no-such-option 1",
        "python -m benchmarks.pipelines --no-such-option",
        "coffee --strong",
    ],
)
def test_commands_that_do_not_work_are_found(command: str, folder: Path) -> None:
    with pytest.raises(AssertionError):
        run_command(command, "", folder)
