"""Numbers in sentences of README and the result pages, recomputed from the records."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

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


@pytest.mark.parametrize("metric", ["train_error", "test_error"])
def test_level_at_equal_macs(metric: str) -> None:
    from generation.cifar_comparison import comparisons

    low, high = {key.structure: c for key, c in comparisons("tf32", metric, "macs")}["btt"].range
    assert f"{-high:.1f} to {-low:.1f} points of {metric.replace('_', ' ')}" in README


@pytest.mark.parametrize(
    ("metric", "sentence"), [("train_error", "lowest train error"), ("test_error", "lowest test error")]
)
def test_time_to_the_lowest_error_of_dense(metric: str, sentence: str) -> None:
    from generation.cifar_comparison import comparisons, mlp_scaling

    from buttress.lab.analysis.frontier import Frontier
    from buttress.lab.analysis.lines import BASELINE, LineKey, points

    lines = points(mlp_scaling(), metric)
    dense, btt = (Frontier.of(lines[key], "seconds") for key in (BASELINE, LineKey("btt")))
    seconds = btt.cost_at(float(dense.error[-1]))
    text = README.partition(sentence)[2]
    assert f"in {seconds:.0f} s instead of {dense.cost[-1]:.0f} s" in text[:80]
    crossing = {key.structure: c for key, c in comparisons("tf32", metric, "seconds")}["btt"].crossing
    assert crossing is not None
    assert f"{crossing.cost:.0f} s ({metric.replace('_', ' ')})" in README


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

    models = [p.seeds for line in points(mlp_scaling()).values() for p in line]
    assert (len(models), models.count(1), models.count(2)) == (26, 12, 14), "the page says so"
    assert f"the train error varies by {100 * noise('train_error'):.1f} % of its value" in CIFAR
    assert f"the test error by {100 * noise('test_error'):.1f} %" in CIFAR


def test_distance_from_the_published_errors() -> None:
    from generation.cifar import interpolate
    from generation.cifar_comparison import mlp_scaling

    from buttress.lab.analysis import published
    from buttress.lab.analysis.lines import points

    def distances(metric: str, curves: published.Mapping[str, published.Curve]) -> dict[str, list[float]]:
        return {
            key.structure: [p.error - float(interpolate(curves[key.structure], p.macs)) for p in line]
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
