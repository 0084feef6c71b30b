"""Code that users write: modules and files that an experiment names, loaded once each, and functions in them.

Importing runs a module, so what nobody vouched for is refused before it is imported: an experiment may name a .py file
of the user's own, what an installed package declares under an entry point, what the owner of a node allows by name, and
what a script of the user's own has imported already.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from threading import Lock, RLock
from types import CodeType, ModuleType
from typing import Any, Generic, TypeVar

from steelyard.base.errors import UserError, brief, listed, nearest
from steelyard.base.randomness import stream_key

PYTHON = "python:"
"""How the names of functions begin that were handed over from Python and that no import finds."""

SHIPPED = "steelyard_app.code."
"""How the names of modules begin that an app folder brings along to other machines."""

CRITERIA = "steelyard.criteria"
MODELS = "steelyard.models"
LOSSES = "steelyard.losses"
ALGORITHMS = "steelyard.algorithms"
POLICIES = "steelyard.policies"
SCORES = "steelyard.scores"
"""The entry-point groups under which installed packages declare what experiments may name."""

_loading = RLock()
_given: dict[str, Callable[..., Any]] = {}
"""What was handed over from Python, by the name that stands for it in settings."""
_ruling = Lock()
_rules: list[frozenset[str]] = []
"""The names that each piece of work under way allows; what all of them allow is run."""
_MARK = "__steelyard__"
FactoryT = TypeVar("FactoryT", bound=Callable[..., Any])


class NotAllowed(UserError):
    """An experiment names code that this process does not run; the line holds only what the experiment itself says."""


def _allowed() -> frozenset[str] | None:
    """Return None for any code that was written for this process, or exactly these names."""
    with _ruling:
        return frozenset.intersection(*_rules) if _rules else None


@contextmanager
def only(names: Iterable[str] | None) -> Generator[None]:
    """Run no user code but what these names stand for; use it on a node, where an experiment is data from elsewhere."""
    mine = [] if names is None else [frozenset(names)]
    with _ruling:
        _rules.extend(mine)
    try:
        yield
    finally:
        # Work that outlasted its time ends while other work is under way: it takes its own rules along, no others.
        with _ruling:
            for rule in mine:
                _rules.remove(rule)


def _is_allowed_by_name(code: str) -> bool:
    """Whether the owner of this process named exactly this code as allowed; never so where no rules are set."""
    allowed = _allowed()
    return allowed is not None and code in allowed


def model(factory: FactoryT | None = None) -> FactoryT:
    """Declare a function that builds a network as one that experiments may name in `model.name`.

    It may ask for `feature_shape` (a sample's shape), `classes` and `outputs`, and for what `model.arguments` gives.

        >>> @steelyard.model
        ... def net(feature_shape, outputs): return torch.nn.Linear(feature_shape[0], outputs)

    Raises:
        UserError: what is decorated is no function or class of yours.
    """
    return _marked(factory, "model")


def loss(function: FactoryT | None = None) -> FactoryT:
    """Declare a per-sample loss as one that experiments may name in `training.loss`.

    It is called with outputs [samples, outputs] and labels [samples], and returns one number for each sample.

        >>> @steelyard.loss
        ... def distance(outputs, labels): return (outputs[:, 0] - labels).abs()

    Raises:
        UserError: what is decorated is no function or class of yours.
    """
    return _marked(function, "loss")


def _marked(code: FactoryT | None, kind: str) -> FactoryT:
    if code is None or not callable(code):
        got = "nothing" if code is None else brief(code)
        raise UserError(f"@{kind}: got {got}; allowed: @{kind} above a function or class, without parentheses")
    try:
        setattr(code, _MARK, kind)
    except (AttributeError, TypeError):
        raise UserError(f"@{kind}: got {brief(code)}, which is part of Python; allowed: a function of yours") from None
    return code


def _refuse_forbidden(code: str, field: str) -> None:
    """Refuse code that the rules of this process leave out, and modules that nobody wrote for an experiment."""
    allowed = _allowed()
    if allowed is not None and code not in allowed and code not in {name.rpartition(":")[0] for name in allowed}:
        raise NotAllowed(
            f"{field}: '{code[:80]}' is not run here; allowed: what is built in, and what the node's own `allow` names"
        )
    if not code.endswith(".py"):
        if code.partition(".")[0] in sys.stdlib_module_names:
            raise NotAllowed(f"{field}: '{code[:80]}' is part of Python; allowed: code written for Steelyard")
    elif _is_library(Path(code)):
        raise NotAllowed(f"{field}: '{code[:80]}' belongs to an installed library; allowed: a file of your own")


def _is_library(file: Path) -> bool:
    """Whether a file belongs to Python or to an installed package."""
    path = file.resolve()
    folders = {Path(folder).resolve() for folder in sysconfig.get_paths().values() if folder}
    library = (folder for folder in folders if folder.name.startswith(("python", "site", "dist")))
    return not {"site-packages", "dist-packages"}.isdisjoint(path.parts) or any(map(path.is_relative_to, library))


def _refuse_undeclared(module: str, name: str | None, field: str, group: str) -> None:
    """Refuse a module that nobody vouched for, before it is imported; `name` is what is wanted of it, if one thing."""
    whole = module if name is None else f"{module}:{name}"
    if _is_allowed_by_name(whole) or _is_loaded(module):
        return
    # An entry point of a whole module has no name in it.
    declared = {point.attr or None for point in entry_points(group=group) if point.module == module}
    if not declared if name is None else declared.isdisjoint((None, name)):
        # The line may go from a node to its server, so it does not say what is declared here.
        file = "path/to/file.py" if name is None else "path/to/file.py:name"
        raise NotAllowed(
            f"{field}: '{whole[:80]}' is not declared for Steelyard; allowed: '{file}' of your own, or what an "
            f"installed package declares under the entry point {group}"
        )


def _is_loaded(module: str) -> bool:
    """Whether a module is here already and is the user's own, or came with the app that runs here."""
    if module.startswith(SHIPPED):
        return app_is_loaded()
    file = getattr(sys.modules.get(module), "__file__", None)
    return file is not None and not _is_library(Path(file))


def is_ours(code: object) -> bool:
    """Whether a function or class is the library's own, not a user's."""
    return (getattr(code, "__module__", None) or "").startswith("steelyard.")


def app_is_loaded() -> bool:
    """Whether this process runs the app whose modules begin with `SHIPPED`; elsewhere nothing may be imported of it."""
    return SHIPPED.partition(".")[0] in sys.modules


@cache
def _declared(path: tuple[str, ...]) -> Any:
    """Return what the packages on a path offer, under all groups: they are gone through once, which takes 15 ms."""
    return entry_points()


@cache
def load_entry_points(group: str) -> None:
    """Import what installed packages offer under an entry-point group; runs once for each."""
    found: Iterable[EntryPoint] = _declared(tuple(sys.path)).select(group=group)
    for point in found:
        try:
            point.load()
        except Exception as error:
            raise UserError(f"entry point {group}: '{point.name}' ({point.value}) does not load: {error}") from error


def load_code(code: str, field: str, group: str, name: str | None = None) -> ModuleType:
    """Import a user's module by dotted name or by the path of a .py file; `field` is who asks, for the error line.

    Use it for every piece of user code, so that a file named twice is run once. A dotted module must be declared under
    the entry-point group, where `name` is given with that name or as a whole.
    """
    _refuse_forbidden(code, field)
    if not code.endswith(".py"):
        _refuse_undeclared(code, name, field, group)
        try:
            return importlib.import_module(code)
        except UserError:
            raise
        except (Exception, SystemExit) as error:
            raise UserError(f"{field}: cannot import '{code}': {type(error).__name__}: {error}") from error
    path = Path(code).resolve()
    if not path.is_file():
        raise UserError(f"{field}: there is no file '{code}'; allowed: the path of a Python file, or a module name")
    alias = f"steelyard_user_{path.stem}_{stream_key(0, purpose=str(path)):x}"
    with _loading:  # threads that train ask for a loss at the same time
        if alias in sys.modules:
            return sys.modules[alias]
        return _run(alias, path, code, field)


class _Source(SourceFileLoader):
    """Runs a file as it was read: bytecode beside it may be of another, and its folder a link."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _run(name: str, path: Path, code: str, field: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path, loader=_Source(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        if isinstance(error, UserError):
            raise
        raise UserError(f"{field}: '{code}' fails when loaded: {type(error).__name__}: {error}") from error
    return module


def origin(code: Any) -> str:
    """Return the name by which a table knows code again; what a notebook defines anew takes the old one's place."""
    notebook = code.__module__ == "__main__" and not hasattr(sys.modules["__main__"], "__file__")
    return "this notebook" if notebook else code.__qualname__


def hand_over(factory: Callable[..., Any]) -> str:
    """Return a name under which `find_code` finds what was given from Python; use it to name a model in settings."""
    module, name = getattr(factory, "__module__", ""), getattr(factory, "__qualname__", repr(factory))
    if module and module != "__main__" and "<" not in name:
        path = f"{module}:{name}"
        if _attribute(sys.modules.get(module), name) is factory:
            _given[path] = factory
            return path
    first = path = f"{PYTHON}{name}"
    number = 1
    while _given.get(path, factory) is not factory:  # another lambda, say, or a function that was defined anew
        number += 1
        path = f"{first}#{number}"
    _given[path] = factory
    return path


def hand_over_as(name: str, function: Callable[..., Any]) -> None:
    """Let a name of `hand_over`, from an earlier process, stand for a function again, if it is the function's name."""
    own = getattr(function, "__qualname__", repr(function))
    if name in (hand_over(function), f"{PYTHON}{own}") or name.startswith(f"{PYTHON}{own}#"):
        _given[name] = function


def is_handed_over(name: str) -> bool:
    """Whether a name stands for what this process was given from Python, which nothing need be imported for."""
    return name in _given


def refuse_unknown(name: str, field: str, known: Sequence[str]) -> None:
    """Refuse a name that is neither built in nor written like code of the user's own; nothing is imported for it.

    Use it when settings are read, so that a slip is reported before any data is loaded or any point of a grid has run.
    """
    if name not in known and not name.rpartition(":")[0]:
        raise UserError(
            f"{field}: got '{name}'{nearest(name, known)}; allowed: {listed(known)}, "
            "'package.module:name' or 'path/to/file.py:name'"
        )


def find_code(
    name: str, field: str, known: Sequence[str], fits: Callable[[Any], bool] = lambda found: False
) -> Callable[..., Any]:
    """Return what "module:name", "file.py:name" or a handed-over name stands for; use it for user-written code.

    A module must be declared for this before it is imported, and a name in it written for it: marked with `model` or
    `loss`, or of a class that `fits`; in a file of the user's own, it must be defined there. So no experiment can
    import any module, or call any function of any library.
    """
    allowed = _allowed()
    if allowed is not None and ":" in name and name not in allowed:
        raise NotAllowed(
            f"{field}: '{name[:80]}' is not run here; allowed: {listed(known)}, and what the node's own `allow` names"
        )
    if is_handed_over(name):
        return _given[name]
    if name.startswith(PYTHON):
        raise UserError(
            f"{field}: '{name}' was handed over from Python and is not known to this process; allowed: go on in "
            "Python, with steelyard.resume(folder, given=[the function])"
        )
    refuse_unknown(name, field, known)
    source, _, attribute = name.rpartition(":")
    kind, group = ("loss", LOSSES) if field.endswith("loss") else ("model", MODELS)
    module = load_code(source, field, group, attribute)
    found = _attribute(module, attribute)
    if not callable(found):
        raise UserError(f"{field}: {source} has no function or class '{attribute}'")
    file = source.endswith(".py") or source.startswith(SHIPPED)
    own = file and getattr(found, "__module__", None) == module.__name__
    if not own and not hasattr(found, _MARK) and not fits(found):
        raise NotAllowed(
            f"{field}: {name} was not written for this; allowed: a torch.nn.Module, a function marked with "
            f"@steelyard.{kind}, or one defined in a .py file of your own"
        )
    return found


def _attribute(holder: object, dotted: str) -> Any:
    for part in dotted.split("."):
        holder = getattr(holder, part, None)
    return holder


# A table of things by name that packages and users can add to: criteria and algorithms.


T = TypeVar("T")


class Registry(Generic[T]):
    """What is built in, what installed packages declare under an entry point, and what plugins define, by name.

    Two experiments of one process may give one name to two things; whoever looks up last names its plugins.
    """

    def __init__(self, what: str, group: str, origin: Callable[[T], str]) -> None:
        self.what, self.group = what, group
        self._origin = origin
        """From an entry to the name of its code: the same code may be registered again, other code may not."""
        self._entries: dict[str, T] = {}
        self._plugged: dict[str, dict[str, T]] = {}

    def add(self, name: str, entry: T) -> None:
        """Put an entry into the table; a name that is taken by other code is refused."""
        known = self._entries.get(name)
        if known is not None and self._origin(known) != self._origin(entry):
            raise UserError(
                f"{self.what} {name}: registered twice, by {self._origin(known)} and {self._origin(entry)}; "
                "give one of them another name"
            )
        self._entries[name] = entry

    def load(self, sources: Sequence[str]) -> None:
        """Make what these scripts or modules define known, and no longer what other plugins define."""
        for source, defined in self._plugged.items():
            if source not in sources:
                for name, entry in defined.items():
                    if self._entries.get(name) is entry:
                        del self._entries[name]
        for source in sources:
            if source in self._plugged:
                for name, entry in self._plugged[source].items():
                    self.add(name, entry)
            else:
                before = dict(self._entries)
                load_code(source, "plugin", self.group)
                changed = {name: entry for name, entry in self._entries.items() if before.get(name) is not entry}
                self._plugged[source] = changed

    def known(self) -> dict[str, T]:
        """Return all entries by name."""
        load_entry_points(self.group)
        return dict(self._entries)

    def get(self, name: str) -> T:
        """Return the entry of that name, or say which names there are."""
        table = self.known()
        if name not in table:
            raise UserError(f"{self.what} '{name}' is not known{nearest(name, table)}; known: {listed(table)}")
        return table[name]
