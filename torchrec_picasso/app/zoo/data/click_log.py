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
from torchrec_picasso.errors import InputError

_FAVOURITES, _FAVOURITE_SHARE = 2, 0.8
"""Favourite categories of a user, and the share of clicks in them."""


def samples_of_log(
    log: Mapping[str, Ids],
    *,
    user: str,
    targets: Sequence[str],
    profiles: Sequence[str] = (),
    most: int = 50,
    recent: int = 5000,
    first: int = 1,
) -> Clicks:
    """Makes samples in time order.

    Args:
        log: One id per click, by column, in time order.
        user: Column of the user.
        targets: Columns of the clicked item; the first identifies it.
        profiles: Other columns, without history.
        most: Longest history.
        recent: Number of earlier clicks that a negative is drawn from.
        first: First click that becomes a sample; earlier ones are history only.

    Raises:
        InputError: If the log has fewer than 2 clicks.
    """
    num_clicks = len(log[user])
    if num_clicks < 2:
        raise InputError(
            f"expected at least 2 clicks, since negatives are drawn from earlier ones, got "
            f"{num_clicks}; give a longer log"
        )
    rng = np.random.default_rng(0)
    click_n = np.arange(max(first, 1), num_clicks)
    reach_n = np.minimum(click_n, recent)
    drawn_n = click_n - 1 - (rng.random(len(click_n)) * reach_n).astype(np.int64)
    # clicks and negatives alternate; target_m is the click that gives the target
    target_m = np.stack([click_n, drawn_n], axis=1).reshape(-1)
    click_m = np.repeat(click_n, 2)
    item = log[targets[0]]
    is_click_m = np.tile([True, False], len(click_n))
    kept_m = is_click_m | (item[target_m] != item[click_m])
    target_m, click_m = target_m[kept_m], click_m[kept_m]
    return Clicks(
        targets={column: log[column][target_m] for column in targets},
        histories={
            column: History.before(log[user], log[column], most).take(click_m) for column in targets
        },
        profiles={column: log[column][click_m] for column in profiles},
        clicked=is_click_m[kept_m].astype(np.float32),
        in_time_order=True,
    )


def generate_log(
    num_clicks: int,
    *,
    num_users: int = 1000,
    num_items: int = 5000,
    num_categories: int = 40,
    seed: int = 0,
) -> dict[str, Ids]:
    """Generates a log of users who return to a few favourite categories.

    Args:
        num_clicks: Clicks.
        num_users: Users, Zipf-skewed.
        num_items: Items, Zipf-skewed, each of one category.
        num_categories: Categories.
        seed: Seed.

    Returns:
        Columns ``user``, ``item``, ``category`` and ``device``, in time order.
    """
    rng = np.random.default_rng(seed)

    def zipf(rows: int, chance: np.ndarray) -> Ids:
        drawn: Ids = np.searchsorted(zipf_cdf(rows, 1.0), chance, "right")
        return drawn

    user_n = zipf(num_users, rng.random(num_clicks))
    favourites = rng.integers(num_categories, size=(num_users, _FAVOURITES))
    favourite_n = favourites[user_n, rng.integers(_FAVOURITES, size=num_clicks)]
    any_n = rng.integers(num_categories, size=num_clicks)
    category_n = np.where(rng.random(num_clicks) < _FAVOURITE_SHARE, favourite_n, any_n)
    # item i is in category i % num_categories, so each category has popular items
    place_n = zipf(num_items // num_categories, rng.random(num_clicks))
    return {
        "user": user_n,
        "item": place_n * num_categories + category_n,
        "category": category_n,
        "device": user_n % 3,
    }
