"""Weighing inside other people's federations: one room for what every framework needs, one file for each of them."""
