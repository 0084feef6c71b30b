"""Peer: FedJAX's federated averaging (for_each_client on jit)."""

from importlib.metadata import version

import jax

if not hasattr(jax, "tree_map"):  # FedJAX 0.0.17 still uses the name that JAX has since moved
    jax.tree_map = jax.tree.map

import fedjax
import jax.numpy as jnp
import numpy as np
from fedjax.algorithms import fed_avg
from jax import lax
from work import Gate, chosen, make_data, pick

bench = chosen()
data = make_data(bench)
labels = data.labels.astype(np.int32)


def start() -> dict[str, jnp.ndarray]:
    draw = np.random.default_rng(5)

    def layer(*shape: int) -> jnp.ndarray:
        bound = 1 / np.sqrt(np.prod(shape[:-1]))
        return jnp.asarray(draw.uniform(-bound, bound, shape), jnp.float32)

    if not bench.convolutional:
        sizes = {"a": layer(784, bench.hidden), "b": layer(bench.hidden, bench.classes)}
        return {**sizes, "a0": jnp.zeros(bench.hidden), "b0": jnp.zeros(bench.classes)}
    return {
        "c": layer(5, 5, 1, 32), "c0": jnp.zeros(32), "d": layer(5, 5, 32, 64), "d0": jnp.zeros(64),
        "a": layer(3136, bench.hidden), "a0": jnp.zeros(bench.hidden),
        "b": layer(bench.hidden, bench.classes), "b0": jnp.zeros(bench.classes),
    }  # fmt: skip


def convolve(x: jnp.ndarray, kernel: jnp.ndarray, bias: jnp.ndarray) -> jnp.ndarray:
    x = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) + bias
    n, height, width, channels = x.shape
    return jax.nn.relu(x.reshape(n, height // 2, 2, width // 2, 2, channels).max((2, 4)))


def outputs(p: dict[str, jnp.ndarray], x: jnp.ndarray) -> jnp.ndarray:
    if bench.convolutional:
        x = convolve(x.reshape(-1, 28, 28, 1), p["c"], p["c0"])
        x = convolve(x, p["d"], p["d0"]).reshape(len(x), -1)
    return jax.nn.relu(x @ p["a"] + p["a0"]) @ p["b"] + p["b0"]


def per_example(p, batch, rng):
    logs = jax.nn.log_softmax(outputs(p, batch["x"]))
    return -jnp.take_along_axis(logs, batch["y"][:, None], 1)[:, 0]


algorithm = fed_avg.federated_averaging(
    fedjax.grad(per_example),
    fedjax.optimizers.sgd(bench.rate),
    fedjax.optimizers.sgd(1.0),
    fedjax.ShuffleRepeatBatchHParams(batch_size=bench.batch, num_epochs=bench.epochs),
)
state = algorithm.init(start())
key = jax.random.PRNGKey(0)


def one_round(round: int) -> None:
    global state, key
    key, sub = jax.random.split(key)
    chosen_clients = pick(bench, round)
    work = []
    for client, own in zip(chosen_clients, jax.random.split(sub, len(chosen_clients)), strict=True):
        rows = slice(int(data.begins[client]), int(data.begins[client + 1]))
        work.append((client, fedjax.ClientDataset({"x": data.features[rows], "y": labels[rows]}), own))
    state, _ = algorithm.apply(state, work)
    jax.block_until_ready(state.params)


Gate(peer="fedjax", fedjax=version("fedjax"), jax=jax.__version__).serve(one_round)
