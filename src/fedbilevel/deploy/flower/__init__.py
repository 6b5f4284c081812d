"""Real federations on Flower: any algorithm, unchanged, with clients that keep their data.

| module | what is in it |
| --- | --- |
| `wire` | what crosses the wire: the messages, how they are encoded, and what is refused |
| `transport` | `flower_federation` and the transport: deadlines, resending, lost tasks |
| `app` | the server process: runs an experiment and writes its run folder |
| `client` | the client: runs phases on its own data |
| `warm_node` | a node that stays up between tasks |
| `deployment` | starts and stops Flower's processes |
| `keys` | certificates and keys for a secure deployment |

It needs the `flower` extra: `pip install 'fedbilevel[flower]'`.
"""

import os

# Flower reads these on import. Neither telemetry nor the update check is on unless the user asks.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("FLWR_DISABLE_UPDATE_CHECK", "1")
