"""Weighing inside other people's federations: one room for what every framework needs, one file for each of them."""

from steelyard.adapters.recorder import ClientTest, Journal, Model, Recorder
from steelyard.adapters.rounds import Collected, Combined, Reply, ServerRows, WeighedRounds
from steelyard.adapters.swarm import Site

__all__ = [
    "ClientTest",
    "Collected",
    "Combined",
    "Journal",
    "Model",
    "Recorder",
    "Reply",
    "ServerRows",
    "Site",
    "WeighedRounds",
]
