"""docs/benchmarks.md is what benchmarks/report.py writes, and the report does not flatter."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def report(root: Path) -> ModuleType:
    """benchmarks/report.py, which is a script and no part of the package."""
    spec = importlib.util.spec_from_file_location("benchmark_report", root / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")  # as for a script: its neighbours can be imported
        spec.loader.exec_module(module)
    return module


def result(name: str, value: float, **changes: object) -> dict[str, object]:
    return {
        "name": name, "value": value, "unit": "ms", "low": None, "high": None, "peer": "", "peer_value": None,
        "ratio": None, "hardware": "1x NVIDIA H100 80GB HBM3", "command": "python x.py", "commit": "0123456789",
        "date": "2026-01-02T03:04:05Z",
    } | changes  # fmt: skip


def row_of(page: str, name: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| `{name}`")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_committed_page_is_what_the_generator_writes(report: ModuleType) -> None:
    written = report.render(
        report.read_figures(report.FIGURES), report.read_results(report.RESULTS), list(report.measured())
    )
    assert report.PAGE.read_text() == written, "run `make bench-report` and commit docs/benchmarks.md"


def test_a_figure_without_a_result_says_that_it_was_not_measured(report: ModuleType) -> None:
    row = row_of(report.render([report.Figure("speed", "ms", "lower", 5.0, 2.0, "1x H100", "")], {}), "speed")
    assert row[1] == row[5] == "not measured yet"


@pytest.mark.parametrize(
    ("better", "value", "verdict"),
    [
        ("lower", 1.0, "aim reached"),
        ("lower", 2.0, "aim reached"),
        ("lower", 4.0, "target reached"),
        ("lower", 5.1, "**missed**"),
        ("higher", 2.0, "**missed**"),
        ("higher", 5.0, "target reached"),
        ("higher", 9.0, "aim reached"),
    ],
)
def test_the_verdict_compares_the_value_with_target_and_aim(
    report: ModuleType, better: str, value: float, verdict: str
) -> None:
    aim = 2.0 if better == "lower" else 8.0
    figure = report.Figure("speed", "ms", better, 5.0, aim, "1x H100", "")
    assert row_of(report.render([figure], {"speed": result("speed", value)}), "speed")[5] == verdict


def test_a_result_from_other_hardware_says_what_was_asked_for(report: ModuleType) -> None:
    figure = report.Figure("speed", "ms", "lower", 5.0, 2.0, "2 CPU cores", "")
    page = report.render([figure], {"speed": result("speed", 1.0, hardware="16 CPU cores (AMD EPYC)")})
    assert row_of(page, "speed")[5] == "aim reached, but asked for on 2 CPU cores"


def test_a_row_has_interval_peer_ratio_date_and_commit(report: ModuleType) -> None:
    page = report.render(
        [], {"speed": result("speed", 0.12345, low=0.1, high=0.2, peer="theirs", peer_value=1.5, ratio=12.1)}
    )
    assert row_of(page, "speed") == [
        "`speed`", "0.123 [0.1, 0.2]", "ms", "theirs: 1.5", "12.1", "1x NVIDIA H100 80GB HBM3", "2026-01-02", "0123456",
    ]  # fmt: skip


def test_a_result_that_lacks_a_key_or_has_another_name_is_refused(report: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(json.dumps({"name": "speed", "value": 1.0}))
    with pytest.raises(ValueError, match=r"speed\.json: lacks unit"):
        report.read_results(tmp_path)
    (tmp_path / "speed.json").write_text(json.dumps(result("other", 1.0)))
    with pytest.raises(ValueError, match=r"speed\.json: holds other"):
        report.read_results(tmp_path)


def test_a_figure_that_is_neither_higher_nor_lower_is_refused_with_its_line(report: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "figures.csv"
    path.write_text("issue,name,unit,better,target,aim,hardware,what\nmain-job,speed,ms,fast,1,2,1x H100,x\n")
    with pytest.raises(ValueError, match=r"figures\.csv:2: better: got 'fast'"):
        report.read_figures(path)
