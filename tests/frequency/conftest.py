"""A real stream with time, for tests marked data."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import real_data

GLOBO_FILE = "shared/data/globo_clicks_50k.parquet"


@pytest.fixture(scope="session")
def globo_path() -> Path:
    """50,000 real news clicks of 15 hours, in order of time, as Parquet; for tests marked data."""
    path = real_data(GLOBO_FILE)
    if path is None:
        pytest.skip(f"needs real clicks, which are not distributed: no {GLOBO_FILE} here or beside")
    return path
