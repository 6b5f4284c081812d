"""Federations of real clients: one package per communication framework."""
