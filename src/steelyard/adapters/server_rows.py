"""The server's own rows in somebody else's federation: a network and labelled rows to test replies on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from steelyard.adapters.arrays import Arrays, Layout
from steelyard.base.errors import UserError, expect
from steelyard.learning import evaluation
from steelyard.messages.payloads import ServerTest


class NoRows:
    """A server without rows; criteria that need some are refused before the first round."""

    layout: Layout | None = None
    sent: Arrays | None = None
    """The model of the round; what is tested are changes of it."""

    def initial(self, seed: int) -> torch.Tensor:
        raise NotImplementedError("the framework makes the first model")

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        raise UserError("rows: not given; allowed: rows=ServerRows(network, features, labels)")


class ServerRows(NoRows):
    """Rows of the task that the server holds and trusts; hand them over where a rule measures on them (VP, GA).

    `network` is a torch.nn.Module whose state_dict has the names that clients send, `labels` are classes 0, 1, 2, ...

        >>> rows = ServerRows(torch.nn.Linear(3, 2), numpy.zeros((4, 3)), [0, 1, 0, 1])  # [rows, ...], [rows]

    Raises:
        UserError: rows and labels differ in number, numbers are not finite, or the network is not the
            clients'.
    """

    def __init__(self, network: torch.nn.Module, features: Any, labels: Any) -> None:
        expect("rows: network", network, torch.nn.Module, "a torch.nn.Module")
        self._network = network
        self._features = _tensor("features", features)
        self._labels = _classes(_tensor("labels", labels))
        floating = [value.dtype for value in network.state_dict().values() if value.is_floating_point()]
        if floating and self._features.is_floating_point():
            self._features = self._features.to(floating[0])
        counts = [int(part.shape[0]) if part.ndim else 0 for part in (self._features, self._labels)]
        if counts[0] != counts[1] or not counts[0]:
            raise UserError(
                f"rows: {counts[0]} features and {counts[1]} labels; allowed: as many of both, and at least one"
            )
        if not bool(torch.isfinite(self._features).all()):
            raise UserError("rows: features hold NaN or infinity; allowed: finite numbers")

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Return accuracy and the figures of each class for each model, given as changes [models, parameters]."""
        state = self._network.state_dict()
        counts = [self._confusion(model, state) for model in models]
        stacked = np.stack(counts)
        return ServerTest(evaluation.accuracy(stacked), evaluation.f1(stacked), by_class=evaluation.by_class(stacked))

    def _confusion(self, model: torch.Tensor, state: dict[str, torch.Tensor]) -> Any:
        assert self.layout is not None
        # A copy: what the changes are added to must stay as it is.
        arrays = self.layout.arrays(model.clone(), None, self.sent)
        floating = [name for name, value in state.items() if value.is_floating_point()]
        for name in sorted({*floating} ^ {*arrays}):
            whose = "the network has '{}', which clients do not send" if name in floating else "clients send '{}' too"
            raise UserError(f"rows: {whose.format(name)}; allowed: the clients' network")
        given = {name: torch.from_numpy(array).to(state[name].dtype) for name, array in arrays.items()}
        training = self._network.training
        self._network.eval()
        try:
            with torch.no_grad():
                outputs = torch.func.functional_call(self._network, {**state, **given}, (self._features,))
        except (RuntimeError, ValueError, TypeError) as error:
            reason = str(error).partition("\n")[0]
            raise UserError(
                f"rows: the network cannot look at them ({reason}); allowed: rows as clients have"
            ) from error
        finally:
            self._network.train(training)
        classes = max(int(outputs.shape[-1]), 2)
        if int(self._labels.max()) >= classes:
            raise UserError(
                f"rows: labels hold class {int(self._labels.max())}, and the network tells {classes} classes apart; "
                f"allowed: 0 to {classes - 1}"
            )
        return evaluation.confusion(evaluation.predictions(outputs, classes), self._labels, classes)


def _tensor(name: str, values: Any) -> torch.Tensor:
    try:
        return values if torch.is_tensor(values) else torch.as_tensor(np.asarray(values))
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"rows: {name} cannot be made a tensor ({error}); allowed: an array of numbers") from None


def _classes(labels: torch.Tensor) -> torch.Tensor:
    """Return labels as classes; what is none is named."""
    odd = labels[(labels < 0) | (labels != labels.long())]
    if len(odd):
        raise UserError(f"rows: labels hold {odd[0].item():g}; allowed: classes 0, 1, 2, ...")
    return labels.long()
