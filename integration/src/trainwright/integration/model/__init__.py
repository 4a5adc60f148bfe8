"""A Llama-style decoder, cut into pipeline stages and built from exchangeable layers."""

from trainwright.integration.model.blocks import Block, DenseBlock, ExpertBlock
from trainwright.integration.model.decoder import DecoderStage, build_stage
from trainwright.integration.model.initialize import initialize_, initializer
from trainwright.integration.model.latent_shape import LatentShape
from trainwright.integration.model.layers import Layers, PlainLayers
from trainwright.integration.model.packing import Packed, Places, attend_causally
from trainwright.integration.model.parallel_layers import TensorParallelLayers
from trainwright.integration.model.shape import (
    PRESETS,
    ExpertShape,
    ModelShape,
    preset,
)

__all__ = [
    "PRESETS",
    "Block",
    "DecoderStage",
    "DenseBlock",
    "ExpertBlock",
    "ExpertShape",
    "LatentShape",
    "Layers",
    "ModelShape",
    "Packed",
    "Places",
    "PlainLayers",
    "TensorParallelLayers",
    "attend_causally",
    "build_stage",
    "initialize_",
    "initializer",
    "preset",
]
