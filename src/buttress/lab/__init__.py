"""The lab: tasks, models, training runs, sweeps, and the analysis of their records."""
