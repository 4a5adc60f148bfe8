"""What a run keeps of the folders that it was begun with, so that it goes on without them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainwright.integration.config import RunConfig
from trainwright.integration.data.learned import FILE
from trainwright.integration.data.manifest import MANIFEST, read_manifest
from trainwright.integration.data.tokenizer import BYTES
from trainwright.integration.hugging_face.exporting import TOKENIZER_FILES
from trainwright.integration.model import PRESETS

CONFIG = "config.json"
DATA = "data"
MODEL = "model"


def keep_origin(run: Path, config: RunConfig) -> None:
    """Keep what says what the model is, and what goes along where it is exported.

    Args:
        run: the folder of the run.
        config: its settings.

    Raises:
        OSError: it cannot be written.
    """
    if config.model.model in PRESETS:
        return
    origin, kept = Path(config.model.model_config or config.model.model), run / MODEL
    kept.mkdir(exist_ok=True)
    for name in (*TOKENIZER_FILES, CONFIG):
        if os.path.isfile(origin / name):
            shutil.copyfile(origin / name, kept / name)


def kept_origin(run: Path) -> Path | None:
    """Return the folder with what a run has kept of the one that it was begun with, if any."""
    return run / MODEL if os.path.isfile(run / MODEL / CONFIG) else None


def own_settings(run: Path, config: RunConfig) -> RunConfig:
    """Return a run's settings with what it has kept in the place of what was elsewhere.

    The folder that it was begun with may say something else by now, or be gone.
    """
    kept = kept_origin(run)
    if kept is not None:
        config = config.evolve(model_config=str(kept.absolute()))
    spec, own = config.data.tokenizer, run / FILE
    if spec is None or spec == BYTES or spec.startswith(("ids:", "bpe:")):
        return config
    if os.path.exists(spec) or not os.path.isfile(own):
        return config
    end = config.data.end_token
    if os.path.isfile(run / DATA / MANIFEST):
        end = read_manifest(run / DATA).end_token
    return config.evolve(tokenizer=str(own.absolute()), end_token=end)
