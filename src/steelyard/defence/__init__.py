"""What protects the server: checks of all that comes from a client, caps on weights, and robust rules."""
