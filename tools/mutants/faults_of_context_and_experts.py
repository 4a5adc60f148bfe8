"""Faults of sequences cut over ranks, of experts, and of runs that go back."""

from __future__ import annotations

from tools.mutants.faults import INTEGRATION, ONE_STEP, Fault

CONTEXT = "packages/sharding/src/trainwright/sharding/context"
EXPERT = "packages/sharding/src/trainwright/sharding/expert"
GUARDS = "packages/stability-guards/src/trainwright/stability_guards"

IN_RING = ("tests/test_law.py", "-k", f"{ONE_STEP} and cp2-tp2-pp2")
IN_EXPERTS = ("tests/test_law.py", "-k", f"{ONE_STEP} and (ep4 or ep2)")
EVALUATED = ("tests/test_evaluation.py",)
RECOVERED = ("tests/test_recovery.py",)

FAULTS_OF_CONTEXT_AND_EXPERTS = (
    Fault(
        "rotary positions count from zero on every context rank",
        f"{INTEGRATION}/feed.py",
        "        self._positions_S = part.positions()\n",
        "        self._positions_S = part.positions() * 0 + torch.arange(part.length)\n",
        IN_RING,
    ),
    Fault(
        "labels are cut contiguously and tokens in zigzag",
        f"{INTEGRATION}/feed.py",
        "            labels_MBS=self._part.take(whole.labels_MBS),\n",
        "            labels_MBS=whole.labels_MBS[..., : self._part.length],\n",
        IN_RING,
    ),
    Fault(
        "keys that came round are not seen in the backward",
        f"{CONTEXT}/ring.py",
        "        for step in others:\n",
        "        for step in others[:0]:\n",
        IN_RING,
    ),
    Fault(
        "held-out sequences are not cut over context ranks",
        f"{INTEGRATION}/evaluation.py",
        "part.take(tokens), part.take(labels), part.positions()",
        "tokens, labels, part.positions()",
        EVALUATED,
    ),
    Fault(
        "every tensor-parallel rank's draw of a token is added up",
        f"{INTEGRATION}/generation.py",
        'parts.counts_tokens > 0 and mesh.coordinate("tp") == 0',
        "parts.counts_tokens > 0",
        ("tests/test_generation.py",),
    ),
    Fault(
        "the balance loss counts the choices of this rank's part of a sequence alone",
        f"{EXPERT}/statistics.py",
        "work = sequence.all_reduce(table_GX) if sequence.size > 1 else None",
        "work = sequence.all_reduce(table_GX.clone()) if sequence.size > 1 else None",
        IN_EXPERTS,
    ),
    Fault(
        "auxiliary losses never reach the router",
        f"{INTEGRATION}/model/decoder.py",
        '        return StageOutput(hidden_BSD, {"experts": losses})\n',
        "        return hidden_BSD\n",
        IN_EXPERTS,
    ),
    Fault(
        "the router's gradient is not summed over tensor-parallel ranks",
        f"{EXPERT}/router.py",
        '        gradient = {"tp": Partial()} if self.tp.size > 1 else {}\n',
        "        gradient = {}\n",
        IN_EXPERTS,
    ),
    Fault(
        "the gradient of experts is summed over all data ranks",
        f"{EXPERT}/experts.py",
        '                {"ep": Shard(0), "etp": Shard(1)},\n',
        "                {},\n",
        IN_EXPERTS,
    ),
    Fault(
        "what is left out is read again after going back",
        f"{GUARDS}/recovery.py",
        "        self._source.seek(entry.position, self.left_out)\n",
        "        self._source.seek(entry.position, self._exclude)\n",
        RECOVERED,
    ),
    Fault(
        "going back leaves the moments as they are",
        f"{INTEGRATION}/optimizers/states.py",
        "                now[key].copy_(value)\n",
        "                now[key] = now[key]\n",
        RECOVERED,
    ),
    Fault(
        "the learning rate follows steps, not applied updates, after going back",
        f"{INTEGRATION}/live_state.py",
        "            setattr(self.progress, name, value)\n",
        '            setattr(self.progress, name, value + (name == "updates"))\n',
        RECOVERED,
    ),
    Fault(
        "replicas are compared with nobody",
        f"{INTEGRATION}/replica_check.py",
        'axes = tuple(a for a in placement.axes if a != "pp" and a not in cut)',
        'axes = ("tp",)',
        RECOVERED,
    ),
    Fault(
        "a run resumes from a checkpoint that a rollback has taken back",
        f"{INTEGRATION}/training_state.py",
        "                check_not_abandoned(guards, parts.journal.entries)\n",
        "                pass\n",
        RECOVERED,
    ),
)
