"""Benchmarks: contenders for the same work, timed in turns, as ratios."""
