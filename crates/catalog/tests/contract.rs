//! What every catalog promises, written against the public interface alone: another database behind it passes the
//! same cases.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::json;
use std::time::Duration;
use warmset_catalog::{Catalog, CatalogError, EVENTS_MAX, Measurement, ModelSettings, NewEvent, NewModel};
use warmset_core::{
    Digest, Footprint, Instant, ModelName, PoolName, Priority, WorkerId,
    forecast::Forecast,
    gateway::ColdPolicy,
    targets::Targets,
    worker::{LoadTimings, Recollection},
};

/// The one place that knows which database is tested.
async fn open() -> (Catalog, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(directory.path().join("catalog.db").to_str().unwrap()).await.unwrap();
    (catalog, directory)
}

fn name(text: &str) -> ModelName {
    ModelName::parse(text).unwrap()
}

fn new_model(text: &str, byte: u8) -> NewModel {
    NewModel {
        name: name(text),
        digest: Digest([byte; 32]),
        manifest: format!("{{\"byte\":{byte}}}"),
        source: format!("/models/{text}.gguf"),
        settings: ModelSettings::default(),
    }
}

#[tokio::test]
async fn a_model_comes_back_as_it_was_added() {
    let (catalog, _directory) = open().await;
    let mut new = new_model("org/a:7b", 1);
    new.settings = ModelSettings {
        runtime: Some("llama-server".into()),
        engine: "synthetic".into(),
        pin: true,
        priority: Priority::Critical,
        max_concurrency: Some(7),
        critical_reserve: 1,
        parallel: 3,
        context_tokens: 2048,
        memory_cap_bytes: Some(u64::MAX),
        cold: ColdPolicy::Reject,
        fallback: Some(name("other")),
        pool: PoolName::new("small"),
        keep_alive_seconds: Some(0.5),
        schedule: vec!["08:00-18:00 UTC".into()],
        slo: Targets { ttft_p99_warm_ms: None, ttft_p99_cold_ms: Some(5_000) },
        accelerators: 2,
        source_stamp: Some("12 34".into()),
        pinned_source: Some("hf://org/a/b.gguf@0123".into()),
        fetch_seconds: Some(1.5),
    };
    catalog.add_model(&new, "test").await.unwrap();
    catalog.add_alias(&name("best"), &new.name, false).await.unwrap();
    let model = catalog.resolve(&name("best")).await.unwrap();
    assert_eq!((&model.name, model.digest, &model.manifest), (&new.name, new.digest, &new.manifest));
    assert_eq!((&model.source, &model.settings), (&new.source, &new.settings));
    assert_eq!(model.aliases, [name("best")]);
    assert!(model.created_unix_milliseconds > 0);
    assert_eq!(catalog.models().await.unwrap(), std::slice::from_ref(&model));
    assert_eq!(catalog.model(&new.name).await.unwrap(), model);
}

#[tokio::test]
async fn names_are_unique_over_models_and_aliases_and_a_digest_has_one_name() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&new_model("a", 1), "test").await.unwrap();
    catalog.add_alias(&name("alias"), &name("a"), false).await.unwrap();
    for (taken, byte) in [("a", 2), ("alias", 2)] {
        let error = catalog.add_model(&new_model(taken, byte), "test").await.unwrap_err();
        assert!(matches!(&error, CatalogError::NameTaken(other) if other.as_str() == taken), "{error}");
        assert!(error.is_callers_fault());
        let error = catalog.add_alias(&name(taken), &name("a"), false).await.unwrap_err();
        assert!(matches!(error, CatalogError::NameTaken(_)), "{error}");
    }
    let error = catalog.add_model(&new_model("b", 1), "test").await.unwrap_err();
    assert!(matches!(&error, CatalogError::DigestTaken { name, .. } if name.as_str() == "a"), "{error}");
    assert_eq!(catalog.models().await.unwrap().len(), 1);
    let error = catalog.add_alias(&name("x"), &name("alias"), false).await.unwrap_err();
    assert!(matches!(error, CatalogError::UnknownModel(_)), "{error}");
}

#[tokio::test]
async fn a_removed_model_takes_its_aliases_along_and_leaves_its_measurements() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&new_model("a", 1), "test").await.unwrap();
    catalog.add_alias(&name("alias"), &name("a"), false).await.unwrap();
    catalog.record_measurement(&Digest([1; 32]), "cpu-2", &Measurement::default()).await.unwrap();
    let removed = catalog.remove_model(&name("a")).await.unwrap();
    assert_eq!(removed.aliases, [name("alias")]);
    for gone in ["a", "alias"] {
        let error = catalog.resolve(&name(gone)).await.unwrap_err();
        assert!(matches!(&error, CatalogError::UnknownModel(unknown) if unknown.as_str() == gone), "{error}");
    }
    assert!(matches!(catalog.remove_model(&name("a")).await, Err(CatalogError::UnknownModel(_))));
    assert!(catalog.measurement(&Digest([1; 32]), "cpu-2").await.unwrap().is_some());
    // The name and the digest are free again.
    catalog.add_model(&new_model("alias", 1), "test").await.unwrap();
}

#[tokio::test]
async fn settings_and_aliases_change() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&new_model("a", 1), "test").await.unwrap();
    let pinned = ModelSettings { pin: true, ..ModelSettings::default() };
    catalog.set_settings(&name("a"), &pinned).await.unwrap();
    assert_eq!(catalog.model(&name("a")).await.unwrap().settings, pinned);
    assert!(matches!(catalog.set_settings(&name("b"), &pinned).await, Err(CatalogError::UnknownModel(_))));

    catalog.add_alias(&name("z"), &name("a"), false).await.unwrap();
    catalog.add_alias(&name("y"), &name("a"), false).await.unwrap();
    assert_eq!(catalog.aliases().await.unwrap(), [(name("y"), name("a")), (name("z"), name("a"))]);
    catalog.remove_alias(&name("z")).await.unwrap();
    assert!(matches!(catalog.remove_alias(&name("z")).await, Err(CatalogError::UnknownModel(_))));
    assert_eq!(catalog.model(&name("a")).await.unwrap().aliases, [name("y")]);
}

#[tokio::test]
async fn measurements_are_kept_per_digest_and_worker_type_and_blend() {
    let (catalog, _directory) = open().await;
    let digest = Digest([1; 32]);
    let footprint = |private, shared| Footprint {
        private_host_bytes: private,
        shared_host_bytes: shared,
        accelerator_bytes: vec![private],
    };
    let first = Measurement {
        timings: LoadTimings { load_seconds: 1.0, ..LoadTimings::default() },
        peak: footprint(100, 10),
        steady: footprint(80, 10),
        prefill_tokens_per_second: Some(100.0),
        kv_bytes_per_token: Some(5),
        ..Measurement::default()
    };
    let stored = catalog.record_measurement(&digest, "cpu-2", &first).await.unwrap();
    assert_eq!(stored.samples, 1);
    let second = Measurement {
        timings: LoadTimings { load_seconds: 2.0, ..LoadTimings::default() },
        peak: footprint(90, 20),
        steady: footprint(70, 20),
        decode_tokens_per_second: Some(9.0),
        ..Measurement::default()
    };
    catalog.record_measurement(&digest, "cpu-2", &second).await.unwrap();
    let known = catalog.measurement(&digest, "cpu-2").await.unwrap().unwrap();
    assert!(known.timings.load_seconds > 1.0 && known.timings.load_seconds < 2.0);
    assert_eq!((known.peak, known.steady), (footprint(100, 20), footprint(70, 20)));
    assert_eq!((known.prefill_tokens_per_second, known.decode_tokens_per_second), (Some(100.0), Some(9.0)));
    assert_eq!((known.kv_bytes_per_token, known.samples), (Some(5), 2));
    assert!(known.measured_unix_milliseconds > 0);

    catalog.record_growth(&digest, "cpu-2", &footprint(130, 5)).await.unwrap();
    let grown = catalog.measurement(&digest, "cpu-2").await.unwrap().unwrap();
    assert_eq!((grown.peak, grown.steady, grown.samples), (footprint(130, 20), footprint(130, 5), 2));
    catalog.record_growth(&digest, "cpu-64", &footprint(130, 5)).await.unwrap();

    assert_eq!(catalog.measurement(&digest, "cpu-64").await.unwrap(), None);
    catalog.record_measurement(&digest, "cpu-64", &second).await.unwrap();
    let all: Vec<String> = catalog.measurements().await.unwrap().into_iter().map(|(_, kind, _)| kind).collect();
    assert_eq!(all, ["cpu-2", "cpu-64"]);
    catalog.forget_measurements(&digest).await.unwrap();
    assert!(catalog.measurements().await.unwrap().is_empty());
}

#[tokio::test]
async fn events_come_back_in_order_from_where_one_stopped_and_are_bounded() {
    let (catalog, _directory) = open().await;
    let event = |number: u64| NewEvent {
        kind: "load_finished".into(),
        model: Some(name("a")),
        digest: Some(Digest([1; 32])),
        detail: json!({ "number": number }),
    };
    catalog.append_events(&[]).await.unwrap();
    catalog.append_events(&[event(1), event(2), NewEvent { model: None, digest: None, ..event(3) }]).await.unwrap();
    let read = catalog.events(0, 2).await.unwrap();
    assert_eq!(read.iter().map(|event| event.id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(read[0].event, event(1));
    assert_eq!(catalog.events(2, 10).await.unwrap()[0].event.model, None);

    let many: Vec<NewEvent> = (0..EVENTS_MAX).map(event).collect();
    catalog.append_events(&many).await.unwrap();
    let kept = catalog.events(0, u64::MAX).await.unwrap();
    assert_eq!(kept.len() as u64, EVENTS_MAX);
    assert_eq!((kept[0].id, kept.last().unwrap().id), (4, EVENTS_MAX + 3));
}

#[tokio::test]
async fn what_is_remembered_of_a_worker_comes_back_older_and_is_replaced_whole() {
    let (catalog, _directory) = open().await;
    let mut habit = Forecast::default();
    (0..5).for_each(|hour| habit.note(Instant::after(Duration::from_secs(3600 * hour))));
    let known = |number, warm| Recollection {
        digest: Digest([number; 32]),
        demand_per_second: f64::from(number) / 3.0,
        age: Duration::from_secs(3600),
        warm,
        forecast: habit.clone(),
    };
    let (own, other) = (WorkerId(0), WorkerId(7));
    catalog.remember(own, &[known(1, true), known(2, false)]).await.unwrap();
    catalog.remember(other, &[known(3, true)]).await.unwrap();
    let back = catalog.recollections(own).await.unwrap();
    let facts: Vec<_> = back.iter().map(|one| (one.digest, one.demand_per_second, one.warm)).collect();
    assert_eq!(facts, [known(1, true), known(2, false)].map(|one| (one.digest, one.demand_per_second, one.warm)));
    let intervals = |forecast: &Forecast| serde_json::to_string(forecast).unwrap();
    assert!(back.iter().all(|one| intervals(&one.forecast) == intervals(&habit)), "{back:?}");
    assert!(back.iter().all(|one| one.age >= Duration::from_secs(3600)), "{back:?}");
    catalog.remember(own, &[]).await.unwrap();
    assert!(catalog.recollections(own).await.unwrap().is_empty());
    assert_eq!(catalog.recollections(other).await.unwrap().len(), 1);
}
