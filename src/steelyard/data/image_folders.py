"""What the folders of images say: the class of each image, whose it is, and whether it is for testing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from steelyard.base.errors import UserError

FOLDER = "folder"
"""The word of `labels`, `owner` and `held_out` that means: as the folders are named."""
TEST_FOLDERS = ("test", "val", "valid", "validation")
TRAIN_FOLDERS = ("train", "training")
LAYOUT = "images in a folder for each class, as in cat/001.png and dog/001.png"


@dataclass(frozen=True, eq=False)
class Folders:
    """The folders of images, outermost first, without those that all images share."""

    path: Path
    parts: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, path: Path, images: Sequence[str]) -> Folders:
        """Look at images by their path inside a folder or zip; a single folder around everything says nothing."""
        parts = [PurePosixPath(name).parent.parts for name in images]
        while parts and all(len(folders) > 1 and folders[0] == parts[0][0] for folders in parts):
            parts = [folders[1:] for folders in parts]
        return cls(path, tuple(parts))

    @property
    def by_class(self) -> bool:
        """Whether every image lies in a folder, and there are two folders' names or more: classes."""
        return all(self.parts) and len({folders[-1] for folders in self.parts}) > 1

    @property
    def splits(self) -> bool:
        """Whether the outermost folders are train and test (or validation), with folders in them."""
        outer = {folders[0].lower() for folders in self.parts if folders}
        known = outer <= {*TEST_FOLDERS, *TRAIN_FOLDERS} and not outer.isdisjoint(TRAIN_FOLDERS)
        return known and len(outer) > 1 and all(len(folders) > 1 for folders in self.parts)

    @property
    def by_owner(self) -> bool:
        """Whether folders of owners hold folders of classes, some of which two owners have."""
        inner = self._inner()
        if not all(len(folders) == 2 for folders in inner) or len({folders[0] for folders in inner}) < 2:
            return False
        return len({folders[1] for folders in inner}) < len(set(inner))

    def _inner(self) -> tuple[tuple[str, ...], ...]:
        return tuple(folders[1:] for folders in self.parts) if self.splits else self.parts

    def classes(self) -> NDArray[np.str_]:
        """Return the class of each image: the folder that holds it."""
        if not self.by_class:
            raise UserError(f"data.labels: '{self.path}' has no folder for each class; expected {LAYOUT}")
        return np.array([folders[-1] for folders in self.parts])

    def owners(self) -> NDArray[np.str_]:
        """Return whose image each is: the folder around the class's folder."""
        inner = self._inner()
        if not all(len(folders) > 1 for folders in inner):
            raise UserError(
                f"data.owner: got 'folder', but '{self.path}' has no folders around those of the classes; "
                "expected OWNER/CLASS/IMAGE, or data.attributes with a column of owners"
            )
        return np.array([folders[-2] for folders in inner])

    def held_out(self) -> NDArray[np.bool_]:
        """Return which images lie in the test folder."""
        if not self.splits:
            raise UserError(
                f"data.held_out: got 'folder', but '{self.path}' is not divided into train and test; "
                "expected train/CLASS/IMAGE and test/CLASS/IMAGE"
            )
        return np.array([folders[0].lower() in TEST_FOLDERS for folders in self.parts])
