"""Readers of settings, models and run folders: each reads its input from one file, made anew."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import transformers
import yaml

from tests.fuzzing import Reader
from tests.hugging_face_models import CONFIGS
from trainwright.checkpointing import CheckpointingError
from trainwright.checkpointing.exchange import open_huggingface
from trainwright.integration.checkpoint_command import _parse_size
from trainwright.integration.cli import parser
from trainwright.integration.config import RunConfig
from trainwright.integration.data.choice import parse_paths
from trainwright.integration.deepspeed import read_deepspeed
from trainwright.integration.errors import TrainwrightError
from trainwright.integration.hugging_face import read_config
from trainwright.integration.report import page, read_run
from trainwright.integration.run_folder import RunFolder
from trainwright.integration.settings.options import given_leaves

OURS = (TrainwrightError,)


@functools.cache
def room() -> Path:
    """Return a folder in memory, where there is one, that goes with the process."""
    memory = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    _kept.append(made)
    return Path(made.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def put(name: str, content: bytes) -> Path:
    """Write a file of the room and return where it is."""
    path = room() / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def _leaves(name: str) -> Callable[[bytes], object]:
    return lambda data: RunConfig.load(put(name, data)).leaves()


def _settings(name: str, write: Callable[[Any], str]) -> Reader:
    config = RunConfig.of(layout="dp=2,tp=2", steps=5, data="web@3,code@1", lr=1e-3)
    other = RunConfig.of(schedule="zb-h1", layout="pp=2", recompute="budget:300MB", keep=2)
    seeds = [write(json.loads(each.text())).encode() for each in (config, other)]
    return Reader(_leaves(name), seeds, OURS)


def _toml(values: dict[str, Any]) -> str:
    top = {name: value for name, value in values.items() if not isinstance(value, dict)}
    sections = {name: value for name, value in values.items() if isinstance(value, dict)}
    lines = [f"{name} = {json.dumps(value)}" for name, value in top.items() if value is not None]
    for section, inside in sections.items():
        lines.append(f"[{section}]")
        lines += [f"{k} = {json.dumps(v)}" for k, v in inside.items() if v is not None]
    return "\n".join(lines)


_PARSER = parser()


def _options(data: bytes) -> object:
    words = data.decode("utf-8", "surrogateescape").split("\n")
    if {"-h", "--help"} & set(words):
        return None  # which prints it and ends
    options, unknown = _PARSER.parse_known_args(["train", *words])
    config = RunConfig.of(**given_leaves(options))
    _ = config.parallel.mesh, config.model.shape, config.data.choice, config.sizes
    return config.leaves(), unknown


OPTIONS = [
    b"--layout\ndp=2\n--zero\n3\n--schedule\n1f1b\n--recompute\nbudget:300MB\n--lr\n1e-3",
    b"--layout=dp=8,dp_shard=4\n--data\na@1,b@2\n--packing\nwhole\n--tokenizer\nbpe:300",
    b"--steps\n5\n--dtype\nfloat16\n--offload-activations\ncpu\n--chunks\n2",
]
DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-8}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 10, "total_num_steps": 100, "warmup_min_lr": 0},
    },
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 5e8, "overlap_comm": True},
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
}


def _deepspeed(data: bytes) -> object:
    read = read_deepspeed(put("ds.json", data), {"layout": "dp=2"})
    return read.leaves, read.notes


def _models() -> Reader:
    seeds = [
        json.dumps(getattr(transformers, kind)(**sizes).to_dict()).encode()
        for kind, sizes in CONFIGS.values()
    ]
    return Reader(lambda data: read_config(put("hf/config.json", data).parent).shape, seeds, OURS)


def _tensors(name: str) -> Callable[[bytes], object]:
    def read(data: bytes) -> object:
        with open_huggingface(put(name, data).parent) as source:
            return {key: (t.dtype, t.shape) for key, t in source.tensors.items()}

    return read


def _safetensors() -> bytes:
    header = {
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "__metadata__": {"format": "pt"},
    }
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(range(32))


def _index() -> Reader:
    put("index/one.safetensors", _safetensors())
    seed = json.dumps(
        {"metadata": {"total_size": 32}, "weight_map": dict.fromkeys("ab", "one.safetensors")}
    )
    read = _tensors("index/model.safetensors.index.json")
    return Reader(read, [seed.encode()], (CheckpointingError,))


METRICS = (
    b"".join(
        json.dumps(
            {
                "step": step,
                "loss": 2.0 / step,
                "grad_norm": 1.0,
                "lr": 1e-3,
                "tokens": 9,
                "step_s": 0.1,
            }
        ).encode()
        + b"\n"
        for step in range(1, 5)
    )
    + b'{"step": 4, "held_out_loss": 2.0}\n'
)


def _losses(data: bytes) -> object:
    folder = RunFolder(put("run/metrics.jsonl", data).parent)
    before = folder.losses()
    folder.rewind(2)
    after = folder.losses()
    (folder.path / "metrics.superseded.jsonl").unlink(missing_ok=True)
    return before, after


ABOUT = {
    "model": "tiny",
    "parameters": 5,
    "world": 2,
    "schedule": "1f1b",
    "pipeline_ranks": 2,
    "microbatches": 2,
    "chunks": None,
}
SUMMARY = {"held_out_loss": 1.0, "sample": "x", "steps": 3, "bigram_loss": 2.0}
MEASURED = {
    "step": 3,
    "ranks": [0, 1],
    "compute_s": [0.1, 0.2],
    "wait_s": [0.0, 0.1],
    "step_s": [0.3, 0.3],
    "memory": {"weights": [1, 2]},
    "timeline": [
        [["F", 0, 0, 0.0, 0.1], ["B", 0, 0, 0.3, 0.4], ["F", 0, 1, 0.4, 0.5]],
        [["F", 1, 0, 0.1, 0.2], ["wait for F", 1, 1, 0.2, 0.3]],
    ],
}
JOURNAL = {
    "number": 0,
    "verdict": "SKIP",
    "step": 3,
    "updates": 2,
    "batch": [[0, 4]],
    "left_out": [],
    "reason": "loss",
    "loss": 1.0,
    "back_to": 2,
}


def _page(*names: str) -> Callable[[bytes], object]:
    """Return what draws the page of a run of which some files are the input."""

    def read(data: bytes) -> object:
        sound = {
            "about.json": json.dumps(ABOUT).encode(),
            "summary.json": json.dumps(SUMMARY).encode(),
            "measured.jsonl": json.dumps(MEASURED).encode() + b"\n",
            "metrics.jsonl": METRICS[:90],
            "config.json": b"{}",
        }
        for name, content in sound.items():
            path = put(f"pages/{name}", data if name in names else content)
        put("pages/journal.jsonl", data if "journal.jsonl" in names else b"")
        return len(page(read_run(path.parent)))

    return read


def _line(value: object) -> bytes:
    return json.dumps(value).encode() + b"\n"


READERS: dict[str, Callable[[], Reader]] = {
    "settings-json": lambda: _settings("c.json", json.dumps),
    "settings-yaml": lambda: _settings("c.yaml", yaml.safe_dump),
    "settings-toml": lambda: _settings("c.toml", _toml),
    "settings-deepspeed": lambda: Reader(_deepspeed, [json.dumps(DEEPSPEED).encode()], OURS),
    "settings-options": lambda: Reader(_options, OPTIONS, OURS),
    "settings-mixture": lambda: Reader(
        lambda data: parse_paths(data.decode("utf-8", "surrogateescape")),
        [b"web.jsonl@3,code@1", b"a@0.7,b@1/3", b"a@1e-2,b@2.5"],
        OURS,
    ),
    "settings-layout": lambda: Reader(
        lambda data: RunConfig.of(layout=data.decode("utf-8", "surrogateescape")).parallel.mesh,
        [b"dp=2,tp=2,pp=2", b"dp=4,ep=2,cp=2"],
        OURS,
    ),
    "settings-size": lambda: Reader(
        lambda data: _parse_size(data.decode("utf-8", "surrogateescape")), [b"5GB", b"3MiB"], OURS
    ),
    "model-config": _models,
    "model-index": _index,
    "model-safetensors": lambda: Reader(
        _tensors("one/model.safetensors"), [_safetensors()], (CheckpointingError,)
    ),
    "run-identity": lambda: Reader(
        lambda data: RunFolder(put("identity/run.json", data).parent).identity(),
        [b'{"run": "a1", "data": "b2"}'],
        OURS,
    ),
    "run-metrics": lambda: Reader(_losses, [METRICS], OURS),
    "report-metrics": lambda: Reader(_page("metrics.jsonl"), [METRICS], OURS),
    "report-journal": lambda: Reader(_page("journal.jsonl"), [_line(JOURNAL)], OURS),
    "report-measured": lambda: Reader(_page("measured.jsonl"), [_line(MEASURED)], OURS),
    "report-rest": lambda: Reader(
        _page("about.json", "summary.json", "config.json"),
        [_line({**ABOUT, **SUMMARY, "model": {"model": "tiny"}})],
        OURS,
    ),
}
