"""The snippets of a page of documentation, and running them one after another as a reader would.

A page is one sitting in one empty folder: commands, Python and files follow each other. What a fence says decides:

    ```sh                     every command is run
    ```python                 is run; names live on to the end of the page
    ```toml                   is accepted as (a part of) an experiment
    ```LANGUAGE title="FILE"  is written to that file

A comment right above a fence says what a test must know:

    <!-- needs: mnist -->                        data in that folder; without it the snippet is not run
    <!-- shortened: --set rounds.count=1 -->     what the test adds to commands that train, to be quick
    <!-- prints: Use VP>DS: accuracy is -->      what the last command of the fence must print
    <!-- refused -->                             the command must end with exit code 2: it shows an error
    <!-- not run: reason -->                     cannot be run by a test
    <!-- printed by: steelyard run typo -->      the text is in the error line of this command (exit code 2)
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.kit import inside

_FENCE = re.compile(r"^( *)```(\w+)?([^\n]*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_NOTE = re.compile(r"<!-- (needs|shortened|prints|refused|not run|printed by)(?:: ([^\n]*?))? -->\s*$")
_TITLE = re.compile(r'title="([^"]+)"')
_TRAINING = tuple(f"steelyard {words} " for words in ("run", "compare", "arena", "sweep", "attack", "recommend audit"))
LANGUAGES = {"sh", "python", "toml", "text", "json", "csv", "mermaid"}


@dataclass(frozen=True)
class Snippet:
    """One fence of a page: its language, its text, the file that it is, and what the page's comments say of it."""

    language: str
    text: str
    line: int
    title: str | None
    notes: dict[str, str]


def snippets(page: str) -> list[Snippet]:
    """Return the fences of a page in their order."""
    found: list[Snippet] = []
    for match in _FENCE.finditer(page):
        indent, language, rest, text = match.groups()
        title = _TITLE.search(rest)
        body = "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))
        line = page.count("\n", 0, match.start()) + 1
        found.append(
            Snippet(language or "", body, line, title and title.group(1), _notes(page[: match.start()]))  # type: ignore[arg-type]
        )
    return found


def _notes(before: str) -> dict[str, str]:
    notes: dict[str, str] = {}
    before = before.rstrip(" ")
    while (match := _NOTE.search(before)) and before[match.end() :].strip() == "":
        notes[match.group(1)] = match.group(2) or ""
        before = before[: match.start()].rstrip()
    return notes


def commands(text: str) -> list[str]:
    """Return the single commands of a shell snippet: lines, with continued lines joined and comments left out."""
    lines = (re.sub(r"(^|\s)#.*", "", line).strip() for line in re.sub(r"\\\n\s*", "", text).splitlines())
    return [line for line in lines if line]


class Sitting:
    """Runs the snippets of one page in the present folder; each `steelyard` command in a fork of this warm process."""

    def __init__(self, data: Path | None) -> None:
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.data = data

    def run(self, snippet: Snippet) -> str | None:
        """Run one snippet; return what went wrong, or None."""
        if "not run" in snippet.notes:
            return None if snippet.notes["not run"] else "`not run` without a reason"
        needs = snippet.notes.get("needs")
        if needs and (self.data is None or not all((self.data / name).exists() for name in needs.split())):
            return None
        if snippet.title:
            path = Path(snippet.title)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(snippet.text, encoding="utf-8")
            return None
        if "printed by" in snippet.notes:
            return _printed(snippet)
        if snippet.language == "sh":
            return self._shell(snippet)
        if snippet.language == "python":
            return self._python(snippet)
        if snippet.language == "toml":
            return _toml(snippet)
        return None if snippet.language in LANGUAGES else f"a fence of '{snippet.language}'"

    def _shell(self, snippet: Snippet) -> str | None:
        expected = 2 if "refused" in snippet.notes else 0
        output = ""
        for command in commands(snippet.text):
            if snippet.notes.get("shortened") and command.startswith(_TRAINING):
                command = f"{command} {snippet.notes['shortened']}"
            code, output = _command(command)
            if code != expected:
                return f"$ {command}\nexit code {code}, expected {expected}\n{output[-2000:]}"
            if "Traceback" in output:
                return f"$ {command}\n{output[-2000:]}"
        if (due := snippet.notes.get("prints", "")) not in output:
            return f"not printed: {due}\n{output[-2000:]}"
        return None

    def _python(self, snippet: Snippet) -> str | None:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(snippet.text, f"line {snippet.line}", "exec"), self.names)
        except Exception:
            return traceback.format_exc()
        return None


def _printed(snippet: Snippet) -> str | None:
    command = snippet.notes["printed by"]
    code, output = _command(command)
    message = output.strip().splitlines()[-1] if output.strip() else ""
    if code == 2 and message.startswith("steelyard: ") and snippet.text.strip() in message:
        return None
    return f"$ {command}\nexit code {code}; expected 2 and a line with: {snippet.text.strip()}\n{output[-2000:]}"


def _toml(snippet: Snippet) -> str | None:
    from steelyard.base.errors import UserError
    from steelyard.experiment.loading import build

    try:
        build(tomllib.loads(snippet.text))
    except (UserError, tomllib.TOMLDecodeError) as error:
        return str(error)
    return None


def _command(command: str) -> tuple[int, str]:
    words = [os.path.expandvars(word) for word in shlex.split(command, comments=True)]
    if words[0] != "steelyard" or any(mark in words for mark in ("|", ">", "<", "&&", "&", "||", ";")):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=280, check=False)
        return done.returncode, done.stdout + done.stderr
    with open(".output", "w+", encoding="utf-8") as output:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                done = inside(*words[1:], folder=Path.cwd())
                output.write(done.stdout + done.stderr)
                output.flush()
                code = done.returncode
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        output.seek(0)
        return os.waitstatus_to_exitcode(status), output.read()


def main() -> None:
    """Run a page in the present folder and write down what went wrong; tests start it as a process of its own."""
    import steelyard.api
    import steelyard.cli.main  # noqa: F401  every command forks from here and need not wait for it again

    data = os.environ.get("STEELYARD_DATA")
    sitting = Sitting(Path(data) if data else None)
    problems: list[str] = []
    for snippet in snippets(Path(sys.argv[1]).read_text(encoding="utf-8")):
        problem = sitting.run(snippet)
        if problem is not None:
            problems.append(f"line {snippet.line}: {problem}")
    Path("problems.json").write_text(json.dumps(problems), encoding="utf-8")


if __name__ == "__main__":
    main()
