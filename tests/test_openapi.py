"""The description at /openapi.json against the server: what it allows is sent, what it promises must come back."""

import json

import hypothesis
import pytest
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
LEFT_OUT = {("get", "/admin/v1/events"), ("post", "/admin/v1/drain")}
EXAMPLES = 25
MODEL = "described"


@pytest.fixture(scope="module")
def server(module_pool, tmp_path_factory):
    source = synthetic_model(tmp_path_factory.mktemp("models"), MODEL)
    return module_pool(models=[{"name": MODEL, "source": source, "engine": "synthetic"}])


@pytest.fixture(scope="module")
def document(server):
    status, headers, text = server.get("/openapi.json", admin=True)
    assert status == 200 and headers["content-type"] == "application/json"
    return json.loads(text)


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
    chosen = json.loads(json.dumps(document))
    for method, path, operation in list(operations(chosen)):
        if (operation["x-warmset-scope"] == "admin") != admin or (method, path) in LEFT_OUT:
            del chosen["paths"][path][method]
    chosen["paths"] = {path: item for path, item in chosen["paths"].items() if item}
    if not admin:
        # Most requests are for the model that is there: what is behind the name is worth more tries than the name.
        for name, schema in chosen["components"]["schemas"].items():
            if name.endswith("Request"):
                schema["properties"]["model"] = {"enum": [MODEL, MODEL, MODEL, "missing"]}
                for limit in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
                    if limit in schema["properties"]:
                        schema["properties"][limit] = {"type": "integer", "minimum": 1, "maximum": 16}
    port = server.admin_address if admin else server.url
    base = port if port.startswith("http") else f"http://{port}"
    schema = schemathesis.openapi.from_dict(chosen)
    pid, sent, faults = server.pid, 0, []
    settings = hypothesis.settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck), phases=[hypothesis.Phase.generate],
    )
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings
        @hypothesis.given(case=operation.as_strategy())
        def send(case):
            nonlocal sent
            sent += 1
            response = case.call(base_url=base, timeout=60)
            case.validate_response(response, checks=CHECKS)

        try:
            send()
        except Exception as fault:  # one operation's fault must not hide another's
            faults.append(f"{operation.method} {operation.path}: {fault}")
    assert not faults, "\n\n".join(faults)
    assert sent >= EXAMPLES * 5
    assert server.pid == pid and server.running()
    assert server.complete(MODEL)[0] == 200
