"""From a log of clicks to samples: each click, and beside it one that did not happen.

What was not clicked is drawn from the clicks shortly before, whoever made them, so that what is
popular now is drawn often and popularity alone tells nothing. Both samples have the same user and
the same history: that user's latest clicks, without the one to be told. Where the drawn target is
the clicked one, there is no second sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from torchrec_picasso.app.zoo.data.clicks import Clicks
from torchrec_picasso.app.zoo.data.generated import zipf_cdf
from torchrec_picasso.app.zoo.data.history import History, Ids
from torchrec_picasso.errors import InputError

__all__ = ["generate_log", "samples_of_log"]

_TASTES, _TASTE_SHARE = 2, 0.8
"""Favourite categories of a user, and how often a click goes to one of them."""


def samples_of_log(
    log: Mapping[str, Ids],
    *,
    user: str,
    targets: Sequence[str],
    profiles: Sequence[str] = (),
    most: int = 50,
    recent: int = 5000,
    seed: int = 0,
    first: int = 1,
) -> Clicks:
    """Makes samples in time order.

    Args:
        log: One id per click, by column, in time order.
        user: Column that tells whose click it is.
        targets: Columns of what is clicked; the first one tells clicks apart.
        profiles: Columns of everything else, without a history.
        most: Longest history.
        recent: Clicks before a click that the one that did not happen is drawn from.
        seed: Draws it.
        first: The first click that becomes a sample; those before it are history only.

    Raises:
        InputError: If there is no click before the last one.
    """
    num_clicks = len(log[user])
    if num_clicks < 2:
        raise InputError(
            f"expected at least 2 clicks, since what was not clicked is drawn from those before, "
            f"got {num_clicks}; give a longer log"
        )
    rng = np.random.default_rng(seed)
    click_n = np.arange(max(first, 1), num_clicks)
    reach_n = np.minimum(click_n, recent)
    drawn_n = click_n - 1 - (rng.random(len(click_n)) * reach_n).astype(np.int64)
    # a click and what was not clicked take turns
    of_m = np.stack([click_n, drawn_n], axis=1).reshape(-1)
    click_m = np.repeat(click_n, 2)
    told_by = log[targets[0]]
    is_click_m = np.tile([True, False], len(click_n))
    kept_m = is_click_m | (told_by[of_m] != told_by[click_m])
    of_m, click_m = of_m[kept_m], click_m[kept_m]
    return Clicks(
        targets={column: log[column][of_m] for column in targets},
        histories={
            column: History.before(log[user], log[column], most).of(click_m) for column in targets
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
        num_users: Zipf-skewed: few are here every day.
        num_items: Zipf-skewed, each of one category.
        num_categories: Of the items.
        seed: Draws everything.

    Returns:
        Columns ``user``, ``item``, ``category`` and ``device``, in time order.
    """
    rng = np.random.default_rng(seed)

    def zipf(rows: int, chance: np.ndarray) -> Ids:
        drawn: Ids = np.searchsorted(zipf_cdf(rows, 1.0), chance, "right")
        return drawn

    user_n = zipf(num_users, rng.random(num_clicks))
    taste_UT = rng.integers(num_categories, size=(num_users, _TASTES))
    favourite_n = taste_UT[user_n, rng.integers(_TASTES, size=num_clicks)]
    any_n = rng.integers(num_categories, size=num_clicks)
    category_n = np.where(rng.random(num_clicks) < _TASTE_SHARE, favourite_n, any_n)
    # item i is of category i % num_categories, so popular ones are in all of them
    place_n = zipf(num_items // num_categories, rng.random(num_clicks))
    return {
        "user": user_n,
        "item": place_n * num_categories + category_n,
        "category": category_n,
        "device": user_n % 3,
    }
