"""The mathematics of one bilevel problem, and tools that all other packages use.

Mathematics: `problem`, `oracle`, `tree`, `linear`, `hypergradient`, `spectrum`, `submodels`.
Tools: `rng` (keyed draws), `settings`, `schedules`, `checks`, `devices`, `ranks` (several
processes), `codec` (nested values as JSON and tensors), `process` (threads and memory).
"""
