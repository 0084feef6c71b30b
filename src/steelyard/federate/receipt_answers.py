"""What a node's receipts and the heads that it keeps show: that it took part in a round, or that it did not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steelyard.base import files
from steelyard.base.errors import UserError, first_names
from steelyard.federate.receipts import FILE, PROOFS, Receipt, read, read_proofs, written
from steelyard.proof.signing import SERVER, Keys, fingerprint
from steelyard.proof.statements import UNSIGNED, Proof
from steelyard.runs.chain import Records
from steelyard.runs.database import reading

Outcome = Literal["signed", "took part", "absent", "did not take part", "differs"]
CODES: dict[Outcome, int] = {"signed": 0, "took part": 0, "absent": 0, "did not take part": 1, "differs": 2}
"""What `steelyard federate receipts` ends with: the largest of its lines. "signed": by the node, and no head yet;
"absent": the node signed nothing, and the head holds nothing of it; "did not take part": it signed, and the head holds
nothing of it."""
Place = tuple[str, str, int]
"""Run, rule and round."""
CheckedProof = tuple[Proof, str]
"""A proof, and why it shows nothing; empty where it does."""


@dataclass(frozen=True)
class Answer:
    """What is known of a node in one round of one rule."""

    place: Place
    clients: tuple[str, ...]
    """For whom the node signed."""
    outcome: Outcome
    why: str

    def line(self) -> str:
        """Return it in words: where, who, what is known."""
        run, federation, round = self.place
        who = f", client{'s' if len(self.clients) > 1 else ''} {first_names(self.clients)}" if self.clients else ""
        return f"run {run}, {federation}, round {round}{who}: {self.outcome}: {self.why}"


def listed(folder: Path, trusted: Keys | None = None) -> list[Answer]:
    """Return what a node's own files show of each round: its receipts, and the heads that were kept with them."""
    return _answers(_receipts(folder), _checked(read_proofs(folder), trusted))


def prove(folder: Path, run: Path, trusted: Keys | None = None) -> list[Answer]:
    """Hold a node's receipts against a run's folder, and keep what its signed heads say of the node."""
    files.check_run(run)
    receipts = _receipts(folder)
    with reading(run) as db:
        records = Records(db)
        name = records.run
        nodes = sorted({one.key for one in receipts if one.run == name})
        if not nodes:
            known = f"no receipt is of run '{name}' ({run})"
            raise UserError(f"{folder}: {known}; allowed: the folder of a run that the node signed in")
        rules = [rule for (rule,) in db.execute("SELECT name FROM federations ORDER BY name").fetchall()]
        rounds = [round for (round,) in db.execute("SELECT round FROM chain WHERE round > 0 ORDER BY round").fetchall()]
        sealed = [one for round in rounds if (one := records.sealed(round)) is not None]
    proofs = _checked([one.proof(rule, node) for one in sealed for rule in rules for node in nodes], trusted)
    written(folder, [proof for proof, fault in proofs if not fault])
    beyond = "the run's chain does not reach this round"
    return [
        Answer(one.place, one.clients, "did not take part", beyond) if one.outcome == "signed" else one
        for one in _answers(receipts, proofs)
        if one.place[0] == name
    ]


def _receipts(folder: Path) -> list[Receipt]:
    if not files.is_file(folder / FILE) and not files.is_file(folder / PROOFS):
        raise UserError(f"{folder}: holds no {FILE}; allowed: the state folder of a node that has a key and took part")
    return read(folder)


def _answers(receipts: Sequence[Receipt], proofs: Sequence[CheckedProof]) -> list[Answer]:
    last: dict[Place, CheckedProof] = {(one[0].run, one[0].federation, one[0].round): one for one in proofs}
    signed: dict[Place, list[Receipt]] = {}
    for one in receipts:
        signed.setdefault((one.run, one.federation, one.round), []).append(one)
    heads: dict[tuple[str, int], set[str]] = {}
    for proof, fault in proofs:
        if not fault:
            heads.setdefault((proof.run, proof.round), set()).add(proof.head)
    places = sorted({*last, *signed})
    return [_answer(place, signed.get(place, []), last.get(place), heads) for place in places]


def _answer(
    place: Place, receipts: Sequence[Receipt], last: CheckedProof | None, heads: Mapping[tuple[str, int], set[str]]
) -> Answer:
    """Say what is known of one round: it may have been repeated, then any of its receipts counts."""
    clients = tuple(sorted({client for one in receipts for client in one.digests}))

    def answer(outcome: Outcome, why: str) -> Answer:
        return Answer(place, clients, outcome, why)

    if any(not one.holds() for one in receipts):
        return answer("differs", "the node's own signature does not hold")
    if last is None:
        return answer("signed", "no head of the server is kept with it yet")
    both = heads.get((place[0], place[2]), set[str]())
    if len(both) > 1:
        return answer("differs", f"the server signed two heads: {' and '.join(f'{one[:16]}…' for one in sorted(both))}")
    proof, fault = last
    if fault not in ("", UNSIGNED):
        return answer("differs", fault)
    held = proof.statement if proof.own else ""
    shown = fault or f"head {proof.head[:16]}… is signed"
    if not held:
        nothing = f"{shown} and holds nothing of this node"
        return answer("did not take part" if receipts else "absent", nothing)
    if held not in {one.statement.digest() for one in receipts}:
        return answer("differs", f"{shown} and holds another statement, {held[:16]}…")
    return answer("took part", shown if fault else f"{shown} and its path holds")


def _checked(proofs: Sequence[Proof], trusted: Keys | None) -> list[CheckedProof]:
    return [(proof, _fault(proof, trusted)) for proof in proofs]


def _fault(proof: Proof, trusted: Keys | None) -> str:
    """Say why a proof shows nothing; empty where it does."""
    try:
        proof.check()
    except ValueError as error:
        return str(error)
    if trusted is not None and trusted.named.get(SERVER) != proof.key:
        return f"the head is signed by {fingerprint(proof.key)}, not by {SERVER}.pub"
    return ""
