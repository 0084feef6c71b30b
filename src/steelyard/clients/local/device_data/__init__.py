"""The clients of a simulation and their samples as tensors on the device, laid out for whole cohorts at once."""
