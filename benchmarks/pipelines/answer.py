"""From a question to a report: what is refused before ranks start, and the ranks' runs."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path

from benchmarks.cluster import run_on_hosts
from benchmarks.pipelines.compare import RankAnswer, compare_on_rank
from benchmarks.pipelines.floors import compute_floor_ms, floors
from benchmarks.pipelines.question import Question
from benchmarks.pipelines.rankings import rankings
from benchmarks.pipelines.report import Report
from benchmarks.pipelines.variants import interleaved_is_missing, parse_variant
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.launch.run_ranks import run_ranks
from torchrec_picasso.app.zoo.registry import check_source, make_source
from torchrec_picasso.app.zoo.tables import table_specs
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import ConfigError

__all__ = ["answer", "check_question", "without_missing"]

_TIMEOUT_S = 7200.0


def without_missing(question: Question) -> tuple[Question, dict[str, str]]:
    """The question without variants that this package cannot field.

    Returns:
        The question, and by name why a variant is left out.

    Raises:
        ConfigError: If a variant is not known, or none is stock.
    """
    variants = {name: parse_variant(name) for name in question.variants}
    left_out = {}
    missing = interleaved_is_missing()
    for name, variant in list(variants.items()):
        if variant.pipeline == "interleaved" and missing is not None:
            left_out[name] = missing
            del variants[name]
    if not any(c.is_stock and c.pipeline == "sparse_dist" for c in variants.values()):
        raise ConfigError("--variants: there is no stock one to compare with; add table_wise")
    return dataclasses.replace(question, variants=tuple(variants)), left_out


def check_question(question: Question, curves: str | None = None) -> None:
    """Refuses what could only fail later, on ranks.

    Args:
        question: What is to be measured.
        curves: File of measured curves, if it is to be read.

    Raises:
        PicassoError: If data or curves cannot be read, or the tables do not fit into memory.
    """
    if curves and Path(curves).is_file():
        CommCurves.from_json(curves)
    data = question.config().data
    check_source(make_source(data, seed=0), question.world_size)
    variants = [parse_variant(name) for name in question.variants]
    num_stock = sum(variant.is_stock for variant in variants)
    _check_memory(data, question.dim, len(variants) - num_stock + min(3, num_stock))


def answer(
    question: Question,
    left_out: dict[str, str],
    curves: str | None = None,
    local_from: str | None = None,
) -> Report:
    """Measures.

    Args:
        question: What; its rate must be one that links can have here.
        left_out: Why variants that were asked for do not take part.
        curves: File of measured curves, written if missing; ``None`` = measured and forgotten.
        local_from: File of curves of the same ranks on other links, whose local costs hold here
            too: over a slow link they take minutes to measure.

    Raises:
        RankError: If a rank fails.
        ClusterError: If the links cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="pipelines_") as folder:
        answers = _compare(question, curves or str(Path(folder) / "curves.json"), local_from)
    compute_ms = compute_floor_ms(question)
    results_RC = [answer.results for answer in answers]
    found = rankings(results_RC, question.batch_size, question.ranks_per_host)
    return Report(
        question=question,
        variants=found,
        probe_ms=answers[0].probe_ms,
        left_out=left_out | answers[0].left_out,
        floors=floors(question, found, compute_ms),
    )


def _compare(question: Question, curves: str, local_from: str | None) -> list[RankAnswer]:
    arguments = question, curves, local_from
    if question.rate_mbit is None:
        return run_ranks(compare_on_rank, question.world_size, *arguments, timeout_s=_TIMEOUT_S)
    return run_on_hosts(
        compare_on_rank,
        question.hosts,
        question.rate_mbit,
        *arguments,
        timeout_s=_TIMEOUT_S,
        ranks_per_host=question.ranks_per_host,
    )


def _check_memory(data: DataConfig, dim: int, num_models: int) -> None:
    """Refuses what would end in the kernel's killing of a rank, where the kernel tells."""
    facts = Path("/proc/meminfo")
    if not facts.is_file():
        return
    words = facts.read_text().partition("MemAvailable:")[2].split()
    needed = num_models * dim * 4 * sum(table.num_embeddings for table in table_specs(data))
    if words and needed > int(words[0]) * 1024:
        raise ConfigError(
            f"the tables of {num_models} variants take {needed / 1e9:.1f} GB, but "
            f"{int(words[0]) / 1e6:.1f} GB of memory are free; lower --max-rows or --dim, or name "
            "fewer --variants"
        )
