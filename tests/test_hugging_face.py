"""Folders of Hugging Face's libraries come in and go out whole, and compute the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hugging_face_models import CONFIGS, logits_of, save, serial
from trainwright.collectives import SingleCommunicator
from trainwright.integration.hugging_face import export, load_, read_config, read_shape
from trainwright.sharding import Mesh, MeshShape


def opened(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager"
    ).eval()


@pytest.mark.parametrize("name", CONFIGS)
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
