"""What a finished run has to say: held-out loss, what it is measured by, a sample of text."""

from __future__ import annotations

import sys
from typing import Any

import attrs
import numpy as np
import torch

from trainwright.collectives import Communicator
from trainwright.integration.data import IGNORE, Data, Rows, Tokenizer, fit_ngrams
from trainwright.integration.data.preparation import READING_S
from trainwright.integration.evaluation import bits_a_byte, bytes_of, token_losses
from trainwright.integration.generation import continuations
from trainwright.integration.parts import Parts, Progress
from trainwright.integration.plot import plot_loss
from trainwright.integration.recipe import StepRecord
from trainwright.integration.run_folder import RunFolder
from trainwright.integration.sampling import Sampling
from trainwright.integration.strict_json import strict_json

PROMPT = b"\ndef "


@attrs.frozen
class Summary:
    """What a finished run has to say.

    Args:
        held_out_loss: nats a token.
        held_out_bits: bits a byte of text; None where nobody knows the bytes of a token.
        bigram_loss, trigram_loss: of n-gram models of the training bytes, on the same sequences, in
            nats a byte; None where tokens are no bytes, or are of several sources or documents
            apart.
        sample: generated text.
    """

    steps: int
    updates: int
    skipped: int
    loss: float
    held_out_loss: float
    held_out_bits: float | None
    bigram_loss: float | None
    trigram_loss: float | None
    sample: str
    out: str


def finish(
    parts: Parts,
    progress: Progress,
    folder: RunFolder,
    data: Data,
    rows: Rows,
    last: StepRecord | None,
) -> Summary:
    """Evaluate, generate and plot; every rank returns the same.

    Args:
        parts: of the run.
        progress: how far it has come.
        folder: where the plot goes.
        data: of the run.
        rows: of what it holds out, which it is measured with.
        last: the record of the last step, if one was made.

    Communicates: what `evaluate` and `continuations` do, and a broadcast of 16 bytes.
    """
    config = parts.config
    losses = token_losses(parts, rows.tokens_NS, rows.labels_NS, rows.documents_NS)
    held_out = losses.mean
    sample = _sample(parts, data.tokenizer, config.evaluation.sample_bytes)
    levels = _baselines(parts.mesh.world, data, rows)
    if parts.mesh.world.rank == 0:
        lines: dict[str, Any] = {"held-out": held_out}
        if levels is not None:
            lines |= {"bigram": levels[0], "trigram": levels[1]}
        plot_loss(folder.plot, *folder.losses(), lines)
    return Summary(
        steps=progress.step,
        updates=progress.updates,
        skipped=progress.skipped,
        loss=float("nan") if last is None else last.loss,
        held_out_loss=held_out,
        held_out_bits=bits_a_byte(losses, bytes_of(rows.labels_NS, data.tokenizer)),
        bigram_loss=None if levels is None else levels[0],
        trigram_loss=None if levels is None else levels[1],
        sample=sample,
        out=str(folder.path),
    )


def report(summary: Summary, as_json: bool) -> None:
    """Print the summary for a person, or as one JSON object."""
    if as_json:
        sys.stdout.write(strict_json(attrs.asdict(summary)) + "\n")
        return
    held_out = f"\nheld-out loss {summary.held_out_loss:.3f} nats a "
    if summary.bigram_loss is not None and summary.trigram_loss is not None:
        below = "below" if summary.held_out_loss < summary.bigram_loss else "NOT below"
        held_out += (
            f"byte, {below} the byte bigram's {summary.bigram_loss:.3f} "
            f"(trigram {summary.trigram_loss:.3f})"
        )
    else:
        held_out += "token"
        if summary.held_out_bits is not None:
            held_out += f", {summary.held_out_bits:.3f} bits a byte"
    sys.stdout.write(
        f"{held_out}\n"
        f"updates {summary.updates}, skipped {summary.skipped}; run folder {summary.out}\n"
        f"sample:\n{summary.sample}\n"
    )


def _sample(parts: Parts, tokenizer: Tokenizer, count: int) -> str:
    """Return generated text, so many tokens of it; nothing where tokens have no text."""
    if not count or tokenizer.sizes() is None:
        return ""
    prompt = tokenizer.encode([PROMPT])[0].tolist()
    # What stands behind documents is no text.
    banned = frozenset(() if tokenizer.end is None else (tokenizer.end,))
    drawn = continuations(
        parts, [prompt], count, Sampling(0.8, seed=parts.config.seed, banned=banned)
    )
    tokens = [token for step in drawn for token in step if token is not None]
    return tokenizer.decode([*prompt, *tokens])


def _baselines(world: Communicator, data: Data, rows: Rows) -> tuple[float, float] | None:
    stream, counts_NS = data.byte_stream, rows.labels_NS != IGNORE
    # Only the end of what is held out may be filled up.
    if stream is None or rows.documents_NS is not None or not bool(counts_NS[:-1].all()):
        return None
    # The first rank counts; the tables are large, and one copy a host is enough.
    losses = torch.zeros(2, dtype=torch.float64, device=world.device)
    if world.rank == 0:
        sequences = torch.cat((rows.tokens_NS[:, :1], rows.labels_NS.clamp(min=0)), dim=1)
        known = fit_ngrams(stream).losses(sequences.numpy().astype(np.uint8), counts_NS.numpy())
        losses.copy_(torch.tensor(known))
    world.broadcast(losses, 0, timeout_s=READING_S).wait()
    return float(losses[0]), float(losses[1])
