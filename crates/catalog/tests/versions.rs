//! Versions of models, against the public interface; and a catalog from before there were any.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use serde_json::json;
use sqlx::{Connection, SqliteConnection};
use warmset_catalog::{Catalog, CatalogError, ModelSettings, NewModel, Switch, VERSIONS_MAX};
use warmset_core::{
    Digest, ModelName, Priority,
    rollout::{Canary, Expected},
};

async fn open() -> (Catalog, tempfile::TempDir) {
    let directory = tempfile::tempdir().unwrap();
    let catalog = Catalog::open(directory.path().join("catalog.db").to_str().unwrap()).await.unwrap();
    (catalog, directory)
}

fn name(text: &str) -> ModelName {
    ModelName::parse(text).unwrap()
}

fn digest(byte: u8) -> Digest {
    Digest([byte; 32])
}

fn version(byte: u8) -> NewModel {
    NewModel {
        name: name("a"),
        digest: digest(byte),
        manifest: format!("{{\"byte\":{byte}}}"),
        source: format!("/models/{byte}.gguf"),
        settings: ModelSettings { context_tokens: u32::from(byte), ..ModelSettings::default() },
    }
}

fn switch(from: u8, to: u8, back: bool) -> Switch {
    let detail = json!({ "why": "a test" });
    Switch { model: name("a"), from: digest(from), to: digest(to), by: "ada".into(), back, detail }
}

fn canary() -> Canary {
    Canary {
        prompt: "Say yes.".into(),
        max_tokens: 4,
        expected: Expected::Text("yes".into()),
        score_min: 0.5,
        latency_max_seconds: 2.0,
        given: true,
    }
}

#[tokio::test]
async fn a_version_is_nobodys_until_the_name_is_switched_and_then_everybodys() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&version(1), "eve").await.unwrap();
    catalog
        .set_settings(&name("a"), &ModelSettings { pin: true, priority: Priority::Batch, ..version(1).settings })
        .await
        .unwrap();
    catalog.add_version(&version(2)).await.unwrap();
    assert_eq!(catalog.model(&name("a")).await.unwrap().digest, digest(1));
    catalog.set_canary(&digest(2), Some(&canary())).await.unwrap();
    assert_eq!(catalog.canaries().await.unwrap(), [(digest(2), canary())].into());

    let model = catalog.switch(&switch(1, 2, false)).await.unwrap();
    assert_eq!((model.digest, model.source.as_str()), (digest(2), "/models/2.gguf"));
    // How it is served stays with the name, how it is loaded came with the version.
    assert!(model.settings.pin && model.settings.priority == Priority::Batch && model.settings.context_tokens == 2);
    let versions = catalog.versions(&name("a")).await.unwrap();
    let approvals: Vec<_> = versions.iter().map(|version| version.approval.as_ref().unwrap().by.as_str()).collect();
    assert_eq!((versions[0].digest, versions[1].digest, approvals), (digest(1), digest(2), vec!["eve", "ada"]));
    assert_eq!((versions[0].replaced, versions[1].replaced), (None, Some(digest(1))));
    assert_eq!(versions[1].canary, Some(canary()));

    let model = catalog.switch(&switch(2, 1, true)).await.unwrap();
    assert_eq!((model.digest, model.settings.context_tokens), (digest(1), 1));
    assert_eq!(
        catalog.version(&digest(1)).await.unwrap().unwrap().replaced,
        None,
        "what was gone back to has no earlier one"
    );
    let told = catalog.events_of(&name("a"), &["promoted", "rolled_back"], 10).await.unwrap();
    let told: Vec<_> = told.iter().map(|event| (event.event.kind.as_str(), event.event.digest.unwrap())).collect();
    assert_eq!(told, [("rolled_back", digest(1)), ("promoted", digest(2))]);
}

#[tokio::test]
async fn a_switch_that_comes_too_late_changes_nothing() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&version(1), "eve").await.unwrap();
    catalog.add_version(&version(2)).await.unwrap();
    catalog.switch(&switch(1, 2, false)).await.unwrap();
    let late = catalog.switch(&switch(1, 2, false)).await.unwrap_err();
    assert!(matches!(late, CatalogError::Moved { to, .. } if to == digest(2)), "{late}");
    let unknown = catalog.switch(&switch(2, 9, false)).await.unwrap_err();
    assert!(matches!(unknown, CatalogError::UnknownVersion(found) if found == digest(9)));
    assert_eq!(catalog.events_of(&name("a"), &["promoted"], 10).await.unwrap().len(), 1);
}

#[tokio::test]
async fn versions_have_limits_and_leave_nothing_behind() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&version(0), "eve").await.unwrap();
    let last = u8::try_from(VERSIONS_MAX).unwrap();
    for byte in 1..last {
        catalog.add_version(&version(byte)).await.unwrap();
    }
    let full = catalog.add_version(&version(last)).await.unwrap_err();
    assert!(full.to_string().contains("remove one with `warmset model remove a --digest"), "{full}");
    let taken = catalog.add_model(&NewModel { name: name("b"), ..version(1) }, "eve").await.unwrap_err();
    assert!(matches!(taken, CatalogError::DigestTaken { name: owner, .. } if owner == name("a")));
    assert!(matches!(
        catalog.add_version(&NewModel { name: name("c"), ..version(99) }).await,
        Err(CatalogError::UnknownModel(_))
    ));

    assert!(matches!(catalog.remove_version(&name("a"), &digest(0)).await, Err(CatalogError::VersionInUse { .. })));
    catalog.switch(&switch(0, 1, false)).await.unwrap();
    catalog.switch(&switch(1, 2, false)).await.unwrap();
    catalog.remove_version(&name("a"), &digest(1)).await.unwrap();
    assert_eq!(
        catalog.version(&digest(2)).await.unwrap().unwrap().replaced,
        Some(digest(0)),
        "over the one that is gone"
    );
    catalog.remove_model(&name("a")).await.unwrap();
    assert_eq!(catalog.manifests().await.unwrap(), Vec::<String>::new());
    catalog.add_model(&NewModel { name: name("b"), ..version(1) }, "eve").await.unwrap();
}

#[tokio::test]
async fn an_alias_changes_its_meaning_in_one_step_if_that_is_said() {
    let (catalog, _directory) = open().await;
    catalog.add_model(&version(1), "eve").await.unwrap();
    catalog.add_model(&NewModel { name: name("b"), ..version(2) }, "eve").await.unwrap();
    catalog.add_alias(&name("best"), &name("a"), false).await.unwrap();
    assert!(matches!(catalog.add_alias(&name("best"), &name("b"), false).await, Err(CatalogError::NameTaken(_))));
    catalog.add_alias(&name("best"), &name("b"), true).await.unwrap();
    assert_eq!(catalog.resolve(&name("best")).await.unwrap().name, name("b"));
    // A model's own name is no alias, and a step to nowhere is none.
    assert!(catalog.add_alias(&name("a"), &name("b"), true).await.is_err());
    assert!(catalog.add_alias(&name("best"), &name("gone"), true).await.is_err());
    assert_eq!(catalog.resolve(&name("best")).await.unwrap().name, name("b"));
}

#[tokio::test]
async fn a_catalog_from_before_there_were_versions_keeps_its_models_approved() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.db");
    let location = path.to_str().unwrap().to_owned();
    Catalog::open(&location).await.unwrap().close().await;
    let mut raw = SqliteConnection::connect(&format!("sqlite://{location}")).await.unwrap();
    let settings = serde_json::to_string(&ModelSettings::default()).unwrap();
    let text = digest(7).to_string();
    // As it was: every table and index that came with versions and after them is gone.
    sqlx::raw_sql(
        "DROP TABLE versions; DROP TABLE jobs; DROP TABLE files; DROP TABLE batches; DROP INDEX events_by_model;
         UPDATE schema_version SET version = 3",
    )
    .execute(&mut raw)
    .await
    .unwrap();
    sqlx::query("INSERT INTO digests VALUES (?, '{}', 5)").bind(&text).execute(&mut raw).await.unwrap();
    sqlx::query("INSERT INTO models VALUES ('old', ?, '/old.gguf', ?, 5, 5)")
        .bind(&text)
        .bind(settings)
        .execute(&mut raw)
        .await
        .unwrap();
    raw.close().await.unwrap();
    let catalog = Catalog::open(&location).await.unwrap();
    let versions = catalog.versions(&name("old")).await.unwrap();
    assert_eq!((versions.len(), versions[0].digest, versions[0].source.as_str()), (1, digest(7), "/old.gguf"));
    let approval = versions[0].approval.as_ref().unwrap();
    assert_eq!((approval.by.as_str(), approval.unix_milliseconds), ("before versions", 5));
}
