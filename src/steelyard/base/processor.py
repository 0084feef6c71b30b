"""What decides whether the same seed gives the same bits: the processor, the kernels that torch takes on it, threads.

A result names these (`made_by`); who holds it against a run of his own compares bits where they agree (`same_kind`),
and elsewhere only what a processor cannot change. What a file says of its processor is a claim: no check may allow
more because of it than it allows everybody.
"""

from __future__ import annotations

import functools
import hashlib
import platform
from collections.abc import Mapping

MACHINE, KERNELS, THREADS, TORCH = "version_machine", "version_kernels", "version_threads", "version_torch"
"""Names under which runs and archives keep them, beside the versions of libraries."""
DECIDES = (MACHINE, KERNELS, THREADS, TORCH)


def made_by() -> dict[str, str]:
    """Return what computes here, for the record of a result."""
    import torch  # for speed of start: who writes a result has it already

    return {MACHINE: platform.machine(), KERNELS: kernels(), THREADS: str(torch.get_num_threads())}


@functools.cache
def kernels() -> str:
    """Return the instruction set that torch takes, and eight digits of what its kernels make of fixed numbers.

    Two processors of one name may have other kernels, and settings of the environment (ATEN_CPU_CAPABILITY,
    ONEDNN_MAX_CPU_ISA) change them, so a name alone would not tell.
    """
    import torch  # for speed of start: who asks has it already

    # On one thread: their number is named beside, and a process that will be forked may start none.
    return f"{torch.backends.cpu.get_cpu_capability()} {digest_of_kernels(1)[:8]}"


def digest_of_kernels(threads: int) -> str:
    """Return the SHA-256 of products, convolutions, sums and functions of fixed numbers on so many threads."""
    import torch  # for speed of start, as above

    def numbers(*shape: int) -> torch.Tensor:
        count = int(torch.Size(shape).numel())
        # Multiplying and taking a remainder round alike everywhere, so that all begin with the same bits.
        return (torch.arange(count, dtype=torch.float64) * 0.6180339887498949 % 1 - 0.5).float().reshape(shape)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    with torch.no_grad():
        results = [
            numbers(33, 257) @ numbers(257, 65),
            numbers(8, 784) @ numbers(784, 10),
            torch.nn.functional.conv2d(numbers(4, 3, 17, 17), numbers(9, 3, 5, 5)),
            torch.nn.functional.conv2d(numbers(4, 16, 9, 9), numbers(32, 16, 3, 3)),
            torch.log_softmax(numbers(64, 62), 1),
            torch.tanh(numbers(4097)),
            numbers(100_003).sum().reshape(1),
        ]
    torch.set_num_threads(before)
    return hashlib.sha256(b"".join(result.numpy().tobytes() for result in results)).hexdigest()


def same_kind(made: Mapping[str, str], here: Mapping[str, str]) -> bool:
    """Say whether two results were made such that the same seed must give the same bits; unknown is another kind."""
    return all(name in made and made[name] == here.get(name) for name in DECIDES)


def in_words(made: Mapping[str, str]) -> str:
    """Return what a result says of its processor: "x86_64 (AVX2 1f0c23ab), 2 threads, torch 2.13.0"."""
    machine, torch = made.get(MACHINE) or _of_platform(made), made.get(TORCH)
    named = f"{machine or 'a processor that it does not name'}{f' ({made[KERNELS]})' if KERNELS in made else ''}"
    count = made.get(THREADS)
    threads = [] if count is None else [f"{count} thread{'' if count == '1' else 's'}"]
    return ", ".join([named, *threads, *([f"torch {torch}"] if torch else [])])


def _of_platform(made: Mapping[str, str]) -> str:
    """Return the machine of a record that names only Python's platform, as those before 0.3 do."""
    name = made.get("version_platform", "")
    return next((known for known in ("x86_64", "aarch64", "arm64", "AMD64") if known in name), "")
