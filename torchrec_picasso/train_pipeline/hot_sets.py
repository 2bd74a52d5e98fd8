"""The hot sets of a pipeline's tables: refreshed between steps, here or by other code.

Replicas are bitwise equal to their home rows by construction. A mismatch means faulty memory, a
nondeterministic device, or a write that bypassed torch's version counters
(``storage/torchrec_kernel.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_picasso.batches.feed import IdStream
from torchrec_picasso.errors import PicassoError
from torchrec_picasso.rows.group import RowGroup
from torchrec_picasso.rows.hot_rows import SavedUses
from torchrec_picasso.rows.refresh_policy import Refresh
from torchrec_picasso.rows.refresher import Refreshed, Refresher
from torchrec_picasso.rows.route import Route
from torchrec_picasso.train_pipeline.module_group import ModuleGroup

_NO_ROW = -1


class HotSets:
    """Refreshes hot sets, and detects in-flight batches whose layout has an older hot set.

    Without a policy the pipeline changes no hot set. Every ``verify_every`` steps replicas are
    compared with home rows; ``None`` = never. Requests read hot sets on the stream of ids.
    """

    def __init__(
        self, policy: Refresh | None, verify_every: int | None, id_stream: IdStream
    ) -> None:
        self._policy = policy
        self._verify_every = verify_every
        self._id_stream = id_stream
        self._num_steps = 0
        self._groups: Sequence[RowGroup] = ()
        self._epochs: list[int] = []
        self._refresher: Refresher | None = None
        self._saved: SavedUses | None = None
        self.last: Refreshed | None = None
        """The result of the last refresh evaluation."""

    def attach(self, groups: Sequence[ModuleGroup]) -> None:
        """Sets the tables; the same model may be attached again."""
        self._groups = [group.row_group for group in groups]
        if self._policy is not None:
            row_groups = [module.group for group in groups for module in group.modules.values()]
            # the same tables keep their access counts
            if self._refresher is None or not self._refresher.is_of(row_groups):
                self._refresher = Refresher(row_groups, self._policy)
                if self._saved is not None:
                    self._refresher.restore_uses(self._saved)
        self._hand_over()

    def _hand_over(self) -> None:
        # a list: what is computed on demand must be queued before the stream of ids waits for it
        tensors = [tensor for group in self._groups for tensor in group.tensors_of_hot_set()]
        self._id_stream.take_over(tensors)

    def hot_rows(self) -> dict[str, Tensor]:
        """The hot rows of each table that has any, by name, int64."""
        return {name: rows for group in self._groups for name, rows in group.hot_rows.items()}

    def saved_uses(self) -> SavedUses | None:
        """The access counts so far; ``None`` without a refresh policy. Collective."""
        return None if self._refresher is None else self._refresher.saved_uses()

    def restore_uses(self, saved: SavedUses) -> None:
        """Continues from saved access counts, at once or as soon as there are tables."""
        self._saved = saved
        if self._refresher is not None:
            self._refresher.restore_uses(saved)

    def end_step(self) -> None:
        """Ends a training step; a refresh may follow. Collective. All ranks raise PicassoError if a
        replica differs from its home row."""
        self._num_steps += 1
        if self._verify_every is not None and self._num_steps % self._verify_every == 0:
            for group in self._groups:
                check_replicas(group)
        if self._refresher is not None:
            self.last = self._refresher.step() or self.last

    def have_changed(self) -> bool:
        """Whether the hot set of any table differs from that of the last call."""
        # TorchRec's modules may be refreshed by others; each change counts up a group's epoch
        for group in self._groups:
            group.follow_hot_rows()
        before, self._epochs = self._epochs, [group.hot_epoch for group in self._groups]
        if not before or before == self._epochs:
            return False
        self._hand_over()
        return True


def check_replicas(group: RowGroup) -> None:
    """Compares the replicas on all ranks with the home rows. Collective: between steps.

    Raises PicassoError on all ranks, which names table, row and ranks of the first mismatch. The
    check is skipped if home rows were written since the replicas were filled. Every rank receives
    all hot rows, weights and optimizer state.
    """
    for route in group.routes:
        if route.hot.num_rows:
            _check_route(route)


def _check_route(route: Route) -> None:
    unlike_P = [storage.differing_homes() for storage in route.storages if storage.num_hot_rows]
    unlike_h = route.hot.ids_H[torch.cat(unlike_P)]
    first = int(unlike_h[0]) if len(unlike_h) else _NO_ROW
    was_written = any(storage.was_written() for storage in route.storages)
    # Three numbers per rank: count of mismatches, linear id of the first one, written or not. All
    # ranks receive (W, 3), so all return or raise together.
    own = unlike_h.new_tensor([len(unlike_h), first, was_written])
    count_W, first_W, written_W = route.ranks.gather(own).t().tolist()
    if any(written_W) or not any(count_W):
        return
    rank = next(rank for rank, count in enumerate(count_W) if count)
    found = first_W[rank]
    table, base, _ = next(each for each in route.id_ranges() if each[1] <= found < each[2])
    # The message names the home rank too, because either copy may be the faulty one.
    block, _ = route.space.find_blocks(torch.tensor([found], device=route.device))
    home = int(route.space.block_rank_TW[block])
    counts = ", ".join(f"{count} on rank {rank}" for rank, count in enumerate(count_W) if count)
    raise PicassoError(
        f"table {table.name!r}, row {found - base}: the replica on rank {rank} is not what its "
        f"home on rank {home} is; {counts} differ. Load the last checkpoint, and look for failing "
        "memory or writes past torch (by numpy, or through a storage)"
    )
