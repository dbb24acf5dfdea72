//! Tests of the configuration file.

use super::*;
use proptest::prelude::*;
use warmset_core::{Priority, gateway::ColdPolicy};
use warmset_engine::protocol::EngineKind;

fn problems(text: &str) -> Vec<(usize, String)> {
    parse(text).unwrap_err().into_iter().map(|problem| (problem.line, problem.message)).collect()
}

#[test]
fn limits_of_what_waits_are_read() {
    let config = parse("[gateway]\nconnections_max = 100\njobs_max = 7\njob_time_to_live = \"1h\"").unwrap();
    assert_eq!((config.gateway.connections_max, config.gateway.jobs_max), (Some(100), Some(7)));
    assert_eq!(config.gateway.job_time_to_live, Some(Duration::from_secs(3600)));
    assert_eq!(problems("[gateway]\njobs_max = 20001").len(), 1);
}

#[test]
fn every_key_is_read() {
    let config = parse(
        r#"
        [gateway]
        listen = "127.0.0.1:18080"
        admin_listen = "[::1]:18081"
        max_body_bytes = "1MiB"
        queue_limit = 10
        queue_limit_per_model = 5
        first_byte_timeout = "500ms"
        drain_timeout = 30

        [worker]
        memory = "2GiB"
        reserve = 1000
        type = "cpu-2"
        cores = 2
        concurrent_loads = 1
        load_deadline = "10m"
        stop_deadline = "5s"
        hang_deadline = "1m"
        slices = [{ name = "small", memory = "512MiB" }]

        [residency]
        restore = false
        minimum_seconds = 1.5
        priority_protection_seconds = 2
        demand_half_life_seconds = 300
        thrash_window_seconds = 60
        thrash_threshold = 0.5

        [[device]]
        id = "gpu0"
        memory = "80GiB"
        reserve = "1GiB"

        [[model]]
        name = "org/a"
        aliases = ["a"]
        source = "/models/a.json"
        digest = "sha256:1111111111111111111111111111111111111111111111111111111111111111"
        engine = "synthetic"
        pin = true
        priority = "critical"
        max_concurrency = 4
        critical_reserve = 1
        parallel = 4
        context_tokens = 2048
        memory_cap = "1GiB"
        cold = "reject"
        pool = "small"
        keep_alive = "5m"
        device = "gpu:2"
        "#,
    )
    .unwrap();
    assert_eq!(config.gateway.first_byte_timeout, Some(Duration::from_millis(500)));
    assert_eq!(config.gateway.drain_timeout, Some(Duration::from_secs(30)));
    assert_eq!((config.worker.memory, config.worker.reserve), (Some(2 << 30), Some(1000)));
    assert_eq!(config.worker.slices, [SliceOptions { name: "small".into(), memory: 512 << 20 }]);
    assert_eq!(config.residency.minimum_seconds, Some(Duration::from_millis(1500)));
    assert_eq!(config.residency.restore, Some(false));
    assert_eq!(config.devices, [DeviceOptions { id: "gpu0".into(), memory: 80 << 30, reserve: 1 << 30 }]);
    let model = &config.models[0];
    assert_eq!((model.engine, model.pin), (Some(EngineKind::Synthetic), Some(true)));
    assert_eq!((model.priority, model.cold), (Some(Priority::Critical), Some(ColdPolicy::Reject)));
    assert_eq!((model.keep_alive_seconds, model.accelerators), (Some(300.0), Some(2)));
    assert_eq!(model.aliases, ["a"]);
}

#[test]
fn what_is_kept_of_prompts_is_read() {
    let text = "[kv]\nhost = \"1GiB\"\ndisk = 0\ndir = \"/kv\"\nblock_tokens = 64\nencrypt = true\nretention = \"1h\"\ndisk_free = 5\ndisk_writes_per_day = 7\nverify = true\n";
    let expected = KvOptions {
        host: Some(1 << 30),
        disk: Some(0),
        dir: Some("/kv".into()),
        encrypt: Some(true),
        retention: Some(Duration::from_secs(3600)),
        disk_writes_per_day: Some(7),
        disk_free: Some(5),
        verify: Some(true),
    };
    assert_eq!(parse(text).unwrap().kv, expected);
    let found = problems("[kv]\nblock_tokens = 16\nretention = 0\n");
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 3], "{found:?}");
    assert!(found[0].1.contains("blocks have 64 tokens"), "{found:?}");
}

#[test]
fn an_empty_file_says_nothing() {
    assert_eq!(parse(""), Ok(Config::default()));
}

#[test]
fn all_problems_are_reported_with_their_lines() {
    let found = problems(
        "[gateway]\nlisten = \"nowhere\"\nlistne = 1\n\n[worker]\nmemory = \"lots\"\ncores = 0\n\n[onnx]\nhost = 1\n\n[[model]]\nsource = \"/a\"\npin = \"yes\"\n",
    );
    let lines: Vec<usize> = found.iter().map(|(line, _)| *line).collect();
    assert_eq!(lines, [2, 3, 6, 7, 9, 12, 14], "{found:?}");
    let texts: Vec<&str> = found.iter().map(|(_, message)| message.as_str()).collect();
    assert!(texts[0].contains("nowhere"), "{texts:?}");
    assert!(texts[1].contains("unknown key gateway.listne: did you mean listen?"), "{texts:?}");
    assert!(texts[2].contains("lots"), "{texts:?}");
    assert!(texts[3].contains("worker.cores: must be between 1"), "{texts:?}");
    assert!(texts[4].contains("unknown key onnx: known here: gateway, worker"), "{texts:?}");
    assert!(texts[5].contains("name is missing"), "{texts:?}");
    assert!(texts[6].contains("model.pin: must be true or false, not string"), "{texts:?}");
}

#[test]
fn broken_syntax_does_not_hide_other_problems() {
    let found = problems("[worker]\nmemory = \n[gateway]\nlistne = 1\n");
    assert!(found.iter().any(|(line, _)| *line == 2), "{found:?}");
    assert!(found.iter().any(|(line, message)| *line == 4 && message.contains("listne")), "{found:?}");
}

#[test]
fn names_are_checked_and_unique() {
    let found = problems(
        "[[model]]\nname = \"../a\"\nsource = \"/a\"\n[[model]]\nname = \"b\"\nsource = \"/b\"\n[[model]]\nname = \"c\"\naliases = [\"b\"]\nsource = \"/c\"\n",
    );
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 7], "{found:?}");
    assert!(found[1].1.contains("the name b is used twice"), "{found:?}");
}

#[test]
fn a_syntax_error_makes_up_no_others() {
    let found =
        problems("[gateway\nlisten = \"127.0.0.1:1\"\n\n[[model]]\nname = \"a\"\nsource = \"/a.gguf\"\npool = \"p\"\n");
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].0 == 1 && found[0].1.contains("unclosed table"), "{found:?}");
    let found = problems("gateway = 1\nmodel = 2\n");
    assert_eq!(found.len(), 2, "without a syntax error they are wrong: {found:?}");
}

#[test]
fn what_would_stop_everything_is_no_limit() {
    let found = problems(
        "[gateway]\nmax_body_bytes = 0\nfirst_byte_timeout = 0\n[worker]\nmemory = 0\nload_deadline = \"0s\"\nstop_deadline = 0.0\nhang_deadline = 0\n[residency]\ndemand_half_life_seconds = 0\nthrash_window_seconds = 0\n",
    );
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [2, 3, 5, 6, 7, 8, 10, 11], "{found:?}");
    assert!(found.iter().all(|(_, message)| message.contains("must be more than 0: write for instance")), "{found:?}");
    assert!(parse("[gateway]\ndrain_timeout = 0\n[residency]\nminimum_seconds = 0\n").is_ok());
}

#[test]
fn numbers_are_numbers() {
    for (value, words) in [("nan", "is not a number"), ("inf", "must be finite"), ("-1.0", "must not be negative")] {
        let found = problems(&format!("[residency]\nthrash_threshold = {value}\n"));
        assert!(found.len() == 1 && found[0].1.contains(words), "{value}: {found:?}");
    }
}

#[test]
fn sequences_beyond_the_engines_limit_are_refused_with_it() {
    let model = |parallel| format!("[[model]]\nname = \"a\"\nsource = \"/a.gguf\"\nparallel = {parallel}\n");
    assert!(parse(&model(PARALLEL_MAX)).is_ok());
    let found = problems(&model(PARALLEL_MAX + 1));
    assert_eq!(found, [(4, "model.parallel: must be between 1 and 64, not 65".to_owned())]);
}

#[test]
fn slices_pools_and_reserves_are_refused_where_they_stand() {
    let found = problems(
        "[worker]\nslices = [\n  { name = \"a\", memory = 1 },\n  { name = \"a\", memory = 1 },\n  { name = \"default\", memory = 1 },\n]\n",
    );
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [4, 5], "{found:?}");
    let model = "[[model]]\nname = \"m\"\nsource = \"/a.gguf\"\n";
    let found =
        problems(&format!("{model}pool = \"nowhere\"\n{}critical_reserve = 4\n", model.replace("\"m\"", "\"n\"")));
    assert_eq!(found.iter().map(|(line, _)| *line).collect::<Vec<_>>(), [4, 8], "{found:?}");
    assert!(found[0].1.contains("model.pool: there is no pool nowhere"), "{found:?}");
    assert!(found[1].1.contains("model: critical_reserve must be less"), "{found:?}");
    // What was refused already is not judged by its default.
    let found = problems(&format!("{model}parallel = 0\ncritical_reserve = 4\n"));
    assert_eq!(found.len(), 1, "{found:?}");
    let slices = "[worker]\ntype = \"x\"\nslices = [{ name = \"s\", memory = 1 }]\n";
    assert_eq!(parse(&format!("{slices}{model}pool = \"s\"\n")).unwrap().worker.slices_line, Some(3));
}

proptest! {
    #[test]
    fn any_text_is_read_or_refused_without_a_panic(text in "[\\[\\]a-z=\"0-9\n .{},]{0,200}") {
        let _ = parse(&text);
    }
}

#[test]
fn targets_schedules_and_parts_of_the_forecast_are_read() {
    let model = "[[model]]\nname = \"a\"\nsource = \"a.gguf\"\n";
    let text = format!(
        "[residency]\nforecast = [\"intervals\", \"preload\"]\n{model}slo = {{ ttft_p99_cold_ms = 5000 }}\n\
         schedule = \"Mon-Fri 08:00-18:00 UTC\"\n"
    );
    let config = parse(&text).unwrap();
    let parts = config.residency.forecast.unwrap();
    assert!(parts.preload && parts.intervals && !parts.time_of_day);
    let read = &config.models[0];
    assert_eq!(read.slo.unwrap().ttft_p99_cold_ms, Some(5_000));
    assert_eq!(read.schedule.as_deref(), Some(&["Mon-Fri 08:00-18:00 UTC".to_owned()][..]));
    for (wrong, words) in [
        ("slo = { ttft_p99 = 1 }", "there is no target ttft_p99"),
        ("slo = { ttft_p99_cold_ms = 0 }", "ttft_p99_cold_ms: must be between 1"),
        ("schedule = \"always\"", "is no schedule"),
    ] {
        let problems = parse(&format!("{model}{wrong}\n")).unwrap_err();
        assert!(problems[0].message.contains(words) && problems[0].line == 4, "{problems:?}");
    }
    let problems = parse("[residency]\nforecast = [\"luck\"]\n").unwrap_err();
    assert!(problems[0].message.contains("no part of the forecast"), "{problems:?}");
}

#[test]
fn parking_has_its_keys() {
    let text =
        "[residency]\npark = false\npark_requests_max = 3\npark_bytes_max = \"1MiB\"\npark_seconds_max = \"5s\"\n";
    let residency = parse(text).unwrap().residency;
    assert_eq!((residency.park, residency.park_requests_max, residency.park_times_max), (Some(false), Some(3), None));
    assert_eq!(residency.park_bytes_max, Some(1 << 20));
    assert_eq!(residency.park_seconds_max, Some(Duration::from_secs(5)));
    assert!(parse("[residency]\npark_times_max = 0\n").is_err());
}
