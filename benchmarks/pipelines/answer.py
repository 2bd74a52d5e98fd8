"""From a question to a report: what is refused before ranks start, and the ranks' runs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from benchmarks.cluster import run_on_hosts
from benchmarks.pipelines.compare import RankAnswer, compare_on_rank
from benchmarks.pipelines.floors import compute_floor_ms, floors
from benchmarks.pipelines.question import Question
from benchmarks.pipelines.rankings import rankings
from benchmarks.pipelines.report import Report
from benchmarks.pipelines.variants import parse_variant
from torchrec_picasso.app.config import DataConfig
from torchrec_picasso.app.zoo.registry import check_source, make_source
from torchrec_picasso.app.zoo.tables import table_specs
from torchrec_picasso.cost import CommCurves
from torchrec_picasso.errors import ConfigError

_TIMEOUT_S = 7200.0


def check_question(question: Question, curves: str | None = None) -> None:
    """Refuses what is not known, or could only fail later, on ranks.

    Raises:
        PicassoError: If a variant is not known, none is stock, data or curves cannot be read, or
            the tables do not fit into memory.
    """
    if curves and Path(curves).is_file():
        CommCurves.from_json(curves)
    variants = [parse_variant(name) for name in question.variants]
    if not any(variant.is_stock and variant.pipeline == "sparse_dist" for variant in variants):
        raise ConfigError("--variants: there is no stock one to compare with; add table_wise")
    data = question.config().data
    check_source(make_source(data, seed=0), question.world_size)
    num_stock = sum(variant.is_stock for variant in variants)
    _check_memory(data, question.dim, len(variants) - num_stock + min(3, num_stock))


def answer(
    question: Question,
    curves: str | None = None,
) -> Report:
    """Measures.

    Raises:
        RankError: If a rank fails.
        ClusterError: If the links cannot be made.
    """
    with tempfile.TemporaryDirectory(prefix="pipelines_") as folder:
        answers: list[RankAnswer] = run_on_hosts(
            compare_on_rank,
            question.hosts,
            question.rate_mbit,
            *(question, curves or str(Path(folder) / "curves.json")),
            timeout_s=_TIMEOUT_S,
            ranks_per_host=question.ranks_per_host,
        )
    compute_ms = compute_floor_ms(question)
    results_RC = [answer.results for answer in answers]
    found = rankings(results_RC, question.batch_size, question.ranks_per_host)
    return Report(
        question=question,
        variants=found,
        probe_ms=answers[0].probe_ms,
        left_out=answers[0].left_out,
        floors=floors(question, found, compute_ms),
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
