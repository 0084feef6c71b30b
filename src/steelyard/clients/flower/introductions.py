"""Reading a node's introduction: its clients, what its data look like, its key. False claims are refused."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from cryptography.hazmat.primitives import serialization
from flwr.app import RecordDict

from steelyard.clients.flower import wire
from steelyard.clients.flower.forms import IntroductionForm, Refused
from steelyard.clients.flower.register import Register, bare

About = dict[str, int | list[int]]
"""What a server without data must know of the nodes' data, such as the shape of a sample."""

LARGEST_INTRODUCTION = 4 << 20
"""Most bytes of what a node says of itself, as it is sent and as it is read."""
_LONGEST_NAME = 128
_LARGEST_FACT = 10**8
_MOST_DIMENSIONS = 8
_MOST_NAMED = 5


def introduction(answer: RecordDict | str) -> IntroductionForm:
    """Return what a node said of itself, or refuse it."""
    if isinstance(answer, str):
        raise Refused(answer)
    text, arrays = wire.split(answer)
    if arrays:
        raise Refused("introduction: holds arrays; allowed: none")
    return IntroductionForm.read(text, LARGEST_INTRODUCTION)


def facts(about: Mapping[str, int | list[int]]) -> About:
    """Return what a node says of its data; sizes that no data have are refused."""
    for name, value in about.items():
        numbers = value if isinstance(value, list) else [value]
        large = any(not 0 <= number <= _LARGEST_FACT for number in numbers) or prod(numbers) > _LARGEST_FACT
        if len(about) > _MOST_DIMENSIONS or len(numbers) > _MOST_DIMENSIONS or len(name) > _LONGEST_NAME or large:
            raise Refused(f"about {name[:40]}: no data have such sizes; allowed: a product of at most {_LARGEST_FACT}")
    return dict(about)


def key_line(pem: bytes) -> str:
    """Return a node's public key as the register writes it; a node without one has no key that could be in it."""
    try:
        key = serialization.load_pem_public_key(pem)
        return bare(key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode())
    except ValueError:
        return ""


def client_names(clients: Sequence[str], most: int) -> tuple[str, ...]:
    """Return a node's clients, ascending, or refuse names that cannot be stored and shown."""
    if not 1 <= len(clients) <= most or len(set(clients)) != len(clients):
        raise Refused(f"clients: {len(clients)} names; allowed: 1 to {most}, all different")
    for name in clients:
        if not (name.strip() and name.isprintable() and len(name) <= _LONGEST_NAME):
            raise Refused(f"clients: got {name[:40]!r}; allowed: printable names of at most {_LONGEST_NAME} letters")
    return tuple(sorted(clients))


def absent(
    register: Register, connected: Collection[str], said: Mapping[str, About], about: About, reasons: Mapping[str, str]
) -> str:
    """Say who of a register does not take part, and why, in one line; all but the register are by key.

    `said` is what those who introduced themselves said of their data, `reasons` why others were not admitted.
    """
    missing: list[str] = []
    for key, entry in register.entries.items():
        if key not in said:
            unknown = "is connected and has not said who it is" if key in connected else "is not connected"
            missing.append(f"{entry.name} {reasons.get(key, unknown)}")
        elif said[key] != about:
            missing.append(f"{entry.name} has data of another kind: {said[key]}; most have {about}")
    more = len(missing) - _MOST_NAMED
    return "; ".join(missing[:_MOST_NAMED] + ([f"{more} others are missing"] if more > 0 else []))
