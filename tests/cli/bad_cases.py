"""Bad input of every kind: what is typed, what stands in the files, and the words that the answer must hold."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Content = str | bytes

LEARN = """name = "t"
[partition]
clients = 4
[model]
name = "logistic"
[rounds]
count = 1
[compute]
engine = "loop"
"""
RECOMMEND = """kind = "recommend"
name = "t"
[interactions]
path = "ratings.tsv"
[fpl]
factors = 3
[rounds]
epochs = 1
"""
_RATINGS = [f"u{u}\ti{(u * 3 + k) % 12}\t{1 + (u + k) % 5}\t{k}" for u in range(8) for k in range(6)]
HEAD = "user\titem\trating\n"
TRAIN = HEAD + "".join(f"u{u}\ti{k}\t{1 + k % 5}\n" for u in range(5) for k in range(4))
TEST = HEAD + "".join(f"u{u}\ti{k}\t{1 + k % 5}\n" for u in range(5) for k in range(4, 6))
LISTS = "user\titem\tscore\n" + "".join(f"u{u}\ti{k}\t{9 - k}\n" for u in range(5) for k in range(4, 8))
TABLE = "client,DS,LD\nA,.9,.2\nB,.1,.8\n"
BASE: Mapping[str, Content] = {
    "learn.toml": LEARN,
    "rec.toml": RECOMMEND,
    "ratings.tsv": "user\titem\trating\ttime\n" + "\n".join(_RATINGS) + "\n",
    "train.tsv": TRAIN,
    "test.tsv": TEST,
    "lists.tsv": LISTS,
    "clients.csv": TABLE,
}
"""Files that every case finds beside its own."""
LONG = "a" * 5000
DIGITS = "9" * 5000


@dataclass(frozen=True)
class Case:
    """A command that must be refused: one line that holds the words, exit code 2, no run folder."""

    name: str
    arguments: tuple[str, ...]
    words: tuple[str, ...]
    files: Mapping[str, Content] = field(default_factory=dict[str, Content])


def _fields() -> list[Case]:
    """Fields of an experiment: numbers, names, criteria, models."""
    learning: dict[str, str] = {
        "rounds.count=0": "rounds.count: got 0",
        "rounds.count=true": "rounds.count: got true; allowed: a whole number",
        "rounds.count=1.5": "a whole number",
        "rounds.count=many": "'many'; allowed: a whole number",
        "rounds.count=1e300": "rounds.count",
        "rounds.count=inf": "rounds.count: got inf",
        "rounds.count=1000000000000": "less than or equal to 10000000",
        f"rounds.count={DIGITS}": "at most 18 digits",
        "rounds.fraction=0": "rounds.fraction",
        "rounds.fraction=nan": "rounds.fraction: got nan",
        "rounds.fraction=true": "a number",
        "rounds.min_clients=5": "rounds.min_clients: got 5; allowed: at most 4",
        "rounds.min_clients=100000000": "at most 4",
        "rounds.targets=[true]": "rounds.targets",
        "rounds.targets=0.5": "allowed: a list",
        "rounds.target=2": "rounds.target",
        "rounds.stop_at_target=3": "true or false",
        "rounds=1": "a section of fields",
        "seed=-1": "seed: got -1",
        "seed=99999999999999999999": "at most 18 digits",
        "seed=x": "a whole number",
        "name=''": "name: got ''",
        "name='../x'": "letters, digits",
        f"name={LONG}": "up to 100 letters",
        "name='a\x1b[31m'": "\\x1b[31m",
        "kind=x": "kind",
        "kind=['x']": "kind",
        "partition.clients=100000000": "less than or equal to 1000000",
        "partition.clients=0": "partition.clients",
        "partition.clients=899": "at most 898",
        "partition.clients=true": "a whole number",
        "partition.samples=1000000": "partition.samples",
        "partition.minimum=1000000": "1797 rows",
        "partition.alpha=0": "partition.alpha",
        "partition.alpha=inf": "a finite number",
        "partition.scheme=natural": "partition.scheme",
        "partition.scheme=given": "with scheme 'given'",
        "partition.scheme=iidd": "did you mean 'iid'",
        "partition.server=held-out": "partition.server",
        "partition.table=[[1,true]]": "partition.table",
        "partition.test_fraction=1": "partition.test_fraction",
        "model.name=''": "model.name: got ''",
        "model.name='x:'": "is not declared for Steelyard",
        "model.name=':x'": "model.name: got ':x'",
        "model.name='os:getcwd'": "'os' is part of Python",
        "model.name='x.py:y'": "there is no file",
        "model.name=logstic": "did you mean 'logistic'",
        "model.name=3": "model.name: got 3; allowed: text",
        "model.hidden=[5]": "model.hidden: got [5] with model.name 'logistic'",
        "model.kernel=3": "model.kernel: got 3 with model.name 'logistic'",
        "model.outputs=3": "model.outputs: got 3 for 10 classes",
        "model.outputs=1000000000": "model.outputs",
        "model={name='mlp',hidden=[1000000,1000000]}": "parameters; allowed: at most 1,000,000,000",
        "model={name='cnn',kernel=2}": "an odd number",
        "model.outputs=1": "model.outputs: got 1 for 10 classes",
        "training.loss=squared": "did you mean 'squared-error'",
        "training.loss=barron": "allowed: 1 output",
        "training.batch_size=0": "training.batch_size: got 0; allowed: greater than or equal to 1, 'full'",
        "training.batch_size=[]": "training.batch_size: got []; allowed: a whole number, 'full'",
        "training.batch_size=true": "training.batch_size",
        "training.learning_rate=1e300": "numbers up to 1e30",
        "training.learning_rate=inf": "a finite number",
        "training.learning_rate=-1": "training.learning_rate",
        "training.epochs=1000000000000": "less than or equal to 100000",
        "training.momentum=1": "less than 1",
        "compute.device=tpu": "compute.device",
        "compute.device='cuda:99'": "compute.device",
        "compute.engine=warp": "compute.engine: got 'warp'",
        "compute.engine='vmap:0'": "compute.engine",
        "compute.threads=100000000": "less than or equal to 1024",
        "compute.memory_gb=1e300": "compute.memory_gb",
        "store.folder=true": "store.folder: got true; allowed: text",
        "store.folder=[]": "store.folder: got []; allowed: text",
        "store.folder='learn.toml'": "is a file",
        "store.checkpoint_every=0": "store.checkpoint_every",
        "federate.nodes=0": "federate.nodes",
        "federate.timeout=inf": "a finite number",
        "data.source=digitz": "did you mean 'digits'",
        "data.path='.'": "data.path",
        "data.path=3": "data.path: got 3; allowed: text",
        "data.classes=3": "data.classes",
        "weighing.criteria=['XX']": "weighing.criteria: criterion 'XX' is not known",
        "weighing={criteria=['CBX','LD'],priority='LD>CBX'}": "criterion 'CBX' is not known (did you mean 'CB'?)",
        "weighing={criteria=['XX'],priority='DS>LD'}": "one of your own: name its file in weighing.plugins",
        "beside.other.criteria=['XX']": "beside.other.criteria: criterion 'XX' is not known",
        "weighing.policy.name=mine": "or a criterion in a file that weighing.plugins names",
        "weighing.criteria=DS": "allowed: a list",
        "weighing.criteria=[]": "at least 1 value",
        "weighing.criteria=['DS','DS']": "each criterion once",
        "weighing.criteria=['[/b]']": "criterion '[/b]' is not known",
        "weighing.criteria=['VP']": "VP is measured on the server's test set",
        "weighing.criteria=[1]": "weighing.criteria.0: got 1; allowed: text",
        "weighing.name=' x'": "printable characters",
        "weighing.name='\x1b[31mx'": "\\x1b[31mx",
        f"weighing.name='{LONG}'": "1 to 200 printable characters",
        "beside.'a#b'.criteria=['DS']": "without '#'",
        "beside.DS.criteria=['DS']": "the name of the main rule",
        "beside.x=1": "a section of fields",
        "weighing.plugins=['no.py']": "there is no file",
        "weighing.plugins=['']": "plugin: ",
        "weighing.power=2": "allowed only with power",
        "weighing={score='power',power=nan}": "weighing.power: got nan",
        "flaws=1": "allowed: a list",
        "flaws=[{kind='noisyy'}]": "did you mean 'noisy'",
        "flaws=[{kind='noisy',amount=true,pick='random',count=1}]": "flaws.0.amount: got true",
        "rounds.cuont=1": "did you mean 'count'",
        "plugins=['own.py']": "plugins: unknown field (did you mean 'algorithm.plugins' or 'weighing.plugins'?)",
        "weighing={criteria=['XX'],plugin=['own.py']}": "weighing.plugin: unknown field (did you mean 'plugins'?)",
        "rounds.learning_rate=1": "rounds.learning_rate: unknown field (did you mean 'training.learning_rate'?)",
        "ronds.count=1": "unknown field (did you mean 'rounds'?)",
        "rounds.count": "section.field=value",
        "=1": "section.field=value",
        "rounds..count=1": "section.field=value",
        "name.x=1": "is a single value",
        "rounds.count=1\nseed=2": "a whole number",
    }
    recommending: dict[str, str] = {
        "interactions.core=100": "core",
        "interactions.core=-1": "interactions.core",
        "interactions.threshold=1e300": "interactions.threshold",
        "interactions.threshold=nan": "a finite number",
        "interactions.share=1": "interactions.share",
        "interactions.path='no'": "no",
        "interactions.path='.'": "file",
        "interactions.columns={user='x'}": "not in the header",
        "interactions.category_column='x'": "category_column",
        "interactions.pi_column='x'": "pi_column",
        "interactions.catalogue='no'": "found no 'no'",
        "items={path='ratings.tsv',title=99}": "columns",
        "items={path='no'}": "found no 'no'",
        "knowledge={sources=[]}": "knowledge.sources: got",
        "knowledge={sources=[{path='x'}],hops=0}": "knowledge.hops: got 0",
        "knowledge={sources=[{path='x',format='owl'}]}": "knowledge.sources.0.format: got 'owl'",
        "knowledge={sources=[{path='x'}],max_share=nan}": "knowledge.max_share",
        "fpl.factors=1000000000": "less than or equal to 10000",
        "fpl.factors=0": "fpl.factors",
        "fpl.learning_rate=inf": "fpl.learning_rate",
        "fpl.mode=qFPL": "fpl.mode",
        "fpl.mode=custom": "triples",
        "fpl={mode='custom',triples=100000000000000}": "fpl.triples",
        "fpl.pi=nan": "fpl.pi",
        "fpl.pi=true": "fpl.pi: got true; allowed: a number",
        "fpl.decoys=1e9": "fpl.decoys",
        "fpl.decoys=inf": "fpl.decoys",
        "fpl.threads=1000000": "fpl.threads",
        "ranking.cutoff=1000000000": "ranking.cutoff",
        "ranking.cutoff=0": "ranking.cutoff",
        "rounds.epochs=1000000000000": "rounds.epochs",
        "rounds.min_clients=100": "at most 8",
        "weighing.criteria=['VP']": "VP",
        "partition.clients=3": "unknown field",
    }
    cases = [
        Case(f"set {text[:40]!r}", ("run", "learn.toml", "--set", text), (told,)) for text, told in learning.items()
    ]
    cases += [
        Case(f"recommend set {text[:40]!r}", ("run", "rec.toml", "--set", text), (told,))
        for text, told in recommending.items()
    ]
    return cases


def _configs() -> list[Case]:
    """Experiment files that are no such files."""
    contents: dict[str, tuple[Content, str]] = {
        "binary": (bytes(range(128, 256)), "text"),
        "utf-16": (LEARN.encode("utf-16"), "text"),
        "latin-1": ("name = 'é'".encode("latin-1"), "text"),
        "duplicate key": ("name = 'a'\nname = 'b'", "not valid TOML"),
        "unclosed": ("[data", "not valid TOML"),
        "digits": (f"seed = {DIGITS}", "thousands of digits"),
        "deep": ("a = " + "[" * 5000, "nested too deeply"),
        "markup": ("'[/b]' = 1", "[/b]: unknown field"),
        "control": ('"\\u001b[31m" = 1', "\\x1b[31m: unknown field"),
        "tables": ("[[data]]\nsource = 'digits'", "a section of fields"),
        "date": ("name = 2020-01-01", "name"),
        "bool": ("partition = true", "a section of fields"),
        "text": ("data = 'digits'", "a section of fields"),
        "kind": ("kind = 'learn'", "kind"),
    }
    return [
        Case(f"config {name}", ("run", "bad.toml"), (told,), {"bad.toml": content})
        for name, (content, told) in contents.items()
    ]


def _data(name: str, settings: str, told: str, files: Mapping[str, Content], partition: str = "clients = 4") -> Case:
    text = f"[data]\n{settings}\n" + LEARN.replace('name = "t"\n', "", 1).replace("clients = 4", partition)
    return Case(f"data {name}", ("run", "bad.toml"), (told,), {"bad.toml": text, **files})


def _npz(**arrays: Any) -> bytes:
    packed = io.BytesIO()
    np.savez(packed, **arrays)
    return packed.getvalue()


def _npz_cases() -> list[Case]:
    chance = np.random.default_rng(0)
    x = chance.normal(size=(60, 3))
    y = (x[:, 0] > 0).astype(np.int64)
    natural = 'scheme = "natural"'
    cases: dict[str, tuple[bytes, str, str]] = {
        "objects": (_npz(x=np.array([{}] * 60, dtype=object), y=y), "clients = 4", "Python objects"),
        "pickle": (pickle.dumps([1]), "clients = 4", "Python objects, or is no such file"),
        "text file": (b"hello", "clients = 4", "or is no such file"),
        "empty": (b"", "clients = 4", "cut off or damaged"),
        "broken zip": (b"PK\x03\x04" + b"x" * 50, "clients = 4", "cut off or damaged"),
        "complex": (_npz(x=x.astype(complex), y=y), "clients = 4", "complex numbers"),
        "words": (_npz(x=x.astype(str), y=y), "clients = 4", "features is text"),
        "complex labels": (_npz(x=x, y=y.astype(complex)), "clients = 4", "neither numbers nor text"),
        "dates as labels": (_npz(x=x, y=y.astype("m8[s]")), "clients = 4", "neither numbers nor text"),
        "nan": (_npz(x=np.where(x > 0, x, np.nan), y=y), "clients = 4", "nan or infinite"),
        "no rows": (_npz(x=x[:0], y=y[:0]), "clients = 4", "no rows"),
        "one axis": (_npz(x=x[:, 0], y=y), "clients = 4", "two or more axes"),
        "a number": (_npz(x=np.array(1.0), y=y), "clients = 4", "two or more axes"),
        "no columns": (_npz(x=x[:, :0], y=y), "clients = 4", "at least one number per row"),
        "labels in a table": (_npz(x=x, y=y[:, None]), "clients = 4", "one per row"),
        "labels missing": (_npz(x=x), "clients = 4", "found no 'y'"),
        "labels nan": (_npz(x=x, y=np.where(y, np.nan, 0.0)), "clients = 4", "nan or infinity"),
        "labels infinite": (_npz(x=x, y=np.where(y, np.inf, 0.0)), "clients = 4", "nan or infinity"),
        "labels fractions": (_npz(x=x, y=y / 2), "clients = 4", "fractions"),
        "labels huge": (_npz(x=x, y=y + 10**9), "clients = 4", "labels run up to"),
        "records": (_npz(x=np.zeros(60, dtype=[("a", "f4")]), y=y), "clients = 4", "two or more axes"),
        "owners nan": (_npz(x=x, y=y, owner=np.where(y, 1.0, np.nan)), natural, "has no owner"),
        "owners empty": (_npz(x=x, y=y, owner=np.array(["", "a"] * 30)), natural, "has no owner"),
        "owners in a table": (_npz(x=x, y=y, owner=x), natural, "owners has shape"),
        "one row each": (_npz(x=x, y=y, owner=np.arange(60)), natural, "partition.minimum"),
    }
    made = [
        _data(f"npz {name}", 'source = "npz"\npath = "d.npz"', told, {"d.npz": content}, partition)
        for name, (content, partition, told) in cases.items()
    ]
    made.append(_data("npz missing", 'source = "npz"\npath = "no.npz"', "found no 'no.npz'", {}))
    made.append(_data("npz folder", 'source = "npz"\npath = "."', "cannot be read", {}))
    made.append(_data("npz path too long", f'source = "npz"\npath = "{LONG}"', "File name too long", {}))
    return made


def _table(labels: list[Any] | None = None, owners: list[Any] | None = None, header: str = "a,b,target,own") -> str:
    labels = [i % 2 for i in range(60)] if labels is None else labels
    owners = ["abc"[i % 3] for i in range(60)] if owners is None else owners
    rows = [f"{i / 7:.3f},{(i * 3 % 7) / 3:.3f},{labels[i]},{owners[i]}" for i in range(60)]
    return "\n".join([header, *rows]) + "\n"


def _csv_cases() -> list[Case]:
    both = 'source = "csv"\npath = "d.csv"\nlabels = "target"\nowner = "own"\n'
    contents: dict[str, tuple[Content, str, str]] = {
        "binary": (bytes(range(128, 256)) * 9, "", "UTF-8"),
        "nul": (b"\0" * 100, "", "not a text file"),
        "utf-16": (_table().encode("utf-16"), "", "UTF-8"),
        "empty": ("", "", "is empty"),
        "header only": ("a,b,target,own\n", "", "no rows"),
        "no header": (_table().split("\n", 1)[1], "", "not column names"),
        "owner empty": (_table(owners=["" if i == 7 else "a" for i in range(60)]), "", "data.owner"),
        "one label": (_table(labels=[1] * 60), "", "two classes"),
        "fractions": (_table(labels=[0.5] * 60), "", "holds 0.5"),
        "label empty": (_table(labels=["", *[0, 1] * 29, 1]), "", "is empty in row 1"),
        "duplicate column": (_table(header="a,a,target,own"), "", "'a' 2 times"),
        "nameless column": (_table(header=",b,target,own"), "", "has no name"),
        "ragged": (_table() + "1,2,3\n", "", "cells"),
        "huge number": (_table() + "1e300,0,1,a\n", "", "'1e+300'"),
        "no such label": (_table(header="a,b,t,own"), "", "found no column 'target'"),
        "label is owner": (_table(), 'ignore = ["a", "b"]', "no column is left"),
        "many classes asked": (_table(), "classes = 100000000", "classes"),
        "label inf": (_table() + "1,0,inf,a\n", "", "holds 'inf' in row 61; expected finite numbers"),
        "no levels": (_table(), "levels = {a = []}", "data.levels.a"),
        "threshold nan": (_table(), "positive_above = nan", "a finite number"),
    }
    return [
        _data(f"csv {name}", both + extra, told, {"d.csv": content}, 'scheme = "natural"')
        for name, (content, extra, told) in contents.items()
    ]


def _leaf(users: list[Any], count: int = 6, label: Any = None, row: Any = None) -> dict[str, Any]:
    x = [[k, 1.0] if row is None else row for k in range(count)]
    y = [k % 2 if label is None else label for k in range(count)]
    return {"users": users, "num_samples": [count] * len(users), "user_data": {str(u): {"x": x, "y": y} for u in users}}


def _leaf_cases() -> list[Case]:
    good = _leaf(["a", "b"], 2)
    contents: dict[str, tuple[Content | dict[str, Any], str]] = {
        "user without rows": ({**_leaf(["a"]), "users": ["a", "b"], "num_samples": [6, 6]}, "user 'b' lacks"),
        "user twice": (_leaf(["a", "a"]), "more than once"),
        "user nameless": (_leaf([""]), "expected users as text"),
        "user a number": (_leaf([1]), "expected users as text"),
        "counts": ({**_leaf(["a"]), "num_samples": [5]}, "expected 5"),
        "no users": (_leaf([]), "users"),
        "negative labels": (_leaf(["a", "b"], label=-1), "labels run from -1"),
        "labels null": (_leaf(["a"], label={}), "not whole numbers"),
        "labels huge": (_leaf(["a"], label=10**6), "labels run up to"),
        "nobody in both parts": (_leaf(["c"]), "both to train and to test on"),
        "rows of words": ({**_leaf(["a"], row="word")}, "rows x"),
        "rows empty": (_leaf(["a"], row=[]), "rows"),
        "rows of objects": (_leaf(["a"], row={"a": 1}), "not lists of numbers"),
        "not JSON": ("{", "not JSON"),
        "binary": (bytes(range(128, 256)), "not a text file"),
        "deep": ("[" * 100_000, "nested too deeply"),
        "digits": ('{"users": [' + DIGITS + "]}", "thousands of digits"),
        "a list": ("[]", "no JSON object"),
    }
    return [
        _data(
            f"leaf {name}",
            'source = "leaf"\npath = "d"',
            told,
            {
                "d/train/a.json": json.dumps(content) if isinstance(content, dict) else content,
                "d/test/a.json": json.dumps(_leaf([]) if name == "no users" else good),
            },
            'scheme = "given"\ntest = "held-out"',
        )
        for name, (content, told) in contents.items()
    ]


def _idx_cases() -> list[Case]:
    images = struct.pack(">IIII", 2051, 60, 4, 4) + bytes(60 * 16)
    labels = struct.pack(">II", 2049, 60) + bytes(i % 2 for i in range(60))
    contents: dict[str, tuple[bytes, bytes, str]] = {
        "swapped": (labels, images, "magic number"),
        "cut off": (images[:-5], labels, "cut off"),
        "too long": (images + b"x", labels, "expected 960"),
        "absurd shape": (struct.pack(">IIII", 2051, 2**31, 2**15, 2**15) + bytes(50), labels, "cut off"),
        "empty": (b"", b"", "starts with nothing"),
        "no rows": (struct.pack(">IIII", 2051, 0, 4, 4), struct.pack(">II", 2049, 0), "holds nothing"),
        "no width": (struct.pack(">IIII", 2051, 60, 4, 0), labels, "holds nothing"),
        "packed": (gzip.compress(images), labels, "magic number"),
        "fewer labels": (images, struct.pack(">II", 2049, 59) + bytes(59), "one per image"),
        "label 255": (images, struct.pack(">II", 2049, 60) + bytes([255] * 60), "label 255"),
    }
    return [
        _data(
            f"idx {name}",
            'source = "mnist"\npath = "d"',
            told,
            {
                f"d/{part}-{kind}-ubyte": content
                for part in ("train", "t10k")
                for kind, content in (("images-idx3", first), ("labels-idx1", second))
            },
        )
        for name, (first, second, told) in contents.items()
    ]


def _interactions() -> list[Case]:
    """Files of interactions, as `split` reads them and as `evaluate` does."""
    contents: dict[str, tuple[Content, str]] = {
        "empty": ("", "the file is empty"),
        "one column": ("user\nu1\n", "separators"),
        "empty cell": (HEAD + "u0\t\t3\n", "item is ''"),
        "rating nan": (HEAD + "u0\ti1\tnan\n", "'nan'"),
        "rating infinite": (HEAD + "u0\ti1\tinf\n", "'inf'"),
        "rating a word": (HEAD + "u0\ti1\tx\n", "'x'"),
        "decimal comma": ("user;item;rating\nu0;i1;3,5\n", "'3,5'"),
        "header only": (HEAD, "no rows"),
        "user twice": ("user\tuser\titem\n1\t2\t3\n", "more than once"),
        "time a word": ("user\titem\trating\ttime\nu\ti\t1\tx\n", "seconds since 1970"),
        "ragged": (HEAD + "u\ti\t1\nu\ti\t1\t2\t3\n", "fields"),
    }
    return [
        Case(f"ratings {name}", ("recommend", "split", "bad.tsv", "--out", "o"), (told,), {"bad.tsv": content})
        for name, (content, told) in contents.items()
    ]


_KNOWN: list[tuple[str, str, dict[str, Content]]] = [
    ("nowhere", "found no 'k.tsv'", {}),
    ("empty", "k.tsv: the file is empty", {"k.tsv": "\n\n"}),
    ("of no item", "k.tsv: line 2: begins with '2' after no item", {"k.tsv": "7\t1\t2\n\t2\n"}),
    ("of a folder", "k.tsv: no such file", {"k.tsv/x": ""}),
    ("of three columns", "3 columns without a header", {"k.tsv": "a\tb\tc\n"}),
    ("binary", "expected", {"k.tsv": b"\0\xff\0\n\t\n"}),
]


def _recommending() -> list[Case]:
    split = ("recommend", "split", "ratings.tsv", "--out", "o")
    evaluate = ("recommend", "evaluate", "--train", "train.tsv", "--test", "test.tsv", "--recommendations", "lists.tsv")
    baseline = ("recommend", "baseline", "popular", "--train", "train.tsv", "--out", "new.tsv")
    vsm = ("recommend", "baseline", "vsm", *baseline[3:])
    k_toml = RECOMMEND + '[[knowledge.sources]]\npath = "k.tsv"\n'
    audit = ("recommend", "audit", "rec.toml")
    cost = ("recommend", "cost", "--users", "10", "--items", "10", "--interactions", "10")
    return [
        Case("split core", (*split, "--core", "1000000000"), ("nothing is left",)),
        Case("split core below 0", (*split, "--core", "-1"), ("'--core'",)),
        Case("split threshold", (*split, "--threshold", "1e300"), ("nothing is left",)),
        Case("split share 0", (*split, "--share", "0"), ("share",)),
        Case("split share nan", (*split, "--share", "nan"), ("share",)),
        Case("split count", (*split, "--count", "0", "--kind", "newest"), ("count",)),
        Case("split kind", (*split, "--kind", "tempral"), ("'--kind'",)),
        Case("split seed", (*split, "--seed", "x"), ("'--seed'",)),
        Case("split here", ("recommend", "split", "ratings.tsv", "--out", ""), ("--out",)),
        Case("split into a file", (*split[:-1], "train.tsv"), ("is a file",)),
        Case("split again", (*split[:-1], "old"), ("exists already",), {"old/test.tsv": ""}),
        Case("evaluate cutoff 0", (*evaluate, "--cutoff", "0"), ("--cutoff: got '0'",)),
        Case("evaluate cutoff absurd", (*evaluate, "--cutoff", "1000000000"), ("1 to 10,000",)),
        Case("evaluate cutoff digits", (*evaluate, "--cutoff", DIGITS), ("--cutoff",)),
        Case("evaluate cutoff empty", (*evaluate, "--cutoff", ""), ("--cutoff: got ''",)),
        Case("evaluate threshold nan", (*evaluate, "--threshold", "nan"), ("finite",)),
        Case("evaluate threshold high", (*evaluate, "--threshold", "100"), ("no test interaction",)),
        Case("evaluate train is test", (*evaluate, "--test", "train.tsv"), ("is --train too",)),
        Case("evaluate train is lists", (*evaluate, "--recommendations", "train.tsv"), ("is --train too",)),
        Case("evaluate no file", (*evaluate, "--catalogue", "no.tsv"), ("no such file",)),
        Case(
            "evaluate catalogue too small",
            (*evaluate, "--catalogue", "c.tsv"),
            ("not in the cat",),
            {"c.tsv": "item\n1\n"},
        ),
        Case("baseline unknown", ("recommend", "baseline", "populr", *baseline[3:]), ("did you mean 'popular'",)),
        Case("baseline setting", (*baseline, "--set", "factors=3"), ("has no 'factors'",)),
        Case(
            "baseline neighbours",
            ("recommend", "baseline", "item-knn", *baseline[3:], "--set", "neighbours=0"),
            ("1 to",),
        ),
        Case(
            "baseline factors",
            ("recommend", "baseline", "fcf", *baseline[3:], "--set", "factors=1000000000"),
            ("1 to",),
        ),
        Case("baseline rate", ("recommend", "baseline", "fcf", *baseline[3:], "--set", "rate=nan"), ("rate is nan",)),
        Case("baseline cutoff", (*baseline, "--cutoff", "0"), ("--cutoff",)),
        Case("baseline over a file", (*baseline[:-1], "train.tsv"), ("exists already",)),
        Case("baseline into a folder", (*baseline[:-1], "."), ("a new file",)),
        Case("baseline nowhere", (*baseline[:-1], "no/such/new.tsv"), ("there is no folder",)),
        Case("baseline without knowledge", vsm, ("--knowledge: vsm needs it",)),
        Case("baseline with knowledge", (*baseline, "--knowledge", "rec.toml"), ("popular looks at no features",)),
        Case("vsm of nothing", (*vsm, "--knowledge", "rec.toml"), ("no section [knowledge]",)),
        Case("features of nothing", ("recommend", "features", "rec.toml"), ("has no section [knowledge]",)),
        Case("features of learning", ("recommend", "features", "learn.toml"), ("has no section [knowledge]",)),
        Case(
            "features of an item",
            ("recommend", "features", "k.toml", "--item", "x"),
            ("--item: got 'x'; allowed: one of",),
            {"k.toml": k_toml, "k.tsv": "1\t1\t2\n"},
        ),
        *(
            Case(f"knowledge {name}", ("recommend", "features", "k.toml"), (told,), {"k.toml": k_toml, **files})
            for name, told, files in _KNOWN
        ),
        Case("audit rounds", (*audit, "--rounds", "0"), ("--rounds",)),
        Case("audit rounds digits", (*audit, "--rounds", DIGITS), ("--rounds",)),
        Case("audit pi", (*audit, "--pi", "nan"), ("--pi",)),
        Case("audit decoys", (*audit, "--decoys", "inf"), ("--decoys",)),
        Case("audit decoys absurd", (*audit, "--decoys", "1e9"), ("--decoys",)),
        Case("audit learning", ("recommend", "audit", "learn.toml"), ("not of kind 'recommend'",)),
        Case("cost users", (*cost, "--users", "0"), ("'--users'",)),
        Case("cost pi", (*cost, "--pi", "2"), ("'--pi'",)),
        Case("cost mode", (*cost, "--mode", "x"), ("'--mode'",)),
        Case("top of nothing", ("recommend", "top", "no", "--user", "u1"), ("no",)),
        Case("top of a file", ("recommend", "top", "train.tsv", "--user", "u1"), ("train.tsv",)),
    ]


def _weighing() -> list[Case]:
    def weigh(name: str, told: str, *arguments: str, text: Content = TABLE, **files: Content) -> Case:
        given = {f"{key}.toml": content for key, content in files.items()}
        return Case(f"weigh {name}", ("weigh", "w.csv", *arguments), (told,), {"w.csv": text, **given})

    choquet = ("--score", "choquet", "--capacity", "c.toml")
    return [
        weigh("score", "did you mean 'mean'", "--score", "men"),
        weigh("power nan", "a finite number", "--score", "power", "--power", "nan"),
        weigh("power absurd", "1e30", "--score", "power", "--power", "1e300"),
        weigh("power 0", "greater than 0", "--score", "power", "--power", "0"),
        weigh("power misplaced", "allowed only with power", "--power", "2"),
        weigh("weights nan", "weights", "--score", "weighted-mean", "--weights", "nan,1"),
        weigh("weights empty", "--weights: got ''", "--score", "weighted-mean", "--weights", ""),
        weigh("weights negative", "numbers >= 0", "--score", "owa", "--weights=-1,2"),
        weigh("quantifier", "quantifier", "--score", "owa", "--quantifier", "some"),
        weigh("quantifier nan", "quantifier", "--score", "owa", "--quantifier", "nan,1"),
        weigh("priority", "priority", "--priority", "DS>>LD"),
        weigh("priority markup", "[/b]", "--priority", "[/b]"),
        weigh("format", "'--format'", "--format", "xml"),
        weigh("by nothing known", "names no rule or criterion 'XX'", "--by", "XX"),
        weigh("by twice normalised", "one of /share, /max, /rank", "--by", "DS/max/max"),
        weigh("by updates", "needs updates or rounds", "--by", "clip(DS)"),
        weigh("by and score", "together with options of a score", "--by", "DS", "--score", "mean"),
        weigh("by and normalise", "one of the two", "--by", "DS/max", "--normalise", "rank"),
        weigh("normalise", "'--normalise'", "--normalise", "sum"),
        weigh("binary", "UTF-8", text=bytes(range(128, 256))),
        weigh("semicolons", "semicolons", text=TABLE.replace(",", ";")),
        weigh("no header", "a header of names", text="A,.9,.2\nB,.1,.8\n"),
        weigh("header only", "no table", text="client,DS\n"),
        weigh("client twice", "'A' twice", text=TABLE.replace("B", "A")),
        weigh("client nameless", "row 2", text=TABLE.replace("A,", ",")),
        weigh("cell infinite", "'inf'", text=TABLE.replace(".9", "inf")),
        weigh("cell a word", "row 2", text=TABLE.replace(".9", "90%")),
        weigh("column nameless", "header", text=TABLE.replace("DS", "")),
        weigh("sum overflows", "1e30", text="client,DS\nA,1e308\nB,1e308\n"),
        weigh("capacity nan", "DS", *choquet, c="DS = nan\nLD = 1"),
        weigh("capacity true", "DS", *choquet, c="DS = true\nLD = 0.5"),
        weigh("capacity unknown", "X", *choquet, c="X = 1"),
        weigh("capacity word", "DS", *choquet, c="DS = 'x'\nLD = 1"),
        weigh("capacity falls", "DS", *choquet, c="DS = 0.9\nLD = 0.8\n'DS,LD' = 0.5"),
        weigh("capacity no TOML", "not valid TOML", *choquet, c="DS"),
        weigh("capacity missing", "cannot be read", "--score", "choquet", "--capacity", "no.toml"),
        Case("weigh a folder", ("weigh", "."), (".",)),
        Case("weigh nothing", ("weigh", "no.csv"), ("no.csv",)),
    ]


def _commands() -> list[Case]:
    def case(told: str, *arguments: str, **files: Content) -> Case:
        return Case(f"command {' '.join(arguments)[:50]!r}", arguments, (told,), files)

    compare = ("compare", "learn.toml", "--rules")
    untested = ("--set", "partition.test=none")
    adjusted = "weighing={criteria=['DS','LD'],adjust={strategy='online'}}"
    init = ("federate", "init", "app", "learn.toml")
    node, limited = 'server = "h:1"\ninsecure = true\nclient = "a"\n', 'require = "local"\nepsilon = 8\n'
    table = '{ path = "x.csv", source = "csv" }'
    pem = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
    return [
        case("Missing argument", "run"),
        case("no such recipe or file", "run", ""),
        case("no such recipe or file", "run", "."),
        case("did you mean 'quickstart'", "run", "quickstrat"),
        case("no such recipe or file", "run", LONG),
        case("not valid TOML", "run", "train.tsv"),
        case("unexpected extra argument", "run", "learn.toml", "extra"),
        case("--nope", "run", "learn.toml", "--nope"),
        case("'--format'", "run", "learn.toml", "--format", "xml"),
        case("'--seed'", "run", "learn.toml", "--seed", "1.5"),
        case("--out: got nothing", "run", "learn.toml", "--out", ""),
        case("is a file", "run", "learn.toml", "--out", "train.tsv"),
        case("is a file", "run", "learn.toml", "--out", "train.tsv/x"),
        case("File name too long", "run", "learn.toml", "--out", "a" * 300),
        case("", "run", "learn.toml", "--out", "/proc/steelyard"),
        case("No such command", "rnu"),
        case("No such command", "[/b]"),
        case("--nope", "--nope"),
        case("no experiment named", "show"),
        case("no such recipe or file", "show", "x"),
        case("no run here (no experiment.toml)", "table", "."),
        case("no", "table", "no"),
        case("no", "resume", "no"),
        case("train.tsv", "resume", "train.tsv"),
        case("no", "export", "no"),
        case("'--to'", "export", "no", "--to", "xml"),
        case("there is no file", "criteria", "--plugin", "no.py"),
        case("is not declared for Steelyard", "criteria", "--plugin", "no.such"),
        case("'--seeds'", "compare", "learn.toml", "--seeds", "0"),
        case("1 to 1,000", "compare", "learn.toml", "--rules", "DS", "--seeds", "1000000"),
        case("--baseline", "compare", "learn.toml", "--rules", "DS", "--baseline", "LD"),
        case("--rules", *compare, ""),
        case("XX", *compare, "XX"),
        case("DS>DS", *compare, "DS>DS"),
        case("fitted", *compare, "fitted()"),
        case("budget", *compare, "budget(x)"),
        case("at most 200 characters", *compare, f"budget({DIGITS})"),
        case("at most 200 characters", *compare, LONG),
        case("power", *compare, "power(DS)^0"),
        case("weights", *compare, "weighted-mean(DS=-1)"),
        case("quantifier", *compare, "owa(DS,LD;nope)"),
        case("nofile", *compare, "choquet(DS,LD;nofile)"),
        case("test set", *compare, "server-only"),
        case("'os' is part of Python", "run", "learn.toml", "--trust", "--set", "training.loss=os:getcwd"),
        case("'os' is part of Python", "run", "learn.toml", "--set", "training.loss=os:getcwd"),
        case("nothing to compare rules by", *compare, "DS", *untested),
        case("compares accuracies", "run", "learn.toml", *untested, "--set", adjusted),
        case("no accuracy to reach", "run", "learn.toml", *untested, "--set", "rounds.stop_at_target=true"),
        case("65535", *init, "--superlink", "127.0.0.1:99999"),
        case("HOST:PORT", *init, "--superlink", "x"),
        case("HOST:PORT", *init, "--superlink", 'x"y:80'),
        case("HOST:PORT", *init, "--superlink", ""),
        case("HOST:PORT", *init, "--superlink", "a\nb:80"),
        case("no.pem", *init, "--root-certificates", "no.pem"),
        case("holds no certificate", *init, "--root-certificates", "train.tsv"),
        Case("garbage certificate", (*init, "--root-certificates", "g.pem"), ("no certificate",), {"g.pem": pem}),
        case("is not empty", "federate", "init", ".", "learn.toml"),
        case("no such recipe", "federate", "init", "app", "nosuch"),
        case("File name too long", "federate", "init", "a" * 300),
        case("--host", "federate", "certificates", "certs", "--host", "a b"),
        case("--host", "federate", "certificates", "certs", "--host", "h:80"),
        case("--host: got none", "federate", "certificates", "certs"),
        case("--renew: certs/ca.pem cannot be read", "federate", "certificates", "certs", "--renew"),
        case("file", "federate", "key", "."),
        case("exists already", "federate", "key", "train.tsv"),
        case("keeps no ledger", "federate", "ledger", "n.toml", **{"n.toml": f'{node}state = "x"\n'}),
        case("node config tests: got 'no'", "federate", "node", "n.toml", **{"n.toml": f'{node}tests = "no"\n'}),
        case(
            "node config min-rows: got 0", "federate", "node", "n.toml", **{"n.toml": f'{node}data="x"\nmin-rows=0\n'}
        ),
        case(
            *("node config data: labels: got", "federate", "node", "n.toml"),
            **{"n.toml": f"{node}data={table}\n", "x.csv": "a,b\n1,2\n"},
        ),
        case("given without state", "federate", "node", "n.toml", **{"n.toml": f"{node}{limited}"}),
        case("is a file", "federate", "node", "n.toml", **{"n.toml": f'{node}{limited}state = "n.toml"\n'}),
        case(
            "is damaged (it is empty)",
            *("federate", "node", "n.toml"),
            **{"n.toml": f'{node}{limited}state = "."\n', "ledger.jsonl": ""},
        ),
        case("got 0 sources", "new", "n.toml"),
        case("got 2 sources", "new", "n.toml", "--csv", "clients.csv", "--npz", "x.npz"),
        case("found no 'no.csv'", "new", "n.toml", "--csv", "no.csv"),
        case("found no column 'nope'", "new", "n.toml", "--csv", "clients.csv", "--label", "nope"),
        case("is there already", "new", "learn.toml", "--csv", "clients.csv", "--label", "LD"),
        case("found no folder", "new", "no/n.toml", "--csv", "clients.csv", "--label", "LD"),
        case("no such folder", "ls", "no"),
        case("no such folder", "top", "train.tsv", "--once"),
        case("'--every'", "top", ".", "--every", "0"),
        case("--every: got nan", "top", ".", "--every", "nan", "--once"),
        case("--every: got inf", "top", ".", "--every", "inf", "--once"),
        case("no run here", "report", "no"),
        case("cannot be read", "weigh", "no"),
        case("--attack: got nothing; allowed: ", "attack", "learn.toml"),
        case("--attack: got 'adaptve' (did you mean 'adaptive'?)", "attack", "learn.toml", "--attack", "adaptve"),
        case("--attack: got 'nope'", "attack", "learn.toml", "--attack", "nope"),
        case("--fraction: got 2", "attack", "learn.toml", "--attack", "sign-flip", "--fraction", "2"),
        case("--fraction: got 0; allowed", "attack", "learn.toml", "--attack", "sign-flip", "--fraction", "0"),
        case("--fraction: got 0.5; allowed", "attack", "learn.toml", "--attack", "sign-flip", "--fraction", "0.5"),
        case("this experiment has no classes", "attack", "adafed-regression", "--attack", "sign-flip"),
        case("of kind 'recommend' have no hostile", "attack", "fpl-ml1m", "--attack", "sign-flip"),
        case("--fraction: got nan", "attack", "learn.toml", "--attack", "sign-flip", "--fraction", "nan"),
        case("1 to 1,000", "attack", "learn.toml", "--attack", "sign-flip", "--seeds", "1000000"),
        case("is a file", "attack", "learn.toml", "--attack", "sign-flip", "--out", "train.tsv"),
        case("cannot be read", "federate", "register", "x", "no.pub"),
        case("--nodes", "federate", "local", "learn.toml", "--nodes", "0"),
        case("--nodes", "federate", "local", "learn.toml", "--nodes", "1000000"),
    ]


CASES: list[Case] = [
    *(*_fields(), *_configs(), *_npz_cases(), *_csv_cases(), *_leaf_cases(), *_idx_cases(), *_interactions()),
    *(*_recommending(), *_weighing(), *_commands()),
]
