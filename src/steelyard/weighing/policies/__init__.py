"""Weights by others: rules with a name of their own, one file each with its equation and where it comes from."""
