"""Real federations on Flower: any method, unchanged, over a SuperLink and nodes that hold their own data.

`server` gives an algorithm its federation, `app` runs an experiment on it, `client` answers, `wire` is what travels
between them, `warm` is a node that stays up, `deployment` starts Flower's processes, `keys` makes what a secure one
needs. Needs the `flower` extra.
"""

import os

# Before anything of Flower's is imported: no telemetry, no look for updates, unless the user wants them.
for _name, _value in (("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1")):
    os.environ.setdefault(_name, _value)
