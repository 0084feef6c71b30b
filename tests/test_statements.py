"""Statements of nodes and the tree over them: a leaf shows what a node stated, or that it stated nothing."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.runs.signed_runs import a_key

from steelyard.signing import SigningKey, fingerprint, head_statement, link
from steelyard.statements import SealedRound, Statement, Tree, root_along, slot

PLACES = st.sets(st.binary(min_size=32, max_size=32), min_size=1, max_size=9)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[SigningKey]:
    folder: Path = tmp_path_factory.mktemp("keys")
    return [a_key(folder / name) for name in "abcds"]


def test_a_tree_by_hand() -> None:
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    said = {place: place[::-1].hex() for place in (c, a, b)}
    leaves = [sha256(b"\0" + place + after + place).digest() for place, after in ((a, b), (b, c), (c, a))]
    both = sha256(b"\1" + leaves[0] + leaves[1]).digest()
    tree = Tree(said)
    assert tree.root == sha256(b"\1" + both + leaves[2]).hexdigest()
    assert tree.leaf_for(a) == (a.hex(), b.hex(), a.hex(), ["R" + leaves[1].hex(), "R" + leaves[2].hex()])
    assert tree.leaf_for(c) == (c.hex(), a.hex(), c.hex(), ["L" + both.hex()])
    # Who has no leaf is shown by the one before its place; before the first that is the last.
    assert tree.leaf_for(bytes([1] * 31 + [9])) == tree.leaf_for(a)
    assert tree.leaf_for(bytes(32)) == tree.leaf_for(c) == tree.leaf_for(b"\xff" * 32)
    assert Tree({}).root is None


@given(PLACES, st.binary(min_size=32, max_size=32))
def test_every_leaf_leads_to_the_root_and_no_other_does(places: set[bytes], wanted: bytes) -> None:
    tree = Tree({place: place.hex() for place in places})
    for at in (*places, wanted):
        place, following, statement, path = tree.leaf_for(at)
        parts = [bytes.fromhex(each) for each in (place, following, statement)]
        assert root_along(sha256(b"\0" + b"".join(parts)).digest(), path) == tree.root
        assert (place == at.hex()) == (at in places)
        changed = bytes([parts[1][0] ^ 1]) + parts[1][1:]
        assert root_along(sha256(b"\0" + parts[0] + changed + parts[2]).digest(), path) != tree.root


@pytest.mark.parametrize("step", ["X" + "00" * 32, "L00", "Lno digits", ""])
def test_what_is_no_path_is_refused(step: str) -> None:
    with pytest.raises(ValueError, match=r"path|hexadecimal"):
        root_along(bytes(32), [step])


@pytest.mark.parametrize("signing", ["", "a", "ab", "abc", "abcd"])
def test_a_head_shows_of_every_node_what_it_stated_or_that_it_did_not(keys: list[SigningKey], signing: str) -> None:
    *nodes, server = keys
    stated = {
        slot("7", "DS", 3, fingerprint(key.line)): Statement("7", "DS", 3, "asked", "", {name: bytes(32)}).digest()
        for name, key in zip("abcd", nodes, strict=True)
        if name in signing
    }
    tree = Tree(stated)
    head = link("ab" * 32, 3, tree.root, "cd" * 32)
    signature = server.sign(head_statement("7", 3, head))
    sealed = SealedRound("7", 3, "ab" * 32, "cd" * 32, head, server.line, signature, tree)
    for name, key in zip("abcd", nodes, strict=True):
        proof = sealed.proof("DS", key.line)
        proof.check()
        assert proof.own == (name in signing)
        if proof.own:
            assert proof.statement == Statement("7", "DS", 3, "asked", "", {name: bytes(32)}).digest()
            # Without its own leaf a server cannot show that a node was absent.
            others = {place: said for place, said in stated.items() if place.hex() != proof.place}
            forged = SealedRound("7", 3, "ab" * 32, "cd" * 32, head, server.line, signature, Tree(others))
            with pytest.raises(ValueError, match="lead to the head"):
                forged.proof("DS", key.line).check()


def test_a_statement_is_of_its_run_rule_round_task_clients_and_of_the_one_before() -> None:
    said = ("7", "DS", 3, "asked", "ab" * 32, {"a": bytes(32)})
    others = ("8", "LD", 4, "other", "", {"b": bytes(32)})
    found = {Statement(*said).digest()}  # type: ignore[arg-type]
    for at, other in enumerate(others):
        found.add(Statement(*said[:at], other, *said[at + 1 :]).digest())  # type: ignore[arg-type]
    assert len(found) == 7
    assert Statement("7", "DS", 3, "t", "", {"b": b"1", "a": b"2"}).content() == (
        b"statement text 7\nupdates\nrun text 1\n7\nfederation text 2\nDS\nround whole 1\n3\ntask text 1\nt\n"
        b"client text 1\na\ndigest bytes 1\n2\nclient text 1\nb\ndigest bytes 1\n1\n"
    )
