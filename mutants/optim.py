"""Mistakes in learning rates and weight decay."""

from __future__ import annotations

from mutants.mutation import Mutation

FACTS = ("tests/optim/test_facts.py",)
RATES = ("tests/optim/test_rates.py", "tests/optim/test_groups.py", "tests/optim/test_rates_embedding.py")
TRANSFER = ("tests/optim/test_width_transfer.py", "tests/optim/test_facts.py")
MATRICES = ("tests/optim/test_matrices.py",)
MUON = ("tests/optim/test_muon.py",)
ORTHOGONALIZATION = ("tests/optim/test_orthogonalization.py",)
BOUND = ("tests/optim/test_layer_bound.py",)

MUTATIONS = (
    Mutation(
        "the bias of attention counted three times",
        "optim/facts.py",
        "d_out //= 3",
        "d_out //= 1",
        (*FACTS, *TRANSFER, *MATRICES),
    ),
    Mutation(
        "embeddings not decayed",
        "optim/facts.py",
        'kind="embedding: one row per token", layer=name, d_out=d_out, decays=True',
        'kind="embedding: one row per token", layer=name, d_out=d_out, decays=False',
        (*FACTS, *RATES, "tests/optim/test_weight_decay.py"),
    ),
    Mutation(
        "gains decayed",
        "optim/facts.py",
        'layer=f"{name}.gains", d_out=1, decays=False',
        'layer=f"{name}.gains", d_out=1, decays=True',
        (*FACTS, *RATES, "tests/optim/test_weight_decay.py"),
    ),
    Mutation(
        "parts of a fused layer taken for equal",
        "optim/facts.py",
        "n / module.out_features for p, n in",
        "1 / len(module.sizes) for p, n in",
        TRANSFER,
    ),
    Mutation(
        "the size of an embedding's rows ignored",
        "optim/facts.py",
        "row_std=module.std or 1.0,",
        "row_std=1.0,",
        RATES,
    ),
    Mutation(
        "vectors trained by Muon",
        "optim/rates.py",
        'rule = options.rule if facts.layout is not None or options.rule != "muon" else "adam"',
        "rule = options.rule",
        RATES,
    ),
    Mutation(
        "structure_aware ignored",
        "optim/rates.py",
        "if options.structure_aware:",
        "if options.structure_aware or True:",
        RATES,
    ),
    Mutation(
        "frozen parameters get a rate",
        "optim/rates.py",
        "if parameter.requires_grad:",
        "if parameter is not None:",
        RATES,
    ),
    Mutation(
        "scale replaces the multiplier",
        "optim/rates.py",
        "_rounded(rate.multiplier * scale)",
        "_rounded(scale)",
        RATES,
    ),
    Mutation(
        "a tied parameter scaled by its first name alone",
        "optim/rates.py",
        "next((scales.values[n] for n in every_own_name if n in scales.values), None)",
        "scales.values.get(name)",
        RATES,
    ),
    Mutation(
        "multipliers rounded to three digits",
        "optim/rates.py",
        'float(f"{multiplier:.14g}")',
        'float(f"{multiplier:.3g}")',
        RATES,
    ),
    Mutation(
        "width transfer inverted",
        "optim/width_transfer.py",
        "rate(rule, d_in, d_out) / rate(rule, base_in, base_out)",
        "rate(rule, base_in, base_out) / rate(rule, d_in, d_out)",
        TRANSFER,
    ),
    Mutation(
        "a part compared with the whole fused layer of the base",
        "optim/width_transfer.py",
        "return base_in, base_out * facts.share",
        "return base_in, base_out",
        TRANSFER,
    ),
    Mutation(
        "a wider table taken for a matrix",
        "optim/width_transfer.py",
        "facts.table_shape[:-1] != in_base.table_shape[:-1]",
        "facts.table_shape != in_base.table_shape",
        MATRICES,
    ),
    Mutation(
        "the fan-in of a convolution without its kernel",
        "optim/matrices.py",
        "d_in, d_out = p[0].numel(), p.shape[0]",
        "d_in, d_out = p.shape[1], p.shape[0]",
        FACTS,
    ),
    Mutation(
        "groups of a transposed convolution ignored",
        "optim/matrices.py",
        "d_in, d_out = p[:, 0].numel() // module.groups,",
        "d_in, d_out = p[:, 0].numel(),",
        FACTS,
    ),
    Mutation(
        "the gates of a recurrent layer counted as one matrix",
        "optim/matrices.py",
        'p.shape[0] if key.startswith("weight_hr") else module.hidden_size',
        "p.shape[0]",
        MATRICES,
    ),
    Mutation(
        "groups merged across weight decays",
        "optim/groups.py",
        "groups.setdefault((p.multiplier, p.weight_decay, p.rule, layout)",
        "groups.setdefault((p.multiplier, 0.0, p.rule, layout)",
        RATES,
    ),
    Mutation(
        "a warning while all rates are still zero",
        "optim/flattened_rates.py",
        "if len(set(rates)) == 1 and rates[0] != 0:",
        "if len(set(rates)) == 1:",
        ("tests/optim/test_flattened_rates.py",),
    ),
    Mutation(
        "keywords of one module applied to all",
        "optim/weight_decay.py",
        "(is_inside and any(keyword in inside for keyword in keywords))",
        "any(keyword in inside for keyword in keywords)",
        ("tests/optim/test_weight_decay.py",),
    ),
    Mutation(
        "the gates of a recurrent layer orthogonalized as one matrix",
        "optim/matrices.py",
        'gates: Layout = ("rows", p.shape[0] // outputs)',
        'gates: Layout = ("rows", 1)',
        MUON,
    ),
    Mutation(
        "a transposed convolution orthogonalized by its inputs",
        "optim/matrices.py",
        '("columns" if module.transposed else "rows", 1) if module.groups == 1 else None',
        '("rows", 1) if module.groups == 1 else None',
        MUON,
    ),
    Mutation(
        "a bilinear weight taken for a stack",
        "optim/matrices.py",
        'd_out=p.shape[0], layout=("rows", 1))',
        "d_out=p.shape[0])",
        MUON,
    ),
    Mutation(
        "Muon decays by the bare weight decay",
        "optim/muon.py",
        '1 - group["lr"] * group["weight_decay"]',
        '1 - group["weight_decay"]',
        MUON,
    ),
    Mutation(
        "Muon without Nesterov's look ahead",
        "optim/muon.py",
        'torch._foreach_lerp(gradients, averages, group["momentum"]) if group["nesterov"] else averages',
        "averages",
        MUON,
    ),
    Mutation(
        "tall matrices left transposed",
        "optim/muon.py",
        "updates[i].unstack(result.mT if is_tall else result)",
        "updates[i].unstack(result)",
        MUON,
    ),
    Mutation(
        "shards orthogonalized as if they were whole",
        "optim/updates.py",
        "return shards.is_sharded(p) and not (p.dim() == 3 and self.layout == STACK and shards.is_split_by_slices(p))",
        "return False",
        ("tests/optim/test_muon_processes.py",),
    ),
    Mutation(
        "each process bounds the norms of its own slices",
        "optim/layer_bound.py",
        "largest = shards.maximum(largest, factor.parameter)",
        "pass",
        ("tests/optim/test_muon_processes.py",),
    ),
    Mutation(
        "a cushion too thin for rounding in bfloat16",
        "optim/orthogonalization.py",
        "CUSHION = 1.05",
        "CUSHION = 1.01",
        ORTHOGONALIZATION,
    ),
    Mutation(
        "small gradients underflow",
        "optim/orthogonalization.py",
        "    x = x / x.abs().amax((-2, -1), keepdim=True).clamp(min=tiny)  # the squares below would underflow",
        "    pass",
        ORTHOGONALIZATION,
    ),
    Mutation(
        "the bound forgets the terms of higher order",
        "optim/layer_bound.py",
        "change = change * (norm + largest) + product * largest",
        "change = change * norm + product * largest",
        BOUND,
    ),
    Mutation(
        "the bound takes updates for exactly orthogonal",
        "optim/layer_bound.py",
        "largest = rate * self.update_norm",
        "largest = rate",
        BOUND,
    ),
    Mutation(
        "the bound measures one slice alone",
        "optim/layer_bound.py",
        "largest = torch.cat([bounds, bounds.new_zeros(1)]).amax()",
        "largest = bounds[0]",
        BOUND,
    ),
)
