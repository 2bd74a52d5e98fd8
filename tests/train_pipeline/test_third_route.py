"""A third route is one file: this file has one, in which a row travels once per lookup.

What a form of tables needs beside the class of its route are its properties in ``FORMS`` and the
class in ``ROUTES``. A price in ``cost/forms.py`` is for forms that plans choose by themselves.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.support.shared_run import run_once
from tests.train_pipeline import runs, test_exactness
from torchrec_picasso.exchange.waiting import tallied
from torchrec_picasso.ops.id_reader import IdReader, ReadIds
from torchrec_picasso.ops.row_order import UniqueRows
from torchrec_picasso.ops.sorts import positions_of
from torchrec_picasso.placement import FORMS, FormTraits
from torchrec_picasso.rows.group import ROUTES
from torchrec_picasso.rows.row_route import RowRoute

FORM: Any = "row_per_lookup"


class _LookupReader(IdReader):
    """Reads ids, and leaves repeats of a row apart."""

    def read(
        self, features: KeyedJaggedTensor, sizes_K: Sequence[int | None], is_weighted: bool
    ) -> ReadIds:
        ids = super().read(features, sizes_K, is_weighted)
        by_row_N = ids.rows.lookups_by_row_N
        ids_N = ids.rows.ids_U.index_select(0, ids.rows.row_of_lookup_N)
        one_each_N = torch.ones_like(by_row_N)
        rows = UniqueRows(ids_N[by_row_N], positions_of(by_row_N), by_row_N, one_each_N)
        return dataclasses.replace(ids, rows=rows)


class RowPerLookupRoute(RowRoute):
    """Tables without hot rows, whose rows travel once per lookup."""

    name = FORM
    reads_unique_rows = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._reader = _LookupReader(self.space, self.plan)


JOB = dataclasses.replace(
    test_exactness.JOBS["rows"], placement={"*": FORM, "a": 3, "b": "bags"}, batch_sizes=(16, 9)
)
"""Tables of each route in one module."""
SETTINGS = [(1, False), (1, True), (4, True)]


def _train(rank: int, world_size: int) -> dict[Any, Any]:
    forms, routes = cast(dict[str, Any], FORMS), cast(dict[str, Any], ROUTES)
    forms[FORM], routes[FORM] = FormTraits(), RowPerLookupRoute
    found: dict[Any, Any] = {}
    for name, place in {"stock": "table_wise", "rows": 0, FORM: FORM}.items():
        job = dataclasses.replace(JOB, placement={"*": place})
        with tallied() as tally:
            found[name] = runs.plain_run(job, rank, world_size)
        found[name, "bytes"] = tally.sent_bytes
    for setting in SETTINGS:
        found[setting] = runs.train_job(JOB, setting, rank, world_size)
    return found


@pytest.mark.parametrize("kind", ["rows", FORM, *SETTINGS])
def test_trains_as_stock(kind: Any) -> None:
    runs.compare_runs(run_once(_train, 2), kind, "stock")


def test_a_row_travels_for_each_of_its_lookups() -> None:
    for on_rank in run_once(_train, 2):
        assert on_rank[FORM, "bytes"] > 1.3 * on_rank["rows", "bytes"]
