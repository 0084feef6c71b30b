"""A node's receipts show that it took part, or did not, with its own files and the server's public key alone."""

from __future__ import annotations

import json
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.kit import assert_refused
from tests.runs.contents import change
from tests.runs.signed_runs import RUN, signed_run
from typer.testing import CliRunner

from steelyard.base import journal
from steelyard.base.journal import Journal
from steelyard.cli.federate import app
from steelyard.federate import book
from steelyard.federate.book import Shown, prove_receipts, receipts_of
from steelyard.messages.updates import LossState, Signed, Task
from steelyard.proof.signing import SigningKey, fingerprint, read_public_key
from steelyard.proof.statements import Proof, Statement
from steelyard.report.verification import Keys
from steelyard.runs.chain import Records
from steelyard.runs.database import reading

TASK = Task("DS", 1, 1, ("a",), torch.zeros(2), LossState("cross-entropy"))
ABSENT = (2, "b")
"""Node b signs nothing in round 2."""


def said_by(run: Path, line: str) -> list[book.Receipt]:
    """Return what a node signed, as it would have kept it."""
    with reading(run) as db:
        made = Records(db)
        found = [one for round in range(1, 4) for one in made.statements(round) if one.key == fingerprint(line)]
    return [
        book.Receipt(
            run=RUN, federation=one.statement.federation, round=one.statement.round, task=one.statement.task,
            before=one.statement.before, digests={name: d.hex() for name, d in one.statement.digests.items()},
            salts={}, key=line, signature=one.signature.hex(),
        )
        for one in found
    ]  # fmt: skip


def sent_by(run: Path, line: str) -> list[Proof]:
    """Return what the server sends a node of each round."""
    with reading(run) as db:
        made = Records(db)
        sealed = [made.sealed(round) for round in range(1, 4)]
    return [one.proof("DS>LD", line) for one in sealed if one is not None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run, its public keys, and the state folders of both nodes before any head came."""
    folder = tmp_path_factory.mktemp("made")
    signed_run(folder / "run", folder / "keys", absent=ABSENT)
    for node in "ab":
        (folder / node).mkdir()
        lines = said_by(folder / "run", read_public_key(folder / "keys" / f"{node}.pub"))
        (folder / node / book.RECEIPTS).write_text("".join(line.model_dump_json() + "\n" for line in lines))
    return folder


@pytest.fixture
def taken(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "made"))


def outcomes(found: list[Shown]) -> list[str]:
    return [answer.outcome for answer in found]


def test_what_the_server_sends_shows_who_took_part_and_who_did_not_without_its_folder(taken: Path) -> None:
    shown: dict[str, list[Shown]] = {}
    for node in "ab":
        line = read_public_key(taken / "keys" / f"{node}.pub")
        assert book.keep_proofs(taken / node, RUN, line, sent_by(taken / "run", line)) == []
    shutil.rmtree(taken / "run")
    for node in "ab":
        shown[node] = receipts_of(taken / node, Keys.read(taken / "keys"))
    assert outcomes(shown["a"]) == ["took part"] * 3
    assert outcomes(shown["b"]) == ["took part", "absent", "took part"]
    assert shown["a"][0].line().startswith(f"run {RUN}, DS>LD, round 1, client a: took part: head ")
    assert shown["b"][1].line().endswith("is signed and holds nothing of this node")
    assert (taken / "a" / book.PROOFS).stat().st_mode & 0o077 == 0


def test_what_was_signed_and_is_in_no_head_did_not_take_part(taken: Path) -> None:
    """A server that leaves a node out of its chain and sends it the heads all the same."""
    key = SigningKey.read(taken / "keys" / "b")
    digests = {"b": bytes(32)}
    signature = key.sign(Statement(RUN, "DS>LD", 2, "asked", "", digests).content())
    task = replace(TASK, federation="DS>LD", round=2)
    book.keep_receipt(taken / "b", RUN, task, "asked", Signed(key.line, "", digests, {}, signature))
    book.keep_proofs(taken / "b", RUN, key.line, sent_by(taken / "run", key.line))
    assert outcomes(receipts_of(taken / "b")) == ["took part", "did not take part", "took part"]


def test_proofs_of_others_or_of_no_head_are_not_kept(taken: Path) -> None:
    a, b = (read_public_key(taken / "keys" / f"{node}.pub") for node in "ab")
    proofs = sent_by(taken / "run", a)
    assert len(book.keep_proofs(taken / "b", RUN, b, proofs)) == 3
    assert len(book.keep_proofs(taken / "a", "8", a, proofs)) == 3
    assert not (taken / "b" / book.PROOFS).exists()
    (relabelled,) = (proof.model_copy(update={"node": b}) for proof in proofs if proof.round == 1)
    with pytest.raises(ValueError, match="it is of another node"):
        relabelled.check()


def test_a_head_by_another_key_than_the_trusted_one_shows_nothing(taken: Path) -> None:
    prove_receipts(taken / "a", taken / "run")
    shutil.copy(taken / "keys" / "a.pub", taken / "keys" / "server.pub")
    found = receipts_of(taken / "a", Keys.read(taken / "keys"))
    assert outcomes(found) == ["differs"] * 3
    assert "not by server.pub" in found[0].why


def test_a_kept_proof_that_is_changed_is_noticed(taken: Path) -> None:
    """Each of its parts is changed in tests/proof/test_signing.py."""
    prove_receipts(taken / "a", taken / "run")
    path = taken / "a" / book.PROOFS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0]["record"] = "00" * 32
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "differs" in outcomes(receipts_of(taken / "a"))


def test_two_heads_of_one_round_are_named(taken: Path) -> None:
    """A server that shows one chain to the node and another to everybody else."""
    prove_receipts(taken / "a", taken / "run")
    change(taken / "run", "UPDATE rounds SET epsilon = 9 WHERE round = 2")
    db = sqlite3.connect(taken / "run" / "run.sqlite")
    with db:
        Records(db).extend(-1, 3, SigningKey.read(taken / "keys" / "server"))
    db.close()
    line = read_public_key(taken / "keys" / "a.pub")
    assert book.keep_proofs(taken / "a", RUN, line, sent_by(taken / "run", line)) == []
    found = receipts_of(taken / "a", Keys.read(taken / "keys"))
    assert outcomes(found) == ["took part", "differs", "differs"]
    assert found[1].why.startswith("the server signed two heads: ")


def test_the_command_ends_with_the_worst_of_its_lines(taken: Path) -> None:
    options = ["receipts", str(taken / "b"), "--run", str(taken / "run")]
    made = CliRunner().invoke(app, [*options, "--keys", str(taken / "keys")])
    assert (made.exit_code, made.output.count("took part"), made.output.count("absent")) == (0, 2, 1)
    change(taken / "run", "UPDATE chain SET head = NULL WHERE round = 3")
    (taken / "b" / book.PROOFS).unlink()
    made = CliRunner().invoke(app, options)
    assert (made.exit_code, made.output.count("did not take part")) == (1, 1)


def test_bad_files_are_one_line_each(taken: Path, tmp_path: Path) -> None:
    state = taken / "a"
    assert_refused(lambda: receipts_of(tmp_path), "holds no receipts")
    whole = (state / book.RECEIPTS).read_text()
    (state / book.RECEIPTS).write_text(whole.replace(f'"run":"{RUN}"', '"run":"8"'))
    assert_refused(lambda: prove_receipts(state, taken / "run"), "no receipt is of run '7'")
    (state / book.RECEIPTS).write_text(whole.replace('"run"', '"ruin"', 1))
    assert_refused(lambda: receipts_of(state), "line 1: ")


def of_round(round: int, run: str = RUN, federation: str = "DS") -> book.Receipt:
    return book.Receipt(
        run=run, federation=federation, round=round, task="asked", before="", digests={"a": f"{round:064x}"}, salts={},
        key="line", signature="",
    )  # fmt: skip


@given(
    st.lists(st.tuples(st.sampled_from("67"), st.sampled_from(["DS", "LD"]), st.integers(1, 4))),
    st.binary(max_size=20).filter(lambda torn: b"\n" not in torn),
    st.integers(1, 300),
)
def test_whatever_was_written_the_last_line_of_an_earlier_round_is_found(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[str, str, int]], torn: bytes, block: int
) -> None:
    folder = tmp_path_factory.mktemp("state")
    lines = [of_round(round, run, federation) for run, federation, round in places]
    content = "".join(line.model_dump_json() + "\n" for line in lines).encode() + torn
    (folder / book.RECEIPTS).write_bytes(content)
    earlier = [one for one in lines if (one.run, one.federation) == ("7", "DS") and one.round < 3]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "BLOCK", block)
        expected = earlier[-1].statement.digest() if earlier else ""
        assert book.last_statement(folder, "7", "DS", 3) == expected
        Journal(folder / book.RECEIPTS).append([of_round(9).model_dump_json()])
    assert (folder / book.RECEIPTS).read_bytes() == content[: len(content) - len(torn)] + (
        of_round(9).model_dump_json().encode() + b"\n"
    )


LEFT_OUT = "DELETE FROM signatures WHERE round = 2"
CHANGED = "UPDATE digests SET updates = zeroblob(64) WHERE round = 3"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([LEFT_OUT, CHANGED], ["took part", "differs", "differs"]),
        (["UPDATE chain SET head = NULL WHERE round = 3"], ["took part", "took part", "did not take part"]),
        (["UPDATE chain SET key = NULL, signature = NULL"], ["took part"] * 3),
    ],
)
def test_a_run_folder_that_differs_is_named_and_unsigned_heads_are_not_kept(
    taken: Path, changes: list[str], expected: list[str]
) -> None:
    for statement in changes:
        change(taken / "run", statement)
    found = prove_receipts(taken / "a", taken / "run")
    assert outcomes(found) == expected
    kept = outcomes(receipts_of(taken / "a"))
    whole = (one == "took part" and "key" not in changes[0] for one in expected)
    assert kept == ["took part" if one else "signed" for one in whole], "nothing else of it is kept"
