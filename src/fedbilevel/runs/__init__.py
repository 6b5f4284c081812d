"""Experiments on disk: configs, run folders, checkpoints."""
