"""TorchRec's planner with hot/cold placements.

``planner`` has what a user calls. Its ``enumerator`` reads tables (``table_info``), lets ``choice``
choose the plan and ``decision`` place it (``home_blocks``), and offers TorchRec only the options of
that plan (``hot_options``); ``refusals``, ``by_host`` and ``explain`` give reasons.
"""

from torchrec_picasso.planner.enumerator import HotColdEnumerator
from torchrec_picasso.planner.planner import hot_cold_planner

__all__ = ["HotColdEnumerator", "hot_cold_planner"]
