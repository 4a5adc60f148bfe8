"""Faults of saving, loading and computing again."""

from __future__ import annotations

from tools.mutants.faults import ACTIVATIONS, Fault

STATE = "packages/checkpointing/src/trainwright/checkpointing/state"
TESTS = "packages/checkpointing/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_{file}.py", "-k", words)


FAULTS_OF_STATE = (
    Fault(
        "the last run of elements that a shard shares with a piece is not read",
        f"{STATE}/filling.py",
        "piece.spec.overlap(want.leaf.spec), into)",
        "piece.spec.overlap(want.leaf.spec)[: -1 or None], into)",
        _in("layouts", "any_layout_loads"),
    ),
    Fault(
        "elements of a piece are written one further",
        f"{STATE}/piece_file.py",
        "                write_at += count",
        "                write_at += count - 1",
        _in("layouts", "one_process_loads or reads_only_the_blocks"),
    ),
    Fault(
        "a block that is not what was written is believed",
        f"{STATE}/piece_file.py",
        "        if found != expected:",
        "        if found != expected and number < 0:",
        _in("damage", "no_flipped_bit or damaged_block"),
    ),
    Fault(
        "files are renamed before they are on the disk",
        f"{STATE}/tensor_file.py",
        "        writer.sync()\n",
        "        pass\n",
        _in("crashes", "crash_after_any_operation"),
    ),
    Fault(
        "the folder is renamed before its names are on the disk",
        f"{STATE}/saving.py",
        "        files.sync_folder(temporary)\n",
        "        pass\n",
        _in("crashes", "crash_after_any_operation"),
    ),
    Fault(
        "a save returns before its new name is on the disk",
        f"{STATE}/saving.py",
        "        files.sync_folder(self._place.root)\n",
        "        pass\n",
        _in("crashes", "crash_after_any_operation or files_of_a_synchronous"),
    ),
    Fault(
        "a save in the background writes what training makes of the weights meanwhile",
        f"{STATE}/snapshot.py",
        "                kept = self._fill(path, tensor.detach())",
        "                kept = tensor.detach().reshape(-1)",
        _in("asynchronous", "nothing_that_changes"),
    ),
    Fault(
        "tensors of equal size share the memory of their copies",
        f"{STATE}/snapshot.py",
        "        buffer = self._buffers.get(path)",
        "        buffer = next(iter(self.used.values()), self._buffers.get(path))",
        _in("asynchronous", "files_of_a_synchronous or keep_their_own"),
    ),
    Fault(
        "one checkpoint fewer stays",
        f"{STATE}/retention.py",
        "saved[: -retention.last] if",
        "saved[: 1 - retention.last or None] if",
        _in("retention", "every_nth or whatever_the_limit"),
    ),
    Fault(
        "replicas that differ are saved as if they were equal",
        f"{STATE}/planning.py",
        "            if theirs.get(path) != replicas.get(path)",
        "            if (path in theirs) != (path in replicas)",
        _in("layouts", "what_differs_between_ranks"),
    ),
    Fault(
        "a checkpoint with a file cut short is the newest",
        f"{STATE}/opening.py",
        "        if find_damage(files, saved) is None:",
        "        if saved is not None:",
        _in("damage", "shortened_file"),
    ),
    Fault(
        "two values are loaded into one memory",
        f"{STATE}/filling.py",
        "            _check_same(want, host)",
        "            target.detach().copy_(host)",
        _in("aliases", "two_different_values"),
    ),
)

FAULTS_OF_RECOMPUTATION = (
    Fault(
        "what is computed again draws other numbers",
        f"{ACTIVATIONS}/randomness.py",
        "            source.write(before)\n",
        "            pass\n",
        _in("recompute", "dropout_of_the_global"),
    ),
    Fault(
        "computing again leaves the generator where it ended",
        f"{ACTIVATIONS}/randomness.py",
        "                source.write(state)\n",
        "                pass\n",
        _in("recompute", "dropout_of_the_global"),
    ),
    Fault(
        "statistics are updated by what is computed again as well",
        f"{ACTIVATIONS}/buffers.py",
        "                owner._buffers[name] = tensor\n",
        "                pass\n",
        _in("replay", "buffers_are_updated_once"),
    ),
    Fault(
        "what is computed again sees the statistics of now",
        f"{ACTIVATIONS}/buffers.py",
        "            each.owner._buffers[each.name] = each.before.clone()",
        "            each.owner._buffers[each.name] = each.tensor.clone()",
        _in("replay", "buffers_are_updated_once"),
    ),
    Fault(
        "what is computed again is not under the modes of the forward",
        f"{ACTIVATIONS}/ambient.py",
        "            if not any(mode is other for other in active):",
        "            if any(mode is other for other in active):",
        _in("recompute", "function_modes"),
    ),
    Fault(
        "products of what is computed again have the precision of now",
        f"{ACTIVATIONS}/ambient.py",
        "        _set_numerics(wanted)\n",
        "        _set_numerics(now)\n",
        _in("recompute", "flags_that_change"),
    ),
)

FAULTS_OF_CHECKPOINTS = (*FAULTS_OF_STATE, *FAULTS_OF_RECOMPUTATION)
