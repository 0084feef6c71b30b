"""One description of a run, from TOML or Python; every field checked, every error names it."""
