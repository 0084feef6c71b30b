"""Bad input of every kind ends in one plain line and exit code 2, before a folder is made; never in a traceback.

One table of what is typed and of files, one runner. Values of sections have tables in the rooms that check them.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from tests.conftest import CommandLine
from tests.kit import assert_refused, inside

from steelyard import Experiment
from steelyard.clients.flower.register import Entry, enter
from steelyard.clients.node import NodeConfig
from steelyard.experiment.node_rules import check_own
from steelyard.learning.models import build
from steelyard.recommend.kgflex.selection import KgflexSettings

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
    "j.json": "{}",
    "far.csv": "round,client,DS,weight\n999999999999,a,1,1\n",
    "few.tsv": "item\n1\n",
    "empty.toml": "# nothing yet\n",
    "no.pem": "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    "old/test.tsv": "",
    "damaged/ledger.jsonl": "",
    "rows.toml": NODE + 'data = "x"\nmin-rows = 0\n',
    "stateless.toml": LIMITED,
    "nowhere.toml": LIMITED + 'state = "clients.csv"\n',
    "broken.toml": LIMITED + 'state = "damaged"\n',
    "keeps.toml": NODE + 'state = "x"\n',
    "here.toml": NODE.replace("h:1", "here"),
    "plain.toml": NODE.replace("insecure = true\n", ""),
    "slip.toml": NODE + 'alow = "x"\n',
    "broke.toml": "server = ",
}
"""Files that every case finds."""

SETTINGS: dict[str, str] = {
    # what numbers, words, lists and sections may be
    "rounds.count=0": "rounds.count: got 0",
    "rounds.count=true": "rounds.count: got true; allowed: a whole number",
    "rounds.count=1000000000000": "less than or equal to 10000000",
    f"rounds.count={DIGITS}": "at most 18 digits",
    "rounds.count=1\nseed=2": "a whole number",
    "clock.late=next": "late: got 'next' without deadline",
    "rounds={fraction=0.5,count=2,select={by='power-of-choice',candidates=1}}": "at least the cohort's 2",
    "rounds.fraction=nan": "rounds.fraction: got nan",
    "rounds=1": "a section of fields",
    "rounds.count": "section.field=value",
    "name.x=1": "is a single value",
    "model.name=3": "model.name: got 3; allowed: text",
    "training.learning_rate=1e300": "numbers up to 1e30",
    "flaws=[{kind='noisy',amount=true,pick='random',count=1}]": "flaws.0.amount: got true",
    "flaws=[{kind='stale',amount=0,pick='random',count=1}]": "flaws.0.amount: got 0; allowed: greater than or",
    # unknown fields and words, with what was perhaps meant
    "rounds.cuont=1": "did you mean 'count'",
    "rounds.learning_rate=1": "rounds.learning_rate: unknown field (did you mean 'training.learning_rate'?)",
    "plugins=['own.py']": "plugins: unknown field (did you mean 'algorithm.plugins' or 'weighing.plugins'?)",
    "ronds.count=1": "unknown field (did you mean 'rounds'?)",
    "data.source=digitz": "data.source: got 'digitz' (did you mean 'digits'?)",
    "kind=['x']": "kind",
    # names that could steer a terminal or leave a folder
    f"name={LONG}": "up to 100 letters",
    "name='a\x1b[31m'": "\\x1b[31m",
    "name=a/b": "name: got 'a/b'",
    "beside.'a#b'.criteria=['DS']": "without '#'",
    "beside.DS.criteria=['DS']": "the name of the main rule",
    # what fits no other field, or the data
    "rounds.min_clients=5": "rounds.min_clients: got 5; allowed: at most 4",
    "partition.clients=899": "at most 898",
    "model.hidden=[5]": "model.hidden: got [5] with model.name 'logistic'",
    "model.outputs=3": "model.outputs: got 3 for 10 classes",
    "model={name='mlp',hidden=[1000000,1000000]}": "parameters; allowed: at most 1,000,000,000",
    "model={name='cnn',kernel=2}": "an odd number",
    "training.loss=barron": "allowed: 1 output",
    "training.batch_size=0": "training.batch_size: got 0; allowed: greater than or equal to 1, 'full'",
    "compute.device='cuda:99'": "compute.device",
    "compute.device=tpu": "compute.device: got 'tpu'",
    "compute.engine='stacked/vmap:0'": "compute.engine",
    "store.folder='learn.toml'": "is a file",
    # code that an experiment names
    "model.name='os:getcwd'": "'os' is part of Python",
    "model.name='x:'": "is not declared for Steelyard",
    "weighing.plugins=['no.py']": "there is no file",
    # criteria and rules
    "weighing.criteria=['[/b]']": "criterion '[/b]' is not known",
    "weighing={criteria=['XX'],priority='DS>LD'}": "one of your own: name its file in weighing.plugins",
    "weighing.criteria=['DS','DS']": "each criterion once",
    "weighing.criteria=['VP']": "VP is measured on the server's test set",
}
RECOMMENDING: dict[str, str] = {
    "interactions.core=100": "core",
    "interactions.path='.'": "allowed separators",
    "interactions.columns={user='x'}": "not in the header",
    "interactions.category_column='x'": "category_column",
    "items={path='ratings.tsv',title=99}": "no column '99'",
    "knowledge={sources=[]}": "knowledge.sources: got",
    "knowledge={sources=[{path='x',format='owl'}]}": "knowledge.sources.0.format: got 'owl'",
    "fpl.mode=custom": "triples",
    "fpl.decoys=inf": "fpl.decoys",
    "partition.clients=3": "unknown field",
}
EVALUATE = "recommend evaluate --train train.tsv --test test.tsv --recommendations lists.tsv"
BASELINE = "recommend baseline popular --train train.tsv --out"
ATTACK = "attack learn.toml --attack"
COMPARE = "compare learn.toml --rules"
INIT = "federate init app learn.toml"
MANY = ",".join(map(str, range(1, 301)))
PLAN = "privacy plan --rounds 30 --delta 1e-6"
TYPED: dict[str, str] = {
    "run": "Missing argument",
    "run quickstrat": "did you mean 'quickstart'",
    "run train.tsv": "holds data and is no experiment. Write one: steelyard new my.toml --csv train.tsv",
    "run empty.toml": "empty.toml: holds no field",
    "run learn.toml extra": "unexpected extra argument",
    "run learn.toml --nope": "--nope",
    "run learn.toml --seed 1.5": "'--seed'",
    "run learn.toml --out ''": "--out: got nothing",
    "run learn.toml --out train.tsv/x": "is a file",
    f"run learn.toml --out {LONG[:300]}": "File name too long",
    "run learn.toml --set partition.test=none --set rounds.stop_at_target=true": "no accuracy to reach",
    "run learn.toml --set partition.test=none --set rounds.keep=best": "rounds.keep: given with partition.test 'none'",
    "rnu": "No such command",
    "new my.toml --npz x.npz": 'new: --npz was removed. Write an experiment with [data], source = "npz"',
    "models": "models: the command was removed. Type `steelyard list models`.",
    "list rules --plugin own.py": "--plugin: got it with rules; allowed with: criteria, algorithms",
    "sweep learn.toml --one-by-one": "sweep: --one-by-one was removed. Rules and seeds of a point are one run.",
    "privacy audit learn.toml --figures x": "privacy audit: --figures was removed. Leave it out.",
    "new my.toml --csv j.json": "--csv: got 'j.json', which is JSON; expected a table",
    "import far.csv --out i": "got '999999999999'; allowed: a whole number from 0 to 9,999,999",
    "table .": "not a run folder: experiment.toml is missing",
    "resume x --quit": "see `steelyard resume --help`",
    "export no --to xml": "'--to'",
    "ls no": "no such folder",
    "top . --every nan --once": "--every: got nan",
    "watch nowhere --port 0": "nowhere: no such folder",
    "list criteria --plugin no.such": "is not declared for Steelyard",
    "list recipes --quiet --verbose": "--verbose, --quiet: got both",
    f"{COMPARE} DS --seeds 1000000": "1 to 1,000",
    f"{COMPARE} DS,EQ --participation 1,1": "--participation: got '1,1'; allowed: each share once",
    f"{COMPARE} DS --baseline LD": "--baseline",
    "compare learn.toml --part 1/2 --report": "--report: got with --part; allowed: the whole has these",
    "compare learn.toml --part 1/2 --full --baseline DS": "--full and --baseline: got with --part",
    "compare learn.toml --participation 1 --part 1/2": "--part: got with --participation; allowed: each of its runs",
    f"{COMPARE} onlin": "did you mean 'online'",
    f"{COMPARE} DS,DS": "--rules: 'DS' is there twice",
    f"{COMPARE} DS,fedavg": "--rules: 'fedavg' is there twice, as 'DS' too",
    f"{COMPARE} feddisco(a=1,a=2)": "--rules: got 'feddisco(a=1,a=2)'; allowed: a once",
    f"{COMPARE} 'clip(EQ;mix;mix)'": "allowed: mix once",
    f"{COMPARE} {LONG}": "at most 200 characters",
    f"{COMPARE} 'power(DS)^0'": "power",
    f"{COMPARE} 'power(DS)^1e9'": "power: got 1000000000.0; allowed: less than or equal to 1000",
    f"{COMPARE} 'choquet(DS,LD;nofile)'": "nofile",
    f"{COMPARE} server-only": "test set",
    f"{COMPARE} DS --set partition.test=none": "nothing to compare rules by",
    "sweep learn.toml --over training.epochs=1,2 --set training.epochs=3": "training.epochs is in --over too",
    "sweep learn.toml --over training.epochs=1 --measure accurracy": "did you mean 'accuracy'",
    f"sweep learn.toml --over training.batch_size={MANY} --over training.epochs={MANY}": "a grid of 90,000 points",
    "sweep learn.toml --over training.learning_rat=1": "did you mean 'learning_rate'",
    "sweep learn.toml --over training.learning_rate=0.1,fast": "training.learning_rate: got 'fast'",
    "sweep learn.toml --over training.epochs=[1,2],3": "training.epochs.0: got [1, 2]",
    # the first point would run; the second is named before it does
    "sweep learn.toml --over model.name=mlp,logstic": "--over: model.name: got 'logstic' (did you mean 'logistic'?)",
    "sweep learn.toml --over training.epochs=1 --out .": "--out: got nothing or the working folder",
    "attack learn.toml": "--attack: got nothing; allowed: ",
    f"{ATTACK} adaptve": "--attack: got 'adaptve' (did you mean 'adaptive'?)",
    f"{ATTACK} sign-flip --fraction 0.5": "--fraction: got 0.5; allowed",
    f"{ATTACK} sign-flip --out train.tsv": "is a file",
    "attack adafed-regression --attack sign-flip": "this experiment has no classes",
    "attack fpl-ml1m --attack sign-flip": "of kind 'recommend' have no malicious",
    "arena": "allowed: one of them",
    "arena NOPE": "arena: 'NOPE' names no rule or criterion 'NOPE'",
    "arena EQ --scenes hospital": "--scenes: got 'hospital' (did you mean 'hospitals'?)",
    "arena EQ --seeds 99": "--seeds: got 99; allowed: a whole number from 1 to 10",
    "arena EQ --part 3/2": "--part: got '3/2'",
    "arena --retune --seeds 1 --draft": "arena: got --draft, --seeds with --retune",
    "arena --check .": "there is no file arena.json",
    f"{INIT} --superlink 127.0.0.1:99999": "65535",
    f"{INIT} --root-certificates nothing.pem": "nothing.pem",
    f"{INIT} --root-certificates no.pem": "no certificate",
    "federate init . learn.toml": "is not empty",
    "federate certificates certs": "--host: got none",
    "federate certificates certs --renew": "--renew: certs/ca.pem cannot be read",
    "federate key train.tsv": "exists already",
    "federate ledger keeps.toml": "keeps no ledger",
    "federate node rows.toml": "rows.toml: min-rows: got 0",
    "federate node here.toml": "server: got 'here'",
    "federate node plain.toml": "ca: got None",
    "federate node slip.toml": "alow: unknown (did you mean 'allow'?)",
    "federate node broke.toml": "not valid TOML",
    "federate node stateless.toml": "given without state",
    "federate node nowhere.toml": "is a file",
    "federate node broken.toml": "is damaged (it is empty)",
    "federate register x no.pub": "cannot be read",
    "federate local learn.toml --nodes 1000000": "--nodes",
    f"{PLAN} --epsilon 1 --noise 1": "--epsilon, --noise: got both or none of the two",
    f"{PLAN} --epsilon 0": "--epsilon: got 0.0; allowed: greater than 0",
    "privacy plan --rounds 100000 --epsilon 1e-7": "--epsilon: 1e-07 at delta 1e-05 needs more noise",
    f"{PLAN} --noise 1e-4": "--noise: got 0.0001; allowed: greater than or equal to 0.001",
    f"{PLAN} --noise 1 --delta 1": "--delta: got 1.0; allowed: less than 1",
    f"{PLAN} --noise 1 --delta .9": "--delta: got 0.9 with 2 clients",
    f"{PLAN} --noise 1 --sampling 1.5": "--sampling: got 1.5; allowed: less than or equal to 1",
    f"{PLAN} --noise 1 --clients 50 --sampling 0.01": "at least 0.02",
    f"{PLAN} --noise 1 --clients 1000 --delta 1e-3": "below 0.001, or --accept-large-delta",
    f"{PLAN} --noise 1 --sampling 1e-12": "with 1e+12 clients",
    "weigh no.csv": "no.csv",
    "weigh clients.csv --by 'men(DS)'": "did you mean 'mean'",
    "weigh clients.csv --by 'power(DS)^1e300'": "1e30",
    "weigh clients.csv --by 'weighted-mean(DS=a)'": "a number",
    "weigh clients.csv --score mean": "--by",
    "weigh clients.csv --by XX": "names no rule or criterion 'XX'",
    "weigh clients.csv --by 'clip(DS)'": "needs updates or rounds",
    "weigh clients.csv --by 'choquet(DS,LD;none.toml)'": "none.toml cannot be read",
    "recommend split ratings.tsv --out o --core 1000000000": "nothing is left",
    "recommend split ratings.tsv --out o --count 0 --kind newest": "count",
    "recommend split ratings.tsv --out old": "exists already",
    f"{EVALUATE} --cutoff 1000000000": "1 to 10,000",
    f"{EVALUATE} --cutoff 5,-1": "--cutoff: got '5,-1'",
    f"{EVALUATE} --threshold 100": "no test interaction",
    f"{EVALUATE} --test train.tsv": "is --train too",
    f"{EVALUATE} --catalogue few.tsv": "not in the cat",
    "recommend baseline populr --train train.tsv --out x.tsv": "did you mean 'popular'",
    f"{BASELINE} x.tsv --set factors=3": "factors: unknown field",
    "recommend baseline fcf --train train.tsv --out x.tsv --set rate=nan": "rate: got nan",
    f"{BASELINE} train.tsv": "exists already",
    f"{BASELINE} no/such/x.tsv": "there is no folder",
    f"{BASELINE} x.tsv --knowledge rec.toml": "popular looks at no features",
    "recommend baseline vsm --train train.tsv --out x.tsv": "--knowledge: vsm needs it",
    "recommend features learn.toml": "has no section [knowledge]",
    "recommend features known.toml --item x": "--item: got 'x'; allowed: one of",
    f"recommend audit rec.toml --rounds {DIGITS}": "--rounds",
    "recommend audit rec.toml --decoys 1e9": "--decoys",
    "recommend audit learn.toml": "not of kind 'recommend'",
}
"""What is typed, and what the line must name."""
EXPERIMENTS: dict[str, tuple[Content, str]] = {
    "utf-16": (LEARN.encode("utf-16"), "text"),
    "duplicate key": ("name = 'a'\nname = 'b'", "not valid TOML"),
    "two signs": ("name = 'x'\nrounds = = 3\n", "line 2"),
    "digits": (f"seed = {DIGITS}", "thousands of digits"),
    "deep": ("a = " + "[" * 5000, "nested too deeply"),
    "markup": ("'[/b]' = 1", "[/b]: unknown field"),
    "control": ('"\\u001b[31m" = 1', "\\x1b[31m: unknown field"),
    "a folder as a file": ('[data]\nsource = "npz"\npath = "."\n' + LEARN[11:], "cannot be read"),
    "a path too long": (f'[data]\nsource = "npz"\npath = "{LONG}"\n' + LEARN[11:], "File name too long"),
}
RATINGS: dict[str, tuple[Content, str]] = {
    "empty": ("", "the file is empty"),
    "empty cell": (HEAD + "u0\t\t3\n", "item is ''"),
    "rating infinite": (HEAD + "u0\ti1\tinf\n", "'inf'"),
    "decimal comma": ("user;item;rating\nu0;i1;3,5\n", "'3,5'"),
    "user twice": ("user\tuser\titem\n1\t2\t3\n", "more than once"),
    "time a word": ("user\titem\trating\ttime\nu\ti\t1\tx\n", "seconds since 1970"),
}
KNOWLEDGE: dict[str, tuple[Content, str]] = {
    "empty": ("\n\n", "k.tsv: the file is empty"),
    "without links": ("1\n2\n", "k.tsv: 1 columns without a header"),
    "of no item": ("7\t1\t2\n\t2\n", "k.tsv: line 2: begins with '2' after no item"),
    "binary": (b"\0\xff\0\n\t\n", "expected"),
}
TABLES: dict[str, tuple[Content, str]] = {
    "binary": (bytes(range(128, 256)), "UTF-8"),
    "semicolons": (TABLE.replace(",", ";"), "semicolons"),
    "no names": ("DS,LD\n3,1\n1,2\n", "has no column 'client', and 'DS' holds numbers"),
    "cell below 0": (TABLE.replace(".9", "-1"), "line 2"),
    "sum overflows": ("client,DS\nA,1e308\nB,1e308\n", "1e30"),
}
CAPACITIES: dict[str, tuple[Content, str]] = {
    "unknown": ("X = 1", "X"),
    "falls": ("DS = 0.9\nLD = 0.8\n'DS,LD' = 0.5", "DS"),
}
READ: dict[str, tuple[str, dict[str, tuple[Content, str]]]] = {
    "bad.toml": ("run bad.toml", EXPERIMENTS),
    "bad.tsv": ("recommend split bad.tsv --out o", RATINGS),
    "k.tsv": ("recommend features known.toml", KNOWLEDGE),
    "bad.csv": ("weigh bad.csv", TABLES),
    "c.toml": ("weigh clients.csv --by 'choquet(DS,LD;c.toml)'", CAPACITIES),
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


def test_calls_are_refused_in_one_line_too() -> None:
    for call, told in (
        (lambda: Experiment.load("quickstart").compare(["DS", "DS"]), "'DS' is there twice"),
        (lambda: Experiment.load("quickstart").compare([]), "rules: got an empty list"),
        (lambda: Experiment.load("quickstart", {"rounds.cuont": 1}), "rounds.cuont: unknown field"),
        (lambda: Experiment(model={"name": torch.nn.Linear(3, 2)}), "model.name: got Linear(in_features=3"),
        (lambda: check_own(NodeConfig.read({"client": "a", "data": "none.csv"})), "node config data: found no"),
        (lambda: KgflexSettings(limits=(0, 0)), "limits: got "),
        (lambda: build(torch.nn.Linear(3, 2).half, (3,), 2, 1), "torch.float16; allowed: torch.float32"),
    ):
        assert_refused(call, told)


def test_another_experiment_in_the_folder_of_a_run_is_told(command: CommandLine, tmp_path: Path) -> None:
    lay_out(tmp_path, {})
    assert command("run", "learn.toml", "--out", "r").returncode == 0
    assert "RUNS: got r, r; allowed: each run once" in command("report", "r", "r").stderr
    own = tmp_path / "r" / "experiment.toml"
    own.write_text(own.read_text().replace('name = "t"', 'name = "other"'))
    told = "is not as the run wrote it: name: 't' when the run began, 'other' now"
    assert told in command("table", "r").stderr


@pytest.mark.parametrize(
    ("entry", "parts"),
    [
        (Entry("../x", "key"), ("--name: got '../x'",)),
        (Entry("a", "key", ("\x1b[2J",)), (r"--client: got '\x1b[2J'",)),
        (Entry("old", "key"), ("--name: 'old' is another key's", "`--remove old` first")),
    ],
)
def test_names_in_the_register_of_a_server(tmp_path: Path, entry: Entry, parts: tuple[str, ...]) -> None:
    file = tmp_path / "register.json"
    enter(file, Entry("old", "its key"))
    assert_refused(lambda: enter(file, entry), *parts)
