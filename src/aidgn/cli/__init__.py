"""The command line. Each command parses, calls a function and prints; heavy imports happen when a command runs."""

import codecs
import errno
import io
import os
import signal
import sys
from types import FrameType

import click

import aidgn
from aidgn.cli.adapt import adapt
from aidgn.cli.algorithms import algorithms
from aidgn.cli.data import data
from aidgn.cli.demo import demo
from aidgn.cli.diagnose import diagnose
from aidgn.cli.export import export
from aidgn.cli.features import features
from aidgn.cli.fit import fit
from aidgn.cli.predict import predict
from aidgn.cli.report import report
from aidgn.cli.serve import serve
from aidgn.cli.status import status
from aidgn.cli.sweep import sweep
from aidgn.cli.table import table
from aidgn.cli.train import train
from aidgn.errors import AidgnError, ParameterError, did_you_mean

COMMANDS: tuple[click.Command, ...] = (
    demo,
    train,
    sweep,
    status,
    table,
    report,
    adapt,
    features,
    diagnose,
    fit,
    predict,
    export,
    serve,
    algorithms,
    data,
)
CONTINUED = ("demo", "train", "sweep", "adapt", "fit", "data download", "data prepare")  # others start from scratch
PIPE_CLOSED = 128 + signal.SIGPIPE  # exit code of a process that SIGPIPE ended


class Group(click.Group):
    """A group that lists commands in the order people meet them and suggests the nearest name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(f"There is no command {args[0]}.{did_you_mean(args[0], self.commands)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has ended (| head); click would exit with 1
            discard_output()
            sys.exit(PIPE_CLOSED)


@click.group(
    cls=Group,
    commands={str(command.name): command for command in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Start with `aidgn demo`. Every command explains itself with --help.",
)
@click.version_option(aidgn.__version__, prog_name="aidgn")
def app() -> None:
    """Train image classifiers that hold up on domains they never saw, and measure that honestly."""


def main() -> None:
    """Run the command line. A user's mistake is one message and exit code 2, Ctrl-C is 130."""
    prepare_streams()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell's & ignores it
        for number in (signal.SIGINT, signal.SIGALRM):
            signal.signal(number, interrupt)
    try:
        try:
            app(standalone_mode=False)
        finally:
            if signal.setitimer(signal.ITIMER_REAL, 0)[0]:  # an interrupt was postponed
                raise KeyboardInterrupt
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except AidgnError as error:
        text = "\n".join([describe_error(error), *getattr(error, "__notes__", ())])
        click.echo(f"Error: {text}" if error.exit_code == 2 else text, err=True)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        continues = " ".join(sys.argv[1:3]).startswith(CONTINUED)
        click.echo(f"Interrupted{'; the same command continues' if continues else ''}.", err=True)
        sys.exit(130)
    except OSError as error:
        # Only standard output gets here: files are written with an error that says which file it is.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        click.echo(
            "Error: The disk is full: standard output could not be written. Free some space and run the same command "
            "again.",
            err=True,
        )
        discard_output()
        sys.exit(2)


def describe_error(error: AidgnError) -> str:
    """Return the message, with the command-line option instead of the parameter that an error names."""
    if not isinstance(error, ParameterError):
        return str(error)
    options = {param.name: param.opts[0] for command in COMMANDS for param in command.params}
    flag = options.get(error.parameter, error.parameter)
    return str(error).replace(error.parameter, flag, 1)


def prepare_streams() -> None:
    """Open streams that are closed, as some daemons start programs, and accept every file name."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "legible")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)  # file names may hold bytes that are not text


def interrupt(number: int, frame: FrameType | None) -> None:
    """Handle Ctrl-C, but postpone it while a module is imported.

    NumPy and PyTorch would swallow it, turn it into another error or end the process. A second Ctrl-C is not
    postponed.
    """
    again = number == signal.SIGINT and signal.getitimer(signal.ITIMER_REAL)[0]
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    if frame is None or again:
        raise KeyboardInterrupt
    signal.setitimer(signal.ITIMER_REAL, 0.01)  # its signal calls this function again


def legible(error: UnicodeError) -> tuple[str | bytes, int]:
    """Keep bytes that are not text; write letters that standard output cannot encode as their codes."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeEncodeError:
        return codecs.backslashreplace_errors(error)


codecs.register_error("legible", legible)


def discard_output() -> None:
    """Discard buffered output at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
