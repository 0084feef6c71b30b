"""What a run is made of: clients, server, federations and the plan; a part of a run (3/8), and joining all parts."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from steelyard.base import files
from steelyard.base.errors import MachineError, UserError, brief, empty_folder, listed, told_as
from steelyard.base.logs import doing, logger
from steelyard.base.processor import DECIDES
from steelyard.base.settings import parse
from steelyard.clients.protocol import RemainingClients
from steelyard.clients.ranks.group import current
from steelyard.experiment.description import Description
from steelyard.experiment.guarantees import guarantee_notes, private_rounds
from steelyard.experiment.loading import FOLDER as CODE
from steelyard.experiment.loading import RUN_FILE, Ask, own_text, read_experiment
from steelyard.experiment.resuming import (
    changed_data,
    changed_experiment,
    check_rules,
    code_files_of,
    flat_fields,
)
from steelyard.messages.updates import LossState
from steelyard.proof.signing import head_key
from steelyard.rounds.state import Federation, Plan
from steelyard.runs.facts import RunFacts
from steelyard.runs.glance import this_process
from steelyard.runs.history import History
from steelyard.runs.joining import join_rounds, set_up
from steelyard.tracking import check as check_tracker
from steelyard.weighing.order import strategy_of
from steelyard.weighing.rule import Rule, trust_warnings, unlimited

if TYPE_CHECKING:
    from steelyard.clients.protocol import Clients, Server
    from steelyard.data.dataset import Dataset, DatasetOrSeeded
    from steelyard.rounds.private import PrivateRounds
    from steelyard.weighing.criterion import Criterion


MOST = 10_000

_ItemT = TypeVar("_ItemT")


@dataclass(frozen=True, order=True)
class Part:
    """The third of eight parts, written 3/8."""

    number: int
    of: int

    @classmethod
    def read(cls, text: str, where: str = "--part") -> Self:
        """Read a part as it is written; `where` names the option or the file in an error."""
        found = re.fullmatch(r"([0-9]{1,5})/([0-9]{1,5})", text.strip())
        number, of = map(int, found.groups()) if found else (0, 0)
        if not 1 <= number <= of <= MOST:
            raise UserError(f"{where}: got {brief(text)}; allowed: NUMBER/OF, such as 3/8, at most {MOST:,} parts")
        return cls(number, of)

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"

    def share(self, items: Sequence[_ItemT], what: str) -> list[_ItemT]:
        """Return every so manyth item, so that parts take about as long; none may be left without one."""
        if self.of > len(items):
            raise UserError(f"--part: got {self}, but there are {len(items)} {what}; allowed: at most {len(items)}")
        return list(items[self.number - 1 :: self.of])


def in_order(found: Mapping[Path, Part | None]) -> list[Path]:
    """Return the folders of all parts by their numbers; parts that are missing, doubled or of others are named."""
    parts = {folder: part for folder, part in found.items() if part is not None}
    if not parts or len(parts) < len(found):
        whole = next(iter(found.keys() - parts.keys()), None)
        raise UserError(f"{whole}: is not a part; allowed: folders that were made with --part")
    sizes = {part.of: folder for folder, part in parts.items()}
    if len(sizes) > 1:
        (one, first), (other, second) = list(sizes.items())[:2]
        raise UserError(f"{second}: is one of {other} parts, {first} one of {one}; allowed: parts of one whole")
    of = next(iter(sizes))
    by_number: dict[int, list[Path]] = {number: [] for number in range(1, of + 1)}
    for folder, part in parts.items():
        by_number[part.number].append(folder)
    missing = [f"{number}/{of}" for number, folders in by_number.items() if not folders]
    doubled = [f"{n}/{of} ({listed(map(str, each))})" for n, each in by_number.items() if len(each) > 1]
    if missing or doubled:
        faults = [f"missing: {', '.join(missing)}"] if missing else []
        faults += [f"doubled: {', '.join(doubled)}"] if doubled else []
        raise UserError(f"join: {'; '.join(faults)}; allowed: each of the {of} parts once")
    return [folders[0] for folders in by_number.values()]


# What a run is made of.


Assembly = Callable[[], "tuple[Clients, Server]"]


def federations_of(
    experiment: Description,
    seeds: Sequence[int] | None = None,
    criteria: Sequence[Criterion] | None = None,
    part: Part | None = None,
) -> list[Federation]:
    """Return every rule of an experiment with every seed as a federation, the main rule first; of a part, its own.

    `criteria` are the experiment's own, where they are looked up already; without them no code of the user's is run.
    """
    chosen = list(seeds) if seeds else [experiment.seed]
    found = [
        Federation(
            f"{name}#{seed}" if len(chosen) > 1 else name,
            name,
            seed,
            Rule(settings, criteria),
            strategy_of(settings.adjust),
            LossState(experiment.local_loss) if settings.loss is None else settings.loss.first(experiment.local_loss),
            (settings.algorithm or experiment.algorithm).made(),
            experiment.momentum,
            experiment.learning_rate,
        )
        for seed in chosen
        for name, settings in experiment.rules().items()
    ]
    return found if part is None else part.share(found, "rules and seeds together")


def part_of(history: History) -> Part | None:
    """Return which part of a comparison a run is; None for a whole one."""
    text = history.facts.part
    return None if text is None else Part.read(text, f"{history.folder}: part")


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
        measure=rounds.leading,
        report=experiment.reports_on_server,
        poisson=rounds.sampling == "poisson",
        rate=experiment.rate,
        select=rounds.select,
        clocked=experiment.clocked,
        contributions=experiment.contributions,
        chosen_by=experiment.round_chosen_by,
        keeps_best=rounds.keep == "best",
        patience=rounds.patience,
    )


@dataclass(frozen=True, eq=False)
class Parts:
    """What a run is made of; each part is made once."""

    experiment: Description
    clients: Clients
    server: Server
    federations: Sequence[Federation]
    plan: Plan
    private: PrivateRounds | None

    @classmethod
    def of(
        cls,
        experiment: Description,
        clients: Clients,
        server: Server,
        federations: Sequence[Federation],
        part: Part | None = None,
    ) -> Self:
        plan = replace(plan_of(experiment), part=part is not None)
        private = private_rounds(experiment, plan, federations, clients)
        if private is not None and part is not None:
            raise UserError("--part: got a comparison with [privacy], whose rules share one ledger; allowed: no --part")
        return cls(experiment, clients, server, federations, plan, private)

    @property
    def seeds(self) -> list[int]:
        return list(dict.fromkeys(federation.seed for federation in self.federations))

    def begun(self, folder: Path, text: str) -> RunFacts:
        """Return what a run notes when it begins: for a resume to tell whether it is still so, and for its model.

        `text` is its experiment file. Clients are asked for all seeds, so that what cannot be shared out shows before
        there is a folder. A run that promises its clients privacy notes nothing of single rows and sites.
        """
        prints: dict[str, dict[str, str]] = {}
        prepared: dict[str, str] = {}
        for seed in self.seeds:
            self.clients.names(seed)
            if found := self.clients.fingerprint(seed):
                prints[str(seed)] = dict(found)
            if (preparation := self.clients.preparation(seed)) is not None:
                shown = preparation if self.experiment.privacy is None else preparation.without_rows()
                prepared[str(seed)] = shown.model_dump_json(exclude_defaults=True)
        return RunFacts(experiment_text=text, code_files=code_files_of(folder), data=prints, preparations=prepared)

    def noted(self) -> RunFacts:
        """Return what a reader of the run should know: how clients work, and what in the rules is open to lies."""
        facts, privacy = RunFacts.read(self.clients.describe()), self.experiment.privacy
        rules = [federation.rule for federation in self.federations]
        notes = [facts.notes, *trust_warnings(rules)]
        if privacy is not None:
            notes += guarantee_notes(privacy, [name for rule in rules for name in rule.names])
        text = "; ".join(note for note in notes if note)
        return facts.also(RunFacts(notes=text)) if text else facts


def assembled(
    experiment: Description, dataset: DatasetOrSeeded | None, assemble: Assembly | None, read: Dataset | None = None
) -> tuple[Clients, Server]:
    """Build clients and server: simulated ones, of data that may be `read` already, or those `assemble` brings."""
    if current() is not None and (assemble is not None or dataset is not None or not experiment.shared_out):
        what = "a data set from Python" if dataset is not None else "clients of this kind"
        raise UserError(f"WORLD_SIZE: several processes were started, and {what} are not shared out; allowed: 1")
    with doing("reading the data" if assemble is None else "waiting for the nodes"):
        clients, server = experiment.assemble(dataset, read) if assemble is None else assemble()
    withdrawn = experiment.rounds.withdrawn
    return RemainingClients(clients, withdrawn) if withdrawn else clients, server


def experiment_again(history: History, dataset: DatasetOrSeeded | None, ask: Ask | None) -> Description:
    """Return the experiment of a run that goes on or is repeated here; `ask` is called with the code that it names."""
    folder = history.folder
    experiment = read_experiment(folder)
    experiment.check_runs_here(str(folder))
    if history.facts.in_memory and dataset is None:
        raise UserError(f"{folder}: this run was given its data in Python; do this there, with dataset=...")
    if ask is not None and (code := experiment.named_code()):
        ask(str(folder), code)
    return experiment


@contextmanager
def as_begun(
    history: History,
    *,
    dataset: DatasetOrSeeded | None = None,
    assemble: Assembly | None = None,
    ask: Ask | None = None,
    accept: bool = False,
) -> Generator[tuple[Parts, Sequence[str]]]:
    """Build a run's parts again, to go on with it or to repeat it, and close the clients at the end.

    Experiment and data must be those that the run began with; `accept` takes others, and what differs is returned.
    `ask` is called with the code that the folder names, before it runs.
    """
    folder = history.folder
    changes = changed_experiment(folder, history.facts, accept=accept)
    experiment = experiment_again(history, dataset, ask)
    check_tracker(experiment.tracking)
    seeds = history.facts.seeds or None
    if choice := history.facts.engine_choice:
        experiment = experiment.with_engine(choice)
    part = part_of(history)
    federations = federations_of(experiment, seeds, experiment.criteria(), part)
    check_rules(history, federations)
    clients, server = assembled(experiment, dataset, assemble)
    with closing(clients):
        parts = Parts.of(experiment, clients, server, federations, part)
        changes += changed_data(history, parts.begun(folder, own_text(folder / RUN_FILE)), accept=accept)
        yield parts, changes


# Joining parts.


_log = logger(__name__)

_SAME = ("code_files", "seeds", "in_memory")
"""Facts, beside the experiment, in which all parts of one comparison agree."""
_OWN = {"part", "tracked_as", "writer"}
"""Facts of a part alone."""


def join_runs(folders: Sequence[Path], out: Path) -> Path:
    """Make one run in a new folder of all parts of a comparison, given in any order; returns the folder.

    The parts stay as they are. What is missing, doubled, not at its end or of another experiment is named.
    """
    histories = {folder: History(folder) for folder in folders}
    parts = in_order({folder: part_of(history) for folder, history in histories.items()})
    found = [histories[folder] for folder in parts]
    for history in found:
        if history.facts.status != "finished":
            raise UserError(
                f"{history.folder}: is not at its end; allowed: parts that are (`steelyard resume {history.folder}` "
                "goes on with one that was stopped)"
            )
        history.require_whole()
        _check_same(found[0], history)
    out = empty_folder(out, "--out")
    experiment = read_experiment(parts[0])
    names = [one.name for one in federations_of(experiment, found[0].facts.seeds)]
    held = [name for history in found for name in history.federations["federation"]]
    if sorted(held) != sorted(names):
        raise UserError(f"{parts[0]}: the parts hold other rules and seeds than the comparison; allowed: as written")
    every = experiment.resolved().store.clients_every
    facts = _facts(found)
    code = [name for name in files.names_in(parts[0] / CODE) if name.endswith(".py")]
    with told_as(f"{out}: cannot be written", "a writable folder", kind=MachineError):
        for name in code:
            files.write(out / CODE / name, files.read_bytes(parts[0] / CODE / name))
    made = [RUN_FILE, *([CODE] if code else [])]
    set_up(
        *(out, {RUN_FILE: found[0].facts.experiment_text or ""}, facts, (), made),
        fill=lambda draft: join_rounds(draft, parts, names, every, head_key()),
    )
    return out


def _check_same(first: History, other: History) -> None:
    """Refuse a part of another comparison; say where parts were computed differently, which may show in last bits."""
    before, now = (flat_fields(parse(one.facts.experiment_text or "", str(one.folder))) for one in (first, other))
    fields = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    fields += [name for name in _SAME if getattr(first.facts, name) != getattr(other.facts, name)]
    data, others = first.facts.data, other.facts.data
    fields += [f"the data of seed {seed}" for seed in data.keys() & others.keys() if data[seed] != others[seed]]
    if fields:
        raise UserError(
            f"{other.folder}: is a part of another comparison than {first.folder}, which differs in {fields[0]}; "
            "allowed: parts of one"
        )
    for name in ("version_steelyard", *DECIDES, "engine_choice", "device"):
        if (one := first.info.get(name)) != (two := other.info.get(name)):
            _log.warning(
                f"{name}: {one} in {first.folder}, {two} in {other.folder}: last bits may differ from one run's"
            )


def _facts(histories: Sequence[History]) -> RunFacts:
    """Return the facts of the whole: what parts agree on, tables of all, largest peaks, all texts that differ."""
    known = [{key: value for key, value in one.info.items() if key not in {*_OWN, "schema"}} for one in histories]
    facts: dict[str, str] = {}
    for key in dict.fromkeys(key for one in known for key in one):
        values = list(dict.fromkeys(one[key] for one in known if key in one))
        facts[key] = values[0] if len(values) == 1 else _merged(values)
    facts |= {"notes": text} if (text := _notes(histories)) else {}
    return RunFacts.read(facts | {"writer": this_process().text()})


def _merged(values: Sequence[str]) -> str:
    try:
        found: list[Any] = [json.loads(value) for value in values]
    except ValueError:
        return "; ".join(values)
    if all(isinstance(one, dict) for one in found):
        return json.dumps({key: value for one in found for key, value in one.items()})
    if all(isinstance(one, list) for one in found):
        return json.dumps(sorted({value for one in found for value in one}))
    return values[found.index(max(found))] if all(isinstance(one, int | float) for one in found) else "; ".join(values)


def _notes(histories: Sequence[History]) -> str:
    """Return the notes of all parts: those on rules once for all rules, as one run writes them."""
    rules = read_experiment(histories[0].folder).rules()
    trust = [history.facts.trust for history in histories]
    notes: list[str] = []
    for history, mine in zip(histories, trust, strict=True):
        on_rules = "; ".join(unlimited((rules[name], mine[name]) for name in rules if name in mine))
        notes.append(history.facts.notes.removesuffix(on_rules).removesuffix("; "))
    known = {name: each for mine in trust for name, each in mine.items()}
    on_rules = unlimited((settings, known[name]) for name, settings in rules.items() if name in known)
    return "; ".join(note for note in dict.fromkeys([*notes, *on_rules]) if note)
