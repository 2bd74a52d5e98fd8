"""``convert``: from a run's folder to one file; what it cannot use is one clear line."""

from pathlib import Path

import torch

from tests.app.cli.support import TINY_CONFIG, Capture, error_of, output_of
from torchrec_picasso.app.config import load_config
from torchrec_picasso.app.zoo.registry import build_model, make_source


def test_a_run_becomes_one_file(tmp_path: Path, capsys: Capture) -> None:
    config, run, out = tmp_path / "run.yaml", tmp_path / "run", tmp_path / "model.pt"
    config.write_text(
        f"{TINY_CONFIG}checkpoint: {{folder: {run}, every_steps: 2, async_save: true}}\n"
    )
    output_of(["train", "--config", str(config)], capsys)
    assert sorted(path.name for path in run.iterdir()) == ["step_00000002", "step_00000004"]
    (run / "step_00000006.tmp").mkdir()
    said = output_of(["convert", "--checkpoint", str(run), "-o", str(out)], capsys)
    assert said == f"wrote {out}: 12 tensors, 0.4 MB, from {run / 'step_00000004'}\n"
    settings = load_config(config)
    model = build_model(settings, make_source(settings.data, settings.seed))
    plain = torch.load(out, weights_only=True)
    model.load_state_dict(plain, strict=True, assign=True)
    assert not any(parameter.is_meta for parameter in model.parameters())
    # another checkpoint by its own name, which is another state of the same model
    other = tmp_path / "other.pt"
    step_2 = str(run / "step_00000002")
    output_of(["convert", "--checkpoint", step_2, "-o", str(other)], capsys)
    before = torch.load(other, weights_only=True)
    assert before.keys() == plain.keys()
    assert not any(torch.equal(before[name], tensor) for name, tensor in plain.items())
    _refusals(tmp_path, capsys)


def _refusals(tmp_path: Path, capsys: Capture) -> None:
    run, out = tmp_path / "run", str(tmp_path / "new.pt")

    def refused(checkpoint: Path, out: str = out) -> str:
        return error_of(["convert", "--checkpoint", str(checkpoint), "-o", out], capsys)

    whole = tmp_path / "model.pt"
    assert refused(run, str(whole)) == (
        f"--out {whole}: exists already; move it away or name another file"
    )
    assert "there is no folder" in refused(run, str(tmp_path / "none" / "new.pt"))
    begun = tmp_path / "begun"
    (begun / "step_00000002.tmp").mkdir(parents=True)
    for nothing in (tmp_path / "none", whole, begun, begun / "step_00000002.tmp"):
        assert refused(nothing).startswith(f"{nothing}: no checkpoint in it; expected folders")
    newest = run / "step_00000004"
    next(iter(sorted(newest.glob("*.distcp")))).unlink()
    assert refused(newest) == f"{newest}: __0_0.distcp is missing; name another checkpoint"
    (newest / "SHA256SUMS").unlink()  # a checkpoint that has no sums
    assert refused(newest).startswith(f"{newest}: cannot be read (")
    (newest / ".metadata").write_text("something else")
    assert refused(newest).startswith(f"{newest}: cannot be read (")
    assert not list(tmp_path.glob("new.pt*"))
