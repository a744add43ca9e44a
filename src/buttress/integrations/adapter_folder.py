"""save_adapter and load_adapter_: the adapters of a model in a folder of their own, without the weights they adapt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from buttress.core.chain_sum import base_factor
from buttress.errors import PlanError, first_line, quoted
from buttress.files import leaves, new_folder
from buttress.inspection.names import join, parameters, unique_modules
from buttress.inspection.sites import check_not_wrapped, find_sites
from buttress.integrations.base_checksums import base_tensors, checksum, is_adapted
from buttress.integrations.missing import FAILURES, import_failure
from buttress.surgery import AdapterReport, Plan, PlanEntry
from buttress.surgery.adapting import adapt_entries, count_trained, freeze
from buttress.surgery.entry import entries_of, plan_data
from buttress.surgery.replacement import AdapterStart

DESCRIPTION_FILE = "buttress-adapter.json"
WEIGHTS_FILE = "buttress-adapter.safetensors"
FORMAT = "buttress-adapter"
MAX_TEXT = 64 << 20
"""Longest description, in bytes."""

Shape = tuple[int, ...]


def save_adapter(model: nn.Module, folder: Path | str) -> Path:
    """Save the adapters of a model, and what else is trained, to a new folder, atomically.

    The folder holds the plan, the trained parameters, the buffers, and a checksum of every frozen parameter, by which
    `load_adapter_` recognizes the model. The frozen parameters themselves are not saved.

    Args:
        model: A model after `adapt_`.
        folder: The folder to write. It must not exist, or be empty.

    Returns:
        The folder.

    Raises:
        PlanError: If the model has no adapters, has normalized ones, is sharded or on the meta device, or the folder
            is not empty.
        MissingExtraError: If safetensors is not installed.

    Example:
        >>> report = adapt_(model, BTT(rank=2))
        >>> save_adapter(model, "adapter")
        >>> report = load_adapter_(base_model, "adapter")
    """
    safetensors = _safetensors("save_adapter")
    entries = _adapter_entries(model)
    if not entries:
        raise PlanError("the model has no adapters to save: adapt_ adds them")
    if any(entry.normalize for entry in entries):
        raise PlanError("adapters with normalize=True cannot be saved alone: save the whole model")
    every = parameters(model)
    for name, parameter in every.items():
        if type(parameter).__module__.startswith("torch.distributed.") or parameter.is_meta:
            raise PlanError(f"{name} is not whole on this device: gather or load the model first")
    factors = {name: every[name] for name in _factor_shapes(entries, _sizes(model, entries))}
    held = {
        id(p) for n, m in unique_modules(model) if is_adapted(m) for k, p in m.named_parameters() if "factors." in k
    }
    others = {id(p): (n, p) for n, p in reversed(every.items()) if p.requires_grad and id(p) not in held}
    trained, buffers = dict(reversed(list(others.values()))), _buffers(model)
    base = {n: [str(t.dtype), list(t.shape), checksum(t)] for n, t in base_tensors(model) if not t.requires_grad}
    description = {
        "format": FORMAT,
        "version": 1,
        "plan": plan_data(entries),
        "parameters": list(trained),
        "buffers": list(buffers),
        "base": base,
    }
    tensors = _apart({name: t.detach().cpu().contiguous() for name, t in (factors | trained | buffers).items()})
    with new_folder(folder) as part:
        (part / DESCRIPTION_FILE).write_text(json.dumps(description, indent=1) + "\n", encoding="utf-8")
        safetensors.save_file(tensors, part / WEIGHTS_FILE)
    return Path(folder)


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of which no two share memory, as safetensors needs it; blocks can share a buffer, such as a table."""
    apart, storages = {}, set[int]()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        apart[name] = tensor.clone() if address in storages else tensor
        storages.add(address)
    return apart


def load_adapter_(model: nn.Module, folder: Path | str, *, strict: bool = True) -> AdapterReport | None:
    """Put the adapters in a folder onto the model that they were trained on, in place.

    A folder is data: nothing in it runs, and all sizes and data types are compared with the model before anything is
    allocated. If anything does not fit, the model is unchanged.

    Args:
        model: The model before `adapt_`, with the same weights; or after it, with the same plan.
        folder: What `save_adapter` wrote.
        strict: Whether the frozen parameters must be those that the adapters were trained on, bit by bit. If False,
            only their names and shapes are compared, as for a base of another data type. No parameter may be missing
            or added in either case.

    Returns:
        What `adapt_` reports; None if the model had these adapters already.

    Raises:
        PlanError: If the folder holds no adapter, is damaged, or belongs to another model.
        MissingExtraError: If safetensors is not installed.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained("base")
        >>> print(load_adapter_(model, "adapter"))
    """
    safetensors = _safetensors("load_adapter_")
    check_not_wrapped(model, "loading the adapter")
    saved = _Saved.read(Path(folder))
    existing = _adapter_entries(model)
    if existing and tuple(existing) != saved.plan.entries:
        raise PlanError("the model has other adapters already: unadapt_ or merge_ it first")
    if not existing:
        saved.plan.apply_(model, dry_run=True)  # says why a plan does not fit
    saved.check_shapes(_expected_shapes(model, saved))
    saved.check_dtypes(_buffers(model))
    _check_base(model, saved, strict)
    tensors = safetensors.load_file(saved.weights)
    report = None
    if not existing:
        sites = find_sites(model, embeddings=True)
        report = adapt_entries(model, saved.plan.entries, sites, AdapterStart(drawn=False))
    _assign(model, tensors)
    freeze(model, {id(p) for n, p in parameters(model).items() if n in saved.parameters}, ())
    return None if report is None else replace(report, params_trained=count_trained(model))


@dataclass(frozen=True)
class _Saved:
    """An adapter's folder, as it was described; `weights` is the file of its tensors."""

    plan: Plan
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    base: Mapping[str, Any]
    weights: Path

    @classmethod
    def read(cls, folder: Path) -> _Saved:
        """Read the description; nothing of the weights is read."""
        path, weights = folder / DESCRIPTION_FILE, folder / WEIGHTS_FILE
        for file in (path, weights):
            if not file.is_file():
                raise PlanError(f"{folder} holds no adapter of buttress: there is no {file.name} in it")
            if leaves(folder, file):
                raise PlanError(f"{file} is a link out of its folder, which is not followed")
        if (size := path.stat().st_size) > MAX_TEXT:
            raise PlanError(f"{path} has {size:,} bytes, more than {MAX_TEXT:,}: it is not an adapter's description")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if (data["format"], data["version"]) != (FORMAT, 1):
                raise ValueError(f"format {quoted(data['format'])}, version {quoted(data['version'])}")
            plan = Plan.from_json(json.dumps(data["plan"]))
            names = [tuple(_name(n) for n in data[key]) for key in ("parameters", "buffers")]
            base = {_name(n): (_name(d), tuple(s), _name(c)) for n, (d, s, c) in data["base"].items()}
        except PlanError as error:
            raise PlanError(f"{path} cannot be used: {error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else first_line(error)
            raise PlanError(f"{path} is not the description of an adapter ({reason}): save it again") from None
        return cls(plan, names[0], names[1], base, weights)

    def check_shapes(self, expected: Mapping[str, Shape]) -> None:
        """Compare the tensors in the file with what the model needs, by the file's header alone."""
        from buttress.integrations.weight_headers import saved_shapes

        shapes = saved_shapes([self.weights])
        for name in sorted({*expected, *shapes}):
            if shapes.get(name) != expected.get(name):
                problem = f"has the shape {shapes[name]}" if name in shapes else "is missing"
                wanted = f"needs the shape {expected[name]}" if name in expected else "is not part of the plan"
                raise PlanError(f"{quoted(name, 120)} {wanted}, but in {self.weights} it {problem}")

    def check_dtypes(self, buffers: Mapping[str, Tensor]) -> None:
        """Check by the file's header that the factors of each adapter have one floating-point type, and so on."""
        from buttress.integrations.weight_headers import saved_dtypes, saved_shapes

        dtypes, first = saved_dtypes([self.weights]), dict[str, str]()
        for name in saved_shapes([self.weights]):
            dtype, floating = dtypes.get(name), name not in buffers or buffers[name].is_floating_point()
            if dtype is None or dtype.is_floating_point != floating:
                wanted = "floating-point numbers of 16 bits or more" if floating else "integers"
                raise PlanError(f"{quoted(name, 120)} must be {wanted}, but in {self.weights} it is not: save it again")
            layer, is_factor, _ = name.rpartition(".factors.")
            if is_factor and dtype != dtypes[other := first.setdefault(layer, name)]:
                raise PlanError(
                    f"{quoted(name, 120)} is {dtype} in {self.weights}, but {quoted(other, 120)} of the same adapter "
                    f"is {dtypes[other]}: one adapter has one data type"
                )


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{quoted(value, 30)} is no text")
    return value


def _adapter_entries(model: nn.Module) -> list[PlanEntry]:
    adapted = {name for name, module in unique_modules(model) if is_adapted(module)}
    return [entry for entry in entries_of(model) if entry.name in adapted]


def _sizes(model: nn.Module, entries: Sequence[PlanEntry]) -> dict[str, tuple[int, int]]:
    """Input and output size of every layer with an entry, adapted or not."""
    weights = dict(base_tensors(model))
    sites = find_sites(model, embeddings=True)
    sizes = {}
    for entry in entries:
        if entry.name in sites:
            linear = sites[entry.name].read()
            sizes[entry.name] = (linear.in_features, linear.out_features)
        else:
            module = dict(unique_modules(model))[entry.name]
            d_out, d_in = weights[join(entry.name, "weight")].shape
            is_transposed = getattr(module, "stands_for", None) is not None
            sizes[entry.name] = (d_out, d_in) if is_transposed else (d_in, d_out)
    return sizes


def _factor_shapes(entries: Sequence[PlanEntry], sizes: Mapping[str, tuple[int, int]]) -> dict[str, Shape]:
    """Shapes of the trained factors of adapters, by the names that they have in the model."""
    shapes: dict[str, Shape] = {}
    for entry in entries:
        d_in, d_out = sizes[entry.name]
        for i, size in enumerate(entry.split or (d_out,)):
            chain = entry.structure.chain(d_in, size)
            if base_factor(chain) is None:
                raise PlanError(f"{entry.name}: {entry.structure} is not an adapter, which has one frozen dense part")
            prefix = f"{entry.name}.parts.{i}" if entry.split else entry.name
            if entry.tied is None:
                shapes |= {f"{prefix}.factors.{f.name}": f.shape for f in chain.factors if not f.frozen}
    return shapes


def _expected_shapes(model: nn.Module, saved: _Saved) -> dict[str, Shape]:
    """Shapes of the tensors that an adapter of this model consists of."""
    entries = saved.plan.entries
    own = {name: tuple(t.shape) for name, t in base_tensors(model)}
    own |= {name: tuple(p.shape) for name, p in parameters(model).items()}
    own |= {f"{e.name}.parts.{i}.bias": (size,) for e in entries for i, size in enumerate(e.split or ())}
    buffers = {name: tuple(b.shape) for name, b in _buffers(model).items()}
    expected = _factor_shapes(entries, _sizes(model, entries))
    for names, known in ((saved.parameters, own), (saved.buffers, buffers)):
        for name in names:
            if name not in known:
                raise PlanError(f"the adapter trains {quoted(name, 120)}, which the model does not have")
            expected[name] = known[name]
    return expected


def _check_base(model: nn.Module, saved: _Saved, strict: bool) -> None:
    """Compare the frozen parameters with those that the adapters were trained on."""
    own = dict(base_tensors(model))
    hint = "load the model that was adapted"
    every = parameters(model)
    trained = {id(every[name]) for name in saved.parameters if name in every}
    for name, tensor in own.items():
        if name not in saved.base and id(tensor) not in trained and not _stored_as(name) & {*saved.parameters}:
            raise PlanError(f"the model has {name}, which the one that the adapter was trained on lacks: {hint}")
    for name, (dtype, shape, digits) in saved.base.items():
        if name not in own:
            raise PlanError(
                f"the adapter was trained on a model with {quoted(name, 120)}, which this one lacks: {hint}"
            )
        tensor = own[name]
        if tuple(tensor.shape) != shape:
            raise PlanError(f"{name} has the shape {tuple(tensor.shape)}, the adapter needs {quoted(shape)}: {hint}")
        if not strict:
            continue
        if str(tensor.dtype) != dtype:
            raise PlanError(
                f"{name} is {tensor.dtype}, the adapter was trained on {quoted(dtype)}: {hint}, or strict=False"
            )
        if tensor.is_meta or checksum(tensor) != digits:
            problem = (
                "is on the meta device" if tensor.is_meta else "has other values than when the adapter was trained"
            )
            raise PlanError(f"{name} {problem}: {hint}, or compare names and shapes alone with strict=False")


def _stored_as(name: str) -> set[str]:
    """Names that a parameter of a layer can have where it is trained: its own, as a part, or packed in an attention."""
    layer, _, key = name.rpartition(".")
    attention, _, projection = layer.rpartition(".")
    return {name, f"{layer}.parts.0.{key}", join(attention, f"in_proj_{key}"), join(attention, f"{projection}_{key}")}


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that a model saves, such as the statistics of normalization, which training changes."""
    return {
        join(name, key): buffer
        for name, module in unique_modules(model)
        for key, buffer in module.named_buffers(recurse=False)
        if key not in module._non_persistent_buffers_set
    }


@torch.no_grad()
def _assign(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give tensors of a model these values; factors take over the data type as well."""
    own: dict[str, Tensor] = {**parameters(model), **_buffers(model)}
    for name, value in tensors.items():
        target = own[name]
        if ".factors." in name:
            target.data = value.to(target.device, copy=True)  # the Parameter stays, since a tied layer may share it
        else:
            target.copy_(value)


def _safetensors(caller: str) -> Any:
    try:
        import safetensors.torch
    except FAILURES as error:
        raise import_failure(f"bt.{caller}", "safetensors", error) from error
    return safetensors.torch
