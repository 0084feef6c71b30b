"""A federation across machines: Flower carries the messages, Steelyard weighs.

Needs the extra `steelyard[flower]`. Nothing here is imported by a simulation.
"""
