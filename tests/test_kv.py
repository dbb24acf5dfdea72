"""Prefixes that outlive the request they were computed for: in the engine, in host memory, on disk."""

import os
import random
import shutil
import signal
import subprocess
import threading

import pytest
import warmset

BLOCK_TOKENS = 64
NAME = "m"


def model(models, **settings):
    return {"name": NAME, "source": str(models["q4_1"]), "context_tokens": 2048, "parallel": 2, **settings}


def prompt(seed, tokens):
    """Token numbers that mean nothing: what matters is that they are the same again."""
    draw = random.Random(seed)
    return [draw.randrange(1000, 40000) for _ in range(tokens)]


def ask(server, tokens, max_tokens=24, name=NAME, timeout=warmset.PATIENCE_SECONDS):
    status, headers, body = server.complete(name, tokens, max_tokens, timeout=timeout, temperature=0, ignore_eos=True)
    assert status == 200, body
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(tokens)
    return body["choices"][0]["text"], usage["prompt_tokens_details"]["cached_tokens"]


def ask_from_disk(server, tokens):
    """The first answer after a start. A disk that hangs longer than computing would take is not waited for: then another start."""
    for _ in range(5):
        answer = ask(server, tokens)
        if answer[1] > 0 or model_view(server)["abandoned"] == 0:
            break
        assert server.stop() == 0
        server.start()
        wait_for_blocks_on_disk_by_digest(server)
    return answer


def kv(server):
    return server.admin_json("/admin/v1/kv")


def model_view(server, name=NAME):
    return next(view for view in kv(server)["models"] if view["name"] == name)


def wait_for_blocks(server, blocks, tier="host", name=NAME):
    """Saving comes after the answer."""
    def enough():
        views = [view for view in kv(server)["models"] if view["name"] == name]
        return views and views[0][f"{tier}_blocks"] >= blocks
    warmset.wait_for(enough, lambda: f"{blocks} blocks are in {tier}: {kv(server)}")


def engine_of(server, name=NAME):
    return next(engine["pid"] for engine in server.admin_json("/admin/v1/workers")["workers"][0]["engines"] if engine["name"] == name)


@pytest.fixture(scope="module")
def expected(module_pool, models):
    """What the same prompts give where nothing is kept."""
    server = module_pool(models=[model(models)], kv={"host": 0})
    answers = {}

    def answer(tokens, max_tokens=24):
        key = (tuple(tokens), max_tokens)
        if key not in answers:
            text, cached = ask(server, tokens, max_tokens)
            assert cached == 0
            answers[key] = text
        return answers[key]

    assert kv(server) == {"enabled": False}
    return answer


# A whole number of blocks, the last of which is computed again: as long a piece as llama.cpp's attention wants it. Then
# computing in other pieces gives the same bits, and only a wrong block could give another text.
TOKENS = 5 * BLOCK_TOKENS
BLOCKS = 4


def test_the_same_prompt_again_computes_only_its_tail(pool, models, expected):
    server = pool(models=[model(models)])
    tokens = prompt(1, TOKENS)
    assert ask(server, tokens) == (expected(tokens), 0)
    text, cached = ask(server, tokens)
    assert (text, cached) == (expected(tokens), BLOCKS * BLOCK_TOKENS)
    assert model_view(server)["hit_tokens"]["device"] == cached
    assert server.metric("warmset_kv_hit_tokens_total", model=NAME, tier="device") == cached
    assert server.metric("warmset_tokens_total", model=NAME, tenant="anonymous", kind="cached") == cached


@pytest.mark.parametrize("loss", ["unloaded", "killed"])
def test_prefixes_outlive_the_engine(pool, models, expected, loss):
    server = pool(models=[model(models)])
    tokens = prompt(2, TOKENS)
    assert ask(server, tokens) == (expected(tokens), 0)
    wait_for_blocks(server, BLOCKS)
    if loss == "unloaded":
        server.cli("model", "unload", NAME)
    else:
        pid = engine_of(server)
        os.kill(pid, signal.SIGKILL)
        warmset.wait_for(lambda: not warmset.alive(pid), "the engine is gone")
    text, cached = ask(server, tokens)
    assert (text, cached) == (expected(tokens), BLOCKS * BLOCK_TOKENS)
    view = model_view(server)
    assert view["hit_tokens"] == {"device": 0, "host": cached, "disk": 0} and view["reloaded"] == 1
    assert kv(server)["rejected"] == {}


def test_a_shared_beginning_is_used_and_what_follows_is_not(pool, models, expected):
    server = pool(models=[model(models)])
    shared = prompt(3, 3 * BLOCK_TOKENS)
    prompts = [shared + prompt(seed, 2 * BLOCK_TOKENS) for seed in (4, 5, 6)]
    assert ask(server, prompts[0]) == (expected(prompts[0]), 0)
    for number, tokens in enumerate(prompts[1:]):
        # A save is waited for, and not for long: the next request takes the place.
        wait_for_blocks(server, 3 + number + 1)
        assert ask(server, tokens) == (expected(tokens), 3 * BLOCK_TOKENS)
    wait_for_blocks(server, 3 + 3 * 1)
    server.cli("model", "unload", NAME)
    for tokens in prompts:
        text, cached = ask(server, tokens)
        assert text == expected(tokens) and cached in (3 * BLOCK_TOKENS, 4 * BLOCK_TOKENS)
    traffic = model_view(server)["traffic"]
    assert traffic["system_tokens"] >= 3 * BLOCK_TOKENS and traffic["session_tokens"] > 0


def test_other_weights_under_the_same_name_find_nothing(pool, models):
    server = pool(models=[model(models)])
    tokens = prompt(7, TOKENS)
    ask(server, tokens)
    wait_for_blocks(server, BLOCKS)
    candidate = server.cli_json("model", "add", NAME, str(models["q4_0"]))["candidate"]
    server.cli("model", "promote", NAME, candidate)
    _, cached = ask(server, tokens)
    assert cached == 0
    _, cached = ask(server, tokens)
    assert cached == BLOCKS * BLOCK_TOKENS


def test_a_full_tier_takes_in_what_is_new_and_stays_within_its_limit(pool, models, expected):
    limit = 20 << 20
    server = pool(models=[model(models)], kv={"host": limit})
    prompts = [prompt(seed, TOKENS) for seed in range(20, 25)]
    for number, tokens in enumerate(prompts):
        assert ask(server, tokens, 2)[1] == 0
        # What the next one displaces is here, and what is asked for again below was not lost in a crowd.
        warmset.wait_for(lambda: model_view(server)["saved_blocks"] >= BLOCKS * (number + 1), lambda: f"they are saved: {kv(server)}")
        assert kv(server)["host_bytes"] <= limit
    assert model_view(server)["evicted_blocks"] > 0, "old blocks leave"
    server.cli("model", "unload", NAME)
    text, cached = ask(server, prompts[-1])
    assert text == expected(prompts[-1]) and cached > 0
    held = sum(os.stat(f"/proc/{server.pid}/fd/{fd}").st_blocks * 512 for fd in os.listdir(f"/proc/{server.pid}/fd")
               if "warmset-kv-arena" in os.readlink(f"/proc/{server.pid}/fd/{fd}") and os.stat(f"/proc/{server.pid}/fd/{fd}").st_mode & 0o777)
    assert held <= 2 * limit  # one descriptor for the server, one for its engines


CONVERSATIONS = 64
# All of them wait for each other.
CONVERSATIONS_SECONDS = 900


def test_many_conversations_at_once_restore_what_was_saved(pool, models, tmp_path):
    """Loads race stores: with `verify` the engine writes every restored prefix out again, and compares its bytes with the
    blocks that it was made of and these with what was saved."""
    # Room for half of what they say first: what is not in memory comes from disk, and what is read makes others leave.
    block_bytes = 30 * 2 * 3 * 64 * 2 * BLOCK_TOKENS + 4096
    settings = {"host": CONVERSATIONS // 2 * block_bytes, "dir": str(tmp_path / "kv"), "disk": 512 << 20, "disk_free": 0, "verify": True}
    server = pool(models=[model(models, parallel=8)], kv=settings)

    def say(number, turn):
        # Each turn says one block more than the one before; the last token is always computed.
        ask(server, prompt(1000 + number, (1 + turn) * BLOCK_TOKENS + 1), 1, timeout=CONVERSATIONS_SECONDS)

    for number in range(CONVERSATIONS):
        say(number, 0)
    wait_for_blocks(server, CONVERSATIONS, "disk")
    failures = []

    def talk(number):
        try:
            for turn in (1, 2):
                say(number, turn)
        except Exception as failure:
            failures.append(failure)

    # Back from the last one: it is still in memory. Asked from the first one on, each might be displaced just before its turn.
    threads = [threading.Thread(target=talk, args=(number,)) for number in reversed(range(CONVERSATIONS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    view, found = kv(server), model_view(server)
    restored = (found["hit_tokens"]["host"] + found["hit_tokens"]["disk"]) // BLOCK_TOKENS
    assert view["rejected"] == {}, view
    assert found["reloaded"] >= CONVERSATIONS and found["verified_blocks"] == restored >= CONVERSATIONS, view
    assert found["hit_tokens"]["host"] > 0 and found["hit_tokens"]["disk"] > 0, view
    assert server.metric("warmset_kv_verified_blocks_total", model=NAME) == restored


def test_people_see_what_is_kept_and_whether_it_pays(pool, models):
    server = pool(models=[model(models)])
    tokens = prompt(50, TOKENS)
    ask(server, tokens, 2)
    wait_for_blocks(server, BLOCKS)
    server.cli("model", "unload", NAME)
    ask(server, tokens, 2)
    text = server.cli("kv").stdout
    assert "in host memory" in text and "pays" in text, text
    document = server.cli_json("kv")
    assert document["models"][0]["verdict"] == "pays"
    assert document["host_bytes"] == document["models"][0]["host_blocks"] * (document["models"][0]["block_bytes"] + 4096)


def disk_server(pool, models, directory, **settings):
    return pool(models=[model(models)], kv={"dir": str(directory), "disk": 256 << 20, "disk_free": 0, **settings})


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_prefixes_outlive_the_server(pool, models, expected, tmp_path, end):
    server = disk_server(pool, models, tmp_path / "kv")
    tokens = prompt(60, TOKENS)
    assert ask(server, tokens) == (expected(tokens), 0)
    wait_for_blocks(server, BLOCKS, "disk")
    if end == "stopped":
        assert server.stop() == 0
    else:
        server.kill()
    server.start()
    wait_for_blocks_on_disk_by_digest(server)
    text, cached = ask_from_disk(server, tokens)
    assert (text, cached) == (expected(tokens), BLOCKS * BLOCK_TOKENS)
    assert model_view(server)["hit_tokens"] == {"device": 0, "host": 0, "disk": cached}
    assert kv(server)["rejected"] == {}


def wait_for_blocks_on_disk_by_digest(server):
    """Before a model is loaded nobody knows which name its blocks belong to."""
    warmset.wait_for(lambda: sum(view["disk_blocks"] for view in kv(server)["models"]) >= BLOCKS, lambda: kv(server))


def test_flipped_bits_on_disk_are_computed_around_and_counted(pool, models, expected, tmp_path):
    place = tmp_path / "kv"
    server = disk_server(pool, models, place)
    tokens = prompt(61, TOKENS)
    ask(server, tokens)
    wait_for_blocks(server, BLOCKS, "disk")
    server.kill()
    for path in place.iterdir():
        if path.stat().st_size > 1 << 20:
            flip_payloads(path)
    server.start()
    text, cached = ask(server, tokens)
    assert text == expected(tokens) and cached == 0
    # Computed again, it is kept again.
    wait_for_blocks(server, BLOCKS)
    server.cli("model", "unload", NAME)
    text, cached = ask(server, tokens)
    assert (text, cached) == (expected(tokens), BLOCKS * BLOCK_TOKENS)


def flip_payloads(path):
    """Changes one bit in each half mebibyte: every block, and no page of a header but by chance."""
    with open(path, "r+b") as file:
        for at in range((256 << 10) + 77, path.stat().st_size, 512 << 10):
            file.seek(at)
            byte = file.read(1)
            file.seek(at)
            file.write(bytes([byte[0] ^ 4]))


def test_prompts_are_not_readable_on_an_encrypted_disk(pool, models, tmp_path):
    secret = "The password of the vault is swordfish, and nobody may know. " * 12
    for encrypt in (False, True):
        place = tmp_path / f"kv-{encrypt}"
        server = pool(models=[model(models)], kv={"dir": str(place), "disk": 256 << 20, "disk_free": 0, "encrypt": encrypt})
        server.complete(NAME, secret, 2, temperature=0)
        wait_for_blocks(server, 2, "disk")
        content = b"".join(path.read_bytes() for path in place.iterdir() if path.is_file())
        # A header names the engine's format: where it can be read, so can the tokens in it.
        assert (b"warmKV1" in content) is not encrypt
        server.stop()


def content(place):
    return b"".join(path.read_bytes() for path in place.iterdir() if path.is_file() and path.name != "lock")


@pytest.mark.parametrize("encrypt", [False, True])
def test_what_is_cleared_is_nowhere_any_more(pool, models, expected, tmp_path, encrypt):
    place = tmp_path / "kv"
    server = pool(models=[model(models)], kv={"dir": str(place), "disk": 256 << 20, "disk_free": 0, "encrypt": encrypt})
    tokens = prompt(70, TOKENS)
    assert ask(server, tokens) == (expected(tokens), 0)
    wait_for_blocks(server, BLOCKS, "disk")
    shown = server.cli_json("kv", "clear")
    assert [(one["host_blocks"], one["disk_blocks"]) for one in shown["models"]] == [(0, 0)]
    assert b"warmKV1" not in content(place) and kv(server)["disk_bytes"] < 1 << 20, "when that is answered it is done"
    assert ask(server, tokens) == (expected(tokens), 0), "its engine has forgotten it, too"
    wait_for_blocks(server, BLOCKS, "disk")
    server.cli_json("kv", "clear")
    server.kill()
    server.start()
    assert ask(server, tokens) == (expected(tokens), 0), "whatever happens right behind the answer"
    wait_for_blocks(server, BLOCKS, "disk")
    server.stop()
    server.start()
    assert ask_from_disk(server, tokens) == (expected(tokens), BLOCKS * BLOCK_TOKENS), "what came after it is kept"


def test_what_was_asked_of_a_model_that_is_removed_goes_with_it(pool, models, expected, tmp_path):
    place = tmp_path / "kv"
    server = pool(models=[model(models)], kv={"dir": str(place), "disk": 256 << 20, "disk_free": 0})
    tokens = prompt(71, TOKENS)
    ask(server, tokens)
    wait_for_blocks(server, BLOCKS, "disk")
    server.stop()
    # Its KV was not in use since the server began: a note beside the blocks says whose it is.
    server.start()
    server.cli_json("model", "remove", NAME)
    assert b"warmKV1" not in content(place) and not list(place.glob("*.model")), "when that is answered it is done"
    assert kv(server)["blocks"] == 0
    server.kill()
    server.start()
    assert ask(server, tokens)[1] == 0, "the configuration brings the model back, and nothing that was asked of it"


# The last block is kept, too: the next turn goes on behind it.
KEPT = BLOCKS + 1


def blocks_on_disk(server):
    return {view["digest"]: view["disk_blocks"] for view in kv(server)["models"]}


@pytest.fixture
def two_versions(pool, models, tmp_path):
    """A name whose file was replaced while the server ran: two digests, with the KV of one prompt each on disk."""
    place, source = tmp_path / "kv", tmp_path / "m.gguf"
    shutil.copy(models["q4_1"], source)
    settings = {"dir": str(place), "disk": 256 << 20, "disk_free": 0}
    server = pool(models=[{**model(models), "source": str(source)}], kv=settings)
    tokens, first = prompt(72, TOKENS), server.digest(NAME)
    ask(server, tokens)
    wait_for_blocks(server, BLOCKS, "disk")
    shutil.copy(models["q4_0"], source)
    assert server.cli_json("admin", "reload")["changed"] == [NAME]
    second = server.digest(NAME)
    assert second != first
    assert ask(server, tokens)[1] == 0, "other weights find nothing"
    warmset.wait_for(lambda: blocks_on_disk(server) == {first: KEPT, second: KEPT}, lambda: kv(server))
    return server, tokens, first, second


def test_a_version_that_was_replaced_keeps_its_kv_for_the_day_it_comes_back(two_versions):
    server, tokens, first, second = two_versions
    server.cli("model", "rollback", NAME)
    assert server.digest(NAME) == first
    assert ask(server, tokens)[1] == BLOCKS * BLOCK_TOKENS
    assert blocks_on_disk(server) == {first: KEPT, second: KEPT}


@pytest.mark.parametrize("removed", ["the old version", "the new version"])
def test_what_was_asked_of_a_version_that_is_removed_goes_with_it_and_no_other(two_versions, models, tmp_path, removed):
    server, tokens, first, second = two_versions
    gone, kept = (first, second) if removed == "the old version" else (second, first)
    if kept == first:
        # The file, too, or the next start would take the new version in again.
        shutil.copy(models["q4_1"], tmp_path / "m.gguf")
        server.cli("model", "rollback", NAME)
    server.cli("model", "remove", NAME, "--digest", gone)
    assert {digest: count for digest, count in blocks_on_disk(server).items() if count} == {kept: KEPT}, "when that is answered it is done"
    assert len(list((tmp_path / "kv").glob("*.model"))) == 1
    server.kill()
    server.start()
    warmset.wait_for(lambda: kv(server)["blocks"] == KEPT, lambda: kv(server))
    assert ask_from_disk(server, tokens)[1] == BLOCKS * BLOCK_TOKENS, "the other one's stays"
    assert server.digest(NAME) == kept and blocks_on_disk(server) == {kept: KEPT}


def test_what_was_asked_of_all_versions_goes_with_the_name(two_versions, tmp_path):
    server, _, _, _ = two_versions
    server.cli("model", "remove", NAME)
    assert kv(server)["blocks"] == 0 and not list((tmp_path / "kv").glob("*.model"))
    assert b"warmKV1" not in content(tmp_path / "kv")


def test_a_disk_that_is_full_keeps_nobody_from_serving(pool, models, expected, tmp_path):
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", place], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    try:
        filler = place / "filler"
        server = disk_server(pool, models, place / "kv")
        with open(filler, "wb") as file:
            file.write(bytes(11 << 20))
        tokens = prompt(62, TOKENS)
        assert ask(server, tokens)[0] == expected(tokens)
        warmset.wait_for(lambda: kv(server)["disk_writes_failed"] > 0, lambda: kv(server))
        assert model_view(server)["disk_blocks"] == 0
        filler.unlink()
        again = prompt(63, TOKENS)

        def written():
            ask(server, again, 1)
            ask(server, prompt(random.randrange(1 << 30), 2 * BLOCK_TOKENS + 1), 1)
            return kv(server)["disk_written_bytes"] > 0
        warmset.wait_for(written, lambda: kv(server))
    finally:
        server.stop()
        subprocess.run(["umount", "--lazy", place], check=True)


def test_a_directory_that_is_removed_under_the_server_is_told_of(pool, models, expected, tmp_path):
    place = tmp_path / "kv"
    server = disk_server(pool, models, place)
    first, second = prompt(64, TOKENS), prompt(65, TOKENS)
    ask(server, first)
    wait_for_blocks(server, BLOCKS, "disk")
    assert kv(server)["disk_fault"] is None
    place.rename(tmp_path / "aside")
    assert ask(server, second) == (expected(second), 0)
    warmset.wait_for(lambda: kv(server)["disk_fault"], lambda: kv(server))
    text = server.cli("kv").stdout
    assert "written no more" in text and "was replaced or removed" in text, text
    lines = lambda: [line for line in server.log_path.read_text().splitlines() if "was replaced or removed" in line]  # noqa: E731
    warmset.wait_for(lines, "the log says so")
    told = lines()
    assert len(told) == 1 and "ERROR" in told[0] and "restart the server" in told[0], told
    assert not place.exists(), "nothing of it is made anew"
    server.cli("model", "unload", NAME)
    assert ask(server, second) == (expected(second), BLOCKS * BLOCK_TOKENS), "host memory goes on"
    refused = server.cli("kv", "clear", check=False)
    assert refused.returncode == 1 and "was replaced or removed" in refused.stderr, refused.stderr
    assert "later" not in refused.stderr, refused.stderr


def synthetic(directory):
    path = warmset.synthetic_model(directory, "declared", kv_bytes_per_token=4096)
    return {"name": NAME, "source": str(path), "engine": "synthetic"}


def test_a_directory_of_blocks_is_its_owners_alone_and_not_needed_without_a_disk(pool, tmp_path):
    place = tmp_path / "of its own" / "kv"
    pool(models=[synthetic(tmp_path)], kv={"dir": str(place), "disk": 64 << 20, "disk_free": 0})
    assert place.stat().st_mode & 0o777 == 0o700
    server = pool(models=[synthetic(tmp_path)], kv={"dir": "/proc/no directory can be made here", "disk": 0})
    assert kv(server)["disk_bytes_max"] == 0


def test_the_bytes_that_are_shown_are_those_that_lie_there(pool, tmp_path):
    place = tmp_path / "kv"
    settings = {"dir": str(place), "disk": 64 << 20, "disk_free": 0, "retention": "3s"}
    server = pool(models=[synthetic(tmp_path)], kv=settings)
    status, _, body = server.complete(NAME, " ".join(f"word{number}" for number in range(4 * BLOCK_TOKENS + 1)), 1)
    assert status == 200, body
    block_bytes = 4096 * (BLOCK_TOKENS + 1)
    warmset.wait_for(lambda: kv(server)["disk_written_bytes"] >= 4 * block_bytes, lambda: kv(server))
    warmset.wait_for(lambda: model_view(server)["disk_blocks"] == 0, lambda: kv(server))
    warmset.wait_for(lambda: kv(server)["disk_bytes"] < block_bytes, lambda: kv(server))
