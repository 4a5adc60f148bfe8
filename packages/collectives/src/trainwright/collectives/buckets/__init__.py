"""Flat gradient buckets around one's own module, over any communicator."""

from trainwright.collectives.buckets.errors import UnusedParameterError
from trainwright.collectives.buckets.gradients import GradientBuckets
from trainwright.collectives.buckets.plan import BucketPlan, FlatBucket, Slot, plan_buckets

__all__ = [
    "BucketPlan",
    "FlatBucket",
    "GradientBuckets",
    "Slot",
    "UnusedParameterError",
    "plan_buckets",
]
