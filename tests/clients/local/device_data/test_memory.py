import torch

from steelyard.clients.local.device_data.memory import MatrixPool


def test_a_block_is_used_again_only_when_nobody_looks() -> None:
    pool = MatrixPool(1 << 20)
    first = pool.matrix(10, 100)
    first.fill_(1.0)
    address = first.data_ptr()
    row = first[3]
    del first
    second = pool.matrix(10, 100)  # a row of the first is still held
    assert second.data_ptr() != address
    second.fill_(2.0)
    assert row.tolist() == [1.0] * 100
    del row
    third = pool.matrix(10, 100)
    assert third.data_ptr() == address
    assert pool.held() <= 2 * 4096


def test_beyond_the_limit_it_lies_in_a_file() -> None:
    pool = MatrixPool(100)
    matrix = pool.matrix(10, 100)
    matrix.copy_(torch.arange(1000.0).view(10, 100))
    assert torch.equal(torch.ones(10) @ matrix, torch.arange(1000.0).view(10, 100).sum(0))
    assert pool.held() == 0
    assert pool.matrix(0, 5).shape == (0, 5)
