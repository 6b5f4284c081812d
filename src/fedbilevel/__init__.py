"""Federated bilevel optimization on PyTorch."""
