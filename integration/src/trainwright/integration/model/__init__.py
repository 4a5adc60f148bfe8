"""A Llama-style decoder, cut into pipeline stages and built from exchangeable layers."""

from trainwright.integration.model.blocks import Block, ExpertBlock, Layers, PlainLayers
from trainwright.integration.model.decoder import DecoderStage, build_stage
from trainwright.integration.model.initialize import initialize_, initializer
from trainwright.integration.model.parallel_layers import TensorParallelLayers
from trainwright.integration.model.shape import PRESETS, ExpertShape, ModelShape, preset

__all__ = [
    "PRESETS",
    "Block",
    "DecoderStage",
    "ExpertBlock",
    "ExpertShape",
    "Layers",
    "ModelShape",
    "PlainLayers",
    "TensorParallelLayers",
    "build_stage",
    "initialize_",
    "initializer",
    "preset",
]
