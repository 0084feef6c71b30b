"""The section `[federate]` of an experiment: how long a federation across machines waits, and for whom."""

from __future__ import annotations

from pydantic import Field

from steelyard.base.settings import Section


class FederateSettings(Section):
    """How a run across machines waits for its nodes; a simulation ignores it."""

    nodes: int = Field(default=1, ge=1, le=1_000_000)
    """Number of nodes to wait for before the first round; give all of them for reproducible cohorts."""
    start_timeout: float = Field(default=300.0, gt=0)
    """Seconds to wait for that many nodes to connect and say which clients live on them."""
    timeout: float = Field(default=600.0, gt=0)
    """Seconds that a node has to answer one task or question; who has not answered by then is left out of the round."""
    most_clients: int = Field(default=10_000, ge=1)
    """Clients that one node may hold, where the server's register says nothing else of its key."""
    test_bound: float = Field(default=3.0, ge=1, allow_inf_nan=False)
    """Of a client's test samples at most this many times the median client's count in the accuracy: nobody can check
    how many it has, and a client that claims a hundred times as many would decide the accuracy alone."""
