"""Faults of sequence parallelism and of dropout by place: who has which positions."""

from __future__ import annotations

from tools.mutants.faults import TENSOR, Fault
from tools.mutants.faults_of_tensor_parallelism import IN_SEQUENCE, TESTS

POSITIONS = (f"{TESTS}/tensor/test_sequence_parallel.py", "-k", "sequences_of_any_length")
DROPOUT = (f"{TESTS}/tensor/test_dropout.py", "-k")

FAULTS_OF_SEQUENCE_PARALLELISM = (
    Fault(
        "the ranks' terms of positions are not added",
        f"{TENSOR}/sequence.py",
        "        return differentiable.partial_to_shard(terms, tp, sequence.dim)",
        "        return differentiable.replicate_to_shard(terms, tp, sequence.dim)",
        POSITIONS,
    ),
    Fault(
        "the ranks' terms of positions are not added where ranks have unequally many",
        f"{TENSOR}/sequence.py",
        "    return sum_part(terms, tp, Cut.uneven(length, tp.size), sequence.dim)",
        "    return take_part(terms, tp, Cut.uneven(length, tp.size), sequence.dim)",
        POSITIONS,
    ),
    Fault(
        "positions are gathered again in the order of ranks turned round",
        f"{TENSOR}/pending.py",
        "stacked.view(comm.size, *padded.shape).movedim(0, dim)",
        "stacked.view(comm.size, *padded.shape).flip(0).movedim(0, dim)",
        IN_SEQUENCE,
    ),
    Fault(
        "of padded parts the last positions are kept",
        f"{TENSOR}/parts.py",
        "slot.narrow(dim, 0, n) for slot, n",
        "slot.narrow(dim, largest - n, n) for slot, n",
        POSITIONS,
    ),
    Fault(
        "what was gathered for one backward serves the next",
        f"{TENSOR}/sequence.py",
        "            self._served = 0\n            self._whole = None",
        "            self._served = 0",
        (*POSITIONS[:2], "share_an_entrance"),
    ),
    Fault(
        "a frozen product is waited for before what was gathered is let go",
        f"{TENSOR}/products.py",
        "        if weight.requires_grad:\n            entrance",
        "        if True:\n            entrance",
        (f"{TESTS}/tensor/test_frozen_columns.py",),
    ),
    Fault(
        "what was changed in place since is gathered as it was before",
        f"{TENSOR}/sequence.py",
        "found if found.versions == (found.part._version, whole._version) else None",
        "found",
        (*POSITIONS[:2], "changed_in_place"),
    ),
    Fault(
        "tensor ranks drop the same places of the different parts that they hold",
        f"{TENSOR}/dropout.py",
        "        return self.rank * local, self.ranks * local",
        "        return 0, self.ranks * local",
        (*DROPOUT, "ranks_hold_the_same"),
    ),
    Fault(
        "tensor ranks that hold the same activations draw masks of their own",
        f"{TENSOR}/building.py",
        "PlacedDropout(each.module.p, style.seed, each.name",
        "PlacedDropout(each.module.p, style.seed + setting.tp.rank, each.name",
        (f"{TESTS}/tensor/test_parallelize.py", "-k", "dropout_drops"),
    ),
    Fault(
        "every micro-batch drops what the first one drops",
        f"{TENSOR}/dropout.py",
        "        first[0] += self.place.first_sample\n",
        "",
        (*DROPOUT, "micro_batch"),
    ),
)
