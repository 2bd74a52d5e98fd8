"""Cost model: measured collectives and local work, and predictions of step time and bytes.

``measure`` times collectives, ``curves`` keeps them beside the ``local`` work. ``table_work`` has
the expected rows of a table, ``hot_cold`` and ``stock`` the bytes and work of both kinds of tables,
``by_host`` those of rows that travel by host; ``forms`` names the exchange of each form.
``step_price`` assigns these to operations, ``schedule_time`` simulates the schedule.
"""

from torchrec_picasso.cost.curves import CommCurves
from torchrec_picasso.cost.local import LocalCosts

__all__ = ["CommCurves", "LocalCosts"]
