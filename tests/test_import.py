"""Importing buttress is cheap, and imports no optional library."""

from __future__ import annotations

import subprocess
import sys

IMPORT = """
import gc, sys, time
import torch, numpy
gc.disable()  # a collection that is due after torch's own import is not ours
before = {name.partition(".")[0] for name in sys.modules}
start = time.process_time()  # other programs on the machine do not count
import buttress
took = time.process_time() - start
after = {name.partition(".")[0] for name in sys.modules}
print(took)
print(*sorted(after - before - set(sys.stdlib_module_names)))
print(*sorted(after))
"""


def test_import_is_cheap_and_brings_nothing_along():
    times = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True, timeout=60)
        took, new, everything = done.stdout.splitlines()
        times.append(float(took))
        assert new.split() == ["buttress"]
        assert not {"transformers", "timm", "matplotlib", "scipy", "sklearn", "triton"} & set(everything.split())
    assert min(times) < 0.3
