"""Runs: the loop, what it leaves on disk, and how to read it back."""
