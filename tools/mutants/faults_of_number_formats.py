"""Faults of scalers, masters, histories of FP8, and what is kept in few bits."""

from __future__ import annotations

from tools.mutants.faults import Fault
from tools.mutants.faults_of_precision import PRECISION

TESTS = "packages/precision/tests"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_{file}.py", "-k", words)


FAULTS_OF_SCALERS = (
    Fault(
        "a restart forgets how many clean steps there were",
        f"{PRECISION}/dynamic_scaling.py",
        '            "_growth_tracker": self._growth_tracker,',
        '            "_growth_tracker": 0,',
        _in("dynamic_scaling", "however_often_a_run_restarts"),
    ),
    Fault(
        "a restart has the whole patience again",
        f"{PRECISION}/dynamic_scaling.py",
        "        self._hysteresis_tracker = left",
        "        self._hysteresis_tracker = settings.hysteresis",
        (f"{TESTS}/test_hysteresis.py",),
    ),
    Fault(
        "every clean step refills the patience",
        f"{PRECISION}/dynamic_scaling.py",
        "        if self._settings.hysteresis_refills:",
        "        if self._settings.hysteresis:",
        (f"{TESTS}/test_hysteresis.py",),
    ),
    Fault(
        "the scale grows one step late",
        f"{PRECISION}/dynamic_scaling.py",
        "        if self._growth_tracker < self._settings.growth_interval:",
        "        if self._growth_tracker <= self._settings.growth_interval:",
        _in("dynamic_scaling", "those_of_torch_grad_scaler"),
    ),
    Fault(
        "a step that does not wait asks no other rank",
        f"{PRECISION}/dynamic_scaling.py",
        "            flags = [self._agree(flags, self._communicator)]",
        "            flags = list(flags)",
        (f"{TESTS}/test_deferred_steps.py",),
    ),
)

FAULTS_OF_MASTERS = (
    Fault(
        "loading the masters leaves the weights of the model",
        f"{PRECISION}/master.py",
        "        self._publish()\n        self._show_state()\n\n    def add",
        "        self._show_state()\n\n    def add",
        _in("master", "loading_the_optimizer_alone"),
    ),
    Fault(
        "a load leaves the masters as they are",
        f"{PRECISION}/master.py",
        "            self._masters[index].copy_(masters[self._names[index]])",
        "            self._masters[index].copy_(self._masters[index])",
        _in("master", "resumed_run or loading_the_optimizer_alone"),
    ),
    Fault(
        "masters begin at the rounded weights though the exact ones are there",
        f"{PRECISION}/master.py",
        "    return original.detach().to(wide)",
        "    return weight.detach().to(wide, copy=True)",
        _in("master", "masters_start_from"),
    ),
    Fault(
        "a weight that was put into the model is rounded over",
        f"{PRECISION}/master.py",
        "            self._comparison.take_over(weight, master)",
        "            assert weight.shape == master.shape",
        _in("master", "swapped_in_the_model or put_into_the_model"),
    ),
    Fault(
        "what rounding loses is not kept",
        f"{PRECISION}/weight_rounding.py",
        "        residual.copy_(lost)",
        "        residual.zero_()",
        _in("rounded_weights", "small_updates"),
    ),
    Fault(
        "weights of all steps are rounded by the same draws",
        f"{PRECISION}/weight_rounding.py",
        "        key = Key(self.seed, spec.name, update)",
        "        key = Key(self.seed, spec.name, 0)",
        _in("rounded_weights", "draw_apart"),
    ),
    Fault(
        "moments of all steps are rounded by the same draws",
        f"{PRECISION}/moments.py",
        "{place.parameter}/{place.moment}/{place.update}/{first}",
        "{place.parameter}/{place.moment}/{first}",
        _in("moments", "mean_over_updates"),
    ),
)

FAULTS_OF_HISTORIES = (
    Fault(
        "a history keeps its oldest entries and forgets the second newest",
        f"{PRECISION}/float8/state.py",
        "        rolled_HT = torch.cat((met_T[None], history_HT[:-1]))",
        "        rolled_HT = torch.cat((met_T[None], history_HT[1:]))",
        _in("float8_state", "looks_back_as_far"),
    ),
    Fault(
        "gradients are scaled for the format of inputs",
        f"{PRECISION}/float8/state.py",
        "recipe.scale_from(largest_T[every], role)",
        "recipe.scale_from(largest_T[every], _ROLES[0])",
        _in("float8_state", "format_of_a_matrix"),
    ),
    Fault(
        "what a discarded step has met enters the history of the next",
        f"{PRECISION}/float8/state.py",
        "            memory.pending = None\n            memory.num_steps = self.num_steps",
        "            memory.num_steps = self.num_steps",
        _in("float8_state", "discarded_leaves_no_trace"),
    ),
    Fault(
        "a step that was not finite enters the history",
        f"{PRECISION}/float8/state.py",
        "        self._history_HT = torch.where(is_finite_T, rolled_HT, history_HT)",
        "        self._history_HT = rolled_HT.nan_to_num(0.0, 0.0)",
        _in("float8_state", "teaches_nothing"),
    ),
    Fault(
        "a history that is loaded has the scales of before",
        f"{PRECISION}/float8/state.py",
        "            memory.scale = scale[name].detach().clone()\n",
        "            pass\n",
        _in("float8_state", "resumed_run_is_bitwise"),
    ),
    Fault(
        "what one rank finds not finite is lost in the maximum",
        f"{PRECISION}/float8/roles.py",
        "amax.nan_to_num(nan=torch.inf, posinf=torch.inf)",
        "amax.nan_to_num(nan=0.0, posinf=torch.inf)",
        _in("float8_parts", "every_rank"),
    ),
)

FAULTS_OF_NUMBER_FORMATS = (*FAULTS_OF_SCALERS, *FAULTS_OF_MASTERS, *FAULTS_OF_HISTORIES)
