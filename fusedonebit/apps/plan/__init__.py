"""The planner: what a step's messages cost on a network, and whether compressing them pays."""

from __future__ import annotations

from .collectives import TYPICAL, Cost, Network
from .costs import METHODS, Method, choose_topology, methods

__all__ = ["METHODS", "TYPICAL", "Cost", "Method", "Network", "choose_topology", "methods"]
