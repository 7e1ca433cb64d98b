import re
import threading

import pytest

from rlsvc.spec.compose import compose
from rlsvc.train.orchestrator import GroupRestarted, Orchestrator, Order


def spec(*words: str):
    base = ["experiment=pusht_demo", "total_steps=10", "log_interval=100", "learner.updates_per_call=4"]
    return compose([*base, "checkpoint.interval=100", "evaluation.interval=null", *words])


def shown(orders) -> list[str]:
    return [f"{o.kind} {o.num_updates}->{o.step}" if o.kind == "update" else f"{o.kind} {o.step}" for o in orders]


class Group:
    """Carries out orders in no time; loses its ranks at the numbers in `restarts`, coming back at the step given."""

    def __init__(self, step: int = 0, restarts: dict[int, int] | None = None) -> None:
        self.step, self.restarts, self.orders = step, dict(restarts or {}), []

    def start(self) -> int:
        return self.step

    def execute(self, order: Order):
        self.orders.append(order)
        if order.number in self.restarts:
            raise GroupRestarted(self.restarts.pop(order.number))
        return {"loss": float(order.step)} if order.kind == "update" else {"step": order.step}

    def close(self) -> None:
        pass


class Listener:
    def __init__(self, on_metrics=None) -> None:
        self.updates, self.results, self.then = [], [], on_metrics

    def on_metrics(self, step, metrics) -> None:
        self.updates.append((step, metrics))
        if self.then:
            self.then()

    def on_result(self, order, result) -> None:
        self.results.append((order.kind, order.step, result))


def orders(*words: str, step: int = 0) -> list[str]:
    """What a group that begins at `step` is told, without the final stop."""
    _, group, _ = run(words, Group(step))
    return shown(group.orders)[:-1]


def run(words=(), group=None, stop=None, listener=None):
    group, listener = group or Group(), listener or Listener()
    step = Orchestrator(spec(*words), group, listener, stop or threading.Event()).run()
    return step, group, listener


def test_a_run_ends_with_validation_export_and_checkpoint():
    assert orders() == [
        "update 4->4", "update 4->8", "update 2->10", "validate 10", "export 10", "checkpoint 10",
    ]  # fmt: skip


def test_calls_are_cut_where_something_is_due_between_multiples_of_k():
    words = ("checkpoint.interval=3", "evaluation.interval=5", "log_interval=7")
    assert orders(*words) == [
        "update 3->3", "validate 3", "checkpoint 3",
        "update 2->5", "validate 5", "export 5",
        "update 1->6", "validate 6", "checkpoint 6",
        "update 1->7",
        "update 2->9", "validate 9", "checkpoint 9",
        "update 1->10", "validate 10", "export 10", "checkpoint 10",
    ]  # fmt: skip


def test_without_an_environment_only_the_last_bundle_is_exported():
    assert orders("env=null", "evaluation.interval=5", "data.validation_fraction=0") == [
        "update 4->4",
        "update 4->8",
        "update 2->10",
        "export 10",
        "checkpoint 10",
    ]


@pytest.mark.parametrize("step", range(11))
def test_resuming_at_any_step_gives_what_is_left_of_the_same_schedule(step):
    words = ("checkpoint.interval=3", "evaluation.interval=5", "log_interval=2", "learner.updates_per_call=1")
    whole = orders(*words)
    assert orders(*words, step=step) == [order for order in whole if int(re.split("[ >]", order)[-1]) > step]


def test_orders_are_numbered_in_turn_and_end_with_stop():
    step, group, _ = run()
    assert step == 10
    assert [order.number for order in group.orders] == list(range(7))
    assert shown(group.orders)[-1] == "stop 10"


def test_metrics_are_averaged_over_updates_by_their_number_and_logged_at_the_interval():
    _, _, listener = run(["log_interval=6"])
    # 4 updates that report 4 and 2 that report 6; then 4 that report 10.
    assert listener.updates == [(6, {"train/loss": pytest.approx((4 * 4 + 2 * 6) / 6)}), (10, {"train/loss": 10.0})]
    assert [result[:2] for result in listener.results] == [("validate", 10), ("export", 10), ("checkpoint", 10)]


def test_a_restarted_group_goes_on_from_its_checkpoint_and_old_metrics_are_dropped():
    # Order 3 is the update to 8, after the updates to 4 and the checkpoint there.
    words = ["checkpoint.interval=4", "data.validation_fraction=0", "log_interval=10"]
    step, group, listener = run(words, Group(restarts={2: 4}))
    assert step == 10
    assert shown(group.orders) == [
        "update 4->4", "checkpoint 4", "update 4->8", "update 4->8", "checkpoint 8", "update 2->10", "export 10",
        "checkpoint 10", "stop 10",
    ]  # fmt: skip
    assert listener.updates == [(10, {"train/loss": pytest.approx((4 * 8 + 2 * 10) / 6)})]


def test_a_group_that_comes_back_at_the_beginning_does_everything_again():
    _, group, _ = run(["data.validation_fraction=0"], Group(restarts={4: 0}))
    assert shown(group.orders).count("update 4->4") == 2


def test_a_stop_writes_a_checkpoint_and_ends_the_run():
    stop = threading.Event()
    step, group, listener = run(["log_interval=4"], stop=stop, listener=Listener(stop.set))
    assert step == 4
    assert shown(group.orders) == ["update 4->4", "checkpoint 4", "stop 4"]
    assert [result[:2] for result in listener.results] == [("checkpoint", 4)]


def test_a_stop_survives_a_group_that_restarts_while_it_writes_the_checkpoint():
    stop = threading.Event()
    step, group, _ = run(["log_interval=4"], Group(restarts={1: 0}), stop, Listener(stop.set))
    assert step == 0
    assert shown(group.orders) == ["update 4->4", "checkpoint 4", "checkpoint 0", "stop 0"]


def test_ranks_lost_at_the_very_end_do_not_fail_the_run():
    _, group, _ = run(["data.validation_fraction=0"], Group(restarts={5: 10}))
    assert shown(group.orders)[-3:] == ["checkpoint 10", "stop 10", "stop 10"]


def test_a_finished_run_that_is_resumed_has_nothing_left_to_do():
    step, group, _ = run(group=Group(step=10))
    assert (step, shown(group.orders)) == (10, ["stop 10"])
