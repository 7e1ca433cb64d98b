"""What a trial holds of the cluster, and how many fit.

A trial in one process holds `resources` of the sweep. A trial with a learner group holds one placement group: a sliver
of a CPU for its own process, and a bundle for every rollout worker, evaluation worker and acting GPU, which Ray then
places there. The learner's ranks come beside it, since Ray Train makes a placement group of its own. So that trials
never wait for each other's parts, no more of them run at once than fit with all that they need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlsvc.core.errors import SpecError
from rlsvc.spec.rllib import RLlibSpec, remote_learners
from rlsvc.spec.run import RunSpec
from rlsvc.spec.sweep import SweepSpec

HEAD = {"CPU": 0.01}
"""Of a trial's own process, where its group does the work: Ray refuses a trial that asks for nothing."""
Bundle = dict[str, float]


@dataclass(frozen=True)
class Needs:
    """What one trial holds.

    Attributes:
        own: bundles of its placement group, its process's first.
        ranks: bundles of the learner group's placement group.
    """

    own: list[Bundle]
    ranks: list[Bundle] = field(default_factory=list)

    @property
    def bundles(self) -> list[Bundle]:
        """All of them."""
        return [*self.own, *self.ranks]

    def total(self, name: str) -> float:
        """Of one resource."""
        return sum(bundle.get(name, 0.0) for bundle in self.bundles)


def in_one_process(run: RunSpec) -> bool:
    """Whether a trial's process does all of the run by itself."""
    if isinstance(run.algo, RLlibSpec):
        return False
    workers = run.online and (
        run.rollout.workers > 1 or run.rollout.mode == "async" or run.rollout.inference != "local"
    )
    return run.learner.ranks == 1 and not workers and run.evaluation.workers == 1 and run.rollout.clients is None


def needs_of(spec: SweepSpec, run: RunSpec, gpus: float) -> Needs:
    """What a trial with this run holds, in a cluster with so many GPUs."""
    if in_one_process(run):
        bundle = {"CPU": spec.resources.cpu}
        return Needs([bundle | ({"GPU": spec.resources.gpu} if spec.resources.gpu else {})])
    from rlsvc.train.cluster import place_on_gpus, robot_resources

    placed = place_on_gpus(run, gpus)
    robot = robot_resources(run.env)
    own: list[Bundle] = [dict(HEAD)]
    rank = {"CPU": run.learner.cpus_per_rank, "GPU": placed.learner.gpus_per_rank or 0.0}
    ranks = [rank] * run.learner.ranks
    if isinstance(run.algo, RLlibSpec):
        # RLlib's learners are placed in the trial's own group; one without a GPU is the trial's process.
        inside, ranks = remote_learners(placed.learner), []
        own = [dict(HEAD) if inside else {"CPU": run.learner.cpus_per_rank}]
    if run.collects and run.rollout.clients is None:
        own += [{"CPU": run.rollout.cpus_per_worker, **robot}] * run.rollout.workers
        own += [{"GPU": placed.rollout.inference_gpus or 0.0}] if run.rollout.inference == "central" else []
    if run.evaluates:
        own += [{"CPU": run.evaluation.cpus_per_worker, **robot}] * run.evaluation.workers
        own += [{"GPU": placed.evaluation.gpus or 0.0}]
    if isinstance(run.algo, RLlibSpec):
        own += [rank] * remote_learners(placed.learner)
    return Needs([_held(bundle) for bundle in own if any(bundle.values())], [_held(bundle) for bundle in ranks])


def fit(needs: Needs, nodes: Sequence[Bundle], at_most: int) -> int:
    """How many such trials the nodes hold at once, each with all of its bundles; at most so many."""
    free = [dict(node) for node in nodes]
    bundles = sorted(needs.bundles, key=lambda bundle: (-bundle.get("GPU", 0.0), -bundle.get("CPU", 0.0)))
    for count in range(at_most):
        for bundle in bundles:
            node = next((node for node in free if all(node.get(k, 0.0) >= v - 1e-9 for k, v in bundle.items())), None)
            if node is None:
                return count
            for name, amount in bundle.items():
                node[name] -= amount
    return at_most


def check_fit(needs: Needs, nodes: Sequence[Bundle]) -> None:
    """Refuses a trial that these nodes can never hold.

    Raises:
        SpecError: names the resource, what is asked for, and what there is.
    """
    for name in sorted({key for bundle in needs.bundles for key in bundle}):
        asked, there = needs.total(name), sum(node.get(name, 0.0) for node in nodes)
        if asked > there + 1e-9:
            raise SpecError(
                f"resources: a trial asks for {asked:g} {name} ({_shown(needs)}), the cluster has {there:g}. Ask for "
                "less in resources, or in learner, rollout and evaluation of the run; or set RAY_ADDRESS to a cluster "
                "that has them"
            )
    if not fit(needs, nodes, 1):
        raise SpecError(
            f"resources: a trial asks for {_shown(needs)}, which no nodes of the cluster hold: "
            f"{'; '.join(_bundle(_held(node)) for node in nodes)}. Ask for smaller pieces"
        )


def _held(bundle: Bundle) -> Bundle:
    return {name: amount for name, amount in bundle.items() if amount and not name.startswith(("node:", "object_"))}


def _shown(needs: Needs) -> str:
    kinds: dict[str, int] = {}
    for bundle in needs.bundles:
        kinds[_bundle(bundle)] = kinds.get(_bundle(bundle), 0) + 1
    return " + ".join(f"{count} x {kind}" if count > 1 else kind for kind, count in kinds.items())


def _bundle(bundle: Bundle) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(bundle.items()) if name != "memory")
