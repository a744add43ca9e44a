"""Mistakes in calibrating, choosing and healing."""

from __future__ import annotations

from mutants.mutation import Mutation

ALLOCATION = ("tests/compression/test_allocation.py", "tests/compression/test_judgement.py")
MOMENTS = ("tests/compression/test_input_moments.py",)
HEALING = ("tests/compression/test_distillation.py",)
PIPELINE = ("tests/compression/test_pipeline.py",)

MUTATIONS = (
    Mutation(
        "the upper hull instead of the lower",
        "compression/allocation.py",
        "_slope(hull[-2], option) <= _slope(hull[-2], hull[-1])",
        "_slope(hull[-2], option) >= _slope(hull[-2], hull[-1])",
        ALLOCATION,
    ),
    Mutation(
        "the steps that save least taken first",
        "compression/allocation.py",
        "sorted(steps, key=lambda s: (s[0], s[1]))",
        "sorted(steps, key=lambda s: (-s[0], s[1]))",
        ALLOCATION,
    ),
    Mutation(
        "the rest of the budget spent twice",
        "compression/allocation.py",
        "            remaining -= best.cost_after - chosen[name].cost_after\n",
        "",
        ALLOCATION,
    ),
    Mutation(
        "an unmeasured effect counts as 1",
        "compression/allocation.py",
        "self.effects.get(name, median)",
        "self.effects.get(name, 1.0)",
        ALLOCATION,
    ),
    Mutation(
        "the loss is the error, not its square",
        "compression/layer_options.py",
        "dense, after, projection.output_error**2, member)",
        "dense, after, projection.output_error, member)",
        ALLOCATION,
    ),
    Mutation(
        "families thinned to their cheapest member",
        "compression/layer_options.py",
        "dict.fromkeys(fits[-1:])",
        "dict.fromkeys(fits[:1])",
        ("tests/compression/test_layer_options.py",),
    ),
    Mutation(
        "the cost is always MACs",
        "compression/layer_options.py",
        "getattr(structure.chain(d_in, d_out), cost)",
        "structure.chain(d_in, d_out).macs",
        ("tests/compression/test_layer_options.py",),
    ),
    Mutation(
        "structures with sharing compared by default",
        "compression/layer_options.py",
        "if not members or members[0].chain(*self.sizes).shares_parameters:",
        "if not members:",
        ("tests/compression/test_layer_options.py",),
    ),
    Mutation(
        "options that cost as much as dense",
        "compression/layer_options.py",
        "if after >= dense:",
        "if after > 2 * dense:",
        ("tests/compression/test_layer_options.py",),
    ),
    Mutation(
        "an option kept unless another is better in one respect",
        "compression/projection_store.py",
        "any(other.cost <= cost and other.loss <= loss for other in front)",
        "any(other.cost <= cost or other.loss <= loss for other in front)",
        ("tests/compression/test_projection_store.py",),
    ),
    Mutation(
        "the store never frees its bytes",
        "compression/projection_store.py",
        "        self.nbytes -= sum(option.draft.nbytes for option in front)\n",
        "",
        ("tests/compression/test_projection_store.py",),
    ),
    Mutation(
        "attention masks ignored in moments",
        "compression/input_moments.py",
        "sums.weights = (weigh or mask_of)(batch)",
        "sums.weights = None if weigh is None else weigh(batch)",
        MOMENTS,
    ),
    Mutation(
        "weights of tokens squared",
        "compression/input_moments.py",
        "rows * weights.sqrt()",
        "rows * weights",
        MOMENTS,
    ),
    Mutation(
        "inputs changed in place counted as the same",
        "compression/input_moments.py",
        "key = id(x), x._version, stride",
        "key = id(x), 0, stride",
        MOMENTS,
    ),
    Mutation(
        "every module in training mode afterwards",
        "compression/running.py",
        "            module.training = training\n",
        "            module.training = True\n",
        (*MOMENTS, *HEALING),
    ),
    Mutation(
        "the divergence in the other direction",
        "compression/distillation.py",
        "F.kl_div(own, reference_tensor,",
        "F.kl_div(reference_tensor, own,",
        HEALING,
    ),
    Mutation(
        "padding compared",
        "compression/distillation.py",
        "return own[mask.bool()], other[mask.bool()]",
        "return own, other",
        HEALING,
    ),
    Mutation(
        "the first step of healing has a rate of zero",
        "compression/distillation.py",
        "min((step + 1) / warm_up,",
        "min(step / warm_up,",
        HEALING,
    ),
    Mutation(
        "healing with dropout",
        "compression/distillation.py",
        "model.eval()  # the teacher's",
        "model.train()  # the teacher's",
        HEALING,
    ),
    Mutation(
        "half-precision weights stay in float32",
        "compression/distillation.py",
        "        _restore_dtypes(model, dtypes)\n",
        "        pass\n",
        HEALING,
    ),
    Mutation(
        "healing resumed with other data",
        "compression/distillation.py",
        'f"{lr} {weight_decay} {steps} {label}"',
        'f"{lr} {weight_decay} {steps}"',
        HEALING,
    ),
    Mutation(
        "held-out examples among those to learn from",
        "compression/calibration_data.py",
        "return shuffled[:count], shuffled[count:]",
        "return shuffled[:count], shuffled",
        ("tests/compression/test_calibration_data.py",),
    ),
    Mutation(
        "the same batch in every step of healing",
        "compression/calibration_data.py",
        "random.Random(step).sample(",
        "random.Random(0).sample(",
        ("tests/compression/test_calibration_data.py",),
    ),
    Mutation(
        "a layer judged with fewer tokens than inputs",
        "compression/judgement.py",
        "return SHORT_OF_TOKENS if tokens < inputs else None",
        "return SHORT_OF_TOKENS if tokens < inputs // 2 else None",
        ("tests/compression/test_judgement.py",),
    ),
    Mutation(
        "the effect of a layer not relative to its loss",
        "compression/output_effect.py",
        "return mean / max(projection.output_error**2, 1e-12)",
        "return mean",
        ALLOCATION,
    ),
    Mutation(
        "harmful healing kept",
        "compression/pipeline.py",
        "    if is_harmful(before, after):\n        model.load_state_dict(start)\n",
        "",
        PIPELINE,
    ),
)
