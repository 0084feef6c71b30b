"""The data sets that come with scikit-learn, digits and diabetes, and MNIST in its original IDX files."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from numpy.typing import NDArray

from steelyard.base import randomness
from steelyard.base.errors import UserError
from steelyard.base.marks import DataFile
from steelyard.data.files import find, read_bytes
from steelyard.data.sources.npz import read_arrays
from steelyard.data.sources.source import DataSettings, SourceCapabilities

if TYPE_CHECKING:
    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import Dataset

SIDE = 16
"""Pixels of a side of the images that are made from digits."""
_DIGITS = ("datasets", "data", "digits.csv.gz")
"""Where they lie in scikit-learn."""


class Digits(DataSettings, named="digits"):
    """scikit-learn's 1,797 digits as 1×8×8 images between 0 and 1; use it where no download is wanted."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, 8, 8)

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(classes=10)

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.dataset import of_arrays

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


class Diabetes(DataSettings, named="diabetes"):
    """scikit-learn's 442 patients, 10 scaled columns and the disease's progression; use it to try regression."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (10,)

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities("regression", classes=0)

    def read(self) -> Dataset:
        # For speed of start: few experiments use these data sets.
        from sklearn.datasets import load_diabetes

        from steelyard.data.dataset import of_arrays

        bunch: Any = load_diabetes()
        target = np.asarray(bunch.target, dtype=np.float32)
        return of_arrays(np.asarray(bunch.data, dtype=np.float32), target, name="diabetes")


class DigitMasks(DataSettings, named="digit-masks"):
    """scikit-learn's digits, each somewhere on a larger image with its strokes as the mask; for a first try.

    A pixel of digit d is class d + 1 where it is at least half as bright as can be, all others are background. Where
    each digit lies is drawn once, the same on every machine.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return (1, SIDE, SIDE)

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities("segmentation", classes=0)

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.dataset import of_arrays

        digits = Digits().read()
        pixels, labels = digits.features.numpy()[:, 0], digits.labels.numpy()
        side = pixels.shape[-1]
        chance = randomness.generator(0, purpose="data/digit-masks")
        corners = chance.integers(0, SIDE - side + 1, size=(len(pixels), 2))
        images = np.zeros((len(pixels), 1, SIDE, SIDE), dtype=np.float32)
        masks = np.zeros((len(pixels), SIDE, SIDE), dtype=np.uint8)
        for row, (top, left) in enumerate(corners.tolist()):
            images[row, 0, top : top + side, left : left + side] = pixels[row]
            masks[row, top : top + side, left : left + side] = (pixels[row] >= 0.5) * (labels[row] + 1)
        return of_arrays(images, masks, classes=11, name="digit-masks")


# MNIST, packed or not, with the writers of QMNIST where they are at hand.


ORIGIN = (
    "a folder with MNIST's four IDX files (train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, "
    "t10k-labels-idx1-ubyte, each also as .gz), from https://yann.lecun.com/exdb/mnist or a mirror such as "
    "https://ossci-datasets.s3.amazonaws.com/mnist"
)
_UNSIGNED_BYTES = 0x08


class Mnist(DataSettings, named="mnist"):
    """MNIST as uint8 images 1×28×28, its 10,000 test rows held out, with writers from QMNIST where they are at hand."""

    path: Annotated[Path, DataFile("data")] | None = None
    """The folder of the IDX files and, if it is there, of `mnist_writers.npz` (arrays `train_writer` and
    `test_writer`). A relative path is looked for beside the experiment's file, then in the working folder, then in the
    folder that the environment variable STEELYARD_DATA names, then in ../shared/data. Default: the folder mnist in
    STEELYARD_DATA, ../shared/data or data."""

    def capabilities(self) -> SourceCapabilities:
        return SourceCapabilities(classes=10, owners=True, held_out=True)

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.dataset import of_arrays, owner_names

        folder = find(self.path, ORIGIN, default="mnist")
        if not folder.is_dir():
            raise UserError(f"data.path: '{folder}' is a file; expected {ORIGIN}")
        (train_images, train_labels), (test_images, test_labels) = (_part(folder, part) for part in ("train", "t10k"))
        if train_images.shape[1:] != test_images.shape[1:]:
            raise UserError(
                f"{folder}: images are {train_images.shape[1:]} and, to test, {test_images.shape[1:]}; "
                "expected one size"
            )
        labels = np.concatenate([train_labels, test_labels]).astype(np.int64)
        images = np.concatenate([train_images, test_images])[:, None]
        writers = _writers(folder, len(train_labels), len(test_labels))
        people = None if writers is None else owner_names(writers, "writer")
        held_out = np.arange(len(labels)) >= len(train_labels)
        return of_arrays(images, labels, people, held_out=held_out, classes=10, name="mnist")


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


def _writers(folder: Path, train: int, test: int) -> NDArray[np.int64] | None:
    path = folder / "mnist_writers.npz"
    if not path.is_file():
        return None
    arrays: dict[str, NDArray[Any]] = read_arrays(path)
    for name, count in (("train_writer", train), ("test_writer", test)):
        if name not in arrays or arrays[name].shape != (count,) or arrays[name].dtype.kind not in "iu":
            raise UserError(f"{path}: lacks whole numbers '{name}' of length {count}; expected one writer per image")
    return np.concatenate([arrays["train_writer"], arrays["test_writer"]]).astype(np.int64)
