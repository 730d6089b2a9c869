"""Measuring: prompts, one timed generation, the paired comparison, and the results file they fill."""
