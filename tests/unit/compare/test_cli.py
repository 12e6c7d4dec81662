import subprocess
import sys
from pathlib import Path

import pytest

from sb3_per import __version__, cli


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["-h"], ["--help"]):
        assert cli.main(arguments) == 0
        out = capsys.readouterr().out
        assert out.startswith("usage: sb3-per COMMAND")
        for name, command in cli.COMMANDS.items():
            assert f"  {name} " in out
            assert command.summary in out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_unknown_command_gets_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["comapre"]) == 2
    assert "there is no command 'comapre': did you mean compare?" in capsys.readouterr().err
    assert cli.main(["zzz"]) == 2
    assert "there are compare, plot" in capsys.readouterr().err


def test_command_gets_its_settings_or_its_arguments_and_gives_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sb3_per.compare.main.plot", lambda settings: settings)
    code = cli.main(["plot", str(tmp_path), "--window", "7"])
    assert (code.folder, code.window) == (tmp_path, 7)  # type: ignore[attr-defined]
    raw = cli.Command("", "builtins:len", None, "experiments")
    monkeypatch.setitem(cli.COMMANDS, "raw", raw)
    assert cli.main(["raw", "--any", "thing", "at all"]) == 3


def test_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["compare"]) == 1
    assert capsys.readouterr().err.strip() == (
        "sb3-per compare needs tyro, which is not installed: pip install 'sb3-per[experiments]'"
    )
    (tmp_path / "needs_more.py").write_text("import no_such_package.part\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "more", cli.Command("", "needs_more:main", None, "atari"))
    assert cli.main(["more"]) == 1
    assert capsys.readouterr().err.strip() == (
        "sb3-per more needs no_such_package, which is not installed: pip install 'sb3-per[atari]'"
    )


def test_missing_module_of_our_own_is_a_fault_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    command = cli.Command("", "sb3_per.no_such_module:main", None, "experiments")
    monkeypatch.setitem(cli.COMMANDS, "lost", command)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        cli.main(["lost"])


def test_help_imports_nothing_of_the_commands() -> None:
    code = (
        "import sys; from sb3_per.cli import main; main(['--help']); "
        "print(sorted({name.split('.')[0] for name in sys.modules}))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    loaded = out.splitlines()[-1]
    # pandas and matplotlib come with SB3, and pyarrow with some versions of pandas
    for package in ("tyro", "joblib", "jinja2"):
        assert f"'{package}'" not in loaded


def test_bad_settings_end_with_a_message_and_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert cli.main(["compare", "--envs", "CartPoll-v1", "--output", str(tmp_path / "x")]) == 2
    assert "sb3-per compare: --envs CartPoll-v1" in capsys.readouterr().err
    assert cli.main(["plot", str(tmp_path / "x")]) == 2
    assert "has no comparison" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_stopped_while_the_command_is_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "takes_long.py").write_text("raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.COMMANDS, "slow", cli.Command("", "takes_long:main", None, "atari"))
    assert cli.main(["slow"]) == 130
    assert capsys.readouterr().err.strip() == "sb3-per slow: stopped"


def test_process_that_used_ray_ends_at_once_with_its_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes: list[int] = []
    monkeypatch.setattr("os._exit", codes.append)
    monkeypatch.setattr("logging.shutdown", lambda: None)
    monkeypatch.setattr(sys, "argv", ["sb3-per", "no-such-command"])
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    assert cli.main() == 2
    assert codes == []
    monkeypatch.setitem(sys.modules, "ray", object())
    cli.main()
    assert codes == [2]
    # Called as a function, it always returns
    assert cli.main(["no-such-command"]) == 2
    assert codes == [2]
