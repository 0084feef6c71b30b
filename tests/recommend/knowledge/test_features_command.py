"""`steelyard recommend features` and the baseline that reads them, in a process of their own."""

from __future__ import annotations

import json
from pathlib import Path

from tests.conftest import CommandLine

EXPERIMENT = """kind = "recommend"
name = "films"
[interactions]
path = "ratings.tsv"
[knowledge]
min_items = 2
[[knowledge.sources]]
path = "graph.nt"
links = "links.tsv"
"""


def lay_out(folder: Path) -> None:
    (folder / "films.toml").write_text(EXPERIMENT)
    rows = [f"{user}\t{item}\t5\t{time}" for time, (user, item) in enumerate(["aw", "ax", "by", "bw", "cz", "cx"])]
    (folder / "ratings.tsv").write_text("user\titem\trating\ttime\n" + "\n".join(rows) + "\n")
    (folder / "links.tsv").write_text("".join(f"{item}\thttp://e/{item}\n" for item in "wxyz"))
    told = [("w", "director", "mann"), ("x", "director", "mann"), ("y", "director", "lee"), ("z", "director", "lee")]
    told += [("mann", "born", "chicago"), ("lee", "born", "chicago")]
    lines = [f"<http://e/{s}> <http://e/{p}> <http://e/{o}> .\n" for s, p, o in told]
    (folder / "graph.nt").write_text("".join(lines))


def test_the_account_of_features(tmp_path: Path, steelyard: CommandLine) -> None:
    lay_out(tmp_path)
    done = steelyard("recommend", "features", "films.toml", "--item", "w")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "graph: 6 triples, 7 nodes, 2 predicates",
        "1 hop: 2 found, dropped: none, kept: 2 in 4 pairs",
        "2 hops: 1 found, dropped: none, kept: 1 in 4 pairs",
        "items: 4, known to the sources: 4, with features: 4",
        "w has 2 features:",
        "  director: mann",
        "  director → born: chicago",
    ]
    once = steelyard("recommend", "features", "films.toml", "--set", "knowledge.hops=1", "--format", "json")
    assert [hop["kept"] for hop in json.loads(once.stdout)["hops"]] == [2]


def test_vsm_from_files(tmp_path: Path, steelyard: CommandLine) -> None:
    lay_out(tmp_path)
    (tmp_path / "train.tsv").write_text("user\titem\na\tw\nb\ty\n")
    (tmp_path / "all.tsv").write_text("item\nw\nx\ny\nz\n")
    files = ("--train", "train.tsv", "--catalogue", "all.tsv", "--out", "lists.tsv", "--cutoff", "1")
    done = steelyard("recommend", "baseline", "vsm", "--knowledge", "films.toml", *files)
    assert done.returncode == 0, done.stderr
    # Nobody took x or z; each shares a director with what one of the users took.
    assert (tmp_path / "lists.tsv").read_text().splitlines()[1:] == ["a\tx\t1", "b\tz\t1"]
