"""All planted faults, by kind."""

from __future__ import annotations

from tools.mutants.faults import FAULTS_OF_THE_WHOLE
from tools.mutants.faults_of_context_and_experts import FAULTS_OF_CONTEXT_AND_EXPERTS
from tools.mutants.faults_of_data_parallelism import FAULTS_OF_DATA_PARALLELISM
from tools.mutants.faults_of_float8 import FAULTS_OF_FLOAT8
from tools.mutants.faults_of_guards import FAULTS_OF_GUARDS
from tools.mutants.faults_of_optimizers import FAULTS_OF_OPTIMIZERS
from tools.mutants.faults_of_precision import FAULTS_OF_PRECISION
from tools.mutants.faults_of_schedules import FAULTS_OF_SCHEDULES
from tools.mutants.faults_of_sequence_parallelism import FAULTS_OF_SEQUENCE_PARALLELISM
from tools.mutants.faults_of_tensor_parallelism import FAULTS_OF_TENSOR_PARALLELISM

KINDS = {
    "data parallelism": FAULTS_OF_DATA_PARALLELISM,
    "tensor parallelism": FAULTS_OF_TENSOR_PARALLELISM,
    "sequence parallelism": FAULTS_OF_SEQUENCE_PARALLELISM,
    "schedules": FAULTS_OF_SCHEDULES,
    "precision": FAULTS_OF_PRECISION,
    "FP8": FAULTS_OF_FLOAT8,
    "context and experts": FAULTS_OF_CONTEXT_AND_EXPERTS,
    "optimizers": FAULTS_OF_OPTIMIZERS,
    "guards": FAULTS_OF_GUARDS,
    "the whole": FAULTS_OF_THE_WHOLE,
}

FAULTS = tuple(fault for faults in KINDS.values() for fault in faults)
