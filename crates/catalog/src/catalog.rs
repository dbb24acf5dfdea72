//! Opening the database.

use crate::{
    error::{CatalogError, means_damaged},
    migrations,
    reserve::Reserve,
    write::{Write, roll_back},
};
use sqlx::{
    Row, SqlitePool,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

/// How long a statement waits for another process's lock, for instance that of a backup.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// One connection: writes cannot contend, and reads see every write before them.
const CONNECTIONS: u32 = 1;

/// The catalog of one installation. Clones share the connection.
#[derive(Debug, Clone)]
pub struct Catalog {
    pub(crate) pool: SqlitePool,
    reserve: Reserve,
}

impl Catalog {
    /// Opens `PATH`, `sqlite://PATH` or `sqlite::memory:`, creates it if needed and brings its schema up to date.
    pub async fn open(location: &str) -> Result<Self, CatalogError> {
        let path = path_of(location)?;
        let options = if path.as_os_str() == ":memory:" {
            SqliteConnectOptions::new().in_memory(true)
        } else {
            SqliteConnectOptions::new().filename(&path).create_if_missing(true).journal_mode(SqliteJournalMode::Wal)
        };
        let options = options.synchronous(SqliteSynchronous::Full).busy_timeout(BUSY_TIMEOUT).foreign_keys(true);
        let pool = SqlitePoolOptions::new()
            .max_connections(CONNECTIONS)
            // A database in memory lives as long as its connection.
            .idle_timeout(None)
            .max_lifetime(None)
            .after_release(|connection, _| Box::pin(roll_back(connection)))
            .connect_with(options)
            .await
            .map_err(|error| open_error(error.into(), &path))?;
        let mut catalog = Self { pool, reserve: Reserve::default() };
        catalog.prepare(&path).await.map_err(|error| open_error(error, &path))?;
        if path.as_os_str() != ":memory:" {
            catalog.reserve = Reserve::beside(&path);
        }
        Ok(catalog)
    }

    /// Writes everything out and closes. Dropping without it loses nothing.
    pub async fn close(self) {
        self.pool.close().await;
    }

    async fn prepare(&self, path: &Path) -> Result<(), CatalogError> {
        let mut connection = self.pool.acquire().await?;
        let row = sqlx::query("PRAGMA quick_check(1)").fetch_one(&mut *connection).await?;
        let verdict: String = row.try_get(0)?;
        if verdict != "ok" {
            return Err(CatalogError::Damaged { path: path.to_path_buf(), reason: verdict });
        }
        migrations::migrate(&mut connection, path).await
    }

    /// A transaction that holds the write lock from its start.
    pub(crate) async fn write(&self) -> Result<Write, CatalogError> {
        Write::begin(self.pool.acquire().await?).await
    }

    /// Takes the room for removals back, as soon as there is any.
    pub(crate) fn keep_room_for_removal(&self) {
        self.reserve.restore();
    }

    /// Whether a removal that failed so can be tried again, with the room that is kept for it: it is what makes room.
    pub(crate) fn has_room_for_removal(&self, failed: &CatalogError) -> bool {
        matches!(failed, CatalogError::DiskFull) && self.reserve.spend()
    }
}

fn path_of(location: &str) -> Result<PathBuf, CatalogError> {
    if let Some(rest) = location.strip_prefix("sqlite://").or_else(|| location.strip_prefix("sqlite:")) {
        return Ok(PathBuf::from(rest));
    }
    match location.split_once("://") {
        Some((scheme, _)) => Err(CatalogError::Scheme { scheme: scheme.to_owned() }),
        None => Ok(PathBuf::from(location)),
    }
}

/// Adds to errors that concern the file which file it is.
fn open_error(error: CatalogError, path: &Path) -> CatalogError {
    match error {
        CatalogError::Database(cause) if means_damaged(&cause) => {
            CatalogError::Damaged { path: path.to_path_buf(), reason: cause.to_string() }
        }
        other => other,
    }
}

/// The wall clock, for people; nothing is decided by it.
pub(crate) fn unix_milliseconds() -> i64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(elapsed.as_millis()).unwrap_or(i64::MAX)
}

/// A count read from the database.
pub(crate) fn count(value: i64) -> u64 {
    u64::try_from(value).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::NewEvent;

    #[tokio::test]
    async fn a_full_disk_is_survived() {
        let directory = tempfile::tempdir().unwrap();
        let location = directory.path().join("catalog.db").display().to_string();
        let catalog = Catalog::open(&location).await.unwrap();
        let event = |bytes| NewEvent {
            kind: "load_finished".into(),
            model: None,
            digest: None,
            detail: serde_json::json!({ "text": "x".repeat(bytes) }),
        };
        catalog.append_events(&[event(1)]).await.unwrap();
        let pages: i64 = sqlx::query_scalar("PRAGMA page_count").fetch_one(&catalog.pool).await.unwrap();
        // What SQLite says when it may not grow is what it says when it cannot.
        sqlx::query(sqlx::AssertSqlSafe(format!("PRAGMA max_page_count = {pages}")))
            .execute(&catalog.pool)
            .await
            .unwrap();
        let full = catalog.append_events(&[event(1 << 16)]).await.unwrap_err();
        assert!(matches!(full, CatalogError::DiskFull), "{full:?}");
        catalog.append_events(&[event(2)]).await.unwrap();
        assert_eq!(catalog.events(0, 10).await.unwrap().len(), 2);
    }
}
