"""Tables in the three values that a row group knows them by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchrec_picasso.ops.hot_slots import HotSlots
from torchrec_picasso.ops.ids import IdSpace, PackedTable
from torchrec_picasso.ops.pack_plan import PackPlan

__all__ = ["Laid", "lay_out_tables"]


@dataclass(frozen=True)
class Laid:
    """Tables laid out."""

    tables: Sequence[PackedTable]
    space: IdSpace
    hot: HotSlots
    plan: PackPlan


def lay_out_tables(tables: Sequence[PackedTable]) -> Laid:
    """All three values of the same tables, on the CPU."""
    cpu = torch.device("cpu")
    return Laid(
        tables, IdSpace.build(tables, cpu), HotSlots.build(tables, cpu), PackPlan.build(tables, cpu)
    )
