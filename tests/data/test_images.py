"""Images: classes, owners and test part by the names of folders, tables beside them, masks, CelebA as it is."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.test_sources import leaf_file
from tests.kit import assert_refused

from steelyard.data import Dataset, DataSettings, PartitionSettings, load, share_out
from steelyard.data.inspect import DataSummary, look

Image = pytest.importorskip("PIL.Image")


def read(path: Path | str, **fields: object) -> Dataset:
    return load(DataSettings.model_validate({"source": "images", "path": path, "size": 4, **fields}))


def picture(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def draw(folder: Path, shades: dict[str, int]) -> Path:
    """Write one even image for each name."""
    for name, shade in shades.items():
        picture(folder / name, np.full((8, 8), shade))
    return folder


PETS = {"cat/001.png": 10, "cat/002.png": 20, "dog/001.png": 30}


def test_owners_from_a_table_beside_classes_from_folders(tmp_path: Path) -> None:
    draw(tmp_path / "pets", PETS)
    table = tmp_path / "who.csv"
    table.write_text("image,clinic\ncat/001.png,north\ndog/001.png,south\ncat/002.png,south\n")
    data = read(tmp_path / "pets", labels="folder", owner="clinic", attributes=table, colours="grey")
    assert data.shape == (1, 4, 4)
    assert (data.features[:, 0, 0, 0].tolist(), data.labels.tolist()) == ([10, 30, 20], [0, 1, 0])
    assert data.owners.tolist() == ["north", "south", "south"]


def test_images_are_cut_to_their_central_square(tmp_path: Path) -> None:
    wide = np.zeros((4, 8), dtype=np.uint8)
    wide[:, 2:6] = 200
    # numbers as folders are ordered as numbers
    for kind in range(11):
        picture(tmp_path / f"{kind}" / "1.png", (wide.T if kind % 2 else wide) + kind)
    assert list(looked(tmp_path)[0].classes) == [str(kind) for kind in range(11)]
    data = read(tmp_path, colours="grey")
    assert [image.unique().tolist() for image in data.features] == [[200 + int(label)] for label in data.labels]


# CelebA and tables beside images --------------------------------------------------------------------------------------


def celeba_folder(folder: Path) -> Path:
    """CelebA's own layout: four images of two people, the third blurry."""
    for number in range(1, 5):
        coloured(folder / "img_align_celeba" / f"00000{number}.png", (number * 10, 0, 255))
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
    notes = share_out(dataset, PartitionSettings(scheme="natural"), 0).notes
    assert notes == ("1 of 5 rows of list_attr_celeba.txt have no image",)
    lines = (folder / "identity_CelebA.txt").read_text().replace(" 7", " 9")
    (tmp_path / "people.txt").write_text(lines)
    scale = {"mean": [0, 0.5, 1], "deviation": [1, 0.5, 0.25]}
    other = read(folder / "img_align_celeba", identities=tmp_path / "people.txt", augment=scale)
    assert other.features[2, :, 0, 0].tolist() == pytest.approx([30 / 255, -1, 0])
    assert other.owners.tolist() == ["identity-009", "identity-009", "identity-012", "identity-012"]


def test_a_zip_of_images_with_a_csv(tmp_path):
    folder = celeba_folder(tmp_path / "celeba")
    packed = tmp_path / "faces.zip"
    with zipfile.ZipFile(packed, "w") as archive:
        for path in sorted(folder.rglob("*.png")):
            archive.write(path, f"img/{path.name}")
    table = "file,person,mood,fuzzy\n000001.png,ann,glad,0\n000002.png,bob,sad,1\n000003.png,ann,calm,0\n"
    # of two tables the one that is called as the images are
    (tmp_path / "faces.csv.gz").write_bytes(gzip.compress(table.encode()))
    (tmp_path / "aside.csv").write_text("image,mood\n000001.png,odd\n")
    settings = DataSettings(
        source="images", path=packed, labels="mood", owner="person", marks={"sharp": "not fuzzy"}, size=4
    )
    dataset = load(settings)
    assert dataset.labels.tolist() == [1, 2, 0]
    assert dataset.owners.tolist() == ["ann", "bob", "ann"]
    assert dataset.marks["sharp"].tolist() == [1, 0, 1]


def test_leaf_celeba_names_images(tmp_path):
    data, found = tmp_path / "celeba", tmp_path / "raw"
    settings = DataSettings(source="leaf", path=data / "few", size=8)
    celeba_folder(found)
    leaf_file(data / "few" / "train" / "a.json", {"7": (["000001.png", "000002.png"], [1, 0])})
    leaf_file(data / "few" / "test" / "a.json", {"7": (["000004.png"], [0])})
    (data / "data").mkdir()
    assert_refused(lambda: load(settings), "name images, but there is no", data / "few" / "raw" / "img_align_celeba")
    for place in (data / "few", data, data / "data"):
        found = found.rename(place / "raw")
        assert load(settings).features[:, 0, 0, 0].tolist() == [10, 20, 40]
    leaf_file(data / "few" / "test" / "a.json", {"7": (["000009.png"], [0])})
    assert_refused(lambda: load(settings), "holds no image '000009.png'")


def coloured(path: Path, colour: tuple[int, int, int]) -> None:
    picture(path, np.full((8, 8, 3), colour))


def looked(path: Path, label: str | None = None) -> tuple[DataSummary, dict[str, Any]]:
    seen = look("images", [path], label)
    assert seen.source == "images"
    return seen, {name: value for name, (value, _) in seen.fields.items()}


def test_a_look_says_what_folders_are_and_which_fields_read_them(tmp_path: Path) -> None:
    draw(tmp_path / "pets", PETS)
    picture(tmp_path / "pets" / "cat" / "003.png", np.full((12, 20), 5))
    data = read(tmp_path / "pets")
    # both classes hold a 001.png: they are told apart by their folders
    assert (data.features[:, 0, 0, 0].tolist(), data.labels.tolist()) == ([10, 20, 5, 30], [0, 0, 0, 1])
    seen, fields = looked(tmp_path / "pets")
    assert fields == {"labels": "folder", "size": 8, "colours": "grey"}
    assert (seen.rows, seen.shape, dict(seen.classes), seen.owners) == (4, (1, 8, 8), {"cat": 3, "dog": 1}, None)
    assert seen.account == ("pets: 4 images, 8×8 to 20×12, grey", "classes by folder: 2: cat 3, dog 1 images")
    draw(tmp_path / "own", {"train/ann/cat/1.png": 1, "test/ann/dog/1.png": 2, "test/bob/dog/1.png": 3})
    seen, fields = looked(tmp_path / "own")
    assert (fields["owner"], fields["held_out"], seen.owners) == ("folder", "folder", {"ann": 2, "bob": 1})
    assert (seen.held_out, seen.owners_held_out) == (2, False)  # bob has nothing to train on
    assert seen.account[2:] == ("owners by folder: 2, of 1 to 2 rows: ann 2, bob 1", "test part by folder: 2 images")
    data = read(tmp_path / "own", labels="folder", owner="folder", held_out="folder")
    # sorted by path: test before train
    assert (data.owners.tolist(), data.held_out.tolist()) == (["ann", "bob", "ann"], [True, True, False])
    assert data.labels.tolist() == [1, 1, 0]
    draw(tmp_path / "own", {"train/bob/cat/2.png": 4})
    assert looked(tmp_path / "own")[0].owners_held_out
    assert_refused(lambda: look("images", [tmp_path / "own"], None, "who"), "--owner: got 'who' with images in folders")
    faces = celeba_folder(tmp_path / "celeba") / "img_align_celeba"
    assert_refused(lambda: looked(faces), "--images: '", "no folder for each class", "--label")
    seen, fields = looked(faces, "Smiling")
    assert fields == {"labels": "Smiling", "owner": "identity", "size": 8}
    assert (seen.owners, dict(seen.classes)) == ({"identity-007": 2, "identity-012": 2}, {"-1": 2, "1": 2})
    assert seen.account[1] == "classes: 2: -1 2, 1 2 images"
    hospital(tmp_path / "scans", "north")
    hospital(tmp_path / "scans", "south", rows=2)
    seen, fields = looked(tmp_path / "scans")
    assert seen.account[0] == "scans: 5 images with masks, 8×8, colour"
    assert fields == {"task": "segmentation", "owner": "folder", "size": 16}
    assert (seen.rows, seen.shape, seen.task) == (5, (3, 16, 16), "segmentation")
    assert seen.account[1] == "owners by folder: 2, of 2 to 3 rows: north 3, south 2"


# masks ----------------------------------------------------------------------------------------------------------------


def masked(path: Path, **fields: object) -> Dataset:
    return read(path, **{"task": "segmentation", "size": 8, **fields})


def hospital(folder: Path, name: str, rows: int = 3, high: int = 255) -> None:
    for row in range(rows):
        mask = np.zeros((8, 8))
        mask[: row + 2, :4] = high
        picture(folder / name / "images" / f"{row}.png", np.full((8, 8, 3), 20 * row))
        picture(folder / name / "masks" / f"{row}.png", mask)


def test_pairs_of_the_same_name_in_a_folder_for_each_owner(tmp_path: Path) -> None:
    hospital(tmp_path / "scans", "north")
    hospital(tmp_path / "scans", "south", rows=2)
    for alone in ("cover.png", "south/images/unmarked.png"):
        picture(tmp_path / "scans" / alone, np.zeros((8, 8, 3)))
    data = masked(tmp_path / "scans", owner="folder")
    assert data.owners.tolist() == ["north"] * 3 + ["south"] * 2
    assert (data.kind, data.classes, data.targets, tuple(data.labels.shape)) == ("segmentation", 0, 2, (5, 64))
    assert [int(mask.sum()) for mask in data.labels] == [8, 12, 16, 8, 12]
    assert data.notes == (
        "scans: classes of pixels: 0 = 0, 1 = 255",
        "2 pictures have no mask or no image of the same name, such as cover.png: left out",
    )


def test_masks_are_scaled_without_new_values(tmp_path: Path) -> None:
    hospital(tmp_path, "a", high=2)
    data = masked(tmp_path, size=5, classes=3)
    assert set(data.labels.unique().tolist()) == {0, 2}
    assert data.targets == 3
    # black and white: the values are 0 and 1
    Image.new("1", (8, 8), 1).save(tmp_path / "a" / "masks" / "0.png")
    assert masked(tmp_path).labels[0].tolist() == [1] * 64


def test_arrays_of_masks(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    masks = chance.integers(0, 4, (6, 8, 8))
    np.savez(tmp_path / "scans.npz", x=chance.random((6, 8, 8)), y=masks, owner=list("aabbcc"))
    data = load(DataSettings(source="npz", path=tmp_path / "scans.npz", task="segmentation"))
    assert np.array_equal(data.labels.reshape(6, 8, 8).numpy(), masks)


def test_digits_become_masks_the_same_everywhere() -> None:
    data, digits = load(DataSettings(source="digit-masks")), load(DataSettings(source="digits"))
    assert repr(data) == "Dataset('digit-masks': 1,797 samples of 1×16×16, masks of 11 classes)"
    masks, images = data.labels.reshape(-1, 16, 16), data.features[:, 0]
    assert [mask.nonzero()[0].tolist() for mask in masks[:3]] == [[0, 11], [8, 5], [4, 11]]
    assert torch.equal(masks.flatten(1).amax(dim=1), digits.labels + 1)
    assert torch.equal(masks > 0, images >= 0.5)
    # sums of the same 64 numbers up to 1, in float32: 64 · 64 · 6e-8
    torch.testing.assert_close(images.sum(dim=(1, 2)), digits.features.sum(dim=(1, 2, 3)), rtol=0, atol=3e-4)


# what is refused ------------------------------------------------------------------------------------------------------

CELEBA = {"path": "celeba/img_align_celeba"}
MASKS = {"path": "scans", "task": "segmentation"}
PICTURES = {"path": "pets", "labels": "folder"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whole and broken folders of images, which are only read."""
    folder = tmp_path_factory.mktemp("pictures")
    celeba_folder(folder / "celeba")
    draw(folder / "pets", PETS)
    draw(folder / "flat", {"1.png": 1, "2.png": 2})
    draw(folder / "broken", {"a/1.png": 1, "b/1.png": 2})
    broken = folder / "broken" / "a" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    hospital(folder / "scans", "a", high=2)
    hospital(folder / "dark", "a", high=0)
    hospital(folder / "odd", "a")
    coloured(folder / "odd" / "a" / "masks" / "0.png", (0, 0, 0))
    (folder / "cut.txt").write_text((folder / "celeba" / "list_attr_celeba.txt").read_text()[:-25])
    people = [f"00000{number}.png {number}\n" for number in (1, 2, 3, 4, 5)]
    (folder / "twice.txt").write_text("000001.png 7\n" + "".join(people))
    (folder / "some.txt").write_text(people[0])
    (folder / "words.txt").write_text("000001.png seven\n")
    (folder / "tables").mkdir()
    (folder / "tables" / "who.csv").write_text("image,clinic\n001.png,north\n002.png,south\n")
    (folder / "tables" / "none.csv").write_text("picture,clinic\n001.png,north\n002.png,south\n")
    return folder


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({**CELEBA, "labels": "smiling"}, "list_attr_celeba.txt (did you mean 'Smiling'?)"),
        ({**CELEBA, "attributes": "cut.txt"}, "expected 5, its first line"),
        ({**CELEBA, "identities": "twice.txt"}, "twice.txt: names image '000001.png' twice"),
        ({**CELEBA, "identities": "some.txt"}, "some.txt: names no identity for image '000002.png' of celeba/list"),
        ({**CELEBA, "identities": "words.txt"}, "words.txt: not lines of an image name and a whole number"),
        ({**CELEBA, "attributes": "twice.txt"}, "twice.txt: starts with '000001.png 7"),
        ({**CELEBA, "marks": {"sharp": "Bury"}}, "data.marks.sharp: found no 'Bury' in celeba"),
        ({"path": "cut.txt"}, "cut.txt: cannot be read as .zip"),
        ({"path": "tables"}, "data.path: 'tables' holds no image"),
        ({**PICTURES, "owner": "folder"}, "data.owner: got 'folder', but 'pets' has no folders around"),
        ({**PICTURES, "held_out": "folder"}, "data.held_out: got 'folder', but 'pets' is not divided"),
        ({**PICTURES, "classes": 2}, "data.classes: got 2 with images in classes"),
        ({**PICTURES, "owner": "clinic"}, "data.owner: got 'clinic' without a table"),
        ({**MASKS, "path": "pets"}, "data.path: 'pets' holds no image with a mask"),
        ({**CELEBA, "attributes": "tables/none.csv"}, "none.csv: has 2 rows and columns picture, clinic"),
        ({"path": "flat", "labels": "folder"}, "data.labels: 'flat' has no folder for each class"),
        ({"path": "broken"}, "is broken"),
        ({"path": "flat"}, "data.attributes: got nothing"),
        ({**PICTURES, "owner": "clinic", "attributes": "tables/who.csv"}, "several folders hold an image '001.png'"),
        ({**MASKS, "classes": 2}, "masks hold 2; expected classes 0 to 1"),
        ({**MASKS, "path": "odd"}, "mask 'a/masks/0.png' is RGB"),
        ({**MASKS, "path": "dark"}, "masks hold the background, 0, alone"),
    ],
)
def test_what_images_do_not_say_is_refused(
    pictures: Path, fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(pictures)
    assert_refused(lambda: read(**{"size": 8, **fields}), told)
