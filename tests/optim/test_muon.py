"""bt.optim.Muon, compared with a plain loop, and everything that users do with an optimizer."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import buttress as bt

LR = 0.03


class Everything(nn.Module):
    """A parameter of every layout: factors, dense, attention, convolutions, a recurrent and a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.up = bt.StructuredLinear(16, 24, bt.BTT(rank=2), normalize=True)
        self.down = bt.StructuredLinear(24, 16, bt.Monarch(blocks=4))
        self.mix = nn.MultiheadAttention(16, 2, batch_first=True)
        self.conv = nn.Conv1d(16, 12, 3, padding=1)
        self.back = nn.ConvTranspose1d(12, 16, 3, padding=1)
        self.depthwise = nn.Conv1d(16, 16, 3, padding=1, groups=16)
        self.memory = nn.GRU(16, 16, batch_first=True)
        self.pairs = nn.Bilinear(16, 16, 5)
        self.head = nn.Linear(5, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.down(nn.functional.gelu(self.up(x)))
        x = x + self.mix(x, x, x, need_weights=False)[0]
        x = x + self.depthwise(self.back(self.conv(x.mT))).mT
        x = x + self.memory(x)[0]
        return self.head(self.pairs(x, x))


def everything(seed: int = 0) -> Everything:
    torch.manual_seed(seed)
    return Everything()


def groups_of(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    return bt.param_groups(model, LR, rule="muon", weight_decay=0.1, **options)


def set_gradients(model: nn.Module, step: int) -> None:
    """Gradients that depend on the step alone."""
    generator = torch.Generator().manual_seed(1000 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        set_gradients(model, step)
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def polar(x: Tensor) -> Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return (u @ vh).to(x.dtype)


def as_matrices(name: str, p: Tensor) -> Tensor:
    """The matrices of a parameter of `Everything`, written out by hand."""
    match name.split(".", maxsplit=1)[0]:
        case "back":  # (in, out, kernel)
            return p.permute(1, 0, 2).reshape(16, 12 * 3)
        case "conv":
            return p.reshape(12, 16 * 3)
        case "pairs":
            return p.reshape(5, 16 * 16)
        case "memory":  # three gates
            return torch.stack([p[:16], p[16:32], p[32:]])
        case "mix" if "in_proj" in name:
            return torch.stack([p[:16], p[16:32], p[32:]])
    return p


def plainly(model: nn.Module, steps: int, *, momentum: float, nesterov: bool) -> dict[str, Tensor]:
    """Muon and AdamW as a loop over parameters, with the singular value decomposition."""
    names = {p: name for name, p in model.named_parameters()}
    groups = groups_of(model)
    adam = torch.optim.AdamW([g for g in groups if g["rule"] == "adam"], betas=(0.9, 0.95))
    averages = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(steps):
        set_gradients(model, step)
        adam.step()
        for group in groups:
            for p in group["params"] if group["rule"] == "muon" else []:
                average = averages[names[p]]
                average.mul_(momentum).add_((1 - momentum) * p.grad)
                direction = (1 - momentum) * p.grad + momentum * average if nesterov else average
                update = from_matrices(names[p], polar(as_matrices(names[p], direction)), p.shape)
                p.data.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * update)
    return {name: p.detach() for name, p in model.named_parameters()}


def from_matrices(name: str, matrices: Tensor, shape: torch.Size) -> Tensor:
    if name.startswith("back"):
        return matrices.reshape(16, 12, 3).permute(1, 0, 2)
    return matrices.reshape(shape)


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=0, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


class TestStep:
    @pytest.mark.parametrize(("momentum", "nesterov"), [(0.95, True), (0.9, False), (0.0, True)])
    def test_it_is_that_of_a_plain_loop(self, momentum: float, nesterov: bool) -> None:
        model = everything().double()
        expected = plainly(copy.deepcopy(model), 3, momentum=momentum, nesterov=nesterov)
        precise = bt.optim.minimax_coefficients(steps=12, lower=1e-6)
        optimizer = bt.optim.Muon(groups_of(model), momentum=momentum, nesterov=nesterov, coefficients=precise)
        assert_equal(train(model, optimizer, range(3)), expected, 1e-6)

    def test_the_default_is_close_to_it(self) -> None:
        model = everything()
        expected = plainly(copy.deepcopy(model), 3, momentum=0.95, nesterov=True)
        # Three steps whose singular values differ from 1 by 0.2 %, and more where the momentum is nearly singular.
        assert_equal(train(model, bt.optim.Muon(groups_of(model)), range(3)), expected, 3 * LR * 0.1)

    def test_every_slice_gets_a_step_of_the_size_of_the_rate(self) -> None:
        """No scale but the learning rate: the change has the singular values that the rate says."""
        model = bt.StructuredLinear(64, 32, bt.BTT(rank=2), bias=False)
        before = copy.deepcopy(model)
        (*groups,) = bt.param_groups(model, LR, rule="muon")
        optimizer = bt.optim.Muon(groups)
        train(model, optimizer, range(1))
        for group in optimizer.param_groups:
            for p in group["params"]:
                (name,) = (n for n, q in model.named_parameters() if q is p)
                change = p.detach() - before.get_parameter(name).detach()
                sizes = torch.linalg.svdvals(change) / group["lr"]
                torch.testing.assert_close(sizes, torch.ones_like(sizes), rtol=0, atol=0.01)

    def test_the_last_momentum_is_counted_by_nesterov_alone(self) -> None:
        results = []
        for nesterov in (True, False):
            p = nn.Parameter(torch.zeros(4, 4))
            optimizer = bt.optim.Muon([p], nesterov=nesterov)
            results.append(train(nn.ParameterList([p]), optimizer, range(2))["0"])
        assert not torch.equal(*results)

    def test_zero_gradients_change_nothing_but_by_decay(self) -> None:
        model = everything()
        optimizer = bt.optim.Muon(groups_of(model), bound=1.0)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        decays = {p: g["lr"] * g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.detach(), before[name] * (1 - decays[p]))

    def test_parameters_without_a_gradient_are_left_alone(self) -> None:
        model = everything()
        before = copy.deepcopy(model)
        optimizer = bt.optim.Muon(groups_of(model))
        set_gradients(model, 0)
        model.up.factors["R"].grad = model.head.bias.grad = None
        optimizer.step()
        assert torch.equal(model.up.factors["R"], before.up.factors["R"])
        assert torch.equal(model.head.bias, before.head.bias)
        assert not torch.equal(model.up.factors["L"], before.up.factors["L"])
        assert model.up.factors["R"] not in optimizer.state
        bt.optim.Muon(groups_of(model)).zero_grad()
        optimizer.step()  # no gradients at all

    def test_one_by_one_is_the_same(self) -> None:
        models = [everything(), everything()]
        results = [
            train(m, bt.optim.Muon(groups_of(m), foreach=f), range(3))
            for m, f in zip(models, (True, False), strict=True)
        ]
        assert_equal(*results, 1e-5)

    def test_large_batches_are_divided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from buttress.optim import muon

        sizes = []
        whole = muon.orthogonalize
        monkeypatch.setattr(muon, "orthogonalize", lambda x, c: sizes.append(x.shape[0]) or whole(x, c))
        params = [nn.Parameter(torch.randn(2, 3, 5)) for _ in range(3)] + [nn.Parameter(torch.randn(5, 3))]
        train(nn.ParameterList(params), bt.optim.Muon(params), range(1))
        assert sizes == [7]  # a transposed matrix is in the same batch
        monkeypatch.setattr(muon, "BATCH_NUMBERS", 60)
        train(nn.ParameterList(params), bt.optim.Muon(params), range(1))
        assert sizes[1:] == [4, 3]

    def test_rates_may_be_tensors(self) -> None:
        models = [everything(), everything()]
        results = []
        for model, as_tensor in zip(models, (False, True), strict=True):
            optimizer = bt.optim.Muon(groups_of(model), bound=1.0)
            for group in optimizer.param_groups:
                group["lr"] = torch.tensor(group["lr"]) if as_tensor else group["lr"]
            results.append(train(model, optimizer, range(3)))
        assert_equal(*results, 1e-6)

    def test_nothing_is_read_on_the_host(self) -> None:
        """Tensors on the meta device have no values, so reading one raises an error. Adam is torch's own."""
        with torch.device("meta"):
            groups = [group for group in groups_of(Everything()) if group["rule"] == "muon"]
            rates = [torch.tensor(group["lr"]) for group in groups]
        optimizer = bt.optim.Muon(groups, bound=1.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
            for p in group["params"]:
                p.grad = torch.empty_like(p)
        optimizer.step()
        optimizer.step()

    def test_the_closure_is_called_with_gradients(self) -> None:
        p = nn.Parameter(torch.eye(3))
        optimizer = bt.optim.Muon([p])

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = p.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure).item() == 3.0
        assert optimizer.step(closure).item() < 3.0

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_other_types_of_parameters(self, dtype: torch.dtype) -> None:
        model = everything().to(dtype)
        actual = train(model, bt.optim.Muon(groups_of(model), dtype=torch.float32), range(2))
        reference = everything()
        expected = train(reference, bt.optim.Muon(groups_of(reference)), range(2))
        assert {t.dtype for t in actual.values()} == {dtype}
        assert_equal({n: t.float() for n, t in actual.items()}, expected, 0.02)


class TestState:
    def test_a_loaded_optimizer_continues_with_the_same_bits(self) -> None:
        model = everything()
        optimizer = bt.optim.Muon(groups_of(model))
        train(model, optimizer, range(3))
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        expected = train(model, optimizer, range(3, 6))
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = everything(seed=1)
        other.load_state_dict(saved["model"])
        restored = bt.optim.Muon(groups_of(other))
        restored.load_state_dict(saved["optimizer"])
        assert_equal(train(other, restored, range(3, 6)), expected)

    def test_the_count_of_steps_keeps_its_type(self) -> None:
        model = everything().bfloat16()
        optimizer = bt.optim.Muon(groups_of(model))
        train(model, optimizer, range(2))
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        step = optimizer.state[model.head.bias]["step"]
        assert (step.dtype, step.item()) == (torch.float32, 2.0)

    def test_schedulers_scale_both_rules(self) -> None:
        optimizer = bt.optim.Muon(groups_of(everything()))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        before = [g["lr"] for g in optimizer.param_groups]
        optimizer.step()
        scheduler.step()
        assert [g["lr"] for g in optimizer.param_groups] == [rate / 2 for rate in before]


@pytest.mark.filterwarnings("ignore")  # of torch, about its own profiler
def test_a_compiled_step_is_the_same() -> None:
    models = [everything(), everything()]
    results = []
    for model, is_compiled in zip(models, (False, True), strict=True):
        optimizer = bt.optim.Muon(groups_of(model), bound=2.0)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        if is_compiled:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager", fullgraph=True)  # type: ignore[method-assign]
        results.append(train(model, optimizer, range(3)))
    torch.compiler.reset()
    assert_equal(*results, 1e-5)
