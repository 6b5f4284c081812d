"""The mathematics of one bilevel problem: problem, oracle, solvers, hypergradient, draws, settings."""
