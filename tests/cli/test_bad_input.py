"""Bad input of every kind ends in one plain line and exit code 2, before a folder is made; never in a traceback.

One table of what is typed and of files, one runner. Values of sections have tables in the rooms that check them.
"""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.conftest import CommandLine
from tests.kit import assert_refused, inside

from steelyard import Experiment, in_memory
from steelyard.clients.flower.register import Entry, enter
from steelyard.clients.node import NodeConfig
from steelyard.data.flaw_settings import FlawSettings
from steelyard.data.partition import share_out
from steelyard.data.settings import PartitionSettings
from steelyard.experiment.node_rows import check_own
from steelyard.federate.certificates import make_key
from steelyard.learning.losses import resolve
from steelyard.learning.models import build
from steelyard.messages import LossState
from steelyard.recommend.settings import KgflexSettings

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
HEAD = "user\titem\trating\n"
TABLE = "client,DS,LD\nA,.9,.2\nB,.1,.8\n"
KNOWN = RECOMMEND + '[[knowledge.sources]]\npath = "k.tsv"\n'
NODE = 'server = "h:1"\ninsecure = true\nclient = "a"\n'
LIMITED = NODE + 'require = "local"\nepsilon = 8\n'
LONG = "a" * 5000
DIGITS = "9" * 5000
BASE: dict[str, Content] = {
    "learn.toml": LEARN,
    "rec.toml": RECOMMEND,
    "known.toml": KNOWN,
    "k.tsv": "1\t1\t2\n",
    "ratings.tsv": "user\titem\trating\ttime\n"
    + "".join(f"u{u}\ti{(u * 3 + k) % 12}\t{1 + (u + k) % 5}\t{k}\n" for u in range(8) for k in range(6)),
    "train.tsv": HEAD + "".join(f"u{u}\ti{k}\t{1 + k % 5}\n" for u in range(5) for k in range(4)),
    "test.tsv": HEAD + "".join(f"u{u}\ti{k}\t{1 + k % 5}\n" for u in range(5) for k in range(4, 6)),
    "lists.tsv": "user\titem\tscore\n" + "".join(f"u{u}\ti{k}\t{9 - k}\n" for u in range(5) for k in range(4, 8)),
    "clients.csv": TABLE,
    "few.tsv": "item\n1\n",
    "empty.toml": "# nothing yet\n",
    "no.pem": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    "old/test.tsv": "",
    "damaged/ledger.jsonl": "",
    "tests.toml": NODE + 'tests = "no"\n',
    "rows.toml": NODE + 'data = "x"\nmin-rows = 0\n',
    "stateless.toml": LIMITED,
    "nowhere.toml": LIMITED + 'state = "clients.csv"\n',
    "broken.toml": LIMITED + 'state = "damaged"\n',
    "keeps.toml": NODE + 'state = "x"\n',
}
"""Files that every case finds."""

SETTINGS: dict[str, str] = {
    # what numbers, words, lists and sections may be
    "rounds.count=0": "rounds.count: got 0",
    "rounds.count=true": "rounds.count: got true; allowed: a whole number",
    "rounds.count=many": "'many'; allowed: a whole number",
    "rounds.count=1e300": "rounds.count",
    "rounds.count=1000000000000": "less than or equal to 10000000",
    f"rounds.count={DIGITS}": "at most 18 digits",
    "rounds.count=1\nseed=2": "a whole number",
    "rounds.fraction=nan": "rounds.fraction: got nan",
    "rounds.targets=0.5": "allowed: a list",
    "rounds=1": "a section of fields",
    "rounds.count": "section.field=value",
    "rounds..count=1": "section.field=value",
    "name.x=1": "is a single value",
    "model.name=3": "model.name: got 3; allowed: text",
    "training.learning_rate=inf": "a finite number",
    "training.learning_rate=1e300": "numbers up to 1e30",
    "flaws=[{kind='noisy',amount=true,pick='random',count=1}]": "flaws.0.amount: got true",
    # unknown fields and words, with what was perhaps meant
    "rounds.cuont=1": "did you mean 'count'",
    "rounds.learning_rate=1": "rounds.learning_rate: unknown field (did you mean 'training.learning_rate'?)",
    "plugins=['own.py']": "plugins: unknown field (did you mean 'algorithm.plugins' or 'weighing.plugins'?)",
    "ronds.count=1": "unknown field (did you mean 'rounds'?)",
    "data.source=digitz": "data.source: got 'digitz' (did you mean 'digits'?)",
    "model.name=logstic": "did you mean 'logistic'",
    "kind=['x']": "kind",
    # names that could steer a terminal or leave a folder
    "name='../x'": "letters, digits",
    f"name={LONG}": "up to 100 letters",
    "name='a\x1b[31m'": "\\x1b[31m",
    "weighing.name='\x1b[31mx'": "\\x1b[31mx",
    "beside.'a#b'.criteria=['DS']": "without '#'",
    "beside.DS.criteria=['DS']": "the name of the main rule",
    # what fits no other field, or the data
    "rounds.min_clients=5": "rounds.min_clients: got 5; allowed: at most 4",
    "partition.clients=899": "at most 898",
    "partition.minimum=1000000": "1797 rows",
    "model.hidden=[5]": "model.hidden: got [5] with model.name 'logistic'",
    "model.outputs=3": "model.outputs: got 3 for 10 classes",
    "model={name='mlp',hidden=[1000000,1000000]}": "parameters; allowed: at most 1,000,000,000",
    "model={name='cnn',kernel=2}": "an odd number",
    "training.loss=barron": "allowed: 1 output",
    "training.batch_size=0": "training.batch_size: got 0; allowed: greater than or equal to 1, 'full'",
    "compute.device='cuda:99'": "compute.device",
    "compute.engine='vmap:0'": "compute.engine",
    "store.folder='learn.toml'": "is a file",
    # code that an experiment names
    "model.name='os:getcwd'": "'os' is part of Python",
    "training.loss=os:getcwd": "'os' is part of Python",
    "model.name='x:'": "is not declared for Steelyard",
    "model.name='x.py:y'": "there is no file",
    "weighing.plugins=['no.py']": "there is no file",
    # criteria and rules
    "weighing.criteria=['[/b]']": "criterion '[/b]' is not known",
    "weighing={criteria=['CBX','LD'],priority='LD>CBX'}": "criterion 'CBX' is not known (did you mean 'CB'?)",
    "weighing={criteria=['XX'],priority='DS>LD'}": "one of your own: name its file in weighing.plugins",
    "weighing.criteria=['DS','DS']": "each criterion once",
    "weighing.criteria=['VP']": "VP is measured on the server's test set",
    "weighing.power=2": "allowed only with power",
}
RECOMMENDING: dict[str, str] = {
    "interactions.core=100": "core",
    "interactions.threshold=nan": "a finite number",
    "interactions.path='no'": "no",
    "interactions.path='.'": "file",
    "interactions.columns={user='x'}": "not in the header",
    "interactions.category_column='x'": "category_column",
    "items={path='ratings.tsv',title=99}": "columns",
    "knowledge={sources=[]}": "knowledge.sources: got",
    "knowledge={sources=[{path='x',format='owl'}]}": "knowledge.sources.0.format: got 'owl'",
    "fpl.mode=custom": "triples",
    "fpl.pi=true": "fpl.pi: got true; allowed: a number",
    "fpl.decoys=inf": "fpl.decoys",
    "rounds.min_clients=100": "at most 8",
    "weighing.criteria=['VP']": "VP",
    "partition.clients=3": "unknown field",
}
EVALUATE = "recommend evaluate --train train.tsv --test test.tsv --recommendations lists.tsv"
BASELINE = "recommend baseline popular --train train.tsv --out"
ATTACK = "attack learn.toml --attack"
COMPARE = "compare learn.toml --rules"
INIT = "federate init app learn.toml"
TYPED: dict[str, str] = {
    "run": "Missing argument",
    "run ''": "no such recipe or file",
    "run quickstrat": "did you mean 'quickstart'",
    f"run {LONG}": "no such recipe or file",
    "run train.tsv": "not valid TOML",
    "run empty.toml": "empty.toml: holds no field",
    "run learn.toml extra": "unexpected extra argument",
    "run learn.toml --nope": "--nope",
    "run learn.toml --format xml": "'--format'",
    "run learn.toml --seed 1.5": "'--seed'",
    "run learn.toml --out ''": "--out: got nothing",
    "run learn.toml --out train.tsv/x": "is a file",
    f"run learn.toml --out {LONG[:300]}": "File name too long",
    "run learn.toml --out /proc/steelyard": "/proc/steelyard",
    "run learn.toml --trust --set training.loss=os:getcwd": "'os' is part of Python",
    "run learn.toml --set partition.test=none --set rounds.stop_at_target=true": "no accuracy to reach",
    "rnu": "No such command",
    "swep": "Did you mean 'sweep'?",
    "'[/b]'": "No such command",
    "show": "no experiment named",
    "table .": "no run here (no experiment.toml)",
    "resume train.tsv": "train.tsv",
    "resume x --quit": "see `steelyard resume --help`",
    "report no": "no run here",
    "export no --to xml": "'--to'",
    "ls no": "no such folder",
    "top train.tsv --once": "no such folder",
    "top . --every 0": "'--every'",
    "top . --every nan --once": "--every: got nan",
    "watch nowhere --port 0": "nowhere: no such folder",
    "criteria --plugin no.such": "is not declared for Steelyard",
    "recipes --quiet --verbose": "--verbose, --quiet: got both",
    "recipes --log-file .": "Is a directory",
    "recipes --log-file no/where": "No such file or directory",
    "compare learn.toml --seeds 0": "'--seeds'",
    f"{COMPARE} DS --seeds 1000000": "1 to 1,000",
    f"{COMPARE} DS --baseline LD": "--baseline",
    f"{COMPARE} ''": "--rules",
    f"{COMPARE} onlin": "did you mean 'online'",
    f"{COMPARE} DS,DS": "--rules: 'DS' is there twice",
    f"{COMPARE} DS/max/max": "one of /share, /max, /rank",
    f"{COMPARE} DS>DS": "DS>DS",
    f"{COMPARE} 'budget(x)'": "budget",
    f"{COMPARE} {LONG}": "at most 200 characters",
    f"{COMPARE} 'power(DS)^0'": "power",
    f"{COMPARE} 'weighted-mean(DS=-1)'": "weights",
    f"{COMPARE} 'owa(DS,LD;nope)'": "quantifier",
    f"{COMPARE} 'choquet(DS,LD;nofile)'": "nofile",
    f"{COMPARE} server-only": "test set",
    f"{COMPARE} DS --set partition.test=none": "nothing to compare rules by",
    "sweep learn.toml": "--over: got nothing",
    "sweep learn.toml --over training.epochs=1,,2": "--over: got '1,,2', in which a value is empty",
    "sweep learn.toml --over training.epochs=1,2 --set training.epochs=3": "training.epochs is in --over too",
    "sweep learn.toml --over training.learning_rat=1": "did you mean 'learning_rate'?",
    "sweep learn.toml --over training.epochs=1 --measure speed": "--measure: got 'speed'",
    # the first point would run; the second is named before it does
    "sweep learn.toml --over model.name=mlp,logstic": "--over: model.name: got 'logstic' (did you mean 'logistic'?)",
    "sweep learn.toml --over training.epochs=1 --out .": "--out: got nothing or the working folder",
    "attack learn.toml": "--attack: got nothing; allowed: ",
    f"{ATTACK} adaptve": "--attack: got 'adaptve' (did you mean 'adaptive'?)",
    f"{ATTACK} sign-flip --fraction 0.5": "--fraction: got 0.5; allowed",
    f"{ATTACK} sign-flip --fraction nan": "--fraction: got nan",
    f"{ATTACK} sign-flip --out train.tsv": "is a file",
    "attack adafed-regression --attack sign-flip": "this experiment has no classes",
    "attack fpl-ml1m --attack sign-flip": "of kind 'recommend' have no hostile",
    "arena": "allowed: one of them",
    "arena EQ --retune": "allowed: one of them",
    "arena NOPE": "arena: 'NOPE' names no rule or criterion 'NOPE'",
    "arena none.py": "there is no file 'none.py'",
    "arena EQ --scenes moon": "--scenes: got 'moon'",
    "arena EQ --scenes ,": "--scenes: got ','",
    "arena EQ --suite huge": "--suite: got 'huge'",
    "arena EQ --jobs 0": "--jobs: got 0",
    "arena EQ --part 3/2": "--part: got '3/2'",
    "arena EQ --draft --until-decided": "--until-decided: got it with --draft",
    "arena --retune --seeds 1 --draft": "arena: got --draft, --seeds with --retune",
    "arena --check x.json --jobs 2 --suite full": "arena: got --suite, --jobs with --check",
    "arena --check .": "there is no file arena.json",
    f"{INIT} --superlink 127.0.0.1:99999": "65535",
    f"{INIT} --superlink 'x\"y:80'": "HOST:PORT",
    f"{INIT} --root-certificates nothing.pem": "nothing.pem",
    f"{INIT} --root-certificates no.pem": "no certificate",
    "federate init . learn.toml": "is not empty",
    "federate certificates certs": "--host: got none",
    "federate certificates certs --host h:80": "--host",
    "federate certificates certs --renew": "--renew: certs/ca.pem cannot be read",
    "federate key train.tsv": "exists already",
    "federate ledger keeps.toml": "keeps no ledger",
    "federate node tests.toml": "node config tests: got 'no'",
    "federate node rows.toml": "node config min-rows: got 0",
    "federate node stateless.toml": "given without state",
    "federate node nowhere.toml": "is a file",
    "federate node broken.toml": "is damaged (it is empty)",
    "federate register x no.pub": "cannot be read",
    "federate local learn.toml --nodes 1000000": "--nodes",
    "weigh no.csv": "no.csv",
    "weigh .": ".",
    "weigh clients.csv --score men": "did you mean 'mean'",
    "weigh clients.csv --score power --power 1e300": "1e30",
    "weigh clients.csv --power 2": "allowed only with power",
    "weigh clients.csv --score weighted-mean --weights a,b": "--weights: got 'a,b'",
    "weigh clients.csv --score owa --weights=-1,2": "numbers >= 0",
    "weigh clients.csv --score owa --quantifier nan,1": "quantifier",
    "weigh clients.csv --priority '[/b]'": "[/b]",
    "weigh clients.csv --by XX": "names no rule or criterion 'XX'",
    "weigh clients.csv --by 'clip(DS)'": "needs updates or rounds",
    "weigh clients.csv --by DS --score mean": "together with options of a score",
    "weigh clients.csv --by DS/max --normalise rank": "one of the two",
    "weigh clients.csv --score choquet --capacity none.toml": "none.toml cannot be read",
    "recommend split ratings.tsv --out o --core 1000000000": "nothing is left",
    "recommend split ratings.tsv --out o --share nan": "share",
    "recommend split ratings.tsv --out o --count 0 --kind newest": "count",
    "recommend split ratings.tsv --out train.tsv": "is a file",
    "recommend split ratings.tsv --out old": "exists already",
    f"{EVALUATE} --cutoff ''": "--cutoff: got ''",
    f"{EVALUATE} --cutoff 1000000000": "1 to 10,000",
    f"{EVALUATE} --threshold nan": "finite",
    f"{EVALUATE} --threshold 100": "no test interaction",
    f"{EVALUATE} --test train.tsv": "is --train too",
    f"{EVALUATE} --catalogue few.tsv": "not in the cat",
    "recommend baseline populr --train train.tsv --out x.tsv": "did you mean 'popular'",
    f"{BASELINE} x.tsv --set factors=3": "has no 'factors'",
    "recommend baseline fcf --train train.tsv --out x.tsv --set rate=nan": "rate is nan",
    f"{BASELINE} train.tsv": "exists already",
    f"{BASELINE} .": "a new file",
    f"{BASELINE} no/such/x.tsv": "there is no folder",
    f"{BASELINE} x.tsv --knowledge rec.toml": "popular looks at no features",
    "recommend baseline vsm --train train.tsv --out x.tsv": "--knowledge: vsm needs it",
    "recommend features learn.toml": "has no section [knowledge]",
    "recommend features known.toml --item x": "--item: got 'x'; allowed: one of",
    f"recommend audit rec.toml --rounds {DIGITS}": "--rounds",
    "recommend audit rec.toml --pi nan": "--pi",
    "recommend audit rec.toml --decoys 1e9": "--decoys",
    "recommend audit learn.toml": "not of kind 'recommend'",
    "recommend cost --users 0 --items 10 --interactions 10": "'--users'",
    "recommend top train.tsv --user u1": "train.tsv",
}
"""What is typed, and what the line must name."""
EXPERIMENTS: dict[str, tuple[Content, str]] = {
    "binary": (bytes(range(128, 256)), "text"),
    "utf-16": (LEARN.encode("utf-16"), "text"),
    "duplicate key": ("name = 'a'\nname = 'b'", "not valid TOML"),
    "digits": (f"seed = {DIGITS}", "thousands of digits"),
    "deep": ("a = " + "[" * 5000, "nested too deeply"),
    "markup": ("'[/b]' = 1", "[/b]: unknown field"),
    "control": ('"\\u001b[31m" = 1', "\\x1b[31m: unknown field"),
    "tables": ("[[data]]\nsource = 'digits'", "a section of fields"),
    "date": ("name = 2020-01-01", "name"),
    "no such data": ('[data]\nsource = "npz"\npath = "no.npz"\n' + LEARN[11:], "found no 'no.npz'"),
    "a folder as a file": ('[data]\nsource = "npz"\npath = "."\n' + LEARN[11:], "cannot be read"),
    "a path too long": (f'[data]\nsource = "npz"\npath = "{LONG}"\n' + LEARN[11:], "File name too long"),
}
RATINGS: dict[str, tuple[Content, str]] = {
    "empty": ("", "the file is empty"),
    "one column": ("user\nu1\n", "separators"),
    "empty cell": (HEAD + "u0\t\t3\n", "item is ''"),
    "rating infinite": (HEAD + "u0\ti1\tinf\n", "'inf'"),
    "decimal comma": ("user;item;rating\nu0;i1;3,5\n", "'3,5'"),
    "header only": (HEAD, "no rows"),
    "user twice": ("user\tuser\titem\n1\t2\t3\n", "more than once"),
    "time a word": ("user\titem\trating\ttime\nu\ti\t1\tx\n", "seconds since 1970"),
}
KNOWLEDGE: dict[str, tuple[Content, str]] = {
    "empty": ("\n\n", "k.tsv: the file is empty"),
    "of no item": ("7\t1\t2\n\t2\n", "k.tsv: line 2: begins with '2' after no item"),
    "of three columns": ("a\tb\tc\n", "3 columns without a header"),
    "binary": (b"\0\xff\0\n\t\n", "expected"),
}
TABLES: dict[str, tuple[Content, str]] = {
    "binary": (bytes(range(128, 256)), "UTF-8"),
    "semicolons": (TABLE.replace(",", ";"), "semicolons"),
    "no header": ("A,.9,.2\nB,.1,.8\n", "a header of names"),
    "no names": ("DS,LD\n3,1\n1,2\n", "has no column 'client', and 'DS' holds numbers"),
    "empty": ("", "no table"),
    "client twice": (TABLE.replace("B", "A"), "'A' twice"),
    "client nameless": (TABLE.replace("A,", ","), "line 2"),
    "cell infinite": (TABLE.replace(".9", "inf"), "'inf'"),
    "cell a word": (TABLE.replace(".9", "90%"), "line 2"),
    "cell below 0": (TABLE.replace(".9", "-1"), "line 2"),
    "cells too many": (TABLE.replace(".9", ".9,1"), "line 2"),
    "column twice": (TABLE.replace("LD", "DS"), "header"),
    "sum overflows": ("client,DS\nA,1e308\nB,1e308\n", "1e30"),
}
CAPACITIES: dict[str, tuple[Content, str]] = {
    "nan": ("DS = nan\nLD = 1", "DS"),
    "unknown": ("X = 1", "X"),
    "falls": ("DS = 0.9\nLD = 0.8\n'DS,LD' = 0.5", "DS"),
    "no TOML": ("DS", "not valid TOML"),
}
READ: dict[str, tuple[str, dict[str, tuple[Content, str]]]] = {
    "bad.toml": ("run bad.toml", EXPERIMENTS),
    "bad.tsv": ("recommend split bad.tsv --out o", RATINGS),
    "k.tsv": ("recommend features known.toml", KNOWLEDGE),
    "bad.csv": ("weigh bad.csv", TABLES),
    "c.toml": ("weigh clients.csv --score choquet --capacity c.toml", CAPACITIES),
}
"""Files of each kind: the name, the command that reads it, and what may stand in it."""
CASES: dict[str, tuple[list[str], str, dict[str, Content]]] = {
    **{text: (["run", "learn.toml", "--set", text], told, {}) for text, told in SETTINGS.items()},
    **{f"rec {text}": (["run", "rec.toml", "--set", text], told, {}) for text, told in RECOMMENDING.items()},
    **{text: (shlex.split(text), told, {}) for text, told in TYPED.items()},
    **{
        f"{name} {kind}": (shlex.split(command), told, {name: content})
        for name, (command, contents) in READ.items()
        for kind, (content, told) in contents.items()
    },
}
LIBRARY_WORDS = ("constrained", "instance of", "pathlib", "pickle", "pydantic", "dtype", "ndarray", "unable to parse")


def lay_out(folder: Path, files: dict[str, Content]) -> set[Path]:
    for name, content in {**BASE, **files}.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return set(folder.rglob("*"))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [pytest.param(name, id=name[:60].encode("unicode_escape").decode()) for name in CASES])
def test_refused_in_one_line(name: str, tmp_path: Path) -> None:
    words, told, files = CASES[name]
    before = lay_out(tmp_path, files)
    done = inside(*words, folder=tmp_path)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done
    # On a slow machine, what takes long is named before the answer.
    assert [line for line in lines if line.startswith("steelyard: ")] == lines[-1:], done.stderr
    assert told in lines[-1]
    assert lines[-1].isprintable()
    assert len(lines[-1]) < 1100
    assert [word for word in ("Traceback", *LIBRARY_WORDS) if word in done.stderr] == []
    assert set(tmp_path.rglob("*")) == before


def rows() -> Any:
    return in_memory(np.random.default_rng(1).normal(size=(40, 3)), np.arange(40) % 2)


def half(outputs: int) -> torch.nn.Module:
    return torch.nn.Linear(3, outputs).half()


SEVENS = FlawSettings(kind="classes-missing", classes=(77,), clients=("client-001",))
CALLED: dict[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "a rule twice": (lambda: Experiment.load("quickstart").compare(["DS", "DS"]), ("'DS' is there twice",)),
    "no rule": (lambda: Experiment.load("quickstart").compare([]), ("rules: got an empty list",)),
    "a node's data": (
        lambda: check_own(NodeConfig.read({"client": "north", "data": "none.csv"})),
        ("node config data: found no", "none.csv"),
    ),
    "limits of no feature": (lambda: KgflexSettings(limits=(0, 0)), ("limits: got ", "at least one number above 0")),
    "a class that there is not": (
        lambda: share_out(rows(), PartitionSettings(clients=2), 1, [SEVENS]),
        ("flaws.0.classes: got 77; allowed: 0 to 1",),
    ),
    "a network of half precision": (lambda: build(half, (3,), 2, 1), ("torch.float16; allowed: torch.float32",)),
    **{
        f"{outputs} outputs for {classes} classes": (
            lambda classes=classes, outputs=outputs: resolve(LossState("auto"), classes, outputs),
            (f"model.outputs: got {outputs} for ", f"allowed: {allowed}"),
        )
        for classes, outputs, allowed in ((2, 3, "1 or 2"), (10, 1, "10"), (0, 2, "1"))
    },
}


@pytest.mark.parametrize("name", CALLED)
def test_calls_are_refused_in_one_line_too(name: str) -> None:
    call, parts = CALLED[name]
    assert_refused(call, *parts)


def test_another_experiment_in_the_folder_of_a_run_is_told(command: CommandLine, tmp_path: Path) -> None:
    lay_out(tmp_path, {})
    assert command("run", "learn.toml", "--out", "r").returncode == 0
    assert "not as the run wrote it" not in command("table", "r").stderr
    assert "RUNS: got r, r; allowed: each run once" in command("report", "r", "r").stderr
    own = tmp_path / "r" / "experiment.toml"
    own.write_text(own.read_text().replace('name = "t"', 'name = "other"'))
    for word in ("table", "report"):
        done = command(word, "r")
        assert done.returncode == 0
        assert "is not as the run wrote it: name: 't' when the run began, 'other' now" in done.stderr


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (Entry("../x", "key"), ("--name: got '../x'",)),
        (Entry("", "key"), ("--name: got ''",)),
        (Entry("a", "key", ("b", "b")), ("--client: got b, b",)),
        (Entry("a", "key", ("\x1b[2J",)), (r"--client: got '\x1b[2J'",)),
        (Entry("old", "key"), ("--name: 'old' is another key's", "`--remove old` first")),
    ],
)
def test_names_in_the_register_of_a_server(tmp_path: Path, entry: Entry, parts: tuple[str, ...]) -> None:
    file = tmp_path / "register.json"
    enter(file, Entry("old", "its key"))
    assert_refused(lambda: enter(file, entry), *parts)
    enter(file, Entry("old", "its key", ("north", "Zürich 2")))


def test_an_empty_name_is_not_the_name_of_the_file(refused: Callable[..., str], tmp_path: Path) -> None:
    make_key(tmp_path / "clinic")
    assert "--name: got ''" in refused("federate", "register", "server", "clinic.pub", "--name", "")
    assert "--remove: no node ''" in refused("federate", "register", "server", "clinic.pub", "--remove", "")


class Sequence(torch.nn.Module):
    """A small LSTM, which torch cannot map over clients."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.cells, self.last = torch.nn.LSTM(1, 4, batch_first=True), torch.nn.Linear(4, outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.cells(x[:, :, None])[0][:, -1])


def test_nobody_is_asked_to_file_an_issue_about_torch(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"data": {"source": "memory"}, "partition": {"clients": 2}, "rounds": {"count": 1}}
    experiment = Experiment(**fields, model={"name": Sequence}, compute={"engine": "vmap"})
    with warnings.catch_warnings(record=True) as caught:
        experiment.run(tmp_path / "run", dataset=rows())
    assert not [warning for warning in caught if "issue" in str(warning.message)]
