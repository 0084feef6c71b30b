"""What is signed, byte by byte from docs/reference/chain.md; keys; and a tree that shows what a node stated or not."""

from __future__ import annotations

import hmac
import struct
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused, named
from tests.runs.records import updates
from tests.runs.signed_runs import a_key

from steelyard.messages.payloads import DenseModels
from steelyard.messages.updates import LossState, Task
from steelyard.proof import signing
from steelyard.proof.signing import SigningKey, field, fingerprint, head_statement, holds, link
from steelyard.proof.statements import Proof, SealedRound, Statement, Tree, root_along, slot, stated

PLACES = st.sets(st.binary(min_size=32, max_size=32), min_size=1, max_size=9)
VALUES = st.one_of(
    st.none(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), st.text(), st.binary(max_size=40)
)
# The public key of the private number 12345, and what `ssh-keygen -l` says of it.
LINE = (
    "ecdsa-sha2-nistp384 AAAAE2VjZHNhLXNoYTItbmlzdHAzODQAAAAIbmlzdHAzODQAAABhBOhrmV41Dk0xKpWmt9XYzc20aC9YiAChzWyXLh3LKl"
    "rDjZAEaVGwPMs7F5qJ/aiLG0hbnywfRLDdQc5uPDppC7+qvsHh/0rvskYf3aZim+y9Q890wT2MGhYlYSJD8ARhSA=="
)
PRINT = "SHA256:vJ12lDTNIC+WTlarRGhZl/9vlIztc2iHQc5R27iaF3U"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[SigningKey]:
    folder: Path = tmp_path_factory.mktemp("keys")
    return [a_key(folder / name) for name in "abcds"]


# ---------------------------------------------------------------- fields and digests


@given(st.lists(st.tuples(st.sampled_from(["a", "b", "client"]), VALUES), max_size=5))
def test_fields_can_be_read_back_one_by_one(fields: list[tuple[str, Any]]) -> None:
    """So that two different lists of fields never make the same record."""
    content = b"".join(field(name, value) for name, value in fields)
    found: list[tuple[str, str, bytes]] = []
    while content:
        header, _, rest = content.partition(b"\n")
        name, kind, length = header.decode().split(" ")
        found.append((name, kind, rest[: int(length)]))
        assert rest[int(length) : int(length) + 1] == b"\n"
        content = rest[int(length) + 1 :]
    written: dict[type, Any] = {
        int: lambda value: ("whole", str(value).encode()),
        float: lambda value: ("real", struct.pack("<d", value + 0.0)),  # a negative zero is a zero, as in SQLite
        str: lambda value: ("text", value.encode()),
        bytes: lambda value: ("bytes", value),
    }
    assert field("x", -0.0) == field("x", 0.0) == b"x real 8\n" + bytes(8) + b"\n"
    assert found == [(name, *written[type(value)](value)) for name, value in fields if value is not None]


def test_digests_by_hand() -> None:
    loss = b'{"class_weights": [1.0, 2.0], "name": "barron", "scale": 1.5, "shape": null}'
    said = b"federation text 2\nDS\nseed whole 1\n3\nround whole 1\n4\nloss text %d\n%s\n" % (len(loss), loss)
    said += b'algorithm text 24\n{"mu": 0.5, "name": "x"}\nmodel text 64\n'
    model = sha256(struct.pack("<2f", 1.0, -2.5)).hexdigest()
    vector = sha256(struct.pack("<2f", 7.0, 8.0)).hexdigest()
    said += model.encode() + b"\nvector text 1\na\ndigest text 64\n" + vector.encode()
    said += b"\nvector text 1\nb\ndigest text 64\n" + model.encode() + b"\n"
    table = torch.tensor([[7.0, 1.0], [8.0, -2.5]], requires_grad=True)
    task = Task(
        *("DS", 3, 4, ("c",), torch.tensor([1.0, -2.5]), LossState("barron", (1.0, 2.0), None, 1.5)),
        vectors={"b": torch.tensor([1.0, -2.5]), "a": table[:, 0]},
    )
    assert signing.digest_of_task(task, {"name": "x", "mu": 0.5}) == sha256(said).hexdigest()
    assert signing.salted_digest(b"salt", b"update") == sha256(b"saltupdate").digest()
    salted = b"salt text 2\nab\nfederation text 2\nDS\nround whole 1\n3\nclient text 1\na\n"
    assert signing.server_salt("ab", "DS", 3, "a") == sha256(salted).digest()[:16]
    assert signing.server_salt("", "DS", 3, "a") == sha256(salted.partition(b"ab\n")[2]).digest()[:16]


def test_heads_by_hand() -> None:
    assert head_statement("7", 3, "ab") == b"statement text 4\nhead\nrun text 1\n7\nround whole 1\n3\nhead text 2\nab\n"
    start = b"chain whole 1\n3\nbefore text 2\nab\nround whole 1\n3\n"
    record = b"record text 2\nef\n"
    assert link("ab", 3, "cd", "ef") == sha256(start + b"statements text 2\ncd\n" + record).hexdigest()
    assert link("ab", 3, None, "ef") == sha256(start + record).hexdigest()


# ---------------------------------------------------------------- keys


def test_a_key_signs_salts_and_is_known_by_its_fingerprint(tmp_path: Path) -> None:
    form, pem = serialization.PrivateFormat.OpenSSH, serialization.Encoding.PEM
    private = ec.derive_private_key(12345, ec.SECP384R1())
    (tmp_path / "key").write_bytes(private.private_bytes(pem, form, serialization.NoEncryption()))
    key = SigningKey.read(tmp_path / "key")
    assert (key.line, fingerprint(key.line)) == (LINE, PRINT)
    said = (
        b"salt whole 1\n1\nrun text 1\n7\nfederation text 2\nDS\nround whole 1\n3\ntask text 1\nt\nclient text 1\na\n"
    )
    expected = hmac.digest((12345).to_bytes(48, "big"), said, "sha256")[:16]
    assert key.salt("7", "DS", 3, "t", "a") == expected
    signature = key.sign(b"content")
    private.public_key().verify(signature, b"content", ec.ECDSA(signing_hash()))
    assert holds(LINE, signature, b"content")
    assert not holds(LINE, signature, b"other")
    assert not holds(LINE, b"no signature", b"content")
    (tmp_path / "key.pub").write_text(f"{LINE} whose it is\n")
    assert signing.read_public_key(tmp_path / "key.pub") == LINE


def signing_hash() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA384()


def test_a_key_of_another_kind_signs_nothing(tmp_path: Path) -> None:
    other = ec.derive_private_key(5, ec.SECP256R1())
    pem, ssh = serialization.Encoding.PEM, serialization.Encoding.OpenSSH
    file = tmp_path / "key"
    file.write_bytes(other.private_bytes(pem, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()))
    assert_refused(lambda: SigningKey.read(file), f"key: {file}", "of another kind", "federate key")
    line = other.public_key().public_bytes(ssh, serialization.PublicFormat.OpenSSH).decode()
    assert not holds(line, other.sign(b"x", ec.ECDSA(signing_hash())), b"x")


@pytest.mark.parametrize("line", ["", "no key", LINE[:-9], LINE.replace("384", "256")])
def test_a_line_that_is_no_key_signs_nothing(line: str) -> None:
    assert not holds(line, b"", b"x")


@pytest.mark.parametrize(
    ("read", "content", "words"),
    named(
        [
            ("no private key", SigningKey.read, b"text", ("key: ", "is not a private key", "federate key")),
            ("no public key", signing.read_public_key, b"text", ("not a public key", "federate key")),
            ("no public file", signing.read_public_key, None, ("cannot be read: No such file", "a .pub file")),
        ]
    ),
)
def test_files_that_hold_no_key(
    tmp_path: Path, read: Callable[[Path], object], content: bytes | None, words: tuple[str, ...]
) -> None:
    if content is not None:
        (tmp_path / "file").write_bytes(content)
    assert_refused(lambda: read(tmp_path / "file"), tmp_path / "file", *words)


def test_the_key_of_heads_is_named_by_the_environment_and_is_nobody_elses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("STEELYARD_HEAD_KEY", raising=False)
    assert signing.head_key() is None
    monkeypatch.setenv("STEELYARD_HEAD_KEY", "")
    assert signing.head_key() is None
    key, file = a_key(tmp_path / "server"), tmp_path / "server"
    monkeypatch.setenv("STEELYARD_HEAD_KEY", str(file))
    found = signing.head_key()
    assert found is not None
    assert found.line == key.line
    for mode in (0o640, 0o620, 0o610, 0o604, 0o602, 0o601):
        file.chmod(mode)
        assert_refused(signing.head_key, f"key: {file}", "can be read by others", f"chmod 600 {file}")


# ---------------------------------------------------------------- statements


def test_a_statement_is_of_its_run_rule_round_task_clients_and_of_the_one_before() -> None:
    before, rest = b"before text 2\nab\n", b"client text 1\na\ndigest bytes 1\n2\nclient text 1\nb\ndigest bytes 1\n1\n"
    start = b"statement text 7\nupdates\nrun text 1\n7\nfederation text 2\nDS\nround whole 1\n3\ntask text 1\nt\n"
    said = Statement("7", "DS", 3, "t", "ab", {"b": b"1", "a": b"2"})
    assert said.content() == start + before + rest
    assert said.digest() == sha256(start + before + rest).hexdigest()
    assert replace(said, before="").content() == start + rest


@pytest.mark.parametrize("hidden", [False, True])
def test_a_node_states_the_salted_digests_of_all_that_it_sends(keys: list[SigningKey], hidden: bool) -> None:
    sent = updates(clients=("b", "a"), payload=DenseModels(torch.tensor([[1.0, 2.0], [3.0, 4.0]])))
    task = Task("DS", 1, 3, ("a", "b"), torch.zeros(2))
    options = {"hidden": True} if hidden else {}
    found = stated(keys[0], "7", task, "asked", sent, "ab" * 32, **options)
    assert found is not None
    salts = {client: keys[0].salt("7", "DS", 3, "asked", client) for client in "ab"}
    digests = {
        client: sha256(salts[client] + struct.pack("<2f", *row)).digest()
        for client, row in (("b", (1.0, 2.0)), ("a", (3.0, 4.0)))
    }
    assert (found.key, found.before, found.digests) == (keys[0].line, "ab" * 32, digests)
    assert found.salts == ({} if hidden else salts)
    assert holds(found.key, found.signature, Statement("7", "DS", 3, "asked", "ab" * 32, digests).content())
    assert stated(keys[0], "7", task, "asked", updates(payload=DenseModels(torch.zeros(0, 2)))) is None


# ---------------------------------------------------------------- trees and proofs


def test_a_tree_by_hand() -> None:
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    said = {place: place[::-1].hex() for place in (c, a, b)}
    leaves = [sha256(b"\0" + place + after + place).digest() for place, after in ((a, b), (b, c), (c, a))]
    both = sha256(b"\1" + leaves[0] + leaves[1]).digest()
    tree = Tree(said)
    assert tree.root == sha256(b"\1" + both + leaves[2]).hexdigest()
    assert tree.leaf_for(a) == (a.hex(), b.hex(), a.hex(), ["R" + leaves[1].hex(), "R" + leaves[2].hex()])
    assert tree.leaf_for(b) == (b.hex(), c.hex(), b.hex(), ["L" + leaves[0].hex(), "R" + leaves[2].hex()])
    assert tree.leaf_for(c) == (c.hex(), a.hex(), c.hex(), ["L" + both.hex()])
    # Who has no leaf is shown by the one before its place; before the first that is the last.
    assert tree.leaf_for(bytes(32)) == tree.leaf_for(c) == tree.leaf_for(b"\xff" * 32)
    assert (Tree({}).root, Tree({}).leaf_for(a)) == (None, ("", "", "", []))
    place = b"slot text 1\n7\nfederation text 2\nDS\nround whole 1\n3\nkey text 1\nk\n"
    assert slot("7", "DS", 3, "k") == sha256(place).digest()


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


@pytest.mark.parametrize("step", ["X" + "00" * 32, "L00", "R" + "00" * 33, "Lno digits", ""])
def test_what_is_no_path_is_refused(step: str) -> None:
    with pytest.raises(ValueError, match=r"path|hexadecimal"):
        root_along(bytes(32), [step])


def sealed(server: SigningKey, stated: dict[bytes, str]) -> SealedRound:
    """A round of run 7 whose head is over these statements."""
    tree = Tree(stated)
    head = link("ab" * 32, 3, tree.root, "cd" * 32)
    signature = server.sign(head_statement("7", 3, head))
    return SealedRound("7", 3, "ab" * 32, "cd" * 32, head, server.line, signature, tree)


def said_by(keys: list[SigningKey], signing: str) -> dict[bytes, str]:
    return {
        slot("7", "DS", 3, fingerprint(key.line)): Statement("7", "DS", 3, "asked", "", {name: bytes(32)}).digest()
        for name, key in zip("abcd", keys, strict=False)
        if name in signing
    }


@pytest.mark.parametrize("signing", ["", "a", "ab", "abc", "abcd"])
def test_a_head_shows_of_every_node_what_it_stated_or_that_it_did_not(keys: list[SigningKey], signing: str) -> None:
    said = said_by(keys, signing)
    whole = sealed(keys[4], said)
    for name, key in zip("abcd", keys, strict=False):
        proof = whole.proof("DS", key.line)
        proof.check()
        assert proof.own == (name in signing)
        if not proof.own:
            continue
        mine = slot("7", "DS", 3, fingerprint(key.line))
        assert (proof.place, proof.statement) == (mine.hex(), said[mine])
        # Without its own leaf a server cannot show that a node was absent,
        others = {place: digest for place, digest in said.items() if place != mine}
        with pytest.raises(ValueError, match="lead to the head"):
            replace(whole, tree=Tree(others)).proof("DS", key.line).check()
        # and with no other leaf of the same tree either, the ones beside its own among them.
        for place in others:
            shown = dict(zip(("place", "following", "statement", "path"), whole.tree.leaf_for(place), strict=True))
            with pytest.raises(ValueError, match="another node"):
                proof.model_copy(update=shown).check()


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "the run": ({"run": "8"}, "another node|signature|lead"),
    "the round": ({"round": 4}, "another node|lead"),
    "the statement": ({"statement": "00" * 32}, "lead"),
    "the path": ({"path": []}, "lead"),
    "the record": ({"record": "00" * 32}, "lead"),
    "the head before": ({"before": "00" * 32}, "lead"),
    "the head": ({"head": "00" * 32}, "lead"),
    "a leaf left out": ({"place": "", "following": "", "statement": "", "path": []}, "lead"),
    "the signature": ({"signature": "00"}, "signature of the head does not hold"),
    "another key": ({"key": LINE}, "signature of the head does not hold"),
    "no key": ({"key": ""}, "the head is not signed"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_a_proof_of_which_anything_is_changed_shows_nothing(keys: list[SigningKey], what: str) -> None:
    proof = sealed(keys[4], said_by(keys, "abc")).proof("DS", keys[0].line)
    fields, words = CHANGED[what]
    changed = proof.model_copy(update=fields)
    with pytest.raises(ValueError, match=words):
        changed.check()


@pytest.mark.parametrize("wrong", [{"place": "AB" * 32}, {"head": "ab" * 33}, {"round": "3"}, {"more": 1}])
def test_a_proof_is_read_strictly(keys: list[SigningKey], wrong: dict[str, Any]) -> None:
    fields = sealed(keys[4], {}).proof("DS", keys[0].line).model_dump()
    assert Proof.model_validate(fields).own is False
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Proof.model_validate({**fields, **wrong})
