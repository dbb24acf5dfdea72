"""The description at /openapi.json against the server: what it allows is sent, what it promises must come back."""

import collections
import copy
import itertools
import json

import hypothesis
import pytest
import requests
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from warmset import synthetic_model

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
# Streams that never end, and what would end the server for every other test.
LEFT_OUT = {("get", "/admin/v1/events"), ("get", "/admin/v1/recording"), ("post", "/admin/v1/drain")}
EXAMPLES = 40
MODEL = "described"
# What must be answered and not only refused, on each listener.
WITH_BODY = ("chat/completions", "completions", "embeddings", "responses", "messages", "messages/count_tokens", "batches")
NAMED = ("models", "files", "batches", "jobs", "responses")
ANSWERED = {
    False: {f"POST /v1/{route}": EXAMPLES // 2 for route in WITH_BODY} | {f"GET /v1/{kind}/{{name}}": 1 for kind in NAMED},
    True: {"GET /admin/v1/models/{name}": 1, "POST /admin/v1/models/{name}/pin": 1, "GET /admin/v1/jobs/{name}": 1},
}


@pytest.fixture(scope="module")
def server(module_pool, tmp_path_factory):
    source = synthetic_model(tmp_path_factory.mktemp("models"), MODEL)
    return module_pool(models=[{"name": MODEL, "source": source, "engine": "synthetic"}])


@pytest.fixture(scope="module")
def document(server):
    status, headers, text = server.get("/openapi.json", admin=True)
    assert status == 200 and headers["content-type"] == "application/json"
    return json.loads(text)


def names_there(server):
    """What there is of each kind, by the beginning of its paths."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": MODEL, "prompt": "x"}}
    form = {"file": ("lines.jsonl", json.dumps(line)), "purpose": (None, "batch")}
    file = requests.post(f"{server.url}/v1/files", files=form, timeout=60).json()["id"]
    body = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = json.loads(server.post("/v1/batches", body)[2])["id"]
    body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
    job = json.loads(server.post("/v1/completions", body, headers={"prefer": "respond-async"})[2])["id"]
    body = {"model": MODEL, "input": "x", "max_output_tokens": 1, "background": True}
    response = json.loads(server.post("/v1/responses", body)[2])["id"]
    models = {"/v1/models/": MODEL, "/admin/v1/models/": MODEL}
    return {"/v1/files/": file, "/v1/batches/": batch, "/v1/jobs/": job, "/v1/responses/": response, "/admin/v1/jobs/": job, **models}


def with_names(document, names):
    """The description of asking for what there is; what deletes is left as it is, or there would be nothing left."""
    document = copy.deepcopy(document)
    for method, path, operation in operations(document):
        for parameter in operation["parameters"]:
            for start, name in names.items():
                if path.startswith(start) and parameter["name"] == "name" and method != "delete":
                    parameter["schema"] = {"const": name}
    document["components"]["schemas"]["BatchRequest"]["properties"]["input_file_id"] = {"const": names["/v1/files/"]}
    return document


def operations(document):
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method, path, operation


def test_the_description_is_complete_and_scoped(document, server):
    scopes = {(method, path): operation["x-warmset-scope"] for method, path, operation in operations(document)}
    assert scopes[("post", "/v1/chat/completions")] == "inference"
    assert scopes[("get", "/health/live")] == "health"
    assert all((scope == "admin") == (path.startswith("/admin/") or path in ("/metrics", "/openapi.json"))
               for (_, path), scope in scopes.items())
    # What is described for one listener is not on the other one.
    for (method, path), scope in scopes.items():
        if method == "get" and "{" not in path and (method, path) not in LEFT_OUT:
            assert server.request("GET", path, admin=scope != "admin")[0] == 404, path
            assert server.request("GET", path, admin=scope == "admin")[0] == 200, path


@pytest.mark.parametrize("admin", [False, True], ids=["inference", "admin"])
def test_what_the_description_allows_is_answered_as_it_promises(document, server, admin):
    chosen = copy.deepcopy(document)
    for method, path, operation in list(operations(chosen)):
        if (operation["x-warmset-scope"] == "admin") != admin or (method, path) in LEFT_OUT:
            del chosen["paths"][path][method]
    chosen["paths"] = {path: item for path, item in chosen["paths"].items() if item}
    if not admin:
        # For the model that is there: what is behind the name is worth more tries than the name.
        for name, schema in chosen["components"]["schemas"].items():
            if name.endswith("Request"):
                schema["properties"]["model"] = {"const": MODEL}
                for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    if limit in schema["properties"]:
                        schema["properties"][limit] = {"type": "integer", "minimum": 1, "maximum": 16}
    port = server.admin_address if admin else server.url
    base = port if port.startswith("http") else f"http://{port}"
    described = [schemathesis.openapi.from_dict(form) for form in (chosen, with_names(chosen, names_there(server)))]
    pid, sent, faults, answered = server.pid, 0, [], collections.Counter()
    settings = hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )
    for result in itertools.chain(*(schema.get_all_operations() for schema in described)):
        operation = result.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy())
        def send(case):
            nonlocal sent
            sent += 1
            response = case.call(base_url=base, timeout=60)
            answered[operation.label, response.status_code // 100] += 1
            case.validate_response(response, checks=CHECKS)

        try:
            send()
        except (Exception, BaseExceptionGroup) as fault:  # one operation's fault must not hide another's
            several = fault.exceptions if isinstance(fault, BaseExceptionGroup) else [fault]
            faults += [f"{operation.method} {operation.path}: {one}" for one in several]
    assert not faults, "\n\n".join(faults)
    assert sent >= EXAMPLES * 5
    for label, least in ANSWERED[admin].items():
        assert answered[label, 2] >= least, f"{label} refuses what its description allows: {sorted(answered.items())}"
    assert server.pid == pid and server.running()
    assert server.complete(MODEL)[0] == 200
