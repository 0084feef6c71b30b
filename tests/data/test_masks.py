"""Images with masks: folders of pairs, arrays, and those made from digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from steelyard.data import in_memory, load
from steelyard.data.settings import DataSettings
from steelyard.errors import UserError


def picture(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(values.astype(np.uint8)).save(path)


def hospital(folder: Path, name: str, rows: int = 3, high: int = 255) -> None:
    for row in range(rows):
        mask = np.zeros((8, 8))
        mask[: row + 2, :4] = high
        picture(folder / name / "images" / f"{row}.png", np.full((8, 8, 3), 20 * row))
        picture(folder / name / "masks" / f"{row}.png", mask)


def read(path: Path, **fields: object) -> DataSettings:
    return load(DataSettings(source="images", path=path, task="segmentation", size=8, **fields))  # type: ignore


def test_pairs_of_the_same_name_in_a_folder_for_each_owner(tmp_path: Path) -> None:
    hospital(tmp_path / "scans", "north")
    hospital(tmp_path / "scans", "south", rows=2)
    picture(tmp_path / "scans" / "south" / "images" / "unmarked.png", np.zeros((8, 8, 3)))
    data = read(tmp_path / "scans", owner="folder")
    assert repr(data) == "Dataset('scans': 5 samples of 3×8×8, masks of 2 classes, 2 owners)"
    assert data.owners.tolist() == ["north"] * 3 + ["south"] * 2
    assert (data.kind, data.classes, data.targets, tuple(data.labels.shape)) == ("segmentation", 0, 2, (5, 64))
    assert [int(mask.sum()) for mask in data.labels] == [8, 12, 16, 8, 12]
    assert data.notes == (
        "scans: classes of pixels: 0 = 0, 1 = 255",
        "1 pictures have no mask or no image of the same name, such as south/images/unmarked.png: left out",
    )


def test_masks_are_scaled_without_new_values(tmp_path: Path) -> None:
    hospital(tmp_path, "a", high=2)
    hospital(tmp_path, "b", high=2)
    data = load(DataSettings(source="images", path=tmp_path, task="segmentation", size=5, classes=3))
    assert set(data.labels.unique().tolist()) == {0, 2}
    assert data.targets == 3
    with pytest.raises(UserError, match=r"masks hold 2; expected classes 0 to 1 \(data.classes\)"):
        read(tmp_path, classes=2)


def test_what_cannot_be_a_mask_is_named(tmp_path: Path) -> None:
    hospital(tmp_path, "a")
    picture(tmp_path / "a" / "masks" / "0.png", np.zeros((8, 8, 3)))
    with pytest.raises(UserError, match=r"mask 'a/masks/0.png' is RGB; expected grey, black and white or a palette"):
        read(tmp_path)
    with pytest.raises(UserError, match=r"holds no image with a mask; expected images/NAME.png with masks/NAME.png"):
        read(tmp_path / "a" / "images")
    with pytest.raises(UserError, match=r"masks are \(4, 4\) and images \(8, 8\); expected the same size"):
        in_memory(np.zeros((2, 1, 8, 8)), np.zeros((2, 4, 4), dtype=int))
    with pytest.raises(UserError, match=r"masks run from 0 to 0; expected .* two classes at least"):
        in_memory(np.zeros((2, 1, 8, 8)), np.zeros((2, 8, 8), dtype=int))


def test_arrays_of_masks(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    masks = chance.integers(0, 4, (6, 8, 8))
    np.savez(tmp_path / "scans.npz", x=chance.random((6, 8, 8)), y=masks, owner=list("aabbcc"))
    data = load(DataSettings(source="npz", path=tmp_path / "scans.npz", task="segmentation"))
    assert (data.targets, data.shape) == (4, (1, 8, 8))
    assert np.array_equal(data.labels.reshape(6, 8, 8).numpy(), masks)
    with pytest.raises(UserError, match=r"data.labels has shape \(6, 8, 8\); expected \(6,\), one per row"):
        load(DataSettings(source="npz", path=tmp_path / "scans.npz"))
    with pytest.raises(UserError, match=r"task: got 'survival' with source 'npz'; allowed: classes, regression, seg"):
        DataSettings(source="npz", path=tmp_path / "scans.npz", task="survival")


def test_digits_become_masks_the_same_everywhere() -> None:
    data, digits = load(DataSettings(source="digit-masks")), load(DataSettings(source="digits"))
    assert (len(data), data.shape, data.targets) == (1797, (1, 16, 16), 11)
    masks, images = data.labels.reshape(-1, 16, 16), data.features[:, 0]
    for row in range(0, 1797, 97):
        assert set(masks[row].unique().tolist()) == {0, int(digits.labels[row]) + 1}
        assert bool((images[row][masks[row] > 0] >= 0.5).all())
        assert float(images[row].sum()) == pytest.approx(float(digits.features[row].sum()))
    with pytest.raises(UserError, match=r"data.augment: got pad or flip with masks"):
        load(DataSettings(source="digit-masks", augment={"flip": True}))


def test_data_from_python_may_say_what_they_are() -> None:
    assert DataSettings(source="memory").capabilities().task is None
    for task in ("segmentation", "survival"):
        assert DataSettings(source="memory", task=task).capabilities().task == task
