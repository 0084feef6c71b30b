"""The truth that estimates are held against: every coalition of clients trained as a federation of its own.

All coalitions of a rule run in lock step, as the rules of a comparison do, from the same first model and with the same
seed. A coalition trains exactly as a run would that never had the other clients.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from typing_extensions import TypedDict

from steelyard.base.errors import UserError, listed, nearest
from steelyard.contributions.document import UNITS, rule_of
from steelyard.contributions.replaying import check_simulated, untested
from steelyard.experiment.parts import Parts, as_begun
from steelyard.messages.updates import Floats
from steelyard.rounds.contributions import ContributionSettings, Measure, RoundValues
from steelyard.rounds.loop import run_rounds
from steelyard.rounds.state import Federation, RoundRecord, Snapshot, States
from steelyard.rounds.valuing import Test, overall_first, tester
from steelyard.runs.history import RETRAINED, History
from steelyard.runs.store import add_values
from steelyard.weighing.shapley import Coalitions, shapley_values

if TYPE_CHECKING:
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.experiment.code import Ask

MOST = 10
"""Clients whose coalitions are all trained at most: 1,024 federations."""


class Without(TypedDict):
    """How the model of a run does, and how it would do without one client."""

    run: str
    rule: str
    client: str
    measure: str
    unit: str
    seeds: list[int]
    after: float
    """With everybody."""
    without: float
    low: float
    high: float
    source: str


class _Nothing:
    """A recorder that keeps nothing: retrained coalitions are judged by their last models."""

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        """Forget a round."""


def retrain(
    folder: str | Path,
    settings: ContributionSettings,
    rule: str | None = None,
    *,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
) -> str:
    """Train every coalition of a run's clients and put their Shapley and leave-one-out values into its folder.

    Returns why they could not be written there; empty where they were.
    """
    found: dict[tuple[str, int], tuple[RoundValues, ...]] = {}
    with _begun(folder, settings, rule, dataset, ask) as (parts, mains):
        members = {main.name: _all_members(main, parts) for main in mains}
        models = _trained(parts, mains, members)
        for main in mains:
            names = tuple(parts.clients.names(main.seed))
            test = _test(parts, settings.measure, main)
            found[main.name, parts.plan.rounds] = _values(settings.measure, names, models[main.name], test)
    return add_values(Path(folder), found, RETRAINED)


@contextmanager
def _begun(
    folder: str | Path,
    settings: ContributionSettings,
    rule: str | None,
    dataset: DatasetOrSeeded | None,
    ask: Ask | None,
) -> Generator[tuple[Parts, list[Federation]]]:
    """Put a run's parts together again; with the federations of the rule that is asked for."""
    history = History(folder)
    chosen = rule_of(history, rule)
    check_simulated(history)
    with as_begun(history, dataset=dataset, ask=ask) as (parts, _):
        parts.experiment.check_contributions(settings, own_code=True)
        yield parts, [each for each in parts.federations if each.rule_name == chosen]


def _all_members(main: Federation, parts: Parts) -> list[frozenset[str]]:
    """Return all coalitions but the empty one; number k of them holds the clients of k + 1's binary digits."""
    names = parts.clients.names(main.seed)
    if len(names) > MOST:
        raise UserError(
            f"--retrain: this run has {len(names)} clients, and so 2^{len(names)} coalitions to train; allowed: up to "
            f"{MOST} clients, or --without CLIENT --retrain"
        )
    numbers = range(1, 2 ** len(names))
    return [frozenset(name for place, name in enumerate(names) if number >> place & 1) for number in numbers]


def _trained(
    parts: Parts, mains: Sequence[Federation], members: Mapping[str, Sequence[frozenset[str]]]
) -> dict[str, torch.Tensor]:
    """Train coalitions of federations side by side; return the last models of each, after the first model itself."""
    federations = [
        replace(main, name=f"{main.name} {number}", members=inside)
        for main in mains
        for number, inside in enumerate(members[main.name])
    ]
    # A coalition goes on however few give a usable update; nobody's tests decide when it ends.
    plan = replace(untested(parts), min_clients=0, stop_at=None, report=False, contributions=None)
    states = run_rounds(federations, {}, parts.clients, parts.server, plan, _Nothing())
    return {
        main.name: torch.stack(
            [
                parts.server.initial(main.seed),
                *(states[f"{main.name} {number}"].parameters for number in range(len(members[main.name]))),
            ]
        )
        for main in mains
    }


def _test(parts: Parts, measure: Measure, main: Federation) -> Test:
    return tester(measure, main.name, main.seed, parts.plan.rounds, parts.clients, parts.server)


def _values(measure: Measure, names: tuple[str, ...], models: torch.Tensor, test: Test) -> tuple[RoundValues, ...]:
    good, sizes = test(models)
    worths = overall_first(good, sizes)
    places = 1 << np.arange(len(names))

    def worth(coalitions: Coalitions) -> Floats:
        return worths[coalitions @ places]

    found = shapley_values(len(names), worth, lambda: np.random.default_rng(0)).values
    whole = len(worths) - 1
    left_out = worths[whole] - worths[whole - places]
    sign = -1.0 if measure.endswith("loss") else 1.0
    ends = (sign * float(worths[0, 0]), sign * float(worths[whole, 0]))
    none = np.zeros(len(names))
    return (
        RoundValues(measure, "shapley", names, found, none, sizes, *ends),
        RoundValues(measure, "leave-one-out", names, left_out, none, sizes, *ends),
    )


def retrained_without(
    folder: str | Path,
    client: str,
    settings: ContributionSettings,
    rule: str | None = None,
    *,
    dataset: DatasetOrSeeded | None = None,
    ask: Ask | None = None,
) -> Without:
    """Train a run again with and without one client, and say how both models do."""
    with _begun(folder, settings, rule, dataset, ask) as (parts, mains):
        members: dict[str, list[frozenset[str]]] = {}
        for main in mains:
            names = frozenset(parts.clients.names(main.seed))
            check_client(client, sorted(names))
            members[main.name] = [names, names - {client}]
        models = _trained(parts, mains, members)
        levels: list[Floats] = []
        for main in mains:
            good, sizes = _test(parts, settings.measure, main)(models[main.name][1:])
            levels.append(overall_first(good, sizes)[:, 0])
    after, without = np.abs(np.mean(levels, axis=0)).tolist()
    return {
        "run": str(folder),
        "rule": mains[0].rule_name,
        "client": client,
        "measure": settings.measure,
        "unit": UNITS[settings.measure],
        "seeds": [main.seed for main in mains],
        "after": after,
        "without": without,
        "low": without,
        "high": without,
        "source": "trained again without it",
    }


def check_client(client: str, names: Sequence[str]) -> None:
    """Refuse a client that a run does not have, and to leave out the only one."""
    if client not in names:
        shown = listed(names[:5]) + (", ..." if len(names) > 5 else "")
        raise UserError(f"CLIENT: got '{client}'{nearest(client, names)}; allowed: {shown}")
    if len(names) == 1:
        raise UserError(f"CLIENT: got '{client}', the only client of this run; allowed: runs with others")
