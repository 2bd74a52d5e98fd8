"""The predicted memory of a step is what ranks hold: hot rows, micro-batches, relays by host."""

import pytest

from benchmarks.sequence_memory import _parser, measure
from torchrec_picasso.app.launch.run_ranks import run_ranks

SIZES = "--samples 256 --history 64 --dim 16 --rows 40000"


@pytest.mark.parametrize(
    ("num_ranks", "setting", "options"),
    [
        (4, "1:ahead", "--ranks-per-host 2"),
        *((2, setting, "--hot-rows 20000") for setting in ("1:ahead", "4:ahead", "1", "4")),
    ],
)
def test_ranks_hold_what_is_predicted(num_ranks: int, setting: str, options: str) -> None:
    sizes = _parser().parse_args(f"{SIZES} {options}".split())
    ranks = run_ranks(measure, num_ranks, f"ours:{setting}", sizes, timeout_s=300)
    peaks = [rank["peak_bytes"] for rank in ranks]
    assert ranks[0]["predicted_bytes"] == pytest.approx(peaks, rel=0.1)
