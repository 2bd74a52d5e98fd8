"""Names that users and plans rely on: public ones, signatures, and the TorchRec names behind."""

import inspect
from operator import attrgetter

import pytest
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder

import torchrec_picasso
from tests.support.packaging import pins
from torchrec_picasso import errors, version

KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY
VAR_KEYWORD = inspect.Parameter.VAR_KEYWORD

PUBLIC = (
    "CommCurves",
    "FrequencyStats",
    "HotColdEmbeddingBagCollectionSharder",
    "HotColdParams",
    "InterleavedTrainPipeline",
    "hot_cold_planner",
)

METHODS = {
    "FrequencyStats.collect": ["batches", "model", "num_batches"],
    "FrequencyStats.to_parquet": ["self", "path"],
    "FrequencyStats.from_parquet": ["path"],
    "FrequencyStats.merge": ["self", "other"],
    "FrequencyStats.to_frame": ["self"],
    "FrequencyStats.coverage": ["self", "table", "num_rows"],
    "FrequencyStats.expected_unique": ["self", "table", "num_lookups"],
    "CommCurves.measure": ["pg"],
    "CommCurves.to_json": ["self", "path"],
    "CommCurves.from_json": ["path"],
}


@pytest.mark.parametrize("name", PUBLIC)
def test_public_name_is_at_the_top(name: str) -> None:
    assert name in torchrec_picasso.__all__
    assert hasattr(torchrec_picasso, name)


@pytest.mark.parametrize(("method", "expected"), METHODS.items())
def test_signatures(method: str, expected: list[str]) -> None:
    """Users call these by position: what came later is keyword-only and has a default."""
    function = attrgetter(method)(torchrec_picasso)
    parameters = list(inspect.signature(function).parameters.values())
    assert [p.name for p in parameters[: len(expected)]] == expected
    for added in parameters[len(expected) :]:
        assert added.kind is KEYWORD_ONLY
        assert added.default is not inspect.Parameter.empty


def test_planner_signature() -> None:
    parameters = inspect.signature(torchrec_picasso.hot_cold_planner).parameters
    assert list(parameters)[:2] == ["topology", "stats"]
    assert parameters["stats"].default is None
    for name in ("hot_rows", "curves", "constraints", "batch_size"):
        assert parameters[name].kind is KEYWORD_ONLY
        assert parameters[name].default is None
    assert [p.kind for p in parameters.values()][-1] is VAR_KEYWORD


def test_sharder_takes_its_parents_arguments() -> None:
    sharder = torchrec_picasso.HotColdEmbeddingBagCollectionSharder
    assert issubclass(sharder, EmbeddingBagCollectionSharder)
    ours = inspect.signature(sharder).parameters
    parents = inspect.signature(EmbeddingBagCollectionSharder).parameters
    assert list(ours)[: len(parents)] == list(parents)
    assert all(ours[name].default == parameter.default for name, parameter in parents.items())
    assert all(ours[name].kind is KEYWORD_ONLY for name in list(ours)[len(parents) :])


def test_interleaved_pipeline_signature() -> None:
    parameters = inspect.signature(torchrec_picasso.InterleavedTrainPipeline).parameters
    assert list(parameters)[:3] == ["model", "optimizer", "device"]
    expected = {"num_micro_batches": None, "lookahead": None, "split_batch": None}
    for name, default in expected.items():
        assert parameters[name].kind is KEYWORD_ONLY
        assert parameters[name].default == default
    for method in ("progress", "summary"):
        assert hasattr(torchrec_picasso.InterleavedTrainPipeline, method)


def test_errors_are_one_family() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass)]
    assert len(kinds) >= 5
    assert all(issubclass(kind, errors.PicassoError) for kind in kinds)
    assert issubclass(errors.PicassoError, ValueError)


def test_the_tried_torchrec_is_the_pinned_one() -> None:
    assert pins("requirements-nodeps.txt")["torchrec"] == version.TESTED_TORCHREC
