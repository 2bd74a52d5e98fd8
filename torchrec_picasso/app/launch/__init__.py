"""Starts ranks: as processes of this machine (``run_ranks``, ``rank_process``, ``frozen``), on a
slower loopback too (``shaped_loopback``), or by torchrun (``torchrun``, ``fresh_store``), in an
order of hosts (``rank_order``, ``host_ring``).

``progress``, ``quiet`` and ``environment`` are what every run prints and saves.
"""
