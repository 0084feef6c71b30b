"""The papers' tables and figures as data: printed figures, ours beside them, one verdict; nothing here runs.

An entry is a file in `papers/`: data (a recipe and what differs from it), systems (rules, settings of a recommender, or
baselines) with the figures that are printed for them, measures, claims. Every value that is measured is a line of
`rows.csv`, and tables, figures, tests and verdicts follow from these lines alone, wherever they come from.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field

from steelyard.base.documents import Document
from steelyard.base.errors import UserError, brief, nearest, told_as
from steelyard.base.measures import Estimate, deviation, estimate, half_per_deviation, show_estimate, show_number
from steelyard.base.settings import Section, parse, validated
from steelyard.report.rendering import Block, Table
from steelyard.report.statistics import ALPHA, equivalence_p, holm, paired_p

ROWS = "rows.csv"
NEAR = 0.02
"""A figure is reproduced within 2 % of the printed one, or where that one lies within what a single run may give."""


class Value(NamedTuple):
    """A line of `rows.csv`."""

    data: str
    system: str
    seed: int
    measure: str
    x: float
    """Where it stands in a series or a figure; 0 where there is none."""
    value: float


class Base(Section):
    """Data of an entry: a recipe, and what differs from it."""

    recipe: str
    given: dict[str, Any] = Field(default_factory=dict)
    """Fields by dotted name; an empty text takes one away."""
    tiny: dict[str, Any] = Field(default_factory=dict)
    """Further fields with which it runs in seconds, to see that it runs."""
    at_once: int = Field(default=1000, ge=1)
    """Seeds that make one run of rules."""


class System(Section):
    """A row of a table: a rule in words, settings of a recommender, or a baseline."""

    name: str
    baseline: str = ""
    data: tuple[str, ...] = ()
    """Only these data; empty for all."""
    given: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """By data: fields of the experiment, with a dot, and settings of the baseline; under "all" for every data."""
    over: str = ""
    """A field that takes each of `values`: a system for each, whose value is its place in a figure."""
    values: tuple[int | float, ...] = ()
    at: float | None = None
    grid: dict[str, tuple[int | float, ...]] = Field(default_factory=dict)
    """Settings of a baseline; the first measure chooses the best point on a fifth of the training rows."""
    printed: dict[str, tuple[float | Literal["–"], ...]] = Field(default_factory=dict)
    """By data: the authors' figure of each measure."""
    seeds: int = Field(default=0, ge=0)
    """So many seeds; 0: those of the entry. 1 where nothing is drawn."""


class Claim(Section):
    """That a rule is ahead of another; named before it is run, and tested in the family of its entry."""

    data: str
    rule: str
    against: str
    measure: str
    margin: float = Field(default=0.01, gt=0)
    """Within it two rules count as equal."""


class Drawing(Section):
    """What a figure shows: measures or "x" across and up, a line for each system or points."""

    x: str = "x"
    y: str
    name: str = ""
    """Of what goes up, where the measure's is none."""
    lines: bool = True


class Entry(Section):
    """A table or figure of a paper."""

    title: str
    paper: Literal["paper 000", "paper 001", "paper 003", "thesis", "ours"]
    like: str = ""
    """Another entry, which gives all that this one does not."""
    data: dict[str, Base] = Field(default_factory=dict)
    systems: tuple[System, ...] = ()
    measures: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    seeds: int = Field(default=3, ge=1)
    releases: bool = False
    """Of the Laplace mechanism, which need no run."""
    command: str = ""
    """The commands that give it, where another one than `paper` does."""
    figure: Drawing | None = None
    takes: str = ""
    """How long it takes, and on what."""
    note: str = ""

    def of(self, data: str) -> list[System]:
        """Return the systems of some data, those with values one by one."""
        found: list[System] = []
        for system in self.systems:
            if data in (system.data or (data,)):
                found += [system] if not system.values else [_with(system, value) for value in system.values]
        return found


def _with(system: System, value: float) -> System:
    given = {**system.given, "all": {**system.given.get("all", {}), system.over: value}}
    name = f"{system.name}, {system.over.rpartition('.')[2]} {value}"
    return system.model_copy(update={"name": name, "given": given, "at": float(value)})


_FOLDER = resources.files("steelyard.studies") / "papers"


def entries() -> list[str]:
    """Return the names of all tables and figures."""
    return sorted(each.name.removesuffix(".toml") for each in _FOLDER.iterdir() if each.name.endswith(".toml"))


@cache
def entry_of(name: str) -> Entry:
    """Return a table or figure by name."""
    if name not in entries():
        raise UserError(
            f"paper: got {brief(name)}{nearest(name, entries())}; allowed: a name that `steelyard paper` lists"
        )
    document = _read(name)
    return validated(Entry, {**(_read(document["like"]) if "like" in document else {}), **document}, f"paper {name}")


def _read(name: str) -> dict[str, Any]:
    return parse((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"), name)


def read_rows(path: Path) -> list[Value]:
    """Return the values of a file."""
    with told_as(f"{path}: cannot be read", "a file of values"), path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        try:
            if tuple(next(lines)) != Value._fields:
                raise ValueError
            return [Value(data, of, int(seed), name, float(x), float(y)) for data, of, seed, name, x, y in lines]
        except (ValueError, StopIteration):
            raise UserError(f"{path}: no values; allowed: {ROWS} of `steelyard paper`") from None


def as_csv(values: Iterable[Value]) -> str:
    """Return values as lines of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([Value._fields, *values])
    return text.getvalue()


# What figures come to.


Key = tuple[str, str, str]
BySeed = dict[Key, dict[int, float]]
"""Values by data, system and measure, then by seed."""


class Beside(Document):
    """A measure of a system: ours over seeds, the printed one, and how the two stand."""

    data: str
    system: str
    measure: str
    ours: Estimate
    printed: float | None
    verdict: str


class Tested(Document):
    """A claim as it was tested: the gain over seeds, p, p of equality within the margin, and the verdict."""

    claim: str
    gain: Estimate
    p: float
    equal_p: float
    verdict: str


class Found(Document):
    """An entry with what was measured."""

    name: str
    title: str
    folder: str
    rows: tuple[Beside, ...]
    claims: tuple[Tested, ...]
    left: int
    """Cells that are not done."""
    tiny: bool


def verdict(ours: Sequence[float], printed: float | None) -> str:
    """Say how our seeds stand to one printed run: reproduced, above, below; empty where nothing is printed.

    It is reproduced within 2 %, and where the printed figure lies in the 95 % interval for a single further run.
    """
    if printed is None or not ours or math.isnan(sum(ours)):
        return ""
    away = math.fsum(ours) / len(ours) - printed
    single = deviation(ours) * half_per_deviation(len(ours)) * math.sqrt(len(ours) + 1) if len(ours) > 1 else 0.0
    if abs(away) <= max(NEAR * abs(printed), single):
        return "reproduced"
    return "above" if away > 0 else "below"


def found_of(name: str, values: Iterable[Value], folder: str = "", *, left: int = 0, tiny: bool = False) -> Found:
    """Return an entry with values, wherever they were measured; tiny ones have no verdict."""
    entry, by_seed = entry_of(name), _by_seed(values)
    rows = [
        _beside((data, system.name, measure), by_seed, None if tiny or not isinstance(printed, float) else printed)
        for data in entry.data or ("",)
        for system in entry.of(data)
        for measure, printed in zip_longest(entry.measures, system.printed.get(data, ()))
    ]
    whole = tuple(row for row in rows if row.ours.values or row.printed is not None)
    claims = () if tiny else _tested(entry, by_seed)
    title = f"{entry.title} ({entry.paper})"
    return Found(name=name, title=title, folder=folder, rows=whole, claims=claims, left=left, tiny=tiny)


def _beside(key: Key, by_seed: BySeed, printed: float | None) -> Beside:
    ours, (data, system, measure) = list(by_seed.get(key, {}).values()), key
    said = verdict(ours, printed)
    return Beside(data=data, system=system, measure=measure, ours=estimate(ours), printed=printed, verdict=said)


def _tested(entry: Entry, by_seed: BySeed) -> tuple[Tested, ...]:
    """Test claims as one family by Holm; one with fewer seeds than planned is not tested, and counts in the family."""
    gains: list[list[float]] = []
    for claim in entry.claims:
        mine, theirs = (by_seed.get((claim.data, rule, claim.measure), {}) for rule in (claim.rule, claim.against))
        gains.append([mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())])
    whole = [len(gain) >= entry.seeds for gain in gains]
    pairs = list(zip(entry.claims, gains, whole, strict=True))
    apart = holm([paired_p(gain) if done else 1.0 for _, gain, done in pairs])
    equal = holm([equivalence_p(gain, claim.margin) if done else 1.0 for claim, gain, done in pairs])
    found: list[Tested] = []
    for (claim, gain, done), p, same in zip(pairs, apart, equal, strict=True):
        assert p is not None, "claims have two seeds or more"
        assert same is not None
        words = f"{claim.data}: {claim.rule} against {claim.against}, {claim.measure}"
        said = _decided(gain, p, same) if done else f"not tested: {len(gain)} of {entry.seeds} seeds"
        found.append(Tested(claim=words, gain=estimate(gain), p=p, equal_p=same, verdict=said))
    return tuple(found)


def _decided(gains: Sequence[float], p: float, same: float) -> str:
    if p >= ALPHA:
        return "equal within the margin" if same < ALPHA else "not decided"
    return ("ahead" if sum(gains) > 0 else "behind") + (", by less than the margin" if same < ALPHA else "")


def _by_seed(values: Iterable[Value]) -> BySeed:
    """Return values by data, system and measure, then by seed; series are for figures, and left out."""
    found: BySeed = {}
    for value in values:
        if not value.measure.endswith(":all") and not value.measure.startswith(("sent:", "shown:")):
            found.setdefault((value.data, value.system, value.measure), {})[value.seed] = value.value
    return found


def parts_of(answer: Found) -> list[Block]:
    """Return a table for each data, and one of the claims."""
    entry = entry_of(answer.name)
    parts: list[Block] = [answer.title]
    if answer.tiny:
        parts.append("Settings are tiny: these figures show that it runs, and mean nothing.")
    for data in dict.fromkeys(each.data for each in answer.rows):
        rows = tuple(_row(each) for each in answer.rows if each.data == data)
        parts.append(Table(data, ("", "measure", "ours", "printed", "verdict"), rows, names=2))
    if answer.claims:
        told = tuple(
            (each.claim, show_estimate(each.gain, 4, signed=True), f"{each.p:.2g}", f"{each.equal_p:.2g}", each.verdict)
            for each in answer.claims
        )
        note = "p after Holm over the table; equal: two one-sided tests within the margin."
        parts.append(Table("Claims", ("claim", "gain", "p", "p of equal", "verdict"), told, note))
    parts += [entry.note] if entry.note else []
    return [*parts, *([f"{answer.left} cells are not done."] if answer.left else [])]


def _row(each: Beside) -> tuple[str, ...]:
    whole = all(value.is_integer() for value in (*each.ours.values, each.printed or 0.0))
    digits = 0 if whole else 5 if abs(each.ours.mean) < 10 else 1
    printed = "–" if each.printed is None else show_number(each.printed, digits)
    return each.system, each.measure, show_estimate(each.ours, digits), printed, each.verdict
