"""The client of the Flower peer, in a module of its own so that Ray's actors keep data and model between messages."""

import functools

import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from plain import network, train
from work import chosen, make_data

app = ClientApp()


@functools.lru_cache(maxsize=1)
def kept():
    torch.set_num_threads(1)
    bench = chosen()
    data = make_data(bench)
    model = network(bench)
    optimizer = torch.optim.SGD(model.parameters(), lr=bench.rate)
    return bench, data, torch.from_numpy(data.features), torch.from_numpy(data.labels), model, optimizer


@app.train()
def answer(message: Message, context: object) -> Message:
    bench, data, features, labels, model, optimizer = kept()
    client = int(message.content["config"]["client"])  # type: ignore[index]
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
    rows = slice(int(data.begins[client]), int(data.begins[client + 1]))
    train(model, optimizer, features[rows], labels[rows], bench)
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": data.size(client)}),
    }
    return Message(content=RecordDict(content), reply_to=message)
