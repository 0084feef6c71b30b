"""The Flower ClientApp: reads a message, lets this node's clients do the work, writes the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from steelyard import __version__
from steelyard.clients.flower import wire
from steelyard.clients.flower.forms import IntroductionForm
from steelyard.clients.node import NodeClients, NodeConfig
from steelyard.federate.node_state import NodeStates
from steelyard.federate.run_config import experiment_of

ResultT = TypeVar("ResultT")

_built: dict[tuple[str, str, str], NodeClients] = {}


def node_clients(context: Context) -> NodeClients:
    """Return this node's clients; built once per process, so that a warm process has the data at hand."""
    key = (
        str(context.run_config.get("experiment")),
        str(context.run_config.get("set")),
        repr(sorted(context.node_config.items(), key=str)),
    )
    if key not in _built:
        experiment = experiment_of(context.run_config)
        _built[key] = experiment.on_node(NodeConfig.read(context.node_config))
    return _built[key]


def within(seconds: float, work: Callable[[], ResultT]) -> ResultT:
    """Do the work, but no longer than the server waits: a node that hangs would miss the next round as well."""
    results: list[ResultT] = []
    faults: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as fault:
            faults.append(fault)

    thread = threading.Thread(target=run, daemon=True, name="work")
    thread.start()
    thread.join(seconds)
    if faults:
        raise faults[0]
    if not results:
        raise TimeoutError(f"took longer than the {seconds:g} s that the server waits")
    return results[0]


def _states(context: Context, run: str, federation: str) -> NodeStates:
    keep = experiment_of(context.run_config).store.checkpoint_every + 1
    folder = NodeConfig.read(context.node_config).state
    return NodeStates(context.state, run, federation, keep, folder)


def _introduce(context: Context) -> RecordDict:
    node = node_clients(context)
    form = IntroductionForm(version=__version__, clients=list(node.names), about=dict(node.about))
    return wire.content(form, {})


def _train(message: Message, context: Context) -> RecordDict:
    task, run, seconds = wire.read_task(message.content)

    def work() -> RecordDict:
        clients = node_clients(context).clients
        states = _states(context, run, task.federation)
        clients.restore(states.before(task.round))
        (updates,) = clients.train([task])
        states.keep(task.round, clients.snapshot())
        return wire.write_updates(updates, experiment_of(context.run_config).codec())

    return within(seconds, work)


def _evaluate(message: Message, context: Context) -> RecordDict:
    question, run, seconds = wire.read_question(message.content)

    def work() -> RecordDict:
        clients = node_clients(context).clients
        clients.restore(_states(context, run, question.federation).before(question.round + 1))
        with torch.no_grad():
            (answer,) = clients.evaluate([question])
        return wire.write_evaluations(answer)

    return within(seconds, work)


app = ClientApp()


@app.query("introduce")
def introduce(message: Message, context: Context) -> Message:
    """Say which clients live on this node."""
    return Message(_introduce(context), reply_to=message)


@app.train("task")
def train(message: Message, context: Context) -> Message:
    """Train those of this node's clients that the server asks for."""
    return Message(_train(message, context), reply_to=message)


@app.evaluate("question")
def evaluate(message: Message, context: Context) -> Message:
    """Test the server's models on the test sets of all clients of this node."""
    return Message(_evaluate(message, context), reply_to=message)
