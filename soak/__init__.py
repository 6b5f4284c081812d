"""Attacks on the whole library with random, seeded trials: kills, faults, damage, hostile input.

`python -m soak` runs all of them for some minutes; `python -m soak --attack kills --count 500` runs
one of them. An attack is a function of a `Trial`: it draws everything from the trial's generator,
works in the trial's folder, and either returns what came out, or raises, which is a bad outcome. A
bad outcome is printed with the command that repeats it.

The helpers of the tests are used here too (`tests/support`), and `tests/soak` runs every attack for
a few seconds.
"""
