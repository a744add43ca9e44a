"""Mistakes in what claims rest on: comparisons, fits, verdicts, sweeps and packed images."""

from __future__ import annotations

from mutants.mutation import Mutation

FRONTIER = ("tests/lab/analysis/test_frontier.py",)
COMPARISON = ("tests/lab/analysis/test_comparison.py",)
VERDICT = ("tests/lab/analysis/test_verdict.py",)
SATURATING = ("tests/lab/analysis/test_saturating.py",)
LINES = ("tests/lab/analysis/test_lines.py",)
INTERLEAVED = ("tests/lab/sweeps/test_interleaved.py",)
PACKED = ("tests/lab/data/test_packed.py",)

MUTATIONS = (
    Mutation(
        "of equal costs the worse model is kept",
        "lab/analysis/frontier.py",
        "order = np.lexsort((error, cost))",
        "order = np.lexsort((-error, cost))",
        FRONTIER,
    ),
    Mutation(
        "a frontier falls beyond its last model",
        "lab/analysis/frontier.py",
        "np.interp(np.log(costs), np.log(self.cost), np.log(self.error))",
        "np.interp(np.log(costs), np.log(self.cost), np.log(self.error), right=np.log(self.error[-1] / 2))",
        FRONTIER,
    ),
    Mutation(
        "a budget below the first model buys it",
        "lab/analysis/frontier.py",
        "np.where(costs < self.cost[0], np.inf, errors)",
        "errors",
        FRONTIER,
    ),
    Mutation(
        "interpolation in costs instead of their logarithms",
        "lab/analysis/frontier.py",
        "np.interp(np.log(costs), np.log(self.cost), np.log(self.error))",
        "np.interp(costs, self.cost, np.log(self.error))",
        FRONTIER,
    ),
    Mutation(
        "a crossing in the middle of its interval",
        "lab/analysis/frontier.py",
        "share = gaps[i - 1] / (gaps[i - 1] - gap)",
        "share = 0.5",
        FRONTIER,
    ),
    Mutation(
        "the mean weighs costs instead of their logarithms",
        "lab/analysis/frontier.py",
        "    u = np.log(x)\n",
        "    u = np.asarray(x, dtype=np.float64)\n",
        FRONTIER,
    ),
    Mutation(
        "the noise of two seeds with two degrees of freedom",
        "lab/analysis/point.py",
        "degrees = sum(len(values) - 1 for values in logs)",
        "degrees = sum(len(values) for values in logs)",
        COMPARISON,
    ),
    Mutation(
        "the noise of a mean does not shrink with seeds",
        "lab/analysis/comparison.py",
        "noise / np.sqrt([p.seeds for p in models])",
        "noise * np.ones(len(models))",
        COMPARISON,
    ),
    Mutation(
        "samples that do not cross are dropped",
        "lab/analysis/comparison.py",
        "            crossed.append(math.inf)  # not within the costs that both lines span\n",
        "            continue\n",
        COMPARISON,
    ),
    Mutation(
        "the interval of a crossing holds half of the samples",
        "lab/analysis/comparison.py",
        "[0.025, 0.975]",
        "[0.25, 0.75]",
        COMPARISON,
    ),
    Mutation(
        "crossings beyond the last model count",
        "lab/analysis/comparison.py",
        "crossed = [x for x in crossings(*pair) if start <= x <= end]",
        "crossed = crossings(*pair)",
        COMPARISON,
    ),
    Mutation(
        "ratios the other way around",
        "lab/analysis/comparison.py",
        "a.errors_at(ends) / b.errors_at(ends)",
        "b.errors_at(ends) / a.errors_at(ends)",
        COMPARISON,
    ),
    Mutation(
        "the trend of the base relative to the line",
        "lab/analysis/comparison.py",
        "np.log(first.errors_at(costs) / second.errors_at(costs))",
        "np.log(second.errors_at(costs) / first.errors_at(costs))",
        COMPARISON,
    ),
    Mutation(
        "the largest difference named as the smallest",
        "lab/analysis/comparison.py",
        "return min(differences), max(differences)",
        "return max(differences), min(differences)",
        COMPARISON,
    ),
    Mutation(
        "the line that is worst at equal MACs leads",
        "lab/analysis/verdict.py",
        "return sum((ratio or 0) > 0 for ratio in ratios.values()), ratios.get(BASELINE) or 0.0",
        "return sum((ratio or 0) < 0 for ratio in ratios.values()), ratios.get(BASELINE) or 0.0",
        VERDICT,
    ),
    Mutation(
        "a crossing reported where the structure ends behind",
        "lab/analysis/verdict.py",
        "if last.difference >= 0:",
        "if last.difference >= 0 and crossing is None:",
        VERDICT,
    ),
    Mutation(
        "unknown noise passed over in silence",
        "lab/analysis/verdict.py",
        "if max(seeds) == 1:",
        "if max(seeds) == 0:",
        VERDICT,
    ),
    Mutation(
        "times of runs that shared a GPU count",
        "lab/analysis/lines.py",
        "for r in seeds if alone(r) and (seconds",
        "for r in seeds if (seconds",
        LINES,
    ),
    Mutation(
        "training time without the number of steps",
        "lab/analysis/lines.py",
        "return record.run.steps * milliseconds / 1e3 if milliseconds > 0 else None",
        "return milliseconds / 1e3 if milliseconds > 0 else None",
        LINES,
    ),
    Mutation(
        "times of old versions count",
        "lab/analysis/lines.py",
        "return [seconds for version, seconds in timed if version == newest]",
        "return [seconds for version, seconds in timed]",
        LINES,
    ),
    Mutation(
        "a repeated record counts as a seed",
        "lab/analysis/lines.py",
        'done = {r.run: r for r in records if r.status == "done"}.values()',
        'done = [r for r in records if r.status == "done"]',
        LINES,
    ),
    Mutation(
        "times of all devices in one mean",
        "lab/analysis/lines.py",
        "_newest_times(r for r in best if _device(r) == device)",
        "_newest_times(best)",
        LINES,
    ),
    Mutation(
        "a common floor is fitted to each line",
        "lab/analysis/saturating.py",
        'return 1 if self.shared == "floor" else self.count',
        "return self.count",
        SATURATING,
    ),
    Mutation(
        "a law without a floor",
        "lab/analysis/saturating.py",
        "np.log(floor + np.exp(",
        "np.log(0 * floor + np.exp(",
        SATURATING,
    ),
    Mutation(
        "the scatter divided by points instead of degrees",
        "lab/analysis/saturating.py",
        "math.sqrt(2 * best.cost / degrees)",
        "math.sqrt(best.cost / degrees)",
        SATURATING,
    ),
    Mutation(
        "interleaved runs one after the other",
        "lab/sweeps/interleaved.py",
        "while len(turns) < at_once and",
        "while len(turns) < 1 and",
        INTERLEAVED,
    ),
    Mutation(
        "a run that another process trains is dropped",
        "lab/sweeps/interleaved.py",
        "            queue.put_back(self.run)\n",
        "            pass\n",
        INTERLEAVED,
    ),
    Mutation(
        "shared runs recorded as alone",
        "lab/sweeps/interleaved.py",
        "steps = job.training(run, store, at_once,",
        "steps = job.training(run, store, 1,",
        INTERLEAVED,
    ),
    Mutation(
        "pixels of shards not verified",
        "lab/data/packed.py",
        "if len(pixels) != shard.images or digest(pixels) != shard.pixels:",
        "if len(pixels) != shard.images:",
        PACKED,
    ),
    Mutation(
        "labels not verified",
        "lab/data/packed.py",
        "if digest(labels[name]) != split.labels:",
        "if False:",
        PACKED,
    ),
    Mutation(
        "tiles read column by column",
        "lab/data/packed.py",
        "transpose(0, 2, 1, 3, 4)",
        "transpose(2, 0, 1, 3, 4)",
        PACKED,
    ),
)
