"""Faults in optimizers: what they are shown of a matrix, what they keep, what goes on with it."""

from __future__ import annotations

from tools.mutants.faults import INTEGRATION, Fault

DATA = "packages/sharding/src/trainwright/sharding/data"
OPTIMIZERS = f"{INTEGRATION}/optimizers"
IN_A_LAYOUT = "updates_in_a_layout"


def _law(name: str) -> tuple[str, ...]:
    return ("tests/test_optimizer_law.py", "-k", f"{IN_A_LAYOUT} and {name}")


def _states(words: str) -> tuple[str, ...]:
    return ("tests/test_optimizer_states.py", "-k", words)


FAULTS_OF_OPTIMIZERS = (
    Fault(
        "Adafactor sums the rows of what a rank keeps of a matrix",
        f"{OPTIMIZERS}/named.py",
        "    return whole_parameters(torch.optim.Adafactor)",
        "    return element_wise(torch.optim.Adafactor)",
        _law("adafactor"),
    ),
    Fault(
        "Muon has the embedding and the head as well",
        f"{OPTIMIZERS}/plans.py",
        "    return spec.name.startswith(BLOCKS) and len(spec.global_shape) > 1",
        "    return len(spec.global_shape) > 1",
        _law("muon"),
    ),
    Fault(
        "an owner takes weights for gradients",
        f"{DATA}/matrix_exchange.py",
        "                for whole in (gradients[label], weights[label]):",
        "                for whole in (weights[label], gradients[label]):",
        _law("adafactor"),
    ),
    Fault(
        "the parts of a matrix lie in a stack as if it were the first",
        f"{DATA}/matrix_parts.py",
        "        first = at + _before(box, common.start[:num_lead])",
        "        first = at + _before(box, box.start[:num_lead])",
        _law("muon"),
    ),
    Fault(
        "Lion keeps as much of its momentum as it signs",
        f"{OPTIMIZERS}/lion.py",
        "        torch._foreach_mul_(momenta, kept)",
        "        torch._foreach_mul_(momenta, signed)",
        _law("lion"),
    ),
    Fault(
        "a resumed optimizer counts its updates from one too few",
        f"{OPTIMIZERS}/states.py",
        "                _set_clock(each.values, self._updates)",
        "                _set_clock(each.values, self._updates - 1)",
        _states("another_layout_and_stage"),
    ),
    Fault(
        "numbers that an optimizer keeps begin anew after a resume",
        f"{OPTIMIZERS}/states.py",
        "                _take_number(each, leaf)",
        "                pass",
        _states("bit_for_bit"),
    ),
    Fault(
        "a snapshot of the beginning leaves what was kept since",
        f"{OPTIMIZERS}/states.py",
        "            del now[key]",
        "            pass",
        _states("from_memory or put_back"),
    ),
)
