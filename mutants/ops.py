"""Mistakes in applying chains with torch's own operations, in strides and in looking up rows."""

from __future__ import annotations

from mutants.mutation import Mutation

BMM = ("tests/ops/test_bmm.py", "tests/ops/test_ops.py", "tests/core/test_contract.py")
FRAMING = ("tests/ops/test_framing.py", "tests/core/test_contract.py", "tests/core/structures/test_formulas.py")
NORMS = ("tests/ops/test_norms.py",)
STRIDES = ("tests/ops/test_strides.py", "tests/ops/test_layouts.py")
LOOKUP = ("tests/ops/test_lookup.py", "tests/ops/test_lookup_rows.py")
FLOPS = ("tests/ops/test_flops.py", "tests/ops/fused/test_operators.py")

MUTATIONS = (
    Mutation(
        "the reference flattens a regroup in another order",
        "ops/reference.py",
        "z = torch.einsum(*operands, [0, *(number[a] for a in old)])",
        "z = torch.einsum(*operands, [0, *(number[a] for a in reversed(old))])",
        FRAMING,
    ),
    Mutation(
        "intermediates padded in front",
        "ops/reference.py",
        "F.pad(x, (0, chain.padding[0]))",
        "F.pad(x, (chain.padding[0], 0))",
        ("tests/ops/test_reference.py",),
    ),
    Mutation(
        "scales in reverse order",
        "ops/framing.py",
        "zip(factors, scales, strict=True)]",
        "zip(factors, reversed(scales), strict=True)]",
        FRAMING,
    ),
    Mutation(
        "y cut at the front",
        "ops/framing.py",
        "y = y[:, : chain.d_out]",
        "y = y[:, -chain.d_out :]",
        FRAMING,
    ),
    Mutation(
        "window shifted for even kernels",
        "ops/framing.py",
        "before = size // 2",
        "before = (size - 1) // 2",
        FRAMING,
    ),
    Mutation(
        "autocast converts float64",
        "ops/framing.py",
        " or x.dtype == torch.float64:",
        ":",
        FRAMING,
    ),
    Mutation(
        "mean squares in half precision",
        "ops/norms.py",
        "return t.to(torch.promote_types(t.dtype, torch.float32)).square().mean()",
        "return t.square().mean()",
        NORMS,
    ),
    Mutation(
        "factors unbalanced further",
        "ops/norms.py",
        "t * (common / ratio)",
        "t * (ratio / common)",
        NORMS,
    ),
    Mutation(
        "factors balanced to their arithmetic mean",
        "ops/norms.py",
        "common = ratios.log().mean().exp()",
        "common = ratios.mean()",
        NORMS,
    ),
    Mutation(
        "factors balanced although one is zero",
        "ops/norms.py",
        "if not ratios.all():",
        "if not ratios.any():",
        NORMS,
    ),
    Mutation(
        "recompute ignored by bmm",
        "ops/bmm.py",
        "saved = [t if needed and not recompute else None for",
        "saved = [t if needed else None for",
        (*BMM, "tests/nn/test_linear.py"),
    ),
    Mutation(
        "slices repeated as a whole instead of one by one",
        "ops/bmm_layout.py",
        "weight.unsqueeze(1).expand(-1, self.repeats, -1, -1)",
        "weight.unsqueeze(0).expand(self.repeats, -1, -1, -1)",
        BMM,
    ),
    Mutation(
        "gradient of a shared slice averaged",
        "ops/bmm_layout.py",
        "grad.unflatten(0, (-1, self.repeats)).sum(1)",
        "grad.unflatten(0, (-1, self.repeats)).mean(1)",
        BMM,
    ),
    Mutation(
        "gradient of y permuted forward",
        "ops/bmm.py",
        "grad.reshape(-1, *layout.y_sizes).permute(layout.inverse)",
        "grad.reshape(-1, *layout.y_sizes).permute(layout.permutation)",
        BMM,
    ),
    Mutation(
        "a regroup undone before the permutation",
        "ops/bmm_layout.py",
        "z = z.reshape(*sizes, -1).permute(permutation)",
        "z = z.permute(permutation).reshape(*sizes, -1)",
        BMM,
    ),
    Mutation(
        "the bias keeps its precision under autocast",
        "ops/__init__.py",
        "bias = None if bias is None else bias.to(dtype)",
        "bias = None if bias is None else bias.float()",
        (*BMM, "tests/nn/test_linear.py", "tests/ops/test_framing.py"),
    ),
    Mutation(
        "the dense matrix in half precision under autocast",
        "ops/__init__.py",
        "with torch.autocast(eye.device.type, enabled=False):",
        "with torch.autocast(eye.device.type, enabled=True):",
        (*BMM, "tests/nn/test_linear.py"),
    ),
    Mutation(
        "axes merged although they share a slice",
        "ops/strides.py",
        "merged[-1][1] == tuple(size * s for s in strides)",
        "merged[-1][1][:2] == tuple(size * s for s in strides)[:2]",
        STRIDES,
    ),
    Mutation(
        "outer and inner size confused",
        "ops/strides.py",
        "return cls(n * inner_size, inner_size, outer, inner)",
        "return cls(n * inner_size, n, outer, inner)",
        STRIDES,
    ),
    Mutation(
        "shared axes move to the next slice",
        "ops/strides.py",
        "slice_strides.get(a, 0)",
        "slice_strides.get(a, 1)",
        STRIDES,
    ),
    Mutation(
        "the extent of a source is one short",
        "ops/strides.py",
        "return self.block_offsets[-1][0] + last + 1",
        "return self.block_offsets[-1][0] + last",
        (*STRIDES, "tests/ops/fused/test_composite.py"),
    ),
    Mutation(
        "contiguous access needed at one end only",
        "ops/strides.py",
        "self.factors[0].source.inner_stride != 1 or self.factors[-1]",
        "self.factors[0].source.inner_stride != 1 and self.factors[-1]",
        (*STRIDES, "tests/ops/test_speeds.py"),
    ),
    Mutation(
        "tables of offsets counted by blocks",
        "ops/strides.py",
        "tables = (3 * f.blocks for f in strided.factors)",
        "tables = (f.blocks for f in strided.factors)",
        (*STRIDES, "tests/ops/fused/test_limits.py"),
    ),
    Mutation(
        "negative row numbers read from the end",
        "ops/lookup.py",
        "valid = (ids >= 0) & (ids < layout.d_out)",
        "valid = ids < layout.d_out",
        LOOKUP,
    ),
    Mutation(
        "rows of the padding can be looked up",
        "ops/lookup.py",
        "valid = (ids >= 0) & (ids < layout.d_out)",
        "valid = (ids >= 0) & (ids <= layout.d_out)",
        LOOKUP,
    ),
    Mutation(
        "rows scaled by the last scale alone",
        "ops/lookup.py",
        "entries * reduce(mul, scales).to(entries.dtype)",
        "entries * scales[-1].to(entries.dtype)",
        (*LOOKUP, "tests/nn/test_embedding.py"),
    ),
    Mutation(
        "autocast changes looked-up rows",
        "ops/lookup.py",
        "torch.autocast(ids.device.type, enabled=False)",
        "torch.autocast(ids.device.type, enabled=True)",
        (*LOOKUP, "tests/nn/test_embedding.py"),
    ),
    Mutation(
        "MACs of a lookup without shared axes",
        "ops/lookup_layout.py",
        "self.macs += size(roles.batch + roles.shared + roles.summed + roles.created)",
        "self.macs += size(roles.batch + roles.summed + roles.created)",
        LOOKUP,
    ),
    Mutation(
        "the window of a lookup turned around",
        "ops/lookup_layout.py",
        "torch.arange(self.size, device=z.device) - self.size // 2)",
        "torch.arange(self.size, device=z.device) + self.size // 2)",
        LOOKUP,
    ),
    Mutation(
        "frozen factors counted as if they learned",
        "ops/flops.py",
        "macs = strided.macs * (2 if learns else 1)",
        "macs = strided.macs * 2",
        FLOPS,
    ),
    Mutation(
        "attention counted with as many keys as queries",
        "ops/flops.py",
        "2 * prod(query[:-1]) * key[-2]",
        "2 * prod(query[:-1]) * query[-2]",
        (*FLOPS, "tests/costs/test_counting_operators.py"),
    ),
)
