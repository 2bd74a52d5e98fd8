"""Hosts that the ranks of one machine pretend to be on."""

import os


def pretend_hosts(rank: int, num_places: int) -> None:
    """Says, as torchrun does, that each ``num_places`` ranks share a host."""
    os.environ["LOCAL_WORLD_SIZE"] = str(num_places)
    os.environ["LOCAL_RANK"] = str(rank % num_places)
