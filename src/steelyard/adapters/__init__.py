"""Weighing inside other people's federations: one room for what every framework needs, one file for each of them."""

from steelyard.adapters.journal import Journal
from steelyard.adapters.recorder import ClientTest, Recorder
from steelyard.adapters.rounds import Collected, Combined, Reply, WeighedRounds
from steelyard.adapters.server_rows import ServerRows

__all__ = ["ClientTest", "Collected", "Combined", "Journal", "Recorder", "Reply", "ServerRows", "WeighedRounds"]
