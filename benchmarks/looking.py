"""How soon a long run can be seen: `python -m benchmarks.looking [ROUNDS CLIENTS]`, page and report in Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.store import write_run

WIDTHS = (1280, 390)
WARM = 10.0
"""Seconds that the page gets to load its libraries before the first visitor comes."""


def make(root: Path, rounds: int, clients: int) -> Path:
    """Write a long run with an experiment beside it, and its report; returns the report."""
    from steelyard.experiment.loading import load, to_toml
    from steelyard.report.html import write_report
    from steelyard.report.view import RunView

    write_run(root / "long", rounds, clients)
    (root / "long" / "experiment.toml").write_text(to_toml(load("quickstart")), encoding="utf-8")
    report = root / "report.html"
    write_report(RunView([root / "long"]), report)
    return report


def look(browser: Any, address: str, width: int, figures: dict[str, str]) -> tuple[list[float], float]:
    """Open an address and wait for figures, one by one; returns seconds to each, and the processor time of the tab."""
    context = browser.new_context(viewport={"width": width, "height": 900})
    tab = context.new_page()
    session = context.new_cdp_session(tab)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    begun, seconds = time.perf_counter(), list[float]()
    tab.goto(address)
    for element, drawn in figures.items():
        tab.locator(element).wait_for(state="visible", timeout=120_000)
        tab.locator(element).scroll_into_view_if_needed()
        tab.wait_for_selector(drawn, timeout=120_000)
        seconds.append(time.perf_counter() - begun)
    metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
    context.close()
    return seconds, float(metrics["TaskDuration"])


def main() -> None:
    """Write a run, serve it, and print how long its curves and its heat map take to appear."""
    from playwright.sync_api import sync_playwright

    rounds, clients = (int(word) for word in (sys.argv[1:3] or ("1000", "371")))
    with tempfile.TemporaryDirectory() as scratch, sync_playwright() as playwright:
        root = Path(scratch)
        report = make(root, rounds, clients)
        command = [sys.executable, "-m", "steelyard", "watch", str(root), "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            time.sleep(WARM)
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            page = {f".figure.{kind}": f".figure.{kind}[data-drawn]" for kind in ("accuracy", "weights")}
            parts = {"[data-figure=accuracy]": "[data-figure=accuracy][data-drawn]"}
            parts |= {"[data-part=weights]": "[data-part=weights][data-drawn]"}
            views = {"page": (f"{found[0]}#/run/long", page), "report": (report.as_uri(), parts)}
            print(f"{rounds} rounds x {clients} clients; the report is {report.stat().st_size / 1e6:.1f} MB")
            print("\n| what | width | curves, s | heat map, s | processor of the tab, s |\n|---|---|---|---|---|")
            for width in WIDTHS:
                for name, (address, figures) in views.items():
                    (curves, heat), processor = look(browser, address, width, figures)
                    print(f"| {name} | {width} | {curves:.2f} | {heat:.2f} | {processor:.2f} |", flush=True)
            browser.close()
        finally:
            server.terminate()
            server.wait()


if __name__ == "__main__":
    main()
