"""timm: structured models saved and loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import buttress as bt

timm = pytest.importorskip("timm")
from buttress import vision  # noqa: E402

ARGS: dict[str, Any] = {"depth": 1, "img_size": 32, "patch_size": 8}
X = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def vit() -> Any:
    torch.manual_seed(0)
    return timm.create_model("vit_tiny_patch16_224", num_classes=5, **ARGS).eval()


def test_names() -> None:
    assert vision.__all__ == ["fill", "load", "model_args", "save"]


@pytest.mark.parametrize("structure", [None, bt.BTT(rank=2), bt.LowRank(rank=4)], ids=str)
def test_saved_and_loaded(structure: bt.Structure | None, tmp_path: Path) -> None:
    model = vit()
    if structure is not None:
        bt.replace_(model, structure)
    assert vision.save(model, tmp_path / "m", **ARGS) == tmp_path / "m"
    loaded = vision.load(tmp_path / "m")
    assert torch.equal(loaded(X), model(X))
    assert bt.Plan.of(loaded) == bt.Plan.of(model)
    assert vision.model_args(tmp_path / "m") == ARGS
    plan = json.loads((tmp_path / "m" / "buttress-plan.json").read_text())
    assert len(plan["layers"]) == len(bt.Plan.of(model).entries)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_is_loaded_in_the_dtype_of_its_file(dtype: torch.dtype, tmp_path: Path) -> None:
    model = vit()
    bt.replace_(model, bt.LowRank(rank=4))
    vision.save(model.to(dtype), tmp_path / "m", **ARGS)
    loaded = vision.load(tmp_path / "m")
    assert {t.dtype for t in loaded.state_dict().values()} == {dtype}
    assert all(torch.equal(t, loaded.state_dict()[n]) for n, t in model.state_dict().items())
    assert torch.equal(loaded(X.to(dtype)), model(X.to(dtype)))
    wide = vision.load(tmp_path / "m", dtype=torch.float32)
    assert {t.dtype for t in wide.state_dict().values()} == {torch.float32}
    with pytest.raises(bt.PlanError, match=r"floating-point dtype .* got torch\.int8"):
        vision.load(tmp_path / "m", dtype=torch.int8)


def test_weights_of_several_dtypes_keep_theirs(tmp_path: Path) -> None:
    model = vit().bfloat16()
    model.head.float()
    vision.save(model, tmp_path / "m", **ARGS)
    loaded = vision.load(tmp_path / "m")
    assert {n: p.dtype for n, p in loaded.named_parameters()} == {n: p.dtype for n, p in model.named_parameters()}


def test_integers_stay_integers(tmp_path: Path) -> None:
    model = timm.create_model("resnet10t", num_classes=3).bfloat16().eval()
    vision.save(model, tmp_path / "m")
    loaded = vision.load(tmp_path / "m")
    assert {n: t.dtype for n, t in loaded.state_dict().items()} == {n: t.dtype for n, t in model.state_dict().items()}
    assert torch.int64 in {t.dtype for t in loaded.state_dict().values()}


def test_a_folder_of_timm_itself_has_no_plan(tmp_path: Path) -> None:
    model = vit()
    timm.models.save_for_hf(model, str(tmp_path / "m"), model_args=ARGS, safe_serialization=True)
    assert torch.equal(vision.load(tmp_path / "m")(X), model(X))


def test_refusals(tmp_path: Path) -> None:
    vision.save(vit(), tmp_path / "m", **ARGS)
    with pytest.raises(bt.PlanError, match="exists already"):
        vision.save(vit(), tmp_path / "m", **ARGS)
    with pytest.raises(bt.PlanError, match="does not hold a timm model"):
        vision.load(tmp_path / "nothing")
    (tmp_path / "m" / "buttress-plan.json").write_text("[]")
    with pytest.raises(bt.PlanError, match="not a buttress plan"):
        vision.load(tmp_path / "m")


def test_a_saved_folder_has_a_card(tmp_path: Path) -> None:
    model = vit()
    bt.replace_(model, bt.BTT(rank=2))
    vision.save(model, tmp_path / "m", **ARGS)
    card = (tmp_path / "m" / "README.md").read_text()
    assert "library_name: timm" in card
    assert "buttress.vision.load(" in card
    vision.save(vit(), tmp_path / "dense", **ARGS)
    assert not (tmp_path / "dense" / "README.md").exists(), "timm alone loads it"
    assert {p.name for p in tmp_path.iterdir()} == {"m", "dense"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = vit()
    bt.replace_(model, bt.LowRank(rank=2))
    return vision.save(model, tmp_path / "m", **ARGS)


def refused(folder: Path, config: Any) -> str:
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    with pytest.raises(bt.PlanError) as error:
        vision.load(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


class TestAFolderIsData:
    def test_arguments_that_open_files_are_refused(self, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        outside = str(tmp_path / "pickle.bin")
        for name, value in (
            ("checkpoint_path", outside), ("pretrained", True), ("pretrained_cfg", {"file": outside}),
            ("pretrained_cfg_overlay", {"url": "http://x"}), ("cache_dir", outside), ("pretrained_strict", False),
        ):  # fmt: skip
            text = refused(folder, config | {"model_args": ARGS | {name: value}})
            assert f"sets the argument {name!r}" in text

    def test_values_that_are_not_data_are_refused(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for value in ({"a": 1}, [[[1]]], "/etc/passwd", "http://x", ["a/b"]):
            assert "act_layer" in refused(folder, config | {"model_args": ARGS | {"act_layer": value}})
        assert "not an object" in refused(folder, config | {"model_args": [1]})
        assert "num_classes" in refused(folder, config | {"num_classes": {"a": 1}})

    def test_sources_of_pretrained_weights_are_ignored(self, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        sources = {"file": str(tmp_path / "x.bin"), "url": "http://127.0.0.1:9/x", "hf_hub_id": "a/b", "source": "url"}
        config["pretrained_cfg"] |= sources
        (folder / "config.json").write_text(json.dumps(config))
        assert not sources.keys() & {k for k, v in vision.load(folder).pretrained_cfg.items() if v}

    def test_architectures_from_elsewhere_are_refused(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        for name in ("hf-hub:timm/resnet18", "local-dir:/tmp", "nonsense", 3, None, ["vit"]):
            assert "names no architecture" in refused(folder, config | {"architecture": name})

    @pytest.mark.parametrize(
        ("arguments", "problem"),
        [
            ({"embed_dim": 0}, "cannot build"),
            ({"embed_dim": -4}, "cannot build"),
            ({"embed_dim": "wide"}, "cannot build"),
            ({"nonsense": 1}, "cannot build"),
            ({"embed_dim": 3 * 10**9}, "no size of a timm model"),
            ({"embed_dim": 3 * 2**16}, "far more"),
            ({"depth": 10**9}, "no size of a timm model"),
            ({"depth": 10**4}, "far more than were saved"),
            ({"depth": 2}, "is missing"),
        ],
        ids=str,
    )
    def test_broken_sizes(self, folder: Path, arguments: dict[str, Any], problem: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        text = refused(folder, config | {"model_args": ARGS | arguments})
        assert any(p in text for p in problem.split("|")), text

    def test_long_values_are_cut(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        changes = ({"act_layer": "x" * 3000}, {"act_layer": "/" * 3000}, {"n" * 3000: 1}, {"drop_rate": [0] * 3000})
        for arguments in changes:
            assert len(refused(folder, config | {"model_args": ARGS | arguments})) < 1200
        assert len(refused(folder, config | {"architecture": "x" * 3000})) < 600

    @pytest.mark.parametrize("text", ["", "{", "[]", "3", "[" * 100_000, '{"architecture": NaN}'], ids=lambda t: t[:9])
    def test_broken_configs(self, folder: Path, text: str) -> None:
        assert "config.json" in refused(folder, text)

    def test_broken_weights(self, folder: Path) -> None:
        file = folder / "model.safetensors"
        for keep in (file.stat().st_size - 1, 100, 0):
            file.write_bytes(file.read_bytes()[:keep])
            with pytest.raises(bt.PlanError, match=r"model\.safetensors cannot be read"):
                vision.load(folder)
        file.unlink()
        with pytest.raises(bt.PlanError, match=r"model\.safetensors cannot be read"):
            vision.load(folder)

    def test_saving_refuses_arguments_that_do_not_describe_the_model(self, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match=r"could not be loaded again: .* Give save the arguments"):
            vision.save(vit(), tmp_path / "m")
        assert list(tmp_path.iterdir()) == []

    def test_saving_refuses_what_loading_would_refuse(self, tmp_path: Path) -> None:
        with pytest.raises(bt.PlanError, match="sets the argument 'checkpoint_path'"):
            vision.save(vit(), tmp_path / "m", **ARGS, checkpoint_path="x")
        assert list(tmp_path.iterdir()) == []
