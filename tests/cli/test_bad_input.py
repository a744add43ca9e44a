"""Bad input to every command: the documented exit code, at most three lines, no traceback, and nothing written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs buttress[lab]")

from command_line import Invoke
from toy_language import sentence, tokenizer

MOST_LINES = 3
TINY = "task=digits width=8 depth=1 steps=1 batch=8 --device cpu --runs {runs}"

CASES = {
    "structures": [
        "structures --width 0",
        "structures --width -3",
        "structures --width many",
        "structures --nonsense",
    ],
    "inspect": [
        "inspect",
        "inspect bttt",
        "inspect btt(rank=0)",
        "inspect btt(rank=",
        "inspect btt(rank=two)",
        "inspect btt --d-in 0",
        "inspect btt(rank={{[]:1}})",
        "inspect btt(cores=1000000000000)",
        "inspect btt(split=greedy)",
        "inspect btt(split='gredy')",
        "inspect btt(split=((2,3),(3,2)))",
        "inspect btt(split=((32,32),(32)))",
        "inspect low_rank(rank=100000000000)",
        "inspect btt --d-in 1000000000000000003",
    ],
    "recipes": ["recipes --jsn"],
    "train": [
        "train widht=3",
        "train width",
        "train width=0",
        "train width=abc",
        "train structure=bttt",
        "train structure=btt(rank=0)",
        "train structure=btt(split=((2,3),(3,2))) " + TINY,
        "train task=none",
        "train lr=-1",
        "train lr=nan",
        "train resample=nearest",
        "train mixup_on=pixels",
        "train mixup=0.8 mixup_on=pixels " + TINY,
        "train schedule=cosine_steps",
        "train --device abacus",
        "train --parallel sideways " + TINY,
        "train --checkpoint-seconds -1",
        "train --runs {file}/runs " + TINY.partition(" --runs")[0],
        "train task=cifar10 --data {nowhere}",
        "train task=cifar10 --data {file}",
        "train task=text model=gpt --data {nowhere} --runs {runs}",
        "train task=text model=gpt --data {broken_tokens} --runs {runs}",
        "train task=digits steps=99999999999999 --runs {runs}",
    ],
    "sweep": [
        "sweep",
        "sweep mlp-scalin",
        "sweep digits widht=3",
        "sweep digits --on moon",
        "sweep digits --workers 0",
        "sweep digits --address head:6379",
        "sweep digits --runs {file}/runs",
        "sweep digits --on ray --workers 2",
    ],
    "sample": [
        "sample {nowhere}",
        "sample {file}",
        "sample {empty}",
        "sample {broken_run}",
        "sample {empty} --temperature -1",
        "sample {empty} --tokens 0",
    ],
    "records": [
        "records {nowhere} {out}",
        "records {empty} {out}",
        "records {file} {out}",
        "records {empty}",
        "records {empty} {out} --recipe none",
    ],
    "report": ["report {nowhere}", "report {empty}", "report {file}", "report {damaged_records}"],
    "demo": ["demo --workers 0", "demo --runs {file}/runs"],
    "bench": [
        "bench 0 4 --device cpu",
        "bench 4",
        "bench four four",
        "bench 8 8 --tokens 0 --device cpu",
        "bench 8 8 --device abacus",
    ],
    "compress": [
        "compress {nowhere} --out {out}",
        "compress {file} --out {out}",
        "compress {empty} --out {out}",
        "compress {model}",
        "compress {model} --out {model}",
        "compress {model} --out {model}/small",
        "compress {model} --out {full}",
        "compress {model} --out {file}",
        "compress {model} --out {file}/small",
        "compress {model} --out {out} --keep 50",
        "compress {model} --out {out} --keep 0",
        "compress {model} --out {out} --keep nan",
        "compress {model} --out {out} --structure bttt",
        "compress {model} --out {out} --cost joules",
        "compress {model} --out {out} --cost time --card abacus",
        "compress {model} --out {out} --plan {nowhere}",
        "compress {model} --out {out} --plan {file}",
        "compress {model} --out {out} --plan {other_plan}",
        "compress {model} --out {out} --plan {other_plan} --head",
        "compress {model} --out {out} --head yes",
        "compress {model} --out {out} --calibrate {nowhere}",
        "compress {model} --out {out} --calibrate {empty}",
        "compress {model} --out {out} --calibrate {file}",
        "compress {model} --out {out} --heal 5",
        "compress {model} --out {out} --heal -5",
        "compress {model} --out {out} --calibrate {text} --heal 5 --lr -1",
        "compress {model} --out {out} --device abacus",
        "compress {no_tokenizer} --out {out} --calibrate {text}",
        "compress {no_config} --out {out}",
        "compress {broken_config} --out {out}",
        "compress {list_config} --out {out}",
        "compress {truncated_weights} --out {out}",
        "compress {no_weights} --out {out}",
        "compress {pickled_weights} --out {out}",
        "compress {outside_modules} --out {out}",
        "compress {broken_timm} --out {out}",
        "compress someone/some-model --out {out}",
        "compress {model} --out {out} --calibrate {latin}",
        "compress {model} --out {out} --calibrate {images}",
        "compress {model} --out {out} --calibrate {text} --calibrate {text}",
        "compress {model} --out {out} --layers",
        "compress {model} --out {out} --layers nothing.*",
        "compress {model} --out {out} --batch 0",
        "compress {unknown_architecture} --out {out}",
        "compress {remote_code} --out {out}",
        "compress {adapter} --out {out}",
        "compress {huge} --out {out}",
        "compress {impossible_timm} --out {out}",
        "compress {gguf}/truncated.gguf --out {out}",
        "compress {gguf}/text.gguf --out {out}",
        "compress {gguf}/blocks.gguf --out {out}",
        "compress {gguf}/width.gguf --out {out}",
        "compress {gguf}/nothing.gguf --out {out}",
        "compress {gguf} --out {out}",
        "compress {gguf}/good.gguf --out {out} --calibrate {images}",
    ],
    "tokens": [
        "tokens",
        "tokens {text}",
        "tokens {nowhere} --out {out}",
        "tokens {empty} --out {out}",
        "tokens {text} --out {file}",
        "tokens {text} --out {out} --val 2",
        "tokens {text} --out {out} --val {nowhere}",
        "tokens {text} --out {out} --tokenizer {nowhere}",
        "tokens {text} --out {out} --tokenizer train:0",
        "tokens {text} --out {out} --tokenizer train:many",
        "tokens {latin} --out {out} --tokenizer train:300",
        "tokens --check {nowhere}",
        "tokens --check {broken_tokens}",
        "tokens {text} --check {empty}",
    ],
    "check": [
        "check bttt",
        "check btt --widths a,b",
        "check btt --widths 32",
        "check btt --steps 0",
        "check btt --widths 8,16 --steps 1 --figure {file}/figure.png",
    ],
}  # fmt: skip
"""Arguments by command; names in braces are paths of the fixture `paths`."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Good and damaged folders and files."""
    from small_transformers import llama

    root = tmp_path_factory.mktemp("inputs")
    (root / "empty").mkdir()
    (root / "images").mkdir()
    (root / "full").mkdir()
    (root / "full" / "important.txt").write_text("do not overwrite")
    (root / "file").write_text("a file with a single line")
    (root / "text").write_text("\n".join(map(sentence, range(40))))
    (root / "latin").write_bytes(b"caf\xe9 au lait\n" * 400)
    plan = {"version": 1, "layers": [{"name": "other.layer", "structure": "btt"}]}
    (root / "other_plan").write_text(json.dumps(plan))
    llama().save_pretrained(root / "model")
    tokenizer().save_pretrained(root / "model")
    damage_models(root)
    (root / "broken_tokens").mkdir()
    (root / "broken_tokens" / "tokens.json").write_text("{}")
    (root / "damaged_records").mkdir()
    (root / "damaged_records" / "records.jsonl").write_text('null\n{"run": ')
    (root / "broken_run").mkdir()
    (root / "broken_run" / "run.json").write_text("[]")
    return root


def damage_models(root: Path) -> None:
    """Write copies of the model, each with one fault."""

    def damaged(name: str) -> Path:
        shutil.copytree(root / "model", root / name)
        return root / name

    for file in damaged("no_tokenizer").glob("tokenizer*"):
        file.unlink()
    (damaged("no_config") / "config.json").unlink()
    (damaged("broken_config") / "config.json").write_text('{"architectures": ')
    (damaged("list_config") / "config.json").write_text("[]")
    config = json.loads((root / "model" / "config.json").read_text())
    unknown = json.dumps(config | {"model_type": "unheard_of", "architectures": ["UnheardOfModel"]})
    (damaged("unknown_architecture") / "config.json").write_text(unknown)
    own_code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}}
    (damaged("remote_code") / "config.json").write_text(json.dumps(config | own_code))
    (root / "remote_code" / "mine.py").write_text("raise SystemExit(77)")
    sizes = {"hidden_size": 2**30, "intermediate_size": 2**31}
    (damaged("huge") / "config.json").write_text(json.dumps(config | sizes))
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_config.json").write_text("{}")
    weights = damaged("truncated_weights") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    (damaged("no_weights") / "model.safetensors").unlink()
    (damaged("pickled_weights") / "model.safetensors").rename(root / "pickled_weights" / "pytorch_model.bin")
    modules = [{"idx": 0, "path": "../model", "type": "sentence_transformers.models.Transformer"}]
    (damaged("outside_modules") / "modules.json").write_text(json.dumps(modules))
    write_gguf_files(root / "gguf")
    for name, args in (("broken_timm", {"embed_dim": "wide"}), ("impossible_timm", {"embed_dim": 0})):
        folder = damaged(name)
        timm_config = {"architecture": "vit_tiny_patch16_224", "num_classes": 4, "model_args": args}
        (folder / "config.json").write_text(json.dumps(timm_config))


def write_gguf_files(folder: Path) -> None:
    """Write a GGUF file, and others with one fault each."""
    from gguf_files import llama, write_gguf

    folder.mkdir()
    model = llama()
    good = write_gguf(folder / "good.gguf", model)
    (folder / "truncated.gguf").write_bytes(good.read_bytes()[:-5000])
    (folder / "text.gguf").write_text("a text that ends in .gguf")
    write_gguf(folder / "blocks.gguf", model, block_count=2**31)
    write_gguf(folder / "width.gguf", model, embedding_length=2**30)


@pytest.fixture
def paths(inputs: Path, tmp_path: Path) -> dict[str, Path]:
    """Paths by name: those of the inputs, and new ones to write to."""
    new = {name: tmp_path / name for name in ("out", "runs", "nowhere")}
    return {path.name: path for path in inputs.iterdir()} | new


@pytest.mark.parametrize("line", [line for lines in CASES.values() for line in lines])
def test_bad_input_is_refused_in_a_few_lines(
    line: str, paths: dict[str, Path], invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = invoke(*(word.format(**paths) for word in line.split(" ")))
    lines = [text for text in done.err.splitlines() if text.strip()]
    assert done.code == 2, done
    assert 1 <= len(lines) <= MOST_LINES, done.err
    assert lines[-1].startswith("error: "), done.err
    assert "Traceback" not in done.err
    assert not paths["out"].exists()
    assert [path.name for path in paths["full"].iterdir()] == ["important.txt"]


def test_every_command_is_covered() -> None:
    import typer

    from buttress.cli.app import app

    assert list(CASES) == list(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    assert all(line.split(" ")[0] == command for command, lines in CASES.items() for line in lines)
