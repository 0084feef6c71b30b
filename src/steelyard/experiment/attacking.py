"""An experiment under attack: a share of its clients hostile in one of the ways that are known by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steelyard.errors import UserError, listed, nearest
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build

CLEAN = "clean"
INFLATION = "inflation"
ATTACKS: Mapping[str, Mapping[str, Any]] = {
    "label-flip": {"kind": "labels-flipped", "how": "pairs"},
    "sign-flip": {"kind": "reversed", "amount": 1},
    "scaled-reversal": {"kind": "reversed", "amount": 10},
    "gaussian": {"kind": "gaussian"},
    "alie": {"kind": "alie"},
    "ipm": {"kind": "ipm"},
    "min-max": {"kind": "min-max"},
    "free-rider": {"kind": "free-rider"},
    "backdoor": {"kind": "backdoor"},
    INFLATION: {"kind": "claims-criteria"},
}
"""By name: the flaw that makes a client hostile; docs/defence.md has the formulas."""

RULES = (
    *("fedavg", "EQ", "clip(EQ)", "median(EQ)", "trimmed-mean(EQ)", "multi-krum(EQ)", "centred-clip(EQ)"),
    *("geometric-median(EQ)", "guarded"),
)
"""What `steelyard attack` compares unless told otherwise; FLTrust joins where the server has rows of its own."""


def attack_names(texts: Sequence[str]) -> list[str]:
    """Read attacks such as "alie" or "sign-flip+inflation", with commas or one by one; "all" is each of them lying."""
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    found: dict[str, None] = {}
    for word in words:
        if word == "all":
            found |= dict.fromkeys(name if name == INFLATION else f"{name}+{INFLATION}" for name in ATTACKS)
            continue
        name, _, more = word.partition("+")
        if name not in ATTACKS or more not in ("", INFLATION) or (more and name == INFLATION):
            raise UserError(
                f"--attack: got '{word}'{nearest(name, ATTACKS)}; allowed: {listed(ATTACKS)}, each but the last also "
                f"as NAME+{INFLATION}, or all"
            )
        found[word] = None
    if not found:
        raise UserError(f"--attack: got nothing; allowed: {listed(ATTACKS)}, or all")
    return list(found)


def under_attack(experiment: Description, attack: str, fraction: float) -> Description:
    """Return the experiment with this share of its clients hostile, drawn by the seed; "clean" leaves it as it is."""
    if attack == CLEAN:
        return experiment
    if not 0 < fraction < 0.5:
        raise UserError(
            f"--fraction: got {fraction:g}; allowed: more than 0, less than 0.5 (share of the clients; against half of "
            "them no rule can hold)"
        )
    document = experiment.model_dump(mode="json", exclude_none=True)
    if "flaws" not in document:
        raise UserError(
            f"attack: experiments of kind '{document.get('kind')}' know no hostile clients; allowed: learning"
        )
    if experiment.regression:
        raise UserError("attack: this experiment is a regression, and accuracy is what is shown; allowed: classes")
    name, _, more = attack.partition("+")
    document["flaws"] = [*document["flaws"], {**ATTACKS[name], "pick": "random", "share": fraction}]
    if more:
        document["flaws"].append({**ATTACKS[INFLATION], "pick": "same"})
    return build(document, "attack")


def rules_for(experiment: Description) -> list[str]:
    """Return the rules to compare where the user names none: those that this experiment's server can follow."""
    return list(RULES) if experiment.offers().lacks_test_set else [*RULES[:-1], "fltrust(EQ)", RULES[-1]]
