"""The network lab: every way to agree on a step, on four hosts with real links between them, by the link's rate."""
