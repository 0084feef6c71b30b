"""Local training, one client after another: the slow, readable version that every faster engine is held to."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from steelyard.base.errors import UserError, fault
from steelyard.base.randomness import permutations, stream_key, stream_keys
from steelyard.learning import losses
from steelyard.learning.augmentation import Augmentation
from steelyard.learning.descent import Descent
from steelyard.learning.dropout import drawing, set_chance
from steelyard.learning.parameters import Layout, for_training, names_of, still_layers
from steelyard.learning.settings import TrainingSettings
from steelyard.messages.algorithm import Part
from steelyard.messages.updates import LossState


def orders(seed: int, round: int, clients: Sequence[str], size: int, settings: TrainingSettings) -> NDArray[np.int64]:
    """Return the order in which clients of one size visit their samples: [clients, passes, size].

    It is a pure function of (seed, round, client). One batch of everything needs no order: it is taken as stored.
    """
    passes = settings.epochs
    if settings.updates is not None:
        # As many as whole batches alone would need: steps of a pass too many are left out.
        passes = -(-settings.updates // max(size // batch_limit(settings, size), 1))
    if settings.batch_size == "full" or settings.batch_size >= size:
        return np.broadcast_to(np.arange(size), (len(clients), passes, size))
    return permutations(stream_keys(seed, round, clients, "batches"), size, passes)


def batch_limit(settings: TrainingSettings, size: int) -> int:
    """Return how many samples a step takes from a client of this size."""
    return size if settings.batch_size == "full" else min(settings.batch_size, size)


def normalises_batches(module: nn.Module) -> bool:
    """Whether a module normalises over the samples of a batch (batch norm), so that one sample says nothing."""
    still = set(map(id, still_layers(module)))
    return any(isinstance(layer, _BatchNorm) and id(layer) not in still for layer in module.modules())


def cut(rows: NDArray[np.int64], step: int, *, joined: bool) -> list[NDArray[np.int64]]:
    """Cut an epoch into batches; `joined` adds a last batch of one row to the one before, for batch norm."""
    parts = [rows[begin : begin + step] for begin in range(0, len(rows), step)]
    if joined and len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [np.concatenate(parts[-2:])]
    return parts


class ClientLoop:
    """A module that trains one client after another; what is the same for all of them is looked up once."""

    def __init__(self, module: nn.Module, layout: Layout) -> None:
        self.module, self.layout = module, layout
        still = set(map(id, still_layers(module)))
        self._modes = [(layer, id(layer) not in still) for layer in module.modules()]
        self._outside = _copied(layout.outside(module))
        self._draws, self._joined = drawing(module), normalises_batches(module)
        self._parts: dict[Part, dict[str, nn.Parameter]] = {}

    def _moving(self, part: Part) -> dict[str, nn.Parameter]:
        """Return by name the parameters of a part of the model."""
        if part not in self._parts:
            names = names_of(self.module, part)
            self._parts[part] = {name: each for name, each in self.module.named_parameters() if name in names}
        return self._parts[part]

    def train(
        self,
        start: torch.Tensor,
        features: torch.Tensor,
        labels: torch.Tensor,
        order: NDArray[np.int64],
        settings: TrainingSettings,
        loss: LossState,
        chance: int | None = 0,
        key: int = 0,
        descent: Descent | None = None,
        correction: torch.Tensor | None = None,
        augment: Augmentation | None = None,
        into: torch.Tensor | None = None,
        part: Part = "everything",
    ) -> tuple[torch.Tensor, float]:
        """Train one client from `start` and return its flat model and the mean loss of its last pass over its data.

        `chance` seeds torch's generator for layers that draw from it; None leaves it alone, which threads must. `key`
        names the stream of draws by name: dropout's and those of `augment`. `descent` is the optimiser where it is not
        that of the settings alone; `correction` is the client's vector for it, flat. `into` is a vector for the model.
        Of a `part` of the model, that part alone moves, and running means.
        """
        moving = self._moving(part)
        parameters = list(moving.values())
        self.layout.write(self.module, start)
        self._begin_anew()
        descent, taken = descent or Descent.of(settings), 0
        starts = [parameter.detach().clone() for parameter in parameters] if descent.pull else []
        views = {} if correction is None else self.layout.views(correction)
        corrections = [views[name] for name in moving] if views else []
        memories = [descent.remember(parameter.detach()) for parameter in parameters] if descent.memories else []
        passes = [cut(rows, batch_limit(settings, len(labels)), joined=self._joined) for rows in order]
        batches = [torch.from_numpy(np.array(batch)).to(features.device) for one in passes for batch in one]
        batches = batches[: settings.updates]
        last = max(len(batches) - len(passes[-1]), 0)
        mean = torch.zeros((), device=features.device)
        slopes = self._slopes(loss, features.device, key, augment)
        with nullcontext() if chance is None else seeded(features.device, chance):
            for batch in batches:
                total = slopes(features.index_select(0, batch), labels.index_select(0, batch), taken, parameters)
                _descend(descent, taken, parameters, memories, starts, corrections)
                if taken >= last:
                    mean += total
                taken += 1
        return self.layout.read(self.module, into), float(mean) / max(sum(map(len, batches[last:])), 1)

    def gradient(
        self,
        model: torch.Tensor,
        features: torch.Tensor,
        labels: torch.Tensor,
        loss: LossState,
        chance: int | None = 0,
        key: int = 0,
        taken: int = 0,
        augment: Augmentation | None = None,
        part: Part = "everything",
        *,
        into: torch.Tensor,
    ) -> torch.Tensor:
        """Write the gradient of the mean loss of one batch at a flat model, in a part of it; return that loss.

        In place of running means stands how far the batch moves them down. `taken` is the number of the step.
        """
        moving = self._moving(part)
        own = dict(self.module.named_parameters())
        held = {name: each.data for name, each in own.items()}
        views, found = self.layout.views(model), self.layout.views(into)
        buffers = [slot.name for slot in self.layout.buffer_slots]
        self._begin_anew()
        for name in buffers:
            self.module.get_buffer(name).copy_(views[name])
        slopes = self._slopes(loss, features.device, key, augment)
        try:
            # The module computes with the model where it lies: to copy it would take as long as a small step.
            for slot in self.layout.trained_slots:
                own[slot.name].data = views[slot.name]
            with nullcontext() if chance is None else seeded(features.device, chance + taken):
                total = slopes(features, labels, taken, list(moving.values()))
        finally:
            for name, each in held.items():
                own[name].data = each
        for slot in self.layout.trained_slots:
            slope = moving[slot.name].grad if slot.name in moving else None
            found[slot.name].zero_() if slope is None else found[slot.name].copy_(slope)
        for name in buffers:
            found[name].copy_(views[name] - self.module.get_buffer(name))
        return total / len(labels)

    def _slopes(
        self, loss: LossState, device: torch.device, key: int, augment: Augmentation | None
    ) -> Callable[[torch.Tensor, torch.Tensor, int, list[nn.Parameter]], torch.Tensor]:
        """Return what takes the gradient of a batch in some parameters and returns the sum of its losses."""
        each, weights = losses.per_sample(loss), class_weights(loss, device)

        def slopes(seen: torch.Tensor, target: torch.Tensor, taken: int, moving: list[nn.Parameter]) -> torch.Tensor:
            for parameter in moving:
                parameter.grad = None
            set_chance(self._draws, key, taken)
            if augment is not None:
                seen = augment(seen, torch.tensor([key, taken], device=seen.device))
            total = losses.weigh(each(outputs_of(self.module, seen), target), target, weights).sum()
            _backward(total / len(target), moving)
            return total.detach()

        return slopes

    def _begin_anew(self) -> None:
        """Leave nothing of the client before: modes, and buffers that are no part of the model that is sent."""
        if not all(layer.training == wanted for layer, wanted in self._modes):
            for_training(self.module)
        for name, value in _copied(self._outside).items():
            part, _, own = name.rpartition(".")
            setattr(self.module.get_submodule(part), own, value)

    def changed(self) -> list[str]:
        """Return the buffers that training changed and that are not sent; torch's count of batches does not matter."""
        held = self.layout.outside(self.module)
        return [
            name
            for name, value in self._outside.items()
            if not name.endswith(("num_batches_tracked", "chance")) and not torch.equal(held[name], value)
        ]


def _copied(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy tensors; one that has several names, because layers share it, is one afterwards too."""
    copies = {id(tensor): tensor.clone() for tensor in tensors.values()}
    return {name: copies[id(tensor)] for name, tensor in tensors.items()}


def train_client(
    module: nn.Module, layout: Layout, start: torch.Tensor, *given: Any, **named: Any
) -> tuple[torch.Tensor, float]:
    """Train one client, as `ClientLoop.train` says; use it where a module has one client to train."""
    return ClientLoop(module, layout).train(start, *given, **named)


def _backward(loss: torch.Tensor, parameters: list[nn.Parameter]) -> None:
    """Take the gradient; a user's module or loss may not let it, or may leave all parameters out."""
    if not loss.requires_grad:
        raise UserError(f"model.name: its outputs have no gradient while it trains; {_GRADIENT}")
    try:
        loss.backward(inputs=parameters)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's own functions do on the way back
        raise UserError(f"model.name: no gradient can be taken of the model: {fault(error)}") from error
    if all(parameter.grad is None for parameter in parameters):
        raise UserError(f"model.name: none of its parameters has a part in its outputs; {_GRADIENT}")


_GRADIENT = "allowed: a forward that torch can take back to the module's own parameters"


@contextmanager
def seeded(device: torch.device, chance: int) -> Generator[None]:
    """Seed torch's generator of the device for one block and put its state back; use it around layers that draw."""
    # torch.manual_seed would seed every backend there is and note where from, which costs more than a small client.
    source = torch.cuda.default_generators[device.index or 0] if device.type == "cuda" else torch.default_generator
    state = source.get_state()
    source.manual_seed(chance)
    try:
        yield
    finally:
        source.set_state(state)


@torch.no_grad()
def _descend(
    descent: Descent,
    step: int,
    parameters: list[nn.Parameter],
    memories: list[list[torch.Tensor]],
    starts: list[torch.Tensor],
    corrections: list[torch.Tensor],
) -> None:
    """Take one step with every parameter. (torch.optim would do, but its import takes seconds.)

    One without a part in the outputs has the gradient 0: what decays and corrects goes for it, too, as in a stack.
    """
    if descent.plain:
        moved = [parameter for parameter in parameters if parameter.grad is not None]
        subtract: Any = torch._foreach_sub_  # pyright: ignore[reportPrivateImportUsage]
        subtract(moved, [parameter.grad for parameter in moved], alpha=descent.rate)
        return
    for index, parameter in enumerate(parameters):
        slope = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        start = starts[index] if starts else None
        correction = corrections[index] if corrections else None
        memory = memories[index] if memories else []
        descent.apply(parameter, slope, memory, start, step, correction=correction)


def class_weights(loss: LossState, device: torch.device | str) -> torch.Tensor | None:
    """Return κ as a tensor, or None where every class counts 1."""
    if loss.class_weights is None:
        return None
    return torch.tensor(loss.class_weights, dtype=torch.float32, device=device)


def chance_of(seed: int, round: int, client: str, before: int = 0) -> int:
    """Return the seed of layers that draw at random in this client's training of this round.

    `before` counts its trainings of this round before this one.
    """
    return stream_key(seed, round, client, f"layers {before}" if before else "layers")


# Calling a module of the user.


def outputs_of(module: nn.Module, features: torch.Tensor) -> torch.Tensor:
    """Return what a model makes of some samples, [samples, outputs]; use it wherever a user's module is called."""
    when = "while it trains" if module.training else "while it is tested"
    try:
        found = module(features)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the user's module does
        shape = tuple(features.shape[1:])
        raise UserError(
            f"model.name: the model fails {when}, on {len(features)} samples of shape {shape}: {fault(error)}"
        ) from error
    if not isinstance(found, torch.Tensor) or found.dim() != 2 or len(found) != len(features):
        shown = f"shape {tuple(found.shape)}" if isinstance(found, torch.Tensor) else type(found).__name__
        raise UserError(
            f"model.name: the model returned {shown} {when}, for {len(features)} samples; "
            "allowed: one tensor [samples, outputs], in training as in tests"
        )
    return found
