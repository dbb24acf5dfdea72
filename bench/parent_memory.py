"""What the server's own process takes with 1,000 models in its catalog, none of them loaded. Claim: below 64 MiB."""

import harness
import warmset

MODELS = 1000
LIMIT_MIB = 64


def main():
    with harness.scratch() as directory:
        models = []
        for number in range(MODELS):
            # The bytes tell the models apart.
            source = warmset.synthetic_model(directory, f"m{number}", allocate=False, host_bytes=(1 << 20) + number)
            models.append({"name": f"org/model-{number:04}", "source": source, "engine": "synthetic", "aliases": [f"alias-{number}"]})
        server = warmset.Server(directory, memory="1GiB", config=warmset.toml({"model": models}))
        with server:
            assert len(server.admin_json("/admin/v1/models")["models"]) == MODELS
            first = figures(server)
            # A server that takes nothing in, as it usually starts, and is looked at and used.
            server.stop()
            server.config = None
            server.start()
            for _ in range(20):
                assert server.get("/v1/models")[0] == 200
                server.admin_json("/admin/v1/models")
                server.metrics()
            assert server.complete("org/model-0007")[0] == 200
            used = figures(server)
    claims = {"models": MODELS, "limit_mib": LIMIT_MIB, "after_adding_them": first, "after_a_restart_and_use": used,
              "holds": max(first["rss_mib"], used["rss_mib"]) < LIMIT_MIB}
    harness.report("parent_memory", claims, claim=f"the parent below {LIMIT_MIB} MiB")


def figures(server):
    mebibytes = lambda value: round(value / warmset.MEBIBYTE, 1)
    return {"rss_mib": mebibytes(warmset.resident_set_bytes(server.pid)), "private_mib": mebibytes(warmset.private_bytes(server.pid))}


if __name__ == "__main__":
    main()
