"""The models of a cohort that lie on the ranks which trained them: what is asked of them is computed there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.clients.ranks.wire import Content
from steelyard.messages.payloads import DenseModels, Floats, ServerTest, SingleModels, spans


class Asking(Protocol):
    """From a command and what each rank is given for it to the answers by rank."""

    def __call__(self, command: str, contents: Mapping[int, Content]) -> Mapping[int, Content]: ...


class RankedModels(DenseModels):
    """Whole local models, each on the rank that trained it.

    Sums, distances and tests are done there, and only what comes of them travels. Sums are added up in the order of
    the ranks. Whoever asks for `models` gets all of them into the memory of this process, once a round.
    """

    at_hand = False

    def __init__(
        self,
        ask: Asking,
        task: tuple[int, int],
        seed: int,
        places: Sequence[tuple[int, int]],
        received: torch.Tensor,
        memory: Callable[[int], torch.Tensor],
        frozen: tuple[tuple[int, int], ...] = (),
    ) -> None:
        """Name the rank and the row there of each client; `task` is the number of the training, and its place in it.

        `memory` gives a matrix for so many models, where all of them are wanted here.
        """
        object.__setattr__(self, "frozen", frozen)
        self._ask, self._task, self._seed, self._received = ask, task, seed, received
        self._places, self._memory = tuple(places), memory

    @cached_property
    def models(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        """All models, copied into this process."""
        found = self._memory(len(self._places))
        for span, models in self.blocks():
            found[:, span] = models
        return found

    @property
    def nbytes(self) -> int:
        return 4 * len(self._places) * self._received.numel()

    @property
    def like(self) -> torch.Tensor:
        return self._received.new_empty((len(self._places), 0))

    def blocks(self) -> Iterator[tuple[slice, torch.Tensor]]:
        for span in spans(self._received.numel(), len(self._places), self._received.device.type):
            found = self._received.new_empty((len(self._places), span.stop - span.start))
            for clients, rows in self._asked("rows", span=[span.start, span.stop]):
                found[clients] = rows.to(found.device)
            yield span, found

    def combine(self, parameters: torch.Tensor, weights: Floats) -> torch.Tensor:
        given = np.asarray(weights, dtype=np.float64)
        total = self._received.new_zeros((*given.shape[:-1], self._received.numel()))
        by_rank = {rank: given[..., clients] for rank, clients in self._clients().items()}
        for _, part in self._asked("sum", by_rank):
            total += part.to(total.device)
        return self.keep_frozen(total, parameters)

    def divergence(self, parameters: torch.Tensor) -> Floats:
        # The ranks have the model that they were sent.
        known = torch.equal(parameters.to(self._received.device), self._received)
        return self._in_order(self._asked("divergence", parameters=None if known else parameters), np.float64)

    def gram(self, parameters: torch.Tensor) -> Floats:
        return SingleModels.gram(self, parameters)

    def finite(self) -> NDArray[np.bool_]:
        return self._in_order(self._asked("finite"), np.bool_)

    def tested(self, test: Callable[[torch.Tensor], ServerTest]) -> ServerTest:
        """Return the test of every model by the server of the rank that holds it: all have the same rows."""
        answers = self._asked("tested", seed=self._seed)
        order = np.argsort([client for clients, _ in answers for client in clients])
        return ServerTest.joined([ServerTest(**found) for _, found in answers], order)

    def select(self, keep: Sequence[int]) -> RankedModels:
        places = [self._places[place] for place in keep]
        return RankedModels(self._ask, self._task, self._seed, places, self._received, self._memory, self.frozen)

    def content(self) -> Sequence[NDArray[Any]] | None:
        return DenseModels(self.models).content()

    def _clients(self) -> dict[int, list[int]]:
        """By rank, in order: which of the clients it trained."""
        found: dict[int, list[int]] = {rank: [] for rank in sorted({rank for rank, _ in self._places})}
        for client, (rank, _) in enumerate(self._places):
            found[rank].append(client)
        return found

    def _asked(
        self, command: str, weights: Mapping[int, Floats] | None = None, **given: Content
    ) -> list[tuple[list[int], Content]]:
        """Have each rank do something with its models; returns the clients that it trained, and its answer."""
        clients = self._clients()
        contents = {
            rank: {
                **given,
                "task": self._task,
                "rows": np.array([self._places[client][1] for client in mine], dtype=np.int64),
                **({} if weights is None else {"weights": weights[rank]}),
            }
            for rank, mine in clients.items()
        }
        answers = self._ask(command, contents)
        return [(clients[rank], answers[rank]) for rank in clients]

    def _in_order(self, answers: Sequence[tuple[list[int], Content]], kind: Any) -> NDArray[Any]:
        found = np.zeros(len(self._places), dtype=kind)
        for clients, values in answers:
            found[clients] = values
        return found
