"""Second moments of the inputs of a model's linear layers, accumulated as batches stream through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from buttress.compression.observing import observable
from buttress.compression.running import EncoderStates, call, decoder_mask_of, evaluating, mask_of
from buttress.errors import PlanError
from buttress.inspection.hooks import removing
from buttress.inspection.names import first_match
from buttress.inspection.sites import Site, find_sites
from buttress.nn.pointwise_conv import computed_positions
from buttress.surgery.choosing import special_reason


class InputMoments(dict[str, Tensor]):
    """The result of `moments`: second moments by layer name, and how much data each layer had.

    Args:
        means: The moments by layer name.
        tokens: Tokens that reached each of these layers.
        unreached: Names of the layers that no batch reached.

    Example:
        >>> inputs = bt.moments(model, loader)
        >>> inputs.tokens["mlp.0"], inputs.unreached
    """

    def __init__(
        self,
        means: Mapping[str, Tensor] | None = None,
        tokens: Mapping[str, float] | None = None,
        unreached: Iterable[str] = (),
    ) -> None:
        super().__init__(means or {})
        self.tokens = dict(tokens or {})
        """Tokens that reached each layer, by name; masked ones do not count."""
        self.unreached = tuple(unreached)
        """Names of the layers that no batch reached."""


def moments(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    layers: Iterable[str] = ("*",),
    run: Callable[[nn.Module, Any], object] | None = None,
    weigh: Callable[[Any], Tensor | None] | None = None,
) -> InputMoments:
    """Measure E[x x^T] over the inputs x of each linear layer.

    The inputs of a 1 × 1 convolution are the channels at each position that it computes. The model runs in eval mode.
    Memory is that of one batch and of the moments, independent of the number of batches.

    Args:
        model: The model. It is not changed.
        batches: Batches to run the model on. A mapping is passed as keywords, a tuple or list as arguments, anything
            else as the only argument.
        layers: Globs of layer names. A 1 × 1 convolution is measured only by a glob that ends in its own name.
        run: Called as `run(model, batch)`, for batches that have to be passed in another way.
        weigh: Called as `weigh(batch)`: a weight per token, such as an attention mask, or None. It applies to layers
            whose inputs have its shape. Default: a mapping's "attention_mask"; in an encoder-decoder of transformers,
            for layers that read the decoder's tokens, its "decoder_attention_mask", or all tokens if it has none.

    Shape:
        Each result: (d_in, d_in), in float32; d_in is the number of input channels of a convolution.

    Returns:
        The moments by layer name. Layers that no batch reached are missing; `unreached` names them, and `tokens` says
        how many tokens reached each of the others.

    Raises:
        PlanError: If a glob matches no linear layer, or no batch reached any layer.

    Example:
        >>> inputs = bt.moments(model, loader)
        >>> bt.replace_(model, bt.BTT(rank=4), init="project", moments=inputs)
    """
    sites = find_sites(model, convolutions=True)
    by_name = {name for name, site in sites.items() if site.by_name_only}
    matches = first_match(dict.fromkeys(layers), sites, by_name=by_name)
    for glob, reason in matches.unmatched.items():
        raise PlanError(f"no linear layer matches {glob!r}: {special_reason(model, glob, sites) or reason}")
    measured = moments_of(model, batches, {name: sites[name] for name in matches.values}, run=run, weigh=weigh)
    if not measured:
        raise PlanError("no linear layer was reached: give at least one batch, and layers that the model uses")
    return measured


@torch.no_grad()
def moments_of(
    model: nn.Module,
    batches: Iterable[Any],
    selected: Mapping[str, Site],
    *,
    run: Callable[[nn.Module, Any], object] | None = None,
    weigh: Callable[[Any], Tensor | None] | None = None,
    sums: MomentSums | None = None,
    is_enough: Callable[[MomentSums], bool] | None = None,
) -> InputMoments:
    """Measure the inputs of these layers, as `moments` does.

    Args:
        model: The model. It is not changed.
        batches: As for `moments`.
        selected: The layers, by name.
        run: As for `moments`.
        weigh: As for `moments`.
        sums: Sums of earlier batches, which are continued.
        is_enough: Called after each batch with the sums so far; whether to stop. Default: all batches are taken.

    Returns:
        As for `moments`; empty if no batch reached any of the layers.
    """
    sums = MomentSums() if sums is None else sums
    sums.encoder = EncoderStates.of(model)
    with (
        evaluating(model),
        observable(selected.values()) as modules,
        removing(*sums.hooks(modules, selected), *(sums.encoder.hooks() if sums.encoder else ())),
    ):
        for batch in batches:
            sums.weights = (weigh or mask_of)(batch)
            sums.decoder_weights = sums.weights if weigh else decoder_mask_of(batch)
            (run or call)(model, batch)
            sums.end_batch()
            if is_enough is not None and is_enough(sums):
                break
    means = sums.means()
    return InputMoments(
        {name: means[name] for name in selected if name in means},
        {name: sums.tokens[name] for name in selected if name in means},
        (name for name in selected if name not in means),
    )


class MomentSums:
    """Sums of x x^T by layer, filled by forward hooks.

    Args:
        sums: The sums so far.
        tokens: Tokens that have reached each of these layers.
        batches: Batches so far.
    """

    def __init__(
        self, sums: Mapping[str, Tensor] | None = None, tokens: Mapping[str, float] | None = None, batches: int = 0
    ) -> None:
        self.weights: Tensor | None = None
        """Weights of the current batch's tokens."""
        self.decoder_weights: Tensor | None = None
        """Weights of those that a decoder reads, if the model has an encoder, too."""
        self.encoder: EncoderStates | None = None
        """Tells the tokens of an encoder from those of a decoder, if the model has both."""
        self.sums, self.tokens, self.batches = dict(sums or {}), dict(tokens or {}), batches
        # Moments of the current batch by input tensor, which q, k and v share. The tensor is kept alive, so that no
        # other tensor gets its id.
        self._by_input: dict[tuple[int, int, tuple[int, ...]], tuple[Tensor, Tensor, float]] = {}

    def hooks(
        self, modules: Mapping[str, nn.Module], sites: Mapping[str, Site]
    ) -> list[torch.utils.hooks.RemovableHandle]:
        """Register hooks that read the inputs of these layers."""
        return [
            module.register_forward_pre_hook(self._hook(name, sites[name].stride), with_kwargs=True)
            for name, module in modules.items()
        ]

    def end_batch(self) -> None:
        """Release the batch's inputs."""
        self._by_input.clear()
        if self.encoder is not None:
            self.encoder.end_batch()
        self.batches += 1

    def fewest_tokens_per_input(self, names: Iterable[str]) -> float:
        """The least number of tokens per input that have reached one of these layers."""
        return min((self.tokens[n] / len(self.sums[n]) if n in self.sums else 0.0 for n in names), default=0.0)

    def means(self) -> dict[str, Tensor]:
        """The moments of the layers that at least one token reached."""
        with torch.inference_mode(False):
            return {name: total / self.tokens[name] for name, total in self.sums.items() if self.tokens[name] > 0}

    def _hook(
        self, name: str, stride: tuple[int, ...]
    ) -> Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any]], None]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
            x = arguments[0] if arguments else keywords.get("input")
            if not isinstance(x, Tensor):
                raise PlanError(
                    f"{name} was called with {type(x).__name__} instead of a tensor: leave it out of layers"
                )
            # The model may run in inference mode, but what is kept is also used outside of it.
            with torch.inference_mode(False), torch.no_grad():
                total, count = self._moments_of(x, stride)
                self.sums[name] = self.sums[name] + total if name in self.sums else total.clone()
            self.tokens[name] = self.tokens.get(name, 0.0) + count

        return hook

    def _moments_of(self, x: Tensor, stride: tuple[int, ...]) -> tuple[Tensor, float]:
        """Sum of x x^T over the tokens of an input, or over the positions of a convolution, and their total weight."""
        if x.is_inference():  # it does not count its changes in place, so it cannot be recognized
            return self._computed(x, stride)
        key = id(x), x._version, stride
        if key not in self._by_input:
            self._by_input[key] = x, *self._computed(x, stride)
        _, total, count = self._by_input[key]
        return total, count

    def _computed(self, x: Tensor, stride: tuple[int, ...]) -> tuple[Tensor, float]:
        channel_axis = -len(stride) - 1
        rows = computed_positions(x.detach(), stride).reshape(-1, x.shape[channel_axis]).float()
        given = self.weights if self.encoder is None or self.encoder.include(x) else self.decoder_weights
        if given is None or given.shape != x.select(channel_axis, 0).shape:
            return rows.mT @ rows, float(len(rows))
        weights = computed_positions(given.unsqueeze(channel_axis), stride).reshape(-1, 1).to(rows)
        rows = rows * weights.sqrt()
        return rows.mT @ rows, float(weights.sum())
