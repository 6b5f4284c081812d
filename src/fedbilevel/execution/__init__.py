"""Executors: what computes the tasks of clients. `reference` is the plain loop, `stacked` the fast one."""
