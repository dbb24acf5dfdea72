//! What holds for the SQLite catalog in particular: kill -9, restarts, damaged and newer files.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use sqlx::{Connection, Row, SqliteConnection, sqlite::SqliteConnectOptions};
use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Command, Stdio},
};
use warmset_catalog::{Catalog, CatalogError, ModelSettings, NewModel, SCHEMA_VERSION};
use warmset_core::{Digest, ModelName};

const CHILD_CATALOG: &str = "WARMSET_TEST_CHILD_CATALOG";

async fn open(path: &Path) -> Result<Catalog, CatalogError> {
    Catalog::open(path.to_str().unwrap()).await
}

async fn raw(path: &Path) -> SqliteConnection {
    SqliteConnection::connect_with(&SqliteConnectOptions::new().filename(path)).await.unwrap()
}

fn numbered(number: u64) -> NewModel {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&number.to_be_bytes());
    NewModel {
        name: ModelName::parse(&format!("m{number}")).unwrap(),
        digest: Digest(digest),
        manifest: "{}".into(),
        source: "/m".into(),
        settings: ModelSettings::default(),
    }
}

#[tokio::test]
async fn a_restart_finds_everything_and_every_location_is_understood() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.db");
    let catalog = open(&path).await.unwrap();
    catalog.add_model(&numbered(1), "test").await.unwrap();
    catalog.close().await;
    let again = Catalog::open(&format!("sqlite://{}", path.display())).await.unwrap();
    assert_eq!(again.models().await.unwrap().len(), 1);
    let memory = Catalog::open("sqlite::memory:").await.unwrap();
    memory.add_model(&numbered(1), "test").await.unwrap();
    assert_eq!(memory.models().await.unwrap().len(), 1);
    let error = Catalog::open("postgres://host/db").await.unwrap_err();
    assert!(matches!(&error, CatalogError::Scheme { scheme } if scheme == "postgres"), "{error}");
}

#[tokio::test]
async fn writes_are_durable_and_rows_refer_to_each_other() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.db");
    let catalog = open(&path).await.unwrap();
    let mut connection = raw(&path).await;
    let row = sqlx::query("PRAGMA journal_mode").fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<String, _>(0), "wal");
    let broken = sqlx::query("INSERT INTO aliases (alias, model) VALUES ('a', 'none')");
    assert!(broken.execute(&mut connection).await.is_err());
    // Another connection's write is waited for, not failed on.
    sqlx::query("BEGIN IMMEDIATE").execute(&mut connection).await.unwrap();
    let model = numbered(1);
    let write = catalog.add_model(&model, "test");
    let release = async { sqlx::query("COMMIT").execute(&mut connection).await.unwrap() };
    let (written, _) = tokio::join!(write, release);
    written.unwrap();
}

#[tokio::test]
async fn a_newer_schema_is_refused_and_left_alone() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.db");
    open(&path).await.unwrap().close().await;
    let mut connection = raw(&path).await;
    sqlx::query("UPDATE schema_version SET version = version + 1").execute(&mut connection).await.unwrap();
    connection.close().await.unwrap();
    let error = open(&path).await.unwrap_err();
    assert!(matches!(error, CatalogError::NewerSchema { found, known, .. } if found == known + 1));
    assert!(error.to_string().contains("newer warmset"), "{error}");
    let mut connection = raw(&path).await;
    let row = sqlx::query("SELECT version FROM schema_version").fetch_one(&mut connection).await.unwrap();
    assert_eq!(row.get::<i64, _>(0), i64::try_from(SCHEMA_VERSION).unwrap() + 1);
}

#[tokio::test]
async fn a_damaged_file_is_told_with_what_to_do() {
    let directory = tempfile::tempdir().unwrap();
    let garbage = directory.path().join("garbage.db");
    std::fs::write(&garbage, vec![b'x'; 8192]).unwrap();
    let error = open(&garbage).await.unwrap_err();
    assert!(matches!(error, CatalogError::Damaged { .. }), "{error}");
    assert!(error.to_string().contains(".recover"), "{error}");

    let torn = directory.path().join("torn.db");
    let catalog = open(&torn).await.unwrap();
    for number in 0..200 {
        catalog.add_model(&numbered(number), "test").await.unwrap();
    }
    catalog.close().await;
    let mut bytes = std::fs::read(&torn).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle..middle + 8192].fill(0xff);
    std::fs::write(&torn, &bytes).unwrap();
    let error = open(&torn).await.unwrap_err();
    assert!(matches!(error, CatalogError::Damaged { .. }), "{error}");
}

/// Writes without end and says on stderr what was acknowledged; only does something when the test below starts it.
#[tokio::test]
async fn child_writes() {
    let Ok(path) = std::env::var(CHILD_CATALOG) else { return };
    let catalog = Catalog::open(&path).await.unwrap();
    for number in 0.. {
        catalog.add_model(&numbered(number), "test").await.unwrap();
        let pinned = ModelSettings { pin: true, ..ModelSettings::default() };
        catalog.set_settings(&numbered(number).name, &pinned).await.unwrap();
        writeln!(std::io::stderr(), "acknowledged {number}").unwrap();
    }
}

#[tokio::test]
async fn kill_9_in_a_write_loop_loses_nothing_acknowledged() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("catalog.db");
    let mut seen = 0;
    for round in 1..=3 {
        if round > 1 {
            // The child numbers from 0 again.
            std::fs::remove_file(&path).unwrap();
            let _ = std::fs::remove_file(path.with_extension("db-wal"));
            let _ = std::fs::remove_file(path.with_extension("db-shm"));
        }
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child_writes", "--exact", "--nocapture"])
            .env(CHILD_CATALOG, &path)
            .stderr(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let mut acknowledged = 0;
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines().map_while(Result::ok);
        let target = 20 * round;
        while acknowledged < target && lines.next().is_some_and(|line| line.starts_with("acknowledged")) {
            acknowledged += 1;
        }
        child.kill().unwrap();
        // What it said before it died counts too.
        acknowledged += u64::try_from(lines.filter(|line| line.starts_with("acknowledged")).count()).unwrap();
        child.wait().unwrap();
        assert!(acknowledged >= target);
        let catalog = open(&path).await.unwrap();
        for number in 0..acknowledged {
            assert!(catalog.model(&numbered(number).name).await.unwrap().settings.pin, "{number}");
        }
        catalog.close().await;
        seen += acknowledged;
    }
    assert!(seen >= 120);
}
