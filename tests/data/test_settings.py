"""The sections [data], [partition] and [[flaws]]: what does not fit is refused before any data is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.kit import assert_refused

from steelyard.data import (
    DataSettings,
    FlawSettings,
    PartitionSettings,
    check_flaws,
    check_together,
)
from steelyard.data.scaling import load
from steelyard.data.sources.source import SourceCapabilities

IID = {"scheme": "iid", "clients": 4}
WHO = {"clients": ["client-002"]}
SCALE = {"mean": [0.5], "deviation": [1.0]}
TABLE = {"source": "csv", "path": "x.csv", "labels": "y"}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, SourceCapabilities(classes=10)),
        ({"source": "mnist"}, SourceCapabilities(classes=10, owners=True, held_out=True)),
        ({"source": "digit-masks"}, SourceCapabilities("segmentation", classes=0)),
        (TABLE, SourceCapabilities(marks=frozenset({"complete"}))),
        (
            {**TABLE, "owner": "o", "positive_above": 0, "marks": {"new": "not old"}},
            SourceCapabilities(classes=2, marks=frozenset({"complete", "new"}), owners=True),
        ),
        (
            {**TABLE, "owner": "o", "held_out": "p", "task": "regression"},
            SourceCapabilities(
                "regression", 0, frozenset({"complete"}), owners=True, held_out=True, splits_owners=True
            ),
        ),
        (
            {"source": "npz", "path": "x", "task": "multi-label", "marks": {"new": "n"}},
            SourceCapabilities("multi-label", 0, frozenset({"new"}), owners=True, splits_owners=True),
        ),
        (
            {"source": "leaf", "path": "x", "classes": 7},
            SourceCapabilities(classes=7, owners=True, held_out=True, splits_owners=True),
        ),
        ({"source": "images", "path": "x", "task": "segmentation"}, SourceCapabilities("segmentation", 0, None, True)),
        (
            {"source": "images", "path": "x", "labels": "folder", "held_out": "folder"},
            SourceCapabilities(owners=True, held_out=True, splits_owners=True),
        ),
        (
            {"source": "memory", "task": "survival"},
            SourceCapabilities("survival", None, None, owners=True, held_out=True, splits_owners=True),
        ),
    ],
)
def test_what_a_source_offers_is_known_before_it_is_read(fields: dict[str, Any], expected: SourceCapabilities) -> None:
    assert DataSettings(**fields).capabilities() == expected


@pytest.mark.parametrize(
    ("section", "fields", "told"),
    [
        (section, *case)
        for section, cases in {
            DataSettings: [
                ({"source": "npz"}, "path: missing"),
                ({"source": "csv", "path": "x"}, "labels: missing"),
                ({"source": "csv", "path": "x", "labels": "y", "files": ["z"]}, "files: got some together with path"),
                ({"source": "csv", "path": "x", "labels": "y", "task": "survival"}, "event: got "),
                (
                    {"source": "csv", "path": "x", "labels": "y", "task": "regression", "positive_above": 1},
                    "positive_above: got 1.0 with task 'regression'",
                ),
                ({"source": "digits", "path": "x"}, "path: got 'x' with source 'digits'"),
                (
                    {"source": "npz", "path": "x", "task": "survival"},
                    "task: got 'survival'; allowed: 'classes', 'regression', 'segmentation'",
                ),
                ({"source": "csv", "labels": "y"}, "files: got nothing"),
                ({"normalise": "client"}, "normalise: got 'client' with source 'digits'"),
                ({"augment": {"mean": [0.5]}}, "deviation: got 0 numbers and 1 in mean"),
                ({"normalise": "standard", "augment": SCALE}, "normalise: got 'standard' together with augment"),
            ],
            PartitionSettings: [
                ({"scheme": "iid"}, "clients: got nothing; needed with scheme 'iid'"),
                ({"scheme": "table", "table": [[1, 2], [3]]}, "table: line 1 has 1 counts; allowed: 2"),
                ({"scheme": "table", "table": [[1, 2], [0, 1]]}, "table: line 1 sums to 1"),
                ({**IID, "rows": "all", "test": "held-out"}, "rows: got 'all' with test 'held-out'"),
                ({"scheme": "given"}, "test: got 'local' with scheme 'given'"),
                (
                    {**IID, "split_column": "fold"},
                    "split_column: is a column of the table; allowed: [data] held_out",
                ),
                ({**IID, "num_partitions": 5}, "clients: got it twice, also as 'num_partitions'"),
                ({**IID, "test": "none", "test_clients": 3}, "test_clients: got 3 with test 'none'"),
                ({**IID, "minimum": 1}, "minimum: got 1 with test 'local'"),
                ({**IID, "server_fraction": 0.2}, "server_fraction: got 0.2 with server 'none'"),
                ({**IID, "server_weighs": 3}, "server_weighs: got 3 with server_report 'none'"),
                ({**IID, "server_report": "same"}, "server_report: got 'same' with server 'none'"),
                ({**IID, "test_samples": 3}, "test_samples: got 3 with test 'local'"),
                ({**IID, "test_order": "stored"}, "test_order: got 'stored'"),
                ({**IID, "samples": 1}, "samples: got 1; allowed: at least minimum = 2"),
                ({**IID, "samples": 5, "size_spread": 0.5}, "size_spread: got 0.5 with samples"),
                ({**IID, "scheme": "dirichlet", "self_balancing": True, "samples": 5}, "self_balancing: got"),
                ({"scheme": "table", "table": [[2, 2]], "clients": 3}, "clients: got 3; allowed: 1, the lines"),
                ({"scheme": "table", "table": [[2, 2]], "overlap": True}, "overlap: got true with test 'local'"),
                ({"scheme": "given", "test": "held-out", "test_samples": 3}, "test_samples: got 3 with scheme"),
            ],
            FlawSettings: [
                ({"kind": "labels-flipped", "how": "class", **WHO}, "classes: got 0 with how 'class'"),
                ({"kind": "labels-flipped", "how": "class", "classes": [0], **WHO}, "which is the target too"),
                ({"kind": "copy", **WHO}, "clients: got names with kind 'copy'"),
                ({"kind": "noisy", "pick": "random", "count": 1, **WHO}, "pick: got both clients and pick"),
                ({"kind": "noisy", "pick": "random"}, "share: got neither share and count"),
                ({"kind": "noisy", "share": 0.5, **WHO}, "share: got 0.5 without pick"),
                ({"kind": "noisy", "pick": "same", "count": 2}, "count: got 2 with pick 'same'"),
                ({"kind": "labels-flipped", "target": 1, **WHO}, "target: got some with how 'uniform'"),
            ],
        }.items()
        for case in cases
    ],
)
def test_sections_name_the_field_and_what_is_allowed(section: type, fields: dict[str, Any], told: str) -> None:
    assert_refused(lambda: section(**fields), told)


@pytest.mark.parametrize(
    ("data", "partition", "told"),
    [
        ({}, {**IID, "test": "held-out"}, "partition.test: got 'held-out' with data.source 'digits'"),
        ({"source": "csv", "path": "x.csv", "labels": "y"}, {"scheme": "natural"}, "does not know whose rows they are"),
        ({}, {"scheme": "table", "table": [[5, 5]]}, "partition.table: got 'lines of 2 counts'"),
    ],
)
def test_source_and_partition_are_checked_together(data: dict[str, Any], partition: dict[str, Any], told: str) -> None:
    assert_refused(lambda: check_together(DataSettings(**data), PartitionSettings(**partition)), told)


@pytest.mark.parametrize(
    ("data", "flaws", "told"),
    [
        ({"source": "diabetes"}, [{"kind": "labels-flipped", **WHO}], "flaws.0.kind: got 'labels-flipped'"),
        ({}, [{"kind": "noisy", "clients": ["client-8"]}], "flaws.0.clients: got 'client-8' (did you mean"),
        ({}, [{"kind": "copy", "of": "client-009"}], "?); allowed: client-000 to client-007"),
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
    npz = DataSettings(source="npz", path="x", held_out="test")
    check_together(npz, PartitionSettings(**IID, test="held-out"))
    check_together(npz, PartitionSettings(scheme="given", test="held-out"))
    check_together(DataSettings(source="diabetes"), PartitionSettings(scheme="shard", clients=5))


def test_a_section_written_out_reads_back_the_same() -> None:
    for section in (
        DataSettings(source="images", path="faces", marks={"sharp": "not Blurry"}, share=0.5),
        PartitionSettings(scheme="table", table=[[10, 0], [3, 4]], test="none"),
        FlawSettings(kind="labels-flipped", pick="biggest", share=0.3),
    ):
        assert type(section)(**section.model_dump(mode="json")) == section


def test_the_shape_that_settings_decide_is_the_shape_of_what_is_read():
    for source in ("digits", "diabetes", "digit-masks"):
        settings = DataSettings(source=source)
        found = load(settings)
        assert (found.name, found.shape, found.kind) == (source, settings.shape, settings.capabilities().task)
    assert DataSettings(source="images", path="x", size=8, colours="grey").shape == (1, 8, 8)
    assert DataSettings(source="mnist").shape is None


def test_every_flaw_source_and_scheme_is_described():
    reference = Path(__file__).parents[2] / "docs" / "reference"
    for kinds, pages in (
        (FlawSettings.kinds, ("experiments.md", "defence.md")),
        (DataSettings.kinds, ("data.md",)),
        (PartitionSettings.kinds, ("data.md",)),
    ):
        text = "".join((reference / page).read_text(encoding="utf-8") for page in pages)
        assert [word for word in kinds if f"| `{word}`" not in text] == []
