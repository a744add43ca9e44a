"""Running a model on batches of any form, in eval mode, and which tokens of them count."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

IGNORED = -100
"""Target of a token that does not count, as torch has it."""

DECODER_INPUTS = ("decoder_attention_mask", "decoder_input_ids", "decoder_inputs_embeds")
"""Names of what only a decoder reads, in the batches of transformers."""


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in eval mode, and restore the mode of each of its modules afterwards."""
    modes = [(m, m.training) for m in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def call(model: nn.Module, batch: Any, **keywords: Any) -> Any:
    """Run a model on a batch: a mapping is passed as keywords, a tuple or list as arguments, else as one argument."""
    if isinstance(batch, Mapping):
        return model(**batch, **keywords)
    return model(*batch, **keywords) if isinstance(batch, tuple | list) else model(batch, **keywords)


def mask_of(batch: Any) -> Tensor | None:
    """The attention mask of a batch, if it has one; that of the encoder's tokens if there is a decoder, too."""
    return _tensor(batch, "attention_mask")


def decoder_mask_of(batch: Any) -> Tensor | None:
    """The mask of the tokens that the decoder of an encoder-decoder reads; None if all of them count.

    Without a mask of their own, all decoder inputs count, and all labels, which become decoder inputs, but ignored
    ones. A batch with neither is one whose decoder reads the encoder's tokens again, as BART's does: their mask counts.
    """
    if (mask := _tensor(batch, "decoder_attention_mask")) is not None or has_decoder_inputs(batch):
        return mask
    labels = _tensor(batch, "labels")
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():  # else they name classes
        return labels != IGNORED
    return mask_of(batch)


def has_decoder_inputs(batch: Any) -> bool:
    """Whether a batch holds what a decoder reads, next to what an encoder does."""
    return any(_tensor(batch, name) is not None for name in DECODER_INPUTS)


def _tensor(batch: Any, name: str) -> Tensor | None:
    value = batch.get(name) if isinstance(batch, Mapping) else None
    return value if isinstance(value, Tensor) else None


class EncoderStates:
    """Tells which tensors belong to the tokens of the encoder, while an encoder-decoder of transformers runs.

    These are all tensors inside the encoder, and its result. The place of a layer does not say it: the keys and values
    of cross-attention are computed in the decoder, but from the encoder's result. It is recognized as the very tensor
    that the encoder returned or the decoder received. Everything else, such as the output head, reads the decoder's
    tokens.

    Args:
        encoder: The encoder.
        decoder: The decoder, which is called with `encoder_hidden_states`.
    """

    def __init__(self, encoder: nn.Module, decoder: nn.Module) -> None:
        self.encoder, self.decoder = encoder, decoder
        self._running = False
        self._results: list[Tensor] = []  # kept alive, so that no other tensor is taken for one of them

    @classmethod
    def of(cls, model: nn.Module) -> EncoderStates | None:
        """Those of the first encoder-decoder among the modules of a model; None if there is none."""
        for module in model.modules():
            # All models of transformers have both methods, which return the model itself where it has no such part.
            if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
                parts = [getattr(module, name, lambda: None)() for name in ("get_encoder", "get_decoder")]
                encoder, decoder = (part if isinstance(part, nn.Module) else module for part in parts)
                if len({encoder, decoder, module}) == 3:
                    return cls(encoder, decoder)
        return None

    def hooks(self) -> list[RemovableHandle]:
        """Register hooks on the encoder and the decoder."""
        return [
            self.encoder.register_forward_pre_hook(self._enter),
            self.encoder.register_forward_hook(self._leave),
            self.decoder.register_forward_pre_hook(self._receive, with_kwargs=True),
        ]

    def include(self, x: Tensor) -> bool:
        """Whether a tensor, which a layer reads now, belongs to the encoder's tokens."""
        return self._running or any(x is result for result in self._results)

    def end_batch(self) -> None:
        """Release the batch's tensors."""
        self._running = False
        self._results.clear()

    def _enter(self, _: nn.Module, __: tuple[Any, ...]) -> None:
        self._running = True

    def _leave(self, _: nn.Module, __: tuple[Any, ...], output: Any) -> None:
        self._running = False
        result = output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)
        self._results += [result] if isinstance(result, Tensor) else []

    def _receive(self, _: nn.Module, __: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if isinstance(states := keywords.get("encoder_hidden_states"), Tensor):
            self._results.append(states)
