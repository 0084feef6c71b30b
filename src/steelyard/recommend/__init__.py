"""Recommenders in which each user is a client: interactions, ranking metrics, FPL, baselines."""
