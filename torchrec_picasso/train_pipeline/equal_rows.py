"""Checks that lookups which a proof takes for equally many are so in each micro-batch.

A model that concatenates two features' lookups raises unless they are equally many. A batch's may
be, and those of its parts not: the second feature has the same lengths in another order, say. Stock
TorchRec trains such a batch, so it is trained whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_picasso.batches.split import leaves_of
from torchrec_picasso.proof.values import SAMPLES
from torchrec_picasso.train_pipeline.in_flight_batch import InFlightBatch


def are_uneven(
    groups: Iterable[Sequence[str]],
    inflight: InFlightBatch,
    looked_up: Mapping[str, KeyedJaggedTensor],
) -> bool:
    """Whether rows of a group are not equally many in a micro-batch, or cannot be counted.

    Args:
        groups: Names of rows, see :attr:`.Proof.equal_rows`.
        inflight: A batch with several micro-batches.
        looked_up: Features of the whole batch that modules look up, by name.
    """
    counts_K = _counts_of_parts(inflight, looked_up)
    for group in groups:
        first, *others = (counts_K.get(name, counts_K.get(_without_table(name))) for name in group)
        if first is None or any(other != first for other in others):
            return True
    return False


def _without_table(name: str) -> str:
    """Shortens ``module['feature@table']``, TorchRec's name of the lookups of a feature that
    several tables have, to ``module['feature']``."""
    return name.rpartition("@")[0] + name[-2:]


def _counts_of_parts(
    inflight: InFlightBatch, looked_up: Mapping[str, KeyedJaggedTensor]
) -> dict[str, list[int]]:
    """Counts rows of each micro-batch with samples, by their names in a proof."""
    filled, counts_K = inflight.filled, defaultdict(list)
    sizes_K = counts_K[SAMPLES] = [inflight.sizes_K[k] for k in filled]
    for k in filled:
        for path, leaf in leaves_of(inflight.micro_batches_K[k], "batch"):
            if isinstance(leaf, KeyedJaggedTensor):
                for key, count in zip(leaf.keys(), leaf.length_per_key()):
                    counts_K[f"{path}[{key!r}]"].append(count)
            elif isinstance(leaf, JaggedTensor):
                counts_K[path].append(leaf.values().size(0))
    # tables look up the whole batch, and a micro-batch gets the rows of its samples
    for name, features in looked_up.items():
        keys = features.keys()
        lengths_FB_of_K = features.lengths().view(len(keys), -1).split(sizes_K, dim=1)
        counts_KF = [lengths_FB.sum(dim=1).tolist() for lengths_FB in lengths_FB_of_K]
        counts_K |= {f"{name}[{key!r}]": list(n) for key, n in zip(keys, zip(*counts_KF))}
    return counts_K
