"""Pages are true: what they say of files, fields, faults, names and ways to add things is so; links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import io
import json
import re
import shutil
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy
import pytest
import torch
from pydantic import BaseModel
from tests.docs.pages import beside, long_sentences, made_pages, sentences, written_pages
from tests.kit import assert_refused
from tests.warm import ROOT, warm_script

import steelyard
from steelyard import manual
from steelyard.adapters import rounds
from steelyard.base import files
from steelyard.base.settings import known_fields
from steelyard.clients.local import Simulation
from steelyard.data import PartitionSettings, share_out
from steelyard.experiment.loading import kind_of
from steelyard.federate import book
from steelyard.learning.models import ModelSettings
from steelyard.learning.training import TrainingSettings
from steelyard.privacy import sharing
from steelyard.report.figures.look import theme
from steelyard.report.rendering import asset
from steelyard.runs.schema import declared
from steelyard.studies import sweep_table


def test_no_sentence_is_too_long() -> None:
    assert len(long_sentences("word " * 41 + "end.")) == 1
    assert not long_sentences("word " * 38 + "end. " + "word " * 38 + "end.\n| " + "word " * 30 + "| word |")
    every = {**written_pages(), **made_pages()}
    assert {path: found for path, text in every.items() if (found := long_sentences(text))} == {}


UNPLAIN = re.compile(
    r"equal say|seen from|held against|hold it against|cannot be told from|cannot be lied about|more is better|explod|"
    r"worst tenth of|singly|of the clients' own|weights by others|the rivals|hostile clients|goes on\b|\banew\b|"
    r"common model|rows that (?:weigh|report)|reporting rows|shared out|with your rights|\d %",
    re.IGNORECASE,
)
"""Words for which the field has better ones: equal weights, compare with, diverge, malicious, global model, 95%."""


def test_pages_use_the_words_of_the_field() -> None:
    """Of those that people write; pages of single results and of a format made from the code have their own words."""
    others = ("docs/results/", "docs/reference/result.md", "docs/architecture.md", "CONTRIBUTING.md")
    pages = {path: text for path, text in written_pages().items() if not path.startswith(others)}
    pages["docs/results/index.md"] = written_pages()["docs/results/index.md"]
    found = {path: [each for each in sentences(text) if UNPLAIN.search(each)] for path, text in pages.items()}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_the_guide_is_short_and_every_page_is_in_the_menu() -> None:
    """At most 26 pages of at most 1,500 words; a page that is in no menu is found by nobody."""
    guide = {path: text for path, text in written_pages().items() if path.startswith("docs/guide/")}
    assert len(guide) <= 26
    assert {path: words for path, text in guide.items() if (words := len(text.split())) > 1_500} == {}
    menu = set(re.findall(r"[\w/-]+\.md$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    pages = {path.removeprefix("docs/") for path in written_pages() if path.startswith("docs/")}
    made = {path for path in made_pages() if "/policies/" not in path}
    assert menu - {"contributing.md", "changelog.md"} == pages | made


@pytest.mark.parametrize("dark", [False, True])
def test_figures_have_the_colours_of_the_pages(dark: bool) -> None:
    """Of theme.css, which report, page, offline pages and the site begin with."""
    colours = {
        name: pair[dark] for name, *pair in re.findall(r"--(\w+): light-dark\((\S+), (\S+)\)", asset("theme.css"))
    }
    look = theme(dark)
    drawn = {"ink": look["title"]["color"], "soft": look["axis"]["domainColor"], "line": look["axis"]["gridColor"]}
    assert drawn.items() <= colours.items()


def test_diagrams_are_as_drawn_and_no_picture_is_kept_for_nothing() -> None:
    images = ROOT / "docs" / "images"
    for name, draw in beside("diagrams").DIAGRAMS.items():
        kept = (images / f"{name}.svg").read_text(encoding="utf-8")
        assert kept == draw().svg(), f"{name}: python docs/diagrams.py draws another one"
    links = [
        (path, link) for path, text in written_pages().items() for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    ]
    shown = {((ROOT / path).parent / link).resolve() for path, link in links}
    assert {path.resolve() for path in images.rglob("*.*")} - shown == set()


def test_every_fault_of_the_server_has_a_test_that_is_there() -> None:
    text = written_pages()["docs/reference/server.md"].split("## Faults", 1)[1].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert len(rows) >= 15
    for fault, _, tested in rows:
        named = re.match(r"`(?:python -m benchmarks\.(\w+)|(test_\w+))`", tested.strip())
        assert named is not None, fault
        measured, test = named.groups()
        assert f"def {test}(" in tests if test else (ROOT / "benchmarks" / f"{measured}.py").is_file(), fault


def test_every_field_that_a_server_can_set_is_classed_with_a_test_that_is_there() -> None:
    page = written_pages()["docs/reference/security.md"]
    text = page[page.index("## Every field of an experiment") :].split("\n## ", 1)[0]
    rows = [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| `")]
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py"))
    assert [row[0] for row in rows if len(row) != 4 or f"def {row[3].strip(' `')}(" not in tests] == []
    sections = [found for row in rows for found in re.findall(r"`([\w.]+): ([\w, ]+)`", row[0])]
    classed = [f"{section}.{name}".removeprefix("top.") for section, names in sections for name in names.split(", ")]
    real = {name for kind in ("learning", "recommend") for name in settable(kind_of(kind), [])}
    assert set(classed) == real
    assert len(classed) == len(set(classed))


def settable(kind: type[BaseModel], path: list[int | str]) -> Iterator[str]:
    """Yield every field of an experiment by dotted name, of lists of sections those of one; rules beside are one."""
    for name in known_fields(kind, path):
        inside = [at for at in ([*path, name], [*path, name, 0]) if name != "beside" and known_fields(kind, at)]
        if inside:
            yield from settable(kind, inside[0])
        else:
            yield ".".join(str(part) for part in [*path, name] if part != 0)


def test_every_file_key_tensor_and_table_that_is_written_is_named() -> None:
    page = written_pages()["docs/reference/files.md"]
    written = [
        files.DATABASE,
        files.LEDGER,
        book.LEDGER,
        book.RECEIPTS,
        sweep_table.RESULTS,
        f"{files.CHECKPOINTS}/",
    ]
    assert [name for name in written if f"`{name}" not in page] == []
    entries = {
        "## The ledger of a node": book.Entry,
        "## Receipts of a node": book.Receipt,
        "| key of a proof |": book.Proof,
        "## What a node took part in": book.Asked,
    }
    for heading, entry in entries.items():
        table = page[page.index(heading) :].split("|---|---|\n")[1].split("\n\n")[0]
        keys = {key for row in table.splitlines() for key in re.findall(r"`(\w+)`", row.split("|")[1])}
        assert keys == set(entry.model_fields), heading
    tables = dict(
        re.findall(r"^## `(\w+)`$(.*?)(?=^## |\Z)", made_pages()["reference/database.md"], re.MULTILINE | re.DOTALL)
    )
    assert list(tables) == list(declared())
    for table, columns in declared().items():
        assert [column for column in columns if not re.search(rf"\b{column}\b", tables[table])] == []


@pytest.mark.parametrize("kind", ["learning", "recommend"])
def test_every_field_is_on_its_page_with_its_meaning_and_an_example_that_it_accepts(kind: str) -> None:
    fields, page = beside("fields"), made_pages()["reference/fields.md"]
    entry = re.compile(r"^#### `([\w.]+)` \{: #[\w-]+ \}\n\n(.*?)(?=\n\n+#|\n*\Z)", re.DOTALL | re.MULTILINE)
    entries = dict(entry.findall(page))
    documented = {path.split(".")[-1] for path in entries}
    assert not [name for name, text in entries.items() if len(text.split("\n\n")) < 2]
    for section in kind_of(kind).model_json_schema()["$defs"].values():
        own = {name for name, field in section.get("properties", {}).items() if "$ref" not in str(field)}
        assert own <= documented
    for place in fields.sections(kind_of(kind)):
        for name, field in place.fields().items():
            value = tomllib.loads(fields.example_line(place, name, field))
            for part in [*(place.path.split(".") if place.path and not place.several else []), name]:
                value = value[part]
            assert fields.accepts(field, value), f"{place.path}.{name} = {value}"
    assert not fields.accepts(kind_of(kind).model_fields["kind"], "another")


def test_every_command_option_and_argument_has_its_help() -> None:
    page = beside("generated").commands_page()
    for command in ("run", "weigh", "recommend list", "federate local"):
        assert f"## `steelyard {command}`" in page
    assert not [line for line in page.splitlines() if line.startswith("| `") and line.endswith("|  |")]


BLOCKS = {
    block.rsplit(".", 1)[1]: block
    for block in re.findall(r"^::: ([\w.]+)$", written_pages()["docs/reference/api.md"], re.MULTILINE)
}


def test_the_page_of_names_has_signature_docstring_and_members_of_each() -> None:
    page = beside("api_page").filled(written_pages()["docs/reference/api.md"])
    assert "0x" not in page  # Checks of a type print as addresses, others on every machine.
    assert [f"### `{name}`" for name in BLOCKS if f"### `{name}`\n" not in page] == []
    assert ":::" not in page
    run = page.partition("#### `Experiment.run`\n")[2].partition("\n####")[0]
    for words in ("```python\nExperiment.run(", "    out: str | Path | None = None,", "```pycon\n>>>", "- UserError: "):
        assert words in run
    assert "#### `History.models`" in page
    assert "- `arrays`: The new model; None where the old one is kept." in page


def object_of(block: str) -> Any:
    module, name = block.rsplit(".", 1)
    for part, package in {"steelyard.nvflare": "nvflare", "steelyard.flower": "flwr"}.items():
        if module == part:
            pytest.importorskip(package)
    return getattr(import_module(module), name, None) or import_module(block)


@pytest.mark.parametrize("name", sorted(set(BLOCKS) - set(steelyard.__all__) | {"Weighed"}))
def test_a_name_beyond_the_first_ones_has_an_example_that_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that `steelyard` itself exports are tried by tests/test_gate.py."""
    monkeypatch.chdir(tmp_path)
    found = object_of(BLOCKS[name])
    examples = doctest.DocTestParser().get_examples(found.__doc__ or "")
    assert examples, f"{name} has no example"
    data = steelyard.in_memory(numpy.zeros((20, 3)), [0, 1] * 10)
    plain = [each for each, block in BLOCKS.items() if not block.startswith(("steelyard.nvflare", "steelyard.flower"))]
    known: dict[str, Any] = {each: object_of(BLOCKS[each]) for each in plain}
    known |= {"steelyard": steelyard, "numpy": numpy, "torch": torch, "rows": data, "sharing": sharing}
    ones = numpy.ones(2)
    known["replies"] = [rounds.Reply("ann", {"layer": ones}, 30), rounds.Reply("bob", {"layer": -ones}, 10)]
    if name == "SimulationServer":
        populations = {1: share_out(data, PartitionSettings(clients=2), seed=1)}
        known["clients"] = Simulation(populations, ModelSettings(name="logistic"), TrainingSettings(epochs=5))
    if name == "Weighed":
        known |= {"FedAvg": import_module("flwr.serverapp.strategy").FedAvg}
    known[name] = found
    for example in examples:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(example.source, name, "single"), known)
        if example.want:
            assert printed.getvalue() == example.want


USED = """
import json
import numpy as np
import steelyard
from steelyard import Experiment
from steelyard.recommend.interactions import build
from steelyard.recommend.metrics import measure
from steelyard.recommend.metrics import GroundTruth

experiment = Experiment(
    data={"source": "stripes"},
    partition={"scheme": "iid", "clients": 4},
    model={"name": "logistic"},
    rounds={"count": 1},
    compute={"engine": "loop", "device": "cpu"},
)
words = ["FEW", "least(FEW,DS)", "power-mean(FEW,DS)^3", "fedhalf", "shortest"]
result = experiment.compare(words, out="run", progress=False)
rules = [rule.rule for rule in result.comparison.rules]
rows = build(["a", "a", "b"], ["x", "y", "x"])
shown = measure(GroundTruth.between(rows, rows).view(np.array([[0, 1], [0, -1]]), 2))["items_shown"]
print(json.dumps({"rules": rules, "data": result.experiment.data.source, "shown": shown, "file": steelyard.__file__}))
"""


def test_the_examples_of_contributing_are_found_and_used(tmp_path: Path) -> None:
    """In a copy of the package with every example of CONTRIBUTING put where it says."""
    shutil.copytree(ROOT / "src", tmp_path / "src")  # with bytecode, which Python takes for files that did not change
    block = re.compile(r"```python\n# (at the end of|the file) (src/\S+)\n(.*?)```", re.DOTALL)
    for where, path, code in block.findall(written_pages()["CONTRIBUTING.md"]):
        file = tmp_path / path
        assert file.exists() == (where == "at the end of"), path
        before = file.read_text() + "\n\n" if file.exists() else ""
        file.write_text(before + code)
    (tmp_path / "used.py").write_text(USED, encoding="utf-8")
    ran = warm_script(tmp_path / "used.py", folder=tmp_path / "src", fresh=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(tmp_path)
    assert set(found["rules"]) >= {"FEW", "least(FEW,DS)", "power-mean(FEW,DS)^3", "fedhalf", "shortest"}
    assert (found["data"], found["shown"]) == ("stripes", 2)


def test_the_pages_in_the_package_fetch_nothing_and_their_links_lead_somewhere(tmp_path: Path) -> None:
    """Also links to a heading, which the pages' sources only name."""
    written = manual.write_pages(tmp_path)
    pages = {path: path.read_text(encoding="utf-8") for path in written.rglob("*.html")}
    assert {path.relative_to(written).with_suffix("").as_posix() for path in pages} == set(manual.pages())
    anchors = {path: set(re.findall(r' id="([^"]+)"', text)) for path, text in pages.items()}
    lost: list[str] = []
    for path, text in pages.items():
        assert "<script" not in text
        assert not re.search(r'<(?:img|link|iframe)[^>]*"https?:', text)
        for link in re.findall(r'(?:href|src)="(?!https://)([^"]+)"', text):
            to, _, place = unquote(link).partition("#")
            target = (path.parent / to).resolve() if to else path
            if not target.is_file() or (place and place not in anchors[target]):
                lost.append(f"{path.relative_to(written)}: {link}")
    assert lost == []
    assert "<table>" in pages[written / "guide" / "which-rule.html"]


def test_the_page_whose_headings_have_the_words_comes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert manual.search("malicious clients")[0][1] == "guide/hostile-clients"
    assert manual.search("nowhereatall") == []
    monkeypatch.setattr(manual, "PLACES", (tmp_path,))
    assert_refused(manual.sources, "docs", "no pages")
