"""A method without a barrier, for tests of the virtual clock."""

from fedbilevel.algorithms.simfbo import SimFBO, State
from fedbilevel.federation import Federation


class Async(SimFBO):
    """SimFBO on the next two arrivals; clients that have replied are sent the newest x, y, z."""

    def iterate(self, s: State, fed: Federation) -> State:
        descend = self.descend()
        if fed.iteration == 0:
            fed.post(descend, range(len(fed)), x=s.x, y=s.y, z=s.z)
        replies = fed.collect(2)
        x = s.x - 0.01 * replies.mean("qx")
        y = s.y - 0.1 * replies.mean("qy")
        z = s.z - 0.1 * replies.mean("qz")
        # Two messages in one iteration: their tasks have equal phases and can be stacked.
        half = len(replies.idle) // 2
        fed.post(descend, replies.idle[:half], x=x, y=y, z=z)
        fed.post(descend, replies.idle[half:], x=x, y=y, z=z)
        return State(x, y, z)
