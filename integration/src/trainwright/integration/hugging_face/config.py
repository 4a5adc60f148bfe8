"""config.json of Hugging Face's libraries: read as a shape, written from one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import torch

from trainwright.integration.errors import ConfigError
from trainwright.integration.hugging_face.families import FAMILIES, Family
from trainwright.integration.hugging_face.keys import IGNORABLE, Keys
from trainwright.integration.model import ModelShape
from trainwright.integration.outside_files import read_object
from trainwright.sharding import ShardingError

CONFIG = "config.json"
_REFUSED = {
    "quantization_config": "quantised weights are not read; save the model without them first",
    "is_encoder_decoder": "only decoders are",
}
TRAINING = ("z_loss", "embedding_gradient")
"""What a shape says of training alone."""


@attrs.frozen
class FoundConfig:
    """What a config.json says.

    Args:
        shape: the model.
        model_type: its family.
        ignored: keys that change nothing here, each with the reason.
        values: all that the file holds.
    """

    shape: ModelShape
    model_type: str
    ignored: Mapping[str, str] = attrs.field(repr=False)
    values: Mapping[str, Any] = attrs.field(repr=False)

    @property
    def family(self) -> Family:
        """How the family says what a model is."""
        return FAMILIES[self.model_type]


def read_shape(folder: str | Path, *, ignore: Collection[str] = ()) -> ModelShape:
    """Return the shape of the model in a folder, as its config.json says; see `read_config`."""
    return read_config(folder, ignore=ignore).shape


def read_config(folder: str | Path, *, ignore: Collection[str] = ()) -> FoundConfig:
    """Return what the config.json of a folder says; no other file is looked at.

    Args:
        folder: the folder.
        ignore: keys that are not known here and may be passed over.

    Raises:
        ConfigError: There is no such file, its ``model_type`` is not known, or a key that may
            change what is computed is not implemented, or has a value that is not.
    """
    path = Path(folder) / CONFIG
    try:
        values = read_object(path)
    except FileNotFoundError:
        raise ConfigError(f"{folder} holds no {CONFIG}, which says what its model is") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    return understand(values, str(path), ignore)


def understand(
    values: Mapping[str, Any], source: str = CONFIG, ignore: Collection[str] = ()
) -> FoundConfig:
    """Return what the entries of a config.json say; see `read_config`."""
    keys = Keys(values, source, ignore)
    kind = keys.optional("model_type")
    for name, reason in _REFUSED.items():
        if keys.optional(name):
            keys.refuse(f"{name}: {reason}")
    if not isinstance(kind, str) or kind not in FAMILIES:
        keys.refuse(f"model_type={kind!r} is not implemented; {', '.join(FAMILIES)} are")
    try:
        shape = FAMILIES[kind].read(keys)
    except ConfigError:
        raise
    except (ShardingError, TypeError, ValueError, ArithmeticError) as error:
        # Such as a period of no layers.
        raise ConfigError(f"{source}: {error}") from error
    return FoundConfig(shape, kind, keys.finish(), dict(values))


def write_config(
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    like: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the entries of a config.json that says this shape, in the form of its family.

    Args:
        shape: the model.
        dtype: of its weights in the files.
        like: another config.json of which entries that change nothing are taken over, such as the
            numbers of tokens; and its family, where that can say the shape.

    Raises:
        ConfigError: No family has such a model; the message says what stands in the way.
    """
    kept = {name: value for name, value in (like or {}).items() if name in IGNORABLE}
    first = (like or {}).get("model_type")
    reasons = []
    for kind, family in sorted(FAMILIES.items(), key=lambda item: item[0] != first):
        found = _said_by(shape, kind, family)
        if isinstance(found, dict):
            told = {"architectures": [family.architecture], "model_type": kind}
            name = str(dtype).removeprefix("torch.")
            return {**kept, **told, **found, "dtype": name, "torch_dtype": name}
        if family.sparse == (shape.experts is not None):
            reasons.append(f"{kind}: {found}")
    raise ConfigError(
        "no family of Hugging Face's models is known that has all of this model, so that it "
        f"cannot be exported: {'; '.join(reasons)}"
    )


def _said_by(shape: ModelShape, kind: str, family: Family) -> dict[str, Any] | str:
    """Return what a family writes of a shape if it reads the same again, else what it has not."""
    if (shape.experts is not None) != family.sparse:
        return "other feed-forward blocks"
    written = family.write(shape)
    try:
        again = understand({"model_type": kind, **written}).shape
    except ConfigError as error:
        return str(error)
    differ = [
        told
        for field in attrs.fields(ModelShape)
        if field.name not in TRAINING
        for told in _told(field.name, _value(shape, field.name), _value(again, field.name))
    ]
    return written if not differ else f"it has {', '.join(differ)}"


def _told(name: str, ours: Any, theirs: Any) -> Iterator[str]:
    """Say how two values of a shape differ, by their parts where they have some."""
    if ours == theirs:
        return
    if not attrs.has(type(ours)) or type(ours) is not type(theirs):
        yield f"{name}={theirs}, not {ours}"
        return
    for field in attrs.fields(type(ours)):
        yield from _told(field.name, getattr(ours, field.name), getattr(theirs, field.name))


def _value(shape: ModelShape, name: str) -> Any:
    if name == "max_positions" and shape.positions == "rotary":
        return None
    if name == "head_features":
        return shape.head_width
    if name == "mlp_width" and shape.experts is not None and not shape.dense_layers:
        return None  # nothing has it
    if name == "experts" and shape.experts is not None:
        return attrs.evolve(shape.experts, balance=0.0, z=0.0)  # factors of training
    return getattr(shape, name)
