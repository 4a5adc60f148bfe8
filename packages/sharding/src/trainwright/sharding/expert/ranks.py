"""The ranks that the tokens of an expert layer meet on."""

from __future__ import annotations

import attrs

from trainwright.collectives import Communicator
from trainwright.sharding.expert.scratch import Scratch
from trainwright.sharding.mesh import Mesh


@attrs.frozen(eq=False)
class ExpertRanks:
    """The communicators of an expert layer, taken from the two views of a mesh.

    Args:
        ep: Joins the ranks that hold other experts.
        etp: Joins the ranks that hold other parts of the same experts.
        peers: Joins both, etp fastest: the ranks whose tokens meet.
        tp: Joins the ranks with the same sequences and positions, or with other positions under
            sequence parallelism.
        sequence: Joins cp and tp: the ranks that hold the tokens of one sequence.
        cp_size: Ranks that cut a sequence.
        regroups: Whether rows are brought into the order of the experts, so that one kernel can
            multiply them all; otherwise they stay in the order in which they came, by rank.
        scratch: Memory for rows that are on their way, shared by the layers over a mesh.
    """

    ep: Communicator
    etp: Communicator
    peers: Communicator
    tp: Communicator
    sequence: Communicator
    cp_size: int
    regroups: bool
    scratch: Scratch

    @classmethod
    def of(cls, mesh: Mesh) -> ExpertRanks:
        """Return those of this rank, the same for all layers over a mesh."""
        return mesh.shared("experts", lambda: cls._make(mesh))

    @classmethod
    def _make(cls, mesh: Mesh) -> ExpertRanks:
        return cls(
            mesh.communicator("ep"),
            mesh.communicator("etp"),
            mesh.communicator("ep", "etp"),
            mesh.communicator("tp"),
            mesh.communicator("cp", "tp"),
            mesh.size("cp"),
            regroups=mesh.world.device.type != "cpu",
            scratch=Scratch(),
        )
