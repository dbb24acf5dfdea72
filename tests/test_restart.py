"""After a restart the pool begins where it stopped: what was warm comes back unasked, the most worth first."""

import sqlite3

import pytest
import warmset
from warmset import synthetic_model, wait_for

NAMES = ("often", "sometimes", "once")
# Room for two of the three: 64 MiB each, and what their processes take beside it.
MEMORY = {"memory": "204MiB", "reserve": "64MiB"}


def states(server):
    return {model["name"]: model["state"] for model in server.admin_json("/admin/v1/models")["models"]}


def warm_in_catalog(server):
    with sqlite3.connect(server.data / "catalog.db") as catalog:
        rows = catalog.execute("SELECT name FROM warmth JOIN models USING (digest) WHERE warm").fetchall()
    return {name for (name,) in rows}


def demand_in_catalog(server):
    with sqlite3.connect(server.data / "catalog.db") as catalog:
        return dict(catalog.execute("SELECT name, demand_per_second FROM warmth JOIN models USING (digest)"))


def busy_pool(pool, directory, **tables):
    models = [{"name": name, "source": synthetic_model(directory, name, 64 + index / 1024), "engine": "synthetic"}
              for index, name in enumerate(NAMES)]
    server = pool(**MEMORY, models=models, **tables)
    for name, times in (("once", 1), ("sometimes", 3), ("often", 9)):
        for _ in range(times):
            assert server.complete(name)[0] == 200
    wait_for(lambda: states(server) == {"often": "ready", "sometimes": "ready", "once": "absent"}, "two of three are warm")
    return server


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_what_was_warm_comes_back_without_a_request(pool, tmp_path, end):
    server = busy_pool(pool, tmp_path)
    if end == "kill":
        wait_for(lambda: warm_in_catalog(server) == {"often", "sometimes"}, "what is warm is written down")
        # That may have been after the first of the requests; how many came after it is written within half a minute.
        told = lambda: demand_in_catalog(server)  # noqa: E731
        wait_for(lambda: told()["often"] > told()["sometimes"], lambda: f"how often they are wanted is written down: {told()}")
        server.kill()
    else:
        server.stop()
    server.start()
    wait_for(lambda: states(server) == {"often": "ready", "sometimes": "ready", "once": "absent"}, lambda: str(states(server)))
    wait_for(lambda: server.metric("warmset_model_loads_total") >= 2, "the loads are counted")
    assert server.metric("warmset_model_loads_total") == 2
    assert server.metric("warmset_model_evictions_total") == 0
    demand = {line["name"]: line["demand_per_second"] for line in server.ledger()["entries"]}
    assert demand["often"] > demand["sometimes"] > 0


def test_with_less_memory_the_most_worth_comes_back(pool, tmp_path):
    server = busy_pool(pool, tmp_path)
    server.stop()
    server.budget = "137MiB"
    server.start()
    wait_for(lambda: states(server)["often"] == "ready", lambda: str(states(server)))
    assert states(server) == {"often": "ready", "sometimes": "absent", "once": "absent"}
    # The other is served as ever, and takes its place.
    assert server.complete("sometimes")[0] == 200


def test_restoring_can_be_switched_off(pool, tmp_path):
    server = busy_pool(pool, tmp_path, residency={"restore": False, "forecast": False})
    server.stop()
    server.start()
    assert set(states(server).values()) == {"absent"}
    assert server.complete("often")[0] == 200
    assert server.metric("warmset_model_loads_total") == 1


def test_readiness_waits_for_pins_and_not_for_a_broken_one(pool, tmp_path):
    slow = {"name": "slow", "source": synthetic_model(tmp_path, "slow", 16, load_seconds=2.0), "pin": True}
    broken = {"name": "broken", "source": synthetic_model(tmp_path, "broken", 17, failure="load_fails"), "pin": True}
    server = pool(memory="1GiB", models=[{**slow, "engine": "synthetic"}, {**broken, "engine": "synthetic"}], wait=False)
    reasons = set()

    def ready():
        try:
            status, _, text = server.get("/health/ready")
        except ConnectionError:
            return False
        if status == 503:
            reasons.add(text.decode().strip())
        return status == 200

    wait_for(ready, "the server is ready")
    # The broken one may be tried again at just this moment.
    wait_for(lambda: states(server) == {"slow": "ready", "broken": "failed"}, lambda: str(states(server)))
    assert reasons <= {"the pinned model slow is being loaded", "the pinned model broken is being loaded"} and reasons
