"""``convert``: from a run's folder to one file; what it cannot use is one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.app.cli.support import TINY_CONFIG, error_of, output_of
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.zoo.registry import build_model, make_source


def write_config(folder: Path, name: str, settings: str = TINY_CONFIG) -> str:
    file = folder / name
    checkpoint = f"{{folder: {folder / 'run'}, every_steps: 2, async_save: true}}"
    file.write_text(f"{settings}checkpoint: {checkpoint}\n")
    return str(file)


def test_a_run_becomes_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, run, out = write_config(tmp_path, "run.yaml"), tmp_path / "run", tmp_path / "model.pt"
    output_of(["train", "--config", config], capsys)
    assert sorted(path.name for path in run.iterdir()) == ["step_00000002", "step_00000004"]
    (run / "step_00000006.tmp").mkdir()
    argv = ["convert", "--config", config, "--checkpoint", str(run)]
    said = output_of([*argv, "-o", str(out)], capsys)
    assert said == f"wrote {out}: 12 tensors, 0.4 MB, from {run / 'step_00000004'}\n"
    settings = load_config(config)
    model = build_model(settings, make_source(settings.data, settings.seed))
    plain = torch.load(out, weights_only=True)
    model.load_state_dict(plain, strict=True, assign=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    # another checkpoint by its own name, which is another state of the same model
    other = tmp_path / "other.pt"
    argv[-1] = str(run / "step_00000002")
    output_of([*argv, "-o", str(other)], capsys)
    before = torch.load(other, weights_only=True)
    assert before.keys() == plain.keys()
    assert not any(torch.equal(before[name], tensor) for name, tensor in plain.items())
    _refusals(tmp_path, config, capsys)


def _refusals(tmp_path: Path, config: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = tmp_path / "run", str(tmp_path / "new.pt")

    def refused(checkpoint: Path, out: str = out, config: str = config) -> str:
        argv = ["convert", "--config", config, "--checkpoint", str(checkpoint), "-o", out]
        return error_of(argv, capsys)

    whole = tmp_path / "model.pt"
    assert refused(run, str(whole)) == (
        f"--out {whole}: exists already; move it away or name another file"
    )
    assert "there is no folder" in refused(run, str(tmp_path / "none" / "new.pt"))
    name_it = "name the checkpoint.folder of a run, or one checkpoint in it"
    none = tmp_path / "none"
    assert refused(none) == f"{none}: there is no such folder; {name_it}"
    assert refused(whole) == f"{whole}: is a file; {name_it}"
    left = run / "step_00000006.tmp"
    assert refused(left) == f"{left}: a checkpoint that was not finished; name one without .tmp"
    begun = tmp_path / "begun"
    (begun / "step_00000002.tmp").mkdir(parents=True)
    assert refused(begun) == (
        f"{begun}: not a checkpoint, and none is in it but unfinished ones (step_00000002.tmp); "
        f"{name_it}"
    )
    wide = write_config(tmp_path, "wide.yaml", TINY_CONFIG.replace("dim: 8,", "dim: 16,"))
    newest = run / "step_00000004"
    message = refused(run, config=wide)
    assert message.startswith(f"{newest}: a checkpoint of another model, it has ")
    assert "instead of" in message
    assert message.endswith("pass the --config that it was trained with")
    next(iter(sorted(newest.glob("*.distcp")))).unlink()
    assert refused(newest) == f"{newest}: __0_0.distcp is missing; name another checkpoint"
    (newest / "SHA256SUMS").unlink()  # a checkpoint that has no sums
    assert refused(newest).startswith(f"{newest}: cannot be read (")
    (newest / ".metadata").write_text("something else")
    assert refused(newest).startswith(f"{newest}: not a checkpoint (")
    assert not list(tmp_path.glob("new.pt*"))
