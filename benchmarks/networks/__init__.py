"""The networks that are measured: hand-written, randomly initialized, sized for a fraction of a second per step."""

from benchmarks.networks.network import Network, Problem
from benchmarks.networks.table import NETWORKS, TWELVE

__all__ = ["NETWORKS", "TWELVE", "Network", "Problem"]
