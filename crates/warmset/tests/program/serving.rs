//! A real server with synthetic models.

use crate::support::{Place, alive, run, wait_until};
use rustix::process::Signal;
use serde_json::json;

fn synthetic(place: &Place, name: &str, bytes: u64) -> String {
    place.write(&format!("{name}.json"), &format!(r#"{{"host_bytes":{bytes},"decode_seconds_per_token":0.0001}}"#))
}

#[test]
fn models_are_added_asked_measured_and_remembered() {
    let place = Place::new();
    let source = synthetic(&place, "a", 1_000_000);
    let mut server = place.serve(&[]);
    let digest = server.json(&["model", "add", "a", &source, "--engine", "synthetic"])["digest"].clone();
    server.json(&["model", "alias", "add", "b", "a"]);
    let cold = server.json(&["run", "b", "hello", "--max-tokens", "5"]);
    assert_eq!((&cold["digest"], &cold["start"]), (&digest, &json!("cold")), "{cold}");
    assert!(!cold["content"].as_str().unwrap().is_empty());
    let warm = server.json(&["run", "a", "hello", "--max-tokens", "5"]);
    assert_eq!(warm["start"], json!("warm"));
    assert_eq!(warm["usage"]["completion_tokens"], json!(5));

    let shown = server.json(&["model", "show", "a"]);
    assert_eq!((&shown["state"], &shown["measured"]), (&json!("ready"), &json!(true)), "{shown}");
    server.json(&["model", "unload", "a"]);
    assert_eq!(server.json(&["model", "show", "a"])["state"], json!("absent"));
    assert_eq!(server.json(&["model", "load", "a"])["state"], json!("ready"));
    let profile = server.json(&["model", "profile", "a"]);
    assert!(profile["decode_tokens_per_second"].as_f64().unwrap() > 0.0, "{profile}");
    assert!(server.json(&["model", "logs", "a"])["lines"].is_array());

    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(0));
    let offline = place.json(&["model", "show", "b"]);
    assert_eq!(offline["digest"], digest);
    assert_eq!(offline["measurements"][0]["samples"], json!(4));
}

#[test]
fn commands_on_a_data_directory_in_use_go_through_its_server() {
    let place = Place::new();
    let source = synthetic(&place, "a", 1000);
    let mut server = place.serve(&[]);
    place.json(&["model", "add", "a", &source, "--engine", "synthetic"]);
    assert_eq!(place.json(&["model", "load", "a"])["state"], json!("ready"));
    assert_eq!(server.json(&["model", "show", "a"])["state"], json!("ready"));
    // A second server on the same data is refused and harms nothing.
    place
        .run(&["serve", "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"])
        .fails_with("in use by the server");
    assert_eq!(server.json(&["run", "a", "hi", "--max-tokens", "1"])["start"], json!("warm"));
    // Refusals of the server reach people as one line.
    server.run(&["model", "show", "missing"]).fails_with("no model is named missing");
    server.run(&["model", "add", "x", "/nonexistent.gguf"]).fails_with("No such file");
    server.run(&["model", "add", "x", &source, "--engine", "synthetic", "--pool", "small"]).fails_with("no pool small");
    server.run(&["run", "missing", "hi"]).fails_with("missing");
    server.json(&["model", "remove", "a"]);
    server.run(&["run", "a", "hi"]).fails_with("a");
    assert_eq!(server.json(&["doctor"])["healthy"], json!(true));
    server.signal(Signal::INT);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn configured_models_are_taken_pinned_ones_loaded_and_changes_followed() {
    let place = Place::new();
    let source = synthetic(&place, "a", 1000);
    let config = |pin: bool| {
        let model =
            format!("[[model]]\nname = \"org/a\"\naliases = [\"a\"]\nsource = \"{source}\"\nengine = \"synthetic\"\n");
        let slices = "[worker]\nslices = [{ name = \"small\", memory = \"100MiB\" }]\n";
        place.write("c.toml", &format!("{slices}{model}pin = {pin}\npool = \"small\"\n"))
    };
    let mut server = place.serve(&["--config", &config(true)]);
    wait_until("the pinned model is loaded", || server.json(&["model", "show", "a"])["state"] == "ready");
    let first = server.json(&["model", "show", "org/a"]);
    assert_eq!(first["pool"], json!("small"));
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(0));

    // The file has changed: the name now means another model, with the settings of the configuration.
    synthetic(&place, "a", 2000);
    let mut server = place.serve(&["--config", &config(false)]);
    let second = server.json(&["model", "show", "a"]);
    assert_ne!(second["digest"], first["digest"]);
    assert_eq!((&second["pin"], &second["state"]), (&json!(false), &json!("absent")));
    server.kill();
}

#[test]
fn kill_9_leaves_no_engine_and_nothing_lost() {
    let place = Place::new();
    let source = synthetic(&place, "a", 1000);
    let mut server = place.serve(&[]);
    let digest = server.json(&["model", "add", "a", &source, "--engine", "synthetic", "--pin"])["digest"].clone();
    server.json(&["model", "load", "a"]);
    let engines = server.engines();
    assert!(!engines.is_empty());
    server.kill();
    wait_until("no engine is left", || !engines.iter().any(|pid| alive(*pid)));

    let shown = place.json(&["model", "show", "a"]);
    assert_eq!((&shown["digest"], &shown["pin"]), (&digest, &json!(true)));
    let mut server = place.serve(&[]);
    wait_until("the pinned model is back", || server.json(&["model", "show", "a"])["state"] == "ready");
    server.signal(Signal::TERM);
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn a_second_signal_stops_at_once() {
    let place = Place::new();
    let source = place.write("slow.json", r#"{"host_bytes":1000,"load_seconds":600}"#);
    let mut server = place.serve(&[]);
    server.json(&["model", "add", "slow", &source, "--engine", "synthetic"]);
    let admin = server.admin.clone();
    let asking = std::thread::spawn(move || run(&["run", "slow", "hi", "--server", &admin]));
    wait_until("the load is under way", || server.json(&["model", "show", "slow"])["state"] == "loading");
    server.signal(Signal::TERM);
    server.signal(Signal::INT);
    assert_eq!(server.wait().code(), Some(1));
    asking.join().unwrap().fails_with("");
}
