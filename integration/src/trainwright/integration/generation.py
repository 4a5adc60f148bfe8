"""Text from the model as it stands, in any layout."""

# Shapes: B rows of this rank, N rows of all, V vocabulary.

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from trainwright.integration.decoding import Decoder, decoder_of
from trainwright.integration.errors import ConfigError, TrainwrightError
from trainwright.integration.model_parts import ModelParts
from trainwright.integration.sampling import Sampling

SEPARATOR = 0
"""Token that stands between files where tokens are bytes; it is no byte of text."""


class GenerationError(TrainwrightError, RuntimeError):
    """The model says nothing of what comes next: its logits are not numbers."""


def generate(
    parts: ModelParts,
    prompt: bytes,
    num_bytes: int,
    temperature: float = 0.8,
) -> bytes:
    """Return ``num_bytes`` sampled bytes that continue ``prompt``; every rank gets the same.

    See `continuations`.
    """
    sampling = Sampling(temperature, seed=parts.config.seed, banned=frozenset({SEPARATOR}))
    drawn = continuations(parts, [prompt], num_bytes, sampling)
    return bytes(token for tokens in drawn for token in tokens if token is not None)


@torch.no_grad()
def continuations(
    parts: ModelParts,
    prompts: Sequence[Sequence[int]],
    num_tokens: int,
    sampling: Sampling,
    *,
    stop: Collection[int] = (),
    window: int | None = None,
    cached: bool = True,
) -> Iterator[list[int | None]]:
    """Yield the next token of every prompt, up to ``num_tokens`` times, the same on every rank.

    Tokens are drawn by place, so that the text does not depend on the layout. All ranks ask for
    all of it together, or stop asking together.

    A model sees the last ``window`` tokens of a row. While the longest row fits, each step reads
    one token a row; from then on each reads the whole windows of all rows anew, since what a
    position holds depends on all before it.

    Args:
        parts: the model.
        prompts: token ids, at least one each.
        num_tokens: at most so many.
        sampling: the rule.
        stop: tokens that end a row; they are yielded.
        window: None takes the length of the sequences that the model is trained on, or what the
            model has positions for where that is less.
        cached: whether keys and values are kept; False reads whole windows at each step.

    Yields:
        A token for each prompt; None for a row that has ended.

    Raises:
        ConfigError: a prompt is empty, or the model has no positions for the window.
        GenerationError: logits are not numbers; on every rank.

    Communicates: what `Decoder` does, forwards only, and for each token one all-reduce over the
        world of 8 bytes a prompt. Data and context ranks take turns with the prompts. Stage 3: the
        weights are gathered once.
    """
    if not prompts or not all(prompts):
        raise ConfigError("a prompt must have at least one token, got none")
    window = _fitting(parts, window)
    rows = _Rows(parts, prompts)
    capacity = min(window, max(len(prompt) for prompt in prompts) + num_tokens)
    ended = [False] * len(prompts)
    with decoder_of(parts, capacity) as decoder:
        for step in range(num_tokens):
            logits_BV = rows.read(decoder, window, anew=step == 0 or not cached)
            chosen = rows.agree(logits_BV, sampling, step)
            if min(chosen) < 0:
                raise GenerationError(
                    f"the model's logits are not finite numbers after {step} tokens; its weights "
                    "are damaged, or overflow in the dtype of the run"
                )
            rows.append(chosen)
            told = [None if over else token for token, over in zip(chosen, ended, strict=True)]
            ended = [over or token in stop for token, over in zip(chosen, ended, strict=True)]
            yield told
            if all(ended):
                return


def _fitting(parts: ModelParts, window: int | None) -> int:
    shape = next(iter(parts.model.stages.values())).shape
    limits = [parts.config.batch.sequence_length] if window is None else [window]
    if shape.window is not None:
        limits.append(shape.window)
    if shape.positions == "learned" and shape.max_positions is not None:
        limits.append(shape.max_positions)
    if window is not None and (window < 1 or min(limits) < window):
        raise ConfigError(
            f"the model cannot see {window} tokens at once; 1 to {min(limits[1:], default=window)} "
            "work"
        )
    return min(limits)


class _Rows:
    """All rows, and which of them this rank reads."""

    def __init__(self, parts: ModelParts, prompts: Sequence[Sequence[int]]) -> None:
        mesh = parts.mesh
        self._world = mesh.world
        self._tokens = [list(prompt) for prompt in prompts]
        ranks = mesh.size("dp") * mesh.size("cp")
        rank = mesh.coordinate("dp") * mesh.size("cp") + mesh.coordinate("cp")
        self._mine = list(range(rank, len(prompts), ranks))
        # Filled up with the first one: ranks that share experts compute together, on equally many.
        spare = -(-len(prompts) // ranks) - len(self._mine)
        self._read = self._mine + [0] * spare
        self._speaks = parts.counts_tokens > 0 and mesh.coordinate("tp") == 0

    def read(self, decoder: Decoder, window: int, *, anew: bool) -> torch.Tensor | None:
        rows = [self._tokens[row] for row in self._read]
        if anew or max(len(row) for row in rows) > window:
            return decoder.read([row[-window:] for row in rows])
        return decoder.advance([row[-1] for row in rows], [len(row) - 1 for row in rows])

    def agree(self, logits_BV: torch.Tensor | None, sampling: Sampling, step: int) -> list[int]:
        """Return the next token of every row, which the ranks with logits have drawn."""
        chosen_N = torch.zeros(len(self._tokens), dtype=torch.int64, device=self._world.device)
        if logits_BV is not None and self._mine and self._speaks:
            mine_B = torch.tensor(self._mine, device=self._world.device)
            chosen_N[mine_B] = sampling.draw(logits_BV[: len(mine_B)], mine_B, step)
        self._world.all_reduce(chosen_N).wait()
        return [int(token) for token in chosen_N.tolist()]

    def append(self, chosen: Sequence[int]) -> None:
        for row, token in zip(self._tokens, chosen, strict=True):
            row.append(token)
