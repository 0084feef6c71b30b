"""A job for NVFlare's simulator, started by test_nvflare.py: python job.py FOLDER RULE."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv

from steelyard.nvflare import WeighedAggregator


def main(folder: Path, rule: str) -> None:
    recipe = NumpyFedAvgRecipe(
        name="numbers",
        model=np.zeros((2, 3)),
        min_clients=4,
        num_rounds=3,
        train_script=str(Path(__file__).with_name("client.py")),
        aggregator=WeighedAggregator(rule, metrics=["quality"], folder=str(folder / "run"), measure="quality"),
        key_metric="quality",
    )
    recipe.execute(SimEnv(num_clients=4, num_threads=4, workspace_root=str(folder / "workspace")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
