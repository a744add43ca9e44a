"""Decoder: text generation with a static cache, one token at a time, for causal language models of transformers.

The step is compiled once and repeated: a CUDA graph on a GPU, one function of torch.compile on a CPU. Prompts are read
in eager mode, because their lengths differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

from buttress.errors import ButtressError, ShapeError
from buttress.integrations.decodable import check_generation_config, check_layers, check_model
from buttress.integrations.single_token import compiled
from buttress.ops import graphed

Engine = Literal["eager", "compiled", "cuda_graph"]
Step = Callable[[Tensor, Tensor, Tensor], Tensor]
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Args:
        temperature: Divides the logits; 0 chooses the most likely token.
        top_k: Number of the most likely tokens to choose among; None for all of them.
        generator: Source of randomness; None for torch's own.

    Raises:
        ButtressError: If the temperature is negative, or `top_k` is below 1.
    """

    temperature: float = 0.0
    top_k: int | None = None
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ButtressError(f"the temperature must be 0 (most likely token) or positive, got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ButtressError(f"top_k must be at least 1, got {self.top_k}")

    def choose(self, logits: Tensor) -> Tensor:
        """The next token of each row.

        Args:
            logits: The logits.

        Shape:
            (batch, vocabulary) -> (batch,).

        Returns:
            The tokens.
        """
        if self.temperature == 0:
            return logits.argmax(-1)
        scaled = logits.float() / self.temperature
        if self.top_k is None or self.top_k >= scaled.shape[-1]:
            return torch.multinomial(scaled.softmax(-1), 1, generator=self.generator)[:, 0]
        values, tokens = scaled.topk(self.top_k, dim=-1)
        chosen = torch.multinomial(values.softmax(-1), 1, generator=self.generator)
        return tokens.gather(1, chosen)[:, 0]


class Decoder:
    """Generates text with a model, from a cache of fixed size and a step that is compiled once.

    Build it once for a model and a batch size, and use it for many prompts: the first call compiles the step.

    Args:
        model: A causal language model of transformers whose layers all attend to the whole text, such as those of the
            Llama and GPT-2 families; structured or dense.
        max_length: Tokens that the cache holds for each row: the longest prompt plus the new tokens.
        batch: Number of prompts at a time.
        engine: How the step runs. "cuda_graph" replays a captured graph, "compiled" is one function of torch.compile,
            "eager" is plain PyTorch. Default: "cuda_graph" on a GPU, "compiled" elsewhere.

    Raises:
        ButtressError: If the model has no static cache or its attention is neither "sdpa" nor "eager", or the engine
            does not suit its device.
        ShapeError: If the cache would be longer than the model's positions.

    Example:
        >>> decoder = hf.Decoder(model, max_length=512)
        >>> ids = tokenizer("In mathematics, a matrix is", return_tensors="pt").input_ids
        >>> tokenizer.decode(decoder.generate(ids, max_new_tokens=40)[0])
    """

    def __init__(
        self, model: PreTrainedModel, *, max_length: int, batch: int = 1, engine: Engine | None = None
    ) -> None:
        self.model, self.batch, self.max_length = model, batch, max_length
        self.device = model.device
        self.engine = _checked_engine(engine, self.device)
        check_model(model, max_length, batch)
        with _plain_mode():
            self._cache, self._dtype = self._empty_cache(), model.dtype
            self._token = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
            self._position = torch.zeros(batch, 1, dtype=torch.long, device=self.device)
            self._mask = torch.ones(batch, max_length, dtype=torch.long, device=self.device)
        self._step: Step | None = None
        self._captured_tensors: list[object] = []
        self._streams = 0

    def _empty_cache(self) -> StaticCache:
        cache = StaticCache(config=self.model.config, max_cache_len=self.max_length)
        check_layers(cache)
        return cache

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
        on_token: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Continue a batch of prompts; the same tokens as `model.generate(do_sample=False)` at temperature 0.

        Of the model's generation config, only the tokens that end and pad a text are used. Penalties, suppressed and
        forced tokens, smallest lengths and beams are refused.

        Args:
            input_ids: The prompts, padded on the left where their lengths differ.
            attention_mask: 1 for tokens, 0 for padding. Default: no padding.
            max_new_tokens: New tokens at most.
            temperature: Divides the logits; 0 chooses the most likely token.
            top_k: Number of the most likely tokens to choose among.
            eos_token_id: Tokens that end a text. Default: those of the model's generation config; an empty sequence
                for none.
            pad_token_id: What a row holds behind its end. Default: that of the model's generation config, else the
                first token that ends a text.
            generator: Source of randomness.
            on_token: Called with the new tokens, (batch,), as soon as they are known.

        Shape:
            (batch, prompt) -> (batch, prompt + new).

        Returns:
            The prompts with their continuations. It ends where all rows have ended.

        Raises:
            ShapeError: If the prompts do not fit the batch size or the cache.
            ButtressError: If padding is not on the left, an option is out of range, or the model's generation config
                changes the choice of tokens.

        Example:
            >>> decoder.generate(ids, max_new_tokens=20, temperature=0.8, top_k=50)
        """
        new: list[Tensor] = []
        for tokens in self.stream(
            input_ids,
            attention_mask,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            eos_token_id=eos_token_id,
            pad_token_id=pad_token_id,
            generator=generator,
        ):
            new.append(tokens)
            if on_token is not None:
                on_token(tokens)
        return torch.cat((input_ids.to(self.device), torch.stack(new, 1)), 1)

    def stream(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Iterator[Tensor]:
        """As `generate`, token by token. Inputs are checked at once.

        Only one stream of a decoder can be open: an earlier one raises an error where it continues.

        Args:
            input_ids: The prompts.
            attention_mask: 1 for tokens, 0 for padding.
            max_new_tokens: New tokens at most.
            temperature: As for `generate`, like all that follows.
            top_k: See there.
            eos_token_id: See there.
            pad_token_id: See there.
            generator: See there.

        Shape:
            input_ids is (batch, prompt).

        Returns:
            An iterator of the new tokens, (batch,) each.

        Raises:
            ShapeError: If the prompts do not fit the batch size or the cache.
            ButtressError: If padding is not on the left, an option is out of range, or the model's generation config
                changes the choice of tokens.

        Example:
            >>> for tokens in decoder.stream(ids, max_new_tokens=20):
            ...     print(tokenizer.decode(tokens), end="", flush=True)
        """
        sampling = Sampling(temperature, top_k, generator)
        self._check_prompts(input_ids, attention_mask, max_new_tokens)
        config = self.model.generation_config
        check_generation_config(config)
        ends = _as_list(config.eos_token_id if eos_token_id is None else eos_token_id)
        padding = config.pad_token_id if pad_token_id is None else pad_token_id
        if padding is None:
            padding = ends[0] if ends else 0
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        return self._stream(
            input_ids.to(self.device), mask.to(self.device, torch.long), max_new_tokens, sampling, ends, padding
        )

    def _stream(
        self, ids: Tensor, mask: Tensor, count: int, sampling: Sampling, ends: list[int], padding: int
    ) -> Iterator[Tensor]:
        with _plain_mode():
            self._streams += 1
            number = self._streams
            step = self._prepared_step()
            ended = torch.zeros(self.batch, dtype=torch.bool, device=self.device)
            end_tokens = torch.tensor(ends, device=self.device)
            logits = self._prefill(ids, mask)
        for i in range(count):
            if number != self._streams:
                raise ButtressError(
                    "another text was begun with this decoder, whose cache holds one batch: finish a stream before the "
                    "next, or build a Decoder for each"
                )
            with _plain_mode():
                if i:
                    logits = step(self._token, self._position, self._mask)
                    self._position += 1
                tokens = sampling.choose(logits)
                if ends:
                    tokens = torch.where(ended, padding, tokens)
                    ended |= torch.isin(tokens, end_tokens)
                self._token.copy_(tokens[:, None])
            yield tokens
            if ends and bool(ended.all()):
                return

    def _prefill(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Read the prompts into the cache. Returns the logits of the last token."""
        self._cache.reset()  # type: ignore[no-untyped-call]
        length = ids.shape[1]
        self._mask.fill_(1)
        self._mask[:, :length] = mask
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        self._position.copy_(positions[:, -1:] + 1)
        return self._forward(ids, positions, self._mask)

    def _forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        """The logits of the last token."""
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _prepared_step(self) -> Step:
        """The step, compiled or captured on first use; the cache is then in memory, and its contents are void."""
        if self.model.training:
            raise ButtressError("the model is in training mode: call model.eval() before generating text")
        if self._dtype != self.model.dtype:
            self._cache, self._dtype, self._step = self._empty_cache(), self.model.dtype, None
        if self.engine == "cuda_graph" and self._captured_tensors != self._tensors():
            self._step = None  # a graph reads the memory in which the weights were when it was captured
        if self._step is None:
            self._prefill(self._token, torch.ones_like(self._token))  # allocates the cache
            if self.engine == "eager":
                self._step = self._forward
            elif self.engine == "compiled":
                self._step = compiled(self._forward)
            else:
                self._step, self._captured_tensors = self._captured(), self._tensors()
        return self._step

    def _tensors(self) -> list[object]:
        """Where the model's parameters and buffers are, and of which form."""
        tensors = (*self.model.parameters(), *self.model.buffers())
        return [(t.data_ptr(), t.shape, t.stride(), t.dtype) for t in tensors]

    def _captured(self) -> Step:
        """The step as a CUDA graph, which reads and writes the same tensors on each replay."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self.device), graphed():
            stream = torch.cuda.Stream(self.device)
            stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(stream):
                for _ in range(_WARM_UP_STEPS):
                    self._cache.reset()  # type: ignore[no-untyped-call]
                    self._forward(self._token, self._position, self._mask)
                self._cache.reset()  # type: ignore[no-untyped-call]
            with torch.cuda.graph(graph, stream=stream):
                logits = self._forward(self._token, self._position, self._mask)
            torch.cuda.current_stream(self.device).wait_stream(stream)

        def replay(*_: Tensor) -> Tensor:
            with torch.cuda.device(self.device):
                graph.replay()
            return logits

        return replay

    def _check_prompts(self, ids: Tensor, mask: Tensor | None, count: int) -> None:
        if ids.dim() != 2 or ids.shape[0] != self.batch or not ids.shape[1]:
            raise ShapeError(
                f"this decoder takes prompts of shape ({self.batch}, length) with at least one token, got "
                f"{tuple(ids.shape)}: build a Decoder with the batch size of the prompts"
            )
        if count < 1:
            raise ButtressError(f"max_new_tokens must be at least 1, got {count}")
        if ids.shape[1] + count > self.max_length:
            raise ShapeError(
                f"a prompt of {ids.shape[1]} tokens and {count} new ones do not fit into a cache of {self.max_length}: "
                "shorten them, or build a Decoder with a larger max_length"
            )
        if mask is None:
            return
        if mask.shape != ids.shape:
            raise ShapeError(f"the attention mask is {tuple(mask.shape)}, but the prompts are {tuple(ids.shape)}")
        if not bool(((mask == 0) | (mask == 1)).all()) or bool(
            (mask.long().diff(dim=1) < 0).any() | (mask[:, -1] == 0).any()
        ):
            raise ButtressError(
                "the attention mask must be 0 for padding on the left and 1 for the tokens after it: set "
                "tokenizer.padding_side = 'left'"
            )


def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int,
    engine: Engine | None = None,
    **options: Any,
) -> Tensor:
    """Continue a batch of prompts with a new `Decoder`, which is compiled for this call alone.

    Args:
        model: The model.
        input_ids: The prompts, padded on the left where their lengths differ.
        attention_mask: 1 for tokens, 0 for padding.
        max_new_tokens: New tokens at most.
        engine: How the step runs; see `Decoder`.
        **options: As for `Decoder.generate`.

    Shape:
        (batch, prompt) -> (batch, prompt + new).

    Returns:
        The prompts with their continuations.

    Raises:
        ButtressError: As for `Decoder` and its `generate`.

    Example:
        >>> hf.generate(model, ids, max_new_tokens=20, engine="eager")
    """
    if input_ids.dim() != 2:
        raise ShapeError(f"prompts have the shape (batch, length), got {tuple(input_ids.shape)}")
    decoder = Decoder(model, max_length=input_ids.shape[1] + max_new_tokens, batch=input_ids.shape[0], engine=engine)
    return decoder.generate(input_ids, attention_mask, max_new_tokens=max_new_tokens, **options)


@contextmanager
def _plain_mode() -> Iterator[None]:
    """No gradients, and no inference tensors: those could not be written to outside of the caller's inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def _checked_engine(engine: Engine | None, device: torch.device) -> Engine:
    chosen = engine or ("cuda_graph" if device.type == "cuda" else "compiled")
    if chosen not in get_args(Engine):
        raise ButtressError(f"unknown engine {chosen!r}: there are {', '.join(get_args(Engine))}")
    if chosen == "cuda_graph" and device.type != "cuda":
        raise ButtressError(f"a CUDA graph needs a model on a GPU, but this one is on {device}: use engine='compiled'")
    return chosen


def _as_list(tokens: int | Sequence[int] | Tensor | None) -> list[int]:
    if tokens is None:
        return []
    return [int(tokens)] if isinstance(tokens, int) else [int(t) for t in tokens]
