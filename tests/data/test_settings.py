"""The sections [data], [partition] and [[flaws]]: what does not fit is refused before any data is read."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.kit import assert_refused

from steelyard.data import (
    DataSettings,
    FlawSettings,
    PartitionSettings,
    check_flaws,
    check_together,
    in_memory,
    share_out,
)
from steelyard.data.loading import load
from steelyard.data.settings import client_name

IID = {"scheme": "iid", "clients": 4}
WHO = {"clients": ["client-002"]}


REFUSED: list[tuple[type, dict[str, Any], str]] = [
    (DataSettings, {"source": "npz"}, "path: got nothing; allowed with source 'npz': a .npz file"),
    (DataSettings, {"source": "csv", "path": "x"}, "labels: got nothing; allowed with source 'csv'"),
    (DataSettings, {"source": "csv", "path": "x", "labels": "y", "files": ["z"]}, "files: got some together with path"),
    (DataSettings, {"source": "csv", "path": "x", "labels": "y", "event": "e"}, "event: got "),
    (DataSettings, {"source": "csv", "path": "x", "labels": "y", "task": "survival"}, "event: got "),
    (
        DataSettings,
        {"source": "csv", "path": "x", "labels": "y", "task": "regression", "positive_above": 1},
        "positive_above: got 1.0 with task 'regression'",
    ),
    (DataSettings, {"source": "digits", "path": "x"}, "path: got 'x' with source 'digits'"),
    (DataSettings, {"source": "digits", "ignore": ["x"]}, "ignore: got ('x',) with source 'digits'"),
    (DataSettings, {"source": "npz", "path": "x", "size": 32}, "size: got 32 with source 'npz'"),
    (DataSettings, {"source": "npz", "path": "x", "task": "survival"}, "task: got 'survival' with source 'npz'"),
    (DataSettings, {"source": "images", "path": "x", "held_out": "part"}, "allowed with images: folder"),
    (PartitionSettings, {"scheme": "iid"}, "clients: got nothing; needed with scheme 'iid'"),
    (PartitionSettings, {**IID, "samples": 5, "size_spread": 0.5}, "size_spread: got 0.5 with samples"),
    (PartitionSettings, {"scheme": "shard", "clients": 4, "shard_size": 5, "size_spread": 0.5}, "with shard_size"),
    (PartitionSettings, {**IID, "samples": 5, "minimum": 6}, "samples: got 5; allowed: at least minimum = 6"),
    (PartitionSettings, {"scheme": "table"}, "table: got nothing"),
    (PartitionSettings, {"scheme": "table", "table": [[1, 2], [3]]}, "table: line 1 has 1 counts; allowed: 2"),
    (PartitionSettings, {"scheme": "table", "table": [[1, 2], [0, 1]]}, "table: line 1 sums to 1"),
    (PartitionSettings, {"scheme": "table", "table": [[1, 2]], "clients": 3}, "clients: got 3; allowed: 1"),
    (PartitionSettings, {"scheme": "table", "table": [[1, 2]], "overlap": True}, "overlap: got true"),
    (PartitionSettings, {**IID, "minimum": 1}, "minimum: got 1 with test 'local'"),
    (PartitionSettings, {**IID, "test_samples": 5}, "test_samples: got 5 with test 'local'"),
    (PartitionSettings, {**IID, "rows": "all", "test": "held-out"}, "rows: got 'all' with test 'held-out'"),
    (PartitionSettings, {**IID, "server_fraction": 0.2}, "server_fraction: got 0.2 with server 'none'"),
    (PartitionSettings, {**IID, "test_order": "stored"}, "test_order: got 'stored'"),
    (PartitionSettings, {"scheme": "given"}, "test: got 'local' with scheme 'given'"),
    (PartitionSettings, {**IID, "num_partitions": 5}, "clients: got it twice, also as 'num_partitions'"),
    (FlawSettings, {"kind": "labels-flipped", "how": "class", **WHO}, "classes: got 0 with how 'class'"),
    (FlawSettings, {"kind": "labels-flipped", "how": "class", "classes": [0], **WHO}, "which is the target too"),
    (FlawSettings, {"kind": "backdoor", "how": "semantic", "classes": [1, 2], **WHO}, "classes: got 2"),
    (FlawSettings, {"kind": "noisy", "classes": (1,), **WHO}, "classes: got some with kind 'noisy'"),
    (FlawSettings, {"kind": "boosted", "from_round": 2, **WHO}, "from_round: got 2 with kind 'boosted'"),
    (FlawSettings, {"kind": "labels-flipped", "amount": 1.5, **WHO}, "amount: got 1.5 with kind 'labels-flipped'"),
    (FlawSettings, {"kind": "classes-missing", "amount": 1, **WHO}, "allowed: more than 0, less than 1"),
    (FlawSettings, {"kind": "stale", "amount": 1.5, **WHO}, "amount: got 1.5 with kind 'stale'"),
    (FlawSettings, {"kind": "free-rider", "amount": 1, **WHO}, "amount: got 1 with kind 'free-rider'"),
    (FlawSettings, {"kind": "copy", **WHO}, "clients: got names with kind 'copy'"),
    (FlawSettings, {"kind": "noisy"}, "pick: got neither clients nor pick"),
    (FlawSettings, {"kind": "noisy", "pick": "random", "count": 1, **WHO}, "pick: got both clients and pick"),
    (FlawSettings, {"kind": "noisy", "pick": "random"}, "share: got neither share and count"),
    (FlawSettings, {"kind": "noisy", "pick": "same", "count": 2}, "count: got 2 with pick 'same'"),
]


@pytest.mark.parametrize(("section", "fields", "told"), REFUSED)
def test_sections_name_the_field_and_what_is_allowed(section: type, fields: dict[str, Any], told: str) -> None:
    assert_refused(lambda: section(**fields), told)


def test_a_table_comes_from_toml():
    text = """
    scheme = "table"
    table = [[10, 0], [3, 4]]
    test = "none"
    """
    settings = PartitionSettings(**tomllib.loads(text))
    assert settings.table == ((10, 0), (3, 4))
    assert settings.client_count == 2
    assert PartitionSettings(**settings.model_dump(mode="json")) == settings


def test_client_names_sort_as_numbers():
    assert [client_name(0, 5), client_name(42, 1000), client_name(42, 1001)] == [
        "client-000",
        "client-042",
        "client-0042",
    ]
    names = [client_name(number, 1200) for number in range(1200)]
    assert names == sorted(names)


@pytest.mark.parametrize(
    ("data", "partition", "told"),
    [
        ({}, {**IID, "test": "held-out"}, "partition.test: got 'held-out' with data.source 'digits'"),
        ({}, {"scheme": "natural"}, "partition.scheme: got 'natural' with data.source 'digits'"),
        ({"source": "diabetes"}, {"scheme": "dirichlet", "clients": 3}, "partition.scheme: got 'dirichlet'"),
        ({"source": "npz", "path": "x"}, {**IID, "test": "held-out"}, "partition.test: got 'held-out'"),
        ({"source": "csv", "path": "x.csv", "labels": "y"}, {"scheme": "natural"}, "does not know whose rows they are"),
        (
            {"source": "images", "path": "x", "labels": "folder"},
            {**IID, "test": "held-out"},
            "no test part of its own",
        ),
        ({}, {"scheme": "table", "table": [[5, 5]]}, "partition.table: got 'lines of 2 counts'"),
    ],
)
def test_source_and_partition_are_checked_together(data: dict[str, Any], partition: dict[str, Any], told: str) -> None:
    assert_refused(lambda: check_together(DataSettings(**data), PartitionSettings(**partition)), told)


@pytest.mark.parametrize(
    ("data", "flaws", "told"),
    [
        (
            {"source": "diabetes"},
            [{"kind": "labels-flipped", **WHO}],
            "flaws.0.kind: got 'labels-flipped' with data.so",
        ),
        ({}, [{"kind": "noisy", "clients": ["client-8"]}], "flaws.0.clients: got 'client-8' (did you mean"),
        ({}, [{"kind": "noisy", "clients": ["client-008"]}], "flaws.0.clients: got 'client-008'"),
        ({}, [{"kind": "copy", "of": "client-009"}], "flaws.0.of: got 'client-009'"),
        ({}, [{"kind": "noisy", "pick": "random", "count": 9}], "flaws.0.count: got 9; allowed: at most 8"),
        ({}, [{"kind": "noisy", "pick": "same"}], "flaws.0.pick: got 'same' in the first section"),
        (
            {},
            [{"kind": "free-rider", "clients": ["client-008"]}, {"kind": "copy", "of": "client-000"}],
            "flaws.0.clients: got 'client-008'",
        ),
    ],
)
def test_flaws_that_can_never_be_are_refused_before_data_is_read(
    data: dict[str, Any], flaws: list[dict[str, Any]], told: str
) -> None:
    eight, given = PartitionSettings(scheme="iid", clients=8), [FlawSettings(**flaw) for flaw in flaws]
    assert_refused(lambda: check_flaws(DataSettings(**data), eight, given), told)
    if len(given) == 2:  # A copy can be named from its section on.
        check_flaws(DataSettings(), eight, given[::-1])


def test_what_goes_together_is_let_through():
    check_together(
        DataSettings(source="mnist"), PartitionSettings(scheme="natural", test="held-out", server="held-out")
    )
    check_together(DataSettings(source="npz", path="x", held_out="test"), PartitionSettings(**IID, test="held-out"))
    check_together(DataSettings(source="diabetes"), PartitionSettings(scheme="shard", clients=5))


def test_the_settings_import_nothing_heavy():
    code = "import sys, steelyard.data; print([m for m in ('torch', 'numpy', 'pandas', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "section",
    [
        DataSettings(source="images", path="faces", marks={"sharp": "not Blurry"}, share=0.5),
        PartitionSettings(scheme="dirichlet", clients=30, alpha=0.3, size_spread=0.5, server="fraction"),
        FlawSettings(kind="labels-flipped", pick="biggest", share=0.3),
    ],
)
def test_a_section_written_out_reads_back_the_same(section: Any) -> None:
    for whole in (True, False):
        assert type(section)(**section.model_dump(mode="json", exclude_none=whole)) == section


@pytest.mark.parametrize(
    "fields", [{"source": "digits"}, {"source": "diabetes"}, {"source": "images", "size": 8, "colours": "grey"}]
)
def test_the_shape_that_settings_decide_is_the_shape_of_what_is_read(fields: dict[str, Any], tmp_path: Path):
    if fields["source"] == "images":
        for name, shade in (("a", 10), ("b", 200)):
            (tmp_path / name).mkdir()
            for number in range(2):
                Image.new("RGB", (12, 10), (shade, number, 0)).save(tmp_path / name / f"{number}.png")
        fields = {**fields, "path": tmp_path, "labels": "folder"}
    settings = DataSettings(**fields)
    assert settings.shape == tuple(load(settings).features.shape[1:])
    assert DataSettings(source="mnist").shape is None


REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
PAGE = (REFERENCE / "data.md").read_text(encoding="utf-8")


def test_every_example_is_valid():
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    assert len(blocks) >= 9
    for block in blocks:
        assert set(block) <= {"data", "partition", "flaws"}
        data = DataSettings(**block["data"]) if "data" in block else None
        partition = PartitionSettings(**block["partition"]) if "partition" in block else None
        if data and partition:
            check_together(data, partition)
        if partition:
            check_flaws(data or DataSettings(), partition, [FlawSettings(**flaw) for flaw in block.get("flaws", [])])


def test_every_flaw_is_described_and_its_example_valid():
    page = (REFERENCE / "experiments.md").read_text(encoding="utf-8")
    for kind in FlawSettings.model_json_schema()["properties"]["kind"]["enum"]:
        assert f"| `{kind}` |" in page
    blocks = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", page, re.DOTALL)]
    flaws = [FlawSettings(**flaw) for block in blocks for flaw in block.get("flaws", [])]
    assert len(flaws) >= 3
    check_flaws(DataSettings(), PartitionSettings(clients=10), flaws)


def test_every_source_and_scheme_is_described():
    for section, field in ((DataSettings, "source"), (PartitionSettings, "scheme")):
        for word in section.model_json_schema()["properties"][field]["enum"]:
            assert f"| `{word}` |" in PAGE


def test_the_worked_example_of_held_out_labels():
    # 400 sevens and 200 ones: among 100 test rows 67 sevens and 33 ones
    labels = np.repeat([7, 1, 7, 1], [400, 200, 100, 100])
    dataset = in_memory(np.zeros((800, 1)), labels, held_out=np.arange(800) >= 600)
    table = [[0, 200, 0, 0, 0, 0, 0, 400]]
    settings = PartitionSettings(scheme="table", table=table, test="held-out", test_samples=100)
    client = share_out(dataset, settings, 0).clients[0]
    assert np.bincount(labels[client.test])[[1, 7]].tolist() == [33, 67]
