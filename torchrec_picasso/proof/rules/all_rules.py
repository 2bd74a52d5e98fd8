"""The rules of all families: each module registers its own when it is imported."""

from __future__ import annotations

from torchrec_picasso.proof.call import RULES
from torchrec_picasso.proof.rules import creation, jagged, lookups, products, reductions, views
from torchrec_picasso.proof.rules.pointwise import pointwise

__all__ = ["FAMILIES", "RULES", "pointwise"]

FAMILIES = (creation, jagged, lookups, products, reductions, views)
