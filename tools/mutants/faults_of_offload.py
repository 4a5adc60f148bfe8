"""Faults of states that are kept in host memory or in a file."""

from __future__ import annotations

from tools.mutants.faults import Fault
from tools.mutants.faults_of_data_parallelism import DATA

OFFLOAD = "packages/sharding/src/trainwright/sharding/offload"
TESTS = "packages/sharding/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/{file}.py", "-k", words)


FAULTS_OF_OFFLOAD = (
    Fault(
        "weights that were clipped after the update are published as they were before",
        f"{DATA}/away.py",
        "        if returned is not None and returned[0] == self._version():\n",
        "        if returned is not None:\n",
        _in("test_offload_training", "changes_masters_between"),
    ),
    Fault(
        "gradients that the user replaced are not the ones that count",
        f"{DATA}/away.py",
        "            if kept is not None and kept.data_ptr() == own.data_ptr():\n",
        "            if kept is not None:\n",
        _in("test_offload_training", "somebody_has_replaced"),
    ),
    Fault(
        "of several backwards only the last one's gradients reach the host",
        f"{DATA}/gradients.py",
        "add=self._has_sums",
        "add=False",
        _in("test_offload_training", "moves_that_take_their_time"),
    ),
    Fault(
        "the update begins while gradients are on their way",
        f"{DATA}/gradients.py",
        "        self._arrive()\n        if self._work is not None:\n",
        "        if self._work is not None:\n",
        _in("test_offload_training", "moves_that_take_their_time"),
    ),
    Fault(
        "a unit is updated before its states are read",
        f"{OFFLOAD}/streaming.py",
        "                visit.wait()\n                if reads_ahead",
        "                if reads_ahead",
        _in("test_offload_steps", "states_that_were_loaded"),
    ),
    Fault(
        "memory of a unit is used again while it is written",
        f"{OFFLOAD}/streaming.py",
        "            visit.wait()\n            _leave(visit)\n",
        "            _leave(visit)\n",
        _in("test_offload_steps", "used_again_before"),
    ),
    Fault(
        "updated masters are not written back",
        f"{OFFLOAD}/streaming.py",
        "        visit.works.append(unit.masters.write(visit.masters))\n",
        "",
        _in("test_offload_training", "element_wise_optimizer and file"),
    ),
    Fault(
        "a fourth unit is in memory",
        f"{OFFLOAD}/streaming.py",
        "self._make_room(visits, buffers, 2)",
        "self._make_room(visits, buffers, 3)",
        _in("test_offload_steps", "three_units"),
    ),
    Fault(
        "states that were loaded are overwritten by those in the file",
        f"{OFFLOAD}/states.py",
        "            if not self._is_kept(part, value):\n                here.copy_(value)\n",
        "",
        _in("test_offload_training", "Adagrad and file"),
    ),
    Fault(
        "slots of a file overlap",
        f"{OFFLOAD}/file.py",
        "            self._used += _up(size)\n",
        "            self._used += size // 2\n",
        _in("test_offload_stores", "written_to_a_slot"),
    ),
    Fault(
        "a link that is slow may fill the device with gradients that wait",
        f"{OFFLOAD}/lanes.py",
        "        self._room = threading.Semaphore(depth)\n",
        "        self._room = threading.Semaphore(1000 * depth)\n",
        _in("test_offload_stores", "lets_few_wait"),
    ),
    Fault(
        "gathers begin as their inputs come, in another order on each rank",
        f"{DATA}/away.py",
        "        self.begin_through(self._waiting[-1] if self._waiting else None)\n",
        "",
        _in("test_offload_steps", "order_in_which_they_are_asked"),
    ),
    Fault(
        "an update of whole gradients reads what backwards added, not their sums on the host",
        f"{DATA}/flat.py",
        "        gradient = bucket.gradients.kept[start:stop]",
        "        gradient = bucket.gradients.full[start:stop]",
        _in("test_offload_training", "sums_in_sixteen"),
    ),
    Fault(
        "space is agreed on by all ranks, of which some have more models than others",
        f"{DATA}/away.py",
        "    agree(mesh.communicator(*STAGE_AXES), problem, OffloadError)",
        "    agree(mesh.world, problem, OffloadError)",
        ("tests/test_offload.py", "-k", "changes_no_bit and tied"),
    ),
    Fault(
        "a file's third unit is not counted",
        "packages/sharding/src/trainwright/sharding/memory/away.py",
        "_UNITS_AT_ONCE = 3",
        "_UNITS_AT_ONCE = 2",
        _in("test_memory", "three_units"),
    ),
    Fault(
        "offloaded gradients are counted on the device",
        "packages/sharding/src/trainwright/sharding/memory/states.py",
        "        if self.is_lent and self.away is not None:\n            return 0\n",
        "",
        _in("test_memory", "states_that_are_away"),
    ),
    Fault(
        "selective recomputation is priced as full",
        "packages/sharding/src/trainwright/sharding/memory/kept_bytes.py",
        "block.products * self.keeps_products",
        "0",
        ("tests/test_memory_model.py", "-m", "long or not long", "-k", "selective and pp"),
    ),
)
