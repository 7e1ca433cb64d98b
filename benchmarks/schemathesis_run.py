"""Schemathesis over the OpenAPI page of a policy on Ray Serve behind HAProxy: all checks, all phases, stateful too.

    python benchmarks/schemathesis_run.py [--examples 500] [--seed 0] [--no-store]

The policy answers zeros and takes a feature of every dtype; the server asks for keys. Schemathesis sends what fits the
page and what does not, follows the page's links from answer to answer, and holds every answer against the page: status,
media type, headers, schema; what fits must be taken, what does not must be refused, and nothing may be answered with
5xx. The figure is the number of failures that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from common import write_result

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Outcome:
    """What Schemathesis found.

    Attributes:
        cases: requests that it made and checked.
        failures: that differ, and errors of its own.
        acted: requests meant to be good that the act route answered with actions.
        text: what it printed.
    """

    cases: int
    failures: int
    acted: int
    text: str


def check(url: str, key: str, examples: int, seed: int) -> Outcome:
    """Run Schemathesis against a server.

    Args:
        url: "127.0.0.1:port".
        key: with all roles.
        examples: at most so many of each route in each phase, beside those that cover the page's limits.
        seed: of all that is generated.

    Raises:
        RuntimeError: it did not run to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        configuration = f"hooks = {json.dumps(str(HERE / 'schemathesis_hooks.py'))}\n"
        (Path(folder) / "schemathesis.toml").write_text(configuration)
        ran = subprocess.run(
            [
                *(sys.executable, "-m", "schemathesis.cli", "run", f"http://{url}/openapi.json", "--no-color"),
                *("--header", f"Authorization: Bearer {key}", "--checks", "all", "--continue-on-failure"),
                *("--phases", "examples,coverage,fuzzing,stateful", "--max-examples", str(examples)),
                *("--seed", str(seed), "--generation-database", "none", "--report-json-path", "report.json"),
            ],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            check=False,
        )
        report = Path(folder) / "report.json"
        if not report.exists():
            raise RuntimeError(f"Schemathesis did not run: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        found = json.loads(report.read_text())
    if not found["complete"] or found["operations"]["tested"] != found["operations"]["total"]:
        raise RuntimeError(f"Schemathesis ended early ({found['stop_reason']}): {ran.stdout[-2000:]}")
    rates = found["valid_rates"]["POST /v1/policies/{name}/act"]
    return Outcome(
        cases=found["test_cases"]["generated"],
        failures=len(found["failures"]) + len(found["errors"]),
        acted=sum(phase["accepted"] for phase in rates.values()),
        text=ran.stdout,
    )


def main() -> int:
    """Serve, check, print, store; exit code 1 when something failed."""
    from schemathesis_hooks import CONTRACT

    from rlsvc.runner import BaselineRunner
    from rlsvc.serve.deploy import Deployment, ray_for_serving, start
    from rlsvc.serve.haproxy import free_ports
    from rlsvc.serve.keys import ROLES, Keys, new_key
    from rlsvc.serve.settings import ServeSettings

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=500, help="of each route in each phase")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-store", action="store_true", help="print only")
    args = parser.parse_args()
    (port,) = free_ports(1)
    key, kept = new_key("schemathesis", tuple(ROLES))
    settings = ServeSettings(max_body_bytes=2**20)
    deployment = Deployment(
        "zero", partial(BaselineRunner, "zero", CONTRACT), port=port, settings=settings, keys=Keys((kept,))
    )
    with ray_for_serving(deployment):
        start(deployment)
        outcome = check(f"127.0.0.1:{port}", key, args.examples, args.seed)
    print(outcome.text)
    print(f"{outcome.cases} cases, {outcome.acted} answered with actions, {outcome.failures} failures")
    if not outcome.acted:
        raise SystemExit("no request was answered with actions: nothing was tested")
    if not args.no_store:
        write_result(
            "schemathesis_failures",
            float(outcome.failures),
            "count",
            seeds=[args.seed],
            packages=("rlsvc", "schemathesis", "hypothesis", "fastapi", "ray"),
        )
    return 1 if outcome.failures else 0


if __name__ == "__main__":
    os.environ.pop("RAY_ADDRESS", None)  # a cluster elsewhere would be another machine
    sys.exit(main())
