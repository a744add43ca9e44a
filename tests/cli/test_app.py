"""The command line as a whole: its commands and options, help, version, exit codes and error messages."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

import typer

import buttress as bt
from buttress.cli.app import app
from buttress.cli.extras import EXTRAS, install_hint
from buttress.core.structures import base
from command_line import Finished, Invoke, run, run_without

SURFACE = {
    "structures": "--width --json",
    "inspect": "structure sizes --d-in --d-out --json",
    "recipes": "--json",
    "train": "settings --runs --data --device --compile --parallel --checkpoint-seconds --tensorboard --wandb --json",
    "sweep": "recipe settings --runs --data --device --workers --interleave --on --address --cpus-per-run "
    "--gpus-per-run --compile --json",
    "sample": "folder --prompt --tokens --temperature --top --seed --data --device",
    "records": "runs out settings --recipe",
    "report": "runs --out --title",
    "demo": "--runs --workers",
    "bench": "d_in d_out --tokens --device --forward --json",
    "compress": "model --out --keep --structure --layers --head --cost --tokens --card --plan --calibrate --batch "
    "--length --heal --lr --heal-dtype --device --json",
    "tokens": "texts --out --val --tokenizer --separator --dataset --check --json",
    "check": "structure --widths --naive --steps --figure --json",
}
"""Every command with its arguments and options, in order."""


def surface() -> dict[str, str]:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    return {
        name: " ".join(p.opts[0] if p.param_type_name == "option" else p.name for p in command.params)
        for name, command in commands.items()
    }


def test_commands_and_options_stay_as_they_are() -> None:
    assert surface() == SURFACE


def test_every_command_and_option_has_a_help_text() -> None:
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        assert command.help, name
        for p in command.params:
            assert p.help, (name, p.name)
            assert p.help.endswith("."), (name, p.name)


def test_help_has_examples(invoke: Invoke) -> None:
    done = invoke("--help")
    assert done.code == 0
    for name in ("demo", "structures", "inspect", "train", "sweep", "report", "bench", "check"):
        assert f" {name} " in done.out
        if name != "demo":
            assert "Example" in invoke(name, "--help").out


def test_without_a_command_the_help_is_all_there_is(invoke: Invoke) -> None:
    done = invoke()
    assert done.code in (0, 2), "the convention of click, by its version"
    assert done.err.strip() == ""
    assert "Usage: buttress" in done.out
    assert " inspect " in done.out


STRUCTURE = """
import buttress as bt

@bt.structure
class Eighths(bt.Structure):
    def chain(self, d_in, d_out):
        sizes = {"g": 8, "d": d_in // 8, "e": d_out // 8}
        return bt.Chain.of(d_in, d_out, x="g d", factors={"A": "g e d"}, y="e g", sizes=sizes)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Name of a user's module that declares a structure, in a folder of PYTHONPATH."""
    monkeypatch.setattr(base, "REGISTRY", dict(base.REGISTRY))
    (tmp_path / "users_eighths.py").write_text(STRUCTURE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delitem(sys.modules, "users_eighths", raising=False)
    return "users_eighths"


def test_a_structure_of_an_imported_module_is_known(module: str, invoke: Invoke) -> None:
    assert invoke("inspect", "eighths", "64").code == 2
    assert "g=8" in invoke("--import", module, "inspect", "eighths", "64").out


@pytest.mark.parametrize("engine", [("--workers", "1"), ("--interleave", "2")])
def test_a_structure_of_an_imported_module_is_known_to_workers(
    engine: tuple[str, str], module: str, tmp_path: Path, invoke: Invoke
) -> None:
    settings = ("structure=eighths", "width=16", "layers=hidden", "steps=1", "batch=8")
    done = invoke(
        "--import", module, "sweep", "digits", *settings, "--runs", tmp_path / "runs", "--device", "cpu", *engine,
        "--json",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert {record["run"]["structure"] for record in json.loads(done.out)} == {"eighths"}


@pytest.mark.parametrize("content", [None, "raise RuntimeError('unfinished')", "nonsense("])
def test_a_module_that_cannot_be_imported_is_named(
    content: str | None, tmp_path: Path, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    if content is not None:
        (tmp_path / "users_broken.py").write_text(content)
    done = invoke("--import", "users_broken", "inspect", "btt")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: the module 'users_broken' cannot be imported (")
    assert done.err.count("\n") == 1


def test_the_version() -> None:
    assert run("--version") == Finished(0, f"buttress {bt.__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("sweep", "mlp-scalin"), 2, "did you mean 'mlp-scaling'"),
        (("train", "widht=3"), 2, "did you mean 'width'"),
        (("train", "structure=bt"), 2, "did you mean"),
        (("train", "task=cifar10", "--data", "/nowhere"), 2, "cifar-10-python.tar.gz, not in /nowhere"),
        (("train", "lr=1e9", "optimizer=sgd", "steps=50", "width=16"), 1, "the loss is not finite at step"),
        (("report", "/nowhere"), 2, "there are no records"),
        (("records", "/nowhere", "/nowhere/x.jsonl"), 2, "holds no record"),
        (("inspect", "btt(rank=0)"), 2, "rank"),
        (("nonsense",), 2, "No such command"),
        (("train", "task=[/x]"), 2, "no task is called '[/x]'"),
        (("train", "--device", "abacus"), 2, "is not a device"),
        (("check", "btt", "--widths", "a,b"), 2, "at least two widths"),
    ],
)
def test_invalid_usage(arguments: tuple[str, ...], code: int, says: str, tmp_path: Path, invoke: Invoke) -> None:
    more = ("--runs", str(tmp_path)) if arguments[0] in ("train", "sweep") else ()
    done = invoke(*arguments, *more)
    text = " ".join((done.out + done.err).split())
    assert done.code == code, text
    assert says in text


def test_an_error_is_one_line() -> None:
    done = run("report", "/" + "a-very-long-name" * 10)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("library", ["typer", "rich"])
def test_without_its_extra_the_script_says_what_to_install(library: str) -> None:
    (done,) = run_without([library], ["structures"])
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith(f"buttress: the command line needs {library}, which is not installed: pip install 'mat")
    assert "'rich>=13'" in done.err
    assert "'typer>=0.12'" in done.err
    assert "buttress[" not in done.err, "it is on no index"
    assert "\n" not in done.err


RUN = ("width=16", "depth=1", "steps=1", "batch=8", "--device", "cpu")
MISSING = (
    ("sklearn", ("train", *RUN)),
    ("sklearn", ("check", "btt")),
    ("matplotlib", ("report", ".")),
    ("PIL", ("train", "task=cifar10", *RUN, "--data", ".")),
    ("tokenizers", ("tokens", __file__, "--out", "out", "--tokenizer", "train:300")),
    ("datasets", ("tokens", "--dataset", "json:x", "--out", "out")),
    ("ray", ("sweep", "digits", "--on", "ray")),
    ("wandb", ("train", *RUN, "--wandb", "project")),
    ("transformers", ("compress", "model", "--out", "out")),
)
"""A library, and a command that needs it."""


def test_without_an_extra_a_command_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "test.webp").touch()
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "bert"}')
    blocked = [library for library in EXTRAS if library not in ("typer", "rich")]
    finished = run_without(blocked, *(arguments for _, arguments in MISSING), folder=str(tmp_path))
    for done, (library, arguments) in zip(finished, MISSING, strict=True):
        assert done.code == 2, (library, arguments, done)
        message = done.err.strip()
        assert message.startswith("error: "), (library, arguments, done)
        assert "pip install " in message
        assert "\n" not in message


def test_commands_do_without_libraries_that_they_do_not_use(tmp_path: Path) -> None:
    blocked = [library for library in EXTRAS if library not in ("typer", "rich")]
    commands = (
        ("structures",),
        ("inspect", "btt"),
        ("recipes",),
        ("train", "task=teacher", *RUN),
        ("bench", "4096", "4096", "--device", "NVIDIA H200"),
        ("records", "runs", "records.jsonl"),
    )
    for done, arguments in zip(run_without(blocked, *commands, folder=str(tmp_path)), commands, strict=True):
        assert done.code == 0, (arguments, done.err)


def test_hints_name_what_is_needed() -> None:
    hint = install_hint(ModuleNotFoundError(name="matplotlib.pyplot"))
    assert hint is not None
    assert hint.startswith("needs matplotlib, which is not installed: pip install 'matplotlib>=3.9' 'pillow>=10' ")
    datasets = install_hint(ModuleNotFoundError(name="datasets"))
    assert datasets == "needs datasets, which is not installed: pip install 'datasets>=3' 'tokenizers>=0.20'"
    assert install_hint(ModuleNotFoundError(name="nonsense")) is None
    assert install_hint(ImportError()) is None


def test_a_library_without_a_message_of_its_own_gets_a_hint(monkeypatch: pytest.MonkeyPatch, invoke: Invoke) -> None:
    monkeypatch.setitem(sys.modules, "buttress.lab.analysis.report", None)
    monkeypatch.setitem(EXTRAS, "buttress", "lab")  # as if the module were an optional library
    done = invoke("report", "/nowhere")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: this command needs buttress, which is not installed: pip install 'matplotlib>")
