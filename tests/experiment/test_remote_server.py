"""What the server of a federation across machines knows of the network, from what nodes say about their data."""

from __future__ import annotations

import pytest

from steelyard.experiment.remote_server import RemoteServer
from steelyard.learning.models import build
from steelyard.learning.parameters import Layout
from steelyard.learning.settings import ModelSettings


@pytest.mark.parametrize("pixels", [False, True])
def test_the_layers_are_those_of_the_network_that_is_trained(pixels: bool) -> None:
    about = {"features": [1, 16, 16], "classes": 3, **({"pixels": 1} if pixels else {})}
    server = RemoteServer(ModelSettings(), about)
    layout = Layout.of(build(ModelSettings(), (1, 16, 16), 3, 1, pixels=pixels))
    assert len(server.initial(1)) == layout.size
    assert server.kernels(1).tolist() == layout.kernels.tolist()
    assert server.output_layer(1).tolist() == layout.output.tolist()
