"""The only source of chance: streams named by seed, round, client and purpose.

Every draw in the library comes from a stream that is a pure function of these four words, so a result does not
depend on the order in which clients answer, on how many are trained together, or on whether a run was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _digest(seed: int, round: int, client: str, purpose: str) -> bytes:
    words = f"{seed}\x1f{round}\x1f{client}\x1f{purpose}".encode()
    return hashlib.blake2b(words, digest_size=16).digest()


def generator(seed: int, round: int = 0, client: str = "", purpose: str = "") -> np.random.Generator:
    """Return the NumPy generator of one stream; use it for any draw on the host."""
    key = np.frombuffer(_digest(seed, round, client, purpose), dtype="<u8").astype(np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def stream_key(seed: int, round: int = 0, client: str = "", purpose: str = "") -> int:
    """Return the stream's name as one 63-bit integer; use it to seed a generator of another library."""
    return int.from_bytes(_digest(seed, round, client, purpose)[:8], "little") >> 1


def stream_keys(seed: int, round: int, clients: Sequence[str], purpose: str) -> NDArray[np.uint64]:
    """Return one 64-bit key per client; use them with `words` to draw for a whole cohort at once."""
    raw = b"".join(_digest(seed, round, client, purpose)[:8] for client in clients)
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64)


def words(keys: NDArray[np.uint64], count: int, start: int = 0) -> NDArray[np.uint64]:
    """Return `count` random 64-bit words per key (SplitMix64 counted from `start`), shape keys.shape + (count,).

    Use it where thousands of clients draw in one step: word i of a key is the same however many are asked for.
    """
    return words_at(keys[..., None], np.arange(start, start + count, dtype=np.uint64))


def words_at(keys: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return the word at one position of each key's stream, element by element; `words` gives positions in a row.

    Use it where each draw belongs to a thing with a number of its own (an item, a round), whatever else is drawn.
    """
    with np.errstate(over="ignore"):
        z = positions + np.uint64(1)
        z *= _GOLDEN
        z = keys + z
        z ^= z >> np.uint64(30)
        z *= _MIX_1
        z ^= z >> np.uint64(27)
        z *= _MIX_2
        z ^= z >> np.uint64(31)
        return z


def uniforms(keys: NDArray[np.uint64], count: int) -> NDArray[np.float64]:
    """Return `count` uniform numbers in [0, 1) per key; use it for vectorised yes/no draws and choices."""
    return (words(keys, count) >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))


def permutations(keys: NDArray[np.uint64], size: int, count: int) -> NDArray[np.int64]:
    """Return `count` permutations of range(size) per key, shape keys.shape + (count, size).

    Use it for the order in which clients visit their samples, one permutation per local epoch.
    """
    drawn = words(keys, count * size).reshape(*keys.shape, count, size)
    # The order of the words, stable. Sorting words that carry their place in the last bits takes a quarter of the time
    # and gives the same, unless two words differ in those bits alone.
    places = np.uint64((1 << max(size - 1, 1).bit_length()) - 1)
    tagged = drawn & ~places
    tagged |= np.arange(size, dtype=np.uint64)
    tagged.sort(axis=-1)
    if ((tagged[..., 1:] ^ tagged[..., :-1]) <= places).any():
        return np.argsort(drawn, axis=-1, kind="stable").astype(np.int64)
    tagged &= places
    return tagged.view(np.int64)


_sorted: tuple[Sequence[str], list[str]] = ((), [])
"""The names that were sorted last, and in order: a million of them are asked for again in every round."""


def _ascending(names: Sequence[str]) -> list[str]:
    global _sorted
    known, ordered = _sorted
    if names is not known or not isinstance(names, tuple):
        ordered = sorted(names)
        _sorted = (names, ordered)
    return ordered


def choose(seed: int, round: int, names: Sequence[str], count: int, purpose: str = "cohort") -> list[str]:
    """Choose `count` of the names without repetition, in sorted order; use it to select a round's cohort."""
    ordered = _ascending(names)
    picked = generator(seed, round, purpose=purpose).choice(len(ordered), size=count, replace=False)
    return [ordered[i] for i in sorted(picked.tolist())]
