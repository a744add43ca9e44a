"""ProjectedAttention: nn.MultiheadAttention whose projections are modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from buttress.errors import ShapeError
from buttress.nn.computed import computed

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


class ProjectedAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention whose four projections can be any modules.

    nn.MultiheadAttention passes its weights to one fused function, which would bypass such modules.
    This class calls ``q_proj``, ``k_proj``, ``v_proj`` and ``out_proj`` instead. Arguments and results of
    ``forward`` are the same. Without a packed weight, torch's encoder layers do not take their fused path.

    Args:
        source: The attention to take sizes, options, ``bias_k``, ``bias_v`` and the training mode from.
        projections: The modules ``"q_proj"``, ``"k_proj"``, ``"v_proj"`` (from ``embed_dim``, ``kdim`` and ``vdim``
            features to ``embed_dim``) and ``"out_proj"`` (from ``embed_dim`` to ``embed_dim``).

    Shape:
        As for nn.MultiheadAttention. With ``batch_first``:

        - query: ``(N, L, embed_dim)``; key: ``(N, S, kdim)``; value: ``(N, S, vdim)``.
        - output: ``(N, L, embed_dim)``.
        - weights: ``(N, L, S)``, or ``(N, num_heads, L, S)`` with ``average_attn_weights=False``.

    Attributes:
        q_proj: Projection of the queries.
        k_proj: Projection of the keys.
        v_proj: Projection of the values.
        out_proj: Projection of the concatenated heads.
        same_embed_dim: Whether the source kept one packed weight for queries, keys and values.

    Example:
        >>> model = nn.ModuleDict({"attention": nn.MultiheadAttention(64, 4, batch_first=True)})
        >>> report = replace_(model, {"attention.*": BTT(rank=2)})
        >>> type(model["attention"]).__name__
        'ProjectedAttention'
        >>> x = torch.randn(2, 10, 64)
        >>> model["attention"](x, x, x)[0].shape
        torch.Size([2, 10, 64])
    """

    def __init__(self, source: nn.MultiheadAttention, projections: dict[str, nn.Module]) -> None:
        nn.Module.__init__(self)
        self.embed_dim = source.embed_dim
        self.kdim = source.kdim
        self.vdim = source.vdim
        self.num_heads = source.num_heads
        self.dropout = source.dropout
        self.batch_first = source.batch_first
        self.head_dim = source.head_dim
        self.add_zero_attn = source.add_zero_attn
        self.same_embed_dim = source._qkv_same_embed_dim
        # torch's encoder layers check this before they take the fused path.
        self._qkv_same_embed_dim = False
        for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self.register_parameter(name, None)
        self.q_proj: nn.Module = projections["q_proj"]
        self.k_proj: nn.Module = projections["k_proj"]
        self.v_proj: nn.Module = projections["v_proj"]
        # torch declares out_proj as a Linear that is never quantized; here it is any module.
        self.add_module("out_proj", projections["out_proj"])
        self.bias_k, self.bias_v = source.bias_k, source.bias_v
        self.train(source.training)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # nn.MultiheadAttention's own would set _qkv_same_embed_dim to True in old pickles.
        nn.Module.__setstate__(self, state)

    @property
    def in_proj_weight(self) -> Tensor | None:  # type: ignore[override]
        """The weights of queries, keys and values as one matrix, computed on each access; for reading only.

        None where queries, keys and values have different sizes.
        """
        return self._packed("weight") if self.same_embed_dim else None

    @property
    def in_proj_bias(self) -> Tensor | None:  # type: ignore[override]
        """The biases of queries, keys and values as one vector, computed on each access; for reading only."""
        return None if self.q_proj.bias is None else self._packed("bias")

    def _packed(self, name: str) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        sources = [p for projection in projections for p in projection.parameters()]
        return computed(
            lambda: torch.cat([getattr(projection, name) for projection in projections]),
            sources,
            refusal=f"in_proj_{name} is put together from q_proj, k_proj and v_proj: write to those",
        )

    def _reset_parameters(self) -> None:
        """Nothing: the projections are initialized where they are created. Loaders call this for every attention."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention as in nn.MultiheadAttention.forward: the same arguments and results."""
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (t.unsqueeze(0) for t in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = (t.transpose(0, 1) for t in (query, key, value))
        batch, target = query.shape[:2]
        q, k, v = self.q_proj(query), self.k_proj(key), self.v_proj(value)  # [N, L, E], [N, S, E], [N, S, E]
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self.bias_k.expand(batch, 1, -1)), 1)
            v = torch.cat((v, self.bias_v.expand(batch, 1, -1)), 1)
        if self.add_zero_attn:
            k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        added = k.shape[1] - key.shape[1]
        # [N, heads, L or S, head_dim]
        q, k, v = (t.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        mask = self._mask(attn_mask, key_padding_mask, batch, added, q.dtype)
        drop = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.mT  # [N, heads, L, S]
            weights = (scores if mask is None else scores + mask).softmax(-1)
            weights = F.dropout(weights, drop) if drop else weights
            y = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            y = F.scaled_dot_product_attention(q, k, v, mask, drop)
        y = self.out_proj(y.transpose(1, 2).reshape(batch, target, self.embed_dim))
        if not batched:
            return y.squeeze(0), None if weights is None else weights.squeeze(0)
        return y if self.batch_first else y.transpose(0, 1), weights

    def _mask(
        self, attn_mask: Tensor | None, padding: Tensor | None, batch: int, added: int, dtype: torch.dtype
    ) -> Tensor | None:
        """Both masks as one that is added to the scores; keys that the layer itself adds are never masked."""
        mask = None
        if attn_mask is not None:
            # (target, source), or (batch * heads, target, source).
            whole = attn_mask if attn_mask.dim() == 2 else attn_mask.unflatten(0, (batch, self.num_heads))
            mask = F.pad(_additive(whole, dtype), (0, added))
        if padding is not None:
            keys = F.pad(_additive(padding, dtype), (0, added))[:, None, None, :]
            mask = keys if mask is None else mask + keys
        return mask

    def packed(self, projections: dict[str, nn.Linear]) -> nn.MultiheadAttention:
        """The nn.MultiheadAttention that computes the same with these projections.

        Args:
            projections: The four projections as dense layers, by name.

        Returns:
            An nn.MultiheadAttention with the same options and training mode.
        """
        q, k, v, out = (projections[name] for name in PROJECTIONS)
        dense = nn.MultiheadAttention(
            self.embed_dim,
            self.num_heads,
            self.dropout,
            bias=q.bias is not None,
            add_zero_attn=self.add_zero_attn,
            kdim=self.kdim,
            vdim=self.vdim,
            batch_first=self.batch_first,
            device="meta",
        )
        if self.same_embed_dim:
            packed = torch.cat([m.weight.detach() for m in (q, k, v)])
            dense.in_proj_weight = nn.Parameter(packed, requires_grad=q.weight.requires_grad)
        else:
            for name, part in (("q_proj_weight", q), ("k_proj_weight", k), ("v_proj_weight", v)):
                setattr(dense, name, part.weight)
        if q.bias is not None:
            packed = torch.cat([m.bias.detach() for m in (q, k, v)])
            dense.in_proj_bias = nn.Parameter(packed, requires_grad=q.bias.requires_grad)
        dense.out_proj.weight, dense.out_proj.bias = out.weight, out.bias
        dense.bias_k, dense.bias_v = self.bias_k, self.bias_v
        return dense.train(self.training)


def unpacked(source: nn.MultiheadAttention, *, copy: bool = False) -> dict[str, nn.Linear]:
    """The four projections of an nn.MultiheadAttention as linear layers.

    Args:
        source: The attention, with packed or separate weights.
        copy: Whether the layers get copies of the weights instead of views.

    Returns:
        The layers by name, as in `PROJECTIONS`. The parameters of "out_proj" are the attention's own.
    """
    if source._qkv_same_embed_dim:
        weights: Sequence[Tensor] = source.in_proj_weight.detach().chunk(3)
    else:
        weights = [w.detach() for w in (source.q_proj_weight, source.k_proj_weight, source.v_proj_weight)]
    packed = source.in_proj_bias
    biases: Sequence[Tensor | None] = [None] * 3 if packed is None else packed.detach().chunk(3)
    trainable = any(
        p.requires_grad for k, p in source._parameters.items() if k.endswith("proj_weight") and p is not None
    )
    parts = {}
    for name, weight, bias in zip(PROJECTIONS, weights, biases, strict=False):
        own_bias = None if bias is None else nn.Parameter(bias.clone(), packed is not None and packed.requires_grad)
        linear = linear_from_tensors(weight.clone() if copy else weight, own_bias, requires_grad=trainable)
        parts[name] = linear.train(source.training)
    # out_proj is a module of its own already: its parameters stay the same where it is not replaced.
    out_proj = linear_from_tensors(source.out_proj.weight, source.out_proj.bias)
    parts["out_proj"] = out_proj.train(source.training)
    return parts


def linear_from_tensors(weight: Tensor, bias: Tensor | None, *, requires_grad: bool = True) -> nn.Linear:
    """An nn.Linear around existing tensors.

    Args:
        weight: The weight, of shape (out_features, in_features). A Parameter is used as it is.
        bias: The bias, of shape (out_features,), or None. A Parameter is used as it is.
        requires_grad: Whether new Parameters are trainable.

    Returns:
        The layer; nothing is copied.
    """
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta", dtype=weight.dtype)
    linear.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=requires_grad)
    if bias is not None:
        linear.bias = bias if isinstance(bias, nn.Parameter) else nn.Parameter(bias, requires_grad=requires_grad)
    return linear


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.is_floating_point():
        return mask.to(dtype)
    if mask.dtype != torch.bool:
        raise ShapeError(f"an attention mask is boolean or floating, got {mask.dtype}")
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
