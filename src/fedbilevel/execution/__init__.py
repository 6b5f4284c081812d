"""Executors: what computes client tasks.

`reference` is the plain loop over tasks and steps, `stacked` the fast executor, `ranked` spreads
tasks over several processes. `memories` holds what clients remember between their tasks, `losses`
evaluates the losses over all clients.
"""
