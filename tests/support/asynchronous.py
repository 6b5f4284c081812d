"""A method without a barrier, for tests of the clock."""

from fedbilevel.algorithms.simfbo import SimFBO, State
from fedbilevel.federation import Federation


class Async(SimFBO):
    """SimFBO on the next two arrivals; who has answered is sent the newest x, y and z."""

    def iterate(self, s: State, fed: Federation) -> State:
        descend = self.descend()
        if fed.iteration == 0:
            fed.post(descend, range(len(fed)), x=s.x, y=s.y, z=s.z)
        r = fed.collect(2)
        x, y, z = s.x - 0.01 * r.mean("qx"), s.y - 0.1 * r.mean("qy"), s.z - 0.1 * r.mean("qz")
        # Two messages of one iteration have equal phases, also after a restart.
        half = len(r.idle) // 2
        fed.post(descend, r.idle[:half], x=x, y=y, z=z)
        fed.post(descend, r.idle[half:], x=x, y=y, z=z)
        return State(x, y, z)
