"""A DIN for clicks with histories, small and smooth.

Smooth throughout, where the paper has kinks (PReLU, Dice): at a kink, a sum in another order
becomes another gradient, and two trainings that are equal could not be told from two that are not.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.app.zoo.feature_groups import ONE_HOT, SEQUENCE, FeatureGroup, FeatureGroups
from torchrec_picasso.app.zoo.models.din import DIN

__all__ = ["build_din"]

_NUM_DENSE = 1  # of zeros: clicks have no dense features
_ATTENTION_HIDDEN, _HIDDEN = 16, (64,)


def build_din(
    clicks: Clicks, sequence_dim: int = 16, profile_dim: int = 8, seed: int = 0
) -> ClickModel:
    """A DIN with its loss, tables on the meta device.

    Args:
        clicks: Tell the tables and their sizes; a column's table is ``t_<column>``.
        sequence_dim: Columns of the tables of targets and histories.
        profile_dim: Columns of the other tables.
        seed: Draws the dense weights.
    """
    targets = list(clicks.targets)
    histories = [history_of(target) for target in targets]
    groups = [
        _group("target", targets, sequence_dim),
        _group("history", histories, sequence_dim, tables_of="target"),
        _group("profile", list(clicks.profiles), profile_dim),
    ]
    num_rows = {column: clicks.num_rows(column) for column in (*targets, *clicks.profiles)}
    num_rows |= dict(zip(histories, (num_rows[target] for target in targets)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        embeddings = FeatureGroups(groups, num_rows)
        head = DIN(embeddings, _NUM_DENSE, _ATTENTION_HIDDEN, _HIDDEN, "tanh")
        return ClickModel(embeddings, head)


def _group(
    name: str, columns: Sequence[str], dim: int, tables_of: str | None = None
) -> FeatureGroup:
    return FeatureGroup(
        name=name,
        columns=tuple(columns),
        dims=(dim,) * len(columns),
        kind=ONE_HOT if tables_of is None else SEQUENCE,
        tables_of=tables_of,
    )
