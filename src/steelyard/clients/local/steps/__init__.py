"""Training steps derived by hand, without autograd: the pieces that all networks share, and the dense network."""
