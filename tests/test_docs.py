"""The documentation names commands, options, keys, experiments and files that exist; generated pages are current."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup

from rlsvc.cli import app
from rlsvc.commands.jobs import COMMANDS
from rlsvc.spec.collect import CollectSpec
from rlsvc.spec.compose import compose, compose_file, experiments
from rlsvc.spec.sweep import check_space
from rlsvc.tune.space import load_sweep

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"^# (run|sweep|session): (\S+)\n")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SHELL = {">", "|", "&", "&&", ";"}
# Shown with an experiment's name as a letter, in the tables of docs/coming-from.md.
PLACEHOLDERS = {"C", "E", "NAME"}
# Made by docs/adding-an-algorithm.md, which tests/test_adding_an_algorithm.py follows with its command and its files.
FOLLOWED = "reward_weighted"


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    language: str
    text: str

    @property
    def marked(self) -> re.Match[str] | None:
        """A YAML block that begins with `# run: FILE`, `# sweep: FILE` or `# session: FILE` is that file."""
        return MARK.match(self.text) if self.language == "yaml" else None


def blocks() -> Iterator[Block]:
    for page in PAGES:
        for language, text in BLOCK.findall(page.read_text()):
            yield Block(page, language, text)


def command_lines() -> list[tuple[str, list[str]]]:
    """(page, words) of every line `rlsvc ...` in a bash block; a line may go on after a backslash."""
    found = []
    for block in blocks():
        if block.language == "bash":
            for line in block.text.replace("\\\n", " ").splitlines():
                words = list(itertools.takewhile(lambda word: word not in SHELL, shlex.split(line, comments=True)))
                if words[:1] == ["rlsvc"]:
                    found.append((block.page.name, words[1:]))
    return found


def commands_of(command: str) -> list[list[str]]:
    """The words of every documented line of this command, those inside `rlsvc submit -- ...` too."""
    lines = [words for _, words in command_lines()]
    lines += [words[words.index("--") + 1 :] for words in lines if words[0] == "submit"]
    return [words[1:] for words in lines if words[0] == command]


def parse(words: list[str]) -> None:
    """Parse a command line without running it.

    Raises:
        typer.TyperException: an unknown command, option or value, or an argument too many or too few.
    """
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="rlsvc")
    while isinstance(command, TyperGroup):
        _, command, words = command.resolve_command(context, words)
        assert command is not None
        context = typer.Context(command, info_name=command.name, parent=context)
    if command.name == "submit":  # takes what it does not know for a part of the command that it hands on
        own, sent = words[: words.index("--")], words[words.index("--") + 1 :]
        unknown = [word for word in own if word.startswith("-") and word not in options_of(command)]
        if unknown or sent[0] not in COMMANDS:
            raise typer.BadParameter(f"submit: {unknown or sent[0]}")
        parse(sent)
    command.make_context(command.name, list(words), parent=context.parent)


def options_of(command: TyperCommand) -> set[str]:
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


@pytest.fixture
def documented_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with every file that a page shows, as the working directory; the sweep's own are there too."""
    (tmp_path / "tune_spaces").symlink_to(ROOT / "tune_spaces")
    for block in blocks():
        if match := block.marked:
            (tmp_path / match[2]).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("page", "words"), command_lines(), ids=lambda value: value if isinstance(value, str) else None
)
def test_every_documented_command_line_parses(page: str, words: list[str]) -> None:
    parse(words)


@pytest.mark.parametrize(
    "line",
    [
        "trian experiment=pusht_demo",
        "train --locl experiment=pusht_demo",
        "evaluate --episodes many bundle",
        "policies promote name",
        "dataset check",
        "jobs kill some-job",
        "submit --adress x -- train experiment=pusht_demo",
        "submit -- train --locl experiment=pusht_demo",
        "submit -- query 127.0.0.1:8000",
    ],
)
def test_a_command_line_that_does_not_exist_is_found(line: str) -> None:
    with pytest.raises(typer.TyperException):
        parse(line.split())


def test_every_documented_training_run_composes(documented_files: Path) -> None:
    lines = commands_of("train")
    assert len(lines) >= 8, "the pages show fewer training runs than they did: is the parser of the blocks broken?"
    for words in lines:
        if f"experiment={FOLLOWED}" not in words:
            compose([word for word in words if not word.startswith("--")])


def test_every_documented_yaml_run_composes(documented_files: Path) -> None:
    files = [match[2] for block in blocks() if (match := block.marked) and match[1] == "run"]
    assert files
    for file in files:
        compose([file])


def test_every_documented_session_validates(documented_files: Path) -> None:
    files = [match[2] for block in blocks() if (match := block.marked) and match[1] == "session"]
    assert files
    for file in files:
        compose_file(CollectSpec, Path(file))


def test_every_documented_sweep_fits_the_run_that_it_varies(documented_files: Path) -> None:
    lines = [words for words in commands_of("sweep") if words[0].endswith(".yaml")]
    assert lines
    for words in lines:
        file, *overrides = (word for word in words if not word.startswith("--"))
        sweep = load_sweep(Path(file), overrides)
        check_space(sweep, compose(sweep.run))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    links = [link.partition("#")[0] for link in LINK.findall(page.read_text()) if "://" not in link]
    assert [link for link in links if link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_experiment_that_a_page_names_ships(page: Path) -> None:
    named = set(re.findall(r"\bexperiment=(\w+)", page.read_text())) - PLACEHOLDERS
    assert named <= {*experiments(), FOLLOWED}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = re.findall(r"(?:^|`)make ((?:[a-z-]+ ?)+)(?:$|`)", page.read_text(), re.MULTILINE)
    assert {target for line in lines for target in line.split()} <= targets


def test_every_experiment_that_ships_composes() -> None:
    for name in experiments():
        assert compose([f"experiment={name}"]).name == name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_python_is_valid_and_imports_names_that_exist(page: Path) -> None:
    for block in blocks():
        if block.page == page and block.language == "python" and not block.text.startswith(("# file: ", "# table: ")):
            compile(block.text, f"{page.name}", "exec")
            imports = [line for line in block.text.splitlines() if re.match(r"(from|import) ", line)]
            exec("\n".join(imports), {})


def test_the_configuration_page_is_what_its_generator_writes() -> None:
    spec = importlib.util.spec_from_file_location("generate_configuration", ROOT / "docs" / "generate_configuration.py")
    assert spec is not None
    assert spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = generator.render()
    assert generator.PAGE.read_text() == written, "run `python docs/generate_configuration.py` and commit the page"
    bare = [line for line in written.splitlines() if line.startswith("| `") and line.endswith("|  |")]
    assert bare == [], "these keys have no docstring in rlsvc/spec"
