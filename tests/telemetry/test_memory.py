"""Resident memory, against what this process does to itself."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from splitlm.telemetry import memory

MIB = 1024 * 1024
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@linux
def test_resident_memory_grows_when_pages_are_touched_and_the_peak_stays() -> None:
    before = memory.rss_bytes()
    block = mmap.mmap(-1, 64 * MIB)
    for i in range(0, len(block), 4096):
        block[i] = 1
    held = memory.rss_bytes()
    assert 48 * MIB < held - before < 96 * MIB
    block.close()
    assert memory.rss_bytes() < held - 32 * MIB
    assert memory.peak_rss_bytes() >= held - 4 * MIB


def test_the_peak_is_read_in_kib(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmPeak:\t  9999 kB\nVmHWM:\t    1000 kB\nVmRSS:\t     900 kB\n")
    monkeypatch.setattr(memory, "STATUS", status)
    assert memory.peak_rss_bytes() == 1000 * 1024


@linux
def test_both_ways_to_the_peak_agree() -> None:
    assert memory._rusage_peak() == pytest.approx(memory.peak_rss_bytes(), rel=0.25)


def test_without_proc_the_peak_stands_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "STATM", tmp_path / "none")
    monkeypatch.setattr(memory, "STATUS", tmp_path / "none")
    assert memory.rss_bytes() == memory.peak_rss_bytes() == memory._rusage_peak() > MIB


def test_odd_text_in_proc_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    odd = tmp_path / "odd"
    odd.write_text("VmHWM:\n")
    monkeypatch.setattr(memory, "STATM", odd)
    monkeypatch.setattr(memory, "STATUS", odd)
    assert memory.rss_bytes() > MIB
