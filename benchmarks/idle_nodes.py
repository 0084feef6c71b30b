"""What nodes that wait for a message cost a server: `python -m benchmarks.idle_nodes [--nodes 50,200] [--seconds 40]`.

A server with its proxy and TLS, and light nodes: each has its own key and connection, joins and asks for messages as a
real one does, and there are none. All of them are threads of one process, which is not counted. For each number of
nodes: the processor time of proxy and SuperLink, in milliseconds a second. The last line is JSON, with the slope: what
a thousand nodes more would take, in cores. `--out FILE` adds a row to a Markdown table.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.federation import Server, seconds, server, show
from benchmarks.kit import start, whole_numbers

COLUMNS = {
    "nodes": "idle nodes",
    "proxy_ms": "proxy, ms a second",
    "superlink_ms": "SuperLink, ms a second",
    "cores_per_1000": "cores for 1,000 more",
    "failed_calls": "calls that failed",
    "load": "load",
}


def measure(started: Server, steps: list[int], watch: float) -> dict[str, Any]:
    """Let more and more nodes join, and watch what they cost."""
    stop, there = threading.Event(), 0
    failed: Counter[str] = Counter()
    used: list[dict[str, float]] = []
    for step in steps:
        joined = threading.Barrier(step - there + 1)
        for name in started.names[there:step]:
            threading.Thread(target=take_part, args=(started, name, joined, stop, failed), daemon=True).start()
        joined.wait(600)
        there = step
        time.sleep(watch / 2)
        parts, begun = started.parts(), time.monotonic()
        before = {name: seconds(parts[name]) for name in ("proxy", "superlink")}
        time.sleep(watch)
        passed = time.monotonic() - begun
        used.append({name: 1000 * (seconds(parts[name]) - before[name]) / passed for name in before})
        print(f"{step} nodes: {used[-1]}", file=sys.stderr)
    if failed:
        print(f"calls that failed: {dict(failed)}", file=sys.stderr)
    stop.set()
    slope = (sum(used[-1].values()) - sum(used[0].values())) / max(1, steps[-1] - steps[0])
    milliseconds = {f"{name}_ms": [round(one[name], 1) for one in used] for name in used[0]}
    found = {"nodes": steps, **milliseconds, "cores_per_1000": round(slope, 3), "failed_calls": failed.total()}
    return {**found, "load": os.getloadavg()[0]}


def take_part(
    started: Server, name: str, joined: threading.Barrier, stop: threading.Event, failed: Counter[str]
) -> None:
    """Be a node that has nothing to do."""
    from steelyard.clients.flower.calls import CallError
    from steelyard.federate.node import Server as Address

    root = started.root
    fleet = Address(f"127.0.0.1:{started.port}", root / "tls" / "ca.pem", root / name).connection(stop)
    while not stop.is_set():
        try:
            fleet.activate(10.0)
            break
        except CallError:  # Its key is not registered yet.
            time.sleep(1.0)
    joined.wait()
    while not stop.is_set():
        try:
            fleet.next_message()
        except CallError as error:  # Counted; the next call comes soon, as a real node's does.
            failed[f"{type(error).__name__}: {error}"[:200]] += 1
            stop.wait(0.5)


def main(
    nodes: Annotated[str, typer.Option(help="numbers of nodes, ascending; at most 450 have one address")] = "50,200",
    watch: Annotated[float, typer.Option("--seconds", help="how long each number is watched")] = 40.0,
    out: Annotated[Path | None, typer.Option(help="Markdown file that gets a row more")] = None,
) -> None:
    """Measure as the command line says."""
    steps = whole_numbers(nodes)
    with tempfile.TemporaryDirectory() as scratch, server(Path(scratch), steps[-1], 1) as started:
        found = measure(started, steps, watch)
    show(found, COLUMNS, out)


if __name__ == "__main__":
    start(main)
