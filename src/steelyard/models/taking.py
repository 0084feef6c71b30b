"""Taking a model out of a run: which rule's, of which round, held to the run's chain."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from steelyard import __version__
from steelyard.adapters.arrays import Layout as ArrayLayout
from steelyard.adapters.arrays import described
from steelyard.adapters.recorder import WHOLE
from steelyard.base import files
from steelyard.base.errors import UserError, listed, told_as
from steelyard.base.measures import MEASURES, TASKS, measure_of
from steelyard.base.usercode import is_handed_over
from steelyard.data.preparation import Preparation
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import Ask, RecordedDescription, read_experiment
from steelyard.experiment.recommend import RecommendDescription
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ModelSettings
from steelyard.models.card import card
from steelyard.models.document import CodeFile, ModelDocument, Network, Origin, Test
from steelyard.models.folder import (
    DOCUMENT,
    WEIGHTS,
    Model,
    built,
    code_file,
    digest_of,
    held_of,
    read_contents,
    read_document,
    weights_alone,
)
from steelyard.models.personal import Own, of_client, of_newcomer
from steelyard.models.predicting import Predictor
from steelyard.models.recommender import TABLE, Recommender, of_run
from steelyard.proof.signing import model_digest
from steelyard.report.recommender import open_run
from steelyard.report.record import record
from steelyard.report.verification import CHANGED, Record, Verification, verify
from steelyard.runs.checkpoint import kept_checkpoints
from steelyard.runs.database import reading
from steelyard.runs.history import History
from steelyard.runs.signatures import Findings
from steelyard.weighing.order import chooses

MOST_TESTS = 100
"""Sites whose tests a model's folder names."""


class ChangedRun(UserError):
    """A run is not as it was written: there is no model of it."""


def take(
    run: Path,
    rule: str | None = None,
    round: str | None = None,
    *,
    ask: Ask | None = None,
    keys: Path | None = None,
    head: str | None = None,
    client: str | None = None,
    adapt: Sequence[Path] = (),
) -> Model:
    """Return a rule's model of a run: the recommended rule's, or the main one's, unless one is named.

    `round` is last, best, or a number: of rounds whose model the run keeps; None: the best where the run keeps it
    (`rounds.keep`), else the last. `ask` is called with the code of the run's own network before that runs. A run that
    is not as it was written, or not as `keys` or a final hash kept elsewhere (`head`) say, is refused: `ChangedRun`.
    `client` names whose own model it is to be; `adapt` are files with the rows of a newcomer, for whom it is trained.
    """
    checked = _verified(run, keys, head)
    experiment, history = read_experiment(run), History(run)
    if isinstance(experiment, RecommendDescription):
        raise UserError(f"{run}: is of a recommender; allowed: `steelyard model`, or Result.recommender in Python")
    if not isinstance(experiment, LearningDescription | RecordedDescription):
        raise UserError(f"{run}: is no run of kind learning, and no model of other kinds can be taken; allowed: such")
    if isinstance(experiment, RecordedDescription) and not history.facts.arrays:
        raise UserError(
            f"{run}: keeps no model; allowed: a run whose app said keep_models=True, and whose arrays have names"
        )
    found = record(run, rule=rule, checked=checked)
    name, seed = _federation(history, found["rule"])
    kept = _kept(history, name, round)
    if isinstance(experiment, RecordedDescription):
        if client is not None or adapt:
            raise UserError(f"{run}: is of another framework's app; allowed: no --client and no --adapt")
        return _recorded(history, experiment, found, kept, named=rule is not None)
    text = history.facts.preparations.get(str(seed))
    if text is None:
        raise UserError(f"{run}: does not say what its rows went through; allowed: simulated runs of this version")
    taken = _Taken(history, experiment, Preparation.model_validate_json(text), found, seed, kept)
    model = taken.model(named=rule is not None, ask=ask)
    if client is None and not adapt:
        return model
    if client is not None and adapt:
        raise UserError(f"--client: got '{client}' and --adapt; allowed: one of them")
    if ask is not None and (code := experiment.named_code()):
        ask(str(run), code)
    settings = experiment.rules()[found["rule"]].algorithm or experiment.algorithm
    base = Predictor(model.preparation, model.network)
    given = (settings.made(), base, kept.parameters.to(torch.float32))
    if client is not None:
        own = of_client(*given, name, kept.beside, client)
    else:
        own = of_newcomer(*given, experiment, seed=seed, round=kept.round, files=adapt)
    return replace(taken, own=own).model(named=rule is not None, ask=None)


def take_recommender(
    run: Path, rule: str | None = None, *, keys: Path | None = None, head: str | None = None, client: str | None = None
) -> Recommender:
    """Return a rule's recommender of a run, as `take` does a network; `client`: with the own part of that user."""
    checked = _verified(run, keys, head)
    experiment, history = read_experiment(run), History(run)
    found = record(run, rule=rule, checked=checked)
    name, seed = _federation(history, found["rule"])
    kept, finished = _kept(history, name, "last"), open_run(run, found["rule"], seed)
    tested = history.tested(found["rule"], seed, kept.round - 1)
    at = tested.round == kept.round
    if client is not None:
        at &= np.array([tested.clients[place] == client for place in tested.client.tolist()], dtype=np.bool_)
    whose = "all users" if client is None else client
    tests = [_test(whose, int(at.sum()), experiment.score_name, tested.score[at].mean())] if at.any() else []
    own = "" if client is None else f"the recommender of user {client}"
    origin = _origin(experiment, found, seed, kept, tests, named=rule is not None, own=own)
    return of_run(finished, origin, found, client)


def _verified(run: Path, keys: Path | None, head: str | None) -> Verification:
    checked = verify(run, keys, head)
    if checked.code == CHANGED or (keys is not None and checked.code):
        what = [*checked.found.changed, *checked.found.unchecked][0].line()
        raise ChangedRun(f"{run}: was changed, so there is no model of it: {what}; see `steelyard verify {run}`")
    return checked


def _federation(history: History, rule: str) -> tuple[str, int]:
    row = next(row for row in history.federations.to_dict("records") if row["rule"] == rule)
    return str(row["federation"]), int(row["seed"])


class _Kept(NamedTuple):
    """A model that a run keeps."""

    round: int
    parameters: torch.Tensor
    why: str
    best: bool
    beside: Mapping[str, torch.Tensor]
    """What the run keeps beside the models of that round."""


def _kept(history: History, name: str, wanted: str | None) -> _Kept:
    """Return the model of a federation at the end of the round that is wanted; `verify` has held it to the chain."""
    with reading(history.folder) as connection:
        checkpoints = [found for _, found in kept_checkpoints(connection, history.folder)]
    sound = [found for found in checkpoints if not isinstance(found, UserError)]
    states = [found.states[name] for found in sound]
    models = dict(model for state in reversed(states) for model in state.models)
    if not models:
        raise next((found for found in checkpoints if isinstance(found, UserError)), UserError(_none(history)))
    best, last = states[0].best, states[0].round
    best_round = best.round if best is not None and best.round in models else None
    if wanted is None:
        wanted = "last" if best_round is None else "best"
    rounds = {"last": last, "best": best_round}
    round = rounds[wanted] if wanted in rounds else int(wanted) if wanted.isdecimal() and len(wanted) < 10 else None
    if round not in models:
        rest = "" if best_round is not None else '; rounds.keep = "best" keeps the best one'
        kept = listed(str(each) for each in sorted(models))
        raise UserError(
            f"--round: got {wanted[:20]}; allowed: rounds whose model the run keeps, which are {kept}{rest}"
        )
    words = {last: "the last", best_round: "the best on rows that do not report"}
    beside = next((found.kept for found in sound if found.round == round), {})
    why = f"round {round}, {words.get(round, 'as asked for')}"
    return _Kept(round, models[round], why, round == best_round, beside)


def _none(history: History) -> str:
    return f"{history.folder}: keeps no model; allowed: a run with a checkpoint (store.checkpoint_every)"


@dataclass(frozen=True, eq=False)
class _Taken:
    """What a model is made from."""

    history: History
    experiment: LearningDescription
    preparation: Preparation
    found: Record
    seed: int
    kept: _Kept
    own: Own | None = None
    """The model of one client, in place of the global one."""

    def model(self, *, named: bool, ask: Ask | None) -> Model:
        """Return the model: network, weights, where it is from, and its card."""
        settings = self.experiment.model
        if ":" in settings.name and ask is not None and not is_handed_over(settings.name):
            ask(str(self.history.folder), {"model.name": settings.name})
        own, words = self.own, "" if self.own is None else self.own.words
        origin = _origin(self.experiment, self.found, self.seed, self.kept, self._tests(), named=named, own=words)
        prepared = self.preparation if own is None else own.prepared(self.preparation)
        parameters = (self.kept if own is None else own).parameters
        made = model_of(self.history.folder, origin, settings, prepared, parameters)
        return replace(made, card=card(made.document, self.found, self._left_out))

    @property
    def _personal(self) -> bool:
        return self.found["rule"] in self.history.personal

    @property
    def _by_clients(self) -> bool:
        return self.kept.best and self.experiment.round_chosen_by == "clients"

    def _reports(self, client: str) -> bool:
        """Whether a client's test in the run is one of this model."""
        if self.own is not None:
            return client == self.own.client
        return not self._personal and not (self._by_clients and chooses(client))

    @property
    def _left_out(self) -> str:
        """Whose model this is, and which tests of the run do not report on it; empty where all do."""
        if self.own is not None:
            return f"This is {self.own.words}. It follows from that client's rows: hand it to that client alone."
        if self._personal:
            return (
                "This is the global model. Clients use personalised models, which are not in this folder; their tests "
                "are of those, and are left out. Layers that clients keep for themselves, if any, are untrained here."
            )
        return "The tests of clients that chose the round are left out." if self._by_clients else ""

    def _tests(self) -> list[Test]:
        """Return the scores of this model in its run: on the server's rows, then at each site that reports on it."""
        history, rule, at = self.history, self.found["rule"], self.kept.round
        frame = history.rounds
        row = frame[(frame["rule"] == rule) & (frame["seed"] == self.seed) & (frame["round"] == at)].iloc[0]
        server = {"accuracy": row["server_accuracy"]} if self.preparation.target.task == "classes" else {}
        server |= json.loads(row["server_metrics"]) if isinstance(row["server_metrics"], str) else {}
        rows = history.facts.report_rows.get(str(self.seed), 0)
        leading = self.experiment.rounds.leading
        figure = TASKS[self.preparation.target.task].figure if leading is None else leading.name
        found = (
            [_test("the server", rows, figure, server.get(figure))]
            if not self.own and rows and figure in server
            else []
        )
        tests = history.tested(rule, self.seed, at - 1)
        errors = tests.metrics.get("score_error", np.full(len(tests.round), np.nan))
        named = ((place, tests.clients[tests.client[place]]) for place in np.flatnonzero(tests.round == at).tolist())
        reporting = [(place, name) for place, name in named if self._reports(name)]
        for place, name in reporting[:MOST_TESTS]:
            error = float(errors[place])
            score, samples = float(tests.score[place]), int(tests.samples[place])
            found.append(_test(name, samples, self.experiment.score_name, score, None if np.isnan(error) else error))
        return found + ([] if self._personal else self._not_tested())

    def _not_tested(self) -> list[Test]:
        """Return the sites without a score, each with the reason that the run noted."""
        frame = self.history.untested
        at = (frame["rule"] == self.found["rule"]) & (frame["seed"] == self.seed) & (frame["round"] == self.kept.round)
        reasons = list(zip(frame.loc[at, "client"], frame.loc[at, "failure"], strict=True))[:MOST_TESTS]
        measure = measure_of(self.experiment.score_name).name
        named = [(str(name), str(why)) for name, why in reasons if not (self._by_clients and chooses(str(name)))]
        return [Test(where=name, rows=0, measure=measure, value=None, why=why) for name, why in named]


def _origin(
    experiment: Description, found: Record, seed: int, kept: _Kept, tests: list[Test], *, named: bool, own: str = ""
) -> Origin:
    """Return where a model is from."""
    why = "the rule that was asked for" if named else ""
    if found["recommended"]:
        why = "the rule that the comparison recommends"
    elif found["beside"] and not named:
        why = "the run's main rule; no rule is recommended"
    measure, threshold = leading_of(experiment)
    return Origin(
        run=found["name"],
        purpose=experiment.description,
        rule=found["rule"],
        algorithm=found["algorithm"],
        seed=seed,
        round=kept.round,
        chosen="; ".join(filter(None, (why, kept.why))),
        own=own,
        digest=model_digest(kept.parameters),
        closing=next(iter(found["hashes"].values())),
        measure=measure,
        threshold=threshold,
        tests=tests,
        version=__version__,
    )


def model_of(
    where: Path, origin: Origin, settings: ModelSettings, prepared: Preparation, parameters: torch.Tensor
) -> Model:
    """Return a model without its card: the network that the settings describe, with these parameters."""
    pixels, outputs = prepared.target.task == "segmentation", len(prepared.target.names)
    network = build(settings, prepared.shape, outputs, origin.seed, pixels=pixels)
    layout = Layout.of(network)
    if layout.size != len(parameters):
        raise UserError(
            f"{where}: got a model of {len(parameters)} numbers; expected {layout.size}, as its network has"
        )
    layout.write(network, parameters.to(torch.float32))
    fields, code, held = _network(settings)
    vector = [slot.name for slot in layout.slots]
    document = ModelDocument(
        origin=origin,
        network=Network(settings=fields, outputs=outputs, pixels=pixels, seed=origin.seed, vector=vector),
        preparation=prepared,
        weights=held_of(b""),
        card=held_of(b""),
        code=held,
    )
    return Model(document, network.eval(), "", code)


def _recorded(history: History, experiment: RecordedDescription, found: Record, kept: _Kept, *, named: bool) -> Model:
    """Return the model of another framework's app: its weights by their names, and what is not known."""
    layout = ArrayLayout.read(history.facts.arrays)
    if len(kept.parameters) != layout.size(layout.floating):
        raise UserError(
            f"{history.folder}: its arrays are not those of its model; expected the folder as it was written"
        )
    whole = {
        name: kept.beside[WHOLE + name].numpy().astype(layout.types[name]).reshape(layout.shapes[name])
        for name in layout.counting
    }
    arrays = {**layout.arrays(kept.parameters, None, None), **whole}
    network = weights_alone({name: torch.from_numpy(arrays[name]) for name in layout.types})
    scores = history.rounds.loc[history.rounds["round"] == kept.round, "server_accuracy"].tolist()
    tests = [_test("the server", 0, experiment.measure, score) for score in scores]
    tests = [test for test in tests if test.value is not None]
    tested = history.tested(found["rule"], 0, kept.round - 1)
    places = np.flatnonzero(tested.round == kept.round).tolist()[:MOST_TESTS]
    sites = [(tested.clients[tested.client[place]], place) for place in places]
    tests += [_test(name, int(tested.samples[at]), experiment.measure, float(tested.score[at])) for name, at in sites]
    document = ModelDocument(
        origin=_origin(experiment, found, 0, kept, tests, named=named),
        network=Network(settings={}, outputs=0, seed=0, vector=layout.floating),
        preparation=None,
        weights=held_of(b""),
        card=held_of(b""),
    )
    return Model(document, network, card(document, found, "", history.facts.arrays))


def _test(where: str, rows: int, measure: str, value: object, error: float | None = None) -> Test:
    kind = MEASURES.get(measure) or measure_of(measure)
    number = float("nan") if value is None else float(str(value))
    ends = kind.interval(number, rows, error) if rows else None
    low, high = (None, None) if ends is None or np.isnan(ends).any() else ends
    value = None if np.isnan(number) else number
    return Test(where=where, rows=rows, measure=kind.name, value=value, low=low, high=high)


def _network(settings: ModelSettings) -> tuple[dict[str, Any], bytes, CodeFile | None]:
    """Return the fields of a network as a folder has them, with the file of code that builds it."""
    fields = settings.model_dump(mode="json", exclude_none=True)
    source, _, factory = settings.name.rpartition(":")
    if not source.endswith(".py"):
        return fields, b"", None
    with told_as(f"{source} cannot be read", "the code that the run kept, in its folder"):
        name, code = Path(source).name, Path(source).read_bytes()
    return {**fields, "name": f"{files.CODE}/{name}:{factory}"}, code, code_file(name, code)


def leading_of(experiment: Description) -> tuple[str | None, float]:
    """Return the measure that leads, and above which probability the second of two classes is predicted."""
    leading = experiment.rounds.leading if isinstance(experiment, LearningDescription) else None
    return (None, 0.5) if leading is None else (leading.name, leading.threshold)


def look_at_model(folder: Path, run: Path, found: Findings) -> None:
    """Hold a model's folder to a run: its numbers to the chain, its network and preparation to what the run noted."""
    experiment = read_experiment(run)
    what = "as the run made it"
    if isinstance(experiment, RecommendDescription):
        saved, what = Recommender.load(folder), "its table as the run made it"
        origin, digest = saved.document.origin, model_digest(saved.tensors[TABLE].reshape(-1))
    else:
        document = read_document(folder)
        origin, digest = document.origin, _look_at_network(folder, document, experiment, History(run), found)
    with reading(run) as connection:
        rows = connection.by_federation("digests", ("round", "model"), "")
        digests: Mapping[object, str] = {(whose, at): held for whose, at, held in rows}
    if digest != origin.digest or digests.get(((origin.rule, origin.seed), origin.round)) != digest:
        found.change(f"{folder}: its numbers are not those of {origin.rule} in round {origin.round} of this run")
    if not found.changed:
        found.checked["model"] = f"{origin.rule}, seed {origin.seed}, round {origin.round}, {what}"


def _look_at_network(
    folder: Path, document: ModelDocument, experiment: Description, history: History, found: Findings
) -> str:
    """Hold network and preparation to what the run noted; return the digest of the numbers."""
    origin = document.origin
    if origin.own:
        raise UserError(f"{folder}: is {origin.own}, whose numbers are in no chain; allowed: a global model")
    tensors, _ = read_contents(folder, document)
    text = history.facts.preparations.get(str(origin.seed))
    if (None if text is None else Preparation.model_validate_json(text)) != document.preparation:
        found.change(f"{folder / DOCUMENT}: what its rows go through is not what this run noted")
    if isinstance(experiment, LearningDescription):
        fields, _, code = _network(experiment.model)
        if (document.network.settings, document.code) != (fields, code):
            found.change(f"{folder / DOCUMENT}: its network is not the one of this run")
        elif (
            code is None and [slot.name for slot in Layout.of(built(document, folder)).slots] != document.network.vector
        ):
            found.change(f"{folder / DOCUMENT}: its numbers have other names than in this run")
        if (origin.measure, origin.threshold) != leading_of(experiment):
            found.change(f"{folder / DOCUMENT}: its measure or threshold is not the one of this run")
    elif described({name: tensor.numpy() for name, tensor in tensors.items()}) != history.facts.arrays:
        found.change(f"{folder / WEIGHTS}: its arrays are not those of this run")
    return digest_of(folder, document.network, tensors)
