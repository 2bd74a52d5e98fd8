"""``calibrate``: measured curves of real ranks, in a file that planning reads."""

from pathlib import Path

import pytest

from tests.app.cli.support import Capture, error_of, output_of
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.cost.curves import COLLECTIVES

SMALLEST = ["--max-mib", "0.004", "--seconds", "0.001", "--no-local"]


def test_two_ranks_write_curves_that_planning_reads(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "curves.json"
    argv = ["calibrate", "--ranks", "2", "-o", str(out), *SMALLEST]
    argv[argv.index("0.004")] = "0.02"  # 4 and 16 KiB
    text = output_of(argv, capsys)
    curves = CommCurves.from_json(out)
    assert (curves.world_size, curves.ranks_per_host, curves.device) == (2, 2, "cpu")
    assert not curves.local.measured
    assert {"date_utc", "cpu", "torch"} <= set(curves.measured_on)
    for name in COLLECTIVES:
        assert len(curves.collectives[name].sent_bytes) == 2
        assert curves.ms(name, 4096) > 0
        assert f"\n  {name} " in text
    assert "\n2 ranks, 2 per host, gloo on cpu" in text
    assert "local work per step (assumed), ns per element:" in text
    assert text.endswith(f"wrote {out}\n")
    assert list(tmp_path.iterdir()) == [out]


def test_a_models_dense_part_is_measured_without_its_tables(
    tmp_path: Path, capsys: Capture
) -> None:
    out, config = tmp_path / "curves.json", tmp_path / "run.yaml"
    # tables that would not fit into any memory
    config.write_text(
        "data: {num_tables: 2, row_scale: 1.0, batch_size: 32}\n"
        "model: {embedding_dim: 8, dense_layers: [16], over_layers: [16]}\n"
    )
    argv = ["calibrate", "--ranks", "2", "-o", str(out), *SMALLEST, "--config", str(config)]
    text = output_of(argv, capsys)
    dense = CommCurves.from_json(out).dense
    assert dense is not None
    assert dense.forward_ms > 0
    assert dense.backward_ms > 0
    assert dense.batch_size == 32
    towers = (13 + 1) * 16 + (16 + 1) * 8  # dense layers; those over them are more
    assert 4 * towers < dense.parameter_bytes < 8 * 4 * towers
    assert "dense part: forward " in text
    argv = ["plan", "--config", str(config), "--curves", str(out)]
    assert f"{dense.total_ms:.1f} ms of it dense" in output_of(argv, capsys)
    given = output_of([*argv, "--dense-ms", "250"], capsys)
    assert "250.0 ms of it dense" in given
    assert "the dense part not known" in output_of([*argv, "--dense-ms", "0"], capsys)
    assert "--dense-ms: expected at least 0, got -1" in error_of(
        [*argv, "--dense-ms", "-1"], capsys
    )


def test_a_small_budget_is_told_by_the_largest_size(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "curves.json"
    argv = ["calibrate", "--ranks", "2", "-o", str(out), "--no-local", "--budget", "1e-9"]
    text = output_of(argv, capsys)
    curves = CommCurves.from_json(out)
    line = next(line for line in text.splitlines() if line.startswith("  all_reduce "))
    assert line.endswith(" 0.016")  # MB, of an all-reduce of 16 KiB
    assert {len(curve.sent_bytes) for curve in curves.collectives.values()} == {2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--max-mib", "0.001"], "--max-mib: expected at least 0.004 (4 KiB), got 0.001"),
        (["--budget", "0"], "--budget: expected more than 0 seconds, got 0"),
        (["--budget", "nan"], "--budget: expected more than 0 seconds, got nan"),
        (["--ranks", "0"], "--ranks: expected at least 1, got 0"),
        (["-o", "DIR/no/c.json"], "--out DIR/no/c.json: there is no folder DIR/no; make it or"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    options: list[str], words: str, tmp_path: Path, capsys: Capture
) -> None:
    placed = [option.replace("DIR", str(tmp_path)) for option in options]
    argv = ["calibrate", "-o", str(tmp_path / "curves.json"), *SMALLEST, *placed]
    assert error_of(argv, capsys).startswith(words.replace("DIR", str(tmp_path)))
    assert list(tmp_path.iterdir()) == []
