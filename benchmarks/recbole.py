"""Turn a file of RecBole's data sets into one that Steelyard reads.

    python -m benchmarks.recbole ml-100k.inter ratings.tsv

`.inter` and `.item` keep their columns, under the names before the colon; values of a `token_seq` are joined by `|`,
and columns of `float` are left out of `.item`. `.kg` becomes subject, predicate and object, `.link` item and entity: it
goes to `links`. Each may be packed (`.gz`).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pandas as pd

TRIPLES = {"head_id": "subject", "relation_id": "predicate", "tail_id": "object"}


def converted(path: Path) -> pd.DataFrame:
    """Return the columns of a RecBole file as Steelyard names and writes them."""
    frame = pd.read_csv(path, sep="\t", dtype=str, keep_default_na=False, quoting=3)
    kinds = {name: name.partition(":") for name in frame.columns}
    for name, (_, _, kind) in kinds.items():
        if kind == "token_seq":
            frame[name] = frame[name].str.replace(" ", "|")
    if ".item" in path.suffixes:
        frame = frame[[name for name in frame.columns if not kinds[name][2].startswith("float")]]
    frame = frame.rename(columns={name: plain for name, (plain, _, _) in kinds.items()})
    return frame[list(TRIPLES)].rename(columns=TRIPLES) if set(TRIPLES) <= set(frame.columns) else frame


def main() -> None:
    """Convert the file that the command names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    converted(options.path).to_csv(options.out, sep="\t", index=False, quoting=3)


if __name__ == "__main__":
    main()
