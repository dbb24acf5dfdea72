//! Configurations as people write them for llama-swap.

use super::*;

/// Macros, groups, aliases, ttl, environment, a fixed port, a container, and what has no counterpart.
const LARGE: &str = r#"
healthCheckTimeout: 90
logLevel: warn
startPort: 10001
globalTTL: 600
macros:
  "server": >
    /opt/llama.cpp/llama-server
    --port ${PORT} --host 127.0.0.1
  "ctx": 8192
  "args": "-c ${ctx} -np 2"

models:
  "qwen2.5:7b":
    cmd: |
      # the fast one
      ${server} ${args}
      --model /models/qwen2.5-7b-q4_k_m.gguf
      --chat-template-kwargs '{"enable_thinking": false}'
    aliases:
      - "gpt-4o-mini"
      - id: qwen
        name: Qwen
    ttl: 300
    concurrencyLimit: 8
    env:
      - "CUDA_VISIBLE_DEVICES=0,1"
      - "LLAMA_ARG_THREADS=8"
  "qwen2.5:14b":
    cmd: |
      ${server} ${args} \
      --model /models/qwen2.5-14b-q4_k_m.gguf \
      --chat-template-kwargs '{"enable_thinking": false}'
    env: ["LLAMA_ARG_THREADS=8", "CUDA_VISIBLE_DEVICES=0,1"]
    useModelName: "qwen"
    unlisted: true
  "embed":
    proxy: "http://127.0.0.1:9999"
    cmd: /usr/bin/text-embeddings --port 9999 --model-id BAAI/bge-small
    checkEndpoint: /ready
    ttl: 0
  "relative":
    macros: { ctx: 4096 }
    cmd: ./llama-server --port=${PORT} -m models/a.gguf -c ${ctx}
  "docker-llama":
    proxy: "http://127.0.0.1:${PORT}"
    cmd: docker run --name ${MODEL_ID} -p ${PORT}:8080 image --model /models/a.gguf
    cmdStop: docker stop ${MODEL_ID}
  "fixed":
    cmd: server --listen 9000
  "lost":
    cmd: "${nowhere} --port ${PORT}"

groups:
  coding: { swap: false, members: ["qwen2.5:7b", "embed"] }
hooks:
  on_startup: { preload: ["embed"] }
apiKeys: ["sk-secret"]
"#;

fn model<'a>(document: &'a toml::Table, name: &str) -> &'a toml::Table {
    let models = document["model"].as_array().unwrap();
    models.iter().map(|model| model.as_table().unwrap()).find(|model| model["name"].as_str() == Some(name)).unwrap()
}

fn runtime<'a>(document: &'a toml::Table, name: &str) -> &'a toml::Table {
    let runtimes = document["runtime"].as_array().unwrap();
    runtimes.iter().map(|one| one.as_table().unwrap()).find(|one| one["name"].as_str() == Some(name)).unwrap()
}

fn texts(value: &toml::Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|word| word.as_str().unwrap()).collect()
}

#[test]
fn a_whole_configuration_is_carried_over_and_the_rest_is_said() {
    let imported = convert(LARGE, "/etc/llama-swap").unwrap();
    assert_eq!(imported.models, ["qwen2.5:7b", "qwen2.5:14b", "embed", "relative"]);
    let document: toml::Table = imported.toml.parse().unwrap();

    let (small, large) = (model(&document, "qwen2.5:7b"), model(&document, "qwen2.5:14b"));
    assert_eq!(small["runtime"], large["runtime"], "what differs is the model only");
    assert_eq!(small["source"].as_str(), Some("/models/qwen2.5-7b-q4_k_m.gguf"));
    assert_eq!(texts(&small["aliases"]), ["gpt-4o-mini", "qwen"]);
    let number = |model: &toml::Table, key: &str| model.get(key).and_then(toml::Value::as_integer);
    assert_eq!((number(small, "parallel"), number(small, "context_tokens")), (Some(2), Some(4096)));
    assert_eq!((number(small, "max_concurrency"), number(small, "keep_alive")), (Some(8), Some(300)));
    assert_eq!(number(large, "keep_alive"), Some(600), "the ttl of all");
    let shared = runtime(&document, small["runtime"].as_str().unwrap());
    let expected = [
        "/opt/llama.cpp/llama-server",
        "--port",
        "${PORT}",
        "--host",
        "127.0.0.1",
        "-c",
        "8192",
        "-np",
        "2",
        "--model",
        "${MODEL}",
        "--chat-template-kwargs",
        "{\"enable_thinking\": false}",
    ];
    assert_eq!(texts(&shared["command"]), expected);
    assert_eq!((shared["visible_devices"].as_str(), shared["cwd"].as_str()), (Some("0,1"), Some("/etc/llama-swap")));
    assert_eq!(shared["env"].as_table().unwrap()["LLAMA_ARG_THREADS"].as_str(), Some("8"));
    assert_eq!(number(shared, "health_timeout"), Some(90));

    let embed = model(&document, "embed");
    assert_eq!((embed["source"].as_str(), embed.get("keep_alive")), (Some("command:embed"), None));
    let embed = runtime(&document, embed["runtime"].as_str().unwrap());
    assert_eq!(texts(&embed["command"])[1..3], ["--port", "${PORT}"], "a fixed port becomes the given one");
    assert_eq!(embed["health"].as_str(), Some("/ready"));

    let relative = model(&document, "relative");
    assert_eq!(
        (relative["source"].as_str(), number(relative, "context_tokens")),
        (Some("command:relative"), Some(4096))
    );

    for (place, words) in [
        ("models.docker-llama", "container"),
        ("models.fixed", "${PORT}"),
        ("models.lost", "no macro ${nowhere}"),
        ("models.relative", "relative path"),
        ("models.qwen2.5:14b.useModelName", "own name"),
        ("models.qwen2.5:14b.unlisted", "listed"),
        ("groups", "memory"),
        ("hooks", "pin"),
        ("apiKeys", "keys"),
        ("logLevel", "RUST_LOG"),
        ("env", "environment"),
    ] {
        let said = |note: &&String| note.starts_with(&format!("{place}:")) && note.contains(words);
        assert!(imported.notes.iter().any(|note| said(&note)), "{place}: {:#?}", imported.notes);
    }
    assert!(!imported.toml.contains("sk-secret"));
}

#[test]
fn the_smallest_configuration_is_enough() {
    let imported =
        convert("models:\n  llama:\n    cmd: llama-server --port ${PORT} -hf org/repo:Q4_K_M\n", "/d").unwrap();
    let document: toml::Table = imported.toml.parse().unwrap();
    assert_eq!(model(&document, "llama")["source"].as_str(), Some("command:llama"));
    assert_eq!(texts(&runtime(&document, "llama")["command"])[3..], ["-hf", "org/repo:Q4_K_M"]);
    assert_eq!(imported.notes.len(), 1, "{:?}", imported.notes);
}

#[test]
fn anchors_are_followed_and_names_that_cannot_be_are_said() {
    let text = "x: &common\n  ttl: 5\nmodels:\n  'a b':\n    cmd: s --port ${PORT}\n  ok:\n    <<: *common\n    cmd: s --port ${PORT}\n    aliases: ['no spaces', fine]\n";
    let imported = convert(text, "/d").unwrap();
    assert_eq!(imported.models, ["ok"]);
    let document: toml::Table = imported.toml.parse().unwrap();
    assert_eq!(model(&document, "ok")["keep_alive"].as_integer(), Some(5));
    assert_eq!(texts(&model(&document, "ok")["aliases"]), ["fine"]);
    assert!(imported.notes.iter().any(|note| note.starts_with("models.a b: left out")));
    assert!(imported.notes.iter().any(|note| note.contains("no spaces")));
}

#[test]
fn what_is_no_configuration_is_refused() {
    for bad in ["", "- a\n", "models: 3\n", "models:\n  a: {\n", "a: 1\na: 2\nmodels: {}\n"] {
        assert!(convert(bad, "/d").is_err(), "{bad:?}");
    }
    assert!(convert("models: {}\n", "/d").unwrap().models.is_empty());
}
