//! Where a command works: on a running server, or on the data directory when none runs.

use super::arguments::GlobalArguments;
use crate::{
    client::{CallError, Client, DEFAULT_ADMIN},
    data::{self, DataLock, Locked},
    library::Library,
};
use anyhow::{Context, Result};

/// Where a command works.
pub(crate) enum Place {
    /// Through the admin listener of a running server.
    Server(Client),
    /// On the data directory, which no other process uses now.
    Directory {
        /// Its models.
        library: Box<Library>,
        /// Held until the command is done.
        lock: DataLock,
    },
}

impl Place {
    /// Finds the place. `--server` means a server and nothing else; `--data` means that directory, through the server
    /// that has it if one does; without both it is the default server if it runs, else the default directory.
    pub(crate) async fn find(global: &GlobalArguments) -> Result<Self> {
        if let Some(server) = &global.server {
            return Ok(Self::Server(Client::new(server)?));
        }
        let root = match &global.data {
            Some(data) => data.clone(),
            None => {
                let client = Client::new(DEFAULT_ADMIN)?;
                if answers(&client).await {
                    return Ok(Self::Server(client));
                }
                data::default_directory()
            }
        };
        let locked =
            tokio::task::spawn_blocking(move || DataLock::take(&root)).await.context("the lock task ended")??;
        match locked {
            Locked::Server(address) => Ok(Self::Server(Client::new(&address)?)),
            Locked::Here(lock) => {
                let library = Box::new(Library::open(lock.root()).await?);
                Ok(Self::Directory { library, lock })
            }
        }
    }
}

impl Place {
    /// Leaves the data directory tidy.
    pub(crate) async fn leave(self) {
        if let Self::Directory { library, lock } = self {
            library.catalog.close().await;
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
