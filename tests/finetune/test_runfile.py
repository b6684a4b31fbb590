"""The file of settings as it is read: keys that stand twice, what is no YAML, and text that is no path."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitlm.core.errors import UsageError
from splitlm.finetune.runfile import read_run


def refused(path: Path, text: str, *words: str, changes: tuple[str, ...] = ()) -> None:
    """The file is refused in one paragraph with these words."""
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        read_run(path, changes)
    said = str(caught.value)
    assert "\n" not in said and "\0" not in said
    for word in words:
        assert word in said, said


@pytest.mark.parametrize(
    ("text", "key", "line", "first"),
    [
        ("name: a\nname: b\n", "name", 2, 1),
        ("learning: {learning-rate: 0.5}\nprivacy: {noise: 2.0}\n\nlearning:\n  batch-size: 4\n", "learning", 4, 1),
        ("server:\n  clients: [1, 1]\n  'clients': [1, 1]\n", "clients", 3, 2),
        ("privacy: {noise: 1, noise: 1}\n", "noise", 1, 1),
        ("name: a\nserver:\n  model:\n    Bert: {n_block: 1}\n    Bert: {n_block: 2}\n", "Bert", 5, 4),
        ("optimizer: &o {reset-each-round: True, reset-each-round: False}\n", "reset-each-round", 1, 1),
        ("server:\n  clients: [{a: 1, a: 2}, 1]\n", "a", 2, 2),
    ],
)
def test_a_key_that_stands_twice_is_refused(text: str, key: str, line: int, first: int, tmp_path: Path) -> None:
    refused(tmp_path / "c.yaml", text, f"c.yaml, line {line}: ", repr(key), f"first in line {first}.")


def test_a_key_that_stands_twice_in_a_value_of_the_command_line_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "c.yaml", "", "--set", "'noise'", "twice", changes=("privacy={noise: 1, noise: 2}",))


def test_merge_keys_and_anchors_work(tmp_path: Path) -> None:
    """What ``<<`` brings gives way to what stands there, and to what another one brought before."""
    path = tmp_path / "c.yaml"
    path.write_text(
        "server:\n"
        "  model:\n"
        "    Bert: &few {n_block: 2}\n"
        "    GPT2: *few\n"
        "    ./one: {<<: *few, n_block: 3}\n"
        "    ./two: {n_block: 4, <<: [*few, *few]}\n"
        "    ./three: &more {<<: *few}\n"
        "    ./four: {<<: *more}\n"
    )
    limits = {name: limit.n_block for name, limit in read_run(path).server.model.items()}
    assert limits == {"Bert": 2, "GPT2": 2, "./one": 3, "./two": 4, "./three": 2, "./four": 2}


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("# nothing\n")
    assert read_run(tmp_path / "c.yaml").given == ()


@pytest.mark.parametrize(
    "value",
    ["!!timestamp x", "!!bool x", "!!int x", "2026-13-01", "0b_", "[" * 3000, "!!python/name:os.system", "{[a]: 1}"],
)
def test_what_pyyaml_stumbles_over_is_said(value: str, tmp_path: Path) -> None:
    refused(tmp_path / "c.yaml", f"name: {value}\n", "c.yaml", "not YAML")
    refused(tmp_path / "c.yaml", "", "--set", "is no value", changes=(f"name={value}",))


@pytest.mark.parametrize(
    "key",
    ["server.model-path", "server.model-name", "server.data-path", "server.data-name", "security.certs", "log_path"],
)
def test_the_home_of_a_user_who_is_not_there(key: str, tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    refused(path, "", f"c.yaml:{key}: ", "'~nobody9/x'", "home folder", changes=(f"{key}=~nobody9/x",))


@pytest.mark.parametrize("key", ["server.model-path", "server.data-path", "server.data-name", "security.certs"])
@pytest.mark.parametrize("value", ["''", "' '"])
def test_an_empty_path_is_not_the_files_own_folder(key: str, value: str, tmp_path: Path) -> None:
    refused(tmp_path / "c.yaml", "", f"c.yaml:{key}: {key} is empty", changes=(f"{key}={value}",))
    refused(tmp_path / "c.yaml", "log_path: ''", "c.yaml:log_path: log_path is empty")


def test_a_path_may_be_the_files_own_folder_and_none_is_none(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("server: {data-path: ., model-path: null}\nlog_path: .\n")
    config = read_run(tmp_path / "c.yaml")
    assert (config.server.data_path, config.server.model_path, config.log_path) == (str(tmp_path), None, str(tmp_path))


@pytest.mark.parametrize("mark", ["\\0", "\\ud800"])
@pytest.mark.parametrize(
    "key",
    [
        *("name", "log_path", "server.model-path", "server.data-path", "server.data-name", "server.model-name"),
        *("security.certs", "server.aggregator", "rabbit.address", "rabbit.virtual-host"),
    ],
)
def test_text_that_no_path_and_no_message_can_hold(key: str, mark: str, tmp_path: Path) -> None:
    refused(tmp_path / "c.yaml", "", f"c.yaml:{key}: ", "holds the character", changes=(f'{key}="~a{mark}b"',))


def test_a_models_name_is_such_a_text_too(tmp_path: Path) -> None:
    refused(tmp_path / "c.yaml", 'server: {model: {"./a\\0b": {n_block: 1}}}', "server.model", "holds the character")
