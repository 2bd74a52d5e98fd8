"""Decides which tables are hot/cold and which of their rows are hot, inside TorchRec's planner."""

from torchrec_picasso.planner.enumerator import HotColdEnumerator
from torchrec_picasso.planner.planner import hot_cold_planner

__all__ = ["HotColdEnumerator", "hot_cold_planner"]
