"""``trainwright checkpoint`` shows, verifies, compares and converts; mistakes are one line."""

import json
import math

import pytest
import torch

from trainwright.checkpointing import StateStore
from trainwright.checkpointing.exchange import open_huggingface, write_dcp
from trainwright.integration.cli import main


def tree(step):
    torch.manual_seed(0)
    weight = torch.randn(6, 4)
    weight[0, 0] += step
    return {
        "model": {"a.weight": weight, "a.bias": torch.arange(4).to(torch.bfloat16)},
        "optimizer": {"a.weight": {"exp_avg": torch.ones(6, 4)}},
        "run": {"step": step, "loss": math.inf, "scale": [1, 2.5, None]},
    }


@pytest.fixture
def root(tmp_path):
    store = StateStore(tmp_path / "run" / "checkpoints", run="mine")
    for step in (9, 10):
        store.save(step, tree(step))
    return tmp_path / "run"


def call(capsys, *arguments):
    code = main(["checkpoint", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_show_names_run_steps_files_and_each_tensor_with_shape_and_dtype(root, capsys):
    code, out, _ = call(capsys, "show", root)
    assert code == 0
    assert "step 10 of run mine; complete here: 9, 10\n" in out
    assert "rank-00000.safetensors" in out
    assert "run/scale = [1, 2.5, None]" in out
    (line,) = [line for line in out.splitlines() if "model/a.weight " in line]
    assert line.split() == ["model/a.weight", "float32", "6x4", "1", "piece"]


def test_show_as_json_is_strict_json_of_the_step_asked_for(root, capsys):
    code, out, _ = call(capsys, "show", f"{root}@9", "--json")
    said = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert code == 0
    assert (said["run"], said["step"], said["plain"]["run/loss"]) == ("mine", 9, "inf")
    assert said["tensors"]["model/a.bias"]["dtype"] == "bfloat16"
    assert said["tensors"]["model/a.bias"]["pieces"][0]["boxes"] == [[[0], [4]]]


def test_verify_names_every_damaged_file_and_says_1(root, capsys):
    assert call(capsys, "verify", root)[0] == 0
    first, second = sorted((root / "checkpoints").glob("step-*"))
    for folder, name in ((first, "manifest.json"), (second, "rank-00000.safetensors")):
        data = bytearray((folder / name).read_bytes())
        data[-9] ^= 1
        (folder / name).write_bytes(data)

    code, out, _ = call(capsys, "verify", root)
    assert code == 1
    assert f"{first / 'manifest.json'} is damaged" in out
    assert f"{second / 'rank-00000.safetensors'} is damaged" in out
    code, out, _ = call(capsys, "verify", second)
    assert code == 1
    assert str(first) not in out


def test_diff_says_what_differs_and_by_how_much(root, tmp_path, capsys):
    code, out, _ = call(capsys, "diff", f"{root}@9", "@10")
    assert code == 1
    assert out.splitlines() == [
        "run/step: 9 and 10",
        "model/a.weight: 1 elements differ, at most by 1",
    ]
    other = tree(10)
    other["model"]["new"] = other["model"].pop("a.bias")
    other["optimizer"]["a.weight"]["exp_avg"] = torch.ones(4, 6)
    StateStore(tmp_path / "other").save(10, other)
    code, out, _ = call(capsys, "diff", root, tmp_path / "other")
    assert code == 1
    assert out.splitlines() == [
        "only in the first: model/a.bias",
        "only in the second: model/new",
        "optimizer/a.weight/exp_avg: float32 [6, 4] and float32 [4, 6]",
    ]
    assert call(capsys, "diff", root, f"{root}@10") == (0, "no difference\n", "")


def test_a_checkpoint_goes_to_dcp_and_back_and_to_one_file_without_a_difference(
    root, tmp_path, capsys
):
    for place, target, kind in ((root, "dcp", "dcp"), (tmp_path / "dcp", "back", "trainwright")):
        assert call(capsys, "convert", place, tmp_path / target, "--to", kind)[0] == 0
        assert call(capsys, "verify", tmp_path / target)[0] == 0
        assert call(capsys, "show", tmp_path / target)[0] == 0
        assert call(capsys, "diff", root, tmp_path / target) == (0, "no difference\n", "")
    call(capsys, "convert", f"{root}@9", tmp_path / "one", "--to", "trainwright", "--step", 3)
    assert StateStore(tmp_path / "one").steps() == [3]


def test_weights_go_to_safetensors_in_files_of_the_size_asked_for_and_back(root, tmp_path, capsys):
    target = tmp_path / "hf"
    arguments = ("convert", root, target, "--to", "safetensors", "--max-file-size", "100")
    code, out, _ = call(capsys, *arguments)
    assert code == 0
    assert out == f"{target}: 2 tensors, 104 bytes, in 2 files; 4 other entries left out\n"
    with open_huggingface(target) as source:
        assert set(source.tensors) == {"a.weight", "a.bias"}
    code, out, _ = call(capsys, "verify", target)
    assert (code, "no checksums" in out) == (0, True)
    assert call(capsys, "convert", target, tmp_path / "b", "--to", "trainwright")[0] == 0
    _, out, _ = call(capsys, "diff", root, tmp_path / "b")
    assert all(line.startswith("only in the first: ") for line in out.splitlines())


def test_names_of_one_tensor_stay_names_of_one_tensor(tmp_path, capsys):
    weight = torch.randn(3, 2)
    StateStore(tmp_path / "a").save(1, {"model": {"emb": weight, "head": weight}})
    code, out, _ = call(capsys, "convert", tmp_path / "a", tmp_path / "b", "--to", "safetensors")
    assert code == 0
    assert "1 tensors, 24 bytes, in 1 files; head is tied to emb; 0 other" in out
    call(capsys, "convert", tmp_path / "b", tmp_path / "c", "--to", "trainwright")
    assert call(capsys, "diff", tmp_path / "a", tmp_path / "c") == (0, "no difference\n", "")


def test_tuples_and_unreadable_values_of_dcp_folders_are_told(tmp_path, capsys):
    write_dcp(tmp_path / "dcp", {"betas": (0.9, 0.95), "raw": b"ab", "w": torch.ones(1)})
    code, _, err = call(capsys, "convert", tmp_path / "dcp", tmp_path / "c", "--to", "trainwright")
    assert code == 0
    assert err.splitlines() == [
        "left out raw: a bytes is no plain value",
        "betas: tuples became lists",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "{}/absent"], "absent is no folder"),
        (["show", "{}/run@77"], "holds no complete checkpoint of step 77"),
        (["show", "{}/run", "--run", "other"], "of run 'other'"),
        (["show", "{}/empty"], "holds no complete checkpoint"),
        (["verify", "{}/empty"], "holds no checkpoint"),
        (["verify", "{}/run@77"], "holds no complete checkpoint of step 77"),
        (["diff", "{}/run", "{}/absent"], "absent is no folder"),
        (["convert", "{}/run", "{}/run", "--to", "dcp"], "is there already"),
        (["convert", "{}/run", "{}/x", "--to", "zip"], "invalid choice: 'zip'"),
        (["convert", "{}/run", "{}/x", "--to", "dcp", "--max-file-size", "1TB"], "such as 500MB"),
        (
            ["convert", "{}/run", "{}/x", "--to", "safetensors", "--prefix", "m/"],
            "there are model/",
        ),
        (["convert", "{}/run", "{}/x", "--to", "trainwright", "--step", "-1"], "step must be"),
        (["look"], "invalid choice: 'look'"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(root, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").mkdir()
    code, out, err = call(capsys, *(text.format(tmp_path) for text in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("trainwright: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()
