"""A small DIN for clicks with histories, with smooth activations.

The paper's PReLU and Dice have kinks: there, sums in another order give another gradient, and equal
trainings would not give equal weights.
"""

from __future__ import annotations

import torch

from torchrec_picasso.app.zoo.click_model import ClickModel
from torchrec_picasso.app.zoo.data.clicks import Clicks, history_of
from torchrec_picasso.app.zoo.feature_groups import SEQUENCE, FeatureGroup, FeatureGroups
from torchrec_picasso.app.zoo.models.din import DIN

_NUM_DENSE = 1  # of zeros: clicks have no dense features
_ATTENTION_HIDDEN, _HIDDEN = 16, (64,)


def build_din(
    clicks: Clicks, sequence_dim: int = 16, profile_dim: int = 8, seed: int = 0
) -> ClickModel:
    """Builds a DIN with its loss, tables on the meta device.

    The table of a column is ``t_<column>``, with ``sequence_dim`` columns for targets and histories
    and ``profile_dim`` for others; ``seed`` initialises the dense weights.
    """
    targets, profiles = tuple(clicks.targets), tuple(clicks.profiles)
    histories = tuple(map(history_of, targets))
    target_dims = (sequence_dim,) * len(targets)
    groups = [
        FeatureGroup(name="target", columns=targets, dims=target_dims),
        FeatureGroup(
            name="history", columns=histories, dims=target_dims, kind=SEQUENCE, tables_of="target"
        ),
        FeatureGroup(name="profile", columns=profiles, dims=(profile_dim,) * len(profiles)),
    ]
    num_rows = {column: clicks.num_rows(column) for column in (*targets, *profiles)}
    num_rows |= {history_of(target): num_rows[target] for target in targets}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        embeddings = FeatureGroups(groups, num_rows)
        head = DIN(embeddings, _NUM_DENSE, _ATTENTION_HIDDEN, _HIDDEN, "tanh")
        return ClickModel(embeddings, head)
