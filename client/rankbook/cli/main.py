"""Entry of the `rankbook` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from rankbook.cli import (
    doctor,
    engines,
    moving,
    operate,
    plan,
    register,
    simulate,
    status,
    topology,
    watch,
)
from rankbook.cli.invocation import Invocation, Reported, global_options
from rankbook.cli.output import Output, open_output
from rankbook.errors import BadRequest, Internal, RankbookError

__all__ = ["EXIT_INTERRUPTED", "EXIT_OK", "EXIT_USAGE", "cli", "main", "run"]

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
"""The other exit codes stand with their reason in `rankbook.errors.TABLE`."""


class _Quiet(click.Group):
    """A group that ends at an interrupt without a word; click itself writes an empty line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(EXIT_INTERRUPTED) from None


@click.group(
    cls=_Quiet,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 failed or timed out, 2 usage, 3 not found, 4 unreachable, "
    "5 refused by state or rule, 6 not permitted, 130 interrupted.",
)
@global_options(hidden=False)
@click.version_option(package_name="rankbook", prog_name="rankbook")
def cli() -> None:
    """The book of ranks: which worker of which engine holds which layers.

    \b
    First look:
      rankbook engines                 every engine, one line each
      rankbook topology ENGINE         its grid, and what is wrong with it
      rankbook doctor                  what to fix

    The global options may also follow the command.
    """


for _command in (
    engines.engines,
    topology.topology,
    topology.workers,
    plan.plan,
    plan.compare,
    watch.watch,
    watch.wait,
    register.register,
    operate.seal,
    operate.drain,
    operate.evict,
    doctor.doctor,
    moving.export,
    moving.import_,
    status.status,
    status.config,
    status.completion,
    simulate.simulate,
):
    cli.add_command(_command)


def main() -> None:
    """Runs the command line of this process and exits with its code."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: The command line without the program's name.

    Returns:
        The exit code.
    """
    invocation = Invocation()
    # Of a server beside this process, over a store: what fails is said as the error.
    os.environ.setdefault("RANKBOOK_STORE_LOG", "off")
    try:
        code = cli.main(
            args=list(arguments), prog_name="rankbook", standalone_mode=False, obj=invocation
        )
        return code if isinstance(code, int) else EXIT_OK
    except Reported as reported:
        _output(invocation, arguments).error(reported.error, data=False)
        return reported.error.exit_code
    except RankbookError as error:
        _output(invocation, arguments).error(error)
        return error.exit_code
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.exceptions.NoArgsIsHelpError as help_:
        sys.stderr.write(help_.format_message() + "\n")
        return EXIT_USAGE
    except click.UsageError as usage:
        return _usage(usage, _scanned_output(arguments))
    except click.ClickException as failure:
        _output(invocation, arguments).error(BadRequest(failure.format_message()))
        return failure.exit_code
    except (KeyboardInterrupt, click.Abort):
        return EXIT_INTERRUPTED
    except Exception as error:
        if os.environ.get("RANKBOOK_TRACEBACK"):
            raise
        fault = Internal(
            f"{type(error).__name__}: {error} - a fault of rankbook's own, please report it "
            "with the traceback that RANKBOOK_TRACEBACK=1 shows",
            metadata={"exception": type(error).__name__},
        )
        _output(invocation, arguments).error(fault)
        return fault.exit_code


def _usage(usage: click.UsageError, out: Output) -> int:
    where = usage.ctx.command_path if usage.ctx is not None else "rankbook"
    # click lists choices one a line, with tabs.
    message = " ".join(usage.format_message().split()).rstrip(".")
    out.error(BadRequest(f"{message}. See: {where} --help", metadata={"command": where}))
    return EXIT_USAGE


def _output(invocation: Invocation, arguments: Sequence[str]) -> Output:
    """The output of the run, also where its settings could not be read."""
    try:
        return invocation.out
    except RankbookError:
        return _scanned_output(arguments)


def _scanned_output(arguments: Sequence[str]) -> Output:
    """The output of a run whose words did not parse, so that a flag may not have been read."""
    form = "json" if _wants_json(arguments, os.environ) else "table"
    return open_output(sys.stdout, sys.stderr, form, os.environ)


def _wants_json(arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether JSON was asked for, read from words that may not even parse."""
    wanted = environ.get("RANKBOOK_OUTPUT", "")
    for index, word in enumerate(arguments):
        if word in ("-o", "--output") and index + 1 < len(arguments):
            wanted = arguments[index + 1]
        elif word.startswith("--output="):
            wanted = word.removeprefix("--output=")
        elif word.startswith("-o") and len(word) > len("-o"):
            wanted = word.removeprefix("-o").removeprefix("=")
    return wanted == "json"
