"""Digits on Flower, weighed by Steelyard."""
