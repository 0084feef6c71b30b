"""Images in folders: classes, owners and the test part by the names of folders."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from steelyard.data import Dataset, DataSettings, PartitionSettings, check_together, load, share_out
from steelyard.data.image_folders import Folders
from steelyard.errors import UserError

Image = pytest.importorskip("PIL.Image")


def draw(folder: Path, shades: dict[str, int], size: tuple[int, int] = (8, 8), mode: str = "L") -> Path:
    """Write one even image for each name."""
    for name, shade in shades.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, shade if mode == "L" else (shade, 0, 0)).save(path)
    return folder


def read(path: Path, **fields: object) -> Dataset:
    return load(DataSettings.model_validate({"source": "images", "path": path, "size": 4, **fields}))


def refused(path: Path, **fields: object) -> str:
    with pytest.raises(UserError) as caught:
        read(path, **fields)
    assert "\n" not in str(caught.value)
    return str(caught.value)


PETS = {"cat/001.png": 10, "cat/002.png": 20, "dog/001.png": 30}


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    data = read(draw(tmp_path / "pets", PETS))
    # both classes hold a 001.png: they are told apart by their folders
    assert data.features[:, 0, 0, 0].tolist() == [10, 20, 30]
    assert data.features.shape == (3, 3, 4, 4)
    assert data.labels.tolist() == [0, 0, 1]
    assert (data.classes, data.owners, data.held_out) == (2, None, None)
    assert data.notes == ("pets: classes: 0 = cat, 1 = dog",)


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    data = read(draw(tmp_path, PETS), labels="folder", colours="grey")
    assert data.features.shape == (3, 1, 4, 4)
    assert data.features[2].unique().tolist() == [30]


def test_numbers_as_folders_are_ordered_as_numbers(tmp_path: Path) -> None:
    data = read(draw(tmp_path, {f"{digit}/a.png": digit for digit in range(11)}))
    assert sorted(zip(data.features[:, 0, 0, 0].tolist(), data.labels.tolist(), strict=True)) == [
        (digit, digit) for digit in range(11)
    ]
    assert data.notes == ()


def test_folders_of_owners_around_those_of_classes(tmp_path: Path) -> None:
    draw(tmp_path, {"ann/cat/1.png": 1, "ann/dog/1.png": 2, "bob/cat/1.png": 3, "bob/dog/2.png": 4})
    data = read(tmp_path, labels="folder", owner="folder")
    assert data.owners.tolist() == ["ann", "ann", "bob", "bob"]
    assert data.labels.tolist() == [0, 1, 0, 1]
    assert share_out(data, PartitionSettings(scheme="natural"), 0).names == ["ann", "bob"]


def test_train_and_test_folders(tmp_path: Path) -> None:
    draw(tmp_path, {"train/cat/1.png": 1, "train/dog/1.png": 2, "test/cat/1.png": 3, "test/dog/1.png": 4})
    settings = DataSettings(source="images", path=tmp_path, labels="folder", held_out="folder", size=4)
    check_together(settings, PartitionSettings(clients=1, test="held-out"))
    data = load(settings)
    # sorted by path: test before train
    assert data.held_out.tolist() == [True, True, False, False]
    assert data.labels.tolist() == [0, 1, 0, 1]


def test_a_zip_with_one_folder_around_everything(tmp_path: Path) -> None:
    draw(tmp_path / "in", PETS)
    with zipfile.ZipFile(tmp_path / "pets.zip", "w") as archive:
        for name in PETS:
            archive.write(tmp_path / "in" / name, f"pets/{name}")
    assert read(tmp_path / "pets.zip").labels.tolist() == [0, 0, 1]


def test_owners_from_a_table_beside_classes_from_folders(tmp_path: Path) -> None:
    draw(tmp_path / "pets", PETS)
    table = tmp_path / "who.csv"
    table.write_text("image,clinic\ncat/001.png,north\ndog/001.png,south\ncat/002.png,south\n")
    data = read(tmp_path / "pets", labels="folder", owner="clinic", attributes=table)
    assert dict(zip(data.features[:, 0, 0, 0].tolist(), data.owners.tolist(), strict=True)) == {
        10: "north",
        30: "south",
        20: "south",
    }
    assert data.labels.tolist() == [0, 1, 0]


def test_a_table_that_names_images_without_their_folder_is_refused_where_two_have_the_name(tmp_path: Path) -> None:
    draw(tmp_path / "pets", PETS)
    table = tmp_path / "who.csv"
    table.write_text("image,clinic\n001.png,north\n002.png,south\n")
    line = refused(tmp_path / "pets", labels="folder", owner="clinic", attributes=table)
    assert "several folders hold an image '001.png'" in line


def test_a_share_keeps_labels_owners_and_test_part_together(tmp_path: Path) -> None:
    shades = {f"{who}/{kind}/{n}.png": 40 * w + n for w, who in enumerate("abcd") for kind in "xy" for n in range(2)}
    draw(tmp_path, shades)
    data = read(tmp_path, labels="folder", owner="folder", share=0.5)
    assert len(data) == 8
    assert ["abcd"[shade // 40] for shade in data.features[:, 0, 0, 0].tolist()] == data.owners.tolist()


@pytest.mark.parametrize(
    ("names", "fields", "words"),
    [
        ({"1.png": 1, "2.png": 2}, {"labels": "folder"}, "has no folder for each class; expected images in a folder"),
        (PETS, {"owner": "folder"}, "has no folders around those of the classes; expected OWNER/CLASS/IMAGE"),
        (PETS, {"held_out": "folder"}, "is not divided into train and test; expected train/CLASS/IMAGE"),
        (PETS, {"labels": "folder", "owner": "clinic"}, "data.owner: got 'clinic' without a table of the images"),
        ({"1.png": 1, "2.png": 2}, {}, "data.attributes: got nothing"),
    ],
)
def test_what_the_folders_do_not_say_is_refused(
    tmp_path: Path, names: dict[str, int], fields: dict[str, object], words: str
) -> None:
    folder = tmp_path / "in" / "pictures"
    assert words in refused(draw(folder, names), **fields)


def test_only_folders_mark_the_test_part_of_images(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="allowed with images: folder"):
        DataSettings(source="images", path=tmp_path, held_out="part")
    plain = DataSettings(source="images", path=tmp_path, labels="folder")
    with pytest.raises(UserError, match="no test part of its own"):
        check_together(plain, PartitionSettings(clients=2, test="held-out"))


@pytest.mark.parametrize(
    ("paths", "by_class", "splits", "by_owner"),
    [
        (["a/x.png", "b/x.png"], True, False, False),
        (["train/a/x.png", "test/a/x.png", "test/b/x.png"], True, True, False),
        (["u/a/x.png", "v/a/x.png", "v/b/x.png"], True, False, True),
        (["train/u/a/x.png", "test/v/a/x.png", "train/v/b/x.png"], True, True, True),
        # every owner has a class of its own: more likely kinds of classes
        (["u/a/x.png", "v/b/x.png"], True, False, False),
        (["a/x.png", "x.png"], False, False, False),
        (["train/x.png", "test/x.png"], True, False, False),
    ],
)
def test_what_folders_look_like(paths: list[str], by_class: bool, splits: bool, by_owner: bool) -> None:
    folders = Folders.of(Path("p"), paths)
    assert (folders.by_class, folders.splits, folders.by_owner) == (by_class, splits, by_owner)


def test_images_are_cut_to_their_central_square(tmp_path: Path) -> None:
    wide = np.zeros((4, 8), dtype=np.uint8)
    wide[:, 2:6] = 200
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        Image.fromarray(wide).save(tmp_path / kind / "1.png")
    assert read(tmp_path, colours="grey").features.unique().tolist() == [200]
