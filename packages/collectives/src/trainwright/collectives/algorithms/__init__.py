"""Collective algorithms over point-to-point messages: they serve every communicator.

Each algorithm is data, the `Plan` of what a rank sends and receives in each step, which
`verify_plans` checks for all ranks without running it, and one small executor runs it over any
`Passage`: a communicator, or anything else with ``rank``, ``size``, ``device`` and ``exchange``.
All functions have finished when they return, never wait for a send before the matching receive
has been started, and send nothing for empty chunks.
"""

from trainwright.collectives.algorithms.all_to_all import (
    all_to_all_by,
    direct_all_to_all,
    direct_all_to_all_plan,
    hierarchical_all_to_all,
    hierarchical_all_to_all_plan,
)
from trainwright.collectives.algorithms.chain import (
    ring_broadcast,
    ring_broadcast_plan,
    ring_reduce,
    ring_reduce_plan,
)
from trainwright.collectives.algorithms.direct import (
    direct_all_gather,
    direct_all_gather_plan,
    direct_all_reduce,
    direct_all_reduce_plan,
    direct_broadcast,
    direct_broadcast_plan,
    direct_reduce,
    direct_reduce_plan,
    direct_reduce_scatter,
    direct_reduce_scatter_plan,
    master_worker_all_reduce,
    master_worker_all_reduce_plan,
)
from trainwright.collectives.algorithms.double_tree import (
    double_tree_all_reduce,
    double_tree_all_reduce_plan,
    double_tree_broadcast,
    double_tree_broadcast_plan,
    double_tree_reduce,
    double_tree_reduce_plan,
)
from trainwright.collectives.algorithms.execution import Passage
from trainwright.collectives.algorithms.halving import (
    halving_doubling_all_gather,
    halving_doubling_all_gather_plan,
    halving_doubling_all_reduce,
    halving_doubling_all_reduce_plan,
    halving_doubling_reduce_scatter,
    halving_doubling_reduce_scatter_plan,
)
from trainwright.collectives.algorithms.hierarchical import (
    hierarchical_all_gather,
    hierarchical_all_gather_plan,
    hierarchical_all_reduce,
    hierarchical_all_reduce_plan,
    hierarchical_reduce_scatter,
    hierarchical_reduce_scatter_plan,
    split_by_nodes,
)
from trainwright.collectives.algorithms.operations import (
    all_gather_by,
    all_reduce_by,
    broadcast_by,
    reduce_by,
    reduce_scatter_by,
)
from trainwright.collectives.algorithms.parameter_server import ParameterServer, StaleReport
from trainwright.collectives.algorithms.plan import Part, Payload, Plan, Step, chunk_bounds
from trainwright.collectives.algorithms.ring import (
    bidirectional_ring_all_gather,
    bidirectional_ring_all_gather_plan,
    bidirectional_ring_all_reduce,
    bidirectional_ring_all_reduce_plan,
    bidirectional_ring_reduce_scatter,
    bidirectional_ring_reduce_scatter_plan,
    ring_all_gather,
    ring_all_gather_plan,
    ring_all_reduce,
    ring_all_reduce_plan,
    ring_reduce_scatter,
    ring_reduce_scatter_plan,
)
from trainwright.collectives.algorithms.served_parameters import ServedParameters
from trainwright.collectives.algorithms.server_roles import ServerRoles
from trainwright.collectives.algorithms.tree import (
    tree_all_reduce,
    tree_all_reduce_plan,
    tree_broadcast,
    tree_broadcast_plan,
    tree_reduce,
    tree_reduce_plan,
)
from trainwright.collectives.algorithms.trees import (
    TreeNode,
    tree_height,
    tree_node,
    twin_node,
)
from trainwright.collectives.algorithms.verification import verify_plans

__all__ = [
    "ParameterServer",
    "Part",
    "Passage",
    "Payload",
    "Plan",
    "ServedParameters",
    "ServerRoles",
    "StaleReport",
    "Step",
    "TreeNode",
    "all_gather_by",
    "all_reduce_by",
    "all_to_all_by",
    "bidirectional_ring_all_gather",
    "bidirectional_ring_all_gather_plan",
    "bidirectional_ring_all_reduce",
    "bidirectional_ring_all_reduce_plan",
    "bidirectional_ring_reduce_scatter",
    "bidirectional_ring_reduce_scatter_plan",
    "broadcast_by",
    "chunk_bounds",
    "direct_all_gather",
    "direct_all_gather_plan",
    "direct_all_reduce",
    "direct_all_reduce_plan",
    "direct_all_to_all",
    "direct_all_to_all_plan",
    "direct_broadcast",
    "direct_broadcast_plan",
    "direct_reduce",
    "direct_reduce_plan",
    "direct_reduce_scatter",
    "direct_reduce_scatter_plan",
    "double_tree_all_reduce",
    "double_tree_all_reduce_plan",
    "double_tree_broadcast",
    "double_tree_broadcast_plan",
    "double_tree_reduce",
    "double_tree_reduce_plan",
    "halving_doubling_all_gather",
    "halving_doubling_all_gather_plan",
    "halving_doubling_all_reduce",
    "halving_doubling_all_reduce_plan",
    "halving_doubling_reduce_scatter",
    "halving_doubling_reduce_scatter_plan",
    "hierarchical_all_gather",
    "hierarchical_all_gather_plan",
    "hierarchical_all_reduce",
    "hierarchical_all_reduce_plan",
    "hierarchical_all_to_all",
    "hierarchical_all_to_all_plan",
    "hierarchical_reduce_scatter",
    "hierarchical_reduce_scatter_plan",
    "master_worker_all_reduce",
    "master_worker_all_reduce_plan",
    "reduce_by",
    "reduce_scatter_by",
    "ring_all_gather",
    "ring_all_gather_plan",
    "ring_all_reduce",
    "ring_all_reduce_plan",
    "ring_broadcast",
    "ring_broadcast_plan",
    "ring_reduce",
    "ring_reduce_plan",
    "ring_reduce_scatter",
    "ring_reduce_scatter_plan",
    "split_by_nodes",
    "tree_all_reduce",
    "tree_all_reduce_plan",
    "tree_broadcast",
    "tree_broadcast_plan",
    "tree_height",
    "tree_node",
    "tree_reduce",
    "tree_reduce_plan",
    "twin_node",
    "verify_plans",
]
