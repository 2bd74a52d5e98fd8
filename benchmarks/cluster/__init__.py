"""Several hosts on one machine: network namespaces whose links are shaped to a real network's rate.

While bytes wait for a shaped link, the cores are idle, as on a real cluster; what a schedule hides
there it hides here. Not emulated: propagation delay, loss, a switch's small buffers, and cores of
their own for the hosts. Needs root and iproute2; :func:`why_unavailable` says what is missing.
"""

from benchmarks.cluster.emulated import EmulatedCluster, why_unavailable
from benchmarks.cluster.namespaces import ClusterError
from benchmarks.cluster.run import run_on_hosts, usable_rate

__all__ = ["ClusterError", "EmulatedCluster", "run_on_hosts", "usable_rate", "why_unavailable"]
