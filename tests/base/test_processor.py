"""What decides whether the same seed gives the same bits, and what is compared where that differs."""

from __future__ import annotations

import pytest
import torch
from tests.warm import command_environment

from steelyard.base.processor import (
    DECIDES,
    KERNELS,
    MACHINE,
    THREADS,
    TORCH,
    digest_of_kernels,
    in_words,
    kernels,
    made_by,
    same_kind,
)

MADE = {MACHINE: "x86_64", KERNELS: "AVX2 0123abcd", THREADS: "2", TORCH: "2.13.0"}


def test_the_same_processor_gives_the_same_digest_and_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    assert digest_of_kernels(1) == digest_of_kernels(1)
    assert kernels().endswith(digest_of_kernels(1)[:8])
    assert torch.get_num_threads() == before
    assert set(made_by()) == set(DECIDES) - {TORCH}


@pytest.mark.parametrize("name", DECIDES)
def test_all_that_decides_must_agree_and_what_is_not_named_does_not(name: str) -> None:
    assert same_kind(MADE, {**MADE, "version_python": "3.12"})
    assert not same_kind(MADE, {**MADE, name: "another"})
    assert not same_kind({key: value for key, value in MADE.items() if key != name}, MADE)


def test_a_processor_in_words() -> None:
    assert in_words(MADE) == "x86_64 (AVX2 0123abcd), 2 threads, torch 2.13.0"
    older = {"version_platform": "Linux-6.1-aarch64-with-glibc2.36", TORCH: "2.13.0"}
    assert in_words(older) == "aarch64, torch 2.13.0"
    assert in_words({}) == "a processor that it does not name"


@pytest.mark.slow
def test_a_setting_that_changes_kernels_changes_what_a_result_names() -> None:
    import subprocess
    import sys

    words = [sys.executable, "-c", "from steelyard.base.processor import kernels; print(kernels())"]
    found = {
        subprocess.run(words, env=command_environment(**more), capture_output=True, text=True, check=True).stdout
        for more in ({}, {"ATEN_CPU_CAPABILITY": "default"})
    }
    assert len(found) == 2 or torch.backends.cpu.get_cpu_capability() == "DEFAULT"
