"""A run begins with the weights of a Hugging Face folder, and trains on from them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from tests.hugging_face_models import SIZES
from tests.serial import settings, text
from trainwright.checkpointing.errors import CheckpointingError
from trainwright.checkpointing.state import StateStore
from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.integration.config import RunConfig
from trainwright.integration.errors import ConfigError
from trainwright.integration.parts import Parts, Progress, assemble
from trainwright.integration.recipe import StepRecord, train
from trainwright.integration.training_state import restore_state, save_state


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    sizes = {**SIZES, "vocab_size": 300, "tie_word_embeddings": True}
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=8))
    model.save_pretrained(place)
    return place


def config_of(folder: Path, **changes: object) -> RunConfig:
    return settings(model=str(folder), steps=2, warmup=1, **changes)


def parts_of(world: Communicator, config: RunConfig) -> Parts:
    return assemble(config, world, text())


def test_the_first_loss_of_a_run_is_that_of_the_folders_model(folder: Path) -> None:
    config = config_of(folder, layout="dp=2,tp=2,pp=2", zero=3, dtype="float64")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).double()
    batch = parts_of(SingleCommunicator(), config_of(folder)).feed.next_batch().part

    def work(world: Communicator) -> list[float]:
        parts = parts_of(world, config)
        records: list[StepRecord] = []
        train(parts, parts.start(), [records.append])
        return [record.loss for record in records]

    losses = LocalWorld(8, timeout_s=60.0).run(work)[0]

    with torch.no_grad():
        logits = theirs(batch.tokens_MBS[0]).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), batch.labels_MBS[0].flatten())
    assert losses[0] == pytest.approx(float(wanted), rel=1e-6)
    assert losses[1] < losses[0]


def test_a_run_from_scratch_draws_the_weights_of_the_folders_model(folder: Path) -> None:
    world = SingleCommunicator()
    drawn = parts_of(world, config_of(folder, from_scratch=True))
    loaded = parts_of(world, config_of(folder))

    before = drawn.model.pieces["model.layers.0.mlp.up_proj.weight"].parameter.clone()
    for parts in (drawn, loaded):
        parts.start()

    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(drawn.model.pieces[name].parameter, before)
    assert not torch.equal(loaded.model.pieces[name].parameter, before)
    with pytest.raises(ConfigError, match="--from-scratch has no effect with --model tiny"):
        settings(from_scratch=True)


def test_what_the_folder_has_no_weights_for_is_named(folder: Path) -> None:
    parts = parts_of(SingleCommunicator(), config_of(folder))
    (folder / "model.safetensors").rename(folder / "aside")
    try:
        with pytest.raises(CheckpointingError, match="holds neither model"):
            parts.start()
    finally:
        (folder / "aside").rename(folder / "model.safetensors")


def test_a_resumed_run_reads_no_weights_of_the_folder(folder: Path, tmp_path: Path) -> None:
    world, config = SingleCommunicator(), config_of(folder)
    first, second = parts_of(world, config), parts_of(world, config)
    store = StateStore(tmp_path, world, coordinates=first.mesh.coordinates)
    (folder / "model.safetensors").rename(folder / "aside")
    try:
        with store:
            save_state(store, first, Progress())
            assert restore_state(store, second) == Progress()
    finally:
        (folder / "aside").rename(folder / "model.safetensors")


def test_a_model_that_is_no_preset_and_no_folder_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"unknown model 'tinny': no folder, .*mean tiny"):
        _ = settings(model="tinny").model.shape


def test_sequences_beyond_what_a_model_has_positions_for_are_refused(tmp_path: Path) -> None:
    sizes = {"vocab_size": 256, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="--sequence-length 17 is beyond the model's table of"):
        parts_of(SingleCommunicator(), config_of(tmp_path))
    transformers.MistralConfig(**{**SIZES, "vocab_size": 256}, sliding_window=16).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match="beyond the model's sliding window of 16"):
        parts_of(SingleCommunicator(), config_of(tmp_path))
