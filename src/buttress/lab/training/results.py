"""From a finished trainer to the run record."""

from __future__ import annotations

import platform

import torch

import buttress
from buttress.lab.runs.records import Curve, Metrics, Record
from buttress.lab.training.trainer import Trainer

CURVE_POINTS = 200
"""Number of points of a recorded curve."""
TAIL_EPOCHS = 10
"""Epochs at the end of a run over which its training error is averaged, as in the paper."""
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "B200": 2250e12}
"""Vendor's peak FLOP/s of bfloat16 matmuls by GPU, to which utilization is relative."""


def build_record(
    trainer: Trainer, *, seconds: float, step_ms: float, compile_seconds: float | None, at_once: int, metrics: Metrics
) -> Record:
    """Evaluate a trainer at the end of its run and build the record.

    Args:
        trainer: The trainer.
        seconds: Duration of the whole run.
        step_ms: Median time per step.
        compile_seconds: Time of compilation, of capturing a CUDA graph and of warmup; None if it is unknown.
        at_once: Runs that share the device.
        metrics: Metrics of the run over its steps.

    Returns:
        The record, with the status "done".
    """
    run, batch = trainer.run, trainer.batches.size
    losses, errors = trainer.losses.cpu(), 100 * trainer.errors.cpu()
    tail = max(1, min(TAIL_EPOCHS * trainer.batches.per_epoch, run.steps // 5))
    test_loss, test_error = trainer.evaluator.test()
    results = {
        "train_error": errors[-tail:].mean().item(),
        "train_loss": losses[-tail:].mean().item(),
        "test_error": test_error,
        "test_loss": test_loss,
        "seconds": seconds,
        "step_ms": step_ms,
        "examples_per_second": run.steps * batch / max(seconds, 1e-9),
    }
    if run.grow_to:
        results["mean_macs"] = trainer.mean_macs
    if compile_seconds is not None:
        results["compile_seconds"] = compile_seconds
    if trainer.task.epoch:
        results["examples"] = trainer.task.epoch
    if trainer.task.language:
        results["head_macs"] = trainer.head_macs
        results["tokens_per_second"] = batch * run.context / max(step_ms / 1e3, 1e-9)
    if trainer.device.type == "cuda" and at_once == 1:  # runs that share a GPU share its time and, perhaps, its memory
        results |= _gpu_results(trainer, step_ms)
    if run.probe:
        results["feature_update"] = trainer.tables.changes.mean().item()
    return Record(
        run, "done", results, trainer.params, trainer.macs, training_curve(trainer, run.steps), "",
        _environment(trainer, at_once), metrics,
    )  # fmt: skip


def _gpu_results(trainer: Trainer, step_ms: float) -> dict[str, float]:
    results = {"peak_gib": torch.cuda.max_memory_allocated(trainer.device) / 2**30}
    name = torch.cuda.get_device_name(trainer.device)
    peak = next((flops for gpu, flops in PEAK_FLOPS.items() if gpu in name), None)
    if peak and trainer.run.precision == "bfloat16":
        flops = 6 * trainer.mean_macs * trainer.batches.size / max(step_ms / 1e3, 1e-9)
        results["mfu"] = flops / (peak * trainer.group.size)
    return results


def _environment(trainer: Trainer, at_once: int) -> dict[str, str]:
    """Hardware, library versions and settings of the process."""
    device = trainer.device
    cpu = platform.processor() or platform.machine()
    environment = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
        "buttress": buttress.__version__,
        "python": platform.python_version(),
        "at_once": str(at_once),
        "compiled": "yes" if trainer.compiled else "no",
    }
    if trainer.group.size > 1:
        environment["processes"] = f"{trainer.group.size}, {trainer.group.strategy}"
    if trainer.task.fingerprint:
        environment["data"] = trainer.task.fingerprint
    return environment


def training_curve(trainer: Trainer, steps: int) -> Curve:
    """Loss and error of the first `steps` steps, averaged over at most `CURVE_POINTS` equal intervals."""
    losses, errors = trainer.losses[:steps].cpu(), 100 * trainer.errors[:steps].cpu()
    edges = sorted({round(i * steps / CURVE_POINTS) for i in range(1, CURVE_POINTS + 1)} - {0})
    return tuple(
        (end, round(losses[start:end].mean().item(), 4), round(errors[start:end].mean().item(), 3))
        for start, end in zip([0, *edges][:-1], edges, strict=True)
    )
