"""What docs/generate.py writes: pages from the code, tables and figures from the records under results/."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
