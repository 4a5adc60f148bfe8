"""Silent corruption: every so many steps the weights that ranks have alike are compared."""

from __future__ import annotations

import attrs
import torch

from trainwright.collectives import broadcast_object
from trainwright.integration.parts import Parts
from trainwright.integration.recipe import StepRecord
from trainwright.sharding import Shard, placements_of
from trainwright.stability_guards import HaltError, Verdict, agree, compare_replicas


@attrs.frozen(eq=False)
class ReplicaCheck:
    """Observes the steps and compares replicas after every so many.

    At stage 3 there is nothing to compare: each weight is made whole from parts that one rank has.

    Args:
        parts: whose weights.
        every: steps from one comparison to the next; 0 for none.
    """

    parts: Parts
    every: int

    def __call__(self, record: StepRecord) -> None:
        """Compare if the step is due.

        Raises:
            HaltError: bits differ; on every rank, naming tensor and ranks.

        Communicates: one all-gather of 16 bytes a rank over those that have the same weights, and
            one all-reduce of 8 bytes over the world.
        """
        if self.every and record.step % self.every == 0 and self.parts.config.parallel.zero < 3:
            self.compare(record.step)

    def compare(self, step: int) -> None:
        """Compare now; every rank calls it together."""
        mesh = self.parts.mesh
        problems = []
        for axes, named in self._groups().items():
            ranks = mesh.ranks(*axes)
            for found in compare_replicas(named, mesh.communicator(*axes)):
                odd = ", ".join(str(ranks[rank]) for rank in found.ranks)
                problems.append(f"{found.name} on {'' if found.has_majority else 'one of '}{odd}")
        asked = agree(Verdict.HALT if problems else Verdict.CONTINUE, mesh.world)
        if asked.verdict is Verdict.CONTINUE:
            return
        told = broadcast_object(mesh.world, problems, root=asked.rank)
        raise HaltError(
            f"step {step}: weights that should be alike differ, which is corruption of memory or "
            f"of a message: {'; '.join(told)} (ranks of the world); resume from the last "
            "checkpoint, without that device"
        )

    def _groups(self) -> dict[tuple[str, ...], dict[str, torch.Tensor]]:
        """Return the weights of this rank by the axes along which others have the same."""
        groups: dict[tuple[str, ...], dict[str, torch.Tensor]] = {}
        for number, stage in self.parts.model.stages.items():
            placements = placements_of(stage)
            for name, parameter in stage.named_parameters():
                placement = placements[name]
                cut = [a for a, held in placement.weight.items() if isinstance(held, Shard)]
                axes = tuple(a for a in placement.axes if a != "pp" and a not in cut)
                groups.setdefault(axes, {})[f"{name} of stage {number}"] = parameter.detach()
        return groups
