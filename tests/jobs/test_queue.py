"""Whose turn it is: priority, age, what is free; without Ray."""

from rlsvc.jobs.queue import FRESH_S, SETTLE_S, SILENT_S, Line, Ticket

HAVE = {"CPU": 4.0, "GPU": 1.0}


def ticket(job: str, priority: int = 0, since: float = 0.0, **asks: float) -> Ticket:
    return Ticket(job, priority, since, asks)


def settled() -> tuple[Line, float]:
    return Line(0.0), SETTLE_S + 1


def test_the_higher_priority_goes_first_then_the_older():
    line, now = settled()
    old, young, urgent = ticket("old", 0, 1, CPU=4), ticket("young", 0, 2, CPU=4), ticket("urgent", 5, 3, CPU=4)
    running = ticket("running", 0, 0, CPU=4)
    assert line.ask(running, HAVE, HAVE, now) == 0
    none = {"CPU": 0.0, "GPU": 0.0}
    for _ in range(2):
        places = {one.job: line.ask(one, HAVE, none, now) for one in (young, old, urgent)}
    assert places == {"urgent": 1, "old": 2, "young": 3}
    line.over("running")
    assert line.ask(old, HAVE, HAVE, now) == 2  # the urgent one has not asked since
    assert line.ask(urgent, HAVE, HAVE, now) == 0


def test_a_large_job_is_not_overtaken_by_a_small_one_behind_it():
    line, now = settled()
    assert line.ask(ticket("running", CPU=2), HAVE, HAVE, now) == 0
    free = {"CPU": 2.0, "GPU": 1.0}
    assert line.ask(ticket("large", since=1, CPU=4), HAVE, free, now + FRESH_S) == 1
    assert line.ask(ticket("small", since=2, CPU=1), HAVE, free, now + FRESH_S) == 2


def test_what_others_hold_is_not_free():
    line, now = settled()
    one = ticket("one", CPU=3)
    assert line.ask(one, HAVE, {"CPU": 2.0, "GPU": 1.0}, now) == 1
    assert line.ask(one, HAVE, {"CPU": 3.0, "GPU": 1.0}, now) == 0


def test_a_job_that_just_began_holds_what_it_has_not_taken_yet():
    line, now = settled()
    assert line.ask(ticket("first", CPU=2), HAVE, HAVE, now) == 0
    second = ticket("second", since=1, CPU=3)
    assert line.ask(second, HAVE, HAVE, now) == 1  # all is idle, but two of the four CPUs are promised
    assert line.ask(ticket("third", 1, CPU=2), HAVE, HAVE, now) == 0  # beside the first one there is room for two


def test_a_job_between_two_steps_of_its_own_keeps_what_it_asked_for():
    line, now = settled()
    first, second = ticket("first", CPU=4), ticket("second", since=1, CPU=1)
    assert line.ask(first, HAVE, HAVE, now) == 0
    for later in range(0, int(3 * FRESH_S), 10):
        line.runs(first, now + later)
        assert line.ask(second, HAVE, HAVE, now + later) == 1


def test_a_job_that_has_died_is_forgotten():
    line, now = settled()
    assert line.ask(ticket("dead", CPU=4), HAVE, HAVE, now) == 0
    assert line.ask(ticket("next", since=1, CPU=4), HAVE, HAVE, now + SILENT_S - 1) == 1
    assert line.ask(ticket("next", since=1, CPU=4), HAVE, HAVE, now + SILENT_S + 1) == 0


def test_a_line_that_was_lost_hears_first_who_runs():
    line = Line(100.0)
    running, waiting = ticket("running", CPU=4), ticket("waiting", 9, CPU=4)
    assert line.ask(waiting, HAVE, HAVE, 100.5) == 1
    line.runs(running, 101.0)
    assert line.ask(waiting, HAVE, HAVE, 101 + SETTLE_S) == 1
    line.over("running")
    assert line.ask(waiting, HAVE, HAVE, 101 + SETTLE_S) == 0
