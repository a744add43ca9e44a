"""The public names, pinned: other people's code uses them."""

import importlib
import inspect

import pytest

import buttress as bt

NAMES = {
    "AdapterReport", "Advice", "BLAST", "BTT", "BlockDiagonal", "Budget", "ButtressError", "Chain", "ChainError",
    "ChainSum", "Choice",
    "CompressOptions", "Convolution", "Cost", "Curves", "Dense", "DenseLayer", "Explanation", "Factor", "FusionReport",
    "GrowthReport",
    "Healing", "HealingLosses", "InputMoments", "Int8Linear",
    "Kronecker", "LowRank", "Match", "MissingExtraError", "Monarch", "Outcome", "Plan", "PlanEntry", "PlanError",
    "ProjectedAttention", "Projection", "Quantization", "ReadOnlyError", "Remainder", "Report", "RuleError",
    "ShapeError",
    "SplitLinear", "Structure", "StructureError", "StructuredEmbedding", "StructuredLinear", "StructuredPointwiseConv",
    "Sum", "TensorTrain", "Unreached",
    "adapt_", "advise", "budget", "calibrate", "compress", "cost", "curves", "densify_", "explain", "from_pretrained",
    "fuse_", "graphed", "grow_",
    "heal", "init_std", "language_loss", "load_adapter_", "lr_multiplier", "match", "merge_", "moments",
    "param_groups", "parse", "project", "quantize_", "replace_", "save_adapter", "side_by_side", "split",
    "structure", "structures", "timed", "unadapt_", "unfuse_",
}  # fmt: skip
OPTIM = {
    "QUINTIC", "Explanation", "Muon", "ParameterRow", "explain", "minimax_coefficients", "orthogonalize",
    "param_groups",
}  # fmt: skip
OPTIONAL = {
    "buttress.hf": {
        "Decoder",
        "LoraExport",
        "StructuredConfig",
        "adapted",
        "attach",
        "export_lora",
        "generate",
        "lora",
        "save",
    },
    "buttress.parallel": {"ColumnParallel", "RowParallel"},
    "buttress.vision": {"fill", "load", "model_args", "save"},
    "buttress.lab.diagnostics": {"Coordinate", "CoordinateCheck", "coordinate_check", "plot"},
}


def test_names() -> None:
    assert set(bt.__all__) == NAMES
    assert bt.__all__ == sorted(bt.__all__)
    assert all(hasattr(bt, name) for name in bt.__all__)
    assert set(bt.optim.__all__) == OPTIM


@pytest.mark.parametrize("module", OPTIONAL)
def test_names_of_optional_modules(module: str) -> None:
    for library in ("transformers", "timm", "peft", "matplotlib"):
        pytest.importorskip(library)
    public = importlib.import_module(module)
    assert set(public.__all__) == OPTIONAL[module]
    assert all(hasattr(public, name) for name in public.__all__)


def test_signatures() -> None:
    def names(function: object) -> list[str]:
        return list(inspect.signature(function).parameters)

    assert names(bt.StructuredLinear) == [
        "in_features", "out_features", "structure", "bias", "zero_init", "normalize", "device", "dtype",
    ]  # fmt: skip
    assert names(bt.StructuredEmbedding) == [
        "num_embeddings", "embedding_dim", "structure", "padding_idx", "std", "normalize", "device", "dtype",
    ]  # fmt: skip
    assert names(bt.replace_)[:5] == ["model", "plan", "init", "normalize", "split"]
    assert names(bt.param_groups) == [
        "model", "lr", "base", "weight_decay", "rule", "scale", "adam_scale", "structure_aware",
    ]  # fmt: skip
    assert names(bt.explain) == names(bt.param_groups)
    assert names(bt.lr_multiplier) == ["factor", "chain", "rule"]
    assert names(bt.optim.Muon) == [
        "params", "lr", "momentum", "nesterov", "weight_decay", "rule", "betas", "eps", "coefficients", "dtype",
        "bound", "foreach",
    ]  # fmt: skip
    assert names(bt.project)[:2] == ["structure", "weight"]
    rest = list(inspect.signature(bt.project).parameters.values())[2:]
    assert all(p.kind is p.KEYWORD_ONLY for p in rest), "what was added does not change a call"
    assert names(bt.StructuredLinear.from_dense) == ["linear", "structure", "normalize"]


def test_a_chain_and_its_factors_answer_what_is_asked() -> None:
    chain = bt.BTT(rank=4).chain(1024, 4096)
    assert (chain.d_in, chain.d_out, chain.params, chain.macs) == (1024, 4096, 786432, 786432)
    assert not chain.shares_parameters
    first = chain.factors[0]
    assert (first.name, first.blocks, first.d_out, first.d_in, first.shared) == ("R", 32, 256, 32, 1)
    assert (first.params, first.macs) == (262144, 262144)
