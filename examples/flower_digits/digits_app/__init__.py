"""Digits on Flower, weighted by Steelyard."""
