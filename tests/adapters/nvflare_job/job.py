"""A job for NVFlare's simulator, started by test_nvflare.py: python job.py FOLDER RULE TRANSFER.

FOLDER holds parts.npz with rows of the clients and of the server; without a rule it is NVFlare's own average.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe import SimEnv
from server_rows import CleanRows

from steelyard.nvflare import WeighedAggregator


def weighed(folder: Path, rule: str) -> WeighedAggregator:
    rows = CleanRows(str(folder / "parts.npz"))
    return WeighedAggregator(rule, rows=rows, metrics=["quality"], folder=str(folder / "run"), measure="quality")


def main(folder: Path, rule: str, transfer: str) -> None:
    parts = str(folder / "parts.npz")
    recipe = NumpyFedAvgRecipe(
        name="digits",
        model=np.zeros((10, 65)),
        min_clients=6,
        num_rounds=3,
        train_script=str(Path(__file__).with_name("client.py")),
        train_args=f"--parts {parts} --transfer {transfer}" + (" --broken" if rule else ""),
        aggregator=weighed(folder, rule) if rule else None,
        key_metric="quality",
    )
    recipe.execute(SimEnv(num_clients=6, num_threads=6, workspace_root=str(folder / "workspace")))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
