"""A folder or zip of images: in a folder for each class, with an attribute table such as CelebA's, or with masks."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from steelyard.base.errors import UserError, listed, nearest
from steelyard.base.marks import DataFile
from steelyard.data.cells import class_numbers, marked, numbered, numbering
from steelyard.data.files import find, read_text
from steelyard.data.preparation import Preparation, Target
from steelyard.data.sources.source import FileSource, Side, SourceCapabilities
from steelyard.data.tables import parse

if TYPE_CHECKING:
    import pandas
    from PIL.Image import Image

    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import Dataset


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


# Attribute tables of images: a CSV file, or CelebA's own text files.


TABLE_ORIGIN = "a .csv with a column of image names, or CelebA's list_attr_celeba.txt, either also as .gz"
_IMAGE_COLUMNS = ("image", "image_id", "file", "filename", "file_name", "name")


@dataclass(frozen=True)
class Table:
    """One row per image: its name and its attributes."""

    path: Path
    images: list[str]
    columns: dict[str, NDArray[Any]]

    def column(self, field: str, name: str) -> NDArray[Any]:
        """Return one column; `field` is the setting that named it, for the error line."""
        if name not in self.columns:
            known = list(self.columns)
            raise UserError(
                f"data.{field}: found no '{name}' in {self.path}{nearest(name, known)}; allowed: {listed(known)}"
            )
        return self.columns[name]

    def mark(self, mark: str, column: str) -> NDArray[np.float64]:
        """Return a column as 0/1 (anything above 0 is 1); `not column` turns it round."""
        return marked(self.column(f"marks.{mark}", column.removeprefix("not ")), mark, column, self.path)


def read_table(settings: Images, images: Path) -> Table:
    """Return the attribute table of these images, joined with the file of identities where there is one."""
    path = find(settings.attributes, TABLE_ORIGIN, field="attributes") if settings.attributes else _table_beside(images)
    frame = _read_csv(path) if ".csv" in path.suffixes else _read_celeba(path)
    identities = settings.identities and find(
        settings.identities, "CelebA's identity_CelebA.txt, also as .gz", field="identities"
    )
    if identities is None and "identity" not in frame.columns:
        identities = _first([path.parent / f"identity_CelebA.txt{packed}" for packed in ("", ".gz")])
    if identities is not None:
        frame = frame.drop(columns="identity", errors="ignore").join(_read_identities(identities), how="left")
        unknown = np.flatnonzero(frame["identity"].isna().to_numpy())
        if len(unknown):
            name = frame.index[int(unknown[0])]
            raise UserError(f"{identities}: names no identity for image '{name}' of {path}; expected one per image")
        frame["identity"] = frame["identity"].astype("int64")
    columns = {str(name): _plain(frame[name].to_numpy()) for name in frame.columns}
    return Table(path, [str(name) for name in frame.index], columns)


def beside(images: Path) -> Path | None:
    """Return the table that lies in the folder of the images or of their zip, or one above; None if there is none."""
    return _first(_named(images)) or next(iter(_unnamed(images)), None)


def _named(images: Path) -> list[Path]:
    folders = [images, images.parent] if images.is_dir() else [images.parent]
    stem = images.stem if images.is_file() else images.name
    names = [f"{stem}_metadata.csv", f"{stem}.csv", "list_attr_celeba.csv", "list_attr_celeba.txt"]
    return [folder / f"{name}{packed}" for folder in folders for name in names for packed in ("", ".gz")]


def _unnamed(images: Path) -> list[Path]:
    folders = [images, images.parent] if images.is_dir() else [images.parent]
    return [path for folder in folders for path in sorted([*folder.glob("*.csv"), *folder.glob("*.csv.gz")])]


def _table_beside(images: Path) -> Path:
    if found := _first(_named(images)):
        return found
    others = _unnamed(images)
    if len(others) == 1:
        return others[0]
    raise UserError(
        f"data.attributes: got nothing, and beside {images} there are {len(others)} .csv files; allowed: {TABLE_ORIGIN}"
    )


def _first(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _read_csv(path: Path) -> pandas.DataFrame:
    frame = parse(path, io.StringIO(read_text(path)), TABLE_ORIGIN)
    image = next((name for name in _IMAGE_COLUMNS if name in frame.columns), None)
    if image is None or frame.empty:
        raise UserError(
            f"{path}: has {len(frame)} rows and columns {listed(map(str, frame.columns))}; "
            f"expected rows and a column of image names: {listed(_IMAGE_COLUMNS)}"
        )
    return _by_image(path, frame.rename(columns={image: "image"}))


def _read_celeba(path: Path) -> pandas.DataFrame:
    """The original text: a count, a line of attribute names, then a line per image with -1 or 1 for each."""
    head = read_text(path).split("\n", 2)
    if len(head) < 3 or not head[0].strip().isdigit():
        raise UserError(f"{path}: starts with {head[0][:30]!r}; expected {TABLE_ORIGIN}, which starts with a count")
    frame = _by_spaces(path, head[2], ["image", *head[1].split()])
    if len(frame) != int(head[0]) or frame.isna().to_numpy().any():
        raise UserError(
            f"{path}: holds {len(frame.dropna())} whole rows (cut off?); expected {int(head[0])}, its first line"
        )
    return _by_image(path, frame)


def _read_identities(path: Path) -> pandas.DataFrame:
    frame = _by_spaces(path, read_text(path), ["image", "identity"])
    if frame.isna().to_numpy().any() or frame["identity"].dtype.kind not in "iu":
        raise UserError(f"{path}: not lines of an image name and a whole number; expected CelebA's identity_CelebA.txt")
    return _by_image(path, frame)


def _by_spaces(path: Path, text: str, names: list[str]) -> pandas.DataFrame:
    return parse(path, io.StringIO(text), TABLE_ORIGIN, sep=r"\s+", header=None, names=names, index_col=False)


def _by_image(path: Path, frame: pandas.DataFrame) -> pandas.DataFrame:
    frame = frame.set_index("image")
    if not frame.index.is_unique:
        raise UserError(
            f"{path}: names image '{frame.index[frame.index.duplicated()][0]}' twice; expected one row per image"
        )
    return frame


def _plain(values: NDArray[Any]) -> NDArray[Any]:
    return values if values.dtype.kind in "biuf" else values.astype(np.str_)


ORIGIN = (
    "a folder or .zip of images, in a folder for each class or with a table beside them (where data sets come from: "
    "docs/reference/data.md)"
)
MASK = "m"
"""The mode in which masks are read: as they are."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


class Images(FileSource, named="images"):
    """Images as uint8 tensors channels×size×size with label, person and marks.

    Use it for images in folders named after their classes, with an attribute table such as CelebA's, or with masks.
    Rows of the table whose image is not there are left out and counted in the notes.
    """

    path: Annotated[Path, DataFile("data")]
    """The folder or .zip of images, looked for beside the experiment's file, then in the working folder, then in the
    folder that the environment variable STEELYARD_DATA names, then in ../shared/data."""
    labels: str | None = None
    """The column that is the label (default Smiling), or "folder", the name of the folder that holds the image (default
    where there is no table)."""
    owner: str | None = None
    """The column that names the person (default identity), or "folder", the folder around that of the class, as in
    OWNER/CLASS/IMAGE."""
    held_out: Literal["folder"] | None = None
    """"folder" where images lie in train/CLASS and test/CLASS."""
    task: Literal["classes", "segmentation"] = "classes"
    """classes, or segmentation: each image has a mask of the same name in a folder beside its own."""
    marks: dict[str, str] = Field(default_factory=dict)
    """Further attributes of each row, as name = "column" or name = "not column", each 0/1. Default: sharp = "not
    Blurry", which the criterion image sharpness reads."""
    attributes: Annotated[Path, DataFile("attributes")] | None = None
    """The attribute table, a .csv or CelebA's list_attr text file, either also .gz. Default: the only such file beside
    the images."""
    identities: Annotated[Path, DataFile("identities")] | None = None
    """CelebA's text file of image names and identities; not needed where the table has the person's column."""
    size: Side = 64
    """Width and height in pixels; others are cut to the central square and scaled."""
    colours: Literal["rgb", "grey"] = "rgb"
    """Three channels, or one of grey."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (1 if self.colours == "grey" else 3, self.size, self.size)

    def capabilities(self) -> SourceCapabilities:
        # In folders without a table there are no marks; with one, only the table can tell.
        unmarked = self.labels == FOLDER and self.attributes is None
        marks = frozenset(self.marks) if self.marks or unmarked else None
        given = self.held_out is not None
        classes = 0 if self.task == "segmentation" else None
        return SourceCapabilities(self.task, classes, marks, owners=True, held_out=given, splits_owners=given)

    def read(self) -> Dataset:
        # For speed of start: settings are read without torch.
        from steelyard.data.dataset import of_arrays, share_of_rows

        if self.classes is not None and self.task == "classes":
            raise UserError(f"data.classes: got {self.classes} with images in classes; allowed: task = 'segmentation'")
        pictures = Pictures(find(self.path, ORIGIN))
        rows = self.listing(pictures)
        kept = share_of_rows(rows.owners, len(rows.images), self.share, self.seed)
        labels, names, notes, classes = rows.labels[kept], rows.names, rows.notes, len(rows.names)
        if rows.masks:
            masks = pictures.read_masks([rows.masks[row] for row in kept], self.size)
            labels, names = _numbered(masks, self, pictures)
            notes, classes = [*numbering(f"{pictures.path.name}: classes of pixels", names), *notes], self.classes
        dataset = of_arrays(
            pictures.read([rows.images[row] for row in kept], self.size, self.colours),
            labels,
            None if rows.owners is None else rows.owners[kept],
            held_out=None if rows.held_out is None else rows.held_out[kept],
            marks={name: values[kept] for name, values in rows.marks.items()},
            classes=classes,
            name=pictures.path.stem,
        )
        names = names or [str(number) for number in range(dataset.targets)]
        target = Target(task=self.task, label=self.labels or "", names=names)
        return replace(dataset, notes=tuple(notes), preparation=self.prepared(target))

    def listing(self, pictures: Pictures) -> Listing:
        """Return what is known of the images before any is decoded."""
        if self.task == "segmentation":
            pairs, alone = paired(pictures.names)
            if not pairs:
                raise UserError(f"data.path: '{pictures.path}' holds no image with a mask; expected {PAIRS}")
            images, table, rows = [image for image, _ in pairs], Table(pictures.path, [], {}), np.arange(len(pairs))
            why = "pictures have no mask or no image of the same name, such as"
            notes = [f"{len(alone)} {why} {alone[0]}: left out"] if alone else []
        else:
            table = _table(self, pictures)
            rows = np.flatnonzero([name in pictures for name in table.images])
            if not len(rows):
                raise UserError(
                    f"{table.path}: none of its {len(table.images)} images is in {pictures.path}; expected their names"
                )
            missing = len(table.images) - len(rows)
            notes = [f"{missing} of {len(table.images)} rows of {table.path.name} have no image"] if missing else []
            images, pairs = [pictures.inside(table.images[row]) for row in rows], []
        folders = Folders.of(pictures.path, images)
        labels, names = np.zeros(len(rows), np.int64), list[str]()
        if not pairs:
            labels, names = _labels(table, self, rows, folders, notes)
        return Listing(
            images,
            [mask for _, mask in pairs],
            labels,
            names,
            _people(table, self, rows, folders),
            folders.held_out() if self.held_out == FOLDER else None,
            {name: table.mark(name, column)[rows] for name, column in _marks(table, self).items()},
            notes,
            table.path,
        )

    def prepared(self, target: Target) -> Preparation:
        """Return what images go through before a model sees them."""
        shape = [1 if self.colours == "grey" else 3, self.size, self.size]
        return Preparation(form="images", values="bytes", shape=shape, target=target)


@dataclass(frozen=True, eq=False)
class Listing:
    """Images by their path inside the folder or zip, with an entry for each in all that is known of them."""

    images: list[str]
    masks: list[str]
    """Empty where images have none."""
    labels: NDArray[np.int64]
    names: list[str]
    """Of the classes by number; none where masks hold these."""
    owners: NDArray[np.str_] | None
    held_out: NDArray[np.bool_] | None
    marks: dict[str, NDArray[np.float64]]
    notes: list[str]
    table: Path
    """The attribute table, or the images themselves."""


def _table(settings: Images, pictures: Pictures) -> Table:
    """The attribute table, or one without attributes where the folders say what the images are."""
    by_folder = settings.labels == FOLDER or (
        settings.labels is None and beside(pictures.path) is None and Folders.of(pictures.path, pictures.names).by_class
    )
    if settings.attributes is None and by_folder:
        return Table(pictures.path, pictures.names, {})
    return read_table(settings, pictures.path)


def _labels(
    table: Table, settings: Images, rows: NDArray[np.int64], folders: Folders, notes: list[str]
) -> tuple[NDArray[np.int64], list[str]]:
    """Return the class of each image as a number, and the names of the classes."""
    if settings.labels == FOLDER or (settings.labels is None and not table.columns):
        labels, names = numbered(folders.classes().tolist())
        notes.extend(numbering(f"{folders.path.name}: classes", names))
        return labels, names
    labels, names = class_numbers(table.column("labels", settings.labels or "Smiling"), table.path)
    return labels[rows], names[: int(labels[rows].max()) + 1]


def _people(table: Table, settings: Images, rows: NDArray[np.int64], folders: Folders) -> NDArray[np.str_] | None:
    if settings.owner == FOLDER:
        return folders.owners()
    if settings.owner is None and "identity" not in table.columns:
        return None
    if not table.columns:
        raise UserError(
            f"data.owner: got '{settings.owner}' without a table of the images; allowed: folder, or data.attributes, "
            "a .csv with a column of image names and one of owners"
        )
    # For speed of start: settings are read without torch.
    from steelyard.data.dataset import owner_names

    name = settings.owner or "identity"
    return owner_names(table.column("owner", name)[rows], name)


def _marks(table: Table, settings: Images) -> dict[str, str]:
    return settings.marks or ({"sharp": "not Blurry"} if "Blurry" in table.columns else {})


class Pictures:
    """The images of a folder (with its subfolders) or of a zip, found by name or by their path inside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        names = self._zip_names() if path.is_file() else [str(p.relative_to(path).as_posix()) for p in path.rglob("*")]
        images = [name for name in sorted(names) if PurePosixPath(name).suffix.lower() in SUFFIXES]
        if not images:
            raise UserError(f"data.path: '{path}' holds no image ({', '.join(SUFFIXES)}); expected {ORIGIN}")
        self.names = images
        """All images by their path inside the folder or zip, sorted."""
        counts = Counter(PurePosixPath(name).name for name in images)
        self._repeated = {name for name, count in counts.items() if count > 1}
        self._paths = {PurePosixPath(name).name: name for name in images} | {name: name for name in images}

    def _zip_names(self) -> list[str]:
        try:
            with zipfile.ZipFile(self.path) as archive:
                return archive.namelist()
        except (zipfile.BadZipFile, OSError) as problem:
            raise UserError(f"{self.path}: cannot be read as .zip ({problem}); expected {ORIGIN}") from None

    def __contains__(self, name: str) -> bool:
        return name in self._paths

    def inside(self, name: str) -> str:
        """Return the path of an image inside the folder or zip; a name that several folders have is refused."""
        if name not in self._paths:
            raise UserError(f"{self.path}: holds no image '{name}'; expected every image that is named")
        if name in self._repeated and name not in self.names:
            raise UserError(f"{self.path}: several folders hold an image '{name}'; expected names with their folder")
        return self._paths[name]

    def read(self, names: Sequence[str], size: int, colours: Literal["rgb", "grey"] = "rgb") -> NDArray[np.uint8]:
        """Decode these images to RGB or grey, shape (images, 3 or 1, size, size)."""
        return self._all(names, size, "L" if colours == "grey" else "RGB")

    def read_masks(self, names: Sequence[str], size: int) -> NDArray[np.uint8]:
        """Decode masks, whose values are classes of pixels: (images, size, size), scaled by nearest pixels."""
        return self._all(names, size, MASK)[:, 0]

    def _all(self, names: Sequence[str], size: int, mode: str) -> NDArray[np.uint8]:
        if find_spec("PIL") is None:
            raise UserError(
                "data.source: reading images needs Pillow; install it with: pip install 'steelyard[images]'"
            )
        decoded = np.empty((len(names), len(mode), size, size), dtype=np.uint8)
        archive = zipfile.ZipFile(self.path) if self.path.is_file() else None
        try:
            for row, name in enumerate(names):
                decoded[row] = self._decode(archive, name, size, mode)
        finally:
            if archive is not None:
                archive.close()
        return decoded

    def _decode(self, archive: zipfile.ZipFile | None, name: str, size: int, mode: str) -> NDArray[np.uint8]:
        # For speed of start: few data sets are image files.
        from PIL import Image

        path = self.inside(name)
        try:
            content = (self.path / path).read_bytes() if archive is None else archive.read(path)
            with Image.open(io.BytesIO(content)) as image:
                if mode == MASK and image.mode not in ("1", "L", "P"):
                    raise UserError(
                        f"{self.path}: mask '{path}' is {image.mode}; expected grey, black and white or a "
                        "palette, each value a class"
                    )
                pixels = np.asarray(_square(image if mode == MASK else image.convert(mode), size, exact=mode == MASK))
                return pixels.reshape(size, size, len(mode)).transpose(2, 0, 1)
        except UserError:
            raise
        # Pillow raises its own error for pictures of absurd size, and SyntaxError for some broken files.
        except Image.DecompressionBombError as problem:
            raise UserError(
                f"{self.path}: image '{path}' is too large ({problem}); expected a smaller picture"
            ) from None
        except (OSError, SyntaxError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
            raise UserError(f"{self.path}: image '{path}' is broken; expected a whole picture") from None


def _square(image: Image, size: int, *, exact: bool = False) -> Image:
    """Cut the central square and scale it to size × size; `exact` takes the nearest pixel, for no value but those."""
    # For speed of start: few data sets are image files.
    from PIL.Image import Resampling

    side = min(image.size)
    if image.size == (size, size):
        return image
    left, top = (image.width - side) // 2, (image.height - side) // 2
    how = Resampling.NEAREST if exact else Resampling.LANCZOS
    return image.resize((size, size), how, box=(left, top, left + side, top + side))


# Images with a mask for each: a class for every pixel, 0 is the background.


IMAGES = ("images", "image", "imgs")
MASKS = ("masks", "mask", "labels")
PAIRS = "images/NAME.png with masks/NAME.png beside it, or OWNER/images/NAME.png with OWNER/masks/NAME.png"


def paired(names: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return (image, mask) of the same name in folders beside each other, and what has no partner."""
    images: dict[tuple[str, ...], str] = {}
    masks: dict[tuple[str, ...], str] = {}
    alone: list[str] = []
    for name in names:
        path = PurePosixPath(name)
        folders = path.parent.parts
        kind = folders[-1].lower() if folders else ""
        where = images if kind in IMAGES else masks if kind in MASKS else None
        if where is None:
            alone.append(name)
        else:
            where[*folders[:-1], path.stem] = name
    alone += [
        name for one, other in ((images, masks), (masks, images)) for key, name in one.items() if key not in other
    ]
    return [(images[key], masks[key]) for key in sorted(images.keys() & masks.keys())], alone


def _numbered(values: NDArray[np.uint8], settings: Images, pictures: Pictures) -> tuple[NDArray[np.uint8], list[str]]:
    """Return masks as numbers of classes, and what the files hold for each; nothing where the settings say it."""
    levels: list[Any] = np.unique(values).tolist()
    if settings.classes is not None:
        if levels[-1] >= settings.classes:
            raise UserError(
                f"{pictures.path}: masks hold {levels[-1]}; expected classes 0 to {settings.classes - 1} (data.classes)"
            )
        return values, []
    if levels[0] != 0:
        levels = [0, *levels]
    if len(levels) < 2:
        raise UserError(f"{pictures.path}: masks hold the background, 0, alone; expected a class of pixels beside it")
    numbers = np.searchsorted(levels, values).astype(np.uint8)
    return numbers, [str(level) for level in levels]
