"""The rules of a comparison: words such as "LD>DS>MD" or "scaffold", the default ones, the experiment with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

from steelyard.algorithms.catalogue import known as algorithms
from steelyard.algorithms.catalogue import load_plugins as load_algorithms
from steelyard.algorithms.settings import AlgorithmSettings, parse_algorithm
from steelyard.base.documents import first_line
from steelyard.base.errors import UserError, brief
from steelyard.base.logs import logger
from steelyard.base.settings import validated
from steelyard.experiment.description import Description, FederationSettings, federation_label
from steelyard.experiment.loading import Ask, build, read_document
from steelyard.weighing import criterion as registry
from steelyard.weighing.policy import known as policies
from steelyard.weighing.words import WORDS, Frame, read_rule, respelt, show_priority, split

_log = logger(__name__)

_OF_EXPERIMENTS = {
    "recipe": "the experiment's own rules; also the name of one of them",
    "all": "FedAvg, every policy and every personal algorithm once",
    "ALGORITHM+RULE": "an algorithm, with the weights of a rule in place of sizes",
}
_FURTHER = (
    *("scaffold", "fedprox(mu=0.01)", "feddyn", "fednova", "fedavgm", "fedadam", "fedyogi", "fedexp"),
    *("local-only", "fine-tuned", "ditto", "apfl", "fedrep", "fedbn", "fedala", "fedfomo", "flexlora"),
    *_OF_EXPERIMENTS,
)
_LONGEST = 200


def parse_rules(texts: Sequence[str], experiment: Description) -> dict[str, FederationSettings]:
    """Return the rules that these texts name; see `rules_with_reasons`."""
    return rules_with_reasons(texts, experiment)[0]


def rules_with_reasons(
    texts: Sequence[str], experiment: Description
) -> tuple[dict[str, FederationSettings], dict[str, str]]:
    """Read rules such as "DS", "LD>DS>MD", "online(LD>DS>MD)@20", "scaffold", "fedprox(mu=0.1)+LD>DS", separated by
    commas or given one by one.

    "all" is every policy and every personal algorithm once; what of it cannot run here is returned beside the rules,
    with the reason. docs/reference/experiments.md says what each word means; the recipe's criteria and plugins are the
    frame.
    """
    if experiment.weighing.plugins:
        registry.load_plugins(experiment.weighing.plugins)
    if experiment.algorithm.plugins:
        load_algorithms(experiment.algorithm.plugins)
    found: dict[str, FederationSettings] = {}
    left_out: dict[str, str] = {}
    own, words = experiment.rules(), [word for text in texts for word in split(text)]
    for word in words:
        if len(word) > _LONGEST:
            raise UserError(f"--rules: got {brief(word)}; allowed: rules of at most {_LONGEST} characters")
        if word not in own:
            word = respelt(word, (*registry.known(), *algorithms()))
        if word == "recipe":
            found.update(own)
        elif word == "all":
            every, left_out = _every_rule(experiment)
            found.update(every)
        else:
            name, settings = (word, own[word]) if word in own else _rule(word, experiment)
            same = next((old for old, rule in found.items() if _alike(rule, settings, experiment)), None)
            if same is None:
                found[name] = settings
            elif "recipe" not in words:
                other = "" if same == word else f", as '{same}' too"
                raise UserError(f"--rules: '{word}' is there twice{other}; allowed: each rule once")
    if not found:
        raise UserError("--rules: got nothing. Give rules such as fedavg,LD>DS; all words: steelyard list rules")
    return found, left_out


def _alike(rule: FederationSettings, other: FederationSettings, experiment: Description) -> bool:
    """Whether two rules do the same, whatever their names."""
    trained = [each.algorithm or experiment.algorithm for each in (rule, other)]
    same = rule.model_copy(update={"name": other.name, "algorithm": other.algorithm})
    return trained[0] == trained[1] and other == same


def rule_words() -> list[tuple[str, str, str]]:
    """Return every word that a rule may hold, what it is, and what it makes of the rule: `steelyard list rules`."""
    words = {**WORDS, **_OF_EXPERIMENTS}
    return [
        *((each.name, "criterion", each.description) for each in registry.known().values()),
        ("LD>DS>MD", "order", "criteria by priority: each counts as far as those before it are met"),
        *((word, "rule", what) for word, what in words.items()),
        *((name, "policy", first_line(made)) for name, made in policies().items()),
        *((name, "algorithm", first_line(made)) for name, made in algorithms().items()),
    ]


def _every_rule(experiment: Description) -> tuple[dict[str, FederationSettings], dict[str, str]]:
    """Return FedAvg, Shapley values, each policy and each personal algorithm once with its defaults; and the reasons.

    What cannot run here stands among the reasons, and is said.
    """
    found: dict[str, FederationSettings] = {}
    left_out: dict[str, str] = {}
    personal = sorted(name for name, made in algorithms().items() if made.personal)
    for word in ("fedavg", "SV", *policies(), *personal):
        try:
            name, settings = _rule(word, experiment)
            experiment.changed(rules={name: settings}, where="")
        except UserError as error:
            left_out[word] = str(error)
            _log.warning(f"--rules all: without {word}: {error}")
        else:
            found[name] = settings
    return found, left_out


def _rule(word: str, experiment: Description) -> tuple[str, FederationSettings]:
    """Read "RULE", "ALGORITHM" (with sizes as weights) or "ALGORITHM+RULE"; without an algorithm, the experiment's."""
    first, *rest = split(word, "+")
    algorithm = parse_algorithm(first) if word != "fedavg" else None
    rule = word if algorithm is None else "+".join(rest) or "DS"
    given = read_rule(rule, _frame(experiment))
    if algorithm is not None and "name" in given and algorithm.name != "fedavg":
        given["name"] = f"{algorithm.label}+{given['name']}"
    if algorithm is None and experiment.algorithm.name != "fedavg":
        algorithm = AlgorithmSettings() if rule in ("fedavg", "server-only") else experiment.algorithm
    if algorithm is not None:
        plugins = experiment.algorithm.plugins
        given["algorithm"] = algorithm.model_copy(update={"plugins": plugins} if plugins else {})
    plugs = list(experiment.weighing.plugins)
    settings = validated(FederationSettings, {**given, "plugins": plugs}, f"--rules: '{word}'")
    return federation_label(settings), settings


def _frame(experiment: Description) -> Frame:
    capabilities = experiment.capabilities()
    return Frame(
        known=registry.known(),
        base=experiment.weighing,
        named=experiment.rules(),
        server_rows=not capabilities.lacks_test_set,
        trains=not capabilities.lacks_test_set and capabilities.slopes,
        worth=experiment.worth,
        further=_FURTHER,
    )


# An experiment with the rules of a comparison.


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
    return with_rules(experiment, rules, {} if given else {"store.checkpoint_every": every})


def seeds_of(experiment: Description, seeds: int) -> list[int]:
    """Return the seeds of a comparison, counted from the experiment's; refuse one that leaves nothing to compare by."""
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds: got {seeds}; allowed: a whole number from 1 to {MOST_SEEDS:,}")
    if not experiment.clients_evaluate and not experiment.reports_on_server:
        raise UserError(
            "partition.test: got 'none', which leaves nothing to compare rules by; allowed: local, held-out, or "
            "partition.server_report"
        )
    return [experiment.seed + number for number in range(seeds)]


def with_rules(experiment: Description, texts: Sequence[str], fields: Mapping[str, Any] | None = None) -> Description:
    """Return the experiment with these rules, the first as its main rule; without any, with the default ones.

    `fields` are further changes, by dotted name.
    """
    found, left_out = rules_with_reasons(texts, experiment) if texts else (default_rules(experiment), {})
    return experiment.changed({"left_out": left_out, **(fields or {})}, rules=found, where="--rules")


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
