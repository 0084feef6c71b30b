"""Comparing rules: several of them on the same cohorts, first models and partitions, over several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steelyard.base.errors import UserError
from steelyard.experiment.code import Ask
from steelyard.experiment.description import Description
from steelyard.experiment.federations import FederationSettings, put_federations
from steelyard.experiment.loading import build, read_document
from steelyard.experiment.rule_words import parse_rules, rules_with_reasons
from steelyard.experiment.running import run
from steelyard.weighing.words import show_priority

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded

MOST_SEEDS = 1_000
CHECKPOINTS = 10
"""How many checkpoints a comparison writes: each holds the models of all rules and seeds."""


def load_comparison(
    name_or_file: str | Path,
    changes: Sequence[str] = (),
    rules: Sequence[str] = (),
    seed: int | None = None,
    ask: Ask | None = None,
) -> Description:
    """Load a recipe or file as `steelyard compare` does: with the rules to compare in place of its own.

    Unless the file or a change says otherwise, right or wrong is recorded for every test sample of the last round,
    and checkpoints are written ten times a run. Plugins are loaded to know their criteria; `ask` is called before.
    """
    document = read_document(name_or_file, changes, seed, ask)
    document.setdefault("rounds", {}).setdefault("samples", True)
    experiment = build(document, str(name_or_file))
    every = max(1, experiment.rounds.count // CHECKPOINTS)
    given = "checkpoint_every" in document.get("store", {})
    return with_rules(experiment, rules, {} if given else {"checkpoint_every": every})


def compare(
    experiment: Description,
    rules: Sequence[str] = (),
    seeds: int = 1,
    *,
    out: str | Path | None = None,
    dataset: DatasetOrSeeded | None = None,
    progress: bool = False,
) -> Path:
    """Run rules side by side with `seeds` seeds, counted from the experiment's; returns the folder of the run.

    As in `load_comparison`, right or wrong is recorded for every test sample of the last round, unless the experiment
    says otherwise.
    """
    chosen = seeds_of(experiment, seeds)
    if "samples" not in experiment.rounds.model_fields_set:
        experiment = experiment.model_copy(update={"rounds": experiment.rounds.model_copy(update={"samples": True})})
    return run(with_rules(experiment, rules), out=out, seeds=chosen, dataset=dataset, progress=progress)


def seeds_of(experiment: Description, seeds: int) -> list[int]:
    """Return the seeds of a comparison, counted from the experiment's; refuse one that leaves nothing to compare by."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds: got {seeds}; allowed: a whole number from 1 to {MOST_SEEDS:,}")
    partition = experiment.model_dump().get("partition", {})
    if partition.get("test") == "none" and partition.get("server_report") == "none":
        raise UserError(
            "partition.test: got 'none', which leaves nothing to compare rules by; allowed: local, held-out, or "
            "partition.server_report"
        )
    return [experiment.seed + number for number in range(seeds)]


def with_rules(experiment: Description, texts: Sequence[str], store: Mapping[str, Any] | None = None) -> Description:
    """Return the experiment with these rules, the first as its main rule; without any, with the default ones.

    `store` are further changes, to fields of [store].
    """
    found, left_out = rules_with_reasons(texts, experiment) if texts else (default_rules(experiment), {})
    document = experiment.model_dump(mode="json", exclude_none=True) | {"left_out": left_out}
    document["store"] |= store or {}
    put_federations(document, found)
    return build(document, "--rules")


def default_rules(experiment: Description) -> dict[str, FederationSettings]:
    """Return each criterion alone, every order of up to three, and online; the recipe's own rules if it has no order.

    With more than three criteria the orders are too many to run: the recipe's own stands for them.
    """
    base = experiment.weighing
    if base.score != "prioritized" or len(base.criteria) < 2:
        return experiment.rules()
    orders = list(permutations(range(len(base.criteria)))) if len(base.criteria) <= 3 else [base.order()]
    texts = [*base.criteria, *(show_priority(order, base.criteria) for order in orders), "online"]
    return parse_rules(texts, experiment)
