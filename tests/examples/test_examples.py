"""Every example trains, on one rank and on two; without its marked lines the DLRM is stock."""

import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.readme.blocks import blocks_of
from tests.support.packaging import ROOT
from torchrec_picasso.app.launch.run_ranks import run_ranks

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
MOST_LINES, FEW_STEPS = 80, 5  # later a ReLU may have fallen to the other side


def run_file(rank: int, world_size: int, file: str) -> str:
    """Returns what a rank prints; it has joined the group that torchrun would make."""
    dist.init_process_group = lambda backend: None  # type: ignore[assignment]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        runpy.run_path(file, run_name="__main__")
    return out.getvalue()


def losses_of(file: Path, world_size: int) -> list[float]:
    """The last loss that each rank prints, or one for all."""
    said = "".join(run_ranks(run_file, world_size, str(file), timeout_s=60))
    assert world_size == 1 or "interleaved" in said or file.stem == "stock", said
    return [float(loss) for loss in re.findall(r"loss (\d\.\d+)", said)]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_it_trains(file: Path, world_size: int) -> None:
    assert len(file.read_text().splitlines()) <= MOST_LINES
    losses = losses_of(file, world_size)
    assert losses
    assert all(0 < loss < 0.6 for loss in losses)  # a coin has 0.693


def test_the_marks_are_the_diff_of_the_readme(tmp_path: Path) -> None:
    source = (ROOT / "examples" / "dlrm.py").read_text()
    (diff,) = (b for b in blocks_of((ROOT / "README.md").read_text()) if b.language == "diff")
    removed = [line[1:].strip() for line in diff.text.splitlines() if line.startswith("-")]
    assert removed == re.findall(r"^# - (.*)$", source, re.MULTILINE)
    few = re.sub(r"^(.*, STEPS = .*, )\d+$", rf"\g<1>{FEW_STEPS}", source, flags=re.MULTILINE)
    # placements draw other random rows
    few = few.replace("feature_names=[name]", "feature_names=[name], init_fn=torch.nn.init.ones_")
    assert few.count("init.ones_") == 1
    kept = [line for line in few.splitlines() if not re.search(r"  # \+", line)]
    ours, stock = tmp_path / "ours.py", tmp_path / "stock.py"
    ours.write_text(few)
    stock.write_text("\n".join(line.removeprefix("# - ") for line in kept))
    assert "picasso" not in stock.read_text()
    assert losses_of(ours, 2) == pytest.approx(losses_of(stock, 2), abs=2e-6)  # 6 digits
