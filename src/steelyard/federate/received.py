"""The last global model that a node received: it stays in the node's `state`, for its owner.

Owner and experiment must both allow that it is kept.
"""

from __future__ import annotations

import torch

from steelyard.base.documents import Document
from steelyard.base.errors import told_as
from steelyard.base.files import owners_only
from steelyard.clients.node import NodeConfig
from steelyard.experiment.description import Description
from steelyard.messages.updates import Question, Task
from steelyard.runs.checkpoint import write_tensors

FILE = "model.safetensors"
"""In the node's `state` folder."""
MODEL, ABOUT = "parameters", "about"


class About(Document):
    """What a node notes of the model that it keeps."""

    run: str
    rule: str
    seed: int
    round: int
    experiment: str
    """As the server sent it."""


def keep(
    config: NodeConfig,
    experiment: Description,
    text: str,
    run: str,
    asked: Task | Question,
    round: int,
    parameters: torch.Tensor,
) -> None:
    """Keep a global model that came with a task or a question, where owner and experiment allow it."""
    allowed = config.keep_model and experiment.federate.nodes_keep_model
    if config.state is None or not allowed or asked.federation != next(iter(experiment.rules())):
        return
    about = About(run=run, rule=asked.federation, seed=asked.seed, round=round, experiment=text)
    with told_as(f"node config state: {config.state / FILE} cannot be written"), owners_only(config.state):
        write_tensors(config.state / FILE, {MODEL: parameters}, {ABOUT: about.model_dump_json()})
