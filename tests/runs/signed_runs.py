"""Runs whose nodes and server sign, as a server across machines writes them; small enough to change every cell."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tests.runs.records import evaluations, federation, record, state, updates, values

from steelyard.messages.updates import Failure, Signed
from steelyard.proof.signing import SigningKey, key_pair, model_digest, task_digest
from steelyard.proof.statements import Statement
from steelyard.runs.digests import update_digest
from steelyard.runs.facts import RunFacts
from steelyard.runs.store import Store

RUN = "7"
TEXT = 'name = "hand-made"\nkind = "learning"\n[data]\nsource = "digits"\n'
KEEPS = TEXT + '[store]\nkeep = "updates"\n'


def a_key(file: Path) -> SigningKey:
    """Make a key pair in FILE and FILE.pub."""
    private, public = key_pair()
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(private)
    file.chmod(0o600)
    file.with_name(file.name + ".pub").write_bytes(public)
    return SigningKey.read(file)


def signed_by(key: SigningKey, client: str, round: int, task: str, numbers: np.ndarray, before: str = "") -> Signed:
    """Sign an update as a node does."""
    salt = key.salt(RUN, "DS>LD", round, task, client)
    digests = {client: update_digest(salt, numbers)}
    signature = key.sign(Statement(RUN, "DS>LD", round, task, before, digests).content())
    return Signed(key.line, before, digests, {client: salt}, signature)


def signed_run(
    folder: Path, keys: Path, rounds: int = 3, absent: tuple[int, str] = (0, ""), *, keep: bool = False
) -> Path:
    """A finished run of one rule whose two clients are signed for by two nodes; their public keys lie in `keys`.

    Node a links its statements, node b does not. `absent` is a round and a node that signs nothing in it; `keep` has
    the run keep updates. From round 1 on each model is the weighted sum of the updates.
    """
    nodes = {name: a_key(keys / name) for name in ("a", "b")}
    folder.mkdir(parents=True)
    text = KEEPS if keep else TEXT
    (folder / "experiment.toml").write_text(text)
    store = Store(folder, signer=a_key(keys / "server"), keep_updates="float32" if keep else None)
    made = federation()
    store.register([made])
    store.note(RunFacts(federation_run=RUN, experiment_text=text))
    store.resume()
    before = ""
    for round in range(rounds + 1):
        old = state(round, *((0.75, 0.25) if round > 1 else (1.0, 2.0)))
        task = task_digest("DS>LD", 0, round, old.loss, {"name": "fedavg"}, model_digest(old.parameters), {})
        rows = dict(zip("ab", torch.eye(2).numpy(), strict=True))
        signed = tuple(
            signed_by(key, name, round, task, rows[name], before if name == "a" else "")
            for name, key in nodes.items()
            if absent != (round, name)
        )
        if round and absent != (round, "a"):
            before = Statement(RUN, "DS>LD", round, task, before, signed[0].digests).digest()
        tested = evaluations(
            round=round, metrics={"mae": np.array([1.0, 2.0])}, failures=(Failure("é", "no test rows"),),
            right=np.array([True, False, True, True]) if round == rounds else None,
        )  # fmt: skip
        sent = updates(round=round, signed=signed, bytes_sent=np.array([8, 8])) if round else None
        done = record(
            round=round, updates=sent, evaluations=tested, epsilon=0.5, simulated=1.0, loss=old.loss,
            server_accuracy=0.5, server_macro_f1=0.25, server_metrics={"mae": 1.0},
            contributions=(values(round),) if round else (),
        )  # fmt: skip
        new = {"DS>LD": state(round, *((0.75, 0.25) if round else (1.0, 2.0)))}
        store.commit(round, [done], new, dict, last=round == rounds)
    store.finish()
    store.close()
    return folder
