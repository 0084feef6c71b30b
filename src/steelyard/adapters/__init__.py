"""Weighing inside other people's federations: one room for what every framework needs, one file for each of them."""

from steelyard.adapters.rounds import Collected, Combined, Reply, WeighedRounds
from steelyard.adapters.server_rows import ServerRows

__all__ = ["Collected", "Combined", "Reply", "ServerRows", "WeighedRounds"]
