"""The only place that knows Flower's internals; all else speaks our words, and imports `flwr.app` and its kin alone.

    `messages`    a message taken apart, the parts fetched, what Flower's errors are called here
    `fleet`       a node's calls to its server
    `answers`     the server app's look for answers
    `superlink`   Flower's SuperLink as a process, and the keys that are registered with it
    `transport`   bounds on what Flower's HTTP clients take from one call

tests/clients/flower/test_adapter.py reads all sources for other imports, and holds every version that is supported to
the names that are needed here.
"""
