//! Where a command works: on a running server, or on the data directory when none runs.

use super::arguments::GlobalArguments;
use crate::{
    client::{CallError, Client, DEFAULT_ADMIN},
    data::{self, DataLock, Locked},
    repository::{Repository, Runtimes},
};
use anyhow::{Context, Result};
use std::path::PathBuf;

/// Where a command works.
pub(crate) enum Place {
    /// Through the admin listener of a running server.
    Server(Client),
    /// On the data directory, which no other process uses now.
    Directory {
        /// Its models.
        repository: Box<Repository>,
        /// Held until the command is done.
        lock: DataLock,
    },
}

/// Where to look, before anything is opened or made.
pub(crate) enum Sought {
    /// A server that was named or that answers.
    Server(Client),
    /// A data directory, which need not exist and which a server may have.
    Directory(PathBuf),
}

impl Sought {
    /// `--server` means a server and nothing else; `--data` means that directory, through the server
    /// that has it if one does; without both it is the default server if it runs, else the default directory.
    pub(crate) async fn find(global: &GlobalArguments) -> Result<Self> {
        if let Some(server) = &global.server {
            return Ok(Self::Server(Client::new(server)?));
        }
        if let Some(data) = &global.data {
            return Ok(Self::Directory(data.clone()));
        }
        let client = Client::new(DEFAULT_ADMIN)?;
        if answers(&client).await {
            return Ok(Self::Server(client));
        }
        Ok(Self::Directory(data::default_directory()))
    }
}

impl Place {
    /// Finds the place and opens it.
    pub(crate) async fn find(global: &GlobalArguments) -> Result<Self> {
        Self::open(Sought::find(global).await?).await
    }

    /// Opens a place. A data directory that is not there is made.
    pub(crate) async fn open(sought: Sought) -> Result<Self> {
        let root = match sought {
            Sought::Server(client) => return Ok(Self::Server(client)),
            Sought::Directory(root) => root,
        };
        let locked =
            tokio::task::spawn_blocking(move || DataLock::take(&root)).await.context("the lock task ended")??;
        match locked {
            Locked::Server(address) => Ok(Self::Server(Client::new(&address)?)),
            Locked::Here(lock) => {
                let sources = warmset_source::Settings::default();
                let repository = Box::new(Repository::open(lock.root(), Runtimes::default(), sources).await?);
                Ok(Self::Directory { repository, lock })
            }
        }
    }

    /// Leaves the data directory tidy.
    pub(crate) async fn leave(self) {
        if let Self::Directory { repository, lock } = self {
            repository.catalog.close().await;
            drop(lock);
        }
    }
}

/// Whether a Warmset server listens there.
async fn answers(client: &Client) -> bool {
    match client.get("/admin/v1/models").await {
        Ok(document) => document["models"].is_array(),
        Err(CallError::Unreachable { .. } | CallError::Broken { .. } | CallError::Refused { .. }) => false,
    }
}
