"""A round of the chain with all that proofs about it need, held to the rows that it comes from."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from tests.runs.contents import query
from tests.runs.records import federation, record, state
from tests.runs.signed_runs import RUN, signed_run

from steelyard.runs.chain import Records
from steelyard.runs.opening import reading
from steelyard.runs.store import Store
from steelyard.signing import read_public_key


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    return signed_run(folder / "run", folder / "keys")


def test_a_sealed_round_holds_its_head_the_one_before_and_the_servers_signature(run: Path) -> None:
    heads = dict(query(run, "SELECT round, head FROM chain"))
    signatures = dict(query(run, "SELECT round, signature FROM chain"))
    server = read_public_key(run.parent / "keys" / "server.pub")
    with reading(run) as db:
        records = Records(db)
        for round in range(4):
            found = records.sealed(round)
            assert found is not None
            assert (found.run, found.round, found.head, found.key) == (RUN, round, heads[round], server)
            assert found.before == (heads[round - 1] if round else records.first())
            assert found.signature == signatures[round]
            ledger = query(run, f"SELECT ledger_bytes, ledger FROM chain WHERE round = {round}")[0]
            assert ledger == (None, None)
            assert found.record == hashlib.sha256(records.record(round, None)).hexdigest()
        assert records.sealed(4) is None


def test_without_a_key_a_sealed_round_has_no_signature(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.register([federation()])
    store.commit(0, [record(round=0, updates=None)], {"DS>LD": state(0)}, dict, last=True)
    store.close()
    with reading(tmp_path) as db:
        found = Records(db).sealed(0)
    assert found is not None
    assert (found.key, found.signature) == ("", b"")
