"""Mistakes in raising ranks in mid-training, and in finding the size that matches a cost."""

from __future__ import annotations

from mutants.mutation import Mutation

GROWTH = ("tests/core/test_growth.py", "tests/surgery/test_growing.py")
OPTIMIZER = ("tests/optim/test_growing.py", "tests/surgery/test_growing.py")
GROWING = ("tests/surgery/test_growing.py",)
MATCHING = ("tests/surgery/test_matching.py",)

MUTATIONS = (
    Mutation(
        "a rank may shrink",
        "core/growth.py",
        "if after < before]:",
        "if after < before and not before]:",
        GROWTH,
    ),
    Mutation(
        "axes that are no bonds may grow",
        "core/growth.py",
        "if others := sorted(changed.keys() - new.sufficient_ranks.keys()):",
        "if others := sorted(changed.keys() - old.sizes.keys()):",
        GROWTH,
    ),
    Mutation(
        "only the first part of a sum grows",
        "core/growth.py",
        "factors={name: factor for part in parts for name, factor in part.factors.items()},",
        "factors={name: factor for part in parts[:1] for name, factor in part.factors.items()},",
        GROWTH,
    ),
    Mutation(
        "new slices that are read are not zero",
        "ops/enlarging.py",
        "large.masked_fill_(zeros, 0.0)",
        "large.masked_fill_(zeros, 1e-3)",
        GROWING,
    ),
    Mutation(
        "entries between two new slices are zero as well",
        "ops/enlarging.py",
        "zeros = _new_slices(growth, growth.contracted, factor) & ~_new_slices(growth, growth.created, factor)",
        "zeros = _new_slices(growth, growth.contracted, factor)",
        GROWING,
    ),
    Mutation(
        "drawn entries ignore the standard deviation",
        "ops/enlarging.py",
        ".normal_(std=std)",
        ".normal_()",
        GROWING,
    ),
    Mutation(
        "second moments of new entries are zero",
        "optim/growing.py",
        "return with_means(growing.growth, value) if slot in SIZES else with_zeros(growing.growth, value)",
        "return with_zeros(growing.growth, value)",
        OPTIMIZER,
    ),
    Mutation(
        "averages of gradients of new entries are means",
        "optim/growing.py",
        "return with_means(growing.growth, value) if slot in SIZES else with_zeros(growing.growth, value)",
        "return with_means(growing.growth, value)",
        OPTIMIZER,
    ),
    Mutation(
        "rates of grown factors stay",
        "optim/growing.py",
        "return kappa(self.facts, self.chain, rule)[0] / kappa(self.facts, self.facts.chain, rule)[0]",
        "return 1.0",
        OPTIMIZER,
    ),
    Mutation(
        "a scheduler keeps its old rates",
        "optim/growing.py",
        "setattr(scheduler, name, [values[i] * ratio for i, ratio in sources])",
        "setattr(scheduler, name, [values[i] for i, ratio in sources])",
        OPTIMIZER,
    ),
    Mutation(
        "only the outermost scheduler changes",
        "optim/growing.py",
        'return [scheduler, *(p for part in getattr(scheduler, "_schedulers", ()) for p in _parts(part))]',
        "return [scheduler]",
        OPTIMIZER,
    ),
    Mutation(
        "the state of an unknown optimizer is enlarged anyway",
        "optim/growing.py",
        "(value.shape == growing.old.shape and slot in SUMS | SIZES)",
        "(value.shape == growing.old.shape)",
        OPTIMIZER,
    ),
    Mutation(
        "groups are not in the order of the model",
        "optim/growing.py",
        "for m in sorted(members, key=lambda m: positions.get(id(m.parameter), len(positions))):",
        "for m in members:",
        OPTIMIZER,
    ),
    Mutation(
        "an optimizer without the factors is taken",
        "optim/growing.py",
        "if g.old.requires_grad and id(g.old) not in groups:",
        "if g.old.requires_grad and not groups:",
        OPTIMIZER,
    ),
    Mutation(
        "pending gradients are lost without a word",
        "surgery/growing.py",
        "if g.old.grad is not None and bool(g.old.grad.any()):",
        "if g.old.grad is not None and g.old.grad.isnan().any():",
        GROWING,
    ),
    Mutation(
        "a layer grows alone, away from those that share its factors",
        "surgery/growing.py",
        "if name not in layers or leader not in layers or layers[name].structure != layers[leader].structure:",
        "if name not in layers and leader not in layers:",
        GROWING,
    ),
    Mutation(
        "the plan on the config stays that of before",
        "surgery/growing.py",
        "    record_plan(model)\n",
        "",
        GROWING,
    ),
    Mutation(
        "a dry run of grow_ changes the model",
        "surgery/growing.py",
        "    if dry_run:\n        return report\n",
        "    if dry_run:\n        growing.apply_()\n        return report\n",
        GROWING,
    ),
    Mutation(
        "the first size that was tried is taken",
        "surgery/matching.py",
        "best = min(tried, key=lambda c: abs(c.cost - goal))",
        "best = tried[0]",
        MATCHING,
    ),
    Mutation(
        "neighbors of the crossing are not tried",
        "surgery/matching.py",
        'tried = _search(sizes, candidate, goal, patience=0 if unit == "ms" else PATIENCE)',
        "tried = _search(sizes, candidate, goal, patience=0)",
        MATCHING,
    ),
    Mutation(
        "a target out of reach gives the nearest size",
        "surgery/matching.py",
        "if min(costs) <= matched.target <= max(costs):",
        "if costs:",
        MATCHING,
    ),
    Mutation(
        "times without the backward pass",
        "surgery/matching.py",
        "sample_ms(step if self.training else lambda: model(*inputs), self.device)",
        "sample_ms(lambda: model(*inputs), self.device)",
        MATCHING,
    ),
    Mutation(
        "the model to match is moved to another device",
        "surgery/matching.py",
        'model = copy.deepcopy(target) if unit == "ms" else target',
        "model = target",
        MATCHING,
    ),
)
