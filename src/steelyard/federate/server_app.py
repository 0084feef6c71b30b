"""The Flower ServerApp: the round loop of a simulation, with clients on other machines."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from steelyard.base.errors import UserError
from steelyard.base.logs import logger, show
from steelyard.clients.flower.grid import FlowerClients
from steelyard.clients.flower.hidden_grid import HiddenClients
from steelyard.clients.flower.mailbox import RunStopped
from steelyard.clients.flower.register import REGISTER, RegisterFile
from steelyard.clients.protocol import Clients, Server
from steelyard.data.findings import in_order, of_all
from steelyard.data.site_sums import scales, site_preparation, words_of
from steelyard.experiment.description import Description
from steelyard.experiment.loading import read_experiment
from steelyard.experiment.node_rules import held_to
from steelyard.experiment.running import resume, run
from steelyard.federate.app_folder import experiment_of, experiment_text
from steelyard.federate.queue import LOG, STOP, STOPPED, Status, note_outcome
from steelyard.federate.workers import LAUNCHER, is_running
from steelyard.runs.database import exists
from steelyard.runs.history import History
from steelyard.weighing.weights import cap_of

_log = logger(__name__)

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run or resume the experiment of the run configuration; the run folder lies on the SuperLink's machine."""
    show()
    config = context.run_config
    report = Path(str(config["report"])) if config.get("report") else None
    if report is not None:
        _print_into(report / LOG)
    _leave_with_launcher()
    _stop_in_words(report)
    _note(report, "running")
    try:
        folder = federate(grid, config, str(context.run_id))
    except BaseException as error:
        line = " ".join(str(error).split()) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        _note(report, "stopped", line)
        _log.error(line)
        raise
    _note(report, "finished", str(folder))
    _log.info(f"finished, {folder}")


def federate(grid: Grid, config: dict[str, Any], run_id: str) -> Path:
    """Run an experiment with the clients behind a grid, or go on with one; what the ServerApp does."""
    out = str(config.get("out") or "")
    if config.get("resume") and not out:
        raise UserError("run config out: got ''; allowed with resume=true: the folder of a run that was stopped")
    # A run that was stopped before its first model was tested has nothing to go on from: it starts.
    if config.get("resume") and exists(Path(out)):
        folder = Path(out)
        name = History(folder).facts.federation_run or run_id
        assemble = _assembly(grid, read_experiment(folder), name, resumed=True)
        return resume(folder, progress=True, assemble=assemble)
    experiment = experiment_of(config)
    return run(experiment, out=out or None, progress=True, assemble=_assembly(grid, experiment, run_id))


def _assembly(
    grid: Grid, experiment: Description, run_name: str, *, resumed: bool = False
) -> Callable[[], tuple[Clients, Server]]:
    def assemble() -> tuple[Clients, Server]:
        clients = clients_behind(grid, experiment, run_name, survey=not resumed)
        if resumed and clients.terms:
            asked = ", ".join(f"{name} = {value:g}" for name, value in clients.terms.items())
            raise UserError(f"terms of the nodes: {asked} now, and the run began without; allowed: a new run")
        held = experiment.changed(clients.terms) if clients.terms else experiment
        return clients, held.at_server(clients.roster.about)

    return assemble


def clients_behind(grid: Grid, experiment: Description, run_name: str, *, survey: bool = False) -> FlowerClients:
    """Return an experiment's clients on the nodes of a grid; waits for as many nodes as the experiment asks for.

    `survey` asks them first what their columns hold, and has them agree on scales.
    """
    refusals = {found.name: found.refusal for found in experiment.criteria() if found.measured_by == "client"}
    file = os.environ.get(REGISTER)
    experiment.check_federated()
    further: dict[str, Any] = {
        "scores": experiment.score_range,
        "run": run_name,
        "codec": experiment.codec(),
        "experiment": experiment_text(experiment),
        "register": RegisterFile(Path(file)).now if file else None,
        "known": experiment.about_data(),
        "further": _further(experiment),
    }
    if experiment.privacy is not None and experiment.privacy.aggregation is not None:
        clients = HiddenClients(grid, refusals, experiment.federate, experiment.privacy.aggregation, **further)
    else:
        clients = FlowerClients(grid, refusals, experiment.federate, **further)
    _log.info(f"waiting for {experiment.federate.nodes} nodes")
    clients.wait(alike=not survey or experiment.table is None)
    _log.info(f"{clients.roster.nodes} nodes, {len(clients.roster.registered)} clients")
    terms = held_to(experiment, clients.roster.terms, len(clients.roster.registered))
    if terms:
        _log.info(f"terms of the nodes: {', '.join(f'{name} = {value:g}' for name, value in terms.items())}")
    held = _hold(clients, experiment, terms)
    if survey:
        held = agreed(clients, held)
        if not clients.roster.settled:
            clients.wait()
    about, known = clients.roster.about, clients.survey.known
    shape = about.get("features")
    if known is not None and isinstance(shape, list) and held.table is not None:
        clients.prepared = site_preparation(held.table, known, shape)
    elif survey:
        clients.prepared = held.unprepared(about)
    return clients


def _hold(clients: FlowerClients, experiment: Description, fields: Mapping[str, Any]) -> Description:
    """Return the experiment with these fields changed, by which nodes are asked from now on."""
    if not fields:
        return experiment
    held = experiment.changed(fields, where="terms of the nodes")
    clients.hold_to(fields, experiment_text(held), anew="data.agreed" in fields)
    if "data.agreed" in fields:
        clients.wait()
    if isinstance(clients, HiddenClients) and held.privacy is not None and held.privacy.aggregation is not None:
        clients.aggregation = held.privacy.aggregation
    return held


def agreed(clients: FlowerClients, experiment: Description) -> Description:
    """Return the experiment as the sites agree on it by what their owners let them tell, and note what seems wrong.

    First on words, then on scales. Two sites must tell something, or three where only their sum is seen.
    """
    roster, survey, table = clients.roster, clients.survey, experiment.table
    if table is None or not (table.pools or roster.telling("sums", "findings")):
        return experiment
    asked = 0 if experiment.refuses_statistics else survey.ask()
    if survey.known is None or asked < 2:
        why = experiment.refuses_statistics or "fewer than two nodes tell of their columns (statistics)"
        roster.note(f"statistics: {why}{'; each node scales or fills by its own rows' if table.pools else ''}")
        return experiment
    experiment = _agreed_on(clients, experiment, "data.agreed", words_of(table, survey.known))
    if isinstance(clients, HiddenClients):
        settings, shares = clients.aggregation, experiment.weighing.max_shares
        like = survey.known.like(site_preparation(experiment.table or table, survey.known, [1]))
        survey.add_up(clients.train, like, settings.bound, lambda count: cap_of(count, settings.largest_weight, shares))
    findings = survey.findings() if roster.telling("findings") else []
    if (together := survey.together) is not None:
        clients.findings = in_order([*findings, *of_all(together.profile("", table.labels), table.task)])
        experiment = _agreed_on(clients, experiment, "data.scales", scales(together) if table.pools else {})
    for finding in clients.findings:
        _log.warning(f"{finding.level}: {finding.sentence} ({finding.name})")
    return experiment


def _agreed_on(
    clients: FlowerClients, experiment: Description, field: str, found: Mapping[str, Sequence[Any]]
) -> Description:
    if not found:
        return experiment
    _log.info(f"{field}: {len(found)} columns, agreed by the nodes")
    return _hold(clients, experiment, {field: found})


def _further(experiment: Description) -> set[str]:
    """Return what nodes must say of each client beside its model: what a criterion or an algorithm looks at.

    Devices with noise say nothing that their promise does not cover (`DeviceNoise`).
    """
    needs = [criterion.needs for criterion in experiment.criteria()]
    privacy = experiment.privacy
    source = None if privacy is None else privacy.source
    noisy = source in ("local", "records")
    public = not noisy or (privacy is not None and privacy.criteria == "public")
    asked = {
        "steps": source != "local" and experiment.optimiser is not None,
        "first_losses": not noisy and any(need.first_losses for need in needs),
        "label_counts": public and any(need.label_counts for need in needs),
    }
    return {name for name, wanted in asked.items() if wanted}


def _note(report: Path | None, status: Status, line: str = "") -> None:
    if report is not None:
        note_outcome(report, status, line, pid=os.getpid())


def _stop_in_words(report: Path | None) -> None:
    """Let a run that is ended by a signal say why: Flower ends apps so that do not notice a stop themselves."""
    if report is not None:
        RunStopped.asked = (report / STOP, STOPPED)

    ends = (signal.SIGINT, signal.SIGTERM)

    def stop(*_: object) -> None:
        for each in ends:  # A second one must not disturb the run's record.
            signal.signal(each, signal.SIG_IGN)
        raise RunStopped("its ServerApp was ended by a signal")

    if threading.current_thread() is threading.main_thread():
        for each in ends:
            signal.signal(each, stop)


def _print_into(file: Path) -> None:
    """Let all that this process prints from now on, and whatever it loads, go to the end of a file."""
    with contextlib.suppress(OSError):
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.close(handle)


def _leave_with_launcher() -> None:
    """Leave at once when whoever started us is gone; Flower's own way out waits for a SuperLink that is gone too."""
    launcher = os.environ.get(LAUNCHER, "")
    if not launcher.isdigit():
        return

    def watch() -> None:
        while is_running(int(launcher)):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="launcher").start()
