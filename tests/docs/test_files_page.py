"""The page of files names every file, key and tensor that is written."""

from __future__ import annotations

import re

from tests.docs.made import pages
from tests.warm import ROOT

from steelyard import files
from steelyard.arena import archive, plan
from steelyard.federate import node_ledger, receipts
from steelyard.privacy import ledger
from steelyard.runs import checkpoint, schema, tensor_files
from steelyard.runs.typed import declared
from steelyard.sweeps import result

PAGE = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")


def keys(heading: str) -> set[str]:
    """The keys in the first table below a heading or a head of a table."""
    table = PAGE[PAGE.index(heading) :].split("|---|---|\n")[1].split("\n\n")[0]
    return {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])}


def test_every_file_of_a_folder_is_named() -> None:
    written = [files.DATABASE, files.RUN_FILE, files.LEDGER, files.LOCK, files.REPORT, files.SWEEP_FILE]
    written += [files.ARENA_FILE, archive.ARCHIVE, archive.PICTURE, f"{plan.SCENES}/"]
    written += [files.ATTACK_FILE, files.DRAFT, node_ledger.FILE, node_ledger.MARK, receipts.FILE, receipts.PROOFS]
    written += [result.RESULTS, result.BEST, result.PICTURE]
    folders = (files.CHECKPOINTS, files.CODE, files.EXPORT, files.FIGURES, files.FLOWER, files.UPDATES)
    written += [f"{folder}/" for folder in folders]
    assert [name for name in written if f"`{name}" not in PAGE] == []


def test_every_key_of_a_line_is_named() -> None:
    assert keys("## The ledger of a run") == set(ledger._Line.model_fields)
    assert keys("## The ledger of a node") == set(node_ledger.Entry.model_fields)
    assert keys("## Receipts of a node") == set(receipts.Receipt.model_fields)
    assert keys("| key of a proof |") == set(receipts.Proof.model_fields)


def test_every_kind_of_tensor_is_named() -> None:
    for prefix in (checkpoint.MODELS, checkpoint.SERVER, tensor_files.CLIENTS):
        assert f"| `{prefix}" in PAGE


def test_every_table_of_the_database_is_on_its_page() -> None:
    page = pages()["reference/database.md"]
    assert re.findall(r"^## `(\w+)`$", page, re.MULTILINE) == list(declared(schema.SCHEMA))
    for table, columns in declared(schema.SCHEMA).items():
        made = page.split(f"## `{table}`")[1].split("\n## ")[0]
        assert [column for column in columns if not re.search(rf"\b{column}\b", made)] == []
