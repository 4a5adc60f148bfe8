"""Faults of what is read, resumed, generated, exported, and read of others' files."""

from __future__ import annotations

from tools.mutants.faults import INTEGRATION, ONE_STEP, Fault

TESTS = "integration/tests"
HUGGING_FACE = ("tests/test_hugging_face.py", "-k", "logits_are_those")
DEEPSPEED = f"{TESTS}/test_deepspeed_file.py"


def _in(file: str, words: str) -> tuple[str, ...]:
    return (f"{TESTS}/test_{file}.py", "-k", words)


FAULTS_OF_READING = (
    Fault(
        "labels are shifted twice",
        f"{INTEGRATION}/data/shifting.py",
        "    labels: np.ndarray = row.tokens[1:].astype(np.int64)",
        "    labels: np.ndarray = np.append(row.tokens[2:], row.tokens[:1]).astype(np.int64)",
        _in("data", "labels_are_the_following"),
    ),
    Fault(
        "the first token of a document is learnt from the last one before it",
        f"{INTEGRATION}/data/shifting.py",
        "(after < 0) | (after != before)",
        "after < 0",
        _in("sample_order", "labels_stop"),
    ),
    Fault(
        "documents in a pack see those before them",
        f"{INTEGRATION}/model/packing.py",
        "causal=True, documents=known)",
        "causal=True)",
        ("tests/test_packed_documents.py", "-k", "as_if_it_were_alone"),
    ),
    Fault(
        "places in a pack are counted from the beginning of the row",
        f"{INTEGRATION}/data/shifting.py",
        "places - np.maximum.accumulate(np.where(starts, places, 0))",
        "places - np.maximum.accumulate(np.where(starts, places, 0)) * 0",
        _in("packing_and_mixing", "count_their_own_places"),
    ),
    Fault(
        "a token between two rows of a long document is no target",
        f"{INTEGRATION}/data/row_table.py",
        "    return limit, limit - 1",
        "    return limit, limit",
        _in("packing_and_mixing", "whole_documents_lose"),
    ),
    Fault(
        "a source of a mixture begins anew with each period",
        f"{INTEGRATION}/data/mixture.py",
        "periods * int(self.counts[source]) + int(self.before[turn])",
        "int(self.before[turn])",
        _in("packing_and_mixing", "mixture or shares"),
    ),
    Fault(
        "turns of a mixture go to the source whose sample is late last",
        f"{INTEGRATION}/data/mixture.py",
        "            chosen = min(open_ones,",
        "            chosen = max(open_ones,",
        _in("packing_and_mixing", "shares_of_any_first"),
    ),
    Fault(
        "a checkpoint counts batches that were read ahead",
        f"{INTEGRATION}/feed.py",
        '        return {"consumed": self._position}',
        '        return {"consumed": self._reader.consumed}',
        _in("data", "position_of_batches_handed_out"),
    ),
    Fault(
        "after going back the batch that was read ahead is handed out",
        f"{INTEGRATION}/feed.py",
        "            self._ahead[-1].wait()\n            self._ahead = None\n",
        "            self._ahead[-1].wait()\n",
        _in("packing_and_mixing", "only_handed_out_ones"),
    ),
    Fault(
        "data ranks behind a gap read what those before it have",
        f"{INTEGRATION}/data/reader.py",
        "        first -= begin - start",
        "        first = 0",
        _in("data", "left_out_is_read_by_no"),
    ),
    Fault(
        "rows that fill an evaluation up count",
        f"{INTEGRATION}/evaluation.py",
        "    labels = _filled(labels_NS[rank::ranks], shape, IGNORE)",
        "    labels = _filled(labels_NS[rank::ranks], shape, 0)",
        _in("loss_arithmetic", "held_out"),
    ),
    Fault(
        "weights of the modules are the old ones after a load",
        f"{INTEGRATION}/training_state.py",
        "    parts.model.publish()\n    parts.feed.count_from",
        "    parts.feed.count_from",
        _in("exact_resume", "after_a_load"),
    ),
    Fault(
        "only the first group of parameters follows the learning rate",
        f"{INTEGRATION}/optimizers/joined.py",
        "zip(self.param_groups, self._shares, strict=True):",
        "zip(self.param_groups[:1], self._shares[:1], strict=True):",
        ("tests/test_law.py", "-k", f"{ONE_STEP} and dp2-float64"),
    ),
)

FAULTS_OF_MODELS = (
    Fault(
        "a row sees one position too few of what it has read",
        f"{INTEGRATION}/model/cache.py",
        "device=device) <= last_B",
        "device=device) < last_B",
        ("tests/test_generation.py", "-k", "cache"),
    ),
    Fault(
        "a new token stands one place further than it should",
        f"{INTEGRATION}/generation.py",
        "[len(row) - 1 for row in rows]",
        "[len(row) for row in rows]",
        ("tests/test_generation.py", "-k", "cache"),
    ),
    Fault(
        "heads are turned the other way round",
        f"{INTEGRATION}/model/rotary.py",
        "    turned = torch.cat((-second, first), dim=-1)",
        "    turned = torch.cat((second, -first), dim=-1)",
        HUGGING_FACE,
    ),
    Fault(
        "short waves are stretched and long ones kept",
        f"{INTEGRATION}/model/rotary.py",
        "(kept_F + (1 - kept_F) / self.factor)",
        "((1 - kept_F) + kept_F / self.factor)",
        HUGGING_FACE,
    ),
    Fault(
        "matrices of GPT-2 are written as they are",
        f"{INTEGRATION}/hugging_face/names.py",
        '        turned = self.transposed and len(shape) == 2 and name.endswith("_proj.weight")',
        "        turned = self.transposed and len(shape) == 3",
        HUGGING_FACE,
    ),
    Fault(
        "gate and up of an expert change places in files",
        f"{INTEGRATION}/hugging_face/names.py",
        "((names.gate, 0), (names.up, half))",
        "((names.gate, half), (names.up, 0))",
        HUGGING_FACE,
    ),
    Fault(
        "the draw of a row depends on the rows beside it",
        f"{INTEGRATION}/sampling.py",
        "random.uniform_at(key, rows_B, dtype",
        "random.uniform_at(key, torch.arange(len(rows_B)), dtype",
        _in("sampling", "depends_on_seed_row"),
    ),
    Fault(
        "the token at which the likeliest ones are enough is left out",
        f"{INTEGRATION}/sampling.py",
        "        before_BV = sorted_BV.cumsum(1) - sorted_BV",
        "        before_BV = sorted_BV.cumsum(1)",
        _in("sampling", "likeliest_tokens"),
    ),
)

FAULTS_OF_OTHERS_FILES = (
    Fault(
        "elements of DeepSpeed's buckets are taken for bytes",
        f"{INTEGRATION}/deepspeed/zero.py",
        "_GRADIENT_BYTES * sizes[least]",
        "sizes[least]",
        (DEEPSPEED, "-k", "a_key_sets"),
    ),
    Fault(
        "of two sizes of buckets the larger one holds",
        f"{INTEGRATION}/deepspeed/zero.py",
        "        least = min(sizes,",
        "        least = max(sizes,",
        (DEEPSPEED, "-k", "a_key_sets"),
    ),
    Fault(
        "the layer that is computed is not counted beside those fetched ahead",
        f"{INTEGRATION}/deepspeed/zero.py",
        "min(1 + -(-prefetched // layer),",
        "min(-(-prefetched // layer),",
        (DEEPSPEED, "-k", "a_key_sets"),
    ),
    Fault(
        "the power of a loss scale is a factor",
        f"{INTEGRATION}/deepspeed/formats.py",
        "    return 2.0**power",
        "    return 2.0 * power",
        (DEEPSPEED, "-k", "a_key_sets"),
    ),
    Fault(
        "the second update of DeepSpeed's rise has the rate of the third",
        f"{INTEGRATION}/foreign_rates.py",
        "        risen = _risen(update - 1, self.warmup_num_steps, self.warmup_type)",
        "        risen = _risen(update, self.warmup_num_steps, self.warmup_type)",
        (DEEPSPEED, "-k", "rates_of_deepspeed"),
    ),
    Fault(
        "DeepSpeed's fall ends one update early",
        f"{INTEGRATION}/foreign_rates.py",
        "(total - (update - 1)) / max(1, total - rise)",
        "(total - update) / max(1, total - rise)",
        (DEEPSPEED, "-k", "rates_of_deepspeed"),
    ),
)

FAULTS_OF_DATA = (*FAULTS_OF_READING, *FAULTS_OF_MODELS, *FAULTS_OF_OTHERS_FILES)
