"""LEAF folders: JSON files of users with their rows, in a train and a test part (Caldas et al. 2018).

Text becomes rows of tokens of one length: characters by a fixed alphabet, words by their hash. Both need no vocabulary
that clients would have to agree on, so that nodes read text alike without sharing any of it.
"""

from __future__ import annotations

import hashlib
import re
import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field, ValidationError

from steelyard.base.errors import UserError, brief
from steelyard.base.marks import DataFile
from steelyard.base.settings import explain
from steelyard.data.files import find, read_text
from steelyard.data.sources.source import FileSource, Side, SourceCapabilities

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import Dataset

PADDING, UNKNOWN, FIRST = 0, 1, 2
"""Tokens before the text, of characters beyond the alphabet, and the first that stands for something."""
ALPHABET = "".join(sorted("\n !\"&'(),-.:;>?[]}" + string.digits + string.ascii_letters))
"""The 80 characters of LEAF's Shakespeare, as its labels are numbered."""
_WORDS = re.compile(r"[\w']+|[^\w\s]")


def characters(texts: Sequence[str], length: int) -> NDArray[np.int64]:
    """Return one token for each character, [texts, length]: the last ones of a longer text, padding before a shorter.

    Use it where the next character is to be predicted.
    """
    known = {letter: number for number, letter in enumerate(ALPHABET, FIRST)}
    return _rows([[known.get(letter, UNKNOWN) for letter in text[-length:]] for text in texts], length)


def words(texts: Sequence[str], length: int, vocabulary: int) -> NDArray[np.int64]:
    """Return one token below `vocabulary` for each of the first words, [texts, length], with padding before them.

    Words of one hash share a token (Weinberger et al. 2009). Use it where whole texts are classified.
    """
    found = ([_hashed(word, vocabulary) for word in _WORDS.findall(text.lower())[:length]] for text in texts)
    return _rows(list(found), length)


@lru_cache(maxsize=1 << 20)
def _hashed(word: str, vocabulary: int) -> int:
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return FIRST + int.from_bytes(digest, "little") % (vocabulary - FIRST)


def _rows(tokens: Sequence[Sequence[int]], length: int) -> NDArray[np.int64]:
    table = np.full((len(tokens), length), PADDING)
    for row, mine in zip(table, tokens, strict=True):
        if mine:
            row[length - len(mine) :] = mine
    return table


ORIGIN = (
    "a LEAF folder with train/*.json and test/*.json (keys users, num_samples, user_data), made by LEAF's "
    "preprocess.sh, https://github.com/TalwalkarLab/leaf"
)
IMAGES = (".jpg", ".jpeg", ".png")
TWEET, SENTIMENT = 4, 4
"""Where the text of a tweet stands in a row of Sent140, and its label of a good mood."""


class Leaf(FileSource, named="leaf"):
    """A LEAF data set, each row with its user, the test/ rows held out; use it with scheme given or natural.

    784 numbers per row become an image 1×28×28 (FEMNIST). Rows that are names of images (CelebA) are decoded from
    data/raw/img_align_celeba beside the folder. Texts become rows of tokens: characters where the labels are the next
    character (Shakespeare), words else (Sent140). Other rows must be lists of numbers.
    """

    path: Annotated[Path, DataFile("data")]
    """The folder with train/ and test/, looked for beside the experiment's file, then in the working folder, then in
    the folder that the environment variable STEELYARD_DATA names, then in ../shared/data."""
    size: Side = 64
    """Images: width and height in pixels; others are cut to the central square and scaled."""
    length: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Text: tokens of a row; a shorter text has padding (token 0) before it. Default: 80 characters, 25 words."""
    vocabulary: Annotated[int, Field(ge=3, le=10_000_000)] = 10_000
    """Words: number of tokens that words are hashed to; the model must know as many, in `model.arguments`."""

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(classes=self.classes, owners=True, held_out=True, splits_owners=True)

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.dataset import of_arrays

        folder = find(self.path, ORIGIN)
        if not folder.is_dir():
            raise UserError(f"data.path: '{folder}' is a file; expected {ORIGIN}")
        folder = folder / "data" if (folder / "data" / "train").is_dir() else folder
        rows: list[Any] = []
        labels: list[Any] = []
        owners: list[str] = []
        held_out: list[bool] = []
        for part in ("train", "test"):
            files = sorted([*(folder / part).glob("*.json"), *(folder / part).glob("*.json.gz")])
            if not files:
                raise UserError(f"{folder / part}: holds no .json file; expected {ORIGIN}")
            for path in files:
                for user, inputs, targets in _users(path):
                    rows.extend(inputs)
                    labels.extend(targets)
                    owners.extend([user] * len(inputs))
                    held_out.extend([part == "test"] * len(inputs))
        if not rows:
            raise UserError(f"{folder}: holds no rows; expected {ORIGIN}")
        name, people = folder.resolve().name, np.array(owners)
        texts = _texts(rows)
        if texts is not None:
            features, targets, classes, letters = _tokens(folder, texts, labels, self)
            options: dict[str, Any] = {"held_out": held_out, "classes": classes, "name": name, "tokens": True}
            return self._prepared(of_arrays(features, targets, people, **options), letters)
        features = _features(folder, rows, self.size)
        targets = _classes(folder, labels)
        return of_arrays(features, targets, people, held_out=held_out, classes=self.classes, name=name)

    def _prepared(self, dataset: Dataset, letters: bool) -> Dataset:
        """Return texts with what they went through; `letters`: as characters, the next of which is predicted."""
        found = dataset.described
        names = [*ALPHABET, *found.target.names[len(ALPHABET) :]] if letters else found.target.names
        target = found.target.model_copy(update={"names": names[: dataset.classes]})
        form = {"form": "characters" if letters else "words", "vocabulary": 0 if letters else self.vocabulary}
        return replace(dataset, preparation=found.model_copy(update={**form, "target": target}))


def _texts(rows: list[Any]) -> list[str] | None:
    """Return the text of each row, None where rows are no texts: names of images, or numbers.

    A row of Sent140 is a list: the tweet's number, its date, the query, the user, the text.
    """
    if all(isinstance(row, list) and len(row) >= TWEET + 1 and isinstance(row[TWEET], str) for row in rows):
        return [row[TWEET] for row in rows]
    if not all(isinstance(row, str) for row in rows) or all(Path(row).suffix.lower() in IMAGES for row in rows):
        return None
    return rows


def _tokens(
    folder: Path, texts: list[str], labels: list[Any], settings: Leaf
) -> tuple[NDArray[np.int64], NDArray[np.int64], int | None, bool]:
    """Return tokens, labels, how many classes there are, and whether tokens are characters."""
    targets, letters = _targets(folder, labels)
    if letters:
        return characters(texts, settings.length or 80), targets, settings.classes or len(ALPHABET), True
    return words(texts, settings.length or 25, settings.vocabulary), targets, settings.classes, False


def _targets(where: Path, labels: list[Any], classes: int | None = None) -> tuple[NDArray[np.int64], bool]:
    """Return the classes of texts by number, and whether they are characters."""
    letters = all(isinstance(label, str) and len(label) == 1 for label in labels[:100])
    # A play may hold digits, too; sentiments are nothing else.
    if letters and not all(str(label).isdigit() for label in labels):
        strange = next(
            (one for one in labels if not isinstance(one, str) or len(one) != 1 or one not in ALPHABET), None
        )
        if strange is not None:
            raise UserError(f"{where}: a label y is {brief(strange)}; expected one of {len(ALPHABET)} characters")
        return np.array([ALPHABET.index(label) for label in labels], dtype=np.int64), True
    whole = [int(label) if isinstance(label, str) and label.isdigit() else label for label in labels]
    targets = _classes(where, whole)
    if classes in (None, 2) and set(np.unique(targets).tolist()) <= {0, SENTIMENT}:
        targets = (targets == SENTIMENT).astype(np.int64)  # Sentiment140 writes 0 and 4.
    return targets, False


def texts_of_file(path: Path, classes: int) -> tuple[list[str], list[str]]:
    """Return the texts of one .json file with the names of their classes, of which the data set has so many."""
    users = _users(path)
    texts = _texts([row for _, inputs, _ in users for row in inputs])
    if texts is None:
        raise UserError(f"{path}: its rows x are no texts; expected a LEAF file of texts")
    targets, letters = _targets(path, [label for _, _, mine in users for label in mine], classes)
    return texts, [ALPHABET[target] if letters else str(target) for target in targets.tolist()]


class _Rows(BaseModel):
    x: list[Any]
    y: list[Any]


class _File(BaseModel):
    """One file of a LEAF folder, as far as it is read."""

    users: list[Annotated[str, Field(pattern=r"\S")]]
    num_samples: list[int]
    user_data: dict[str, _Rows]


def _users(path: Path) -> list[tuple[str, list[Any], list[Any]]]:
    """Return (user, x, y) of every user of one file, with the counts checked."""
    try:
        leaf = _File.model_validate_json(read_text(path))
    except ValidationError as problem:
        raise UserError(f"{path}: {explain(problem, _File)}; expected a whole LEAF file") from None
    if len(leaf.users) != len(leaf.num_samples):
        raise UserError(
            f"{path}: names {len(leaf.users)} users with {len(leaf.num_samples)} num_samples; expected as many of each"
        )
    twice = [user for user, times in Counter(leaf.users).items() if times > 1]
    if twice:
        raise UserError(f"{path}: names user '{twice[0]}' more than once; expected each user once")
    found: list[tuple[str, list[Any], list[Any]]] = []
    for user, count in zip(leaf.users, leaf.num_samples, strict=True):
        rows = leaf.user_data.get(user, _Rows(x=[], y=[]))
        if not len(rows.x) == len(rows.y) == count:
            raise UserError(
                f"{path}: user '{user}' has {len(rows.x)} x and {len(rows.y)} y; expected {count}, its num_samples"
            )
        found.append((user, rows.x, rows.y))
    return found


def _features(folder: Path, rows: list[Any], size: int) -> NDArray[Any]:
    if all(isinstance(row, str) for row in rows):
        return _pictures(folder, rows, size)
    try:
        features = np.asarray(rows, dtype=np.float32)
    except (ValueError, TypeError, OverflowError):
        raise UserError(
            f"{folder}: rows x are not lists of numbers of one length, and not all texts; expected rows of one kind"
        ) from None
    if features.ndim == 1:
        features = features[:, None]
    if features.ndim == 2 and features.shape[1] == 28 * 28:
        return features.reshape(-1, 1, 28, 28)
    return features


def _pictures(folder: Path, names: list[str], size: int) -> NDArray[np.uint8]:
    # For speed of start: most LEAF folders hold no images.
    from steelyard.data.sources.images import Pictures

    folders = [base / "raw" / "img_align_celeba" for base in (folder, folder.parent, folder.parent / "data")]
    raw = next((candidate for candidate in folders if candidate.is_dir()), None)
    if raw is None:
        raise UserError(
            f"{folder}: rows x name images, but there is no {folders[0]}; expected the folder of the images"
        )
    return Pictures(raw).read(names, size)


def _classes(folder: Path, labels: list[Any]) -> NDArray[np.int64]:
    whole = [int(label) if isinstance(label, float) and label.is_integer() else label for label in labels]
    strange = [label for label in whole if not isinstance(label, int) or abs(label) >= 2**31]
    if strange:
        raise UserError(
            f"{folder}: labels y such as {brief(strange[0])} are not whole numbers; expected classes 0, 1, 2, ..."
        )
    return np.asarray(whole, dtype=np.int64)
