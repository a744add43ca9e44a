"""The paper's GPT-2: its counts, its start, causality, the loss in chunks, and sampling."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

import buttress as bt
from buttress.lab.models import GPT, gpt
from buttress.lab.models.gpt import chunk_size


class TestModel:
    # The table of shared facts about the paper's models: parameters exactly, MACs without its count of the norms.
    @pytest.mark.parametrize(
        ("width", "params", "macs"), [(384, 60.07e6, 23.226e9), (512, 89.54e6, 35.800e9), (768, 162.62e6, 68.195e9)]
    )
    def test_counts_are_those_of_the_paper(self, width: int, params: float, macs: float) -> None:
        with torch.device("meta"):
            model = GPT(50304, 512, width, heads=width // 64)
            found = bt.cost(model, torch.zeros(1, 512, dtype=torch.long))
        assert round(found.params / 1e6, 2) == params / 1e6
        norms = 512 * 5 * (25 * width + 24 * width)
        assert round((found.macs + norms) / 1e9, 3) == macs / 1e9

    @pytest.mark.parametrize(
        ("width", "heads", "params", "macs"),
        [(1024, 6, 83.37, 18.536), (1536, 6, 131.84, 30.057), (2048, 6, 185.03, 43.994), (2560, 12, 250.90, 66.863)],
    )
    def test_counts_with_the_authors_split(self, width: int, heads: int, params: float, macs: float) -> None:
        with torch.device("meta"):
            model = GPT(50304, 512, width, heads=heads, head_width=64)
            bt.replace_(model, {"*": bt.BTT(rank=4, split="greedy")}, normalize=True)
            found = bt.cost(model, torch.zeros(1, 512, dtype=torch.long))
        assert round(found.params / 1e6, 2) == params
        norms = 512 * 5 * (25 * width + 24 * heads * 64)
        assert round((found.macs + norms) / 1e9, 3) == macs

    def test_a_structured_head_and_narrow_attention_are_counted_by_their_chains(self) -> None:
        with torch.device("meta"):
            model = GPT(50304, 512, 1024, heads=6, head_width=64)
            bt.replace_(model, {"*": bt.BTT(rank=4)}, normalize=True)
        layers = {n: m for n, m in model.named_modules() if isinstance(m, bt.StructuredLinear)}
        assert layers["head"].chain.params == 7_225_344
        assert {m.out_features for n, m in layers.items() if n.endswith(("to_q", "to_k", "to_v"))} == {384}
        embedding = 50304 * 1024 + 512 * 1024
        norms = 12 * (2 * 1024 + 2 * 64) + 1024
        inside = sum(m.chain.params + len(m.gains) for m in layers.values())
        assert sum(p.numel() for p in model.parameters()) == embedding + norms + inside

    def test_starts(self) -> None:
        model = GPT(640, 16, 64, depth=2, heads=2)
        zero = {n.rsplit(".")[-2] for n, p in model.named_parameters() if not p.any()}
        assert zero == {"to_q", "to_out", "down", "head"}
        assert not any("bias" in n for n, _ in model.named_parameters())
        assert abs(model.embedding.weight.std().item() - 0.02) < 2e-3
        assert all(m.scale == 8 / 32 for m in model.modules() if hasattr(m, "scale"))

    def test_it_does_not_look_ahead(self) -> None:
        model = awake(GPT(64, 16, 32, depth=2, heads=2))
        x = torch.randint(0, 64, (1, 16))
        changed = x.clone()
        changed[0, 9] = (x[0, 9] + 1) % 64
        a, b = model(x), model(changed)
        torch.testing.assert_close(a[:, :9], b[:, :9])
        assert not torch.allclose(a[:, 9:], b[:, 9:])

    def test_too_long_a_text(self) -> None:
        with pytest.raises(bt.ShapeError, match="at most 16 tokens, got 17"):
            GPT(64, 16, 32, depth=1, heads=1)(torch.zeros(1, 17, dtype=torch.long))

    @pytest.mark.parametrize("structure", [None, bt.BTT(rank=2), bt.Monarch(4)])
    @pytest.mark.parametrize("chunk", [1, 7, 48, 1000])
    def test_the_loss_in_chunks_is_the_loss(
        self, structure: bt.Structure | None, chunk: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = GPT(60, 12, 16, depth=1, heads=2)
        if structure is not None:
            bt.replace_(model, {"*": structure}, normalize=True)
        model = awake(model).double()
        x, y = torch.randint(0, 60, (2, 4, 12))
        monkeypatch.setattr(gpt, "MAX_LOGITS", 60 * chunk)
        whole = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (3 * whole).backward()
        wanted = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss, error = model(x, y)
        (3 * loss).backward()
        torch.testing.assert_close(loss, whole)
        assert error == (model(x).argmax(-1) != y).double().mean()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == wanted.keys()
        for name, grad in wanted.items():
            torch.testing.assert_close(found[name], grad)
        with torch.no_grad():
            torch.testing.assert_close(model(x, y)[0], whole)

    def test_logits_never_exist_whole(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = GPT(512, 64, 16, depth=1, heads=1)
        monkeypatch.setattr(gpt, "MAX_LOGITS", 512 * 32)
        sizes: list[int] = []
        real = model.score
        model.score = lambda head, hidden, targets: sizes.append(len(hidden)) or real(head, hidden, targets)
        x = torch.randint(0, 512, (4, 64))
        model(x, x)[0].backward()
        assert sizes == [32] * 8

    def test_chunks_have_one_size_where_that_is_to_be_had(self) -> None:
        assert chunk_size(32768, 5336) == 4096
        assert chunk_size(100, 100) == 100
        assert chunk_size(101, 100) == 51, "a prime: two chunks, of nearly one size"
        for count in range(1, 60):
            for limit in range(1, 60):
                chunk = chunk_size(count, limit)
                assert chunk <= limit
                assert -(-count // chunk) < 2 * -(-count // limit), "at most twice as many as are needed"

    @pytest.mark.parametrize("structure", [None, bt.BTT(rank=2)], ids=str)
    def test_a_compiled_loss_is_the_same(self, structure: bt.Structure | None, monkeypatch: pytest.MonkeyPatch) -> None:
        model = GPT(96, 16, 32, depth=1, heads=2)
        if structure is not None:
            bt.replace_(model, {"*": structure}, normalize=True)
        awake(model)
        monkeypatch.setattr(gpt, "MAX_LOGITS", 96 * 16)
        x, y = torch.randint(0, 96, (2, 2, 16)).unbind()

        def gradients() -> list[torch.Tensor]:
            loss, error = model(x, y)
            return [loss.detach(), error, *torch.autograd.grad(loss, list(model.parameters()))]

        wanted = gradients()
        torch.compiler.reset()
        graphs: list[object] = []

        def backend(module: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
            graphs.append(module)
            return aot_eager(module, inputs)

        model.score = torch.compile(model.score, backend=backend, fullgraph=True)
        for a, b in zip(gradients(), wanted, strict=True):
            torch.testing.assert_close(a, b)
        assert len(graphs) == 1, "both chunks have one size"

    def test_samples(self) -> None:
        model = awake(GPT(64, 8, 32, depth=1, heads=2))
        start = torch.randint(0, 50, (2, 3))

        def words(**how: object) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1)
            stream = model.sample(start, vocab=50, generator=generator, **how)  # type: ignore[arg-type]
            return torch.stack([next(stream) for _ in range(20)], 1)

        assert words().shape == (2, 20)
        assert (words() < 50).all()
        assert torch.equal(words(), words())
        greedy = words(temperature=0.0)
        assert torch.equal(greedy, words(top=1))
        assert torch.equal(greedy[:, 0], model(start)[:, -1, :50].argmax(-1))


def awake(model: GPT) -> GPT:
    """With nothing left at zero."""
    with torch.no_grad():
        for p in model.parameters():
            if not p.any():
                p.normal_(std=0.1)
    return model
