"""Figures without measuring: medians, goals, turns, tables, and the README's block."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitlm.bench import publish
from splitlm.bench.figure import Figure, Goal, Result, figure, markdown, number, ratios, read_json, table, write_json
from splitlm.bench.turns import interleave
from splitlm.core.errors import UsageError


def test_a_figure_is_the_median_with_its_spread() -> None:
    """One bad repetition moves the spread and not the value."""
    made = figure("x", "a ÷ b", [0.97, 0.2, 0.99, 0.96, 0.98])
    assert (made.value, made.low, made.high, made.count) == (0.97, 0.2, 0.99, 5)
    assert made.reached is None


def test_goals_point_both_ways_and_hold_at_the_bound() -> None:
    """More is better for a ratio of speeds, less for a time."""
    speed, time = Goal(">=", 0.95, 0.97), Goal("<=", 0.3)
    assert [speed.reached(v) for v in (0.949, 0.95, 0.99)] == [False, True, True]
    assert [time.reached(v) for v in (0.31, 0.3, 0.1)] == [False, True, True]
    assert (str(speed), str(time)) == ("≥ 0.95 (0.97)", "≤ 0.3")
    assert figure("x", "", [1.0, 0.9], goal=speed).reached is True
    assert figure("x", "", [0.9, 0.9], goal=speed).reached is False


def test_ratios_pair_what_was_measured_together() -> None:
    """A machine that halves its speed between repetitions halves both sides."""
    assert ratios({"a": [10.0, 5.0], "b": [20.0, 10.0]}, "a", "b") == [0.5, 0.5]
    with pytest.raises(ValueError, match=r"zip\(\)"):
        ratios({"a": [1.0], "b": [1.0, 2.0]}, "a", "b")


def test_turns_alternate_after_one_that_does_not_count() -> None:
    """Whoever goes first in one repetition goes last in the next."""
    order: list[str] = []
    said: list[str] = []

    def arm(name: str) -> float:
        order.append(name)
        return float(len(order))

    samples = interleave({n: (lambda n=n: arm(n)) for n in "abc"}, 3, said.append)
    assert "".join(order) == "abc" + "abc" + "cba" + "abc"
    assert samples == {"a": [4.0, 9.0, 10.0], "b": [5.0, 8.0, 11.0], "c": [6.0, 7.0, 12.0]}
    assert len(said) == 3


def test_numbers_keep_three_digits() -> None:
    """Wide enough to compare, narrow enough to read."""
    assert [number(v) for v in (0.9512, 1.0, 12.345, 123.4, 0.0093, 0)] == ["0.951", "1", "12.3", "123", "0.009", "0"]


def _result() -> Result:
    good = figure("good", "a ÷ b", [1.0, 1.1], goal=Goal(">=", 1.0), note="beside it")
    bad = figure("bad", "a hop", [0.4], unit="ms", goal=Goal("<=", 0.3))
    free = figure("free", "no goal", [2.0])
    return Result(
        bench="ring",
        settings={"model": "tiny", "tokens": 8},
        versions={"torch": "2"},
        machine="2 cores",
        figures=[good, bad, free],
    )


def test_a_table_says_what_was_reached() -> None:
    """A line per figure, a note below its own."""
    lines = table(_result().figures).splitlines()
    assert len(lines) == 5
    assert "1.05 ×" in lines[1] and lines[1].index("≥ 1") < lines[1].index("reached") and "not reached" not in lines[1]
    assert lines[2].strip() == "beside it"
    assert "0.400 ms" in lines[3] and "not reached" in lines[3]
    assert "reached" not in lines[4] and "—" in lines[4]


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    """What was written is read; what is not a result is refused with the file's name."""
    result = _result()
    assert read_json(write_json(result)) == result
    path = tmp_path / "deep" / "result.json"
    publish.save(path, "ring", {"tokens": 8}, result.figures)
    read = publish.load(path)
    assert read.figures == result.figures and read.settings == {"tokens": 8} and "python" in read.versions
    path.write_text('{"bench": 1}')
    with pytest.raises(UsageError, match=r"result\.json"):
        publish.load(path)
    with pytest.raises(UsageError, match="result"):
        publish.save(tmp_path / "deep" / "result.json" / "x", "ring", {}, [])


def test_the_readme_block_is_replaced_and_nothing_else() -> None:
    """Twice gives the same text; without both marks nothing is written."""
    text = f"# Title\n\n{publish.BEGIN}\nold\n{publish.END}\n\nafter\n"
    block = publish.block([_result()])
    once = publish.replace(text, block, "README.md")
    assert once.startswith("# Title\n\n<!-- bench:begin -->\n") and once.endswith("<!-- bench:end -->\n\nafter\n")
    assert "old" not in once and "splitlm bench ring tiny --tokens 8" in once and "| a ÷ b |" in once
    assert publish.replace(once, block, "README.md") == once
    for broken in ("no marks", publish.BEGIN, f"{publish.END}{publish.BEGIN}", text + text):
        with pytest.raises(UsageError, match=r"README\.md"):
            publish.replace(broken, block, "README.md")


def test_markdown_has_a_row_per_figure() -> None:
    """And says when a goal was missed."""
    rows = markdown(_result().figures).splitlines()
    assert len(rows) == 2 + 3
    assert rows[3].endswith("| ≤ 0.3 | not reached |")


def test_a_figure_of_nothing_is_refused() -> None:
    """A comparison that measured nothing has no median."""
    with pytest.raises(ValueError):
        figure("x", "", [])
    assert Figure(name="x", text="", value=1, low=1, high=1, count=1).unit == "×"
