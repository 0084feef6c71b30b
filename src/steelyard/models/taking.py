"""Taking a model out of a run: which rule's, of which round, held to the run's chain."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas
import torch

from steelyard import __version__
from steelyard.adapters.arrays import Layout as ArrayLayout
from steelyard.adapters.arrays import described
from steelyard.adapters.recorder import WHOLE
from steelyard.base import files
from steelyard.base.errors import UserError, listed, told_as
from steelyard.base.measures import ERROR, TASKS
from steelyard.base.usercode import is_handed_over
from steelyard.data.preparation import Preparation, Target
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.loading import Ask, RecordedDescription, read_experiment
from steelyard.experiment.recommend import RecommendDescription
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ModelSettings
from steelyard.models.card import card, takes_and_gives
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
from steelyard.proof.signing import model_digest
from steelyard.report.record import record
from steelyard.report.verification import CHANGED, Record, verify
from steelyard.runs.checkpoint import kept_checkpoints
from steelyard.runs.database import reading
from steelyard.runs.history import History
from steelyard.runs.signatures import Findings
from steelyard.weighing.order import chooses

if TYPE_CHECKING:
    from steelyard.models.recommender import Recommender

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
) -> Model | Recommender:
    """Return a rule's model of a run, or its recommender: the recommended rule's, or the main one's, unless named.

    `round` is last, best, or a number: of rounds whose model the run keeps; None: the best where the run keeps it
    (`rounds.keep`), else the last. `ask` is called with the code of the run's own network before that runs. A run that
    is not as it was written, or not as `keys` or a final hash kept elsewhere (`head`) say, is refused: `ChangedRun`.
    `client` names whose own model or part it is to be; `adapt` are files with the rows of a newcomer, for whom the
    model is trained.
    """
    checked = verify(run, keys, head)
    if checked.code == CHANGED or (keys is not None and checked.code):
        what = [*checked.found.changed, *checked.found.unchecked][0].line()
        raise ChangedRun(f"{run}: was changed, so there is no model of it: {what}; see `steelyard verify {run}`")
    experiment, history = read_experiment(run), History(run)
    found = record(run, rule=rule, checked=checked)
    row = next(row for row in history.federations.to_dict("records") if row["rule"] == found["rule"])
    taken = _Taken(history, experiment, found, str(row["federation"]), int(row["seed"]), named=rule is not None)
    if client is not None and adapt:
        raise UserError(f"--client: got '{client}' and --adapt; allowed: one of them")
    if isinstance(experiment, RecommendDescription):
        if round not in (None, "last") or adapt:
            raise UserError(
                "--round, --adapt: given for a recommender; allowed: its last round, and for a newcomer "
                "`steelyard recommend list MODEL --rows FILE`"
            )
        return taken.recommender(client)
    if isinstance(experiment, LearningDescription):
        return taken.network(experiment, taken.kept(round), ask, client, adapt)
    if not isinstance(experiment, RecordedDescription):
        raise UserError(f"{run}: is no run of kind learning, and no model of other kinds can be taken; allowed: such")
    if client is not None or adapt:
        raise UserError(f"{run}: is of another framework's app; allowed: no --client and no --adapt")
    return taken.weights(experiment, taken.kept(round))


class _Kept(NamedTuple):
    """A model that a run keeps."""

    round: int
    parameters: torch.Tensor
    why: str
    best: bool
    beside: Mapping[str, torch.Tensor]
    """What the run keeps beside the models of that round."""


@dataclass(frozen=True, eq=False)
class _Taken:
    """A rule of a run, whose model is taken."""

    history: History
    experiment: Description
    found: Record
    federation: str
    seed: int
    named: bool
    """Whether the rule was asked for by its name."""

    def kept(self, wanted: str | None) -> _Kept:
        """Return the model at the end of the round that is wanted; `verify` has held it to the chain."""
        folder = self.history.folder
        with reading(folder) as connection:
            checkpoints = [found for _, found in kept_checkpoints(connection, folder)]
        sound = [found for found in checkpoints if not isinstance(found, UserError)]
        states = [found.states[self.federation] for found in sound]
        models = dict(model for state in reversed(states) for model in state.models)
        if not models:
            none = f"{folder}: keeps no model; allowed: a run with a checkpoint (store.checkpoint_every)"
            raise next((found for found in checkpoints if isinstance(found, UserError)), UserError(none))
        best, last = states[0].best, states[0].round
        rounds = {"last": last} | ({"best": best.round} if best is not None and best.round in models else {})
        wanted = ("best" if "best" in rounds else "last") if wanted is None else wanted
        number = int(wanted) if wanted.isdecimal() and len(wanted) < 10 else None
        if (round := rounds.get(wanted, number)) not in models:
            rest = "" if "best" in rounds else '; rounds.keep = "best" keeps the best one'
            kept = listed(str(each) for each in sorted(models))
            raise UserError(
                f"--round: got {wanted[:20]}; allowed: rounds whose model the run keeps, which are {kept}{rest}"
            )
        words = {last: "the last", rounds.get("best"): "the best on rows that do not report"}
        beside = next((found.kept for found in sound if found.round == round), {})
        why = f"round {round}, {words.get(round, 'as asked for')}"
        return _Kept(round, models[round], why, round == rounds.get("best"), beside)

    def network(
        self,
        experiment: LearningDescription,
        kept: _Kept,
        ask: Ask | None,
        client: str | None,
        adapt: Sequence[Path],
    ) -> Model:
        """Return the global model, or that of one client: network, weights, where it is from, and its card."""
        folder, settings, whole = self.history.folder, experiment.model, client is None and not adapt
        text = self.history.facts.preparations.get(str(self.seed))
        if text is None:
            raise UserError(
                f"{folder}: does not say what its rows went through; allowed: simulated runs of this version"
            )
        prepared, parameters, own = Preparation.model_validate_json(text), kept.parameters, None
        named = ":" in settings.name and not is_handed_over(settings.name)
        code = experiment.named_code() if not whole else {"model.name": settings.name} if named else {}
        if ask is not None and code:
            ask(str(folder), code)
        if not whole:
            algorithm = (experiment.rules()[self.found["rule"]].algorithm or experiment.algorithm).made()
            base = model_of(folder, self._origin(kept, []), settings, prepared, parameters)
            given = (algorithm, base, parameters.to(torch.float32))
            if client is not None:
                own = of_client(*given, self.federation, kept.beside, client)
            else:
                own = of_newcomer(*given, experiment, seed=self.seed, round=kept.round, files=adapt)
            prepared, parameters = own.prepared(prepared), own.parameters
        tests, left_out = self._reported(experiment, prepared.target, kept, own)
        origin = self._origin(kept, tests, "" if own is None else own.words)
        made = model_of(folder, origin, settings, prepared, parameters)
        return replace(made, card=card(origin, self.found, "Model", takes_and_gives(prepared), left_out=left_out))

    def _reported(
        self, experiment: LearningDescription, target: Target, kept: _Kept, own: Own | None
    ) -> tuple[list[Test], str]:
        """Return the tests of a model in its run; and whose it is, and which tests do not report on it."""
        if own is not None:
            whose = f"This is {own.words}. It follows from that client's rows: hand it to that client alone."
            return self._sites(kept, lambda name: name == own.client), whose
        row = self._at(self.history.rounds, kept).iloc[0]
        server = {"accuracy": row["server_accuracy"]} if target.task == "classes" else {}
        server |= json.loads(row["server_metrics"]) if isinstance(row["server_metrics"], str) else {}
        rows, leading = self.history.facts.report_rows.get(str(self.seed), 0), experiment.rounds.leading
        figure = TASKS[target.task].figure if leading is None else leading.name
        known = rows and figure in server
        tests = [Test.of(figure, server[figure], rows, where="the server", rows=rows)] if known else []
        if self.found["rule"] in self.history.personal:
            return tests, (
                "This is the global model. Clients use personalised models, which are not in this folder; their tests "
                "are of those, and are left out. Layers that clients keep for themselves, if any, are untrained here."
            )
        chose = kept.best and experiment.round_chosen_by == "clients"
        tests += self._sites(kept, lambda name: not (chose and chooses(name)))[:MOST_TESTS]
        untested = self._at(self.history.untested, kept)
        reasons = zip(untested["client"].astype(str), untested["failure"].astype(str), strict=True)
        tests += [
            Test.of(experiment.score_name, None, 0, where=name, rows=0, why=why)
            for name, why in list(reasons)[:MOST_TESTS]
            if not (chose and chooses(name))
        ]
        return tests, "The tests of clients that chose the round are left out." if chose else ""

    def _at(self, frame: pandas.DataFrame, kept: _Kept) -> pandas.DataFrame:
        mine = (frame["rule"] == self.found["rule"]) & (frame["seed"] == self.seed)
        return frame.loc[mine & (frame["round"] == kept.round)]

    def _sites(self, kept: _Kept, reports: Callable[[str], bool]) -> list[Test]:
        """Return the scores of the model at the sites that report on it."""
        tests = self.history.tested(self.found["rule"], self.seed, kept.round - 1)
        errors = tests.metrics.get(ERROR, np.full(len(tests.round), np.nan))
        named = ((place, tests.clients[tests.client[place]]) for place in np.flatnonzero(tests.round == kept.round))
        return [
            Test.of(
                self.experiment.score_name,
                float(tests.score[place]),
                rows := int(tests.samples[place]),
                float(errors[place]),
                where=name,
                rows=rows,
            )
            for place, name in named
            if reports(name)
        ]

    def weights(self, experiment: RecordedDescription, kept: _Kept) -> Model:
        """Return the model of another framework's app: its weights by their names, and what is not known."""
        layout = ArrayLayout.read(self.history.facts.arrays)
        if len(kept.parameters) != layout.size(layout.floating):
            raise UserError(
                f"{self.history.folder}: its arrays are not those of its model; expected the folder as it was written"
            )
        whole = {
            name: kept.beside[WHOLE + name].numpy().astype(layout.types[name]).reshape(layout.shapes[name])
            for name in layout.counting
        }
        arrays = {**layout.arrays(kept.parameters, None, None), **whole}
        network = weights_alone({name: torch.from_numpy(arrays[name]) for name in layout.types})
        server = self._at(self.history.rounds, kept)["server_accuracy"].dropna().tolist()
        tests = [Test.of(experiment.measure, score, 0, where="the server", rows=0) for score in server]
        origin = self._origin(kept, tests + self._sites(kept, lambda name: True)[:MOST_TESTS])
        document = ModelDocument(
            origin=origin,
            network=Network(settings={}, outputs=0, seed=0, vector=layout.floating),
            preparation=None,
            weights=held_of(b""),
            card=held_of(b""),
        )
        about = takes_and_gives(None, self.history.facts.arrays)
        return Model(document, network, card(origin, self.found, "Model", about))

    def recommender(self, client: str | None) -> Recommender:
        """Return the recommender as of the last round; `client`: with the own part of that user."""
        # In an extra that models of networks do not need.
        from steelyard.models.recommender import of_run
        from steelyard.report.recommender import open_run

        kept, finished = self.kept("last"), open_run(self.history.folder, self.found["rule"], self.seed)
        tests = self._sites(kept, lambda name: client in (None, name))
        if client is None and tests:
            mean = float(np.mean([test.value for test in tests if test.value is not None]))
            tests = [Test.of(self.experiment.score_name, mean, 0, where="all users", rows=len(tests))]
        own = "" if client is None else f"the recommender of user {client}"
        return of_run(finished, self._origin(kept, tests, own), self.found, client)

    def _origin(self, kept: _Kept, tests: list[Test], own: str = "") -> Origin:
        """Return where a model is from."""
        found, why = self.found, "the rule that was asked for" if self.named else ""
        if found["recommended"]:
            why = "the rule that the comparison recommends"
        elif found["beside"] and not self.named:
            why = "the run's main rule; no rule is recommended"
        measure, threshold = leading_of(self.experiment)
        return Origin(
            run=found["name"],
            purpose=self.experiment.description,
            rule=found["rule"],
            algorithm=found["algorithm"],
            seed=self.seed,
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
    target = prepared.target
    pixels, outputs = target.task == "segmentation", len(target.names)
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
        from steelyard.models.recommender import TABLE, Recommender  # In an extra.

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
