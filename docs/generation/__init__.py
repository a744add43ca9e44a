"""What docs/generate.py writes: pages from the code, tables and figures from the records under results/."""
