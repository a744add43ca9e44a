"""Which layers calibration can judge: those it reached with enough data to tell what they would lose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from buttress.compression.input_moments import InputMoments
from buttress.inspection.sites import Site

SHORT_OF_TOKENS = "fewer tokens reached it than it has inputs"


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer that stays dense, and why."""

    name: str
    """Name of the layer."""
    params: int
    """Its parameters, bias included."""
    macs: int
    """Its multiply-accumulates per token."""
    reason: str
    """Why it stays dense."""
    tokens: int | None = None
    """Calibration tokens that reached it; None where they were not counted."""

    @property
    def is_short_of_tokens(self) -> bool:
        """Whether it stays dense because too few calibration tokens reached it."""
        return self.reason == SHORT_OF_TOKENS

    @classmethod
    def of(cls, site: Site, reason: str, moments: Mapping[str, Tensor] | None = None) -> DenseLayer:
        """The record of a layer of a model.

        Args:
            site: The layer.
            reason: Why it stays dense.
            moments: What `moments` returned, for the number of tokens.

        Returns:
            The record. A layer whose weight cannot be read has no parameters.
        """
        tokens = int(moments.tokens.get(site.name, 0)) if isinstance(moments, InputMoments) else None
        try:
            linear = site.read()
        except (AttributeError, KeyError, TypeError):  # its weight is computed, or does not exist yet
            return cls(site.name, 0, 0, reason, tokens)
        macs = linear.in_features * linear.out_features
        return cls(site.name, macs + (0 if linear.bias is None else linear.bias.numel()), macs, reason, tokens)


def reason_not_to_judge(site: Site, moments: Mapping[str, Tensor] | None) -> str | None:
    """Why the loss of a layer's options cannot be told, None if it can.

    With fewer tokens than inputs, a matrix of that rank gives the same outputs on all of them, whatever the weight is:
    a loss of 0 says nothing.

    Args:
        site: The layer.
        moments: Second moments of layers' inputs; None to judge by the weights alone.

    Returns:
        The reason, or None.
    """
    if site.unsupported_reason:
        return f"it cannot be replaced: {site.unsupported_reason}"
    if not moments and not (isinstance(moments, InputMoments) and moments.unreached):
        return None
    if moments is None or site.name not in moments:
        return "no calibration data reached it"
    energy = moments[site.name].diagonal().sum()
    if not bool(energy.isfinite()):
        return "its inputs were not finite"
    if energy <= 0:
        return "its inputs were all zero"
    inputs = site.read().in_features
    tokens = moments.tokens.get(site.name, inputs) if isinstance(moments, InputMoments) else inputs
    return SHORT_OF_TOKENS if tokens < inputs else None
