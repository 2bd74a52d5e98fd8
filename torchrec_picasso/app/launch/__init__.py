"""How ranks start: as processes of this machine (``run_ranks``, ``rank_process``, ``frozen``), or by
torchrun (``torchrun``, ``fresh_store``, in the order of hosts of ``rank_order`` and ``host_ring``).

``progress``, ``quiet`` and ``environment`` are what every run prints and saves.
"""
