"""What every room stands on: errors, files, settings, chance, logs, measures, code that users write."""
