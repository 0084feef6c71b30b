"""What an algorithm is: the points at which one may differ from FedAvg, and what it is given there.

    client: begins at the received model, or with parts of a model of its own in it
            step ← gradient + pull·(θ − Θ) + correction      (learning/descent.py is the gate)
            or steps of the algorithm's own, one batch after another
            after its last step: what it keeps for its next round, what it sends beside its model
            tests the received model, or one of its own
    server: from the cohort's weighted sum, or from single updates, to the new model and to what it keeps

An algorithm is one file in this folder that reads like its paper: a frozen section of settings with the methods that
differ. What it leaves out is FedAvg's. It declares the vectors that clients keep and send and that the server keeps;
the loop, the engines, the wire, the store and the checkpoints carry them. Weights come from any weighing rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from steelyard.base.settings import Section

if TYPE_CHECKING:
    # Only for annotations: settings are read without waiting for torch.
    import torch

Vectors = Mapping[str, "torch.Tensor"]
"""Vectors by name, each as long as the model: of one federation [parameters], of a cohort [clients, parameters]."""
Floats = NDArray[np.float64]
Part = Literal["nothing", "head", "body", "norms", "everything"]
"""A part of a model: its last layer, all but its last layer, its batch norms with their running means, or all of it."""
OWN, LAST = "own", "last"
"""Under these names clients keep models: their own, and the one that their last training ended with. Both begin as the
first model that a client receives, not at 0."""
FACTORS = "factors"
"""Under this name the server of a `factored` algorithm keeps where the low-rank adapters of the model stand: for each
[where A begins, where B begins, rank, inputs, outputs]."""


class Batch(Protocol):
    """One batch of rows for each client of a cohort; a client without such a batch has gradient 0 and stands still."""

    def gradient(self, models: torch.Tensor) -> torch.Tensor:
        """Return ∇Fᵢ of each client's row of models on its batch, [clients, parameters]; outside the part it is any."""
        ...

    @property
    def losses(self) -> torch.Tensor:
        """Fᵢ of the models whose gradient was asked for last, [clients]; 0 for a client that has no such batch."""
        ...

    @property
    def taken(self) -> torch.Tensor:
        """Whether each client has such a batch, [clients]."""
        ...


class LocalSteps(Protocol):
    """The local training of some clients of a cohort that an algorithm does itself; `Algorithm.train` is given it.

    An engine cuts a cohort into stacks of clients that train side by side, each maybe in a thread of its own. The
    numbers of a model may stand in an order of the engine's; `part` says which are which.

    >>> def train(self, local: steelyard.LocalSteps):  # FedAvg's training, step by step
    ...     models, move = local.start, local.optimiser()
    ...     for batch in local.batches():
    ...         models = move(models, batch.gradient(models))
    ...     return models, {}
    """

    start: torch.Tensor
    """Where each client begins, [clients, parameters]."""
    received: torch.Tensor
    """Θ: the global model that each client received, [clients, parameters]."""
    kept: Vectors
    """What the clients kept from their last round, [clients, parameters] each."""
    rate: float
    """η: the local learning rate of this round."""

    def part(self, part: Part) -> torch.Tensor:
        """Return for each parameter whether it belongs to this part of the model."""
        ...

    def batches(self, epochs: int | None = None, share: float = 1.0, part: Part = "everything") -> Iterator[Batch]:
        """Return the batches of a training in the order of its steps.

        `epochs` None is as [training] says. With a `share` below 1 each client goes through so many of its rows, drawn
        anew in each round; it has at least one. Gradients are those in a `part` of the model, which may take less.
        """
        ...

    def optimiser(self) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return (models, gradients) → models after one step of the optimiser of [training], on the current batch."""
        ...

    def trained(self, start: torch.Tensor, part: Part = "everything", epochs: int | None = None) -> torch.Tensor:
        """Return what the ordinary training of the round makes of these models, [clients, parameters].

        Only parameters of this part move, and running means; `epochs` None is as [training] says.
        """
        ...


@dataclass(frozen=True, eq=False)
class SecondTraining:
    """A second training of the same clients in the same round, of a model that is not sent."""

    start: torch.Tensor
    """Where each client begins, [clients, parameters]."""
    pull: float
    """μ of the term μ/2 ‖θ − start‖² in its loss."""
    correction: torch.Tensor
    """What is added to each client's gradients, [clients, parameters]."""


@dataclass(frozen=True, eq=False)
class LocalTraining:
    """What the clients of one cohort did this round, side by side; `Algorithm.after_training` is given it.

    >>> def moved(training: steelyard.LocalTraining):  # [clients, parameters]
    ...     return training.models - training.start
    """

    start: torch.Tensor
    """Θ: the global model that was received, [1 or clients, parameters]; a client may start from one of its own."""
    models: torch.Tensor
    """θᵢ: the models after the last step, [clients, parameters]."""
    steps: torch.Tensor
    """τᵢ: how many steps each client took, [clients, 1]."""
    rate: float
    """η: the local learning rate of this round."""
    received: Vectors
    """What the server sent beside the model, [parameters] each."""
    kept: Vectors
    """What the clients kept from their last round, [clients, parameters] each; at first 0, and Θ for OWN."""
    second: torch.Tensor | None = None
    """The models of the second training, [clients, parameters], where the algorithm has one."""


@dataclass(frozen=True, eq=False)
class Listening:
    """What each client of a cohort found out about the models of all; `Algorithm.listen` is given it."""

    losses: torch.Tensor
    """Lᵢ(θⱼ): of each client's held-back rows, each model's mean loss, [clients, models]."""
    last_losses: torch.Tensor
    """Lᵢ(θᵢ⁻): the loss of what the client's last training ended with, [clients]."""
    distances: torch.Tensor
    """‖θⱼ − θᵢ⁻‖, [clients, models]."""


@dataclass(frozen=True, eq=False)
class ServerStep:
    """What the server has at hand when it steps; `Algorithm.step` is given it.

    >>> def step(self, server: steelyard.ServerStep):  # the new model [parameters], and what the server keeps
    ...     return server.average, {}
    """

    parameters: torch.Tensor
    """Θ: the global model before the step, [parameters]."""
    average: torch.Tensor
    """Σ wᵢθᵢ, or what a robust rule, noise or a hidden sum make of it: what FedAvg would take as its new model."""
    weights: Floats
    """wᵢ: the weights of the cohort, which sum to 1."""
    tensors: Vectors
    """What the server kept from its last step."""
    share: float
    """The cohort's share of all clients."""
    momentum: float
    """The clients' momentum."""
    models: torch.Tensor | None = None
    """θᵢ: the single models, [clients, parameters], for algorithms that declare `sees = "models"`."""
    sent: Vectors | None = None
    """What the clients sent beside their models, [clients, parameters] each."""
    steps: NDArray[np.int64] | None = None
    """τᵢ: how many steps each client took."""

    @property
    def change(self) -> torch.Tensor:
        """Δ = Σ wᵢθᵢ − Θ, the step that FedAvg would take."""
        return self.average - self.parameters

    def weighted(self, vectors: torch.Tensor, weights: Floats | None = None) -> torch.Tensor:
        """Return Σ wᵢxᵢ of vectors [clients, parameters], by the cohort's weights or by others."""
        given = vectors.new_tensor(self.weights if weights is None else weights)
        return (given @ vectors).to(self.parameters.device)


class Algorithm(Section):
    """FedAvg (McMahan et al. 2017), and the base of every other algorithm: Θ ← Σ wᵢθᵢ.

    Derive from it, decorate the class with `@algorithm("name")`, declare what travels, and write the methods that
    differ. Fields of the class are its settings, with their defaults.

        >>> class Half(steelyard.Algorithm):
        ...     def step(self, server): return server.parameters + 0.5 * server.change, {}
    """

    name: ClassVar[str] = "fedavg"
    """The name that experiments use; `@algorithm` sets it."""
    corrects: ClassVar[Literal["nothing", "gradient", "step"]] = "nothing"
    """What a client's correction is added to: its gradient before any momentum, or the step that it takes."""
    keeps: ClassVar[tuple[str, ...]] = ()
    """Vectors that each client keeps from round to round, by name; they begin as `fresh` says."""
    sends: ClassVar[tuple[str, ...]] = ()
    """Vectors that each client sends beside its model, by name."""
    receives: ClassVar[tuple[str, ...]] = ()
    """Which of the server's tensors every client receives beside the model."""
    sees: ClassVar[Literal["sum", "models"]] = "sum"
    """What the server's step needs: the weighted sum alone, or single models too. A step that needs only the sum goes
    with robust rules, noise and hidden sums."""
    counts_steps: ClassVar[bool] = False
    """Whether the server must know how many steps each client took."""
    optimisers: ClassVar[tuple[str, ...]] = ("sgd", "adam", "adadelta")
    """The local optimisers for which the algorithm is defined."""
    personal: ClassVar[bool] = False
    """Whether each client tests a model of its own; then its accuracy is that model's."""
    private: ClassVar[Part] = "nothing"
    """The part of its model that each client keeps for itself, under OWN: it is not sent, and the server's model keeps
    what it had there."""
    tunes: ClassVar[bool] = False
    """Whether each client trains its model once more, as in the next round, before it tests it."""
    by_hand: ClassVar[bool] = False
    """Whether the algorithm takes its clients' steps itself, in `train`."""
    replaces: ClassVar[bool] = False
    """Whether clients send something else than the model that they trained, which `sent` returns."""
    factored: ClassVar[bool] = False
    """Whether the algorithm works on low-rank adapters (LoRA); its server then keeps FACTORS."""
    listens: ClassVar[bool] = False
    """Whether each client weighs the models of the whole cohort for itself; it then keeps OWN and LAST."""

    @property
    def held_back(self) -> float:
        """The share of each client's training rows that it tests models on and does not train on."""
        return 0.0

    @property
    def pull(self) -> float:
        """μ of the term μ/2 ‖θ − Θ‖² in the local loss."""
        return 0.0

    def correction(self, received: Vectors, kept: Vectors) -> torch.Tensor:
        """Return each client's correction for the whole round, [clients, parameters]; asked for where it corrects."""
        raise NotImplementedError(f"{type(self).__name__}.correction")

    def begin(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        """Return where clients begin a round, [clients, parameters]; asked for where the algorithm is personal.

        `parameters` is Θ, [1 or clients, parameters]; `private` says of each parameter whether it is kept from others.
        """
        return parameters.where(~private, kept[OWN]) if OWN in kept else parameters

    def own_models(self, parameters: torch.Tensor, kept: Vectors, private: torch.Tensor) -> torch.Tensor:
        """Return the models that clients test, [clients, parameters]; asked for where the algorithm is personal."""
        return self.begin(parameters, kept, private)

    def fresh(self, name: str, received: torch.Tensor) -> torch.Tensor:
        """Return what clients that kept nothing yet have under a name, [clients, parameters or 1]."""
        return received if name in (OWN, LAST) else received * 0

    def visited(self, once: Floats, sizes: Floats) -> Floats:
        """Return how many rows clients go through in a round; `once` is one training of clients of these sizes."""
        return once

    def train(self, local: LocalSteps) -> tuple[torch.Tensor, Vectors]:
        """Return the models that the clients end with, and what they keep; asked for where the algorithm is by hand.

        The loss that a client reports is the mean over the last pass of what its batches' `losses` held.
        """
        raise NotImplementedError(f"{type(self).__name__}.train")

    def again(self, local: LocalTraining) -> SecondTraining | None:
        """Return what a second training in the same round begins with; None where there is none."""
        return None

    def listen(self, heard: Listening) -> torch.Tensor:
        """Return the weight that each client gives each model of the cohort, [clients, models]; asked where it listens.

        What is missing from 1 in a row goes to the model that the client's last training ended with.
        """
        raise NotImplementedError(f"{type(self).__name__}.listen")

    def sent(self, local: LocalTraining) -> tuple[torch.Tensor, Vectors]:
        """Return what clients send in place of their models, and what they keep; asked for where it replaces them."""
        raise NotImplementedError(f"{type(self).__name__}.sent")

    def after_training(self, local: LocalTraining) -> tuple[Vectors, Vectors]:
        """Return what the clients keep, and what they send beside their models; [clients, parameters] each."""
        return {}, {}

    def rank_of(self, client: str) -> int | None:
        """Return how many ranks of its adapters a client trains, None for all; asked for where it is factored."""
        return None

    def figures(self, tensors: Vectors) -> Mapping[str, float]:
        """Return what the record of a round says of the server's step, by name, from what the server keeps."""
        return {}

    def start(self, parameters: torch.Tensor) -> Vectors:
        """Return what the server keeps before the first round."""
        return {}

    def step(self, server: ServerStep) -> tuple[torch.Tensor, Vectors]:
        """Return the new model and what the server keeps; called for every weighting that is tried in a round."""
        return server.average, server.tensors
