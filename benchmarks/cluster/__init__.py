"""Several hosts on one machine: network namespaces whose links are shaped to a real network's rate.

While bytes wait for a shaped link, the cores are idle, as on a real cluster; what a schedule hides
there it hides here. Needs root and iproute2; :func:`why_unavailable` says what is missing.
"""

from benchmarks.cluster.emulated import EmulatedCluster
from benchmarks.cluster.namespaces import ClusterError, why_unavailable

__all__ = ["ClusterError", "EmulatedCluster", "why_unavailable"]
