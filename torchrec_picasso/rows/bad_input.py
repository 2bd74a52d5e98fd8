"""Raises one error on every rank when any rank's batch is malformed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_picasso.errors import InputError
from torchrec_picasso.exchange.header import Header
from torchrec_picasso.ops.ids import PackedTable
from torchrec_picasso.rows.batch_ids import BatchIds
from torchrec_picasso.rows.valid_features import RepairedFeatures, length_error

__all__ = ["raise_on_bad_input"]


def raise_on_bad_input(
    header: Header, tables: Sequence[PackedTable], batch: BatchIds, rank: int
) -> None:
    """Raises if any rank's batch has malformed lengths or holds an invalid id or weight.

    Args:
        header: Header of the batch, with the error counts of all ranks.
        tables: Tables that the features look up, in feature order.
        batch: This rank's batch, for the details of the message.
        rank: This rank.

    Raises:
        InputError: On every rank; the rank with the error names feature, table, value and range.
    """
    for counts_W, describe, what in (
        (header.bad_lengths_W, _describe_lengths, "lengths that do not fit its values"),
        (header.outside_ids_W, _describe_outside_id, "ids outside their tables"),
        (header.bad_weights_W, _describe_bad_weight, "per-sample weights that are not finite"),
    ):
        # The rank with the error describes its own values; the other ranks name that rank.
        if counts_W[rank]:
            raise InputError(describe(tables, batch, counts_W[rank]))
        for other, count in enumerate(counts_W):
            if count:
                number = "" if count is True else f"{count} "
                raise InputError(
                    f"rank {other} holds {number}{what} in this batch; its own error names them, "
                    "and all ranks stop here together"
                )


def _describe_lengths(tables: Sequence[PackedTable], batch: BatchIds, count: int) -> str:
    given = [mended.given for mended in batch.sound if isinstance(mended, RepairedFeatures)]
    return next(filter(None, map(length_error, given)))


def _feature_of_lookup(features: KeyedJaggedTensor) -> torch.Tensor:
    lookups_F = torch.tensor(features.length_per_key())
    return torch.repeat_interleave(torch.arange(lookups_F.numel()), lookups_F)


def _table_of_feature(tables: Sequence[PackedTable]) -> list[tuple[str, str, int]]:
    """Returns feature name, table name and table rows of each feature, in lookup order."""
    return [(f, t.name, t.num_embeddings) for t in tables for f in t.feature_names]


def _describe_outside_id(tables: Sequence[PackedTable], batch: BatchIds, count: int) -> str:
    features = batch.features
    feature_N = _feature_of_lookup(features)
    rows_F = torch.tensor([rows for *_, rows in _table_of_feature(tables)])
    ids_N = features.values().cpu()
    # Repeats the check of shift_rows on the host, to find the first invalid lookup.
    first = int(((ids_N < 0) | (ids_N >= rows_F[feature_N])).nonzero()[0])
    feature, table, rows = _table_of_feature(tables)[int(feature_N[first])]
    return (
        f"feature {feature!r} looks up row {int(ids_N[first])} of table {table!r}, whose rows are "
        f"0..{rows - 1}; {count} such ids in this rank's batch. Hash or clamp ids before training"
    )


def _describe_bad_weight(tables: Sequence[PackedTable], batch: BatchIds, count: int) -> str:
    features = batch.features
    weights_N = features.weights().cpu()
    first = int(torch.isfinite(weights_N).logical_not().nonzero()[0])
    feature, table, _ = _table_of_feature(tables)[int(_feature_of_lookup(features)[first])]
    return (
        f"feature {feature!r} of table {table!r} has per-sample weight {float(weights_N[first])}, "
        f"expected a finite number; {count} such weights in this rank's batch"
    )
