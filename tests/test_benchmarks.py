"""The baselines of the benchmarks compute what the layers that they are compared with compute."""

import csv
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

import buttress as bt
from buttress import ops
from emulated_gpu import emulate

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def benchmark(name: str) -> ModuleType:
    """A benchmark as a module; those that it imports are in its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return import_module(name)


@pytest.fixture(scope="module")
def permute_and_bmm():
    return benchmark("permute_and_bmm")


@pytest.mark.parametrize(
    ("structure", "d_in", "d_out"),
    [(bt.BTT(), 24, 30), (bt.BTT(rank=3), 64, 36), (bt.Monarch(4), 64, 64), (bt.Monarch(4), 32, 64)],
    ids=str,
)
def test_versions_of_permute_and_bmm_equal_the_reference(permute_and_bmm, structure, d_in, d_out):
    chain = structure.chain(d_in, d_out)
    factors, leaves = permute_and_bmm.random_factors(chain, dtype=torch.float64)
    factors = [f.requires_grad_() for f in factors]
    x = torch.randn(7, d_in, dtype=torch.float64, requires_grad=True)
    y = ops.apply(chain, x, factors, impl="reference")
    dy = torch.randn_like(y)
    dx, d_right, d_left = torch.autograd.grad(y, [x, *factors], dy)
    versions = permute_and_bmm.WAYS | {"compiled": permute_and_bmm.plain}
    for version in versions.values():
        result = version(x, *leaves)
        grads = torch.autograd.grad(result, [x, *leaves], dy)
        torch.testing.assert_close(result, y)
        torch.testing.assert_close(grads[0], dx)
        torch.testing.assert_close(grads[2], d_left.mT)
        # The rows of the first factor may be in another order.
        torch.testing.assert_close(grads[1].sum(2), d_right.mT.sum(2))
        torch.testing.assert_close(grads[1].square().sum(2), d_right.mT.square().sum(2))


@pytest.fixture(scope="module")
def on_chip():
    pytest.importorskip("triton")
    return benchmark("on_chip")


def test_a_trial_of_the_on_chip_kernels_checks_and_times_every_pass(on_chip, monkeypatch, tmp_path):
    emulate(monkeypatch, tmp_path)
    command_line = ["--tokens=40", "--dtype=float16", "--candidates=1", "--seconds=0", "--device=cpu"]
    trial = on_chip.Trial(bt.BTT(rank=2), 32, 48, on_chip.arguments().parse_args(command_line))
    trial.run()
    timed = [(row["pass"], row["kernels"]) for row in trial.rows]
    assert timed == [
        ("forward", "on chip"), ("input_gradient", "on chip"), ("weight_gradients", "on chip"),
        ("forward", "triton"), ("input_gradient", "triton"), ("step", "triton"), ("step", "nn.Linear"),
        ("step", "on chip"), ("step", "on chip but for the gradient of x"),
    ]  # fmt: skip
    assert all(float(row["error"]) < on_chip.LIMIT for row in trial.rows[:3])
    assert "WRONG" not in trial.summary()
    trial.rows[0]["error"] = "nan"
    assert "WRONG: forward" in trial.summary()


def test_a_trial_passes_over_options_with_one_result_that_is_no_number(on_chip, monkeypatch, tmp_path):
    """Python's max of 0.001 and NaN is 0.001."""
    emulate(monkeypatch, tmp_path)
    command_line = ["--tokens=40", "--dtype=float16", "--candidates=1", "--seconds=0", "--device=cpu"]
    trial = on_chip.Trial(bt.BTT(rank=2), 32, 48, on_chip.arguments().parse_args(command_line))
    monkeypatch.setattr(on_chip, "relative", lambda r, e: 1e-3 if r.shape == trial.factors[0].shape else float("nan"))
    exact = [f.float() for f in trial.factors]
    assert trial._fastest("weight_gradients", ["option"], exact, lambda option: exact) is None
    assert trial.rows[-1]["error"] == "nan"


@pytest.mark.parametrize("cluster", [2, 8])
def test_kernels_that_measure_clusters_compile(monkeypatch, cluster):
    pytest.importorskip("cuda.core")
    from buttress.ops.on_chip.compiling import machine_code

    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from cluster_bandwidth import text

    assert machine_code(text(cluster), "sm_90", cached=False).startswith(b"\x7fELF")


@pytest.fixture(scope="module")
def adapters():
    pytest.importorskip("peft")
    pytest.importorskip("transformers")
    return benchmark("adapters")


@pytest.mark.parametrize(
    "method", ["low_rank", "btt", "monarch", "tensor_train", "kronecker", "sum", "lora", "lokr", "oft", "boft"]
)
@pytest.mark.filterwarnings("ignore")  # of peft
def test_adapters_have_the_parameters_of_lora_and_are_removed_again(adapters, method):
    from small_transformers import llama

    torch.manual_seed(0)
    model = llama().requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    data = (torch.randint(96, (4, 16)), torch.randint(96, (2, 16)))
    options = adapters.arguments().parse_args(["--rank", "12", "--steps", "2", "--device", "cpu"])
    target = sum(12 * (m.in_features + m.out_features) for m in adapters.adapted_layers(model).values())
    row = adapters.measure(model, method, 0.3, data, options)
    assert 0.02 * target < row["parameters"] <= target
    assert row["loss_after"] != round(adapters.held_out_loss(model, data[1], 2), 4)
    if method == "boft":
        config = adapters.peft_config(model, method, 12)
        assert row["parameters"] == adapters.boft_parameters(config, adapters.adapted_layers(model))
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.fixture(scope="module")
def step():
    return benchmark("step")


KERNELS = {
    "forward": ["forward", "forward_pair", "decode_pair"],
    "backward": ["backward", "reduce_gradients", "weight_gradients"],
    "on_chip": ["apply_pair", "arrange_weights"],
    "gemm": [
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm>", "void cublasLt::splitKreduce_kernel<32, 16>",
        "triton_tem_fused_mm_3", "aten::bmm",
    ],
    "compiled": ["triton_poi_fused_add_native_layer_norm_0", "triton_per_fused__to_copy"],
    "eager": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float>>", "aten::mul",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64>>", "fmha_cutlassF_bf16_aligned_64x64_sm80",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4>>",
        "void at::native::multi_tensor_apply_kernel<LpNormFunctor>",
    ],
    "other": ["Memcpy DtoD (Device -> Device)", "Memset (Device)"],
}  # fmt: skip


def test_kernels_have_the_kinds_that_their_names_say(step):
    assert tuple(KERNELS) == step.KINDS
    assert {kind for kind, _ in step.RULES} == set(step.KINDS)
    for kind, names in KERNELS.items():
        assert {name: step.kind_of(name) for name in names} == dict.fromkeys(names, kind)
    assert step.kind_of("ncclDevKernel_AllReduce") is None


def test_our_kernels_are_among_the_rules(step):
    triton = pytest.importorskip("triton")
    from buttress.ops.fused import kernels
    from buttress.ops.on_chip import source

    # Functions that kernels call, unlike those that are launched, are private or come from other modules.
    functions = {n: f for n, f in vars(kernels).items() if isinstance(f, triton.runtime.KernelInterface)}
    names = [n for n, f in functions.items() if n[0] != "_" and f.fn.__module__ == kernels.__name__]
    assert len(names) >= 5
    assert {step.kind_of(name) for name in names} == {"forward", "backward"}
    assert [step.kind_of(n) for n in (source.ARRANGE, source.APPLY, source.GRADIENTS)] == [
        "on_chip",
        "on_chip",
        "backward",
    ]


def test_unknown_kernels_are_named_with_their_share(step):
    times, unknown = step.by_kind(Counter({"forward": 60.0, "nccl": 30.0, "Memset (Device)": 9.99, "tiny": 0.01}))
    assert times == dict.fromkeys(step.KINDS, 0.0) | {"forward": 60.0, "other": pytest.approx(40.0)}
    assert unknown == "nccl 30.0%"


def test_a_step_by_kind_of_kernel(step, tmp_path, capsys):
    small = ["--device", "cpu", "--tokens", "64", "--context", "32", "--depth", "1", "--vocabulary", "128"]
    step.main([*small, "--out", str(tmp_path / "step.csv"), "dense:64", "btt(rank=2, split='aligned'):64"])
    with (tmp_path / "step.csv").open() as file:
        dense, structured = csv.DictReader(file)
    assert (dense["structure"], structured["structure"]) == ("dense", "btt(rank=2, split='aligned')")
    for row in (dense, structured):
        assert row["tokens"] == "64"
        assert float(row["step_ms"]) > 0
        # The smallest times are rounded away.
        assert float(row["gemm_ms"]) > 0
        assert float(row["eager_ms"]) > 0
    assert int(structured["parameters"]) < int(dense["parameters"])
    with pytest.raises(SystemExit, match="a model is a structure and a width"):
        step.main([*small, "btt"])
    assert capsys.readouterr().out.count("step_ms") == 2


@pytest.fixture(scope="module")
def llama():
    pytest.importorskip("transformers")
    return benchmark("llama")


def test_llamas_of_any_width(llama, tmp_path, monkeypatch, capsys):
    out = tmp_path / "llama.csv"
    command = [
        "llama.py",
        "--device",
        "cpu",
        "--width",
        "64",
        "--depth",
        "1",
        "--dtype",
        "float32",
        "--engine",
        "eager",
    ]
    command += ["--prompt", "32", "--batch", "1", "--train", "64", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    llama.main()
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["model"] for row in rows] == list(llama.STRUCTURES)
    macs = {row["model"]: int(row["blocks_macs"]) for row in rows}
    assert macs["half low rank"] == pytest.approx(macs["dense"] / 2, rel=0.05)
    for row in rows:
        assert all(float(row[key]) > 0 for key in ("prefill_ms", "decode_1_ms", "train_ms"))
        assert (row["fused_ms"] == "") == (row["model"] == "dense")
    capsys.readouterr()
    llama.main()  # all rows are there
    assert not capsys.readouterr().out
