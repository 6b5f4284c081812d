"""Experiments as TOML files, and the runs that they describe."""
