"""Experiments: TOML files that describe runs, how they are read, and how a run is set up."""
