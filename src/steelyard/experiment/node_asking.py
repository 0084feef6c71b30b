"""What an experiment may ask of a node with a file of its own: nothing that chooses among its rows and columns."""

from __future__ import annotations

from typing import Any

from steelyard.clients.node import NodeConfig
from steelyard.data.settings import DataSettings
from steelyard.errors import brief
from steelyard.experiment.description import Description
from steelyard.experiment.learning import LearningDescription
from steelyard.experiment.node_rows import own_partition, own_reading
from steelyard.experiment.recommend import RecommendDescription
from steelyard.recommend.settings import InteractionSettings
from steelyard.settings import Section
from steelyard.usercode import NotAllowed

_FREE = ("path", "attributes", "identities", "catalogue", "normalise", "size", "colours")
"""Fields that an experiment may choose: files are the node's own anyway, and the others change no row's part."""


def check_rows(experiment: Description, node: NodeConfig) -> None:
    """Refuse an experiment that would read this node's file, or choose among its rows, in its own way."""
    if not node.guards_rows:
        return
    if experiment.rounds.samples and node.min_rows > 1:
        raise NotAllowed(
            f"rounds.samples: asks for an answer about each single row, and this node answers about {node.min_rows} "
            "rows or more; allowed: false"
        )
    if isinstance(experiment, LearningDescription):
        _refuse_other("data", experiment.data, _as_read(experiment.data, node))
        if experiment.flaws:
            raise NotAllowed(
                "flaws: given, but a server may not choose among the rows of this node's own file; allowed: no "
                "[[flaws]]"
            )
        if node.part is not None:
            _refuse_other("partition", experiment.partition, own_partition(node, held_out=False, seed=0))
        elif experiment.partition.validation is not None:
            raise NotAllowed(
                "partition.validation: given, but this node decides itself which rows it tests on; allowed: leave it "
                "out"
            )
    elif isinstance(experiment, RecommendDescription):
        _refuse_other("interactions", experiment.interactions, own_reading(InteractionSettings, node))
        if experiment.ranking.threshold is not None:
            raise NotAllowed(
                "ranking.threshold: given, but a server may not choose among the rows of this node's own file; "
                "allowed: leave it out"
            )


def _as_read(asked: DataSettings, node: NodeConfig) -> DataSettings:
    """Return how this node's file is read; without a table [data], as the source's defaults say."""
    if not node.reading and asked.source == "csv":
        raise NotAllowed(
            "data.source: got 'csv', but this node's configuration does not name the columns of its file; allowed: a "
            "table [data] there"
        )
    own = own_reading(DataSettings, node, source=asked.source)
    unsaid: dict[str, Any] = {}
    if own.classes is None:
        unsaid["classes"] = asked.classes
    if own.share == 1:
        unsaid["seed"] = asked.seed
    if own.source == "npz" and {own.labels, asked.labels} <= {None, "y"}:
        unsaid["labels"] = asked.labels
    return own.model_copy(update=unsaid)


def _refuse_other(name: str, asked: Section, own: Section) -> None:
    for field in type(asked).model_fields:
        value = getattr(asked, field)
        if field not in _FREE and value != getattr(own, field):
            raise NotAllowed(
                f"{name}.{field}: got {brief(value)}, but this node's own configuration decides how its rows are read "
                "and shared out; allowed: the value there"
            )
