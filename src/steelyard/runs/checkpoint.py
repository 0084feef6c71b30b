"""Checkpoints: the states of all federations as one safetensors file plus one JSON text."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from steelyard.errors import UserError
from steelyard.messages import LossState
from steelyard.rounds.state import RoundState
from steelyard.weighing.priorities import OrderState

FOLDER = "checkpoints"
"""Folder of checkpoint files in a run's folder."""
CLIENTS = "clients/"
MODELS = "models/"


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file so that it is there whole or not at all: a temporary file, flushed, then renamed."""
    draft = path.with_suffix(".part")
    with draft.open("wb") as file:
        file.write(save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}))
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file; a damaged one is named in the error."""
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable checkpoint: {error}") from error


def pack(states: Mapping[str, RoundState], clients: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], str]:
    """Split states into tensors (models, what clients keep) and JSON (everything else)."""
    tensors = {MODELS + name: state.parameters for name, state in states.items()}
    tensors |= {CLIENTS + name: tensor for name, tensor in clients.items()}
    rest = {
        name: {
            "round": state.round,
            "loss": asdict(state.loss),
            "orders": asdict(state.orders),
            "finished": state.finished,
            "memory": state.memory,
        }
        for name, state in states.items()
    }
    return tensors, json.dumps(rest)


def unpack(tensors: Mapping[str, torch.Tensor], text: str) -> tuple[dict[str, RoundState], dict[str, torch.Tensor]]:
    """Put states together again from tensors and JSON; the inverse of `pack`."""
    states: dict[str, RoundState] = {}
    for name, rest in json.loads(text).items():
        loss: dict[str, Any] = rest["loss"]
        if loss["class_weights"] is not None:
            loss["class_weights"] = tuple(loss["class_weights"])
        orders: dict[str, Any] = rest["orders"]
        orders["order"] = tuple(orders["order"])
        states[name] = RoundState(
            round=rest["round"],
            parameters=tensors[MODELS + name],
            loss=LossState(**loss),
            orders=OrderState(**orders),
            finished=rest["finished"],
            memory=rest.get("memory", {}),  # runs of earlier versions remembered nothing
        )
    kept = {name.removeprefix(CLIENTS): tensor for name, tensor in tensors.items() if name.startswith(CLIENTS)}
    return states, kept


def last_checkpoint(
    connection: sqlite3.Connection, folder: Path
) -> tuple[int, dict[str, RoundState], dict[str, torch.Tensor]]:
    """Return (round, states, what clients keep) of the last checkpoint of a run; (−1, {}, {}) before the first."""
    row = connection.execute("SELECT round, file, states FROM checkpoints ORDER BY round DESC LIMIT 1").fetchone()
    if row is None:
        return -1, {}, {}
    states, kept = unpack(read_tensors(folder / FOLDER / row[1]), row[2])
    return int(row[0]), states, kept
