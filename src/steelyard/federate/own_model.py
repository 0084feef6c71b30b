"""The model that a node's owner takes: the last global one that it received, with what its own rows go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from steelyard import __version__
from steelyard.base.errors import UserError
from steelyard.base.files import is_file
from steelyard.base.usercode import only
from steelyard.clients.node import NodeConfig
from steelyard.experiment.learning import LearningDescription
from steelyard.federate.client_app import node_clients
from steelyard.federate.node import read_node
from steelyard.federate.received import ABOUT, FILE, MODEL, About
from steelyard.models.card import takes_and_gives
from steelyard.models.document import Origin
from steelyard.models.folder import Model
from steelyard.models.taking import leading_of, model_of
from steelyard.proof.signing import model_digest
from steelyard.report.rendering import Block, render
from steelyard.runs.checkpoint import metadata_of, read_content, read_tensors


def take(file: Path) -> Model:
    """Return the model that the node of a file keeps; what `steelyard federate model` writes."""
    config = NodeConfig.read(read_node(file)[1])
    if config.state is None or not is_file(config.state / FILE):
        raise UserError(
            f"{file}: keeps no model; allowed: keep-model = true, and an experiment with federate.nodes_keep_model"
        )
    parameters = read_tensors(config.state / FILE)[MODEL]
    about = About.model_validate_json(metadata_of(read_content(config.state / FILE))[ABOUT])
    with only(None if config.trusts else config.allow):
        experiment, node = node_clients(about.experiment, config)
        prepared = node.clients.preparation(about.seed)
    if not isinstance(experiment, LearningDescription) or prepared is None or ":" in experiment.model.name:
        raise UserError(
            f"{file}: got a model of {experiment.name}; allowed: networks that are built in, of kind learning"
        )
    measure, threshold = leading_of(experiment)
    origin = Origin(
        run=experiment.name,
        purpose=experiment.description,
        rule=about.rule,
        algorithm=(experiment.rules()[about.rule].algorithm or experiment.algorithm).name,
        seed=about.seed,
        round=about.round,
        chosen=f"round {about.round}, the last that this node received (run {about.run})",
        digest=model_digest(parameters),
        closing="",
        measure=measure,
        threshold=threshold,
        version=__version__,
    )
    made = model_of(file, origin, experiment.model, prepared, parameters)
    return replace(made, card=_card(origin, ", ".join(node.names), takes_and_gives(prepared)))


def _card(origin: Origin, site: str, further: Sequence[Block]) -> str:
    lines = (
        f"Rule: {origin.rule} ({origin.algorithm}), seed {origin.seed}; {origin.chosen}.",
        f"Digest of the model, as the run's chain has it: {origin.digest}.",
        "Where clients have personalised models, this is the global model.",
        f"The columns, scales and categories below are those of this node ({site}). They are in no model of others.",
        "No test is in this folder: `steelyard test` makes one.",
    )
    purpose = f"Intended use, as the experiment says: {origin.purpose or 'not said'}"
    parts: list[Block] = [f"# Model of {origin.run}, at {site}", purpose, "## Where it is from", lines, *further]
    return render(parts, "markdown")
