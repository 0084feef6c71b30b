"""Sources: what each reader returns, on tiny files made here, and the one line it gives for a broken file."""

from __future__ import annotations

import gzip
import json
import pickle
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.kit import assert_refused

from steelyard.data import DataSettings, in_memory, load
from steelyard.data.dataset import share_of_rows
from steelyard.data.files import states_of
from steelyard.data.scaling import normalised, standardised

TWO = [[1.0], [2.0]]
"""Two rows of one number."""

# digits and diabetes ------------------------------------------------------------------------------------------------


def test_digits_are_images_between_0_and_1():
    digits = load(DataSettings())
    assert (digits.features.shape, digits.features.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (float(digits.features.min()), float(digits.features.max())) == (0.0, 1.0)
    # the first digit of scikit-learn's set is a 0 whose first line is 0 0 5 13 9 1 0 0, of 16
    assert digits.features[0, 0, 0].tolist() == [0, 0, 5 / 16, 13 / 16, 9 / 16, 1 / 16, 0, 0]
    assert digits.labels[:4].tolist() == [0, 1, 2, 3]
    given = load(DataSettings(augment={"mean": [0.5], "deviation": [0.25]})).features
    assert torch.equal(given, digits.features * 4 - 2)
    scaled = load(DataSettings(normalise="standard")).features.double()
    # sums of 115,008 numbers in float32, each off by 6e-8 of about 2
    assert (float(scaled.mean()), float(scaled.std(correction=0))) == pytest.approx((0, 1), abs=1e-6)


def test_columns_are_scaled_by_what_is_not_held_out():
    columns = in_memory([[0.0, 10.0], [2.0, 10.0], [100.0, 50.0]], [0, 1, 0], held_out=[False, False, True])
    # means 1 and 10, deviations 1 and 0, which divides nothing
    assert standardised(columns)[0].features.tolist() == [[-1, 0], [1, 0], [99, 40]]


def test_what_cannot_be_scaled_or_changed_is_named():
    words = in_memory([[1, 2]], [0], tokens=True)
    for data, fields, told in (
        (words, {"normalise": "standard"}, "data.normalise: got 'standard' for rows of tokens"),
        (load(DataSettings(source="digit-masks")), {"augment": {"flip": True}}, "data.augment: got pad or flip with"),
        (
            load(DataSettings()),
            {"augment": {"mean": [0, 0], "deviation": [1, 1]}},
            "data.augment: got 2 in mean and 2 in deviation for images of 1 channels",
        ),
    ):
        assert_refused(lambda d=data, f=fields: normalised(d, DataSettings(**f)), told)


# in memory ----------------------------------------------------------------------------------------------------------


def test_in_memory_takes_arrays_and_tensors():
    pixels = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    dataset = in_memory(pixels, np.array([0, 1, 1, 2], dtype=np.uint8), [7, 7, 10, 2], marks={"sharp": [1, 0, 1, 1]})
    assert dataset.features.dtype == torch.uint8
    assert dataset.inputs(np.array([0]))[0, 0, 0, 0] == pytest.approx(0.2)
    assert dataset.owners.tolist() == ["user-007", "user-007", "user-010", "user-002"]
    assert in_memory([[1, 2], [3, 4]], [0.5, 1.5]).classes == 0
    assert in_memory(TWO, [True, False]).classes == 2
    assert in_memory(TWO, [0, 1], classes=100_000).classes == 100_000
    assert in_memory(TWO, torch.tensor([0, 1]), task="regression").classes == 0
    several = in_memory(TWO, [[0, 1, 1], [1, 1, 0]])
    assert (several.kind, several.targets, several.labels.tolist()) == ("multi-label", 3, [[0, 1, 1], [1, 1, 0]])
    assert repr(several) == "Dataset('memory': 2 samples of 1, 3 labels)"
    assert repr(dataset) == "Dataset('memory': 4 samples of 1×2×2, 3 classes, 3 owners)"
    numbers = in_memory(TWO, [0.5, 1.0], [1.5, 2.0])
    assert repr(numbers) == "Dataset('memory': 2 samples of 1, numbers to predict, 2 owners)"
    assert numbers.owners.tolist() == ["1.5", "2.0"]
    assert in_memory(TWO, [0, 1], [-1, 5]).owners.tolist() == ["user--1", "user-5"]
    assert in_memory(TWO, [0, 1], np.array([b"a", b"b"])).owners.tolist() == ["a", "b"]
    part = replace(several, owners=np.array(["a", "b"]), held_out=np.array([False, True])).take(np.array([1]))
    assert (part.owners.tolist(), part.held_out.tolist(), part.labels.tolist()) == (["b"], [True], [[1, 1, 0]])


# MNIST in IDX files -------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def mnist_folder(folder: Path, ending: str = "", writers: bool = True, mark: str = "-") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": np.arange(6 * 4).reshape(6, 2, 2),
        "train-labels-idx1-ubyte": np.array([3, 1, 4, 1, 5, 9]),
        "t10k-images-idx3-ubyte": np.full((2, 2, 2), 255),
        "t10k-labels-idx1-ubyte": np.array([2, 6]),
    }
    for name, array in arrays.items():
        content = gzip.compress(idx(array)) if ending else idx(array)
        (folder / (name.replace("-idx", f"{mark}idx") + ending)).write_bytes(content)
    if writers:
        np.savez(
            folder / "mnist_writers.npz", train_writer=np.array([0, 0, 1, 1, 1, 12]), test_writer=np.array([20, 21])
        )
    return folder


@pytest.mark.parametrize("mark", ["-", "."])
@pytest.mark.parametrize("ending", ["", ".gz"])
def test_mnist_reads_idx_files(tmp_path, ending, mark):
    dataset = load(DataSettings(source="mnist", path=mnist_folder(tmp_path / "m", ending, mark=mark)))
    assert dataset.features.shape == (8, 1, 2, 2)
    assert dataset.features[1, 0].tolist() == [[4, 5], [6, 7]]
    assert dataset.labels.tolist() == [3, 1, 4, 1, 5, 9, 2, 6]
    assert dataset.held_out.tolist() == [False] * 6 + [True] * 2
    assert dataset.owners[[0, 5]].tolist() == ["writer-000", "writer-012"]


def test_mnist_is_found_by_the_environment_and_in_torchvisions_layout(tmp_path, monkeypatch):
    mnist_folder(tmp_path / "mnist" / "MNIST" / "raw", writers=False)
    monkeypatch.setenv("STEELYARD_DATA", str(tmp_path))
    dataset = load(DataSettings(source="mnist"))
    assert (len(dataset), dataset.owners) == (8, None)
    for train in (np.zeros(5, int), np.zeros(6)):
        np.savez(tmp_path / "mnist" / "mnist_writers.npz", train_writer=train, test_writer=np.zeros(2, int))
        told = "mnist_writers.npz: lacks whole numbers 'train_writer' of length 6"
        assert_refused(lambda: load(DataSettings(source="mnist")), told)


# npz ----------------------------------------------------------------------------------------------------------------


def npz_file(path: Path, **changes: np.ndarray) -> Path:
    arrays = {
        "x": np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2),
        "y": np.array([0, 1, 2, 1, 0], dtype=np.uint8),
        "writer": np.array([3, 3, 0, 0, 3], dtype=np.int16),
    }
    np.savez(path, **{**arrays, **changes})
    return path


def test_npz_with_other_names_words_as_labels_and_a_test_part(tmp_path):
    path = npz_file(
        tmp_path / "a.npz",
        pictures=np.zeros((5, 4, 4, 3), dtype=np.uint8),
        word=np.array(["dog", "cat", "dog", "ant", "cat"]),
        who=np.array(["zoe", "al", "zoe", "al", "al"]),
        late=np.array([0, 0, 0, 1, 1], dtype=bool),
    )
    settings = DataSettings(
        source="npz", path=path, features="pictures", labels="word", owner="who", held_out="late", classes=7
    )
    dataset = load(settings)
    assert dataset.shape == (3, 4, 4)
    assert (dataset.labels.tolist(), dataset.classes) == ([2, 1, 2, 0, 1], 7)
    assert dataset.owners.tolist() == ["zoe", "al", "zoe", "al", "al"]
    assert dataset.held_out.tolist() == [False, False, False, True, True]


def test_npz_attributes_by_name_and_marks(tmp_path):
    path = npz_file(
        tmp_path / "a.npz",
        attributes=np.array([[1, -1], [-1, 1], [1, 1], [-1, -1], [1, -1]]),
        attribute_names=np.array(["Smiling", "Blurry"]),
    )
    dataset = load(DataSettings(source="npz", path=path, labels="Smiling", marks={"sharp": "not Blurry"}))
    assert dataset.labels.tolist() == [1, 0, 1, 0, 1]
    assert dataset.marks["sharp"].tolist() == [1, 0, 0, 1, 1]


def test_npz_of_numbers_to_predict(tmp_path):
    dataset = load(DataSettings(source="npz", path=npz_file(tmp_path / "a.npz"), task="regression"))
    assert (dataset.kind, dataset.labels.tolist(), dataset.notes) == ("regression", [0, 1, 2, 1, 0], ())


def test_a_share_keeps_whole_people(tmp_path):
    writers = np.repeat(np.arange(10), 3)
    path = npz_file(tmp_path / "a.npz", x=np.zeros((30, 1, 2, 3), dtype=np.uint8), y=writers % 3, writer=writers)
    half = load(DataSettings(source="npz", path=path, share=0.5))
    assert len(half) == 15
    assert all(count == 3 for count in np.unique(half.owners, return_counts=True)[1])
    assert half.features.shape == (15, 1, 2, 3)
    # without people single rows, ascending
    alone = share_of_rows(None, 10, 0.35, 0).tolist()
    assert (len(alone), sorted(set(alone))) == (4, alone)


# LEAF ---------------------------------------------------------------------------------------------------------------


def leaf_file(path: Path, users: dict[str, tuple[list, list]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in users.items()},
    }
    path.write_text(json.dumps(content))


def leaf_folder(folder: Path) -> Path:
    image = [0.25] * 784
    leaf_file(
        folder / "train" / "all_data_0.json", {"f0001_41": ([image] * 3, [10, 61, 10]), "f0002_07": ([image], [4])}
    )
    leaf_file(folder / "train" / "all_data_1.json", {"f0003_11": ([image] * 2, [5, 6])})
    leaf_file(folder / "test" / "all_data_0.json", {"f0001_41": ([image], [61]), "f0003_11": ([image], [5])})
    return folder


@pytest.mark.parametrize("nested", [False, True])
def test_leaf_femnist_with_its_own_split(tmp_path: Path, nested: bool):
    leaf_folder(tmp_path / "femnist" / "data" if nested else tmp_path / "femnist")
    dataset = load(DataSettings(source="leaf", path=tmp_path / "femnist"))
    assert (dataset.features.shape, dataset.classes) == ((8, 1, 28, 28), 62)
    assert dataset.owners[3:6].tolist() == ["f0002_07", "f0003_11", "f0003_11"]
    assert dataset.held_out.tolist() == [False] * 6 + [True] * 2


def test_leaf_shakespeare_predicts_the_next_character(tmp_path):
    for part in ("train", "test"):
        leaf_file(tmp_path / part / "a.json", {"PUCK": (["If we ", "é\n}"], ["s", "\n"]), "ARIEL": (["I come"], ["}"])})
    dataset = load(DataSettings(source="leaf", path=tmp_path, length=5))
    assert (dataset.classes, dataset.features.dtype) == (80, torch.int64)
    # LEAF numbers its 80 characters in the order of their codes: newline 0, space 1, … z 78, } 79.
    assert dataset.labels[:3].tolist() == [71, 0, 79]
    assert dataset.features[0].tolist() == [2 + 58, 2 + 1, 2 + 75, 2 + 57, 2 + 1]  # "f we "
    assert dataset.features[1].tolist() == [0, 0, 1, 2, 2 + 79]  # padding, a character that is not known, "\n}"


@pytest.mark.parametrize("bad", ["0", 0])
def test_leaf_sent140_reads_words_alike_everywhere(tmp_path, bad):
    def tweet(text: str) -> list[str]:
        return ["1467810369", "Mon Apr 06", "NO_QUERY", "ann", text]

    for part in ("train", "test"):
        ann = [tweet("So happy, so HAPPY!"), tweet("")]
        leaf_file(tmp_path / part / "a.json", {"ann": (ann, ["4", "0"]), "bob": ([tweet("happy")], [bad])})
    dataset = load(DataSettings(source="leaf", path=tmp_path, length=6, vocabulary=50))
    assert (dataset.classes, dataset.labels[:3].tolist()) == (2, [1, 0, 0])
    first, empty, last = dataset.features[:3].tolist()
    assert first[:2] == first[3:5]
    assert len({*first, 0, 1}) == 6
    assert (empty, last) == ([0] * 6, [0] * 5 + [first[1]])


# what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "fields", "told"),
    [
        ((TWO, [0]), {}, "memory: got 2 rows of features and 1 labels"),
        ((TWO, [0, 2]), {"classes": 2}, "expected classes 0 to 1"),
        ((TWO, [[0, 1], [2, 1]]), {}, "hold other values than 0 and 1"),
        ((TWO, [0, 1], [["a"], ["b"]]), {}, "memory: owners has shape (2, 1)"),
        (([[1.0], [float("nan")]], [0, 1]), {}, "memory: features holds nan or infinite"),
        (([["a"], ["b"]], [0, 1]), {}, "memory: features is text; expected numbers"),
        (([[1.0], [2.0, 3.0]], [0, 1]), {}, "memory: features has rows of different lengths"),
        ((np.zeros((2, 1, 8, 8)), np.zeros((2, 4, 4), int)), {}, "masks are (4, 4) and images (8, 8)"),
        ((np.zeros((2, 1, 4, 4)), np.full((2, 4, 4), 300)), {}, "masks run from 300 to 300; expected classes 0 (back"),
        ((np.zeros((2, 1, 4, 4)), np.full((2, 4, 4), 0.5)), {}, "masks are no whole numbers"),
        (([1.0, 2.0], [0, 1]), {}, "features has shape (2,); expected (rows, ...)"),
        (([[1j], [2j]], [0, 1]), {}, "features is complex numbers; expected numbers"),
        ((TWO, [0, -1]), {}, "labels run from -1 to 0; expected classes 0 to 0, numbered from 0"),
        ((TWO, [0, 100_000]), {}, "labels run up to 100000; expected classes 0 to at most 99999"),
        ((TWO, [0.5, np.nan]), {}, "labels holds nan or infinite"),
        ((TWO, [0.5, 1.0]), {"classes": 2}, "floating-point numbers with classes=2"),
        ((TWO, [0, 1], "ann"), {}, "memory: owners is 'ann'; expected a list"),
        ((TWO, [0, 1], [7.0, np.nan]), {}, "user: row 2 has no owner (nan)"),
        ((TWO, [0, 1], ["a", " "]), {}, "user: row 2 has no owner; expected"),
        (
            (TWO, [0, 1]),
            {"held_out": [True]},
            "held_out has shape (1,); expected one value for each of the 2",
        ),
    ],
)
def test_in_memory_refuses_what_does_not_fit(arguments: tuple[Any, ...], fields: dict[str, Any], told: str):
    assert_refused(lambda: in_memory(*arguments, **fields), told)


NUMBERS = np.arange(5)


@pytest.mark.parametrize(
    ("changes", "fields", "told"),
    [
        ({}, {"labels": "why"}, "data.labels: found no 'why' in"),
        ({"site": list("abcde")}, {"marks": {"sharp": "site"}}, "data.marks.sharp: column 'site' of"),
        ({}, {"classes": 2}, "labels run from 0 to 2; expected classes 0 to 1"),
        ({"y": NUMBERS / 2}, {}, "a.npz: data.labels holds fractions"),
        ({"y": NUMBERS * 1j}, {}, "a.npz: data.labels are neither numbers nor text"),
        ({"x": np.ones((5, 0))}, {}, "at least one number per row"),
        ({"x": NUMBERS}, {}, "data.features has shape (5,); expected (rows, ...)"),
        ({"y": np.ones((5, 2))}, {}, "data.labels has shape (5, 2); expected (5,), one per row"),
        ({}, {"task": "segmentation"}, "data.labels has shape (5,); expected (5, height, width)"),
        ({"y": NUMBERS * np.nan}, {}, "data.labels holds fractions, nan or infinity"),
        ({}, {"owner": "who"}, "data.owner: found no 'who' in"),
    ],
)
def test_arrays_that_cannot_be_used_are_named(
    tmp_path: Path, changes: dict[str, Any], fields: dict[str, Any], told: str
):
    settings = DataSettings(source="npz", path=npz_file(tmp_path / "a.npz", **changes), **fields)
    assert_refused(lambda: load(settings), told)


@pytest.mark.parametrize("content", [b"hello", pickle.dumps([1]), b"PK\x03\x04" + b"x" * 50, 10, 300, -20])
def test_what_is_no_whole_npz_is_named_and_nothing_is_unpickled(tmp_path: Path, content: bytes | int):
    path = npz_file(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    assert_refused(lambda: load(DataSettings(source="npz", path=path)), f"{path}: cannot be read")


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("train-images-idx3-ubyte", idx(np.array([1])), "starts with 00000801; expected IDX magic number 00000803"),
        ("train-images-idx3-ubyte", bytes([0, 0, 8, 3, 0]), "starts with 00000803; expected IDX magic number 00000803"),
        ("train-images-idx3-ubyte", idx(np.zeros((0, 2, 2))), "holds nothing, its shape is (0, 2, 2)"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 3, 3))), "images are (2, 2) and, to test, (3, 3)"),
        ("train-labels-idx1-ubyte", idx(np.array([1, 2, 3])), "holds 3 labels; expected 6, one per image"),
        ("train-labels-idx1-ubyte", idx(np.array([1, 2, 3, 4, 5, 10])), "holds label 10; expected 0 to 9"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 2, 2)))[:-3], "holds 5 values (cut off or damaged); expected 8"),
        (
            "train-images-idx3-ubyte.gz",
            gzip.compress(idx(np.zeros((6, 2, 2))), mtime=0)[:-12],
            "cannot be read (Compressed",
        ),
        ("train-images-idx3-ubyte", None, "holds no train-images-idx3-ubyte or train-images-idx3-ubyte.gz"),
    ],
)
def test_a_broken_mnist_file_is_named(tmp_path: Path, name: str, content: bytes | None, told: str):
    folder = mnist_folder(tmp_path / "m")
    (folder / name.removesuffix(".gz")).unlink()
    if content is not None:
        (folder / name).write_bytes(content)
    assert_refused(lambda: load(DataSettings(source="mnist", path=folder)), told, folder)


def test_missing_mnist_says_where_it_was_looked_for_and_where_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STEELYARD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    assert states_of([None, Path("mnist")]) == ()
    places = "data.path: found no 'mnist' (looked at ../shared/data/mnist, data/mnist)"
    assert_refused(lambda: load(DataSettings(source="mnist")), places, "https://")
    assert_refused(lambda: load(DataSettings(source="mnist", path="elsewhere")), "found no 'elsewhere'")


HALVES = {"u": {"x": [[0] * 784] * 2, "y": [1, 0.5]}}
ONE = {"users": ["u"], "num_samples": [1], "user_data": {"u": {"x": [[1.0]], "y": [0]}}}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"users": ["u"', "allowed: Invalid JSON"),
        ({"users": ["u"], "num_samples": [1]}, "user_data: missing"),
        ({**ONE, "user_data": {}}, "user 'u' has 0 x and 0 y; expected 1"),
        ({**ONE, "num_samples": [2], "user_data": HALVES}, "labels y such as 0.5"),
        ({**ONE, "user_data": {"u": {"x": [[0] * 784], "y": [2**31]}}}, "labels y such as 2147483648"),
        ("[]", "got []; allowed: a section of fields"),
        ({**ONE, "users": [7]}, "users.0: got 7; allowed: text"),
        ({**ONE, "num_samples": []}, "names 1 users with 0 num_samples"),
        ({**ONE, "num_samples": [2]}, "user 'u' has 1 x and 1 y; expected 2"),
        (
            {**ONE, "user_data": {"u": {"x": ["a.png"], "y": [0]}}},
            "rows x are not lists of numbers of one length",
        ),
        ({**ONE, "users": ["u", "u"], "num_samples": [1, 1]}, "more than once"),
    ],
)
def test_a_broken_leaf_file_is_named(tmp_path: Path, content: Any, told: str):
    path = leaf_folder(tmp_path / "f") / "train" / "all_data_1.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    assert_refused(lambda: load(DataSettings(source="leaf", path=tmp_path / "f")), told)


def test_characters_and_tokens_that_cannot_be_are_named(tmp_path: Path):
    def refused(rows: list[str], labels: list[Any], told: str) -> None:
        for part in ("train", "test"):
            leaf_file(tmp_path / part / "a.json", {"u": (rows, labels)})
        assert_refused(lambda: load(DataSettings(source="leaf", path=tmp_path)), told)

    refused(["to be or not", "or"], ["t", "é"], "y is 'é'; expected one of 80 characters")
    refused(["Anno 1"] * 101, ["s"] * 100 + [7], "a label y is 7; expected one of 80 characters")
    refused(["Anno 1"], ["yes"], "labels y such as 'yes' are not whole numbers")
    (tmp_path / "test" / "a.json").unlink()
    assert_refused(lambda: load(DataSettings(source="leaf", path=tmp_path)), "holds no .json file")
    file = tmp_path / "train" / "a.json"
    assert_refused(lambda: load(DataSettings(source="leaf", path=file)), f"data.path: '{file}' is a file; expected a")
