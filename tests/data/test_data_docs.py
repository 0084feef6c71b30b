"""The TOML in docs/reference/data.md is accepted as it stands there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import numpy as np

from steelyard.data import (
    DataSettings,
    FlawSettings,
    PartitionSettings,
    check_flaws,
    check_together,
    in_memory,
    share_out,
)

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "data.md").read_text(encoding="utf-8")


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
    page = (Path(__file__).parents[2] / "docs" / "reference" / "experiments.md").read_text(encoding="utf-8")
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
