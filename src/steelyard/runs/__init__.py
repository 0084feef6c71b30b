"""The folder of a run: what was asked, what happened, and where to go on from."""
