"""Faults of what carries and adds: plans, buckets, codecs, maps that autograd goes through."""

from __future__ import annotations

from tools.mutants.faults import COLLECTIVES, Fault

TESTS = "packages/collectives/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_{file}.py", "-k", words)


FAULTS_OF_PLANS = (
    Fault(
        "an average divides by one rank too few",
        f"{COLLECTIVES}/arithmetic.py",
        "            _divide(first, len(parts))",
        "            _divide(first, max(1, len(parts) - 1))",
        _in("reduce_ops", "averages_divide"),
    ),
    Fault(
        "sums of 16-bit numbers of many ranks grow in 16 bits",
        f"{COLLECTIVES}/arithmetic.py",
        "    return dtype is wide or (is_pair",
        "    return dtype in _HALVES or dtype is wide or (is_pair",
        _in("reduce_ops", "small_terms_of_bfloat16"),
    ),
    Fault(
        "both rings go round the same way",
        f"{COLLECTIVES}/algorithms/ring.py",
        "        owner = (self.place - self.direction * behind) % self.size",
        "        owner = (self.place - behind) % self.size",
        _in("algorithm_results", "all_reduces_equal"),
    ),
    Fault(
        "a rank passes on its own contribution instead of the partial sum",
        f"{COLLECTIVES}/algorithms/ring.py",
        "            payload = first if number == 1 else Payload.PARTIAL",
        "            payload = first",
        _in("algorithm_results", "all_reduces_equal"),
    ),
    Fault(
        "a small scatter gives every rank the first rank's rows",
        f"{COLLECTIVES}/shm/quick.py",
        "skipped = group.rank * self._num_needed * self._dtype.itemsize",
        "skipped = 0 * self._dtype.itemsize",
        _in("shm", "between_three"),
    ),
    Fault(
        "a room in shared memory is written again before all have read it",
        f"{COLLECTIVES}/shm/quick.py",
        "        if user >= 0 and not table.is_over(user):",
        "        if user >= 0 and False:",
        _in("shm", "between_three"),
    ),
    Fault(
        "a slice that begins at an odd place is drawn from the even one before",
        f"{COLLECTIVES}/random/elements.py",
        "pair.view(-1)[indices.start - 2 * first : indices.stop - 2 * first]",
        "pair.view(-1)[: indices.stop - indices.start]",
        _in("random", "slice"),
    ),
    Fault(
        "a range of a range counts from the beginning of the boxes",
        f"{COLLECTIVES}/shard_spec.py",
        "start=self.start + start, stop=self.start + stop)",
        "start=start, stop=stop)",
        _in("shard_spec", "range_of_a_range"),
    ),
    Fault(
        "later boxes lie where the first one does",
        f"{COLLECTIVES}/shard_spec.py",
        "            before += box.numel",
        "            before += 0",
        _in("shard_spec", "kept_range_of_the_boxes"),
    ),
)

FAULTS_OF_MAPS = (
    Fault(
        "terms of the gradient of gathered shards are not added",
        f"{COLLECTIVES}/differentiable.py",
        "gather, functools.partial(sum_own_slice, comm=comm, dim=at))",
        "gather, functools.partial(own_slice, comm=comm, dim=at))",
        _in("differentiable", "those_of_the_placement"),
    ),
    Fault(
        "shards of a later dim are joined element by element in turn",
        f"{COLLECTIVES}/linear_maps.py",
        "    return stacked.view(comm.size, *tensor.shape).movedim(0, dim).reshape(whole)",
        "    return stacked.view(comm.size, *tensor.shape).movedim(0, dim + 1).reshape(whole)",
        _in("differentiable", "those_of_the_placement"),
    ),
    Fault(
        "what comes back of an exchange is that of the rank before",
        f"{COLLECTIVES}/linear_maps.py",
        "    comm.all_to_all(output, tensor.contiguous(), received, sent).wait()\n",
        "    comm.all_to_all(output, tensor.contiguous(), received, sent).wait()\n"
        "    output = output.roll(1, 0)\n",
        _in("differentiable", "all_to_all_sends_rows"),
    ),
    Fault(
        "the gradient of what root shares is root's own term",
        f"{COLLECTIVES}/differentiable.py",
        "source, copy, functools.partial(sum_to_root, comm=comm, root=root))",
        "source, copy, same)",
        _in("differentiable", "broadcast_copies"),
    ),
)

FAULTS_OF_BUCKETS = (
    Fault(
        "a bucket is started before its last gradient has come",
        f"{COLLECTIVES}/buckets/gradients.py",
        "not buckets[self._num_launched].pending:",
        "buckets[self._num_launched].pending < 2:",
        _in("buckets", "gradients_are_those_of_one_process"),
    ),
    Fault(
        "a bucket closes after it has exceeded its bytes",
        f"{COLLECTIVES}/buckets/plan.py",
        "* parameter.itemsize > limit:",
        "* parameter.itemsize > 2 * limit:",
        _in("buckets", "each_gradient_lies"),
    ),
    Fault(
        "every backward is reduced though more are to come",
        f"{COLLECTIVES}/buckets/gradients.py",
        "        if self._is_accumulating or member.has_arrived:",
        "        if member.has_arrived:",
        _in("buckets", "earlier_backward or rebuilding_in_the_middle"),
    ),
    Fault(
        "sums are taken for averages",
        f"{COLLECTIVES}/buckets/gradients.py",
        "bucket.launch(self._op, self._reduce_dtype)",
        "bucket.launch(ReduceOp.SUM, self._reduce_dtype)",
        _in("buckets", "gradients_are_those_of_one_process"),
    ),
    Fault(
        "a gradient that was not there is what the buffer held before",
        f"{COLLECTIVES}/buckets/bucket.py",
        "                member.place.zero_()\n",
        "                pass\n",
        _in("buckets", "counts_as_zero_there"),
    ),
)

FAULTS_OF_CODECS = (
    Fault(
        "blocks have each other's scales",
        f"{COLLECTIVES}/codec/blocks.py",
        "scales[blocks].copy_(_scales(rows, stored))",
        "scales[blocks].copy_(_scales(rows, stored).flip(0))",
        _in("codec", "every_codec_keeps_the_laws"),
    ),
    Fault(
        "integers of a codec are cut off instead of rounded",
        f"{COLLECTIVES}/codec/blocks.py",
        "            quotients.round_()",
        "            quotients.trunc_()",
        _in("codec", "at_most_a_254th"),
    ),
    Fault(
        "what was lost before is lost again",
        f"{COLLECTIVES}/codec/compressed.py",
        "    lost = total - codec.decode(parts, total.shape, total.dtype)",
        "    lost = source - codec.decode(parts, total.shape, total.dtype)",
        _in("compressed", "with_feedback"),
    ),
    Fault(
        "of averages only a rank's share of what the sum lost is made up for",
        f"{COLLECTIVES}/codec/all_reduce.py",
        "            weight = comm.size if op is ReduceOp.AVG else 1",
        "            weight = 1",
        _in("compressed_all_reduce", "with_feedback"),
    ),
)

FAULTS_OF_COLLECTIVES = (
    *FAULTS_OF_PLANS,
    *FAULTS_OF_MAPS,
    *FAULTS_OF_BUCKETS,
    *FAULTS_OF_CODECS,
)
