"""The server's own rows in somebody else's federation: a network and labelled rows to test replies on."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from steelyard.adapters.arrays import Arrays, Layout
from steelyard.errors import UserError
from steelyard.learning import evaluation
from steelyard.messages import ServerTest


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
    """

    def __init__(self, network: torch.nn.Module, features: Any, labels: Any) -> None:
        self._network = network
        self._features = torch.as_tensor(np.asarray(features) if not torch.is_tensor(features) else features)
        self._labels = torch.as_tensor(np.asarray(labels) if not torch.is_tensor(labels) else labels).long()
        floating = [value.dtype for value in network.state_dict().values() if value.is_floating_point()]
        if floating and self._features.is_floating_point():
            self._features = self._features.to(floating[0])
        if len(self._features) != len(self._labels) or not len(self._labels):
            raise UserError(f"rows: {len(self._features)} features and {len(self._labels)} labels; allowed: as many")

    def test(self, seed: int, models: torch.Tensor) -> ServerTest:
        """Return accuracy and F1 of each class for each model, given as changes [models, parameters]."""
        state = self._network.state_dict()
        counts = [self._confusion(model, state) for model in models]
        stacked = np.stack(counts)
        return ServerTest(evaluation.accuracy(stacked), evaluation.f1(stacked))

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
        return evaluation.confusion(evaluation.predictions(outputs, classes), self._labels, classes)
