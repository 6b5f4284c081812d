"""Ratios of things measured in one run: machines are noisy, ratios carry over."""
