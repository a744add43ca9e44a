"""Mistakes in counting and in timing."""

from __future__ import annotations

from mutants.mutation import Mutation

COUNTING = ("tests/costs/test_counting.py", "tests/costs/test_counting_embedding.py")
ADVICE = ("tests/costs/test_advice.py", "tests/costs/test_advice_measuring.py")
TIMES = ("tests/costs/test_layer_times.py",)

MUTATIONS = (
    Mutation(
        "FLOPs counted as MACs",
        "costs/counting.py",
        "(total - self._charged_flops) // 2",
        "(total - self._charged_flops)",
        COUNTING,
    ),
    Mutation(
        "saved parameters counted as activations",
        "costs/counting.py",
        "self._storages = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}",
        "self._storages = set()",
        COUNTING,
    ),
    Mutation(
        "tied parameters counted in each row",
        "costs/counting.py",
        "own = [p for p in module.parameters(recurse=structured) if id(p) not in counted]",
        "own = list(module.parameters(recurse=structured))",
        COUNTING,
    ),
    Mutation(
        "arithmetic after a module charged to it",
        "costs/counting.py",
        "                self.charge()\n                self._running.pop()\n",
        "                self._running.pop()\n                self.charge()\n",
        COUNTING,
    ),
    Mutation(
        "a structure recommended within the noise",
        "costs/advice.py",
        "best.against_dense > max(TOLERANCE, 1 + self.spread)",
        "best.against_dense > TOLERANCE",
        ADVICE,
    ),
    Mutation(
        "the time of a structure is that of nn.Linear",
        "costs/advice.py",
        "return _option(self._timings([structure], d_in, d_out)[0], training=self.training, compiled=True).ms",
        "return self._timings([structure], d_in, d_out)[0].linear_ms(training=self.training, compiled=True)",
        ADVICE,
    ),
    Mutation(
        "a structure's time scaled by dense work",
        "costs/layer_times.py",
        "_stretched(row, layer, moved, work)",
        "_stretched(row, layer, work, work)",
        TIMES,
    ),
    Mutation(
        "times scaled from sizes too far away",
        "costs/layer_times.py",
        "max(distances(r)) <= log2(MAX_SCALING)",
        "max(distances(r)) <= MAX_SCALING",
        TIMES,
    ),
    Mutation(
        "each structure compared with its own time of nn.Linear",
        "costs/layer_times.py",
        "return timings if linear is None else",
        "return timings if True else",
        ("tests/costs/test_advice.py",),
    ),
)
