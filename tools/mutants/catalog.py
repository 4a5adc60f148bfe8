"""All planted faults, by kind."""

from __future__ import annotations

from tools.mutants.faults import FAULTS_OF_THE_WHOLE
from tools.mutants.faults_of_attention import FAULTS_OF_ATTENTION
from tools.mutants.faults_of_checkpoints import FAULTS_OF_CHECKPOINTS
from tools.mutants.faults_of_collectives import FAULTS_OF_COLLECTIVES
from tools.mutants.faults_of_context_and_experts import FAULTS_OF_CONTEXT_AND_EXPERTS
from tools.mutants.faults_of_data import FAULTS_OF_DATA
from tools.mutants.faults_of_data_parallelism import FAULTS_OF_DATA_PARALLELISM
from tools.mutants.faults_of_experts import FAULTS_OF_EXPERTS
from tools.mutants.faults_of_float8 import FAULTS_OF_FLOAT8
from tools.mutants.faults_of_guards import FAULTS_OF_GUARDS
from tools.mutants.faults_of_number_formats import FAULTS_OF_NUMBER_FORMATS
from tools.mutants.faults_of_offload import FAULTS_OF_OFFLOAD
from tools.mutants.faults_of_optimizers import FAULTS_OF_OPTIMIZERS
from tools.mutants.faults_of_pipelines import FAULTS_OF_PIPELINES
from tools.mutants.faults_of_precision import FAULTS_OF_PRECISION
from tools.mutants.faults_of_schedules import FAULTS_OF_SCHEDULES
from tools.mutants.faults_of_sequence_parallelism import FAULTS_OF_SEQUENCE_PARALLELISM
from tools.mutants.faults_of_shards import FAULTS_OF_SHARDS
from tools.mutants.faults_of_tensor_parallelism import FAULTS_OF_TENSOR_PARALLELISM
from tools.mutants.faults_of_verdicts import FAULTS_OF_VERDICTS

KINDS = {
    "collectives": FAULTS_OF_COLLECTIVES,
    "data parallelism": (*FAULTS_OF_DATA_PARALLELISM, *FAULTS_OF_SHARDS),
    "tensor parallelism": FAULTS_OF_TENSOR_PARALLELISM,
    "sequence parallelism": FAULTS_OF_SEQUENCE_PARALLELISM,
    "attention": FAULTS_OF_ATTENTION,
    "experts": FAULTS_OF_EXPERTS,
    "context and experts": FAULTS_OF_CONTEXT_AND_EXPERTS,
    "pipelines": (*FAULTS_OF_SCHEDULES, *FAULTS_OF_PIPELINES),
    "precision": (*FAULTS_OF_PRECISION, *FAULTS_OF_NUMBER_FORMATS),
    "FP8": FAULTS_OF_FLOAT8,
    "checkpointing": FAULTS_OF_CHECKPOINTS,
    "offload": FAULTS_OF_OFFLOAD,
    "optimizers": FAULTS_OF_OPTIMIZERS,
    "guards": (*FAULTS_OF_GUARDS, *FAULTS_OF_VERDICTS),
    "data and models": FAULTS_OF_DATA,
    "the whole": FAULTS_OF_THE_WHOLE,
}

FAULTS = tuple(fault for faults in KINDS.values() for fault in faults)
