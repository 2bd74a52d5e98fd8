"""What users and plans rely on: public names, their signatures, and TorchRec's names behind them."""

from __future__ import annotations

import importlib.metadata
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import CacheParams

import torchrec_picasso
from torchrec_picasso import (
    FrequencyStats,
    HotColdEmbeddingBagCollectionSharder,
    HotColdParams,
    _torchrec,
    errors,
    hot_cold_planner,
    version,
)

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD

SIGNATURES: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "collect": (FrequencyStats.collect, ["batches", "model", "num_batches"]),
    "to_parquet": (FrequencyStats.to_parquet, ["self", "path"]),
    "from_parquet": (FrequencyStats.from_parquet, ["path"]),
    "merge": (FrequencyStats.merge, ["self", "other"]),
    "to_frame": (FrequencyStats.to_frame, ["self"]),
    "coverage": (FrequencyStats.coverage, ["self", "table", "num_rows"]),
    "expected_unique": (FrequencyStats.expected_unique, ["self", "table", "num_lookups"]),
}


@pytest.mark.parametrize("name", list(SIGNATURES))
def test_frequency_stats_signatures(name: str) -> None:
    function, parameters = SIGNATURES[name]
    assert list(inspect.signature(function).parameters) == parameters


def test_planner_signature() -> None:
    parameters = inspect.signature(hot_cold_planner).parameters
    assert list(parameters)[:2] == ["topology", "stats"]
    assert parameters["stats"].default is None
    for name in ("hot_rows", "curves", "constraints", "batch_size"):
        assert parameters[name].kind is KEYWORD_ONLY
        assert parameters[name].default is None
    assert [p.kind for p in parameters.values()][-1] is VAR_KEYWORD


def test_hot_cold_params() -> None:
    assert issubclass(HotColdParams, CacheParams)
    params = HotColdParams(hot_rows=[5, 2])
    assert params.hot_rows.tolist() == [2, 5]
    assert params.num_hot_rows == 2


def test_sharder_takes_its_parents_arguments() -> None:
    assert issubclass(HotColdEmbeddingBagCollectionSharder, EmbeddingBagCollectionSharder)
    ours = inspect.signature(HotColdEmbeddingBagCollectionSharder)
    assert ours == inspect.signature(EmbeddingBagCollectionSharder)


def test_all_is_complete_and_importable() -> None:
    for name in torchrec_picasso.__all__:
        assert hasattr(torchrec_picasso, name), name
    expected = {
        "FrequencyStats",
        "HotColdEmbeddingBagCollectionSharder",
        "HotColdParams",
        "hot_cold_planner",
    }
    assert expected <= set(torchrec_picasso.__all__)


def test_errors_are_one_family() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) >= 5
    assert all(issubclass(kind, errors.PicassoError) for kind in kinds)
    assert issubclass(errors.PicassoError, ValueError)


def test_torchrec_still_has_the_names_we_use() -> None:
    assert len(_torchrec.__all__) >= 20
    missing = [name for name in _torchrec.__all__ if not hasattr(_torchrec, name)]
    assert not missing


def test_the_tried_torchrec_is_the_installed_one() -> None:
    assert importlib.metadata.version("torchrec") == version.TESTED_TORCHREC
