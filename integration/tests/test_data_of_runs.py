"""Runs on tokenised and packed data: in layouts, resumed, refused; each held-out sample once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import attrs
import pytest
import torch

from trainwright.collectives import Communicator, LocalWorld
from trainwright.integration import ModelShape, RunConfig, assemble, train
from trainwright.integration.cli import main
from trainwright.integration.data import DataChoice, prepare_data
from trainwright.integration.errors import ConfigError
from trainwright.integration.evaluation import evaluate
from trainwright.integration.vocabulary import check_vocabulary, shape_for
from trainwright.sharding import Mesh, MeshShape
from trainwright.stability_guards import FileJournal, Intervention, Positions, Verdict

SHAPE = ModelShape(vocabulary=300, width=32, layers=2, heads=4, kv_heads=2, mlp_width=48)
TEXT = "".join(f"sentence {k} of the {k % 7}th kind, and then more\n" for k in range(300))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(40):
        lines = TEXT.splitlines(keepends=True)[7 * number : 7 * number + 7 - number % 3]
        (folder / f"{number:02d}.txt").write_text("".join(lines))
    return folder


@pytest.mark.parametrize("packing", ["documents", "whole"])
def test_packed_documents_train_alike_in_every_layout(
    tmp_path: Path, texts: Path, packing: str
) -> None:
    choice = DataChoice(data=str(texts), tokenizer="bpe:300", packing=packing)
    data = prepare_data(choice, tmp_path / "data")

    def outcome(**layout: object) -> tuple[list[float], float]:
        config = RunConfig.of(
            steps=2, global_batch=4, sequence_length=24, dtype="float64", packing=packing, **layout
        )

        def work(world: Communicator) -> tuple[list[float], float]:
            records: list[float] = []
            parts = assemble(config, world, data, SHAPE)
            train(parts, parts.start(), [lambda record: records.append(record.loss)])
            rows = data.held_out_rows(24, 5)
            held_out = evaluate(parts, rows.tokens_NS, rows.labels_NS, rows.documents_NS)
            parts.feed.close()
            return records, held_out

        results = LocalWorld(config.parallel.mesh.world_size, timeout_s=60.0).run(work)
        assert all(result == results[0] for result in results)
        return results[0]

    losses, held_out = outcome()
    assert losses[1] < losses[0]
    others: list[dict[str, object]] = [{"layout": "dp=2,cp=2"}]
    if packing == "documents":
        others.append({"layout": "tp=2,pp=2", "read_ahead": 0})
    for layout in others:
        found, also = outcome(**layout)
        assert found == pytest.approx(losses, rel=1e-12)
        assert also == pytest.approx(held_out, rel=1e-12)


def test_evaluation_counts_every_sequence_once_on_any_number_of_ranks() -> None:
    # What stands for the model gives each token its number as its loss.
    class _Counting:
        def evaluate(self, inputs, passes):
            total = sum(float(inputs(0, k)["tokens_BS"].sum()) for k in range(passes))
            return type("Result", (), {"loss_sum": total})

    def mean(world: Communicator, samples: int) -> float:
        config = RunConfig.of(layout=f"dp={world.size}", global_batch=12, sequence_length=1)
        parts = SimpleNamespace(
            mesh=Mesh(world, MeshShape.parse(f"dp={world.size}")),
            config=config,
            executor=_Counting(),
            counts_tokens=1.0,
        )
        tokens = torch.arange(samples)[:, None]
        return evaluate(parts, tokens, tokens)

    for ranks in (1, 2, 3, 4):
        assert set(LocalWorld(ranks).run(lambda world: mean(world, 10))) == {4.5}
        assert set(LocalWorld(ranks).run(lambda world: mean(world, 2))) == {0.5}


SMALL = ["--sequence-length", "16", "--global-batch", "4", "--sample-bytes", "3"]
EVALUATED = ["--evaluate-sequences", "4", "--threads-as-ranks", "--json"]


def _train(capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, object]:
    capsys.readouterr()
    assert main(["train", *EVALUATED, *more]) == 0
    summary: dict[str, object] = json.loads(capsys.readouterr().out)
    return summary


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, texts: Path) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    learnt = ["--tokenizer", "bpe:290", "--packing", "whole", *SMALL]
    given = ["--data", str(texts), *learnt, "--steps", "1", "--out", str(run)]
    assert main(["train", *given, *EVALUATED]) == 0
    return run


def test_a_run_on_learnt_tokens_is_resumed_without_tokenising_anew(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    kept = run / "data" / "0.train.safetensors"
    before = kept.stat().st_mtime_ns

    summary = _train(capsys, "--resume", str(run), "--steps", "2", "--layout", "dp=2")

    assert kept.stat().st_mtime_ns == before
    assert (run / "tokenizer.json").exists()
    assert summary["bigram_loss"] is None
    assert isinstance(summary["held_out_bits"], float)
    assert 0 < summary["held_out_bits"] < 16
    assert isinstance(summary["sample"], str)
    assert summary["sample"].startswith("\ndef ")


def test_other_tokens_are_other_data_and_leave_those_of_the_run_alone(
    tmp_path: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    manifest = (run / "data" / "manifest.json").read_text()

    for changed in (["--packing", "documents"], ["--data", __file__], ["--tokenizer", "bytes"]):
        code = main(["train", *EVALUATED, "--resume", str(run), "--steps", "2", *changed])
        assert code == 2
        assert "is not the data that the run" in capsys.readouterr().err
        assert (run / "data" / "manifest.json").read_text() == manifest
        assert sorted(path.name for path in run.glob("data*")) == ["data"]


def test_data_that_cannot_be_leaves_no_run_folder(
    tmp_path: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    for given, word in (
        (["--sequence-length", "99999"], "shorter than one sequence"),
        (["--tokenizer", "bpe:9000"], "give"),
        (["--held-out", str(tmp_path / "missing")], "does not exist"),
        (["--chat"], "messages"),
        (["--tokenizer", "ids:300"], "numbers only"),
    ):
        code = main(["train", *EVALUATED, "--data", str(texts), *given, "--out", str(out)])
        assert code == 2
        assert word in capsys.readouterr().err
        assert not out.exists()


def test_a_preset_takes_the_tokens_of_the_data_and_another_model_must_know_them() -> None:
    config = RunConfig.of(model="tiny")
    assert shape_for(config, 5000) == attrs.evolve(config.model.shape, vocabulary=5000)
    check_vocabulary(SHAPE, 300, "mine")
    with pytest.raises(ConfigError, match=r"mine has a vocabulary of 300.*one of 301"):
        check_vocabulary(SHAPE, 301, "mine")


def test_what_a_run_stumbled_over_is_shown_as_text(
    tmp_path: Path, finished: Path, texts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    batch = Positions([(0, 4)])
    entry = Intervention(0, Verdict.SKIP, 0, 0, batch=batch, left_out=Positions(), reason="loss")
    FileJournal(run / "journal.jsonl").append(entry)

    capsys.readouterr()
    assert main(["data", "show", str(run), "--json"]) == 0

    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["position"] for row in rows] == [0, 1, 2, 3]
    joined = "".join(path.read_text() for path in texts.iterdir())
    for row in rows:
        pieces = [piece for piece in row["text"].split("<|endoftext|>") if piece]
        assert pieces
        assert all(piece in joined for piece in pieces)
