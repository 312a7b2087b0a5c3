"""What commands say: numbers and names as people read them."""

import contextlib
import io
import os
import pty
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner
from PIL import Image

from aidgn.cli import app, describe_error, main
from aidgn.cli.options import parse_settings
from aidgn.cli.sweep import finished_tables, print_end
from aidgn.errors import AidgnError, ParameterError
from aidgn.inference.output import PredictionRow, format_csv
from aidgn.progress import rate
from aidgn.report.table_formats import Cell, Row, Table, to_terminal
from aidgn.serve import name_model
from aidgn.sweeps.store import PlannedRun, SweepFolder


def test_speeds_have_three_digits_and_no_exponent() -> None:
    found = [rate(speed) for speed in (4941.2, 999.6, 999.4, 12.34, 0.0522)]
    assert found == ["4,941", "1,000", "999", "12.3", "0.0522"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("runs/fit-photos/model", "fit-photos"),
        ("shelf/model.safetensors", "shelf"),
        ("runs/fit-a/model/export/model.safetensors", "fit-a"),
        ("cats.safetensors", "cats"),
        ("runs/digits-ERM-1.5", "digits-ERM-1.5"),
    ],
)
def test_a_model_is_called_by_a_name_of_its_own(path: str, name: str) -> None:
    assert name_model(Path(path)) == name


def test_a_plan_says_how_its_runs_come_about(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        "{datasets: [digits], algorithms: [AIDGN, ERM], targets: [ink], trials: 2, draws: 2, "
        f"hyper_parameters: {{AIDGN: {{kappa: [10, 30]}}}}, out: {tmp_path / 'runs'}}}"
    )
    said = CliRunner().invoke(app, ["sweep", str(plan), "--dry-run"]).output
    # Per draw and trial: AIDGN with either kappa, and ERM. What draws vary is not set by hand.
    assert "12 runs: 1 data set, 2 algorithms, 2 draws, 2 trials, 2 values of kappa. 0 finished, 12 to do." in said


def test_a_table_is_printed_in_one_form() -> None:
    error = CliRunner().invoke(app, ["table", "runs", "--markdown", "--latex"]).exception
    assert str(error) == "--markdown and --latex each print the table: choose one."


@pytest.mark.parametrize("wrong", [["--algorithm", "ERMM"], ["--device", "cudo"]])
def test_fit_says_what_is_wrong_before_it_looks_at_pictures(wrong: list[str]) -> None:
    found = CliRunner().invoke(app, ["fit", "digits", *wrong])
    assert found.output == "" and wrong[1] in str(found.exception)


def test_the_demo_does_not_mix_runs_of_other_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    written = []

    def write(folders: list[str], out: Path, **_: object) -> Path:
        written.append(folders)
        return out

    monkeypatch.setattr("aidgn.report.page.write_report", write)
    arguments = ["demo", "--trials", "1", "--steps"]
    output = CliRunner().invoke(app, [*arguments, "2"], catch_exceptions=False).output
    assert written == [["runs/demo"]]
    assert "  aidgn algorithms AIDGN --small\n" in output  # has the defaults that the demo uses
    error = CliRunner().invoke(app, [*arguments, "3"]).exception
    assert isinstance(error, AidgnError) and "steps 2 (here 3)" in str(error)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ParameterError("eval_every", 0, "a whole number"), "--eval-every is 0; expected a whole number."),
        (ParameterError("evaluate_source_in", 2, "true"), "--eval-in is 2; expected true."),
        (ParameterError("kappa", -1, "a number"), "kappa is -1; expected a number."),
        (AidgnError("eval_every"), "eval_every"),
    ],
)
def test_errors_name_the_option(error: AidgnError, text: str) -> None:
    assert describe_error(error) == text


def test_report_names_what_is_missing(
    tmp_path: Path, own: str, digits_run: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    run = digits_run(tmp_path / "runs", own)
    assert CliRunner().invoke(app, ["report", str(run)]).exit_code == 0
    assert "cannot show everything" in caplog.text and "--algorithm path/to/file.py:Mine" in caplog.text
    assert "--points" not in (run / "report.html").read_text()  # the command's default is the page's
    caplog.clear()
    assert CliRunner().invoke(app, ["report", str(run), "--algorithm", own, "--points", "50"]).exit_code == 0
    page = re.sub(r"<[^>]*>", "", (run / "report.html").read_text())
    assert not caplog.text and f"aidgn report runs/{run.name} --algorithm path/to/file.py:Mine --points 50\n" in page


def test_defaults_say_for_which_images_they_are() -> None:
    large, small = (CliRunner().invoke(app, ["algorithms", "AIDGN", *more]).output for more in ((), ("--small",)))
    assert "For images of 224 pixels; --small shows" in large and "For images of 28 to 64 pixels" in small


def test_names_that_are_no_text_are_said_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in ("a/x", "a/y", "b/x", "b/y"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(3):
            colour = (len(place) * ord(place[0]) % 256, ord(place[2]), number)
            Image.new("RGB", (9, 9), colour).save(tmp_path / place / f"{number}.png")
    (tmp_path / "a" / os.fsdecode(b"caf\xe9.txt")).touch()
    out = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(out, encoding="utf-8"))
    monkeypatch.setattr(sys, "argv", ["aidgn", "data", "check", str(tmp_path)])
    main()
    sys.stdout.flush()
    assert b"1 other file ignored: a/caf\xe9.txt\n" in out.getvalue()


def test_a_spreadsheet_takes_no_file_for_a_formula() -> None:
    rows = [PredictionRow(name, [("cat", 0.5)], None) for name in ("=cmd|x.png", "@x.png", "a/=b.png")]
    assert format_csv(rows, False) == "./=cmd|x.png,cat,0.500000\n./@x.png,cat,0.500000\na/=b.png,cat,0.500000\n"


def test_a_check_counts_what_is_wrong_and_nothing_else(tmp_path: Path) -> None:
    for number, place in enumerate(("a/x", "a/y", "b/x", "b/y")):
        (tmp_path / place).mkdir(parents=True)
        for green in range(3):
            Image.new("RGB", (9, 9), (50 * number, green, 0)).save(tmp_path / place / f"{green}.png")
    (tmp_path / "a" / "x" / "9.png").write_text("no picture")
    (tmp_path / "notes.txt").touch()
    found = CliRunner().invoke(app, ["data", "check", str(tmp_path)])
    assert "\n1 other file ignored: notes.txt" in found.output
    assert f"\nbroken: {tmp_path}/a/x/9.png is not an image" in found.output
    assert str(found.exception).endswith(" is not in order: 1 broken file.")


def commands(group: click.Group, *above: str) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, command in group.commands.items():
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from commands(command, *above, name)


@pytest.mark.parametrize(("names", "command"), list(commands(app)))
def test_every_help_has_examples_with_options_that_there_are(names: tuple[str, ...], command: click.Command) -> None:
    examples = re.findall(r"^  (?:.*\| )?aidgn (.*?)(?: >.*)?$", command.epilog or "", re.M)
    assert examples and any(tuple(example.split()[: len(names)]) == names for example in examples)
    for example in examples:
        found: click.Command = app
        words = shlex.split(example)
        while isinstance(found, click.Group):
            found = found.commands[words.pop(0)]
        found.make_context("aidgn", words)  # an option that there is not is an error


def in_a_terminal(columns: int, code: str) -> str:
    """What a Python program writes to a terminal of that many columns, without its codes."""
    here, there = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=there,
        stdout=there,
        stderr=there,
        env=os.environ | {"COLUMNS": str(columns), "TERM": "xterm"},
    ) as process:
        os.close(there)
        said = b""
        with contextlib.suppress(OSError):  # how a terminal ends
            while part := os.read(here, 4096):
                said += part
    os.close(here)
    assert process.returncode == 0, said.decode()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said.decode()).replace("\r", "")


def test_a_narrow_terminal_cuts_no_name_off() -> None:
    said = in_a_terminal(
        50,
        """if True:
        import sys
        from aidgn.report.table_formats import Cell, Row, Table, to_terminal
        cells = [Cell(12.34 * n, 10.0, 3) for n in range(1, 7)]
        print(to_terminal(Table("T", list("ACPSTU"), [Row("AIDGN-noD", cells), Row("AIDGN-noR", cells)])))
        from aidgn.cli import main
        sys.argv = ["aidgn", "data", "list"]
        main()""",
    )
    assert "…" not in said and all(len(line) <= 50 for line in said.splitlines())
    assert "TerraIncognita" in said and "586575" in said


def test_piped_output_ignores_the_terminal_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")  # as in many a pipeline
    row = Row("AIDGN", [Cell(12.34 * n, 10.0, 3) for n in range(1, 9)])
    (line,) = (line for line in to_terminal(Table("T", list("ABCDEFGH"), [row])).splitlines() if "AIDGN" in line)
    assert line.count("± 10.0") == 8
    said = CliRunner().invoke(app, ["data", "list"]).output
    assert "art_painting (A), cartoon (C), photo (P), sketch (S)" in said


@pytest.mark.parametrize(
    ("done", "said"),
    [(0, "0 of 2 runs are finished.\n"), (1, "1 of 2 runs are finished. `aidgn table out` shows them.\n")],
)
def test_a_table_is_named_where_there_is_one(done: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    todo = SimpleNamespace(specs=[0, 0], count=lambda kind: done, edited_runs=lambda: 0, other_runs=0, runs=[])
    print_end(todo, "out")  # type: ignore[arg-type]
    assert capsys.readouterr().out == said


def test_a_sweep_ends_with_its_table_beside_the_paper_s(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "docs" / "results" / "pacs-resnet50-he2015.zip"
    ours, ablation = finished_tables(str(results))
    assert {"paper", "difference"} < {row.kind for row in ours.rows} and "table 2" in ablation.title
    assert finished_tables(str(tmp_path)) == []


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_waits_for_an_import(times: int, tmp_path: Path) -> None:
    SweepFolder(tmp_path).write([PlannedRun("key", "digits", "ERM", ["ink"], 0, 0, 4, "")], 2, "")
    code = f"""if True:
        import signal, sys
        from aidgn.cli import main

        class Finder:
            def find_spec(self, name, *_):
                if name == "numpy":
                    for number in range({times}):
                        try:
                            signal.raise_signal(signal.SIGINT)
                        except KeyboardInterrupt:
                            if number == 0:  # what becomes of it in NumPy
                                raise ImportError("cannot load module more than once per process")
                            raise

        sys.meta_path.insert(0, Finder())
        sys.argv = ["aidgn", "status", {str(tmp_path)!r}, "--watch"]
        main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (130, "Interrupted.")


def test_a_batch_size_is_given_once() -> None:
    assert parse_settings(("lr=1",), 8) == {"lr": "1", "batch_size": "8"}
    with pytest.raises(AidgnError, match=r"--batch-size 8 and --set batch_size=9 differ: give one\."):
        parse_settings(("batch_size=9",), 8)
