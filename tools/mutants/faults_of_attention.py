"""Faults of attention over ranks: masks, what is merged, who has which positions."""

from __future__ import annotations

from tools.mutants.faults import Fault
from tools.mutants.faults_of_context_and_experts import CONTEXT

TESTS = "packages/sharding/tests"
RING = (f"{TESTS}/test_context_ring.py", "-k", "test_ring_attention_is")
PLAN = (f"{TESTS}/test_context_ring.py", "-k", "each_pair_is_computed_once")
LAYOUT = (f"{TESTS}/test_context_layout.py", "-k")

FAULTS_OF_ATTENTION = (
    Fault(
        "a query sees the key after its own",
        f"{CONTEXT}/spans.py",
        "    if not causal or asked.end <= asking.position + 1:",
        "    if not causal or asked.end <= asking.position + 2:",
        PLAN,
    ),
    Fault(
        "keys before all queries of a segment are not seen",
        f"{CONTEXT}/spans.py",
        "        found.append(Span(whole.queries, (asked.start, first_key)))",
        "        pass",
        (f"{TESTS}/test_context_ring.py", "-k", "gathered_keys or a_grid"),
    ),
    Fault(
        "the last key of each piece that goes round is seen by nobody",
        f"{CONTEXT}/spans.py",
        "    start, stop = max(span.keys[0], first), min(span.keys[1], last)",
        "    start, stop = max(span.keys[0], first), min(span.keys[1], last - 1)",
        PLAN,
    ),
    Fault(
        "a block counts by the share of the others",
        f"{CONTEXT}/merging.py",
        "torch.sigmoid(lse - so_far)",
        "torch.sigmoid(so_far - lse)",
        RING,
    ),
    Fault(
        "the log-sum-exp of blocks is the largest of theirs",
        f"{CONTEXT}/merging.py",
        "            torch.logaddexp(so_far, lse, out=so_far)",
        "            torch.maximum(so_far, lse, out=so_far)",
        RING,
    ),
    Fault(
        "queries keep the gradient of the last block alone",
        f"{CONTEXT}/merging.py",
        "        total[at].add_(found)",
        "        total[at].copy_(found)",
        RING,
    ),
    Fault(
        "early and late chunks of a rank do not balance",
        f"{CONTEXT}/layout.py",
        "(*chunks[rank], *chunks[-1 - rank])",
        "(*chunks[rank], *chunks[size + rank])",
        (f"{TESTS}/test_context_ring.py", "-k", "equal_causal_work"),
    ),
    Fault(
        "a document in two runs begins anew in the second",
        f"{CONTEXT}/documents.py",
        "            before = seen.get(run.document, 0)",
        "            before = 0",
        (*LAYOUT, "documents"),
    ),
    Fault(
        "padding is a document like others",
        f"{CONTEXT}/documents.py",
        "for start, stop, number in runs if number >= 0)",
        "for start, stop, number in runs)",
        (*LAYOUT, "documents"),
    ),
    Fault(
        "sequences of a micro-batch have the documents of the first ones",
        f"{CONTEXT}/documents.py",
        "self.rows[start:stop])",
        "self.rows[: stop - start])",
        (f"{TESTS}/test_context_ring.py", "-k", "microbatches_have"),
    ),
)
