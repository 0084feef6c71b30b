"""What a sweep is: its points and plan, its file, running and resuming it, its result; attacks run the same way."""
