"""Who is suspected: only a member for which the others wait, never one that gets on, however slowly."""

from moeray.comm.messages import Tick
from moeray.elastic.health import StallWatch

TIMEOUT_S = 1.5


def tick(position: int = 0, progress: int = 0, *, parked: bool = False, requests: int = 1) -> Tick:
    return Tick(epoch=0, position=position, progress=progress, is_parked=parked, num_requests=requests)


def watch(**ticks: Tick) -> StallWatch:
    """Members `a`, `b`, ... in slots 0, 1, ... that have answered once."""
    made = StallWatch(range(len(ticks)), TIMEOUT_S)
    for slot, answer in enumerate(ticks.values()):
        made.saw(slot, answer)
    return made


def pass_time(watched: StallWatch, seconds: float, **answers: Tick) -> None:
    """In pieces of 0.1 s; members that are named answer each time, always the same."""
    for _ in range(round(seconds * 10)):
        watched.elapsed(0.1)
        for name, answer in answers.items():
            watched.saw(ord(name) - ord("a"), answer)


def test_the_one_furthest_behind_is_suspected_once_the_time_is_over() -> None:
    watched = watch(a=tick(7), b=tick(6), c=tick(7))
    pass_time(watched, 1.4, a=tick(7), b=tick(6), c=tick(7))
    assert watched.suspect() is None
    pass_time(watched, 0.1, a=tick(7), b=tick(6), c=tick(7))
    suspect = watched.suspect()
    assert suspect is not None
    assert suspect.slot == 1
    assert suspect.evidence == "nobody got on for 1.5 s, and it is 1 exchanges behind"


def test_a_long_step_is_no_stall() -> None:
    watched = watch(a=tick(7), b=tick(6), c=tick(7))
    for layer in range(10):
        pass_time(watched, 1.0, a=tick(7), b=tick(6, layer), c=tick(7))
        assert watched.suspect() is None


def test_nobody_is_suspected_while_all_rest() -> None:
    rest = tick(parked=True, requests=0)
    watched = watch(a=rest, b=rest)
    pass_time(watched, 60.0, a=rest, b=rest)
    assert watched.is_resting
    assert watched.suspect() is None


def test_one_that_does_not_answer_while_all_rest_is_suspected_later() -> None:
    rest = tick(parked=True, requests=0)
    watched = watch(a=rest, b=rest)
    pass_time(watched, 2 * TIMEOUT_S - 0.2, a=rest)
    assert watched.suspect() is None
    pass_time(watched, 0.3, a=rest)
    suspect = watched.suspect()
    assert suspect is not None
    assert (suspect.slot, suspect.evidence) == (1, "it has not answered for 3 s")


def test_in_the_same_exchange_the_silent_one_is_suspected_then_the_one_with_fewer_requests() -> None:
    busy, idle = tick(5, requests=9), tick(5, requests=2)
    watched = watch(a=idle, b=busy, c=busy)
    pass_time(watched, TIMEOUT_S, a=idle, c=busy)
    suspect = watched.suspect()
    assert suspect is not None
    assert suspect.slot == 1
    assert suspect.evidence.endswith("in the same exchange as all, without an answer")
    watched = watch(a=busy, b=busy, c=idle)
    pass_time(watched, TIMEOUT_S, a=busy, b=busy, c=idle)
    suspect = watched.suspect()
    assert suspect is not None
    assert suspect.slot == 2
    assert suspect.evidence.endswith("in the same exchange as all")


def test_a_parked_one_that_others_wait_for_is_suspected() -> None:
    watched = watch(a=tick(8), b=tick(7, parked=True, requests=0))
    pass_time(watched, TIMEOUT_S, a=tick(8))
    suspect = watched.suspect()
    assert suspect is not None
    assert suspect.slot == 1


def test_a_single_worker_that_hangs_is_suspected() -> None:
    watched = watch(a=tick(0, 5))
    pass_time(watched, TIMEOUT_S)
    suspect = watched.suspect()
    assert suspect is not None
    assert suspect.slot == 0


def test_an_epoch_that_has_only_begun_is_not_judged_unless_one_never_comes_to_it() -> None:
    watched = StallWatch((0, 1), TIMEOUT_S)
    watched.saw(0, tick(1))
    pass_time(watched, 4 * TIMEOUT_S - 0.2, a=tick(1))
    assert watched.suspect() is None
    assert not watched.is_anxious
    pass_time(watched, 0.3, a=tick(1))
    suspect = watched.suspect()
    assert suspect is not None
    assert (suspect.slot, suspect.evidence) == (1, "it has not told of this epoch for 6 s")


def test_getting_on_at_all_starts_the_time_again() -> None:
    watched = watch(a=tick(7), b=tick(6))
    pass_time(watched, 1.4, a=tick(7), b=tick(6))
    watched.saw(1, tick(7))
    pass_time(watched, 1.4, a=tick(7), b=tick(7))
    assert watched.is_anxious
    assert watched.suspect() is None
