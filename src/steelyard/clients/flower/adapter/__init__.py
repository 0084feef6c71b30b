"""The only place that knows Flower's internals; all else speaks our words, and imports `flwr.app` and its kin alone.

    `messages`    a message taken apart, the parts fetched, what Flower's errors are called here
    `fleet`       a node's calls to its server: signed by the server's clock, bounded, repeated where it is busy
    `superlink`   Flower's SuperLink as a process, the keys that are registered with it, its runs, and their answers
    `direct_calls`  the calls of which a round consists, answered without the layers of its web application
    `link_state`  what a SuperLink keeps in memory, and the parts of messages in files

tests/clients/flower/test_adapter.py reads all sources for other imports, and holds every version that is supported to
the names that are needed here.
"""
