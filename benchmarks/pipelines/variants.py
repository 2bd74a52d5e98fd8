"""Variants: a placement under a train pipeline, from its name on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineFusedSparseDist

from benchmarks.pipelines.question import FORMS
from torchrec_picasso import InterleavedTrainPipeline
from torchrec_picasso.app.config import PLACEMENTS
from torchrec_picasso.app.runs.pipelines import MakePipeline, sparse_dist
from torchrec_picasso.errors import ConfigError
from torchrec_picasso.placement import Form
from torchrec_picasso.train_pipeline.step_report import OnStep

AUTO = "auto"
"""In place of a number: the pipeline chooses."""

_NO_LOOKAHEAD = "interleaved_no_lookahead"
_MOST_VALUES = {"hot_cold": 1, "interleaved": 3, _NO_LOOKAHEAD: 3}
_HELP = (
    "NAME is one of table_wise, row_wise, column_wise, planner, fused, hot_cold, "
    "hot_cold:HOT_ROWS, interleaved, interleaved:MICRO_BATCHES, "
    "interleaved:MICRO_BATCHES:HOT_ROWS, interleaved:MICRO_BATCHES:HOT_ROWS:WAVES, and the same "
    "with interleaved_no_lookahead, each also with +loadN for a DataLoader of N workers, and with "
    "+prepareN for one that reads ids ahead, or +node_rows or +rows for that form of its tables; "
    f"MICRO_BATCHES is a number from 1 on or {AUTO}"
)


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A placement and the pipeline that trains it.

    Args:
        name: Name on the command line.
        placement: One of :data:`.app.config.PLACEMENTS`; empty = the best stock one.
        pipeline: ``"sparse_dist"``, ``"fused"``, ``"interleaved"``, or ``"loop"``, TorchRec's
            without any overlap.
        hot_rows: Hot rows of a hot/cold placement; ``None`` = the planner's own choice.
        num_micro_batches: Micro-batches of the interleaved pipeline; ``None`` = its own choice.
        lookahead: Lookahead of the interleaved pipeline; ``None`` = its own choice.
        num_waves: Waves that its tables travel in.
        num_workers: Workers of its DataLoader; ``None`` = its batches are made before.
        prepares: Whether the DataLoader reads their ids.
        form: Form of its row-exchanged tables; ``None`` = the planner's.
        is_again: Whether it is a stock variant once more, to show noise; nothing is compared with
            it.
    """

    name: str
    placement: str
    pipeline: str = "sparse_dist"
    hot_rows: int | None = None
    num_micro_batches: int | None = None
    lookahead: bool | None = None
    num_waves: int = 1
    num_workers: int | None = None
    prepares: bool = False
    form: Form | None = None
    is_again: bool = False

    @property
    def is_stock(self) -> bool:
        """Whether others are compared with it: nothing of this package is in it, and it is not
        there once more."""
        is_ours = self.placement == "hot_cold" or self.pipeline == "interleaved"
        return not (is_ours or self.is_again)

    @property
    def chooses(self) -> bool:
        """Whether its pipeline chooses its micro-batches on the first steps."""
        return self.pipeline == "interleaved" and self.num_micro_batches is None

    @property
    def needs_curves(self) -> bool:
        """Whether the planner weighs measured curves for it."""
        return self.placement == "hot_cold" and self.hot_rows is None


def parse_variant(name: str) -> Variant:
    """A variant from its name on the command line.

    Raises:
        ConfigError: If there is none of this name.
    """
    before, plus, option = name.partition("+")
    kind, *texts = before.split(":")
    refusal = ConfigError(f"--variants: got {name!r}; {_HELP}")
    if kind not in (*PLACEMENTS, "fused", *_MOST_VALUES) or len(texts) > _MOST_VALUES.get(kind, 0):
        raise refusal
    is_interleaved = kind in ("interleaved", _NO_LOOKAHEAD)
    loader = re.fullmatch(r"(load|prepare)(\d+)", option)
    form = next((form for form in FORMS if form == option), None)
    if plus and ((loader is None and form is None) or not is_interleaved):
        raise refusal
    is_auto = is_interleaved and texts[:1] == [AUTO]
    numbers = texts[1:] if is_auto else texts
    if not all(text.isdecimal() for text in numbers):
        raise refusal
    values: list[int | None] = [int(text) for text in numbers]
    if is_interleaved:
        given = [None, *values] if is_auto else values
        num_micro_batches, hot_rows, num_waves, *_ = [*given, None, None, None]
        if num_micro_batches == 0 or num_waves == 0:
            raise refusal
        return Variant(
            name=name,
            placement="hot_cold",
            pipeline="interleaved",
            num_micro_batches=num_micro_batches,
            hot_rows=hot_rows,
            lookahead=False if kind == _NO_LOOKAHEAD else None,
            num_waves=num_waves or 1,
            num_workers=None if loader is None else int(loader[2]),
            prepares=loader is not None and loader[1] == "prepare",
            form=form,
        )
    if kind == "fused":
        return Variant(name=name, placement="", pipeline="fused")
    return Variant(name=name, placement=kind, hot_rows=values[0] if values else None)


def pipeline_options(variant: Variant) -> dict[str, Any]:
    """Settings of the interleaved pipeline; ``None`` = it chooses itself."""
    lookahead = variant.lookahead
    if not variant.chooses:
        lookahead = lookahead is not False
    return {"num_micro_batches": variant.num_micro_batches, "lookahead": lookahead}


def pipeline_maker(variant: Variant, on_step: OnStep | None = None) -> MakePipeline:
    """Factory of the variant's pipeline; an interleaved one reports its steps to ``on_step``."""
    makers: dict[str, MakePipeline] = {
        "sparse_dist": sparse_dist,
        "fused": TrainPipelineFusedSparseDist,
        "loop": TrainPipelineBase,
        "interleaved": lambda model, optimizer, device: InterleavedTrainPipeline(
            model, optimizer, device, on_step=on_step, **pipeline_options(variant)
        ),
    }
    return makers[variant.pipeline]
