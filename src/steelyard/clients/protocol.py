"""The two protocols that the round loop speaks to: it never knows which implementation answers, nor asks it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from steelyard.base.tallies import Leading
from steelyard.messages.algorithm import Algorithm
from steelyard.messages.payloads import ServerTest
from steelyard.messages.updates import Counts, Evaluations, Question, RowTests, Task, Updates
from steelyard.proof.statements import SealedRound

if TYPE_CHECKING:
    # Only for annotations: the process of a node that speaks to the server does without torch.
    import torch

    from steelyard.data.findings import Finding
    from steelyard.data.preparation import Preparation
    from steelyard.privacy.clipping import DeviceNoise


class Clients(Protocol):
    """The devices of a federation: in this process, across machines, or anything else that trains and evaluates.

    Derive from it. What has an answer here need only be written by clients of which something else is true.
    """

    complete: bool = True
    """Whether all clients are known before the first round; across machines some may come later."""
    terms: Mapping[str, Any] = {}
    """Fields of the experiment, by dotted name, as owners of nodes limit them."""
    findings: Sequence[Finding] = ()
    """What they found wrong with their data before the first round, where nobody else can look."""

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        """Refuse what cannot work with the data (model, loss, engine, algorithms), before there is a folder."""

    def names(self, seed: int) -> Sequence[str]:
        """Return the stable ids of all registered clients, ascending."""
        ...

    def samples(self, seed: int) -> Mapping[str, int]:
        """Return how many samples each client trains on, where it is known before a round; empty where it is not."""
        return {}

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        """Do the tasks and return one answer each, in order; clients that fail are named in the answer."""
        ...

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        """Test models on every registered client; one answer per question, in order."""
        ...

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Return what the clients keep between rounds and a checkpoint must hold (empty when it lives elsewhere)."""
        ...

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `snapshot` returned; called once, before the first round after a resume."""
        ...

    def describe(self) -> Mapping[str, str]:
        """Return what a reader of the run should know of how the clients work: engine, device, memory, notes."""
        ...

    @property
    def notes(self) -> Sequence[str] | None:
        """What is new of the clients after a round: who came, who was refused, and why; None where nothing can be."""
        return None

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        """Return what tells the data of a seed from others, part by part, for a resume; empty where not at hand."""
        return {}

    def preparation(self, seed: int) -> Preparation | None:
        """Return what the rows of a seed go through before a model sees them; None where that is not at hand."""
        return None

    def colluders(self, seed: int, round: int) -> Mapping[str, str]:
        """Return the family of candidates of each simulated client that colludes in a round (`defence.candidates`):
        these know the rule, see all updates of their cohort, and choose what to send.
        """
        return {}

    def prove_by(self, sealed: Callable[[int], SealedRound | None]) -> None:
        """Say where the rounds of the signed chain are found, for clients whose nodes keep what it says of them; called
        once, before the first round.
        """

    def hand_out(self) -> None:
        """Send nodes what they do not have yet of the signed chain; called once, after the last round."""

    def close(self) -> None:
        """Let go of devices and connections."""


class WrappedClients(Clients):
    """Clients around others that do the work; derive from it what changes their tasks or their answers."""

    def __init__(self, clients: Clients) -> None:
        self.clients = clients
        self.complete, self.terms = clients.complete, clients.terms

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        self.clients.check(algorithms)

    def names(self, seed: int) -> Sequence[str]:
        return self.clients.names(seed)

    def samples(self, seed: int) -> Mapping[str, int]:
        return self.clients.samples(seed)

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        return self.clients.train(tasks)

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        return self.clients.evaluate(questions)

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return self.clients.snapshot()

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        self.clients.restore(state)

    def describe(self) -> Mapping[str, str]:
        return self.clients.describe()

    @property
    def notes(self) -> Sequence[str] | None:
        return self.clients.notes

    def fingerprint(self, seed: int) -> Mapping[str, str]:
        return self.clients.fingerprint(seed)

    def preparation(self, seed: int) -> Preparation | None:
        return self.clients.preparation(seed)

    def colluders(self, seed: int, round: int) -> Mapping[str, str]:
        return self.clients.colluders(seed, round)

    def prove_by(self, sealed: Callable[[int], SealedRound | None]) -> None:
        self.clients.prove_by(sealed)

    def hand_out(self) -> None:
        self.clients.hand_out()

    def close(self) -> None:
        self.clients.close()


ON_THE_WAY_OUT = ("algorithm", "behaviour", "vectors", "measure", "clock", "noise", "sign", "hide")
"""What happens to the updates of a cohort before they leave, in this order.

What the algorithm makes of the training; what a client that breaks the protocol sends instead; vectors beside the
models, which follow from what is sent; criteria, of what is sent; who comes too late; noise, which covers all of it;
the node's signature, of what it then has; masks. The server undoes it from the end: it opens the sum, checks
signatures, discounts who was late, and the algorithm makes the new model of the sum.
"""


@dataclass(eq=False)
class Sending:
    """One task's updates on their way out; every step puts in what it makes of them."""

    task: Task
    updates: Updates


SendingT = TypeVar("SendingT", bound=Sending, contravariant=True)


class Step(Generic[SendingT]):
    """One thing that happens to updates on their way out; derive from it what does it."""

    name: ClassVar[str]
    """Its name in `ON_THE_WAY_OUT`."""

    def check(self) -> None:
        """Refuse what cannot work, before there is a folder."""

    def out(self, sending: SendingT) -> None:
        """Change what is sent."""
        raise NotImplementedError

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        """Return what is kept between rounds."""
        return {}

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        """Put back what `snapshot` returned; entries of others are passed over."""

    def describe(self) -> Mapping[str, str]:
        """Return what a reader of the run should know of it."""
        return {}


StepT = TypeVar("StepT", bound=Step)


def in_order(steps: Iterable[StepT]) -> tuple[StepT, ...]:
    """Return steps in the order in which updates pass them."""
    return tuple(sorted(steps, key=lambda step: ON_THE_WAY_OUT.index(step.name)))


class Noise(Step[Sending]):
    """Devices clip and noise what they send.

    Tests of models are answered as they are: the guarantee does not cover them. The owner of a node can refuse them
    there (`NodeConfig.tests`).
    """

    name = "noise"

    def __init__(self, noise: DeviceNoise) -> None:
        self.noise = noise

    def out(self, sending: Sending) -> None:
        sending.updates = self.noise.applied(sending.task, sending.updates)


class SendingClients(WrappedClients):
    """Clients whose updates pass some steps before they leave; made where clients are built."""

    def __init__(self, clients: Clients, steps: Iterable[Step[Sending]]) -> None:
        super().__init__(clients)
        self.steps = in_order(steps)

    def check(self, algorithms: Sequence[Algorithm]) -> None:
        for step in self.steps:
            step.check()
        super().check(algorithms)

    def train(self, tasks: Sequence[Task]) -> list[Updates]:
        sent = [Sending(task, answer) for task, answer in zip(tasks, self.clients.train(tasks), strict=True)]
        for step in self.steps:
            for sending in sent:
                step.out(sending)
        return [sending.updates for sending in sent]

    def snapshot(self) -> Mapping[str, torch.Tensor]:
        return {
            **self.clients.snapshot(),
            **{key: held for step in self.steps for key, held in step.snapshot().items()},
        }

    def restore(self, state: Mapping[str, torch.Tensor]) -> None:
        for step in self.steps:
            step.restore(state)
        self.clients.restore(state)

    def describe(self) -> Mapping[str, str]:
        return {
            **self.clients.describe(),
            **{key: said for step in self.steps for key, said in step.describe().items()},
        }


class RemainingClients(WrappedClients):
    """All clients but some that have withdrawn: these do not train, and no test of theirs comes back."""

    def __init__(self, clients: Clients, withdrawn: Collection[str]) -> None:
        super().__init__(clients)
        self.withdrawn = frozenset(withdrawn)

    def names(self, seed: int) -> Sequence[str]:
        return [name for name in self.clients.names(seed) if name not in self.withdrawn]

    def evaluate(self, questions: Sequence[Question]) -> list[Evaluations]:
        asked = [replace(question, withdrawn=self.withdrawn) for question in questions]
        return [answer.without(self.withdrawn) for answer in self.clients.evaluate(asked)]


class Server(Protocol):
    """What the server itself can compute; derive from it.

    First parameters and tests every server has. All else has an answer here for a server that cannot say: None.
    """

    @property
    def classes(self) -> int | None:
        """How many classes the task has, so that nobody can claim more; 0 for a regression, None where not known."""
        return None

    def initial(self, seed: int) -> torch.Tensor:
        """Return the first global model as one flat vector, a pure function of the seed."""
        ...

    def test(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest:
        """Test models [candidates, parameters] on the server's own test set.

        Where a measure leads, it and all others of the task are among the figures.
        """
        ...

    def report(self, seed: int, models: torch.Tensor, measure: Leading | None = None) -> ServerTest | None:
        """Test models [candidates, parameters] on rows that report on them, apart from those that weigh clients."""
        return None

    def report_rows(self, seed: int) -> int:
        """Return how many rows report, or weigh and report, so that readers know what figures rest on; 0 for none."""
        return 0

    def row_tests(self, seed: int, models: torch.Tensor) -> RowTests | None:
        """Test models [candidates, parameters] on single rows: those that only report, or else those that weigh."""
        return None

    def gradients(self, seeds: Sequence[int], models: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of the server's loss at each model [models, parameters], one seed per model."""
        return None

    def train(self, seed: int, round: int, parameters: torch.Tensor) -> torch.Tensor | None:
        """Train a model on the server's own rows as a client would on its own, and return it."""
        return None

    def output_layer(self, seed: int) -> Counts | None:
        """Return the positions [outputs, parameters of each] of the last layer's rows in the flat model, bias last."""
        return None

    def kernels(self, seed: int) -> Counts | None:
        """Return where each layer's kernel begins and ends in the flat model: [kernels, 2]."""
        return None

    def adapters(self, seed: int) -> Counts | None:
        """Return for each low-rank adapter [where A begins, where B begins, rank, inputs, outputs]."""
        return None

    def imagined(self, seed: int, colluders: Collection[str], *, insider: bool = False) -> Server | None:
        """Return a simulation's server as its colluders imagine it in one round: with rows of theirs as its own, or
        with its own where they know these.
        """
        return None
