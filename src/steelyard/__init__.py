"""Steelyard: federated learning in which each client's say is weighed."""

__version__ = "0.1.0"
