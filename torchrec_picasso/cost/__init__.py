"""What a placement costs: measured curves, and arithmetic from them to milliseconds and bytes."""

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalCosts

__all__ = ["CommCurves", "LocalCosts"]
