"""Who keeps parameters and who computes gradients, among the ranks of a parameter server."""

from __future__ import annotations

import attrs

from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.plan import chunk_bounds
from trainwright.collectives.errors import UsageError


@attrs.frozen
class ServerRoles:
    """Which ranks of ``size`` are servers, the first ``num_servers``, and which are workers.

    Raises:
        UsageError: There would be no server or no worker.
    """

    size: int
    num_servers: int = 1

    def __attrs_post_init__(self) -> None:
        """Refuse worlds without a server or a worker."""
        if not 1 <= self.num_servers < self.size:
            raise UsageError(
                f"ServerRoles: num_servers={self.num_servers} of size={self.size} ranks leaves no "
                "server or no worker; there must be at least one of each"
            )

    @property
    def servers(self) -> range:
        """The ranks that keep parameters."""
        return range(self.num_servers)

    @property
    def workers(self) -> range:
        """The ranks that compute gradients."""
        return range(self.num_servers, self.size)

    def bounds(self, numel: int) -> tuple[int, ...]:
        """Return the ends of the servers' chunks of ``numel`` elements.

        Raises:
            UsageError: There are fewer elements than servers.
        """
        if numel < self.num_servers:
            raise UsageError(
                f"ServerRoles: {numel} elements cannot be cut over num_servers={self.num_servers}; "
                "use fewer servers"
            )
        return chunk_bounds(numel, self.num_servers)

    def check(self, what: str, comm: Passage, role: range, other: str) -> None:
        """Refuse a rank that has the other role, and roles of another world.

        Raises:
            UsageError: ``comm`` has another size, or its rank is not in ``role``.
        """
        if comm.size != self.size:
            raise UsageError(
                f"{what}: the roles are those of {self.size} ranks, this communicator has "
                f"{comm.size}; make them with ServerRoles(comm.size, ...)"
            )
        if comm.rank not in role:
            raise UsageError(
                f"{what}: rank {comm.rank} is none of ranks {role.start}..{role.stop - 1}; make a "
                f"{other} there"
            )
