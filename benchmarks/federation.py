"""Where the time and memory of a federation go, with real processes on this machine.

    python -m benchmarks.federation --nodes 2 --rounds 10                # as `steelyard federate local` runs it
    python -m benchmarks.federation --nodes 2 --rounds 10 --served       # a server with its proxy, TLS; nodes apart
    python -m benchmarks.federation --nodes 10 --clients 1000 --rounds 3 --served --data mnist
    python -m benchmarks.federation --nodes 8 --rounds 3 --served --hidden 2530,2530      # 6.6 million parameters

The last line is JSON: seconds to the first tested model, the median and the longest round after it, and the whole with
starting and ending. With `--served` also the processor seconds per round of each kind of process, the peak memory of
the server's processes, and the memory of a node, all its processes together, when the last round has been stored (PSS:
shared pages count once). `--out FILE` adds a row to a Markdown table.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from benchmarks.kit import machine, start, table, whole_numbers

_LOOK_SECONDS = 0.02
_TICKS = os.sysconf("SC_CLK_TCK")
PIXELS = {"digits": 64, "mnist": 784}
COLUMNS = {
    "nodes": "nodes",
    "clients": "clients",
    "parameters": "parameters",
    "rounds": "rounds",
    "through": "through",
    "first_model_sec": "to the first model, s",
    "median_round_sec": "a round, s (median)",
    "longest_round_sec": "longest",
    "total_sec": "whole, s",
    "node_mb": "a node, MB",
    "server_app_mb": "server app, MB (peak)",
    "superlink_mb": "SuperLink, MB (peak)",
    "cpu_sec_per_round": "processor, s a round",
    "load": "load",
}
LAST = {"command": "command", "machine": "machine"}


def experiment(nodes: int, clients: int, rounds: int, hidden: Sequence[int], data: str) -> dict[str, Any]:
    """Return an experiment on images of digits."""
    return {
        "name": "small",
        "data": {"source": data},
        "partition": {"scheme": "iid", "clients": clients},
        "model": {"name": "mlp", "hidden": list(hidden)} if hidden else {"name": "logistic"},
        "rounds": {"count": rounds, "fraction": 1.0},
        "compute": {"engine": "loop", "device": "cpu"},
        "federate": {"nodes": nodes},
    }


def local(document: dict[str, Any], nodes: int, *, tls: bool) -> dict[str, Any]:
    """Run one federation as `steelyard federate local` does."""
    from steelyard.experiment.loading import build
    from steelyard.federate.local import run_local

    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        found = watched(out, lambda: run_local(build(document), nodes=nodes, tls=tls, out=out))
    return {**about(document), "through": "TLS" if tls else "plain", **found}


def served(document: dict[str, Any], nodes: int) -> dict[str, Any]:
    """Run one federation through a server's proxy, each node as its owner would start it."""
    from steelyard.experiment.loading import build
    from steelyard.federate.queue import ServerFolder, follow, submit

    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch), nodes, _clients(document)) as begun:
        root, started = Path(scratch), begun.parts
        begun.start_nodes()
        run = submit(ServerFolder(root / "server").folder, build(document), out=root / "run")
        measured: dict[str, Any] = {}

        def finish() -> None:
            rounds = document["rounds"]["count"]
            before = {name: seconds(pids) for name, pids in started().items()}
            while last_round(root / "run") < rounds and run.is_open:
                if last_round(root / "run") == 0:
                    before = {name: seconds(pids) for name, pids in started().items()}
                time.sleep(_LOOK_SECONDS)
            groups = started()
            used = {name: seconds(pids) - before.get(name, 0.0) for name, pids in groups.items()}
            memory = [sum(map(pss, pids)) for name, pids in groups.items() if name.startswith("node-")]
            of_server = [name for name in ("proxy", "superlink", "server_app") if name in groups]
            sides = {"nodes": sum(value for name, value in used.items() if name.startswith("node-"))}
            sides |= {name: used[name] for name in of_server}
            measured.update({f"{name}_mb": max(map(peak, groups[name])) for name in of_server})
            measured["node_mb"] = max(memory)
            measured["cpu_sec_per_round"] = {name: round(value / rounds, 2) for name, value in sides.items()}
            follow(run)

        found = watched(root / "run", finish)
    return {**about(document), "through": "proxy, TLS", **found, **measured}


class Server:
    """A server in a folder, with keys for so many nodes; `start_nodes` starts them as their owners would."""

    def __init__(self, root: Path, nodes: int, clients: int) -> None:
        from steelyard.clients.flower.register import Entry, enter
        from steelyard.federate.certificates import make_certificates, make_key
        from steelyard.federate.workers import environment, reserved_port
        from steelyard.proof.signing import read_public_key

        self.root, self.names = root, [f"node-{number}" for number in range(nodes)]
        make_certificates(root / "tls", ["127.0.0.1"])
        for name in self.names:
            _, public = make_key(root / name)
            enter(root / "server" / "register.json", Entry(name, read_public_key(public), most=clients))
        with reserved_port() as reserved:
            self.port = int(reserved.getsockname()[1])
        self._env = environment(root / "home", OMP_NUM_THREADS="1")
        self.serving = self._start("serve", "serve", "server", "--tls", "tls", "--listen", f"127.0.0.1:{self.port}")
        self.nodes: list[Any] = []

    def _start(self, name: str, *words: str) -> Any:
        from steelyard.federate.workers import Process

        command = [sys.executable, "-m", "steelyard", "federate", *words]
        return Process(name, command, self._env, self.root / f"{name}.log", self.root)

    def start_nodes(self) -> None:
        """Start every node in processes of its own, each with its part of the clients."""
        for number, name in enumerate(self.names):
            lines = [f'server = "127.0.0.1:{self.port}"', 'ca = "tls/ca.pem"', f'key = "{name}"']
            lines += [f"partition-id = {number}", f"num-partitions = {len(self.names)}", f'state = "state-{name}"']
            (self.root / f"{name}.toml").write_text("\n".join(lines), encoding="utf-8")
            self.nodes.append(self._start(name, "node", f"{name}.toml"))

    def parts(self) -> dict[str, list[int]]:
        """Return the process ids of each node, of the proxy, of the SuperLink and of the server app."""
        found = {node.name: family(node.pid) for node in self.nodes} | {"proxy": [self.serving.pid]}
        kinds = {b"steelyard.federate.server": "superlink", b"flwr-serverapp": "server_app"}
        for pid in family(self.serving.pid)[1:]:
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
                found.setdefault(next((kind for word, kind in kinds.items() if word in words), "others"), []).append(
                    pid
                )
        return found


@contextmanager
def server(root: Path, nodes: int, clients: int) -> Generator[Server]:
    """Start a server, and end it and its nodes."""
    from steelyard.federate.workers import end_all

    begun = Server(root, nodes, clients)
    try:
        begun.serving.wait_for_port(begun.port, 120)
        yield begun
    finally:
        end_all([*begun.nodes, begun.serving])


def watched(out: Path, work: Callable[[], object]) -> dict[str, Any]:
    """Do the work and return when which round was stored."""
    stored: dict[int, float] = {}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(_LOOK_SECONDS):
            stored.setdefault(last_round(out), time.perf_counter())

    watcher = threading.Thread(target=watch, daemon=True)
    begun = time.perf_counter()
    watcher.start()
    work()
    ended = time.perf_counter()
    done.set()
    watcher.join()
    stored.setdefault(last_round(out), ended)
    return took(begun, [stored[round] for round in sorted(stored) if round >= 0], ended)


def took(begun: float, times: Sequence[float], ended: float) -> dict[str, float]:
    """Return how long the first model, each round after it and the whole took, from when each was stored."""
    each = [later - earlier for earlier, later in itertools.pairwise(times)]
    return {
        "load": os.getloadavg()[0],
        "first_model_sec": round(times[0] - begun, 2),
        "median_round_sec": round(statistics.median(each), 2),
        "longest_round_sec": round(max(each), 2),
        "total_sec": round(ended - begun, 2),
    }


def about(document: dict[str, Any]) -> dict[str, Any]:
    """Return what was run: nodes, clients, parameters and rounds."""
    widths = [PIXELS[document["data"]["source"]], *document["model"].get("hidden", ()), 10]
    parameters = sum((inputs + 1) * outputs for inputs, outputs in itertools.pairwise(widths))
    rounds, nodes = document["rounds"]["count"], document["federate"]["nodes"]
    return {"nodes": nodes, "clients": _clients(document), "parameters": parameters, "rounds": rounds}


def _clients(document: dict[str, Any]) -> int:
    return int(document["partition"]["clients"])


def last_round(out: Path) -> int:
    """Return the last round that a run has stored; -1 before the first."""
    from steelyard.federate.queue import rounds_of

    return rounds_of(out)[0]


def family(pid: int) -> list[int]:
    """Return a process and all that it started, and those in turn, as far as they run."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return []
    return [pid, *itertools.chain.from_iterable(map(family, children))]


def seconds(pids: list[int]) -> float:
    """Return the processor seconds that processes have used."""
    used = 0
    for pid in pids:
        try:
            used += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:
            continue
    return used / _TICKS


def pss(pid: int) -> int:
    """Return the memory of a process in MB, pages that it shares with others in proportion."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) // 1024
    except OSError:
        return 0


def peak(pid: int) -> int:
    """Return the most memory that a process has had, in MB."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) // 1024
    except OSError:
        return 0


def show(found: Mapping[str, Any], columns: Mapping[str, str], out: Path | None) -> None:
    """Print what was found; where a file is given, add it to a table there, with the command and the machine."""
    if out is not None:
        command = f"`python -m benchmarks.{' '.join([Path(sys.argv[0]).stem, *sys.argv[1:]])}`"
        lines = table([{**found, "command": command, "machine": machine()}], {**columns, **LAST}).splitlines()
        with out.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in (lines if not out.stat().st_size else lines[2:])))
    print(json.dumps(found), flush=True)


def main(
    nodes: int = 2,
    rounds: int = 10,
    clients: Annotated[int, typer.Option(help="of all nodes together; 0: two for each node")] = 0,
    hidden: Annotated[str, typer.Option(help="hidden units of the model, 2530,2530; none: logistic regression")] = "",
    data: Annotated[
        Literal["digits", "mnist"], typer.Option(help="mnist (from STEELYARD_DATA) has enough rows for many clients")
    ] = "digits",
    tls: bool = False,
    through_proxy: Annotated[
        bool, typer.Option("--served", help="through the proxy, each node in processes of its own")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Markdown file that gets a row more")] = None,
) -> None:
    """Measure as the command line says."""
    document = experiment(nodes, clients or 2 * nodes, rounds, whole_numbers(hidden), data)
    found = served(document, nodes) if through_proxy else local(document, nodes, tls=tls)
    show(found, COLUMNS, out)


if __name__ == "__main__":
    start(main)
