"""Numbers in sentences of README and the result pages, recomputed from the records."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

import buttress as bt
from pages import DOCS, ROOT

pytest.importorskip("scipy", reason="fits need buttress[lab]")
pytest.importorskip("matplotlib", reason="figures need buttress[lab]")

README = (ROOT / "README.md").read_text()
CIFAR = (DOCS / "results/cifar.md").read_text()


@pytest.fixture(autouse=True)
def generation() -> Iterator[None]:
    """The package docs/generation, importable."""
    sys.path.insert(0, str(DOCS))
    yield
    sys.path.remove(str(DOCS))


Curve = tuple[list[float], list[float]]


def curves(metric: str) -> dict[str, Curve]:
    """Training seconds and mean errors of each structure, read from the files without the package."""
    errors: dict[tuple[str, int], list[float]] = {}
    times: dict[tuple[str, int], tuple[str, float]] = {}
    seeds = (f"h200/lab/mlp-scaling{seed}.jsonl" for seed in ("", "-seed-1", "-seed-2"))
    for name in (*seeds, "cpu/lab/mlp-differences.jsonl"):
        for line in (ROOT / "results" / name).read_text().splitlines():
            record = json.loads(line)
            run, results, environment = record["run"], record["results"], record["made_on"]
            if "split" in run["structure"]:
                continue
            key = run["structure"] or "dense", record["macs"]
            errors.setdefault(key, []).append(results[metric])
            if "H200" in environment["device"] and environment.get("at_once", "1") == "1":
                seconds = run["steps"] * results["step_ms"] / 1e3
                times[key] = max(times.get(key, ("", 0.0)), (environment["buttress"], seconds))
    lines: dict[str, list[tuple[int, float, float]]] = {}
    for (structure, macs), values in sorted(errors.items()):
        lines.setdefault(structure, []).append((macs, times[structure, macs][1], sum(values) / len(values)))
    return {name: tuple(zip(*line, strict=True)) for name, line in lines.items()}


def at(x: float, xs: Sequence[float], errors: Sequence[float]) -> float:
    return float(np.exp(np.interp(np.log(x), np.log(xs), np.log(errors))))


@pytest.mark.parametrize("metric", ["train_error", "test_error"])
def test_level_at_equal_macs(metric: str) -> None:
    lines = curves(metric)
    (xs, _, dense), (us, _, btt) = lines["dense"], lines["btt"]
    common = [x for x in (*xs, *us) if max(xs[0], us[0]) <= x <= min(xs[-1], us[-1])]
    gaps = [at(x, xs, dense) - at(x, us, btt) for x in common]
    assert f"{min(gaps):.1f} to {max(gaps):.1f} points of {metric.replace('_', ' ')}" in README


@pytest.mark.parametrize("metric", ["train_error", "test_error"])
def test_crossing_in_time(metric: str) -> None:
    lines = curves(metric)
    (_, xs, dense), (_, us, btt) = lines["dense"], lines["btt"]
    grid = np.geomspace(max(xs[0], us[0]), min(xs[-1], us[-1]), 20001)
    ahead = [float(x) for x in grid if at(x, xs, dense) < at(x, us, btt)]
    assert f"{max(ahead):.0f} s ({metric.replace('_', ' ')})" in README


def test_the_two_models_of_the_first_screen() -> None:
    from generation.cifar_comparison import mlp_scaling

    from buttress.lab.analysis.lines import LineKey, points

    texts = []
    for key, width in ((LineKey("btt"), 4096), (LineKey(), 2048)):
        models = [
            next(p for p in points(mlp_scaling(), metric)[key] if p.width == width)
            for metric in ("train_error", "test_error")
        ]
        texts.append((" / ".join(f"{p.error:.1f}" for p in models), f"{models[0].seconds:.0f}"))
    (btt, btt_seconds), (dense, dense_seconds) = texts
    assert f"reaches {btt} % (train / test error) in {btt_seconds} s" in README
    assert f"reaches {dense} % in {dense_seconds} s" in README
    assert f"in {btt_seconds} s (bf16: 37 s) to lower errors than dense of width 2048 in {dense_seconds} s" in CIFAR


def test_every_model_on_the_page_is_in_the_recipe() -> None:
    from generation.cifar_comparison import PRECISIONS

    from buttress.lab.recipes import find

    models = {(run.structure, run.width, run.layers) for run in find("mlp-scaling").runs()}
    for records in PRECISIONS.values():
        assert {(r.run.structure, r.run.width, r.run.layers) for r in records()} <= models


def test_relative_errors_at_both_ends() -> None:
    from generation.cifar_comparison import comparisons

    (c,) = [c for key, c in comparisons("tf32", "train_error", "macs").items() if key.structure == "btt"]
    ends = [100 * (1 - x.value) for x in (c.first_ratio, c.last_ratio)]
    assert "BTT's train error is {:.0f} % below dense at the small end and {:.1f} % below".format(*ends) in CIFAR


def test_a_slower_version_would_move_the_crossing() -> None:
    from generation.cifar_comparison import mlp_scaling

    from buttress.lab.analysis.comparison import compare
    from buttress.lab.analysis.lines import BASELINE, LineKey, points

    slow = [r for r in mlp_scaling() if not (r.run.seed == 1 and (r.run.structure, r.run.width) == ("btt", 2048))]
    lines = points(slow)
    crossing = compare(lines[LineKey("btt")], lines[BASELINE], against="seconds").crossing
    assert crossing is not None
    assert f"would be at {crossing.cost:.0f} s" in CIFAR


def test_times_of_gpt2() -> None:
    from generation.records import runs

    from buttress.lab.analysis.lines import training_seconds

    page = (DOCS / "results/gpt2.md").read_text()
    for structure, width in (("", 768), ("btt(rank=4)", 1216)):
        (record,) = [r for r in runs("gpt2-wiki") if (r.run.structure, r.run.width) == (structure, width)]
        seconds, loss = f"{training_seconds(record):.0f}", f"{record.results['test_loss']:.2f}"
        assert f"{loss} in {seconds} s" in README or f"needs {seconds} s for {loss}" in README
        assert f"{loss} in {seconds} seconds" in page


def test_noise_between_seeds() -> None:
    from generation.cifar_comparison import mlp_scaling, noise

    from buttress.lab.analysis.lines import points

    models = [p.by_seed for line in points(mlp_scaling()).values() for p in line]
    assert sorted(map(len, models)) == [2] * 5 + [3] * 21
    assert "Of the 26 models 21 have three seeds and five have two" in CIFAR
    assert f"the train error varies by {100 * noise('train_error'):.1f} % of its value" in CIFAR
    assert f"the test error by {100 * noise('test_error'):.1f} %" in CIFAR


def test_distance_from_the_published_errors() -> None:
    from generation.cifar_comparison import mlp_scaling

    from buttress.lab.analysis import published
    from buttress.lab.analysis.lines import points

    def distances(metric: str, curves: published.Mapping[str, published.Curve]) -> dict[str, list[float]]:
        return {
            key.structure: [p.error - round(published.interpolate(curves[key.structure], p.macs), 1) for p in line]
            for key, line in points(mlp_scaling(), metric).items()
        }

    train, test = distances("train_error", published.TRAIN_ERROR), distances("test_error", published.TEST_ERROR)
    largest = [max(abs(x) for line in each.values() for x in line) for each in (train, test)]
    assert "Every train error is within {:.1f} points of the published one, and every test error within {:.1f}.".format(
        *largest
    ) in CIFAR  # fmt: skip
    assert f"by {min(train['btt']):.1f} to {max(train['btt']):.1f} points" in CIFAR
    assert f"above its published test error by {min(test['btt']):.1f} to {max(test['btt']):.1f}." in CIFAR
    assert f"within {max(map(abs, train['dense'])):.1f} points in train error" in CIFAR
    assert f"up to {-min(test['dense']):.1f} points better in test error" in CIFAR
    worse = train["tensor_train(rank=16)"]
    assert f"Tensor-Train comes out {-max(worse):.1f} to {-min(worse):.1f} points better" in CIFAR


def test_time_of_a_layer_at_equal_macs() -> None:
    from generation.layer_speed import nanoseconds
    from generation.records import rows

    import buttress as bt

    page = (DOCS / "results/layer-speed.md").read_text()
    square = {(r["structure"], int(r["d_in"])): r for r in rows("h200/layers.csv") if r["d_in"] == r["d_out"]}
    times = []
    for width, dense_width in ((1024, 512), (16384, 4096)):
        macs = bt.parse("btt(rank=4)").chain(width, width).macs
        assert macs == dense_width**2
        assert f"at {macs:,} MACs" in page or f"at {macs / 1e6:.1f} million" in page
        ours = nanoseconds(square["btt(rank=4)", width], "both_ms")
        times.append(ours / nanoseconds(square["btt", dense_width], "linear_both_ms"))
    assert f"takes {times[0]:.1f} times as long" in page
    assert f"and {times[1]:.1f} times as long" in page


@pytest.mark.parametrize("metric", ["train_error", "test_error"])
def test_growing_halfway_pays_if_the_learning_rate_stays(metric: str) -> None:
    from generation import growing

    page = (DOCS / "how-to/grow-a-rank.md").read_text()
    assert "With a constant learning rate it is worth it" in page
    assert "With the cosine schedule it is not" in page
    rates = 1 + np.cos(np.pi * np.linspace(0, 1, 401))
    assert f"only {100 * rates[200:].sum() / rates.sum():.0f} % of the learning" in page
    groups = growing.by_schedule_and_width()
    assert {schedule for schedule, _ in groups} == {"constant", "cosine"}
    for (schedule, _), structures in groups.items():
        small, grown, large = structures.values()
        assert [len(seeds) for seeds in structures.values()] == [5, 5, 5]
        assert growing.mean_macs(grown[0]) == (small[0].macs + large[0].macs) / 2
        gaps = np.array(growing.above_line(small, large, grown, metric))
        errors = [np.mean([r.results["train_error"] for r in seeds]) for seeds in (small, grown, large)]
        if schedule == "constant":
            assert gaps.mean() < 0
            if metric == "train_error":
                assert f"{-gaps.mean():.1f}" in page.partition("With a constant learning rate it is worth it")[2][:90]
                assert gaps.mean() < -5 * gaps.std(ddof=1) / len(gaps) ** 0.5
        else:
            assert gaps.mean() > 0
            assert errors[0] - errors[1] < 0.1 * (errors[0] - errors[2])  # almost as much as rank 1


def test_sums_are_ahead_of_their_parts_as_the_page_says() -> None:
    from generation.records import rows

    page = (DOCS / "results/compression.md").read_text()
    scores = {(r["rank"], r["structure"], r["weights"]): r for r in rows("cpu/minilm_sums.csv")}
    ranks, stages = ({key[i] for key in scores} for i in (0, 2))
    for rank in ranks:
        for stage in stages:
            mine, *parts = (scores[rank, kind, stage] for kind in ("sum", "low_rank", "btt"))
            gain = float(mine["cosine"]) - max(float(p["cosine"]) for p in parts)
            assert gain > 0
            assert float(mine["kept"]) <= max(float(p["kept"]) for p in parts)
            correlated = all(mine["spearman"] > p["spearman"] for p in parts)
            assert correlated == (stage != "aware" or rank == "5")
            if stage != "aware":
                assert f"{gain:.2f} at {100 * float(mine['kept']):.0f} %" in page


@pytest.mark.parametrize("width", [256, 1024])
def test_the_effects_of_the_authors_choices(width: int) -> None:
    from generation.cifar_differences import by_model

    page = (DOCS / "results/cifar.md").read_text()

    def differences(metric: str, change: str) -> np.ndarray:
        plain, changed = ({r.run.seed: r.results[metric] for r in by_model()["btt", width, c]} for c in ("", change))
        assert sorted(plain) == sorted(changed) == [0, 1, 2]
        return np.array([changed[seed] - plain[seed] for seed in range(3)])

    greedy = {metric: differences(metric, "split='greedy'") for metric in ("test_error", "train_error")}
    test, train = (f"{-d.mean():.2f} ± {d.std(ddof=1) / 3**0.5:.2f}" for d in greedy.values())
    assert (
        f"At width {width}, the greedy split lowers the test error by {test} points and the train error by {train}."
        in page
    )
    for change in ("schedule=cosine_epochs", "mixup_on=pixels", "resample=bilinear"):
        assert abs(differences("train_error", change).mean()) < 0.1
        assert -0.45 < differences("test_error", change).mean() < 0.35, "the page says -0.4 to +0.3"
    together = "split='greedy', schedule=cosine_epochs, mixup_on=pixels"
    for metric, alone in greedy.items():
        assert abs(differences(metric, together).mean() - alone.mean()) < 0.15


def test_the_learning_rates_of_both_splits() -> None:
    for split, multipliers in (("even", [32, 24]), ("greedy", [48, 16])):
        chain = bt.BTT(split=split).chain(3072, 256)
        assert [bt.lr_multiplier(f, chain) for f in chain.factors] == multipliers


def test_adamw_and_muon_in_small_models() -> None:
    from generation.records import runs

    from buttress.lab.analysis.lines import largest_activations

    page = (DOCS / "results/gpt2.md").read_text()
    losses: dict[tuple[str, str, bool], list[float]] = {}
    sizes: dict[tuple[str, str, bool], list[float]] = {}
    records = runs("gpt2-muon-small", "cpu")
    for r in sorted(records, key=lambda r: r.run.lr):
        model = r.run.structure, r.run.optimizer, r.run.normalize
        losses.setdefault(model, []).append(r.results["test_loss"])
        sizes.setdefault(model, []).append(max(size for _, size in largest_activations(r)))
    dense, btt = (
        {name: losses[structure, name, normalize] for name in ("adamw", "muon")}
        for structure, normalize in (("", False), ("btt(rank=4)", True))
    )
    gains = (f"{min(model['adamw']) - min(model['muon']):.2f} nats for" for model in (dense, btt))
    assert "by {} the dense model and by {} normalized BTT".format(*gains) in page
    leads = (f"{min(dense[name]) - min(btt[name]):.2f} nats" for name in ("adamw", "muon"))
    assert "from {} with AdamW to {}.".format(*leads) in page
    plain = "btt(rank=4)", "muon", False
    assert all(a < b for a, b in zip(btt["muon"], losses[plain], strict=True)), "normalized weights: lower at all rates"
    assert f"an RMS of {sizes[plain][-1]:.0f} at the highest rate" in page
    assert f"and with them {sizes['btt(rank=4)', 'muon', True][-1]:.1f}." in page
    assert btt["adamw"][0] == min(btt["adamw"]), "the lowest of the three rates is the best"
    macs = sorted({r.macs / r.run.context for r in records})
    assert "({:.2f} M and {:.2f} M)".format(*(m / 1e6 for m in macs)) in page


def test_one_learning_rate_for_all_widths() -> None:
    from generation.records import runs

    page = (DOCS / "results/gpt2.md").read_text()
    records = runs("gpt2-rate-transfer-small", "cpu")
    losses: dict[tuple[str, int], dict[float, float]] = {}
    for r in records:
        losses.setdefault((r.run.structure, r.run.width), {})[r.run.lr] = r.results["test_loss"]
    assert [len(rates) for rates in losses.values()] == [5] * 6
    above = {lr: [rates[lr] - min(rates.values()) for rates in losses.values()] for lr in (6e-4, 6e-3)}
    assert f"within {max(above[6e-3]):.2f} nats of it in every row" in page
    assert f"is {min(above[6e-4]):.2f} to {max(above[6e-4]):.2f} nats above the best everywhere" in page
    for structure, text in (("", "dense"), ("btt(rank=4)", "BTT")):
        best = [min(rates, key=rates.__getitem__) for (s, _), rates in sorted(losses.items()) if s == structure]
        assert "{:g}, {:g}, {:g} for {}".format(*best, text) in page
    macs = {(r.run.structure, r.run.width): r.macs for r in records}
    for width in (64, 128, 256):
        assert macs["btt(rank=4)", width] < macs["", width]
        assert all(losses["btt(rank=4)", width][lr] < loss for lr, loss in losses["", width].items())
