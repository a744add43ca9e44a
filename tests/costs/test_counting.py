"""cost(): against torch's own FLOP counter and against what autograd really saves."""

import copy
import logging
import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import buttress as bt


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(48, 64), nn.GELU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 10)
    )


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 7))


def gpt2() -> nn.Module:
    hf = pytest.importorskip("transformers")
    config = hf.GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=50, n_positions=16)
    return hf.GPT2LMHeadModel(config)


def replaced(build: Callable[[], nn.Module], structure: bt.Structure, **options) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        model = build()
        bt.replace_(model, structure, **options)
        return model

    return made


def vectors() -> Tensor:
    return torch.randn(6, 48)


def sequences() -> Tensor:
    return torch.randn(4, 10, 32)


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8)


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 12))


CASES = {
    "mlp": (mlp, vectors),
    "convolutions": (convolutions, images),
    "encoder": (encoder, sequences),
    "gpt2": (gpt2, tokens),
    "mlp btt": (replaced(mlp, bt.BTT(rank=2)), vectors),
    "mlp btt three cores": (replaced(mlp, bt.BTT(rank=2, cores=3)), vectors),
    "mlp tensor train": (replaced(mlp, bt.TensorTrain(rank=3)), vectors),
    "mlp kronecker": (replaced(mlp, bt.Kronecker()), vectors),
    "mlp monarch": (replaced(mlp, bt.Monarch(blocks=4)), vectors),
    "mlp low rank": (replaced(mlp, bt.LowRank(rank=5)), vectors),
    "mlp dense": (replaced(mlp, bt.Dense()), vectors),
    "mlp block diagonal": (replaced(mlp, bt.BlockDiagonal(blocks=2)), vectors),
    "mlp normalised": (replaced(mlp, bt.BTT(rank=2), normalize=True), vectors),
    "encoder btt": (replaced(encoder, bt.BTT(rank=2)), sequences),
    "gpt2 monarch": (replaced(gpt2, bt.Monarch(blocks=4)), tokens),
    "gpt2 split": (replaced(gpt2, bt.BTT(rank=2), split={"*.c_attn": 3}), tokens),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def really_saved(model: nn.Module, *inputs: Tensor) -> int:
    """Bytes of the storages that a real forward pass keeps for its backward pass."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages: dict[int, int] = {}
    kept = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept.append(t)
            storages[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*inputs)
    return sum(storages.values())


@cases
def test_macs_are_half_of_what_torch_counts(case) -> None:
    build, example = case
    model, x = build().train(), example()
    found = bt.cost(model, x)
    with FlopCounterMode(display=False) as counter:
        model(x)
    assert counter.get_total_flops() > 0
    assert 2 * found.macs == counter.get_total_flops() == found.flops


@cases
def test_params_and_rows(case) -> None:
    build, example = case
    model = build().train()
    found = bt.cost(model, example())
    assert found.params == sum(p.numel() for p in model.parameters())
    for name in ("params", "macs", "activation_bytes"):
        assert sum(getattr(row, name) for row in found.rows) == getattr(found, name), name
    assert len({row.name for row in found.rows}) == len(found.rows)


@cases
def test_activation_bytes_are_those_that_autograd_saves(case) -> None:
    build, example = case
    model, x = build().train(), example()
    found = bt.cost(model, x)
    saved = really_saved(model, x)
    assert saved > 0
    assert found.activation_bytes == pytest.approx(saved, rel=0.1)


@cases
def test_the_model_is_not_touched(case) -> None:
    build, example = case
    model, x = build(), example()
    for train in (True, False):
        model.train(train)
        held = {n: id(p) for n, p in model.named_parameters()}
        modules = {n: id(m) for n, m in model.named_modules()}
        values = {n: t.clone() for n, t in model.state_dict().items()}
        bt.cost(model, x)
        assert {m.training for m in model.modules()} == {train}
        assert {n: id(p) for n, p in model.named_parameters()} == held
        assert {n: id(m) for n, m in model.named_modules()} == modules
        torch.testing.assert_close(dict(model.state_dict()), values, rtol=0, atol=0)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert all(p.grad is None for p in model.parameters())


def test_by_hand() -> None:
    model = nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 10))
    x = torch.randn(6, 48)
    found = bt.cost(model, x)
    assert found.macs == 6 * (48 * 64 + 64 * 10)
    assert found.params == 48 * 64 + 64 + 64 * 10 + 10
    # The input, and the output of ReLU, which the next layer's gradient needs too.
    assert found.activation_bytes == 4 * 6 * (48 + 64)
    assert {row.name: (row.kind, row.params, row.macs) for row in found.rows if row.params} == {
        "0": ("Linear", 48 * 64 + 64, 6 * 48 * 64),
        "2": ("Linear", 64 * 10 + 10, 6 * 64 * 10),
    }


@pytest.mark.parametrize(
    "structure",
    [bt.BTT(rank=3), bt.TensorTrain(rank=2), bt.Kronecker(), bt.Monarch(blocks=4), bt.LowRank(rank=5)],
    ids=str,
)
def test_a_structured_layer_costs_what_its_chain_says(structure: bt.Structure) -> None:
    layer = bt.StructuredLinear(48, 64, structure)
    found = bt.cost(layer, torch.randn(5, 7, 48))
    assert found.macs == 35 * layer.chain.macs
    assert found.params == layer.chain.params + 64
    (row,) = (row for row in found.rows if row.params)
    assert row.kind == f"StructuredLinear({structure})"


def test_train_and_eval_differ() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 16))
    x = torch.randn(8, 16)
    train = bt.cost(model.train(), x)
    assert bt.cost(model.eval(), x).activation_bytes < train.activation_bytes


def test_gradients_are_counted_under_no_grad_too() -> None:
    model, x = mlp(), vectors()
    with torch.no_grad():
        found = bt.cost(model, x)
    assert found == bt.cost(model, x)
    assert found.activation_bytes > 0


def test_a_model_on_the_meta_device_larger_than_any_memory() -> None:
    n = 2**20
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(n, n), nn.ReLU(), nn.Linear(n, n))
        x = torch.empty(2**20, n)
    found = bt.cost(model, x)
    assert found.params == 2 * (n * n + n)
    assert found.macs == 2 * n * n * n
    assert found.activation_bytes == 2 * 4 * n * n
    assert all(p.is_meta for p in model.parameters())
    bt.replace_(model, {"*": bt.BTT(rank=2)})
    assert bt.cost(model, x).macs == 2 * n * bt.BTT(rank=2).chain(n, n).macs


@cases
def test_meta_and_real_agree(case) -> None:
    build, example = case
    model, x = build(), example()
    with torch.device("meta"):
        twin = copy.deepcopy(build()).to("meta")
    assert bt.cost(twin, x.to("meta")) == bt.cost(model, x)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, batch: dict, pair: tuple, scale: float = 1.0) -> dict:
        return {"y": self.linear(batch["x"]) + self.linear(pair[0]) * pair[1][0] * scale}


def test_nested_inputs() -> None:
    batch = {"x": torch.randn(3, 8), "name": "a text"}
    pair = (torch.randn(3, 8), [torch.randn(3, 1)])
    found = bt.cost(Nested(), batch, pair, 2.0)
    assert found.macs == 2 * 3 * 8 * 8
    assert found.params == 72


class Looks(nn.Module):
    """Looks at values, which fake tensors do not have."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.small, self.large = nn.Linear(8, 8), nn.Linear(8, 32)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        match self.how:
            case "if":
                return self.large(x) if x.sum() > 0 else self.small(x)
            case "item":
                return self.large(x) if x[0, 0].item() > 0 else self.small(x)
            case "nonzero":
                return self.large(x[x[:, 0] > 0])
            case "numpy":
                return self.large(x) if x.detach().numpy().sum() > 0 else self.small(x)


@pytest.mark.parametrize("how", ["if", "item", "nonzero", "numpy"])
def test_control_flow_that_depends_on_data(how: str) -> None:
    model = Looks(how)
    found = bt.cost(model, torch.ones(5, 8))
    assert found.macs == 5 * 8 * 32
    assert found.activation_bytes >= 5 * 8 * 4
    if how != "nonzero":
        assert bt.cost(model, -torch.ones(5, 8)).macs == 5 * 8 * 8
    assert model.calls == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


class Remembers(nn.Module):
    """Holds tensors that are neither parameters nor buffers, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = torch.ones(3, 8)
        self.tables = [torch.ones(3, 8)]

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * self.table + self.tables[0])


@pytest.mark.parametrize("requires_grad", [False, True])
def test_tensors_that_are_neither_parameters_nor_buffers(requires_grad: bool) -> None:
    model = Remembers()
    model.table.requires_grad_(requires_grad)
    found = bt.cost(model, torch.randn(3, 8))
    assert found.macs == 3 * 64
    assert found.params == 72


def test_a_shared_module_is_counted_at_every_call_and_its_parameters_once() -> None:
    shared = nn.Linear(8, 8)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    found = bt.cost(model, torch.randn(3, 8))
    assert found.macs == 2 * 3 * 64
    assert found.params == 72
    assert sum(row.macs for row in found.rows) == found.macs
    assert sum(row.params for row in found.rows) == found.params


def test_tied_weights_are_counted_once() -> None:
    model = nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12, bias=False))
    model[1].weight = model[0].weight
    found = bt.cost(model, torch.arange(5))
    assert found.params == 96
    assert found.macs == 5 * 96


def test_an_error_in_the_model_is_the_users_and_leaves_no_hooks() -> None:
    model = mlp()
    with pytest.raises(RuntimeError):
        bt.cost(model, torch.randn(3, 47))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_table() -> None:
    model = replaced(mlp, bt.BTT(rank=2))()
    found = bt.cost(model, vectors())
    lines = found.table().splitlines()
    assert str(found) == found.table()
    assert lines[0].split() == ["name", "kind", "params", "macs", "activation", "bytes"]
    assert "FLOP" not in found.table().upper()
    total = lines[-1].split()
    assert total == ["total", f"{found.params:,}", f"{found.macs:,}", f"{found.activation_bytes:,}"]
    body = lines[2:-2]
    assert len(body) == len(found.rows)
    for line, row in zip(body, found.rows, strict=True):
        assert line.split()[0] == row.name
        assert line.split()[-3:] == [f"{row.params:,}", f"{row.macs:,}", f"{row.activation_bytes:,}"]
    assert len({len(line) for line in lines}) == 1


def test_attention_is_counted_alike_on_every_device() -> None:
    class Attention(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.scaled_dot_product_attention(x, x, x)

    x = torch.randn(1, 2, 32, 16)
    assert bt.cost(Attention(), x).macs == 2 * 2 * 32 * 32 * 16
    assert bt.cost(Attention(), x.to("meta")).macs == 2 * 2 * 32 * 32 * 16


def test_inference_mode_does_not_hide_the_activations() -> None:
    model = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    with torch.inference_mode():
        inside = bt.cost(model, x).activation_bytes
    assert inside == bt.cost(model, x).activation_bytes > 0


def test_a_wrong_shape_raises_torchs_error_and_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """The logger is as before afterwards, and other threads log in the meantime."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(caplog.handler)  # torch's loggers do not propagate
    before = (log.level, list(log.filters))

    class Logs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            thread = threading.Thread(target=log.error, args=("from elsewhere",), kwargs={"exc_info": ValueError()})
            thread.start()
            thread.join()
            return x

    try:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            bt.cost(nn.Sequential(Logs(), nn.Linear(8, 8)), torch.zeros(1, 9))
        assert {r.getMessage() for r in caplog.records} == {"from elsewhere"}
        assert (log.level, log.filters) == before
        log.error("after", exc_info=ValueError())
        assert caplog.records[-1].getMessage() == "after"
    finally:
        log.removeHandler(caplog.handler)
