"""A site, as in any NVFlare job: nothing here knows of weights."""

import nvflare.client as flare
from net import Net, accuracy, rows_of, train


def main() -> None:
    """Test each model that comes on this site's rows, train it, and send it on."""
    flare.init()
    data, net = rows_of(int(flare.get_site_name().removeprefix("site-"))), Net()
    while flare.is_running():
        received = flare.receive()
        if received is None:
            break
        net.load_state_dict(received.params)
        tested = accuracy(net, data)
        train(net, data)
        flare.send(
            flare.FLModel(
                params=net.state_dict(),
                metrics={"accuracy": tested},
                meta={"rows": len(data[1])},
            )
        )


if __name__ == "__main__":
    main()
