"""Criteria, scores and weights: how a client's say is weighed."""
