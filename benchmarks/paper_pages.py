"""Tables and figures of what `paper_results` has kept: seeds and rules that were run apart come together again.

    python -m benchmarks.paper_pages results

Unpacks the archives of the results folder, joins NAME-seed1, NAME-seed2, ... as far as all of them went, and writes
tables (Markdown, JSON) and figures (SVG) into the same folder, without running anything.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sqlite3
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

import altair as alt
import numpy as np
import pandas as pd

from steelyard.experiment.loading import read_experiment
from steelyard.report.comparison import compare_run
from steelyard.report.comparison_tables import write_comparison
from steelyard.report.curves import Curve, read_curves
from steelyard.report.figures.catalogue import draw
from steelyard.report.figures.writing import write_figure
from steelyard.report.groups import group_tables
from steelyard.report.rendering import render
from steelyard.report.view import RunView
from steelyard.runs.reader import History

RECORDED = ("rounds", "evaluations", "samples", "failures", "untested", "ended")


def unpack(archive: Path, into: Path) -> None:
    """Unpack an archive of `keep`; the first Pythons 3.11 know no filter."""
    guarded = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    with tarfile.open(archive) as packed:
        packed.extractall(into, **guarded)


def join(folders: list[Path], into: Path) -> Path:
    """Join runs of other seeds or rules into one store, as far as all of them went, and return its folder.

    A federation that ended early because its model exploded holds the others up no more than it did in its run.
    """
    if len(folders) == 1:
        return folders[0]
    shutil.copytree(folders[0], into)
    told = [json.loads((folder / "told.json").read_text()) for folder in folders]
    (into / "told.json").write_text(json.dumps(told))
    with sqlite3.connect(into / "run.sqlite") as target:
        target.execute("UPDATE federations SET name = rule || '#' || seed")
        for index, folder in enumerate(folders[1:], 1):
            target.execute("ATTACH ? AS other", (str(folder / "run.sqlite"),))
            add(target, 1000 * index)
            target.commit()
            target.execute("DETACH other")
        common = target.execute(
            "SELECT MIN(last) FROM (SELECT MAX(round) AS last FROM rounds "
            "WHERE federation NOT IN (SELECT federation FROM ended) GROUP BY federation)"
        ).fetchone()[0]
        for table in RECORDED:
            target.execute(f"DELETE FROM {table} WHERE round > ?", (common,))
        left_out = ragged([*target.execute("SELECT id, rule, seed FROM federations ORDER BY id")])
        for key, name in left_out.items():
            print(f"{into.name}: {name} is left out, other seeds or rules do not have it", flush=True)
            target.execute("DELETE FROM federations WHERE id = ?", (key,))
    return into


def ragged(federations: list[tuple[int, str, int]]) -> dict[int, str]:
    """Return the federations to leave out so that every seed has every rule, as tables need it: number and name.

    Where a part is missing, seeds that lack a rule go; where no seed has all of them, rules that a seed lacks.
    """
    rules = {rule for _, rule, _ in federations}
    by_seed: dict[int, set[str]] = {}
    for _, rule, seed in federations:
        by_seed.setdefault(seed, set()).add(rule)
    whole = [seed for seed, found in by_seed.items() if found == rules]
    common = rules if whole else set.intersection(*by_seed.values())
    return {
        key: f"{rule}, seed {seed}"
        for key, rule, seed in federations
        if rule not in common or (whole and seed not in whole)
    }


def add(target: sqlite3.Connection, shift: int) -> None:
    """Add what the attached store `other` recorded: its federations' numbers are shifted, its clients' translated."""
    target.execute("INSERT OR IGNORE INTO clients (name) SELECT name FROM other.clients ORDER BY id")
    keys = dict(target.execute("SELECT o.id, c.id FROM other.clients o JOIN clients c ON c.name = o.name"))
    target.create_function("mine", 1, keys.__getitem__)
    target.create_function("all_mine", 1, lambda blob: translated(blob, keys))
    target.execute(
        "INSERT INTO federations SELECT id + ?, rule || '#' || seed, rule, seed, settings, algorithm "
        "FROM other.federations",
        (shift,),
    )
    changed = {"federation": "federation + ?", "client": "mine(client)", "clients": "all_mine(clients)"}
    for table in RECORDED:
        columns = [row[1] for row in target.execute(f"PRAGMA table_info({table})")]
        taken = ", ".join(changed.get(column, column) for column in columns)
        target.execute(f"INSERT INTO {table} SELECT {taken} FROM other.{table}", (shift,))


def translated(blob: bytes, keys: dict[int, int]) -> bytes:
    """Return a column of clients with their numbers in another store."""
    return np.array([keys[number] for number in np.frombuffer(blob, dtype="<i4").tolist()], dtype="<i4").tobytes()


SMOOTHED = 21
"""Rounds that a line of `behind` is averaged over: single rounds jump by a point."""


def first_criterion(rule: str) -> str:
    """Return what bundles a rule: its first criterion, or that it adjusts its order."""
    return "online adjustment" if rule.startswith("online(") else f"{rule.split('>')[0]} first"


def distances(curves: Sequence[Curve], baseline: str = "DS") -> pd.DataFrame:
    """Return how many points each rule is ahead of the baseline, by round: mean over seeds, then over rounds nearby."""
    seeds = {curve.seed: curve for curve in curves if curve.rule == baseline}
    ahead: dict[str, list[pd.Series]] = {}
    for curve in curves:
        if curve.rule != baseline and curve.seed in seeds:
            other = seeds[curve.seed]
            apart = pd.Series(curve.overall, curve.rounds) - pd.Series(other.overall, other.rounds)
            ahead.setdefault(curve.rule, []).append(100 * apart)
    frames: list[pd.DataFrame] = []
    for rule, found in ahead.items():
        mean = pd.concat(found, axis=1).mean(axis=1).rolling(SMOOTHED, center=True).mean()
        known = {"round": mean.index, "points": mean.to_numpy(), "rule": rule, "bundle": first_criterion(rule)}
        # A third of the rounds says the same and keeps the file small.
        frames.append(pd.DataFrame(known).dropna().iloc[::3])
    return pd.concat(frames, ignore_index=True)


def behind(curves: Sequence[Curve]) -> alt.LayerChart:
    """Draw how far the rules are from DS: a line for each, in the colour of its first criterion."""
    colour = alt.Color("bundle:N", title=None, legend=alt.Legend(orient="top"))
    lines = (
        alt.Chart(distances(curves), width=620, height=260)
        .mark_line(strokeWidth=1.5)
        .encode(
            x=alt.X("round:Q", title="round"),
            y=alt.Y("points:Q", title=f"points ahead of DS, mean of {SMOOTHED} rounds"),
            color=colour,
            detail="rule:N",
        )
    )
    return lines + alt.Chart(pd.DataFrame({"points": [0.0]})).mark_rule(color="#888").encode(y="points:Q")


def write_part(name: str, folder: Path, out: Path) -> None:
    """Write the tables and the figures of one part."""
    with sqlite3.connect(folder / "run.sqlite") as store:
        done = int(store.execute("SELECT MAX(round) FROM rounds").fetchone()[0])
    # Of a run that was stopped, what counts as never reached is the last round that it has.
    rounds = read_experiment(folder).rounds.model_copy(update={"count": done})
    document = compare_run(folder, rounds) | {"run": name, "told": json.loads((folder / "told.json").read_text())}
    (out / f"{name}.json").write_text(json.dumps(document))
    (out / f"{name}.md").write_text(write_comparison(document, "markdown"))
    above = compare_run(folder, rounds.model_copy(update={"reach": "above"}))
    (out / f"{name}-above.json").write_text(json.dumps(above["rounds_to_target"]))
    if name == "unipen62":
        curves = read_curves(History(folder))
        grids = group_tables(curves, rounds.all_targets, rounds.count)
        (out / f"{name}-groups.md").write_text(render(grids, [], "markdown"))
        write_figure(behind(curves), out / f"{name}-behind.svg")
    view = RunView([folder])
    for figure in ("accuracy", "server", "macro-f1", "class-f1", "targets"):
        chart = draw(view, figure)
        if chart is not None:
            write_figure(chart, out / f"{name}-{figure}.svg")


def tables(out: Path) -> None:
    """Unpack every archive of the results folder, join seeds that were run apart, and write their tables."""
    found: dict[str, list[Path]] = {}
    with tempfile.TemporaryDirectory() as place:
        for archive in sorted(out.glob("*.tar.xz")):
            name = archive.name.removesuffix(".tar.xz")
            unpack(archive, Path(place))
            found.setdefault(name.split("-seed")[0], []).append(Path(place) / name)
        for name, folders in found.items():
            write_part(name, join(folders, Path(place) / f"{name}-joined"), out)
            print(name, flush=True)


def main() -> None:
    """Read where the archives are and write their tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the results folder of paper_results")
    tables(parser.parse_args().out)


if __name__ == "__main__":
    main()
