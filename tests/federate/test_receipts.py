"""A node's receipts show that it took part, with its own files and the server's public key alone."""

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
from tests.runs.signed_runs import RUN, signed_run
from typer.testing import CliRunner

from steelyard.cli.federate import app
from steelyard.errors import UserError
from steelyard.federate import receipts
from steelyard.messages import LossState, Signed, Task
from steelyard.runs.chain import Records
from steelyard.runs.schema import reading
from steelyard.runs.verifying import Keys
from steelyard.signing import path_to, read_public_key, root, root_along


def said_by(run: Path, keys: Path, client: str) -> list[receipts.Receipt]:
    """Return what the node of a client signed, as it would have kept it."""
    line = read_public_key(keys / f"{client}.pub")
    with reading(run) as db:
        made = Records(db)
        found = [each for round in range(1, 4) for each in made.statements(round) if each[0].client == client]
    return [
        receipts.Receipt(
            run=RUN, federation=said.federation, round=said.round, client=client, task=said.task,
            digest=said.digest.hex(), salt="", key=line, signature=signature.hex(),
        )
        for said, _, signature in found
    ]  # fmt: skip


@pytest.fixture
def taken(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A run, the folder of public keys, and the state folder of the node of client a."""
    run, keys, state = tmp_path / "run", tmp_path / "keys", tmp_path / "state"
    signed_run(run, keys)
    state.mkdir()
    write(state, said_by(run, keys, "a"))
    return run, keys, state


def write(state: Path, lines: list[receipts.Receipt]) -> None:
    (state / receipts.FILE).write_text("".join(line.model_dump_json() + "\n" for line in lines))


def outcomes(found: list[receipts.Answer]) -> list[str]:
    return [answer.outcome for answer in found]


@given(st.lists(st.binary(min_size=32, max_size=32), min_size=1, max_size=9), st.data())
def test_every_path_leads_to_the_root_and_none_from_another_leaf(leaves: list[bytes], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(leaves) - 1))
    path = path_to(leaves, at)
    assert root_along(leaves[at], path) == root(leaves)
    other = bytes([leaves[at][0] ^ 1]) + leaves[at][1:]
    assert root_along(other, path) != root(leaves)


def test_a_path_by_hand() -> None:
    from hashlib import sha256

    a, b, c = (bytes([n]) * 32 for n in range(3))
    both = sha256(b"\1" + a + b).digest()
    assert path_to([a, b, c], 0) == ["R" + b.hex(), "R" + c.hex()]
    assert path_to([a, b, c], 1) == ["L" + a.hex(), "R" + c.hex()]
    assert path_to([a, b, c], 2) == ["L" + both.hex()]
    assert root_along(c, ["L" + both.hex()]) == sha256(b"\1" + both + c).hexdigest()


@pytest.mark.parametrize("step", ["X" + "00" * 32, "L00", "Lno digits", ""])
def test_what_is_no_path_is_refused(step: str) -> None:
    with pytest.raises(ValueError, match=r"path|hexadecimal"):
        root_along(bytes(32), [step])


def test_a_node_shows_that_it_took_part_without_the_run_once_heads_are_kept(taken: tuple[Path, Path, Path]) -> None:
    run, keys, state = taken
    trusted = Keys.read(keys)
    assert outcomes(receipts.listed(state)) == ["signed"] * 3
    assert outcomes(receipts.prove(state, run, trusted)) == ["took part"] * 3
    shutil.rmtree(run)
    found = receipts.listed(state, trusted)
    assert outcomes(found) == ["took part"] * 3
    assert found[0].line().startswith(f"run {RUN}, DS>LD, round 1, client a: digest {found[0].receipt.digest[:16]}")


def test_a_head_by_another_key_than_the_trusted_one_shows_nothing(taken: tuple[Path, Path, Path]) -> None:
    run, keys, state = taken
    receipts.prove(state, run)
    shutil.copy(keys / "a.pub", keys / "server.pub")
    found = receipts.listed(state, Keys.read(keys))
    assert outcomes(found) == ["differs"] * 3
    assert "not by server.pub" in found[0].why


@pytest.mark.parametrize("field", ["path", "before", "record", "head", "signature"])
def test_any_part_of_a_kept_proof_that_is_changed_is_noticed(taken: tuple[Path, Path, Path], field: str) -> None:
    run, _, state = taken
    receipts.prove(state, run)
    lines = [json.loads(line) for line in (state / receipts.PROOFS).read_text().splitlines()]
    lines[0][field] = ["L" + "00" * 32] if field == "path" else "00" * 32
    (state / receipts.PROOFS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert outcomes(receipts.listed(state)) == ["differs", "took part", "took part"]


def test_a_run_that_left_the_node_out_or_changed_its_digest_is_named(taken: tuple[Path, Path, Path]) -> None:
    run, _, state = taken
    db = sqlite3.connect(run / "run.sqlite")
    with db:
        db.execute("DELETE FROM signatures WHERE round = 2")
        ((digests,),) = db.execute("SELECT updates FROM digests WHERE round = 3").fetchall()
        db.execute("UPDATE digests SET updates = ? WHERE round = 3", (bytes([digests[0] ^ 1]) + digests[1:],))
    db.close()
    found = receipts.prove(state, run)
    assert outcomes(found) == ["took part", "did not take part", "differs"]
    assert "the run says digest" in found[2].why
    assert outcomes(receipts.listed(state)) == ["took part", "signed", "signed"]


def test_a_round_whose_figures_were_changed_does_not_lead_to_its_head(taken: tuple[Path, Path, Path]) -> None:
    run, _, state = taken
    db = sqlite3.connect(run / "run.sqlite")
    with db:
        db.execute("UPDATE rounds SET epsilon = 9 WHERE round = 2")
    db.close()
    found = receipts.prove(state, run)
    assert outcomes(found) == ["took part", "differs", "took part"]
    assert found[1].why == "its path does not lead to the head"


def test_the_command_ends_with_the_worst_of_its_lines(taken: tuple[Path, Path, Path]) -> None:
    run, keys, state = taken
    made = CliRunner().invoke(app, ["receipts", str(state), "--run", str(run), "--keys", str(keys)])
    assert (made.exit_code, made.output.count("took part")) == (0, 3)
    db = sqlite3.connect(run / "run.sqlite")
    with db:
        db.execute("DELETE FROM signatures WHERE round = 2")
    db.close()
    made = CliRunner().invoke(app, ["receipts", str(state), "--run", str(run)])
    assert (made.exit_code, made.output.count("did not take part")) == (1, 1)


def test_bad_files_are_one_line_each(taken: tuple[Path, Path, Path], tmp_path: Path) -> None:
    run, _, state = taken
    with pytest.raises(UserError, match="holds no receipts"):
        receipts.read(tmp_path)
    whole = (state / receipts.FILE).read_text()
    (state / receipts.FILE).write_text(whole.replace(f'"run":"{RUN}"', '"run":"8"'))
    with pytest.raises(UserError, match="no receipt is of run '7'"):
        receipts.prove(state, run)
    assert outcomes(receipts.listed(state)) == ["differs"] * 3
    (state / receipts.FILE).write_text(whole.replace('"run"', '"ruin"', 1))
    with pytest.raises(UserError, match="line 1 is cut off or changed"):
        receipts.read(state)


def test_a_line_torn_by_a_kill_does_not_count_and_the_next_one_takes_its_place(tmp_path: Path) -> None:
    task = Task("DS", 1, 1, ("a",), torch.zeros(2), LossState("cross-entropy"))
    signed = {"a": Signed(bytes(32), bytes(16), "line", b"signature")}
    receipts.keep(tmp_path, RUN, task, "asked", signed)
    whole = (tmp_path / receipts.FILE).read_bytes()
    assert (tmp_path / receipts.FILE).stat().st_mode & 0o077 == 0
    (tmp_path / receipts.FILE).write_bytes(whole + whole[:50])
    assert len(receipts.read(tmp_path)) == 1
    receipts.keep(tmp_path, RUN, replace(task, round=2), "asked", signed)
    assert [one.round for one in receipts.read(tmp_path)] == [1, 2]
