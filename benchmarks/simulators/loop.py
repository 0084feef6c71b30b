"""Peer: one client after another in plain torch, one model object, a running weighted sum."""

import os

import torch
from plain import network, train
from work import Gate, chosen, make_data, pick

bench = chosen()
device = torch.device(os.environ.get("STEELYARD_BENCH_DEVICE", "cpu"))
data = make_data(bench)
features, labels = torch.from_numpy(data.features).to(device), torch.from_numpy(data.labels).to(device)
model = network(bench).to(device)
parameters = list(model.parameters())
optimizer = torch.optim.SGD(parameters, lr=bench.rate)
shared = [parameter.detach().clone() for parameter in parameters]
total = [torch.zeros_like(parameter) for parameter in shared]


def one_round(round: int) -> None:
    clients = pick(bench, round)
    seen = sum(data.size(client) for client in clients)
    torch._foreach_zero_(total)
    for client in clients:
        with torch.no_grad():
            torch._foreach_copy_(parameters, shared)
        rows = slice(int(data.begins[client]), int(data.begins[client + 1]))
        train(model, optimizer, features[rows], labels[rows], bench)
        with torch.no_grad():
            torch._foreach_add_(total, [p.detach() for p in parameters], alpha=data.size(client) / seen)
    torch._foreach_copy_(shared, total)
    if device.type == "cuda":
        torch.cuda.synchronize()


Gate(peer="loop", torch=torch.__version__).serve(one_round)
