"""The documents say what the program does: keys, commands, options and links; every study can be asked for.

``python tests/test_docs.py`` writes the table of ``docs/configuration.md`` anew.
"""

import inspect
import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import typer

import fedgp_flower as fg
from fedgp_flower.cli import app
from fedgp_flower.config import RunConfig
from fedgp_flower.options import meanings
from fedgp_flower.privacy.policy import Policy
from fedgp_flower.run import figures
from fedgp_flower.run.registry import BUILT_IN, default_config, methods, parse_config
from fedgp_flower.run.user_config import parse_assignments, read_config, reference, table_of
from simulations import common, run
from simulations.common import markdown
from simulations.studies.leaves import study

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "configuration.md"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
RULE = re.compile(r"^\| `(?P<key>[a-z-]+)` \| `(?P<default>[^`]+)` \| (?P<meaning>.*) \|$", re.MULTILINE)


def page() -> str:
    """``docs/configuration.md``, its table anew; ``docs/conf.py`` writes that of the other keys whenever it builds."""
    words = PAGE.read_text(encoding="utf-8").split("\n| key")[0].rstrip()
    return "\n".join([words, "", *table_of(basic=True)]) + "\n"


def test_the_page_of_basic_keys_says_what_the_code_says():
    assert page() == PAGE.read_text(encoding="utf-8"), "run tests/test_docs.py"


def test_every_key_has_a_meaning_and_few_are_basic():
    keys = reference()
    assert [name for name, key in keys.items() if not key["meaning"]] == []
    assert keys.keys() == default_config().keys()
    assert 10 < sum(key["basic"] for key in keys.values()) <= 26


@pytest.mark.parametrize("path", sorted((ROOT / "simulations").glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_configurations_are_valid(path):
    config: RunConfig = parse_config(read_config(path))
    assert path.stem.startswith(config.method)
    command = rf"fedgp run (--sites \d+ )?--config simulations/{re.escape(path.name)}"
    assert re.search(command, path.read_text(encoding="utf-8")), "the head of the file says how to run it"


def test_the_methods_of_the_readme_are_those_with_a_configuration():
    shipped = {parse_config(read_config(path)).method for path in (ROOT / "simulations").glob("*.toml")}
    chapter = (ROOT / "README.md").read_text(encoding="utf-8").split("## Methods\n")[1].split("\n## ")[0]
    assert set(re.findall(r"^\| `([\w-]+)`", chapter, re.MULTILINE)) == shipped
    assert shipped <= methods().keys()


def shell_lines(path: Path) -> Iterator[list[str]]:
    """Words of every command in the ``sh`` blocks of a document; continued lines are one."""
    for block in re.findall(r"^```sh\n(.*?)^```", path.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
                words.pop(0)  # variables of the environment
            if words:
                yield words


COMMANDS = [words for path in DOCUMENTS for words in shell_lines(path)]


def named(program: str) -> list[list[str]]:
    """What follows the program's name, for every command of the documents that starts with it."""
    head = shlex.split(program)
    return [words[len(head) :] for words in COMMANDS if [Path(words[0]).name, *words[1 : len(head)]] == head]


def understood(words: list[str]) -> list[str]:
    """The plain words of a documented command whose name and options exist."""
    command = typer.main.get_command(app)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    options = {name: option for option in command.params for name in option.opts if name.startswith("--")}
    rest = iter(words)
    plain = []
    for word in rest:
        if not word.startswith("--"):
            plain.append(word)
        elif word != "--help":
            assert word in options
            if not options[word].is_flag:
                next(rest)
    return plain


@pytest.mark.parametrize("words", named("fedgp"), ids=" ".join)
def test_documented_fedgp_commands_exist(words):
    parse_config(parse_assignments([word for word in understood(words) if "=" in word]))


def test_documented_make_targets_and_keys_of_flwr_runs_exist():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    words = [word for words in named("make") for word in words]
    assert {word for word in words if "=" not in word} <= set(targets)
    for arguments in (word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")):
        parse_config(parse_assignments(shlex.split(arguments)))
    assert named("flwr run")
    for words in named("flwr run"):
        overrides = words[words.index("--run-config") + 1]
        keys = re.findall(r"([\w.-]+)=(?:'[^']*'|\"[^\"]*\"|\S+)", overrides)
        assert keys
        assert set(keys) <= default_config().keys()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", path.read_text(encoding="utf-8"))
    assert [target for target in targets if not (path.parent / target).exists()] == []


def test_files_that_documents_name_exist():
    """``folder/file.py`` from the root, ``file.py`` in the tree of the architecture somewhere below its folder."""
    code = re.compile(r"\b(?:fedgp_flower|strategies|tests|examples|simulations)/[\w/]+\.(?:py|md|toml)\b")
    for path in DOCUMENTS:
        names = set(code.findall(path.read_text(encoding="utf-8")))
        assert sorted(name for name in names if not (ROOT / name).exists()) == [], path.name
    tree = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").split("```")[1]
    known = {path.name for path in ROOT.glob("*/**/*.py")}
    assert sorted(set(re.findall(r"\w+\.py\b", tree)) - known) == []


def test_a_page_says_of_every_message_what_leaves_a_site():
    code = "".join(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("[fs]*/**/*.py")))
    kinds = set(re.findall(r'^@message\("((?:train|query)[\w.]*)"', code, re.MULTILINE))
    assert {"train", "query.statistics"} <= kinds
    rows = list(study())
    assert kinds - {row["message"].strip("`") for row in rows} == set()
    page = (ROOT / "simulations" / "results" / "leaves.md").read_text(encoding="utf-8")
    assert markdown(rows) in page, "run python -m simulations.run leaves --write"


def test_every_rule_of_a_policy_is_documented_with_its_default():
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8")
    told = {row["key"]: (row["default"], row["meaning"]) for row in RULE.finditer(text)}
    words = meanings(Policy)
    expected = {own.alias: (own.default, words[name]) for name, own in Policy.model_fields.items()}
    assert told == {key: (json.dumps(default), said) for key, (default, said) in expected.items()}


def test_the_api_page_has_the_arguments_and_every_strategy_with_its_client():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for name, call in {"run": fg.run, "FederatedGPRegressor": fg.FederatedGPRegressor}.items():
        plain = [own.replace(annotation=inspect.Parameter.empty) for own in inspect.signature(call).parameters.values()]
        signature = f"fg.{name}{inspect.Signature(plain)}".replace("'", '"')
        assert "".join(signature.split()) in "".join(text.split())
    told = dict(re.findall(r'^\| `(\w+)` \| `"([\w-]+)"` \|$', text, re.MULTILINE))
    assert told == {row.strategy.partition(":")[2]: method for method, row in BUILT_IN.items()}


def test_python_of_the_readme_runs(tmp_path, monkeypatch):
    """The block of the chapter on Python, as it stands, on a table with a column of text."""
    chapter = (ROOT / "README.md").read_text(encoding="utf-8").split("## From Python\n")[1].split("\n## ")[0]
    [block] = re.findall(r"^```python\n(.*?)^```", chapter, re.DOTALL | re.MULTILINE)
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": rng.normal(size=60), "clinic": rng.choice(["n", "s", "w"], 60)})
    table["target"] = 100 + 9 * table["x"] + rng.normal(size=60)
    table.to_csv(tmp_path / "mine.csv", index=False)
    table.drop(columns="target").to_csv(tmp_path / "new.csv", index=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "DPI", 30)
    names = {}
    exec(compile(block, "README.md", "exec"), names)
    expected = names["posterior"].predict(names["new"])["mean"]
    np.testing.assert_allclose(names["exported"].transforms.original(names["standardised"]).mean, expected, rtol=1e-9)
    np.testing.assert_allclose(names["f"].mean, expected, rtol=1e-9)
    assert names["run"].metrics.test["rmse"] < 10


@pytest.mark.parametrize("name", run.names())
def test_a_study_has_a_title_arguments_and_a_text(name):
    module = run.load(name)
    assert run.title(module)
    assert vars(run.parser_of(name, module).parse_args([])).keys() >= inspect.signature(module.study).parameters.keys()
    assert inspect.isgeneratorfunction(module.study)


def test_pages_say_which_study_made_them():
    for page in (ROOT / "simulations" / "results").glob("*.md"):
        head = page.read_text(encoding="utf-8")[:600]
        commands = [line for line in head.splitlines() if "python " in line]
        assert commands, page.name
        named = commands[0].partition("python -m simulations.run ")[2].split()
        assert "examples/" in commands[0] or named[0].strip("`.,") in run.names(), page.name


@pytest.fixture
def _scratch(tmp_path, monkeypatch):
    monkeypatch.setattr(common, "RUNS", tmp_path)
    monkeypatch.setattr(common, "version", lambda: "here")


@pytest.mark.usefixtures("_scratch")
def test_a_study_makes_its_runs_once(monkeypatch):
    first = run.run("defaults", {"sets": ("diabetes",), "methods": ("local-only",)})
    assert first[0]["NLL"] == first[0]["local_only"] > first[0]["linear"]
    assert first[0]["above"] == "mean, linear"

    def twice(*arguments):
        raise AssertionError("a run that is there was made again")

    monkeypatch.setattr("fedgp_flower.run.in_process.run_in_process", twice)
    assert run.run("defaults", {"sets": ("diabetes",), "methods": ("local-only",)}) == first


@pytest.mark.usefixtures("_scratch")
def test_results_are_remembered_and_means_are_over_runs():
    found = [common.remembered("study", [1], lambda v=value: {"a": v}) for value in (1.0, 2.0)]
    assert [row["a"] for row in found] == [1.0, 1.0]
    rows = [{"set": "s", "a": 1.0}, {"set": "s", "a": 3.0}, {"set": "t", "a": None}]
    assert common.averaged(rows, ("set",), worst=("a",))[0] == {"set": "s", "runs": 2, "a": 2.0, "a, worst": 3.0}


MEASURING = {
    "cells",
    "evaluation",
    "faults",
    "heartbeats",
    "leaves",
    "load",
    "masks",
    "memory",
    "policy",
    "scale",
    "trip",
}
"""Studies that do not go through ``fit``."""
FEW = {"private": {"splits": (0,), "epsilons": (1.0,)}}
"""Arguments that leave the kinds of runs and make fewer of them."""


@pytest.mark.data
@pytest.mark.skipif("FEDGP_DATA" not in os.environ, reason="no data sets")
@pytest.mark.usefixtures("_scratch")
@pytest.mark.parametrize("name", sorted(set(run.names()) - MEASURING))
def test_the_keys_of_every_run_are_known(name, monkeypatch):
    module = run.load(name)
    monkeypatch.setattr(common, "CHECKING", True)
    monkeypatch.setattr(module, "attacked", common.fit, raising=False)
    if name == "amortised":
        monkeypatch.setattr(module, "scores", lambda *of: {"bound": 1.0})
    rows = list(module.study(**FEW.get(name, {})))
    assert rows
    refused = [row["refused"] for row in rows if "refused" in row]
    assert len(refused) == 3 * (name == "defaults"), refused  # three methods take no classes


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
