"""The round loop: select, train, weigh, combine, evaluate, adapt; its states, its settings, its progress."""
