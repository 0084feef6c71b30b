"""What protects the server: checks of all that comes from a client."""
