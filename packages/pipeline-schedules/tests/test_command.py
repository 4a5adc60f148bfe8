"""The command shows, compares, searches and imports schedules, and fails in one line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from trainwright.pipeline_schedules import (
    GENERATORS,
    Costs,
    from_csv,
    lower,
    read_csv,
    simulate,
    to_csv,
    verify,
    zb_v,
)
from trainwright.pipeline_schedules.command import main

SIZES = ["--stages", "4", "--microbatches", "12"]
KEYS = [
    "schedule", "stages", "microbatches", "makespan", "span", "bubble_over_ideal",
    "bubble_fraction", "peak_activations", "actions",
]  # fmt: skip


def test_a_schedule_is_drawn_on_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "1f1b", "--stages", "2", "--microbatches", "2"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == "rank 0 | F0 F1 .  .  B0 =  .  B1 ="


def test_json_holds_the_numbers_and_the_actions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "zb-v", *SIZES, "--costs", "F=1,I=1,W=1", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values) == KEYS
    assert (values["schedule"], values["stages"], values["microbatches"]) == ("zb-v", 4, 12)
    assert (values["makespan"], values["span"]) == (75, 72)
    assert values["bubble_over_ideal"] == pytest.approx(3 / 72)
    assert values["bubble_fraction"] == pytest.approx(3 / 75)
    assert values["actions"][0][:2] == ["0F0", "0F1"]


def test_pictures_traces_and_tables_go_to_files_or_to_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out.svg"
    assert main(["show", "zb-v", *SIZES, "--svg", str(target)]) == 0
    assert capsys.readouterr().out == ""
    ElementTree.fromstring(target.read_text(encoding="utf-8"))
    assert main(["show", "zb-v", *SIZES, "--trace"]) == 0
    assert json.loads(capsys.readouterr().out)["traceEvents"]
    assert main(["show", "zb-v", *SIZES, "--csv"]) == 0
    assert capsys.readouterr().out == to_csv(zb_v(4, 12))
    assert main(["show", "zb-v", *SIZES, "--csv", "--lowered"]) == 0
    assert from_csv(capsys.readouterr().out) == lower(zb_v(4, 12))


def test_several_forms_are_written_at_once_each_to_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture, trace, table = (tmp_path / name for name in ("out.svg", "out.json", "out.csv"))
    words = ["--svg", str(picture), "--trace", str(trace), "--csv", str(table), "--json"]
    assert main(["show", "zb-v", *SIZES, *words]) == 0
    assert json.loads(capsys.readouterr().out)["schedule"] == "zb-v"
    ElementTree.fromstring(picture.read_text(encoding="utf-8"))
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert table.read_text(encoding="utf-8") == to_csv(zb_v(4, 12))


def test_tables_are_read_verified_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text(to_csv(lower(zb_v(2, 4))), encoding="ascii")
    assert main(["show", str(table), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["schedule"], values["stages"], values["microbatches"]) == ("mine", 2, 4)
    assert values["makespan"] == simulate(read_csv(table)).makespan


def test_comparing_prints_a_line_for_each_generator(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--stages", "8", "--microbatches", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:-1]}
    assert list(rows) == list(GENERATORS)
    assert rows["1f1b"] == ["1", "117", "117", "0.2188", "0.1795", "8"]
    assert rows["zb-h1"][1:3] == ["103", "103"]
    assert rows["zb-v"][:3] == ["2", "99.5", "96"]


def test_costs_of_transfers_and_of_weights_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD\n", encoding="ascii")

    def makespan(words: list[str], costs: str) -> float:
        assert main(["show", *words, "--json", "--costs", costs]) == 0
        return json.loads(capsys.readouterr().out)["makespan"]

    gpipe = ["gpipe", "--stages", "2", "--microbatches", "2"]
    assert makespan(gpipe, "bytes=6,bandwidth=4,latency=1") == makespan(gpipe, "latency=2.5")
    assert makespan(gpipe, "latency=2.5") == makespan(gpipe, "F=1") + 5
    assert makespan([str(table)], "gather=3,reduce=4") == makespan([str(table)], "F=1") + 7


def test_searching_shows_what_was_found_and_its_bound(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["search", "--stages", "2", "--microbatches", "3", "--memory-limit", "3"]
    assert main([*words, "--costs", "F=1:2,I=1,W=0.5,latency=0.25"]) == 0
    shown = capsys.readouterr().out
    value, bound = map(float, re.findall(r"makespan (\S+); none can be below (\S+)", shown)[0])
    assert bound <= value
    assert main([*words, "--objective", "span", "--v-shape", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert list(values)[: len(KEYS)] == KEYS
    assert len(values["peak_activations"]) == 4


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["show", "zb-x", *SIZES], "'zb-x' is neither a table .* generators are sequential, gpipe"),
        (["show", "1f1b"], "1f1b needs --stages and --microbatches"),
        (["show", "1f1b", "--stages", "0", "--microbatches", "1"], "stages must be at least 1"),
        (["show", "1f1b", "--stages", "3000000000", "--microbatches", "1"], "at most 2147483647"),
        (["show", "zb-v", "--stages", "100000", "--microbatches", "100000"], "ranks times microb"),
        (["show", "1f1b", *SIZES, "--costs", "F=1e308"], r"forward must be at most 1e\+290"),
        (["show", "1f1b", *SIZES, "--chunks", "2"], "1f1b has 1 chunk a rank"),
        (["show", "none.csv"], r"No such file .*none\.csv"),
        (["show", "TABLE"], r"row 2 \(rank 1\), column 1: '1X0' is not an action"),
        (["show", "BROKEN"], r"0B0 .* missing"),
        (["show", "BROKEN", "--stages", "2"], "--stages is for generators"),
        (["show", "1f1b", *SIZES, "--costs", "F=1:2"], "forward must be one number or one for"),
        (["show", "1f1b", *SIZES, "--svg", "/no/folder/x.svg"], "No such file"),
        (["compare", *SIZES, "--costs", "F=1:2:3:4"], "need one forward for all"),
        (["show", "1f1b", *SIZES, "--costs", "F=1e-320,I=0,W=0", "--svg"], "cannot be drawn"),
        (["search", *SIZES, "--memory-limit", "0.5"], "no schedule holds no more"),
        (["search", "--stages", "-3", "--microbatches", "4"], "rank_of_stage must name a rank"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "table.csv").write_text("0F0,0B0\n1X0\n", encoding="ascii")
    (tmp_path / "broken.csv").write_text("0F0\n", encoding="ascii")
    (tmp_path / "broken.csv").write_text("0F0,0F1,0B1\n", encoding="ascii")
    paths = {"TABLE": str(tmp_path / "table.csv"), "BROKEN": str(tmp_path / "broken.csv")}
    assert main([paths.get(word, word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.match(f"error: .*{reason}", err)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "required: COMMAND"),
        (["show"], "required: schedule"),
        (["show", "1f1b", "--stages", "x"], "invalid int value: 'x'"),
        (["show", "1f1b", "--costs", "Q=1"], "'Q=1' names no cost; known are F, I, W, B"),
        (["show", "1f1b", "--costs", "F=one"], "'F=one' is no number"),
        (["show", "1f1b", "--costs", "F=1,F=2"], "F is given twice"),
        (["show", "1f1b", *SIZES, "--json", "--csv"], "--csv and --json both go to standard outp"),
        (["show", "1f1b", *SIZES, "--svg", "x", "--csv", "x"], "--svg and --csv both go to x"),
    ],
)
def test_words_that_mean_nothing_end_with_code_2_and_one_line(
    words: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert re.match(f"error: .*{reason}", err)


def test_it_runs_as_a_module() -> None:
    words = ["show", "zb-h1", "--stages", "2", "--microbatches", "3", "--json"]
    result = subprocess.run(
        [sys.executable, "-m", "trainwright.pipeline_schedules", *words],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    values = json.loads(result.stdout)
    schedule = from_csv("\n".join(",".join(actions) for actions in values["actions"]))
    verify(schedule)
    assert simulate(schedule, Costs()).makespan == values["makespan"]
