"""Peer: pfl-research, its simulated backend in two processes (torchrun) with one operator thread each."""

import itertools
import os

import pfl
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from plain import network
from torch.nn import functional
from work import Gate, chosen, make_data, pick

bench = chosen()
torch.set_num_threads(1)
first = int(os.environ.get("RANK", 0)) == 0
data = make_data(bench)
features, labels = torch.from_numpy(data.features), torch.from_numpy(data.labels)
net = network(bench)
net.loss = lambda x, y: functional.cross_entropy(net(x), y)
net.metrics = lambda x, y: {}
rounds = itertools.count()


def user(client: int) -> PyTorchTensorDataset:
    rows = slice(int(data.begins[client]), int(data.begins[client + 1]))
    return PyTorchTensorDataset((features[rows], labels[rows]), user_id=str(client))


class Turn(TrainingProcessCallback):
    """Waits for its turn before each central iteration; the second process waits with the first."""

    def __init__(self) -> None:
        self.gate = Gate(peer="pfl", pfl=pfl.__version__) if first else None

    def wait(self) -> None:
        round = torch.tensor([0])
        if self.gate is not None:
            word = self.gate.wait()
            round[0] = -1 if word is None else word
        if torch.distributed.is_initialized():
            torch.distributed.broadcast(round, 0)
        if int(round) < 0:
            os._exit(0)

    def on_train_begin(self, *, model):
        self.wait()
        return Metrics()

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        if self.gate is not None:
            self.gate.done()
        self.wait()
        return False, Metrics()


# Which clients a round trains does not change its cost, so pfl counts rounds by itself.
order = itertools.chain.from_iterable(pick(bench, round) for round in rounds)
FederatedAveraging().run(
    backend=SimulatedBackend(
        training_data=FederatedDataset(user, lambda: next(order)),
        val_data=FederatedDataset(user, lambda: 0),
        postprocessors=[WeightByDatapoints()],
    ),
    model=PyTorchModel(net, torch.optim.SGD, torch.optim.SGD(net.parameters(), lr=1.0)),
    algorithm_params=NNAlgorithmParams(
        central_num_iterations=10**6, evaluation_frequency=10**9, train_cohort_size=bench.cohort, val_cohort_size=0
    ),
    model_train_params=NNTrainHyperParams(
        local_num_epochs=bench.epochs, local_learning_rate=bench.rate, local_batch_size=bench.batch
    ),
    model_eval_params=NNEvalHyperParams(local_batch_size=None),
    callbacks=[Turn()],
)
