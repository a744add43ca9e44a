"""Mistakes in finding layers of a model and in replacing them."""

from __future__ import annotations

from mutants.mutation import Mutation

NAMES = ("tests/inspection/test_names.py",)
CHOOSING = ("tests/surgery/test_choosing.py", "tests/surgery/test_choosing_embedding.py")
REPLACEMENT = (
    "tests/surgery/test_replacement.py",
    "tests/surgery/test_replacement_embedding.py",
    "tests/surgery/test_replace.py",
)
EXCHANGE = ("tests/surgery/test_exchange.py", "tests/surgery/test_exchange_tied.py")
DENSIFY = ("tests/surgery/test_densify.py", "tests/surgery/test_exchange_tied.py")
PLAN = ("tests/surgery/test_plan.py", "tests/surgery/test_plan_embedding.py")
REPORT = (
    "tests/surgery/test_report.py",
    "tests/surgery/test_report_embedding.py",
    "tests/surgery/test_report_unreached.py",
)

GENERATION = ("tests/integrations/test_generation.py",)

MUTATIONS = (
    Mutation(
        "the last glob that matches wins",
        "inspection/names.py",
        "values[name], deciding_glob[name] = value, glob\n                break\n",
        "values[name], deciding_glob[name] = value, glob\n",
        NAMES,
    ),
    Mutation(
        "a wildcard reaches what is replaced by name only",
        "inspection/names.py",
        "return fnmatchcase(name, glob) and (name not in by_name or last_part(name) == last_part(glob))",
        "return fnmatchcase(name, glob)",
        (*NAMES, *CHOOSING),
    ),
    Mutation(
        "every child called module taken for a wrapped one",
        "inspection/names.py",
        'wrapped = key in _WRAPPERS or (key == "module" and isinstance(module, _PARALLEL))',
        'wrapped = key in _WRAPPERS or key == "module"',
        NAMES,
    ),
    Mutation(
        "the first module leads a tie, embedding or not",
        "inspection/ties.py",
        "for name in (*preferred, *keys):",
        "for name in keys:",
        ("tests/inspection/test_ties.py", *CHOOSING),
    ),
    Mutation(
        "a head that is not in the model",
        "inspection/head.py",
        "if ids & {id(m) for m in model.modules()}:",
        "if ids:",
        ("tests/inspection/test_head.py",),
    ),
    Mutation(
        "a module replaced under one of its names",
        "inspection/sites.py",
        "                parent._modules[key] = new\n",
        "                parent._modules[key] = new\n                return\n",
        ("tests/inspection/test_sites.py", *EXCHANGE, *REPLACEMENT),
    ),
    Mutation(
        "projections that stay dense are views of the packed weight",
        "inspection/sites.py",
        "dict(unpacked(attention, copy=True))",
        "dict(unpacked(attention))",
        ("tests/inspection/test_sites.py", *EXCHANGE, *REPLACEMENT),
    ),
    Mutation(
        "float8 weights taken for whole numbers",
        "inspection/obstacles.py",
        "dtype.itemsize > 1",
        "dtype.itemsize >= 1",
        ("tests/inspection/test_obstacles.py",),
    ),
    Mutation(
        "buffers of a layer lost",
        "inspection/obstacles.py",
        'if set(module._parameters) - {"weight", "bias"} or module._buffers:',
        'if set(module._parameters) - {"weight", "bias"}:',
        ("tests/inspection/test_obstacles.py",),
    ),
    Mutation(
        "shared weights counted for each layer",
        "inspection/coverage.py",
        "if key not in counted:",
        "if key not in counted or True:",
        ("tests/inspection/test_coverage.py",),
    ),
    Mutation(
        "a Structure alone replaces the head",
        "surgery/choosing.py",
        'return reasons | dict.fromkeys(in_head, f"output head, {head.rule}")',
        "return reasons",
        CHOOSING,
    ),
    Mutation(
        "layers tied although their structures differ",
        "surgery/choosing.py",
        "e.name: (id(site.weight), e.structure)",
        "e.name: id(site.weight)",
        (*CHOOSING, *EXCHANGE),
    ),
    Mutation(
        "a frozen layer becomes trainable",
        "surgery/replacement.py",
        "if not linear.weight.requires_grad and not any(f.frozen for f in layer.chain.factors):",
        "if False:",
        REPLACEMENT,
    ),
    Mutation(
        "adapters of a frozen layer are frozen",
        "surgery/replacement.py",
        "if not linear.weight.requires_grad and not any(f.frozen for f in layer.chain.factors):",
        "if not linear.weight.requires_grad:",
        ("tests/projection/test_sums.py",),
    ),
    Mutation(
        "new layers in training mode",
        "surgery/replacement.py",
        "parts.append(layer.train(linear.training))",
        "parts.append(layer)",
        REPLACEMENT,
    ),
    Mutation(
        "the zero start of a weight ignored",
        "surgery/replacement.py",
        "else has_values and not bool(weight.any())",
        "else False",
        REPLACEMENT,
    ),
    Mutation(
        "moments ignored by replace_",
        "surgery/replacement.py",
        "project(layer.structure, weight, moments=moments, sweeps=initialization.sweeps)",
        "project(layer.structure, weight, sweeps=initialization.sweeps)",
        ("tests/surgery/test_replacement_convolution.py", "tests/compression/test_input_moments.py"),
    ),
    Mutation(
        "a drawn embedding of deviation 1",
        "surgery/replacement.py",
        "rms(weight.detach()).item() if has_values else 1.0",
        "1.0",
        REPLACEMENT,
    ),
    Mutation(
        "a dry run changes the model",
        "surgery/exchange.py",
        "if not initialization.dry_run:",
        "if True:",
        (*EXCHANGE, *REPLACEMENT),
    ),
    Mutation(
        "bias_k and bias_v of attention not counted",
        "surgery/exchange.py",
        "total += count_parameters(p for p in (attention.bias_k, attention.bias_v) if p is not None)",
        "total += 0",
        (*EXCHANGE, *REPORT),
    ),
    Mutation(
        "a config that still says tied",
        "surgery/exchange.py",
        "config.tie_word_embeddings = False",
        "config.tie_word_embeddings = True",
        (*EXCHANGE, "tests/integrations/test_transformers.py"),
    ),
    Mutation(
        "densify_ leaves tied layers untied",
        "surgery/densify.py",
        "follower.weight = leading.weight",
        "follower.weight = nn.Parameter(leading.weight.detach().clone())",
        DENSIFY,
    ),
    Mutation(
        "densify_ loses the biases of parts",
        "surgery/densify.py",
        "if parts[0].bias is not None:",
        "if parts[0].bias is None:",
        (*DENSIFY, "tests/surgery/test_replacement.py"),
    ),
    Mutation(
        "normalization lost in JSON",
        "surgery/entry.py",
        'normalize=_typed(row["normalize"], bool),',
        "normalize=False,",
        PLAN,
    ),
    Mutation(
        "a plan without the deviation of embeddings",
        "surgery/entry.py",
        "module.normalize, std=module.std, tied=tied.get(name)",
        "module.normalize, tied=tied.get(name)",
        PLAN,
    ),
    Mutation(
        "a dense lookup counted as a product",
        "surgery/report.py",
        "(0, layer.macs) if isinstance(layer, StructuredEmbedding)",
        "(dense, layer.macs) if isinstance(layer, StructuredEmbedding)",
        REPORT,
    ),
    Mutation(
        "quantized weights left out of the share",
        "surgery/report.py",
        "max(self.model_params_before, listed, 1)",
        "max(self.model_params_before, 1)",
        REPORT,
    ),
    Mutation(
        "quantize_ takes the output head too",
        "surgery/quantizing.py",
        "if id(m) not in head.module_ids",
        "if id(m)",
        ("tests/surgery/test_quantizing.py",),
    ),
    Mutation(
        "torchao passes over structured layers",
        "nn/structured.py",
        'startswith("torchao.") and chooses',
        'startswith("torchao!") and chooses',
        ("tests/surgery/test_quantizing.py",),
    ),
    Mutation(
        "a folder of int8 layers is written",
        "integrations/transformers_hooks.py",
        "if any(isinstance(m, Int8Linear) for m in model.modules()):",
        "if False:",
        ("tests/surgery/test_quantizing.py",),
    ),
    Mutation(
        "a decoder counts positions of padding",
        "integrations/generation.py",
        "positions = (mask.cumsum(1) - 1).clamp(min=0)",
        "positions = torch.arange(length, device=ids.device).expand_as(ids)",
        GENERATION,
    ),
    Mutation(
        "a decoder attends to padding",
        "integrations/generation.py",
        "self._mask[:, :length] = mask",
        "self._mask[:, :length] = 1",
        GENERATION,
    ),
    Mutation(
        "a decoder keeps the text before",
        "integrations/generation.py",
        """        self._cache.reset()  # type: ignore[no-untyped-call]
        length""",
        "        length",
        GENERATION,
    ),
    Mutation(
        "rows go on after their end",
        "integrations/generation.py",
        "tokens = torch.where(ended, padding, tokens)",
        "tokens = torch.where(ended, tokens, tokens)",
        GENERATION,
    ),
    Mutation(
        "the temperature multiplies",
        "integrations/generation.py",
        "scaled = logits.float() / self.temperature",
        "scaled = logits.float() * self.temperature",
        GENERATION,
    ),
)
