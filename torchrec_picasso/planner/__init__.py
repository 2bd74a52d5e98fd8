"""TorchRec's planner with hot/cold placements."""

from torchrec_picasso.planner.enumerator import HotColdEnumerator
from torchrec_picasso.planner.planner import hot_cold_planner

__all__ = ["HotColdEnumerator", "hot_cold_planner"]
