"""Parts that the tests of the subcommands share: a small run, and how a refusal must look."""

import pytest

from torchrec_picasso.app.cli.main import main

Capture = pytest.CaptureFixture[str]

TINY_CONFIG = """
steps: 4
log_every: 2
data: {batch_size: 16, row_scale: 0.001, num_tables: 4, heldout_steps: 1}
model: {embedding_dim: 8, dense_layers: [8], over_layers: [8]}
sharding: {hot_rows: 20}
"""


def error_of(argv: list[str], capsys: Capture) -> str:
    """The message of a command that must end with exit code 2 and without a traceback."""
    assert main(argv) == 2
    message = capsys.readouterr().err
    assert message.startswith("torchrec-picasso: error: ")
    assert "Traceback" not in message
    return message.removeprefix("torchrec-picasso: error: ").rstrip("\n")


def output_of(argv: list[str], capsys: Capture) -> str:
    """Returns what a command that must succeed prints on stdout."""
    code = main(argv)
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out
