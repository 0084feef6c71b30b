"""The training step of the built-in convolutional network, derived by hand: for stacked clients and for one client."""
