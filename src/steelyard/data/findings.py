"""What is wrong with the data of several sites, found in their profiles: each site alone, and against the others."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import Literal

import numpy as np

from steelyard.base.documents import Document
from steelyard.base.errors import counted, first_names, without_controls
from steelyard.data.cells import is_number, limit_of
from steelyard.data.profile import OTHERS, ColumnProfile, Floats, SiteProfile, together

Level = Literal["error", "warning", "note"]

NAMES: Mapping[str, tuple[Level, str]] = {
    # In order of harm.
    "unreadable": ("error", "the reader refuses the data; the sentence is its own"),
    "no-common-column": ("error", "a site has no input column that others have"),
    "labels-spelled-alike": ("error", "labels are equal but for case and spaces: they count as several classes"),
    "labels-of-two-kinds": ("error", "labels are numbers at one site and words at others"),
    "types-clash": ("error", "a column holds numbers at one site and words at others"),
    "words-among-numbers": ("error", "a column of numbers holds words, limits such as <5, or numbers beyond 1e38"),
    "labels-empty": ("error", "rows have no label"),
    "times-of-zero": ("error", "a time to an event is 0 or less"),
    "rows-in-train-and-test": ("error", "test rows are trained on too; below 1 % of them a warning"),
    "cannot-train": ("error", "a site has too few rows, none left, or no event for Cox; or all steps have one row"),
    "gives-the-label-away": ("warning", "a column alone predicts the label"),
    "survival-columns": ("warning", "a time and an event are inputs, or learnt as a number or a class"),
    "other-units": ("warning", "a site's numbers are a factor larger or smaller, in median and in spread"),
    "not-recorded": ("warning", "a number lies far from all others, or is a usual code for a missing value"),
    "left-out": ("warning", "owners with too few rows are left out, as the experiment asks"),
    "class-at-one-site": ("warning", "one site alone has a class"),
    "rare-class": ("warning", "a class has less than 5 % of the rows, so that accuracy says little"),
    "rows-repeated": ("warning", "rows are there before at their site, more than chance explains"),
    "few-rows": ("warning", "a site has less than 10 rows"),
    "counts-rows": ("warning", "an input counts the rows, or names them: another whole number in each"),
    "owner-counts-rows": ("warning", "the column of owners names another one in almost each row"),
    "values-spelled-alike": ("warning", "values of a category are equal but for case and spaces"),
    "constant": ("warning", "a column never changes"),
    "no-values": ("warning", "a site has no value in a column that most rows of the others have"),
    "drift": ("warning", "a column is spread otherwise at a site than at the others (population stability index)"),
}
"""Every finding by its name, with its level and what it means; the most harmful first. An error is certain."""

FEW_ROWS = 10
RARE = 0.05
DRIFT = 0.25
"""From this population stability index on, a column is said to drift."""
MOST_SITES = 3
"""A finding that more sites have is one finding."""
_EXPLAIN_DRIFT = ("other-units", "types-clash", "words-among-numbers", "values-spelled-alike")
AGREES = 0.95
CORRELATES = 0.999
_BETWEEN: Mapping[float, str] = {
    2.54: "inches and cm",
    2.2046: "kg and pounds",
    1.6093: "miles and km",
    4.184: "kJ and kcal",
    7.5006: "kPa and mmHg",
    18.016: "glucose in mmol/L and mg/dL",
    38.67: "cholesterol in mmol/L and mg/dL",
    88.42: "creatinine in mg/dL and µmol/L",
    12.0: "months and years",
    24.0: "hours and days",
    30.44: "days and months",
    60.0: "minutes and hours",
    365.25: "days and years",
    **{10.0**power: "" for power in range(1, 10)},
}
"""By factor: which units it lies between."""
_UNITS = {**_BETWEEN, **{1 / factor: units for factor, units in _BETWEEN.items()}}
_FITS = 0.5
"""A factor fits where quantiles are less apart after it, in spreads."""
_FREE = 3.0
"""Any other factor is only named from here on."""


class Finding(Document):
    """One thing that is wrong with the data, or may be."""

    level: Level
    """error: certain, it stops a run unless it is accepted by name; warning: likely; note: to know."""
    name: str
    """What it is, as `--accept` takes it."""
    sentence: str
    """What was found, for people."""
    site: str = ""
    """The site that has it; empty where it is none alone."""
    column: str = ""
    """The column; empty where it is none."""
    row: str = ""
    """The first row that shows it, where there is one."""
    figures: dict[str, float] = {}  # noqa: RUF012  pydantic gives each model its own copy of a default
    """What it is measured by."""
    mend: str = ""
    """The field of the experiment file that mends it."""
    accepted: bool = False
    """Whether the run went on all the same."""


def found(name: str, sentence: str, profile: SiteProfile | None = None, column: str = "", **more: object) -> Finding:
    """Return a finding by its name; use it for every one, so that its level is that of `NAMES`."""
    given: dict[str, object] = {"level": NAMES[name][0], "name": name, "sentence": without_controls(sentence)}
    return Finding.model_validate(given | {"site": "" if profile is None else profile.site, "column": column} | more)


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings by harm; what several sites have alike is one finding."""
    by_kind: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        by_kind.setdefault((finding.name, finding.column), []).append(finding)
    merged: list[Finding] = []
    for alike in by_kind.values():
        if len(alike) <= MOST_SITES:
            merged += alike
            continue
        sites = first_names([finding.site for finding in alike])
        sentence = f"{alike[0].sentence}; so at {len(alike)} sites: {sites}"
        figures = {**alike[0].figures, "sites": float(len(alike))}
        merged.append(alike[0].model_copy(update={"sentence": sentence, "site": "", "figures": figures}))
    order = list(NAMES)
    return sorted(merged, key=lambda finding: order.index(finding.name))


def compared(profiles: Sequence[SiteProfile], *, task: str) -> list[Finding]:
    """Return what is wrong at each site and between them; use it where all profiles are at hand."""
    findings = [finding for profile in profiles for finding in alone(profile)]
    pool = together(profiles)
    constant = Counter(finding.column for finding in findings if finding.name == "constant")
    has = Counter(name for profile in profiles for name in profile.columns)
    # What never changes at one site alone is that site's; others show whether it matters.
    findings = [
        finding
        for finding in findings
        if finding.name != "constant"
        or (_of_one_value(pool.columns[finding.column]) and constant[finding.column] == has[finding.column])
    ]
    findings += of_all(pool, task)
    if len(profiles) > 1:
        usual = {name: _usual(profiles, name) for name in pool.columns}
        for profile in profiles:
            odd = {name: column for name, (column, sites) in usual.items() if profile.site not in sites}
            findings += beside(profile, pool.plus(profile, -1), odd)
    return in_order(_explained(findings))


def _usual(profiles: Sequence[SiteProfile], name: str) -> tuple[ColumnProfile, set[str]]:
    """Return a column of the sites that have it of one kind and in one unit, those with the most rows; and which."""
    groups: list[list[SiteProfile]] = []
    for profile in sorted((each for each in profiles if name in each.columns), key=lambda each: -each.rows):
        own = profile.columns[name]
        like = next((group for group in groups if _goes_with(own, group[0].columns[name])), None)
        if like is None:
            groups.append(like := [])
        like.append(profile)
    most = max(groups, key=lambda group: sum(each.rows for each in group))
    return reduce(ColumnProfile.plus, (each.columns[name] for each in most)), {each.site for each in most}


def _goes_with(own: ColumnProfile, theirs: ColumnProfile) -> bool:
    return is_numeric(own) == is_numeric(theirs) and not (is_numeric(own) and other_units(own, theirs))


def _of_one_value(column: ColumnProfile) -> bool:
    return np.count_nonzero(column.counts) + len(column.words) == 1


def _explained(findings: Sequence[Finding]) -> list[Finding]:
    """Leave drift out where another finding explains it, and of each column name the site that drifts most."""
    told = {each.column for each in findings if each.name in _EXPLAIN_DRIFT}
    worst: dict[str, Finding] = {}
    for finding in findings:
        if finding.name == "drift" and finding.column not in told:
            before = worst.setdefault(finding.column, finding)
            if finding.figures["psi"] > before.figures["psi"]:
                worst[finding.column] = finding
    return [each for each in findings if each.name != "drift" or worst.get(each.column) is each]


# One site alone, and all together.


def alone(profile: SiteProfile) -> list[Finding]:
    """Return what one site finds in its own rows."""
    findings: list[Finding] = []
    if profile.site and profile.rows < FEW_ROWS:
        sentence = f"the site '{profile.site}' has {counted(profile.rows, 'row')}"
        findings.append(found("few-rows", sentence, profile, mend="partition.minimum", figures={"rows": profile.rows}))
    if profile.repeated:
        at_site = f" at '{profile.site}'" if profile.site else ""
        sentence = f"{profile.repeated:,} of {profile.rows:,} rows{at_site} are there before"
        figures = {"rows": profile.repeated, "of": profile.rows}
        findings.append(found("rows-repeated", sentence, profile, mend="data.duplicates", figures=figures))
    for name, column in profile.columns.items():
        findings += _of_column(profile, name, column)
    return findings


def _first(places: Iterable[int]) -> str:
    """Return the first of some rows, from 1; empty where there is none."""
    first = min(places, default=None)
    return "" if first is None else str(first + 1)


def _where(profile: SiteProfile, name: str) -> str:
    return f"column '{name}'" + (f" at '{profile.site}'" if profile.site else "")


def _field(column: str) -> str:
    """Return the section that declares a column, as an experiment file writes it."""
    bare = column.isascii() and column.replace("_", "").replace("-", "").isalnum()
    return f"data.columns.{column if bare else json.dumps(column, ensure_ascii=False)}"


def _of_column(profile: SiteProfile, name: str, column: ColumnProfile) -> list[Finding]:
    findings: list[Finding] = []
    where, at = _where(profile, name), _field(name)
    for value, count in column.strange.items():
        others = f"far from the others ({column.least:g} to {column.most:g})"
        sentence = f"{where}: {value:g} in {counted(count, 'row')}, {others}"
        figures = {"value": value, "rows": count}
        findings.append(found("not-recorded", sentence, profile, name, mend=f"{at}.missing", figures=figures))
    if column.words and is_numeric(column):
        count = sum(column.words.values())
        texts = first_names([f"'{word[:20]}'" for word in column.words])
        sentence = f"{where} holds numbers and, in {counted(count, 'row')}, {texts}"
        limits = not any(np.isnan(limit_of(word)) for word in column.words)
        mend = f"{at}.{'limits' if limits else 'missing'}"
        more = {"row": _first(column.first.values()), "mend": mend, "figures": {"rows": count}}
        findings.append(found("words-among-numbers", sentence, profile, name, **more))
    same = column.least == column.most and not column.words if column.bulk else len(column.words) == 1
    if same and not column.missing and not column.strange and column.rows >= FEW_ROWS:
        value = f"{column.least:g}" if column.bulk else f"'{next(iter(column.words))[:20]}'"
        findings.append(found("constant", f"{where} is {value} in every row", profile, name, mend="data.ignore"))
    if column.agreement >= (AGREES if profile.labels.words else CORRELATES):
        sentence = f"{where} alone gives the label (agreement {column.agreement:.3f})"
        figures = {"agreement": column.agreement}
        findings.append(found("gives-the-label-away", sentence, profile, name, mend="data.ignore", figures=figures))
    if pairs := spelled_alike(column.words, column.words):
        sentence = f"{where} holds values that differ in case or spaces alone: {_shown(pairs)}"
        findings.append(found("values-spelled-alike", sentence, profile, name, mend=f"{at}.synonyms"))
    return findings


def of_all(pool: SiteProfile, task: str) -> list[Finding]:
    """Return what only all sites together show; `pool` is their sum, or what a server sends of it."""
    labels = {text: count for text, count in pool.labels.words.items() if text != OTHERS}
    if task != "classes" or len(labels) < 2:
        return []
    rows = sum(labels.values())
    rarest = min(labels, key=lambda text: labels[text])
    if labels[rarest] >= RARE * rows:
        return []
    most = max(labels.values()) / rows
    sentence = (
        f"label '{rarest}' is {labels[rarest]:,} of {rows:,} rows, so accuracy says little: always guessing the "
        f"commonest label is right in {most:.1%}"
    )
    figures = {"rows": labels[rarest], "of": rows, "guessing": most}
    return [found("rare-class", sentence, mend="rounds.measure", figures=figures)]


# One site against the others.


def beside(profile: SiteProfile, others: SiteProfile, odd: Mapping[str, ColumnProfile] | None = None) -> list[Finding]:
    """Return what a site finds where it compares itself with the sum of the others.

    `odd`: of columns whose kind or unit may be another here, those of sites that go together; default: of all others.
    """
    findings = _labels_beside(profile, others)
    common = [name for name in profile.columns if name in others.columns and others.columns[name].rows]
    if not common:
        sentence = f"the site '{profile.site}' has no input column in common with the others"
        return [*findings, found("no-common-column", sentence, profile, mend="data.files")]
    lacking = [name for name in others.columns if name not in profile.columns]
    if lacking := [name for name in lacking if 2 * others.columns[name].rows > others.rows]:
        alike = {_loosely(name): f", is it '{name}'?" for name in profile.columns}
        named = first_names([f"'{name}'{alike.get(_loosely(name), '')}" for name in lacking])
        sentence = f"the site '{profile.site}' has no value in {named}"
        findings.append(found("no-values", sentence, profile, lacking[0], mend="data.ignore"))
    for name in common:
        usual = (others.columns if odd is None else odd).get(name)
        findings += _column_beside(profile, name, profile.columns[name], others.columns[name], usual)
    return findings


def _labels_beside(profile: SiteProfile, others: SiteProfile) -> list[Finding]:
    own, theirs = profile.labels, others.labels
    findings: list[Finding] = []
    mend = f"{_field(profile.label)}.synonyms"
    if pairs := spelled_alike(own.words, theirs.words):
        row = _first(own.first[text] for text in pairs if text in own.first)
        sentence = f"labels at '{profile.site}' differ from others in case or spaces alone: {_shown(pairs)}"
        return [found("labels-spelled-alike", sentence, profile, row=row, mend=mend)]
    usual = _worded(own) + _worded(theirs) >= 0
    odd = [text for text in own.words if is_number(text) == usual]
    # One word among numbers is a class as good as they are, such as 0, 1, 2, 3+.
    if odd and len(odd) == len(own.words) and theirs.words:
        at_others = [text for text in theirs.words if is_number(text) != usual]
        sentence = f"labels at '{profile.site}' are {first_names(odd)}, at the others {first_names(at_others)}"
        row = _first(own.first.values())
        return [found("labels-of-two-kinds", sentence, profile, row=row, mend=mend)]
    known = {_loosely(text) for text in theirs.words}
    only = [text for text in own.words if _loosely(text) not in known and text != OTHERS]
    if only and theirs.words:
        rows = sum(own.words[text] for text in only)
        texts = first_names([f"'{text}'" for text in only])
        sentence = f"label {texts} is at '{profile.site}' alone ({counted(rows, 'row')})"
        findings.append(found("class-at-one-site", sentence, profile, figures={"rows": rows}))
    return findings


def _worded(labels: ColumnProfile) -> int:
    """Return how many more rows have a word than a number."""
    return sum(-count if is_number(text) else count for text, count in labels.words.items())


def spelled_alike(own: Mapping[str, int], others: Mapping[str, int]) -> dict[str, str]:
    """Return which texts of a site are, but for case and spaces, a commoner one of its own or of the others."""
    every: dict[str, dict[str, int]] = {}
    for text in {**own, **others}:
        every.setdefault(_loosely(text), {})[text] = own.get(text, 0) + (
            others.get(text, 0) if others is not own else 0
        )
    usual = {key: max(texts, key=lambda text: (texts[text], text)) for key, texts in every.items()}
    return {text: usual[key] for text in own if (key := _loosely(text)) and usual[key] != text}


def _loosely(text: str) -> str:
    """Return a text without case and spaces."""
    return "".join(text.casefold().split())


def _shown(pairs: Mapping[str, str]) -> str:
    return first_names([f"'{text[:20]}' beside '{usual[:20]}'" for text, usual in pairs.items()])


def is_numeric(column: ColumnProfile) -> bool:
    """Whether a column is one of numbers: at least half of what is there, with limits of detection such as <5."""
    limits = sum(count for text, count in column.words.items() if not np.isnan(limit_of(text)))
    return column.numbers > 0 and column.numbers + 2 * limits >= sum(column.words.values())


def _column_beside(
    profile: SiteProfile, name: str, own: ColumnProfile, theirs: ColumnProfile, usual: ColumnProfile | None
) -> list[Finding]:
    where, at = _where(profile, name), _field(name)
    filled = own.numbers + sum(own.words.values()), theirs.numbers + sum(theirs.words.values())
    if not all(filled):
        return []
    if usual is not None and is_numeric(own) != is_numeric(usual):
        kinds = ("numbers", "words") if is_numeric(own) else ("words", "numbers")
        row = _first(own.first.values())
        sentence = f"{where} holds {kinds[0]}, at the others {kinds[1]}"
        return [found("types-clash", sentence, profile, name, row=row, mend=f"{at}.type")]
    if usual is not None and is_numeric(own) and (scaled := other_units(own, usual)) is not None:
        factor, units = scaled
        meant = f" ({units})" if units else ""
        sentence = f"{where} is about {factor:.4g} times as large as at the others{meant}"
        figures = {"factor": factor}
        return [found("other-units", sentence, profile, name, mend=f"{at}.factor", figures=figures)]
    findings: list[Finding] = []
    if not is_numeric(own) and (pairs := spelled_alike(own.words, theirs.words)):
        sentence = f"{where} holds values that others write otherwise: {_shown(pairs)}"
        findings.append(found("values-spelled-alike", sentence, profile, name, mend=f"{at}.synonyms"))
    index, chance = drift(own, theirs)
    if min(filled) >= FEW_ROWS and index > DRIFT + chance:
        sentence = f"{where} is spread otherwise than at the others (population stability index {index:.2f})"
        mend = "data.normalise" if is_numeric(own) else "data.ignore"
        findings.append(found("drift", sentence, profile, name, mend=mend, figures={"psi": index}))
    return findings


def other_units(own: ColumnProfile, theirs: ColumnProfile) -> tuple[float, str] | None:
    """Return the factor that makes a site's numbers those of the others, and the units that it lies between.

    None where none is needed, where none does it (medians and spreads must both fit), or where a shift does it better.
    """
    mine, usual = own.estimated(), theirs.estimated()
    if mine is None or usual is None or min(own.bulk, theirs.bulk) < FEW_ROWS:
        return None
    spread = float(usual[4] - usual[2]) or float(usual[6] - usual[0])
    if not spread:
        return None

    def apart(numbers: Floats) -> float:
        return float(np.abs(numbers - usual)[1:6].mean()) / spread

    as_it_is = apart(mine)
    if as_it_is < 1:
        return None
    tried = [(apart(mine / factor), factor, units) for factor, units in _UNITS.items()]
    tried.append((apart((mine - 32) / 1.8), 1.8, "°F and °C, 32 apart"))
    tried.append((apart(mine * 1.8 + 32), 1 / 1.8, "°C and °F, 32 apart"))
    free = float(mine[3] / usual[3]) if usual[3] else 0.0
    if min(tried)[0] >= _FITS and (free >= _FREE or 0 < free <= 1 / _FREE):
        tried.append((apart(mine / free), free, ""))
    # A slip of the decimal point is commoner than any unit.
    fit, factor, units = min(tried, key=lambda one: one[0] if one[2] else one[0] / 2)
    shifted = apart(mine - mine[3] + usual[3])
    return (factor, units) if fit < min(_FITS, as_it_is / 4, shifted) else None


def drift(own: ColumnProfile, theirs: ColumnProfile) -> tuple[float, float]:
    """Return the population stability index of a column against the others, and how much of it chance explains."""
    if is_numeric(own):
        mine, usual = own.counts, theirs.counts
    else:
        texts = [*{**own.words, **theirs.words}]
        mine, usual = (np.array([part.words.get(text, 0) for text in texts]) for part in (own, theirs))
    used = (mine + usual) > 0
    mine, usual = np.maximum(mine[used], 0) + 0.5, np.maximum(usual[used], 0) + 0.5
    p, q = mine / mine.sum(), usual / usual.sum()
    chance = 3 * (len(p) - 1) * (1 / mine.sum() + 1 / usual.sum())
    return float(((p - q) * np.log(p / q)).sum()), chance
