"""Everything that is an experiment."""
