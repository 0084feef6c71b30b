"""Clients inside this process: a simulation on one machine, a cohort at a time."""

from steelyard.clients.local.server import LocalServer
from steelyard.clients.local.settings import ComputeSettings
from steelyard.clients.local.simulation import LocalClients

__all__ = ["ComputeSettings", "LocalClients", "LocalServer"]
