"""The benchmark of a signed run measures what it says: statements are linked, and only the last ones are checked."""

from __future__ import annotations

from benchmarks.chain import signed


def test_in_a_signed_run_the_last_signature_of_each_node_stands_for_all() -> None:
    # Only the last ones are made by the nodes' keys: were one before them checked, it would be named as changed.
    assert signed(rounds=3, nodes=2)["signatures"] == 6
