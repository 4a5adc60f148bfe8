"""Laws and test doubles for users of the checkpointing protocols; strategies in ``layouts``."""
