"""How far a model's outputs are from those of another model: what healing minimizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.compression.running import IGNORED, decoder_mask_of, has_decoder_inputs, mask_of
from buttress.errors import ButtressError, PlanError

Loss = Callable[[Any, Any, Any], Tensor]
"""A function of the model's output, the teacher's output and the batch, to a scalar."""

HIDDEN_STATES = ("hidden_states", "encoder_hidden_states", "decoder_hidden_states")
"""What transformers returns with `output_hidden_states=True`: the inputs of all blocks, and the result of the last."""


def distance(output: Any, reference: Any, batch: Any) -> Tensor:
    """Distance of a model's output from the teacher's, without padding.

    For logits it is the divergence KL(teacher, model) of the distributions, otherwise `relative_square_error`.

    Args:
        output: Output of the model: a tensor, a tuple that starts with one, or an object with `logits` or
            `last_hidden_state`.
        reference: Output of the teacher.
        batch: The batch; tokens outside its "attention_mask" are padding, and for outputs of a decoder next to an
            encoder those outside its "decoder_attention_mask".

    Returns:
        A scalar.
    """
    own, reference_tensor = _unmasked(output_tensor(output), output_tensor(reference), _mask_of_output(output, batch))
    # A single number is a score, and an image of numbers has its classes elsewhere: no distribution over the last axis.
    if not gives_logits(output) or own.shape[-1] == 1 or own.dim() > 3:
        return relative_square_error(output, reference, batch)
    own, reference_tensor = (F.log_softmax(t.flatten(0, -2).float(), -1) for t in (own, reference_tensor))
    return F.kl_div(own, reference_tensor, log_target=True, reduction="batchmean")


def relative_square_error(output: Any, reference: Any, batch: Any) -> Tensor:
    """The mean square of the difference of two outputs, divided by that of the second; arguments as for `distance`."""
    return _relative_square_error(output_tensor(output), output_tensor(reference), _mask_of_output(output, batch))


def hidden_state_distance(output: Any, reference: Any, batch: Any) -> Tensor:
    """The mean of `relative_square_error` over the hidden states of two outputs, without padding.

    Args:
        output: Output of the model, with tuples of `hidden_states` or those of an encoder and a decoder. What enters
            the first block is left out.
        reference: Output of the teacher.
        batch: The batch; padding is as for `distance`, with the "attention_mask" for the states of an encoder.

    Returns:
        A scalar.

    Raises:
        ButtressError: If there are none, or one output has more of them.
    """
    own, others = (
        [(n, s) for n in HIDDEN_STATES for s in (getattr(o, n, None) or ())[1:]] for o in (output, reference)
    )
    if not own or len(own) != len(others):
        raise ButtressError(
            f"there are {len(own)} hidden states to compare with {len(others)} of the teacher: let `run` return those "
            "of as many blocks of both models, or heal with hidden=0"
        )
    encoder_mask, mask = mask_of(batch), _mask_of_output(output, batch)
    errors = [
        _relative_square_error(state, other, encoder_mask if name.startswith("encoder") else mask)
        for (name, state), (_, other) in zip(own, others, strict=True)
    ]
    return torch.stack(errors).mean()


def distance_for(model: nn.Module) -> Loss:
    """`distance`, or `relative_square_error` if the model's config says that its logits are not those of classes."""
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    return relative_square_error if problem in ("regression", "multi_label_classification") else distance


def _mask_of_output(output: Any, batch: Any) -> Tensor | None:
    """The mask of the tokens of a model's output: in an encoder-decoder, those of the decoder."""
    by_decoder = has_decoder_inputs(batch) or getattr(output, "encoder_last_hidden_state", None) is not None
    return decoder_mask_of(batch) if by_decoder else mask_of(batch)


def _relative_square_error(own: Tensor, other: Tensor, mask: Tensor | None) -> Tensor:
    own, other = _unmasked(own, other, mask)
    return (own - other).float().square().mean() / other.float().square().mean()


def _unmasked(own: Tensor, other: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Both tensors, at the tokens that a mask of their shape keeps."""
    if mask is not None and own.dim() > mask.dim() and mask.shape == own.shape[: mask.dim()]:
        return own[mask.bool()], other[mask.bool()]
    return own, other


def output_tensor(output: Any) -> Tensor:
    """The main tensor of a model's output.

    Its logits or its last hidden state; where there is neither, all outputs of the same shape whose names end in
    "logits" or "_embeds", joined. Of a tuple or list, the first item counts.

    Args:
        output: What the model returned: a tensor, a tuple or list, a mapping, or an object with such attributes.

    Returns:
        The tensor.

    Raises:
        ButtressError: If there is no such tensor.
    """
    if isinstance(output, tuple | list) and output:
        output = output[0]
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        if isinstance(tensor := getattr(output, name, None), Tensor):
            return tensor
    named = dict(output) if isinstance(output, Mapping) else {}
    for ending, join in (("logits", torch.stack), ("_embeds", torch.cat)):
        tensors = [t for name, t in named.items() if name.endswith(ending) and isinstance(t, Tensor)]
        if tensors:
            # Stacked before the classes: the start and the end of an answer are two questions.
            return join([t for t in tensors if t.shape == tensors[0].shape], -2 if ending == "logits" else 0)
    raise ButtressError(f"a {type(output).__name__} has no logits and no last_hidden_state: give a loss of your own")


def gives_logits(output: Any) -> bool:
    """Whether the main tensor of a model's output are logits."""
    if isinstance(getattr(output, "logits", None), Tensor):
        return True
    return (
        isinstance(output, Mapping)
        and not isinstance(output.get("last_hidden_state"), Tensor)
        and any(str(name).endswith("logits") for name in output)
    )


def next_token_loss(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Cross-entropy of a language model's logits with the tokens that follow.

    Args:
        output: Output of the model, with `logits` of shape (batch, tokens, vocabulary).
        batch: Its "input_ids" of shape (batch, tokens); tokens outside its "attention_mask" do not count.

    Returns:
        The mean over the tokens that are predicted.
    """
    ids, mask = batch["input_ids"], mask_of(batch)
    targets = ids if mask is None else ids.masked_fill(mask == 0, IGNORED)
    logits = output_tensor(output)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, targets[:, 1:].flatten(), ignore_index=IGNORED)


def language_loss(next_token: float = 0.5) -> Loss:
    """A loss for `heal` that mixes the distance from the teacher with the next-token loss.

    The distance keeps what the teacher knows; the next-token loss also adapts the model to the text.

    Args:
        next_token: Weight of the next-token loss; the distance has the rest.

    Returns:
        A function of the model's output, the teacher's output and the batch.

    Raises:
        PlanError: If the weight is not between 0 and 1.

    Example:
        >>> bt.heal(model, teacher, batches, 1000, loss=bt.language_loss(0.5))
    """
    if not 0 <= next_token <= 1:
        raise PlanError(f"next_token is the weight of the next-token loss, from 0 to 1; got {next_token!r}")

    def loss(output: Any, reference: Any, batch: Any) -> Tensor:
        return (1 - next_token) * distance(output, reference, batch) + next_token * next_token_loss(output, batch)

    loss.__qualname__ = f"language_loss({next_token!r})"  # identifies it in checkpoints
    return loss
