"""A server that loses its SuperLink, or whose proxy does not reach it: nodes wait, and the run goes on."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from tests.federate.test_node_process import hospitals
from tests.federate.test_operator import LONG, server_apps
from tests.federate.test_process_faults import failures, last_round, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SERVE = """
import asyncio, sys
from pathlib import Path
from steelyard.federate.serving import serve
from steelyard.federate.superlink_calls import SuperLinkCalls
from steelyard.logs import show

cut, pass_on = Path("cut"), SuperLinkCalls.post

async def cut_off(self, *call):
    while cut.exists():
        if cut.read_text() == "refused":
            raise ConnectionRefusedError("the line is cut")
        await asyncio.sleep(0.1)
    return await pass_on(self, *call)

SuperLinkCalls.post = cut_off
show()
serve(Path(sys.argv[1]), Path("tls"), "127.0.0.1", int(sys.argv[2]))
"""
"""A server whose proxy does not reach its SuperLink while a file is there: it is refused, or hears nothing."""


def test_a_line_cut_between_proxy_and_superlink_costs_no_update(tmp_path: Path):
    """Refused: the proxy answers 503. Silent: calls hang, as where packets are lost."""
    with hospitals(tmp_path, script=SERVE) as made:
        folder, cut = tmp_path / "run", tmp_path / "cut"
        submit = made.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", str(folder))
        try:
            wait_until(lambda: last_round(folder) >= 2, 240, "no round")
            for how in ("refused", "silent"):
                cut.with_suffix(".new").write_text(how)
                cut.with_suffix(".new").rename(cut)
                time.sleep(8)  # Flower takes a node for gone after 20 s without a word of it.
                at = last_round(folder)
                cut.unlink()
                wait_until(lambda at=at: last_round(folder) >= at + 3, 90, f"{how}: it hangs")
            assert submit.poll() is None
        finally:
            submit.kill()
            submit.communicate()
        for hospital in ("hospital-a", "hospital-b"):
            assert set(failures(folder, hospital).values()) == {None}
            said = (tmp_path / f"{hospital}.log").read_text()
            assert "the server answers 503; trying again" in said, said
            assert "was not answered" not in said


def test_a_superlink_that_is_killed_ends_its_server_in_one_line_and_the_run_goes_on(tmp_path: Path):
    with hospitals(tmp_path) as made:
        folder = tmp_path / "run"
        submit = made.start_and_listen("submit", "server", "hospitals.toml", *LONG, "--out", str(folder))
        wait_until(lambda: last_round(folder) >= 2, 240, "no round")
        (superlink,) = server_apps(tmp_path, b"steelyard.federate.own_superlink")
        os.kill(superlink, signal.SIGKILL)
        begun = time.monotonic()
        _, errors = submit.communicate(timeout=60)
        assert time.monotonic() - begun < 15
        assert submit.returncode == 2
        assert "steelyard: the server is gone; the run goes on when it serves again" in errors
        wait_until(lambda: made.server_process.code is not None, 30, "serve lives on")
        assert made.server_process.code == 2
        said = (tmp_path / "serve.log").read_text().splitlines()
        log = tmp_path / "server" / "superlink.log"
        assert said[-1] == f"steelyard: the SuperLink ended (code -9): log {log}; serve again, and its run goes on"
        assert server_apps(tmp_path, b"") == []
        at = last_round(folder)
        made.start("again", "serve", "server", "--tls", "tls", "--listen", f"127.0.0.1:{made.port}")
        wait_until(lambda: last_round(folder) >= at + 2, 240, "it does not go on")
        assert set(failures(folder, "hospital-a").values()) == {None}
        assert made.steelyard("stop", "server").returncode == 0
