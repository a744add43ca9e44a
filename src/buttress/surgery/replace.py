"""replace_: linear layers and embeddings of a model replaced by structured ones, in place."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from buttress.errors import PlanError
from buttress.inspection.sites import check_is_model, check_not_wrapped, find_sites
from buttress.projection.closed_form import Projection
from buttress.surgery.choosing import Split, StructureLike, select
from buttress.surgery.exchange import apply_entries
from buttress.surgery.plan import Plan
from buttress.surgery.replacement import Init, Initialization
from buttress.surgery.report import Report


def replace_(
    model: nn.Module,
    plan: StructureLike | Mapping[str, StructureLike | None] | Plan,
    *,
    init: Init = "mup",
    normalize: bool = False,
    split: Mapping[str, Split] | None = None,
    moments: Mapping[str, Tensor] | None = None,
    sweeps: int | None = None,
    projections: Mapping[str, Projection] | None = None,
    dry_run: bool = False,
) -> Report:
    """Replace linear layers by structured ones, in place; if anything fails, the model is unchanged.

    Linear layers are nn.Linear, transformers' Conv1D, and the projections q_proj, k_proj, v_proj and out_proj of
    nn.MultiheadAttention. An nn.Embedding or 1 × 1 convolution is replaced only by a glob that ends in its own name
    without a wildcard ("transformer.wte", "*.wte"), never by "*" or a Structure. A head that shares an embedding's
    weight keeps sharing it where both get the same structure. Biases stay the same Parameters; a fused layer's bias
    is split with it.

    Adapters of peft, quantized and parametrized layers, and subclasses with their own forward are never replaced. A
    Structure or a wildcard passes over them, and the report names them; a glob that names one raises.

    Replace layers before wrapping a model in DDP or FSDP, before offloading it and before adding hooks.

    Args:
        model: The model to change.
        plan: A Structure, or its text, for every linear layer but the output head; or an ordered mapping of name globs
            to a Structure, its text, or None for layers to leave alone, where the first match wins; or a saved Plan.
            The head is what `get_output_embeddings()` or `get_classifier()` names, else the one linear layer at the top
            level that is called head, classifier or lm_head (or fc, where it is alone), else the last linear layer.
        init: "mup" draws new weights (a zero weight gives a zero start); "project" keeps the nearest to the old ones.
        normalize: Whether the new factors are normalized, as for StructuredLinear.
        split: Globs of fused layers, each with a number of equal parts or a tuple of output sizes: {"*.c_attn": 3}.
        moments: Second moments of the layers' inputs, from `moments()`. With them init="project" minimizes the error
            of the outputs instead of that of the weights.
        sweeps: Sweeps of `project`, for init="project".
        projections: Results of `project` that were computed before, by layer name, for init="project".
        dry_run: Whether to report only, and leave the model as it is.

    Returns:
        One row per replaced layer, the parameters of the model before and after, and what was not reached with the
        reasons.

    Raises:
        PlanError: If the plan does not fit the model: a glob that selects nothing or names a layer that cannot be
            replaced (each says why), a split that does not add up, or nothing to replace.
        StructureError: If a text is not a structure.

    Example:
        >>> report = replace_(model, {"*.mlp.*": BTT(rank=2), "*.attn.*": "monarch(blocks=4)"})
        >>> report.share_reached, [layer.name for layer in report.unreached]
        >>> report = replace_(model, {"transformer.wte": BTT(rank=4), "lm_head": BTT(rank=4)})  # stay tied
        >>> print(replace_(model, BTT(rank=2), split={"*.c_attn": 3}, dry_run=True))
    """
    check_is_model(model)
    if isinstance(plan, Plan):
        if split or normalize:
            raise PlanError("a saved Plan already says what is split and normalized: leave those arguments out")
        return plan.apply_(model, init=init, moments=moments, sweeps=sweeps, projections=projections, dry_run=dry_run)
    initialization = Initialization.checked(init, moments, sweeps, projections, dry_run=dry_run)
    check_not_wrapped(model)
    sites = find_sites(model, embeddings=True)
    selection = select(model, plan, sites, normalize=normalize, split=split or {})
    return apply_entries(model, selection.entries, sites, initialization, selection.kept)
