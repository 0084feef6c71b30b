import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steelyard.clients.local import hardware
from steelyard.clients.local.cnn.steps import ConvSteps
from steelyard.clients.local.engines.table import kernel_steps
from steelyard.learning.descent import Descent
from steelyard.learning.models import ModelSettings, build
from steelyard.learning.parameters import Layout

ROOT = Path(__file__).resolve().parents[3]


def test_the_kernels_give_what_torch_gives_in_tritons_interpreter() -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    script = str(Path(__file__).with_name("interpreted_steps.py"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]


def test_without_triton_or_a_gpu_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    module = build(ModelSettings(name="cnn-digits"), (8, 8), 10, seed=0)
    steps, descent = ConvSteps(module, Layout.of(module), half=False), Descent(0.1, 0.0, 0.0)  # type: ignore[arg-type]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert kernel_steps(steps, descent, "float32", torch.device("cpu")) is None
    monkeypatch.setattr(hardware, "_triton", None)
    assert kernel_steps(steps, descent, "float32", torch.device("cuda")) is None
