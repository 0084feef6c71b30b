"""The server: the lines marked with + are what weights take in an app that has FedAvg."""

import torch
from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from digits_app.task import SERVER, TEST, Net, held
from digits_app.task import test as test_fn
from steelyard.flower import ServerRows, Weighed  # +

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the rounds and say how good the model is."""
    torch.manual_seed(0)
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=1.0, min_available_nodes=6)
    rule = str(context.run_config["rule"])  # +
    if rule != "fedavg":  # +
        strategy = Weighed(  # +
            rule,  # +
            strategy,  # +
            rows=ServerRows(Net(), *held(SERVER)),  # +
            folder=str(context.run_config["folder"]),  # +
        )  # +
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(Net().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        evaluate_fn=central_test,
    )
    last = max(result.evaluate_metrics_serverapp)
    print(f"{rule}: accuracy {result.evaluate_metrics_serverapp[last]['accuracy']:.1%} after round {last}")


def central_test(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test a model on rows that nobody trains on."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy = test_fn(net, held(TEST))
    return MetricRecord({"accuracy": accuracy, "loss": loss})
