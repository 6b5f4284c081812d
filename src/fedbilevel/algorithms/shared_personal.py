"""What methods share that keep a whole personal model with every client, beside the common one.

`Result.personal` returns the personal model; of the method's own are only the steps on the two.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NamedTuple

from fedbilevel.core.tree import Tree
from fedbilevel.federation.phase import Message, Number, Phase, Steps


class Local(NamedTuple):
    """A client's copy of the common model, its personal model, and the model it was sent."""

    x: Tree
    y: Tree
    own_x: Tree
    own_y: Tree
    x0: Tree
    y0: Tree


class PersonalModel(Phase):
    """Base of phases that reply with the displacement of the common model and keep a personal one.

    Args:
        lr_x: Step size of the x of the common model.
        lr_y: Step size of its y.
        train: "both", or "y" to leave x where it is.
    """

    name = "train"
    batch = "train"
    remembers = True
    reply: ClassVar = {"dx": "x", "dy": "y"}

    steps: Steps = "local"
    lr_x: Number
    lr_y: Number
    train: Literal["both", "y"]

    def start(self, m: Message) -> Local:
        """Start at the common model, and at the client's own; at first that is the common one."""
        own = m.memory.get("personal", {"x": m.x, "y": m.y})
        return Local(m.x, m.y, own["x"], own["y"], m.x, m.y)

    def finish(self, c: Local) -> dict[str, Any]:
        """Reply with the displacement of the common model; keep the personal one."""
        personal = {"x": c.own_x, "y": c.own_y}
        return {"dx": c.x - c.x0, "dy": c.y - c.y0, "memory": {"personal": personal}}
