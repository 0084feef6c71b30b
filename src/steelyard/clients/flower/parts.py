"""The parts that a message travels in: fetched within a bound, and put together only once their size is known.

Flower sends a message as a tree of parts and an array as a list of pieces: 1 MB that names one piece a thousand times
is a gigabyte once it is put together. So whoever reads a message says how large it may become, and everything is
counted before anything is copied. Only our own messages are read: one written form and some arrays.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict

from steelyard.clients.flower.internals import (
    enter_run,
    get_all_nested_objects,
    get_object_tree,
    message_to_proto,
    no_object_id_recompute,
)
from steelyard.clients.flower.wire import Refused

LARGEST_PART = 32 << 20
"""Most bytes of one part; Flower cuts arrays into pieces of 5 MiB."""
LARGEST_TREE = 256 << 10
"""Most bytes of what goes before the parts: a message without its content, and the names of its parts."""
LARGEST_MESSAGE = 1 << 30
"""Most bytes of a message that a node takes: 40 models of 6.6 million parameters, say."""
_LARGEST_SMALL = 64 << 10
"""Most bytes of a part that only names others, or says who sends a message to whom."""
_SMALLEST_PIECE = 1 << 20
_MOST_OTHERS = 64
"""Parts that a message may have beside a piece for each MiB."""
_NAME_BYTES = 65
_MOST_DIMENSIONS = 32
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Seconds before a part that has not arrived yet is asked for again, the first time and at most.

A message is there before its parts, so this happens in every round. Flower's own pauses are a second at first and ten
in the end, which is longer than the work itself where models are small.
"""
_ITEM, _VALUE, _TEXT = 0x0A, 0x12, 0x2A
"""First bytes of fields of a ConfigRecord: of an item, of its value, and of a text as that value."""

GivenT = TypeVar("GivenT")
FoundT = TypeVar("FoundT")
Pull = Callable[[str], bytes | None]
"""Fetches one part by name; None where it has not arrived yet. Raises `PartsLost` where it never will."""


class PartsTree(Protocol):
    """The name of a part of a message, and the parts that belong to it."""

    @property
    def object_id(self) -> str: ...

    @property
    def children(self) -> Sequence[PartsTree]: ...


class PartsLost(Exception):
    """Parts of a message did not arrive."""


class PartsNotTaken(Exception):
    """The server did not take parts of a message."""


@dataclass(frozen=True)
class MessageParts:
    """A message as it is sent."""

    head: bytes
    """The message without its content."""
    tree: bytes
    """The names of its parts."""
    parts: dict[str, bytes]


def take_apart(message: Message) -> MessageParts:
    """Return a message in parts, named after its content, which it no longer has then."""
    made: Any = message
    name_message(message, made.object_id)
    with no_object_id_recompute():
        tree = get_object_tree(made).SerializeToString()
        parts = {name: part.deflate() for name, part in get_all_nested_objects(made).items()}
    if message.has_content():
        message.content = RecordDict()
    return MessageParts(message_to_proto(message).SerializeToString(), tree, parts)


def error_parts(asked: Message, code: int, reason: str) -> MessageParts:
    """Return the answer to a message that could not be answered."""
    enter_run(asked.metadata.run_id, asked.metadata.dst_node_id)
    return take_apart(Message(Error(code, reason), reply_to=asked))


def name_message(message: Message, name: str) -> None:
    """Give a message its name, which Flower itself sets when it sends one."""
    message.metadata.__dict__["_message_id"] = name


def part_names(tree: PartsTree) -> list[str]:
    """Return the names of all parts of a message, each once, the pieces of arrays first."""
    found = [tree]
    for one in found:
        found += one.children
    return list(dict.fromkeys(one.object_id for one in reversed(found)))


def at_once(work: Callable[[GivenT], FoundT], given: Sequence[GivenT], most: int) -> list[FoundT]:
    """Do the same for each, at most so many at the same time; where one fails, those after it are let go of."""
    pool, failed = ThreadPoolExecutor(most), threading.Event()

    def unless_failed(one: GivenT) -> FoundT:
        if failed.is_set():
            raise CancelledError
        try:
            return work(one)
        except BaseException:
            failed.set()
            raise

    try:
        return list(pool.map(unless_failed, given))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def pull_parts(names: Sequence[str], pull: Pull, most: int, seconds: float) -> dict[str, bytes]:
    """Fetch parts, so many at the same time; raises `PartsLost` where one has not arrived after so many seconds."""
    deadline = time.monotonic() + seconds

    def arrived(name: str) -> bytes:
        pause = _FIRST_PAUSE
        while time.monotonic() < deadline:
            if (content := pull(name)) is not None:
                return content
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        raise PartsLost(f"a part of a message has not arrived after {seconds:g} s")

    return dict(zip(names, at_once(arrived, names, most), strict=True))


def group_of(round: int, largest: int) -> str:
    """Return the group of a message: its round, and how many bytes the answer may have, for the SuperLink to hold."""
    return f"{round}:{largest}"


def largest_answer(group: str) -> int:
    """Return how many bytes the answer to a message of this group may have."""
    _, _, largest = group.partition(":")
    return int(largest) if largest.isdecimal() else LARGEST_MESSAGE


def fetch(name: str, tree: PartsTree, pull: Pull, largest: int, seconds: float, most: int = 1) -> dict[str, bytes]:
    """Return the parts of a message, by name; refuses one that has, or would become, more than `largest` bytes."""
    names = part_names(tree)
    if len(names) > _most_parts(largest):
        raise Refused(f"size: {len(names)} parts; allowed: at most {_most_parts(largest)}")
    size, lock = 0, threading.Lock()

    def counted(part: str) -> bytes | None:
        nonlocal size
        content = pull(part)
        with lock:
            size += len(content or b"")
            _refuse_more(size, largest)
        return content

    contents = pull_parts(names, counted, most, seconds)
    _read(name, contents, largest)
    return contents


def opened(name: str, contents: dict[str, bytes], largest: int) -> Message:
    """Return the message of this name, put together from its parts; use it on what `fetch` returned."""
    content, form, arrays = _read(name, contents, largest)
    if content is None:
        message = Message.inflate(contents[name], {})
    else:
        found = {key: Array(one.dtype, one.shape, one.stype, b"".join(one.pieces)) for key, one in arrays.items()}
        records = RecordDict({"form": ConfigRecord({"json": form}), "arrays": ArrayRecord(found)})
        message = Message.inflate(contents[name], {content: records})
    name_message(message, name)
    return message


class _Array(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    stype: str
    pieces: list[memoryview]


class _Part(NamedTuple):
    children: list[str]
    body: memoryview


def _read(name: str, contents: dict[str, bytes], largest: int) -> tuple[str | None, str, dict[str, _Array]]:
    """Return the name of a message's content (None: it is an error), its form and its arrays, none of them copied."""
    message = _part(contents, name, "Message", largest, _LARGEST_SMALL)
    if not message.children:
        return None, "", {}
    if len(message.children) > 1:
        raise Refused(f"parts: {len(message.children)} contents; allowed: one")
    (content,) = message.children
    records = _names(contents, content, "RecordDict", largest)
    if set(records) != {"form", "arrays"}:
        raise Refused(f"records: got {', '.join(sorted(records))[:200] or 'none'}; allowed: exactly arrays, form")
    form = _text(_part(contents, records["form"], "ConfigRecord", largest, largest).body)
    size = len(form)
    arrays: dict[str, _Array] = {}
    for key, part in _names(contents, records["arrays"], "ArrayRecord", largest).items():
        arrays[key] = array = _array(contents, part, largest)
        size += sum(len(piece) for piece in array.pieces)
        _refuse_more(size, largest)
    return content, form, arrays


def _array(contents: dict[str, bytes], name: str, largest: int) -> _Array:
    part = _part(contents, name, "Array", largest, _LARGEST_SMALL)
    found = _json(part.body)
    dtype, stype, shape = found.get("dtype"), found.get("stype"), _numbers(found.get("shape"), 1 << 62)
    if not isinstance(dtype, str) or not isinstance(stype, str) or shape is None or len(shape) > _MOST_DIMENSIONS:
        raise Refused("parts: an array without dtype, shape and stype")
    pieces = _numbers(found.get("arraychunk_ids"), len(part.children))
    if pieces is None:
        raise Refused("parts: an array that names pieces which it does not have")
    bodies = [_part(contents, child, "ArrayChunk", largest, LARGEST_PART).body for child in part.children]
    return _Array(dtype, tuple(shape), stype, [bodies[number] for number in pieces])


def _names(contents: dict[str, bytes], name: str, kind: str, largest: int) -> dict[str, str]:
    found = _json(_part(contents, name, kind, largest, _LARGEST_SMALL).body)
    if not all(isinstance(value, str) for value in found.values()):
        raise Refused(f"parts: a {kind} that does not name its parts")
    return found


def _part(contents: dict[str, bytes], name: str, kind: str, largest: int, most: int) -> _Part:
    """Return one part: its head says of which kind it is and which others belong to it."""
    content = contents.get(name)
    if content is None:
        raise Refused("parts: one is missing")
    end = content.find(b"\x00", 0, 256 + _NAME_BYTES * _most_parts(largest))
    words = content[: max(end, 0)].decode("ascii", "replace").split(" ")
    if len(words) != 3 or words[0] != kind:
        raise Refused(f"parts: got {words[0][:40]!r}; allowed here: {kind}")
    body = memoryview(content)[end + 1 :]
    if len(body) > most:
        raise Refused(f"size: a {kind} of {len(body)} bytes; allowed: at most {most}")
    return _Part(words[1].split(",") if words[1] else [], body)


def _json(body: memoryview) -> dict[str, Any]:
    try:
        found = json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise Refused("parts: one that is not JSON") from None
    if not isinstance(found, dict):
        raise Refused("parts: one that is no JSON object")
    return cast(dict[str, Any], found)


def _numbers(found: object, below: int) -> list[int] | None:
    """Return a list of whole numbers from 0, all below this one; None for anything else."""
    if not isinstance(found, list):
        return None
    numbers = [one for one in cast(list[object], found) if type(one) is int and 0 <= one < below]
    return numbers if len(numbers) == len(cast(list[object], found)) else None


def _text(body: memoryview) -> str:
    """Return the one text, named json, of a ConfigRecord.

    Read by hand: a record of a million empty values is a few MB on the wire and hundreds of them as Flower's objects.
    """
    item = _only_field(body, _ITEM)
    if bytes(item[:6]) != b"\x0a\x04json":
        raise Refused("form: not one JSON text")
    try:
        return str(_only_field(_only_field(item[6:], _VALUE), _TEXT), "utf-8")
    except UnicodeDecodeError:
        raise Refused("form: not a text") from None


def _only_field(data: memoryview, tag: int) -> memoryview:
    """Return what the one field of a protobuf message holds, which must be this field and fill the message."""
    size, at = 0, 1
    if len(data) > 1 and data[0] == tag:
        while at < min(len(data), 6):
            size |= (data[at] & 0x7F) << 7 * (at - 1)
            at += 1
            if data[at - 1] < 0x80 and size == len(data) - at:
                return data[at:]
    raise Refused("form: not one JSON text")


def _most_parts(largest: int) -> int:
    return _MOST_OTHERS + largest // _SMALLEST_PIECE


def _refuse_more(size: int, largest: int) -> None:
    if size > largest:
        raise Refused(f"size: more than {largest} bytes; that is no answer to what was asked")
