"""Which arithmetic the heavy products use, switched on for one block of work and put back afterwards."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager

import torch

from steelyard.clients.local.settings import Precision


@contextmanager
def arithmetic(precision: Precision, device: torch.device, autocast: bool = False) -> Generator[None]:
    """Use float32, TF32 or bfloat16 products inside the block, with algorithms that repeat bit for bit.

    `autocast` lets torch choose which operations of an ordinary module run in bfloat16.
    """
    short = precision != "float32"
    cuda = device.type == "cuda"
    before = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    kept = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    with ExitStack() as stack:
        if cuda:
            torch.backends.cuda.matmul.allow_tf32 = short
            torch.backends.cudnn.allow_tf32 = short
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
        if autocast and precision == "bfloat16":
            # Without its cache: it would keep the shortened weights of the first step for the whole block.
            stack.enter_context(torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=False))
        try:
            yield
        finally:
            if cuda:
                torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
                torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = kept
