"""Linear layers whose three products take FP8 operands, and recipes for their scales."""

from trainwright.precision.float8.block_recipes import Blockwise, Mx
from trainwright.precision.float8.bound import Float8Products
from trainwright.precision.float8.converting import convert_linears
from trainwright.precision.float8.linear import Float8Linear, multiply_float8
from trainwright.precision.float8.memory import AmaxMemory
from trainwright.precision.float8.products import scaled_product
from trainwright.precision.float8.protocol import Binding, Multipliers, Recipe, TakesProducts
from trainwright.precision.float8.recipes import Current, Delayed, PerRow
from trainwright.precision.float8.roles import Along, Cut, Ranges, Role, Scope
from trainwright.precision.float8.state import Float8State
from trainwright.precision.float8.weights import Float8Codec

__all__ = [
    "Along",
    "AmaxMemory",
    "Binding",
    "Blockwise",
    "Current",
    "Cut",
    "Delayed",
    "Float8Codec",
    "Float8Linear",
    "Float8Products",
    "Float8State",
    "Multipliers",
    "Mx",
    "PerRow",
    "Ranges",
    "Recipe",
    "Role",
    "Scope",
    "TakesProducts",
    "convert_linears",
    "multiply_float8",
    "scaled_product",
]
