"""The commands that look at a model: evaluate, generate and export, on runs and folders."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from trainwright.integration.cli import main
from trainwright.integration.data import open_data
from trainwright.integration.run_folder import WRITER, RunFolder

LICENSE = Path(__file__).parents[2] / "LICENSE"
LAYOUTS = [
    ["--comm", "threads", "--layout", "tp=2,pp=2"],
    pytest.param(["--comm", "threads", "--layout", "dp=3", "--zero", "3"], marks=pytest.mark.long),
]
SETTINGS = ["--sequence-length", "32", "--global-batch", "4", "--sample-bytes", "0"]
SETTINGS += ["--dtype", "float64", "--threads-as-ranks", "--tokenizer", "bpe:300"]


@pytest.fixture(scope="module")
def summary(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what a short run with a tokenizer of its own says at its end."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    arguments = ["--data", str(LICENSE), "--steps", "2", "--out", str(folder), *SETTINGS]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main(["train", "--layout", "dp=1", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


@pytest.fixture(scope="module")
def trained(summary: dict[str, Any]) -> Path:
    """Return the folder of the run."""
    return Path(summary["out"])


@pytest.fixture(scope="module")
def exported(trained: Path) -> Path:
    """Return the folder that the run was exported to, by two ranks."""
    folder = trained.with_name("exported")
    assert main(["export", str(trained), str(folder), "--layout", "tp=2", "--comm", "threads"]) == 0
    return folder


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main([*arguments]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("layout", LAYOUTS, ids=["model", "data"])
def test_a_model_is_measured_and_continues_a_text_alike_in_any_layout(
    summary: dict[str, Any], layout: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run = summary["out"]
    asked = ["--prompt", "Licensor — é", "--tokens", "9", "--temperature", "1.0", "--seed", "5"]

    found = json.loads(said(capsys, "evaluate", run, *layout, "--json"))
    alone = said(capsys, "generate", run, *asked)

    assert math.isclose(found["loss"], summary["held_out_loss"], rel_tol=1e-9)
    assert math.isclose(found["bits_a_byte"], summary["held_out_bits"], rel_tol=1e-9)
    assert found["perplexity"] == math.exp(found["loss"])
    held_out = open_data(Path(run) / "data").held_out[0]
    # All but the first token, also those that fill no row.
    assert found["tokens"] == len(held_out) - 1
    assert found["tokens"] % 32 > 0
    assert found["model"].startswith("step 2 of ")
    assert said(capsys, "generate", run, *asked, *layout) == alone
    assert alone.startswith("Licensor — é")
    assert alone.endswith("\n")


def test_all_of_a_file_is_evaluated_by_its_bytes(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = LICENSE.read_text()[:900]
    (tmp_path / "text.txt").write_text(text)
    tokenizer = Tokenizer.from_file(str(trained / "tokenizer.json"))
    tokens = [*tokenizer.encode(text).ids[1:], tokenizer.token_to_id("<|endoftext|>")]

    arguments = ["--data", str(tmp_path / "text.txt"), "--layout", "dp=2", "--comm", "threads"]
    found = json.loads(said(capsys, "evaluate", str(trained), *arguments, "--json"))

    assert (found["sequences"], found["tokens"]) == (-(-len(tokens) // 32), len(tokens))
    size = len(tokenizer.decode(tokens[:-1]).encode())
    expected = found["loss"] * len(tokens) / math.log(2) / size
    assert math.isclose(found["bits_a_byte"], expected, rel_tol=1e-12)
    shown = said(capsys, "evaluate", str(trained), *arguments, "--sequences", "1")
    assert "32 tokens in 1 sequences" in shown


def test_an_exported_model_is_that_of_transformers_and_says_the_same(
    trained: Path, exported: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = ["the Work", ""]
    asked = ["--tokens", "6", "--temperature", "0", "--no-stop", "--json"]
    asked += [word for prompt in prompts for word in ("--prompt", prompt)]
    run, folder = (
        [json.loads(line) for line in said(capsys, "generate", str(place), *asked).splitlines()]
        for place in (trained, exported)
    )

    assert run == folder
    model: Any = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    tokenizer = Tokenizer.from_file(str(exported / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    for prompt, found in zip(prompts, run, strict=True):
        tokens = tokenizer.encode(prompt).ids or [end]
        for token in found["tokens"]:
            logits = model(torch.tensor([tokens])).logits[0, -1]
            logits[end] = -math.inf
            assert int(logits.argmax()) == token
            tokens.append(token)
        assert found["text"] == tokenizer.decode(found["tokens"], skip_special_tokens=False)


def test_a_folder_is_trained_on_with_its_own_tokenizer_and_written_back(
    summary: dict[str, Any],
    exported: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    values = json.loads((exported / "config.json").read_text()) | {"eos_token_id": 0}
    (tmp_path / "given").mkdir()
    for path in exported.iterdir():
        (tmp_path / "given" / path.name).write_bytes(path.read_bytes())
    (tmp_path / "given" / "config.json").write_text(json.dumps(values))
    (tmp_path / "given" / "generation_config.json").write_text("{}")
    # At this rate an update changes nothing that could be seen.
    arguments = ["--model", str(tmp_path / "given"), "--lr", "1e-30", "--steps", "1"]
    arguments += ["--data", str(LICENSE), "--layout", "tp=2", "--out", str(tmp_path / "run")]

    capsys.readouterr()
    assert main(["train", *arguments, *SETTINGS[:-2], "--json"]) == 0
    told = capsys.readouterr()
    begun = json.loads(told.out)

    assert math.isclose(begun["held_out_loss"], summary["held_out_loss"], rel_tol=1e-9)
    assert "keys of config.json that change nothing here: architectures, " in told.err
    # From here on the run stands alone.
    given = (tmp_path / "given").rename(tmp_path / "aside")
    said(capsys, "export", str(tmp_path / "run"), str(tmp_path / "back"))
    for name in ("config.json", "tokenizer.json", "generation_config.json"):
        written = (tmp_path / "back" / name).read_text()
        assert json.loads(written) == json.loads((given / name).read_text())
    kept = (tmp_path / "run" / "data" / "0.train.safetensors").stat().st_mtime_ns
    resume = ["train", "--resume", str(tmp_path / "run"), "--threads-as-ranks", "--json"]
    resumed = json.loads(said(capsys, *resume, "--layout", "pp=2", "--steps", "2"))
    assert math.isclose(resumed["held_out_loss"], summary["held_out_loss"], rel_tol=1e-9)
    assert (tmp_path / "run" / "data" / "0.train.safetensors").stat().st_mtime_ns == kept
    moved = str((tmp_path / "run").rename(tmp_path / "moved"))
    assert math.isclose(
        json.loads(said(capsys, "evaluate", moved, "--json"))["loss"],
        summary["held_out_loss"],
        rel_tol=1e-9,
    )
    assert said(capsys, "generate", moved, "--prompt", "a", "--tokens", "2").startswith("a")
    # Another model is still refused.
    assert main([*resume[:2], moved, "--threads-as-ranks", "--model", "tiny-moe"]) != 0
    weights, back = (
        load_file(folder / "model.safetensors") for folder in (exported, tmp_path / "back")
    )
    assert all(torch.equal(back[name], weight) for name, weight in weights.items())


def test_a_text_ends_where_the_model_says_so(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["--prompt", "Work", "--tokens", "9", "--temperature", "0", "--json"]
    told = json.loads(said(capsys, "generate", str(trained), *asked))
    third = told["tokens"][2]
    first = told["tokens"].index(third)
    monkeypatch.setattr("trainwright.integration.places._end_of", lambda _: frozenset({third}))

    ended = json.loads(said(capsys, "generate", str(trained), *asked))

    assert ended["tokens"] == told["tokens"][: first + 1]
    assert told["text"].startswith(ended["text"])
    on = json.loads(said(capsys, "generate", str(trained), *asked, "--no-stop"))
    assert len(on["tokens"]) == 9
    assert third not in on["tokens"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "{}/nowhere", "--prompt", "a"], "holds no model"),
        (["generate", "{}/run", "--prompt", "a", "--tokens", "0"], "--tokens must be at least 1"),
        (["generate", "{}/run", "--prompt", "a", "--top-p", "2"], "--top-p"),
        (["generate", "{}/run", "--prompt", "a", "--window", "0"], "cannot see 0 tokens"),
        (["generate", "{}/run", "--prompt", "a", "--layout", "pp=9"], "pp up to 4 works"),
        (["evaluate", "{}/run", "--sequences", "0"], "--sequences"),
        (["evaluate", "{}/run", "--data", "{}/nothing.txt"], "does not exist"),
        (["evaluate", "{}/run", "--sequence-length", "100000"], "sequence length"),
        (["evaluate", "{}/exported"], "give --data"),
        (["evaluate", "{}/exported", "--data", "{}/run", "--step", "2"], "has no steps"),
        (["evaluate", "{}/run", "--step", "1"], "no complete checkpoint"),
        (["export", "{}/run", "{}/exported"], "is there already"),
        (["generate", "{}", "--prompt", "a"], "holds no model"),
        (["generate", "{}/run", "--prompt", "\ud800"], "half a character"),
        (["evaluate", "{}/run", "--layout", "dp=1000000"], "dp=1000000|processes|ranks"),
        (["evaluate", "{}/run", "--micro-batch", "0"], "--micro-batch"),
        (["report", "{}"], "holds no run"),
        (["report", "{}/run", "--out", "{}/missing/r.html"], "cannot write the report"),
        (["data", "show", "{}"], "holds no run"),
        (["data", "tokenize", "{}/nothing", "--out", "{}/new"], "does not exist"),
        (["data", "tokenize", "{}/run/config.json", "--out", "{}/run"], "holds something else"),
        (["checkpoint", "show", "{}/exported@3"], "has no steps"),
        (["checkpoint", "show", "{}"], "no complete checkpoint|no checkpoint"),
        (["checkpoint", "diff", "{}/run", "@7"], "no complete checkpoint"),
        (["checkpoint", "convert", "{}/run", "{}/exported", "--to", "dcp"], "is there already"),
    ],
)
def test_what_cannot_be_looked_at_is_refused_in_words(
    trained: Path,
    exported: Path,
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = main([word.replace("{}", str(trained.parent)) for word in arguments])

    assert code == 2
    assert re.search(words, capsys.readouterr().err)


def test_damaged_weights_are_input_that_cannot_be_used(
    trained: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = (shutil.copytree(place, tmp_path / place.name) for place in (trained, exported))
    (kept,) = (run / "checkpoints").glob("*2*/*.safetensors")
    (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:-4] + b"\xff\xff\xff\x7f"
    )
    content = kept.read_bytes()
    first = 8 + int.from_bytes(content[:8], "little")
    kept.write_bytes(content[:first] + bytes(255 - byte for byte in content[first:]))
    asked = [["generate", "--prompt", "a", "--tokens", "2"], ["evaluate", "--data", str(LICENSE)]]

    for place, word in ((run, "checksum|damaged"), (folder, "not finite")):
        for command, *more in [*asked, ["export", str(tmp_path / "new")]]:
            assert main([command, str(place), *more]) == 2
            assert re.search(word, capsys.readouterr().err)
    assert main(["checkpoint", "verify", str(run)]) == 1
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "with 2 where options, settings, data, weights or folders cannot be" in " ".join(
        capsys.readouterr().out.split()
    )
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("asked", "count"),
    [
        (["--prompt", "", "--tokens", "3", "--no-stop"], 3),
        (["--prompt", "Work " * 200, "--tokens", "3", "--no-stop"], 3),
        (["--prompt", "a", "--tokens", "40", "--no-stop", "--temperature", "0"], 40),
        (["--prompt", "a", "--tokens", "3", "--no-stop", "--top-k", "100000"], 3),
        (["--prompt", "a", "--tokens", "3", "--no-stop", "--temperature", "1e-300"], 3),
    ],
)
def test_text_is_continued_whatever_its_length_and_rule(
    trained: Path, asked: list[str], count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    told = json.loads(said(capsys, "generate", str(trained), *asked, "--json"))
    assert len(told["tokens"]) == count


def test_what_looks_at_a_run_sees_it_while_it_is_written_or_was_killed(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(trained, tmp_path / "run")
    # A run that goes on holds its locks, and one that was killed leaves half of what it wrote.
    with RunFolder(run).lock(), RunFolder(run).lock(WRITER):
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "lo')
        half = run / "checkpoints" / "step-00000003.tmp"
        half.mkdir()
        (half / "model.safetensors").write_bytes(b"half")
        assert said(capsys, "generate", str(run), "--prompt", "a", "--tokens", "2")
        assert json.loads(said(capsys, "evaluate", str(run), "--json"))["tokens"]
        assert "report.html" in said(capsys, "report", str(run))
        assert "1 unreadable lines" in (run / "report.html").read_text()
        assert "step 2" in said(capsys, "checkpoint", "show", str(run))
        assert main(["data", "show", str(run)]) == 2
        assert "it never intervened" in capsys.readouterr().err
    shutil.rmtree(run / "checkpoints")
    for command in (["generate", str(run), "--prompt", "a"], ["evaluate", str(run)]):
        assert main(command) == 2
        assert "has no checkpoint yet" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.processes
def test_processes_continue_a_text_as_one_does(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["generate", str(trained), "--prompt", "Licensor é", "--tokens", "12"]
    command = [sys.executable, "-m", "trainwright.integration", *asked, "--layout", "tp=2"]

    finished = subprocess.run(command, capture_output=True, timeout=120, check=False)

    assert (finished.returncode, finished.stderr) == (0, b"")
    assert finished.stdout.decode() == said(capsys, *asked)


def test_an_option_that_a_command_has_not_is_refused_with_the_commands_own_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["generate", "runs/mine", "--prompt", "a", "--chat"]) == 2

    told = "trainwright: unrecognized arguments: --chat; see trainwright generate --help\n"
    assert capsys.readouterr().err == told
