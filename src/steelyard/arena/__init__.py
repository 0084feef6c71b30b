"""The arena: an idea held against rivals with frozen settings in a frozen suite of scenes, and one sentence on it."""
