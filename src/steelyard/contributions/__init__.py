"""What each client of a run added to the model: read from the run, replayed, retrained; runs without a client."""
