"""Where data come from: a reader with its own settings each."""
