"""Rules as words: what `--rules` and a comparison from Python take, such as "LD>DS>MD", "guarded" or "clip(EQ)"."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steelyard.algorithms.catalogue import load_plugins as load_algorithms
from steelyard.algorithms.settings import AlgorithmSettings, parse_algorithm
from steelyard.defence.settings import DEFENCES
from steelyard.errors import UserError, brief, listed, nearest
from steelyard.experiment.description import Description
from steelyard.experiment.federations import FederationSettings, federation_label, plain
from steelyard.settings import read_value, validated
from steelyard.weighing import criteria as registry
from steelyard.weighing.rule import LIMITS, WeighingSettings, parse_priority
from steelyard.weighing.table import read_capacity

STRATEGIES = ("online", "greedy", "bandit")
WORDS = (
    *(*STRATEGIES, "budget(20)", "fedavg", "adafed", "adafed-weights", "mean", "product", "power(VP)^3"),
    *("weighted-mean(DS=2,LD=1)", "owa(DS,LD;most)", "choquet(DS,LD;FILE)", "fitted(RULE)", "RULE/max", "RULE/rank"),
    *("clip(RULE)", "median(RULE)", "trimmed-mean(RULE)", "multi-krum(RULE)", "centred-clip(RULE)"),
    *(
        "geometric-median(RULE)",
        "fltrust(RULE)",
        "capped(RULE;bound=3;max_shares=2)",
        "guarded",
        "server-only",
        "recipe",
    ),
    *("scaffold", "fedprox(mu=0.01)", "feddyn", "fednova", "fedavgm", "fedadam", "fedyogi", "fedexp", "ALGORITHM+RULE"),
)
_EXAMPLES = {
    "weighted-mean": "a weight for each criterion, as in weighted-mean(DS=2,LD=1)",
    "owa": "a quantifier or a weight for each rank, as in owa(DS,LD;most) or owa(DS,LD;0.7,0.3)",
    "choquet": "a TOML file with the capacity, as in choquet(DS,LD;capacity.toml)",
}
_LONGEST = 200


def parse_rules(texts: Sequence[str], experiment: Description) -> dict[str, FederationSettings]:
    """Read rules such as "DS", "LD>DS>MD", "online(LD>DS>MD)@20", "scaffold", "fedprox(mu=0.1)+LD>DS", separated by
    commas or given one by one.

    What each word means is in docs/experiments.md. The recipe's criteria and plugins are the frame.
    """
    if experiment.weighing.plugins:
        registry.load_plugins(experiment.weighing.plugins)
    if experiment.algorithm.plugins:
        load_algorithms(experiment.algorithm.plugins)
    found: dict[str, FederationSettings] = {}
    for text in texts:
        for word in _split(text):
            if len(word) > _LONGEST:
                raise UserError(f"--rules: got {brief(word)}; allowed: rules of at most {_LONGEST} characters")
            if word == "recipe":
                found.update(experiment.rules())
            elif word in experiment.rules():
                found[word] = experiment.rules()[word]
            else:
                name, settings = _rule(word, experiment)
                found[name] = settings
    if not found:
        raise UserError(f"--rules: got nothing; allowed: orders such as DS>LD>MD, or {listed(WORDS)}")
    return found


def _split(text: str, at: str = ",") -> list[str]:
    """Split at commas, or another mark, outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == at and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def _rule(word: str, experiment: Description) -> tuple[str, FederationSettings]:
    """Read "RULE", "ALGORITHM" (with sizes as weights) or "ALGORITHM+RULE"; without an algorithm, the experiment's."""
    first, *rest = _split(word, "+")
    algorithm = parse_algorithm(first) if word != "fedavg" else None
    rule = word if algorithm is None else "+".join(rest) or "DS"
    given = dict(_described(rule, experiment))
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


def _described(word: str, experiment: Description) -> Mapping[str, Any]:
    base = experiment.weighing
    if word == "fedavg":
        return {"criteria": ["DS"], "name": "fedavg"}
    if word == "server-only":
        return {"trained_by": "server"}
    if word in ("adafed", "adafed-weights"):
        return _adafed(word, experiment)
    if word == "guarded":
        return _guarded(experiment)
    if wrapped := re.fullmatch(r"fitted\((.*)\)", word):
        return _fitted(wrapped[1].strip(), experiment)
    if defended := re.fullmatch(rf"({'|'.join((*DEFENCES, 'capped'))})\((.*)\)", word):
        return _defended(defended[1], defended[2].strip(), experiment)
    if divided := re.fullmatch(r"(.+)/(share|max|rank)", word):
        return _normalised(divided[1], divided[2], experiment)
    match = re.fullmatch(r"([a-z-]+)(?:\(([^()]*)\))?(?:@(\d+))?(?:\^([0-9.]+))?", word)
    if match is None:
        return _ordered(word, base)
    kind, inside, limit, power = match.groups()
    if kind == "budget" and inside is not None and inside.isdigit():
        return {**_ordered(None, base), "adjust": {"strategy": "online", "budget": int(inside)}, "name": word}
    if kind in STRATEGIES:
        adjust = {"strategy": kind} if limit is None else {"strategy": kind, "budget": int(limit)}
        return {**_ordered(inside, base), "adjust": adjust}
    if kind in ("weighted-mean", "owa", "choquet"):
        return _with_parameters(kind, inside or "", word)
    if kind in ("mean", "product", "power"):
        criteria = list(base.criteria) if inside is None else [part.strip() for part in inside.split(",")]
        for name in criteria:
            _known(name, word)
        return {"criteria": criteria, "score": kind, **({} if power is None else {"power": _number(power, word)})}
    raise UserError(f"--rules: got '{word}'{nearest(word, WORDS)}; allowed: criteria, orders of them, {listed(WORDS)}")


def _unnamed(word: str, experiment: Description) -> dict[str, Any]:
    """Read a rule that is a part of another, which then names itself by what it does."""
    own = experiment.rules().get(word)
    given = dict(_described(word, experiment)) if own is None else plain(own)
    return {name: value for name, value in given.items() if name not in ("name", "plugins", "algorithm")}


def _normalised(rule: str, how: str, experiment: Description) -> dict[str, Any]:
    """Read "RULE/max": the rule with its criteria brought to [0, 1] in another way."""
    given = _unnamed(rule, experiment)
    if given.get("trained_by") == "server":
        raise UserError(f"--rules: got '{rule}/{how}'; allowed: server-only as it is, since it weighs nobody")
    return {**given, "normalise": how}


def _fitted(inside: str, experiment: Description) -> dict[str, Any]:
    """Read "fitted(RULE)" or "fitted(RULE;steps=20;rate=1;shrink=0.1)"; RULE itself may hold a semicolon."""
    rule, *assignments = _split(inside, ";") or [""]
    given = _unnamed(rule, experiment) if rule else {}
    if not rule or "fit" in given:
        raise UserError(f"--rules: got 'fitted({inside})'; allowed: a rule inside that is not fitted, as in fitted(EQ)")
    fit: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"--rules: got 'fitted({inside})'; allowed: fitted(RULE;steps=10;rate=3;shrink=0)")
        fit[name.strip()] = read_value(value.strip())
    named = f"fitted({rule}{';' if fit else ''}{';'.join(assignments)})"
    return {**given, "fit": fit, "name": named}


def _guarded(experiment: Description) -> dict[str, Any]:
    """Read "guarded", the rule recommended where clients may be hostile: weights that nobody can talk up, a cap, and
    centred clipping. Without rows of the server's own to measure on, all clients have an equal say.
    """
    measured = not experiment.offers().lacks_test_set
    worth = "VE" if experiment.regression else "VP"
    weights = {"criteria": [worth], "score": "power", "power": 3.0} if measured else {"criteria": ["EQ"]}
    return {**weights, "max_shares": 2.0, "defence": {"rule": "centred-clip"}, "name": "guarded"}


def _defended(kind: str, inside: str, experiment: Description) -> dict[str, Any]:
    """Read "median(RULE)", "clip(RULE;quantile=0.3)", "median(RULE;mix)", "capped(RULE;bound=3;max_shares=2)"."""
    rule, *assignments = _split(inside, ";") or [""]
    given = _unnamed(rule, experiment) if rule else {}
    if not rule or (kind != "capped" and "defence" in given):
        raise UserError(
            f"--rules: got '{kind}({inside})'; allowed: a rule inside without a defence of its own, as in {kind}(EQ)"
        )
    fields: dict[str, Any] = {}
    for assignment in assignments:
        name, _, value = (part.strip() for part in assignment.partition("="))
        if kind == "capped" and name not in LIMITS:
            raise UserError(f"--rules: got 'capped({inside})'; allowed: {listed(LIMITS)}, each with a number")
        fields[name] = read_value(value) if value else True
    named = f"{kind}({inside})"
    return {**given, **(fields if kind == "capped" else {"defence": {"rule": kind, **fields}}), "name": named}


def _with_parameters(kind: str, inside: str, word: str) -> dict[str, Any]:
    """Read "weighted-mean(DS=2,LD=1)", "owa(DS,LD;most)", "owa(DS,LD;0.7,0.3)", "choquet(DS,LD;capacity.toml)"."""
    listed_criteria, _, parameter = (part.strip() for part in inside.partition(";"))
    pairs = [part.partition("=") for part in listed_criteria.split(",")]
    names = [name.strip() for name, _, _ in pairs]
    for name in names:
        _known(name, word)
    if bool(parameter) == (kind == "weighted-mean"):
        raise UserError(f"--rules: got '{word}'; allowed: {_EXAMPLES[kind]}")
    given: dict[str, Any] = {"criteria": names, "score": kind, "name": word}
    if kind == "weighted-mean":
        given["weights"] = [_number(value.strip() or "1", word) for _, _, value in pairs]
    elif kind == "owa":
        numbers = re.fullmatch(r"[0-9.,\s]+", parameter) and parameter.count(",") + 1 == len(names)
        given |= {"weights": [_number(v, word) for v in parameter.split(",")]} if numbers else {"quantifier": parameter}
    else:
        given["capacity"] = read_capacity(Path(parameter), "--rules")
    return given


def _ordered(text: str | None, base: WeighingSettings) -> dict[str, Any]:
    """Read an order; over the recipe's own criteria it keeps their listed order, in which others are tried."""
    if text is None or not text.strip():
        return {"criteria": list(base.criteria), **({"priority": base.priority} if base.priority else {})}
    names = [part.strip() for part in text.split(">")]
    for name in names:
        _known(name, text)
    if len(set(names)) != len(names):
        raise UserError(f"--rules: got '{text}'; allowed: each criterion once")
    if sorted(names) == sorted(base.criteria) and len(names) > 1:
        parse_priority(">".join(names), base.criteria)
        return {"criteria": list(base.criteria), "priority": ">".join(names)}
    return {"criteria": names}


def _known(name: str, word: str) -> None:
    table = registry.known()
    if name not in table:
        raise UserError(
            f"--rules: '{word}' names no rule or criterion '{name}'{nearest(name, [*table, *WORDS])}; "
            f"allowed: criteria ({listed(table)}), orders of them such as DS>LD>MD, {listed(WORDS)}"
        )


def _adafed(word: str, experiment: Description) -> dict[str, Any]:
    regression = experiment.regression
    given: dict[str, Any] = {"criteria": ["VE" if regression else "VP"], "when_zero": "keep", "name": word}
    if word == "adafed":
        given["loss"] = {"adapt": "barron" if regression else "class-f1"}
    return given


def _number(text: str, word: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"--rules: got '{word}'; allowed: a number, as in power(VP)^3 or weighted-mean(DS=2,LD=1)"
        ) from None
