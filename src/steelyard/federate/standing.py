"""How each registered node stands, for an operator: last contact, clock, versions, and what it last refused."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TypedDict

from steelyard.base.errors import UserError
from steelyard.clients.flower.register import Entry, read_register
from steelyard.federate.queue import ServerFolder, read_json, runs_of
from steelyard.runs.database import reading

_CONNECTED_SECONDS = 20.0
"""A node calls every few seconds or has a call held; Flower takes one for gone after twenty."""


class NodeDocument(TypedDict):
    """How a registered node stands."""

    name: str
    clients: list[str]
    status: Literal["connected", "away"]
    last: str | None
    """When it last called."""
    clock: float | None
    """Seconds that its clock is ahead."""
    steelyard: str | None
    flower: str | None
    refused: str | None


def nodes_of(server: ServerFolder) -> list[NodeDocument]:
    """Return what is known of each registered node: its last contact, clock, versions, and what it last refused."""
    contacts, served = read_json(server.contacts), server.is_served()
    faults = _last_faults(server)
    found: list[NodeDocument] = []
    for entry in read_register(server.register).entries.values():
        contact = contacts.get(entry.key, {})
        last = contact.get("last")
        found.append(
            {
                "name": entry.name,
                "clients": list(entry.clients),
                "status": "connected" if served and last and _age(last) < _CONNECTED_SECONDS else "away",
                "last": last,
                "clock": contact.get("clock"),
                "steelyard": contact.get("steelyard"),
                "flower": contact.get("flower"),
                "refused": _fault(entry, faults),
            }
        )
    return found


def _age(moment: str) -> float:
    return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()


def _fault(entry: Entry, faults: tuple[dict[str, str], list[str]]) -> str | None:
    """Return the last fault of a node's clients, or else why the node was not admitted."""
    by_client, lines = faults
    own = [by_client[client] for client in entry.clients if client in by_client]
    refusal = re.compile(rf"steelyard: ((round \d+: )?node {re.escape(entry.name)} was not admitted: .*)")
    noted = [found[1] for line in lines if (found := refusal.fullmatch(line))]
    return next(iter([*own[::-1], *noted[::-1]]), None)


def _last_faults(server: ServerFolder) -> tuple[dict[str, str], list[str]]:
    """Return why clients were last left out in the newest run, and what its log says; it may still wait for nodes."""
    newest = next((run for run in reversed(runs_of(server)) if run.started), None)
    if newest is None:
        return {}, []
    try:
        lines = newest.log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    return _faults(newest.out), lines


def _faults(folder: Path) -> dict[str, str]:
    query = (
        "SELECT c.name, f.round, f.reason FROM (SELECT * FROM untested UNION ALL SELECT * FROM failures) f "
        "JOIN clients c ON c.id = f.client ORDER BY f.round"
    )
    try:
        with reading(folder) as connection:
            rows = connection.execute(query).fetchall()
    except UserError:
        return {}
    return {name: f"round {round}: {why}" for name, round, why in rows}
