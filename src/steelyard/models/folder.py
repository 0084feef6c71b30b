"""A model that left its run: in memory, and as a folder that needs neither the run nor its data.

A folder may come from anybody: nothing in it is unpickled, JSON and files have bounds and checksums, and code in it
runs only where that is allowed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from pydantic import ValidationError
from torch import nn

from steelyard.base import files
from steelyard.base.errors import UserError, brief, empty_folder, first_names, path_of, printable, told_as
from steelyard.base.settings import validated
from steelyard.experiment.loading import FOLDER as CODE
from steelyard.experiment.loading import Ask, refuse
from steelyard.learning.models import build
from steelyard.learning.settings import ModelSettings
from steelyard.models.document import CodeFile, Held, ModelDocument, Network, RecommenderDocument
from steelyard.models.predicting import Given, Predictor
from steelyard.proof.signing import model_digest
from steelyard.runs.checkpoint import content_tensors, tensors_content

if TYPE_CHECKING:
    from steelyard.models.document import Tested
    from steelyard.models.testing import Labels

DOCUMENT, WEIGHTS, CARD = "model.json", "model.safetensors", "card.md"
DocumentT = TypeVar("DocumentT", ModelDocument, RecommenderDocument)
LONGEST = 20_000_000
"""Bytes of a model.json that are looked at; none of ours comes near."""


@dataclass(frozen=True, eq=False, repr=False)
class Model(Predictor):
    """A model that was taken from a run, with the preparation of its rows; it predicts, is tested, and is saved.

    >>> model = steelyard.Result("runs/mine").model()
    >>> answers = model.predict(features)  # a data frame: class and probabilities of each row

    Raises:
        UserError: rows are not such as the model takes, or a folder holds no whole model.
    """

    card: str
    """Where it is from and what it is for, in Markdown."""
    code: bytes = b""
    """The file that builds a network of the user's own."""

    def test(self, rows: Given, label: Labels = None, *, by: str | None = None, site: str | None = None) -> Tested:
        """Return the run's measures on new rows with their intervals, of all and by the column `by`.

        `label` is the column of what is to be predicted, or that itself for each row; default: as in training.

            >>> model.test(pandas.read_csv("held.csv"), "ill").groups[0].figures
        """
        # For speed of start: predictions need no measures.
        from steelyard.models.testing import measured

        return measured(self, rows, label, by=by, site=site)

    @property
    def use(self) -> str:
        """The command that uses the model in a folder, or what else is done with it there."""
        if self.document.preparation is None:
            return f"load {{}}/{WEIGHTS} into the network of your app"
        return "steelyard predict {} FILE --out predictions.csv"

    def save(self, out: Path | str) -> Path:
        """Write the model into a folder of its own, which must not hold anything yet, and return it."""
        code = {} if self.document.code is None else {f"{CODE}/{self.document.code.name}": self.code}
        return write_folder(out, self.document, self.network.state_dict(), self.card, code)

    @classmethod
    def load(cls, folder: Path | str, *, trust: bool = False) -> Model:
        """Return the model of a folder. One with a network of somebody's own needs `trust=True`: it runs that file.

        >>> steelyard.Model.load("heart-model").predict(frame)
        """
        return load(path_of(folder, "Model.load", "the folder of a model"), None if trust else untrusted)

    def __repr__(self) -> str:
        """Where the model is from, in one line."""
        origin = self.document.origin
        return printable(f"Model(of {origin.run}: {origin.rule}, seed {origin.seed}, round {origin.round})")


def untrusted(where: str, code: Mapping[str, str]) -> None:
    """Refuse to run a network of somebody's own; what Python calls where trust was not said."""
    refuse(where, code, "give trust=True")


def write_folder(
    out: Path | str,
    document: ModelDocument | RecommenderDocument,
    tensors: Mapping[str, torch.Tensor],
    card: str,
    code: Mapping[str, bytes],
) -> Path:
    """Write a folder that must not hold anything yet, and return it."""
    folder = empty_folder(path_of(out, "save", "the path of a new folder"), "--out")
    with told_as(f"--out: {folder} cannot be written", "a new folder"):
        files.make_folder(folder)
        contents = {WEIGHTS: tensors_content(tensors), CARD: card.encode(), **code}
        held = {"weights": held_of(contents[WEIGHTS]), "card": held_of(contents[CARD])}
        text = document.model_copy(update=held).model_dump_json(exclude_defaults=False, indent=1)
        files.write_all({folder / name: content for name, content in {**contents, DOCUMENT: text.encode()}.items()})
    return folder


def held_of(content: bytes) -> Held:
    """Return what a folder says of one of its files."""
    return Held(sha256=hashlib.sha256(content).hexdigest(), size=len(content))


def load(folder: Path, ask: Ask | None) -> Model:
    """Return the model of a folder; `ask` is called with code of its own before that runs."""
    document = read_document(folder)
    tensors, card = read_contents(folder, document)
    code = b"" if document.code is None else _content(folder / CODE / document.code.name, document.code)
    if document.code is not None and ask is not None:
        ask(str(folder), {"model.name": f"{CODE}/{document.code.name}"})
    if document.preparation is None:
        return Model(document, weights_alone(tensors), card)
    network = built(document, folder)
    _fill(folder, network, tensors)
    return Model(document, network, card, code)


def read_contents(folder: Path, document: ModelDocument | RecommenderDocument) -> tuple[dict[str, torch.Tensor], str]:
    """Return the tensors and the card of a folder, held to what its document says of them."""
    tensors = content_tensors(folder / WEIGHTS, _content(folder / WEIGHTS, document.weights))
    return tensors, _content(folder / CARD, document.card).decode("utf-8", "replace")


def read_document(folder: Path) -> ModelDocument:
    """Return what the folder of a network says of itself; nothing in it is run."""
    return read_as(folder, ModelDocument, "a recommender: `steelyard recommend list` and `recommend test` take it")


def read_as(folder: Path, kind: type[DocumentT], other: str) -> DocumentT:
    """Return what a folder says of itself; `other` is what one is that says another format."""
    path = folder / DOCUMENT
    if not folder.is_dir() or not files.is_file(path):
        raise UserError(f"{folder}: holds no {DOCUMENT}; expected the folder of a model (`steelyard model RUN --out`)")
    try:
        return kind.model_validate_json(files.read_bytes(path, LONGEST))
    except ValidationError as error:
        first = next((each for each in error.errors(include_url=False) if each["loc"] == ("format",)), None)
        if first is not None:
            raise UserError(f"{folder}: is {other}; expected another model") from None
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "all of it"
        raise UserError(printable(f"{path}: {where}: {first['msg']}; expected the file as it was written")) from None
    except (OSError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read: {error}; expected the file as it was written") from None


def _content(path: Path, held: Held) -> bytes:
    try:
        if not files.is_file(path):
            raise UserError(f"{path}: is missing; expected every file of the model's folder")
        content = files.read_bytes(path, held.size)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}; expected the file as it was written") from None
    if hashlib.sha256(content).hexdigest() != held.sha256:
        raise UserError(f"{path}: was changed: its checksum is not the one in {DOCUMENT}; expected it as it was")
    return content


def built(document: ModelDocument, folder: Path) -> nn.Module:
    """Build the network that a document describes; a file of code is that in the folder."""
    network = document.network
    fields = dict(network.settings)
    source, colon, name = str(fields.get("name", "")).rpartition(":")
    if source.endswith(".py") != (document.code is not None):
        raise UserError(f"{folder / DOCUMENT}: code: does not go with network.settings.name; expected both or neither")
    if document.code is not None:
        fields["name"] = f"{(folder / CODE / document.code.name).resolve()}{colon}{name}"
    settings = validated(ModelSettings, fields, f"{folder / DOCUMENT}: network.settings")
    assert document.preparation is not None, "of weights alone nothing is built"
    given = (settings, document.preparation.shape, network.outputs, network.seed)
    try:
        if ":" not in settings.name:
            # Without memory first: a stranger's fields may describe a network that fills it.
            with torch.device("meta"):
                held = build(*given, pixels=network.pixels).state_dict().values()
            if (size := sum(tensor.nbytes for tensor in held)) > document.weights.size:
                raise UserError(f"network: takes {size:,} bytes, more than {WEIGHTS} has; expected its own network")
        return build(*given, pixels=network.pixels).eval()
    except UserError as error:
        raise UserError(f"{folder / DOCUMENT}: {error}") from None


def weights_alone(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module that holds tensors by their names and computes nothing."""
    found = nn.Module()
    for name, tensor in tensors.items():
        *parts, last = name.split(".")
        at = found
        try:
            for part in parts:
                if part not in dict(at.named_children()):
                    at.add_module(part, nn.Module())
                at = at.get_submodule(part)
            at.register_buffer(last, tensor)
        except (KeyError, AttributeError):
            raise UserError(
                f"model: got an array {brief(name)}; allowed: names that torch's modules can have"
            ) from None
    return found


def _fill(folder: Path, network: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Put weights into a network; other names, shapes or types than its own are refused."""
    wanted, path = network.state_dict(), folder / WEIGHTS
    if lacking := sorted(wanted.keys() ^ tensors.keys()):
        raise UserError(printable(f"{path}: the names {first_names(lacking)} are not in both weights and network"))
    for name, tensor in tensors.items():
        own = wanted[name]
        if tensor.shape != own.shape or tensor.dtype != own.dtype:
            raise UserError(
                printable(
                    f"{path}: {name} is {tuple(tensor.shape)} of {tensor.dtype}; expected {tuple(own.shape)} of "
                    f"{own.dtype}, as the network has it"
                )
            )
    network.load_state_dict(dict(tensors))


def digest_of(folder: Path, network: Network, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return the digest of the numbers that were trained, as the chain of a run has it; no network is built."""
    parts = [tensors.get(name) for name in network.vector]
    wide = not network.settings and any(part is not None and part.dtype == torch.float64 for part in parts)
    found = [part.reshape(-1).to(torch.float64 if wide else torch.float32) for part in parts if part is not None]
    if len(found) < len(parts) or not found:
        raise UserError(f"{folder / WEIGHTS}: lacks numbers that {DOCUMENT} names; expected the file as it was written")
    return model_digest(torch.cat(found))


def code_file(name: str, content: bytes) -> CodeFile:
    """Return what a document says of a file of code."""
    return CodeFile(name=name, **dict(held_of(content)))
