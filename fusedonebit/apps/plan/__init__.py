"""The planner: what a step's messages cost on a network, and whether compressing them pays."""

from __future__ import annotations

from .costs import METHODS, TYPICAL, Method, Network, choose_topology, cost

__all__ = ["METHODS", "TYPICAL", "Method", "Network", "choose_topology", "cost"]
