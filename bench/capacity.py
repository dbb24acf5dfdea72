"""A pool of machines, shared and dedicated, played live on one machine: what `warmset sim` says of it beside what callers saw.

The requests are those of the simulator, at its instants: each machine is a `warmset serve` with synthetic engines, each fleet of several has
a `warmset gateway` in front, and a machine that is lost gets a kill -9 and comes back with its data. What callers saw goes back into the
simulator's report (`--live`), so that the same code counts and prices both. Claim: p50 and p99 within 15 %, counts within 5 %.
"""

import argparse
import asyncio
import contextlib
import json
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import harness
import replay
import warmset

SCENARIO = harness.ROOT / "scenarios" / "capacity-live.toml"
CHAT = "/v1/chat/completions"
HOUR_SECONDS = 3600
# Threads are no matter where nothing is computed: as many as in the simulation.
CORES = 1024
# Requests come so long after everything is ready: the gateway has looked at its replicas by then.
SETTLE_SECONDS = 3
# After the last request came, what has not ended by then is cut; as in the simulation.
DRAIN_SECONDS = 120
# A step of a synthetic engine reads at most this long: crates/engine/src/synthetic.
READ_STEP_SECONDS = 0.05
TIME_TOLERANCE, COUNT_TOLERANCE = 0.15, 0.05
# What is counted of a machine, by the events that tell of it.
COUNTED = ("loads", "failed_loads", "evictions", "preloads_used", "preloads_wasted", "parked")


def arguments():
    parser = argparse.ArgumentParser(prog="bench/run capacity", description=__doc__.splitlines()[0])
    parser.add_argument("--scenario", type=Path, default=SCENARIO)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--live", type=Path, help="write what callers saw here, for `warmset sim SCENARIO --live FILE`")
    parser.add_argument("--html", type=Path, help="write the report with both here")
    return parser.parse_args()


def simulated(given, *options):
    command = ["sim", str(given.scenario), "--seed", str(given.seed), "--json", *map(str, options)]
    return json.loads(warmset.run_command(command, timeout=600).stdout)


def playable(demand):
    """Refuses what synthetic engines do not do."""
    pool = demand["pool"]
    if pool["slow_disk"] or pool["failing_loads"]:
        raise SystemExit("slow_disk and failing_loads cannot be played live: files of synthetic models say one load time for all loads")
    for team in pool["team"]:
        wrong = [key for key in ("decode_step_seconds_per_sequence", "first_request_seconds", "kept_tokens", "pinned") if team[key]]
        if wrong or team["read_step_seconds"] != READ_STEP_SECONDS or pool["shares_compute"]:
            raise SystemExit(f"team {team['name']} is not like a synthetic engine: those have read_step_seconds = {READ_STEP_SECONDS}, "
                             f"share nothing (shares_compute = false), and none of {', '.join(wrong) or 'the rest'}")


def words(number, tokens):
    """So many words, of four bytes each, that only this number begins with."""
    letters = lambda value: "".join(chr(ord("a") + value // 26**place % 26) for place in range(3))
    cycle = [letters(number % 17576), letters(number // 17576 % 17576), letters(number // 17576**2)]
    return " ".join(cycle[place % 3] for place in range(tokens))


def messages(demand, request):
    """The conversation up to a question. Each role is a word, too."""
    team = demand["pool"]["team"][demand["models"][request["model"]]]
    said = []
    if team["system_tokens"]:
        said.append({"role": "system", "content": words(request["model"], team["system_tokens"] - 1)})
    for place, tokens in enumerate(request["said_tokens"]):
        content = words((1 << 20) + 64 * request["session"] + place, max(1, tokens - 1))
        said.append({"role": ("user", "assistant")[place % 2], "content": content})
    return said


def name_of(model):
    return f"model-{model}"


class Machine:
    """One server, what it told before it was killed, and what it holds."""

    def __init__(self, directory, demand, models):
        self.demand, self.counts = demand, [Counter() for _ in demand["pool"]["team"]]
        pool = demand["pool"]
        config = {"gateway": {"queue_limit": pool["queue_limit"], "queue_limit_per_model": pool["queue_limit"],
                              "first_byte_timeout": pool["patience_seconds"]},
                  "worker": {"cores": CORES, "concurrent_loads": pool["concurrent_loads"]}, "kv": {"host": 0},
                  "model": [self.model(directory, model) for model in models]}
        self.server = warmset.Server(directory, memory=pool["memory_bytes"], reserve=pool["reserve_bytes"],
                                     config=warmset.toml(config), environment={"TZ": replay.midnight_zone()})

    def model(self, directory, number):
        team = self.demand["pool"]["team"][self.demand["models"][number]]
        source = warmset.synthetic_model(
            Path(directory) / "models", name_of(number), allocate=False, host_bytes=team["model_bytes"] - number,
            load_extra_bytes=max(0, team["peak_bytes"] - team["model_bytes"]), load_seconds=team["load_seconds"],
            prefill_seconds_per_token=1 / team["prefill_tokens_per_second"], decode_seconds_per_token=team["decode_step_seconds"])
        slo = {key: value for key, value in team["targets"].items() if value is not None}
        return {"name": name_of(number), "source": source, "engine": "synthetic", "parallel": team["parallel"],
                "max_concurrency": team["parallel"], "priority": team["class"], "context_tokens": 1 << 20,
                **({"slo": slo} if slo else {})}

    def start(self):
        began = time.perf_counter()
        self.server.start()
        replay.put_ahead(self.server)
        # What it brought back before it was ready is told, too.
        self.events = warmset.Events(self.server, after=0)
        self.events.start()
        self.start_seconds = time.perf_counter() - began
        self.up = True

    def kill(self):
        self.up = False
        self.server.kill()
        self.collect()

    def stop(self):
        self.up = False
        self.events.__exit__()
        self.collect()
        self.server.stop()

    def collect(self):
        """What this life told, by team."""
        self.events.join(5)
        for event in self.events.all():
            counts = self.counts[self.demand["models"][int(event["model"].split("-")[1])]] if "model" in event else None
            kind = event["type"]
            if kind == "load_started":
                counts["loads"] += 1
            elif kind == "load_refused":
                counts["failed_loads"] += 1
            elif kind == "eviction_started" and event["reason"] == "memory":
                counts["evictions"] += 1
            elif kind == "preloaded" and event["outcome"] in ("used", "wasted"):
                counts[f"preloads_{event['outcome']}"] += 1
            elif kind == "request_parked":
                counts["parked"] += 1
        self.events.events.clear()

    def held(self):
        """Bytes of each model; nothing while the server is away."""
        with contextlib.suppress(OSError, AssertionError, warmset.http.client.HTTPException):
            return [(int(line["name"].split("-")[1]), sum(line["private"])) for line in self.server.ledger()["entries"] if sum(line["private"])]
        return []


class Fleet:
    """Machines, and a gateway in front of them if there is more than one."""

    def __init__(self, directory, demand, placed):
        self.demand, self.placed, self.absences, self.memory, self.requests = demand, placed, [], [], []
        self.machines = [Machine(directory / f"machine-{number}", demand, models) for number, models in enumerate(placed["machines"])]
        self.directory, self.gateway, self.late_seconds = directory, None, []

    def __enter__(self):
        for machine in self.machines:
            machine.start()
        self.port = self.machines[0].server.port
        if len(self.machines) > 1:
            replicas = [{"url": machine.server.url, "models": [name_of(model) for model in models]}
                        for machine, models in zip(self.machines, self.placed["machines"])]
            self.gateway = warmset.Gateway(self.directory / "gateway", [], config=warmset.toml(
                {"gateway": {"first_byte_timeout": self.demand["pool"]["patience_seconds"]}, "replica": replicas}))
            self.gateway.start()
            replay.put_ahead(self.gateway)
            self.port = self.gateway.port
        self.numbers = {machine.server.url: number for number, machine in enumerate(self.machines)}
        return self

    def __exit__(self, *_):
        if self.gateway:
            self.gateway.stop()
        for machine in self.machines:
            machine.stop()

    def lose(self, began, lost):
        """kill -9 at the scenario's moment; ready again when its time away is over."""
        machine, at = self.machines[lost["machine"]], began + lost["at_hours"] * HOUR_SECONDS
        sleep_until(at)
        gone = time.perf_counter()
        machine.kill()
        sleep_until(at + lost["away_seconds"] - machine.start_seconds)
        machine.start()
        self.absences.append({"machine": lost["machine"], "from_seconds": gone - began, "until_seconds": time.perf_counter() - began})

    def sample(self, began):
        pool = self.demand["pool"]
        for number in range(int(pool["hours"] * HOUR_SECONDS / pool["sample_seconds"]) + 1):
            sleep_until(began + number * pool["sample_seconds"])
            for place, machine in enumerate(self.machines):
                self.memory += [{"second": number * pool["sample_seconds"], "machine": place, "model": model, "bytes": held}
                                for model, held in (machine.held() if machine.up else [])]

    def document(self):
        counts = [{name: sum(machine.counts[team][name] for machine in self.machines) for name in COUNTED}
                  for team in range(len(self.demand["pool"]["team"]))]
        return {"counts": counts, "absences": self.absences, "memory": self.memory, "requests": self.requests}


def sleep_until(moment):
    time.sleep(max(0.0, moment - time.perf_counter()))


async def ask(fleet, number, began):
    """One request at its moment, and what its caller saw."""
    demand = fleet.demand
    request = demand["requests"][number]
    body = json.dumps({"model": name_of(request["model"]), "messages": messages(demand, request), "stream": True, "ignore_eos": True,
                       "max_tokens": request["output_tokens"], "temperature": 0}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    due = began + request["second"]
    await asyncio.sleep(max(0.0, due - time.perf_counter()))
    seen = {"number": number, "second": request["second"], "model": request["model"], "machine": None, "cold": False,
            "first_token_seconds": None, "end": "refused", "refusal": None, "ended_seconds": None}
    fleet.late_seconds.append(time.perf_counter() - due)
    writer = None
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", fleet.port, limit=1 << 20)
        writer.write(head.encode() + body)
        await read(reader, fleet, seen, due)
    except (OSError, asyncio.IncompleteReadError, ValueError):
        pass
    finally:
        if writer:
            writer.close()
    if seen["end"] == "refused" and seen["first_token_seconds"] is not None:
        seen["end"] = "broken"
    elif seen["end"] == "refused" and seen["refusal"] is None:
        seen["refusal"] = "machine_lost"
    seen["ended_seconds"] = round(time.perf_counter() - due, 6)
    fleet.requests.append(seen)


async def read(reader, fleet, seen, due):
    status = int((await reader.readline()).split()[1])
    while (line := await reader.readline()).strip():
        name, value = line.decode().strip().split(": ", 1)
        if name == "warmset-start":
            seen["cold"] = value == "cold"
        elif name == "warmset-worker":
            seen["machine"] = fleet.numbers.get(value, seen["machine"])
    if len(fleet.machines) == 1:
        seen["machine"] = 0
    if status != 200:
        lines = [line async for line in reader]
        seen["refusal"] = next((json.loads(line)["error"]["code"] for line in lines if line.startswith(b"{")), str(status))
        return
    async for line in reader:
        if line.startswith(b"data: [DONE]"):
            seen["end"] = "answered"
        elif line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if "error" in event:
                seen["refusal"] = event["error"].get("code") or "error"
                return
            if seen["first_token_seconds"] is None and any(choice["delta"].get("content") for choice in event["choices"]):
                seen["first_token_seconds"] = round(time.perf_counter() - due, 6)


async def play(fleets, demand, began):
    """Every request of the demand to the fleet of its team."""
    fleet_of = {team: fleet for fleet in fleets for team in fleet.placed["teams"]}
    asked = [asyncio.create_task(ask(fleet_of[demand["models"][request["model"]]], number, began))
             for number, request in enumerate(demand["requests"])]
    _, late = await asyncio.wait(asked, timeout=began + demand["requests"][-1]["second"] + DRAIN_SECONDS - time.perf_counter())
    for task in late:
        task.cancel()


def played(demand, arrangement):
    """One arrangement from the first request to the last."""
    print(f"{arrangement['arrangement']}: {len(demand['requests'])} requests in {demand['pool']['hours'] * 60:.1f} minutes", file=sys.stderr)
    with harness.scratch() as directory, contextlib.ExitStack() as stack:
        fleets = [stack.enter_context(Fleet(Path(directory) / f"fleet-{number}", demand, placed))
                  for number, placed in enumerate(arrangement["fleets"])]
        began = time.perf_counter() + SETTLE_SECONDS
        threads = [threading.Thread(target=fleet.sample, args=(began,)) for fleet in fleets]
        threads += [threading.Thread(target=fleet.lose, args=(began, lost)) for fleet in fleets for lost in fleet.placed["lost"]]
        for thread in threads:
            thread.start()
        asyncio.run(play(fleets, demand, began))
        for thread in threads:
            thread.join()
    late = [seconds for fleet in fleets for seconds in fleet.late_seconds]
    return ({"arrangement": arrangement["arrangement"], "fleets": [fleet.document() for fleet in fleets]},
            {share: round(warmset.percentile(late, share), 4) for share in (50, 99, 100)})


# What is claimed of a time, and of a count.
TIMES = ("first_token_p50_seconds", "first_token_p99_seconds", "answer_p50_seconds", "answer_p99_seconds")
COUNTS = ("answered", "loads", "evictions")


def holds(row, name, tolerance):
    """Whether live is as near to simulated as claimed; nothing is near to nothing."""
    both = row[name]
    return both["live"] == both["simulated"] if both["ratio"] is None else abs(both["ratio"] - 1) <= tolerance


def claims(compared):
    """By arrangement and team: which figures are as near as claimed. Counts of one team are too few to judge."""
    found = {}
    for row in compared:
        counts = COUNTS if row["team"] == "all" else COUNTS[:1]
        found[f"{row['arrangement']}, {row['team']}"] = {
            **{name: holds(row, name, TIME_TOLERANCE) for name in TIMES}, **{name: holds(row, name, COUNT_TOLERANCE) for name in counts}}
    return found


def main():
    given = arguments()
    with harness.scratch() as directory:
        path = Path(directory) / "demand.json"
        simulated(given, "--demand", path)
        demand = json.loads(path.read_text())
        playable(demand)
        arrangements = [played(demand, arrangement) for arrangement in demand["arrangements"]]
        live = given.live or Path(directory) / "live.json"
        live.write_text(json.dumps({"seed": given.seed, "arrangements": [row for row, _ in arrangements]}))
        document = simulated(given, "--live", live, *(["--html", given.html] if given.html else []))
    rows = {row["arrangement"]: {key: value for key, value in row.items() if key != "first_token_seconds"} for row in document["rows"]}
    harness.report(
        "capacity", claims(document["compared"]), peer=None, scenario=given.scenario.name, seed=given.seed, requests=document["requests"],
        compared=document["compared"], rows=rows, fleets=document["fleets"],
        sent_late_seconds={row["arrangement"]: late for row, late in arrangements},
        claim="p50 and p99 within 15 %, counts within 5 %")


if __name__ == "__main__":
    main()
