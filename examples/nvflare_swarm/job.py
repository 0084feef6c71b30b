"""Swarm learning of eight sites in NVFlare's simulator, weighted and robust: python job.py --sites 8.

No server averages: in each round another site does. The two largest sites have wrong labels.
"""

import argparse
import subprocess
import sys
from pathlib import Path

import torch
from net import TEST, Net, accuracy, all_rows
from nvflare.app_common.ccwf.ccwf_job import CCWFJob, SwarmClientConfig, SwarmServerConfig
from nvflare.app_common.ccwf.comps.simple_model_shareable_generator import SimpleModelShareableGenerator
from nvflare.app_opt.pt.file_model_persistor import PTFileModelPersistor
from nvflare.job_config.script_runner import ScriptRunner

from steelyard.nvflare import WeighedAggregator  # +


def main() -> None:
    """Run the job, join what the sites wrote into one run, and test the last model."""
    options = argparse.ArgumentParser()
    options.add_argument("--sites", type=int, default=8)
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--rule", default="AG>DS/max")
    options.add_argument("--out", type=Path, default=Path("runs/swarm"))
    given = options.parse_args()
    journals, workspace = given.out.resolve().with_name(f"{given.out.name}-sites"), given.out.with_name("swarm-nvflare")

    torch.manual_seed(0)
    job = CCWFJob(name="swarm", min_clients=given.sites)
    job.add_swarm(
        server_config=SwarmServerConfig(num_rounds=given.rounds, min_clients=given.sites),
        client_config=SwarmClientConfig(
            executor=ScriptRunner(script=str(Path(__file__).with_name("client.py"))),
            aggregator=WeighedAggregator(given.rule, size="rows", folder=str(journals)),  # +
            persistor=PTFileModelPersistor(model=Net()),
            shareable_generator=SimpleModelShareableGenerator(),
            min_responses_required=given.sites,
        ),
    )
    job.simulator_run(str(workspace), n_clients=given.sites, threads=given.sites)

    files = sorted(map(str, journals.glob("*.jsonl")))
    subprocess.run([sys.executable, "-m", "steelyard", "import", *files, "--out", str(given.out)], check=True)
    (*_, last) = sorted(workspace.rglob("FL_global_model.pt"))
    net = Net()
    net.load_state_dict(torch.load(last, weights_only=True)["model"])
    features, labels = all_rows()
    tested = accuracy(net, (features[TEST], labels[TEST]))
    print(f"{given.rule}: accuracy {tested:.1%} after round {given.rounds}")


if __name__ == "__main__":
    main()
