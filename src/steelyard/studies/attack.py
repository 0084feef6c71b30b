"""An experiment under attack: a share of its clients hostile in one of the ways that are known by name.

A run for each attack, and one without; what malicious clients did under each rule, and which rule to use against them.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import model_validator

from steelyard.base import files
from steelyard.base.documents import Document
from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.measures import MEASURES, Estimate, estimate, show_estimate
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import RUN_FILE
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.report.curves import flaws_of, read_curves
from steelyard.report.decide import Exclusions, Rows, Verdict, decide, more_seeds
from steelyard.report.rendering import Block, Table
from steelyard.rounds.plan import RoundSettings
from steelyard.runs.history import History, at_once
from steelyard.studies.study import AnyExperiment, Cell, Study, finished

CLEAN = "clean"
"""The name of the run without malicious clients."""
INFLATION = "inflation"
LATE = "late-inflation"
"""Claims that are true in the first half of the rounds."""
LIES = (LATE, INFLATION)
SLEEPER = "adaptive-sleeper"
"""Colluders that behave in the first half of the rounds."""
ADAPTIVE = (
    *("adaptive", "adaptive-alie", "adaptive-ipm", "adaptive-drift", "adaptive-roles", "adaptive-insider"),
    SLEEPER,
)
"""Attacks whose clients try the rule before they send; each rule is attacked in its own way."""
PARTS = ("adaptive-decoys", "adaptive-hidden", "adaptive-copies", "adaptive-bait")
"""Those that look for the weakness of one part of a rule, all among the candidates of `adaptive-roles`."""
ATTACKS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "label-flip": [{"kind": "labels-flipped", "how": "pairs"}],
    "class-flip": [{"kind": "labels-flipped", "how": "class", "classes": [1], "target": 0}],
    "sign-flip": [{"kind": "reversed", "amount": 1}],
    "scaled-reversal": [{"kind": "reversed", "amount": 10}],
    "gaussian": [{"kind": "gaussian"}],
    "alie": [{"kind": "alie"}],
    "ipm": [{"kind": "ipm"}],
    "min-max": [{"kind": "min-max"}],
    "min-sum": [{"kind": "min-sum"}],
    "mimic": [{"kind": "mimic"}],
    "decoy": [{"kind": "decoy"}],
    "slow-drift": [{"kind": "drift"}],
    "bias-push": [{"kind": "bias"}],
    "free-rider": [{"kind": "free-rider"}],
    "free-riders": [{"kind": "free-rider", "how": "colluding"}],
    "backdoor": [{"kind": "backdoor"}],
    "backdoor-boosted": [{"kind": "backdoor"}, {"kind": "boosted"}],
    "distributed-backdoor": [{"kind": "backdoor", "how": "distributed"}],
    "neurotoxin": [{"kind": "backdoor"}, {"kind": "neurotoxin"}],
    "semantic-backdoor": [{"kind": "backdoor", "how": "semantic"}],
    "semantic-boosted": [{"kind": "backdoor", "how": "semantic"}, {"kind": "boosted"}],
    "adaptive": [{"kind": "adaptive", "how": "all"}],
    "adaptive-alie": [{"kind": "adaptive", "how": "alie"}],
    "adaptive-ipm": [{"kind": "adaptive", "how": "ipm"}],
    "adaptive-drift": [{"kind": "adaptive", "how": "drift"}],
    "adaptive-roles": [{"kind": "adaptive", "how": "roles"}],
    "adaptive-insider": [{"kind": "adaptive", "how": "insider"}],
    **{name: [{"kind": "adaptive", "how": name.removeprefix("adaptive-")}] for name in PARTS},
    SLEEPER: [{"kind": "adaptive", "how": "all"}],
    LATE: [{"kind": "claims-criteria"}],
    INFLATION: [{"kind": "claims-criteria"}],
}
"""By name: the flaws that make a client hostile; docs/reference/defence.md has the formulas."""

RULES = (
    *("fedavg", "EQ", "clip(EQ)", "median(EQ)", "trimmed-mean(EQ)", "multi-krum(EQ)"),
    *("geometric-median(EQ)", "guarded"),
)
"""What `steelyard attack` compares by default; FLTrust joins where the server has rows of its own."""


def attack_names(texts: Sequence[str], *, adaptive: bool = False) -> list[str]:
    """Read attacks such as "alie" or "sign-flip+inflation", with commas or one by one.

    "all" is each that does not adapt, lying; `adaptive` adds those that do, lying.
    """
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    found: dict[str, None] = {}
    for word in words:
        if word == "all":
            fixed = [name for name in ATTACKS if name not in (*ADAPTIVE, *PARTS)]
            found |= dict.fromkeys(name if name in LIES else f"{name}+{INFLATION}" for name in fixed)
            continue
        name, _, more = word.partition("+")
        if name not in ATTACKS or more not in ("", *LIES) or (more and name in LIES):
            raise UserError(
                f"--attack: got '{word}'{nearest(name, ATTACKS)}; allowed: {listed(ATTACKS)}, each but the last two "
                f"also as NAME+{INFLATION} and NAME+{LATE}, or all"
            )
        found[word] = None
    if adaptive:
        found |= dict.fromkeys(f"{name}+{INFLATION}" for name in ADAPTIVE)
    if not found:
        raise UserError(f"--attack: got nothing; allowed: {listed(ATTACKS)}, or all; or --adaptive")
    return list(found)


def under_attack(experiment: Description, attack: str, fraction: float) -> Description:
    """Return the experiment with this share of its clients hostile, drawn by the seed; "clean" leaves it as it is."""
    if attack == CLEAN:
        return experiment
    if not 0 < fraction < 0.5:
        raise UserError(
            f"--fraction: got {fraction:g}; allowed: more than 0, less than 0.5 (share of the clients; no rule "
            "withstands half of them)"
        )
    if not isinstance(experiment, LearningDescription):
        raise UserError(
            f"attack: experiments of kind '{experiment.kind_name()}' have no malicious clients; allowed: kind = "
            "'learning'"
        )
    if experiment.server_figure != "accuracy":
        raise UserError(
            "attack: this experiment has no classes, and attacks are compared by accuracy; allowed: data with classes"
        )
    name, _, more = attack.partition("+")
    picked: dict[str, Any] = {"pick": "random", "share": fraction}
    flaws: list[Any] = list(experiment.flaws)
    for word in (name, more) if more else (name,):
        begins = {"from_round": experiment.rounds.count // 2 + 1} if word in (LATE, SLEEPER) else {}
        for flaw in ATTACKS[word]:
            flaws.append({**flaw, **begins, **picked})
            picked = {"pick": "same"}
    return experiment.changed({"flaws": flaws}, where="attack")


def rules_for(experiment: Description) -> list[str]:
    """Return the rules to compare where the user names none: those that this experiment's server can follow."""
    return list(RULES) if experiment.capabilities().lacks_test_set else [*RULES[:-1], "fltrust(EQ)", RULES[-1]]


class AttackRow(Document):
    """A rule under one attack, over its seeds; `lost` is what it lost against the run without malicious clients.

    Also the weight of malicious clients, how often a backdoor worked, and in what share of its rounds an honest client
    was under alarm (None without a detector, the criterion TR).
    """

    rule: str
    accuracy: Estimate
    lost: Estimate | None = None
    weight: float | None = None
    largest: float | None = None
    backdoor: Estimate | None = None
    false_alarms: float | None = None
    ended: int = 0
    """In how many seeds its model exploded."""
    fedavg: bool = False
    """Whether it weighs by dataset size alone, whatever it is called."""


class AttackBlock(Document):
    """All rules under one attack."""

    attack: str
    rules: tuple[AttackRow, ...]


class Attacks(Document):
    """What several attacks did; "clean" among them is what is lost from."""

    folder: str
    seeds: int
    recommendation: Verdict | None
    fraction: float
    flawed_clients: tuple[str, ...]
    """Those that the experiment itself makes flawed, before anybody attacks, in the first seed."""
    attacks: tuple[AttackBlock, ...]

    def lines_on(self, rule: str) -> list[str]:
        """Say what each attack did to a rule, a line each; for the record of a run."""
        lines: list[str] = []
        for block in self.attacks:
            if block.attack == CLEAN:
                continue
            head = f"{block.attack}, {self.fraction:.0%} of the clients malicious"
            row = next((row for row in block.rules if row.rule == rule), None)
            if row is None:
                lines.append(f"{head}: tested under other rules only ({', '.join(row.rule for row in block.rules)})")
                continue
            lost = "" if row.lost is None else f", {100 * row.lost.mean:.1f} points lost"
            weight = "" if row.weight is None else f"; they had {row.weight:.0%} of all weight"
            lines.append(f"{head}: accuracy {row.accuracy.mean:.1%}{lost}{weight}")
        return lines


class Attack(Study):
    """An experiment with its rules, and attacks on it by name; its cells are these, and one without an attack."""

    kind = "attacks"
    file = files.ATTACK_FILE

    attacks: tuple[str, ...]
    fraction: float
    """The share of malicious clients."""
    seeds: int
    """How many."""
    experiment: AnyExperiment

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        attack_names(self.attacks)
        return self

    def cells(self) -> list[Cell]:
        """Return the run without malicious clients, then one for each attack."""
        return [Cell(name, tuple(seeds_of(self.experiment, self.seeds))) for name in (CLEAN, *self.attacks)]

    def described(self, cell: Cell) -> Description:
        """Return the experiment under an attack."""
        return with_rules(under_attack(self.experiment, cell.folder, self.fraction), ["recipe"])

    def answer(self, folder: Path) -> Attacks:
        """Return what the attacks did, and which rule to use against them; one that is not done is refused."""
        if missing := [cell.folder for cell in self.cells() if not finished(folder / cell.folder)]:
            raise UserError(
                f"{folder}: {missing[0]} is not done; allowed: attacks that have ended (`steelyard resume`)"
            )
        clean, *attacks = (
            AttackBlock(attack=name, rules=outcomes(folder / name, self.experiment.rounds, folder / CLEAN))
            for name in (CLEAN, *self.attacks)
        )
        history = History(folder / CLEAN)
        return Attacks(
            folder=str(folder),
            seeds=self.seeds,
            recommendation=recommended(attacks, self._command(folder)),
            fraction=self.fraction,
            flawed_clients=tuple(sorted(flaws_of(history, min(history.federations["seed"], default=0)))),
            attacks=(clean, *(_with_losses(block, clean) for block in attacks)),
        )

    def parts(self, answer: Attacks) -> list[Block]:
        """Return the recommendation, and a table for each attack."""
        return attack_parts(answer)

    def next_lines(self, answer: Attacks) -> Sequence[str]:
        """Return what to run for more seeds, and where the runs are."""
        return [*more_seeds(answer.recommendation), f"runs stored in {answer.folder}"]

    def _command(self, folder: Path) -> str:
        words = (str(folder / CLEAN / RUN_FILE), "--rules", "recipe", "--attack", ",".join(self.attacks))
        return shlex.join(("steelyard", "attack", *words, "--fraction", str(self.fraction)))


def _with_losses(block: AttackBlock, clean: AttackBlock) -> AttackBlock:
    """Return what an attack did, with what each rule lost, seed by seed."""
    before = {row.rule: row.accuracy.values for row in clean.rules}
    rows = tuple(
        row.model_copy(
            update={"lost": estimate([a - b for a, b in zip(before[row.rule], row.accuracy.values, strict=True)])}
        )
        for row in block.rules
    )
    return block.model_copy(update={"rules": rows})


@at_once
def outcomes(folder: Path, settings: RoundSettings, without: Path | None = None) -> tuple[AttackRow, ...]:
    """Return what malicious clients did under each rule.

    Accuracy is the mean of the last rounds, on the server's rows where some report, else on the clients' tests; a
    backdoor counts in the last round.

    Hostile are the flawed clients; given the folder of a run `without` the attack, those with more flaws than there.
    """
    history = History(folder)
    before = None if without is None else History(without)
    found_curves = sorted(read_curves(history), key=lambda curve: curve.seed)
    hostile = {curve.seed: _hostile(history, before, curve.seed) for curve in found_curves}
    curves: dict[str, list[Sequence[float]]] = {}
    for curve in found_curves:
        tested = curve.server.get("accuracy") or curve.overall.tolist()
        curves.setdefault(curve.rule, []).append(tested)
    found: list[AttackRow] = []
    for rule, by_seed in curves.items():
        weight, largest = _weights(history, rule, hostile)
        late = [curve[-settings.last :] for curve in by_seed]
        worked = _backdoor(history, rule)
        found.append(
            AttackRow(
                rule=rule,
                accuracy=estimate([sum(rounds) / len(rounds) for rounds in late]),
                weight=weight,
                largest=largest,
                backdoor=estimate(worked) if worked else None,
                false_alarms=_false_alarms(history, rule, hostile),
                ended=sum(name == rule for name, _ in history.ended),
                fedavg=next(curve.settings.fedavg for curve in found_curves if curve.rule == rule),
            )
        )
    return tuple(found)


def _hostile(history: History, before: History | None, seed: int) -> set[str]:
    known = {} if before is None else flaws_of(before, seed)
    return {name for name, flaws in flaws_of(history, seed).items() if Counter(flaws) - Counter(known.get(name, []))}


def _weights(history: History, rule: str, hostile: Mapping[int, set[str]]) -> tuple[float | None, float | None]:
    """Return the share of all weight that malicious clients had, mean over seeds, and the largest of one in a round."""
    shares: list[float] = []
    largest: list[float] = []
    for seed, names in hostile.items():
        found = history.cohorts(rule, seed) if names else None
        weighed = None if found is None else ~np.isnan(found.weight)
        if found is None or weighed is None or not weighed.any():
            continue
        weight = found.weight[weighed]
        theirs = weight[np.isin(found.client[weighed], [i for i, name in enumerate(found.clients) if name in names])]
        shares.append(float(theirs.sum() / (weight.sum() or 1.0)))
        largest += [float(theirs.max())] if len(theirs) else []
    return math.fsum(shares) / len(shares) if shares else None, max(largest) if largest else None


def _false_alarms(history: History, rule: str, hostile: Mapping[int, set[str]]) -> float | None:
    """Return the share of the rounds of honest clients in which the detector (TR) left them out; None without it."""
    flags: list[bool] = []
    for seed, names in hostile.items():
        found = history.cohorts(rule, seed)
        if "TR" not in found.criteria:
            return None
        bad = [place for place, name in enumerate(found.clients) if name in names]
        flags += (found.raw[~np.isin(found.client, bad), found.criteria.index("TR")] == 0).tolist()
    return math.fsum(flags) / len(flags) if flags else None


def _backdoor(history: History, rule: str) -> list[float] | None:
    """Return per seed how often the last model takes what the attack aims at for its class, over all such test rows."""
    frame = history.evaluations
    if "backdoor" not in frame.columns:
        return None
    # Clients have more or fewer rows that show it, some none.
    columns = (frame[name].tolist() for name in ("rule", "seed", "round", "backdoor_rows", "backdoor"))
    mine = [row[1:] for row in zip(*columns, strict=True) if row[0] == rule]
    last = max(round for _, round, _, _ in mine)
    found: list[float] = []
    for seed in sorted({seed for seed, *_ in mine}):
        rows = [(count, rate) for of, round, count, rate in mine if (of, round) == (seed, last)]
        found.append(sum(count * rate for count, rate in rows) / (sum(count for count, _ in rows) or 1.0))
    return found


def recommended(attacks: Sequence[AttackBlock], command: str = "") -> Verdict | None:
    """Say which rule to use against these attacks: by the attack that harms it most, seed by seed.

    `command` is what runs them again, for more seeds.
    """
    if not attacks:
        return None
    rows = [row for block in attacks for row in block.rules]
    accuracies: dict[str, list[Sequence[float]]] = {}
    for row in rows:
        accuracies.setdefault(row.rule, []).append(row.accuracy.values)
    least = {rule: [min(seed) for seed in zip(*values, strict=True)] for rule, values in accuracies.items()}
    baseline = next((row.rule for row in rows if row.fedavg), rows[0].rule)
    left_out = {
        row.rule: f"its training diverged in {row.ended} of {len(row.accuracy.values)} seeds under {block.attack}"
        for block in attacks
        for row in block.rules
        if row.ended
    }
    problem = f"{baseline}, the baseline: {left_out[baseline]}" if baseline in left_out else ""
    where = f"under {attacks[0].attack}" if len(attacks) == 1 else f"under the worst of {len(attacks)} attacks"
    compared = Rows(MEASURES["accuracy"], where)
    return decide(least, baseline, compared, Exclusions(left_out, problem), command=command)


def attack_parts(document: Attacks) -> list[Block]:
    """Return the outcomes for people: which rule to use, a table for each attack, what its columns mean."""
    tables: list[Table] = []
    for block in document.attacks:
        if clean := block.attack == CLEAN:
            flawed = len(document.flawed_clients)
            also = f", but {flawed} that the experiment itself makes faulty" if flawed else ""
            title = f"no attack: no malicious clients{also}"
        else:
            title = f"{block.attack}: {document.fraction:.0%} of the clients malicious"
        cells = {row.rule: _cells(row) for row in block.rules}
        always = ("accuracy",) if clean else ("accuracy", "lost", "weight")
        headings = [name for name in _HEADINGS if name in always or any(found[name] for found in cells.values())]
        rows = tuple((rule, *(found[name] for name in headings)) for rule, found in cells.items())
        tables.append(Table(title, ("rule", *headings), rows))
    shown = {heading for table in tables for heading in table.headings}
    explained = "; ".join(f"{name}: {words}" for name, words in _HEADINGS.items() if name in shown)
    return [*([document.recommendation.sentence] if document.recommendation else []), *tables, explained]


_HEADINGS = {
    "accuracy": "% in the last rounds, over the seeds",
    "lost": "points less than without malicious clients",
    "weight": "the share of all weight that malicious clients had",
    "backdoor": "how often rows that an attack aims at are taken for its class",
    "false alarms": "rounds of honest clients in which the detector excluded them",
}
"""The columns and what each means, which is printed below where the column stands."""


def _cells(row: AttackRow) -> dict[str, str]:
    return {
        "accuracy": show_estimate(row.accuracy, 1, 100.0),
        "lost": "" if row.lost is None else show_estimate(row.lost, 1, 100.0),
        "weight": "" if row.weight is None else f"{row.weight:.0%}",
        "backdoor": "" if row.backdoor is None else show_estimate(row.backdoor, 0, 100.0, unit=" %"),
        "false alarms": "" if row.false_alarms is None else f"{row.false_alarms:.1%}",
    }
