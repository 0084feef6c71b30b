import os
import subprocess
import sys

import pytest
import torch

from steelyard.clients.local import kernels


def test_pool_and_its_way_back_are_torchs() -> None:
    raw = torch.randint(-3, 4, (6, 9, 7, 5)).float()  # many ties: the first of the largest wins, as in torch
    bias = torch.tensor([[0.0, 1, -1, 0, 2], [1.0, 0, 0, -2, 0]])
    leaf = raw.clone().requires_grad_()
    images = leaf.permute(0, 3, 1, 2) + bias.repeat_interleave(3, 0)[:, :, None, None]
    expected = torch.relu(torch.max_pool2d(images, 2)).permute(0, 2, 3, 1)
    pooled, codes = kernels.pool(raw, bias)
    assert torch.equal(pooled, expected)
    slope = torch.randn_like(pooled)
    expected.backward(slope)
    assert torch.equal(kernels.unpool(slope, codes, 9, 7), leaf.grad)


@pytest.mark.parametrize("kernel", [3, 5])
def test_windows_make_a_convolution(kernel: int) -> None:
    images, weights = torch.randn(2, 6, 5, 3), torch.randn(4, 3, kernel, kernel)
    taps = kernel * kernel * 3
    seen = kernels.windows(images, kernel, taps + 2, ones=True)
    flat = torch.cat([weights.permute(0, 2, 3, 1).reshape(4, -1), torch.full((4, 1), 0.5), torch.ones(4, 1)], 1)
    expected = torch.conv2d(images.permute(0, 3, 1, 2), weights, torch.full((4,), 0.5), padding=kernel // 2)
    assert torch.allclose((seen @ flat.t()).view(2, 6, 5, 4), expected.permute(0, 2, 3, 1), atol=1e-5)
    turned = kernels.windows(images, kernel, taps, turned=True)
    assert torch.equal(turned.view(-1, kernel, kernel, 3), seen[:, :taps].view(-1, kernel, kernel, 3).flip(1, 2))


CHECK = """
import os, torch
from steelyard.clients.local import kernels
def both(f):
    found = []
    for flag in "10":
        os.environ["TRITON_INTERPRET"] = flag
        got = f()
        found.append(got if isinstance(got, tuple) else (got,))
    assert all(torch.equal(a, b) for a, b in zip(*found)), f
for shape in ((6, 8, 8, 5), (4, 11, 9, 3)):
    raw, bias = torch.randint(-3, 4, shape).float(), torch.randint(-1, 2, (2, shape[3])).float()
    both(lambda: kernels.pool(raw, bias))
    both(lambda: kernels.pool(raw, None))
    pooled, codes = kernels.pool(raw, bias)
    both(lambda: kernels.unpool(pooled - 1, codes, *shape[1:3]))
    for turned in (False, True):
        both(lambda: kernels.windows(raw, 3, 9 * shape[3] + 5, ones=True, turned=turned))
        both(lambda: kernels.windows(raw, 5, 25 * shape[3], turned=turned))
"""


def test_the_triton_kernels_do_the_same_in_its_interpreter() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", CHECK], check=True, env=environment, timeout=200)
