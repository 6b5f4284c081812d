"""Transports: how tasks reach clients. `virtual` simulates them on a clock of its own, `ranked` shares them out."""
