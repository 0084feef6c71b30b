"""The clients, as in any Flower app: nothing here knows of weights."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from digits_app.task import Net, load_data, train
from digits_app.task import test as test_fn

app = ClientApp()


@app.train()
def train_model(msg: Message, context: Context) -> Message:
    """Train the model that came on this client's rows."""
    net = Net()
    net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    data = load_data(int(context.node_config["partition-id"]))
    loss = train(net, data, int(context.run_config["local-epochs"]), float(context.run_config["learning-rate"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(data[1])})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=msg)


@app.evaluate()
def evaluate_model(msg: Message, context: Context) -> Message:
    """Test the model that came on this client's rows."""
    net = Net()
    net.load_state_dict(msg.content.array_records["arrays"].to_torch_state_dict())
    data = load_data(int(context.node_config["partition-id"]))
    loss, accuracy = test_fn(net, data)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(data[1])})
    return Message(RecordDict({"metrics": metrics}), reply_to=msg)
