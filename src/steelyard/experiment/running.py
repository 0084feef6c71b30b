"""Running an experiment into a run folder, and going on with one that was stopped."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from steelyard import files
from steelyard.activity import doing
from steelyard.clients.protocol import CheckedClients
from steelyard.errors import Stopped, UserError
from steelyard.experiment.code import FOLDER as CODE
from steelyard.experiment.code import Ask
from steelyard.experiment.continuing import (
    begun_with,
    changed_data,
    changed_experiment,
    changed_versions,
    check_models,
    check_rules,
)
from steelyard.experiment.description import Description
from steelyard.experiment.federations import FederationSettings
from steelyard.experiment.folders import new_folder
from steelyard.experiment.loading import RUN_FILE, own_text, read_experiment, run_file
from steelyard.experiment.noting import Noting, told, versions, why
from steelyard.experiment.promising import ended_early, private_rounds, promise, rest_of
from steelyard.rounds.loop import Progress, run_rounds
from steelyard.rounds.progress import say, show_progress
from steelyard.rounds.state import Federation, Plan
from steelyard.runs.chain import SALT, require_whole
from steelyard.runs.process import this_process
from steelyard.runs.reader import History
from steelyard.runs.setup import discard, set_up
from steelyard.runs.store import Store, tidy
from steelyard.tracking.recording import Tracked
from steelyard.tracking.trackers import check as check_tracker
from steelyard.weighing.adafed import loss_rule
from steelyard.weighing.adjusting import strategy_of
from steelyard.weighing.rule import Rule, criteria_of
from steelyard.weighing.trust import trusted

if TYPE_CHECKING:
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import DatasetOrSeeded

Assembly = Callable[[], "tuple[Clients, Server]"]


def federations_of(experiment: Description, seeds: Sequence[int] | None = None) -> list[Federation]:
    """Return every rule of an experiment with every seed as a federation, the main rule first."""
    chosen = list(seeds) if seeds else [experiment.seed]
    made: list[Federation] = []
    for seed in chosen:
        for name, settings in experiment.rules().items():
            made.append(make_federation(experiment, name, settings, seed, several=len(chosen) > 1))
    return made


def make_federation(
    experiment: Description, name: str, settings: FederationSettings, seed: int, *, several: bool = False
) -> Federation:
    """Make one federation from a rule, its algorithm and a seed, which is named where there are several."""
    full_name = f"{name}#{seed}" if several else name
    loss = loss_rule(settings.loss, experiment.local_loss)
    algorithm = (settings.algorithm or experiment.algorithm).made()
    return Federation(
        *(full_name, name, seed, Rule(settings), strategy_of(settings.adjust), loss, algorithm, experiment.momentum)
    )


def plan_of(experiment: Description) -> Plan:
    """Return the loop's settings."""
    rounds = experiment.resolved().rounds
    assert rounds.fraction is not None, "clients are counted before rounds are planned"
    return Plan(
        rounds=rounds.count,
        fraction=rounds.fraction,
        min_clients=rounds.min_clients,
        evaluate_every=rounds.evaluate_every,
        stop_at=(rounds.target, rounds.share, rounds.above) if rounds.stop_at_target else None,
        detailed=rounds.samples,
        report=experiment.reports_on_server,
        poisson=rounds.sampling == "poisson",
        rate=experiment.rate,
    )


def run(
    experiment: Description,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    dataset: DatasetOrSeeded | None = None,
    progress: bool | Progress = False,
    assemble: Assembly | None = None,
) -> Path:
    """Run an experiment from the start into a new folder, which is returned.

    `assemble` brings clients of another kind than simulated.
    """
    check_tracker(experiment.tracking)
    folder = new_folder(experiment, out)
    clients, server = _assembled(experiment, dataset, assemble)
    try:
        experiment = _ready(experiment, clients, list(seeds or [experiment.seed]))
        federations = federations_of(experiment, seeds)
        # A budget that allows no round at all shows here, before there is a folder.
        private = private_rounds(experiment, plan_of(experiment), federations, clients)
        made = [name for name in (RUN_FILE, CODE) if not (folder / name).exists()]
        text = run_file(experiment, folder)
        info = {
            "status": "running",
            "seeds": list(seeds or [experiment.seed]),
            "in_memory": dataset is not None,
            **begun_with(folder, text, clients, [federation.seed for federation in federations]),
            **versions(),
            **({} if private is None else {SALT: secrets.token_hex(32)}),
        }
        set_up(folder, {RUN_FILE: text}, info, federations, made)
        store = _open(folder, experiment, simulated=assemble is None)
        try:
            return _go(experiment, folder, store, clients, server, federations, progress)
        except Exception:
            if not store.begun:
                # Nothing to go on with: the folder is free for another try.
                store.close()
                discard(folder, made)
            raise
        finally:
            store.close()
    finally:
        clients.close()


def _ready(experiment: Description, clients: Clients, seeds: Sequence[int]) -> Description:
    """Return the experiment with what the clients' number decides; refuse what cannot work, before a folder is made.

    Where seeds have different numbers of clients, the smallest decides: one share holds for the whole run.
    """
    least = experiment.rounds.min_clients
    counts: list[int] = []
    for seed in seeds:
        with doing(f"sharing out the data, seed {seed}"):
            counts.append(len(clients.names(seed)))
    if least > min(counts):
        raise UserError(f"rounds.min_clients: got {least}; allowed: at most {min(counts)}, the clients that there are")
    if isinstance(clients, CheckedClients):
        clients.check()
    return experiment.for_clients(min(counts))


def resume(
    folder: str | Path,
    *,
    dataset: DatasetOrSeeded | None = None,
    progress: bool | Progress = False,
    assemble: Assembly | None = None,
    ask: Ask | None = None,
    accept_changes: bool = False,
) -> Path:
    """Go on with a run that was stopped or killed, from its last whole checkpoint, to the same bits.

    What it goes on from is checked: the experiment, the data, the database and the checkpoint are those that the run
    wrote, or the difference is named; `accept_changes` goes on all the same. `ask` is called with the code that the
    folder names, before it runs. Returns the run's folder.
    """
    folder = Path(folder)
    files.check_run(folder)
    history = History(folder)
    experiment = read_experiment(folder)
    if history.info.get("status") == "finished":
        require_whole(history.chain, folder, accept=accept_changes)
        tidy(folder)
        return folder
    if history.info.get("in_memory") == "true" and dataset is None:
        raise UserError(f"{folder}: this run was given its data in Python; resume it there with dataset=...")
    changes = changed_experiment(history, accept=accept_changes)
    if ask is not None and (code := experiment.named_code()):
        ask(str(folder), code)
    check_tracker(experiment.tracking)
    seeds = json.loads(history.info.get("seeds", "[]")) or None
    choice = history.info.get("engine_choice")
    if choice:
        experiment = experiment.with_engine(choice)
    federations = federations_of(experiment, seeds)
    check_rules(history, federations)
    for line in changed_versions(history):
        say(line)
    clients, server = _assembled(experiment, dataset, assemble)
    try:
        text = own_text(folder / RUN_FILE)
        now = begun_with(folder, text, clients, [federation.seed for federation in federations])
        changes += changed_data(history, now, accept=accept_changes)
        store = _open(folder, experiment, simulated=assemble is None)
        try:
            if changes:
                store.note(accepted=changes, **now)
            return _go(experiment, folder, store, clients, server, federations, progress, accept=accept_changes)
        finally:
            store.close()
    finally:
        clients.close()


def _assembled(
    experiment: Description, dataset: DatasetOrSeeded | None, assemble: Assembly | None
) -> tuple[Clients, Server]:
    with doing("reading the data" if assemble is None else "waiting for the nodes"):
        return experiment.assemble(dataset) if assemble is None else assemble()


def _open(folder: Path, experiment: Description, *, simulated: bool) -> Store:
    settings = experiment.resolved().store
    return Store(folder, settings.checkpoint_every, settings.clients_every, every_digest=not simulated)


def _go(
    experiment: Description,
    folder: Path,
    store: Store,
    clients: Clients,
    server: Server,
    federations: Sequence[Federation],
    progress: bool | Progress,
    *,
    accept: bool = False,
) -> Path:
    """Do all rounds that are left, from the last checkpoint or the first round, and say how it ended."""
    store.register(federations)
    restored = store.resume(accept=accept)
    for problem in restored.problems:
        say(f"{problem}; going on from round {max(restored.round, 0)}")
    if accept:
        check_models(restored.states, federations, server)
    clients.restore(restored.kept)
    plan = plan_of(experiment)
    private = private_rounds(experiment, plan, federations, clients, folder, begun=restored.round > 0)
    store.ledger = None if private is None else private.ledger
    tracked = Tracked(Noting(store, experiment, clients), experiment.tracking)
    _note_begun(store, experiment, plan)
    for seed in dict.fromkeys(federation.seed for federation in federations):
        # So that what is noted of the clients tells of every seed, also of one that had finished before a resume.
        with doing(f"sharing out the data, seed {seed}"):
            clients.names(seed)
    document = experiment.model_dump(mode="json", exclude_none=True)
    known = tracked.start(folder.resolve().name, document, History(folder).info.get("tracked_as"))
    if known is not None:
        store.note(tracked_as=known)
    try:
        with _shown(progress, plan.rounds) as report:
            states = rest_of(restored.states, federations, private)
            states = run_rounds(federations, states, clients, server, plan, tracked, report, private)
    except BaseException as error:
        with suppress(UserError):  # where the disk is full, what went wrong first is what is told
            store.note(status="stopped", stopped=why(error))
        tracked.end(finished=False)
        if isinstance(error, KeyboardInterrupt):
            raise Stopped(folder) from error
        raise
    ends = [f"{name}: ended in round {state.round + 1}: {state.ended}" for name, state in states.items() if state.ended]
    if private is not None:
        told_of = promise(private, federations, states)
        store.note(privacy=told_of)
        ends = [*ended_early(told_of, plan.rounds), *ends]
    for line in ends:
        say(line)
    store.finish(**told(experiment, clients))
    tracked.end(finished=True)
    return folder


def _note_begun(store: Store, experiment: Description, plan: Plan) -> None:
    """Note what lists and pages of runs show, and how they tell a run that goes on from one that was killed."""
    store.note(
        status="running",
        rounds=plan.rounds,
        measure=experiment.score_name,
        writer=this_process().text(),
        measured_by={found.name: found.measured_by for found in experiment.criteria()},
        trust={name: trusted(rule, criteria_of([rule])) for name, rule in experiment.rules().items()},
    )


def _shown(progress: bool | Progress, rounds: int) -> AbstractContextManager[Progress | None]:
    if callable(progress):
        return nullcontext(progress)
    return show_progress(rounds) if progress else nullcontext(None)
