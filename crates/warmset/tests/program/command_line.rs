//! Commands without a server.

use crate::support::{Place, run};
use serde_json::json;

#[test]
fn wrong_usage_exits_with_2_and_help_with_0() {
    for arguments in [
        &["nonsense"][..],
        &[],
        &["model"],
        &["model", "add"],
        &["model", "show"],
        &["serve", "--memory", "lots"],
        &["serve", "--listen", "nowhere"],
        &["model", "add", "a", "/a.gguf", "--priority", "urgent"],
        &["model", "add", "a", "/a.gguf", "--parallel", "0"],
    ] {
        let ran = run(arguments);
        assert_eq!((ran.code, ran.stdout.as_str()), (2, ""), "{arguments:?}");
        assert!(!ran.stderr.is_empty(), "{arguments:?}");
    }
    let help = run(&["--help"]);
    assert_eq!(help.code, 0);
    assert!(help.stdout.contains("serve") && !help.stdout.contains("engine "), "{}", help.stdout);
    assert!(run(&["--version"]).stdout.starts_with("warmset "));
    assert!(run(&["completions", "fish"]).stdout.contains("complete -c warmset"));
}

#[test]
fn all_problems_of_a_configuration_are_told_with_file_and_line() {
    let place = Place::new();
    let text = "[gateway]\nlisten = \"127.0.0.1:1\"\nlistne = \"x\"\n\n[worker]\nmemory = \"lots\"\n";
    let config = place.write("bad.toml", text);
    let ran = place.run(&["serve", "--config", &config]);
    assert_eq!((ran.code, ran.stdout.as_str()), (1, ""));
    let lines: Vec<&str> = ran.stderr.trim_end().lines().collect();
    assert_eq!(lines.len(), 2, "{}", ran.stderr);
    assert!(lines[0].contains("bad.toml:3: unknown key gateway.listne"), "{}", lines[0]);
    assert!(lines[1].contains("bad.toml:6: worker.memory: \"lots\" is not a size"), "{}", lines[1]);
    place.run(&["serve", "--config", &place.text_path("absent.toml")]).fails_with("cannot be read");
}

#[test]
fn the_admin_listener_stays_on_this_machine_and_slices_must_fit() {
    let place = Place::new();
    place.run(&["serve", "--admin-listen", "0.0.0.0:0"]).fails_with("loopback");
    place.run(&["serve", "--memory", "1GiB", "--reserve", "1GiB"]).fails_with("reserve");
    let slices = "[worker]\nmemory = \"1GiB\"\nreserve = \"128MiB\"\nslices = [{ name = \"a\", memory = \"1GiB\" }]\n";
    place.run(&["serve", "--config", &place.write("c.toml", slices)]).fails_with("slices");
    let pool = "[[model]]\nname = \"a\"\nsource = \"/a.gguf\"\npool = \"small\"\n";
    place
        .run(&[
            "serve",
            "--config",
            &place.write("p.toml", pool),
            "--listen",
            "127.0.0.1:0",
            "--admin-listen",
            "127.0.0.1:0",
        ])
        .fails_with("no pool small");
}

#[test]
fn models_are_kept_in_a_data_directory_without_a_server() {
    let place = Place::new();
    assert_eq!(place.json(&["model", "list"]), json!({ "models": [] }));
    let source = place.write("a.json", r#"{"host_bytes":1000}"#);
    place.run(&["model", "add", "a", &source]).fails_with("--engine synthetic");
    let add = ["model", "add", "a", source.as_str(), "--engine", "synthetic", "--pin", "--max-concurrency", "3"];
    let added = place.json(&add);
    assert_eq!((&added["existed"], &added["pin"], &added["max_concurrency"]), (&json!(false), &json!(true), &json!(3)));
    let digest = added["digest"].as_str().unwrap();
    assert!(digest.starts_with("sha256:"));
    // The same again changes nothing; another file under the name is a version that the name does not stand for yet.
    assert_eq!(place.json(&add)["existed"], json!(true));
    let other = place.write("b.json", r#"{"host_bytes":1001}"#);
    let version = place.json(&["model", "add", "a", &other, "--engine", "synthetic"]);
    assert!(version["digest"] == digest && version["candidate"] != digest, "{version}");
    let pinned = ["model", "add", "a", &other, "--engine", "synthetic", "--priority", "batch"];
    place.run(&pinned).fails_with("is not changed by a new version");
    place.json(&["model", "remove", "a", "--digest", version["candidate"].as_str().unwrap()]);
    // The same file under another path is the same model.
    let copy = place.write("copy.json", r#"{"host_bytes":1000}"#);
    place.run(&["model", "add", "c", &copy, "--engine", "synthetic"]).fails_with("alias");

    let listed = place.json(&["model", "list"]);
    assert_eq!(listed["models"].as_array().unwrap().len(), 1);
    assert_eq!((&listed["models"][0]["name"], &listed["models"][0]["state"]), (&json!("a"), &json!("absent")));
    assert!(place.run(&["model", "list"]).stdout.contains("NAME"));
    place.json(&["model", "unpin", "a"]);
    assert_eq!(place.json(&["model", "show", "a"])["pin"], json!(false));

    place.json(&["model", "alias", "add", "b", "a"]);
    assert_eq!(place.json(&["model", "alias", "list"]), json!({ "aliases": [{ "alias": "b", "model": "a" }] }));
    assert_eq!(place.json(&["model", "show", "b"])["digest"], digest);
    place.run(&["model", "alias", "remove", "a"]).fails_with("no alias");
    place.json(&["model", "alias", "remove", "b"]);

    place.json(&["model", "remove", "a"]);
    place.run(&["model", "show", "a"]).fails_with("no model is named a");
    let blobs = place.path("data/store/blobs").read_dir().unwrap().count();
    assert_eq!(blobs, 0, "files that nothing uses are gone");
}

#[test]
fn bad_sources_and_names_fail_in_one_line_and_leave_nothing() {
    let place = Place::new();
    let pickle = place.write("a.gguf", "PK\u{3}\u{4} a zip archive, as pickled models are");
    let broken = place.write("b.json", r#"{"host_bites":1}"#);
    for (name, source, words) in [
        ("../../etc/passwd", "/etc/passwd", "no model name"),
        ("a", "/nonexistent/model.gguf", "No such file"),
        ("a", "ftp://bucket/model.gguf", "ftp:// are not supported"),
        ("a", "file://elsewhere/model.gguf", "another machine"),
        ("a", pickle.as_str(), "unsupported format"),
        ("a", "/dev/zero", "--engine llama"),
        ("a", broken.as_str(), "--engine synthetic"),
    ] {
        place.run(&["model", "add", name, source]).fails_with(words);
    }
    place.run(&["model", "add", "a", &broken, "--engine", "synthetic"]).fails_with("host_bites");
    place.run(&["model", "add", "a", "/dev/zero", "--engine", "llama"]).fails_with("a device");
    place.run(&["model", "show", "a\u{0430}"]).fails_with("no model name");
    for action in ["load", "unload"] {
        place.run(&["model", action, "a"]).fails_with("start `warmset serve` first");
    }
    place.run(&["model", "logs", "a"]).fails_with("no model is named a");
    place.run(&["run", "a", "hello"]).fails_with("start `warmset serve` first");
    assert_eq!(place.path("data/store/blobs").read_dir().unwrap().count(), 0);
    assert_eq!(place.path("data/store/tmp").read_dir().unwrap().count(), 0);
}

#[test]
fn an_unreachable_server_is_named() {
    run(&["model", "list", "--server", "127.0.0.1:1"]).fails_with("127.0.0.1:1");
    run(&["model", "list", "--server", "nonsense"]).fails_with("HOST:PORT");
}

#[test]
fn a_damaged_catalog_is_refused_with_what_to_do() {
    let place = Place::new();
    place.json(&["model", "list"]);
    std::fs::write(place.path("data/catalog.db"), [b'x'; 8192]).unwrap();
    place.run(&["model", "list"]).fails_with(".recover");
    let report = place.run(&["doctor", "--json"]);
    assert_eq!(report.code, 1);
    assert!(report.stdout.contains("is damaged"), "{}", report.stdout);
}

#[test]
fn a_model_is_profiled_without_a_server() {
    let place = Place::new();
    let source = place.write("a.json", r#"{"host_bytes":1000000,"decode_seconds_per_token":0.0001}"#);
    let digest = place.json(&["model", "add", "a", &source, "--engine", "synthetic"])["digest"].clone();
    let profile = place.json(&["model", "profile", "a"]);
    assert_eq!((&profile["name"], &profile["digest"]), (&json!("a"), &digest));
    assert!(profile["steady_bytes"].as_u64().unwrap() >= 1_000_000);
    for rate in ["prefill_tokens_per_second", "decode_tokens_per_second"] {
        assert!(profile[rate].as_f64().unwrap() > 0.0, "{profile}");
    }
    let shown = place.json(&["model", "show", "a"]);
    assert_eq!(shown["measurements"][0]["samples"], json!(1));
    assert_eq!(shown["measurements"][0]["worker_type"], profile["worker_type"]);
    // What was measured takes the place of the estimate, here as on a server.
    let listed = place.json(&["model", "list"])["models"][0].clone();
    for document in [&shown, &listed] {
        assert_eq!((&document["measured"], &document["steady_bytes"]), (&json!(true), &profile["steady_bytes"]));
    }
}

#[test]
fn doctor_finds_a_corrupt_artifact() {
    let place = Place::new();
    let source = place.write("a.json", r#"{"host_bytes":1000}"#);
    place.json(&["model", "add", "a", &source, "--engine", "synthetic"]);
    let healthy = place.json(&["doctor"]);
    assert_eq!(healthy["healthy"], json!(true), "{healthy}");
    let blob = place.path("data/store/blobs").read_dir().unwrap().next().unwrap().unwrap().path();
    std::fs::remove_file(&blob).unwrap();
    std::fs::write(&blob, r#"{"host_bytes":9999}"#).unwrap();
    let report = place.run(&["doctor", "--json"]);
    assert_eq!(report.code, 1);
    assert!(report.stdout.contains("is corrupt on disk"), "{}", report.stdout);
}
