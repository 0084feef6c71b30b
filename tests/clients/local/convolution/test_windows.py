import pytest
import torch

from steelyard.clients.local.convolution import windows


def test_pool_and_its_way_back_are_torchs() -> None:
    raw = torch.randint(-3, 4, (6, 9, 7, 5)).float()  # many ties: the first of the largest wins, as in torch
    bias = torch.tensor([[0.0, 1, -1, 0, 2], [1.0, 0, 0, -2, 0]])
    leaf = raw.clone().requires_grad_()
    images = leaf.permute(0, 3, 1, 2) + bias.repeat_interleave(3, 0)[:, :, None, None]
    expected = torch.relu(torch.max_pool2d(images, 2)).permute(0, 2, 3, 1)
    pooled, codes = windows.pool(raw, bias)
    assert torch.equal(pooled, expected)
    slope = torch.randn_like(pooled)
    expected.backward(slope)
    assert torch.equal(windows.unpool(slope, codes, 9, 7), leaf.grad)


@pytest.mark.parametrize("kernel", [3, 5])
def test_windows_make_a_convolution(kernel: int) -> None:
    images, weights = torch.randn(2, 6, 5, 3), torch.randn(4, 3, kernel, kernel)
    taps = kernel * kernel * 3
    seen = windows.windows(images, kernel, taps + 2, ones=True)
    flat = torch.cat([weights.permute(0, 2, 3, 1).reshape(4, -1), torch.full((4, 1), 0.5), torch.ones(4, 1)], 1)
    expected = torch.conv2d(images.permute(0, 3, 1, 2), weights, torch.full((4,), 0.5), padding=kernel // 2)
    # Up to 77 float32 products of about 1 each, summed in another order.
    assert torch.allclose((seen @ flat.t()).view(2, 6, 5, 4), expected.permute(0, 2, 3, 1), atol=1e-5)
    turned = windows.windows(images, kernel, taps, turned=True)
    assert torch.equal(turned.view(-1, kernel, kernel, 3), seen[:, :taps].view(-1, kernel, kernel, 3).flip(1, 2))
