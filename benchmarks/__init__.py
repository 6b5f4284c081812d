"""Benchmarks as ratios of times that are measured in one run.

Machines differ and are noisy; ratios carry over from one to another.
"""
