"""What a node makes of an experiment that came from a server: data, never code, and never a path of the server's."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, cast

from pydantic import BaseModel

from steelyard.algorithms.settings import algorithm_table
from steelyard.base.errors import UserError, brief, listed
from steelyard.base.marks import DataFile, marked
from steelyard.base.settings import put
from steelyard.base.usercode import NotAllowed
from steelyard.clients.node import NodeConfig, Terms
from steelyard.data.sources.source import is_pattern
from steelyard.experiment.description import Description
from steelyard.experiment.loading import build, file_name, kind_of, rename_code
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.updates import Question, Task
from steelyard.privacy.planning import device_epsilon
from steelyard.privacy.settings import OWNERS_DELTA
from steelyard.weighing import criterion as registry
from steelyard.weighing.fact import read_fact

_SERVERS = ("store.folder",)
"""Paths that only the server uses."""
_ERROR = re.compile(r"\b\w*(Error|Exception|Interrupt)\b")
_FIELD = re.compile(r"^[a-z][a-z0-9_-]*([. ][a-z0-9_-]+)*(?=:)")


def agreed(document: dict[str, Any], node: NodeConfig) -> Description:
    """Return the experiment of a server as this node takes part in it; what its owner did not agree to is refused.

    Call it inside `usercode.only(node.allow)`, so that the experiment cannot name code either.
    """
    if node.trusts:
        return _with_requirements(build(document), node)
    kind = document.get("kind", "learning")
    if kind != node.kind:
        raise NotAllowed(f"kind: got {str(kind)[:40]!r}; this node takes part in '{node.kind}' only")
    rounds = document.get("rounds")
    select = cast("dict[str, Any]", rounds).get("select") if isinstance(rounds, dict) else None
    for field, table in (("facts", document.get("facts")), ("rounds.select", select)):
        if isinstance(table, dict) and "path" in table:  # Reading the settings would open it.
            raise NotAllowed(f"{field}.path: a server may not name a file of this node; allowed: leave it out")
    rename_code(document, lambda code: _own_code(code, node.allow))
    experiment = build(document)
    own: dict[str, str] = {}
    for field, path, key in _paths(experiment):
        comes_along = path.parts[:1] == ("included",) and ".." not in path.parts
        if field in _SERVERS or comes_along:
            continue
        if key not in node.files:
            wanted = f"`{key}` in the node's own config" if key else "leave it out"
            raise NotAllowed(f"{field}: a server may not name a file of this node; allowed: {wanted}")
        own[field] = str(node.files[key])
    for field, path in own.items():
        put(document, field.split("."), path, field)
    experiment = build(document) if own else experiment
    check_rows(experiment, node)
    return _with_requirements(experiment, node)


def agreed_task(task: Task, described: Mapping[str, Any], experiment: Description) -> Task:
    """Return a server's task as this node does it: with the experiment's own algorithm and its rate of that round.

    `described` is the algorithm that the task names; one that the experiment does not have is refused, as is a round
    that it does not have, since a schedule would give it any learning rate.
    """
    if not 1 <= task.round <= experiment.resolved().rounds.count:
        raise NotAllowed(f"round: got {task.round}; allowed: 1 to {experiment.resolved().rounds.count}")
    own = _agreed_algorithm(described, experiment)
    if set(task.vectors) != set(own.receives):
        got = listed(sorted(task.vectors)) or "none"
        raise NotAllowed(f"vectors: got {got}; allowed with {own.name}: {listed(own.receives) or 'none'}")
    return replace(task, algorithm=own, rate=experiment.rate(task.round))


def agreed_question(question: Question, described: Mapping[str, Any], experiment: Description) -> Question:
    """Return a server's question as this node answers it: with the experiment's own algorithm, where one is named."""
    if not described:
        return question
    own = _agreed_algorithm(described, experiment)
    return replace(question, algorithm=own, rate=experiment.rate(max(question.round, 1)))


def _agreed_algorithm(described: Mapping[str, Any], experiment: Description) -> Algorithm:
    algorithms = experiment.algorithms()
    own = next((made for made in algorithms if algorithm_table(made) == dict(described)), None)
    if own is None:
        names = listed(dict.fromkeys(made.name for made in algorithms))
        raise NotAllowed(f"algorithm: got {brief(dict(described))}; allowed: as the experiment has it ({names})")
    return own


def _with_requirements(experiment: Description, node: NodeConfig) -> Description:
    """Return an experiment that guarantees what this node's owner requires, or refuse it."""
    if node.hides and (experiment.privacy is None or experiment.privacy.aggregation is None):
        raise NotAllowed(
            "privacy.aggregation: missing, but this node's owner requires it; allowed: experiments with "
            "[privacy.aggregation]"
        )
    if node.hides:
        experiment.check_federated()  # Several rules would be several sums of the same updates.
        for name in dict.fromkeys(name for rule in experiment.rules().values() for name in rule.criteria):
            told = fact.name if (fact := read_fact(name)) else name
            if (found := registry.find(name)) and found.about == "user" and told not in node.tell:
                raise NotAllowed(
                    f"weighing.criteria: {name} tells of a person, and this node hides its updates; allowed: other "
                    f"criteria, or `tell` with '{told}' in the node's own config"
                )
    for wanted in ("local", "records"):
        if wanted in node.require and (experiment.privacy is None or getattr(experiment.privacy, wanted) is None):
            raise NotAllowed(
                f"privacy.{wanted}: missing, but this node's owner requires it; allowed: experiments with "
                f"[privacy.{wanted}]"
            )
    if node.epsilon is not None and "local" in node.require:
        _check_epsilon(experiment, node.epsilon)
    return experiment


def held_to(experiment: Description, terms: Mapping[str, Terms], clients: int) -> dict[str, float]:
    """Return what a server changes of its experiment, by dotted name, so that it keeps to the terms of all its nodes.

    Refuses an experiment that cannot be held to them, and names the node.
    """
    found: dict[str, float] = {}
    for node, own in terms.items():
        _check_daily(experiment, node, own)
        if experiment.privacy is not None and experiment.privacy.aggregation is not None:
            least, shares = experiment.rounds.min_clients, experiment.weighing.max_shares
            if own.least_cohort is not None and own.least_cohort > found.get("rounds.min_clients", least):
                if own.least_cohort > clients:
                    raise UserError(
                        f"rounds.min_clients: node {node} asks for {own.least_cohort} clients in a sum (least-cohort), "
                        f"and there are {clients}; allowed: more clients"
                    )
                found["rounds.min_clients"] = own.least_cohort
            if own.largest_weight is not None and own.largest_weight < found.get("weighing.max_shares", shares or inf):
                found["weighing.max_shares"] = own.largest_weight
            field, bound = "privacy.aggregation.bound", experiment.privacy.aggregation.bound
            if own.bound is not None and own.bound < found.get(field, bound):
                found[field] = own.bound
    return found


def _check_daily(experiment: Description, node: str, terms: Terms) -> None:
    """Refuse an experiment that asks a node for more than its owner allows in a day."""
    rounds = experiment.resolved().rounds
    asking = sum(rule.trained_by == "clients" for rule in experiment.rules().values())
    tests = asking * (rounds.count // rounds.evaluate_every + 1)
    for key, most, wanted in (
        ("rounds-per-day", terms.rounds_per_day, rounds.count * asking),
        ("questions-per-day", terms.questions_per_day, tests),
    ):
        if most is not None and wanted > most:
            raise UserError(
                f"rounds.count: asks {wanted}, and node {node} allows {most} ({key}); allowed: fewer rounds"
            )


def _check_epsilon(experiment: Description, most: float) -> None:
    """Refuse noise under which a client would spend more than the owner of this node allows."""
    assert experiment.privacy is not None
    rules = list(experiment.rules().values())
    names = {name for rule in rules for name in rule.criteria}
    asking = sum(rule.trained_by == "clients" for rule in rules)
    known = registry.known()
    # One that is not loaded yet counts as sent: no code runs for this check.
    sent = sum(name not in known or known[name].measured_by == "client" for name in names)
    rounds = experiment.resolved().rounds.count
    costs = device_epsilon(experiment.privacy, rounds, sent, asking)
    if costs > most:
        beside = f" of {asking} rules" if asking > 1 else ""
        raise NotAllowed(
            f"privacy.local: with its noise a client spends epsilon {costs:.4g} at delta {OWNERS_DELTA:g} over "
            f"{rounds:,} "
            f"rounds{beside}, and this node allows {most:g}; allowed: more noise, or fewer rounds or rules"
        )


def _own_code(code: str, allowed: Sequence[str]) -> str:
    """Return the node's own name for code that the server names: its own file of that name, never the server's."""
    wanted = file_name(code)
    if code in allowed or wanted is None:
        return code
    return next((own for own in allowed if file_name(own) == wanted), code)


def _paths(section: BaseModel) -> Generator[tuple[str, Path, str]]:
    """Yield every path that an experiment holds: the field, and the key that stands in for it on a node."""
    keys = {field: mark.on_node for field, mark, _, _ in marked(type(section), section, DataFile)}
    for field, value in _values(section, ""):
        if isinstance(value, Path):
            yield field, value, keys.get(field, "")


def _values(value: object, name: str) -> Generator[tuple[str, object]]:
    """Yield every single value that a section holds, with the field's dotted name."""
    if isinstance(value, BaseModel | dict):
        for key, one in dict(value).items():
            yield from _values(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _values(one, name)
    else:
        yield name, value


def public_error(error: BaseException) -> str:
    """Return what a server may know of an error on a node: its class and its field, never what a file held."""
    if isinstance(error, NotAllowed | TimeoutError):
        return f"{type(error).__name__}: {error}"
    field = _FIELD.match(str(error)) if isinstance(error, UserError) else None
    return f"{type(error).__name__}: {field[0]}" if field else type(error).__name__


def public_reason(reason: str) -> str:
    """Return a client's reason for failing up to the class of the error that it names, without the error's text."""
    found = _ERROR.search(reason)
    return reason[: found.end()] if found else reason


def check_own(node: NodeConfig) -> None:
    """Refuse a node's file whose tables `[data]` or `[partition]` make no sense, or whose data are not there.

    Call it when the node starts, so that no server waits for answers that cannot come.
    """
    if node.guards_rows:
        kind_of(node.kind).check_node(node)
    node.peer_keys()
    for key, path in node.files.items():
        if not path.exists() and not is_pattern(path):
            raise UserError(f"node config {key}: found no '{path}'; allowed: a file or folder that is there")


def check_rows(experiment: Description, node: NodeConfig) -> None:
    """Refuse an experiment that would read this node's file, or choose among its rows, in its own way."""
    if node.guards_rows:
        if experiment.rounds.samples and node.min_rows > 1:
            raise NotAllowed(
                f"rounds.samples: asks for an answer about each single row, and this node answers about "
                f"{node.min_rows} rows or more; allowed: false"
            )
        experiment.check_own_rows(node)
