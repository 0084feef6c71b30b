"""Studies: several runs with one answer. A sweep, an experiment under attack, a candidate in the arena."""
