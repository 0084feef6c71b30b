"""Running an experiment across machines: the two Flower apps, trying it on one machine, app folders, certificates."""
