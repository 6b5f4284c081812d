"""Real federations on Flower: any method, unchanged, over a SuperLink and nodes that hold their own data.

`server` gives an algorithm its federation, `app` runs an experiment on it, `client` answers, `wire` is what travels
between them, `warm` is a node that stays up, `deployment` starts Flower's processes, `keys` makes what a secure one
needs. Needs the `flower` extra.
"""
