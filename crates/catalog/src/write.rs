//! Transactions that write.
//!
//! A full disk makes SQLite roll back by itself, sometimes. A library that counts transactions then counts one too many
//! and its connection is of no use any more; and a new one cannot be opened while the disk is full. So nothing is
//! counted here: what was not committed is rolled back when the connection is given back, if there is anything.

use crate::error::CatalogError;
use sqlx::{Sqlite, SqliteConnection, pool::PoolConnection};
use std::ops::{Deref, DerefMut};

/// A transaction that holds the write lock. Dropping it changes nothing.
pub(crate) struct Write {
    connection: PoolConnection<Sqlite>,
}

impl Write {
    pub(crate) async fn begin(mut connection: PoolConnection<Sqlite>) -> Result<Self, CatalogError> {
        sqlx::raw_sql("BEGIN IMMEDIATE").execute(&mut *connection).await?;
        Ok(Self { connection })
    }

    /// Makes what was written durable.
    pub(crate) async fn commit(mut self) -> Result<(), CatalogError> {
        sqlx::raw_sql("COMMIT").execute(&mut *self.connection).await?;
        Ok(())
    }
}

impl Deref for Write {
    type Target = SqliteConnection;

    fn deref(&self) -> &SqliteConnection {
        &self.connection
    }
}

impl DerefMut for Write {
    fn deref_mut(&mut self) -> &mut SqliteConnection {
        &mut self.connection
    }
}

/// What a connection does before the next one gets it.
pub(crate) async fn roll_back(connection: &mut SqliteConnection) -> Result<bool, sqlx::Error> {
    // That there is nothing to roll back is the rule, and no error.
    let _ = sqlx::raw_sql("ROLLBACK").execute(connection).await;
    Ok(true)
}
