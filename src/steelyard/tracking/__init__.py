"""Sending the figures of a run to a tracker of experiments while it goes on: trackio, Weights & Biases or MLflow."""
