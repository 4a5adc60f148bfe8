"""Folders of Hugging Face's libraries come in and go out whole, and compute the same."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.hugging_face_models import CONFIGS, logits_of, save, serial, theirs, tokens
from trainwright.checkpointing import CheckpointingError, MismatchError
from trainwright.checkpointing.errors import SaveFailedError, TreeError
from trainwright.checkpointing.state.files import LocalFiles
from trainwright.collectives import Communicator, LocalWorld, SingleCommunicator
from trainwright.integration.config import RunConfig
from trainwright.integration.decoding import decoder_of
from trainwright.integration.hugging_face import export, exporting, load_, read_config, read_shape
from trainwright.integration.loading import assemble_model
from trainwright.integration.model import PRESETS
from trainwright.sharding import Mesh, MeshShape


def opened(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


SAMPLE = ("llama3", "gpt2", "qwen2-moe", "deepseek-yarn")
EACH = [pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long) for name in CONFIGS]


@pytest.mark.parametrize("name", EACH)
def test_logits_are_those_of_transformers_and_go_home_bit_for_bit(
    name: str, tmp_path: Path
) -> None:
    right = save(name, tmp_path / "in")
    found = read_config(tmp_path / "in")
    world = SingleCommunicator()

    model = serial(found.shape)
    load_(model, found.shape, tmp_path / "in", world)
    export(model, found.shape, Mesh(world, MeshShape()), tmp_path / "out", like=found.values)
    again = opened(tmp_path / "out")

    torch.testing.assert_close(logits_of(model), logits_of(right), rtol=1e-5, atol=1e-5)
    assert torch.equal(logits_of(again), logits_of(right))
    assert read_shape(tmp_path / "out") == found.shape
    kept, sent = right.state_dict(), again.state_dict()
    assert kept.keys() == sent.keys()
    assert all(torch.equal(sent[key], value) for key, value in kept.items())


@pytest.mark.parametrize(
    ("name", "layout", "changes"),
    [
        ("gpt2", "dp=2,tp=2,pp=2", {"zero": 3}),
        pytest.param("llama-biased", "tp=4,pp=2", {"zero": 0}, marks=pytest.mark.long),
        pytest.param("qwen2-moe", "dp=2,tp=2,pp=2,ep=2", {"zero": 2}, marks=pytest.mark.long),
        ("dots1", "dp=2,pp=2,ep=2", {"zero": 1}),
    ],
)
def test_any_layout_takes_a_folder_up_and_gives_it_back(
    name: str, layout: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    right = save(name, tmp_path / "in")
    config = RunConfig.of(layout=layout, sequence_length=40, micro_batch=2, **changes)
    shape = read_shape(tmp_path / "in")
    rows = tokens().tolist()

    def work(world: Communicator) -> torch.Tensor | None:
        parts = assemble_model(config, world, shape)
        load_(parts.model, shape, tmp_path / "in", world)
        export(parts.model, shape, parts.mesh, tmp_path / "out", max_file_bytes=20_000)
        with torch.no_grad(), decoder_of(parts, 40) as decoder:
            logits: torch.Tensor | None = decoder.read(rows)
        return logits

    ranks = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)

    wanted = logits_of(right)[:, -1]
    found = [logits for logits in ranks if logits is not None]
    assert found
    for logits in found:
        torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) > 1
    given, taken = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert given.keys() == taken.keys()
    assert all(torch.equal(taken[key], value) for key, value in given.items())


def test_weights_of_other_dtypes_come_in_and_go_out_unchanged(tmp_path: Path) -> None:
    theirs("llama").to(torch.bfloat16).save_pretrained(tmp_path / "in", max_shard_size="20KB")
    shape = read_shape(tmp_path / "in")
    mesh = Mesh(SingleCommunicator(), MeshShape())

    model = serial(shape)
    load_(model, shape, tmp_path / "in", mesh.world)
    export(model, shape, mesh, tmp_path / "out", dtype=torch.bfloat16)

    given, taken = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    assert given.keys() == taken.keys()
    assert all(same_bits(taken[key], value) for key, value in given.items())
    assert opened(tmp_path / "out").dtype == torch.bfloat16


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing"),
        (
            lambda t: t.update({"model.extra.weight": torch.zeros(2)}),
            r"model\.extra\.weight is unexpected",
        ),
        (
            lambda t: t.update({"lm_head.weight": torch.zeros(95, 32)}),
            r"lm_head\.weight has shape \(95, 32\), expected \(96, 32\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}),
            r"model\.norm\.weight has the dtype torch\.int64",
        ),
    ],
    ids=["missing", "unexpected", "shape", "dtype"],
)
def test_tensors_that_are_not_the_models_are_named_on_every_rank(
    change: Any, message: str, tmp_path: Path
) -> None:
    save("llama", tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    change(held)
    save_file(held, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    config = RunConfig.of(layout="pp=2", sequence_length=40)

    def work(world: Communicator) -> None:
        parts = assemble_model(config, world, shape)
        with pytest.raises(MismatchError, match=message) as caught:
            load_(parts.model, shape, tmp_path, world)
        assert str(tmp_path) in str(caught.value)

    LocalWorld(2, timeout_s=60.0).run(work)


def test_weights_that_are_not_finite_are_refused_on_every_rank(tmp_path: Path) -> None:
    save("llama", tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["model.norm.weight"][3] = float("nan")
    save_file(held, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)
    config = RunConfig.of(layout="pp=2", sequence_length=40)

    def work(world: Communicator) -> None:
        parts = assemble_model(config, world, shape)
        with pytest.raises(CheckpointingError, match=r"model\.norm\.weight holds .* not finite"):
            load_(parts.model, shape, tmp_path, world)

    LocalWorld(2, timeout_s=60.0).run(work)


def test_heads_of_tied_models_and_buffers_of_old_files_are_left_out(tmp_path: Path) -> None:
    right = save("llama-tied", tmp_path)
    held = load_file(tmp_path / "model.safetensors")
    held["lm_head.weight"] = torch.zeros(96, 32)
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
    save_file(held, tmp_path / "model.safetensors")
    shape = read_shape(tmp_path)

    model = serial(shape)
    loaded = load_(model, shape, tmp_path, SingleCommunicator())

    assert set(loaded.left_out) == {
        "lm_head.weight",
        "model.layers.0.self_attn.rotary_emb.inv_freq",
    }
    assert loaded.ignored["initializer_range"] == "of initial weights"
    torch.testing.assert_close(logits_of(model), logits_of(right), rtol=1e-5, atol=1e-5)


class FullDisk(LocalFiles):
    """A disk that takes so many bytes."""

    def create(self, path: Path) -> Any:
        writer = super().create(path)
        if path.suffix == ".safetensors":
            writer.write = self._fail
        return writer

    def _fail(self, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "LocalFiles", FullDisk)
    config = RunConfig.of(layout="tp=2", sequence_length=40)
    shape = attrs.evolve(PRESETS["tiny"], layers=1)

    def work(world: Communicator) -> None:
        parts = assemble_model(config, world, shape)
        with pytest.raises(SaveFailedError, match="No space left on device"):
            export(parts.model, shape, parts.mesh, tmp_path / "out")
        with pytest.raises(TreeError, match="is there already"):
            export(parts.model, shape, parts.mesh, tmp_path)

    LocalWorld(2, timeout_s=60.0).run(work)

    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_copied_along(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "notes.txt").write_text("")
    shape = attrs.evolve(PRESETS["tiny"], layers=1, norm_epsilon=1e-6)
    mesh = Mesh(SingleCommunicator(), MeshShape())

    export(serial(shape), shape, mesh, tmp_path / "out", tokenizer=tmp_path)

    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json"}
    assert read_shape(tmp_path / "out") == attrs.evolve(shape, max_positions=2048)
