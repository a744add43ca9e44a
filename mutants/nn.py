"""Mistakes in the structured modules."""

from __future__ import annotations

from mutants.mutation import Mutation

TOGETHER = ("tests/core/test_stacking.py", "tests/nn/test_side_by_side.py")
LINEAR = ("tests/nn/test_linear.py", "tests/nn/test_structured.py")
EMBEDDING = ("tests/nn/test_embedding.py",)
ATTENTION = ("tests/nn/test_attention.py",)
POINTWISE = ("tests/nn/test_pointwise_conv.py",)
PARALLEL = ("tests/nn/test_parallel.py",)

MUTATIONS = (
    Mutation(
        "layers computed as one without gradients",
        "nn/side_by_side.py",
        "return x.is_cuda and torch.is_grad_enabled()",
        "return x.is_cuda",
        TOGETHER,
    ),
    Mutation(
        "an axis of x may grow with the outputs",
        "core/stacking.py",
        " or axis in first.x or regrouped",
        " or regrouped",
        TOGETHER,
    ),
    Mutation(
        "a regrouped axis may grow",
        "core/stacking.py",
        " or axis in first.x or regrouped",
        " or axis in first.x",
        TOGETHER,
    ),
    Mutation(
        "the first factor starts at zero",
        "nn/structured.py",
        "last = {part.factors[-1].name for part in self.chain.parts}",
        "last = {part.factors[0].name for part in self.chain.parts}",
        (*LINEAR, *EMBEDDING),
    ),
    Mutation(
        "only the last part of a sum starts at zero",
        "nn/structured.py",
        "last = {part.factors[-1].name for part in self.chain.parts}",
        "last = {self.chain.factors[-1].name}",
        ("tests/projection/test_sums.py",),
    ),
    Mutation(
        "frozen factors are trained",
        "nn/structured.py",
        "nn.Parameter(torch.empty(f.shape, **placement), not f.frozen)",
        "nn.Parameter(torch.empty(f.shape, **placement))",
        ("tests/core/structures/test_sum.py", "tests/projection/test_sums.py"),
    ),
    Mutation(
        "the gain repeats the normalization",
        "nn/structured.py",
        "self.gains[f.name].copy_(1 / self._normalizer(f.name))",
        "self.gains[f.name].copy_(self._normalizer(f.name))",
        (*LINEAR, *EMBEDDING),
    ),
    Mutation(
        "small factors enlarged instead of large ones bounded",
        "nn/structured.py",
        ".clamp(min=1.0))",
        ".clamp(max=1.0))",
        LINEAR,
    ),
    Mutation(
        "gains not tied",
        "nn/structured.py",
        "in ((self.factors, other.factors), (self.gains, other.gains)):",
        "in ((self.factors, other.factors),):",
        (*LINEAR, *EMBEDDING),
    ),
    Mutation(
        "joined factors of layers in another order",
        "nn/side_by_side.py",
        "for joint, *parts in zip(stack.joints, *by_layer, strict=True)]",
        "for joint, *parts in zip(stack.joints, *by_layer[::-1], strict=True)]",
        TOGETHER,
    ),
    Mutation(
        "layers with hooks computed as one",
        "nn/side_by_side.py",
        "if any(observers) or",
        "if",
        TOGETHER,
    ),
    Mutation(
        "entries before the axis ignored where factors are joined",
        "nn/side_by_side.py",
        "if joint.before == 1:",
        "if True:",
        TOGETHER,
    ),
    Mutation(
        "chains with padded outputs stacked",
        "core/stacking.py",
        "or first.padding[1]:",
        "or False:",
        TOGETHER,
    ),
    Mutation(
        "recompute ignored by the layer",
        "nn/linear.py",
        "recompute=self.recompute,",
        "recompute=False,",
        LINEAR,
    ),
    Mutation(
        "a zero weight projected, so that nothing learns",
        "nn/linear.py",
        "{} if zero else project(layer.structure, linear.weight).factors",
        "project(layer.structure, linear.weight).factors",
        LINEAR,
    ),
    Mutation(
        "from_dense forgets the bias",
        "nn/linear.py",
        "project(layer.structure, linear.weight).factors, linear.bias)",
        "project(layer.structure, linear.weight).factors)",
        LINEAR,
    ),
    Mutation(
        "scores of attention not scaled",
        "nn/attention.py",
        "scores = (q * self.head_dim**-0.5) @ k.mT",
        "scores = q @ k.mT",
        ATTENTION,
    ),
    Mutation(
        "the padding mask shifted by the added keys",
        "nn/attention.py",
        "keys = F.pad(_additive(padding, dtype), (0, added))",
        "keys = F.pad(_additive(padding, dtype), (added, 0))",
        ATTENTION,
    ),
    Mutation(
        "dropout of attention in eval mode",
        "nn/attention.py",
        "drop = self.dropout if self.training else 0.0",
        "drop = self.dropout",
        ATTENTION,
    ),
    Mutation(
        "attention weights always averaged",
        "nn/attention.py",
        "weights.mean(1) if average_attn_weights else weights",
        "weights.mean(1)",
        ATTENTION,
    ),
    Mutation(
        "the padding row gets a gradient",
        "nn/embedding.py",
        "return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)",
        "return rows",
        EMBEDDING,
    ),
    Mutation(
        "an embedding's deviation around its mean",
        "nn/embedding.py",
        "std=rms(embedding.weight.detach()).item(),",
        "std=embedding.weight.detach().std().item(),",
        EMBEDDING,
    ),
    Mutation(
        "a stride in one dimension ignored",
        "nn/pointwise_conv.py",
        "if all(step == 1 for step in stride):",
        "if any(step == 1 for step in stride):",
        POINTWISE,
    ),
    Mutation(
        "a convolution's memory format lost",
        "nn/pointwise_conv.py",
        "return y if channels_last else y.contiguous()",
        "return y.contiguous()",
        POINTWISE,
    ),
    Mutation(
        "writes through out= unnoticed",
        "nn/computed.py",
        "if tensor._version != version:",
        "if tensor._version < version:",
        ("tests/nn/test_computed.py",),
    ),
    Mutation(
        "a split layer counts the outputs of its first part",
        "nn/split_linear.py",
        "return sum(self.sizes)",
        "return self.sizes[0]",
        ("tests/nn/test_split_linear.py",),
    ),
    Mutation(
        "gradients of shared factors are not added up",
        "nn/parallel.py",
        "return again.to_local(grad_placements=[Partial()])",
        "return again.to_local()",
        PARALLEL,
    ),
    Mutation(
        "the gradient of a shared input is not added up",
        "nn/parallel.py",
        "x.to_local(grad_placements=[Partial()] if by_outputs else None)",
        "x.to_local()",
        PARALLEL,
    ),
    Mutation(
        "every process adds the bias",
        "nn/parallel.py",
        "(1.0 if self.mesh.get_local_rank() == 0 else 0.0)",
        "1.0",
        PARALLEL,
    ),
    Mutation(
        "a divided factor is normalized by its own part",
        "nn/parallel.py",
        "        if _is_divided(stored):\n            summed",
        "        if False:\n            summed",
        PARALLEL,
    ),
    Mutation(
        "strided parts are stored as contiguous ones",
        "nn/parallel.py",
        "if division is None or division.before > 1 else",
        "if division is None else",
        PARALLEL,
    ),
    Mutation(
        "every process takes the first part of a whole factor",
        "ops/dividing.py",
        "rank * count, count)",
        "0, count)",
        PARALLEL,
    ),
)
