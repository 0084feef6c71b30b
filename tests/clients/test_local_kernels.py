import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("part", ["one by one", "mini", "full"])
def test_the_kernels_give_what_torch_gives_in_tritons_interpreter(part: str) -> None:
    pytest.importorskip("triton", reason="Triton comes with torch's CUDA builds")
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    script = str(Path(__file__).with_name("interpreted_steps.py"))
    done = subprocess.run([sys.executable, script, part], capture_output=True, text=True, env=environment, timeout=250)
    assert done.returncode == 0, done.stderr[-3000:]
