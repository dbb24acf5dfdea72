"""A demand of `warmset sim`, played live with the server's clock going faster than the machine's."""

import pytest
import replay
import warmset

# Two hours in half a minute.
SPEED = 240
SECONDS = 2 * 3_600
SLOTS = 4
PERIOD_SECONDS = 300
SCENARIO = """
description = "a few models with a timer each, and some that are asked for at random"
slots = [4]
load_seconds = 5.0
run_seconds = 2.0
days = 1

[[group]]
models = 4
pattern = "periodic"
every_minutes = [5, 5]
jitter = 0.05

[[group]]
models = 8
pattern = "random"
every_minutes = [5, 40]
burst = 3
"""


@pytest.fixture(scope="module")
def day(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenario") / "few.toml"
    path.write_text(SCENARIO)
    return replay.simulate(path, "--compare", "warmset,lru", seed=3)


def test_the_simulator_hands_out_the_demand_it_replays(day):
    demand = day["demand"]
    assert day["requests"] == len(demand) and demand == sorted(demand)
    assert {model for _, model in demand} == set(range(day["models"]))
    assert {row["policy"]: row["cold"] + row["warm"] for row in day["rows"]} == {"warmset": len(demand), "lru": len(demand)}


def test_sizes_and_load_times_can_be_given_beside_a_scenario(tmp_path):
    path = tmp_path / "few.toml"
    path.write_text(SCENARIO)
    document = replay.simulate(path, "--compare", "lru", "--slots", "1,12", "--load-seconds", "0.5")
    assert [row["slots"] for row in document["rows"]] == [1, 12] and document["load_seconds"] == 0.5
    for option, value in (("--slots", "0"), ("--load-seconds", "0")):
        result = warmset.run_command(["sim", str(path), option, value], check=False)
        assert result.returncode != 0 and "scenario" in result.stderr, result.stderr


def test_two_hours_are_played_in_half_a_minute_and_counted_alike_on_both_sides(day, tmp_path):
    demand = [request for request in day["demand"] if request[0] < SECONDS]
    server = replay.pool(tmp_path, day["models"], SLOTS, SPEED, day["load_seconds"] / SPEED, day["run_seconds"] / SPEED)
    with server:
        played = replay.play(server, demand, SPEED)
        counts = replay.counted(server, len(demand))
        cold = {name: server.metric("warmset_requests_total", model=name, start="cold") for name in played.cold_by_model}
        engines = len(server.engines())
        # What comes every five minutes of the day came every 1.25 seconds here: minutes are what was learned.
        warmset.wait_for(lambda: PERIOD_SECONDS / SPEED * 10 < expected_after_a_request(server, 0) < 2 * PERIOD_SECONDS,
                         lambda: f"the next request is expected in minutes: {expected_after_a_request(server, 0)}")
    assert not played.failures, played.failures[:3]
    assert counts["starts"] == dict(played.starts) and counts["outcomes"] == {"ok": len(demand)}
    assert cold == dict(played.cold_by_model)
    assert counts["loads_failed"] == 0 and engines <= SLOTS + 1  # a spare may wait beside them
    # A load takes five seconds of the day, and something for its process.
    assert counts["load_seconds_mean"] >= day["load_seconds"], counts


def expected_after_a_request(server, model):
    replay.ask(server, model)
    forecast = server.cli_json("model", "show", replay.name_of(model))["forecast"]
    return forecast["next_in_seconds"] or 0.0


def test_a_clock_of_no_or_absurd_speed_is_refused(tmp_path):
    for speed in ("0", "1.5", "100000"):
        result = warmset.run_command(["serve", "--data", str(tmp_path), "--clock-speed", speed], check=False)
        assert result.returncode == 2 and "between 1 and 1000" in result.stderr, result.stderr
