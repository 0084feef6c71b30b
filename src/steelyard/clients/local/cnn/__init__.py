"""The built-in convolutional network's training step, derived by hand: stacked, for one client, in Triton."""
