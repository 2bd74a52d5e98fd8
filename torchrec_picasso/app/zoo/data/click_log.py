"""Samples from a log of clicks: each click, followed by a negative.

The target of a negative is drawn from the recent clicks of all users, so popular items are drawn
often and popularity alone predicts nothing. Both samples have the same user and the same history,
the latest clicks of that user before this one. If the clicked target itself is drawn, there is no
negative.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.data.generated import zipf_cdf
from torchrec_picasso.app.zoo.data.history import History, Ids
from torchrec_picasso.app.zoo.data.stream import Stream, stays
from torchrec_picasso.errors import InputError

_FAVOURITES, _FAVOURITE_SHARE = 2, 0.8
"""Favourite categories of a user, and the share of clicks in them."""
_VISIT_CLICKS, _VISITS_STREAM = 4, 5
"""Mean clicks of a visit; random stream."""
_SECONDS_TO_NEXT = (15.0, 120.0)
"""Mean seconds to the next click, after an item of an even and of an odd category."""


def samples_of_log(
    log: Mapping[str, Ids],
    *,
    user: str,
    targets: Sequence[str],
    profiles: Sequence[str] = (),
    most: int = 50,
    recent: int = 5000,
    first: int = 1,
    num_candidates: int | None = None,
    crosses: Mapping[str, tuple[str, str]] | None = None,
) -> Clicks:
    """Makes samples in time order.

    With ``num_candidates`` samples are a :class:`.Stream`, of two tasks: the click, and a click
    after which the user reads on (:func:`.stays`). One candidate: the same samples; several: the
    click and negatives as one sample, where a negative that is the clicked item counts as clicked.

    Args:
        log: One id per click, by column, in time order.
        user: Column of the user.
        targets: Columns of the clicked item; the first identifies it.
        profiles: Other columns, without history.
        most: Longest history.
        recent: Number of earlier clicks that a negative is drawn from.
        first: First click that becomes a sample; earlier ones are history only.
        num_candidates: Candidates C of a sample; the log then has a column ``second``.
        crosses: Crossed features of a stream.

    Raises:
        InputError: If the log has fewer than 2 clicks.
    """
    item = log[targets[0]]
    target_m, click_m = _draw(item, max(first, 1), recent, num_candidates or 1)
    is_clicked_mc = item[target_m].reshape(len(click_m), -1) == item[click_m][:, None]
    clicks = Clicks(
        targets={column: log[column][target_m] for column in targets},
        histories={
            column: History.before(log[user], log[column], most).take(click_m) for column in targets
        },
        profiles={column: log[column][click_m] for column in profiles},
        clicked=is_clicked_mc[:, 0].astype(np.float32),
        in_time_order=True,
    )
    if num_candidates is None:
        return clicks
    second_n = log["second"]
    reads_on_mc = is_clicked_mc & stays(log[user], second_n)[click_m][:, None]
    return Stream.from_clicks(
        clicks,
        np.stack([is_clicked_mc, reads_on_mc], axis=2),
        second_n[click_m],
        History.before(log[user], second_n, most).take(click_m),
        crosses or {},
    )


def _draw(item_n: Ids, first: int, recent: int, num_candidates: int) -> tuple[Ids, Ids]:
    """Draws negatives: the clicks that give the targets, ``(m,)`` or ``(m, C)``, and the click of
    each sample, ``(m,)``."""
    if len(item_n) < 2:
        raise InputError(
            f"expected at least 2 clicks, since negatives are drawn from earlier ones, got "
            f"{len(item_n)}; give a longer log"
        )
    click_n = np.arange(first, len(item_n))
    num_negatives = max(1, num_candidates - 1)
    chance_nc = np.random.default_rng(0).random((len(click_n), num_negatives))
    reach_n = np.minimum(click_n, recent)
    drawn_nc = (click_n - 1)[:, None] - (chance_nc * reach_n[:, None]).astype(np.int64)
    target_nc = np.concatenate([click_n[:, None], drawn_nc], axis=1)
    if num_candidates > 1:
        return target_nc, click_n
    # clicks and negatives alternate
    target_m, click_m = target_nc.reshape(-1), np.repeat(click_n, 2)
    kept_m = (target_m == click_m) | (item_n[target_m] != item_n[click_m])
    return target_m[kept_m], click_m[kept_m]


def generate_log(
    num_clicks: int,
    *,
    num_users: int = 1000,
    num_items: int = 5000,
    num_categories: int = 40,
    seed: int = 0,
    in_visits: bool = False,
) -> dict[str, Ids]:
    """Generates a log of users who return to a few favourite categories.

    Args:
        num_clicks: Clicks.
        num_users: Users, Zipf-skewed.
        num_items: Items, Zipf-skewed, each of one category.
        num_categories: Categories.
        seed: Seed.
        in_visits: Whether the clicks of a user come several in a row, as in user-major streams.

    Returns:
        Columns ``user``, ``item``, ``category``, ``device`` and ``second``, in time order.
    """
    rng = np.random.default_rng(seed)

    def zipf(rows: int, chance: np.ndarray) -> Ids:
        drawn: Ids = np.searchsorted(zipf_cdf(rows, 1.0), chance, "right")
        return drawn

    user_n, visits = (
        zipf(num_users, rng.random(num_clicks)),
        np.random.default_rng([seed, _VISITS_STREAM]),
    )
    if in_visits:
        user_n = np.repeat(user_n, visits.geometric(1 / _VISIT_CLICKS, num_clicks))[:num_clicks]
    favourites = rng.integers(num_categories, size=(num_users, _FAVOURITES))
    favourite_n = favourites[user_n, rng.integers(_FAVOURITES, size=num_clicks)]
    any_n = rng.integers(num_categories, size=num_clicks)
    category_n = np.where(rng.random(num_clicks) < _FAVOURITE_SHARE, favourite_n, any_n)
    # item i is in category i % num_categories, so each category has popular items
    place_n = zipf(num_items // num_categories, rng.random(num_clicks))
    gap_n = visits.exponential(np.array(_SECONDS_TO_NEXT)[category_n % 2])
    return {
        "user": user_n,
        "item": place_n * num_categories + category_n,
        "category": category_n,
        "device": user_n % 3,
        "second": (gap_n.cumsum() - gap_n).astype(np.int64),
    }
