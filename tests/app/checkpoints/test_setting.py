"""The setting beside a checkpoint: for the same ranks and batches, damaged ones by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrec_picasso.app.checkpoints.setting import read_setting, write_setting
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.schedule.schedule import Setting


def test_a_setting_comes_back_to_the_same_ranks_and_batches(tmp_path: Path) -> None:
    assert read_setting(tmp_path, 2, 512) is None
    for setting in (Setting(4, lookahead=True), Setting(1, lookahead=False)):
        write_setting(tmp_path, setting, 2, 512)
        assert read_setting(tmp_path, 2, 512) == setting
        assert read_setting(tmp_path, 4, 512) is None
        assert read_setting(tmp_path, 2, 1024) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        "\xff",
        '{"num_micro_batches": "4", "lookahead": true, "ranks": 2, "batch_size": 512}',
        '{"num_micro_batches": 4, "lookahead": 1, "ranks": 2, "batch_size": 512}',
        '{"num_micro_batches": [4], "lookahead": true, "ranks": 2, "batch_size": 512}',
    ],
)
def test_a_damaged_setting_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "setting.json").write_text(content, encoding="latin-1")
    with pytest.raises(PicassoError, match=r"setting\.json: cannot be read as a setting; delete"):
        read_setting(tmp_path, 2, 512)
