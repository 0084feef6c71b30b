"""Running an experiment into a run folder, and going on with one that was stopped."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import shutil
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from steelyard.base import files
from steelyard.base.errors import Stopped, UserError, listed, nearest
from steelyard.base.files import in_bytes
from steelyard.base.logs import doing, logger
from steelyard.base.measures import measure_of
from steelyard.clients.local import SimulationServer
from steelyard.clients.ranks.engine import Share, own_versions
from steelyard.clients.ranks.group import Place, RankLost, Ranks, join, rank_count
from steelyard.clients.ranks.wire import Content
from steelyard.experiment.data_check import DataCheck, looked_at, said
from steelyard.experiment.description import Description
from steelyard.experiment.guarantees import ended_early, guarantee_record, open_ledger, remaining
from steelyard.experiment.loading import FOLDER as CODE
from steelyard.experiment.loading import RUN_FILE, Ask, build, new_folder, own_text, read_experiment, run_file
from steelyard.experiment.parts import Assembly, Part, Parts, as_begun, assembled, federations_of
from steelyard.experiment.resuming import (
    also_made_by,
    changed_experiment,
    changed_versions,
    check_models,
    versions,
    why,
)
from steelyard.experiment.rules import seeds_of, with_rules
from steelyard.experiment.simulation import first_called
from steelyard.proof.signing import head_key
from steelyard.rounds.loop import Progress, run_rounds
from steelyard.rounds.plan import cohort_size
from steelyard.rounds.private import NO_GUARANTEE
from steelyard.rounds.progress import show_progress, weighed_one
from steelyard.runs.facts import RUN, RunFacts
from steelyard.runs.glance import this_process
from steelyard.runs.history import History
from steelyard.runs.joining import discard, set_up
from steelyard.runs.store import Store, tidy
from steelyard.tracking import Tracked
from steelyard.tracking import check as check_tracker
from steelyard.weighing.rule import trusted

if TYPE_CHECKING:
    from steelyard.clients.protocol import Clients
    from steelyard.data.dataset import DatasetOrSeeded
    from steelyard.rounds.state import RoundRecord, RoundState, Snapshot, States


_log = logger(__name__)


def run(
    experiment: Description,
    *,
    out: str | Path | None = None,
    seeds: Sequence[int] | None = None,
    dataset: DatasetOrSeeded | None = None,
    progress: bool | Progress = False,
    assemble: Assembly | None = None,
    part: Part | None = None,
    accept: Sequence[str] = (),
) -> Path:
    """Run an experiment from the start into a new folder, which is returned.

    `assemble` brings clients of another kind than simulated. `part` runs only that part of the rules and seeds. Data
    that are wrong for certain are refused, but for findings that `accept` names.
    """
    check_tracker(experiment.tracking)
    seed = (seeds or [experiment.seed])[0]
    experiment, dataset = experiment.with_dataset(dataset, seed)
    folder = new_folder(experiment, out)
    looked, read, handed = None, None, None
    if assemble is None:
        with doing("reading the data"):
            if dataset is not None:
                dataset, handed = first_called(dataset, seed)
            looked, read = looked_at(experiment, handed, accept)
        _tell(looked, told=bool(progress))
    clients, server = assembled(experiment, dataset, assemble, read)
    with closing(clients):
        experiment = experiment.changed(clients.terms) if clients.terms else experiment
        experiment = _ready(experiment, clients, list(seeds or [experiment.seed]))
        federations = federations_of(experiment, seeds, experiment.criteria(), part)
        parts = Parts.of(experiment, clients, server, federations, part)
        if parts.private is not None:
            parts.private.check_first_round(federations)
        _check_disk(parts, folder)
        made = [name for name in (RUN_FILE, CODE) if not (folder / name).exists()]
        text = run_file(experiment, folder)
        facts = RunFacts(
            status="running",
            seeds=list(seeds or [experiment.seed]),
            in_memory=dataset is not None,
            part=None if part is None else str(part),
            salt=None if parts.private is None else secrets.token_hex(32),
            others={"ranks": str(rank_count()), **versions()},
        )
        if looked is not None and looked.findings:
            facts = facts.also(RunFacts(findings=looked.findings, drift=looked.drift))
        if clients.findings:
            facts = facts.also(RunFacts(findings=list(clients.findings)))
        facts = facts.also(parts.begun(folder, text))
        set_up(folder, {RUN_FILE: text}, facts, federations, made)
        store = _open(folder, experiment, simulated=assemble is None)
        try:
            return _go(parts, folder, store, progress)
        except Exception:
            if not store.begun:
                # Nothing to continue with: the folder is free for another try.
                store.close()
                discard(folder, made)
            raise
        finally:
            store.close()


def _tell(looked: DataCheck, *, told: bool) -> None:
    """Refuse data that are wrong for certain, before anything is made of them.

    What may be wrong is `told` where progress is shown too: one of many runs does not repeat it.
    """
    looked.refuse()
    if told and looked.findings:
        more = f"; {len(looked.findings) - 1} more" if len(looked.findings) > 1 else ""
        _log.warning(f"data: {said(looked.findings[0])}{more} (steelyard check)")


def _check_disk(parts: Parts, folder: Path) -> None:
    """Say how much of the disk kept updates will take; refuse to begin where the disk has less."""
    settings, plan = parts.experiment.resolved().store, parts.plan
    if settings.keep != "updates":
        return
    each = 4 if settings.keep_as == "float32" else 2
    size = sum(
        parts.server.initial(one.seed).numel()
        * (each * plan.rounds * cohort_size(len(parts.clients.names(one.seed)), plan.fraction, plan.min_clients)
           + 4 * (plan.rounds + 1))  # the models that rounds end with
        for one in parts.federations
    )  # fmt: skip
    there = next(above for above in (folder, *folder.absolute().parents) if above.exists())
    free = shutil.disk_usage(there).free
    words = f"the updates of {plan.rounds} rounds take {in_bytes(size)} as {settings.keep_as}"
    if size > free:
        raise UserError(f"store.keep: {words}, and the disk has {in_bytes(free)}; allowed: keep = 'models'")
    _log.info(f"store.keep: {words}")


def _ready(experiment: Description, clients: Clients, seeds: Sequence[int]) -> Description:
    """Return the experiment with what the clients' number decides; refuse what cannot work, before a folder is made.

    Where seeds have different numbers of clients, the smallest decides: one share holds for the whole run.
    """
    least = experiment.rounds.min_clients
    counts: list[int] = []
    for seed in seeds:
        with doing(f"partitioning the data, seed {seed}"):
            counts.append(len(clients.names(seed)))
    if least > min(counts):
        raise UserError(f"rounds.min_clients: got {least}; allowed: at most {min(counts)}, the number of clients")
    size, candidates = experiment.rounds.cohort(max(counts)), experiment.rounds.select.candidates
    if candidates is not None and candidates < size:
        raise UserError(f"rounds.select.candidates: got {candidates}; allowed: at least the cohort's {size}")
    if clients.complete:
        # A floor of one that has withdrawn is what the others were weighed beside: it stays.
        names = {name for seed in seeds for name in clients.names(seed)}
        _check_named(experiment, names | set(experiment.rounds.withdrawn))
    clients.check(experiment.algorithms())
    return experiment.for_clients(min(counts))


def _check_named(experiment: Description, names: set[str]) -> None:
    """Refuse a floor, or times at which it is there, for a client that does not exist."""
    floors = [("weighing.floors", client) for rule in experiment.rules().values() for client in rule.floors]
    times = [("rounds.select.available", client) for client in experiment.rounds.select.available]
    for field, client in (*floors, *times):
        if client not in names:
            raise UserError(
                f"{field}: got '{client}'{nearest(client, names)}, which is no client; allowed: "
                f"{listed(sorted(names)[:5])}{', ...' if len(names) > 5 else ''}"
            )


def compare(
    experiment: Description,
    rules: Sequence[str] = (),
    seeds: int = 1,
    *,
    out: str | Path | None = None,
    dataset: DatasetOrSeeded | None = None,
    progress: bool = False,
    accept: Sequence[str] = (),
) -> Path:
    """Run rules side by side with `seeds` seeds, counted from the experiment's; returns the folder of the run.

    As in `load_comparison`, right or wrong is recorded for every test sample of the last round, unless the experiment
    says otherwise.
    """
    chosen = seeds_of(experiment, seeds)
    if "samples" not in experiment.rounds.model_fields_set:
        experiment = experiment.changed({"rounds.samples": True})
    rules_too = with_rules(experiment, rules)
    return run(rules_too, out=out, seeds=chosen, dataset=dataset, progress=progress, accept=accept)


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
    if history.facts.status == "finished":
        read_experiment(folder).check_runs_here(str(folder))
        changed_experiment(folder, history.facts, accept=accept_changes)
        history.require_whole(accept=accept_changes)
        tidy(folder)
        return folder
    with as_begun(history, dataset=dataset, assemble=assemble, ask=ask, accept=accept_changes) as (parts, changes):
        for line in changed_versions(history):
            _log.warning(line)
        with closing(_open(folder, parts.experiment, simulated=assemble is None)) as store:
            if changes:
                store.accept(changes, parts.begun(folder, own_text(folder / RUN_FILE)))
            store.note(also_made_by(history))
            return _go(parts, folder, store, progress, accept=accept_changes)


def _open(folder: Path, experiment: Description, *, simulated: bool) -> Store:
    settings = experiment.resolved().store
    keep = settings.keep_as if settings.keep == "updates" else None
    return Store(
        folder,
        settings.checkpoint_every,
        settings.clients_every,
        # Updates that are written to the disk cost more than their digests, and are checked by them.
        every_digest=not simulated or settings.digests == "every" or settings.keep == "updates",
        signer=head_key(),
        keep_updates=keep,
    )


def _go(parts: Parts, folder: Path, store: Store, progress: bool | Progress, *, accept: bool = False) -> Path:
    """Do all rounds that are left, from the last checkpoint or the first round, and say how it ended."""
    experiment, clients, federations, private = parts.experiment, parts.clients, parts.federations, parts.private
    states, tracked = _begin(parts, folder, store, accept=accept)
    try:
        with _shown(progress, parts.plan.rounds, measure_of(experiment.score_name).percent) as report:
            states = remaining(states, federations, private)
            states = run_rounds(
                federations, states, clients, parts.server, parts.plan, tracked, report, private or NO_GUARANTEE
            )
    except BaseException as error:
        with suppress(UserError):  # where the disk is full, what went wrong first is what is reported
            store.note(RunFacts(status="stopped", stopped=why(error)))
        tracked.end(finished=False)
        if isinstance(error, KeyboardInterrupt):
            raise Stopped(folder) from error
        if isinstance(error, RankLost) and store.begun:
            words = f"what is done is in {folder}; go on, with as many ranks as you like: steelyard resume"
            raise RankLost(f"{error}; {words} {shlex.quote(str(folder))}") from error
        raise
    ends = [f"{name}: ended in round {state.round + 1}: {state.ended}" for name, state in states.items() if state.ended]
    if private is not None:
        promise = guarantee_record(private, federations, states)
        store.note(RunFacts(privacy=promise))
        ends = [*ended_early(promise, parts.plan.rounds), *ends]
    for line in ends:
        _log.warning(line)
    clients.hand_out()
    store.finish(parts.noted())
    tracked.end(finished=True)
    return folder


def _begin(parts: Parts, folder: Path, store: Store, *, accept: bool) -> tuple[dict[str, RoundState], Tracked]:
    """Go back to the last checkpoint, note what the run is, and start the tracker; returns the states there."""
    experiment, clients, federations = parts.experiment, parts.clients, parts.federations
    store.register(federations)
    restored = store.resume(accept=accept)
    for problem in restored.problems:
        _log.warning(f"{problem}; going on from round {max(restored.round, 0)}")
    if accept:
        check_models(restored.states, federations, parts.server)
    clients.restore(restored.kept)
    if store.signer is not None:
        clients.prove_by(store.sealed)
    if parts.private is not None:
        parts.private.ledger = store.ledger = open_ledger(folder, begun=restored.round > 0)
    tracked = Tracked(_Recorder(store, parts), experiment.tracking)
    _note_begun(store, parts)
    for seed in parts.seeds:
        # So that what is noted of the clients holds for every seed, also for one that had finished before a resume.
        with doing(f"partitioning the data, seed {seed}"):
            clients.names(seed)
    if parts.plan.report:
        rows = {str(seed): parts.server.report_rows(seed) for seed in parts.seeds}
        store.note(RunFacts(report_rows=rows))
    document = experiment.model_dump(mode="json", exclude_none=True)
    known = tracked.start(folder.resolve().name, document, History(folder).facts.tracked_as)
    if known is not None:
        store.note(RunFacts(tracked_as=known))
    return restored.states, tracked


class _Recorder:
    """A recorder that also writes down, with the first round, how the clients compute: a resume must do the same.

    It says, once, that a round weighed one client: such rounds look like any other, and compare nothing.
    """

    def __init__(self, store: Store, parts: Parts) -> None:
        self._store, self._parts = store, parts
        self._noted = self._warned = False

    def commit(
        self, round: int, records: Sequence[RoundRecord], states: States, snapshot: Snapshot, *, last: bool
    ) -> None:
        # What is noted of clients elsewhere may change with every round; of simulated ones it does not.
        if round > 0 and (not self._noted or self._parts.clients.notes is not None):
            self._store.note(self._parts.noted())
            self._noted = True
        self._store.commit(round, records, states, snapshot, last=last)
        single = next((r for r in records if r.updates and len(r.updates.clients) == 1 and not r.kept_old), None)
        if single is not None and not self._warned:
            _log.warning(weighed_one(single.federation, round))
            self._warned = True


def _note_begun(store: Store, parts: Parts) -> None:
    """Note what lists and pages of runs show, and how they tell a run that goes on from one that was killed."""
    criteria = [criterion for federation in parts.federations for criterion in federation.rule.criteria]
    store.note(
        RunFacts(
            federation_run=parts.clients.describe().get(RUN),  # before the first head is signed
            status="running",
            rounds=parts.plan.rounds,
            measure=parts.experiment.score_name,
            writer=this_process().text(),
            measured_by={criterion.name: criterion.measured_by for criterion in criteria},
            personal=sorted({f.rule_name for f in parts.federations if f.algorithm.personal}),
            trust={federation.rule_name: dict(trusted(federation.rule)) for federation in parts.federations},
        )
    )


def _shown(progress: bool | Progress, rounds: int, percent: bool) -> AbstractContextManager[Progress | None]:
    if callable(progress):
        return nullcontext(progress)
    return show_progress(rounds, percent) if progress else nullcontext(None)


# Several processes: rank 0 runs the command, the others do their share of what it asks.


def among_ranks(lead: Callable[[], NoReturn], refuse: Callable[[str], NoReturn]) -> NoReturn:
    """Run a command as one of the processes that a launcher started, and end; rank 0 alone says anything."""
    try:
        Place.given(os.environ)
    except UserError as error:  # of its own place, which may be nobody's, each process speaks itself
        refuse(str(error))
    silent = os.environ.get("RANK") != "0"
    if silent:
        _say_nothing()
    try:
        ranks = join()
    except UserError as error:
        if silent:
            sys.exit(2)
        refuse(str(error))
    if ranks is None:
        lead()
    if ranks.place.rank:
        _follow(ranks)
    _leave(ranks, _led(lead, ranks))


def _led(lead: Callable[[], NoReturn], ranks: Ranks) -> int:
    def ended(number: int, frame: object) -> None:
        # Once a rank is lost its launcher ends all others: what is wrong is said first.
        if not ranks.broken:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)

    signal.signal(signal.SIGTERM, ended)
    try:
        lead()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _leave(ranks: Ranks, code: int) -> NoReturn:
    ranks.end()
    if ranks.broken:
        # Threads still wait for answers that will never come: Python would wait for torch's in turn.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _say_nothing() -> None:
    """Leave all words to rank 0."""
    ours = logging.getLogger("steelyard")
    ours.addHandler(logging.NullHandler())
    ours.propagate = False
    warnings.simplefilter("ignore")


def _follow(ranks: Ranks) -> NoReturn:
    """Do what rank 0 asks; when it is gone, end too."""
    # Ctrl-C reaches every process of a terminal: rank 0 decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        ranks.serve(Follower().answer)
    except RankLost:
        os._exit(1)
    sys.exit(0)


class Follower:
    """A rank that builds what rank 0 describes, one experiment after another, and works on it."""

    def __init__(self) -> None:
        self._share: Share | None = None

    def answer(self, command: str, content: Content) -> Content:
        """Do one command of rank 0."""
        if command == "assemble":
            self._assemble(content["experiment"], content["versions"])
            return None
        if command == "release":
            if self._share is not None:
                self._share.simulation.close()
            self._share = None
            return None
        assert self._share is not None, command
        return self._share.answer(command, content)

    def _assemble(self, document: Mapping[str, Any], wanted: Mapping[str, str]) -> None:
        for name, own in own_versions().items():
            if own != wanted[name]:
                raise UserError(f"{name}: {own} here, {wanted[name]} on rank 0; allowed: the same on all ranks")
        _, server = build(document, "experiment").assemble()
        assert isinstance(server, SimulationServer)
        self._share = Share(server.clients, server)
