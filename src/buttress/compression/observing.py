"""Modules on which hooks see every call of a model's linear layers, packed attention included."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from buttress.inspection.names import last_part
from buttress.inspection.sites import Site
from buttress.nn.attention import ProjectedAttention, unpacked


@contextmanager
def observable(sites: Iterable[Site]) -> Iterator[dict[str, nn.Module]]:
    """For each layer a module that is called whenever the layer is applied, while the block runs.

    For most layers it is the layer itself. nn.MultiheadAttention applies its packed weights without calling a module,
    so for the block it computes the same through modules around views of these weights.

    Args:
        sites: The layers. They are in eval mode.

    Yields:
        The modules, by layer name. Packed layers that cannot be replaced are missing.

    Example:
        >>> with observable(find_sites(model).values()) as layers:
        ...     handles = [layer.register_forward_hook(record) for layer in layers.values()]
    """
    attentions: dict[int, tuple[nn.MultiheadAttention, ProjectedAttention]] = {}
    by_name: dict[str, nn.Module] = {}
    for site in sites:
        owner = site.owner
        if not isinstance(owner, nn.MultiheadAttention):
            by_name[site.name] = owner
            continue
        if site.unsupported_reason:
            continue  # its weights cannot be read
        if id(owner) not in attentions:
            attentions[id(owner)] = owner, ProjectedAttention(owner, dict(unpacked(owner))).eval()
        by_name[site.name] = attentions[id(owner)][1].get_submodule(last_part(site.name))
    fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        for attention, projected in attentions.values():
            vars(attention)["forward"] = projected.forward  # hooks of the attention itself still run
        # It reads the weights and calls no attention; with padding, other layers get nested tensors.
        torch.backends.mha.set_fastpath_enabled(False)
        yield by_name
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for attention, _ in attentions.values():
            vars(attention).pop("forward", None)
