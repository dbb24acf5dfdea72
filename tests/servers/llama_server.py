"""llama.cpp's server out of the package xllamacpp, started as `llama-server` is: the real server of the tests of commands."""

import argparse
import signal

import xllamacpp

arguments = argparse.ArgumentParser()
arguments.add_argument("--model", required=True)
arguments.add_argument("--port", type=int, required=True)
arguments.add_argument("--alias", default="")
arguments.add_argument("--ctx-size", type=int, default=2048)
arguments.add_argument("--parallel", type=int, default=1)
arguments.add_argument("--threads", type=int, default=1)
arguments.add_argument("--embeddings", action="store_true")
given = arguments.parse_args()

parameters = xllamacpp.CommonParams()
parameters.model.path = given.model
parameters.hostnames = ["127.0.0.1"]
parameters.port = given.port
parameters.n_ctx = given.ctx_size
parameters.n_parallel = given.parallel
parameters.cpuparams.n_threads = given.threads
parameters.cpuparams_batch.n_threads = given.threads
parameters.embedding = given.embeddings
if given.embeddings:
    parameters.pooling_type = xllamacpp.llama_pooling_type.LLAMA_POOLING_TYPE_MEAN
if given.alias:
    parameters.model_alias = {given.alias}
server = xllamacpp.Server(parameters)
print("listening on", server.listening_address, flush=True)
signal.sigwait({signal.SIGTERM, signal.SIGINT})
