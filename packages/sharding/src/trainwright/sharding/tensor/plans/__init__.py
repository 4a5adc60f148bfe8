"""Plans for models of other libraries, none of which is imported."""

from trainwright.sharding.tensor.plans.declared import plan_of
from trainwright.sharding.tensor.plans.gpt2 import gpt2_plan
from trainwright.sharding.tensor.plans.llama import llama_plan
from trainwright.sharding.tensor.plans.mistral import mistral_plan
from trainwright.sharding.tensor.plans.qwen import qwen_plan

__all__ = ["gpt2_plan", "llama_plan", "mistral_plan", "plan_of", "qwen_plan"]
