"""The command line. A command parses, calls a function and prints; its module is imported only when it is used."""

import codecs
import errno
import io
import os
import signal
import sys
from importlib import import_module
from types import FrameType

import click
from click.shell_completion import CompletionItem

import aidgn
from aidgn.errors import AidgnError, ParameterError, clip, did_you_mean
from aidgn.terminal import protect_streams

# The command NAME is the function NAME in the module aidgn.cli.NAME.
COMMANDS = {
    "demo": "Train, compare and report on handwritten digits, in a minute or two.",
    "train": "Train one run; the same command continues it.",
    "sweep": "Train many runs: algorithms, unseen domains, trials.",
    "status": "Show how far a sweep is: done, running, failed, left, speed, time left.",
    "table": "Show the results of runs, ours or DomainBed's, as a table.",
    "report": "Write one HTML page about runs, which works offline.",
    "adapt": "Adapt trained runs at test time: T3A, Tent.",
    "features": "Write features, labels, domains and splits of a run to one open file.",
    "diagnose": "Test angular invariance and norm shift: figures and numbers.",
    "fit": "Make a model from your own pictures and estimate its accuracy on a new domain.",
    "soup": "Average the weights of runs into one model.",
    "predict": "Classify images: labels, probabilities and warnings.",
    "evaluate": "Measure a model on labelled images of a new site, against its promise.",
    "export": "Write a model as ONNX, safetensors and a model card.",
    "push": "Upload a model to the Hugging Face Hub.",
    "serve": "Serve a model on a local page and a JSON endpoint.",
    "algorithms": "List the algorithms and their hyper-parameters.",
    "data": "List, check, download and prepare data sets; split pages.",
}
CONTINUED = ("demo", "train", "sweep", "adapt", "fit", "data download", "data prepare")  # others start from scratch
PIPE_CLOSED = 128 + signal.SIGPIPE  # exit code of a process that SIGPIPE ended


class Group(click.Group):
    """The group of `COMMANDS`, which imports a command when it is used; --help and completion stay fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return load_command(cmd_name) if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        options = click.Command.shell_complete(self, ctx, incomplete)
        names = [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]
        return names + options

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            raise click.UsageError(f"There is no command {args[0]}.{did_you_mean(args[0], COMMANDS)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # the reader has ended (such as | head); click would exit with 1
            discard_output()
            sys.exit(PIPE_CLOSED)
        except OSError as error:  # raised wherever a file of that name is first looked up
            if error.errno != errno.ENAMETOOLONG:
                raise
            raise AidgnError(f"{clip(error.filename)} is longer than the name of a file can be.") from None


@click.group(
    cls=Group,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
    epilog="Start with `aidgn demo`. Every command explains itself with --help.",
)
@click.version_option(aidgn.__version__, prog_name="aidgn")
def app() -> None:
    """Train image classifiers that hold up on domains they never saw, and measure that honestly."""


def load_command(name: str) -> click.Command:
    """Import a command of `COMMANDS`."""
    command: click.Command = getattr(import_module(f"aidgn.cli.{name}"), name)
    return command


def main() -> None:
    """Run the command line. A user's mistake prints one message and exits with 2, Ctrl-C exits with 130."""
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
        # This is an error of standard output: errors of files are AidgnErrors that name the file.
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
    """Return the message of an error, with command-line options instead of names of parameters."""
    if not isinstance(error, ParameterError):
        return str(error)
    options = {param.name: param.opts[0] for command in map(load_command, COMMANDS) for param in command.params}
    flag = options.get(error.parameter, error.parameter)
    return str(error).replace(error.parameter, flag, 1)


def prepare_streams() -> None:
    """Open closed streams, with which some daemons start programs, and let all file names print safely."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "legible")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)  # file names may hold bytes that are not text
    protect_streams()


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
