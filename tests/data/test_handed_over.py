"""Data handed over in Python: frames, torch data sets, and stand-ins that follow the protocols of other libraries."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from tests.data.test_tables import PATIENTS, assert_patients
from tests.kit import assert_refused
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from steelyard import in_memory

# frames ---------------------------------------------------------------------------------------------------------------


def patients() -> pandas.DataFrame:
    return pandas.read_csv(io.StringIO(PATIENTS)).set_axis([7, 7, 9, 3])


def test_a_frame_is_read_as_a_csv_file_is() -> None:
    frame = patients().astype({"sex": "category"})
    assert_patients(in_memory(frame, label="ill", owner="hospital", normalise="unit"))
    assert list(frame.columns) == ["hospital", "age", "sex", "bp", "ill"]


def test_labels_owners_and_test_part_may_stand_beside_a_frame() -> None:
    frame = patients().drop(columns=["ill", "hospital"])
    data = in_memory(frame, [3, 1, 3, 1], ["b", "a", "b", "a"], held_out=[True, False, False, True], ignore=["sex"])
    assert data.labels.tolist() == [1, 0, 1, 0]
    assert data.shape == (2,)
    ownerless = in_memory(frame, [0.5, 1, 2, 3], held_out=[True, False, False, True], ignore=["sex"])
    assert (ownerless.kind, ownerless.owners, ownerless.held_out.tolist()) == ("regression", None, [1, 0, 0, 1])
    assert data.owners.tolist() == ["b", "a", "b", "a"]
    assert data.held_out.tolist() == [True, False, False, True]


def test_frames_of_other_libraries_turn_into_pandas() -> None:
    class Polars:
        def to_pandas(self) -> pandas.DataFrame:
            return patients()

    assert in_memory(Polars(), label="ill", owner="hospital").classes == 2


# torch ----------------------------------------------------------------------------------------------------------------


def test_a_tensor_dataset() -> None:
    features, labels = torch.arange(12.0).reshape(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])
    data = in_memory(TensorDataset(features, labels))
    assert (data.features.tolist(), data.labels.tolist()) == (features.tolist(), labels.tolist())
    owned = in_memory(TensorDataset(features, labels, torch.tensor([5, 5, 5, 8, 8, 8])))
    assert owned.owners.tolist() == ["user-005"] * 3 + ["user-008"] * 3


class Items(TorchDataset[Any]):
    """A torch Dataset of whatever items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, row: int) -> Any:
        return self.items[row]


def test_items_that_are_mappings_and_labels_that_are_words() -> None:
    items = [{"x": [row, 1.0], "label": word, "who": "ab"[row]} for row, word in enumerate(["yes", "no"])]
    data = in_memory(Items(items), owner="who")
    assert data.features.tolist() == [[0, 1], [1, 1]]
    assert data.labels.tolist() == [1, 0]
    assert "0 = no" in data.notes[0]
    assert data.owners.tolist() == ["a", "b"]


class Picture:
    """As much of a PIL image as counts."""

    def __init__(self, pixels: np.ndarray, mode: str) -> None:
        self.pixels, self.mode, self.size = pixels, mode, pixels.shape[1::-1]

    def convert(self, mode: str) -> Picture:
        if mode == self.mode:
            return self
        grey = self.pixels if self.pixels.ndim == 2 else self.pixels[:, :, 0]
        return Picture(grey if mode == "L" else np.stack([grey] * 3, axis=2), mode)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self.pixels


def test_pictures_become_bytes_with_channels_first() -> None:
    colour = Picture(np.arange(24, dtype=np.uint8).reshape(2, 4, 3), "RGB")
    grey = Picture(np.full((2, 4), 7, dtype=np.uint8), "L")
    data = in_memory(Items([(grey, 0), (grey, 1)]))
    assert (data.features.dtype, data.shape) == (torch.uint8, (1, 2, 4))
    # one picture in colour makes all of them so
    mixed = in_memory(Items([(grey, 0), (colour, 1)]))
    assert mixed.shape == (3, 2, 4)
    assert mixed.features[1, 1].tolist() == [[1, 4, 7, 10], [13, 16, 19, 22]]


# torchvision ----------------------------------------------------------------------------------------------------------


class Vision:
    """torchvision's protocol: `data`, `targets`, perhaps a transform, and items."""

    def __init__(self, data: Any, targets: Any, **changes: Any) -> None:
        self.data, self.targets, self.changes = data, targets, changes
        vars(self).update(changes)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> Any:
        assert self.changes, "read one by one, where data and targets are at hand"
        sample, target = self.changes.get("transform"), self.changes.get("target_transform")
        return (sample or float)(self.data[row]), (target or int)(self.targets[row])


def test_data_and_targets_of_torchvision() -> None:
    digits = in_memory(Vision(torch.arange(32, dtype=torch.uint8).reshape(2, 4, 4), torch.tensor([3, 1])))
    assert (digits.shape, digits.features.dtype) == ((1, 4, 4), torch.uint8)
    colours = np.arange(96, dtype=np.uint8).reshape(2, 4, 4, 3)
    objects = in_memory(Vision(colours, [0, 1]))
    assert objects.shape == (3, 4, 4)
    assert objects.features[1, 2, 3, 0] == colours[1, 3, 0, 2]


def test_a_transform_is_applied() -> None:
    pixels = torch.full((2, 4, 4), 255, dtype=torch.uint8)
    data = in_memory(Vision(pixels, [0, 1], transform=lambda image: image[None].float() / 510))
    assert data.features.unique().tolist() == [0.5]
    turned = Vision(torch.tensor([3.0, 4.0]), [0, 1], target_transform=lambda label: 1 - label)
    assert in_memory(turned).labels.tolist() == [1, 0]


# Hugging Face ---------------------------------------------------------------------------------------------------------


class Hugging:
    """Hugging Face's protocol: named columns, rows as mappings, formats."""

    def __init__(self, columns: dict[str, list[Any]], format: str | None = "torch") -> None:
        self.columns, self.format = columns, format

    @property
    def column_names(self) -> list[str]:
        return list(self.columns)

    def with_format(self, format: str | None) -> Hugging:
        return Hugging(self.columns, format)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, key: str | int) -> Any:
        assert self.format is None, "read without a format"
        return self.columns[key] if isinstance(key, str) else {name: cells[key] for name, cells in self.columns.items()}

    def to_pandas(self) -> pandas.DataFrame:
        raise AssertionError("a column of images does not fit a frame")


def test_images_of_a_hugging_face_data_set() -> None:
    grey = Picture(np.full((4, 4), 9, dtype=np.uint8), "L")
    data = in_memory(
        Hugging({"image": [grey] * 4, "label": [0, 1, 2, 1], "writer": ["a", "b", "a", "b"]}), owner="writer"
    )
    assert (data.shape, data.classes) == ((1, 4, 4), 3)
    assert data.owners.tolist() == ["a", "b", "a", "b"]


def test_tokens_stay_whole_numbers():
    dataset = in_memory(np.array([[3, 0], [1, 2]]), [0, 1], tokens=True)
    assert (dataset.features.dtype, dataset.features.tolist()) == (torch.int64, [[3, 0], [1, 2]])


ROWS = np.ones((2, 1))
PAIR = (ROWS, [0, 1])


class Parts:
    """Hugging Face's data set of several parts."""

    def __init__(self, columns: dict[str, list[str]]) -> None:
        self.column_names = columns

    def with_format(self, format: str | None) -> Parts:
        raise AssertionError("read a part of it")


@pytest.mark.parametrize(
    ("given", "fields", "told"),
    [
        ((patients(),), {}, "no label is named; expected label=, one of the columns hospital, age"),
        ((patients(),), {"label": "il"}, "found no column 'il' for labels (did you mean 'ill'?)"),
        ((Items([([1.0], 0), ([1.0],)]),), {}, "item 1 is tuple of 1; expected (sample, label)"),
        ((Items([("word", 0)]),), {}, "sample 0 is str; expected numbers or a picture"),
        ((Items([{"x": [1.0], "z": 0}]),), {}, "cannot tell the label among x, z"),
        ((Items([{"a": [1.0], "b": [2.0], "y": 0}]),), {}, "cannot tell the sample among a, b"),
        ((Hugging({"x": [[1]], "label": [1]}),), {"owner": "who"}, "memory: found no 'who' for owner"),
        ((ROWS / 2, [0, 1]), {"tokens": True}, "features are no tokens; expected whole numbers from 0"),
        (PAIR, {"tokens": 1}, "in_memory: tokens: got 1"),
        (PAIR, {"name": 7}, "in_memory: name: got 7"),
        (PAIR, {"label": 7}, "in_memory: label: got 7"),
        (PAIR, {"marks": [1, 0]}, "in_memory: marks: got [1, 0]"),
        (PAIR, {"classes": "2"}, "in_memory: classes: got '2'"),
        (PAIR, {"classes": 0}, "in_memory: classes: got 0; allowed: 1 to 100000"),
        (PAIR, {"task": "cox"}, "in_memory: task: got 'cox'; allowed: classes, regression"),
        (PAIR, {"ignore": "id"}, "in_memory: ignore: got 'id'"),
        (PAIR, {"held_out": "part"}, "held_out is the word 'part', and this is no frame"),
        ((ROWS, [[1], [1, 2]]), {}, "labels have different lengths"),
        ((5,), {}, "got int and no labels; expected arrays with labels"),
        ((Items([]),), {}, "got no rows"),
        ((patients().iloc[:0],), {"label": "ill"}, "memory: holds no rows"),
        ((Items([([1.0], 0), ([1.0, 2.0], 1)]),), {}, "sample 1 has shape (2,), sample 0 (1,)"),
        ((patients(), [1, 0]), {}, "labels has shape (2,); expected one value for each of the 4 rows"),
        ((patients().assign(z=[[1, 2]] * 4),), {"label": "ill"}, "column 'z' holds lists or tables"),
        ((patients().rename(columns={"bp": " age"}),), {"label": "ill"}, "names column 'age' 2 times"),
        (
            (Parts({"train": ["x"], "test": ["x"]}),),
            {},
            "several parts (train, test); expected one of them, such as da",
        ),
    ],
)
def test_mistakes_are_named(given: tuple[Any, ...], fields: dict[str, Any], told: str) -> None:
    assert_refused(lambda: in_memory(*given, **fields), told)
