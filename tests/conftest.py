"""Marks that depend on the machine, where real id streams lie, and seeds."""

import random
from pathlib import Path

import hypothesis
import pytest
import torch

from torchrec_picasso.app.launch.run_ranks import PRELOADED

# what the ranks of tests import
PRELOADED += ["pytest", "hypothesis", "torchrec.datasets.random", "torchrec_picasso.app.runs.train"]

# machines that build are slow now and then; a property that hangs is ended by the job's own limit
hypothesis.settings.register_profile("patient", deadline=None)
hypothesis.settings.load_profile("patient")

CHECKOUT = Path(__file__).parents[1]
CRITEO_FILE = "shared/data/criteo_tb_80k.parquet"


def real_data(file: str) -> Path | None:
    """A file of real ids, in the checkout or beside it; None where there is none."""
    found = [path for root in (CHECKOUT, CHECKOUT.parent) if (path := root / file).is_file()]
    return found[0] if found else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, and says why."""
    skips = {}
    if not torch.cuda.is_available():
        skips["gpu"] = pytest.mark.skip(reason="needs a CUDA device; PyTorch sees none")
    if real_data(CRITEO_FILE) is None:
        skips["data"] = pytest.mark.skip(
            reason=f"needs real ids, which are not distributed: no {CRITEO_FILE} here or beside"
        )
    for item in items:
        for name, skip in skips.items():
            if item.get_closest_marker(name) is not None:
                item.add_marker(skip)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Each test draws the same numbers in every run; ranks seed themselves."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def criteo_path() -> Path:
    """80,000 real samples of the Criteo Terabyte click logs, as Parquet; for tests marked data."""
    path = real_data(CRITEO_FILE)
    if path is None:
        pytest.skip(f"needs real ids, which are not distributed: no {CRITEO_FILE} here or beside")
    return path
