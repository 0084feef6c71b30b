"""An experiment under attack: a share of its clients hostile in one of the ways that are known by name.

One run for each attack stands in a folder with a file that says what they are, so that a stopped one goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from steelyard.base.errors import Stopped, UserError, listed, nearest, own_folder
from steelyard.base.files import ATTACK_FILE, is_file
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import build, unnamed_folder
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.report.hostile import CLEAN
from steelyard.runs.store import held
from steelyard.studies.study import ALONE, How, finished, run_or_resume
from steelyard.studies.sweep import PlannedRun, differing, read_plan, write_plan

INFLATION = "inflation"
LATE = "late-inflation"
"""Claims that are true in the first half of the rounds."""
LIES = (LATE, INFLATION)
ADAPTIVE = ("adaptive", "adaptive-alie", "adaptive-ipm", "adaptive-drift")
"""Attacks whose clients try the rule before they send; each rule is attacked in its own way."""
ATTACKS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "label-flip": [{"kind": "labels-flipped", "how": "pairs"}],
    "class-flip": [{"kind": "labels-flipped", "how": "class", "classes": [1], "target": 0}],
    "sign-flip": [{"kind": "reversed", "amount": 1}],
    "scaled-reversal": [{"kind": "reversed", "amount": 10}],
    "gaussian": [{"kind": "gaussian"}],
    "alie": [{"kind": "alie"}],
    "ipm": [{"kind": "ipm"}],
    "min-max": [{"kind": "min-max"}],
    "bias-push": [{"kind": "bias"}],
    "free-rider": [{"kind": "free-rider"}],
    "free-riders": [{"kind": "free-rider", "how": "colluding"}],
    "backdoor": [{"kind": "backdoor"}],
    "backdoor-boosted": [{"kind": "backdoor"}, {"kind": "boosted"}],
    "semantic-backdoor": [{"kind": "backdoor", "how": "semantic"}],
    "semantic-boosted": [{"kind": "backdoor", "how": "semantic"}, {"kind": "boosted"}],
    "adaptive": [{"kind": "adaptive", "how": "all"}],
    "adaptive-alie": [{"kind": "adaptive", "how": "alie"}],
    "adaptive-ipm": [{"kind": "adaptive", "how": "ipm"}],
    "adaptive-drift": [{"kind": "adaptive", "how": "drift"}],
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
            fixed = [name for name in ATTACKS if name not in ADAPTIVE]
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
            f"attack: experiments of kind '{experiment.kind_name()}' have no hostile clients; allowed: kind = "
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
        begins = {"from_round": experiment.rounds.count // 2 + 1} if word == LATE else {}
        for flaw in ATTACKS[word]:
            flaws.append({**flaw, **begins, **picked})
            picked = {"pick": "same"}
    return experiment.changed({"flaws": flaws}, where="attack")


def rules_for(experiment: Description) -> list[str]:
    """Return the rules to compare where the user names none: those that this experiment's server can follow."""
    return list(RULES) if experiment.capabilities().lacks_test_set else [*RULES[:-1], "fltrust(EQ)", RULES[-1]]


@dataclass(frozen=True)
class Attack:
    """An experiment with its rules, the attacks on it by name, the share of hostile clients, the number of seeds."""

    experiment: Description
    names: tuple[str, ...]
    fraction: float
    seeds: int

    @property
    def parts(self) -> list[PlannedRun]:
        """The runs: one without hostile clients, then one for each attack."""
        chosen = tuple(seeds_of(self.experiment, self.seeds))
        hostile = {name: under_attack(self.experiment, name, self.fraction) for name in (CLEAN, *self.names)}
        return [PlannedRun(name, (), with_rules(described, ["recipe"]), chosen) for name, described in hostile.items()]

    def document(self) -> dict[str, Any]:
        """Return it as its file holds it."""
        experiment = self.experiment.model_dump(mode="json", exclude_none=True)
        return {"attacks": list(self.names), "fraction": self.fraction, "seeds": self.seeds, "experiment": experiment}


def is_attack(folder: Path) -> bool:
    """Whether a folder holds attacks."""
    return is_file(folder / ATTACK_FILE)


def read_attack(folder: Path) -> Attack:
    """Return the attacks that a folder holds; none of the code that they name is run."""
    path = folder / ATTACK_FILE
    document = read_plan(path)
    try:
        described, names = document["experiment"], attack_names(list(map(str, document["attacks"])))
        fraction, seeds = float(document["fraction"]), int(document["seeds"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: is cut off or changed ({error!r}); allowed: the file as it was written") from None
    return Attack(build(described, str(path), reading=True), tuple(names), fraction, seeds)


def attack_folder(attack: Attack, out: Path | None) -> Path:
    """Return the folder of attacks, new or with the same attacks in it; anything else is refused."""
    folder = unnamed_folder(attack.experiment, attack.experiment.name) if out is None else own_folder(out, "--out")
    if is_attack(folder):
        changed = differing(read_attack(folder).document(), attack.document())
        if changed is not None:
            raise UserError(
                f"--out: {folder} holds other attacks, which differ in {changed}; allowed: a new folder, or "
                f"`steelyard resume {folder}`"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise UserError(f"--out: {folder} is not empty; allowed: a new folder, which gets one run for each attack")
    else:
        write_plan(folder / ATTACK_FILE, attack.document())
    return folder


def run_attack(folder: Path, how: How = ALONE) -> Attack:
    """Run the attacks of a folder: what is done stays, what was stopped or killed goes on to the same bits."""
    attack = read_attack(folder)
    how.agree(folder, attack.experiment)
    with closing(held(folder)):
        try:
            for number, part in enumerate(attack.parts):
                if finished(folder / part.folder):
                    continue
                if number:
                    how.tell(f"{part.folder}: attack {number} of {len(attack.names)}")
                run_or_resume(part, folder, how)
        except KeyboardInterrupt:
            raise Stopped(folder) from None
    return attack
