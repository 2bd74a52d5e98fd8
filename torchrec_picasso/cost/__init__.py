"""Cost model: measured collectives and local work, and predictions of step time and bytes."""

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalCosts

__all__ = ["CommCurves", "LocalCosts"]
