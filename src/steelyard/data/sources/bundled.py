"""The data sets that come with scikit-learn, digits and diabetes, and MNIST in its original IDX files."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steelyard.base.errors import UserError
from steelyard.data.dataset import Dataset, of_arrays, owner_names
from steelyard.data.files import find, read_bytes
from steelyard.data.sources.npz import read_arrays
from steelyard.data.sources.source import DataSettings

_DIGITS = ("datasets", "data", "digits.csv.gz")
"""Where they lie in scikit-learn."""


def read_digits(settings: DataSettings) -> Dataset:
    """Return scikit-learn's 1,797 digits as 1×8×8 images between 0 and 1; use it where no download is wanted."""
    table = _digits()
    pixels = table[:, :-1].reshape(-1, 1, 8, 8) / np.float32(16)
    return of_arrays(pixels, table[:, -1].astype(np.int64), classes=10, name="digits")


@cache
def _digits() -> NDArray[np.float32]:
    # For speed of start: the file is read as scikit-learn reads it, without importing that, which takes longer than
    # the first round of the quickstart.
    found = find_spec("sklearn")
    places = [] if found is None else found.submodule_search_locations or []
    path = next((path for place in places if (path := Path(place, *_DIGITS)).is_file()), None)
    if path is None:
        raise UserError("data.source: got 'digits', which come with scikit-learn, and it is not there; allowed: others")
    return np.loadtxt(path, delimiter=",", dtype=np.float32)


def read_diabetes(settings: DataSettings) -> Dataset:
    """Return scikit-learn's 442 patients, 10 scaled columns and the disease's progression; use it to try regression."""
    # For speed of start: few experiments use these data sets.
    from sklearn.datasets import load_diabetes

    bunch: Any = load_diabetes()
    target = np.asarray(bunch.target, dtype=np.float32)
    return of_arrays(np.asarray(bunch.data, dtype=np.float32), target, name="diabetes")


# MNIST, packed or not, with the writers of QMNIST where they are at hand.


ORIGIN = (
    "a folder with MNIST's four IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte, each also as .gz), from https://yann.lecun.com/exdb/mnist or a mirror such as "
    "https://ossci-datasets.s3.amazonaws.com/mnist"
)
_UNSIGNED_BYTES = 0x08


def read_mnist(settings: DataSettings) -> Dataset:
    """Return MNIST as uint8 images 1×28×28, its 10,000 test rows marked as held out; use it for the image experiments.

    Writers are read from `mnist_writers.npz` (arrays `train_writer` and `test_writer`) if the folder has it.
    """
    folder = find(settings.path, ORIGIN, default="mnist")
    if not folder.is_dir():
        raise UserError(f"data.path: '{folder}' is a file; expected {ORIGIN}")
    train_images, train_labels = _part(folder, "train")
    test_images, test_labels = _part(folder, "t10k")
    if train_images.shape[1:] != test_images.shape[1:]:
        raise UserError(
            f"{folder}: images are {train_images.shape[1:]} and, to test, {test_images.shape[1:]}; expected one size"
        )
    labels = torch.from_numpy(np.concatenate([train_labels, test_labels]).astype(np.int64))
    held_out = np.arange(len(labels)) >= len(train_labels)
    images = torch.from_numpy(np.concatenate([train_images, test_images])[:, None])
    return Dataset("mnist", images, labels, 10, _writers(folder, len(train_labels), len(test_labels)), held_out)


def _part(folder: Path, part: str) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    image_file, label_file = (_locate(folder, f"{part}-{kind}-ubyte") for kind in ("images-idx3", "labels-idx1"))
    images, labels = read_idx(image_file, axes=3), read_idx(label_file, axes=1)
    if len(images) != len(labels):
        raise UserError(f"{label_file}: holds {len(labels)} labels; expected {len(images)}, one per image")
    if len(labels) and int(labels.max()) > 9:
        raise UserError(f"{label_file}: holds label {int(labels.max())}; expected 0 to 9")
    return images, labels


def _locate(folder: Path, name: str) -> Path:
    # Some mirrors write a dot where the original has a dash before "idx".
    names = [name, f"{name}.gz", name.replace("-idx", ".idx"), f"{name.replace('-idx', '.idx')}.gz"]
    # torchvision keeps the same files in MNIST/raw.
    for parent in (folder, folder / "raw", folder / "MNIST" / "raw"):
        for candidate in names:
            if (parent / candidate).is_file():
                return parent / candidate
    raise UserError(f"{folder}: holds no {name} or {name}.gz; expected {ORIGIN}")


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Return the array of one IDX file of unsigned bytes; its magic number and its length are checked."""
    content = read_bytes(path)
    header = 4 + 4 * axes
    expected = bytes([0, 0, _UNSIGNED_BYTES, axes])
    if len(content) < header or content[:4] != expected:
        raise UserError(
            f"{path}: starts with {content[:4].hex() or 'nothing'}; expected IDX magic number {expected.hex()}"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, dtype=">u4", count=axes, offset=4))
    values = np.frombuffer(content, dtype=np.uint8, offset=header)
    size = int(np.prod(shape, dtype=object))
    if len(values) != size:
        raise UserError(f"{path}: holds {len(values)} values (cut off or damaged); expected {size} for shape {shape}")
    if not size:
        raise UserError(f"{path}: holds nothing, its shape is {shape}; expected at least one value")
    return values.reshape(shape)


def _writers(folder: Path, train: int, test: int) -> NDArray[np.str_] | None:
    path = folder / "mnist_writers.npz"
    if not path.is_file():
        return None
    arrays: dict[str, NDArray[Any]] = read_arrays(path)
    for name, count in (("train_writer", train), ("test_writer", test)):
        if name not in arrays or arrays[name].shape != (count,) or arrays[name].dtype.kind not in "iu":
            raise UserError(f"{path}: lacks whole numbers '{name}' of length {count}; expected one writer per image")
    return owner_names(np.concatenate([arrays["train_writer"], arrays["test_writer"]]).astype(np.int64), "writer")
