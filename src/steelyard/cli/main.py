"""The command line: which commands there are, in which order, and what ends them."""

from __future__ import annotations

import functools
import os
import re
import resource
import sys
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn, cast

import typer
import typer.core
import typer.main

from steelyard import __version__
from steelyard.base import logs
from steelyard.base.errors import UserError, one_line
from steelyard.cli.options import LogFileOption, QuietOption, VerboseOption, share_options

COMMANDS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "Run experiments": (
        ("run", "running:run", "Run an experiment and show its result."),
        ("compare", "running:compare", "Run several rules on the same clients and name the one to use."),
        ("arena", "studies:arena", "Compare a rule with published methods on fixed tasks."),
        ("sweep", "studies:sweep", "Try a grid of fields and rules on a validation split."),
        ("resume", "running:resume", "Continue what was stopped, with bit-identical results."),
        ("join", "running:join", "Put the parts of a comparison, a sweep or an arena together."),
        ("attack", "studies:attack", "Make some clients malicious and compare rules."),
        ("paper", "studies:paper", "Run a table or figure of the papers beside the printed one."),
        ("withdraw", "proof:withdraw", "Run an experiment again without one client."),
    ),
    "Look at runs": (
        ("report", "watching:report", "Write one HTML file that shows what happened."),
        ("watch", "watching:watch", "Open a live page over the runs in a folder."),
        ("top", "watching:top", "Watch runs in the terminal."),
        ("ls", "watching:ls", "List the runs in a folder."),
        ("table", "running:table", "Show which rule to use, and every table of a run."),
        ("weigh", "watching:weigh", "Weight clients from a table, or a run by another rule, without training."),
        ("contributions", "proof:contributions", "Show what each client added to the model."),
        ("export", "showing:export", "Write a run's tables as files."),
        ("verify", "proof:verify", "Check that a run's folder is as its run wrote it."),
        ("record", "proof:record", "Write one page about a run to hand over."),
        ("import", "watching:import_run", "Make a run folder from another federation's records."),
    ),
    "Use models": (
        ("model", "models:model", "Take a model out of a run, into a folder of its own."),
        ("predict", "models:predict", "Let a model say what new rows are."),
        ("test", "models:on_new_rows", "Test a model on new rows whose labels are known."),
    ),
    "Write experiments": (
        ("new", "showing:new", "Write an experiment for your data, ready to run."),
        ("check", "showing:check", "Say what is wrong with an experiment's data before anybody trains."),
        ("list", "showing:list_names", "List rules, criteria, algorithms, networks and recipes."),
        ("explain", "showing:explain", "Print what a rule does in words, with an example."),
        ("show", "showing:show", "Print an experiment, its schema or its partition."),
    ),
    "More": (
        ("docs", "showing:docs", "Open the guide and the reference in the browser."),
        ("federate", "federate:app", "Run an experiment across machines, on Flower."),
        ("recommend", "recommend:app", "Federated recommenders: data, metrics, leakage, lists."),
        ("privacy", "privacy:app", "Differential privacy: plan a budget, audit what attacks find out."),
    ),
}
"""All commands by what they are for: the name, where in this room it is, and its line in `steelyard --help`.

A command's own `--help` is longer; it stands in the docstring.
"""

GONE: Mapping[tuple[str, str], str] = {
    **{
        ("steelyard", name): f"Type `steelyard list {name}`."
        for name in ("recipes", "criteria", "algorithms", "policies", "models")
    },
    ("new", "--npz"): 'Write an experiment with [data], source = "npz" and path.',
    ("new", "--idx"): 'Write an experiment with [data], source = "mnist" and path.',
    ("sweep", "--one-by-one"): "Rules and seeds of a point are one run. Use --jobs for several points at a time.",
    ("sweep", "--stacked"): "Leave it out: rules and seeds of a point are one run.",
    **{
        ("weigh", f"--{name}"): 'Write the rule in words: --by "DS>LD", --by "owa(DS,LD;most)".'
        for name in ("score", "priority", "weights", "quantifier", "capacity", "power", "criteria")
    },
    ("recommend", "top"): "Type `steelyard recommend list RUN --user USER`.",
    ("recommend", "lists"): "Type `steelyard recommend list RUN --out FILE`.",
    ("recommend", "clouds"): "Type `steelyard recommend kept RUN --picture FILE`.",
    ("privacy audit", "--recommender"): "Type `steelyard recommend audit EXPERIMENT`.",
    ("privacy audit", "--figures"): "Leave it out. The pictures are in docs/results/privacy.md.",
    ("privacy plan", "--accountant"): "Leave it out: rounds are added up by privacy loss distributions (pld).",
}
"""Commands and options that were removed since the last version, and what to do in their place."""

_log = logs.logger(__name__)
_NO_MEMORY = "not enough memory for this; allowed: fewer clients, smaller models or less data at once"
_LEAST_MEMORY = 1000 << 20
"""Bytes of addresses below which torch ends the process without a word of ours."""
_HEAVY = ("running:", "studies:")
"""Where the commands are that train."""
# Some versions of typer are built on click, others hold a copy of it: the errors of either are above this one.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_ClickException = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


class _Commands(typer.core.TyperGroup):
    """The commands of the table, each of which is imported when it is called.

    The list is in plain text: loading what draws boxes takes as long as the rest of `steelyard --help`.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._waiting = {name: home for entries in COMMANDS.values() for name, home, _ in entries}
        for entries in COMMANDS.values():
            self.commands.update({name: typer.core.TyperCommand(name, help=text) for name, _, text in entries})

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, None if name is None else self.load(name), rest

    def load(self, name: str) -> Any:
        """Return a command with all its options, or a group with all its commands; imports what they are made of."""
        if home := self._waiting.pop(name, None):
            if home.startswith(_HEAVY) and 0 < resource.getrlimit(resource.RLIMIT_AS)[0] < _LEAST_MEMORY:
                raise UserError(f"{name}: {_NO_MEMORY}{_limit()}")
            found, listed = resolve_name(f"steelyard.cli.{home}"), self.commands[name]
            if not isinstance(found, typer.Typer):
                alone = typer.Typer(add_completion=False)
                alone.command()(found)
                found = alone
            self.commands[name] = command = typer.main.get_command(found)
            command.name, command.help = name, command.help or listed.help
            share_options(self, command)
        return self.commands[name]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(typer.core.TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for panel, entries in COMMANDS.items():
            with formatter.section(panel):
                formatter.write_dl([(name, text) for name, _, text in entries])


_app = typer.Typer(
    name="steelyard",
    cls=_Commands,
    help="Federated learning that weights clients by measured criteria.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@_app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    log_file: LogFileOption = None,
) -> None:
    if version:
        print(f"steelyard {__version__}")
        raise typer.Exit


@functools.cache
def _root() -> _Commands:
    return cast("_Commands", typer.main.get_command(_app))


def command_line() -> Any:
    """Return the command line with all commands loaded: for what goes over every one of them, such as the reference."""
    for name in list(_root().commands):
        _root().load(name)
    return _root()


def main() -> NoReturn:
    """Run the command line, in one process or as one of those that torchrun starts."""
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        # For speed of start: a simulation on several processes trains, and imports torch.
        from steelyard.experiment.running import among_ranks

        among_ranks(_main, fail)
    _main()


def _main() -> NoReturn:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    try:
        logs.show()
        code = _root()(prog_name="steelyard", standalone_mode=False)
    except UserError as error:
        fail(one_line(str(error)))
    except _UsageError as error:
        _explain_usage(error)
    except _ClickException as error:
        fail(one_line(error.format_message()))
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; that is no error of ours.
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        # Files and folders of every command: too long a name, no right to write, a folder where a file is asked.
        fail(one_line(f"{error.filename or 'files'}: {error.strerror or error}"))
    except MemoryError:
        fail(_NO_MEMORY)
    except ImportError as error:
        if "failed to map" not in str(error) and "allocate memory" not in str(error):
            raise
        fail(f"{_NO_MEMORY}{_limit()}")  # a library does not fit into what the shell allows
    except (KeyboardInterrupt, typer.Abort):
        _log.error("stopped")
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _limit() -> str:
    """Say how much memory the shell allows (`ulimit -v`); empty where it sets no limit."""
    most = resource.getrlimit(resource.RLIMIT_AS)[0]
    return "" if most == resource.RLIM_INFINITY else f"; `ulimit -v` allows {most >> 20} MB, a run needs about 1,500"


def _explain_usage(error: typer.BadParameter) -> NoReturn:
    """Say in one line what is wrong with the command itself; a command without anything shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(2)
    path = error.ctx.command_path if error.ctx is not None else "steelyard"
    command, asked = path.removeprefix("steelyard "), re.search(r"No such command '([^']+)'", error.message)
    gone = asked[1] if asked else str(getattr(error, "option_name", ""))
    if instead := GONE.get((command, gone)):
        fail(f"{gone}: the command was removed. {instead}" if asked else f"{command}: {gone} was removed. {instead}")
    # Both click and typer say what was meant.
    message = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", error.format_message().rstrip("."))
    fail(one_line(f"{message}{'' if message.endswith('?') else ';'} see `{path} --help`"))


def fail(line: str) -> NoReturn:
    """Print one line and exit with code 2."""
    _log.error(line)
    sys.exit(2)
