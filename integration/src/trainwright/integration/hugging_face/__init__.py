"""Models of Hugging Face's libraries: read, loaded into any layout, and written again."""

from trainwright.integration.hugging_face.config import (
    FoundConfig,
    read_config,
    read_shape,
    write_config,
)
from trainwright.integration.hugging_face.exporting import export
from trainwright.integration.hugging_face.families import FAMILIES
from trainwright.integration.hugging_face.loading import Loaded, load_

__all__ = [
    "FAMILIES",
    "FoundConfig",
    "Loaded",
    "export",
    "load_",
    "read_config",
    "read_shape",
    "write_config",
]
