"""What is hashed and signed, so that a later change of a run shows; reads no run."""
