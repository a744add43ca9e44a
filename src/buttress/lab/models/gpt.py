"""The GPT-2 of the paper's language experiments (appendix "Model architectures").

It has no biases, normalizes queries and keys, scales attention by 8 / head width and does not tie the embedding to the
head. The loss and its gradient are computed in chunks of tokens, so that the logits of only one chunk exist at a time:
with a vocabulary of fifty thousand, all logits would take most of the memory.
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

Score = Callable[[nn.Module, Tensor, Tensor], tuple[Tensor, Tensor]]
MAX_LOGITS = 2**28
"""Logits that may exist at a time."""


class GPT(nn.Module):
    """A decoder-only language model: embeddings, pairs of causal attention and FFN, a norm, and a head at zero.

    Args:
        vocabulary: Size of the vocabulary.
        context: Largest number of tokens per sequence.
        width: Width of the model.
        depth: Number of pairs of attention and FFN.
        heads: Number of attention heads.
        head_width: Width of each head; heads need not fill the model's width. Default: the width divided by `heads`.

    Shape:
        Tokens `(N, length)` to logits `(N, length, vocabulary)`. With targets `(N, length)` the result is instead the
        mean loss and the fraction of wrong predictions, two scalars.
    """

    def __init__(
        self, vocabulary: int, context: int, width: int, *, depth: int = 12, heads: int = 12, head_width: int = 0
    ) -> None:
        super().__init__()
        self.context = context
        self.score: Score = score
        """Loss and wrong predictions of a chunk of tokens. A compiled version reads the logits less often, and takes
        fewer passes to cast and normalize the head's weights."""
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
        """Logits, or with targets the mean loss and the fraction of wrong predictions."""
        if tokens.shape[-1] > self.context:
            raise ShapeError(
                f"this GPT reads at most {self.context} tokens, got {tokens.shape[-1]}: give it the last of them"
            )
        x = self.embedding(tokens) + self.position[: tokens.shape[-1]]
        x = self.norm(self.blocks(x))
        if targets is None:
            return self.head(x)
        # The forward pass computes gradients, which torch.compile cannot trace. Disabled here and not by a decorator,
        # which would import the compiler together with this module.
        loss = torch.compiler.disable(_loss)
        return loss(self.head, self.score, x.flatten(0, -2), targets.flatten())

    @torch.no_grad()
    def sample(
        self, tokens: Tensor, *, vocab: int, temperature: float = 1.0, top: int = 50, generator: torch.Generator | None
    ) -> Iterator[Tensor]:
        """Generate the tokens that continue a text, one at a time.

        Args:
            tokens: The text so far.
            vocab: Size of the tokenizer's vocabulary; tokens that only pad the model's vocabulary are never drawn.
            temperature: Divides the logits; 0 picks the most likely token.
            top: Number of most likely tokens to draw from.
            generator: Source of random numbers. Default: the global one.

        Shape:
            `tokens` is `(N, length)`; each item is `(N,)`.
        """
        for _ in range(self.context * 1000):
            logits = self(tokens[:, -self.context :])[:, -1, :vocab].float()
            best = logits.topk(min(top, vocab))
            if temperature > 0:
                chosen = torch.multinomial((best.values / temperature).softmax(-1), 1, generator=generator)
            else:
                chosen = torch.zeros_like(best.indices[:, :1])
            following = best.indices.gather(1, chosen)
            tokens = torch.cat((tokens, following), 1)
            yield following[:, 0]


def score(head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of the tokens' losses, and number of wrong predictions.

    Shape:
        `hidden` is `(count, width)`, `targets` `(count,)`; the results are scalars.
    """
    logits = head(hidden)
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(precise, targets, reduction="sum"), (logits.argmax(-1) != targets).sum()


def _loss(head: nn.Module, score: Score, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss and fraction of wrong predictions of all tokens."""
    vocabulary: int = getattr(head, "out_features")  # noqa: B009  (nn.Linear and structured layers have it)
    chunk = chunk_size(len(targets), max(1, MAX_LOGITS // vocabulary))
    if torch.is_grad_enabled():
        results: tuple[Tensor, Tensor] = _ChunkedLoss.apply(head, score, hidden, targets, chunk, *head.parameters())  # type: ignore[no-untyped-call]
        return results
    scores = [score(head, h, t) for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True)]
    loss, wrong = (torch.stack(parts).sum() / len(targets) for parts in zip(*scores, strict=True))
    return loss, wrong


def chunk_size(count: int, limit: int) -> int:
    """Tokens in a chunk: as many as the limit allows, but fewer if chunks of equal size are to be had by that.

    A compiler makes code for one size, and slower code for any size once there is a second one.
    """
    fewest = -(-count // limit)
    even = next((n for n in range(fewest, 2 * fewest) if count % n == 0), fewest)
    return -(-count // even)


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross entropy of a head's logits; the gradients of each chunk are computed before the next chunk."""

    @staticmethod
    def forward(
        ctx: Any, head: nn.Module, score: Score, hidden: Tensor, targets: Tensor, chunk: int, *weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        d_hidden = torch.empty_like(hidden)
        d_weights: list[Tensor] = []
        losses, wrong = [], []
        start = 0
        for h, t in zip(hidden.split(chunk), targets.split(chunk), strict=True):
            with torch.enable_grad():
                x = h.detach().requires_grad_()
                loss, errors = score(head, x, t)
            d_x, *grads = torch.autograd.grad(loss, [x, *weights])
            d_hidden[start : start + len(h)] = d_x
            d_weights = [a.add_(b) for a, b in zip(d_weights, grads, strict=True)] if d_weights else list(grads)
            losses.append(loss.detach())
            wrong.append(errors)
            start += len(h)
        ctx.save_for_backward(d_hidden, *d_weights)
        ctx.count = len(targets)
        ctx.set_materialize_grads(False)
        mean_loss, error = (torch.stack(sums).sum() / len(targets) for sums in (losses, wrong))
        ctx.mark_non_differentiable(error)
        return mean_loss, error

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        factor = d_loss / ctx.count
        d_hidden, *d_weights = ctx.saved_tensors
        return None, None, d_hidden * factor.to(d_hidden.dtype), None, None, *(d * factor for d in d_weights)
