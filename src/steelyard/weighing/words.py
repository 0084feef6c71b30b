"""Rules as words, written and read: "DS", "LD>DS>MD/max", "owa(DS,LD;most)", "capped(VP;max_shares=2)", "guarded".

A word is read within a frame: the criteria that may be named, and those that a word without any takes. What each word
means is in docs/reference/experiments.md.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.settings import read_named, read_value
from steelyard.defence.robust import DefenceSettings
from steelyard.weighing import scores
from steelyard.weighing.fact import FACT, read_fact
from steelyard.weighing.policy import known as policies
from steelyard.weighing.rule import WeighingSettings
from steelyard.weighing.scores import parse_priority
from steelyard.weighing.weights import LIMITS

STRATEGIES = ("online", "greedy", "bandit")
WORDS: Mapping[str, str] = {
    "online": "keep the order of the best test so far; also online(LD>DS)@20: at most 20 testing rounds",
    "greedy": "the same, which improves an order step by step",
    "bandit": "the same, which tries orders by how they did before",
    "online-apart": "online, where half of the clients choose the order and the others report",
    "fedavg": "DS alone, under its usual name",
    "adafed": "AdaFed: weights by performance on the server's rows, and a loss that adapts",
    "adafed-weights": "AdaFed without its loss",
    "mean": "the mean of the experiment's criteria; also mean(DS,LD)",
    "product": "their product: a client must do well on each",
    "fact(age=65..)": "what is known of the device or the user: fact(battery), fact(country=IT), ...",
    "power(VP)^3": "a criterion, or the product of several, to this power",
    "weighted-mean(DS=2,LD=1)": "the mean with a weight for each criterion",
    "owa(DS,LD;most)": "an ordered weighted average: by a quantifier, or a weight for each rank",
    "choquet(DS,LD;FILE)": "Choquet's integral: a file says what each set of criteria is worth",
    "fitted(RULE)": "weights fitted to the server's rows, which begin with RULE",
    "RULE/max": "criteria divided by the largest of the cohort, in place of their sum",
    "RULE/rank": "criteria by their rank in the cohort",
    "clip(RULE)": "no update counts longer than a radius",
    "median(RULE)": "the weighted median of each parameter",
    "trimmed-mean(RULE)": "the mean of each parameter without its ends",
    "multi-krum(RULE)": "only the updates that lie nearest to the others",
    "geometric-median(RULE)": "the point with the least sum of distances to the updates",
    "fltrust(RULE)": "updates count as far as they point where the server's own does",
    "spectral(RULE)": "without clients that stand out where the updates differ most",
    "capped(RULE;max_shares=2)": "caps and floors of weights, bounds of what clients say of themselves",
    "guarded": "a rule against malicious clients: cosine similarity (RD), a weight cap, and a spectral filter",
    "server-only": "no client trains: the server trains on its own samples",
    "feddisco(a=0.5,b=0.1)": "a policy with parameters",
    "POLICY": "a published weighting method, by name",
}
"""The words that a rule may hold beside criteria and policies, and what each makes of it."""
_AFTER = "@N after online, greedy or bandit alone, ^K after power(...) alone, one of them"
_EXAMPLES = {
    "weighted-mean": "a weight for each criterion, as in weighted-mean(DS=2,LD=1)",
    "owa": "a quantifier or a weight for each rank, as in owa(DS,LD;most) or owa(DS,LD;0.7,0.3)",
    "choquet": "a TOML file with the capacity, as in choquet(DS,LD;capacity.toml)",
}


FEW = 6
"""Criteria that an error line names."""


@dataclass(frozen=True)
class Frame:
    """What a rule's words are read within."""

    known: Collection[str] | None
    """The criteria that may be named; None: any."""
    base: WeighingSettings
    """The criteria, and their order, of a word that names none."""
    named: Mapping[str, WeighingSettings] = field(default_factory=dict[str, WeighingSettings])
    """Rules that have names of their own."""
    server_rows: bool = False
    """Whether the server has rows to measure on."""
    trains: bool = False
    """Whether the server can also train on them."""
    worth: str = "VP"
    """The criterion by which a model does well on the server's rows."""
    option: str = "--rules"
    """Who asks, for error lines."""
    further: Collection[str] = ()
    """Words beyond rules that the option takes, for error lines."""

    def refused(self, word: str, allowed: str) -> UserError:
        """Return the error line of a word that is not understood."""
        return UserError(f"{self.option}: got '{word}'; allowed: {allowed}")

    def names(self, name: str) -> bool:
        """Whether a criterion may be named: one that is known, or a fact."""
        return self.known is None or name in self.known or read_fact(name) is not None

    def check(self, name: str, word: str) -> None:
        """Refuse a criterion that may not be named."""
        if self.known is not None and not self.names(name):
            close = nearest(name, [*self.known, *WORDS, *self.further])
            few = f"The criteria here: {listed(self.known)}. " if len(self.known) <= FEW else ""
            raise UserError(
                f"{self.option}: '{word}' names no rule or criterion '{name}'{close}. {few}All: steelyard list rules"
            )


def split(text: str, at: str = ",") -> list[str]:
    """Split at commas, or another mark, outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == at and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


SYNONYMS = {
    "krum": "multi-krum",
    "multikrum": "multi-krum",
    "fedmedian": "median",
    "fedtrimmedavg": "trimmed-mean",
    "qfedavg": "q-fedavg",
}
"""What Flower and papers call rules, and the words for them here."""


def respelt(text: str, known: Iterable[str]) -> str:
    """Return a rule with its names as they are written here: "FedAvg" is "fedavg", "krum" is "multi-krum(EQ)".

    A robust rule that names no weights is that of its paper, with equal ones. Files and values stay as they are.
    """
    names = {*known, *policies(), *(word.partition("(")[0] for word in WORDS)}
    folded = {**SYNONYMS, **{name.lower(): name for name in names}}
    rule = re.match(rf"(?:{FACT}|[^;=])*", text)[0]  # pyright: ignore[reportOptionalSubscript]
    rest = text[len(rule) :]
    found = re.sub(rf"{FACT}|[A-Za-z][\w-]*", lambda word: _named(word[0], names, folded), rule)
    robust = not rest and found in DefenceSettings.kinds and found not in ("none", "clip", *known)
    return f"{found}(EQ)" if robust else found + rest


def _named(word: str, names: Collection[str], folded: Mapping[str, str]) -> str:
    return word if word in names else folded.get(word.lower(), word)


def show_priority(order: Sequence[int], criteria: Sequence[str]) -> str:
    """Write an order as "DS>LD>MD"."""
    return ">".join(criteria[i] for i in order)


def label(settings: WeighingSettings) -> str:
    """Name a rule by what it does, unless the user named it.

    "DS", "DS>LD>MD", "mean(DS,LD)", "online(DS>LD>MD)", "online(DS>LD>MD)@20" with a budget, "VP+class-f1",
    "DS>LD>MD/max" where criteria are divided by the best, "fitted(DS)", "server-only".
    """
    if settings.name is not None:
        return settings.name
    takes = scores.known()[settings.score].takes
    if settings.policy is not None:
        text = settings.policy.label
    elif settings.score == "prioritized" or (len(settings.criteria) == 1 and "power" not in takes):
        text = show_priority(settings.order(), settings.criteria)
    elif settings.power not in (None, 1):
        text = f"{settings.score}({','.join(settings.criteria)})^{settings.power:g}"
    else:
        text = f"{settings.score}({_scored(settings)})"
    if settings.trained_by == "server":
        return "server-only"
    if settings.normalise != "share":
        text = f"{text}/{settings.normalise}"
    if settings.adjust is not None:
        limit = "" if settings.adjust.budget is None else f"@{settings.adjust.budget}"
        apart = "-apart" if settings.adjust.report == "apart" else ""
        text = f"{settings.adjust.strategy}{apart}({text}){limit}"
    if settings.fit is not None:
        text = f"fitted({';'.join([text, *_assigned(settings.fit.model_dump(exclude_defaults=True))])})"
    limits = {name: value for name in LIMITS if (value := getattr(settings, name)) is not None}
    if limits or settings.floors:
        floors = {f"floors.{client}": floor for client, floor in settings.floors.items()}
        text = f"capped({';'.join([text, *_assigned({**limits, **floors})])})"
    if (defence := settings.defence) is not None:
        given = defence.model_dump(exclude_none=True, exclude={"rule", "mix"})
        text = f"{defence.rule}({';'.join([text, *(['mix'] if defence.mix else []), *_assigned(given)])})"
    return text if settings.loss is None or settings.loss.adapt == "none" else f"{text}+{settings.loss.adapt}"


def _scored(settings: WeighingSettings) -> str:
    """Write the criteria of a score with its weights or quantifier; of a capacity, the criteria alone."""
    names = ",".join(settings.criteria)
    if settings.score == "weighted-mean" and settings.weights is not None:
        return ",".join(_assigned(dict(zip(settings.criteria, settings.weights, strict=True))))
    if settings.score != "owa":
        return names
    return f"{names};{settings.quantifier or ','.join(f'{weight:g}' for weight in settings.weights or ())}"


def _assigned(values: Mapping[str, float]) -> list[str]:
    """Write fields as words do, "max_shares=2"."""
    return [f"{name}={value:g}" for name, value in values.items()]


def read_rule(word: str, frame: Frame) -> dict[str, Any]:
    """Return the settings that a word stands for, as they would be in an experiment file."""
    word = respelt(word, frame.known or ())
    if frame.known is not None and all(frame.names(part.strip()) for part in word.split(">")):
        return _ordered(word, frame)
    if word == "fedavg":
        return {"criteria": ["DS"], "name": "fedavg"}
    if word == "server-only":
        return {"trained_by": "server"}
    if word in ("adafed", "adafed-weights"):
        return _adafed(word, frame)
    if word == "guarded":
        return _guarded(frame)
    if word.partition("(")[0].strip() in policies():
        return {"policy": read_named(word, frame.option)}
    if wrapped := re.fullmatch(r"fitted\((.*)\)", word):
        return _fitted(wrapped[1].strip(), frame)
    if defended := re.fullmatch(rf"({'|'.join((*DefenceSettings.kinds, 'capped'))})\((.*)\)", word):
        return _defended(defended[1], defended[2].strip(), frame)
    if divided := re.fullmatch(r"(.+)/(share|max|rank)", word):
        return _normalised(divided[1], divided[2], frame)
    form = rf"(?!fact\()([a-z-]+)(?:\(((?:{FACT}|[^()])*)\))?(?:@(\d+))?(?:\^([0-9.e+-]+))?"
    match = re.fullmatch(form, word)
    if match is None:
        left = set(re.sub(FACT, "", word))
        if left & set("@^"):
            raise frame.refused(word, _AFTER)
        if left & set("()"):
            raise _unknown(word, frame)
        return _ordered(word, frame)
    kind, inside, limit, power = match.groups()
    scoring = scores.known().get(kind)
    takes = () if scoring is None else scoring.takes
    if (limit and kind.removesuffix("-apart") not in STRATEGIES) or (power and "power" not in takes):
        raise frame.refused(word, _AFTER)
    strategy = kind.removesuffix("-apart")
    if strategy in STRATEGIES:
        adjust: dict[str, Any] = {"strategy": strategy}
        adjust |= {} if limit is None else {"budget": int(limit)}
        adjust |= {} if kind == strategy else {"report": "apart"}
        given = _unnamed(inside, frame) if inside and "/" in inside else _ordered(inside, frame)
        return {**given, "adjust": adjust}
    if kind in ("weighted-mean", "owa", "choquet"):
        return _with_parameters(kind, inside or "", word, frame)
    if scoring is not None and kind != "prioritized":
        criteria = list(frame.base.criteria) if inside is None else split(inside)
        for name in criteria:
            frame.check(name, word)
        return {
            "criteria": criteria,
            "score": kind,
            **({} if power is None else {"power": _number(power, word, frame)}),
        }
    if frame.known is None and inside is limit is power is None:
        return _ordered(word, frame)
    raise _unknown(word, frame)


def _unknown(word: str, frame: Frame) -> UserError:
    heads = dict.fromkeys(each.partition("(")[0] for each in (*WORDS, *frame.further))
    close = nearest(word.partition("(")[0], heads)
    return UserError(f"{frame.option}: '{word}' is no rule{close}. All words: steelyard list rules")


def _unnamed(word: str, frame: Frame) -> dict[str, Any]:
    """Read a rule that is a part of another, which then names itself by what it does."""
    given = dict(frame.named[word] if word in frame.named else read_rule(word, frame))
    left = ("name", "plugins", "algorithm")
    return {name: value for name, value in given.items() if value is not None and name not in left}


def _normalised(rule: str, how: str, frame: Frame) -> dict[str, Any]:
    """Read "RULE/max": the rule with its criteria brought to [0, 1] in another way."""
    given = _unnamed(rule, frame)
    if given.get("normalise", "share") != "share" or re.search(r"/(share|max|rank)$", rule):
        raise frame.refused(f"{rule}/{how}", "one of /share, /max, /rank")
    if given.get("trained_by") == "server":
        raise UserError(f"{frame.option}: got '{rule}/{how}'; allowed: server-only alone, since it weighs no clients")
    return {**given, "normalise": how}


def _fitted(inside: str, frame: Frame) -> dict[str, Any]:
    """Read "fitted(RULE)" or "fitted(RULE;steps=20;rate=1;shrink=0.1)"; RULE itself may hold a semicolon."""
    rule, *assignments = split(inside, ";") or [""]
    given = _unnamed(rule, frame) if rule else {}
    if not rule or "fit" in given:
        raise UserError(
            f"{frame.option}: got 'fitted({inside})'; allowed: a rule inside that is not fitted, as in fitted(EQ)"
        )
    fit: dict[str, Any] = {}
    for name, value in _fields(assignments, f"fitted({inside})", frame):
        if not value:
            raise frame.refused(f"fitted({inside})", "fitted(RULE;steps=10;rate=3;shrink=0)")
        fit[name] = read_value(value)
    named = f"fitted({rule}{';' if fit else ''}{';'.join(assignments)})"
    return {**given, "fit": fit, "name": named}


def _fields(assignments: Sequence[str], word: str, frame: Frame) -> Iterator[tuple[str, str]]:
    """Yield the fields of a rule, "steps=20", with their values; one that comes twice is refused."""
    pairs = [tuple(part.strip() for part in assignment.partition("=")) for assignment in assignments]
    for name, _, value in pairs:
        if [each[0] for each in pairs].count(name) > 1:
            raise frame.refused(word, f"{name} once")
        yield name, value


def _guarded(frame: Frame) -> dict[str, Any]:
    """Read "guarded", a rule against malicious clients: weights that nobody can talk up, a cap, and a spectral check.

    A server that can train on its own rows weighs by the direction of what it learns, one that can only test weighs by
    how models do; without rows the track record decides.
    """
    given: dict[str, Any] = {"criteria": ["TR"]}
    if frame.trains:
        given = {"criteria": ["RD"]}
    elif frame.server_rows:
        given = {"criteria": [frame.worth], "score": "power", "power": 3.0}
    return {**given, "max_shares": 1.5, "defence": {"rule": "spectral"}, "name": "guarded"}


def _defended(kind: str, inside: str, frame: Frame) -> dict[str, Any]:
    """Read "median(RULE)", "clip(RULE;quantile=0.3)", "median(RULE;mix)", "capped(RULE;bound=3;max_shares=2)"."""
    rule, *assignments = split(inside, ";") or [""]
    given = _unnamed(rule, frame) if rule else {}
    if not rule or (kind != "capped" and "defence" in given):
        raise frame.refused(f"{kind}({inside})", f"a rule inside without a defence of its own, as in {kind}(EQ)")
    fields: dict[str, Any] = {}
    for name, value in _fields(assignments, f"{kind}({inside})", frame):
        if kind == "capped" and name.startswith("floors."):
            fields.setdefault("floors", {})[name.removeprefix("floors.")] = read_value(value)
            continue
        if kind == "capped" and name not in LIMITS:
            allowed = listed((*LIMITS, "floors.CLIENT"))
            raise frame.refused(f"capped({inside})", f"{allowed}, each with a number")
        fields[name] = read_value(value) if value else True
    named = f"{kind}({inside})"
    return {**given, **(fields if kind == "capped" else {"defence": {"rule": kind, **fields}}), "name": named}


def _with_parameters(kind: str, inside: str, word: str, frame: Frame) -> dict[str, Any]:
    """Read "weighted-mean(DS=2,LD=1)", "owa(DS,LD;most)", "owa(DS,LD;0.7,0.3)", "choquet(DS,LD;capacity.toml)"."""
    listed_criteria, parameter, *_ = (*split(inside, ";"), "", "")
    pairs = [(*split(part, "="), "") for part in split(listed_criteria)]
    names = [name for name, *_ in pairs]
    for name in names:
        frame.check(name, word)
    if bool(parameter) == (kind == "weighted-mean"):
        raise UserError(f"{frame.option}: got '{word}'; allowed: {_EXAMPLES[kind]}")
    given: dict[str, Any] = {"criteria": names, "score": kind, "name": word}
    if kind == "weighted-mean":
        given["weights"] = [_number(value or "1", word, frame) for _, value, *_ in pairs]
    elif kind == "owa":
        numbers = re.fullmatch(r"[0-9.,\s]+", parameter) and parameter.count(",") + 1 == len(names)
        given |= (
            {"weights": [_number(v, word, frame) for v in parameter.split(",")]}
            if numbers
            else {"quantifier": parameter}
        )
    else:
        given["capacity"] = scores.read_capacity_file(Path(parameter), frame.option)
    return given


def _ordered(text: str | None, frame: Frame) -> dict[str, Any]:
    """Read an order; over the recipe's own criteria it keeps their listed order, in which others are tried."""
    base = frame.base
    if text is None or not text.strip():
        return {"criteria": list(base.criteria), **({"priority": base.priority} if base.priority else {})}
    names = [part.strip() for part in text.split(">")]
    if "" in names:
        raise frame.refused(text, "a name between two signs, as in DS>LD>MD")
    for name in names:
        frame.check(name, text)
    if len(set(names)) != len(names):
        raise UserError(f"{frame.option}: got '{text}'; allowed: each criterion once")
    if sorted(names) == sorted(base.criteria) and len(names) > 1:
        parse_priority(">".join(names), base.criteria)
        return {"criteria": list(base.criteria), "priority": ">".join(names)}
    return {"criteria": names}


_ADAPTED = {"VP": "class-f1", "VE": "barron"}
"""How AdaFed adapts the loss, by what its weights are measured by; Cox's loss has nothing to adapt."""


def _adafed(word: str, frame: Frame) -> dict[str, Any]:
    given: dict[str, Any] = {"criteria": [frame.worth], "when_zero": "keep", "name": word}
    if word == "adafed" and frame.worth in _ADAPTED:
        given["loss"] = {"adapt": _ADAPTED[frame.worth]}
    return given


def _number(text: str, word: str, frame: Frame) -> float:
    try:
        return float(text)
    except ValueError:
        raise UserError(
            f"{frame.option}: got '{word}'; allowed: a number, as in power(VP)^3 or weighted-mean(DS=2,LD=1)"
        ) from None
