"""Rules and algorithms as words: what `--rules` and a comparison from Python take, such as "LD>DS>MD" or "scaffold"."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.algorithms.catalogue import known as algorithms
from steelyard.algorithms.catalogue import load_plugins as load_algorithms
from steelyard.algorithms.settings import AlgorithmSettings, parse_algorithm
from steelyard.base.errors import UserError, brief, listed
from steelyard.base.logs import logger
from steelyard.base.settings import validated
from steelyard.experiment.description import Description
from steelyard.experiment.federations import FederationSettings, federation_label, plain, put_federations
from steelyard.weighing import criterion as registry
from steelyard.weighing.policy import known as policies
from steelyard.weighing.words import WORDS, Frame, read_rule, split

_log = logger(__name__)

_FURTHER = (
    *("recipe", "all", "scaffold", "fedprox(mu=0.01)", "feddyn", "fednova", "fedavgm", "fedadam", "fedyogi", "fedexp"),
    *("local-only", "fine-tuned", "ditto", "apfl", "fedrep", "fedbn", "fedala", "fedfomo", "flexlora"),
    "ALGORITHM+RULE",
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
    for text in texts:
        for word in split(text):
            if len(word) > _LONGEST:
                raise UserError(f"--rules: got {brief(word)}; allowed: rules of at most {_LONGEST} characters")
            if word == "recipe":
                found.update(experiment.rules())
            elif word == "all":
                every, left_out = _every_rule(experiment)
                found.update(every)
            elif word in experiment.rules():
                if word in found and "recipe" not in texts:
                    raise UserError(f"--rules: '{word}' is there twice; allowed: each rule once")
                found[word] = experiment.rules()[word]
            else:
                name, settings = _rule(word, experiment)
                if found.get(name) == settings:
                    raise UserError(f"--rules: '{word}' is there twice; allowed: each rule once")
                found[name] = settings
    if not found:
        raise UserError(f"--rules: got nothing; allowed: orders such as DS>LD>MD, or {listed((*WORDS, *_FURTHER))}")
    return found, left_out


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
            document = experiment.model_dump(mode="json", exclude_none=True)
            put_federations(document, {name: settings})
            validated(type(experiment), document, "")
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
        given["algorithm"] = {**algorithm.model_dump(mode="json"), **({"plugins": plugins} if plugins else {})}
    plugs = list(experiment.weighing.plugins)
    settings = validated(FederationSettings, {**given, "plugins": plugs}, f"--rules: '{word}'")
    return federation_label(settings), settings


def _frame(experiment: Description) -> Frame:
    capabilities = experiment.capabilities()
    return Frame(
        known=registry.known(),
        base=experiment.weighing,
        named={name: plain(rule) for name, rule in experiment.rules().items()},
        server_rows=not capabilities.lacks_test_set,
        trains=not capabilities.lacks_test_set and capabilities.slopes,
        worth=experiment.worth,
        further=_FURTHER,
    )
