"""Links between two hosts that are cut, for a while or for good: namespaces stand for hosts."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs
import pytest

from tests.faulting import (
    DEADLINE_S,
    NOTICE_S,
    ROOT,
    TIMEOUT_S,
    Ended,
    Server,
    Setting,
    begin_or_resume,
    check_checkpoints,
    described,
    ended_of,
    environment_of_ranks,
    left_by,
    run_apart,
)
from tests.faulting_command import LINK, Fault
from tests.faulting_session import TABLE, Row, UndisturbedRuns

pytestmark = [pytest.mark.processes, pytest.mark.fault]

PORT = 29500
SETTING = Setting("dp=2", "gloo")


@attrs.frozen
class Host:
    """A network namespace with one end of the link; ``link`` is the interface's name there."""

    name: str
    link: str
    address: str

    def command(self, *words: str) -> list[str]:
        return ["ip", "netns", "exec", self.name, *words]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with one link between them."""
    if shutil.which("ip") is None:
        pytest.skip("there is no ip command (iproute2) to make network namespaces with")
    number = os.getpid()
    pair = tuple(
        Host(f"tw{number}{side}", f"tw{number}{side}", f"10.213.7.{place}")
        for place, side in enumerate("ab", 1)
    )
    with contextlib.ExitStack() as made:
        try:
            for host in pair:
                ip("netns", "add", host.name)
                made.callback(ip, "netns", "del", host.name)
            first, second = pair
            ip("link", "add", first.link, "type", "veth", "peer", "name", second.link)
            for host in pair:
                ip("link", "set", host.link, "netns", host.name)
                ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.link)
                for link in ("lo", host.link):
                    ip("-n", host.name, "link", "set", link, "up")
        except subprocess.CalledProcessError as error:
            made.close()
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        yield first, second


def run_on_hosts(
    hosts: tuple[Host, Host], arguments: Sequence[str], folder: Path, faults: Sequence[Fault]
) -> Ended:
    """Run one rank on each host; the first one's is where they meet."""
    processes = []
    for rank, host in enumerate(hosts):
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
        variables = {name: str(value) for name, value in place.items()}
        variables |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": str(PORT)}
        variables |= {LINK: host.link, "GLOO_SOCKET_IFNAME": host.link}
        variables |= described(faults, folder)
        tool = [sys.executable, "-m", "tests.faulting_command", "train"]
        command = host.command(*tool, *SETTING.arguments, *arguments)
        environment = environment_of_ranks() | variables
        processes.append(subprocess.Popen(command, env=environment, cwd=ROOT))
    codes: dict[int, int | None] = {}
    end = time.monotonic() + DEADLINE_S
    try:
        for rank, process in enumerate(processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                codes[rank] = process.wait(max(0.1, end - time.monotonic()))
        last = time.monotonic()
    finally:
        for process in processes:
            if process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)
            process.wait()
    return ended_of(folder, {rank: codes.get(rank) for rank in (0, 1)}, last)


def middle(undisturbed: UndisturbedRuns, rank: int) -> int:
    """Return the number of an operation in the midst of the run."""
    return undisturbed[SETTING].begun[rank]["collective"] * 2 // 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_link_that_is_cut_ends_both_sides_and_the_run_goes_on_bit_for_bit(
    hosts: tuple[Host, Host],
    server: Server,
    undisturbed: UndisturbedRuns,
    book: Path,
    tmp_path: Path,
    rank: int,
) -> None:
    fault = Fault("cut", "collective", rank, middle(undisturbed, rank), 0.0)
    run = tmp_path / "run"

    ended = run_on_hosts(hosts, begin_or_resume(run, book), tmp_path / "first", [fault])
    newest = check_checkpoints(run)
    again = run_apart(server, SETTING, begin_or_resume(run, book), tmp_path / "again")

    assert ended.struck
    for side, code in ended.codes.items():
        assert code == 1, ended.text
        assert f"missing: rank {1 - side}" in ended.errors[side], ended.text
    assert ended.seconds < TIMEOUT_S + NOTICE_S, ended.text
    assert set(again.codes.values()) == {0}, again.text
    assert left_by(run) == undisturbed[SETTING].left
    TABLE.append(Row(fault, SETTING, ended.seconds, f"equal, resumed from {newest}"))


def test_a_link_that_holds_everything_back_for_a_while_is_waited_for(
    hosts: tuple[Host, Host], undisturbed: UndisturbedRuns, book: Path, tmp_path: Path
) -> None:
    counts = [middle(undisturbed, 1) // part for part in (2, 1)]
    faults = [Fault("cut", "collective", 1, count, 2.0) for count in counts]
    run = tmp_path / "run"

    ended = run_on_hosts(hosts, begin_or_resume(run, book), tmp_path / "first", faults)

    assert ended.struck
    assert set(ended.codes.values()) == {0}, ended.text
    assert left_by(run) == undisturbed[SETTING].left
    TABLE.extend(Row(fault, SETTING, ended.seconds, "waited for") for fault in faults)
