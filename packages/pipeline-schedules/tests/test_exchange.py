"""Schedules read back from the tables that they are written into."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.pipeline_schedules import (
    Action,
    Kind,
    Schedule,
    ScheduleError,
    TableError,
    forward_only,
    from_csv,
    gpipe,
    lower,
    one_f_one_b,
    read_csv,
    to_csv,
    verify,
    write_csv,
)
from trainwright.pipeline_schedules.testing import damages, valid_schedules, weight_plans

PAIRED = Schedule(
    [[(Kind.F, 0, 0), (Kind.F_PAIRED, 0, 1), (Kind.B, 0, 0), (Kind.B, 0, 1)]], [0], 2, "paired"
)


@given(data=st.data(), schedule=valid_schedules())
@settings(max_examples=15)
def test_a_schedule_reads_back_from_both_forms_of_its_table(
    data: st.DataObject, schedule: Schedule
) -> None:
    lowered = lower(schedule, data.draw(weight_plans()))
    for one in (schedule, lowered, data.draw(damages(schedule))):
        again = from_csv(
            to_csv(one),
            num_microbatches=one.num_microbatches,
            rank_of_stage=one.rank_of_stage,
        )
        assert again.packed.tolist() == one.packed.tolist()
        assert again.rank_of_stage == one.rank_of_stage
    assert from_csv(to_csv(schedule)) == schedule
    assert from_csv(to_csv(lowered)) == lowered


def test_tables_without_backwards_are_forward_only() -> None:
    for schedule in (forward_only(2, 3), lower(forward_only(2, 3))):
        again = from_csv(to_csv(schedule))
        assert again == schedule
        verify(again)


def test_an_overlapped_pair_is_one_cell_as_pytorch_writes_it() -> None:
    text = to_csv(PAIRED)
    assert text == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\n"
    assert from_csv(text) == PAIRED
    assert from_csv("0F0,(0B0;0F1)OVERLAP_F_B,0B1") == PAIRED


def test_idle_cells_blanks_and_line_ends_of_any_system_do_not_count() -> None:
    text = "0F0,0F1,, 0B0 ,0B1\r\n,1F0,1B0,1F1,1B1\r\n"
    assert from_csv(text) == Schedule(
        [one_f_one_b(2, 2).actions[0], one_f_one_b(2, 2).actions[1]], [0, 1], 2
    )


def test_a_line_without_actions_is_a_rank_without_actions() -> None:
    schedule = from_csv("0F0,0B0\n\n")
    assert schedule.num_ranks == 2
    assert schedule.rank_of_stage == (0,)


def test_files_carry_their_name_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "my schedule.csv"
    write_csv(lower(one_f_one_b(3, 4)), path)
    again = read_csv(path)
    assert again == lower(one_f_one_b(3, 4))
    assert again.name == "my schedule"
    assert read_csv(str(path), name="other").name == "other"


def test_a_file_that_is_no_text_is_refused_with_its_name(tmp_path: Path) -> None:
    path = tmp_path / "picture.csv"
    path.write_bytes(b"\xff\xfe\x80")
    with pytest.raises(TableError, match=r"picture\.csv is no text"):
        read_csv(path)


@pytest.mark.parametrize(
    ("text", "row", "column", "reason"),
    [
        ("", 1, None, "holds no actions"),
        (",,\n\n", 1, None, "holds no actions"),
        ("0F0,0B0\n1F0,1X0\n", 2, 2, "'1X0' is not an action"),
        ("0F0,,0B0x", 1, 3, "'0B0x' is not an action"),
        ("0F0;0B0", 1, 1, "is not an action"),
        ("0F0,0B", 1, 2, "B needs a microbatch"),
        ("0F0,0B0,0REDUCE_GRAD0", 1, 3, "REDUCE_GRAD takes no microbatch"),
        ("0F0,0B0\n1F0,0B1", 2, 2, "stage 0 runs here, but also on rank 0"),
        ("0F0,2F0", 1, None, "no rank runs stage 1, though stage 2 is there"),
        ("0F0,(0F1;0B0)OVERLAP", 1, 2, "a pair is written"),
        ("0F0,(0F1;0B0", 1, 2, "a pair is written"),
        ("0F0,(0F1;0F2)OVERLAP_F_B", 1, 2, "must hold one F and one B or I"),
        ("0F0,(0F1;0B0;0B1)OVERLAP_F_B", 1, 2, "must hold one F and one B or I"),
        ("0F0,()OVERLAP_F_B", 1, 2, "'' is not an action"),
        ("0F_PAIRED0", 1, 1, "both halves of an overlapped pair in one cell"),
        ("0F3000000000", 1, 1, "has a number above"),
        ("0F2000000000", 1, None, "names microbatch 2000000000, but holds 1 actions"),
        ("999999999F0", 1, None, "no rank runs stage 0"),
        ("0F" + "9" * 5000, 1, 1, "is not an action"),
        ("0F0," + "9" * 5000 + "F0", 1, 2, "is not an action"),
        ("0F\u0663", 1, 1, "is not an action"),  # a digit, but not one of these tables
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_table_that_is_no_schedule_is_refused_with_its_row_and_column(
    text: str, row: int, column: int | None, reason: str
) -> None:
    with pytest.raises(TableError, match=reason.replace("(", r"\(")) as caught:
        from_csv(text)
    assert (caught.value.row, caught.value.column) == (row, column)
    if column is not None:
        assert str(caught.value).startswith(f"row {row} (rank {row - 1}), column {column}: ")


def test_a_paired_forward_without_its_backward_is_not_written() -> None:
    rows = [Action(Kind.F_PAIRED, 0, 0), Action(Kind.F, 0, 1)]
    with pytest.raises(ScheduleError, match=r"0F0 on rank 0 is one half .* but 0F1 does"):
        to_csv(Schedule([rows], [0], 2))
    with pytest.raises(ScheduleError, match="but the end does"):
        to_csv(Schedule([rows[:1]], [0], 2))


def test_what_is_read_is_only_form_and_verify_says_what_works() -> None:
    schedule = from_csv(to_csv(gpipe(2, 2)).replace("0B1", "0B0"))
    with pytest.raises(ScheduleError, match=r"0B1 .* missing|0B0 .* happen once"):
        verify(schedule)
