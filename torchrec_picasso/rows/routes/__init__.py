"""The ways in which tables travel.

To the engine a further one is one file here and one line in ``ROUTES``; the plan and its prices
know routes by :data:`.placement.Form`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torchrec_picasso.rows.routes.pooled import PooledRoute
from torchrec_picasso.rows.routes.route import Route
from torchrec_picasso.rows.routes.rows import RowRoute

__all__ = ["ROUTES"]

ROUTES: Mapping[str, type[Route]] = {route.name: route for route in (RowRoute, PooledRoute)}
"""Routes by name; a group's packs, and the features of a batch, are in this order."""
