"""The command line: which commands there are, in which order, and what ends them.

What is heavy is imported inside the commands, for speed of start: `steelyard --help` must not wait for torch.
"""

from __future__ import annotations

import copy
import functools
import os
import re
import sys
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn, cast

import typer
import typer.core
import typer.main
from typer.models import CommandInfo, TyperInfo

from steelyard import __version__
from steelyard.base import logs
from steelyard.base.errors import UserError, one_line
from steelyard.cli.federate import app as federate_app
from steelyard.cli.options import LogFileOption, QuietOption, VerboseOption, share_options
from steelyard.cli.privacy import app as privacy_app
from steelyard.cli.proof import contributions, record, verify, withdraw
from steelyard.cli.recommend import app as recommend_app
from steelyard.cli.running import compare, join, resume, run, table
from steelyard.cli.showing import algorithms, criteria, docs, export, models, new, policies, recipes, show
from steelyard.cli.studies import arena, attack, sweep
from steelyard.cli.watching import import_run, ls, report, top, watch, weigh

_log = logs.logger(__name__)
_COMPLETING = "_STEELYARD_COMPLETE"
"""Set by shells that ask what may follow: any command may."""
# Some versions of typer are built on click, others hold a copy of it: the errors of either are above this one.
_UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[1])
_ClickException = cast("type[typer.BadParameter]", typer.BadParameter.__mro__[2])


class _Commands(typer.core.TyperGroup):
    """All commands, listed by what they are for, with the whole of their first sentence.

    In plain text: loading what draws boxes takes as long as the rest of `steelyard --help`.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super(typer.core.TyperGroup, self).format_help(ctx, formatter)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        panels = dict[str, list[tuple[str, str]]]()
        for name, command in self.commands.items():
            said = " ".join((command.help or "").partition("\n\n")[0].split())
            panels.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append((name, said))
        for panel, rows in panels.items():
            with formatter.section(panel):
                formatter.write_dl(rows)


app = typer.Typer(
    name="steelyard",
    cls=_Commands,
    help="Federated learning in which each client's say is weighed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

for panel, commands in {
    "Run experiments": (run, compare, arena, sweep, resume, join, attack, withdraw),
    "Look at runs": (report, watch, top, ls, table, weigh, contributions, export, verify, record),
    "Write experiments": (new, recipes, show, criteria, algorithms, policies, models),
}.items():
    for command in commands:
        app.command(rich_help_panel=panel)(command)
app.command("import", rich_help_panel="Look at runs")(import_run)
app.command(rich_help_panel="More")(docs)
app.add_typer(federate_app, rich_help_panel="More")
app.add_typer(recommend_app, name="recommend", rich_help_panel="More")
app.add_typer(privacy_app, name="privacy", rich_help_panel="More")


@functools.cache
def command_line() -> Any:
    """Return all commands as typer builds them, once in a process, with the options that all of them take."""
    return _built(app)


def _built(commands: typer.Typer) -> Any:
    root = typer.main.get_command(commands)
    share_options(root)
    return root


def needed(words: Sequence[str]) -> typer.Typer:
    """Return the commands that these words may be about, for speed of start: building all takes a tenth of a second.

    The one that the first word names; names and descriptions of all where there are only options (help, version);
    otherwise all of them, since a mistake is explained with their names.
    """
    named = {_name(info): info for info in (*app.registered_commands, *app.registered_groups)}
    if _COMPLETING in os.environ or (words and words[0] not in named and not all(w.startswith("-") for w in words)):
        return app
    some = copy.copy(app)
    if words and words[0] in named:
        some.registered_commands = [info for info in app.registered_commands if info is named[words[0]]]
        some.registered_groups = [info for info in app.registered_groups if info is named[words[0]]]
        return some
    some.registered_commands = [_described(info) for info in app.registered_commands]
    some.registered_groups = [copy.copy(info) for info in app.registered_groups]
    for info in some.registered_groups:
        info.typer_instance = copy.copy(info.typer_instance)
        assert info.typer_instance is not None
        info.typer_instance.registered_commands = []
    return some


def _name(info: CommandInfo | TyperInfo) -> str:
    if isinstance(info, CommandInfo):
        assert info.callback is not None
        return info.name or info.callback.__name__.replace("_", "-")
    assert info.typer_instance is not None
    return info.name if isinstance(info.name, str) else str(info.typer_instance.info.name)


def _described(info: CommandInfo) -> CommandInfo:
    """Return a command with its name and description alone."""

    def nothing() -> None: ...

    described = copy.copy(info)
    described.name, described.callback = _name(info), nothing
    nothing.__doc__ = info.callback.__doc__
    return described


def main() -> NoReturn:
    """Run the command line, in one process or as one of those that torchrun starts."""
    if "RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1":
        from steelyard.experiment.running import among_ranks

        among_ranks(_main, fail)
    _main()


def _main() -> NoReturn:
    """Run the command line; a user's mistake is one line on standard error and exit code 2."""
    try:
        logs.show()
        code = _built(needed(sys.argv[1:]))(prog_name="steelyard", standalone_mode=False)
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
        fail("not enough memory for this; allowed: fewer clients, smaller models or less data at once")
    except (KeyboardInterrupt, typer.Abort):
        _log.error("stopped")
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


def _explain_usage(error: typer.BadParameter) -> NoReturn:
    """Say in one line what is wrong with the command itself; a command without anything shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        sys.exit(2)
    path = error.ctx.command_path if error.ctx is not None else "steelyard"
    # Both click and typer say what was meant.
    message = re.sub(r"( Did you mean [^?]*\?)\1+", r"\1", error.format_message().rstrip("."))
    fail(one_line(f"{message}{'' if message.endswith('?') else ';'} see `{path} --help`"))


def fail(line: str) -> NoReturn:
    """Print one line and exit with code 2."""
    _log.error(line)
    sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    log_file: LogFileOption = None,
) -> None:
    if version:
        print(f"steelyard {__version__}")
        raise typer.Exit
