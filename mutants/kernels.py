"""Mistakes in the fused kernels and their launches; without a GPU they run under triton's interpreter."""

from __future__ import annotations

from mutants.mutation import Mutation

KERNELS = ("tests/ops/fused/test_kernels.py",)
OPERATORS = ("tests/ops/fused/test_autograd.py", "tests/ops/fused/test_operators.py")
DECODING = ("tests/ops/fused/test_pair_launches.py",)
INT8 = ("tests/ops/fused/test_int8.py",)

MUTATIONS = (
    Mutation(
        "decoding applies the first scale twice",
        "ops/fused/kernels.py",
        "b_acc *= tl.load(p_s2).to(tl.float32)",
        "b_acc *= tl.load(p_s1).to(tl.float32)",
        DECODING,
    ),
    Mutation(
        "decoding reads one column past x",
        "ops/fused/kernels.py",
        "(o_column < d_in))",
        "(o_column <= d_in))",
        DECODING,
    ),
    Mutation(
        "decoding ignores that a slice is shared",
        "ops/fused/kernels.py",
        "o_row1 = o_block1 * SLICE_STRIDE1 * J1 + o_j1",
        "o_row1 = o_block1 * J1 + o_j1",
        DECODING,
    ),
    Mutation(
        "the scales of the second int8 factor are those of its first slice",
        "ops/fused/kernels.py",
        "tl.load(p_s2 + i_slice2 * J2 + o_j2, o_j2 < J2, 0.0)",
        "tl.load(p_s2 + o_j2, o_j2 < J2, 0.0)",
        INT8,
    ),
    Mutation(
        "the scales of the first int8 factor ignore the slice",
        "ops/fused/kernels.py",
        "tl.load(p_s1 + o_row1, o_k2 < K2, 0.0)",
        "tl.load(p_s1 + o_j1, o_k2 < K2, 0.0)",
        INT8,
    ),
    Mutation(
        "int8 sums are rounded before they are scaled",
        "ops/fused/kernels.py",
        "b_z *= tl.load(p_s1 + o_row1, o_k2 < K2, 0.0)[None, :]",
        "b_z = b_z.to(p_x.dtype.element_ty).to(tl.float32) * tl.load(p_s1 + o_row1, o_k2 < K2, 0.0)[None, :]",
        INT8,
    ),
    Mutation(
        "the intermediate is rounded to int8",
        "ops/fused/kernels.py",
        "b_w2 = b_w2.to(p_x.dtype.element_ty)",
        "b_w2 = b_w2",
        INT8,
    ),
    Mutation(
        "int8 layers drop the gradient of x",
        "ops/fused/int8.py",
        "(x.requires_grad or (bias is not None and bias.requires_grad))",
        "(bias is not None and bias.requires_grad)",
        INT8,
    ),
    Mutation(
        "int8 scales of any shape are read",
        "ops/fused/checks.py",
        "if s.shape != f.shape[:2]:",
        "if s.dim() != 2:",
        INT8,
    ),
    Mutation(
        "the kernel for few tokens always has two stages",
        "ops/fused/pair_launches.py",
        '"num_stages": 2 if shared_bytes <= device_limits(spec.device).program_shared_bytes else 1,',
        '"num_stages": 2,',
        INT8,
    ),
    Mutation(
        "the pair drops the bias",
        "ops/fused/kernels.py",
        "SCALED, BIASED, CONSUMER, RING, PRECISION,",
        "SCALED, False, CONSUMER, RING, PRECISION,",
        KERNELS,
    ),
    Mutation(
        "the source's gradient not scaled",
        "ops/fused/kernels.py",
        "b_dsrc *= scale",
        "b_dsrc *= 1.0",
        KERNELS,
    ),
    Mutation(
        "the weight's gradient not scaled",
        "ops/fused/kernels.py",
        "        if SCALED:\n            b_acc *= tl.load(p_s).to(tl.float32)\n        tl.store(p_dw",
        "        tl.store(p_dw",
        KERNELS,
    ),
    Mutation(
        "one block stands for all that share a slice",
        "ops/fused/kernels.py",
        "tl.full((), i_part % n_shared, tl.int64) * slice_size",
        "tl.full((), 0, tl.int64) * slice_size",
        KERNELS,
    ),
    Mutation(
        "the first part of long inputs skipped",
        "ops/fused/kernels.py",
        "for k_first in range(0, K, BK):",
        "for k_first in range(BK, K, BK):",
        KERNELS,
    ),
    Mutation(
        "a transposed slice read with the wrong stride",
        "ops/fused/kernels.py",
        "p_w + o_k[None, :] * J + o_j[:, None]",
        "p_w + o_k[None, :] * K + o_j[:, None]",
        OPERATORS,
    ),
    Mutation(
        "lanes overlap",
        "ops/fused/kernels.py",
        "i_tile = i * n_lanes + i_lane",
        "i_tile = i + i_lane",
        KERNELS,
    ),
    Mutation(
        "the bias's gradient from the first lane alone",
        "ops/fused/kernels.py",
        "for i_lane in range(n_lanes):",
        "for i_lane in range(1):",
        KERNELS,
    ),
    Mutation(
        "the bias added by the first factor",
        "ops/fused/passes.py",
        "bias if i == last else None",
        "bias if i == 0 else None",
        KERNELS,
    ),
    Mutation(
        "gradients of factors in order of computation",
        "ops/fused/passes.py",
        "return _chain_gradients(dx, gradients[::-1])",
        "return _chain_gradients(dx, gradients)",
        KERNELS,
    ),
    Mutation(
        "the scale's gradient averaged",
        "ops/fused/factor_launches.py",
        "(unscaled * weight).sum()",
        "(unscaled * weight).mean()",
        KERNELS,
    ),
    Mutation(
        "recompute ignored by the kernels",
        "ops/fused/autograd.py",
        "return learns and not recompute",
        "return learns",
        OPERATORS,
    ),
    Mutation(
        "the bias's gradient averaged where weights are frozen",
        "ops/fused/autograd.py",
        "dy.sum(0) if needs_bias",
        "dy.mean(0) if needs_bias",
        OPERATORS,
    ),
    Mutation(
        "second derivatives in the order of the blocks",
        "ops/fused/composite.py",
        "return source, torch.argsort(target), offsets[:, 2]",
        "return source, target, offsets[:, 2]",
        ("tests/ops/fused/test_composite.py",),
    ),
    Mutation(
        "parameters of another dtype accepted",
        "ops/fused/checks.py",
        "any(t.dtype != x.dtype or t.device != x.device for t in operands)",
        "any(t.device != x.device for t in operands)",
        ("tests/ops/fused/test_checks.py", "tests/ops/fused/test_limits.py"),
    ),
    Mutation(
        "intermediates start where they end",
        "ops/strides.py",
        "tuple(sum(self.intermediate_rows[:i]) for i in",
        "tuple(sum(self.intermediate_rows[: i + 1]) for i in",
        KERNELS,
    ),
    Mutation(
        "target offsets in units of the source's alignment",
        "ops/strides.py",
        "gcd(16, *(axis.target_stride for axis in self.block_axes)),",
        "gcd(16, *(axis.source_stride for axis in self.block_axes)),",
        KERNELS,
    ),
)
