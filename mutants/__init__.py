"""Mutation tests: `python -m mutants`, or `make mutants`.

A mutation is one plausible mistake in `src/buttress`: a wrong axis, a missing factor, an option that is ignored. The
tests that are named with it run on a copy of the repository that contains the mistake. They must fail; a mutation that
they do not notice survives, and shows what no test protects.

The run fails if more than 5 % of the mutations survive, if one survives without an explanation, or if one is killed
whose explanation says that it cannot be.

Outcomes are kept in `results/mutants.csv`, as long as the file, the mutation and its tests are the same. So a run that
was interrupted resumes, and after a change only what it affects is repeated.
"""
