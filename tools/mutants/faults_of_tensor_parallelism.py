"""Faults of tensor parallelism: groups, placements, heads, vocabularies."""

from __future__ import annotations

from tools.mutants.faults import IN_3D, INTEGRATION, ONE_STEP, TENSOR, Fault

SHARDING = "packages/sharding/src/trainwright/sharding"
TESTS = "packages/sharding/tests"

IN_SEQUENCE = ("tests/test_law.py", "-k", f"{ONE_STEP} and tp3-pp2")
BLOCKS = (f"{TESTS}/tensor/test_linear_blocks.py", "-k", "block_in_parallel")
FUSED = (f"{TESTS}/tensor/test_heads.py", "-k", "fused")
SHARED_KEYS = (f"{TESTS}/tensor/test_heads.py", "-k", "shared_key_gradients")
EMBEDDING = (f"{TESTS}/test_tensor_layers.py", "-k", "vocab_parallel_embedding")
SMOOTHING = (f"{TESTS}/tensor/test_vocab_loss.py", "-k", "smoothed_label")
PLANS = (f"{TESTS}/tensor/test_plans_of_transformers.py", "-k", "under_its_plan and parts-4")

FAULTS_OF_GRADIENTS = (
    Fault(
        "terms of the tensor ranks are added over data ranks",
        f"{SHARDING}/data/axes.py",
        "self._mesh.communicator(_joined(axis)) for axis in axes)",
        'self._mesh.communicator("dp" if axis == "tp" else _joined(axis)) for axis in axes)',
        (*SHARED_KEYS[:2], "shared_key_gradients and 2-1"),
    ),
    Fault(
        "the layers of a stage are cut over data ranks",
        f"{INTEGRATION}/model/parallel_layers.py",
        'self.tp = mesh.communicator("tp")',
        'self.tp = mesh.communicator("dp")',
        IN_3D,
    ),
    Fault(
        "the loss counts once for each tensor rank",
        f"{SHARDING}/norm/totals.py",
        "    totals[2] = loss_sum if counts_here else 0.0",
        "    totals[2] = loss_sum",
        IN_3D,
    ),
    Fault(
        "the terms that ranks see of a norm's gradient are not added",
        f"{INTEGRATION}/model/parallel_layers.py",
        "        return norm if self.sequence is None else place_partial_(norm)",
        "        return norm",
        IN_SEQUENCE,
    ),
    Fault(
        "the terms of shared key and value heads are not added",
        f"{TENSOR}/key_value.py",
        '        terms = {"tp": Partial()}',
        "        terms = {}",
        SHARED_KEYS,
    ),
    Fault(
        "the terms of a row product's bias are not added where positions are cut",
        f"{TENSOR}/linear.py",
        '            gradient = {} if self.sequence is None else {"tp": Partial()}',
        "            gradient = {}",
        BLOCKS,
    ),
    Fault(
        "the whole gradients of a row product's bias are added",
        f"{TENSOR}/linear.py",
        '            gradient = {} if self.sequence is None else {"tp": Partial()}',
        '            gradient = {"tp": Partial()}',
        BLOCKS,
    ),
    Fault(
        "a row product's bias is added once by each tensor rank",
        f"{TENSOR}/linear.py",
        "else output + self.bias.to(output.dtype)",
        "else output + self.tp.size * self.bias.to(output.dtype)",
        (f"{TESTS}/test_tensor_layers.py", "-k", "row_parallel_linear"),
    ),
    Fault(
        "the gradient of a row product's output is summed though every rank has it whole",
        f"{TENSOR}/products.py",
        "    return apply_function(_SumInPlace, terms, tp)",
        "    terms = apply_function(_SumInPlace, terms, tp)\n"
        "    return differentiable.replicate_to_partial(terms, tp)",
        (f"{TESTS}/test_tensor_layers.py", "-k", "row_parallel_linear"),
    ),
    Fault(
        "the ranks' terms of the gradient of a head's input are not added",
        f"{TENSOR}/fused_head.py",
        "        hidden = differentiable.replicate_to_partial(hidden, tp)\n",
        "        pass\n",
        (f"{TESTS}/tensor/test_head_fused.py", "-k", "sums_and_all_gradients"),
    ),
    Fault(
        "the input gradient of shared key and value heads is summed twice",
        f"{TENSOR}/key_value.py",
        "            is_entered=self.input_is_entered,",
        "            is_entered=False,",
        (f"{TESTS}/tensor/test_heads.py", "-k", "input_gradient_of_shared_keys"),
    ),
    Fault(
        "a weight that tensor ranks hold whole counts once for each of them in the norm",
        f"{SHARDING}/placement/parameters.py",
        "placement.replicated_axes if mesh.size(axis) > 1)",
        'placement.replicated_axes if mesh.size(axis) > 1 and axis != "tp")',
        BLOCKS,
    ),
    Fault(
        "what the ranks of a plan's head do is not added on the way back",
        f"{TENSOR}/regions.py",
        "            return self.residual.enter(output)",
        "            return self.residual.join(output)",
        PLANS,
    ),
    Fault(
        "the gradient of a base model's whole output is summed",
        f"{TENSOR}/regions.py",
        "        return self.residual.join(output)",
        "        return self.residual.enter(output)",
        (*PLANS[:2], "base_model_ends"),
    ),
    Fault(
        "terms of a norm of a rank's heads are added under sequence parallelism only",
        f"{TENSOR}/building.py",
        "    if isinstance(style, Norm) and not setting.residual.is_cut:",
        "    if not setting.residual.is_cut:",
        (f"{TESTS}/tensor/test_parallelize.py", "-k", "shared_part"),
    ),
)

FAULTS_OF_HEADS = (
    Fault(
        "query heads find the key head of their neighbour",
        f"{TENSOR}/heads.py",
        "tuple(head // self._group for head in self._heads.indices(rank))",
        "tuple(\n"
        "            min((head + 1) // self._group, self.num_kv_heads - 1)\n"
        "            for head in self._heads.indices(rank)\n"
        "        )",
        BLOCKS,
    ),
    Fault(
        "repeated key heads take turns instead of standing beside each other",
        f"{TENSOR}/key_value.py",
        "[head for head, n in zip(heads, self.repeats, strict=True) for _ in range(n)]",
        "(list(heads) * max(self.repeats))[: sum(self.repeats)]",
        (*FUSED[:2], "repeated_heads"),
    ),
    Fault(
        "queries stand behind keys and values in the cut of [Q; K; V]",
        f"{TENSOR}/heads.py",
        "Cut.joined(self.query_cut(), self.kv_used_cut(), self.kv_used_cut())",
        "Cut.joined(self.kv_used_cut(), self.kv_used_cut(), self.query_cut())",
        FUSED,
    ),
    Fault(
        "keys and values of a group change places",
        f"{TENSOR}/heads.py",
        "whole = ((first, repeats), (self._group, 1), (self._group + 1, 1))",
        "whole = ((first, repeats), (self._group + 1, 1), (self._group, 1))",
        FUSED,
    ),
    Fault(
        "the rows of [Q; K; V] are cut as one block",
        f"{TENSOR}/plans/gpt2.py",
        "Column(heads.fused_by_block())",
        "Column(Cut.uneven(3 * config.hidden_size, ranks))",
        (*PLANS[:2], f"{PLANS[2]} and gpt2"),
    ),
    Fault(
        "gate and up change places on all tensor ranks but the first",
        f"{TENSOR}/cuts.py",
        "                for first, cut in zip(firsts, cuts, strict=False)\n",
        "                for first, cut in list(zip(firsts, cuts, strict=False))"
        "[:: -1 if rank else 1]\n",
        BLOCKS,
    ),
)

FAULTS_OF_VOCABULARIES = (
    Fault(
        "a smoothed label is spread over one rank's part of the vocabulary in the loss",
        f"{TENSOR}/loss_terms.py",
        "(share / self.indices.size) * below_T",
        "(share / self.indices.count) * below_T",
        SMOOTHING,
    ),
    Fault(
        "a smoothed label is spread over one rank's part of the vocabulary in the gradient",
        f"{TENSOR}/loss_terms.py",
        "(grad_T * (-share / self.indices.size))",
        "(grad_T * (-share / self.indices.count))",
        SMOOTHING,
    ),
    Fault(
        "the label to ignore is always -100",
        f"{TENSOR}/cross_entropy.py",
        "HeadLoss(cut, vocab_size, ignore_index, label_smoothing, z_loss)",
        "HeadLoss(cut, vocab_size, -100, label_smoothing, z_loss)",
        (f"{TESTS}/test_cross_entropy.py", "-k", "label_can_be_the_one_to_ignore"),
    ),
    Fault(
        "ignored tokens add to the loss",
        f"{TENSOR}/loss_terms.py",
        "        return losses_T.masked_fill_(self.ignored_T, 0.0), torch",
        "        return losses_T, torch",
        (f"{TESTS}/test_cross_entropy.py", "-k", "ignored_tokens"),
    ),
    Fault(
        "words that pad the vocabulary have a probability",
        f"{TENSOR}/cross_entropy.py",
        "HeadLoss(cut, vocab_size, ignore_index, label_smoothing, z_loss)",
        "HeadLoss(cut, None, ignore_index, label_smoothing, z_loss)",
        (f"{TESTS}/tensor/test_vocab_loss.py", "-k", "padding_has_no_probability"),
    ),
    Fault(
        "the embedding is summed twice",
        f"{TENSOR}/embedding.py",
        "        return differentiable.partial_to_replicate(found, self.tp)",
        "        found = differentiable.partial_to_replicate(found, self.tp)\n"
        "        return differentiable.partial_to_replicate(found, self.tp)",
        EMBEDDING,
    ),
    Fault(
        "a word of another rank finds the first row of this one",
        f"{TENSOR}/embedding.py",
        "found.masked_fill_(~here.unsqueeze(-1), 0.0)",
        "found",
        EMBEDDING,
    ),
    Fault(
        "tensor ranks draw the same weights",
        f"{TENSOR}/initial.py",
        "            box=box,\n",
        "            box=type(box).full([b - a for a, b in zip(box.start, box.stop)]),\n",
        (f"{TESTS}/test_initial.py", "-k", "every_layout_draws"),
    ),
)

FAULTS_OF_TENSOR_PARALLELISM = (
    *FAULTS_OF_GRADIENTS,
    *FAULTS_OF_HEADS,
    *FAULTS_OF_VOCABULARIES,
)
