"""The dashboard asks for metrics, labels and reasons that a replica exports."""

import json
import re
from pathlib import Path

import numpy as np

from rlsvc.core.contract import Contract, Feature
from rlsvc.data.normalize import Stats
from rlsvc.runner import BaselineRunner
from rlsvc.serve.distribution import Distribution
from rlsvc.serve.metrics import PARTS, Loaded, Metrics
from rlsvc.serve.settings import ServeSettings
from rlsvc.serve.shadow import Shadow
from rlsvc.serve.version import CURRENT, Version

DASHBOARD = json.loads((Path(__file__).parents[2] / "deployments" / "grafana" / "rlsvc.json").read_text())


class Trained:
    """A runner that knows what its policy was trained on."""

    contract = Contract({"joints": Feature((2,), "float32")}, Feature((2,), "float32"), 10.0, 1, 1)

    def training_statistics(self) -> dict[str, Stats]:
        zero = np.zeros(2)
        return {"joints": Stats(zero, zero, zero, zero, zero, zero, 3)}

    def encode(self, name: str, x: np.ndarray) -> np.ndarray:
        return x


def exported() -> dict[str, set[str]]:
    """Sample name -> its labels, once every counter has moved."""
    version = Version(BaselineRunner("zero", Trained.contract), ServeSettings())
    loaded = Loaded([(CURRENT, version)], Distribution(Trained()), Shadow(version, Trained.contract))
    metrics = Metrics("replica", "policy", lambda: loaded)
    metrics.answered("http", dict.fromkeys(PARTS, 0.1), 1)
    metrics.refused("overload")
    metrics.malformed("length")
    metrics.refused_version(CURRENT)
    version.close()
    return {sample.name: set(sample.labels) for family in metrics.registry.collect() for sample in family.samples}


def queries() -> list[str]:
    asked = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    return asked + [one["query"]["query"] for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]


def test_every_metric_of_the_dashboard_is_exported_and_every_exported_one_is_shown():
    named = {name for query in queries() for name in re.findall(r"\brlsvc_\w+", query)}
    there = exported()
    assert named <= set(there)
    family = re.compile(r"_(total|bucket|sum|count|created)$")
    assert {family.sub("", name) for name in named} == {family.sub("", name) for name in there}


def test_every_label_of_the_dashboard_is_one_of_its_metric():
    there = exported()
    for query in queries():
        (metric, *_) = re.findall(r"\brlsvc_\w+", query)
        labels = {name for group in re.findall(r"by \(([^)]*)\)", query) for name in re.split(r",\s*", group)}
        labels |= set(re.findall(r"(\w+)=~?\"", query))
        assert labels <= there[metric], query


def test_panels_have_numbers_places_and_words_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)
    assert all(panel["description"] for panel in panels)
