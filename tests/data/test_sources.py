"""Sources: what each reader returns, on tiny files made here, and the one line it gives for a broken file."""

from __future__ import annotations

import gzip
import json
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from steelyard import Experiment
from steelyard.data import DataSettings, PartitionSettings, in_memory, load, share_out
from steelyard.data.bundled import read_digits
from steelyard.data.mnist import read_idx
from steelyard.errors import UserError
from steelyard.experiment.running import run
from steelyard.runs.reader import History


def refused(settings: DataSettings) -> str:
    with pytest.raises(UserError) as caught:
        load(settings)
    line = str(caught.value)
    assert "\n" not in line
    return line


# digits and diabetes ------------------------------------------------------------------------------------------------


def test_digits_are_images_between_0_and_1():
    digits = load(DataSettings())
    assert (digits.features.shape, digits.features.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (float(digits.features.min()), float(digits.features.max())) == (0.0, 1.0)
    assert (digits.classes, digits.labels.dtype, digits.shape) == (10, torch.int64, (1, 8, 8))
    # the first digit of scikit-learn's set is a 0 whose first line is 0 0 5 13 9 1 0 0, of 16
    assert digits.features[0, 0, 0].tolist() == [0, 0, 5 / 16, 13 / 16, 9 / 16, 1 / 16, 0, 0]
    assert digits.labels[:4].tolist() == [0, 1, 2, 3]


def test_diabetes_is_a_regression():
    diabetes = load(DataSettings(source="diabetes"))
    assert (diabetes.features.shape, diabetes.classes, diabetes.labels.dtype) == ((442, 10), 0, torch.float32)
    assert float(diabetes.labels[0]) == 151.0


def test_standard_normalisation_has_mean_0_and_deviation_1():
    digits = load(DataSettings(normalise="standard"))
    # In float64, so that only the rounding of the features to float32 (6e-8 each) is left.
    values = digits.features.double()
    assert float(values.mean()) == pytest.approx(0, abs=1e-7)
    assert float(values.std(correction=0)) == pytest.approx(1, abs=1e-7)


def test_memory_has_no_file():
    assert "in_memory" in refused(DataSettings(source="memory"))


# in memory ----------------------------------------------------------------------------------------------------------


def test_in_memory_takes_arrays_and_tensors():
    pixels = torch.full((4, 1, 2, 2), 51, dtype=torch.uint8)
    dataset = in_memory(pixels, np.array([0, 1, 1, 2], dtype=np.uint8), [7, 7, 10, 2], marks={"sharp": [1, 0, 1, 1]})
    assert dataset.features.dtype == torch.uint8
    assert dataset.inputs(np.array([0]))[0, 0, 0, 0] == pytest.approx(0.2)
    assert (dataset.classes, len(dataset)) == (3, 4)
    assert dataset.owners.tolist() == ["user-007", "user-007", "user-010", "user-002"]
    assert dataset.marks["sharp"].tolist() == [1, 0, 1, 1]
    table = in_memory([[1, 2], [3, 4]], [0.5, 1.5])
    assert (table.features.dtype, table.classes) == (torch.float32, 0)
    assert in_memory([[1.0], [2.0]], [True, False]).classes == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0], [2.0]], [0]), "memory: got 2 rows of features and 1 labels"),
        (([1.0, 2.0], [0, 1]), "memory: features has shape (2,)"),
        (([[1.0], [2.0]], [[0], [1]]), "memory: labels has shape (2, 1)"),
        (([[1.0], [2.0]], [0, -1]), "memory: labels run from -1 to 0"),
        (([[1.0], [float("nan")]], [0, 1]), "memory: features holds nan"),
        (([[1.0], [2.0]], [0.0, float("inf")]), "memory: labels holds nan or infinite"),
        (([["a"], ["b"]], [0, 1]), "memory: features is text; expected numbers"),
        (([[1.0], [2.0, 3.0]], [0, 1]), "memory: features has rows of different lengths"),
        (([[1.0], [2.0]], [0, 1], ["me"]), "memory: owners has shape (1,)"),
        ((np.zeros((0, 2)), np.zeros(0, dtype=np.int64)), "memory: got no rows"),
    ],
)
def test_in_memory_refuses_what_does_not_fit(arguments, message):
    with pytest.raises(UserError) as caught:
        in_memory(*arguments)
    assert str(caught.value).startswith(message)


def test_in_memory_refuses_too_few_classes_and_words_as_marks():
    with pytest.raises(UserError, match="expected classes 0 to 1"):
        in_memory([[1.0], [2.0]], [0, 2], classes=2)
    with pytest.raises(
        UserError, match="labels run up to 1000000000; expected classes 0 to at most 99999, or floating"
    ):
        in_memory([[1.0], [2.0]], [0, 10**9])
    with pytest.raises(UserError, match="held_out is text"):
        in_memory([[1.0], [2.0]], [0, 1], held_out=["False", "True"])


# MNIST in IDX files -------------------------------------------------------------------------------------------------


def idx(array: np.ndarray) -> bytes:
    return (
        bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(np.uint8).tobytes()
    )


def mnist_folder(folder: Path, packed: bool = False, writers: bool = True) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train-images-idx3-ubyte": np.arange(6 * 4).reshape(6, 2, 2),
        "train-labels-idx1-ubyte": np.array([3, 1, 4, 1, 5, 9]),
        "t10k-images-idx3-ubyte": np.full((2, 2, 2), 255),
        "t10k-labels-idx1-ubyte": np.array([2, 6]),
    }
    for name, array in arrays.items():
        if packed:
            (folder / f"{name}.gz").write_bytes(gzip.compress(idx(array)))
        else:
            (folder / name).write_bytes(idx(array))
    if writers:
        np.savez(
            folder / "mnist_writers.npz", train_writer=np.array([0, 0, 1, 1, 1, 12]), test_writer=np.array([20, 21])
        )
    return folder


@pytest.mark.parametrize("packed", [False, True])
def test_mnist_reads_idx_files(tmp_path, packed):
    dataset = load(DataSettings(source="mnist", path=mnist_folder(tmp_path / "m", packed)))
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


def test_missing_mnist_says_where_it_was_looked_for_and_where_to_get_it(tmp_path, monkeypatch):
    monkeypatch.delenv("STEELYARD_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    line = refused(DataSettings(source="mnist"))
    assert line.startswith("data.path: found no 'mnist' (looked at ../shared/data/mnist, data/mnist)")
    assert "https://" in line
    line = refused(DataSettings(source="mnist", path="elsewhere"))
    assert line.startswith("data.path: found no 'elsewhere' (looked at elsewhere, ../shared/data/elsewhere)")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "train-images-idx3-ubyte",
            b"\0\0\x08\x01" + b"\0" * 20,
            "starts with 00000801; expected IDX magic number 00000803",
        ),
        ("train-images-idx3-ubyte", b"", "starts with nothing"),
        ("train-labels-idx1-ubyte", idx(np.array([1, 2])), "holds 2 labels; expected 6, one per image"),
        ("train-labels-idx1-ubyte", idx(np.array([1, 2, 3, 4, 5, 77])), "holds label 77; expected 0 to 9"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 2, 2)))[:-3], "holds 5 values (cut off or damaged); expected 8"),
        ("t10k-images-idx3-ubyte", idx(np.zeros((2, 3, 3))), "expected one size"),
        ("mnist_writers.npz", b"PK nonsense", "cannot be read as npz"),
    ],
)
def test_a_broken_mnist_file_is_named(tmp_path, name, content, message):
    folder = mnist_folder(tmp_path / "m")
    (folder / name).write_bytes(content)
    line = refused(DataSettings(source="mnist", path=folder))
    assert message in line
    assert str(folder) in line


def test_a_cut_gz_file_and_a_missing_one_are_named(tmp_path):
    folder = mnist_folder(tmp_path / "m", packed=True)
    path = folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-12])
    assert refused(DataSettings(source="mnist", path=folder)).startswith(f"{path}: cannot be read")
    path.unlink()
    assert "holds no train-images-idx3-ubyte or train-images-idx3-ubyte.gz" in refused(
        DataSettings(source="mnist", path=folder)
    )


def test_an_idx_header_with_absurd_sizes_is_refused(tmp_path):
    path = tmp_path / "absurd"
    path.write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", *[2**32 - 1] * 3) + b"\0" * 8)
    with pytest.raises(UserError, match="holds 8 values"):
        read_idx(path, axes=3)


# npz ----------------------------------------------------------------------------------------------------------------


def npz_file(path: Path, **changes: np.ndarray) -> Path:
    arrays = {
        "x": np.arange(5 * 4, dtype=np.uint8).reshape(5, 2, 2),
        "y": np.array([0, 1, 2, 1, 0], dtype=np.uint8),
        "writer": np.array([3, 3, 0, 0, 3], dtype=np.int16),
    }
    np.savez(path, **{**arrays, **changes})
    return path


def test_npz_with_a_writer_column(tmp_path):
    dataset = load(DataSettings(source="npz", path=npz_file(tmp_path / "a.npz")))
    assert (dataset.features.shape, dataset.features.dtype, dataset.classes) == ((5, 1, 2, 2), torch.uint8, 3)
    population = share_out(dataset, PartitionSettings(scheme="natural", test="none"), 0)
    assert {c.client: c.train.tolist() for c in population.clients} == {"writer-000": [2, 3], "writer-003": [0, 1, 4]}


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
    population = share_out(dataset, PartitionSettings(scheme="given", test="held-out"), 0)
    assert {c.client: (c.train.tolist(), c.test.tolist()) for c in population.clients} == {
        "al": ([1], [3, 4]),
        "zoe": ([0, 2], []),
    }


@pytest.mark.parametrize(
    ("labels", "numbers", "notes"),
    [
        ([0, 1, 2, 0, 1, 2], [0, 1, 2, 0, 1, 2], ()),
        ([-1, 1, 3, -1, 1, 3], [0, 1, 2, 0, 1, 2], ("a.npz: classes of 'y': 0 = -1, 1 = 1, 2 = 3",)),
        (["b", "a", "b", "a", "b", "a"], [1, 0, 1, 0, 1, 0], ("a.npz: classes of 'y': 0 = a, 1 = b",)),
    ],
)
def test_npz_labels_that_get_other_numbers_are_told(
    tmp_path: Path, labels: list[int] | list[str], numbers: list[int], notes: tuple[str, ...]
) -> None:
    np.savez(tmp_path / "a.npz", x=np.arange(12.0).reshape(6, 2), y=np.array(labels))
    dataset = load(DataSettings(source="npz", path=tmp_path / "a.npz"))
    assert dataset.labels.tolist() == numbers
    assert dataset.notes == notes


def test_npz_attributes_by_name_and_marks(tmp_path):
    path = npz_file(
        tmp_path / "a.npz",
        attributes=np.array([[1, -1], [-1, 1], [1, 1], [-1, -1], [1, -1]]),
        attribute_names=np.array(["Smiling", "Blurry"]),
    )
    dataset = load(DataSettings(source="npz", path=path, labels="Smiling", marks={"sharp": "not Blurry"}))
    assert dataset.labels.tolist() == [1, 0, 1, 0, 1]
    assert dataset.marks["sharp"].tolist() == [1, 0, 0, 1, 1]


def test_npz_regression(tmp_path):
    path = npz_file(tmp_path / "a.npz", y=np.array([0.5, 1, 2, 3, 4]))
    assert load(DataSettings(source="npz", path=path, task="regression")).classes == 0
    assert "fractions or nan" in refused(DataSettings(source="npz", path=path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": "why"}, "data.labels: found no 'why' in"),
        ({"features": "X"}, "(did you mean 'x'?); allowed: x, y, writer, site"),
        ({"owner": "user"}, "data.owner: found no 'user'"),
        ({"marks": {"sharp": "not Blurry"}}, "data.marks.sharp: found no 'Blurry'"),
        ({"labels": "x"}, "data.labels has shape (5, 2, 2)"),
        ({"marks": {"sharp": "site"}}, "data.marks.sharp: 'site' of"),
        ({"classes": 2}, "labels run from 0 to 2; expected classes 0 to 1"),
    ],
)
def test_npz_names_what_is_missing(tmp_path, fields, message):
    path = npz_file(tmp_path / "a.npz", site=np.array(["a", "b", "c", "d", "e"]))
    assert message in refused(DataSettings(source="npz", path=path, **fields))


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, x=np.zeros((1, 1)), y=np.array([{"a": 1}], dtype=object))
    assert "cannot be read as npz" in refused(DataSettings(source="npz", path=path))
    np.save(tmp_path / "bare.npy", np.zeros(3))
    assert "one bare array" in refused(DataSettings(source="npz", path=tmp_path / "bare.npy"))


@pytest.mark.parametrize("keep", [10, 300, -20])
def test_a_cut_npz_is_refused(tmp_path, keep):
    path = npz_file(tmp_path / "a.npz")
    path.write_bytes(path.read_bytes()[:keep])
    assert refused(DataSettings(source="npz", path=path)).startswith(f"{path}: cannot be read as npz")


def test_a_share_keeps_whole_people(tmp_path):
    writers = np.repeat(np.arange(10), 3)
    path = npz_file(tmp_path / "a.npz", x=np.zeros((30, 2, 2), dtype=np.uint8), y=writers % 3, writer=writers)
    half = load(DataSettings(source="npz", path=path, share=0.5))
    assert len(half) == 15
    assert all(count == 3 for count in np.unique(half.owners, return_counts=True)[1])
    other = load(DataSettings(source="npz", path=path, share=0.5, seed=1))
    assert set(other.owners) != set(half.owners)


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
def test_leaf_femnist_with_its_own_split(tmp_path, nested):
    leaf_folder(tmp_path / "femnist" / "data" if nested else tmp_path / "femnist")
    dataset = load(DataSettings(source="leaf", path=tmp_path / "femnist"))
    assert (dataset.features.shape, dataset.classes) == ((8, 1, 28, 28), 62)
    assert float(dataset.features[0, 0, 0, 0]) == 0.25
    population = share_out(dataset, PartitionSettings(scheme="given", test="held-out"), 0)
    assert {c.client: (c.train.tolist(), c.test.tolist()) for c in population.clients} == {
        "f0001_41": ([0, 1, 2], [6]),
        "f0003_11": ([4, 5], [7]),
    }
    assert population.notes == ("people with fewer than 2 rows, left out: 1 of 3",)
    whole = share_out(dataset, PartitionSettings(scheme="natural", rows="all"), 0)
    assert [len(c.train) + len(c.test) for c in whole.clients] == [4, 3]


def test_leaf_with_number_rows_of_any_length(tmp_path):
    for part in ("train", "test"):
        leaf_file(tmp_path / part / "a.json", {"u": ([[1, 2, 3], [4, 5, 6]], [0.0, 1.0])})
    assert load(DataSettings(source="leaf", path=tmp_path)).features.shape == (4, 3)


def test_leaf_shakespeare_predicts_the_next_character(tmp_path):
    for part in ("train", "test"):
        leaf_file(tmp_path / part / "a.json", {"PUCK": (["If we ", "é\n}"], ["s", "\n"]), "ARIEL": (["I come"], ["}"])})
    dataset = load(DataSettings(source="leaf", path=tmp_path, length=5))
    assert (dataset.classes, dataset.features.dtype) == (80, torch.int64)
    # LEAF numbers its 80 characters in the order of their codes: newline 0, space 1, … z 78, } 79.
    assert dataset.labels[:3].tolist() == [71, 0, 79]
    assert dataset.features[0].tolist() == [2 + 58, 2 + 1, 2 + 75, 2 + 57, 2 + 1]  # "f we "
    assert dataset.features[1].tolist() == [0, 0, 1, 2, 2 + 79]  # padding, a character that is not known, "\n}"
    assert load(DataSettings(source="leaf", path=tmp_path)).features.shape == (6, 80)


def test_a_play_whose_next_character_is_a_digit_is_read_by_characters(tmp_path):
    for part in ("train", "test"):
        leaf_file(tmp_path / part / "a.json", {"CLERK": (["Anno 1", "in the"], ["5", " "])})
    dataset = load(DataSettings(source="leaf", path=tmp_path, length=6))
    assert (dataset.classes, dataset.labels[:2].tolist()) == (80, [16, 1])
    leaf_file(tmp_path / "train" / "a.json", {"CLERK": (["Anno 1"] * 101, ["s"] * 100 + [7])})
    assert "a label y is 7; expected one of 80 characters" in refused(DataSettings(source="leaf", path=tmp_path))


def test_leaf_sent140_reads_words_alike_everywhere(tmp_path):
    def tweet(text: str) -> list[str]:
        return ["1467810369", "Mon Apr 06", "NO_QUERY", "ann", text]

    for part in ("train", "test"):
        ann = [tweet("So happy, so HAPPY!"), tweet("")]
        leaf_file(tmp_path / part / "a.json", {"ann": (ann, ["4", "0"]), "bob": ([tweet("happy")], [0])})
    dataset = load(DataSettings(source="leaf", path=tmp_path, length=6, vocabulary=50))
    assert (dataset.classes, dataset.labels[:3].tolist()) == (2, [1, 0, 0])
    first, empty, last = dataset.features[:3].tolist()
    so, happy, comma, so_again, happy_again, mark = first
    assert (so, happy) == (so_again, happy_again)
    assert len({so, happy, comma, mark} | {0, 1}) == 6
    assert max(first) < 50
    assert (empty, last) == ([0] * 6, [0] * 5 + [happy])
    assert "'standard' for rows of tokens" in refused(DataSettings(source="leaf", path=tmp_path, normalise="standard"))


def test_text_trains_an_lstm_and_too_few_tokens_are_named(tmp_path):
    lines = ["the quality of mercy is not strained", "it droppeth as the gentle rain from heaven"]
    for part in ("train", "test"):
        pairs = [[(line[at : at + 6], line[at + 6]) for at in range(20)] for line in lines]
        users = {f"u{n}": ([x for x, _ in mine], [y for _, y in mine]) for n, mine in enumerate(pairs)}
        leaf_file(tmp_path / part / "a.json", users)
    document = {
        "data": {"source": "leaf", "path": tmp_path, "length": 6},
        "partition": {"scheme": "given", "test": "held-out"},
        "model": {"name": "lstm", "arguments": {"tokens": 82, "hidden": 8}},
        "training": {"optimiser": "adam", "learning_rate": 0.01, "epochs": 5},
        "rounds": {"count": 2},
        "compute": {"engine": "loop", "device": "cpu"},
    }
    history = History(run(Experiment.model_validate(document), out=tmp_path / "run"))
    losses = history.clients.groupby("round")["loss"].mean()
    assert losses.iloc[-1] < losses.iloc[0]
    few = Experiment.model_validate({**document, "model": {"name": "lstm", "arguments": {"tokens": 60}}})
    with pytest.raises(UserError, match=r"does not take tokens from 0 to 79 in rows of shape \(6,\): IndexError"):
        run(few, out=tmp_path / "few")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"users": ["u"', "not JSON"),
        ("[1, 2]", "holds no JSON object"),
        ('{"users": ["u"], "num_samples": [1]}', "lacks lists users and num_samples or object user_data"),
        ('{"users": ["u"], "num_samples": [], "user_data": {}}', "names 1 users with 0 num_samples"),
        ('{"users": ["u"], "num_samples": [1], "user_data": {}}', "user 'u' lacks lists x and y"),
        (
            '{"users": ["u"], "num_samples": [2], "user_data": {"u": {"x": [[1]], "y": [0]}}}',
            "expected 2, its num_samples",
        ),
    ],
)
def test_a_broken_leaf_file_is_named(tmp_path, content, message):
    folder = leaf_folder(tmp_path / "f")
    path = folder / "train" / "all_data_1.json"
    path.write_text(content)
    line = refused(DataSettings(source="leaf", path=folder))
    assert line.startswith(str(path))
    assert message in line


def test_leaf_rows_that_cannot_be_used_are_refused(tmp_path):
    folder = leaf_folder(tmp_path / "f")
    leaf_file(folder / "train" / "all_data_1.json", {"u": ([[1.0], [2.0]], [5, 6])})
    assert "not lists of numbers of one length" in refused(DataSettings(source="leaf", path=folder))
    leaf_file(folder / "train" / "all_data_1.json", {"u": ([[0.5] * 784], ["w"])})
    assert "are not whole numbers" in refused(DataSettings(source="leaf", path=folder))
    for part in ("train", "test"):
        leaf_file(tmp_path / "s" / part / "a.json", {"u": (["to be or not", "or"], ["t", "é"])})
    assert "y is 'é'; expected one of 80 characters" in refused(DataSettings(source="leaf", path=tmp_path / "s"))
    (folder / "test" / "all_data_0.json").unlink()
    assert "holds no .json file; expected a LEAF folder" in refused(DataSettings(source="leaf", path=folder))


# images -------------------------------------------------------------------------------------------------------------


def picture(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (8, 8)) -> None:
    image = pytest.importorskip("PIL.Image")
    path.parent.mkdir(parents=True, exist_ok=True)
    image.new("RGB", size, colour).save(path)


def celeba_folder(folder: Path) -> Path:
    """CelebA's own layout: four images of two people, the third blurry."""
    for number in range(1, 5):
        picture(folder / "img_align_celeba" / f"00000{number}.png", (number * 10, 0, 255))
    rows = [(1, -1), (-1, -1), (1, 1), (-1, -1), (1, -1)]
    lines = [f"00000{number}.png {smiling:2d} {blurry:2d}" for number, (smiling, blurry) in enumerate(rows, 1)]
    (folder / "list_attr_celeba.txt").write_text("\n".join(["5", "Smiling Blurry", *lines]) + "\n")
    people = [7, 7, 12, 12, 12]
    text = "\n".join(f"00000{number}.png {person}" for number, person in enumerate(people, 1))
    (folder / "identity_CelebA.txt").write_text(text + "\n")
    return folder


def test_celeba_in_its_own_layout(tmp_path):
    folder = celeba_folder(tmp_path / "celeba")
    dataset = load(DataSettings(source="images", path=folder / "img_align_celeba", size=8))
    assert (dataset.features.shape, dataset.features.dtype, dataset.classes) == ((4, 3, 8, 8), torch.uint8, 2)
    assert dataset.features[:, :, 0, 0].tolist() == [[10, 0, 255], [20, 0, 255], [30, 0, 255], [40, 0, 255]]
    assert dataset.labels.tolist() == [1, 0, 1, 0]
    assert dataset.marks["sharp"].tolist() == [1, 1, 0, 1]
    assert dataset.owners.tolist() == ["identity-007", "identity-007", "identity-012", "identity-012"]
    assert dataset.notes == ("1 of 5 rows of list_attr_celeba.txt have no image",)
    assert share_out(dataset, PartitionSettings(scheme="natural"), 0).notes == dataset.notes


def test_a_zip_of_images_with_a_csv(tmp_path):
    folder = celeba_folder(tmp_path / "celeba")
    packed = tmp_path / "faces.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(folder.rglob("*.png")):
            archive.write(path, f"img/{path.name}")
    table = "file,person,mood,fuzzy\n000001.png,ann,glad,0\n000002.png,bob,sad,1\n000003.png,ann,calm,0\n"
    (tmp_path / "faces.csv.gz").write_bytes(gzip.compress(table.encode()))
    settings = DataSettings(
        source="images", path=packed, labels="mood", owner="person", marks={"sharp": "not fuzzy"}, size=4
    )
    dataset = load(settings)
    assert dataset.features.shape == (3, 3, 4, 4)
    assert (dataset.labels.tolist(), dataset.classes) == ([1, 2, 0], 3)
    assert dataset.owners.tolist() == ["ann", "bob", "ann"]
    assert dataset.marks["sharp"].tolist() == [1, 0, 1]


def test_a_wide_image_is_cut_to_its_central_square(tmp_path):
    image = pytest.importorskip("PIL.Image")
    wide = image.new("RGB", (16, 8), (255, 0, 0))
    wide.paste((0, 0, 255), (4, 0, 12, 8))
    wide.save(tmp_path / "a.png")
    (tmp_path / "table.csv").write_text("image,Smiling\na.png,1\n")
    dataset = load(DataSettings(source="images", path=tmp_path, size=8))
    assert torch.equal(dataset.features[0, 2], torch.full((8, 8), 255, dtype=torch.uint8))
    assert dataset.owners is None


def test_half_of_the_images_by_person(tmp_path):
    folder = celeba_folder(tmp_path / "celeba")
    dataset = load(DataSettings(source="images", path=folder / "img_align_celeba", size=8, share=0.5))
    assert len(set(dataset.owners.tolist())) == 1
    assert len(dataset) == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"labels": "Smilin"}, "data.labels: found no 'Smilin' in"),
        ({"labels": "smiling"}, "(did you mean 'Smiling'?)"),
        ({"owner": "person"}, "data.owner: found no 'person'"),
        ({"marks": {"sharp": "not Fuzzy"}}, "data.marks.sharp: found no 'Fuzzy'"),
        ({"attributes": "nowhere.csv"}, "data.attributes: found no 'nowhere.csv'"),
        ({"identities": "nowhere.txt"}, "data.identities: found no 'nowhere.txt'"),
    ],
)
def test_images_name_what_is_missing(tmp_path, fields, message):
    folder = celeba_folder(tmp_path / "celeba")
    line = refused(DataSettings(source="images", path=folder / "img_align_celeba", size=8, **fields))
    assert message in line


def test_broken_images_and_tables_are_named(tmp_path):
    folder = celeba_folder(tmp_path / "celeba")
    settings = DataSettings(source="images", path=folder / "img_align_celeba", size=8)
    broken = folder / "img_align_celeba" / "000003.png"
    whole = broken.read_bytes()
    broken.write_bytes(whole[: len(whole) // 2])
    assert "image '000003.png' is broken" in refused(settings)
    broken.write_bytes(whole)
    identities = folder / "identity_CelebA.txt"
    identities.write_text("000001.png 7\n")
    assert "names no identity for image '000002.png'" in refused(settings)
    identities.write_text("000001.png\n")
    assert "not lines of an image name and a whole number" in refused(settings)
    table = folder / "list_attr_celeba.txt"
    table.write_text(table.read_text()[:-25])
    assert "expected 5, its first line" in refused(settings)
    table.write_text("hello\n")
    assert "starts with 'hello'" in refused(settings)
    table.unlink()
    assert refused(settings).startswith("data.attributes: got nothing")


def test_a_folder_without_images_and_a_bad_zip_are_named(tmp_path):
    assert "holds no image" in refused(DataSettings(source="images", path=tmp_path))
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04 cut")
    assert "cannot be read as .zip" in refused(DataSettings(source="images", path=tmp_path / "a.zip"))


def test_without_pillow_the_extra_is_named(tmp_path, monkeypatch):
    folder = celeba_folder(tmp_path / "celeba")
    monkeypatch.setattr("steelyard.data.images.find_spec", lambda name: None)
    line = refused(DataSettings(source="images", path=folder / "img_align_celeba"))
    assert "pip install 'steelyard[images]'" in line


def test_leaf_celeba_names_images(tmp_path):
    data = tmp_path / "celeba" / "data"
    celeba_folder(data / "raw")
    leaf_file(data / "train" / "a.json", {"7": (["000001.png", "000002.png"], [1, 0])})
    leaf_file(data / "test" / "a.json", {"7": (["000004.png"], [0])})
    dataset = load(DataSettings(source="leaf", path=tmp_path / "celeba", size=8))
    assert dataset.features[:, 0, 0, 0].tolist() == [10, 20, 40]
    leaf_file(data / "test" / "a.json", {"7": (["000009.png"], [0])})
    assert "holds no image '000009.png'" in refused(DataSettings(source="leaf", path=tmp_path / "celeba", size=8))


def test_the_digits_are_those_of_scikit_learn() -> None:
    ours, theirs = read_digits(DataSettings(source="digits")), load_digits()
    assert np.array_equal(ours.features.numpy()[:, 0] * 16, theirs.images)
    assert np.array_equal(ours.labels.numpy(), theirs.target)
