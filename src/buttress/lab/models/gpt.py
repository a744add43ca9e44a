"""The GPT-2 of the paper's language experiments (appendix "Model architectures"): no biases, normalised queries and
keys, 8 / d attention, an embedding that is not tied to the head.

The loss is made in chunks of tokens, and its gradient with it, so that no more than one chunk's logits exist at a time:
with fifty thousand words to choose from they would otherwise be most of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress import ShapeError
from buttress.lab.models.mlp import Block, start_
from buttress.lab.models.vit import Attention

Score = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
CHUNK = 2**28
"""Logits that may exist at a time."""


class GPT(nn.Module):
    """Embedding and positions, `depth` pairs of causal attention and FFN, a norm, and a head that starts at zero.

    `heads` of width `head_width` each need not make up the whole width. Called with tokens it gives logits; called with
    tokens and the tokens that follow them, the mean loss and the part that it would have guessed wrong.
    """

    def __init__(
        self, vocabulary: int, context: int, width: int, *, depth: int = 12, heads: int = 12, head_width: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.score: Score = score
        """What is asked of a chunk of logits; exchanged for a compiled one, it passes over them less often."""
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.empty(context, width))
        pairs = (
            (
                Attention(width, heads, head_width=head_width, bias=False, causal=True),
                Block(width, bias=False, norm_bias=False),
            )
            for _ in range(depth)
        )
        self.blocks = nn.Sequential(*(part for pair in pairs for part in pair))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for table in (self.embedding.weight, self.position):
            nn.init.normal_(table, std=0.02)
        nn.init.zeros_(self.head.weight)
        start_(self)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Any:
        if tokens.shape[-1] > self.context:
            raise ShapeError(
                f"this GPT reads at most {self.context} tokens, got {tokens.shape[-1]}: give it the last of them"
            )
        x = self.embedding(tokens) + self.position[: tokens.shape[-1]]
        x = self.norm(self.blocks(x))
        if targets is None:
            return self.head(x)
        # It takes a gradient on the way forward, which torch.compile cannot. Asked for here, not as a decorator, which
        # would make everybody who imports this wait for the compiler.
        loss = torch.compiler.disable(_loss)
        return loss(self.head, self.score, x.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def sample(
        self, tokens: Tensor, *, words: int, temperature: float = 1.0, top: int = 50, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Words that go on from a text, one after the other: (batch,) tokens each, drawn from the `top` likeliest.

        `words` are how many the tokenizer knows: of what the vocabulary was padded with nothing is drawn.
        """
        for _ in range(self.context * 1000):
            logits = self(tokens[:, -self.context :])[:, -1, :words].float()
            best = logits.topk(min(top, words))
            if temperature > 0:
                chosen = torch.multinomial((best.values / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = torch.zeros_like(best.indices[:, :1])
            following = best.indices.gather(1, chosen)
            tokens = torch.cat((tokens, following), 1)
            yield following[:, 0]


def score(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses of some tokens, and how many of them were guessed wrong."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, targets, reduction="sum"), (logits.argmax(-1) != targets).sum()


def _loss(head: nn.Module, score: Score, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and part guessed wrong of all tokens."""
    words: int = getattr(head, "out_features")  # noqa: B009  (nn.Linear and structured layers have it)
    chunk = max(1, CHUNK // words)
    if torch.is_grad_enabled():
        made: tuple[Tensor, Tensor] = _Chunked.apply(head, score, hidden, targets, chunk, *head.parameters())  # type: ignore[no-untyped-call]
        return made
    scores = [score(head(h), t) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    loss, wrong = (torch.stack(parts).sum() / len(targets) for parts in zip(*scores, strict=True))
    return loss, wrong


class _Chunked(torch.autograd.Function):
    """Mean cross entropy of a head's logits, with the gradients of each chunk taken before the next is made."""

    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, score: Score, hidden: Tensor, targets: Tensor, chunk: int, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden)
        d_weights: list[Tensor] = []
        losses, wrong = [], []
        start = 0
        for part, wanted in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            with torch.enable_grad():
                x = part.detach().requires_grad_()
                loss, missed = score(head(x), wanted)
            d_x, *found = torch.autograd.grad(loss, [x, *weights])
            d_hidden[start : start + len(part)] = d_x
            d_weights = [a.add_(b) for a, b in zip(d_weights, found, strict=True)] if d_weights else list(found)
            losses.append(loss.detach())
            wrong.append(missed)
            start += len(part)
        ctx.save_for_backward(d_hidden, *d_weights)
        ctx.count = len(targets)
        ctx.set_materialize_grads(False)
        made = torch.stack(losses).sum() / len(targets), torch.stack(wrong).sum() / len(targets)
        ctx.mark_non_differentiable(made[1])
        return made

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        factor = d_loss / ctx.count
        d_hidden, *d_weights = ctx.saved_tensors
        return None, None, d_hidden * factor.to(d_hidden.dtype), None, None, *(d * factor for d in d_weights)
