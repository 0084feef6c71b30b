"""The tables of docs/results/seeds.md, made from ledger.toml: `python docs/ledger.py` writes them into the page.

The last one says of each entry of `steelyard paper` whether values of its own are stored in benchmarks/results/papers.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from steelyard.studies.paper_table import entries, entry_of

RESULTS = Path(__file__).parent / "results"
VALUES = Path(__file__).parents[1] / "benchmarks" / "results" / "papers"
BY_COMMAND = "What `steelyard paper` runs, and what is not run"
HEADS = (("where", "claim", "here", "cause and evidence"), ("", "subject", "here", "how, or why not"))

Claim = Mapping[str, str]


def claims() -> Sequence[Claim]:
    """Return every claim of the ledger, in the order of the page."""
    return tomllib.loads((RESULTS / "ledger.toml").read_text(encoding="utf-8"))["claim"]


def written(page: str) -> str:
    """Return the page with its tables as the ledger has them."""
    parts = {claim["part"]: [each for each in claims() if each["part"] == claim["part"]] for claim in claims()}
    tables = {part: _claims_table(several) for part, several in parts.items()} | {BY_COMMAND: _commands_table()}
    for part, table in tables.items():
        # The first table of the fold; what stands between its title and the table stays.
        fold = re.compile(rf"(<summary>{re.escape(part)}</summary>\n(?:(?!\|).*\n)*)(?:\|.*\n)+")
        page, found = fold.subn(lambda match, table=table: match[1] + table, page, count=1)
        if not found:
            raise SystemExit(f"seeds.md: no table in the fold '{part}'")
    return page


def _claims_table(several: Sequence[Claim]) -> str:
    head = HEADS[0] if several[0]["part"].startswith("Claims") else HEADS[1]
    columns = ("where", "claim", "here", "evidence")
    if not any("claim" in each for each in several):
        head, columns = (head[0], *head[2:]), ("where", "here", "evidence")
    return _table(head, [[each.get(column, "") for column in columns] for each in several])


def _commands_table() -> str:
    rows: list[list[str]] = []
    for name in entries():
        entry = entry_of(name)
        path = f"benchmarks/results/papers/{name}.csv"
        stored = f"`{path}`" if (VALUES / f"{name}.csv").is_file() else "not run by this command yet"
        how = "another command" if entry.command else "seconds" if entry.releases else stored
        rows.append([f"`{name}`", entry.paper, entry.title, how])
    return _table(("entry", "of", "what", "values of every seed"), rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "|" + "".join(f" {cell} |" if cell else " |" for cell in cells) + "\n"

    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line, rows))


if __name__ == "__main__":
    path = RESULTS / "seeds.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
