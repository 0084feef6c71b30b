"""The sections [data] and [partition]: what does not fit is refused before any data is read."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from steelyard.data import DataSettings, FlawSettings, PartitionSettings, check_together
from steelyard.data.loading import load
from steelyard.data.settings import client_name
from steelyard.errors import UserError
from steelyard.experiment.loading import load as load_experiment
from steelyard.field_texts import field_texts

IID = {"scheme": "iid", "clients": 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "npz"}, "path: got nothing; allowed with source 'npz': a .npz file"),
        ({"source": "leaf"}, "path: got nothing; allowed with source 'leaf'"),
        ({"source": "images"}, "path: got nothing; allowed with source 'images'"),
        (
            {"source": "digits", "path": "x"},
            "path: got 'x' with source 'digits'; allowed with: mnist, leaf, npz, images",
        ),
        ({"source": "mnist", "labels": "y"}, "labels: got 'y' with source 'mnist'; allowed with: npz, images"),
        ({"source": "digits", "share": 0.5}, "share: got 0.5 with source 'digits'"),
        ({"source": "npz", "path": "x", "size": 32}, "size: got 32 with source 'npz'; allowed with: leaf, images"),
        ({"source": "npz", "path": "x", "share": 0}, "greater than 0"),
        ({"source": "cifar"}, "digits"),
        ({"sauce": "digits"}, "sauce"),
    ],
)
def test_data_settings_name_the_field_and_what_is_allowed(fields, message):
    with pytest.raises(UserError) as caught:
        DataSettings(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scheme": "iid"}, "clients: got nothing; needed with scheme 'iid'"),
        ({"scheme": "iid", "clients": 0}, "greater than or equal to 1"),
        ({**IID, "table": [[1, 2]]}, "table: got ((1, 2),) with scheme 'iid'; allowed with: table"),
        ({"scheme": "shard", "clients": 4, "samples": 5}, "samples: got 5 with scheme 'shard'"),
        ({**IID, "samples": 5, "size_spread": 0.5}, "size_spread: got 0.5 with samples, which fixes the size"),
        ({"scheme": "shard", "clients": 4, "shard_size": 5, "size_spread": 0.5}, "with shard_size, which fixes"),
        ({**IID, "samples": 5, "minimum": 6}, "samples: got 5; allowed: at least minimum = 6"),
        ({"scheme": "table"}, "table: got nothing; needed with scheme 'table'"),
        ({"scheme": "table", "table": [[1, 2], [3]]}, "table: line 1 has 1 counts; allowed: 2"),
        ({"scheme": "table", "table": [[1, 2], [0, 1]]}, "table: line 1 sums to 1; allowed: at least minimum = 2"),
        ({"scheme": "table", "table": [[1, -2]]}, "greater than or equal to 0"),
        ({"scheme": "table", "table": [[1, 2]], "clients": 3}, "clients: got 3; allowed: 1, the lines of the table"),
        ({"scheme": "table", "table": [[1, 2]], "overlap": True}, "overlap: got true with test 'local'"),
        ({**IID, "minimum": 1}, "minimum: got 1 with test 'local'"),
        ({**IID, "test_fraction": 1.0}, "less than 1"),
        ({**IID, "test_samples": 5}, "test_samples: got 5 with test 'local'; allowed with: held-out"),
        ({**IID, "rows": "all", "test": "held-out"}, "rows: got 'all' with test 'held-out'"),
        ({**IID, "rows": "all", "server": "held-out"}, "rows: got 'all' with server 'held-out'"),
        ({**IID, "server_fraction": 0.2}, "server_fraction: got 0.2 with server 'none'; allowed with: fraction"),
        ({"scheme": "given"}, "test: got 'local' with scheme 'given'"),
        ({"scheme": "given", "test": "held-out", "test_samples": 3}, "test_samples: got 3 with scheme 'given'"),
        ({"scheme": "dirichlet", "clients": 4, "alpha": 0}, "greater than 0"),
        ({**IID, "num_partitions": 5}, "clients: got it twice, also as 'num_partitions'"),
        ({**IID, "sampels": 5}, "sampels"),
    ],
)
def test_partition_settings_name_the_field_and_what_is_allowed(fields, message):
    with pytest.raises(UserError) as caught:
        PartitionSettings(**fields)
    assert message in str(caught.value)


def test_fields_of_other_schemes_stay_without_effect():
    # so that one word on the command line is enough to try another scheme
    assert PartitionSettings(scheme="iid", clients=3, alpha=0.1, shard_size=300).scheme == "iid"


def test_names_of_flwr_datasets_are_understood():
    own = PartitionSettings(scheme="dirichlet", clients=7, alpha=0.3, minimum=10)
    assert PartitionSettings(scheme="DirichletPartitioner", num_partitions=7, alpha=0.3, min_partition_size=10) == own
    shards = PartitionSettings(scheme="ShardPartitioner", num_partitions=7, num_shards_per_partition=3)
    assert (shards.scheme, shards.shards_per_client) == ("shard", 3)
    assert PartitionSettings(scheme="natural_id").scheme == "natural"


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
    ("data", "partition", "message"),
    [
        (
            {},
            {**IID, "test": "held-out"},
            "partition.test: got 'held-out' with data.source 'digits'; allowed: local, none",
        ),
        ({}, {**IID, "server": "held-out"}, "partition.server: got 'held-out' with data.source 'digits'"),
        ({}, {"scheme": "natural"}, "partition.scheme: got 'natural' with data.source 'digits'"),
        (
            {"source": "mnist"},
            {"scheme": "given", "test": "none"},
            "partition.scheme: got 'given' with data.source 'mnist'",
        ),
        ({"source": "diabetes"}, {"scheme": "dirichlet", "clients": 3}, "partition.scheme: got 'dirichlet'"),
        ({"source": "npz", "path": "x"}, {**IID, "test": "held-out"}, "partition.test: got 'held-out'"),
        ({}, {"scheme": "table", "table": [[5, 5]]}, "partition.table: got 'lines of 2 counts'"),
    ],
)
def test_source_and_partition_are_checked_together(data, partition, message):
    with pytest.raises(UserError) as caught:
        check_together(DataSettings(**data), PartitionSettings(**partition))
    assert str(caught.value).startswith(message)


def test_what_goes_together_is_let_through():
    check_together(
        DataSettings(source="mnist"), PartitionSettings(scheme="natural", test="held-out", server="held-out")
    )
    check_together(DataSettings(source="npz", path="x", held_out="test"), PartitionSettings(**IID, test="held-out"))
    check_together(DataSettings(source="diabetes"), PartitionSettings(scheme="shard", clients=5))


def test_every_field_is_documented():
    for section in (DataSettings, PartitionSettings, FlawSettings):
        assert set(field_texts(section)) == set(section.model_fields)


def test_the_settings_import_nothing_heavy():
    code = "import sys, steelyard.data; print([m for m in ('torch', 'numpy', 'pandas', 'sklearn') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "section",
    [
        DataSettings(),
        DataSettings(source="images", path="faces", marks={"sharp": "not Blurry"}, share=0.5),
        PartitionSettings(scheme="shard", clients=100, shard_size=300, test="held-out", test_samples=100),
        PartitionSettings(scheme="dirichlet", clients=30, alpha=0.3, size_spread=0.5, server="fraction"),
        PartitionSettings(scheme="natural", minimum=5),
    ],
)
def test_a_section_written_out_in_full_reads_back_the_same(section):
    assert type(section)(**section.model_dump(mode="json")) == section
    assert type(section)(**section.model_dump(mode="json", exclude_none=True)) == section


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


def test_an_unknown_source_is_named_once_with_what_there_is():
    with pytest.raises(
        UserError, match=r"^quickstart: data\.source: got 'dgits' \(did you mean 'digits'\?\); allowed:"
    ):
        load_experiment("quickstart", ["data.source=dgits"])
    with pytest.raises(
        UserError, match=r"^quickstart: weighing\.score: got 'meen' \(did you mean 'mean'\?\); allowed:"
    ):
        load_experiment("quickstart", ["weighing.score=meen"])
