"""What the chain of rounds and its digests cost a round: `python -m benchmarks.chain [--bench A|C] [--device cuda]`.

Whole rounds of the product (training, weighing, combining, writing; no tests, so that nothing hides the cost) on the
simulator's benchmarks A and C, checkpoints every tenth round. The share is of processor time, which says the same on a
busy machine; on a GPU, what is hashed beside the next round is not in it, but what a round waits for is. The last line
is JSON. Without --bench, also how long the chain of a run of 1,000 rounds with 371 clients takes to be checked.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.simulators.work import BENCHES, make_data
from benchmarks.store import PARAMETERS, RULE, write_run
from steelyard.base.settings import validated
from steelyard.data import in_memory
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.running import run
from steelyard.messages.updates import LossState, Signed
from steelyard.proof.signing import SigningKey, key_pair, model_digest, task_digest
from steelyard.proof.statements import Statement
from steelyard.report.verification import verify
from steelyard.runs.chain import Records
from steelyard.runs.database import reading
from steelyard.runs.digests import Digests
from steelyard.runs.history import History
from steelyard.runs.store import Store

SKIPPED = 2
"""Rounds at the begin that are not counted: the first model, and the choice of an engine."""


def described(name: str, device: str, precision: str, rounds: int, digests: str) -> LearningDescription:
    """Return a benchmark of the simulator as an experiment."""
    bench = BENCHES[name]
    document: dict[str, Any] = {
        "data": {"source": "memory"},
        "partition": {"scheme": "iid", "clients": bench.clients, "test": "none"},
        "model": {"name": "cnn-mnist" if bench.convolutional else "mlp"},
        "training": {"learning_rate": bench.rate, "epochs": bench.epochs, "batch_size": bench.batch},
        "rounds": {"count": rounds, "fraction": bench.cohort / bench.clients},
        "store": {"checkpoint_every": 10, "digests": digests},
        "compute": {"device": device, "precision": precision},
        "weighing": {"criteria": ["DS", "LD"]},
    }
    if not bench.convolutional:
        document["model"]["hidden"] = [bench.hidden]
    return validated(LearningDescription, document, "experiment")


class Watch:
    """Times rounds and what the chain takes of them: on the clock, and of the processors, threads included."""

    def __init__(self) -> None:
        self.rounds = 0
        self.whole = self.chain = self.clock = 0.0
        self._begun: tuple[float, float] | None = None

    @contextmanager
    def watching(self) -> Generator[None]:
        """Count the rounds that are written meanwhile, after the first ones."""
        commit, take, collect, extend = Store.commit, Digests.take, Digests.collect, Records.extend

        def counted(store: Store, round: int, *rest: Any, **more: Any) -> None:
            commit(store, round, *rest, **more)
            now = time.process_time(), time.perf_counter()
            if self._begun is not None and round > SKIPPED:
                self.rounds += 1
                self.whole += now[0] - self._begun[0]
                self.clock += now[1] - self._begun[1]
            elif round <= SKIPPED:
                self.chain = 0.0
            self._begun = now

        def timed(work: Any) -> Any:
            def inner(*rest: Any, **more: Any) -> Any:
                began = time.process_time()
                try:
                    return work(*rest, **more)
                finally:
                    self.chain += time.process_time() - began

            return inner

        with (
            mock.patch.object(Store, "commit", counted),
            mock.patch.object(Digests, "take", timed(take)),
            mock.patch.object(Digests, "collect", timed(collect)),
            mock.patch.object(Records, "extend", timed(extend)),
        ):
            yield


def measured(name: str, device: str, precision: str, rounds: int, digests: str = "cheap") -> dict[str, Any]:
    """Return the seconds of a round and the share of the chain in them."""
    data = make_data(BENCHES[name])
    features = data.features.reshape(-1, 1, 28, 28) if BENCHES[name].convolutional else data.features
    dataset = in_memory(features, data.labels, classes=BENCHES[name].classes)
    watch = Watch()
    with tempfile.TemporaryDirectory() as scratch, watch.watching():
        folder = run(described(name, device, precision, rounds, digests), out=Path(scratch) / "run", dataset=dataset)
        with reading(folder) as connection:
            ((hashed,),) = connection.execute("SELECT COUNT(*) FROM digests WHERE updates IS NOT NULL").fetchall()
    return {
        "bench": name,
        "seconds_per_round": watch.clock / watch.rounds,
        "processor_per_round": watch.whole / watch.rounds,
        "chain_per_round": watch.chain / watch.rounds,
        "share": watch.chain / watch.whole,
        "rounds_with_digests_of_updates": hashed,
    }


def checked(rounds: int = 1000, clients: int = 371) -> dict[str, float]:
    """Return how long the chain of a long run takes to be checked."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        write_run(folder, rounds, clients)
        began = time.perf_counter()
        found = History(folder).chain
        assert found.problem == ""
        assert found.round == rounds
        return {"check_seconds": time.perf_counter() - began}


def signed(rounds: int = 1000, nodes: int = 371) -> dict[str, float]:
    """Return how long `verify` takes where every client has a node of its own, which signs in every round.

    Only the last signature of each node is made by its key, the others are bytes of the same length: `verify` checks
    no other by the key, and to make all of them takes minutes.
    """
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        (folder / "experiment.toml").write_text('name = "made"\nkind = "learning"\n[data]\nsource = "digits"\n')
        keys = [_key(Path(scratch) / f"node-{number}") for number in range(nodes)]
        before = [""] * nodes
        model = model_digest(torch.zeros(PARAMETERS))

        def sign(round: int, names: Sequence[str]) -> tuple[Signed, ...]:
            found: list[Signed] = []
            task = task_digest(RULE, 0, round, LossState(), {"name": "fedavg"}, model, {})
            for at, (key, name) in enumerate(zip(keys, names, strict=True)):
                digests = {name: hashlib.sha256(f"{round} {name}".encode()).digest()}
                said = Statement("", RULE, round, task, before[at], digests)
                signature = key.sign(said.content()) if round == rounds else bytes(103)
                found.append(Signed(key.line, before[at], digests, {name: bytes(16)}, signature))
                before[at] = said.digest()
            return tuple(found)

        write_run(folder, rounds, nodes, sign, _key(Path(scratch) / "server"))
        began, worked = time.perf_counter(), time.process_time()
        found = verify(folder)
        took = time.perf_counter() - began, time.process_time() - worked
        assert found.found.changed == [], found.lines()[:5]
        assert found.found.checked["signatures"].startswith(f"{rounds * nodes} of nodes"), found.lines()
        return {"signatures": rounds * nodes, "verify_seconds": took[0], "verify_processor": took[1]}


def _key(file: Path) -> SigningKey:
    file.write_bytes(key_pair()[0])
    return SigningKey.read(file)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bench", choices=["A", "C"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--rounds", type=int, default=22)
    parser.add_argument("--digests", choices=["cheap", "every"], default="cheap")
    parser.add_argument("--signed", action="store_true", help="only: verify 1,000 rounds of 371 nodes that sign")
    options = parser.parse_args()
    if options.signed:
        print(json.dumps(signed()))
        return
    names = [options.bench] if options.bench else ["A", "C"]
    shown: list[Any] = [
        measured(name, options.device, options.precision, options.rounds, options.digests) for name in names
    ]
    if options.bench is None:
        shown.append(checked())
    about = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(json.dumps({"device": about, "threads": torch.get_num_threads(), "found": shown}))


if __name__ == "__main__":
    main()
